//! The records of the store: plain data, exactly what the journal holds.
//!
//! A change of the tree is a list of [`Edit`]s. The same list is appended to the journal as one frame and applied to
//! the tree in memory, so a replay cannot come to another result than the first run. Enums only grow at the end, and
//! golden bytes in the tests hold every variant to its encoding.

use serde::{Deserialize, Serialize};

use crate::store::io::writer::Writer;
use crate::tree::{Edit, Node, Source};
use crate::types::{BaseMark, ByteRange, Epoch, Fingerprint, Ino, LayerId, Timestamp, TreePath};

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
