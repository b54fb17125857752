//! The orphans: the records and content of nodes that were removed or replaced, or that have no
//! name yet, and that the kernel holds.
//!
//! Always true:
//! * No orphan is in the journal. A remount forgets all of them, and no process can have them open.
//! * A record is stored under the orphan's id as its number, because the number may have a live
//!   node again.
//! * Writes to an orphan go to an unlinked scratch file, which extents name as layer [`SCRATCH`].
//!   The file exists only while there are orphans.
//! * An *unnamed* file (O_TMPFILE) is an orphan that never had a name, and the only one that can
//!   get one. Writes to it go to the pool of the upper layer, so that its name costs one record.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, FsError, FsResult, Result};
use crate::fs::Extents;
use crate::fs::merged::state::SCRATCH;
use crate::store::Store;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::content::pool::{PoolWriter, Unused};
use crate::tree::{Edit, Misfit, Node, PersistentMap, Source, Tree};
use crate::types::{ByteRange, Epoch, Ino, NodeId};

/// Space of the scratch file that nothing needs any more. To free it can be slow, so the caller
/// does that without the core lock.
#[must_use]
pub(in crate::fs) struct Leftover {
    unused: Vec<Unused>,
    /// The scratch file itself, after the last orphan.
    _scratch: Option<PoolWriter>,
}

impl Leftover {
    /// Frees the space. The caller holds no core lock.
    pub(in crate::fs) fn free(self) {
        if let Err(error) = self.unused.iter().try_for_each(Unused::punch) {
            log::warn!("a scratch file keeps its space until no orphan is left: {error}");
        }
    }
}

/// Creates a scratch file. The caller holds no core lock.
///
/// # Errors
/// As open(2) and fstat(2).
pub(in crate::fs) fn create_scratch(store: &Store) -> Result<PoolWriter> {
    let file = Arc::new(store.tmp().scratch()?);
    PoolWriter::new(SCRATCH, file).map_err(|e| Error::io("create a scratch file", &e))
}

/// The records of the orphans, and where their bytes are. A clone copies a few pointers.
#[derive(Clone, Default)]
pub(in crate::fs) struct OrphanRecords {
    tree: Tree,
    /// The epoch of the base to which an orphan's extents refer. The head may move to another one.
    epochs: PersistentMap<Ino, Epoch>,
}

impl OrphanRecords {
    /// The records and extents.
    pub(in crate::fs) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The oldest epoch of the base to which the extents of an orphan refer.
    pub(in crate::fs) fn oldest_epoch(&self) -> Option<Epoch> {
        let in_base =
            |key: &Ino| self.tree.extents(*key).any(|(_, extent)| extent.source.is_base());
        self.epochs.iter().filter(|(key, _)| in_base(key)).map(|(_, epoch)| *epoch).min()
    }

    /// Adds the record of a node that becomes an orphan, and where its bytes were in a state of
    /// `epoch`.
    ///
    /// # Errors
    /// [`FsError::Damage`] if the node cannot have content.
    pub(in crate::fs) fn add(
        &mut self,
        id: NodeId,
        content: (Arc<Node>, Extents),
        epoch: Epoch,
    ) -> FsResult<()> {
        self.insert(Ino(id.0), content, epoch)
    }

    fn insert(
        &mut self,
        key: Ino,
        (node, extents): (Arc<Node>, Extents),
        epoch: Epoch,
    ) -> FsResult<()> {
        self.tree.put_whole(key, node, extents).map_err(|Misfit(what)| FsError::Damage(what))?;
        self.epochs.insert(key, epoch);
        Ok(())
    }

    /// Removes the record of a node, if there is one. Returns whether none is left.
    pub(in crate::fs) fn remove(&mut self, id: NodeId) -> bool {
        let key = Ino(id.0);
        self.epochs.remove(&key);
        let is_removed =
            self.tree.node(key).is_none() || self.tree.apply(&Edit::Remove { ino: key }).is_ok();
        if !is_removed {
            log::error!("orphan {} could not be released", key.0);
        }
        is_removed
    }
}

/// The records and content of the orphans.
pub(in crate::fs) struct Orphans {
    records: OrphanRecords,
    unnamed: HashSet<Ino>,
    scratch: Option<PoolWriter>,
    last_removal: Option<Instant>,
}

impl Orphans {
    pub(super) fn new() -> Orphans {
        let (records, unnamed) = (OrphanRecords::default(), HashSet::new());
        Orphans { records, unnamed, scratch: None, last_removal: None }
    }

    /// The records.
    pub(in crate::fs) fn records(&self) -> &OrphanRecords {
        &self.records
    }

    /// Replaces the records by a clone to which nodes were added, and from which those were removed
    /// that the kernel has forgotten since. `has_new` says whether any node was added.
    pub(super) fn set_records(&mut self, records: OrphanRecords, has_new: bool) {
        self.records = records;
        if has_new {
            self.last_removal = Some(Instant::now());
        }
    }

