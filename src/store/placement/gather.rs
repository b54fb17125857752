//! Gathers: copies the content of packed layers that have little of their own into the deflated
//! pool of one new layer, a *gathered* layer.
//!
//! Extents never change; the remaps of the source layers point to the copy, and so do the remaps
//! that pointed into a source. The order of the steps:
//!
//! 1. write and sync the pool of the copy;
//! 2. publish the gathered layer, then the remaps of layers that have directories, if there are
//!    any;
//! 3. publish one pack with all other remaps, so no remap ever points to remapped addresses;
//! 4. wait for readers that use earlier remaps;
//! 5. remove the pools of the sources.
//!
//! A crash before step 3 leaves copies beside their sources. gc frees the copies that no remap
//! points to.
//!
//! * The source is verified while it is copied, and the copy gets checksums of the verified bytes.
//!   A flipped bit is never copied: a layer with a damaged block keeps its pool, and a warning
//!   names it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::catalog::RetiringPool;
use crate::store::content::cells::{CellWriter, ReadOutcome};
use crate::store::content::live_ranges::{LiveRanges, in_blocks};
use crate::store::content::pool::block_ceil;
use crate::store::content::remap::{Remap, Run};
use crate::store::io::{disk, log};
use crate::store::layer;
use crate::store::layer::{LayerInfo, POOL};
use crate::store::pack::{Change, PackedLayer};
use crate::store::placement::packing::gathered_journal;
use crate::store::placement::read_remap;
use crate::store::record::LayerKind;
use crate::types::{ByteRange, LayerId};

/// Bytes that are copied at once.
const COPY_LEN: u64 = 1 << 20;

/// By source layer: which of its addresses were copied, and where the copies are.
type Moves = BTreeMap<LayerId, Remap>;

/// The gathered layer while it is filled.
struct Gathered {
    layer: LayerId,
    pool: Arc<File>,
    cells: CellWriter,
}

/// The outcome of copying the own content of one layer.
enum Copied {
    /// All of it is in the copy, at these places.
    Whole(Remap),
    /// Nothing was copied: without checksums the bytes cannot be verified.
    NoChecksums,
    /// Nothing was copied: the block at this address is damaged.
    Damaged(u64),
}

impl Store {
    /// Gathers the content that these packed layers have of their own. No other thread may free
    /// their content meanwhile. Returns how many layers could be moved.
    ///
    /// # Errors
    /// As the calls that write, publish and remove files; the content is then where it was, and
    /// maybe also in the new place. If it is unknown which remaps are on disk, no space is freed
    /// any more, see [`Store::require_certain_remaps`].
    pub fn gather(&self, sources: &[LayerInfo]) -> Result<usize> {
        self.require_certain_remaps()?;
        let Some(newest) = sources.last() else { return Ok(0) };
        let gathered = self.create_gathered()?;
        let layer = gathered.layer;
        let copied = self.copy_and_publish(gathered, sources, newest);
        if !matches!(copied, Ok(Some(_))) {
            self.abandon(layer);
            // The sources keep their pools.
            if self.require_certain_remaps().is_ok() {
                let mut state = self.state.lock();
                sources.iter().for_each(|info| drop(state.retiring.remove(&info.header.layer)));
            }
        }
        let Some(moves) = copied? else { return Ok(0) };
        if !self.wait_for_read_epochs() {
            ::log::warn!(
                "timed out waiting for readers; gathered content takes space twice for now"
            );
            return Ok(moves.len());
        }
        for info in sources.iter().filter(|info| moves.contains_key(&info.header.layer)) {
            self.remove_source_pool(info)?;
        }
        Ok(moves.len())
    }

