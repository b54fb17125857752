//! Moves cold layers into the archive: their records, and their content. Then a checkpoint costs
//! only its content, compressed, and the rest of a removed one next to nothing.
//!
//! * An interruption changes no visible state.
//! * A layer is moved only after it was sealed, trimmed, checksummed and deduplicated. The newest
//!   few layers are left alone, because they still change.
//! * A layer keeps its pool while the trees of the heads refer to much of it. A layer with little
//!   content moves in any case, because its files cost more than reading it does.
//!
//! Bounded steps are repeated until there is nothing to do. Then packs of which little is needed
//! are written anew.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use crate::error::Result;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::layer::LayerInfo;
use crate::store::record::LayerKind;
use crate::timeline::{Common, Effort};
use crate::tree::Tree;
use crate::types::{ByteRange, LayerId};

/// The number of newest layers that are not moved.
const UNMOVED_NEWEST: usize = 4;
/// A step is worth it for so many small layers.
const MIN_LAYERS: usize = 16;
/// Layers in one step, at most.
const MAX_LAYERS: usize = 256;
/// Bytes of records in one step, about.
const MAX_RECORD_BYTES: usize = 4 << 20;
/// Bytes of content in one step, about.
const MAX_CONTENT_BYTES: u64 = 16 << 20;
/// Content is copied only if the disk has so many times its bytes free.
const FREE_FACTOR: u64 = 8;
/// A layer of which the trees of the heads need more bytes keeps its pool.
const LITTLE_CONTENT: u64 = 1 << 20;
/// A journal of fewer bytes is moved without being rewritten.
const SMALL_JOURNAL: u64 = 512;
/// After so many further layers, the trees may not need a layer any more.
const LOOK_AGAIN: u32 = 16;

/// A layer that can be moved.
struct Candidate {
    info: LayerInfo,
    /// The ranges of its pool that have to be copied.
    content: Vec<ByteRange>,
    bytes: u64,
}

impl Common {
    /// Moves cold layers into the archive. Calls `go` now and then, which may block; when it
    /// returns false, the rest is left for the next call.
    ///
    /// # Errors
    /// The store failed; nothing is lost then.
    pub fn archive_cold(&self, effort: Effort, go: &dyn Fn() -> bool) -> Result<()> {
        // Keeps deduplication out.
        let _dedup = self.dedup.lock();
        let mut is_any = false;
        while !self.is_stopping() && go() && self.archive_some(effort, go)? {
            is_any = true;
        }
        if (is_any || effort == Effort::Everything) && !self.is_stopping() {
            let _compacting = self.compacting.lock();
            self.store.tidy_archive()?;
        }
        Ok(())
    }

    /// Moves some layers, if there are enough. Returns whether it did.
    fn archive_some(&self, effort: Effort, go: &dyn Fn() -> bool) -> Result<bool> {
        let candidates = {
            let _compacting = self.compacting.lock();
            self.candidates(effort)?
        };
        let large = candidates.iter().find(|candidate| candidate.bytes > LITTLE_CONTENT);
        if let Some(large) = large
            && !self.archive_ahead(large, go)?
        {
            return Ok(false);
        }
        let is_enough = effort == Effort::Everything || large.is_some();
        let enough = if is_enough { 1 } else { MIN_LAYERS };
        if candidates.len() < enough {
            return Ok(false);
        }
        let _compacting = self.compacting.lock();
        let (mut cold, mut records) = (Vec::new(), 0);
        // Other operations may have changed some of them, or removed them, meanwhile.
        let chosen: BTreeSet<LayerId> =
            candidates.iter().map(|one| one.info.header.layer).collect();
        for info in self.cold(effort)?.into_iter().filter(|l| chosen.contains(&l.header.layer)) {
            let layer = info.header.layer;
            let form = if info.compact || info.bytes < SMALL_JOURNAL {
                self.store.cold_form(layer, None::<std::iter::Empty<_>>)?
            } else {
                let (below, tree) = self.load_with_parent(info.header.parent, layer)?;
                self.store.cold_form(layer, Some(below.edits_to(&tree)))?
            };
            let Some(form) = form else {
                self.keep_out(layer, None);
                continue;
            };
            records += form.weight();
            cold.push(form);
            if records > MAX_RECORD_BYTES || self.is_stopping() {
                break;
            }
        }
        if cold.is_empty() {
            return Ok(false);
        }
        let stay = self.store.archive_layers(cold)?;
        stay.into_iter().for_each(|layer| self.keep_out(layer, None));
        Ok(true)
    }

