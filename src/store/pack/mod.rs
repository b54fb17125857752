//! Packs: the journals, checksums and remaps of many sealed layers in one file, `packs/00000003`.
//!
//! Without its content, a layer is a few hundred bytes in three files of its own directory, which
//! take 16 KiB on most hosts. In a pack it takes its own size, or less: the remaps of consecutive
//! layers are nearly equal and deflate well.
//!
//! ```text
//! packs/00000003    log of PackRecord: Begins, then Layers and Gone, then End
//! ```
//!
//! * A pack is published whole by rename and never changes. So it can be read at any time.
//! * If several packs have a record of a layer, the newest one counts, also if it says that the
//!   layer is gone.
//! * If a layer is in a pack, its journal, checksums and remap are those of the pack. Files of
//!   these names in its directory are leftovers of a move that a crash cut off. The directory holds
//!   only the pool, if there is one, and the index.
//! * A pack names the oldest of the packs that it replaces, and replaces all from there to itself.
//!   So it does no harm if a power cut brings some of them back.
//!
//! Each change is a new pack. It merges the newer of the existing packs into itself as long as they
//! are not much larger than the result. So there are few packs, and the bytes that are written in
//! all grow with the logarithm of the number of layers.

mod block;
mod publish;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::io::lru_cache::LruCache;
use crate::types::LayerId;

pub use block::{Block, PackedLayer};
pub(in crate::store) use publish::{PackOptions, PublishedPack};

/// The directory of the packs in a store.
pub(in crate::store) const PACKS: &str = "packs";
/// How many inflated blocks are cached.
const CACHED_BLOCKS: usize = 8;
/// The smallest space that a file takes on a host, in bytes.
const HOST_BLOCK: u64 = 4096;

/// A record of a pack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PackRecord {
    /// The first record.
    Begins {
        /// The number of the pack, which is also its name.
        number: u32,
        /// The pack replaces all packs from this number on; its own number if it replaces none.
        since: u32,
        /// All layer numbers below this one are used.
        next_layer: u32,
    },
    /// Layers, in order of their numbers, and after those of earlier records.
    Layers {
        /// Length of the encoded block in bytes.
        len: u32,
        /// The encoding of a [`Block`], deflated (RFC 1951).
        deflated: Vec<u8>,
    },
    /// These layers are in no pack any more.
    Gone(Vec<LayerId>),
    /// The last record.
    End,
}

/// A change of what the packs say about a layer.
pub enum Change {
    /// The layer is in the packs, in this form.
    Put(PackedLayer),
    /// The layer is in no pack.
    Gone(LayerId),
}

impl Change {
    /// The layer that changes.
    pub fn layer(&self) -> LayerId {
        match self {
            Change::Put(packed) => packed.layer,
            Change::Gone(layer) => *layer,
        }
    }
}

/// Where a layer is: the pack, the frame of its block, and the index in the block.
#[derive(Clone, Copy, Debug)]
struct Position {
    pack: u32,
    frame: Frame,
    index: usize,
}

/// A frame of the log that a pack is.
#[derive(Clone, Copy, Debug)]
struct Frame {
    start: u64,
    len: u64,
    seq: u64,
}

#[derive(Clone)]
struct Pack {
    number: u32,
    since: u32,
    file: Arc<File>,
    bytes: u64,
    /// How many layers it has records of.
    layers: usize,
}

#[derive(Default)]
struct State {
    /// Oldest first.
    packs: Vec<Pack>,
    positions: BTreeMap<LayerId, Position>,
    /// Layers whose newest record says that they are gone.
    gone: BTreeSet<LayerId>,
}

impl State {
    /// Errors for packs that are missing. Each pack replaces all numbers from `since` on, so there
    /// is no gap between two packs.
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

    /// Notes that a pack, read from newest to oldest, has a record of a layer. Returns whether it
    /// is the newest record of that layer.
    fn note_older(&mut self, layer: LayerId, position: Position) -> bool {
        let is_newest = !self.gone.contains(&layer) && !self.positions.contains_key(&layer);
        if is_newest {
            self.positions.insert(layer, position);
        }
        is_newest
    }
}

/// The packs of a store.
pub struct Packs {
    /// The directory; unset until there is a pack.
    dir: OnceLock<StoreDir>,
    /// Serialises publishing.
    publishing: Mutex<()>,
    state: Mutex<State>,
    /// Inflated blocks by pack and offset of the frame.
    blocks: Mutex<LruCache<(u32, u64), Block>>,
    next_layer: u32,
    damaged: Vec<Error>,
}

fn file_name(number: u32) -> String {
    format!("{number:08}")
}

/// The numbers of the files in the directory of packs.
fn numbers_in(dir: &StoreDir) -> Result<Vec<u32>> {
    dir.list(|name| name.parse::<u32>().ok().filter(|_| name.len() == 8))
}

