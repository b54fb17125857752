//! Archived layers: sealed layers whose records and content are in archive packs.
//!
//! Without its content, a layer is a few hundred bytes in files of its own directory, which take 16
//! KiB on most hosts. In the archive it takes its own size, or less: the records of consecutive
//! layers are nearly equal and compress well.
//!
//! ```text
//! archive/root        one frame: RootRecord, the packs of the archive, and the blocks
//! archive/<64 hex>    archive packs, with the chunks of blocks and of content
//! ```
//!
//! * The root says everything: the archive has the packs that it names, and the layers of its
//!   blocks. It is published by rename, after the packs that it names are on disk.
//! * If a layer is in the archive, files of its directory other than the index are leftovers of a
//!   move that a crash cut off.
//! * The addresses of a layer stay what they were in its pool. So extents, remaps and edits stay.
//! * Each byte that a reader gets was verified against a digest, from the root down.
//!
//! A change of a layer writes its block anew, and the root. [`ArchivedLayers::tidy`] then writes
//! packs anew of which little is live.

mod block;
mod publish;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::archive::packs::Archive;
use crate::store::archive::{ChunkRef, ChunkSource, Digest};
use crate::store::io::codec;
use crate::store::io::dir::StoreDir;
use crate::store::io::lru_cache::LruCache;
use crate::store::io::record_file;
use crate::sys::lock::{Rank, RankedMutex};
use crate::types::LayerId;

pub use block::{ArchivedLayer, Block, StoredContent};
pub(in crate::store) use publish::{PublishedRoot, Tidied};

/// The directory of the archive in a store.
pub(in crate::store) const ARCHIVE: &str = "archive";
/// The file that names the packs and the blocks.
const ROOT: &str = "root";
/// How many decoded blocks are cached.
const CACHED_BLOCKS: usize = 32;
/// How often a reader without the lock of the store starts again, because the writer replaced the
/// root and the packs meanwhile.
const ATTEMPTS: usize = 10;

/// The content of `archive/root`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootRecord {
    /// All layer numbers below this one are used.
    pub next_layer: u32,
    /// The names of the packs.
    pub packs: Vec<Digest>,
    /// The chunks that each block consists of.
    pub blocks: Vec<Vec<ChunkRef>>,
}

/// A change of the archive.
pub enum Change {
    /// The layer is in the archive, in this form.
    Put(ArchivedLayer),
    /// The layer is not in the archive.
    Gone(LayerId),
}

impl Change {
    /// The layer that changes.
    pub fn layer(&self) -> LayerId {
        match self {
            Change::Put(archived) => archived.layer,
            Change::Gone(layer) => *layer,
        }
    }
}

/// The number of a block while the store is open.
type BlockId = u64;

#[derive(Default)]
struct State {
    /// The number of the frame of the root; 0 if there is none.
    number: u64,
    blocks: BTreeMap<BlockId, Vec<ChunkRef>>,
    next_block: BlockId,
    /// The block of each layer, and the index in it.
    positions: BTreeMap<LayerId, (BlockId, usize)>,
}

impl State {
    fn add_block(&mut self, chunks: Vec<ChunkRef>, layers: &[LayerId]) {
        let id = self.next_block;
        self.next_block += 1;
        self.blocks.insert(id, chunks);
        let positions = layers.iter().enumerate().map(|(index, layer)| (*layer, (id, index)));
        self.positions.extend(positions);
    }
}

/// The archived layers of a store.
pub struct ArchivedLayers {
    /// The packs; unset until a layer was archived.
    archive: OnceLock<Arc<Archive>>,
    state: RankedMutex<State>,
    blocks: RankedMutex<LruCache<BlockId, Block>>,
    next_layer: u32,
    damaged: Vec<Error>,
}

impl ArchivedLayers {
    /// Reads the archive of a store and calls `each` with every layer in it. Damage is not an error
    /// here; see [`ArchivedLayers::damaged`].
    ///
    /// # Errors
    /// As open(2) and readdir(3).
    pub(in crate::store) fn open(
        store: &StoreDir,
        durable: bool,
        each: &mut dyn FnMut(ArchivedLayer),
    ) -> Result<ArchivedLayers> {
        let mut layers = ArchivedLayers {
            archive: OnceLock::new(),
            state: RankedMutex::new(Rank::Archive, State::default()),
            blocks: RankedMutex::new(Rank::Archive, LruCache::new(CACHED_BLOCKS)),
            next_layer: 0,
            damaged: Vec::new(),
        };
        if store.list(|name| (name == ARCHIVE).then_some(()))?.is_empty() {
            return Ok(layers);
        }
        let dir = store.dir(ARCHIVE)?;
        let root = match record_file::read_numbered::<RootRecord>(&dir, ROOT) {
            Ok(root) => root,
            Err(error) => {
                layers.damaged.push(error);
                return Ok(layers);
            }
        };
        let (mut root, mut number) = root
            .unwrap_or((RootRecord { next_layer: 0, packs: Vec::new(), blocks: Vec::new() }, 0));
        for _ in 0..ATTEMPTS {
            let (archive, errors) = Archive::open(store.dir(ARCHIVE)?, &root.packs, durable);
            layers.archive = OnceLock::from(Arc::new(archive));
            layers.damaged = errors;
            let again = record_file::read_numbered::<RootRecord>(&dir, ROOT)?;
            match again {
                Some((now, known)) if known != number => (root, number) = (now, known),
                _ => break,
            }
        }
        layers.next_layer = root.next_layer;
        layers.state.get_mut().number = number;
        layers.read_blocks(root.blocks, each)?;
        Ok(layers)
    }

