//! Garbage collection: frees layers and blocks that no head, checkpoint, hold, recent operation,
//! pre-image, open file or edit history needs.
//!
//! Always true:
//! * a block is punched only when no read can live it: the records that dropped it are synced, no
//!   remap leads to it, and all readers that began before are done;
//! * no needed layer has a parent that is not needed.
//!
//! An interrupted step is finished by the next collection. The steps:
//!
//! All heads count, whether they are open or not ([`super::dormant`]).
//!
//! 1. Find the **needed** layers: checkpoints, held layers, the targets of recent operations, the
//!    layer below each upper layer, what the records of heads name, and what merge bases need.
//! 2. Rewrite each needed layer whose parent is not needed, as edits from the nearest needed layer
//!    below.
//! 3. Remove the records of unneeded layers, from the top down. Their pools stay, in layers that
//!    are **collected**.
//! 4. Punch the blocks of every pool that no needed state refers to. Remove collected layers that
//!    have none left.

pub(in crate::timeline) mod policy;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::merged::pre_images::{PreImages, index_in_history};
use crate::store::Unsettled;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::layer::LayerInfo;
use crate::store::placement::archiving::JournalRewriter;
use crate::store::record::{Header, LayerKind, OpRecord, OpVerb, Record, Seal};
use crate::timeline::dormant::{LiveHead, live_sets};
use crate::timeline::{Common, Timeline};
use crate::tree::Tree;
use crate::types::{ByteRange, Epoch, LayerId, Timestamp};

/// Records of the operation log that are kept, at least, even if their states are gone.
const OPERATIONS: usize = 1000;

/// The states that a collection keeps in addition to those that it always keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The number of latest operations whose states are kept.
    pub operations: u64,
    /// The number of newest checkpoints of each head that are kept; `None` keeps all. Those of
    /// dropped heads count together. Held ones are always kept.
    pub checkpoints: Option<u64>,
    /// Drop checkpoints, the oldest first, until the store takes no more than this many bytes.
    pub store_bytes: Option<u64>,
    /// Sealed layers that are kept in any case. Checkpoints among them stay checkpoints.
    pub spared: BTreeSet<LayerId>,
}

/// The layers and bytes that a collection freed, or would free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The checkpoints that it dropped, oldest first.
    pub dropped: Vec<LayerInfo>,
    /// The layers whose records were not needed.
    pub layers: Vec<LayerId>,
    /// Bytes on disk.
    pub bytes: u64,
}

impl Common {
    /// Frees everything that is not needed; with `dry_run` only reports it.
    ///
    /// # Errors
    /// The store failed. The part that is done stays done, and nothing that is needed is lost.
    pub fn gc(&self, keep: &Keep, dry_run: bool) -> Result<Collected> {
        self.gc_while(keep, dry_run, &|| true)
    }

    /// As [`Common::gc`], while `go` returns true. The next collection does the rest.
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
            // A dry run frees nothing, so subtract what it would have freed.
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

    /// The checkpoints that may be dropped, oldest first.
    pub(super) fn droppable(&self, keep: &Keep) -> Vec<LayerInfo> {
        let held = self.store.holds();
        let stays = |layer: &LayerId| held.contains(layer) || keep.spared.contains(layer);
        let mut all = self.sealed();
        all.retain(|l| is_checkpoint(l) && !stays(&l.header.layer));
        all
    }

    /// The checkpoints beyond [`Keep::checkpoints`] that may be dropped, oldest first.
    pub(super) fn excess_checkpoints(&self, keep: &Keep) -> Vec<LayerInfo> {
        let Some(kept) = keep.checkpoints.and_then(|kept| usize::try_from(kept).ok()) else {
            return Vec::new();
        };
        let mut of_heads: BTreeMap<Option<String>, Vec<LayerId>> = BTreeMap::new();
        for info in self.sealed().into_iter().filter(is_checkpoint) {
            let head = Some(&info.header.head).filter(|head| self.store.is_of(&info, head));
            of_heads.entry(head.cloned()).or_default().push(info.header.layer);
        }
        let newest = |of_head: &Vec<LayerId>| -> Vec<LayerId> {
            of_head.iter().rev().take(kept).copied().collect()
        };
        let newest: BTreeSet<LayerId> = of_heads.values().flat_map(newest).collect();
        let mut old = self.droppable(keep);
        old.retain(|info| !newest.contains(&info.header.layer));
        old
    }

