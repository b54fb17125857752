//! Parses the head of a request to the proxy, and rewrites it for the origin.
//!
//! * A connection carries one request: CONNECT, or one with an absolute URL. Any other is refused.
//! * The head for the origin is written from the parsed parts. Its Host is the host that the list
//!   has judged, and one field states its length.
//! * An ambiguous request is refused: two lengths, a Host that differs from the URL, a URL with a
//!   user or a fragment.

use super::allow::Target;
use super::body::Body;

/// The maximum length of a head, in bytes.
pub(super) const LONGEST: usize = 32 << 10;
/// The maximum number of header fields.
const MOST: usize = 100;

/// A request that the proxy understands.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// A tunnel.
    Connect(Target),
    /// A plain request: its target, the head for the origin, and the body that follows.
    Forward(Target, Vec<u8>, Body),
}

/// Why a request is refused. The client gets this text.
pub(super) type Reason = &'static str;

/// The end of the head, after the first empty line, if it is complete. `from` is the length that
/// was searched before.
pub(super) fn end_of_head(bytes: &[u8], from: usize) -> Option<usize> {
    let start = from.saturating_sub(3);
    let rest = bytes.get(start..)?;
    let at = |end: &[u8]| {
        rest.windows(end.len()).position(|window| window == end).map(|at| start + at + end.len())
    };
    [at(b"\n\r\n"), at(b"\n\n")].into_iter().flatten().min()
}

/// Parses a head.
///
/// # Errors
/// The head is malformed, or not a request to a proxy.
pub(super) fn parse(head: &[u8]) -> Result<Request, Reason> {
    let mut fields = [httparse::EMPTY_HEADER; MOST];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(httparse::Status::Complete(len)) if len == head.len() => {}
        Err(httparse::Error::TooManyHeaders) => {
            return Err("the request has too many header fields");
        }
        _ => return Err("the request is malformed"),
    }
    let (Some(method), Some(target), Some(version)) =
        (request.method, request.path, request.version)
    else {
        return Err("the request is malformed");
    };
    if method == "CONNECT" {
        let target = Target::parse(target, None).ok_or("CONNECT needs HOST:PORT")?;
        return Ok(Request::Connect(target));
    }
    let (authority, path) = split(target)?;
    let target =
        Target::parse(authority, Some(80)).ok_or("the URL of the request has no plain host")?;
    check_host(request.headers, &target, version)?;
    let (length, body) = body(request.headers)?;
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut head =
        format!("{method} {slash}{path} HTTP/1.{version}\r\nHost: {authority}\r\n").into_bytes();
    for field in forwarded_fields(request.headers) {
        head.extend([field.name.as_bytes(), b": ", field.value, b"\r\n"].concat());
    }
    head.extend(length.as_bytes());
    head.extend(b"Connection: close\r\n\r\n");
    Ok(Request::Forward(target, head, body))
}

/// Splits `http://AUTHORITY/PATH?QUERY` into the authority and the rest.
fn split(target: &str) -> Result<(&str, &str), Reason> {
    let absolute = "a request to a proxy needs an absolute URL: http://HOST/PATH";
    let (scheme, rest) = target.split_once("://").ok_or(absolute)?;
    if !scheme.eq_ignore_ascii_case("http") {
        return Err("only http:// is forwarded; other protocols need CONNECT or SOCKS5");
    }
    if rest.contains('#') {
        return Err("the URL of the request has a fragment");
    }
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    rest.split_at_checked(end).ok_or(absolute)
}

