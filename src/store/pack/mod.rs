//! Packs: the journals, checksums and maps of many sealed layers in one file, `packs/00000003`.
//!
//! What a layer has besides content is some hundred bytes in three files of a directory of its own, 16 KiB on most hosts. In a
//! pack it takes what it takes, and less: the maps of layers that follow each other say nearly the same.
//!
//! ```text
//! packs/00000003    log of PackRecord: Begins, then Layers and Gone, then End
//! ```
//!
//! Always true:
//! * a pack is published whole by rename and never changes, so what it says can be read whatever happens meanwhile;
//! * of what packs say of a layer the newest is true, also if it is that the layer is in none of them any more;
//! * what the packs say of a layer is true, and not the journal, checksums and map that its directory may still have: those are
//!   what is left of a step that was cut off. In the directory are its pool, if it has content of its own, and its index;
//! * a pack names the oldest one whose place it took together with all between, so it does not matter if some of
//!   those come back in a power cut.
//!
//! Each change is a new pack, and takes in the newer ones of those before as far as they are not much larger than what comes to lie on
//! them. So there are few, and what is written again and again stays within a logarithm of what there is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::sync::{Arc, OnceLock};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{Attempt, Error, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::io::lru_cache::LruCache;
use crate::store::io::{codec, disk};
use crate::types::LayerId;

/// The directory of the packs in a store.
pub(in crate::store) const PACKS: &str = "packs";
/// A block takes no more in once it holds so many bytes.
const BLOCK_BYTES: usize = 256 << 10;
/// Blocks that are kept in memory.
const OPEN_BLOCKS: usize = 8;
/// A pack is taken in by one that is at least this part of it.
const PART: u64 = 2;
/// What a file takes on a host at least.
const LEAST: u64 = 4096;

/// A record of a pack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PackRecord {
    /// The first one.
    Begins {
        /// The number of the pack, which is its name.
        number: u32,
        /// It takes the place of the packs from this number on; its own, if it takes no other's.
        since: u32,
        /// Numbers of layers below this were given out.
        next_layer: u32,
    },
    /// Layers, in order of their numbers and behind those of the record before.
    Layers {
        /// Bytes of the block.
        len: u32,
        /// The encoding of a [`Block`], deflated (RFC 1951).
        deflated: Vec<u8>,
    },
    /// These layers are in no pack any more.
    Gone(Vec<LayerId>),
    /// The last record.
    End,
}

/// Layers that are written together: what is alike lies side by side. Each list has an entry for each layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Their numbers.
    pub layers: Vec<LayerId>,
    /// Where its addresses end, if a layer has no content of its own and so no pool.
    pub holes: Vec<Option<u64>>,
    /// The bytes of their journals.
    pub journals: Vec<Vec<u8>>,
    /// The bytes of their maps.
    pub maps: Vec<Option<Vec<u8>>>,
    /// The bytes of their checksums.
    pub sums: Vec<Option<Vec<u8>>>,
}

/// A layer in a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Its number.
    pub layer: LayerId,
    /// Where its addresses end, if it has no content of its own and so no pool.
    pub hole: Option<u64>,
    /// What its journal would be as a file.
    pub journal: Vec<u8>,
    /// Its map, likewise.
    pub map: Option<Vec<u8>>,
    /// Its checksums, likewise.
    pub sums: Option<Vec<u8>>,
}

impl Packed {
    /// Bytes, about.
    pub fn weight(&self) -> usize {
        let of = |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or(0, Vec::len);
        self.journal.len() + of(&self.map) + of(&self.sums)
    }
}

/// What is to be said of a layer from now on.
pub enum Change {
    /// This.
    Put(Packed),
    /// It is in no pack.
    Gone(LayerId),
}

impl Change {
    /// Which layer.
    pub fn layer(&self) -> LayerId {
        match self {
            Change::Put(packed) => packed.layer,
            Change::Gone(layer) => *layer,
        }
    }
}

/// Where a layer is: a frame of a pack, and the how manyth of its block.
#[derive(Clone, Copy, Debug)]
struct Place {
    pack: u32,
    frame: Frame,
    at: usize,
}

/// A frame of a pack.
#[derive(Clone, Copy, Debug)]
struct Frame {
    start: u64,
    len: u64,
    seq: u64,
}