    /// Drops a checkpoint. The next [`Common::gc`] frees its space, unless a recent operation
    /// needs the layer.
    ///
    /// # Errors
    /// [`Kind::InUse`] if it is held, [`Kind::NoStore`] if there is no such checkpoint, or the
    /// store failed.
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

    /// Rewrites the seal of a checkpoint as an automatic one, so that it is a checkpoint no longer.
    pub(super) fn unmark_checkpoint(&self, info: &LayerInfo) -> Result<()> {
        let layer = info.header.layer;
        let Some(seal) = info.seal.as_deref() else { return Ok(()) };
        let quoted = seal.name.as_ref().map(|name| format!(" '{name}'")).unwrap_or_default();
        let (below, tree) = self.load_with_parent(info.header.parent, layer)?;
        let message = format!("dropped{quoted}");
        let seal = Seal { name: None, automatic: true, message, ..seal.clone() };
        self.store.rewrite_layer(Header::clone(&info.header), seal, below.edits_to(&tree))
    }

    /// Holds a checkpoint, so that it cannot be dropped; or releases it.
    ///
    /// # Errors
    /// There is no such checkpoint, or the store failed.
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

    /// The sealed layers that are needed when the checkpoints in `collected` are dropped.
    pub(super) fn needed(
        &self,
        keep: &Keep,
        collected: &Collected,
        unwritten: &BTreeSet<LayerId>,
    ) -> BTreeSet<LayerId> {
        let dropped: BTreeSet<LayerId> = collected.dropped.iter().map(|l| l.header.layer).collect();
        let mut needed = self.store.holds();
        needed.extend(self.recent(keep).iter().filter_map(|op| op.tree));
        needed.retain(|layer| !dropped.contains(layer));
        needed.extend(&keep.spared);
        needed.extend(self.named_by_heads());
        for info in self.store.catalog() {
            if is_checkpoint(&info) && !dropped.contains(&info.header.layer) {
                needed.insert(info.header.layer);
            }
            if info.seal.is_none() && !unwritten.contains(&info.header.layer) {
                needed.extend(self.store.came_from(&info));
            }
        }
        // Without the records of all heads there is no collection.
        needed.extend(self.merge_bases(&needed).unwrap_or_default());
        let sealed: BTreeSet<LayerId> = self.sealed().iter().map(|l| l.header.layer).collect();
        needed.retain(|layer| sealed.contains(layer));
        needed
    }

    /// The operations whose states are kept, newest first. Those of a dropped head are not kept.
    fn recent(&self, keep: &Keep) -> Vec<OpRecord> {
        let heads = self.store.head_names();
        let mut dropped = BTreeSet::new();
        let mut recent = Vec::new();
        let most = usize::try_from(keep.operations).unwrap_or(usize::MAX);
        for (_, op) in self.store.ops().into_iter().rev().take(most) {
            if op.verb == OpVerb::DropFork {
                dropped.insert(op.description.clone());
            }
            if heads.contains(&op.head) && !dropped.contains(&op.head) {
                recent.push(op);
            }
        }
        recent
    }

