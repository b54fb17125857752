//! The messages between the process outside and the process inside, over a socket that keeps
//! message boundaries.
//!
//! ```text
//! outside                      inside
//! Prepare(Spec)            ->
//!                          <-  Map                      only with a user namespace
//! Mapped                   ->
//!                          <-  Mounted + session, root  only with namespaces
//!                          <-  Started(pid)             only with namespaces
//! Served                   ->
//!                          <-  Ready(Walls)
//! Run                      ->
//!                          <-  Running
//! Signal, Continue ...     ->
//!                          <-  Stopped ... Ended | Failed
//! ```
//!
//! A side that finds the connection closed ends. The end of the process inside kills every process
//! of the command.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::exit::End;
use super::spec::Spec;
use super::walls::Walls;
use crate::error::{Attempt, Error, Kind, Result};
use crate::store::io::codec;
use crate::sys::socket::{receive, send};

/// The maximum length of a message, in bytes. Lists of paths make it long.
const LONGEST: usize = 160 << 10;

/// A message from the process outside.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Build the walls.
    Prepare(Box<Spec>),
    /// The ids of the user namespace are mapped.
    Mapped,
    /// The mount is served.
    Served,
    /// Start the command.
    Run,
    /// Send this signal to the command.
    Signal(i32),
    /// Continue the command after a stop.
    Continue,
}

/// A message from the process inside.
#[derive(Debug, Serialize, Deserialize)]
pub enum Event {
    /// Map the ids of my user namespace.
    Map,
    /// The sandbox is mounted. The FUSE device and the root descriptor come along.
    Mounted {
        /// `st_dev` of its files.
        dev: u64,
        /// Whether other users may enter.
        all_users: bool,
    },
    /// The pid outside of the process that continues from here, and the name of its mount namespace
    /// in `/proc/PID/ns/mnt`.
    Started(i32, OsString),
    /// The host does not allow namespaces.
    Refused(Error),
    /// The walls that stand. With a list of hosts, the listening socket of the proxy comes along.
    Ready(Walls),
    /// The command runs, so signals of the terminal reach it from now on.
    Running,
    /// The command was not started. The number is the code to exit with.
    Failed(Error, u8),
    /// This signal has stopped the command.
    Stopped(i32),
    /// The command has ended.
    Ended(End),
}

/// One end of the connection.
#[derive(Debug)]
pub struct Channel(OwnedFd);

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> Channel {
        Channel(socket)
    }

    pub(super) fn send<T: Serialize>(&self, what: &T) -> Result<()> {
        self.send_with(what, &[])
    }

    pub(super) fn send_with<T: Serialize>(&self, what: &T, descriptors: &[OwnedFd]) -> Result<()> {
        let attempt = || "send a message between jailfs and its sandbox";
        let bytes =
            codec::encode(what).map_err(|error| Error::new(Kind::Failed, attempt(), error))?;
        if bytes.len() > LONGEST {
            return Err(Error::new(Kind::Usage, attempt(), "too many paths to hide or to bind"));
        }
        send(self.0.as_raw_fd(), &bytes, descriptors).map_err(io::Error::from).attempt(attempt)
    }

    /// The next message, or None at the end of the connection.
    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>> {
        let attempt = || "receive a message between jailfs and its sandbox";
        let mut bytes = vec![0; LONGEST];
        let (len, descriptors) = match receive(&self.0, &mut bytes) {
            // The peer closed it before it had read our last message.
            Err(nix::Error::ECONNRESET) => return Ok(None),
            other => other.map_err(io::Error::from).attempt(attempt)?,
        };
        if len == 0 {
            return Ok(None);
        }
        let message = codec::decode(bytes.get(..len).unwrap_or_default());
        let message = message.map_err(|error| Error::new(Kind::Failed, attempt(), error))?;
        Ok(Some((message, descriptors)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::socket::message_pair;

    #[test]
    fn messages_arrive_whole_and_with_their_descriptors() {
        let (ours, theirs) = message_pair().unwrap();
        let (ours, theirs) = (Channel::new(ours), Channel::new(theirs));
        let spec = Spec { hidden: vec![OsString::from("/x"); 1000], ..Spec::default() };
        ours.send(&Order::Prepare(Box::new(spec.clone()))).unwrap();
        let null: OwnedFd =
            std::fs::OpenOptions::new().read(true).open("/dev/null").unwrap().into();
        ours.send_with(&Order::Signal(15), &[null]).unwrap();
        let (Order::Prepare(received), none) = theirs.receive().unwrap().unwrap() else {
            panic!("not the first")
        };
        assert!(*received == spec && none.is_empty());
        let (Order::Signal(15), one) = theirs.receive().unwrap().unwrap() else {
            panic!("not the second")
        };
        assert_eq!(one.len(), 1);
        drop(ours);
        assert!(theirs.receive::<Order>().unwrap().is_none());
    }

    #[test]
    fn too_many_paths_are_refused_by_an_error() {
        let (ours, _theirs) = message_pair().unwrap();
        let spec = Spec { readme: "x".repeat(LONGEST), ..Spec::default() };
        let error = Channel::new(ours).send(&Order::Prepare(Box::new(spec))).unwrap_err();
        assert!(error.reason.contains("too many paths"));
    }
}