struct Pack {
    number: u32,
    since: u32,
    file: Arc<File>,
    bytes: u64,
    /// Layers of which it says something.
    layers: usize,
}

#[derive(Default)]
struct State {
    /// Oldest first.
    packs: Vec<Pack>,
    places: BTreeMap<LayerId, Place>,
    /// Layers of which the newest that is said is that they are gone.
    gone: BTreeSet<LayerId>,
}

impl State {
    /// The packs that are missing: each takes the place of all numbers from `since` on, so there is no gap between two.
    fn missing(&self, dir: &StoreDir) -> Vec<Error> {
        let mut next = 1;
        let mut missing = Vec::new();
        for pack in &self.packs {
            if pack.since > next {
                let what = dir.show(&file_name(pack.since - 1));
                missing.push(Error::damage(format!("read {what}"), "the file is missing"));
            }
            next = pack.number.saturating_add(1);
        }
        missing
    }
}

/// The packs of a store.
pub struct Packs {
    /// None as long as there are none.
    dir: OnceLock<StoreDir>,
    /// Held by the one that publishes.
    publishing: Mutex<()>,
    state: Mutex<State>,
    blocks: Mutex<LruCache<(u32, u64), Block>>,
    next_layer: u32,
    damaged: Vec<Error>,
}

/// A pack that is on the disk and not used yet.
pub(in crate::store) struct Published {
    pack: Pack,
    places: BTreeMap<LayerId, Place>,
    gone: BTreeSet<LayerId>,
    /// Packs whose place it takes.
    replaced: BTreeSet<u32>,
    /// Whether it survives a power cut.
    pub synced: Result<()>,
}

impl Published {
    /// The number of the pack.
    pub fn number(&self) -> u32 {
        self.pack.number
    }
}

fn file_name(number: u32) -> String {
    format!("{number:08}")
}

impl Packs {
    /// Reads the packs of a store. `each` is given every layer that is in them, the way they say it is now. What is damaged is told by
    /// [`Packs::damaged`].
    ///
    /// # Errors
    /// As open(2) and readdir(3).
    pub(in crate::store) fn open(store: &StoreDir, each: &mut dyn FnMut(&Packed)) -> Result<Packs> {
        let mut packs = Packs {
            dir: OnceLock::new(),
            publishing: Mutex::new(()),
            state: Mutex::default(),
            blocks: Mutex::new(LruCache::new(OPEN_BLOCKS)),
            next_layer: 0,
            damaged: Vec::new(),
        };
        if !store.list(|name| (name == PACKS).then_some(()))?.is_empty() {
            let dir = store.dir(PACKS)?;
            packs.read_all(&dir, each)?;
            packs.dir = OnceLock::from(dir);
        }
        Ok(packs)
    }

    fn read_all(&mut self, dir: &StoreDir, each: &mut dyn FnMut(&Packed)) -> Result<()> {
        let mut numbers = dir.list(|name| name.parse::<u32>().ok().filter(|_| name.len() == 8))?;
        numbers.sort_unstable();
        let mut since = u32::MAX;
        for number in numbers.into_iter().rev().collect::<Vec<u32>>() {
            // Another took its place, and its removal was cut off.
            if number >= since {
                continue;
            }
            match self.read_pack(dir, number, each) {
                Ok(pack) => {
                    since = since.min(pack.since);
                    self.state.get_mut().packs.insert(0, pack);
                }
                Err(error) => {
                    // What was found in it before the damage cannot be read by anybody.
                    self.state.get_mut().places.retain(|_, place| place.pack != number);
                    self.damaged.push(error);
                }
            }
        }
        if self.damaged.is_empty() {
            self.damaged.extend(self.state.get_mut().missing(dir));
        }
        Ok(())
    }