/// Checks that there is one Host field, and that it names the host of the URL.
fn check_host(fields: &[httparse::Header<'_>], target: &Target, version: u8) -> Result<(), Reason> {
    let mut hosts = named(fields, "host");
    match (hosts.next(), hosts.next()) {
        (None, None) if version == 0 => Ok(()),
        (Some(value), None) => {
            let stated = std::str::from_utf8(value)
                .ok()
                .and_then(|text| Target::parse(text.trim(), Some(80)));
            match stated {
                Some(stated) if stated == *target => Ok(()),
                _ => Err("the field Host is not the host of the URL"),
            }
        }
        _ => Err("the request needs one field Host"),
    }
}

/// The field that states the length of the body, and the body.
fn body(fields: &[httparse::Header<'_>]) -> Result<(String, Body), Reason> {
    let mut lengths = named(fields, "content-length");
    let mut codings = named(fields, "transfer-encoding");
    match (lengths.next(), lengths.next(), codings.next(), codings.next()) {
        (None, None, None, None) => Ok((String::new(), Body::NONE)),
        (Some(value), None, None, None) => {
            let text = std::str::from_utf8(value).ok();
            let digits = text
                .filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()));
            let length: u64 = digits
                .and_then(|text| text.parse().ok())
                .ok_or("Content-Length is not a number")?;
            Ok((format!("Content-Length: {length}\r\n"), Body::Length(length)))
        }
        (None, None, Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => {
            Ok(("Transfer-Encoding: chunked\r\n".to_owned(), Body::CHUNKED))
        }
        (None, None, ..) => Err("the only Transfer-Encoding that is forwarded is chunked"),
        _ => Err("the request states its length twice"),
    }
}

/// The values of all fields with this name, which is in lower case.
fn named<'a>(fields: &'a [httparse::Header<'a>], name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    fields
        .iter()
        .filter(move |field| field.name.eq_ignore_ascii_case(name))
        .map(|field| field.value)
}

/// The fields that are forwarded unchanged.
fn forwarded_fields<'a>(
    fields: &'a [httparse::Header<'a>],
) -> impl Iterator<Item = &'a httparse::Header<'a>> {
    const OWN: &[&str] = &["host", "content-length", "transfer-encoding", "connection"];
    const FOR_THE_PROXY: &[&str] = &[
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
        "te",
        "trailer",
        "upgrade",
        "http2-settings",
    ];
    let nominated: Vec<String> = named(fields, "connection")
        .flat_map(|value| value.split(|byte| *byte == b','))
        .map(|word| word.trim_ascii().escape_ascii().to_string())
        .collect();
    fields.iter().filter(move |field| {
        let is = |name: &&str| field.name.eq_ignore_ascii_case(name);
        let is_nominated = nominated.iter().any(|name| field.name.eq_ignore_ascii_case(name));
        !(OWN.iter().chain(FOR_THE_PROXY).any(is) || is_nominated)
    })
}

