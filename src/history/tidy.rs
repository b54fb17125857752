//! Keeping the way to every state short: what a day of work leaves is rewritten as what came of it.
//!
//! Nothing that can be seen changes by it. A sealed journal becomes the shortest list of edits from its parent's tree; where
//! many layers lie between a state and the last index below it, its whole tree is written down; the content of a sealed
//! pool gets its checksums; what was begun and never used goes, and the log of numbers forgets what was said twice. So the time to mount
//! depends on how much differs from the base, not on how it came to differ.

use std::sync::atomic::Ordering;

use crate::error::Result;
use crate::history::Timeline;
use crate::store::layer::LayerInfo;
use crate::store::record::LayerKind;
use crate::store::used::Used;
use crate::tree::Tree;
use crate::types::LayerId;

/// A journal of fewer bytes is left as it is.
const SMALL_JOURNAL: u64 = 16 << 10;
/// Layers that are replayed over an index, at most.
const LONGEST_WAY: usize = 128;
/// Bytes of journals that are replayed, without an index or in addition to half of its size.
const FREE_BYTES: u64 = 256 << 10;
/// Indexes that are kept, the newest.
const INDEXES: usize = 4;

/// What is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Journals that are not small, and what is far from an index.
    WhereItPays,
    /// All of it.
    Everything,
}

impl Timeline {
    /// Rewrites journals and writes indexes where that makes the way to a state shorter. Cut off anywhere, it has done a
    /// part of it.
    ///
    /// # Errors
    /// What the store answers; nothing is lost then.
    pub fn tidy(&self, effort: Effort) -> Result<()> {
        let _tidying = self.tidying.lock();
        for info in self.sealed() {
            if self.is_stopping() {
                return Ok(());
            }
            if !info.compact && (info.bytes > SMALL_JOURNAL || effort == Effort::Everything) {
                self.compact(&info)?;
            }
        }
        self.trim_and_sum()?;
        if self.is_stopping() {
            return Ok(());
        }
        if let Some(top) = self.parent()
            && (self.way_is_long(top) || effort == Effort::Everything)
        {
            let tree = self.roots.lock().load(top)?;
            self.store.write_index(top, Tree::new().edits_to(&tree))?;
            let mut indexed: Vec<LayerId> = self.store.catalog().iter().filter_map(has_index).collect();
            indexed.reverse();
            for old in indexed.into_iter().skip(INDEXES) {
                self.store.remove_index(old)?;
            }
        }
        self.store.tidy_identities()?;
        // Not while an operation is under way: what it has begun looks the same.
        if let Some(_turn) = self.turn.try_lock() {
            for layer in self.stale()? {
                self.store.remove_layer(layer)?;
            }
        }
        Ok(())
    }

    /// Ends a [`Timeline::tidy`] that is under way, soon, and all that come: what is not done is done after the next start.
    pub fn stop_tidying(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Gives back what sealed layers hold of content that was replaced or removed before their seal; bytes. For a full disk,
    /// when somebody cannot wait for [`Timeline::tidy`].
    pub fn make_room(&self) -> u64 {
        let _tidying = self.tidying.lock();
        self.trim_and_sum().unwrap_or_else(|error| {
            log::warn!("no room could be made: {error}");
            0
        })
    }

    /// Trims newly sealed pools, then makes the checksums of what is left. Not while somebody looks at states.
    fn trim_and_sum(&self) -> Result<u64> {
        let new = self.store.catalog().into_iter().filter(|info| info.seal.is_some() && !info.summed);
        let mut bytes = 0;
        for info in new {
            if self.is_stopping() {
                return Ok(bytes);
            }
            if matches!(info.header.kind, LayerKind::Continues | LayerKind::Branches) {
                let Some(_alone) = self.fs.try_alone() else { return Ok(bytes) };
                bytes += self.trim(&info)?;
            }
            self.store.write_sums(info.header.layer)?;
        }
        Ok(bytes)
    }

    /// Content that was written to a layer and is in its pool, but neither in the tree that it became nor in a held file, was
    /// seen by no state.
    fn trim(&self, info: &LayerInfo) -> Result<u64> {
        let layer = info.header.layer;
        let (below, tree) = {
            let mut roots = self.roots.lock();
            let below = info.header.parent.map_or_else(|| Ok(Tree::new()), |parent| roots.load(parent))?;
            (below, roots.load(layer)?)
        };
        let mut used = Used::default();
        for ino in below.diff(&tree).contents {
            tree.extents(ino).for_each(|(_, extent)| used.add(extent.source, extent.len));
        }
        for (_, extent) in self.fs.reach().orphans.all_extents() {
            used.add(extent.source, extent.len);
        }
        let unused = used.unused(layer, &self.store.pool_data(layer)?);
        if unused.is_empty() || !self.store.wait_for_readers() {
            return Ok(0);
        }
        self.store.punch_pool(layer, &unused)?;
        Ok(unused.iter().map(|range| range.len()).sum())
    }

    /// Rewrites a journal as what leads from the parent's tree to the layer's.
    fn compact(&self, info: &LayerInfo) -> Result<()> {
        let Some(seal) = info.seal.clone() else { return Ok(()) };
        let (below, tree) = {
            let mut roots = self.roots.lock();
            let below = info.header.parent.map_or_else(|| Ok(Tree::new()), |parent| roots.load(parent))?;
            (below, roots.load(info.header.layer)?)
        };
        self.store.rewrite_layer(info.header.clone(), seal, below.edits_to(&tree))
    }

    /// Whether more is replayed to rebuild the tree of a layer than its size is worth.
    fn way_is_long(&self, top: LayerId) -> bool {
        let (mut layers, mut bytes) = (0, 0);
        let mut at = Some(top);
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            if let Some(index) = info.index {
                return layers > LONGEST_WAY || bytes > FREE_BYTES + index / 2;
            }
            layers += 1;
            bytes += info.bytes;
            at = info.header.parent;
        }
        layers > LONGEST_WAY || bytes > FREE_BYTES
    }
}

fn has_index(info: &LayerInfo) -> Option<LayerId> {
    let wanted = info.index.is_some() && info.header.kind != LayerKind::Collected;
    wanted.then_some(info.header.layer)
}