    /// Gathered layers of whose stored bytes at most half are needed. They are worth gathering
    /// again, because a deflated cell takes space while one byte of it is needed.
    ///
    /// # Errors
    /// Damage of a remap, and as lseek(2).
    pub fn sparse_gathered(&self) -> Result<BTreeSet<LayerId>> {
        let mut gathered = self.catalog();
        gathered.retain(|info| info.header.kind == LayerKind::Gathered);
        let targets = self.targets_in_gathered(&gathered)?;
        let bytes = |ranges: Vec<ByteRange>| ranges.iter().map(ByteRange::len).sum::<u64>();
        let mut sparse = BTreeSet::new();
        for info in gathered {
            let layer = info.header.layer;
            let is_deflated = self.content(layer)?.cells.is_some();
            if is_deflated
                && bytes(self.ranges_to_copy(&info, &targets)?)
                    <= bytes(self.stored_ranges(layer)?) / 2
            {
                sparse.insert(layer);
            }
        }
        Ok(sparse)
    }

    fn create_gathered(&self) -> Result<Gathered> {
        let layer = {
            let mut state = self.state.lock();
            let number = state.next_layer;
            state.next_layer += 1;
            LayerId(number)
        };
        let dir = self.layers.dir.make_dir(&layer::dir_name(layer))?;
        Ok(Gathered { layer, pool: Arc::new(dir.file(POOL, true)?), cells: CellWriter::default() })
    }

    /// Removes a gathered layer that could not be published, unless a remap points to it.
    fn abandon(&self, layer: LayerId) {
        let is_target =
            self.state.lock().remap_targets.as_ref().is_none_or(|known| known.contains(&layer));
        let is_certain = self.require_certain_remaps().is_ok();
        if !is_target
            && is_certain
            && let Err(error) = self.remove_layer(layer)
        {
            ::log::warn!("{error}; gc removes it");
        }
    }

    fn copy_and_publish(
        &self,
        mut gathered: Gathered,
        sources: &[LayerInfo],
        like: &LayerInfo,
    ) -> Result<Option<Moves>> {
        let layer = gathered.layer;
        // Loads the set of targets: `abandon` needs it if a later step fails.
        self.is_remap_target(layer)?;
        let moves = self.copy_sources(&mut gathered, sources)?;
        if moves.is_empty() {
            return Ok(None);
        }
        // The sources have no content of their own.
        if gathered.cells.end() == 0 {
            self.publish_moves(None, sources, &moves)?;
            self.remove_directory(layer)?;
            return Ok(Some(moves));
        }
        let Gathered { pool, cells, .. } = gathered;
        let (cells, checksums) =
            cells.finish(&pool).attempt(|| format!("write the pool of layer {layer}"))?;
        if self.durable {
            disk::sync(&pool).attempt(|| format!("sync the pool of layer {layer}"))?;
            self.layers.dir_of(layer)?.sync()?;
            self.layers.dir.sync()?;
        }
        let journal = gathered_journal(layer, &like.header, cells)?;
        let sums = Some(log::frames(checksums.into_records())?);
        let new = PackedLayer { layer, hole: None, journal, map: None, sums };
        self.publish_moves(Some(new), sources, &moves)?;
        Ok(Some(moves))
    }

    fn copy_sources(&self, gathered: &mut Gathered, sources: &[LayerInfo]) -> Result<Moves> {
        let mut moves = Moves::new();
        let targets = self.targets_in_gathered(sources)?;
        for info in sources {
            let source = info.header.layer;
            match self.copy(info, gathered, &targets)? {
                Copied::Whole(remap) => drop(moves.insert(source, remap)),
                Copied::NoChecksums => {
                    ::log::warn!("layer {source} has no checksums; its content is not gathered");
                }
                Copied::Damaged(at) => ::log::warn!(
                    "the pool of layer {source} is damaged at offset {at}; its content is not \
                     gathered; 'jailfs check --read-data' tells more"
                ),
            }
        }
        Ok(moves)
    }

