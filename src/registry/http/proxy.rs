//! Chooses a proxy by the environment, as curl and Go's programs do.
//!
//! * `HTTPS_PROXY` is for https, `HTTP_PROXY` for http, and `ALL_PROXY` for both. The lower-case
//!   names come first.
//! * `NO_PROXY` lists hosts, domains, addresses and networks that are reached directly. The
//!   loopback is always reached directly.

use std::net::IpAddr;

use super::super::environment::Environment;
use super::url::Origin;

/// The proxies of the environment.
#[derive(Clone, Default)]
pub(in crate::registry) struct Proxies {
    tls: Option<String>,
    plain: Option<String>,
    exceptions: Vec<String>,
}

impl Proxies {
    /// Reads the variables of the environment.
    pub(in crate::registry) fn of(environment: &Environment) -> Proxies {
        let find = |names: &[&str]| {
            names.iter().find_map(|name| environment.text(name)).map(str::to_owned)
        };
        let exceptions = find(&["no_proxy", "NO_PROXY"]).unwrap_or_default();
        let exceptions = exceptions.split(',').map(|text| text.trim().to_ascii_lowercase());
        Proxies {
            tls: find(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]),
            plain: find(&["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"]),
            exceptions: exceptions.filter(|text| !text.is_empty()).collect(),
        }
    }

    /// The URL of the proxy for an origin.
    pub(in crate::registry) fn choose(&self, origin: &Origin) -> Option<&str> {
        let proxy = if origin.is_tls { &self.tls } else { &self.plain };
        let is_direct =
            origin.is_loopback() || self.exceptions.iter().any(|rule| matches(rule, origin));
        if is_direct { None } else { proxy.as_deref() }
    }
}

/// Whether a rule of `NO_PROXY` names the origin.
fn matches(rule: &str, origin: &Origin) -> bool {
    if rule == "*" {
        return true;
    }
    let host = origin.host.trim_start_matches('[').trim_end_matches(']');
    let address = host.parse::<IpAddr>().ok();
    if let Some((network, bits)) = rule.split_once('/') {
        let network = network.parse::<IpAddr>().ok();
        let bits = bits.parse::<u32>().ok();
        return matches!((address, network, bits), (Some(address), Some(network), Some(bits))
            if is_in_network(address, network, bits));
    }
    let bare = rule.trim_start_matches('[').trim_end_matches(']');
    if let Ok(named) = bare.parse::<IpAddr>() {
        return address == Some(named);
    }
    let (name, port) = match rule.rsplit_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (rule, None),
    };
    if port.is_some_and(|port| port != origin.port.to_string()) {
        return false;
    }
    let name = name.strip_prefix('*').unwrap_or(name);
    match name.strip_prefix('.') {
        Some(domain) => is_below(host, domain),
        None => host == name.trim_start_matches('[').trim_end_matches(']') || is_below(host, name),
    }
}

fn is_below(host: &str, domain: &str) -> bool {
    host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.') && !domain.is_empty())
}

fn is_in_network(address: IpAddr, network: IpAddr, bits: u32) -> bool {
    let shifted = |value: u128, width: u32| value.checked_shr(width - bits).unwrap_or(0);
    match (address, network) {
        (IpAddr::V4(one), IpAddr::V4(other)) if bits <= 32 => {
            shifted(u128::from(one.to_bits()), 32) == shifted(u128::from(other.to_bits()), 32)
        }
        (IpAddr::V6(one), IpAddr::V6(other)) if bits <= 128 => {
            shifted(one.to_bits(), 128) == shifted(other.to_bits(), 128)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::url::Url;
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        Proxies::of(&Environment::new(variables))
    }

    fn chosen<'p>(proxies: &'p Proxies, url: &str) -> Option<&'p str> {
        proxies.choose(&Url::parse(url).unwrap().origin)
    }

    #[test]
    fn each_scheme_has_its_variable() {
        let both = proxies(&[("HTTPS_PROXY", "http://s"), ("http_proxy", "http://p")]);
        assert_eq!(chosen(&both, "https://h/"), Some("http://s"));
        assert_eq!(chosen(&both, "http://h/"), Some("http://p"));
        let all = proxies(&[("ALL_PROXY", "socks5://a"), ("HTTPS_PROXY", "")]);
        assert_eq!(chosen(&all, "https://h/"), Some("socks5://a"));
        assert_eq!(chosen(&proxies(&[]), "https://h/"), None);
    }

    #[test]
    fn the_loopback_is_always_direct() {
        let all = proxies(&[("ALL_PROXY", "http://a")]);
        for url in ["https://localhost:5000/", "http://127.0.0.1/", "https://[::1]/"] {
            assert_eq!(chosen(&all, url), None, "{url}");
        }
    }

    #[test]
    fn no_proxy_names_hosts_domains_addresses_and_networks() {
        let table = [
            ("example.com", "https://example.com/", true),
            ("example.com", "https://a.example.com/", true),
            ("example.com", "https://badexample.com/", false),
            (".example.com", "https://example.com/", false),
            (".example.com", "https://a.example.com/", true),
            ("*.example.com", "https://a.b.example.com/", true),
            ("other, EXAMPLE.com:5000", "https://example.com:5000/", true),
            ("example.com:5000", "https://example.com/", false),
            ("10.0.0.0/8", "https://10.1.2.3/", true),
            ("10.0.0.0/8", "https://11.1.2.3/", false),
            ("0.0.0.0/0", "https://11.1.2.3/", true),
            ("10.0.0.0/99", "https://10.0.0.0/", false),
            ("fd00::/8", "https://[fd01::1]/", true),
            ("10.1.2.3", "https://10.1.2.3/", true),
            ("*", "https://h/", true),
            ("", "https://h/", false),
            (".", "https://h/", false),
        ];
        for (rule, url, is_direct) in table {
            let found = proxies(&[("ALL_PROXY", "http://a"), ("NO_PROXY", rule)]);
            assert_eq!(chosen(&found, url).is_none(), is_direct, "{rule}: {url}");
        }
    }
}
