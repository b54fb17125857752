//! Compacts sealed layers, so that the time to mount depends on how much differs from the base, and
//! not on the number of changes that led there.
//!
//! * No visible state changes.
//! * A sealed journal is rewritten as the shortest list of edits from its parent's tree.
//! * If many layers must be replayed since the last index, the whole tree is written as a new
//!   index.
//! * A sealed pool is trimmed, and then gets its checksums.
//! * Layers that were created and never written to are removed, and the identity log is compacted.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::Result;
use crate::store::Unsettled;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::layer::LayerInfo;
use crate::store::record::{Header, LayerKind};
use crate::timeline::Common;
use crate::timeline::dormant::{LiveHead, live_sets};
use crate::tree::Tree;
use crate::types::LayerId;

/// Layers that are replayed over an index, at most.
const MAX_REPLAYED_LAYERS: usize = 128;
/// Bytes of journals that are replayed over an index, at most, besides half of the index's size.
const MAX_REPLAYED_BYTES: u64 = 256 << 10;
/// The number of newest indexes that are kept.
const KEPT_INDEXES: usize = 4;
/// How long an operation on a full disk waits for a compaction that is running.
const COMPACTION_WAIT: Duration = Duration::from_millis(300);

/// How much a compaction rewrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Journals that are not small, and states that are far above an index.
    WhereItPays,
    /// Everything.
    Everything,
}

impl Common {
    /// Rewrites journals and writes indexes where that shortens the replay. If it is interrupted,
    /// the part that is done stays.
    ///
    /// # Errors
    /// The store failed; nothing is lost then.
    pub fn compact(&self, effort: Effort) -> Result<()> {
        let _compacting = self.compacting.lock();
        let mut to_rewrite = match effort {
            Effort::WhereItPays => self.store.unsettled(Unsettled::LongJournal),
            Effort::Everything => self.sealed(),
        };
        to_rewrite.retain(|info| !info.compact);
        for info in to_rewrite {
            if self.is_stopping() {
                return Ok(());
            }
            self.compact_layer(&info)?;
        }
        self.trim_and_checksum()?;
        if self.is_stopping() {
            return Ok(());
        }
        self.write_indexes(effort)?;
        self.store.compact_identities()?;
        // Not while an operation is running: a layer that it just created has no writes either.
        if let Some(_operation) = self.operation.try_lock() {
            for layer in self.unwritten_layers()? {
                self.store.remove_layer(layer)?;
            }
        }
        Ok(())
    }

    /// Writes an index for the newest seal of each open head where the last index is far, and
    /// removes old ones.
    fn write_indexes(&self, effort: Effort) -> Result<()> {
        let heads = self.open_heads();
        let below: BTreeSet<LayerId> = heads.iter().filter_map(|head| head.newest_seal()).collect();
        let mut is_any = false;
        for top in &below {
            if self.replay_is_long(*top) || effort == Effort::Everything {
                let tree = self.trees.lock().load(*top)?;
                self.store.write_index(*top, Tree::new().edits_to(&tree))?;
                is_any = true;
            }
        }
        if !is_any {
            return Ok(());
        }
        let used: BTreeSet<LayerId> =
            below.into_iter().filter_map(|top| self.nearest_index(top)).collect();
        let mut indexed: Vec<LayerId> = self.store.catalog().iter().filter_map(has_index).collect();
        indexed.reverse();
        for old in indexed.into_iter().skip(KEPT_INDEXES).filter(|layer| !used.contains(layer)) {
            self.store.remove_index(old)?;
        }
        Ok(())
    }

