//! What the process outside and the process inside say to each other, over a socket that keeps messages apart.
//!
//! ```text
//! outside                      inside
//! Prepare(Spec)            ->
//!                          <-  Map                      only with a user namespace
//! Mapped                   ->
//!                          <-  Mounted + session, root  only with namespaces
//!                          <-  Started(pid)             only with namespaces: the first process of the pid namespace
//! Served                   ->
//!                          <-  Ready(Walls)
//! Run                      ->
//!                          <-  Runs
//! Signal, Continue ...     ->
//!                          <-  Stopped ... Ended | Failed
//! ```
//! Whoever finds the connection closed ends: inside that takes every process of the command along.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::child::End;
use super::filter::Allow;
use super::net::Net;
use super::walls::Walls;
use crate::error::{Attempt, Error, Kind, Result};
use crate::store::codec;
use crate::sys::mount::{receive, send};

/// The longest message, in bytes: a list of paths.
const LONGEST: usize = 160 << 10;

/// Which walls the caller relies on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Accept {
    /// All of them: namespaces with a view of their own, Landlock, and the filter on system calls.
    #[default]
    All,
    /// Landlock may be missing.
    View,
    /// Namespaces may be missing.
    Landlock,
}

/// What is to be put up around the command. All paths are absolute and without links.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The base.
    pub base: OsString,
    /// The store, of which only the control socket is to be seen.
    pub store: OsString,
    /// Where other stores are.
    pub stores: Vec<OsString>,
    /// What else is not to be seen unless somebody asks for it.
    pub hidden: Vec<OsString>,
    /// What is not to be seen whatever else is asked for.
    pub withheld: Vec<OsString>,
    /// What is to be seen with all in it that is hidden, and although it lies in something hidden.
    pub shown: Vec<OsString>,
    /// What is to be seen although it lies in something that is replaced or hidden; not what is hidden in it.
    pub bound: Vec<OsString>,
    /// What is to be writable as on the host.
    pub writable: Vec<OsString>,
    /// This program.
    pub program: OsString,
    /// Which network the command has.
    pub net: Net,
    /// Which walls must stand.
    pub accept: Accept,
    /// What the filter on system calls does not deny.
    pub allow: Vec<Allow>,
    /// The size of each private directory for temporary files, in bytes; none is the default.
    pub tmp_size: Option<u64>,
    /// Where the sandbox is mounted, if that is not over the base in namespaces of its own, and the directory that takes
    /// the place of `/tmp`.
    pub elsewhere: Option<(OsString, OsString)>,
    /// What the command can read about where it is.
    pub readme: String,
}

/// From outside.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Put the walls up.
    Prepare(Box<Spec>),
    /// The numbers of the user namespace are mapped.
    Mapped,
    /// The mount is served.
    Served,
    /// Start the command.
    Run,
    /// Send it this signal.
    Signal(i32),
    /// Let it go on.
    Continue,
}

/// From inside.
#[derive(Debug, Serialize, Deserialize)]
pub enum News {
    /// Map the numbers of my user namespace.
    Map,
    /// The mount stands; its session and its root come along.
    Mounted {
        /// `st_dev` of its files.
        dev: u64,
        /// Whether other users may enter.
        all_users: bool,
    },
    /// This process, as it is numbered outside, goes on from here, in the mount namespace that `/proc/PID/ns/mnt` calls so.
    Started(i32, OsString),
    /// Namespaces are not to be had here.
    Refused(Error),
    /// All walls are up, or all that can be had; with a list of hosts, the socket of the proxy comes along.
    Ready(Walls),
    /// The command runs: what the terminal sends from now on reaches it.
    Runs,
    /// It did not come to a command; the code to exit with.
    Failed(Error, u8),
    /// The command has been stopped by this signal.
    Stopped(i32),
    /// The command has ended.
    Ended(End),
}

/// One end.
#[derive(Debug)]
pub struct Line(OwnedFd);

impl Line {
    pub(super) fn new(socket: OwnedFd) -> Line {
        Line(socket)
    }

    pub(super) fn say<T: Serialize>(&self, what: &T) -> Result<()> {
        self.say_with(what, &[])
    }

    pub(super) fn say_with<T: Serialize>(&self, what: &T, descriptors: &[OwnedFd]) -> Result<()> {
        let attempt = || "talk to the other side of the sandbox";
        let bytes = codec::encode(what).map_err(|error| Error::new(Kind::Failed, attempt(), error))?;
        if bytes.len() > LONGEST {
            return Err(Error::new(Kind::Usage, attempt(), "there are too many paths to hide or to bind"));
        }
        send(self.0.as_raw_fd(), &bytes, descriptors).map_err(io::Error::from).attempt(attempt)
    }

    /// The next message; none at the end of the connection.
    pub(super) fn hear<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>> {
        let attempt = || "listen to the other side of the sandbox";
        let mut bytes = vec![0; LONGEST];
        let (len, descriptors) = match receive(&self.0, &mut bytes) {
            // It ended with a message of ours unread.
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

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mount::message_pair;

    #[test]
    fn messages_arrive_whole_and_with_their_descriptors() {
        let (ours, theirs) = message_pair().unwrap();
        let (ours, theirs) = (Line::new(ours), Line::new(theirs));
        let spec = Spec { hidden: vec![OsString::from("/x"); 1000], ..Spec::default() };
        ours.say(&Order::Prepare(Box::new(spec.clone()))).unwrap();
        let null: OwnedFd = std::fs::OpenOptions::new().read(true).open("/dev/null").unwrap().into();
        ours.say_with(&Order::Signal(15), &[null]).unwrap();
        let (Order::Prepare(heard), none) = theirs.hear().unwrap().unwrap() else { panic!("not the first") };
        assert!(*heard == spec && none.is_empty());
        let (Order::Signal(15), one) = theirs.hear().unwrap().unwrap() else { panic!("not the second") };
        assert_eq!(one.len(), 1);
        drop(ours);
        assert!(theirs.hear::<Order>().unwrap().is_none());
    }

    #[test]
    fn too_much_is_refused_in_words() {
        let (ours, _theirs) = message_pair().unwrap();
        let spec = Spec { readme: "x".repeat(LONGEST), ..Spec::default() };
        let error = Line::new(ours).say(&Order::Prepare(Box::new(spec))).unwrap_err();
        assert!(error.reason.contains("too many paths"));
    }
}