    /// The ranges that remaps point to, if a gathered layer is among `sources`: only remaps refer
    /// to content of a gathered layer.
    fn targets_in_gathered(&self, sources: &[LayerInfo]) -> Result<LiveRanges> {
        let mut targets = LiveRanges::default();
        if sources.iter().any(|info| info.header.kind == LayerKind::Gathered) {
            for info in self.catalog().iter().filter(|info| info.mapped) {
                for run in self.remap_or_empty(info.header.layer)?.runs() {
                    targets.add_range(run.layer, run.target());
                }
            }
        }
        Ok(targets)
    }

    /// The ranges of the pool of a layer that have to be copied, in whole blocks.
    fn ranges_to_copy(&self, info: &LayerInfo, targets: &LiveRanges) -> Result<Vec<ByteRange>> {
        let layer = info.header.layer;
        if info.header.kind != LayerKind::Gathered {
            return self.own_content(layer);
        }
        // Of a gathered layer, only targets that are still stored: the rest of its cells belonged
        // to states that are gone, and a partly needed run may have a hole in the middle.
        let stored = self.stored_ranges(layer)?;
        let mut to_copy: Vec<ByteRange> = Vec::new();
        for target in targets.of(layer).into_iter().map(in_blocks) {
            let first = stored.partition_point(|data| data.end <= target.start);
            for data in stored.iter().skip(first).take_while(|data| data.start < target.end) {
                let range = ByteRange {
                    start: target.start.max(data.start),
                    end: target.end.min(data.end),
                };
                match to_copy.last_mut() {
                    Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                    _ => to_copy.push(range),
                }
            }
        }
        Ok(to_copy)
    }

    /// The addresses whose bytes are in the pool of a layer, in order; whole cells if it is
    /// deflated.
    fn stored_ranges(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        let (content, end) = (self.content(layer)?, self.pool_end(layer)?);
        let mut stored = LiveRanges::default();
        for data in self.pool_data(layer)? {
            let whole = content.cells.as_ref().map_or(data, |cells| cells.round_out(data));
            let range = ByteRange { start: whole.start, end: block_ceil(whole.end.min(end)) };
            stored.add_range(layer, range);
        }
        Ok(stored.of(layer))
    }

    /// Copies the own content of one layer. Rolls the copy back if a block is damaged.
    fn copy(&self, info: &LayerInfo, to: &mut Gathered, targets: &LiveRanges) -> Result<Copied> {
        let source = info.header.layer;
        let attempt = || format!("gather the content of layer {source}");
        let content = self.content(source)?;
        let mut remap = Remap::default();
        if content.pool.is_none() {
            return Ok(Copied::Whole(remap));
        }
        if content.checksums.is_none() {
            return Ok(Copied::NoChecksums);
        }
        let savepoint = to.cells.clone();
        for range in self.ranges_to_copy(info, targets)? {
            let mut at = range.start;
            while at < range.end {
                let end = range.end.min(at + COPY_LEN);
                // Behind the end of the pool are zeros.
                let mut bytes = vec![0; usize::try_from(end - at).unwrap_or(0)];
                let got = content.read(at, &mut bytes, false).attempt(attempt)?;
                if let ReadOutcome::Damaged(block) = got {
                    to.cells.roll_back(&to.pool, savepoint).attempt(attempt)?;
                    return Ok(Copied::Damaged(block));
                }
                remap.push(Run { start: at, end, layer: to.layer, offset: to.cells.end() });
                to.cells.push(&to.pool, &bytes).attempt(attempt)?;
                at = end;
            }
        }
        Ok(Copied::Whole(remap))
    }

