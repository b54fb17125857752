//! Giving space back: what no head, checkpoint, hold, recent operation, pre-image or held file needs any more.
//!
//! Four steps, each of which can be cut off anywhere and is then finished the next time:
//!
//! 1. **Needed** are the checkpoints, what is held, what the recent operations can go back to, and what a head lies on.
//! 2. Each needed layer whose parent is not needed is rewritten as what leads from the nearest needed layer below it.
//!    Afterwards no needed layer lies on one that is not.
//! 3. The records of those that are not needed go, top down; their pools stay, as layers that are **collected**.
//! 4. In every pool, the blocks to which no extent of a needed state refers are given back to the host; a collected layer
//!    without any is removed.
//!
//! A block is given back only when it can never be asked for again: the records that gave it up are synced, no window of
//! addresses still leads to it, and whoever was reading when it was given up is done.

pub(in crate::timeline) mod policy;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::LiveSet;
use crate::fs::merged::pre_images::{PreImages, index_in_history};
use crate::store::content::live_ranges::LiveRanges;
use crate::store::layer::LayerInfo;
use crate::store::placement::packing::JournalRewriter;
use crate::store::record::{Header, LayerKind, OpRecord, Record, Seal};
use crate::timeline::Timeline;
use crate::tree::{Edit, Tree};
use crate::types::{ByteRange, Epoch, LayerId, Timestamp};

/// Records of the log of heads that are kept, also if nothing can go back to them.
const OPERATIONS: usize = 1000;

/// What is kept, besides what is always kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// What the last operations can go back to, so many.
    pub operations: u64,
    /// The newest checkpoints, so many; none keeps all. What is held is kept in any case.
    pub checkpoints: Option<u64>,
    /// Checkpoints are given up, the oldest first, until the store takes no more than this many bytes.
    pub store_bytes: Option<u64>,
    /// Sealed layers that stay, whatever else is said, and as the checkpoints that they are.
    pub spared: BTreeSet<LayerId>,
}

/// What was given back, or would be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Checkpoints that were given up for it, oldest first.
    pub dropped: Vec<LayerInfo>,
    /// Layers whose records are not needed.
    pub layers: Vec<LayerId>,
    /// Bytes on disk.
    pub bytes: u64,
}

impl Timeline {
    /// Gives back what is not needed; with `dry_run` only says what that is.
    ///
    /// # Errors
    /// What the store answers; what was done until then stays done, and nothing that is needed is lost.
    pub fn gc(&self, keep: &Keep, dry_run: bool) -> Result<Collected> {
        self.gc_while(keep, dry_run, &|| true)
    }

    /// The same, as long as `go` says so: what is not done then is done the next time.
    pub(super) fn gc_while(
        &self,
        keep: &Keep,
        dry_run: bool,
        go: &dyn Fn() -> bool,
    ) -> Result<Collected> {
        let _operation = self.lock_operation();
        let _compacting = self.compacting.lock();
        let before = self.store.disk_usage();
        let mut collected =
            Collected { dropped: self.excess_checkpoints(keep), ..Collected::default() };
        let mut bytes = self.collect(keep, &mut collected, dry_run, go)?;
        while let Some(limit) = keep.store_bytes {
            // What a round gave back is gone for the next; one that only says so finds it again.
            let rest = if dry_run { before.saturating_sub(bytes) } else { self.store.disk_usage() };
            let left =
                self.droppable(keep).into_iter().find(|info| !collected.dropped.contains(info));
            let Some(oldest) = left.filter(|_| rest > limit && go()) else { break };
            collected.dropped.push(oldest);
            if dry_run {
                collected.layers.clear();
            }
            bytes = bytes.max(self.collect(keep, &mut collected, dry_run, go)?);
        }
        if !dry_run {
            self.store
                .trim_ops(usize::try_from(keep.operations).unwrap_or(usize::MAX).max(OPERATIONS))?;
        }
        collected.bytes =
            if dry_run { bytes } else { before.saturating_sub(self.store.disk_usage()) };
        Ok(collected)
    }

