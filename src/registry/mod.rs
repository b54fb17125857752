//! A client for OCI registries: moves blobs and manifests (OCI distribution specification 1.1).
//!
//! * It knows nothing of stores. It gets and gives bytes, digests and tags.
//! * The registry is a foreign party. Every answer is bounded in bytes and time, every digest is
//!   verified, and foreign text in messages is escaped.
//! * A request that was cut or refused by an overload is repeated, with growing pauses. Transfers
//!   go on where they were cut, if the registry allows that.
//! * A tag moves by one request, the last one of a push. A cut before it leaves the old manifest.
//! * Logins go to the registry that they belong to, and to its token server; never along a redirect
//!   and never into a message.
//!
//! It is synchronous. A push or a pull is one command, and its throughput is that of the disk and
//! the network; a few threads can share a [`Repository`].

mod auth;
mod digest;
mod download;
mod environment;
mod fault;
mod http;
mod limits;
mod login;
mod manifest;
mod progress;
mod reference;
mod retry;
mod tags;
mod upload;

pub use self::digest::{Descriptor, Digest, Hasher};
pub use self::environment::Environment;
pub use self::limits::Limits;
pub use self::manifest::Manifest;
pub use self::progress::{Meter, Progress};
pub use self::reference::{Reference, Version};
pub use self::upload::Pushed;

use self::auth::{Auth, Scopes};
use self::fault::{Class, Fault};
use self::http::{Answer, Call, Http, Origin, Payload, Url, Verb};
use crate::error::{Error, Kind, Result};

/// Whether plain http may be spoken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PlainHttp {
    /// Never.
    #[default]
    Never,
    /// With a registry on this machine.
    Loopback,
    /// With the registry `HOST[:PORT]`.
    With(String),
}

/// How a registry is reached.
#[derive(Clone, Default)]
pub struct Options {
    /// Where logins, certificates and proxies are.
    pub environment: Environment,
    /// Whether plain http may be spoken.
    pub plain_http: PlainHttp,
    /// Limits of time and attempts.
    pub limits: Limits,
}

/// A repository of a registry.
pub struct Repository {
    name: String,
    origin: Origin,
    http: Http,
    auth: Auth,
    limits: Limits,
}

impl Repository {
    /// The repository of a reference. Sends nothing.
    ///
    /// # Errors
    /// Plain http is asked for, and the registry is neither on this machine nor named.
    pub fn open(reference: &Reference, options: &Options) -> Result<Repository> {
        let origin = origin_of(reference, &options.plain_http)?;
        let plain = (!origin.is_tls).then(|| origin.host.clone());
        let (environment, limits) = (options.environment.clone(), options.limits.clone());
        Ok(Repository {
            name: reference.name.clone(),
            auth: Auth::new(&reference.registry, &reference.name, environment.clone(), &limits),
            http: Http::new(environment, limits.clone(), plain),
            origin,
            limits,
        })
    }

    /// Checks that the registry answers, and accepts the login if it asks for one.
    ///
    /// # Errors
    /// It does not answer, speaks another protocol, or refuses.
    pub fn ping(&self) -> Result<()> {
        let scopes = Scopes::pull(&self.name);
        let answer = retry::repeated(&self.limits, || {
            let mut call = Call::new(Verb::GET, Url::at(&self.origin, "/v2/".to_owned()));
            self.exchange(&mut call, &scopes)?.expect(&[200])
        })?;
        answer.finish();
        Ok(())
    }

    /// A URL of this repository. `rest` consists of digests, tags and fixed words.
    fn url(&self, rest: &str) -> Url {
        Url::at(&self.origin, format!("/v2/{}/{rest}", self.name))
    }

    /// Sends a request with an authorization, and once more if the registry asks for one.
    fn exchange(&self, call: &mut Call<'_>, scopes: &Scopes) -> std::result::Result<Answer, Fault> {
        let mut has_asked = false;
        loop {
            call.authorization = self.auth.header(&self.http, scopes)?;
            let answer = self.http.send(call)?;
            match answer.status {
                401 if !answer.is_elsewhere && !has_asked => {
                    let sent = call.authorization.as_deref();
                    self.auth.challenged(&answer, sent, scopes)?;
                    let is_stream = matches!(call.payload, Payload::Stream(..));
                    if is_stream {
                        return Err(Fault::cut(&answer.request, "the token has expired"));
                    }
                    answer.finish();
                    has_asked = true;
                }
                408 | 429 | 500 | 502 | 503 | 504 => return Err(answer.refusal()),
                401 | 403 => return Err(self.auth.explained(answer.refusal())),
                _ => return Ok(answer),
            }
        }
    }
}

impl Answer {
    /// The answer, if it has one of these statuses.
    fn expect(self, statuses: &[u16]) -> std::result::Result<Answer, Fault> {
        match self.status {
            status if statuses.contains(&status) => Ok(self),
            status if status < 400 => {
                let reason = format!("the registry answers {status}, which makes no sense here");
                Err(Fault::new(Class::Status(status), &self.request, reason))
            }
            _ => Err(self.refusal()),
        }
    }
}

/// The party that answers for a registry.
fn origin_of(reference: &Reference, plain: &PlainHttp) -> Result<Origin> {
    let registry = match reference.registry.as_str() {
        "docker.io" | "index.docker.io" => "registry-1.docker.io",
        registry => registry,
    };
    let malformed = |bad: &str| Error::new(Kind::Usage, format!("reach {registry}"), bad);
    let tls = Url::parse(&format!("https://{registry}/")).map_err(malformed)?.origin;
    match plain {
        PlainHttp::Never => Ok(tls),
        PlainHttp::Loopback if !tls.is_loopback() => {
            let reason = "plain http can be read and changed on the way, and it is not on this \
                          machine";
            let hint = format!("if you accept that, use --plain-http={registry}");
            Err(malformed(reason).hint(hint))
        }
        PlainHttp::With(named) if !named.eq_ignore_ascii_case(registry) => Ok(tls),
        PlainHttp::Loopback | PlainHttp::With(_) => {
            Ok(Url::parse(&format!("http://{registry}/")).map_err(malformed)?.origin)
        }
    }
}

#[cfg(test)]
mod tests;
