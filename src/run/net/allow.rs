//! The list of hosts that a command may reach.
//!
//! * A host is a name in lower case without a trailing dot, or an address. A name that some
//!   resolvers read as an address (`127.1`, `0x7f000001`, `2130706433`) is neither, and is refused.
//! * An address is admitted only by an entry with that address, whatever names resolve to it.
//! * An entry without a port means the ports 80 and 443.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::address::is_special;

/// The ports of an entry without a port.
const PORTS: [u16; 2] = [80, 443];
/// The maximum length of a name (RFC 1035).
const LONGEST: usize = 253;
/// The maximum number of entries.
const MOST: usize = 1000;

/// A host, as in the list and in requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Host {
    /// In lower case.
    Name(String),
    /// An IPv4-mapped IPv6 address is kept as the IPv4 address.
    Address(IpAddr),
}

impl Host {
    /// Parses a name or an address, an IPv6 address in brackets. None if it is neither.
    pub(super) fn parse(text: &str) -> Option<Host> {
        if let Some(inner) = text.strip_prefix('[') {
            let address: Ipv6Addr = inner.strip_suffix(']')?.parse().ok()?;
            return Some(Host::from(IpAddr::from(address)));
        }
        match text.parse::<Ipv4Addr>() {
            Ok(address) => Some(Host::Address(address.into())),
            Err(_) => name(text).map(Host::Name),
        }
    }
}

impl From<IpAddr> for Host {
    fn from(address: IpAddr) -> Host {
        Host::Address(address.to_canonical())
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Name(name) => f.write_str(name),
            Host::Address(IpAddr::V4(address)) => address.fmt(f),
            Host::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// The name in lower case, if the text is a valid name.
fn name(text: &str) -> Option<String> {
    let text = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        let fits = (1..=63).contains(&label.len());
        fits && label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    let last = text.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_number = is_digits(&last) || last.strip_prefix("0x").is_some_and(is_hex);
    let is_name = text.len() <= LONGEST && text.split('.').all(is_label) && !is_number;
    is_name.then(|| text.to_ascii_lowercase())
}

/// The host and port that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Target {
    pub(super) host: Host,
    pub(super) port: u16,
}

impl Target {
    /// Parses `HOST:PORT`, or `HOST` if `assumed` has a port. Refuses anything else, such as a
    /// user, a space or a path.
    pub(super) fn parse(text: &str, assumed: Option<u16>) -> Option<Target> {
        let (host, port) = split_port(text);
        let port = match port {
            Some(digits) => parse_port(digits)?,
            None => assumed?,
        };
        Some(Target { host: Host::parse(host)?, port })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The host, with its brackets, and the text after the colon.
fn split_port(text: &str) -> (&str, Option<&str>) {
    match text.rsplit_once(':') {
        // This colon is inside the brackets.
        Some((_, behind)) if behind.ends_with(']') => (text, None),
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    }
}

/// Parses a port from 1 to 65535: only digits, no sign, no space.
fn parse_port(digits: &str) -> Option<u16> {
    let is_plain =
        (1..=5).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|port| is_plain && *port != 0)
}

/// The hosts that an entry matches.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Is(Host),
    /// All names below this one.
    Below(String),
}

impl Pattern {
    fn matches(&self, host: &Host) -> bool {
        match (self, host) {
            (Pattern::Is(listed), host) => listed == host,
            (Pattern::Below(zone), Host::Name(name)) => {
                name.strip_suffix(zone.as_str()).is_some_and(|before| before.ends_with('.'))
            }
            (Pattern::Below(_), Host::Address(_)) => false,
        }
    }
}

/// One host, or all names below one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    pattern: Pattern,
    /// None means [`PORTS`].
    port: Option<u16>,
}

impl Entry {
    fn has_port(&self, port: u16) -> bool {
        self.port.map_or_else(|| PORTS.contains(&port), |own| own == port)
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pattern {
            Pattern::Is(host) => host.fmt(f)?,
            Pattern::Below(name) => write!(f, "*.{name}")?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// The judgement of the list on a request, before a name is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Listed,
    /// The host is listed with other ports.
    OtherPort,
    NotListed,
}

/// The hosts that a command may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    entries: Vec<Entry>,
}

impl AllowList {
    /// Parses entries separated by commas: `HOST`, `*.HOST` or an address, each optionally with
    /// `:PORT`. An IPv6 address with a port is in brackets.
    ///
    /// # Errors
    /// A message for people: the wrong entry, and why it is wrong.
    pub fn parse(text: &str) -> Result<AllowList, String> {
        let entries = text.split(',').map(entry).collect::<Result<Vec<_>, _>>()?;
        if entries.len() > MOST {
            return Err(format!("the list has more than {MOST} hosts"));
        }
        Ok(AllowList { entries })
    }

