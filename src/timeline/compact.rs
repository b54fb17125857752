//! Keeping the way to every state short: what a day of work leaves is rewritten as what came of it.
//!
//! Nothing that can be seen changes by it. A sealed journal becomes the shortest list of edits from its parent's tree; where
//! many layers lie between a state and the last index below it, its whole tree is written down; the content of a sealed
//! pool gets its checksums; what was begun and never used goes, and the log of numbers forgets what was said twice. So the time to mount
//! depends on how much differs from the base, not on how it came to differ.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::Result;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::layer::LayerInfo;
use crate::store::record::LayerKind;
use crate::timeline::Timeline;
use crate::tree::Tree;
use crate::types::LayerId;

/// A journal of fewer bytes is left as it is.
const SMALL_JOURNAL: u64 = 16 << 10;
/// Layers that are replayed over an index, at most.
const MAX_REPLAYED_LAYERS: usize = 128;
/// Bytes of journals that are replayed, without an index or in addition to half of its size.
const MAX_REPLAYED_BYTES: u64 = 256 << 10;
/// Indexes that are kept, the newest.
const KEPT_INDEXES: usize = 4;
/// How long a full disk waits for somebody who tidies up.
const COMPACTION_WAIT: Duration = Duration::from_millis(300);

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
    pub fn compact(&self, effort: Effort) -> Result<()> {
        let _compacting = self.compacting.lock();
        for info in self.sealed() {
            if self.is_stopping() {
                return Ok(());
            }
            if !info.compact && (info.bytes > SMALL_JOURNAL || effort == Effort::Everything) {
                self.compact_layer(&info)?;
            }
        }
        self.trim_and_checksum()?;
        if self.is_stopping() {
            return Ok(());
        }
        if let Some(top) = self.parent()
            && (self.replay_is_long(top) || effort == Effort::Everything)
        {
            let tree = self.trees.lock().load(top)?;
            self.store.write_index(top, Tree::new().edits_to(&tree))?;
            let mut indexed: Vec<LayerId> =
                self.store.catalog().iter().filter_map(has_index).collect();
            indexed.reverse();
            for old in indexed.into_iter().skip(KEPT_INDEXES) {
                self.store.remove_index(old)?;
            }
        }
        self.store.compact_identities()?;
        // Not while an operation is under way: what it has begun looks the same.
        if let Some(_operation) = self.operation.try_lock() {
            for layer in self.unwritten_layers()? {
                self.store.remove_layer(layer)?;
            }
        }
        Ok(())
    }

    /// Ends a [`Timeline::compact`] that is under way, soon, and all that come: what is not done is done after the next start.
    pub fn stop_compacting(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Takes [`Timeline::stop_compacting`] back.
    pub fn begin_compacting(&self) {
        self.stopping.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Gives back what sealed layers hold of content that was replaced or removed before their seal; bytes. For a full disk,
    /// when somebody cannot wait for [`Timeline::compact`]; none if somebody else is at it, or looks at states.
    pub fn reclaim_now(&self) -> Option<u64> {
        // Whoever asks may be the thread that answers the kernel.
        let _compacting = self.compacting.try_lock_for(COMPACTION_WAIT)?;
        let made: Result<_> =
            self.trim_and_checksum().and_then(|first| Ok((first, self.trim_again()?)));
        match made {
            Ok((first, again)) => match first.unwrap_or(0) + again.unwrap_or(0) {
                0 => first.and(again),
                bytes => Some(bytes),
            },
            Err(error) => {
                log::warn!("no room could be made: {error}");
                Some(0)
            }
        }
    }

    /// Trims newly sealed pools, then makes the checksums of what is left; none, and neither, if somebody looks at states.
    fn trim_and_checksum(&self) -> Result<Option<u64>> {
        let mut new = self.store.catalog();
        new.retain(|info| info.seal.is_some() && !info.summed);
        let has_tree = |info: &&LayerInfo| info.header.kind.is_of_head();
        let to_trim: Vec<LayerId> =
            new.iter().filter(has_tree).map(|info| info.header.layer).collect();
        let mut bytes = 0;
        if !to_trim.is_empty() {
            let Some(_exclusive) = self.fs.try_exclusive() else { return Ok(None) };
            let Some(trimmed) = self.trim(&to_trim)? else { return Ok(None) };
            bytes = trimmed;
        }
        for info in new {
            if self.is_stopping() {
                return Ok(Some(bytes));
            }
            self.store.write_checksums(info.header.layer)?;
        }
        Ok(Some(bytes))
    }

    /// Trims sealed pools anew of which versions were given up; none if somebody looks at states.
    fn trim_again(&self) -> Result<Option<u64>> {
        let Some(_exclusive) = self.fs.exclusive_soon() else { return Ok(None) };
        let mut layers: Vec<LayerId> = self.fs.layers_given_up().into_iter().collect();
        layers.retain(|layer| {
            self.store
                .layer(*layer)
                .is_some_and(|info| info.seal.is_some() && info.header.kind != LayerKind::PreImage)
        });
        // What was at their addresses may be in others.
        let mut places: BTreeSet<LayerId> = layers.iter().copied().collect();
        for layer in &layers {
            let map = self.store.remap(*layer)?;
            places.extend(map.iter().flat_map(|map| map.runs()).map(|run| run.layer));
        }
        let trimmed = self.trim(&places.into_iter().collect::<Vec<LayerId>>())?;
        if trimmed.is_none() {
            self.fs.note_layers_given_up(layers);
        }
        Ok(trimmed)
    }

    /// Content that is in the pool of a layer, but neither in the tree that the layer became, nor in one above, nor in a held file or
    /// a version, is seen by nobody; nor by others that lead to it, if the layer has content that they gave up. Gives the bytes, or none if somebody
    /// reads for too long.
    fn trim(&self, layers: &[LayerId]) -> Result<Option<u64>> {
        let Some(mut first) = layers.iter().min().copied() else { return Ok(Some(0)) };
        // Before it has checksums, nobody looks for equal content in it.
        if layers.iter().any(|layer| self.store.layer(*layer).is_some_and(|info| info.summed)) {
            self.store.require_certain_remaps()?;
        }
        let mut is_home = false;
        for layer in layers {
            is_home |= self.store.is_remap_target(*layer)?;
        }
        if is_home {
            // Any layer may lead to it, and so any state.
            first = LayerId(0);
        }
        let addresses = self.live_ranges_from(first)?;
        let used = if is_home { self.store.locate(&addresses)? } else { addresses };
        let mut bytes = 0;
        let mut secured = false;
        for layer in layers {
            let unused = self.store.unused(*layer, &used)?;
            if unused.is_empty() {
                continue;
            }
            if !secured {
                self.store.note_sweep();
                self.fs.secure_versions()?;
                if !self.store.wait_for_read_epochs() {
                    return Ok(None);
                }
                secured = true;
            }
            self.store.sync_remap(*layer)?;
            self.store.punch_pool(*layer, &unused)?;
            bytes += unused.iter().map(|range| range.len()).sum::<u64>();
        }
        Ok(Some(bytes))
    }

    /// What anything refers to, of the content that was written to a layer or one above it.
    pub(super) fn live_ranges_from(&self, first: LayerId) -> Result<LiveRanges> {
        let mut used = LiveRanges::default();
        let mut add = |from: &Tree, to: &Tree| {
            for ino in from.diff(to).contents {
                to.extents(ino).for_each(|(_, extent)| used.add(extent.source, extent.len));
            }
        };
        let load = |layer: Option<LayerId>| {
            layer.map_or_else(|| Ok(Tree::new()), |layer| self.trees.lock().load(layer))
        };
        // The parent first, then the live tree, then the sealed layers: a checkpoint can come between
        // any two of them. In this order its layer is among the sealed ones, or above the parent. In
        // the other order it is neither, and what only it refers to would be given back.
        let mut below = self.parent();
        let reach = self.fs.live_set();
        // States above also show what the tree of a layer does not know: an undo brings back what was replaced.
        for info in self.sealed().into_iter().filter(|info| info.header.layer >= first) {
            add(&load(info.header.parent)?, &load(Some(info.header.layer))?);
        }
        // What lies between the last seal and the live tree is in layers whose seal failed, on a full disk say.
        while let Some(info) =
            below.and_then(|layer| self.store.layer(layer)).filter(|l| l.seal.is_none())
        {
            add(&load(info.header.parent)?, &load(below)?);
            below = info.header.parent;
        }
        add(&load(below)?, &reach.state.tree);
        for (_, extent) in reach.orphans.all_extents() {
            used.add(extent.source, extent.len);
        }
        used.add_extents(reach.versions.iter().flat_map(|content| &content.extents));
        for (range, source) in self.applies.lock().iter().flat_map(|images| images.extents()) {
            used.add(source, range.len());
        }
        Ok(used)
    }

    /// Rewrites a journal as what leads from the parent's tree to the layer's.
    fn compact_layer(&self, info: &LayerInfo) -> Result<()> {
        let Some(seal) = info.seal.clone() else { return Ok(()) };
        let (below, tree) = {
            let mut trees = self.trees.lock();
            let below =
                info.header.parent.map_or_else(|| Ok(Tree::new()), |parent| trees.load(parent))?;
            (below, trees.load(info.header.layer)?)
        };
        self.store.rewrite_layer(info.header.clone(), seal, below.edits_to(&tree))
    }

    /// Whether more is replayed to rebuild the tree of a layer than its size is worth.
    fn replay_is_long(&self, top: LayerId) -> bool {
        let (mut layers, mut bytes) = (0, 0);
        let mut at = Some(top);
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            if let Some(index) = info.index {
                return layers > MAX_REPLAYED_LAYERS || bytes > MAX_REPLAYED_BYTES + index / 2;
            }
            layers += 1;
            bytes += info.bytes;
            at = info.header.parent;
        }
        layers > MAX_REPLAYED_LAYERS || bytes > MAX_REPLAYED_BYTES
    }
}

