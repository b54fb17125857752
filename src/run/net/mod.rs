//! The network of a command: the host's, none, or a list of hosts behind a proxy.
//!
//! Always true:
//! * With [`Net::None`] and [`Net::Allow`] the command is in a network namespace of its own, with a
//!   loopback and no route. No interface leads out of it, and the command has no capability to make
//!   one.
//! * With [`Net::Allow`] the process inside opens one listening socket on that loopback before the
//!   command runs, and sends it to the process outside. The process outside accepts on it and
//!   connects in the host's network, so it alone decides which hosts are reached.
//! * The list stays in the process outside. A name that is not listed is not resolved.
//!
//! A socket belongs to the network namespace in which it was made, also when another process
//! accepts on it. So no relay runs inside, where the command could attack it.
//!
//! Files: `allow` is the list, `address` recognises private addresses, `http` and `socks` read
//! requests, `body` bounds the body of a request, `outward` resolves and connects, `stream` waits,
//! `relay` copies, `proxy` accepts and counts.

mod address;
mod allow;
mod body;
mod http;
mod outward;
mod proxy;
mod relay;
mod socks;
mod stream;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

pub use allow::AllowList;
pub(super) use proxy::Proxy;
pub use proxy::Report;

use crate::error::{Attempt, Result};

/// The port of the proxy on the loopback of the command. The kernel does not pick it for other
/// programs (ip_local_port_range ends at 60999).
const PORT: u16 = 61080;

/// Which network a command has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Net {
    /// The host's.
    #[default]
    Host,
    /// A loopback.
    None,
    /// A loopback, and a proxy that admits these hosts. The list is not sent to the process inside.
    Allow(#[serde(skip)] AllowList),
}

impl Net {
    /// Reads `host`, `none` or `allow:LIST`.
    ///
    /// # Errors
    /// A message for people: what is wrong with the text.
    pub fn parse(text: &str) -> std::result::Result<Net, String> {
        match text.split_once(':') {
            None if text == "host" => Ok(Net::Host),
            None if text == "none" => Ok(Net::None),
            Some(("allow", list)) => Ok(Net::Allow(AllowList::parse(list)?)),
            _ => Err("the value is host, none or allow:HOST[:PORT],...".to_owned()),
        }
    }

    /// Whether the command is in a network namespace of its own.
    pub fn is_own(&self) -> bool {
        *self != Net::Host
    }

    /// The variables by which programs inside find the proxy. They do not ask it for the names of
    /// their own loopback, unless the list has these names: then the host's loopback is meant.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let Net::Allow(list) = self else { return Vec::new() };
        let proxy = format!("http://{}:{PORT}", Ipv4Addr::LOCALHOST);
        let own = ["localhost", "127.0.0.1", "::1"].into_iter().filter(|name| !list.names(name));
        let own = own.collect::<Vec<_>>().join(",");
        let mut variables: Vec<_> = PROXY.iter().map(|name| (*name, proxy.clone())).collect();
        variables.extend(NO_PROXY.iter().map(|name| (*name, own.clone())));
        // Without it fetch() of Node.js looks at no proxy (Node.js 22.21 and 24).
        variables.push(("NODE_USE_ENV_PROXY", "1".to_owned()));
        variables
    }

    /// Whether a variable of the caller is removed: one that names a proxy which the command cannot
    /// reach.
    pub fn drops_variable(&self, name: &str) -> bool {
        let mut known = [PROXY, NO_PROXY, OTHERS].into_iter().flatten();
        matches!(self, Net::Allow(_)) && known.any(|known| name.eq_ignore_ascii_case(known))
    }

    /// The text that tells the command about its network.
    pub fn about(&self) -> String {
        match self {
            Net::Host => "The network is the host's.\n".to_owned(),
            Net::None => "There is no network but a loopback (--net none).\n".to_owned(),
            Net::Allow(list) => format!(
                "There is no network but a loopback, and a proxy for HTTP, CONNECT and SOCKS5 at \
                 {}:{PORT}\n\
                 (see HTTP_PROXY), which resolves names itself and admits these hosts only:\n  \
                 {list}\n\
                 The caller of 'jailfs run' can admit others with --net allow:HOST[:PORT],...\n",
                Ipv4Addr::LOCALHOST
            ),
        }
    }
}

const PROXY: &[&str] =
    &["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"];
const NO_PROXY: &[&str] = &["NO_PROXY", "no_proxy"];
/// Variables of single programs that name a proxy, and win over the others there.
const OTHERS: &[&str] = &[
    "npm_config_proxy",
    "npm_config_https_proxy",
    "npm_config_noproxy",
    "cargo_http_proxy",
    "pip_proxy",
    "ftp_proxy",
    "rsync_proxy",
];

/// Opens the socket of the proxy, in the network namespace of the command.
///
/// # Errors
/// Those of bind(2); the loopback must be up.
pub(super) fn listen() -> Result<OwnedFd> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, PORT));
    Ok(listener.attempt(|| format!("open port {PORT} for the proxy of the command"))?.into())
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn a_network_is_one_of_three() {
        assert_eq!(Net::parse("host"), Ok(Net::Host));
        assert_eq!(Net::parse("none"), Ok(Net::None));
        assert!(matches!(Net::parse("allow:example.com"), Ok(Net::Allow(_))));
        for wrong in ["", "allow", "allow:", "Host", "none:", "host:x", "deny:example.com"] {
            assert!(Net::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn programs_ask_the_proxy_for_the_hosts_loopback_only_if_it_is_listed() {
        let value = |list: &str, name: &str| {
            let variables = Net::parse(list).unwrap().variables();
            variables.into_iter().find(|(known, _)| *known == name).unwrap().1
        };
        for name in ["NO_PROXY", "no_proxy"] {
            assert_eq!(value("allow:example.com", name), "localhost,127.0.0.1,::1");
            assert_eq!(value("allow:localhost:1,[::1]:2", name), "127.0.0.1");
        }
        for name in PROXY {
            assert_eq!(value("allow:example.com", name), "http://127.0.0.1:61080");
        }
        assert!(Net::Host.variables().is_empty() && Net::None.variables().is_empty());
    }

    #[test]
    fn proxies_of_the_caller_are_unknown_inside() {
        let allow = Net::parse("allow:example.com").unwrap();
        for name in
            ["HTTPS_PROXY", "no_proxy", "npm_config_https_proxy", "CARGO_HTTP_PROXY", "ftp_proxy"]
        {
            assert!(allow.drops_variable(name) && !Net::Host.drops_variable(name), "{name}");
        }
        assert!(!allow.drops_variable("PROXY_COMMAND"));
    }

    #[test]
    fn the_list_stays_outside() {
        let allow = Net::parse("allow:example.com").unwrap();
        let bytes = crate::store::io::codec::encode(&allow).unwrap();
        assert!(bytes.len() < 8);
        assert_eq!(
            crate::store::io::codec::decode::<Net>(&bytes).unwrap(),
            Net::Allow(AllowList::default())
        );
    }
}
