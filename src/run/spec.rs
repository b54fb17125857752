//! Describes the walls around a command. The process outside sends this to the process inside.

use std::ffi::OsString;

use serde::{Deserialize, Serialize};

use super::filter::Allow;
use super::net::Net;

/// Which walls the caller relies on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Accept {
    /// All: namespaces with a view of their own, Landlock, and the filter on system calls.
    #[default]
    All,
    /// Landlock may be missing.
    View,
    /// Namespaces may be missing.
    Landlock,
}

/// The walls to build around the command. All paths are absolute and resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The base.
    pub base: OsString,
    /// The store. The command sees only its control socket.
    pub store: OsString,
    /// The name in the store of the socket that the command finds as `control`, if it is another.
    pub socket: Option<OsString>,
    /// Whether the command is in a session of its own, without a terminal.
    pub own_session: bool,
    /// The directories of other stores.
    pub stores: Vec<OsString>,
    /// Paths hidden unless an option shows them.
    pub hidden: Vec<OsString>,
    /// Paths hidden whatever the options say.
    pub withheld: Vec<OsString>,
    /// Paths shown with everything in them, also inside hidden or replaced directories.
    pub shown: Vec<OsString>,
    /// Paths shown also inside hidden or replaced directories, except the hidden paths in them.
    pub bound: Vec<OsString>,
    /// Paths that are writable as on the host.
    pub writable: Vec<OsString>,
    /// The executable of this program.
    pub program: OsString,
    /// The network of the command.
    pub net: Net,
    /// The walls that must stand.
    pub accept: Accept,
    /// The system calls that the filter does not deny.
    pub allow: Vec<Allow>,
    /// The size of each private directory for temporary files, in bytes. None is the default.
    pub tmp_size: Option<u64>,
    /// Without namespaces: the mount point of the sandbox, and the directory that replaces `/tmp`.
    pub elsewhere: Option<(OsString, OsString)>,
    /// The text that tells the command about its sandbox.
    pub readme: String,
}
