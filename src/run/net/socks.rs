//! SOCKS5 (RFC 1928), restricted to what clients without a password need: CONNECT to a name or an
//! address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::allow::{Host, Target};
use super::stream::{Client, Until};

/// The first byte of every message.
pub(super) const VERSION: u8 = 5;

/// The reply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Connected = 0,
    Failed = 1,
    Refused = 2,
    HostUnreachable = 4,
    ConnectionRefused = 5,
    NoSuchCommand = 7,
    NoSuchAddressType = 8,
}

impl Answer {
    /// The reply has a dummy address, because clients use it only after BIND.
    pub(super) fn bytes(self) -> [u8; 10] {
        [VERSION, self as u8, 0, 1, 0, 0, 0, 0, 0, 0]
    }
}

/// A request of a client.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request {
    Connect(Target),
    /// CONNECT to a text that is not a host, as the client wrote it, and its port.
    NotAHost(Vec<u8>, u16),
    /// Any other request, and the reply to it.
    Other(Answer),
}

/// Reads the greeting and the request. None if the client offers only methods with a password.
///
/// # Errors
/// Those of [`Client::read_more`].
pub(super) fn read_request(client: &mut Client, until: Until<'_>) -> io::Result<Option<Request>> {
    let [_version, count] = client.take(until)?;
    let methods = client.take_bytes(count.into(), until)?;
    if !methods.contains(&0) {
        client.write(&[VERSION, 0xff], until)?;
        return Ok(None);
    }
    client.write(&[VERSION, 0], until)?;
    let [version, command, _, kind] = client.take(until)?;
    if version != VERSION {
        return Ok(Some(Request::Other(Answer::Failed)));
    }
    let host = match kind {
        1 => Ok(Host::from(IpAddr::from(Ipv4Addr::from(client.take::<4>(until)?)))),
        4 => Ok(Host::from(IpAddr::from(Ipv6Addr::from(client.take::<16>(until)?)))),
        3 => {
            let [len] = client.take(until)?;
            let bytes = client.take_bytes(len.into(), until)?;
            let host = std::str::from_utf8(&bytes).ok().and_then(host);
            host.ok_or(bytes)
        }
        _ => return Ok(Some(Request::Other(Answer::NoSuchAddressType))),
    };
    let port = u16::from_be_bytes(client.take(until)?);
    Ok(Some(match host {
        _ if command != 1 => Request::Other(Answer::NoSuchCommand),
        Ok(host) if port != 0 => Request::Connect(Target { host, port }),
        Ok(host) => Request::NotAHost(host.to_string().into_bytes(), port),
        Err(bytes) => Request::NotAHost(bytes, port),
    }))
}

/// Parses a name or an address. Clients also send addresses as names, IPv6 without brackets.
fn host(text: &str) -> Option<Host> {
    match text.parse::<IpAddr>() {
        Ok(address) => Some(Host::from(address)),
        Err(_) => Host::parse(text),
    }
}