    /// Checkpoints that may be given up, oldest first.
    pub(super) fn droppable(&self, keep: &Keep) -> Vec<LayerInfo> {
        let held = self.store.holds();
        let stays = |layer: &LayerId| held.contains(layer) || keep.spared.contains(layer);
        let mut all = self.sealed();
        all.retain(|l| is_checkpoint(l) && !stays(&l.header.layer));
        all
    }

    /// The checkpoints before the newest so many that may be given up.
    pub(super) fn excess_checkpoints(&self, keep: &Keep) -> Vec<LayerInfo> {
        let Some(kept) = keep.checkpoints.and_then(|kept| usize::try_from(kept).ok()) else {
            return Vec::new();
        };
        let mut newest: Vec<LayerId> =
            self.sealed().iter().filter(|l| is_checkpoint(l)).map(|l| l.header.layer).collect();
        newest.drain(..newest.len().saturating_sub(kept));
        let mut old = self.droppable(keep);
        old.retain(|info| !newest.contains(&info.header.layer));
        old
    }

    /// Gives up a checkpoint: it is none any more, and its space comes back with the next [`Timeline::gc`], when no
    /// recent operation needs it either.
    ///
    /// # Errors
    /// One that is held, or what the store answers.
    pub fn drop_checkpoint(&self, layer: LayerId) -> Result<()> {
        let _operation = self.lock_operation();
        let _compacting = self.compacting.lock();
        let attempt = || format!("drop checkpoint {layer}");
        if self.store.holds().contains(&layer) {
            return Err(Error::new(Kind::InUse, attempt(), "it is held")
                .hint(format!("'jailfs release {layer}' lets it go")));
        }
        match self.store.layer(layer) {
            Some(info) if is_checkpoint(&info) => self.unmark_checkpoint(&info),
            _ => Err(Error::new(Kind::NoStore, attempt(), "there is no such checkpoint")
                .hint("'jailfs log' lists them")),
        }
    }

    pub(super) fn unmark_checkpoint(&self, info: &LayerInfo) -> Result<()> {
        let layer = info.header.layer;
        let Some(seal) = info.seal.clone() else { return Ok(()) };
        let told = seal.name.as_ref().map(|name| format!(" '{name}'")).unwrap_or_default();
        let (below, tree) = self.load_with_parent(info.header.parent, layer)?;
        let seal = Seal { name: None, automatic: true, message: format!("dropped{told}"), ..seal };
        self.store.rewrite_layer(info.header.clone(), seal, below.edits_to(&tree))
    }

    /// Keeps a checkpoint from being dropped; or not any more.
    ///
    /// # Errors
    /// When there is no such checkpoint, or what the store answers.
    pub fn hold(&self, layer: LayerId, held: bool) -> Result<()> {
        let _operation = self.lock_operation();
        let mut holds = self.store.holds();
        let verb = if held { "hold" } else { "release" };
        if held && !self.sealed().iter().any(|l| l.header.layer == layer) {
            return Err(Error::new(
                Kind::NoStore,
                format!("{verb} checkpoint {layer}"),
                "there is no such checkpoint",
            )
            .hint("'jailfs log' lists them"));
        }
        if held {
            holds.insert(layer)
        } else {
            holds.remove(&layer)
        };
        self.store.set_holds(&holds).map_err(|e| e.during(format!("{verb} checkpoint {layer}")))
    }

    pub(super) fn load_with_parent(
        &self,
        parent: Option<LayerId>,
        layer: LayerId,
    ) -> Result<(Tree, Tree)> {
        let mut trees = self.trees.lock();
        let below = parent.map_or_else(|| Ok(Tree::new()), |parent| trees.load(parent))?;
        Ok((below, trees.load(layer)?))
    }