    fn read_pack(
        &mut self,
        dir: &StoreDir,
        number: u32,
        each: &mut dyn FnMut(&Packed),
    ) -> Result<Pack> {
        let name = file_name(number);
        let what = dir.show(&name);
        let file = Arc::new(dir.file(&name, false)?);
        let bytes = dir.read(&name)?.unwrap_or_default();
        let contents = log::read::<PackRecord>(&bytes, &what)?;
        let torn = || {
            Error::damage(format!("read {what} at offset {}", contents.end), "its end is missing")
        };
        let mut records = contents.records.iter().enumerate();
        let begin = records.next().map(|(_, (record, end))| (record, *end));
        let Some((PackRecord::Begins { number: named, since, next_layer }, begin)) = begin else {
            return Err(torn());
        };
        if *named != number || *since > number {
            return Err(Error::damage(
                format!("read {what} at offset 0"),
                format!("it is pack {named}"),
            ));
        }
        self.next_layer = self.next_layer.max(*next_layer);
        let mut said = BTreeSet::new();
        let (mut is_whole, mut start) = (false, begin);
        for (seq, (record, end)) in records {
            let bad = |why: &str| Error::damage(format!("read {what} at offset {start}"), why);
            match record {
                _ if is_whole => return Err(bad("it ends twice")),
                PackRecord::Begins { .. } => return Err(bad("it begins twice")),
                PackRecord::Layers { len, deflated } => {
                    let block = inflate(*len, deflated).map_err(|why| bad(&why))?;
                    let frame = Frame { start, len: end - start, seq: seq as u64 };
                    for at in 0..block.layers.len() {
                        let packed =
                            block.packed(at).ok_or_else(|| bad("not a block of layers"))?;
                        said.insert(packed.layer);
                        let state = self.state.get_mut();
                        if !state.gone.contains(&packed.layer)
                            && !state.places.contains_key(&packed.layer)
                        {
                            state.places.insert(packed.layer, Place { pack: number, frame, at });
                            each(&packed);
                        }
                    }
                }
                PackRecord::Gone(layers) => {
                    let state = self.state.get_mut();
                    said.extend(layers);
                    state
                        .gone
                        .extend(layers.iter().filter(|layer| !state.places.contains_key(layer)));
                }
                PackRecord::End => is_whole = true,
            }
            start = *end;
        }
        if !is_whole || contents.torn > 0 {
            return Err(torn());
        }
        Ok(Pack { number, since: *since, file, bytes: bytes.len() as u64, layers: said.len() })
    }

    /// What is damaged, with file and offset.
    pub fn damaged(&mut self) -> &mut Vec<Error> {
        &mut self.damaged
    }

    /// The number of the newest pack.
    pub fn newest(&self) -> Option<u32> {
        self.state.lock().packs.last().map(|pack| pack.number)
    }

    /// Numbers of layers below this were given out.
    pub fn next_layer(&self) -> u32 {
        self.next_layer
    }

    /// Whether a layer is in a pack.
    pub fn has(&self, layer: LayerId) -> bool {
        self.state.lock().places.contains_key(&layer)
    }

    /// The layers that are in packs.
    pub fn layers(&self) -> Vec<LayerId> {
        self.state.lock().places.keys().copied().collect()
    }

    /// How many packs there are, and how many bytes they take.
    pub fn space(&self) -> (usize, u64) {
        let state = self.state.lock();
        let bytes = |pack: &Pack| pack.bytes.next_multiple_of(LEAST);
        (state.packs.len(), state.packs.iter().map(bytes).sum())
    }

    /// In which file a layer is, for messages.
    pub fn show(&self, layer: LayerId) -> String {
        let place = self.state.lock().places.get(&layer).copied();
        let file = self.dir.get().zip(place).map(|(dir, place)| dir.show(&file_name(place.pack)));
        format!("layer {layer} in {}", file.unwrap_or_else(|| PACKS.to_owned()))
    }

