//! Content of layers that have little of their own, put together in one pool: a layer that is **gathered**.
//!
//! Extents never change; the maps of the layers lead to the new place, and so do the maps of all that led to the old one. In this
//! order: the copy, synced — the new layer — the maps of layers that are not in packs — one pack with all other maps, so that
//! no map ever leads to what is mapped away itself — wait for those who read by the maps before — the old pools go. Cut off before the
//! last pack, it leaves copies beside what they were made of: gc gives back what no map leads to.
//!
//! Always true: what is copied is held against its checksums before, and those of the copy are of the bytes that were, so a flipped bit
//! stays where it is and is told; a layer in which there is one keeps its pool.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::content::cells::{CellWriter, Got};
use crate::store::content::live_ranges::LiveRanges;
use crate::store::content::pool::{block_ceil, block_floor};
use crate::store::content::remap::{Map, Run};
use crate::store::io::{disk, log};
use crate::store::layer;
use crate::store::layer::{LayerInfo, POOL};
use crate::store::pack::{Change, Packed};
use crate::store::placement::packing::gathered_journal;
use crate::store::placement::read_remap;
use crate::store::record::LayerKind;
use crate::store::{FORMAT_WITH_CELLS, Lingering, Store};
use crate::types::{ByteRange, LayerId};

/// Bytes that are copied at once.
const STEP: u64 = 1 << 20;

/// What is copied of a layer, and where the copy is.
type Moved = BTreeMap<LayerId, Map>;

/// The layer that takes content in.
struct Gathered {
    layer: LayerId,
    pool: Arc<File>,
    cells: CellWriter,
}

/// What came of copying what a layer has of its own.
enum Copied {
    /// Where it is in the copy.
    Whole(Map),
    /// It has no checksums to be held against.
    NoSums,
    /// The block at this address is not as it was written.
    Damaged(u64),
}

impl Store {
    /// Puts the content together that these layers have of their own; they are in packs. Nobody may give content of theirs back meanwhile. Gives
    /// how many there were whose content could be moved.
    ///
    /// # Errors
    /// As the calls it is made of; the content is then where it was, or where it was and in the new place. If it is not known what is on the disk, nothing is
    /// given back any more, see [`Store::require_no_doubt`].
    pub fn gather(&self, sources: &[LayerInfo]) -> Result<usize> {
        self.require_no_doubt()?;
        let Some(newest) = sources.last() else { return Ok(0) };
        let gathered = self.begin_gathered()?;
        let layer = gathered.layer;
        let begun = self.copy_and_publish(gathered, sources, newest);
        if !matches!(begun, Ok(Some(_))) {
            self.abandon(layer);
            // They keep their pools.
            if self.require_no_doubt().is_ok() {
                let mut state = self.state.lock();
                sources.iter().for_each(|info| drop(state.lingering.remove(&info.header.layer)));
            }
        }
        let Some(moved) = begun? else { return Ok(0) };
        if !self.wait_for_read_epochs() {
            ::log::warn!(
                "somebody does not come to an end of reading; content that was gathered is there twice for now"
            );
            return Ok(moved.len());
        }
        for info in sources.iter().filter(|info| moved.contains_key(&info.header.layer)) {
            self.drop_pool(info)?;
        }
        Ok(moved.len())
    }

    /// Layers that were gathered and of whose content at most half is needed: cells that are deflated take space as long as a byte of them is.
    ///
    /// # Errors
    /// Damage of a map, and as lseek(2).
    pub fn sparse(&self) -> Result<BTreeSet<LayerId>> {
        let mut gathered = self.catalog();
        gathered.retain(|info| info.header.kind == LayerKind::Gathered);
        let homes = self.homes_in(&gathered)?;
        let bytes = |ranges: Vec<ByteRange>| ranges.iter().map(ByteRange::len).sum::<u64>();
        let mut sparse = BTreeSet::new();
        for info in gathered {
            let layer = info.header.layer;
            let is_deflated = self.content(layer)?.cells.is_some();
            if is_deflated && bytes(self.wanted(&info, &homes)?) <= bytes(self.held(layer)?) / 2 {
                sparse.insert(layer);
            }
        }
        Ok(sparse)
    }

