//! What older layers have is put together: their records in packs, and little content in one pool, so that a checkpoint costs what it
//! holds, and what is left of one that was given up next to nothing.
//!
//! A layer is looked at when it is sealed, trimmed, has checksums, and equal content was looked for in it; the newest few are left
//! as they are, since they are what changes. Two steps, each of them bounded, and done again until there is nothing to do:
//!
//! 1. the records, checksums and maps of many layers become a pack (`store/packing.rs`); journals are rewritten as what came of them;
//! 2. the content of many layers that have little of their own becomes that of one (`store/gather.rs`); so does that of such layers of which
//!    little is still needed.
//!
//! Cut off anywhere, it leaves a store that shows the same.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use crate::error::{Attempt, Result};
use crate::store::layer::LayerInfo;
use crate::store::record::LayerKind;
use crate::timeline::{Effort, Timeline};
use crate::types::LayerId;

/// The newest layers, so many, are left as they are.
const UNPACKED_NEWEST: usize = 4;
/// It pays for so many layers.
const MIN_LAYERS: usize = 16;
/// Layers of one step, at most.
const MAX_LAYERS: usize = 256;
/// Bytes of records in one step, about.
const MAX_RECORD_BYTES: usize = 4 << 20;
/// Bytes of content in one step, about.
const MAX_CONTENT_BYTES: u64 = 16 << 20;
/// Content is copied where so many times its bytes are free.
const FREE_FACTOR: u64 = 8;
/// A layer with more content of its own keeps its pool.
const SMALL_POOL: u64 = 1 << 20;
/// A journal of fewer bytes is not rewritten for it.
const SMALL_JOURNAL: u64 = 512;

impl Timeline {
    /// Puts together what older layers have. `go` is asked now and then, and may wait; when it says no, the rest is left for the next
    /// time.
    ///
    /// # Errors
    /// What the store answers; nothing is lost then.
    pub fn pack(&self, effort: Effort, go: &dyn Fn() -> bool) -> Result<()> {
        // Equal content is not looked for meanwhile.
        let _dedup = self.dedup.lock();
        let mut is_more = true;
        while is_more && !self.is_stopping() && go() {
            let _compacting = self.compacting.lock();
            is_more = self.pack_some(effort)?;
            is_more |= self.gather_some(effort)?;
        }
        Ok(())
    }

    /// Puts the records of some layers in a pack, if there are enough. Whether it did.
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

    /// The layers of which nothing is expected to change soon, oldest first, that are in no pack.
    fn cold(&self, effort: Effort) -> Result<Vec<LayerInfo>> {
        // What the record of a head names is where the next start begins.
        let top = self.store.oldest_top()?.unwrap_or(LayerId(0));
        let has_tree = |info: &LayerInfo| info.header.kind.is_of_head();
        let mut all = self.store.catalog();
        all.retain(|info| {
            info.seal.is_some() && (has_tree(info) || info.header.kind == LayerKind::Collected)
        });
        if effort == Effort::WhereItPays {
            all.truncate(all.len().saturating_sub(UNPACKED_NEWEST));
        }
        let dedup_is_on = self.dedup_is_on.load(Ordering::Relaxed);
        let (looked, not) = (self.deduplicated.lock(), self.too_large_to_pack.lock());
        all.retain(|info| {
            let layer = info.header.layer;
            let is_done = !dedup_is_on || !has_tree(info) || looked.contains(&layer);
            !info.packed && info.summed && layer < top && is_done && !not.contains(&layer)
        });
        Ok(all)
    }

    /// Puts the content of some layers together that have little of their own, if there are enough. Whether it did.
    fn gather_some(&self, effort: Effort) -> Result<bool> {
        let (mut sources, mut bytes, mut room, mut empty) = (Vec::new(), 0, 0, 0);
        let may_be_sparse = self.may_be_sparse.load(Ordering::Relaxed);
        let sparse = if may_be_sparse { self.store.sparse_gathered()? } else { BTreeSet::new() };
        // In what has a map, equal content is not looked for.
        let looked = self.deduplicated.lock().clone();
        let is_done = |info: &LayerInfo| {
            !info.header.kind.is_of_head() || looked.contains(&info.header.layer)
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
            // What is deflated comes to what it was, at most.
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
        // Nobody else may find the disk full for it.
        let has_room = self.store.free_bytes() / FREE_FACTOR >= room;
        let is_thin = sources.iter().any(|info| sparse.contains(&info.header.layer));
        if sparse.is_empty() {
            self.may_be_sparse.store(false, Ordering::Relaxed);
        }
        if sources.is_empty() || !has_room || self.is_stopping() {
            return Ok(false);
        }
        let moved = self.store.gather(&sources)?;
        // Those that were thin are whole now, or cannot be moved.
        if is_thin {
            self.may_be_sparse.store(false, Ordering::Relaxed);
        }
        Ok(moved > 1 || (moved > 0 && empty > 0))
    }
}
