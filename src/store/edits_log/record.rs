//! The records of the log of edit histories.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

use crate::store::io::writer::Writer;
use crate::tree::{Node, Source};
use crate::types::{ByteRange, Epoch, Ino, Timestamp, TreePath};

/// The kind of operation that began an edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// A write.
    Written,
    /// A truncation.
    Truncated,
    /// Another file was renamed over the path.
    Replaced,
    /// The name was removed.
    Removed,
    /// The file was renamed to another path.
    Moved,
    /// A restore, a discard or an op restore.
    Restored,
    /// An undo or a redo.
    Undone,
}

impl How {
    const ALL: [How; 7] = [
        How::Written,
        How::Truncated,
        How::Replaced,
        How::Removed,
        How::Moved,
        How::Restored,
        How::Undone,
    ];

    /// Its code in documents that leave the machine: 0 to 6, in the order of the variants.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The kind with this code.
    pub fn of_code(code: u8) -> Option<How> {
        How::ALL.get(usize::from(code)).copied()
    }
}

/// The content that a path had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// The inode number of the file.
    pub ino: Ino,
    /// Its node.
    pub node: Node,
    /// The epoch of the base that its extents refer to.
    pub epoch: Epoch,
    /// Where its bytes are stored, in order. Gaps read as zeros.
    pub extents: Vec<(ByteRange, Source)>,
}

/// Decodes a content into its final place. serde would decode it into a `Box` first.
fn decode_content<'de, D: Deserializer<'de>>(
    from: D,
) -> std::result::Result<Option<Arc<Content>>, D::Error> {
    Ok(Option::deserialize(from)?.map(Arc::new))
}

/// An edit of a path, with the content before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedEdit {
    /// When the edit began.
    pub time: Timestamp,
    /// The operation that began it.
    pub how: How,
    /// The content; `None` if there was no file.
    #[serde(deserialize_with = "decode_content")]
    pub content: Option<Arc<Content>>,
}

/// The limits of the edit history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Edits of each path; 0 keeps none.
    pub edits: u32,
    /// Bytes of content that only edits refer to, over all paths.
    pub bytes: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { edits: 10, bytes: 256 << 20 }
    }
}

/// An edit with its number, and whether its bytes are synced.
pub type Numbered = (u32, LoggedEdit, bool);

/// A record of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EditsLogRecord {
    /// A process opened the log for writing.
    Opened {
        /// Its boot and its mount of the store's filesystem.
        writer: Writer,
    },
    /// The limits from now on.
    Bounds(Bounds),
    /// Edits began.
    Kept(Vec<(TreePath, LoggedEdit)>),
    /// A file was renamed. The new path gets its edits, if it has none of its own.
    Copied {
        /// The old path.
        from: TreePath,
        /// The new one.
        to: TreePath,
    },
    /// A directory was renamed. Every path below it changes.
    Moved {
        /// The old path.
        from: TreePath,
        /// The new one.
        to: TreePath,
    },
    /// Two directories were exchanged.
    Exchanged {
        /// The path of one.
        a: TreePath,
        /// The path of the other.
        b: TreePath,
    },
    /// An undo or a redo went to an edit of a path, or back to the content before the first
    /// undo.
    At {
        /// The path.
        path: TreePath,
        /// The number of the edit; `None` for the content before the first undo.
        number: Option<u32>,
    },
    /// The bytes of an edit are stored elsewhere from now on.
    Remapped {
        /// The path.
        path: TreePath,
        /// The number of the edit.
        number: u32,
        /// Where its bytes are stored.
        extents: Vec<(ByteRange, Source)>,
    },
    /// The edits of a path up to this number were dropped.
    Dropped {
        /// The path.
        path: TreePath,
        /// The newest of them.
        upto: u32,
    },
    /// The pool bytes of this many of the first records survive a power cut.
    SyncedTo(u64),
    /// All edits of a path, in a rewritten log.
    List {
        /// The path.
        path: TreePath,
        /// The number of its next edit.
        next: u32,
        /// The edit that an undo went to.
        at: Option<u32>,
        /// The edits, oldest first.
        edits: Vec<Numbered>,
    },
    /// A sync failed. An edit that no `SyncedTo` covers is invalid, as after a power cut.
    SyncFailed,
    /// The content of each edit was compared with that of the next one, and the newest of a path
    /// with the file. Equal bytes are stored once.
    Compared {
        /// The paths of which this is not known.
        except: Vec<TreePath>,
    },
}

impl EditsLogRecord {
    /// The number of edits in the list of a path.
    pub(super) fn edits(&self) -> u64 {
        if let EditsLogRecord::List { edits, .. } = self { edits.len() as u64 } else { 0 }
    }
}