    fn begin_gathered(&self) -> Result<Gathered> {
        let layer = {
            let mut state = self.state.lock();
            let number = state.next_layer;
            state.next_layer += 1;
            LayerId(number)
        };
        let dir = self.layers.dir.make_dir(&layer::dir_name(layer))?;
        Ok(Gathered { layer, pool: Arc::new(dir.file(POOL, true)?), cells: CellWriter::default() })
    }

    /// Removes what was begun and came to nothing, unless a map leads to it.
    fn abandon(&self, layer: LayerId) {
        let is_home = self.state.lock().homes.as_ref().is_none_or(|homes| homes.contains(&layer));
        let is_doubtful = self.require_no_doubt().is_err();
        if !is_home
            && !is_doubtful
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
    ) -> Result<Option<Moved>> {
        let layer = gathered.layer;
        // So that it is known whether a map leads to the new pool, should something fail.
        self.is_home(layer)?;
        let mut moved = Moved::new();
        let homes = self.homes_in(sources)?;
        for info in sources {
            let source = info.header.layer;
            match self.copy(info, &mut gathered, &homes)? {
                Copied::Whole(map) => drop(moved.insert(source, map)),
                Copied::NoSums => {
                    ::log::warn!(
                        "content of layer {source} has no checksums, and stays where it is"
                    )
                }
                Copied::Damaged(at) => ::log::warn!(
                    "content of layer {source} is not as it was written at {at}; 'jailfs check --read-data' tells more"
                ),
            }
        }
        if moved.is_empty() {
            return Ok(None);
        }
        // They have nothing of their own.
        if gathered.cells.end() == 0 {
            self.publish_moved(None, sources, &moved)?;
            self.remove_directory(layer)?;
            return Ok(Some(moved));
        }
        let Gathered { pool, cells, .. } = gathered;
        let (cells, sums) =
            cells.finish(&pool).attempt(|| format!("write the pool of layer {layer}"))?;
        if self.durable {
            disk::sync(&pool).attempt(|| format!("sync the pool of layer {layer}"))?;
            self.layers.dir_of(layer)?.sync()?;
            self.layers.dir.sync()?;
        }
        self.require_format(FORMAT_WITH_CELLS)?;
        let journal = gathered_journal(layer, &like.header, cells)?;
        let sums = Some(log::frames(sums.into_records())?);
        let new = Packed { layer, hole: None, journal, map: None, sums };
        self.publish_moved(Some(new), sources, &moved)?;
        Ok(Some(moved))
    }

    /// Where maps lead to in those of the layers to which only maps lead.
    fn homes_in(&self, sources: &[LayerInfo]) -> Result<LiveRanges> {
        let mut homes = LiveRanges::default();
        if sources.iter().any(|info| info.header.kind == LayerKind::Gathered) {
            for info in self.catalog().iter().filter(|info| info.mapped) {
                for run in self.map_of(info.header.layer)?.runs() {
                    homes.add_range(run.layer, run.home());
                }
            }
        }
        Ok(homes)
    }

    /// What of the pool of a layer is to be copied, in whole blocks.
    fn wanted(&self, info: &LayerInfo, homes: &LiveRanges) -> Result<Vec<ByteRange>> {
        let layer = info.header.layer;
        if info.header.kind != LayerKind::Gathered {
            return self.own_content(layer);
        }
        // What else is in its cells went with states that were given up; and of a run that is needed in part, the middle may be gone.
        let held = self.held(layer)?;
        let mut wanted: Vec<ByteRange> = Vec::new();
        for home in homes.of(layer) {
            let (start, end) = (block_floor(home.start), block_ceil(home.end));
            let first = held.partition_point(|data| data.end <= start);
            for data in held.iter().skip(first).take_while(|data| data.start < end) {
                let range = ByteRange { start: start.max(data.start), end: end.min(data.end) };
                match wanted.last_mut() {
                    Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                    _ => wanted.push(range),
                }
            }
        }
        Ok(wanted)
    }