    /// The sealed layers that something needs, apart from those that `collected` gives up.
    pub(super) fn needed(
        &self,
        keep: &Keep,
        collected: &Collected,
        stale: &BTreeSet<LayerId>,
    ) -> BTreeSet<LayerId> {
        let dropped: BTreeSet<LayerId> = collected.dropped.iter().map(|l| l.header.layer).collect();
        let mut needed = self.store.holds();
        let ops = self.store.ops();
        needed.extend(recent(&ops, keep).filter_map(|op| op.tree));
        needed.retain(|layer| !dropped.contains(layer));
        needed.extend(&keep.spared);
        for info in self.store.catalog() {
            if is_checkpoint(&info) && !dropped.contains(&info.header.layer) {
                needed.insert(info.header.layer);
            }
            if info.seal.is_none() && !stale.contains(&info.header.layer) {
                needed.extend(info.header.parent);
            }
        }
        let sealed: BTreeSet<LayerId> = self.sealed().iter().map(|l| l.header.layer).collect();
        needed.retain(|layer| sealed.contains(layer));
        needed
    }

    /// Gives back what only given-up states need. Gives the bytes that this frees, or would.
    fn collect(
        &self,
        keep: &Keep,
        collected: &mut Collected,
        dry_run: bool,
        go: &dyn Fn() -> bool,
    ) -> Result<u64> {
        if !dry_run {
            // What gave blocks up must survive before the blocks go. It comes first: it also seals a layer whose seal failed,
            // and then that is needed like any other.
            self.fs.sync().attempt(|| "gc: sync")?;
        }
        let stale = self.unwritten_layers()?;
        // What is sealed from here on was not looked at.
        let sealed = self.sealed();
        let needed = self.needed(keep, collected, &stale);
        let reach = self.fs.live_set();
        if !dry_run {
            self.store.require_certain_remaps()?;
            self.store.note_sweep();
            // A checkpoint that is given up and on which the tree lies is a layer like any other from now on.
            let dropped = collected.dropped.iter().map(|info| info.header.layer);
            let kept = dropped.filter(|layer| needed.contains(layer));
            for info in kept.filter_map(|layer| self.store.layer(layer)).filter(is_checkpoint) {
                self.unmark_checkpoint(&info)?;
            }
        }
        let below = |layer: LayerId| {
            self.nearest(&needed, self.store.layer(layer).and_then(|l| l.header.parent))
        };
        if !dry_run {
            for layer in stale.iter().chain(&self.abandoned()?) {
                self.store.remove_layer(*layer)?;
            }
            self.store.remove_newborn()?;
            let mut rewriting = self.store.journal_rewriter();
            for layer in &needed {
                if !go() {
                    return Ok(0);
                }
                self.reparent(&mut rewriting, *layer, below(*layer))?;
            }
            rewriting.finish()?;
        }
        let images = self.needed_pre_images(keep, &needed, &reach);
        if !dry_run {
            // What of single files nobody can see any more when these go.
            let gone =
                self.pre_image_layers().into_iter().filter(|(_, layer)| !images.contains(layer));
            let first = gone.map(|(place, _)| place + 1).max().unwrap_or(0);
            self.fs.forget_versions_before(Epoch(u32::try_from(first).unwrap_or(u32::MAX)));
            self.fs.secure_versions().map_err(|e| e.during("gc"))?;
        }
        if !go() {
            return Ok(0);
        }
        let refs = self.live_ranges_of(&needed, &reach, &images, below)?;
        let unneeded = sealed.into_iter().rev().filter(|l| !needed.contains(&l.header.layer));
        let mut bytes = 0;
        let mut given_up = self.store.journal_rewriter();
        for info in unneeded {
            if !go() {
                return Ok(bytes);
            }
            bytes += info.bytes + info.index.unwrap_or(0);
            collected.layers.push(info.header.layer);
            if !dry_run {
                self.trees.lock().forget(info.header.layer);
                given_up.collect(info.header.layer)?;
            }
        }
        given_up.finish()?;
        if !dry_run {
            self.empty_pre_images(&images)?;
            self.thin_remaps(&refs)?;
            if !self.store.wait_for_read_epochs() {
                return Err(Error::new(
                    Kind::InUse,
                    "gc",
                    "somebody does not come to an end of reading",
                )
                .hint("what is not needed any more is still there; try again"));
            }
        }
        Ok(bytes + self.sweep(&refs, &reach, dry_run)?)
    }

