//! The nodes and names of the tree, as they are stored on disk.
//!
//! The journal encodes these types field by field. So a field never changes, and an enum grows only
//! at its end (`store/golden.rs` checks every variant).

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::types::{FileKind, Fingerprint, Ino, Timestamp, TreePath};

/// The attributes that `stat` shows, besides inode number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of hard links.
    pub nlink: u32,
    /// Device number of a device node, as in `st_rdev`; 0 for other nodes.
    pub rdev: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of content or attributes.
    pub ctime: Timestamp,
}

/// Extended attributes by name, shared between states. `None` is the empty set, the common case.
pub type Xattrs = Option<Arc<BTreeMap<Vec<u8>, Vec<u8>>>>;

/// The base file from which a file was copied up, and which still holds part of its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Its path in the base.
    pub path: TreePath,
    /// Its fingerprint at the copy-up.
    pub print: Fingerprint,
}

/// The part of a node that depends on its kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// A regular file. Its extents are recorded separately.
    File {
        /// Bytes.
        size: u64,
        /// The base file that the extents of [`Source::Base`](super::Source::Base) refer to.
        origin: Option<Arc<Origin>>,
    },
    /// A directory. Its names are recorded separately.
    Dir {
        /// The base directory that shows through. `None` makes the directory opaque.
        base: Option<TreePath>,
    },
    /// A symbolic link.
    Symlink {
        /// The stored text.
        target: Vec<u8>,
    },
    /// A fifo, socket or device; `Meta::mode` says which.
    Special,
}

/// A node of the tree: a file, directory, link or special file, without its names and extents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Attributes.
    pub meta: Meta,
    /// Extended attributes.
    pub xattrs: Xattrs,
    /// The part that depends on the kind.
    pub body: Body,
}

impl Node {
    /// The kind of the node.
    pub fn kind(&self) -> FileKind {
        match self.body {
            Body::File { .. } => FileKind::File,
            Body::Dir { .. } => FileKind::Dir,
            Body::Symlink { .. } => FileKind::Symlink,
            Body::Special => FileKind::from_mode(self.meta.mode).unwrap_or(FileKind::Fifo),
        }
    }

    /// `st_size`: the bytes of a file, the length of a link's text, 4096 for a directory, else 0.
    pub fn size(&self) -> u64 {
        match &self.body {
            Body::File { size, .. } => *size,
            Body::Symlink { target } => target.len() as u64,
            Body::Dir { .. } => 4096,
            Body::Special => 0,
        }
    }
}

/// The base node that a name of the tree hides, as it was when the name was made; `None` if the
/// base had no such name.
///
/// Removing a name that hides a base node leaves a whiteout. An `apply` compares the fingerprint
/// with the base to detect that another program changed that node in the meantime.
pub type Hides = Option<Arc<Fingerprint>>;

/// The entry of a directory of the tree for one name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dentry {
    /// The name refers to a node of the tree.
    Child {
        /// The node.
        ino: Ino,
        /// The base node behind the name.
        hides: Hides,
    },
    /// A whiteout: the base has the name, and the tree does not.
    Whiteout(Arc<Fingerprint>),
}
