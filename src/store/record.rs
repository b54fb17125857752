//! The records of the store: plain data, exactly what the journal holds.
//!
//! A change of the tree is a list of [`Edit`]s. The same list is appended to the journal as one frame and applied to
//! the tree in memory, so a replay cannot come to another result than the first run. Enums only grow at the end, and
//! golden bytes in the tests hold every variant to its encoding.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::store::io::writer::Writer;
use crate::types::{
    BaseMark, ByteRange, Epoch, FileKind, Fingerprint, Ino, LayerId, Name, Timestamp, TreePath,
};

/// The attributes of a node that `stat` shows, besides number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of links.
    pub nlink: u32,
    /// Device number of a device node, as in `st_rdev`; else 0.
    pub rdev: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of anything.
    pub ctime: Timestamp,
}

/// Extended attributes by name; shared between states, none for the common empty set.
pub type Xattrs = Option<Arc<BTreeMap<Vec<u8>, Vec<u8>>>>;

/// The file of the base whose bytes a node shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Its path in the base.
    pub path: TreePath,
    /// What it looked like when it was covered.
    pub print: Fingerprint,
}

/// What a node holds besides attributes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// A regular file; its extents are recorded separately.
    File {
        /// Bytes.
        size: u64,
        /// The file of the base that extents into the base refer to.
        origin: Option<Arc<Origin>>,
    },
    /// A directory; its names are recorded separately.
    Dir {
        /// The directory of the base that shows through; none hides all of the base (opaque).
        base: Option<TreePath>,
    },
    /// A symbolic link.
    Symlink {
        /// The text, as stored.
        target: Vec<u8>,
    },
    /// A fifo, socket or device; `Meta` says which.
    Special,
}

/// A node of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Attributes.
    pub meta: Meta,
    /// Extended attributes.
    pub xattrs: Xattrs,
    /// The rest, by kind.
    pub body: Body,
}

impl Node {
    /// What kind of node it is.
    pub fn kind(&self) -> FileKind {
        match self.body {
            Body::File { .. } => FileKind::File,
            Body::Dir { .. } => FileKind::Dir,
            Body::Symlink { .. } => FileKind::Symlink,
            Body::Special => FileKind::from_mode(self.meta.mode).unwrap_or(FileKind::Fifo),
        }
    }

    /// What `st_size` shows: bytes of a file, length of a link's text, 4096 for a directory.
    pub fn size(&self) -> u64 {
        match &self.body {
            Body::File { size, .. } => *size,
            Body::Symlink { target } => target.len() as u64,
            Body::Dir { .. } => 4096,
            Body::Special => 0,
        }
    }
}

/// Where bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// In the pool of a layer, from this logical offset on.
    Pool {
        /// Whose pool.
        layer: LayerId,
        /// Logical offset of the first byte.
        offset: u64,
    },
    /// In the node's origin, from this offset on.
    Base {
        /// Offset in the file of the base.
        offset: u64,
    },
}

impl Source {
    /// Whether it is in the base.
    pub fn is_base(self) -> bool {
        matches!(self, Source::Base { .. })
    }

    /// The source of the bytes `by` further on.
    #[must_use]
    pub fn advanced(self, by: u64) -> Source {
        match self {
            Source::Pool { layer, offset } => Source::Pool { layer, offset: offset + by },
            Source::Base { offset } => Source::Base { offset: offset + by },
        }
    }
}

/// The node of the base that a name of the tree hides, as it was when it was hidden; none if the base has no such name.
/// Removing the name then needs a whiteout, and an apply finds out whether somebody else changed that node meanwhile.
pub type Hides = Option<Arc<Fingerprint>>;

/// What a directory of the upper layers says of a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dentry {
    /// The name stands for this node.
    Child {
        /// Which.
        ino: Ino,
        /// What of the base it hides.
        hides: Hides,
    },
    /// The base has the name, and it is gone.
    Whiteout(Arc<Fingerprint>),
}

/// One primitive change of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Edit {
    /// Sets the whole record of a node; its extents stay.
    Put {
        /// Which.
        ino: Ino,
        /// The record.
        node: Box<Node>,
    },
    /// Sets the attributes of a node.
    Meta {
        /// Which.
        ino: Ino,
        /// The attributes.
        meta: Meta,
    },
    /// Sets or removes an extended attribute.
    Xattr {
        /// Of which node.
        ino: Ino,
        /// Its name.
        name: Vec<u8>,
        /// Its value; none removes it.
        value: Option<Vec<u8>>,
    },
    /// Sets the size of a file; extents beyond it go.
    Resize {
        /// Which.
        ino: Ino,
        /// Bytes.
        size: u64,
    },
    /// Says where a range of a file is.
    Map {
        /// Which file.
        ino: Ino,
        /// Which range.
        range: ByteRange,
        /// The source of its first byte; none is a hole.
        to: Option<Source>,
    },
    /// Says what a name stands for.
    Dentry {
        /// The directory.
        dir: Ino,
        /// The name in it.
        name: Name,
        /// None: nothing is known here, the base shows through.
        to: Option<Dentry>,
    },
    /// Takes a node and its extents out of the tree.
    Remove {
        /// Which.
        ino: Ino,
    },
}