    fn read_blocks(
        &mut self,
        blocks: Vec<Vec<ChunkRef>>,
        each: &mut dyn FnMut(ArchivedLayer),
    ) -> Result<()> {
        let is_whole = self.damaged.is_empty();
        for chunks in blocks {
            match self.read_block(&chunks) {
                Ok(block) => {
                    self.state.get_mut().add_block(chunks, &block.layers);
                    (0..block.layers.len())
                        .filter_map(|index| block.get(index))
                        .for_each(&mut *each);
                }
                Err(error) if error.kind != crate::error::Kind::Damage => return Err(error),
                // A pack that is missing was reported already.
                Err(error) if is_whole => self.damaged.push(error),
                Err(_) => {}
            }
        }
        Ok(())
    }

    fn read_block(&self, chunks: &[ChunkRef]) -> Result<Block> {
        let damage = |why: &str| Error::damage(format!("read a block of {ARCHIVE}/{ROOT}"), why);
        let archive = self.archive.get().ok_or_else(|| damage("there is no archive"))?;
        let mut bytes = Vec::new();
        for chunk in chunks {
            bytes.extend(archive.get(chunk)?);
        }
        let block: Block = codec::decode(&bytes).map_err(|why| damage(&why))?;
        let len = block.layers.len();
        let columns =
            [block.ends.len(), block.journals.len(), block.maps.len(), block.contents.len()];
        match columns.iter().all(|column| *column == len) {
            true => Ok(block),
            false => Err(damage("a column of another length")),
        }
    }

    /// The damage that [`ArchivedLayers::open`] found.
    pub fn damaged(&mut self) -> &mut Vec<Error> {
        &mut self.damaged
    }

    /// The number of the root; 0 if there is none.
    pub fn number(&self) -> u64 {
        self.state.lock().number
    }

    /// All layer numbers below this one are used.
    pub fn next_layer(&self) -> u32 {
        self.next_layer
    }

    /// The packs, if a layer was ever archived.
    pub fn archive(&self) -> Option<&Arc<Archive>> {
        self.archive.get()
    }

    /// Whether a layer is in the archive.
    pub fn has(&self, layer: LayerId) -> bool {
        self.state.lock().positions.contains_key(&layer)
    }

    /// The layers in the archive.
    pub fn layers(&self) -> Vec<LayerId> {
        self.state.lock().positions.keys().copied().collect()
    }

    /// The number of packs, and the space that they take, in bytes.
    pub fn space(&self) -> (usize, u64) {
        self.archive.get().map_or((0, 0), |archive| archive.space())
    }

    /// Reads a layer. `None` if it is not in the archive.
    ///
    /// # Errors
    /// As pread(2), and damage.
    pub fn get(&self, layer: LayerId) -> Result<Option<ArchivedLayer>> {
        while let Some((id, index, chunks)) = self.place_of(layer) {
            let missing = || {
                let attempt = format!("read a block of {ARCHIVE}/{ROOT}");
                Error::damage(attempt, format!("no layer {layer}"))
            };
            let found = self.block(id, &chunks).and_then(|block| {
                block.get(index).filter(|found| found.layer == layer).ok_or_else(missing)
            });
            // The writer may have replaced the block meanwhile, and removed its packs.
            if found.is_ok() || self.place_of(layer).is_some_and(|(now, ..)| now == id) {
                return found.map(Some);
            }
        }
        Ok(None)
    }

    /// The block of a layer, the index in it, and the chunks of the block.
    fn place_of(&self, layer: LayerId) -> Option<(BlockId, usize, Vec<ChunkRef>)> {
        let state = self.state.lock();
        let (id, index) = state.positions.get(&layer).copied()?;
        Some((id, index, state.blocks.get(&id)?.clone()))
    }

    fn block(&self, id: BlockId, chunks: &[ChunkRef]) -> Result<Arc<Block>> {
        if let Some(block) = self.blocks.lock().get(&id) {
            return Ok(block);
        }
        let block = Arc::new(self.read_block(chunks)?);
        self.blocks.lock().insert(id, Arc::clone(&block));
        Ok(block)
    }

    /// Every chunk that is needed: those of the blocks, and those of the content of layers.
    fn live(&self) -> Result<HashSet<Digest>> {
        let blocks = self.state.lock().blocks.clone();
        let mut live = HashSet::new();
        for chunks in blocks.values() {
            let block = self.read_block(chunks)?;
            let content = block.contents.iter().flat_map(|content| &content.chunks);
            live.extend(content.chain(chunks).map(|chunk| chunk.digest));
        }
        Ok(live)
    }

    /// Removes files that an interrupted write left. Without a root all packs stay: it may be
    /// missing.
    ///
    /// # Errors
    /// As readdir(3) and unlink(2).
    pub(in crate::store) fn remove_leftovers(&self) -> Result<()> {
        match self.archive.get() {
            Some(archive) if self.number() > 0 => archive.remove_others(ROOT),
            _ => Ok(()),
        }
    }
}
