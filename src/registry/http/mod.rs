//! Sends one request and receives the head of its answer.
//!
//! * A redirect is followed for GET and HEAD only, a few times, and never from https to http or to
//!   another scheme. The authorization stays with the party that it was made for.
//! * Plain http is spoken only to the host that the caller allowed.
//! * Connecting, each read, each write and the head of the answer have time limits.

mod proxy;
mod trust;
mod url;

use std::collections::HashMap;
use std::io::{self, Read};
use std::time::Instant;

use parking_lot::Mutex;
use ureq::http::{HeaderMap, Method, Request, StatusCode};
use ureq::{Agent, BodyReader, SendBody};

use self::proxy::Proxies;
pub(super) use self::url::{Origin, Url, encoded};
pub(super) use ureq::http::Method as Verb;

use super::environment::Environment;
use super::fault::{Class, Fault, shown};
use super::limits::{BUFFER, HEAD, Limits, REDIRECTS};

/// The most origins that connections are kept to.
const ORIGINS: usize = 8;

/// A client for one registry, and for the parties that it refers to.
pub(super) struct Http {
    environment: Environment,
    proxies: Proxies,
    limits: Limits,
    /// The host to which plain http is spoken.
    plain: Option<String>,
    agents: Mutex<HashMap<Origin, Agent>>,
}

/// The body of a request.
pub(super) enum Payload<'a> {
    /// No body.
    None,
    /// These bytes.
    Bytes(&'a [u8]),
    /// As many bytes of a stream.
    Stream(&'a mut dyn Read, u64),
}

/// A request.
pub(super) struct Call<'a> {
    pub(super) verb: Verb,
    pub(super) url: Url,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) payload: Payload<'a>,
    /// The `Authorization` for the origin of `url`.
    pub(super) authorization: Option<String>,
}

impl Call<'_> {
    pub(super) fn new(verb: Verb, url: Url) -> Call<'static> {
        Call { verb, url, headers: Vec::new(), payload: Payload::None, authorization: None }
    }

    pub(super) fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The request for a message.
    pub(super) fn request(&self) -> String {
        format!("{} {}", self.verb, shown(&self.url.to_string()))
    }
}

/// The head of an answer, with its body still to be read.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    /// The request for a message.
    pub(super) request: String,
    /// Where the answer came from.
    pub(super) url: Url,
    /// Whether another party than the asked one answered.
    pub(super) is_elsewhere: bool,
    body: BodyReader<'static>,
    deadline: Instant,
}

impl Http {
    pub(super) fn new(environment: Environment, limits: Limits, plain: Option<String>) -> Http {
        let proxies = Proxies::of(&environment);
        Http { environment, proxies, limits, plain, agents: Mutex::default() }
    }

    /// Sends a request, and follows redirects.
    pub(super) fn send(&self, call: &mut Call<'_>) -> Result<Answer, Fault> {
        let (begin, mut request) = (call.url.origin.clone(), call.request());
        let mut url = call.url.clone();
        let mut seen = Vec::new();
        loop {
            let is_elsewhere = url.origin != begin;
            self.check_scheme(&url, &request)?;
            let answer = self.send_once(call, &url, &request, is_elsewhere)?;
            let is_redirect = matches!(answer.status, 301 | 302 | 303 | 307 | 308);
            let may_follow = call.verb == Method::GET || call.verb == Method::HEAD;
            if !is_redirect {
                return Ok(answer);
            }
            if !may_follow {
                return Err(Fault::last(&request, "the registry redirects an upload"));
            }
            let Some(location) = answer.header("location") else {
                return Err(Fault::last(&request, "the redirect has no location"));
            };
            let next = url.join(location).map_err(|bad| redirect_fault(&request, location, bad))?;
            if url.origin.is_tls && !next.origin.is_tls {
                return Err(redirect_fault(&request, location, "it leads from https to http"));
            }
            if seen.contains(&next) || next == call.url {
                return Err(redirect_fault(&request, location, "the redirects form a circle"));
            }
            if seen.len() >= REDIRECTS {
                return Err(redirect_fault(&request, location, "there are too many redirects"));
            }
            request = format!("{}, redirected to {}", call.request(), shown(&next.to_string()));
            seen.push(next.clone());
            url = next;
        }
    }