    /// Judges a request by the host and port in it.
    pub(super) fn judge(&self, target: &Target) -> Verdict {
        let mut entries =
            self.entries.iter().filter(|entry| entry.pattern.matches(&target.host)).peekable();
        match () {
            () if entries.peek().is_none() => Verdict::NotListed,
            () if entries.any(|entry| entry.has_port(target.port)) => Verdict::Listed,
            () => Verdict::OtherPort,
        }
    }

    /// Whether a listed request may connect to an address of its host. A special address must be
    /// listed itself, except that `localhost` may lead to the loopback. `is_own`: the address
    /// belongs to this machine.
    pub(super) fn admits(&self, target: &Target, address: IpAddr, is_own: bool) -> bool {
        let address = Host::from(address);
        if self.judge(&Target { host: address.clone(), port: target.port }) == Verdict::Listed {
            return true;
        }
        match (&target.host, address) {
            (Host::Name(name), Host::Address(address)) => {
                let is_loopback = name == "localhost" && address.is_loopback();
                is_loopback || !(is_special(address) || is_own)
            }
            _ => false,
        }
    }

    /// Whether an entry matches this host with any port.
    pub(super) fn names(&self, host: &str) -> bool {
        let host = host
            .parse()
            .map(|address: IpAddr| Host::from(address))
            .ok()
            .or_else(|| Host::parse(host));
        host.is_some_and(|host| self.entries.iter().any(|entry| entry.pattern.matches(&host)))
    }
}

impl fmt::Display for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries: Vec<String> = self.entries.iter().map(Entry::to_string).collect();
        f.write_str(&entries.join(", "))
    }
}

fn entry(text: &str) -> Result<Entry, String> {
    if let Ok(address) = text.parse::<Ipv6Addr>() {
        return listed(text, Host::from(IpAddr::from(address)), None);
    }
    let (host, port) = split_port(text);
    let port = match port {
        Some(digits) => Some(
            parse_port(digits)
                .ok_or_else(|| format!("'{text}': a port is a number from 1 to 65535"))?,
        ),
        None => None,
    };
    if host == "*" {
        return Err("'*' is every host: that is --net host".to_owned());
    }
    if let Some(zone) = host.strip_prefix("*.") {
        let zone = name(zone).ok_or_else(|| wrong(text))?;
        return Ok(Entry { pattern: Pattern::Below(zone), port });
    }
    listed(text, Host::parse(host).ok_or_else(|| wrong(text))?, port)
}

fn listed(text: &str, host: Host, port: Option<u16>) -> Result<Entry, String> {
    match host {
        Host::Address(address) if address.is_unspecified() => {
            Err(format!("'{text}' is not the address of a host"))
        }
        host => Ok(Entry { pattern: Pattern::Is(host), port }),
    }
}

