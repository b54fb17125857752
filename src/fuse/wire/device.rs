//! The descriptor of a session.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;

/// `/dev/fuse`, bound to one mount.
#[derive(Debug)]
pub(in crate::fuse) struct Device(OwnedFd);

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Device {
    pub(in crate::fuse) fn new(descriptor: OwnedFd) -> Device {
        Device(descriptor)
    }

    /// Waits for the next request. Returns its length; `None` when the session has ended.
    ///
    /// # Errors
    /// As read(2).
    pub(super) fn read(&self, buffer: &mut [u8]) -> nix::Result<Option<usize>> {
        loop {
            match nix::unistd::read(&self.0, buffer) {
                // The end of a stream: tests speak the protocol over a socket.
                Ok(0) | Err(Errno::ENODEV) => return Ok(None),
                // The process was killed before its request was taken.
                Err(Errno::ENOENT | Errno::EINTR | Errno::EAGAIN) => {}
                read => return read.map(Some),
            }
        }
    }

    /// Writes a message in one call.
    ///
    /// # Errors
    /// ENOENT for a reply if no process waits for it any more.
    pub(in crate::fuse) fn write(&self, parts: &[IoSlice<'_>]) -> nix::Result<()> {
        nix::sys::uio::writev(&self.0, parts).map(drop)
    }
}