    /// Copies the content of a large layer piece by piece, so that other operations have their
    /// turn. Returns false if `go` stopped it.
    fn archive_ahead(&self, large: &Candidate, go: &dyn Fn() -> bool) -> Result<bool> {
        let layer = large.info.header.layer;
        let (mut part, mut bytes) = (Vec::new(), 0);
        let pieces = large.content.iter().flat_map(|range| {
            let starts = (range.start..range.end).step_by(MAX_CONTENT_BYTES as usize);
            starts.map(|at| ByteRange { start: at, end: range.end.min(at + MAX_CONTENT_BYTES) })
        });
        for piece in pieces {
            part.push(piece);
            bytes += piece.len();
            if bytes < MAX_CONTENT_BYTES {
                continue;
            }
            if self.is_stopping() || !go() {
                return Ok(false);
            }
            let _compacting = self.compacting.lock();
            if self.store.layer(layer).is_none() {
                return Ok(true);
            }
            self.store.archive_ahead(layer, &part)?;
            part.clear();
            bytes = 0;
        }
        Ok(true)
    }

    /// The layers of the next step, oldest first: one with much content, or some with little.
    fn candidates(&self, effort: Effort) -> Result<Vec<Candidate>> {
        let (mut chosen, mut bytes) = (Vec::<Candidate>::new(), 0);
        let mut needed = None;
        for info in self.cold(effort)? {
            let layer = info.header.layer;
            let content = self.store.own_content(layer)?;
            let own: u64 = content.iter().map(ByteRange::len).sum();
            let is_large = own > LITTLE_CONTENT;
            if is_large {
                if needed.is_none() {
                    needed = Some(self.needed_by_trees()?);
                }
                let of_layer = needed.as_ref().map(|needed| needed.of(layer)).unwrap_or_default();
                if of_layer.iter().map(ByteRange::len).sum::<u64>() > LITTLE_CONTENT {
                    self.keep_out(layer, Some(LOOK_AGAIN));
                    continue;
                }
            }
            // The copy must not fill the disk for other programs.
            if self.store.free_bytes() / FREE_FACTOR < bytes + own {
                break;
            }
            let candidate = Candidate { info, content, bytes: own };
            if is_large {
                return Ok(vec![candidate]);
            }
            bytes += own;
            chosen.push(candidate);
            if bytes > MAX_CONTENT_BYTES || chosen.len() == MAX_LAYERS {
                break;
            }
        }
        Ok(chosen)
    }

    /// Where the content is that the trees of the heads show.
    fn needed_by_trees(&self) -> Result<LiveRanges> {
        let mut addresses = LiveRanges::default();
        let mut add = |tree: &Tree| {
            tree.all_extents().for_each(|(_, extent)| addresses.add(extent.source, extent.len));
        };
        let open = self.open_heads();
        open.iter().for_each(|head| add(&head.fs.live_set().state.tree));
        let sealed: BTreeSet<LayerId> = self.sealed().iter().map(|l| l.header.layer).collect();
        for layer in self.tops().into_iter().chain(self.named_by_heads()) {
            let parent = self.store.layer(layer).and_then(|info| info.header.parent);
            let below = if sealed.contains(&layer) { Some(layer) } else { parent };
            if let Some(below) = below.filter(|below| sealed.contains(below)) {
                add(&self.trees.lock().load(below)?);
            }
        }
        self.store.locate(&addresses)
    }

    /// Leaves a layer alone until so many further layers exist, or for good.
    fn keep_out(&self, layer: LayerId, for_layers: Option<u32>) {
        let next = self.store.next_layer().0;
        let until = for_layers.map_or(u32::MAX, |layers| next.saturating_add(layers));
        self.kept_out_of_archive.lock().insert(layer, LayerId(until));
    }

    /// The layers that are not in the archive and are not expected to change soon, oldest first.
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
            all.truncate(all.len().saturating_sub(UNMOVED_NEWEST));
        }
        let dedup_is_on = self.dedup_is_on.load(Ordering::Relaxed);
        // Everything is looked at again that is not kept out for good.
        let next = match effort {
            Effort::WhereItPays => self.store.next_layer(),
            Effort::Everything => LayerId(u32::MAX - 1),
        };
        let (deduplicated, kept_out) = (self.deduplicated.lock(), self.kept_out_of_archive.lock());
        all.retain(|info| {
            let layer = info.header.layer;
            // An archived layer is not searched for content that equals older content.
            let is_done = !dedup_is_on || !has_tree(info) || deduplicated.contains(&layer);
            info.archived.is_none()
                && info.summed
                && !tops.contains(&layer)
                && is_done
                && kept_out.get(&layer).is_none_or(|until| *until <= next)
        });
        Ok(all)
    }
}