    /// Runs the four steps once. Returns the bytes that this frees, or would free.
    fn collect(
        &self,
        keep: &Keep,
        collected: &mut Collected,
        dry_run: bool,
        go: &dyn Fn() -> bool,
    ) -> Result<u64> {
        if !dry_run {
            // The records that dropped blocks must be durable before the blocks are punched. This
            // comes first, because it also seals a layer whose seal failed; that layer is then
            // needed like any other.
            for head in self.open_heads() {
                head.fs.sync().attempt(|| "gc: sync")?;
            }
        }
        // The needs of a head whose record cannot be read are unknown.
        self.store.head_records().map_err(|error| error.during("gc"))?;
        let mut unwritten = self.unwritten_layers()?;
        unwritten.extend(self.layers_of_dropped_heads());
        // Layers that are sealed from here on are left to the next collection.
        let mut going = self.sealed();
        let needed = self.needed(keep, collected, &unwritten);
        going.retain(|info| !needed.contains(&info.header.layer));
        let open = self.open_heads();
        let live = live_sets(&open);
        let below = |layer: LayerId| {
            self.nearest(&needed, self.store.layer(layer).and_then(|l| l.header.parent))
        };
        if !dry_run && !self.reparent_needed((&needed, &below), collected, &unwritten, go)? {
            return Ok(0);
        }
        let pre_images = self.needed_pre_images(keep, &needed, &live);
        if !dry_run {
            self.drop_edits_without(&pre_images)?;
        }
        if !go() {
            return Ok(0);
        }
        let refs = self.live_ranges_of(&needed, (&open, &live), &pre_images, below)?;
        let mut bytes = 0;
        let mut rewriting = self.store.journal_rewriter();
        for info in going.into_iter().rev() {
            if !go() {
                return Ok(bytes);
            }
            bytes += info.bytes + info.index.unwrap_or(0);
            collected.layers.push(info.header.layer);
            if !dry_run {
                self.trees.lock().forget(info.header.layer);
                rewriting.collect(info.header.layer)?;
            }
        }
        rewriting.finish()?;
        if !dry_run {
            self.empty_pre_images(&pre_images)?;
            self.thin_remaps(&refs)?;
            if !self.store.wait_for_read_epochs() {
                let reason = "timed out waiting for readers; some unused space was not freed";
                return Err(Error::new(Kind::InUse, "gc", reason).hint("run 'jailfs gc' again"));
            }
        }
        Ok(bytes + self.sweep(&refs, &live, dry_run)?)
    }

    /// Step 2: turns dropped checkpoints into ordinary layers, removes layers that were never
    /// written to and edit histories without a head, and makes each needed layer a child of the
    /// nearest needed one. Returns false if `go` stopped it.
    fn reparent_needed(
        &self,
        (needed, below): (&BTreeSet<LayerId>, &dyn Fn(LayerId) -> Option<LayerId>),
        collected: &Collected,
        unwritten: &BTreeSet<LayerId>,
        go: &dyn Fn() -> bool,
    ) -> Result<bool> {
        self.store.require_certain_remaps()?;
        self.store.note_sweep();
        self.replace_merged(needed)?;
        // A dropped checkpoint that is still needed stays as an ordinary layer.
        let dropped = collected.dropped.iter().map(|info| info.header.layer);
        let kept = dropped.filter(|layer| needed.contains(layer));
        for info in kept.filter_map(|layer| self.store.layer(layer)).filter(is_checkpoint) {
            self.unmark_checkpoint(&info)?;
        }
        for layer in unwritten.iter().chain(&self.abandoned()?) {
            self.store.remove_unused(*layer)?;
        }
        self.store.remove_incomplete_layers()?;
        self.store.remove_edits_of_dropped_heads();
        let mut rewriting = self.store.journal_rewriter();
        for layer in needed {
            if !go() {
                return Ok(false);
            }
            self.reparent(&mut rewriting, *layer, below(*layer), needed)?;
        }
        rewriting.finish()?;
        Ok(true)
    }

    /// Drops the part of the edit history that is older than the pre-images that stay: those edits
    /// can no longer be restored.
    fn drop_edits_without(&self, pre_images: &BTreeSet<LayerId>) -> Result<()> {
        let gone =
            self.pre_image_layers().into_iter().filter(|(_, layer)| !pre_images.contains(layer));
        let first = gone.map(|(place, _)| place + 1).max().unwrap_or(0);
        let first = Epoch(u32::try_from(first).unwrap_or(u32::MAX));
        // A head that is not open does this when it is opened.
        for head in self.open_heads() {
            head.fs.forget_edits_before(first);
            head.fs.secure_edits().map_err(|e| e.during("gc"))?;
        }
        Ok(())
    }