    /// The nearest layer at or below `top` that has an index.
    fn nearest_index(&self, top: LayerId) -> Option<LayerId> {
        let mut at = Some(top);
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            if info.index.is_some() {
                return Some(info.header.layer);
            }
            at = info.header.parent;
        }
        None
    }

    /// Makes a running [`Common::compact`] end soon, and later ones at once. The next mount does
    /// the rest.
    pub fn stop_compacting(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Allows compactions again after [`Common::stop_compacting`].
    pub fn begin_compacting(&self) {
        self.stopping.store(false, Ordering::Relaxed);
    }

    /// Frees content in sealed layers that was replaced or removed before their seal. Returns the
    /// bytes, or `None` if a compaction is running or a reader looks at states. Used when the disk
    /// is full and an operation cannot wait for [`Common::compact`].
    pub fn reclaim_now(&self) -> Option<u64> {
        // The caller may be the thread that answers the kernel, so it must not wait for long.
        let _compacting = self.compacting.try_lock_for(COMPACTION_WAIT)?;
        let made: Result<_> =
            self.trim_and_checksum().and_then(|first| Ok((first, self.trim_again()?)));
        match made {
            Ok((first, again)) => match first.unwrap_or(0) + again.unwrap_or(0) {
                0 => first.and(again),
                bytes => Some(bytes),
            },
            Err(error) => {
                log::warn!("no space could be freed: {error}");
                Some(0)
            }
        }
    }

    /// Trims newly sealed pools, then writes the checksums of the rest. Returns the bytes freed, or
    /// `None`, with nothing done, if a reader looks at states.
    fn trim_and_checksum(&self) -> Result<Option<u64>> {
        let new = self.store.unsettled(Unsettled::Unsummed);
        let has_tree = |info: &&LayerInfo| info.header.kind.is_of_head();
        let to_trim: Vec<LayerId> =
            new.iter().filter(has_tree).map(|info| info.header.layer).collect();
        let mut bytes = 0;
        if !to_trim.is_empty() {
            let Some(_exclusive) = self.try_exclusive() else { return Ok(None) };
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

    /// Trims sealed pools again whose content the edit history no longer needs. Returns the bytes
    /// freed, or `None` if a reader looks at states.
    fn trim_again(&self) -> Result<Option<u64>> {
        let Some(_exclusive) = self.exclusive_soon() else { return Ok(None) };
        let heads = self.open_heads();
        let dropped = heads.iter().flat_map(|head| head.fs.layers_with_dropped_edits());
        let mut layers: Vec<LayerId> = dropped.collect::<BTreeSet<LayerId>>().into_iter().collect();
        layers.retain(|layer| {
            self.store
                .layer(*layer)
                .is_some_and(|info| info.seal.is_some() && info.header.kind != LayerKind::PreImage)
        });
        // Their remaps may lead to other pools.
        let mut places: BTreeSet<LayerId> = layers.iter().copied().collect();
        for layer in &layers {
            let map = self.store.remap(*layer)?;
            places.extend(map.iter().flat_map(|map| map.runs()).map(|run| run.layer));
        }
        let trimmed = self.trim(&places.into_iter().collect::<Vec<LayerId>>())?;
        // Any head can remember them for the next time.
        if trimmed.is_none()
            && let Some(head) = heads.first()
        {
            head.fs.note_layers_with_dropped_edits(layers);
        }
        Ok(trimmed)
    }

    /// Punches the content of sealed pools that nothing refers to. References come from the tree of
    /// the layer itself, the states above it, orphans, and the edit history; and from any state if
    /// the remap of another layer leads here. Returns the bytes, or `None` if a reader did not
    /// finish in time.
    fn trim(&self, layers: &[LayerId]) -> Result<Option<u64>> {
        let Some(mut first) = layers.iter().min().copied() else { return Ok(Some(0)) };
        // A layer without checksums was not deduplicated yet, so no other layer's remap leads to
        // it.
        if layers.iter().any(|layer| self.store.layer(*layer).is_some_and(|info| info.summed)) {
            self.store.require_certain_remaps()?;
        }
        let mut is_home = false;
        for layer in layers {
            is_home |= self.store.is_remap_target(*layer)?;
        }
        if is_home {
            // Any layer's remap may lead here, so references of all states count.
            first = LayerId(0);
        }
        let addresses = self.live_ranges_from(first)?;
        let used = if is_home { self.store.locate(&addresses)? } else { addresses };
        let (mut bytes, mut to_free) = (0, Vec::new());
        let mut secured = false;
        for layer in layers {
            let unused = self.store.unused(*layer, &used)?;
            if unused.is_empty() {
                continue;
            }
            if !secured {
                self.store.note_sweep();
                self.open_heads().iter().try_for_each(|head| head.fs.secure_edits())?;
                if !self.store.wait_for_read_epochs() {
                    return Ok(None);
                }
                secured = true;
            }
            self.store.sync_remap(*layer)?;
            to_free.push((*layer, unused));
        }
        if !to_free.is_empty() {
            bytes = self.store.free(&to_free)?;
            self.store.tidy_archive()?;
        }
        Ok(Some(bytes))
    }

    /// The ranges that anything refers to, of the content in layer `first` and all above it.
    pub(super) fn live_ranges_from(&self, first: LayerId) -> Result<LiveRanges> {
        let mut used = LiveRanges::default();
        // A checkpoint, a restore or a merge can seal a layer and replace the tree between any two
        // of these steps. In this order, such a layer is the upper one of a live tree, not sealed,
        // or sealed. In another order it can be none of these, and content that only its tree
        // refers to would be punched.
        let open = self.open_heads();
        let live = live_sets(&open);
        self.add_dormant(&open, &live, &mut used)?;
        let mut sealed = self.store.layers_from(first);
        sealed.retain(LayerInfo::is_sealed_state);
        let mut add = |from: &Tree, to: &Tree| {
            for ino in from.diff(to).contents {
                to.extents(ino).for_each(|(_, extent)| used.add(extent.source, extent.len));
            }
        };
        let load = |layer: Option<LayerId>| {
            layer.map_or_else(|| Ok(Tree::new()), |layer| self.trees.lock().load(layer))
        };
        // States above a layer can refer to content that the layer's own tree does not: an undo
        // brings back what was replaced.
        for info in sealed {
            add(&load(info.header.parent)?, &load(Some(info.header.layer))?);
        }
        for LiveHead { parent, live } in &live {
            add(&load(*parent)?, &live.state.tree);
        }
        for LiveHead { live, .. } in &live {
            for (_, extent) in live.orphans.all_extents() {
                used.add(extent.source, extent.len);
            }
            used.add_extents(live.edits.iter().flat_map(|content| &content.extents));
        }
        for (range, source) in self.applies.lock().iter().flat_map(|images| images.extents()) {
            used.add(source, range.len());
        }
        Ok(used)
    }

    /// Rewrites a journal as the shortest list of edits from the parent's tree to the layer's.
    fn compact_layer(&self, info: &LayerInfo) -> Result<()> {
        let Some(seal) = info.seal.as_deref() else { return Ok(()) };
        let (below, tree) = {
            let mut trees = self.trees.lock();
            let below =
                info.header.parent.map_or_else(|| Ok(Tree::new()), |parent| trees.load(parent))?;
            (below, trees.load(info.header.layer)?)
        };
        let header = Header::clone(&info.header);
        self.store.rewrite_layer(header, seal.clone(), below.edits_to(&tree))
    }

    /// Whether rebuilding the tree of a layer replays so much that a new index is worth its size.
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
    use super::*;
    use crate::base::Base;
    use crate::fs::Caller;
    use crate::jail::{Jail, Policy};
    use crate::store::layer::Upper;
    use crate::store::record::Seal;
    use crate::store::{Store, StoreOptions};
    use crate::sys::{clock, failpoint};
    use crate::timeline::Timeline;
    use crate::types::{Name, NodeId};
    use nix::unistd::Pid;
    use std::sync::Arc;

    fn timeline(dir: &std::path::Path) -> Arc<Timeline> {
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
        Timeline::open(&Common::open(store, base).unwrap(), "main", jail).unwrap()
    }

    fn write(timeline: &Timeline, name: &str) {
        let (name, by) = (Name::new(name.as_bytes()).unwrap(), Caller { uid: 0, gid: 0 });
        let file = timeline.fs().mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, by).unwrap();
        timeline.fs().write(file.id, 0, &[7; 10_000], false).unwrap();
    }

    /// A timeline with a sealed file and one that is not, and the layer of the second one.
    fn changed(dir: &std::path::Path) -> (Arc<Timeline>, LayerId) {
        let timeline = timeline(dir);
        write(&timeline, "first");
        timeline.seal(seal(), None).unwrap();
        write(&timeline, "second");
        let layer = timeline.fs().upper_layer();
        (timeline, layer)
    }

    fn seal() -> Seal {
        Seal { name: None, message: String::new(), time: clock::now(), automatic: false }
    }

    /// Waits until another thread sleeps, after it has slept more than `slept` times. Returns how
    /// often it has.
    fn wait_for_sleep(thread: Pid, slept: u64) -> u64 {
        loop {
            let path = format!("/proc/self/task/{thread}/status");
            let status = std::fs::read_to_string(path).unwrap();
            let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            let times = of("voluntary_ctxt_switches:").trim().parse().unwrap();
            if of("State:").contains('S') && times > slept {
                return times;
            }
            std::thread::yield_now();
        }
    }

    /// Finds the live ranges in another thread, while `meanwhile` is called with that thread.
    fn live_ranges_while(timeline: &Arc<Timeline>, meanwhile: impl FnOnce(Pid)) -> LiveRanges {
        std::thread::scope(|scope| {
            let (send_thread, thread) = std::sync::mpsc::channel();
            let other = scope.spawn(move || {
                send_thread.send(nix::unistd::gettid()).unwrap();
                timeline.live_ranges_from(LayerId(0)).unwrap()
            });
            meanwhile(thread.recv().unwrap());
            other.join().unwrap()
        })
    }

    fn next_layer(timeline: &Timeline) -> Upper {
        let (below, kind) = (Some(timeline.fs().upper_layer()), LayerKind::Continues);
        timeline.store.create_layer(below, "main", timeline.epoch(), kind).unwrap()
    }

    fn bytes_of(used: &LiveRanges, layer: LayerId) -> u64 {
        used.of(layer).iter().map(|range| range.len()).sum()
    }

    /// The other thread lists the sealed layers and then waits for the lock of the tree cache. The
    /// checkpoint is made at that point.
    #[test]
    fn a_concurrent_checkpoint_keeps_its_content_from_being_freed() {
        let dir = tempfile::tempdir().unwrap();
        let (timeline, layer) = changed(dir.path());
        let next = next_layer(&timeline);
        let trees = timeline.trees.lock();
        let used = live_ranges_while(&timeline, |other| {
            wait_for_sleep(other, 0);
            timeline.fs().seal(next, seal(), None).unwrap();
            drop(trees);
        });
        assert_eq!(bytes_of(&used, layer), 10_000, "the bytes of the second file");
    }

    /// The layer is still the upper one when the other thread looks at the layers that are not. It
    /// is not sealed when that thread lists the sealed ones, and its seal is written after that.
    #[test]
    fn a_checkpoint_that_is_being_sealed_keeps_its_content_from_being_freed() {
        let dir = tempfile::tempdir().unwrap();
        let (timeline, layer) = changed(dir.path());
        let (_unused, next) = (next_layer(&timeline), next_layer(&timeline));
        let (dormant, trees) = (timeline.dormant.lock(), timeline.trees.lock());
        let used = live_ranges_while(&timeline, |other| {
            let slept = wait_for_sleep(other, 0);
            let sealed = failpoint::with("fail:store.write:1:ENOSPC", || {
                timeline.fs().seal(next, seal(), None)
            });
            assert!(sealed.is_err() && timeline.fs().upper_layer() != layer);
            drop(dormant);
            wait_for_sleep(other, slept);
            timeline.fs().finish_seals().unwrap();
            drop(trees);
        });
        assert_eq!(bytes_of(&used, layer), 10_000, "the bytes of the second file");
    }
}