    /// Refuses plain http, except with the host that the caller allowed.
    fn check_scheme(&self, url: &Url, request: &str) -> Result<(), Fault> {
        let is_allowed = match &self.plain {
            _ if url.origin.is_tls => true,
            Some(host) => url.origin.host == *host || url.origin.is_loopback(),
            None => false,
        };
        if is_allowed {
            return Ok(());
        }
        Err(Fault::last(request, format!("plain http to {} is not allowed", url.origin)))
    }

    fn send_once(
        &self,
        call: &mut Call<'_>,
        url: &Url,
        request: &str,
        is_elsewhere: bool,
    ) -> Result<Answer, Fault> {
        let deadline = Instant::now() + self.limits.answer;
        let mut builder = Request::builder().method(call.verb.clone()).uri(url.whole());
        for (name, value) in &call.headers {
            builder = builder.header(*name, value);
        }
        if let (Some(authorization), false) = (&call.authorization, is_elsewhere) {
            builder = builder.header("authorization", authorization);
        }
        let agent = self.agent(&url.origin).map_err(|error| {
            let fault = Fault::last(request, error.to_string());
            Fault { hint: error.hint, ..fault }
        })?;
        let bad = |_| Fault::last(request, "the request is malformed");
        let answer = match &mut call.payload {
            Payload::None => agent.run(builder.body(()).map_err(bad)?),
            Payload::Bytes(bytes) => agent.run(builder.body(*bytes).map_err(bad)?),
            Payload::Stream(stream, length) => {
                let builder = builder.header("content-length", length.to_string());
                agent.run(builder.body(SendBody::from_reader(*stream)).map_err(bad)?)
            }
        };
        let answer = answer.map_err(|error| fault_of(request, &url.origin, error))?;
        let (head, body) = answer.into_parts();
        Ok(Answer {
            status: head.status.as_u16(),
            headers: head.headers,
            request: request.to_owned(),
            url: url.clone(),
            is_elsewhere,
            body: body.into_with_config().reader(),
            deadline,
        })
    }

    /// The agent that keeps connections to an origin.
    fn agent(&self, origin: &Origin) -> crate::error::Result<Agent> {
        if let Some(agent) = self.agents.lock().get(origin) {
            return Ok(agent.clone());
        }
        let limits = &self.limits;
        let proxy = self.proxies.choose(origin).map(proxy_at).transpose()?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(proxy)
            .user_agent(concat!("jailfs/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .max_response_header_size(HEAD)
            .input_buffer_size(BUFFER)
            .output_buffer_size(BUFFER)
            .timeout_resolve(Some(limits.connect))
            .timeout_connect(Some(limits.connect))
            .timeout_send_request(Some(limits.silence))
            .timeout_recv_response(Some(limits.answer))
            .timeout_per_read(Some(limits.silence))
            .timeout_per_write(Some(limits.silence));
        if origin.is_tls {
            config = config.tls_config(trust::tls(&self.environment, origin)?);
        }
        let agent = config.build().new_agent();
        let mut agents = self.agents.lock();
        if agents.len() >= ORIGINS {
            agents.clear();
        }
        agents.insert(origin.clone(), agent.clone());
        Ok(agent)
    }
}

/// A proxy by its URL. The error does not repeat the URL, which can hold a password.
fn proxy_at(url: &str) -> crate::error::Result<ureq::Proxy> {
    use crate::error::{Error, Kind};
    ureq::Proxy::new(url).map_err(|_| {
        let attempt = "read HTTPS_PROXY, HTTP_PROXY or ALL_PROXY";
        Error::new(Kind::Usage, attempt, "the URL of the proxy is malformed")
    })
}

fn redirect_fault(request: &str, location: &str, reason: &str) -> Fault {
    let shown = location.split('?').next().unwrap_or("");
    Fault::last(request, format!("cannot follow the redirect to '{shown}': {reason}"))
}

/// Describes an error of ureq.
fn fault_of(request: &str, origin: &Origin, error: ureq::Error) -> Fault {
    match error {
        ureq::Error::Io(error) => io_fault(request, origin, &error),
        ureq::Error::Timeout(limit) => {
            Fault::cut(request, format!("the time limit passed ({limit})"))
        }
        ureq::Error::HostNotFound => {
            Fault::cut(request, format!("the host {} is not found", origin.host))
        }
        ureq::Error::ConnectionFailed | ureq::Error::BodyStalled => {
            Fault::cut(request, error.to_string())
        }
        ureq::Error::LargeResponseHeader(..) => {
            Fault::last(request, "the head of the answer is larger than 32 KiB")
        }
        ureq::Error::Rustls(error) => tls_fault(request, origin, &error),
        other => Fault::last(request, other.to_string()),
    }
}

fn io_fault(request: &str, origin: &Origin, error: &io::Error) -> Fault {
    if let Some(error) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return tls_fault(request, origin, error);
    }
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the connection was cut".to_owned(),
        _ => crate::error::Error::io("", error).reason,
    };
    Fault::cut(request, reason)
}

