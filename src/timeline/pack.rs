//! Packs older layers: their records into packs, and small pools into one pool. Then a checkpoint
//! costs only its content, and the rest of a removed one next to nothing.
//!
//! * An interruption changes no visible state.
//! * A layer is packed only after it was sealed, trimmed, checksummed and deduplicated. The newest
//!   few layers are left alone, because they still change.
//!
//! Two bounded steps are repeated until there is nothing to do:
//!
//! 1. The records, checksums and remaps of many layers become one pack
//!    (`store/placement/packing.rs`). Journals are rewritten in their shortest form.
//! 2. The content of many layers with small pools is gathered in the pool of one layer
//!    (`store/placement/gather.rs`). Gathered layers of which little is still needed are gathered
//!    again.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use crate::error::{Attempt, Result};
use crate::store::layer::LayerInfo;
use crate::store::record::LayerKind;
use crate::timeline::{Common, Effort};

/// The number of newest layers that are not packed.
const UNPACKED_NEWEST: usize = 4;
/// A step is worth it for so many layers.
const MIN_LAYERS: usize = 16;
/// Layers in one step, at most.
const MAX_LAYERS: usize = 256;
/// Bytes of records in one step, about.
const MAX_RECORD_BYTES: usize = 4 << 20;
/// Bytes of content in one step, about.
const MAX_CONTENT_BYTES: u64 = 16 << 20;
/// Content is copied only if the disk has so many times its bytes free.
const FREE_FACTOR: u64 = 8;
/// A layer with more bytes of content keeps its own pool.
const SMALL_POOL: u64 = 1 << 20;
/// A journal of fewer bytes is packed without being rewritten.
const SMALL_JOURNAL: u64 = 512;

impl Common {
    /// Packs older layers. Calls `go` now and then, which may block; when it returns false, the
    /// rest is left for the next call.
    ///
    /// # Errors
    /// The store failed; nothing is lost then.
    pub fn pack(&self, effort: Effort, go: &dyn Fn() -> bool) -> Result<()> {
        // Keeps deduplication out.
        let _dedup = self.dedup.lock();
        let mut is_more = true;
        while is_more && !self.is_stopping() && go() {
            let _compacting = self.compacting.lock();
            is_more = self.pack_some(effort)?;
            is_more |= self.gather_some(effort)?;
        }
        Ok(())
    }

    /// Packs the records of some layers, if there are enough. Returns whether it did.
    fn pack_some(&self, effort: Effort) -> Result<bool> {
        let cold = self.cold(effort)?;
        let enough = if effort == Effort::Everything { 1 } else { MIN_LAYERS };
        let (mut packed, mut bytes) = (Vec::new(), 0);
        for info in cold.iter().filter(|_| cold.len() >= enough).take(MAX_LAYERS) {
            let layer = info.header.layer;
            let form = if info.compact || info.bytes < SMALL_JOURNAL {
                self.store.packed_form(layer, None::<std::iter::Empty<_>>)?
            } else {
                let (below, tree) = self.load_with_parent(info.header.parent, layer)?;
                self.store.packed_form(layer, Some(below.edits_to(&tree)))?
            };
            let Some(form) = form else {
                self.too_large_to_pack.lock().insert(layer);
                continue;
            };
            bytes += form.weight();
            packed.push(form);
            if bytes > MAX_RECORD_BYTES || self.is_stopping() {
                break;
            }
        }
        let is_any = !packed.is_empty();
        if is_any {
            self.store.pack_layers(packed)?;
        }
        Ok(is_any)
    }

    /// The layers that are in no pack and are not expected to change soon, oldest first.
    fn cold(&self, effort: Effort) -> Result<Vec<LayerInfo>> {
        // A mount starts at the layer that the head's record names, and writes to it.
        let mut tops = self.tops();
        let records = self.store.head_records()?;
        tops.extend(records.values().filter(|head| !head.is_unused()).map(|head| head.layer));
        let has_tree = |info: &LayerInfo| info.header.kind.is_of_head();
        let mut all = self.store.catalog();
        all.retain(|info| {
            info.seal.is_some() && (has_tree(info) || info.header.kind == LayerKind::Collected)
        });
        if effort == Effort::WhereItPays {
            all.truncate(all.len().saturating_sub(UNPACKED_NEWEST));
        }
        let dedup_is_on = self.dedup_is_on.load(Ordering::Relaxed);
        let (deduplicated, too_large) = (self.deduplicated.lock(), self.too_large_to_pack.lock());
        all.retain(|info| {
            let layer = info.header.layer;
            let is_done = !dedup_is_on || !has_tree(info) || deduplicated.contains(&layer);
            !info.packed
                && info.summed
                && !tops.contains(&layer)
                && is_done
                && !too_large.contains(&layer)
        });
        Ok(all)
    }

    /// Gathers the content of some layers with small pools, if there are enough. Returns whether it
    /// did.
    fn gather_some(&self, effort: Effort) -> Result<bool> {
        let (mut sources, mut bytes, mut room, mut empty) = (Vec::new(), 0, 0, 0);
        let may_be_sparse = self.may_be_sparse.load(Ordering::Relaxed);
        let sparse = if may_be_sparse { self.store.sparse_gathered()? } else { BTreeSet::new() };
        // Deduplicate a layer before gathering it: afterwards it has a remap, and deduplication
        // does not search the content of such a layer.
        let deduplicated = self.deduplicated.lock().clone();
        let is_done = |info: &LayerInfo| {
            !info.header.kind.is_of_head() || deduplicated.contains(&info.header.layer)
        };
        for info in self.store.packed_with_pools().into_iter().filter(is_done) {
            let layer = info.header.layer;
            let Some(pool) = self.store.pool(layer)? else { continue };
            let about = pool.metadata().attempt(|| format!("look at the pool of layer {layer}"))?;
            if about.blocks() * 512 > SMALL_POOL && !sparse.contains(&layer) {
                continue;
            }
            let own: u64 = self.store.own_content(layer)?.iter().map(|range| range.len()).sum();
            bytes += own;
            // Gathered content is deflated; it is at most as long as the pool.
            room += if info.header.kind == LayerKind::Gathered { about.len() } else { own };
            empty += usize::from(own == 0);
            sources.push(info);
            if bytes > MAX_CONTENT_BYTES || sources.len() == MAX_LAYERS {
                break;
            }
        }
        let is_worth_it = match effort {
            Effort::WhereItPays => sources.len() >= MIN_LAYERS,
            Effort::Everything => sources.len() > 1 || empty > 0,
        };
        if !is_worth_it {
            sources.retain(|info| sparse.contains(&info.header.layer));
        }
        // The copy must not fill the disk for other programs.
        let has_room = self.store.free_bytes() / FREE_FACTOR >= room;
        let is_any_sparse = sources.iter().any(|info| sparse.contains(&info.header.layer));
        if sparse.is_empty() {
            self.may_be_sparse.store(false, Ordering::Relaxed);
        }
        if sources.is_empty() || !has_room || self.is_stopping() {
            return Ok(false);
        }
        let moved = self.store.gather(&sources)?;
        // The sparse layers were gathered again, or cannot be moved.
        if is_any_sparse {
            self.may_be_sparse.store(false, Ordering::Relaxed);
        }
        Ok(moved > 1 || (moved > 0 && empty > 0))
    }
}