    /// A layer that is in a pack; none if it is in none.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn get(&self, layer: LayerId) -> Result<Option<Packed>> {
        let found = {
            let state = self.state.lock();
            state.places.get(&layer).copied().and_then(|place| {
                let pack = state.packs.iter().find(|pack| pack.number == place.pack)?;
                Some((place, Arc::clone(&pack.file)))
            })
        };
        found.map(|(place, file)| self.load(layer, place, &file)).transpose()
    }

    fn load(&self, layer: LayerId, place: Place, file: &File) -> Result<Packed> {
        let key = (place.pack, place.frame.start);
        let what = format!("{PACKS}/{}", file_name(place.pack));
        let attempt = || format!("read {what} at offset {}", place.frame.start);
        let known = self.blocks.lock().get(&key);
        let block = match known {
            Some(block) => block,
            None => {
                let Frame { start, len, seq } = place.frame;
                let record = log::read_at::<PackRecord>(file, start, len, seq, &what)?;
                let PackRecord::Layers { len, deflated } = record else {
                    return Err(Error::damage(attempt(), "not a block of layers"));
                };
                let block = inflate(len, &deflated).map_err(|why| Error::damage(attempt(), why))?;
                let block = Arc::new(block);
                self.blocks.lock().insert(key, Arc::clone(&block));
                block
            }
        };
        let packed = block.packed(place.at).filter(|packed| packed.layer == layer);
        packed.ok_or_else(|| Error::damage(attempt(), format!("layer {layer} is not in it")))
    }

    /// Writes a pack that says these changes, and puts it on the disk. Nobody finds it before [`Packs::adopt`]; one thread at a
    /// time.
    ///
    /// # Errors
    /// As the calls it is made of; nothing has changed then.
    pub(in crate::store) fn publish(
        &self,
        store: &StoreDir,
        changes: &[Change],
        how: Publishing,
    ) -> Result<Published> {
        let _publishing = self.publishing.lock();
        let dir = self.dir_in(store, how.durable)?;
        let plan = self.plan(changes, how.takes_in);
        let temp = format!("{}.new", file_name(plan.number));
        let published = self.publish_plan(dir, plan, how);
        // What was written of it takes space for nothing.
        if published.is_err()
            && let Err(error) = dir.remove(&temp)
        {
            ::log::warn!("{error}");
        }
        published
    }

    fn publish_plan(&self, dir: &StoreDir, plan: Plan<'_>, how: Publishing) -> Result<Published> {
        let Publishing { next_layer, durable, .. } = how;
        let number = plan.number;
        let (name, temp) = (file_name(number), format!("{}.new", file_name(number)));
        let attempt = || format!("publish {}", dir.show(&name));
        dir.remove(&temp)?;
        let file = Arc::new(dir.file(&temp, true)?);
        let mut log = Log::append_to(Arc::clone(&file), dir.show(&temp), 0, 0)?;
        log.append(&PackRecord::Begins { number, since: plan.since, next_layer })?;
        let layers = plan.entries.len() + plan.gone.len();
        let places = self.write_layers(&mut log, number, plan.entries)?;
        if !plan.gone.is_empty() {
            log.append(&PackRecord::Gone(plan.gone.iter().copied().collect()))?;
        }
        log.append(&PackRecord::End)?;
        if durable {
            log.sync()?;
        }
        disk::rename(dir, &temp, &name).attempt(attempt)?;
        let synced = if durable { dir.sync() } else { Ok(()) };
        let pack = Pack { number, since: plan.since, file, bytes: log.len(), layers };
        Ok(Published { pack, places, gone: plan.gone, replaced: plan.replaced, synced })
    }

    /// The directory of the packs, which is made if there is none.
    fn dir_in(&self, store: &StoreDir, durable: bool) -> Result<&StoreDir> {
        if let Some(dir) = self.dir.get() {
            return Ok(dir);
        }
        let made = store.make_dir(PACKS)?;
        if durable {
            store.sync()?;
        }
        Ok(self.dir.get_or_init(|| made))
    }

    /// What a new pack is to say, and whose place it takes.
    fn plan<'c>(&self, changes: &'c [Change], takes_in: bool) -> Plan<'c> {
        let state = self.state.lock();
        let number = state.packs.last().map_or(1, |pack| pack.number + 1);
        let weight = |change: &Change| match change {
            Change::Put(packed) => packed.weight() as u64,
            Change::Gone(_) => 0,
        };
        let mut bytes = changes.iter().map(weight).sum::<u64>().max(LEAST);
        let mut live: BTreeMap<u32, usize> = BTreeMap::new();
        for place in state.places.values() {
            *live.entry(place.pack).or_default() += 1;
        }
        let mut first = state.packs.len();
        for (at, pack) in state.packs.iter().enumerate().rev() {
            // Most of it was said anew, or is of layers that are gone.
            let is_stale = live.get(&pack.number).copied().unwrap_or(0) * 2 < pack.layers;
            if takes_in && (pack.bytes.max(LEAST) <= PART * bytes || is_stale) {
                first = at;
                bytes = state.packs.iter().skip(at).map(|pack| pack.bytes).sum::<u64>().max(bytes);
            }
        }
        let (kept, taken_in) = state.packs.split_at(first);
        let replaced: BTreeSet<u32> = taken_in.iter().map(|pack| pack.number).collect();
        let since = taken_in.iter().map(|pack| pack.since).min().unwrap_or(number);
        let mut entries = BTreeMap::new();
        for (layer, place) in
            state.places.iter().filter(|(_, place)| replaced.contains(&place.pack))
        {
            if let Some(pack) = taken_in.iter().find(|pack| pack.number == place.pack) {
                entries.insert(*layer, Entry::Known(*place, Arc::clone(&pack.file)));
            }
        }
        let mut gone = state.gone.clone();
        for change in changes {
            let layer = change.layer();
            gone.remove(&layer);
            entries.remove(&layer);
            match change {
                Change::Put(packed) => drop(entries.insert(layer, Entry::New(packed))),
                Change::Gone(layer) => drop(gone.insert(*layer)),
            }
        }
        if kept.is_empty() {
            gone.clear();
        }
        Plan { number, since, replaced, entries, gone }
    }

    fn write_layers(
        &self,
        log: &mut Log<PackRecord>,
        number: u32,
        entries: BTreeMap<LayerId, Entry<'_>>,
    ) -> Result<BTreeMap<LayerId, Place>> {
        let mut places = BTreeMap::new();
        let (mut block, mut weight) = (Block::default(), 0);
        let mut entries = entries.into_iter().peekable();
        while let Some((layer, entry)) = entries.next() {
            let packed = match entry {
                Entry::New(packed) => packed.clone(),
                Entry::Known(place, file) => self.load(layer, place, &file)?,
            };
            weight += packed.weight();
            block.push(packed);
            if weight >= BLOCK_BYTES || entries.peek().is_none() {
                let (start, seq) = (log.len(), log.count());
                log.append(&deflate(&block)?)?;
                let frame = Frame { start, len: log.len() - start, seq };
                for (at, layer) in block.layers.iter().enumerate() {
                    places.insert(*layer, Place { pack: number, frame, at });
                }
                (block, weight) = (Block::default(), 0);
            }
        }
        Ok(places)
    }

    /// Uses a pack from now on: whoever asks next finds what it says.
    pub(in crate::store) fn adopt(&self, published: &mut Published) {
        let mut state = self.state.lock();
        let Published { pack, places, gone, replaced, .. } = published;
        let Pack { number, since, ref file, bytes, layers } = *pack;
        state.packs.retain(|pack| !replaced.contains(&pack.number));
        state.packs.push(Pack { number, since, file: Arc::clone(file), bytes, layers });
        state
            .places
            .retain(|layer, place| !replaced.contains(&place.pack) && !gone.contains(layer));
        state.places.append(places);
        state.gone = std::mem::take(gone);
    }

    /// Removes the packs whose place another took. It does not matter if they come back.
    pub(in crate::store) fn remove_replaced(&self, published: &Published) {
        for number in &published.replaced {
            if let Some(Err(error)) = self.dir.get().map(|dir| dir.remove(&file_name(*number))) {
                ::log::warn!("{error}; it is not needed");
            }
        }
    }

    /// Removes packs whose place others took before this process began.
    pub(in crate::store) fn remove_old(&self) -> Result<()> {
        let Some(dir) = self.dir.get() else { return Ok(()) };
        let state = self.state.lock();
        let is_old = |number: &u32| state.packs.iter().all(|pack| pack.number != *number);
        let numbers = dir.list(|name| name.parse::<u32>().ok().filter(|_| name.len() == 8))?;
        numbers.into_iter().filter(is_old).try_for_each(|number| dir.remove(&file_name(number)))
    }
}