    /// Removes the runs that nothing refers to from all remaps, so that no remap leads to a block
    /// that is punched.
    fn thin_remaps(&self, refs: &LiveRanges) -> Result<()> {
        let mut maps = Vec::new();
        for layer in self.store.catalog().iter().filter(|l| l.mapped).map(|l| l.header.layer) {
            let Some(map) = self.store.remap(layer)? else { continue };
            let thinner = map.restricted_to(&refs.of(layer));
            if thinner != *map {
                maps.push((layer, thinner));
            }
        }
        self.store.publish_remaps(&maps)
    }

    /// Layers that were created for a head and never written to; every restore leaves one behind.
    ///
    /// A layer is left out if something refers to its pool: a failed undo can leave content there
    /// that has no record in the layer but is in the edit history, and can be restored later. The
    /// caller holds the operation lock, because a running operation creates such a layer, too.
    pub(super) fn unwritten_layers(&self) -> Result<BTreeSet<LayerId>> {
        // A lineage leads through the layer below, or the one before an apply. Both are older.
        let origin = |info: &LayerInfo| match info.header.kind {
            LayerKind::Rebased(before) => Some(before),
            _ => info.header.parent,
        };
        let tops = self.tops();
        let mut unsealed = self.unsealed_but_newest();
        unsealed.retain(|info| {
            info.header.kind != LayerKind::PreImage && !tops.contains(&info.header.layer)
        });
        let Some(oldest) = unsealed.first() else { return Ok(BTreeSet::new()) };
        let newer = self.store.layers_from(oldest.header.layer);
        let origins: BTreeSet<LayerId> = newer.iter().filter_map(origin).collect();
        let mut unwritten = BTreeSet::new();
        for info in &unsealed {
            let layer = info.header.layer;
            if !origins.contains(&layer) && !self.store.read_layer(layer)?.is_changed {
                unwritten.insert(layer);
            }
        }
        // An empty pool cannot be referred to. A pool that cannot be examined may have content.
        let has_content =
            |layer: &&LayerId| self.store.pool_end(**layer).map_or(true, |end| end > 0);
        let filled: BTreeSet<LayerId> = unwritten.iter().filter(has_content).copied().collect();
        if let Some(first) = filled.first() {
            let used = self.live_ranges_from(*first)?;
            unwritten.retain(|layer| !filled.contains(layer) || !used.is_used(*layer));
        }
        Ok(unwritten)
    }

    /// The pre-image layers of applies that ended before they changed the base. No epoch begins
    /// with them, and nothing refers to them.
    fn abandoned(&self) -> Result<Vec<LayerId>> {
        let mut abandoned = Vec::new();
        let mut unsealed = self.unsealed_but_newest();
        unsealed.retain(|info| info.header.kind == LayerKind::PreImage);
        for info in unsealed.iter().rev() {
            let contents = self.store.read_layer(info.header.layer)?;
            if contents.has(|record| matches!(record, Record::Abandoned))? {
                abandoned.push(info.header.layer);
            }
        }
        Ok(abandoned)
    }

    /// The layers without a seal, oldest first. The newest layer of the store is left out: it
    /// stays, so that its number is not used again.
    fn unsealed_but_newest(&self) -> Vec<LayerInfo> {
        let newest = self.store.newest_layer();
        let mut unsealed = self.store.unsettled(Unsettled::Unsealed);
        unsealed.retain(|info| Some(info.header.layer) < newest);
        unsealed
    }

    /// The nearest needed layer at or below `at`.
    fn nearest(&self, needed: &BTreeSet<LayerId>, mut at: Option<LayerId>) -> Option<LayerId> {
        while let Some(layer) = at.filter(|layer| !needed.contains(layer)) {
            at = self.store.layer(layer).and_then(|l| l.header.parent);
        }
        at
    }