impl Packs {
    /// Reads the packs of a store and calls `each` with the newest record of every layer in them.
    /// Damage is not an error here; see [`Packs::damaged`].
    ///
    /// # Errors
    /// As open(2) and readdir(3).
    pub(in crate::store) fn open(
        store: &StoreDir,
        each: &mut dyn FnMut(&PackedLayer),
    ) -> Result<Packs> {
        let mut packs = Packs {
            dir: OnceLock::new(),
            publishing: Mutex::new(()),
            state: Mutex::default(),
            blocks: Mutex::new(LruCache::new(CACHED_BLOCKS)),
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

    /// Reads from the newest pack to the oldest.
    fn read_all(&mut self, dir: &StoreDir, each: &mut dyn FnMut(&PackedLayer)) -> Result<()> {
        let mut numbers = numbers_in(dir)?;
        numbers.sort_unstable();
        let mut since = u32::MAX;
        for number in numbers.into_iter().rev().collect::<Vec<u32>>() {
            // A newer pack replaced it, and a crash cut its removal off.
            if number >= since {
                continue;
            }
            match self.read_pack(dir, number, each) {
                Ok(pack) => {
                    since = since.min(pack.since);
                    self.state.get_mut().packs.insert(0, pack);
                }
                Err(error) => {
                    // Layers that were found before the damage must not lead to this file.
                    self.state.get_mut().positions.retain(|_, at| at.pack != number);
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
        each: &mut dyn FnMut(&PackedLayer),
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
            let attempt = format!("read {what} at offset 0");
            return Err(Error::damage(attempt, format!("it is pack {named}")));
        }
        self.next_layer = self.next_layer.max(*next_layer);
        let state = self.state.get_mut();
        let mut mentioned = BTreeSet::new();
        let (mut has_end, mut start) = (false, begin);
        for (seq, (record, end)) in records {
            let bad = |why: &str| Error::damage(format!("read {what} at offset {start}"), why);
            match record {
                _ if has_end => return Err(bad("a record after the end record")),
                PackRecord::Begins { .. } => return Err(bad("a second record of its beginning")),
                PackRecord::Layers { len, deflated } => {
                    let block = block::inflate(*len, deflated).map_err(|why| bad(&why))?;
                    let frame = Frame { start, len: end - start, seq: seq as u64 };
                    for index in 0..block.layers.len() {
                        let packed =
                            block.packed(index).ok_or_else(|| bad("not a block of layers"))?;
                        mentioned.insert(packed.layer);
                        let position = Position { pack: number, frame, index };
                        if state.note_older(packed.layer, position) {
                            each(&packed);
                        }
                    }
                }
                PackRecord::Gone(layers) => {
                    mentioned.extend(layers);
                    let unknown = layers.iter().filter(|id| !state.positions.contains_key(id));
                    state.gone.extend(unknown);
                }
                PackRecord::End => has_end = true,
            }
            start = *end;
        }
        if !has_end || contents.torn > 0 {
            return Err(torn());
        }
        Ok(Pack { number, since: *since, file, bytes: bytes.len() as u64, layers: mentioned.len() })
    }

    /// The damage that [`Packs::open`] found, with file and offset.
    pub fn damaged(&mut self) -> &mut Vec<Error> {
        &mut self.damaged
    }

    /// The number of the newest pack.
    pub fn newest(&self) -> Option<u32> {
        self.state.lock().packs.last().map(|pack| pack.number)
    }

    /// All layer numbers below this one are used.
    pub fn next_layer(&self) -> u32 {
        self.next_layer
    }

    /// Whether a layer is in a pack.
    pub fn has(&self, layer: LayerId) -> bool {
        self.state.lock().positions.contains_key(&layer)
    }

    /// The layers that are in packs.
    pub fn layers(&self) -> Vec<LayerId> {
        self.state.lock().positions.keys().copied().collect()
    }

    /// The number of packs, and the space that they take, in bytes.
    pub fn space(&self) -> (usize, u64) {
        let state = self.state.lock();
        let bytes = |pack: &Pack| pack.bytes.next_multiple_of(HOST_BLOCK);
        (state.packs.len(), state.packs.iter().map(bytes).sum())
    }

    /// Names a layer and the file of its pack, for messages.
    pub fn show(&self, layer: LayerId) -> String {
        let pack = self.state.lock().positions.get(&layer).map(|position| position.pack);
        let file = self.dir.get().zip(pack).map(|(dir, pack)| dir.show(&file_name(pack)));
        format!("layer {layer} in {}", file.unwrap_or_else(|| PACKS.to_owned()))
    }

    /// Reads a layer. `None` if it is in no pack.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn get(&self, layer: LayerId) -> Result<Option<PackedLayer>> {
        let found = {
            let state = self.state.lock();
            state.positions.get(&layer).copied().and_then(|position| {
                let pack = state.packs.iter().find(|pack| pack.number == position.pack)?;
                Some((position, Arc::clone(&pack.file)))
            })
        };
        found.map(|(position, file)| self.load(layer, position, &file)).transpose()
    }

    fn load(&self, layer: LayerId, position: Position, file: &File) -> Result<PackedLayer> {
        let key = (position.pack, position.frame.start);
        let what = format!("{PACKS}/{}", file_name(position.pack));
        let damage = |why: String| {
            Error::damage(format!("read {what} at offset {}", position.frame.start), why)
        };
        let cached = self.blocks.lock().get(&key);
        let block = match cached {
            Some(block) => block,
            None => {
                let Frame { start, len, seq } = position.frame;
                let record = log::read_at::<PackRecord>(file, start, len, seq, &what)?;
                let PackRecord::Layers { len, deflated } = record else {
                    return Err(damage("not a block of layers".to_owned()));
                };
                let block = Arc::new(block::inflate(len, &deflated).map_err(damage)?);
                self.blocks.lock().insert(key, Arc::clone(&block));
                block
            }
        };
        let packed = block.packed(position.index).filter(|packed| packed.layer == layer);
        packed.ok_or_else(|| damage(format!("layer {layer} is not in it")))
    }
}