    /// The records and extents.
    pub(in crate::fs) fn tree(&self) -> &Tree {
        &self.records.tree
    }

    /// The epoch of the base to which an orphan's extents refer; none for an unknown orphan.
    pub(in crate::fs) fn epoch_of(&self, key: Ino) -> Option<Epoch> {
        self.records.epochs.get(&key).copied()
    }

    /// When a node last became an orphan; none if the kernel holds no orphan.
    pub(in crate::fs) fn last_removal(&self) -> Option<Instant> {
        self.last_removal.filter(|_| !self.records.epochs.is_empty())
    }

    /// Stores the record of a node that was removed, and where its bytes were in a state of
    /// `epoch`.
    pub(super) fn insert_removed(
        &mut self,
        key: Ino,
        content: (Arc<Node>, Extents),
        epoch: Epoch,
    ) -> FsResult<()> {
        self.last_removal = Some(Instant::now());
        self.records.insert(key, content, epoch)
    }

    /// Stores the record of a new file without a name.
    pub(super) fn insert_unnamed(&mut self, key: Ino, node: Node, epoch: Epoch) -> FsResult<()> {
        self.records.insert(key, (Arc::new(node), Extents::new()), epoch)?;
        self.unnamed.insert(key);
        Ok(())
    }

    /// Whether an orphan never had a name.
    pub(in crate::fs) fn is_unnamed(&self, key: Ino) -> bool {
        self.unnamed.contains(&key)
    }

    /// Changes an orphan. Returns the space that the change made unused. Once the caller frees it,
    /// a read of these bytes that is still under way gets zeros.
    pub(in crate::fs) fn apply(&mut self, key: Ino, edits: &[Edit]) -> FsResult<Option<Leftover>> {
        let size = self.records.tree.size(key);
        let may_free = |edit: &Edit| match edit {
            Edit::Resize { size: to, .. } => *to < size,
            Edit::Map { to, .. } => to.is_none(),
            _ => false,
        };
        let before = edits.iter().any(may_free).then(|| self.live_scratch(key));
        edits
            .iter()
            .try_for_each(|edit| self.records.tree.apply(edit))
            .map_err(|Misfit(what)| FsError::Damage(what))?;
        let Some(before) = before else { return Ok(None) };
        Ok(self.leftover(&self.live_scratch(key).unused(SCRATCH, &before.of(SCRATCH))))
    }

    /// Removes an orphan that the kernel has forgotten, or that got a name. Returns the space of
    /// the scratch file to free: for the last orphan all of it. No read of these bytes is under
    /// way, because a reader holds the node.
    pub(super) fn remove(&mut self, key: Ino) -> Option<Leftover> {
        self.unnamed.remove(&key);
        let written = self.live_scratch(key).of(SCRATCH);
        if !self.records.remove(NodeId(key.0)) {
            return None;
        }
        if self.records.epochs.is_empty() {
            let scratch = self.scratch.take()?;
            return Some(Leftover { unused: Vec::new(), _scratch: Some(scratch) });
        }
        self.scratch.as_mut()?.close_window(key);
        self.leftover(&written)
    }

    /// The ranges of the scratch file to which an orphan refers.
    fn live_scratch(&self, key: Ino) -> LiveRanges {
        let mut live = LiveRanges::default();
        for (_, extent) in self.tree().extents(key) {
            if matches!(extent.source, Source::Pool { layer: SCRATCH, .. }) {
                live.add(extent.source, extent.len);
            }
        }
        live
    }

    /// Ranges of the scratch file, as space that nothing needs; `None` if there are none.
    fn leftover(&self, ranges: &[ByteRange]) -> Option<Leftover> {
        let scratch = self.scratch.as_ref().filter(|_| !ranges.is_empty())?;
        let unused = ranges.iter().map(|range| scratch.unused(*range)).collect();
        Some(Leftover { unused, _scratch: None })
    }

    /// The scratch file, for reading; none if no orphan was written to.
    pub(in crate::fs) fn scratch_file(&self) -> Option<&Arc<File>> {
        self.scratch.as_ref().map(PoolWriter::file)
    }

    /// Sends writes to orphans to this scratch file from now on. Does nothing if there is another
    /// one, or the orphan that is to be written is gone.
    pub(in crate::fs) fn use_scratch(&mut self, key: Ino, scratch: PoolWriter) {
        if self.scratch.is_none() && self.records.epochs.contains_key(&key) {
            self.scratch = Some(scratch);
        }
    }

    /// Where writes to orphans go, if the scratch file exists.
    pub(in crate::fs) fn open_scratch(&mut self) -> Option<&mut PoolWriter> {
        self.scratch.as_mut()
    }
}