    /// Rewrites a layer as edits from another layer below it.
    fn reparent(
        &self,
        rewriting: &mut JournalRewriter<'_>,
        layer: LayerId,
        parent: Option<LayerId>,
        needed: &BTreeSet<LayerId>,
    ) -> Result<()> {
        let Some(LayerInfo { header, seal: Some(seal), .. }) = self.store.layer(layer) else {
            return Ok(());
        };
        let kind = match parent {
            Some(_) => header.kind,
            None => self.kind_without_parent(&header, needed),
        };
        if (header.parent, header.kind) == (parent, kind) {
            return Ok(());
        }
        let (below, tree) = self.load_with_parent(parent, layer)?;
        let time = self.created_first(&header, parent);
        let header = Header { parent, time, kind, ..Header::clone(&header) };
        rewriting.rewrite(header, Seal::clone(&seal), below.edits_to(&tree))
    }

    /// The kind of a layer that becomes the bottom of its stack. If an apply began that stack, the
    /// layer names the nearest needed layer before the apply, so that its lineage stays exact.
    /// Without such a layer its lineage ends.
    fn kind_without_parent(&self, header: &Header, needed: &BTreeSet<LayerId>) -> LayerKind {
        let bottom = self.down_from(header.parent).pop().map_or(header.kind, |l| l.header.kind);
        let LayerKind::Rebased(_) = bottom else { return header.kind };
        let older = self.store.lineage_from(header.layer).into_iter().skip(1);
        let mut older = older.map(|info| info.header.layer);
        let origin = older.find(|layer| needed.contains(layer));
        origin.map_or(LayerKind::Continues, LayerKind::Rebased)
    }

    /// The creation time of the oldest layer that is merged into this one, down to the layer that
    /// stays. The rewritten layer keeps it, because the tree has looked at the base since then.
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

    /// The ranges that the needed states refer to.
    fn live_ranges_of(
        &self,
        needed: &BTreeSet<LayerId>,
        (open, live): (&[Arc<Timeline>], &[LiveHead]),
        pre_images: &BTreeSet<LayerId>,
        below: impl Fn(LayerId) -> Option<LayerId>,
    ) -> Result<LiveRanges> {
        let mut refs = LiveRanges::default();
        self.add_dormant(open, live, &mut refs)?;
        let mut add = |from: &Tree, to: &Tree| {
            for ino in from.diff(to).contents {
                to.extents(ino).for_each(|(_, extent)| refs.add(extent.source, extent.len));
            }
        };
        for layer in needed {
            let (from, to) = self.load_with_parent(below(*layer), *layer)?;
            add(&from, &to);
        }
        for LiveHead { parent, live } in live {
            let from =
                parent.map_or_else(|| Ok(Tree::new()), |parent| self.trees.lock().load(parent))?;
            add(&from, &live.state.tree);
            add(&Tree::new(), &live.orphans);
        }
        for LiveHead { live, .. } in live {
            refs.add_extents(live.edits.iter().flat_map(|content| &content.extents));
            for range in &live.reserved {
                refs.add_range(live.upper, *range);
            }
            refs.add_range(live.upper, ByteRange { start: live.end, end: u64::MAX });
        }
        let applies = self.applies.lock().clone();
        for (place, layer) in
            self.pre_image_layers().into_iter().filter(|(_, layer)| pre_images.contains(layer))
        {
            // Each apply has its own pool, and few are needed: keep all of it.
            refs.add_range(layer, ByteRange { start: 0, end: u64::MAX });
            let image = applies.get(place).into_iter().flat_map(|image| image.extents());
            image.for_each(|(range, source)| refs.add(source, range.len()));
        }
        Ok(refs)
    }

    /// The pre-image layers, oldest first, each with its index in the list of applies.
    fn pre_image_layers(&self) -> Vec<(usize, LayerId)> {
        let mut all = self.store.catalog();
        all.retain(|l| l.header.kind == LayerKind::PreImage && l.seal.is_some());
        all.iter().map(|l| (index_in_history(l.header.epoch), l.header.layer)).collect()
    }

