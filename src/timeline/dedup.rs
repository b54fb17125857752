//! Content that is stored once: what a sealed layer has in common with older content is given up, and its map says where it
//! is.
//!
//! It is done one layer at a time, behind every operation:
//!
//! 1. its content is looked through (`store/equal.rs`), without any lock and for as long as that takes;
//! 2. if nothing was given back meanwhile, so that what was found equal is still there, the map is published;
//! 3. when everybody who was reading by the map before is done, the blocks that it gave up are punched.
//!
//! Cut off anywhere, it leaves a store that shows the same: before the map is on the disk nothing has changed, and after it
//! nobody needs the blocks. Those of a layer that came so far and not further are punched at the next start, or by gc.
//!
//! Always true: where content is of which others have given up their own copy, it stays. A layer to which a map leads gets no map of its
//! own any more, gc and the trimming of layers count what maps lead to as needed, and as long as it is not known whether a map is on the
//! disk, nothing is given back.

use std::sync::atomic::Ordering;

use crate::error::Result;
use crate::store::dedup::chunks::ChunkTable;
use crate::store::dedup::matching::{Matcher, Matches, Part, Search};
use crate::store::layer::LayerInfo;
use crate::timeline::Timeline;
use crate::tree::{Dentry, Source, Tree};
use crate::types::{ByteRange, Ino, LayerId};

/// How often a layer is begun anew because something was given back meanwhile, before others come first.
const MAX_ATTEMPTS: usize = 3;

/// What is known while a store is open.
pub(super) struct Dedup {
    table: ChunkTable,
}

/// What became of a layer.
enum Outcome {
    Done,
    /// Something was given back meanwhile.
    Disturbed,
    /// It was said not to go on.
    Stopped,
}

impl Timeline {
    /// Says whether equal content is to be stored once from now on. What is shared already stays so.
    pub fn set_dedup(&self, on: bool) {
        self.dedup_is_on.store(on, Ordering::Relaxed);
    }

    /// Finds what sealed layers have in common with older content, and gives it up. `go` is asked now and then, and may wait; when it
    /// says no, the rest is left for the next time.
    ///
    /// # Errors
    /// What the store answers; nothing is lost then.
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
        for info in self.sealed() {
            let layer = info.header.layer;
            // Before it has checksums, it may still be trimmed.
            if !info.summed || is_done(layer) {
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
        let open = |l: &LayerInfo| l.seal.is_none() || !is_done(l.header.layer);
        let rest =
            self.store.catalog().into_iter().filter(|l| l.header.kind.is_of_head() && open(l));
        if let Some(first) = rest.map(|l| l.header.layer).min()
            && first != table.searched_below()
        {
            table.set_searched_below(first)?;
        }
        Ok(())
    }

    /// How many sealed layers are still to be looked through.
    pub fn layers_to_deduplicate(&self) -> u64 {
        if !self.dedup_is_on.load(Ordering::Relaxed) {
            return 0;
        }
        let done = self.deduplicated.lock();
        self.sealed().iter().filter(|info| !done.contains(&info.header.layer)).count() as u64
    }

    fn begin_dedup(&self) -> Result<Dedup> {
        let table = self.store.chunk_table()?;
        let sealed = self.sealed();
        let done = sealed.iter().map(|l| l.header.layer).filter(|l| *l < table.searched_below());
        self.deduplicated.lock().extend(done);
        // Where the process ended between a map and what is done by it.
        for info in sealed.iter().filter(|info| info.mapped) {
            let layer = info.header.layer;
            let Some(map) = self.store.remap(layer)? else { continue };
            self.free_blocks(layer, &map.freed_blocks())?;
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
                // It was given up by gc, or was punched while it was read.
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
            // As it is now: gc may have put it on another layer, or given it up.
            let Some(info) = self.sealed().into_iter().find(|l| l.header.layer == layer) else {
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
        self.free_blocks(layer, &map.freed_blocks())?;
        self.free_blocks(layer, &zeros)?;
        Ok(Outcome::Done)
    }

    /// Gives the blocks of ranges of a layer back, as far as they take space.
    fn free_blocks(&self, layer: LayerId, blocks: &[ByteRange]) -> Result<()> {
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
                "somebody does not come to an end of reading; gc gives back what layer {layer} gave up"
            );
            return Ok(());
        }
        let _compacting = self.compacting.lock();
        if self.store.layer(layer).is_none() {
            return Ok(());
        }
        self.store.sync_remap(layer)?;
        self.store.punch_pool(layer, &taken)
    }

    /// The parts of files and of their versions that lie in the pool of a layer, and where the content was that they took the place of.
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
        // What files were before edits may be in no state.
        for (range, source) in
            self.fs.live_set().versions.iter().flat_map(|content| &content.extents)
        {
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

/// The file that stood where `ino` stands now: itself, or the one over which it was renamed.
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

/// At which address of a pool a byte of a file was.
fn source_at(below: &Tree, ino: Ino, offset: u64) -> Option<(LayerId, u64)> {
    let (start, extent) = below.extent_at(ino, offset)?;
    match extent.source.advanced(offset - start) {
        Source::Pool { layer, offset } => Some((layer, offset)),
        Source::Base { .. } => None,
    }
}

/// Whether a range has something in common with ranges that are in order.
fn overlaps(ranges: &[ByteRange], range: &ByteRange) -> bool {
    let first = ranges.partition_point(|known| known.end <= range.start);
    ranges.get(first).is_some_and(|known| known.start < range.end)
}