/// What a layer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerKind {
    /// Changes of a head after its parent; the parent was this head's upper layer until then.
    Continues,
    /// Changes of a head after its parent, to which a restore went back.
    Branches,
    /// What the base held, before an apply, at the paths that the apply touched.
    PreImage,
    /// Its records went into the layers above it; its pool holds content that others refer to.
    Collected,
    /// Changes of a head after an apply wrote all of its tree into the base. The named layer was written to until then; if that holds
    /// a change and this one does not, they were never exchanged: else the first change here is all that is in the tree.
    Lands(LayerId),
    /// Holds content of other layers, put together; only their maps lead to it.
    Gathered,
}

impl LayerKind {
    /// Whether it is a state of a head.
    pub fn is_of_head(self) -> bool {
        match self {
            LayerKind::Continues | LayerKind::Branches | LayerKind::Lands(_) => true,
            LayerKind::PreImage | LayerKind::Collected | LayerKind::Gathered => false,
        }
    }
}

/// The first record of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Its number.
    pub layer: LayerId,
    /// The layer below; none lies on the base.
    pub parent: Option<LayerId>,
    /// The head that writes to it.
    pub head: String,
    /// The epoch of the base that it lies over; for a pre-image, the epoch that its apply began.
    pub epoch: Epoch,
    /// What it is for.
    pub kind: LayerKind,
    /// When it was made; after it took the place of others below it, when the first of them was.
    pub time: Timestamp,
}

/// The last record of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The name of the checkpoint.
    pub name: Option<String>,
    /// Its message.
    pub message: String,
    /// When.
    pub time: Timestamp,
    /// Whether jailfs made it itself.
    pub automatic: bool,
}

/// What the base held at a path before an apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreImage {
    /// The path in the base.
    pub path: TreePath,
    /// What was there; none if nothing was.
    pub node: Option<PreNode>,
}

/// A node that the base held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreNode {
    /// Its number.
    pub ino: Ino,
    /// Its number on the host: by it the further links of a file are known.
    pub host: u64,
    /// Its record; the origin of a file says how the file looks since the apply, if its bytes were left in place.
    pub node: Node,
    /// Where its bytes are.
    pub extents: Vec<(ByteRange, Source)>,
}

/// What an apply left in the base at a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The path in the base.
    pub path: TreePath,
    /// What is there now; none if nothing is.
    pub print: Option<Fingerprint>,
}

/// A record of a layer's journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// The first one.
    Header(Header),
    /// A process began to write.
    Opened {
        /// Under which boot, and in which mount.
        writer: Writer,
    },
    /// One operation, applied as a whole or not at all.
    Edits(Vec<Edit>),
    /// Everything before this, pool bytes included, survives a power cut.
    Synced,
    /// The last one of a sealed layer.
    Seal(Seal),
    /// Part of a pre-image layer; a later one for the same path takes its place.
    PreImage(PreImage),
    /// Part of a pre-image layer: what the apply left at a path.
    Left(Left),
    /// The apply did not come to its end, and the base is as it was before.
    Abandoned,
    /// The first records of the journal, so many, survive a power cut, with the pool bytes that they refer to.
    SyncedTo(u64),
    /// The second record of a journal that was rewritten as what came of it, and of an index.
    Compact,
    /// A sync failed: only the first records, so many, were synced before. What is behind them may be lost.
    SyncFailed(u64),
    /// Of a layer that was gathered: the bytes that each cell of 64 KiB of its pool takes deflated, 0 of one that is stored as it is.
    Cells(Vec<u32>),
}

/// Which layer is on top of a head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadRecord {
    /// The upper layer.
    pub layer: LayerId,
}

/// Which layers no drop and no gc takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldsRecord {
    /// Their numbers.
    pub layers: std::collections::BTreeSet<LayerId>,
}

/// A record of `heads.log`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpRecord {
    /// The head.
    pub head: String,
    /// When.
    pub time: Timestamp,
    /// What was done.
    pub verb: OpVerb,
    /// On what, for people.
    pub description: String,
    /// The sealed layer that holds the tree as it was right after; none is the base.
    pub tree: Option<LayerId>,
    /// The epoch of the base that the tree lies over.
    pub epoch: Epoch,
}

/// What an operation did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpVerb {
    /// The store was made.
    Create,
    /// A person asked for a checkpoint.
    Checkpoint,
    /// jailfs sealed the tree before an operation that changes it.
    Seal,
    /// The tree went back to a checkpoint.
    Restore,
    /// Changes since the last checkpoint were thrown away.
    Discard,
    /// The tree was written into the base.
    Apply,
    /// An apply was taken back out of the base.
    UndoApply,
    /// The tree went to what it was after an operation.
    OpRestore,
}

/// A record of `identities`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IdentityRecord {
    /// Every number below this in our own range may have been given out.
    Reserved(Ino),
    /// A node of the base has this number, not that of the host.
    Named {
        /// The device; 0 stands for that of the base's root, whose number may change at a reboot.
        dev: u64,
        /// `st_ino`.
        host: u64,
        /// Our number.
        ino: Ino,
    },
    /// Everything before this is about to be synced.
    Synced,
    /// The base is this directory from here on.
    Root(BaseMark),
    /// A number of the host that a node of the base had which is named otherwise by now, or gone: it is nobody else's.
    Taken(Ino),
}