/// A response of the proxy itself, with a reason in plain text.
pub(super) fn answer(status: &str, reason: &str) -> Vec<u8> {
    let text = format!("jailfs: {reason}\n");
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\nProxy-Connection: close\r\n\r\n{text}",
        text.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forwarded(text: &str) -> (String, String, Body) {
        match parse(text.as_bytes()) {
            Ok(Request::Forward(target, head, body)) => {
                (target.to_string(), String::from_utf8(head).unwrap(), body)
            }
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn a_plain_request_is_written_anew() {
        let (target, head, body) = forwarded(
            "GET http://Example.com/a?b=c HTTP/1.1\r\nHost: example.com\r\nAccept: */*\r\n\
             Proxy-Connection: keep-alive\r\n\
             Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nUpgrade: h2c\r\n\
             Proxy-Authorization: Basic eA==\r\n\r\n",
        );
        assert_eq!((target.as_str(), body), ("example.com:80", Body::NONE));
        assert_eq!(
            head,
            "GET /a?b=c HTTP/1.1\r\nHost: Example.com\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        );
        let (target, head, body) =
            forwarded("POST http://[::1]:81?q HTTP/1.0\nContent-Length: 5\nCookie: a=b\n\n");
        assert_eq!((target.as_str(), body), ("[::1]:81", Body::Length(5)));
        assert_eq!(
            head,
            "POST /?q HTTP/1.0\r\nHost: [::1]:81\r\nCookie: a=b\r\nContent-Length: 5\r\n\
             Connection: close\r\n\r\n"
        );
        let (_, head, body) = forwarded(
            "PUT http://a HTTP/1.1\r\nHost: a:80\r\nTransfer-Encoding: Chunked\r\nTE: trailers\r\n\
             \r\n",
        );
        assert!(
            body == Body::CHUNKED
                && head.starts_with("PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n")
        );
    }

    #[test]
    fn a_connection_cannot_be_nominated_out_of_its_length() {
        let (_, head, body) = forwarded(
            "POST http://a/ HTTP/1.1\r\nHost: a\r\nConnection: content-length, host\r\n\
             Content-Length: 3\r\n\r\n",
        );
        assert_eq!(body, Body::Length(3));
        assert!(head.contains("Host: a\r\n") && head.contains("Content-Length: 3\r\n"), "{head}");
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_refused() {
        let get = |target: &str, fields: &str| format!("GET {target} HTTP/1.1\r\n{fields}\r\n");
        let post = |fields: &str| get("http://a/", &format!("Host: a\r\n{fields}"));
        for text in [
            get("/", "Host: a\r\n"),
            get("a/", "Host: a\r\n"),
            get("//a/", "Host: a\r\n"),
            get("*", "Host: a\r\n"),
            get("https://a/", "Host: a\r\n"),
            get("ftp://a/", "Host: a\r\n"),
            get("http://a/", ""),
            get("http://a/", "Host: b\r\n"),
            get("http://a/", "Host: a\r\nHost: b\r\n"),
            get("http://a/", "Host: a\r\nHost: a\r\n"),
            get("http://a/", "Host: a:81\r\n"),
            get("http://a/", "Host : b\r\nHost: a\r\n"),
            get("http://a/", "Host: a\r\n folded\r\n"),
            get("http://a/", "Host: a, b\r\n"),
            get("http://user@a/", "Host: a\r\n"),
            get("http://a:80@b/", "Host: b\r\n"),
            get("http://a#@b/", "Host: a\r\n"),
            get("http://a\\@b/", "Host: a\r\n"),
            get("http:///a", "Host: a\r\n"),
            get("http://a%2eb/", "Host: a.b\r\n"),
            post("Content-Length: 1\r\nContent-Length: 1\r\n"),
            post("Content-Length: 1, 1\r\n"),
            post("Content-Length: +1\r\n"),
            post("Content-Length: \r\n"),
            post("Content-Length: 99999999999999999999\r\n"),
            post("Content-Length: 1\r\nTransfer-Encoding: chunked\r\n"),
            post("Transfer-Encoding: gzip, chunked\r\n"),
            post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
            post("Transfer-Encoding: xchunked\r\n"),
            get("http://a/", &format!("Host: a\r\n{}", "A: b\r\n".repeat(MOST))),
            "GET http://a/ HTTP/2\r\n\r\n".to_owned(),
            "GET http://a/ b HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(),
            "CONNECT http://a/ HTTP/1.1\r\n\r\n".to_owned(),
            "CONNECT a HTTP/1.1\r\n\r\n".to_owned(),
            "CONNECT user@a:443 HTTP/1.1\r\n\r\n".to_owned(),
            "CONNECT a:443@b:443 HTTP/1.1\r\n\r\n".to_owned(),
            "connect a:443 HTTP/1.1\r\n\r\n".to_owned(),
            "\r\n\r\n".to_owned(),
        ] {
            assert!(parse(text.as_bytes()).is_err(), "{text:?}: {:?}", parse(text.as_bytes()));
        }
        let connect = parse(b"CONNECT a:443 HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
        assert_eq!(connect, Request::Connect(Target::parse("a:443", None).unwrap()));
    }

    #[test]
    fn the_end_of_a_head_is_found_in_pieces() {
        for head in [
            "GET / HTTP/1.1\r\nA: b\r\n\r\n",
            "GET / HTTP/1.1\nA: b\n\n",
            "GET / HTTP/1.1\r\nA: b\n\r\n",
        ] {
            let text = format!("{head}rest\r\n\r\n");
            let mut found = None;
            for end in 1..=text.len() {
                found = end_of_head(&text.as_bytes()[..end], end - 1);
                if found.is_some() {
                    break;
                }
            }
            assert_eq!(found, Some(head.len()), "{head:?}");
            assert_eq!(end_of_head(text.as_bytes(), 0), Some(head.len()));
        }
    }
}