    /// Publishes the gathered layer, if there is one, and every remap that changes.
    fn publish_moves(
        &self,
        new: Option<PackedLayer>,
        sources: &[LayerInfo],
        moves: &Moves,
    ) -> Result<()> {
        self.retire_pools(moves)?;
        let (mut changes, mut remaps) = (Vec::new(), Vec::new());
        let mut catalog = BTreeMap::new();
        for info in sources.iter().filter(|info| moves.contains_key(&info.header.layer)) {
            let layer = info.header.layer;
            if info.header.kind == LayerKind::Gathered {
                // Only remaps point to it, and from now on they point elsewhere. The catalog keeps
                // it for earlier readers.
                self.note_gone(&[layer])?;
                changes.push(Change::Gone(layer));
                catalog.insert(layer, info.clone());
            } else if let Some(packed) = self.layers.packs.get(layer)? {
                let remap = redirect(&self.remap_or_empty(layer)?, moves, moves.get(&layer));
                let hole = Some(self.pool_end(layer)?);
                changes.push(Change::Put(PackedLayer {
                    hole,
                    sums: None,
                    ..self.packed_with_remap(packed, &remap)?
                }));
                remaps.push(remap);
            }
        }
        let mut files = Vec::new();
        for layer in self.catalog().iter().filter(|info| info.mapped).map(|info| info.header.layer)
        {
            let before = self.remap_or_empty(layer)?;
            let remap = redirect(&before, moves, None);
            if remap == before || moves.contains_key(&layer) {
                continue;
            }
            match self.layers.packs.get(layer)? {
                None => files.push((layer, remap)),
                Some(packed) => {
                    changes.push(Change::Put(self.packed_with_remap(packed, &remap)?));
                    remaps.push(remap);
                }
            }
        }
        let new = new.map(Change::Put);
        if files.is_empty() {
            changes.extend(new);
        } else {
            // Before a remap points to the gathered layer, every mount must find that layer.
            self.publish_pack(new.into_iter().collect(), BTreeMap::new())?;
            self.note_remap_targets(files.iter().map(|(_, remap)| remap));
            self.publish_remaps(&files)?;
        }
        self.note_remap_targets(remaps.iter());
        self.publish_pack(changes, catalog)
    }

    /// Remembers how the pools of the sources are stored. A reader that uses an earlier remap opens
    /// and verifies them after the packs no longer say it.
    fn retire_pools(&self, moves: &Moves) -> Result<()> {
        for layer in moves.keys() {
            let content = self.content(*layer)?;
            let checksums = content.checksums.clone().unwrap_or_default();
            let retiring = RetiringPool { checksums, cells: content.cells.clone() };
            self.state.lock().retiring.insert(*layer, retiring);
        }
        Ok(())
    }

    fn remap_or_empty(&self, layer: LayerId) -> Result<Remap> {
        Ok(read_remap(&self.layers, layer)?.unwrap_or_default())
    }

    /// Removes the pool of a source. No reader uses an earlier remap any more.
    fn remove_source_pool(&self, info: &LayerInfo) -> Result<()> {
        let layer = info.header.layer;
        if info.header.kind == LayerKind::Gathered {
            let removed = self.remove_directory(layer);
            self.state.lock().retiring.remove(&layer);
            return removed;
        }
        let hole = self.pool_end(layer)?;
        {
            let mut state = self.state.lock();
            state.retiring.remove(&layer);
            state.contents.remove(&layer);
            if let Some(info) = state.catalog.get_mut(&layer) {
                info.hole = Some(hole);
            }
        }
        self.layers.clear(layer, true)
    }
}

