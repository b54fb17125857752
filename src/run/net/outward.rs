//! Connects to the target of a request, if the list admits it.
//!
//! A name that is not listed is never resolved. A name is resolved once, each of its addresses is
//! judged, and the connection goes to a judged address.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, connect, socket,
};

use super::allow::{AllowList, Host, Target, Verdict};
use super::stream::Until;

/// The maximum number of addresses of a name that are tried.
const MOST: usize = 8;
/// The time limit for one address.
const PATIENCE: Duration = Duration::from_secs(10);

/// Names and addresses as the process outside sees them. Tests replace it.
pub(super) trait Resolver: Send + Sync {
    /// The addresses of a name.
    ///
    /// # Errors
    /// The name has no address, or no server answers.
    fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>>;

    /// Whether an address belongs to this machine.
    fn is_own(&self, address: IpAddr) -> bool;
}

/// The resolver of the host (getaddrinfo(3)).
#[derive(Debug)]
pub(super) struct HostResolver;

impl Resolver for HostResolver {
    fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        Ok((name, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
    }

    /// Tries to bind a socket: the kernel binds only to addresses of this machine, including those
    /// that belong to a route and not to an interface. If it binds to any address
    /// (`net.ipv4.ip_nonlocal_bind`), only the interfaces decide.
    fn is_own(&self, address: IpAddr) -> bool {
        let foreign = match address {
            IpAddr::V4(_) => IpAddr::from([192, 0, 2, 1]),
            IpAddr::V6(_) => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
        };
        let binds = |address: IpAddr| UdpSocket::bind((address, 0)).is_ok();
        (binds(address) && !binds(foreign)) || has_interface(address)
    }
}

/// Whether an interface has this address (getifaddrs(3)).
fn has_interface(address: IpAddr) -> bool {
    let Ok(interfaces) = getifaddrs() else { return false };
    interfaces.filter_map(|interface| interface.address).any(|own| {
        let v4 = own.as_sockaddr_in().map(|own| IpAddr::from(own.ip()));
        let v6 = own.as_sockaddr_in6().map(|own| IpAddr::from(own.ip()));
        v4.or(v6) == Some(address)
    })
}

/// Why a request gets no connection.
#[derive(Debug)]
pub(super) enum Denied {
    /// The list does not admit it. The text says why, for people.
    Refused(String),
    /// The name has no address.
    Unresolved(io::Error),
    /// No address answers.
    Unreachable(io::Error),
}

/// Connects to `target`.
///
/// # Errors
/// The list refuses the target, or it cannot be resolved or reached.
pub(super) fn open(
    list: &AllowList,
    resolver: &dyn Resolver,
    target: &Target,
    until: Until<'_>,
) -> Result<TcpStream, Denied> {
    match list.judge(target) {
        Verdict::Listed => {}
        Verdict::OtherPort => {
            return Err(Denied::Refused(format!(
                "the list of --net allow has no port {} for it",
                target.port
            )));
        }
        Verdict::NotListed => {
            return Err(Denied::Refused("it is not in the list of --net allow".to_owned()));
        }
    }
    let found = match &target.host {
        Host::Name(name) => resolver.resolve(name).map_err(Denied::Unresolved)?,
        Host::Address(address) => vec![*address],
    };
    // IPv4-mapped addresses become IPv4, so that the judged form is the one that is connected to.
    let found = found.into_iter().map(|address| address.to_canonical());
    let (admitted, others): (Vec<IpAddr>, Vec<IpAddr>) =
        found.partition(|address| list.admits(target, *address, resolver.is_own(*address)));
    if let ([], [other, ..]) = (admitted.as_slice(), others.as_slice()) {
        return Err(Denied::Refused(format!(
            "it leads to {other}, an address of this machine or of a private network \
             that the list of --net allow does not have"
        )));
    }
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in admitted.into_iter().take(MOST) {
        match connect_to(SocketAddr::new(address, target.port), until.at_most(PATIENCE)) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(Denied::Unreachable(failed))
}

/// Connects to an address. Does not block, so that the end of the command cancels it.
fn connect_to(address: SocketAddr, until: Until<'_>) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(family, SockType::Stream, flags, SockProtocol::Tcp)?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS | Errno::EINTR) => {
            until.wait(&[(socket.as_fd(), PollFlags::POLLOUT)])?;
        }
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from(socket);
    match stream.take_error()? {
        Some(error) => Err(error),
        None => {
            stream.set_nodelay(true)?;
            Ok(stream)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_recognised() {
        for own in ["127.0.0.1", "127.1.2.3", "::1"] {
            assert!(HostResolver.is_own(own.parse().unwrap()), "{own}");
        }
        assert!(!HostResolver.is_own("192.0.2.1".parse().unwrap()));
        assert!(
            has_interface("127.0.0.1".parse().unwrap()) && has_interface("::1".parse().unwrap())
        );
        assert!(!has_interface("127.1.2.3".parse().unwrap()));
    }
}