    /// Takes out of the maps what nothing refers to, so that no map leads to what is given back.
    fn thin_remaps(&self, refs: &LiveRanges) -> Result<()> {
        let mut maps = Vec::new();
        for layer in self.store.catalog().iter().filter(|l| l.mapped).map(|l| l.header.layer) {
            let Some(map) = self.store.remap(layer)? else { continue };
            let thinner = map.restricted_to(&refs.of(layer));
            if thinner != *map {
                maps.push((layer, thinner));
            }
        }
        self.may_be_sparse.store(true, Ordering::Relaxed);
        self.store.publish_remaps(&maps)
    }

    /// Layers that were begun for a head and never written to: every restore leaves one behind, and so does one that was cut
    /// off. Nothing refers to them: an undo that failed can leave content in one that has no record, for a version, and that may be brought
    /// back later. Only in turn: an operation that is under way begins such a layer, too.
    pub(super) fn unwritten_layers(&self) -> Result<BTreeSet<LayerId>> {
        let catalog = self.store.catalog();
        let parents: BTreeSet<LayerId> = catalog.iter().filter_map(|l| l.header.parent).collect();
        let top = self.store.head(&self.head)?.map(|head| head.layer);
        let mut stale = BTreeSet::new();
        // The newest layer stays, so that its number is not given out again.
        let older = catalog.iter().rev().skip(1);
        for info in older.filter(|l| l.seal.is_none() && l.header.kind != LayerKind::PreImage) {
            let layer = info.header.layer;
            let is_top = layer == self.fs.upper_layer() || Some(layer) == top;
            if is_top || parents.contains(&layer) {
                continue;
            }
            if !self.store.read_layer(layer)?.is_changed {
                stale.insert(layer);
            }
        }
        // Of what has no content nothing can be used. A pool that cannot be looked at may have some.
        let has_content =
            |layer: &&LayerId| self.store.pool_end(**layer).map_or(true, |end| end > 0);
        let filled: BTreeSet<LayerId> = stale.iter().filter(has_content).copied().collect();
        if let Some(first) = filled.first() {
            let mut used = self.live_ranges_from(*first)?;
            self.add_unsealed(&catalog, &mut used)?;
            stale.retain(|layer| !filled.contains(layer) || !used.is_used(*layer));
        }
        Ok(stale)
    }

    /// What layers refer to that are not sealed and are not written to, whatever becomes of them.
    fn add_unsealed(&self, catalog: &[LayerInfo], used: &mut LiveRanges) -> Result<()> {
        let upper = self.fs.upper_layer();
        for info in catalog.iter().filter(|l| l.seal.is_none() && l.header.layer != upper) {
            for record in self.store.read_layer(info.header.layer)?.records() {
                let Record::Edits(edits) = record? else { continue };
                for edit in edits {
                    if let Edit::Map { range, to: Some(source), .. } = edit {
                        used.add(source, range.len());
                    }
                }
            }
        }
        Ok(())
    }

    /// The layers of applies that were given up before they changed anything. No epoch begins with them, and nothing refers to them.
    fn abandoned(&self) -> Result<Vec<LayerId>> {
        let mut abandoned = Vec::new();
        let catalog = self.store.catalog();
        // The newest layer stays, so that its number is not given out again.
        let older = catalog.iter().rev().skip(1);
        for info in older.filter(|l| l.seal.is_none() && l.header.kind == LayerKind::PreImage) {
            let contents = self.store.read_layer(info.header.layer)?;
            if contents.has(|record| matches!(record, Record::Abandoned))? {
                abandoned.push(info.header.layer);
            }
        }
        Ok(abandoned)
    }