fn tls_fault(request: &str, origin: &Origin, error: &rustls::Error) -> Fault {
    let fault = Fault::last(request, error.to_string());
    match error {
        rustls::Error::InvalidCertificate(_) => fault.hint(format!(
            "put the certificate of a private authority into \
             ~/.config/containers/certs.d/{}/ca.crt, or name it by SSL_CERT_FILE",
            origin.authority()
        )),
        rustls::Error::InvalidMessage(_) => {
            fault.hint("if the registry speaks plain http, use --plain-http")
        }
        _ => fault,
    }
}

impl Answer {
    /// The text of a header field.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The announced length of the body.
    pub(super) fn length(&self) -> Option<u64> {
        self.header("content-length").and_then(|text| text.trim().parse().ok())
    }

    /// Reads the next bytes of the body. Zero: the end.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Fault> {
        match self.body.read(buffer) {
            Ok(read) => Ok(read),
            Err(error) => Err(fault_of(&self.request, &self.url.origin, ureq::Error::from(error))),
        }
    }

    /// The whole body, if it has at most `most` bytes and arrives before the deadline.
    pub(super) fn bytes(&mut self, most: usize) -> Result<Vec<u8>, Fault> {
        let too_long = || Fault::last(&self.request, format!("the answer exceeds {most} bytes"));
        if self.length().is_some_and(|length| length > most as u64) {
            return Err(too_long());
        }
        let mut bytes = Vec::new();
        let mut buffer = vec![0; 16 << 10];
        loop {
            if Instant::now() > self.deadline {
                return Err(Fault::cut(&self.request, "the answer takes too long"));
            }
            let read = self.read(&mut buffer)?;
            bytes.extend(buffer.iter().take(read));
            if read == 0 {
                return Ok(bytes);
            }
            if bytes.len() > most {
                return Err(Fault::last(&self.request, format!("the answer exceeds {most} bytes")));
            }
        }
    }

    /// Reads and drops a short rest of the body, so that the connection can be used again.
    pub(super) fn finish(mut self) {
        drop(self.bytes(16 << 10));
    }

    /// The failure that this answer means. Reads its body.
    pub(super) fn refusal(mut self) -> Fault {
        let class = match self.status {
            408 | 429 | 500 | 502 | 503 | 504 => Class::Busy(self.retry_after()),
            status => Class::Status(status),
        };
        let body = self.bytes(super::limits::ERROR_BODY).unwrap_or_default();
        let name = StatusCode::from_u16(self.status).ok();
        let name = name.and_then(|status| status.canonical_reason()).unwrap_or("");
        let mut reason = format!("the registry answers {} {name}", self.status);
        if let Some(detail) = registry_errors(&body) {
            reason = format!("{reason}: {detail}");
        }
        Fault::new(class, &self.request, reason)
    }

    /// The seconds of `Retry-After`. A date is answered by the usual pause.
    fn retry_after(&self) -> Option<std::time::Duration> {
        let seconds = self.header("retry-after")?.trim().parse::<u32>().ok()?;
        Some(std::time::Duration::from_secs(u64::from(seconds)))
    }
}

/// The messages of an error body: `{"errors": [{"code": .., "message": ..}]}`.
fn registry_errors(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Body {
        errors: Vec<One>,
    }
    #[derive(serde::Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let body: Body = serde_json::from_slice(body).ok()?;
    let texts: Vec<String> =
        body.errors.iter().take(3).map(|one| format!("{} ({})", one.message, one.code)).collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}