    /// The addresses whose bytes are in the pool of a layer, in order: of a cell that is deflated all.
    fn held(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        let (content, end) = (self.content(layer)?, self.pool_end(layer)?);
        let mut held = LiveRanges::default();
        for data in self.pool_data(layer)? {
            let whole = content.cells.as_ref().map_or(data, |cells| cells.whole(data));
            let range = ByteRange { start: whole.start, end: block_ceil(whole.end.min(end)) };
            held.add_range(layer, range);
        }
        Ok(held.of(layer))
    }

    /// Copies what a layer has of its own.
    fn copy(&self, info: &LayerInfo, to: &mut Gathered, homes: &LiveRanges) -> Result<Copied> {
        let source = info.header.layer;
        let attempt = || format!("gather the content of layer {source}");
        let content = self.content(source)?;
        let mut map = Map::default();
        if content.file.is_none() {
            return Ok(Copied::Whole(map));
        }
        if content.sums.is_none() {
            return Ok(Copied::NoSums);
        }
        let before = to.cells.clone();
        for range in self.wanted(info, homes)? {
            let mut at = range.start;
            while at < range.end {
                let end = range.end.min(at + STEP);
                // Behind the end of a pool are zeros.
                let mut bytes = vec![0; usize::try_from(end - at).unwrap_or(0)];
                if let Got::Damaged(wrong) = content.read(at, &mut bytes, false).attempt(attempt)? {
                    to.cells.back_to(&to.pool, before).attempt(attempt)?;
                    return Ok(Copied::Damaged(wrong));
                }
                map.push(Run { start: at, end, layer: to.layer, offset: to.cells.end() });
                to.cells.push(&to.pool, &bytes).attempt(attempt)?;
                at = end;
            }
        }
        Ok(Copied::Whole(map))
    }

    /// Publishes where the content is now.
    fn publish_moved(
        &self,
        new: Option<Packed>,
        sources: &[LayerInfo],
        moved: &Moved,
    ) -> Result<()> {
        let (mut files, mut changes, mut maps) = (Vec::new(), Vec::new(), Vec::new());
        // Whoever reads by a map from before still opens the pools, and holds what is in them against what it was.
        for layer in moved.keys() {
            let content = self.content(*layer)?;
            let sums = content.sums.clone().unwrap_or_default();
            let lingering = Lingering { sums, cells: content.cells.clone() };
            self.state.lock().lingering.insert(*layer, lingering);
        }
        let mut catalog = BTreeMap::new();
        for info in sources.iter().filter(|info| moved.contains_key(&info.header.layer)) {
            let layer = info.header.layer;
            if info.header.kind == LayerKind::Gathered {
                // Only maps lead to it, and they lead elsewhere now.
                self.note_gone(&[layer])?;
                changes.push(Change::Gone(layer));
                catalog.insert(layer, info.clone());
            } else if let Some(packed) = self.layers.packs.get(layer)? {
                let map = self.map_of(layer)?.with_moved(moved, moved.get(&layer));
                let hole = Some(self.pool_end(layer)?);
                changes.push(Change::Put(Packed {
                    hole,
                    sums: None,
                    ..self.with_remap(packed, &map)?
                }));
                maps.push(map);
            }
        }
        for layer in self.catalog().iter().filter(|info| info.mapped).map(|info| info.header.layer)
        {
            let before = self.map_of(layer)?;
            let map = before.with_moved(moved, None);
            if map == before || moved.contains_key(&layer) {
                continue;
            }
            match self.layers.packs.get(layer)? {
                None => files.push((layer, map)),
                Some(packed) => {
                    changes.push(Change::Put(self.with_remap(packed, &map)?));
                    maps.push(map);
                }
            }
        }
        let new = new.map(Change::Put);
        if files.is_empty() {
            changes.extend(new);
        } else {
            // A map that is published leads to a layer that every start finds.
            self.publish_packed(new.into_iter().collect(), BTreeMap::new())?;
            self.note_homes(files.iter().map(|(_, map)| map));
            self.publish_remaps(&files)?;
        }
        self.note_homes(maps.iter());
        self.publish_packed(changes, catalog)
    }

    fn map_of(&self, layer: LayerId) -> Result<Map> {
        Ok(read_remap(&self.layers, layer)?.unwrap_or_default())
    }

