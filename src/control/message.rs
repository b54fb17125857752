//! The messages of the control socket.

use serde::{Deserialize, Serialize};

use crate::sandbox::{Reply, Request};

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
}

impl Message {
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
}

/// The mounted heads of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounts {
    /// The head that the client means, by its name or by the daemon's choice.
    pub meant: String,
    /// The mounted heads, by name.
    pub heads: Vec<MountedHead>,
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
