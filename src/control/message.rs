//! The messages of the control socket.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::sandbox::{Reply, Request};
use crate::types::LayerId;

/// A message of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The head that the client means; `None` lets the daemon choose. A command of `run` always
    /// means the head of its own sandbox.
    pub head: Option<String>,
    /// The question of the client.
    pub message: Message,
}

/// The question of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Handles a request in the sandbox of the head. Answered by [`Answer::Reply`].
    Request(Request),
    /// Lists the mounted heads. Answered by [`Answer::Mounts`].
    Mounts,
    /// Mounts the head. The daemon decodes the bytes: the mount point and the options. Answered by
    /// [`Answer::Mounted`] or [`Answer::Ending`].
    Mount(Vec<u8>),
    /// Runs a race, of which the attempts are processes of the client.
    Race(RaceOrder),
}

/// An order of a client that runs a race. A connection has one race. If it closes before
/// [`RaceOrder::Finish`], the daemon ends the attempts and lists their forks as abandoned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RaceOrder {
    /// Makes this many forks of the head. Answered by [`Answer::Race`].
    Begin(u32),
    /// Opens the fork that the call means as its head, and listens on a control socket for its
    /// command. Answered by [`Answer::Socket`].
    Prepare,
    /// Serves that fork in a mount that the client made in another mount namespace. The daemon
    /// decodes the bytes. Answered by [`Answer::Mounted`].
    Serve {
        /// The plan.
        plan: Vec<u8>,
        /// The FUSE device, and the root of the mount.
        #[serde(skip)]
        descriptors: Descriptors,
    },
    /// Fails if that mount was aborted or unmounted.
    Check,
    /// Ends that mount.
    End,
    /// Makes the tree of that fork equal to a sealed state.
    Reset(LayerId),
    /// Makes that fork begin again with the first state.
    Replace,
    /// Drops these forks, with their checkpoints.
    Drop(Vec<String>),
    /// Ends the race. The forks that are left stay.
    Finish,
}

/// Descriptors that travel beside a message. They are taken once.
#[derive(Clone, Default)]
pub struct Descriptors(Arc<Mutex<Vec<OwnedFd>>>);

impl Descriptors {
    /// These descriptors.
    pub fn new(descriptors: Vec<OwnedFd>) -> Descriptors {
        Descriptors(Arc::new(Mutex::new(descriptors)))
    }

    /// Takes them out.
    pub fn take(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0.lock())
    }

    /// Puts in those that came with the message.
    pub(super) fn set(&self, received: Vec<OwnedFd>) {
        *self.0.lock() = received;
    }
}

impl fmt::Debug for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Descriptors")
    }
}

/// Messages are compared without their descriptors.
impl PartialEq for Descriptors {
    fn eq(&self, _: &Descriptors) -> bool {
        true
    }
}

impl Eq for Descriptors {}

impl Message {
    /// The descriptors that travel beside the message, if it has any.
    pub(super) fn descriptors(&self) -> Option<&Descriptors> {
        match self {
            Message::Race(RaceOrder::Serve { descriptors, .. }) => Some(descriptors),
            Message::Race(_) | Message::Request(_) | Message::Mounts | Message::Mount(_) => None,
        }
    }

    /// Whether the answer has a list of changes.
    pub(super) fn is_listed(&self) -> bool {
        matches!(self, Message::Request(request) if request.is_listed())
    }
}

/// The daemon's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The reply of the sandbox.
    Reply(Box<Reply>),
    /// The mounted heads.
    Mounts(Mounts),
    /// The head is mounted.
    Mounted,
    /// The last mount of the daemon has ended, so it mounts nothing more. The client can start
    /// another daemon when this one has closed the connection.
    Ending,
    /// The forks of a race.
    Race {
        /// Their names.
        names: Vec<String>,
        /// The sealed state that they begin with; `None` for the base.
        start: Option<LayerId>,
    },
    /// The name in the store of the control socket of an attempt.
    Socket(String),
}

/// The mounted heads of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounts {
    /// The head that the client means, by its name or by the daemon's choice.
    pub meant: String,
    /// The mounted heads, by name.
    pub heads: Vec<MountedHead>,
    /// Whether the client may run a race.
    pub can_race: bool,
}

/// A mounted head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedHead {
    /// Its name.
    pub head: String,
    /// The mount point, as bytes of its path.
    pub mount_point: Vec<u8>,
}

impl Mounts {
    /// The mount point of a head, as bytes of its path.
    pub fn mount_point(&self, head: &str) -> Option<&[u8]> {
        self.heads.iter().find(|one| one.head == head).map(|one| &*one.mount_point)
    }
}
