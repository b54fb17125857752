//! Deduplicates the content of sealed layers: a layer's remap leads to an equal copy in an older
//! layer, and the layer's own blocks are punched.
//!
//! Always true:
//! * content that a remap leads to stays: gc and the trimming of layers count it as live;
//! * a layer that remaps lead to gets no remap for that content itself, so a remap is one hop;
//! * while it is unknown whether a remap is on disk, nothing is punched.
//!
//! It works on one layer at a time, in the background:
//!
//! 1. It searches the content (`store/dedup/matching.rs`), without locks, for as long as that
//!    takes.
//! 2. If nothing was punched meanwhile, the matches are still there, and it publishes the remap.
//! 3. When all readers that used the previous remap are done, it drops the checksums of the blocks
//!    and punches them.
//!
//! An interruption changes no visible state. Before the remap is on disk nothing has changed, and
//! afterwards no reader needs the blocks. The next mount or gc punches the blocks that are left.

use std::sync::atomic::Ordering;

use crate::error::Result;
use crate::store::content::remap::Remap;
use crate::store::dedup::chunks::ChunkTable;
use crate::store::dedup::matching::{Matcher, Matches, Part, Search};
use crate::store::layer::LayerInfo;
use crate::timeline::Common;
use crate::timeline::dormant::live_sets;
use crate::tree::{Dentry, Source, Tree};
use crate::types::{ByteRange, Ino, LayerId};

/// How often a layer is tried again because blocks were punched meanwhile, before the next layer
/// has its turn.
const MAX_ATTEMPTS: usize = 3;

/// The state of deduplication while a store is open.
pub(super) struct Dedup {
    table: ChunkTable,
}

/// The result of deduplicating one layer.
enum Outcome {
    Done,
    /// Blocks were punched meanwhile, so the matches may be gone.
    Disturbed,
    /// The caller asked to stop.
    Stopped,
}

impl Common {
    /// Turns deduplication on or off. Content that is shared already stays shared.
    pub fn set_dedup(&self, on: bool) {
        self.dedup_is_on.store(on, Ordering::Relaxed);
    }

    /// Deduplicates sealed layers. Calls `go` now and then, which may block; when it returns false,
    /// the rest is left for the next call.
    ///
    /// # Errors
    /// The store failed; nothing is lost then.
    pub fn dedup(&self, go: &dyn Fn() -> bool) -> Result<()> {
        if !self.dedup_is_on.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut dedup = self.dedup.lock();
        let Dedup { table } = match &mut *dedup {
            Some(dedup) => dedup,
            none => none.insert(self.begin_dedup()?),
        };
        let is_done = |layer| self.deduplicated.lock().contains(&layer);
        let mut layers = self.store.layers_from(table.searched_below());
        // A layer without checksums may still be trimmed.
        layers.retain(|info| info.is_sealed_state() && info.summed);
        for info in layers {
            let layer = info.header.layer;
            if is_done(layer) {
                continue;
            }
            if !go() {
                break;
            }
            match self.dedup_layer(table, &info, go)? {
                Outcome::Done => drop(self.deduplicated.lock().insert(layer)),
                Outcome::Disturbed => {}
                Outcome::Stopped => break,
            }
        }
        let mut rest = self.store.layers_from(table.searched_below());
        let is_open = |info: &LayerInfo| info.seal.is_none() || !is_done(info.header.layer);
        rest.retain(|info| info.header.kind.is_of_head() && is_open(info));
        if let Some(first) = rest.iter().map(|info| info.header.layer).min()
            && first != table.searched_below()
        {
            table.set_searched_below(first)?;
        }
        Ok(())
    }

    /// The number of sealed layers that are not deduplicated yet.
    pub fn layers_to_deduplicate(&self) -> u64 {
        if !self.dedup_is_on.load(Ordering::Relaxed) {
            return 0;
        }
        let done = self.deduplicated.lock();
        self.sealed().iter().filter(|info| !done.contains(&info.header.layer)).count() as u64
    }

    fn begin_dedup(&self) -> Result<Dedup> {
        let mut table = self.store.chunk_table()?;
        // A power cut can take the seal of a layer that was searched. Such a layer is written to
        // again, and must be searched again.
        let first = self.unsealed_at_open.filter(|first| *first < table.searched_below());
        if let Some(first) = first {
            table.set_searched_below(first)?;
        }
        let sealed = self.sealed();
        let done = sealed.iter().map(|l| l.header.layer).filter(|l| *l < table.searched_below());
        self.deduplicated.lock().extend(done);
        // The process may have ended between publishing a remap and punching its blocks.
        for info in sealed.iter().filter(|info| info.mapped) {
            let layer = info.header.layer;
            let Some(map) = self.store.remap(layer)? else { continue };
            self.free_blocks(layer, &map.freed_blocks(), Some(&map))?;
        }
        Ok(Dedup { table })
    }

    fn dedup_layer(
        &self,
        table: &mut ChunkTable,
        info: &LayerInfo,
        go: &dyn Fn() -> bool,
    ) -> Result<Outcome> {
        for _ in 0..MAX_ATTEMPTS {
            match self.try_dedup_layer(table, info, go) {
                Ok(Outcome::Disturbed) => {}
                // gc removed it, or punched it while it was read.
                Err(error) if self.store.layer(info.header.layer).is_none() => {
                    log::debug!("{error}; the layer is gone");
                    return Ok(Outcome::Done);
                }
                other => return other,
            }
        }
        Ok(Outcome::Disturbed)
    }

