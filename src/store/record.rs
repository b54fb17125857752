//! The records that the files of a store hold, besides the nodes and edits of [`crate::tree`].
//!
//! These types are encoded field by field. So a field never changes, and an enum grows only at its
//! end (`store/golden.rs` checks every variant).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::store::io::writer::Writer;
use crate::tree::{Edit, Node, Source};
use crate::types::{BaseMark, ByteRange, Epoch, Fingerprint, Ino, LayerId, Timestamp, TreePath};

/// The purpose of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerKind {
    /// Changes of a head after its parent, which was the upper layer of this head until then.
    Continues,
    /// Changes of a head after a restore switched to its parent.
    Branches,
    /// The base nodes that an apply replaced, as they were before.
    PreImage,
    /// A layer whose records moved into the layers above. Its pool holds content that others
    /// refer to.
    Collected,
    /// Changes of a head after an apply wrote all of its tree into the base and the head was
    /// rebased. The head wrote to the named layer until then.
    ///
    /// The first record of this layer holds the whole tree over the new base. If the named layer
    /// has a change and this one has none, the process ended before the head moved to this layer.
    Rebased(LayerId),
}

impl LayerKind {
    /// Whether such a layer is a state of a head.
    pub fn is_of_head(self) -> bool {
        match self {
            LayerKind::Continues | LayerKind::Branches | LayerKind::Rebased(_) => true,
            LayerKind::PreImage | LayerKind::Collected => false,
        }
    }
}

/// The first record of a journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The layer.
    pub layer: LayerId,
    /// The layer below; `None` if the layer lies on the base.
    pub parent: Option<LayerId>,
    /// The head that writes to it.
    pub head: String,
    /// The epoch of the base below; for pre-images, the epoch that the apply began.
    pub epoch: Epoch,
    /// The purpose of the layer.
    pub kind: LayerKind,
    /// When the layer was created. If it replaced layers below, when the oldest of them was.
    pub time: Timestamp,
}

/// The last record of the journal of a sealed layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The name of the checkpoint, if it has one.
    pub name: Option<String>,
    /// Its message.
    pub message: String,
    /// When the layer was sealed.
    pub time: Timestamp,
    /// Whether jailfs sealed the layer on its own. It is then no checkpoint.
    pub automatic: bool,
}

/// A base path before an apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreImage {
    /// The path in the base.
    pub path: TreePath,
    /// The node there, if there was one.
    pub node: Option<PreNode>,
}

/// A base node before an apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreNode {
    /// Its inode number in the mount.
    pub ino: Ino,
    /// Its inode number on the host, by which the hard links of a file are recognised.
    pub host: u64,
    /// Its record. If the apply left the bytes of a file in place, the origin has the fingerprint
    /// of the file since the apply.
    pub node: Node,
    /// Where its bytes are stored.
    pub extents: Vec<(ByteRange, Source)>,
}

/// A base path after an apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The path in the base.
    pub path: TreePath,
    /// The fingerprint of the node there, if there is one.
    pub print: Option<Fingerprint>,
}

/// Bytes of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolBytes {
    /// The address of the first one.
    pub at: u64,
    /// The bytes.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// A record of a layer's journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// The first record.
    Header(Header),
    /// A process opened the layer for writing.
    Opened {
        /// Its boot and its mount of the store's filesystem.
        writer: Writer,
    },
    /// One operation, applied as a whole or not at all.
    Edits(Vec<Edit>),
    /// Everything before this record survives a power cut, with the pool bytes.
    Synced,
    /// The last record of a sealed layer.
    Seal(Seal),
    /// In a layer of pre-images. A later record for the same path replaces an earlier one.
    PreImage(PreImage),
    /// In a layer of pre-images: what the apply left at a path.
    Left(Left),
    /// The apply was rolled back, and the base is as it was before.
    Abandoned,
    /// This many of the first records survive a power cut, with the pool bytes that they refer to.
    SyncedTo(u64),
    /// The second record of a compact journal, and of an index.
    Compact,
    /// A sync failed. Only this many of the first records were synced before.
    SyncFailed(u64),
    /// Everything before this record survives a power cut if this record does. The pool bytes that
    /// no sync of the pool has covered are in it, or in such a record before it.
    Redo(Vec<PoolBytes>),
    /// The seal that will end the journal: no operation comes behind it. The checkpoint is reported
    /// once this record is written, before anything is synced. If the process ends before the seal
    /// is written, the next start writes it.
    Sealing(Seal),
}

