//! Authorizes requests: a login or a token for each.
//!
//! * Nothing is sent before the registry asks for it by a challenge.
//! * Tokens are kept until shortly before they expire, one for each scope.
//! * A password goes to the registry, or to the token server that the registry names over https.
//!   A token request follows no redirect.

mod challenge;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine};
use parking_lot::Mutex;
use serde::Deserialize;

use self::challenge::Challenge;
use super::environment::Environment;
use super::fault::{Class, Fault};
use super::http::{Answer, Call, Http, Payload, Url, Verb, encoded};
use super::limits::{Limits, TOKEN_BODY};
use super::login::{self, Login};

/// The name of this program at token servers.
const CLIENT: &str = "jailfs";
/// The lifetime of a token whose answer names none, and the shortest one that is believed.
const SHORTEST_LIFE: u64 = 60;

/// The rights that a request needs: `repository:NAME:pull,push`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Scopes(BTreeSet<String>);

impl Scopes {
    pub(super) fn pull(name: &str) -> Scopes {
        Scopes([format!("repository:{name}:pull")].into())
    }

    pub(super) fn push(name: &str) -> Scopes {
        Scopes([format!("repository:{name}:pull,push")].into())
    }

    /// The same, and to read from another repository.
    pub(super) fn and_pull(mut self, name: &str) -> Scopes {
        self.0.insert(format!("repository:{name}:pull"));
        self
    }
}

/// The logins and tokens for one registry.
pub(super) struct Auth {
    registry: String,
    name: String,
    environment: Environment,
    helper_limit: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The challenge of the registry, once it is known.
    challenge: Option<Challenge>,
    /// The login, once it was looked for.
    login: Option<Option<Login>>,
    tokens: BTreeMap<Scopes, Token>,
}

struct Token {
    text: String,
    end: Instant,
}

/// The answer of a token server.
#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

impl Auth {
    pub(super) fn new(
        registry: &str,
        name: &str,
        environment: Environment,
        limits: &Limits,
    ) -> Auth {
        Auth {
            registry: registry.to_owned(),
            name: name.to_owned(),
            environment,
            helper_limit: limits.helper,
            state: Mutex::default(),
        }
    }

    /// The `Authorization` for a request, if the registry has asked for one before.
    ///
    /// # Errors
    /// The login cannot be read, or the token server refuses.
    pub(super) fn header(&self, http: &Http, scopes: &Scopes) -> Result<Option<String>, Fault> {
        // The lock is held across the request for a token, so that threads share one token.
        let mut state = self.state.lock();
        let Some(challenge) = state.challenge.clone() else { return Ok(None) };
        match challenge {
            Challenge::Basic => Ok(self.login(&mut state)?.and_then(|login| basic(&login))),
            Challenge::Bearer { .. } => {
                self.token(&mut state, http, scopes).map(|token| Some(format!("Bearer {token}")))
            }
        }
    }

    /// Takes note of the challenge of a 401 answer, and forgets the token of the request, which had
    /// the header `sent`. Another thread may have a newer one already.
    ///
    /// # Errors
    /// There is no challenge that this client understands.
    pub(super) fn challenged(
        &self,
        answer: &Answer,
        sent: Option<&str>,
        scopes: &Scopes,
    ) -> Result<(), Fault> {
        let Some(found) = challenge::of_answer(answer) else {
            let reason = "the registry asks for a login in an unknown way";
            return Err(Fault::new(Class::Status(401), &answer.request, reason));
        };
        let mut state = self.state.lock();
        let refused = sent.and_then(|header| header.strip_prefix("Bearer "));
        if state.tokens.get(scopes).is_some_and(|token| Some(&*token.text) == refused) {
            state.tokens.remove(scopes);
        }
        state.challenge = Some(found);
        Ok(())
    }

    /// Explains that a registry refused.
    pub(super) fn explained(&self, fault: Fault) -> Fault {
        let has_login = matches!(self.state.lock().login, Some(Some(_)));
        self.explain(fault, has_login)
    }

    fn explain(&self, fault: Fault, has_login: bool) -> Fault {
        if !matches!(fault.class, Class::Status(401 | 403)) {
            return fault;
        }
        let text = if has_login { "the login is not accepted" } else { "no login was found" };
        fault.hint(format!("{text}; log in by 'podman login {}'", self.registry))
    }

    fn login(&self, state: &mut State) -> Result<Option<Login>, Fault> {
        if let Some(known) = &state.login {
            return Ok(known.clone());
        }
        let found = login::find(&self.registry, &self.name, &self.environment, self.helper_limit)
            .map_err(|error| Fault::last(&error.attempt, &error.reason))?;
        state.login = Some(found.clone());
        Ok(found)
    }