/// How a pack is published.
#[derive(Clone, Copy, Debug)]
pub(in crate::store) struct Publishing {
    /// Numbers of layers below this are not given out again.
    pub next_layer: u32,
    /// Whether it is synced.
    pub durable: bool,
    /// Whether it may take the place of others: that takes space until those are removed.
    pub takes_in: bool,
}

/// A new pack.
struct Plan<'c> {
    number: u32,
    since: u32,
    replaced: BTreeSet<u32>,
    entries: BTreeMap<LayerId, Entry<'c>>,
    gone: BTreeSet<LayerId>,
}

/// A layer of a new pack.
enum Entry<'c> {
    New(&'c Packed),
    /// As an older pack says it.
    Known(Place, Arc<File>),
}

impl Block {
    fn push(&mut self, packed: Packed) {
        self.layers.push(packed.layer);
        self.holes.push(packed.hole);
        self.journals.push(packed.journal);
        self.maps.push(packed.map);
        self.sums.push(packed.sums);
    }

    fn packed(&self, at: usize) -> Option<Packed> {
        Some(Packed {
            layer: *self.layers.get(at)?,
            hole: *self.holes.get(at)?,
            journal: self.journals.get(at)?.clone(),
            map: self.maps.get(at)?.clone(),
            sums: self.sums.get(at)?.clone(),
        })
    }
}