/// The content of the file of a head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadRecord {
    /// The layer on top of the head. That of a fork which was not used yet is sealed.
    pub layer: LayerId,
    /// Where the head was forked; `None` for the first head.
    pub forked_from: Option<ForkPoint>,
    /// The merges of other heads into this one, and into heads that were dropped from it. gc
    /// forgets a merge that no state needs for a merge base.
    pub merged: BTreeSet<MergePoint>,
    /// The files into which merges wrote conflict markers. Some may have none any more.
    pub unresolved: BTreeSet<TreePath>,
    /// The paths at which merges put the other side of a conflict. Some may be gone.
    pub beside: BTreeSet<TreePath>,
}

impl HeadRecord {
    /// The record of a head that was neither forked nor merged.
    pub fn first(layer: LayerId) -> HeadRecord {
        HeadRecord {
            layer,
            forked_from: None,
            merged: BTreeSet::new(),
            unresolved: BTreeSet::new(),
            beside: BTreeSet::new(),
        }
    }

    /// The layers of this head have at least this number. An earlier head of the same name may have
    /// left older ones.
    pub fn since(&self) -> LayerId {
        self.forked_from.as_ref().map_or(LayerId(0), |fork| fork.since)
    }

    /// Whether nothing was written to the head since it was forked.
    pub fn is_unused(&self) -> bool {
        self.forked_from.as_ref().is_some_and(|fork| fork.layer == self.layer)
    }

    /// The sealed layers that the record needs, besides its top.
    pub fn named(&self) -> impl Iterator<Item = LayerId> + '_ {
        let forked = self.forked_from.iter().map(|fork| fork.layer);
        forked.chain(self.merged.iter().flat_map(|merge| [merge.layer, merge.into]))
    }
}

/// Where a head was forked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkPoint {
    /// The head that was forked.
    pub head: String,
    /// The sealed layer with which the fork began.
    pub layer: LayerId,
    /// When it was forked.
    pub time: Timestamp,
    /// The number of the next new layer at that time.
    pub since: LayerId,
}

/// A merge of another head into this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MergePoint {
    /// The sealed state that the merge led to. It came from both. A state that does not come from
    /// it does not have the merge.
    pub into: LayerId,
    /// The sealed state of the other head that was merged, or an ancestor of it.
    pub layer: LayerId,
}

/// The layers that neither drop nor gc removes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldsRecord {
    /// Their numbers.
    pub layers: BTreeSet<LayerId>,
}

/// The heads that races of attempts have made and not finished with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RaceRecord {
    /// Their names. One can be missing.
    pub heads: BTreeSet<String>,
}

/// A record of `heads.log`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpRecord {
    /// The head.
    pub head: String,
    /// When it happened.
    pub time: Timestamp,
    /// The kind of operation.
    pub verb: OpVerb,
    /// A description for people.
    pub description: String,
    /// The sealed layer with the tree right after the operation; `None` is the base.
    pub tree: Option<LayerId>,
    /// The epoch of the base below that tree.
    pub epoch: Epoch,
}

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpVerb {
    /// The store was created.
    Create,
    /// The user made a checkpoint.
    Checkpoint,
    /// jailfs sealed the tree before an operation that changes it.
    Seal,
    /// The head was restored to a checkpoint.
    Restore,
    /// Changes since the last checkpoint were discarded.
    Discard,
    /// The tree was written into the base.
    Apply,
    /// An apply was undone in the base.
    UndoApply,
    /// The head was restored to its state after an operation.
    OpRestore,
    /// Heads were forked from this one. The description has their names.
    Fork,
    /// Another head was dropped. The description is its name.
    DropFork,
    /// Another head was merged into this one. The description has its name.
    Merge,
    /// The tree was replaced by that of an archive. The description has its name.
    Import,
    /// The tree was replaced by a state from a registry. The description is its reference.
    Pull,
}

/// A record of `identities`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IdentityRecord {
    /// Every number of our own range below this may have been given out.
    Reserved(Ino),
    /// A base node has this number instead of the host's.
    Named {
        /// The device; 0 for the device of the base's root, whose number may change at a reboot.
        dev: u64,
        /// `st_ino` on the host.
        host: u64,
        /// The number in the mount.
        ino: Ino,
    },
    /// A sync of everything before this record begins.
    Synced,
    /// The base is this directory from now on.
    Root(BaseMark),
    /// No base node may get this host number. A node had it that has another number now, or is
    /// gone.
    Taken(Ino),
}