fn has_index(info: &LayerInfo) -> Option<LayerId> {
    let wanted = info.index.is_some() && info.header.kind != LayerKind::Collected;
    wanted.then_some(info.header.layer)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::Base;
    use crate::fs::Caller;
    use crate::jail::{Jail, Policy};
    use crate::store::record::Seal;
    use crate::store::{Store, StoreOptions};
    use crate::sys::clock;
    use crate::types::{Name, NodeId};

    fn timeline(dir: &std::path::Path) -> Timeline {
        let (base, store) = (dir.join("base"), dir.join("store"));
        std::fs::create_dir(&base).unwrap();
        let base = Arc::new(Base::open(&base).unwrap());
        let options = StoreOptions { volatile: true, ..StoreOptions::default() };
        let store = Arc::new(Store::create(&store, b"/base", base.root_id(), options).unwrap());
        let jail = Jail {
            policy: Policy::Deny,
            mount_point: b"/mnt".to_vec(),
            base_path: b"/base".to_vec(),
            allowed_targets: Vec::new(),
        };
        Timeline::open(store, base, "main", jail).unwrap()
    }

    fn write(timeline: &Timeline, name: &str) {
        let (name, by) = (Name::new(name.as_bytes()).unwrap(), Caller { uid: 0, gid: 0 });
        let file = timeline.fs().mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, by).unwrap();
        timeline.fs().write(file.id, 0, &[7; 10_000], false).unwrap();
    }

    fn seal() -> Seal {
        Seal { name: None, message: String::new(), time: clock::now(), automatic: false }
    }

    /// The other thread waits for the lock of the trees right behind its look at the sealed layers.
    #[test]
    fn a_checkpoint_made_meanwhile_hides_no_content_from_what_frees_space() {
        let dir = tempfile::tempdir().unwrap();
        let timeline = timeline(dir.path());
        write(&timeline, "first");
        timeline.seal(seal()).unwrap();
        write(&timeline, "second");
        let layer = timeline.fs().upper_layer();
        let trees = timeline.trees.lock();
        let used = std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let timeline = &timeline;
            let other = scope.spawn(move || {
                tell.send(nix::unistd::gettid()).unwrap();
                timeline.live_ranges_from(LayerId(0)).unwrap()
            });
            let stat = format!("/proc/self/task/{}/stat", told.recv().unwrap());
            while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
                std::thread::yield_now();
            }
            let kind = LayerKind::Continues;
            let next =
                timeline.store.create_layer(Some(layer), "main", timeline.epoch(), kind).unwrap();
            timeline.fs().seal(next, seal()).unwrap();
            drop(trees);
            other.join().unwrap()
        });
        let bytes: u64 = used.of(layer).iter().map(|range| range.len()).sum();
        assert_eq!(bytes, 10_000, "the bytes of the second file");
    }
}
