//! Parses references: `HOST[:PORT]/NAME[:TAG|@DIGEST]`.
//!
//! * The host is always named. Docker would take `tool/app` from docker.io, and podman asks its
//!   configuration, so a reference without a host means different things to the two. It is refused.
//! * The first component is a host if it has a dot or a colon, or is `localhost`, as in Docker.
//! * `docker.io/NAME` means `docker.io/library/NAME`, and its API is at `registry-1.docker.io`.
//! * A reference has a tag or a digest, as in podman; Docker would ignore the tag beside a digest.

use std::fmt;

use super::digest::Digest;
use super::fault::shown;
use crate::error::{Error, Kind, Result};

/// The most bytes of a name with its host, as in Docker.
const LONGEST_NAME: usize = 255;
/// The most bytes of a tag (OCI distribution specification).
const LONGEST_TAG: usize = 128;

/// The version of an artifact in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// A name that can move.
    Tag(String),
    /// A fixed content.
    Digest(Digest),
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Version::Tag(tag) => f.write_str(tag),
            Version::Digest(digest) => write!(f, "{digest}"),
        }
    }
}

/// A reference to an artifact in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The host in lower case, with its port if one is named.
    pub registry: String,
    /// The repository in the registry.
    pub name: String,
    /// The tag or digest, if one is named.
    pub version: Option<Version>,
}

impl Reference {
    /// Parses a reference.
    ///
    /// # Errors
    /// The text is no reference, or names no host.
    pub fn parse(text: &str) -> Result<Reference> {
        parse(text).map_err(|(reason, hint)| {
            let error = Error::new(Kind::Usage, format!("read '{}'", shown(text)), reason);
            let default = || "a reference is HOST[:PORT]/NAME[:TAG] or HOST[:PORT]/NAME@DIGEST";
            error.hint(hint.unwrap_or_else(|| default().to_owned()))
        })
    }

    /// The version that is meant: the named one, or the tag `latest`.
    pub fn version(&self) -> Version {
        self.version.clone().unwrap_or_else(|| Version::Tag("latest".to_owned()))
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.name)?;
        match &self.version {
            None => Ok(()),
            Some(Version::Tag(tag)) => write!(f, ":{tag}"),
            Some(Version::Digest(digest)) => write!(f, "@{digest}"),
        }
    }
}

/// Why a text is no reference, and a hint.
type Bad = (&'static str, Option<String>);

fn parse(text: &str) -> std::result::Result<Reference, Bad> {
    if text.contains("://") {
        return Err(("a reference has no scheme such as https://", None));
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(Digest::parse(digest).map_err(|bad| (bad, None))?)),
        None => (text, None),
    };
    let (host, path) = rest.split_once('/').unwrap_or(("", rest));
    let is_host = host.contains(['.', ':']) || host.eq_ignore_ascii_case("localhost");
    if !is_host {
        let library = if rest.contains('/') { "" } else { "library/" };
        let hint = format!("for Docker Hub, write docker.io/{library}{}", shown(text));
        return Err(("it names no registry", Some(hint)));
    }
    let registry = check_host(host).map_err(|bad| (bad, None))?;
    let (path, tag) = match path.rsplit_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (path, None),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        let rule = "a tag has 1 to 128 letters, digits, '_', '.' and '-', and begins with neither \
                    '.' nor '-'";
        return Err((rule, None));
    }
    let is_official = registry == "docker.io" && !path.contains('/');
    let name = if is_official { format!("library/{path}") } else { path.to_owned() };
    if !is_name(&name) {
        let rule = "a repository consists of lower-case letters and digits, joined by '.', '_', \
                    '__', '-' or '/'";
        return Err((rule, None));
    }
    if registry.len() + 1 + name.len() > LONGEST_NAME {
        return Err(("the name is longer than 255 bytes", None));
    }
    let version = match (tag, digest) {
        (Some(_), Some(_)) => return Err(("it has both a tag and a digest", None)),
        (Some(tag), None) => Some(Version::Tag(tag.to_owned())),
        (None, Some(digest)) => Some(Version::Digest(digest)),
        (None, None) => None,
    };
    Ok(Reference { registry, name, version })
}

/// The host in lower case, if it is a name or an address, with an optional port.
fn check_host(text: &str) -> std::result::Result<String, &'static str> {
    let (host, port) = match text.rfind(']') {
        Some(end) => {
            let (host, rest) = text.split_at(end + 1);
            let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let is_address = inner.is_some_and(|inner| inner.parse::<std::net::Ipv6Addr>().is_ok());
            if !is_address || !(rest.is_empty() || rest.starts_with(':')) {
                return Err("the host is no IPv6 address in brackets");
            }
            (host, rest.strip_prefix(':'))
        }
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let is_label = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if !host.starts_with('[') && !host.split('.').all(is_label) {
        return Err("the host is malformed");
    }
    if let Some(port) = port
        && (port.starts_with('+') || port.parse::<u16>().map_or(true, |port| port == 0))
    {
        return Err("the port is no number from 1 to 65535");
    }
    Ok(text.to_ascii_lowercase())
}