    fn try_dedup_layer(
        &self,
        table: &mut ChunkTable,
        info: &LayerInfo,
        go: &dyn Fn() -> bool,
    ) -> Result<Outcome> {
        let layer = info.header.layer;
        let (sweeps, search, parts) = {
            let _compacting = self.compacting.lock();
            // Look it up again: gc may have changed its parent or removed it.
            let Some(info) = self.store.layer(layer).filter(LayerInfo::is_sealed_state) else {
                return Ok(Outcome::Done);
            };
            let settled = info.mapped || self.store.is_remap_target(layer)?;
            let search = if settled { Search::IndexOnly } else { Search::Matches };
            (self.store.sweeps(), search, self.parts(&info)?)
        };
        let mut matcher = Matcher::new(&self.store, table, layer, search)?;
        for part in &parts {
            if !matcher.search_part(part, go)? {
                return Ok(Outcome::Stopped);
            }
        }
        let Matches { remap: map, zeros, .. } = matcher.finish()?;
        if self.store.sweeps() != sweeps {
            return Ok(Outcome::Disturbed);
        }
        if !map.runs().is_empty() {
            let _compacting = self.compacting.lock();
            if self.store.sweeps() != sweeps {
                return Ok(Outcome::Disturbed);
            }
            self.store.require_certain_remaps()?;
            self.store.publish_remap(layer, &map)?;
        }
        self.free_blocks(layer, &map.freed_blocks(), Some(&map))?;
        self.free_blocks(layer, &zeros, None)?;
        Ok(Outcome::Done)
    }

    /// Punches ranges of a layer's pool, as far as they are allocated. They are zeros, or the
    /// blocks that the remap of the layer freed.
    fn free_blocks(
        &self,
        layer: LayerId,
        blocks: &[ByteRange],
        remap: Option<&Remap>,
    ) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let data = self.store.pool_data(layer)?;
        let taken: Vec<ByteRange> = blocks.iter().copied().filter(|b| overlaps(&data, b)).collect();
        if taken.is_empty() {
            return Ok(());
        }
        if !self.store.wait_for_read_epochs() {
            log::warn!(
                "timed out waiting for readers; gc will free the unused blocks of layer {layer}"
            );
            return Ok(());
        }
        let _compacting = self.compacting.lock();
        if self.store.layer(layer).is_none() {
            return Ok(());
        }
        self.store.sync_remap(layer)?;
        if let Some(remap) = remap {
            self.store.trim_checksums(layer, remap)?;
        }
        self.store.punch_pool(layer, &taken)?;
        Ok(())
    }

    /// The parts of files and of the edit history that lie in the pool of a layer. Each part of a
    /// file comes with the address of the content that it replaced.
    fn parts(&self, info: &LayerInfo) -> Result<Vec<Part>> {
        let layer = info.header.layer;
        let (below, tree) = self.load_with_parent(info.header.parent, layer)?;
        let mut parts = Vec::new();
        for ino in below.diff(&tree).contents {
            let before = was(&below, &tree, ino);
            for (start, extent) in tree.extents(ino) {
                let Source::Pool { layer: of, offset } = extent.source else { continue };
                if of != layer {
                    continue;
                }
                let range = ByteRange::at(offset, extent.len);
                parts.push(Part {
                    range,
                    before: before.and_then(|ino| source_at(&below, ino, start)),
                });
            }
        }
        // The edit history can refer to content that is in no state.
        let live = live_sets(&self.open_heads());
        let edits = live.iter().flat_map(|head| &head.live.edits);
        for (range, source) in edits.flat_map(|content| &content.extents) {
            if let Source::Pool { layer: of, offset } = *source
                && of == layer
            {
                parts.push(Part { range: ByteRange::at(offset, range.len()), before: None });
            }
        }
        parts.sort_by_key(|part| part.range.start);
        Ok(parts)
    }
}

/// The file at the place of `ino` in the tree below: itself, or the one that a rename replaced.
fn was(below: &Tree, tree: &Tree, ino: Ino) -> Option<Ino> {
    if below.node(ino).is_some() {
        return Some(ino);
    }
    let (dir, name) = tree.parent(ino)?;
    match below.dentry(dir, name)? {
        Dentry::Child { ino, .. } => Some(*ino),
        Dentry::Whiteout(_) => None,
    }
}

/// The pool address of a byte of a file.
fn source_at(below: &Tree, ino: Ino, offset: u64) -> Option<(LayerId, u64)> {
    let (start, extent) = below.extent_at(ino, offset)?;
    match extent.source.advanced(offset - start) {
        Source::Pool { layer, offset } => Some((layer, offset)),
        Source::Base { .. } => None,
    }
}

/// Whether a range overlaps one of `ranges`, which are sorted.
fn overlaps(ranges: &[ByteRange], range: &ByteRange) -> bool {
    let first = ranges.partition_point(|known| known.end <= range.start);
    ranges.get(first).is_some_and(|known| known.start < range.end)
}
