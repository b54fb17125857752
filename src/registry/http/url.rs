//! URLs of a registry: parsing, joining, and which party they belong to.
//!
//! * Only `http` and `https` exist. A URL with a user, a password or a fragment is refused.
//! * Two URLs belong to the same party if scheme, host and port are equal.

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;

/// The longest URL, in bytes. The state of an upload is part of its URL.
const LONGEST: usize = 16 << 10;

/// Why a text is no usable URL.
pub(in crate::registry) type Bad = &'static str;

/// A scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::registry) struct Origin {
    /// Whether the scheme is `https`.
    pub(in crate::registry) is_tls: bool,
    /// The host in lower case; an IPv6 address is in brackets.
    pub(in crate::registry) host: String,
    /// The port.
    pub(in crate::registry) port: u16,
}

impl Origin {
    /// Whether the host is this machine.
    pub(in crate::registry) fn is_loopback(&self) -> bool {
        is_loopback(&self.host)
    }

    /// `HOST:PORT`, or `HOST` if the port is the usual one of `https`.
    pub(in crate::registry) fn authority(&self) -> String {
        if self.port == 443 { self.host.clone() } else { format!("{}:{}", self.host, self.port) }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, usual) = if self.is_tls { ("https", 443) } else { ("http", 80) };
        write!(f, "{scheme}://{}", self.host)?;
        if self.port == usual { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

/// Whether a host is the machine itself: `localhost`, or an address of the loopback.
pub(in crate::registry) fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A URL. Displayed without its query, which can hold secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::registry) struct Url {
    /// The party.
    pub(in crate::registry) origin: Origin,
    /// The path and the query.
    path: String,
}

impl Url {
    /// A URL at `origin`. `path` begins with a slash and has no unusual character.
    pub(in crate::registry) fn at(origin: &Origin, path: String) -> Url {
        Url { origin: origin.clone(), path }
    }

    /// Parses an absolute URL.
    ///
    /// # Errors
    /// It is malformed, or neither `http` nor `https`.
    pub(in crate::registry) fn parse(text: &str) -> Result<Url, Bad> {
        if text.len() > LONGEST {
            return Err("the URL is longer than 16 KiB");
        }
        if text.contains('#') {
            return Err("the URL has a fragment");
        }
        let is_tls = has_scheme(text, "https://");
        if !is_tls && !has_scheme(text, "http://") {
            return Err("the URL is neither http nor https");
        }
        let uri: Uri = text.parse().map_err(|_| "the URL is malformed")?;
        let authority = uri.authority().ok_or("the URL has no host")?;
        if authority.as_str().contains('@') {
            return Err("the URL has a user");
        }
        let host = authority.host().to_ascii_lowercase();
        if host.is_empty() {
            return Err("the URL has no host");
        }
        let port = match authority.port() {
            Some(port) => port.as_u16(),
            None if authority.as_str().len() > host.len() => return Err("the port is malformed"),
            None if is_tls => 443,
            None => 80,
        };
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Url { origin: Origin { is_tls, host, port }, path: path.to_owned() })
    }

    /// The URL that a `Location` or `Link` of an answer from this URL means.
    ///
    /// # Errors
    /// It is malformed, or neither `http` nor `https`.
    pub(in crate::registry) fn join(&self, location: &str) -> Result<Url, Bad> {
        let location = location.trim();
        let scheme = location.split(['/', '?', '#']).next().unwrap_or("");
        if scheme.contains(':') {
            return Url::parse(location);
        }
        let base = self.path.split('?').next().unwrap_or("/");
        if location.starts_with("//") {
            let scheme = if self.origin.is_tls { "https:" } else { "http:" };
            Url::parse(&format!("{scheme}{location}"))
        } else if location.starts_with('/') {
            Url::parse(&format!("{}{location}", self.origin))
        } else if location.starts_with('?') {
            Url::parse(&format!("{}{base}{location}", self.origin))
        } else {
            let folder = base.rsplit_once('/').map_or("", |(folder, _)| folder);
            Url::parse(&format!("{}{folder}/{location}", self.origin))
        }
    }

    /// The same URL with another parameter. The value is encoded.
    pub(in crate::registry) fn with(mut self, name: &str, value: &str) -> Url {
        self.path.push(if self.path.contains('?') { '&' } else { '?' });
        self.path.push_str(name);
        self.path.push('=');
        self.path.push_str(&encoded(value));
        self
    }

    /// The whole URL, for a request.
    pub(in crate::registry) fn whole(&self) -> String {
        format!("{}{}", self.origin, self.path)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.origin, self.path.split('?').next().unwrap_or(""))
    }
}

fn has_scheme(text: &str, scheme: &str) -> bool {
    text.get(..scheme.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(scheme))
}

/// Encodes a value for a query or a form.
pub(in crate::registry) fn encoded(value: &str) -> String {
    let mut text = String::new();
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed_and_shown_without_their_query() {
        let url = Url::parse("https://Host.example/v2/a?secret=1").unwrap();
        let origin = Origin { is_tls: true, host: "host.example".into(), port: 443 };
        assert_eq!(url.origin, origin);
        assert_eq!(url.to_string(), "https://host.example/v2/a");
        assert_eq!(url.whole(), "https://host.example/v2/a?secret=1");
        assert_eq!(Url::parse("http://[::1]:5000").unwrap().whole(), "http://[::1]:5000/");
        assert_eq!(Url::parse("http://h").unwrap().origin.port, 80);
    }

    #[test]
    fn other_schemes_users_and_fragments_are_refused() {
        let long = format!("https://h/{}", "a".repeat(LONGEST));
        for bad in [
            "file:///etc/passwd",
            "ftp://h/a",
            "https://",
            "https://user:secret@h/a",
            "https://h/a#b",
            "https://h:99999/a",
            "https://h:/a",
            "https://h/a\r\nX: y",
            "/v2/a",
            "",
            long.as_str(),
        ] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_location_is_joined_as_a_browser_joins_it() {
        let base = Url::parse("https://h:5000/v2/a/uploads/?q=1").unwrap();
        let table = [
            ("/x?y=1", "https://h:5000/x?y=1"),
            ("?y=1", "https://h:5000/v2/a/uploads/?y=1"),
            ("x", "https://h:5000/v2/a/uploads/x"),
            ("//other/x", "https://other/x"),
            ("http://other/x", "http://other/x"),
        ];
        for (location, expected) in table {
            assert_eq!(base.join(location).unwrap().whole(), expected);
        }
        assert!(base.join("file:///etc/passwd").is_err());
        assert!(base.join("javascript:x").is_err());
    }

    #[test]
    fn values_are_encoded() {
        let url = Url::parse("https://h/a").unwrap().with("x", "a b/ä&").with("y", "1");
        assert_eq!(url.whole(), "https://h/a?x=a%20b%2F%C3%A4%26&y=1");
    }

    #[test]
    fn the_loopback_is_known_by_address_and_name() {
        for host in ["localhost", "127.0.0.1", "127.8.8.8", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example", "128.0.0.1", "[::2]", "127.0.0.1.example"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
