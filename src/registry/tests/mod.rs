//! Tests against a small HTTP server in the process, whose answers the test decides.

mod hostile;
mod logins;
mod server;
mod transfers;

use std::time::Duration;

use super::*;

use self::server::Server;

/// Limits under which a registry is left soon.
fn impatient() -> Limits {
    Limits {
        silence: Duration::from_millis(400),
        answer: Duration::from_millis(1500),
        slowest: 50_000,
        ..limits()
    }
}

/// Limits with short pauses. No test waits for their end.
fn limits() -> Limits {
    Limits {
        connect: Duration::from_secs(20),
        silence: Duration::from_secs(20),
        answer: Duration::from_secs(40),
        slowest: 1,
        attempts: 3,
        first_pause: Duration::from_millis(2),
        longest_pause: Duration::from_millis(10),
        pauses: Duration::from_secs(5),
        chunk: 100_000,
        helper: Duration::from_secs(5),
    }
}

/// The repository `a` at the server, over plain http.
fn repository(server: &Server) -> Repository {
    repository_with(server, Environment::default(), limits())
}

fn repository_with(server: &Server, environment: Environment, limits: Limits) -> Repository {
    let reference = Reference::parse(&format!("{}/a", server.address())).unwrap();
    let plain_http = PlainHttp::Loopback;
    Repository::open(&reference, &Options { environment, plain_http, limits }).unwrap()
}

/// Bytes without a pattern that repeats soon.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[test]
fn plain_http_is_spoken_only_where_it_is_allowed() {
    let open = |text: &str, plain_http: PlainHttp| {
        let options = Options { plain_http, ..Options::default() };
        Repository::open(&Reference::parse(text).unwrap(), &options)
    };
    let scheme = |text: &str, plain: PlainHttp| open(text, plain).unwrap().origin.to_string();
    let named = PlainHttp::With("h.example:5000".to_owned());
    assert_eq!(scheme("localhost:5000/a", PlainHttp::Never), "https://localhost:5000");
    assert_eq!(scheme("localhost:5000/a", PlainHttp::Loopback), "http://localhost:5000");
    assert_eq!(scheme("[::1]:5000/a", PlainHttp::Loopback), "http://[::1]:5000");
    assert_eq!(scheme("h.example:5000/a", named.clone()), "http://h.example:5000");
    assert_eq!(scheme("h.example/a", named), "https://h.example");
    assert_eq!(scheme("docker.io/a", PlainHttp::Never), "https://registry-1.docker.io");
    let error = open("h.example/a", PlainHttp::Loopback).err().unwrap();
    assert_eq!(error.kind, Kind::Usage);
    assert!(error.hint.unwrap().contains("--plain-http=h.example"));
}
