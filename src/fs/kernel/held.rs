//! The component of [`crate::fs::Core`] that owns what exists only because the kernel holds it: the
//! node table, the orphans and the listings of directories that are being read.
//!
//! Always true:
//! * A listing belongs to a held, live node.
//! * An orphan has a record, unless the base lost the record before it could be read.
//! * A record is freed when the kernel forgets its node.

use std::collections::{BTreeSet, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::error::FsResult;
use crate::fs::Extents;
use crate::fs::kernel::listing::Listing;
use crate::fs::kernel::nodes::{Held, NodeTable};
use crate::fs::kernel::orphans::{Leftover, OrphanRecords, Orphans};
use crate::tree::{Meta, Node};
use crate::types::{Epoch, Ino, NodeId};

/// A node that the kernel has forgotten.
pub(in crate::fs) struct ForgottenNode {
    pub(in crate::fs) node: Held,
    /// The space to free, now that the node is forgotten.
    pub(in crate::fs) leftover: Option<Leftover>,
}

/// The nodes that the kernel holds. Derefs to the node table.
pub(in crate::fs) struct HeldNodes {
    nodes: NodeTable,
    orphans: Orphans,
    listings: HashMap<NodeId, Listing>,
}

impl Deref for HeldNodes {
    type Target = NodeTable;
    fn deref(&self) -> &NodeTable {
        &self.nodes
    }
}

impl DerefMut for HeldNodes {
    fn deref_mut(&mut self) -> &mut NodeTable {
        &mut self.nodes
    }
}

impl HeldNodes {
    pub(in crate::fs) fn new() -> HeldNodes {
        HeldNodes { nodes: NodeTable::new(), orphans: Orphans::new(), listings: HashMap::new() }
    }

    pub(in crate::fs) fn orphans(&self) -> &Orphans {
        &self.orphans
    }

    pub(in crate::fs) fn orphans_mut(&mut self) -> &mut Orphans {
        &mut self.orphans
    }

    /// Takes back `count` lookups of a node. Returns the node if the kernel no longer holds it.
    pub(in crate::fs) fn forget(&mut self, id: NodeId, count: u64) -> Option<ForgottenNode> {
        let node = self.nodes.forget(id, count)?;
        self.listings.remove(&id);
        let is_orphan = !node.is_live();
        let leftover = if is_orphan { self.orphans.remove(Ino(id.0)) } else { None };
        Some(ForgottenNode { node, leftover })
    }

    /// Makes a live node an orphan, and keeps its record and where its bytes were in a state of
    /// `epoch`. `change` sets the attributes that its holders see.
    pub(in crate::fs) fn make_orphan(
        &mut self,
        id: NodeId,
        (mut node, extents): (Arc<Node>, Extents),
        epoch: Epoch,
        change: impl FnOnce(&mut Meta),
    ) -> FsResult<()> {
        change(&mut Arc::make_mut(&mut node).meta);
        self.orphans.insert_removed(Ino(id.0), (node, extents), epoch)?;
        self.make_orphan_without_record(id);
        Ok(())
    }

    /// Makes live nodes orphans. `records` has the records of all orphans.
    pub(in crate::fs) fn make_orphans(&mut self, ids: &BTreeSet<NodeId>, records: OrphanRecords) {
        self.orphans.set_records(records, !ids.is_empty());
        ids.iter().for_each(|id| self.make_orphan_without_record(*id));
    }

    /// Makes a live node an orphan of which nothing is left: its holders get ENOENT.
    pub(in crate::fs) fn make_orphan_without_record(&mut self, id: NodeId) {
        self.nodes.orphan(id);
        self.listings.remove(&id);
    }

    /// Adds a file without a name, which the kernel holds from now on. Returns its id.
    pub(in crate::fs) fn add_unnamed(
        &mut self,
        ino: Ino,
        node: Node,
        epoch: Epoch,
    ) -> FsResult<NodeId> {
        let id = NodeId(ino.0);
        self.orphans.insert_unnamed(ino, node, epoch)?;
        self.nodes.hold(ino, None);
        self.nodes.orphan(id);
        Ok(id)
    }

    /// Makes a file without a name live, because the tree has it now. Returns the space to free.
    pub(in crate::fs) fn unnamed_was_linked(&mut self, id: NodeId) -> Option<Leftover> {
        let leftover = self.orphans.remove(Ino(id.0));
        self.nodes.revive(id);
        leftover
    }

    /// The listing of a directory that is being read.
    pub(in crate::fs) fn listing(&self, id: NodeId) -> Option<&Listing> {
        self.listings.get(&id)
    }

    /// Takes the listing of a directory out, to read or refresh it while the rest changes.
    pub(in crate::fs) fn take_listing(&mut self, id: NodeId) -> Option<Listing> {
        self.listings.remove(&id)
    }

    /// Puts the listing of a directory back.
    pub(in crate::fs) fn set_listing(&mut self, id: NodeId, listing: Listing) {
        self.listings.insert(id, listing);
    }
}