    /// A token for the scopes: a kept one, or a new one.
    fn token(&self, state: &mut State, http: &Http, scopes: &Scopes) -> Result<String, Fault> {
        if let Some(token) = state.tokens.get(scopes).filter(|token| token.end > Instant::now()) {
            return Ok(token.text.clone());
        }
        let login = self.login(state)?;
        if let Some(Login::Bearer(token)) = login {
            return Ok(token);
        }
        let (realm, service, asked) = self.realm(state)?;
        let scopes_text: BTreeSet<&String> = scopes.0.iter().chain(&asked).collect();
        let begin = Instant::now();
        let answer = ask(http, realm, service.as_deref(), &scopes_text, login.as_ref())
            .map_err(|fault| self.explain(fault, login.is_some()))?;
        let text = answer.token.or(answer.access_token).unwrap_or_default();
        let life = answer.expires_in.unwrap_or(SHORTEST_LIFE).clamp(SHORTEST_LIFE, 24 * 3600);
        // A fifth is kept in reserve, for the request that is sent with the token.
        let token = Token { text: text.clone(), end: begin + Duration::from_secs(life * 4 / 5) };
        state.tokens.insert(scopes.clone(), token);
        Ok(text)
    }

    /// The token server, the service, and the scopes of the challenge.
    fn realm(&self, state: &State) -> Result<(Url, Option<String>, Vec<String>), Fault> {
        let request = format!("log in to {}", self.registry);
        let Some(Challenge::Bearer { service, scopes, .. }) = &state.challenge else {
            return Err(Fault::last(&request, "the registry asks for no token"));
        };
        let realm = state.challenge.as_ref().and_then(Challenge::realm);
        let url = realm.unwrap_or(Err("the challenge names no token server"));
        let url = url.map_err(|bad| Fault::last(&request, format!("its token server: {bad}")))?;
        let scopes = scopes.iter().filter(|scope| !scope.is_empty()).cloned().collect();
        Ok((url, service.clone(), scopes))
    }
}

/// Asks a token server for a token.
fn ask(
    http: &Http,
    realm: Url,
    service: Option<&str>,
    scopes: &BTreeSet<&String>,
    login: Option<&Login>,
) -> Result<TokenAnswer, Fault> {
    let mut call = match login {
        Some(Login::Identity(token)) => {
            let scope = scopes.iter().map(|scope| scope.as_str()).collect::<Vec<_>>().join(" ");
            let form = [
                ("grant_type", "refresh_token"),
                ("service", service.unwrap_or("")),
                ("client_id", CLIENT),
                ("scope", &scope),
                ("refresh_token", token),
            ];
            let pairs = form.map(|(name, value)| format!("{name}={}", encoded(value)));
            return post(http, realm, pairs.join("&").as_bytes());
        }
        _ => {
            let mut url = realm;
            if let Some(service) = service {
                url = url.with("service", service);
            }
            for scope in scopes {
                url = url.with("scope", scope);
            }
            Call::new(Verb::GET, url)
        }
    };
    call.authorization = login.and_then(basic);
    answered(http, &mut call)
}

fn post(http: &Http, realm: Url, form: &[u8]) -> Result<TokenAnswer, Fault> {
    let call = Call::new(Verb::POST, realm);
    let mut call = Call { payload: Payload::Bytes(form), ..call }
        .header("content-type", "application/x-www-form-urlencoded");
    answered(http, &mut call)
}

fn answered(http: &Http, call: &mut Call<'_>) -> Result<TokenAnswer, Fault> {
    let mut answer = http.send(call)?;
    if answer.is_elsewhere {
        return Err(Fault::last(&answer.request, "the token server redirects to another host"));
    }
    if answer.status != 200 {
        return Err(answer.refusal());
    }
    let body = answer.bytes(TOKEN_BODY)?;
    let malformed = || Fault::last(&answer.request, "the token server sends no token");
    // The error of the parser can quote the token.
    let found: TokenAnswer = serde_json::from_slice(&body).map_err(|_| malformed())?;
    let text = found.token.as_ref().or(found.access_token.as_ref());
    let is_token =
        text.is_some_and(|text| !text.is_empty() && text.bytes().all(|c| c.is_ascii_graphic()));
    if is_token { Ok(found) } else { Err(malformed()) }
}

/// The `Authorization` of a user and a password.
fn basic(login: &Login) -> Option<String> {
    match login {
        Login::Password(user, password) => {
            Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
        }
        Login::Bearer(token) => Some(format!("Bearer {token}")),
        Login::Identity(_) => None,
    }
}