    /// The pre-image layers through which a needed state or an open file sees the base, and that of
    /// the last apply, which can be undone.
    fn needed_pre_images(
        &self,
        keep: &Keep,
        needed: &BTreeSet<LayerId>,
        live: &[LiveHead],
    ) -> BTreeSet<LayerId> {
        let recent = self.recent(keep);
        let states = self.store.catalog();
        // An unsealed layer is the upper layer of a head, or may still be sealed.
        let is_needed = |info: &&LayerInfo| {
            info.header.kind.is_of_head()
                && (info.seal.is_none() || needed.contains(&info.header.layer))
        };
        let epochs = states
            .iter()
            .filter(is_needed)
            .map(|info| info.header.epoch)
            .chain(recent.iter().map(|op| op.epoch))
            .chain(live.iter().map(|head| head.live.state.lower.epoch()))
            .chain(live.iter().filter_map(|head| head.live.orphans_from));
        let oldest = epochs.min().unwrap_or(Epoch(0)).0;
        let undoable = self.last_undoable().map_or(u32::MAX, |apply| apply.0.saturating_sub(1));
        let from = usize::try_from(oldest.min(undoable)).unwrap_or(usize::MAX);
        let pre_images = self.pre_image_layers().into_iter().filter(|(place, _)| *place >= from);
        pre_images.map(|(_, layer)| layer).collect()
    }

    /// Removes the records of pre-image layers that are not needed. [`Common::sweep`] then frees
    /// their pools.
    fn empty_pre_images(&self, needed: &BTreeSet<LayerId>) -> Result<()> {
        let mut emptied = Vec::new();
        for (place, layer) in
            self.pre_image_layers().into_iter().filter(|(_, layer)| !needed.contains(layer))
        {
            if let Some(LayerInfo { header, seal: Some(seal), compact: false, .. }) =
                self.store.layer(layer)
            {
                let (header, seal) = (Header::clone(&header), Seal::clone(&seal));
                self.store.rewrite_layer(header, seal, std::iter::empty())?;
            }
            emptied.push(place);
        }
        let mut applies = self.applies.lock();
        let removed = Arc::new(PreImages::collected());
        for place in emptied {
            if let Some(image) = applies.get_mut(place) {
                *image = Arc::clone(&removed);
            }
        }
        Ok(())
    }

    /// Punches the unused blocks of all pools, and removes layers without a tree that nothing
    /// refers to. Returns the bytes.
    fn sweep(&self, refs: &LiveRanges, live: &[LiveHead], dry_run: bool) -> Result<u64> {
        let places = self.store.locate(refs)?;
        let (mut bytes, mut removed, mut to_free) = (0, Vec::new(), Vec::new());
        let last_image =
            self.pre_image_layers().last().map_or(LayerId(u32::MAX), |(_, layer)| *layer);
        for info in self.store.catalog() {
            let layer = info.header.layer;
            // Unsealed layers, new ones or those of an interrupted operation, wait for the next
            // collection.
            let is_upper = || live.iter().any(|head| head.live.upper == layer);
            let is_settled = info.seal.is_some() || is_upper();
            if !is_settled {
                continue;
            }
            let unused = self.store.unused(layer, &places)?;
            if dry_run {
                bytes += self.store.data_bytes(layer, &unused)?;
                continue;
            }
            // The last pre-image layer stays even if it is empty: its number counts the epochs.
            let is_emptied =
                info.header.kind == LayerKind::PreImage && info.compact && layer != last_image;
            let has_no_tree = info.header.kind == LayerKind::Collected;
            let is_given_up = is_emptied || has_no_tree;
            if is_given_up && !refs.is_used(layer) && !places.is_used(layer) {
                bytes += self.store.data_bytes(layer, &unused)?;
                removed.push(layer);
            } else if !unused.is_empty() {
                self.store.sync_remap(layer)?;
                to_free.push((layer, unused));
            }
        }
        if !dry_run {
            bytes += self.store.free(&to_free)?;
            self.store.remove_layers(&removed)?;
            self.store.tidy_archive()?;
        }
        Ok(bytes)
    }
}

/// Whether a layer is a checkpoint, and was not sealed automatically.
pub(super) fn is_checkpoint(info: &LayerInfo) -> bool {
    info.seal.as_ref().is_some_and(|seal| !seal.automatic)
}