    /// The nearest needed layer at or below one.
    fn nearest(&self, needed: &BTreeSet<LayerId>, mut at: Option<LayerId>) -> Option<LayerId> {
        while let Some(layer) = at.filter(|layer| !needed.contains(layer)) {
            at = self.store.layer(layer).and_then(|l| l.header.parent);
        }
        at
    }

    /// Puts a layer on another one below it.
    fn reparent(
        &self,
        rewriting: &mut JournalRewriter<'_>,
        layer: LayerId,
        parent: Option<LayerId>,
    ) -> Result<()> {
        let Some(LayerInfo { header, seal: Some(seal), .. }) = self.store.layer(layer) else {
            return Ok(());
        };
        if header.parent == parent {
            return Ok(());
        }
        let (below, tree) = self.load_with_parent(parent, layer)?;
        let time = self.created_first(&header, parent);
        rewriting.rewrite(Header { parent, time, ..header }, seal, below.edits_to(&tree))
    }

    /// When the first of the layers was begun that a layer takes the place of, down to one that stays: since then the tree looks
    /// at the base.
    fn created_first(&self, header: &Header, stays: Option<LayerId>) -> Timestamp {
        let (mut begun, mut at) = (header.time, header.parent);
        while let Some(below) =
            at.filter(|below| Some(*below) != stays).and_then(|id| self.store.layer(id))
        {
            begun = begun.min(below.header.time);
            at = below.header.parent;
        }
        begun
    }

    /// What the needed states refer to.
    fn live_ranges_of(
        &self,
        needed: &BTreeSet<LayerId>,
        reach: &LiveSet,
        images: &BTreeSet<LayerId>,
        below: impl Fn(LayerId) -> Option<LayerId>,
    ) -> Result<LiveRanges> {
        let mut refs = LiveRanges::default();
        let mut add = |from: &Tree, to: &Tree| {
            for ino in from.diff(to).contents {
                to.extents(ino).for_each(|(_, extent)| refs.add(extent.source, extent.len));
            }
        };
        for layer in needed {
            let (from, to) = self.load_with_parent(below(*layer), *layer)?;
            add(&from, &to);
        }
        let parent = self.parent();
        let from =
            parent.map_or_else(|| Ok(Tree::new()), |parent| self.trees.lock().load(parent))?;
        add(&from, &reach.state.tree);
        add(&Tree::new(), &reach.orphans);
        refs.add_extents(reach.versions.iter().flat_map(|content| &content.extents));
        for range in &reach.reserved {
            refs.add_range(reach.upper, *range);
        }
        refs.add_range(reach.upper, ByteRange { start: reach.end, end: u64::MAX });
        let applies = self.applies.lock().clone();
        for (place, layer) in
            self.pre_image_layers().into_iter().filter(|(_, layer)| images.contains(layer))
        {
            // A new pool for each apply, and few of them: the whole of it stays.
            refs.add_range(layer, ByteRange { start: 0, end: u64::MAX });
            let image = applies.get(place).into_iter().flat_map(|image| image.extents());
            image.for_each(|(range, source)| refs.add(source, range.len()));
        }
        Ok(refs)
    }

    /// The layers of the applies, oldest first, with their places in the history.
    fn pre_image_layers(&self) -> Vec<(usize, LayerId)> {
        let mut all = self.store.catalog();
        all.retain(|l| l.header.kind == LayerKind::PreImage && l.seal.is_some());
        all.iter().map(|l| (index_in_history(l.header.epoch), l.header.layer)).collect()
    }