/// The remap after `moves`: runs that pointed to moved bytes point to their copies. `own` is added,
/// the copies of the layer's own content.
fn redirect(remap: &Remap, moves: &Moves, own: Option<&Remap>) -> Remap {
    let mut runs = Vec::new();
    for run in remap.runs() {
        let Some(copies) = moves.get(&run.layer) else {
            runs.push(*run);
            continue;
        };
        let mut at = run.start;
        for range in copies.locate(run.layer, run.target()) {
            // A range that was not copied was a hole in the source. No state needs it, and it
            // reads as zeros without a run, too.
            if range.layer != run.layer {
                let (layer, offset) = (range.layer, range.offset);
                runs.push(Run { start: at, end: at + range.len, layer, offset });
            }
            at += range.len;
        }
    }
    runs.extend(own.map(Remap::runs).unwrap_or_default());
    runs.sort_unstable_by_key(|run| run.start);
    let mut redirected = Remap::default();
    runs.into_iter().for_each(|run| redirected.push(run));
    redirected
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;
    use crate::store::record::Seal;
    use crate::types::{Epoch, Ino, Timestamp};

    fn run(start: u64, end: u64, layer: u32, offset: u64) -> Run {
        Run { start, end, layer: LayerId(layer), offset }
    }

    fn remap(runs: &[Run]) -> Remap {
        let mut remap = Remap::default();
        runs.iter().for_each(|run| remap.push(*run));
        remap
    }

    #[test]
    fn remaps_point_to_the_copies_of_moved_content() {
        let moves = Moves::from([
            (LayerId(1), remap(&[run(0, 4096, 9, 0), run(8192, 12_288, 9, 4096)])),
            (LayerId(2), remap(&[run(0, 4096, 9, 8192)])),
        ]);
        // A run over a hole in the source, one to another layer, and own content.
        let before =
            remap(&[run(0, 9000, 1, 100), run(12_288, 12_300, 3, 7), run(16_384, 16_484, 2, 50)]);
        let own = remap(&[run(20_480, 24_576, 9, 12_288)]);
        let after = redirect(&before, &moves, Some(&own));
        let wanted = [
            run(0, 3996, 9, 100),
            run(8092, 9000, 9, 4096),
            run(12_288, 12_300, 3, 7),
            run(16_384, 16_484, 9, 8242),
            run(20_480, 24_576, 9, 12_288),
        ];
        assert_eq!(after.runs(), wanted);
        assert_eq!(redirect(&before, &Moves::new(), None), before);
    }

    /// A reader that uses an earlier remap opens the pool when no file says any more how it is
    /// stored.
    #[test]
    fn a_reader_with_an_earlier_remap_still_reads_a_deflated_pool() {
        let dir = tempfile::tempdir().unwrap();
        let options = StoreOptions { volatile: true, ..StoreOptions::default() };
        let store = Store::create(&dir.path().join("store"), b"/base", (1, 2), options).unwrap();
        let text: Vec<u8> = (0..20_000).flat_map(|n| format!("line {n}\n").into_bytes()).collect();
        let seal = || Seal {
            name: None,
            message: String::new(),
            time: Timestamp::default(),
            automatic: true,
        };
        for _ in 0..2 {
            let mut layer =
                store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap();
            let at = layer.pool.allocate(Ino(9), ByteRange::at(0, text.len() as u64), true);
            layer.pool.write(at, &text).unwrap();
            store.seal_layer(&mut layer, seal()).unwrap();
            store.write_checksums(layer.layer()).unwrap();
            let none = None::<std::iter::Empty<crate::tree::Edit>>;
            let packed = store.packed_form(layer.layer(), none).unwrap().unwrap();
            store.pack_layers(vec![packed]).unwrap();
        }
        let read = |layer| {
            let mut bytes = vec![0; text.len()];
            let got = store.content(layer).unwrap().read(0, &mut bytes, false).unwrap();
            assert_eq!(got, ReadOutcome::Bytes(text.len()));
            bytes == text
        };
        assert_eq!(store.gather(&store.packed_with_pools()).unwrap(), 2);
        let [first] =
            store.packed_with_pools().try_into().unwrap_or_else(|_| panic!("one layer has a pool"));
        let first: LayerInfo = first;
        assert!(
            store.content(first.header.layer).unwrap().cells.is_some() && read(first.header.layer)
        );
        let reading = store.reading();
        assert_eq!(store.gather(std::slice::from_ref(&first)).unwrap(), 1);
        assert!(read(first.header.layer), "an earlier reader still reads it");
        drop(reading);
        let all = store.packed_with_pools();
        assert!(
            all.iter()
                .any(|info| info.header.layer > first.header.layer && read(info.header.layer))
        );
    }
}
