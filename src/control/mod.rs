//! The control socket, over which a command reaches the daemon of a store.
//!
//! `STORE/control` is a Unix stream socket of mode 0600 in a directory of mode 0700. The process
//! that holds the lock of the store listens on it. So a socket on which no process listens is left
//! over from a dead daemon and may be replaced.
//!
//! A client must run as the daemon's user or as root (SO_PEERCRED, unix(7)). It must not be more
//! confined than the daemon, unless it descends from it: otherwise a command in one sandbox could
//! escape through the daemon of another.
//!
//! ```text
//! server -> client   frame: greeting: "jailfsct" | version u32 | pid u32
//! client -> server   frame: Call      any number, each followed by
//! server -> client   frame: Result<Answer, Error>
//!
//! frame = length u32 little-endian | payload of that length
//! ```
//!
//! The greeting has a fixed layout, so that a client of another version can read it and report the
//! difference. The other payloads are `store::codec`.
//!
//! One daemon serves all heads of a store. A [`Call`] names the head that the client means. The
//! server does not know the heads: its handler finds them. After a successful `Unmount` the
//! connection stays open until the head is closed, and for the last mounted head until the daemon
//! has closed the store. So its end tells the client that the head, or the store, is free.
//!
//! A byte with descriptors (SCM_RIGHTS) follows a call that has a pipe or a mount.
//!
//! A path in a sockaddr_un has at most 107 bytes. So both sides hold the store's directory open and
//! name the socket `/proc/self/fd/N/control`.

mod client;
mod frame;
mod message;
mod server;
mod waiting;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::OFlag;

pub use client::{Client, connect, is_lost};
pub use frame::Greeting;
pub use message::{Answer, Call, Descriptors, Message, MountedHead, Mounts, RaceOrder};
pub use server::{Answered, Conversation, Listener, Peer, Server};
pub use waiting::Waiting;

use crate::error::{Attempt, Result};

/// How long a daemon whose last mount has ended may take to close the store.
pub const ENDING_LIMIT: Duration = Duration::from_secs(20);
/// How long a client waits before it tries again to reach a daemon.
pub const PAUSE: Duration = Duration::from_millis(10);
/// The name of the socket in the store's directory.
pub const SOCKET: &str = "control";

/// The name of one of several sockets in the store's directory.
pub fn numbered_socket(number: u32) -> String {
    format!("{SOCKET}-{number}")
}

/// A store's directory, held open so that its socket has a short path.
struct StoreDir(File);

impl StoreDir {
    fn open(store: &Path) -> Result<StoreDir> {
        OpenOptions::new()
            .read(true)
            .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_PATH).bits())
            .open(store)
            .attempt(|| format!("open store '{}'", store.display()))
            .map(StoreDir)
    }

    /// The path of the socket, valid in this process while `self` lives.
    fn socket(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()))
    }
}
