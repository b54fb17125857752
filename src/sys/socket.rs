//! Sends and receives messages with descriptors over Unix sockets.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};

/// The most descriptors in one message.
const MOST_DESCRIPTORS: usize = 2;

/// Receives a message with descriptors (SCM_RIGHTS, unix(7)), which close on exec. Returns its
/// length in bytes, 0 if the peer closed the socket.
///
/// # Errors
/// Those of recvmsg(2).
pub fn receive<Fd: AsFd>(socket: Fd, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut parts = [IoSliceMut::new(bytes)];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; MOST_DESCRIPTORS]);
    let message = loop {
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        match recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    let mut received = Vec::new();
    for control in message.cmsgs()? {
        let ControlMessageOwned::ScmRights(descriptors) = control else {
            continue;
        };
        for descriptor in descriptors {
            // SAFETY: unix(7): the descriptors in an SCM_RIGHTS message are new ones of this
            // process that no other code owns.
            received.push(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }
    Ok((message.bytes, received))
}

/// Sends a message with descriptors (SCM_RIGHTS, unix(7)) over an inherited socket, named by
/// number.
///
/// # Errors
/// Those of sendmsg(2).
pub fn send(socket: RawFd, bytes: &[u8], descriptors: &[OwnedFd]) -> Result<(), Errno> {
    let numbers: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if numbers.is_empty() { &[][..] } else { &rights[..] };
    sendmsg::<()>(socket, &[IoSlice::new(bytes)], rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// A pair of sockets that preserve message boundaries and close on exec.
///
/// # Errors
/// Those of socketpair(2).
pub fn message_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
}