    /// The layers of those applies through which a needed state or a held file sees the base, and of the last one, which can be
    /// undone.
    fn needed_pre_images(
        &self,
        keep: &Keep,
        needed: &BTreeSet<LayerId>,
        reach: &LiveSet,
    ) -> BTreeSet<LayerId> {
        let ops = self.store.ops();
        let states =
            needed.iter().filter_map(|layer| self.store.layer(*layer)).map(|l| l.header.epoch);
        let epochs = states
            .chain(recent(&ops, keep).map(|op| op.epoch))
            .chain([reach.state.lower.epoch()])
            .chain(reach.orphans_from);
        let oldest = epochs.min().unwrap_or(Epoch(0)).0;
        let undoable = self.last_undoable().unwrap_or(u32::MAX);
        let from = usize::try_from(oldest.min(undoable)).unwrap_or(usize::MAX);
        let images = self.pre_image_layers().into_iter().filter(|(place, _)| *place >= from);
        images.map(|(_, layer)| layer).collect()
    }

    /// Empties the pre-images that nobody needs; what refers to nothing of theirs goes with [`Timeline::sweep`].
    fn empty_pre_images(&self, needed: &BTreeSet<LayerId>) -> Result<()> {
        let mut emptied = Vec::new();
        for (place, layer) in
            self.pre_image_layers().into_iter().filter(|(_, layer)| !needed.contains(layer))
        {
            if let Some(LayerInfo { header, seal: Some(seal), compact: false, .. }) =
                self.store.layer(layer)
            {
                self.store.rewrite_layer(header, seal, std::iter::empty())?;
            }
            emptied.push(place);
        }
        let mut applies = self.applies.lock();
        let removed = std::sync::Arc::new(PreImages::collected());
        for place in emptied {
            if let Some(image) = applies.get_mut(place) {
                *image = std::sync::Arc::clone(&removed);
            }
        }
        Ok(())
    }

    /// Gives the unused blocks of all pools back, and removes collected layers that have none left and to which nothing refers.
    fn sweep(&self, refs: &LiveRanges, reach: &LiveSet, dry_run: bool) -> Result<u64> {
        let places = self.store.locate(refs)?;
        let (mut bytes, mut removed) = (0, Vec::new());
        let last_image =
            self.pre_image_layers().last().map_or(LayerId(u32::MAX), |(_, layer)| *layer);
        for info in self.store.catalog() {
            let layer = info.header.layer;
            // Layers that were begun since, and those of an operation that was cut off, are looked at the next time.
            let is_settled = info.seal.is_some() || layer == reach.upper;
            if !is_settled {
                continue;
            }
            let unused = self.store.unused(layer, &places)?;
            bytes += unused.iter().map(ByteRange::len).sum::<u64>();
            if dry_run {
                continue;
            }
            // The last apply stays, emptied or not: its number counts the epochs.
            let is_emptied =
                info.header.kind == LayerKind::PreImage && info.compact && layer != last_image;
            let has_no_tree =
                matches!(info.header.kind, LayerKind::Collected | LayerKind::Gathered);
            let is_given_up = is_emptied || has_no_tree;
            if is_given_up && !refs.is_used(layer) && !places.is_used(layer) {
                removed.push(layer);
            } else if !unused.is_empty() {
                self.store.sync_remap(layer)?;
                self.store.punch_pool(layer, &unused)?;
            }
        }
        self.store.remove_layers(&removed)?;
        Ok(bytes)
    }
}

/// Whether a person made it.
pub(super) fn is_checkpoint(info: &LayerInfo) -> bool {
    info.seal.as_ref().is_some_and(|seal| !seal.automatic)
}

/// The operations that can be gone back to.
fn recent<'o>(ops: &'o [(u64, OpRecord)], keep: &Keep) -> impl Iterator<Item = &'o OpRecord> {
    ops.iter().map(|(_, op)| op).rev().take(usize::try_from(keep.operations).unwrap_or(usize::MAX))
}