fn wrong(text: &str) -> String {
    let international =
        if text.is_ascii() { "" } else { "; names in other letters are written as xn--..." };
    format!("'{text}' is not HOST, *.HOST or an address, with or without :PORT{international}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(list: &str, target: &str) -> Verdict {
        let target = Target::parse(target, None).unwrap_or_else(|| panic!("{target} is no target"));
        AllowList::parse(list).unwrap().judge(&target)
    }

    #[test]
    fn an_entry_admits_what_it_names_and_nothing_beside_it() {
        use Verdict::{Listed, NotListed, OtherPort};
        for (list, target, verdict) in [
            ("example.com", "example.com:443", Listed),
            ("example.com", "example.com:80", Listed),
            ("example.com", "example.com:22", OtherPort),
            ("example.com:22", "example.com:443", OtherPort),
            ("example.com:22,example.com", "example.com:22", Listed),
            ("Example.COM.", "eXample.com.:443", Listed),
            ("example.com", "sub.example.com:443", NotListed),
            ("example.com", "example.com.evil.org:443", NotListed),
            ("example.com", "notexample.com:443", NotListed),
            ("*.example.com", "sub.example.com:443", Listed),
            ("*.example.com", "a.b.example.com:443", Listed),
            ("*.example.com", "example.com:443", NotListed),
            ("*.example.com", "notexample.com:443", NotListed),
            ("*.example.com:8443", "a.example.com:443", OtherPort),
            ("192.0.2.1", "192.0.2.1:80", Listed),
            ("192.0.2.1:8080", "192.0.2.1:80", OtherPort),
            ("192.0.2.1", "192.0.2.2:80", NotListed),
            ("192.0.2.1", "[::ffff:192.0.2.1]:80", Listed),
            ("[2001:db8::1]:22", "[2001:db8:0::1]:22", Listed),
            ("2001:db8::1", "[2001:db8::1]:443", Listed),
            ("[2001:db8::1]", "[2001:db8::2]:443", NotListed),
            ("localhost:1", "127.0.0.1:1", NotListed),
            ("127.0.0.1:1", "localhost:1", NotListed),
            ("127.0.0.1:1", "[::1]:1", NotListed),
        ] {
            assert_eq!(judge(list, target), verdict, "{list} and {target}");
        }
    }

    #[test]
    fn odd_forms_are_no_targets() {
        for text in [
            "",
            ":80",
            "example.com",
            "example.com:",
            "example.com:0",
            "example.com:65536",
            "example.com:+80",
            "example.com:080000",
            "example.com:80 ",
            " example.com:80",
            "user@example.com:80",
            "example.com:80@evil.org:80",
            "example.com:80:80",
            "example.com/:80",
            "exa mple.com:80",
            "example..com:80",
            ".example.com:80",
            "example.com..:80",
            "127.1:80",
            "2130706433:80",
            "0x7f000001:80",
            "0177.0.0.1:80",
            "127.0.0.0x1:80",
            "1.2.3.4.5:80",
            "256.1.1.1:80",
            "::1:80",
            "[::1:80",
            "::1]:80",
            "[::1%lo]:80",
            "[127.0.0.1]:80",
            "[]:80",
            "[::1]80",
            "*.example.com:80",
            "ex%61mple.com:80",
            "example.com\0.evil.org:80",
            "exämple.com:80",
            "example.com\\:80",
            "example.com#:80",
            "１27.0.0.1:80",
        ] {
            assert_eq!(Target::parse(text, None), None, "{text}");
        }
        let long = format!("{}.com", "a".repeat(64));
        assert!(Host::parse(&long).is_none() && Host::parse(&"a.".repeat(128)).is_none());
        assert_eq!(Target::parse("example.com", Some(80)).unwrap().to_string(), "example.com:80");
        assert_eq!(Target::parse("[::1]", Some(80)).unwrap().to_string(), "[::1]:80");
    }

    #[test]
    fn a_wrong_list_is_refused_with_its_reason() {
        for (list, says) in [
            ("", "is not HOST"),
            ("example.com,", "is not HOST"),
            ("example.com:0", "from 1 to 65535"),
            ("example.com:https", "from 1 to 65535"),
            ("*", "--net host"),
            ("*:443", "--net host"),
            ("*.*", "is not HOST"),
            ("a.*.com", "is not HOST"),
            ("https://example.com", "from 1 to 65535"),
            ("exämple.com", "xn--"),
            ("127.1", "is not HOST"),
            ("10.0.0.0/8", "is not HOST"),
            ("0.0.0.0", "not the address of a host"),
            ("[::]", "not the address of a host"),
        ] {
            let error = AllowList::parse(list).unwrap_err();
            assert!(error.contains(says), "{list}: {error}");
        }
        let list = "example.com, *.Example.com:8443,[::1]:5,192.0.2.1".replace(' ', "");
        let list = AllowList::parse(&list).unwrap();
        assert_eq!(list.to_string(), "example.com, *.example.com:8443, [::1]:5, 192.0.2.1");
        assert!(AllowList::parse(&vec!["a.org"; MOST + 1].join(",")).is_err());
    }

    /// DNS rebinding: the owner of a listed name chooses its address.
    #[test]
    fn a_listed_name_leads_only_to_the_internet_or_to_listed_addresses() {
        let admits = |list: &str, target: &str, address: &str, is_own| {
            let target = Target::parse(target, None).unwrap();
            AllowList::parse(list).unwrap().admits(&target, address.parse().unwrap(), is_own)
        };
        for special in [
            "127.0.0.1",
            "169.254.169.254",
            "10.1.2.3",
            "::1",
            "::ffff:127.0.0.1",
            "fe80::1",
            "0.0.0.0",
        ] {
            assert!(!admits("evil.org", "evil.org:80", special, false), "{special}");
        }
        assert!(admits("evil.org", "evil.org:80", "8.8.8.8", false));
        assert!(!admits("evil.org", "evil.org:80", "8.8.8.8", true), "the host's own address");
        assert!(admits("evil.org,8.8.8.8", "evil.org:80", "8.8.8.8", true));
        assert!(admits("evil.org:81,127.0.0.1:81", "evil.org:81", "127.0.0.1", true));
        assert!(!admits("evil.org:81,127.0.0.1:82", "evil.org:81", "127.0.0.1", true));
        assert!(!admits("evil.org:81,localhost:81", "evil.org:81", "127.0.0.1", true));
        assert!(admits("localhost:81", "localhost:81", "127.0.0.1", true));
        assert!(admits("localhost:81", "localhost:81", "::1", true));
        assert!(!admits("localhost:81", "localhost:81", "10.0.0.1", false));
        assert!(admits("10.0.0.1", "10.0.0.1:80", "10.0.0.1", true));
    }
}
