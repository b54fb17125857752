//! The primitive changes of the tree.
//!
//! A change is a list of [`Edit`]s. The same list is appended to the journal as one record and
//! applied to the tree in memory, so a replay of the journal gives the same tree.
//!
//! The journal encodes edits as they stand here: the enum grows only at its end.

use serde::{Deserialize, Serialize};

use crate::tree::extents::Source;
use crate::tree::node::{Dentry, Meta, Node};
use crate::types::{ByteRange, Ino, Name};

/// One primitive change of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Edit {
    /// Inserts or replaces the record of a node. Its extents stay.
    Put {
        /// The node.
        ino: Ino,
        /// The record.
        node: Box<Node>,
    },
    /// Sets the attributes of a node.
    Meta {
        /// The node.
        ino: Ino,
        /// The attributes.
        meta: Meta,
    },
    /// Sets or removes an extended attribute.
    Xattr {
        /// The node.
        ino: Ino,
        /// The name of the attribute.
        name: Vec<u8>,
        /// Its value; `None` removes it.
        value: Option<Vec<u8>>,
    },
    /// Sets the size of a file and drops the extents beyond it.
    Resize {
        /// The file.
        ino: Ino,
        /// Bytes.
        size: u64,
    },
    /// Sets where a range of a file is stored.
    Map {
        /// The file.
        ino: Ino,
        /// The range, within the size of the file.
        range: ByteRange,
        /// Where the first byte is stored; `None` makes a hole.
        to: Option<Source>,
    },
    /// Sets or removes the entry for a name.
    Dentry {
        /// The directory.
        dir: Ino,
        /// The name in it.
        name: Name,
        /// The entry; `None` removes it, so that the base shows through.
        to: Option<Dentry>,
    },
    /// Removes a node with its extents and, for a directory, its entries.
    Remove {
        /// The node.
        ino: Ino,
    },
}
