//! Logins and tokens: where they go, and where they do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::server::{Exchange, Head};
use super::*;

/// An environment whose login file has one entry for the server.
fn environment(dir: &std::path::Path, server: &Server, entry: &str) -> Environment {
    let file = dir.join("auth.json");
    let text = format!(r#"{{"auths": {{"{}": {entry}}}}}"#, server.address());
    std::fs::write(&file, text).unwrap();
    Environment::new([("REGISTRY_AUTH_FILE".into(), file.into())])
}

const PASSWORD: &str = r#"{"username": "u", "password": "p"}"#;
/// `u:p`.
const BASIC: &str = "Basic dTpw";

fn challenge(answer: &mut Exchange, text: &str) {
    answer.answer(401, &[("www-authenticate", text)], "");
}

/// Asks for a password, and answers with an empty list of tags.
fn basic(head: &Head, answer: &mut Exchange) {
    match head.field("authorization") {
        Some(BASIC) => answer.answer(200, &[], r#"{"tags": []}"#),
        _ => challenge(answer, "Basic realm=\"x\""),
    }
}

#[test]
fn a_password_is_sent_after_the_registry_asks_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(basic);
    let repository = repository_with(&server, environment(dir.path(), &server, PASSWORD), limits());
    repository.tags().unwrap();
    repository.tags().unwrap();
    let sent: Vec<bool> =
        server.heads().iter().map(|head| head.field("authorization").is_some()).collect();
    assert_eq!(sent, [false, true, true]);
}

#[test]
fn a_missing_or_wrong_login_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(basic);
    let error = repository(&server).tags().unwrap_err();
    assert!(error.hint.as_ref().unwrap().contains("no login was found"), "{error:?}");
    let wrong = r#"{"username": "u", "password": "secret"}"#;
    let repository = repository_with(&server, environment(dir.path(), &server, wrong), limits());
    let error = repository.tags().unwrap_err();
    assert!(error.hint.as_ref().unwrap().contains("not accepted"), "{error:?}");
    assert!(!format!("{error:?}").contains("secret"));
    let unknown = Server::new(|_, answer| challenge(answer, "Negotiate"));
    let error = super::repository(&unknown).tags().unwrap_err();
    assert!(error.reason.contains("in an unknown way"), "{error}");
}

#[test]
fn a_login_is_not_sent_along_a_redirect_to_another_host() {
    let dir = tempfile::tempdir().unwrap();
    let other = Server::new(|_, answer| answer.answer(200, &[], "0123456789"));
    let asks = Server::new(|_, answer| challenge(answer, "Basic realm=\"x\""));
    for (target, is_fine) in [(&other, true), (&asks, false)] {
        let location = format!("http://{}/blob", target.address());
        let server = Server::new(move |head, answer| match head.field("authorization") {
            Some(BASIC) => answer.answer(307, &[("location", &location)], ""),
            _ => challenge(answer, "Basic realm=\"x\""),
        });
        let repository =
            repository_with(&server, environment(dir.path(), &server, PASSWORD), limits());
        let blob = Descriptor::of(b"0123456789");
        let result = repository.fetch_blob(&blob, &mut Vec::new(), &Meter::silent());
        assert_eq!(result.is_ok(), is_fine, "{result:?}");
        let heads = target.heads();
        assert_eq!(heads.len(), 1);
        assert_eq!(heads[0].field("authorization"), None);
    }
}

#[test]
fn a_login_stays_with_a_redirect_on_the_same_host() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(|head, answer| match head.field("authorization") {
        Some(BASIC) if head.path == "/blob" => answer.answer(200, &[], "0123456789"),
        Some(BASIC) => answer.answer(307, &[("location", "/blob")], ""),
        _ => challenge(answer, "Basic realm=\"x\""),
    });
    let repository = repository_with(&server, environment(dir.path(), &server, PASSWORD), limits());
    let blob = Descriptor::of(b"0123456789");
    repository.fetch_blob(&blob, &mut Vec::new(), &Meter::silent()).unwrap();
}

/// A registry with a token server. Each token is `t` and a number, and only the newest is accepted
/// until `revoke` is raised.
struct Tokens {
    given: AtomicU32,
    revoked: AtomicU32,
}

fn token_server(expires_in: u32) -> (Arc<Tokens>, Server) {
    let tokens = Arc::new(Tokens { given: AtomicU32::new(0), revoked: AtomicU32::new(0) });
    let state = tokens.clone();
    let server = Server::new(move |head, answer| {
        if head.path.starts_with("/token") {
            let number = state.given.fetch_add(1, Ordering::SeqCst);
            let form = answer.body();
            if head.method == "POST" {
                let form = String::from_utf8(form).unwrap();
                assert!(form.contains("grant_type=refresh_token"), "{form}");
                assert!(form.contains("refresh_token=i%20t"), "{form}");
            } else {
                assert!(head.path.contains("service=s%20x"), "{}", head.path);
                assert!(head.path.contains("scope=repository%3Aa%3Apull"), "{}", head.path);
                assert_eq!(head.field("authorization"), Some(BASIC));
            }
            let body = format!(r#"{{"token": "t{number}", "expires_in": {expires_in}}}"#);
            return answer.answer(200, &[], body);
        }
        let newest = state.given.load(Ordering::SeqCst).wrapping_sub(1);
        let is_valid = newest >= state.revoked.load(Ordering::SeqCst)
            && head.field("authorization") == Some(&format!("Bearer t{newest}"));
        if is_valid {
            return answer.answer(200, &[], r#"{"tags": []}"#);
        }
        let realm = format!("http://{}/token", head.field("host").unwrap());
        challenge(answer, &format!("Bearer realm=\"{realm}\",service=\"s x\",scope=\"\""));
    });
    (tokens, server)
}

#[test]
fn a_token_is_fetched_once_and_again_when_it_is_refused() {
    for entry in [PASSWORD, r#"{"identitytoken": "i t"}"#] {
        let dir = tempfile::tempdir().unwrap();
        let (tokens, server) = token_server(300);
        let repository =
            repository_with(&server, environment(dir.path(), &server, entry), limits());
        for _ in 0..3 {
            repository.tags().unwrap();
        }
        assert_eq!(tokens.given.load(Ordering::SeqCst), 1);
        tokens.revoked.store(1, Ordering::SeqCst);
        repository.tags().unwrap();
        assert_eq!(tokens.given.load(Ordering::SeqCst), 2);
    }
}

#[test]
fn a_token_server_that_sends_no_token_is_refused() {
    for body in ["", "{}", r#"{"token": ""}"#, r#"{"token": "a\r\nX: y"}"#, r#"{"token": 1}"#] {
        let server = Server::new(move |head, answer| {
            if head.path.starts_with("/token") {
                return answer.answer(200, &[], body);
            }
            let realm = format!("http://{}/token", head.field("host").unwrap());
            challenge(answer, &format!("Bearer realm=\"{realm}\""));
        });
        let error = repository(&server).tags().unwrap_err();
        assert!(error.reason.contains("no token"), "{error}");
        assert!(error.attempt.contains("/token"), "{error}");
    }
}

#[test]
fn a_token_server_is_asked_only_over_an_allowed_scheme() {
    for (realm, reason) in [
        ("file:///etc/passwd", "neither http nor https"),
        ("http://h.example/token", "plain http to http://h.example is not allowed"),
        ("", "neither http nor https"),
    ] {
        let server =
            Server::new(move |_, answer| challenge(answer, &format!("Bearer realm=\"{realm}\"")));
        let error = repository(&server).tags().unwrap_err();
        assert!(error.reason.contains(reason), "{error}");
    }
}
