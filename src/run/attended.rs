//! How a command is attended: alone, with the streams, signals and terminal of its caller, or as
//! one of several that run side by side.
//!
//! Always true for one of several:
//! * It reads nothing, writes into two pipes of its own, and inherits no other descriptor.
//! * It is in a session of its own, so it has no terminal, and a key reaches it only through its
//!   caller.
//! * Its caller ends it through a [`Stopper`], from any thread.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::pipe2;
use parking_lot::Mutex;

use super::streams::Given;
use crate::error::{Attempt, Result};

/// How a command is attended.
pub enum Attended {
    /// It has the standard streams, the signals and the terminal of this process.
    Alone,
    /// It is one of several.
    OneOfSeveral(Apart),
}

/// The connections of a command that is one of several.
pub struct Apart {
    /// Where it writes its output.
    pub output: OwnedFd,
    /// Where it writes its errors.
    pub errors: OwnedFd,
    /// Asks it to end.
    pub stop: Stop,
}

impl Apart {
    /// The descriptors of the command.
    pub(super) fn given(self) -> io::Result<(Vec<Given>, Stop)> {
        let nothing = OpenOptions::new().read(true).open("/dev/null")?;
        Ok((vec![(nothing.into(), 0), (self.output, 1), (self.errors, 2)], self.stop))
    }
}

/// Asks commands to end.
#[derive(Debug)]
pub struct Stopper(Mutex<Option<OwnedFd>>);

/// The other end of a [`Stopper`].
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stopper {
    /// A pair of connected ends.
    ///
    /// # Errors
    /// Those of pipe(2).
    pub fn new() -> Result<(Stopper, Stop)> {
        let (read_end, write_end) =
            pipe2(OFlag::O_CLOEXEC).map_err(io::Error::from).attempt(|| "make a pipe")?;
        Ok((Stopper(Mutex::new(Some(write_end))), Stop(Arc::new(read_end))))
    }

    /// Asks every command with the other end to end.
    pub fn stop(&self) {
        *self.0.lock() = None;
    }
}

impl Stop {
    /// Whether the command was asked to end.
    pub fn is_asked(&self) -> bool {
        let mut ready = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        loop {
            match poll(&mut ready, PollTimeout::ZERO) {
                Err(Errno::EINTR) => {}
                Err(_) => return true,
                Ok(number) => return number > 0,
            }
        }
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The signals that ask this process to end. They are blocked, and are for no command.
#[derive(Debug)]
pub struct Interrupts(SignalFd);

impl Interrupts {
    /// Takes them from now on. The caller has called [`block_signals`](super::block_signals).
    ///
    /// # Errors
    /// signalfd(2) fails.
    pub fn take() -> Result<Interrupts> {
        let signals = SigSet::from_iter([SIGHUP, SIGINT, SIGQUIT, SIGTERM]);
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let taken = SignalFd::with_flags(&signals, flags).map_err(io::Error::from);
        taken.map(Interrupts).attempt(|| "wait for signals")
    }

    /// The next one that has come, without a wait.
    ///
    /// # Errors
    /// The read fails.
    pub fn next(&self) -> Result<Option<Signal>> {
        let read = self.0.read_signal().map_err(io::Error::from).attempt(|| "wait for signals")?;
        let number = read.and_then(|info| i32::try_from(info.ssi_signo).ok());
        Ok(number.and_then(|number| Signal::try_from(number).ok()))
    }
}

impl AsFd for Interrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Asks a command to end while this process waits for it.
#[derive(Debug)]
pub(super) enum Asker {
    /// The signals of this process.
    Signals(SignalFd),
    /// The caller. It asks once.
    Caller(Stop),
    /// The caller, who has asked.
    HasAsked,
}

impl Asker {
    /// A descriptor that is readable when the command is to end.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Asker::Signals(signals) => Some(signals.as_fd()),
            Asker::Caller(stop) => Some(stop.as_fd()),
            Asker::HasAsked => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_reaches_every_copy_of_the_other_end() {
        let (stopper, stop) = Stopper::new().unwrap();
        let other = stop.clone();
        assert!(!stop.is_asked() && !other.is_asked());
        stopper.stop();
        assert!(stop.is_asked() && other.is_asked());
        stopper.stop();
        let (stopper, stop) = Stopper::new().unwrap();
        drop(stopper);
        assert!(stop.is_asked());
    }
}