fn deflate(block: &Block) -> Result<PackRecord> {
    let bad = |why: String| Error::damage("encode a record", why);
    let bytes = codec::encode(block).map_err(bad)?;
    let len = u32::try_from(bytes.len()).ok().filter(|len| *len as usize <= codec::MAX_LEN);
    let len = len.ok_or_else(|| bad("it is too long".to_owned()))?;
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    let deflated = encoder.write_all(&bytes).and_then(|()| encoder.finish());
    Ok(PackRecord::Layers { len, deflated: deflated.attempt(|| "deflate a block of layers")? })
}

fn inflate(len: u32, deflated: &[u8]) -> std::result::Result<Block, String> {
    if len as usize > codec::MAX_LEN {
        return Err("it is too long".to_owned());
    }
    let mut bytes = Vec::new();
    let mut decoder = DeflateDecoder::new(deflated).take(u64::from(len) + 1);
    decoder.read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() != len as usize {
        return Err(format!("{} bytes instead of {len}", bytes.len()));
    }
    codec::decode(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::layer::files::Layers;
    use crate::store::layer::{LayerInfo, packed_info};
    use crate::store::placement::packing::gathered_journal;
    use crate::store::record::{Header, LayerKind};
    use crate::types::{Epoch, Timestamp};

    fn packed(layer: u32, fill: u8) -> Packed {
        let time = Timestamp::default();
        let (head, kind) = ("main".to_owned(), LayerKind::Continues);
        let header =
            Header { layer: LayerId(layer), parent: None, head, epoch: Epoch(0), kind, time };
        let journal = gathered_journal(LayerId(layer), &header, Vec::new()).unwrap();
        Packed {
            layer: LayerId(layer),
            hole: Some(u64::from(fill)),
            journal,
            map: Some(vec![fill; 5000]),
            sums: None,
        }
    }

    fn store() -> (tempfile::TempDir, StoreDir) {
        let dir = tempfile::tempdir().unwrap();
        let store = StoreDir::open(dir.path()).unwrap();
        store.make_dir("layers").unwrap();
        (dir, store)
    }

    fn say(packs: &Packs, store: &StoreDir, changes: Vec<Change>) -> Published {
        let mut published = packs
            .publish(
                store,
                &changes,
                Publishing { next_layer: 1000, durable: false, takes_in: true },
            )
            .unwrap();
        packs.adopt(&mut published);
        published
    }

    fn found(store: &StoreDir) -> (BTreeMap<LayerId, Packed>, Packs) {
        let mut found = BTreeMap::new();
        let mut packs =
            Packs::open(store, &mut |packed| drop(found.insert(packed.layer, packed.clone())))
                .unwrap();
        assert!(packs.damaged().is_empty(), "{:?}", packs.damaged());
        (found, packs)
    }

    #[test]
    fn of_what_packs_say_the_newest_is_true_also_if_those_that_were_replaced_come_back() {
        let (_dir, store) = store();
        let packs = Packs::open(&store, &mut |_| ()).unwrap();
        let (mut model, mut seed) = (BTreeMap::new(), 7u64);
        for step in 0..200u32 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let layer = ((seed >> 33) % 40) as u32 + 1;
            let change = if step % 3 == 2 {
                model.remove(&LayerId(layer));
                Change::Gone(LayerId(layer))
            } else {
                let new = packed(layer, step as u8);
                model.insert(LayerId(layer), new.clone());
                Change::Put(new)
            };
            let published = say(&packs, &store, vec![change]);
            // Of some the removal is cut off.
            if step % 5 > 0 {
                packs.remove_replaced(&published);
            }
            for layer in (1..=40).map(LayerId) {
                assert_eq!(
                    packs.get(layer).unwrap().as_ref(),
                    model.get(&layer),
                    "step {step}, layer {layer}"
                );
            }
            if step % 20 == 0 {
                let (again, opened) = found(&store);
                assert_eq!(again, model, "step {step}");
                assert_eq!(opened.layers(), model.keys().copied().collect::<Vec<_>>());
                assert_eq!(opened.next_layer(), 1000);
                opened.remove_old().unwrap();
                assert_eq!(found(&store).0, model);
            }
        }
        let (count, bytes) = packs.space();
        assert!(count < 8 && bytes < 40_000, "{count} packs of {bytes} bytes");
    }

    #[test]
    fn maps_that_follow_each_other_take_next_to_nothing() {
        let (_dir, store) = store();
        let packs = Packs::open(&store, &mut |_| ()).unwrap();
        let map: Vec<u8> =
            (0..6000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        let layers =
            (1..=100).map(|n| Change::Put(Packed { map: Some(map.clone()), ..packed(n, 0) }));
        say(&packs, &store, layers.collect());
        let (_, bytes) = packs.space();
        assert!(bytes < 15 * 24_000, "{bytes} bytes for 100 maps of 24,000");
    }

    #[test]
    fn a_pack_that_is_cut_or_has_a_flipped_bit_is_told_and_never_a_wrong_layer() {
        let (dir, store) = store();
        let packs = Packs::open(&store, &mut |_| ()).unwrap();
        say(
            &packs,
            &store,
            (1..=3).map(|n| Change::Put(packed(n, 1))).chain([Change::Gone(LayerId(9))]).collect(),
        );
        let path = dir.path().join("packs/00000001");
        let whole = std::fs::read(&path).unwrap();
        let told = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let mut opened = Packs::open(&store, &mut |_| ()).unwrap();
            let error = opened.damaged().pop();
            error.is_some_and(|error| error.to_string().contains("packs/00000001 at offset"))
        };
        (0..whole.len()).for_each(|at| assert!(told(&whole[..at]), "cut at {at}"));
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 1 << (at % 8);
            assert!(told(&bad), "byte {at}");
        }
        assert!(!told(&whole));
    }

    #[test]
    fn what_a_directory_has_of_a_layer_in_a_pack_is_left_of_a_step_that_was_cut_off() {
        let (dir, store) = store();
        let packs = Packs::open(&store, &mut |_| ()).unwrap();
        say(
            &packs,
            &store,
            vec![Change::Put(packed(7, 1)), Change::Put(Packed { hole: None, ..packed(8, 1) })],
        );
        for layer in ["00000007", "00000008"] {
            let layer = dir.path().join("layers").join(layer);
            std::fs::create_dir(&layer).unwrap();
            ["journal", "map", "pool"]
                .iter()
                .for_each(|name| std::fs::write(layer.join(name), "old").unwrap());
        }
        let layers = Layers::open(&store, &mut |_| ()).unwrap();
        let LayerInfo { packed: true, mapped: true, .. } =
            packed_info(&layers, &packed(7, 1)).unwrap()
        else {
            panic!("not in a pack");
        };
        assert_eq!(layers.read(LayerId(7), "map").unwrap(), Some(vec![1; 5000]));
        layers.remove_left(&layers.directories().unwrap()).unwrap();
        assert!(!dir.path().join("layers/00000007").exists(), "it has nothing of its own");
        let left = std::fs::read_dir(dir.path().join("layers/00000008")).unwrap();
        assert_eq!(left.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>(), ["pool"]);
    }

    #[test]
    fn a_pack_that_is_missing_below_the_newest_is_named() {
        let (dir, store) = store();
        let packs = Packs::open(&store, &mut |_| ()).unwrap();
        for layer in 1..=3 {
            let how = Publishing { next_layer: 10, durable: false, takes_in: false };
            let mut published =
                packs.publish(&store, &[Change::Put(packed(layer, 1))], how).unwrap();
            packs.adopt(&mut published);
        }
        assert_eq!(found(&store).0.len(), 3);
        for number in [1, 2] {
            let path = dir.path().join(PACKS).join(file_name(number));
            let bytes = std::fs::read(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            let told =
                Packs::open(&store, &mut |_| ()).unwrap().damaged().pop().unwrap().to_string();
            assert!(told.contains(&format!("{PACKS}/{}", file_name(number))), "{told}");
            std::fs::write(&path, bytes).unwrap();
        }
    }
}