/// Whether `text` is a tag: `[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}`.
pub(super) fn is_tag(text: &str) -> bool {
    let is_word = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    text.len() <= LONGEST_TAG
        && text.bytes().next().is_some_and(is_word)
        && text.bytes().all(|c| is_word(c) || c == b'.' || c == b'-')
}

/// Whether `text` is the name of a repository.
pub(super) fn is_name(text: &str) -> bool {
    text.split('/').all(is_component)
}

/// Whether `text` is `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`.
fn is_component(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let mut separators = text.split(is_plain).filter(|separator| !separator.is_empty());
    text.starts_with(is_plain)
        && text.ends_with(is_plain)
        && separators
            .all(|found| matches!(found, "." | "_" | "__") || found.bytes().all(|c| c == b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn references_are_read_as_docker_and_podman_read_them() {
        let table = [
            ("quay.io/a/b", "quay.io", "a/b", None),
            ("Quay.IO:443/a/b:v1.0_x-Y", "quay.io:443", "a/b", Some("v1.0_x-Y")),
            ("localhost/a", "localhost", "a", None),
            ("localhost:5000/a__b/c---d.e:1", "localhost:5000", "a__b/c---d.e", Some("1")),
            ("[::1]:5000/a", "[::1]:5000", "a", None),
            ("127.0.0.1:5000/a:b", "127.0.0.1:5000", "a", Some("b")),
            ("docker.io/alpine:3", "docker.io", "library/alpine", Some("3")),
            ("docker.io/me/alpine", "docker.io", "me/alpine", None),
        ];
        for (text, registry, name, tag) in table {
            let parsed = Reference::parse(text).unwrap();
            let version = tag.map(|tag| Version::Tag(tag.to_owned()));
            let expected =
                Reference { registry: registry.to_owned(), name: name.to_owned(), version };
            assert_eq!(parsed, expected, "{text}");
            assert_eq!(Reference::parse(&parsed.to_string()).unwrap(), expected);
        }
        let fixed = Reference::parse(&format!("quay.io/a@{HEX}")).unwrap();
        assert_eq!(fixed.version(), Version::Digest(Digest::of(b"")));
        let latest = Reference::parse("quay.io/a").unwrap().version();
        assert_eq!(latest, Version::Tag("latest".to_owned()));
    }

    #[test]
    fn a_text_that_is_no_reference_is_refused_with_its_reason() {
        let long = format!("quay.io/{}", "a".repeat(248));
        let tag = format!("quay.io/a:{}", "t".repeat(129));
        let both = format!("quay.io/a:b@{HEX}");
        let table = [
            ("", "names no registry"),
            ("alpine", "names no registry"),
            ("tool/app:1", "names no registry"),
            ("https://quay.io/a", "no scheme"),
            ("quay.io/", "a repository consists"),
            ("quay.io/A", "a repository consists"),
            ("quay.io/a//b", "a repository consists"),
            ("quay.io/../b", "a repository consists"),
            ("quay.io/a___b", "a repository consists"),
            ("quay.io/a_-b", "a repository consists"),
            ("quay.io/a\n", "a repository consists"),
            ("quay.io/a:", "a tag has"),
            ("quay.io/a:-x", "a tag has"),
            ("quay.io/a:x y", "a tag has"),
            ("quay.io/a@sha512:00", "only sha256"),
            ("quay.io/a@", "a digest is"),
            ("quay.io:0/a", "the port"),
            ("quay.io:+1/a", "the port"),
            ("quay.io:65536/a", "the port"),
            ("-quay.io/a", "the host"),
            ("quay..io/a", "the host"),
            ("user@quay.io/a", "a digest is"),
            ("[::x]:5000/a", "IPv6"),
            (&long, "longer than 255"),
            (&tag, "a tag has"),
            (&both, "both a tag and a digest"),
        ];
        for (text, reason) in table {
            let error = Reference::parse(text).unwrap_err();
            assert!(error.reason.contains(reason), "{text}: {error}");
            assert_eq!(error.kind, Kind::Usage);
        }
        let hint = Reference::parse("alpine").unwrap_err().hint.unwrap();
        assert_eq!(hint, "for Docker Hub, write docker.io/library/alpine");
    }

    #[test]
    fn characters_that_act_on_a_terminal_are_escaped_in_the_error() {
        let error = Reference::parse("quay.io/a\u{1b}[2J").unwrap_err();
        assert!(!error.to_string().contains('\u{1b}'), "{error}");
    }
}
