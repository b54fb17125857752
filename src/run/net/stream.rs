//! Waits on sockets, up to a deadline and up to the end of the command.
//!
//! No call waits longer than its [`Until`] allows, and each returns as soon as the command has
//! ended.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

/// Bytes per read.
pub(super) const CHUNK: usize = 32 << 10;
/// How many bytes of a client are still read after it has been answered.
const DRAIN: usize = 1 << 20;
/// How long they are read.
const DRAIN_TIME: Duration = Duration::from_secs(1);

/// When to stop waiting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until<'a> {
    /// A pipe whose other end is closed when the command has ended.
    pub(super) stop: BorrowedFd<'a>,
    pub(super) time: Option<Instant>,
}

impl<'a> Until<'a> {
    /// A deadline this long from now.
    pub(super) fn within(stop: &'a OwnedFd, time: Duration) -> Until<'a> {
        Until { stop: stop.as_fd(), time: Instant::now().checked_add(time) }
    }

    /// The earlier of this deadline and one this long from now.
    pub(super) fn at_most(self, time: Duration) -> Until<'a> {
        let sooner = Instant::now().checked_add(time).into_iter().chain(self.time).min();
        Until { time: sooner, ..self }
    }

    /// Waits until a descriptor has one of its wanted events.
    ///
    /// # Errors
    /// `TimedOut` at the deadline, `ConnectionAborted` when the command has ended, or an error of
    /// poll(2).
    pub(super) fn wait(
        &self,
        wanted: &[(BorrowedFd<'_>, PollFlags)],
    ) -> io::Result<Vec<PollFlags>> {
        loop {
            let left = self.time.map(|time| time.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let millis = left.map(|left| left.as_millis().saturating_add(1));
            let timeout = millis.map_or(PollTimeout::NONE, |millis| {
                PollTimeout::from(u16::try_from(millis).unwrap_or(u16::MAX))
            });
            let mut polled: Vec<PollFd<'_>> =
                wanted.iter().map(|(fd, events)| PollFd::new(*fd, *events)).collect();
            polled.push(PollFd::new(self.stop, PollFlags::POLLIN));
            match poll(&mut polled, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<PollFlags> =
                polled.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty())).collect();
            let Some((stop, ready)) = ready.split_last() else { continue };
            if !stop.is_empty() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if ready.iter().any(|events| !events.is_empty()) {
                return Ok(ready.to_vec());
            }
        }
    }
}

/// Whether a call on a non-blocking socket is to be repeated when the socket is ready.
pub(super) fn is_not_ready(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// A client, and the bytes of it that were read and not yet used.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) read: Vec<u8>,
}

impl Client {
    /// # Errors
    /// Those of fcntl(2).
    pub(super) fn new(stream: TcpStream) -> io::Result<Client> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Client { stream, read: Vec::new() })
    }

    /// Reads the available bytes, at least one.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end, or an error of [`Until::wait`] or read(2).
    pub(super) fn read_more(&mut self, until: Until<'_>) -> io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => {
                    self.read.extend(bytes.iter().take(len));
                    return Ok(());
                }
                Err(error) if is_not_ready(&error) => {
                    until.wait(&[(self.stream.as_fd(), PollFlags::POLLIN)])?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes the next `N` bytes.
    ///
    /// # Errors
    /// As [`Client::read_more`].
    pub(super) fn take<const N: usize>(&mut self, until: Until<'_>) -> io::Result<[u8; N]> {
        let taken = self.take_bytes(N, until)?;
        taken.try_into().map_err(|_| io::ErrorKind::UnexpectedEof.into())
    }

    /// Takes the next `len` bytes.
    ///
    /// # Errors
    /// As [`Client::read_more`].
    pub(super) fn take_bytes(&mut self, len: usize, until: Until<'_>) -> io::Result<Vec<u8>> {
        while self.read.len() < len {
            self.read_more(until)?;
        }
        Ok(self.read.drain(..len).collect())
    }

    /// Writes all bytes.
    ///
    /// # Errors
    /// Those of [`Until::wait`] and of write(2).
    pub(super) fn write(&mut self, bytes: &[u8], until: Until<'_>) -> io::Result<()> {
        write(&mut self.stream, bytes, until)
    }

    /// Resets the connection, so that the client does not take a truncated answer for a complete
    /// one.
    pub(super) fn reset(self) {
        let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
        if let Err(error) = setsockopt(&self.stream, sockopt::Linger, &at_once) {
            log::debug!("reset a connection of the command: {error}");
        }
    }

    /// Closes the connection so that the answer arrives: the kernel resets a connection that is
    /// closed with unread bytes.
    pub(super) fn close(mut self, stop: BorrowedFd<'_>) {
        let until = Until { stop, time: None }.at_most(DRAIN_TIME);
        let mut seen = 0;
        if self.stream.shutdown(Shutdown::Write).is_err() {
            return;
        }
        while seen < DRAIN && self.read_more(until).is_ok() {
            seen += self.read.len();
            self.read.clear();
        }
    }
}

/// Writes all bytes.
///
/// # Errors
/// Those of [`Until::wait`] and of write(2).
pub(super) fn write(stream: &mut TcpStream, mut bytes: &[u8], until: Until<'_>) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => bytes = bytes.get(len..).unwrap_or_default(),
            Err(error) if is_not_ready(&error) => {
                until.wait(&[(stream.as_fd(), PollFlags::POLLOUT)])?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
