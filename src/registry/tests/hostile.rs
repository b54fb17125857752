//! Answers of a hostile registry: each is an error that names the request, in bounded time.

use std::time::Instant;

use super::server::{Exchange, Head};
use super::*;

type Answers = fn(&Head, &mut Exchange);

/// Runs an operation against a registry. It must fail soon, and its error has to name the request.
fn refused<T>(
    answers: impl Fn(&Head, &mut Exchange) + Send + Sync + 'static,
    operation: impl FnOnce(&Repository) -> Result<T>,
) -> Error {
    refused_within(limits(), answers, operation)
}

fn refused_within<T>(
    limits: Limits,
    answers: impl Fn(&Head, &mut Exchange) + Send + Sync + 'static,
    operation: impl FnOnce(&Repository) -> Result<T>,
) -> Error {
    let server = Server::new(answers);
    let begin = Instant::now();
    let repository = repository_with(&server, Environment::default(), limits);
    let error = operation(&repository).err().expect("the answer is refused");
    assert!(begin.elapsed() < Duration::from_secs(15), "it takes too long: {error}");
    let text = error.to_string();
    assert!(text.contains(&format!("http://{}/v2/a/", server.address())), "{text}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(text.len() < 1500, "{text}");
    error
}

/// Checks the reason for which a download of the blob `0123456789` fails.
fn blob_refused(answers: Answers, reason: &str) {
    blob_refused_within(limits(), answers, reason);
}

fn blob_refused_within(limits: Limits, answers: Answers, reason: &str) {
    let error = refused_within(limits, answers, |repository| {
        let mut sink = Vec::new();
        let blob = Descriptor::of(b"0123456789");
        let result = repository.fetch_blob(&blob, &mut sink, &Meter::silent());
        assert!(sink.len() <= 10, "more bytes than the descriptor says are passed on");
        result
    });
    assert!(error.to_string().contains(reason), "{error} instead of {reason}");
}

/// Writes chunks until the client is gone.
fn endless(exchange: &mut Exchange, head: &str, chunk: &str, pause: Duration) {
    let mut is_there = exchange.write(head);
    while is_there {
        is_there = exchange.write(chunk);
        std::thread::sleep(pause);
    }
}

const CHUNKED: &str = "HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n";
const NO_PAUSE: Duration = Duration::ZERO;

#[test]
fn a_blob_with_other_bytes_than_promised_is_refused() {
    blob_refused(|_, answer| answer.answer(200, &[], "0123456780"), "sends other bytes");
    blob_refused(|_, answer| answer.answer(200, &[], "01234567890"), "announces 11 bytes");
    blob_refused(|_, answer| answer.answer(200, &[], "012345678"), "announces 9 bytes");
    blob_refused(
        |_, answer| endless(answer, CHUNKED, "8\r\nabcdefgh\r\n", NO_PAUSE),
        "more than the 10 bytes",
    );
    blob_refused(
        |_, answer| endless(answer, "HTTP/1.1 200 x\r\n\r\n", "abcdefgh", NO_PAUSE),
        "more than the 10 bytes",
    );
    blob_refused(
        |_, answer| answer.answer(200, &[("content-encoding", "gzip")], "0123456789"),
        "encodes the blob",
    );
    blob_refused(
        |_, answer| answer.answer(206, &[("content-range", "bytes 1-9/10")], "123456789"),
        "instead of 0-9",
    );
    blob_refused(
        |_, answer| answer.answer(206, &[("content-range", "bytes 0-99/100")], "1"),
        "is malformed",
    );
    blob_refused(|_, answer| answer.answer(304, &[], ""), "answers 304");
    blob_refused(|_, answer| answer.answer(404, &[], "{"), "answers 404");
    let cut: Answers = |_, answer| {
        answer.write("HTTP/1.1 200 x\r\ncontent-length: 10\r\n\r\n01");
        answer.cut();
    };
    blob_refused(cut, "tried 3 times");
}

#[test]
fn redirects_in_a_circle_to_files_and_to_other_schemes_are_refused() {
    let to: fn(&mut Exchange, &str) = |answer, to| answer.answer(307, &[("location", to)], "");
    blob_refused(|head, answer| answer.answer(302, &[("location", &head.path)], ""), "a circle");
    blob_refused(
        |head, answer| {
            let next = if head.path.ends_with('1') { "/v2/a/2" } else { "/v2/a/1" };
            answer.answer(302, &[("location", next)], "");
        },
        "a circle",
    );
    blob_refused(
        |head, answer| answer.answer(302, &[("location", &format!("{}0", head.path))], ""),
        "too many redirects",
    );
    for (location, reason) in [
        ("file:///etc/passwd", "neither http nor https"),
        ("gopher://h/", "neither http nor https"),
        ("https://user:secret@h/", "has a user"),
        ("http://registry.example/x", "plain http to http://registry.example is not allowed"),
        ("//", "malformed"),
    ] {
        let error = refused(
            move |_, answer| to(answer, location),
            |repository| repository.manifest(&Version::Tag("t".into())),
        );
        assert!(error.to_string().contains(reason), "{error}");
        assert!(!error.to_string().contains("?secret"), "{error}");
    }
    blob_refused(|_, answer| answer.answer(302, &[], ""), "no location");
}

#[test]
fn endless_and_malformed_heads_are_refused() {
    blob_refused(
        |_, answer| endless(answer, "HTTP/1.1 200 x\r\n", "x-a: bbbbbbbbbb\r\n", NO_PAUSE),
        "",
    );
    blob_refused(
        |_, answer| endless(answer, "HTTP/1.1 200 x\r\nx-a: ", &"b".repeat(1000), NO_PAUSE),
        "larger than 32 KiB",
    );
    let ssh: Answers = |_, answer| {
        answer.write("SSH-2.0-x\r\n\r\n");
    };
    blob_refused(ssh, "");
    let both: Answers = |_, answer| {
        answer.write("HTTP/1.1 200 x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n0");
    };
    blob_refused(both, "");
}

#[test]
fn a_slow_or_silent_registry_is_left() {
    blob_refused_within(
        impatient(),
        |_, answer| {
            let head = "HTTP/1.1 200 x\r\ncontent-length: 10\r\n\r\n";
            endless(answer, head, "0", Duration::from_millis(150));
        },
        "too slowly",
    );
    let pause = Duration::from_millis(100);
    blob_refused_within(
        impatient(),
        |_, answer| endless(answer, "HTTP/1.1 ", "2", Duration::from_millis(100)),
        "",
    );
    blob_refused_within(
        impatient(),
        |_, _| std::thread::sleep(Duration::from_secs(3)),
        "the time limit passed",
    );
    let error = refused_within(
        impatient(),
        move |_, answer| endless(answer, CHUNKED, "1\r\na\r\n", pause),
        |repository| repository.manifest(&Version::Tag("t".into())),
    );
    assert!(error.reason.contains("takes too long"), "{error}");
}

#[test]
fn manifests_are_bounded_and_verified() {
    let tag = Version::Tag("t".into());
    let get = |answers: Answers, version: &Version| {
        refused(answers, |repository| repository.manifest(version)).reason
    };
    let reason = get(
        |_, answer| {
            endless(answer, CHUNKED, &format!("1000\r\n{}\r\n", "a".repeat(4096)), NO_PAUSE)
        },
        &tag,
    );
    assert!(reason.contains("exceeds 4194304 bytes"), "{reason}");
    let reason = get(|_, answer| answer.answer(200, &[("content-length", "5000000")], "{}"), &tag);
    assert!(reason.contains("exceeds"), "{reason}");
    let other = Digest::of(b"other");
    let reason = get(|_, answer| answer.answer(200, &[], "{}"), &Version::Digest(other));
    assert!(reason.contains("sends other bytes"), "{reason}");
    let lies: Answers = |_, answer| {
        let digest = Digest::of(b"other").to_string();
        answer.answer(200, &[("docker-content-digest", &digest)], "{}");
    };
    assert!(get(lies, &tag).contains("sends other bytes"));
    let garbage: Answers = |_, answer| {
        answer.answer(200, &[("docker-content-digest", "sha256:zz")], "{}");
    };
    assert!(get(garbage, &tag).contains("digest"));
    let error = refused(lies, |repository| repository.push_manifest(&tag, "application/x", b"{}"));
    assert!(
        error.to_string().contains("answers 200") || error.reason.contains("stored"),
        "{error}"
    );
}

#[test]
fn lists_of_tags_are_bounded() {
    let list = |answers: Answers| refused(answers, Repository::tags).reason;
    let endless_list: Answers = |head, answer| {
        let number: u32 = head.path.split("last=").nth(1).map_or(0, |text| text.parse().unwrap());
        let link = format!("</v2/a/tags/list?last={}>; rel=\"next\"", number + 1);
        answer.answer(200, &[("link", &link)], format!("{{\"tags\": [\"t{number}\"]}}"));
    };
    assert!(list(endless_list).contains("1000 pages"));
    let circle: Answers = |_, answer| {
        answer.answer(200, &[("link", "<?n=1>; rel=next")], r#"{"tags": ["t"]}"#);
    };
    assert!(list(circle).contains("no new tag"));
    let elsewhere: Answers = |_, answer| {
        answer.answer(200, &[("link", "<http://h.example/>; rel=next")], r#"{"tags": ["t"]}"#);
    };
    assert!(list(elsewhere).contains("another host"));
    let huge: Answers = |_, answer| answer.answer(200, &[("content-length", "99999999")], "");
    assert!(list(huge).contains("exceeds"));
    assert!(list(|_, answer| answer.answer(200, &[], "{\"tags\": [")).contains("malformed"));
    assert!(list(|_, answer| answer.answer(200, &[], "{\"tags\": 3}")).contains("malformed"));
    let nested: Answers = |_, answer| answer.answer(200, &[], "[".repeat(100_000));
    assert!(list(nested).contains("malformed"));
    let escape = list(|_, answer| answer.answer(200, &[], r#"{"tags": ["\u001b[2J"]}"#));
    assert!(escape.contains(r"'\u{1b}[2J', which is no tag"), "{escape}");
}

#[test]
fn an_error_text_of_the_registry_is_escaped_and_cut() {
    let text: Answers = |_, answer| {
        let long = "x".repeat(5000);
        let body =
            format!(r#"{{"errors": [{{"code": "A", "message": "\u001b[2J\u202e{long}"}}]}}"#);
        answer.answer(418, &[], body);
    };
    let reason = refused(text, Repository::tags).reason;
    assert!(reason.contains(r"418") && reason.contains(r"\u{1b}[2J\u{202e}xxx"), "{reason}");
    assert!(reason.ends_with("..."), "{reason}");
}

#[test]
fn an_upload_goes_only_to_the_registry() {
    let push = |answers: Answers| {
        refused(answers, |repository| {
            let bytes = noise(1000);
            let mut source = std::io::Cursor::new(&bytes);
            repository.push_blob(&Descriptor::of(&bytes), &mut source, None, &Meter::silent())
        })
        .to_string()
    };
    fn begin(head: &Head, answer: &mut Exchange, location: &str) {
        match head.method.as_str() {
            "HEAD" => answer.answer(404, &[], ""),
            "POST" => answer.answer(202, &[("location", location)], ""),
            _ => answer.answer(201, &[], ""),
        }
    }
    let text = push(|head, answer| begin(head, answer, "http://localhost:1/v2/a/x?state=secret"));
    assert!(text.contains("is not at the registry") && !text.contains("secret"), "{text}");
    let text = push(|head, answer| begin(head, answer, "file:///v2/a/x"));
    assert!(text.contains("neither http nor https"), "{text}");
    let text = push(|head, answer| match head.method.as_str() {
        "HEAD" => answer.answer(404, &[], ""),
        _ => answer.answer(202, &[], ""),
    });
    assert!(text.contains("no location"), "{text}");
    let text = push(|head, answer| match head.method.as_str() {
        "PUT" => answer.answer(201, &[("docker-content-digest", "sha256:00")], ""),
        _ => begin(head, answer, "/v2/a/x"),
    });
    assert!(text.contains("stored 'sha256:00'"), "{text}");
    let text = push(|head, answer| match head.method.as_str() {
        "PUT" => answer.answer(307, &[("location", "http://localhost:1/")], ""),
        _ => begin(head, answer, "/v2/a/x"),
    });
    assert!(text.contains("redirects an upload"), "{text}");
    let text = push(|head, answer| match head.method.as_str() {
        "PUT" => answer.cut(),
        "GET" => answer.answer(204, &[("range", "0-99999")], ""),
        _ => begin(head, answer, "/v2/a/x"),
    });
    assert!(text.contains("makes no sense"), "{text}");
}