    /// Removes the pool of a layer whose content is elsewhere, when nobody reads by the maps from before.
    fn drop_pool(&self, info: &LayerInfo) -> Result<()> {
        let layer = info.header.layer;
        if info.header.kind == LayerKind::Gathered {
            let removed = self.remove_directory(layer);
            self.state.lock().lingering.remove(&layer);
            return removed;
        }
        let hole = self.pool_end(layer)?;
        {
            let mut state = self.state.lock();
            state.lingering.remove(&layer);
            state.contents.remove(&layer);
            if let Some(info) = state.catalog.get_mut(&layer) {
                info.hole = Some(hole);
            }
        }
        self.layers.clear(layer, true)
    }
}

impl Map {
    /// The map when content was moved: it leads to the new place where it led to the old one, and `own`, of the layer's own content,
    /// is part of it.
    fn with_moved(&self, moved: &Moved, own: Option<&Map>) -> Map {
        let mut runs = Vec::new();
        for run in self.runs() {
            let Some(to) = moved.get(&run.layer) else {
                runs.push(*run);
                continue;
            };
            let mut at = run.start;
            for place in to.places(run.layer, run.home()) {
                // What was a hole of the old place is nothing that anybody needs, and zeros at home, too.
                if place.layer != run.layer {
                    let (layer, offset) = (place.layer, place.offset);
                    runs.push(Run { start: at, end: at + place.len, layer, offset });
                }
                at += place.len;
            }
        }
        runs.extend(own.map(Map::runs).unwrap_or_default());
        runs.sort_unstable_by_key(|run| run.start);
        let mut map = Map::default();
        runs.into_iter().for_each(|run| map.push(run));
        map
    }
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

    fn map(runs: &[Run]) -> Map {
        let mut map = Map::default();
        runs.iter().for_each(|run| map.push(*run));
        map
    }

    #[test]
    fn maps_lead_to_where_content_was_moved() {
        let moved = Moved::from([
            (LayerId(1), map(&[run(0, 4096, 9, 0), run(8192, 12_288, 9, 4096)])),
            (LayerId(2), map(&[run(0, 4096, 9, 8192)])),
        ]);
        // Over a hole of the old place, to another layer, and with content of its own.
        let before =
            map(&[run(0, 9000, 1, 100), run(12_288, 12_300, 3, 7), run(16_384, 16_484, 2, 50)]);
        let own = map(&[run(20_480, 24_576, 9, 12_288)]);
        let after = before.with_moved(&moved, Some(&own));
        let wanted = [
            run(0, 3996, 9, 100),
            run(8092, 9000, 9, 4096),
            run(12_288, 12_300, 3, 7),
            run(16_384, 16_484, 9, 8242),
            run(20_480, 24_576, 9, 12_288),
        ];
        assert_eq!(after.runs(), wanted);
        assert_eq!(before.with_moved(&Moved::new(), None), before);
    }

    /// Whoever found out by an older map where bytes are opens the pool later, when no file says any more how it is stored.
    #[test]
    fn who_began_before_reads_what_was_deflated_as_it_was() {
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
            let none = None::<std::iter::Empty<crate::store::record::Edit>>;
            let packed = store.packed_form(layer.layer(), none).unwrap().unwrap();
            store.put_in_packs(vec![packed]).unwrap();
        }
        let read = |layer| {
            let mut bytes = vec![0; text.len()];
            let got = store.content(layer).unwrap().read(0, &mut bytes, false).unwrap();
            assert_eq!(got, Got::Bytes(text.len()));
            bytes == text
        };
        assert_eq!(store.gather(&store.packed_with_pools()).unwrap(), 2);
        let [first] =
            store.packed_with_pools().try_into().unwrap_or_else(|_| panic!("one is gathered"));
        let first: LayerInfo = first;
        assert!(
            store.content(first.header.layer).unwrap().cells.is_some() && read(first.header.layer)
        );
        let reading = store.reading();
        assert_eq!(store.gather(std::slice::from_ref(&first)).unwrap(), 1);
        assert!(read(first.header.layer), "it is read as it is stored");
        drop(reading);
        let all = store.packed_with_pools();
        assert!(
            all.iter()
                .any(|info| info.header.layer > first.header.layer && read(info.header.layer))
        );
    }
}
