//! Changes the archived layers.
//!
//! Publishing has two steps: [`ArchivedLayers::publish`] writes the blocks and the root, and
//! [`ArchivedLayers::adopt`] makes readers use them. The caller updates the catalog between the
//! two, under the lock of the catalog.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::store::archive::packs::{Archive, ArchiveWriter};
use crate::store::archive::{Chunk, ChunkRef, ChunkSink, MAX_CHUNK};
use crate::store::archived::{
    ARCHIVE, ArchivedLayer, ArchivedLayers, Block, BlockId, Change, ROOT, RootRecord,
};
use crate::store::io::dir::StoreDir;
use crate::store::io::{codec, log};
use crate::types::LayerId;

/// A block is full once it holds this many bytes. Most blocks are one chunk.
const FULL_BLOCK: usize = 48 << 10;
/// So many blocks that are less than a quarter full are written anew as fewer.
const MANY_SMALL: usize = 4;

/// A root that is on disk and that no reader uses yet.
pub(in crate::store) struct PublishedRoot {
    number: u64,
    replaced: BTreeSet<BlockId>,
    added: Vec<(Vec<ChunkRef>, Vec<LayerId>)>,
    /// Whether it survives a power cut.
    pub synced: Result<()>,
}

impl PublishedRoot {
    /// The number of the root.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl ArchivedLayers {
    /// The packs of the store; the first use makes the directory.
    ///
    /// # Errors
    /// As mkdir(2), open(2) and fsync(2).
    pub(in crate::store) fn made(&self, store: &StoreDir, durable: bool) -> Result<&Arc<Archive>> {
        if let Some(archive) = self.archive.get() {
            return Ok(archive);
        }
        let dir = store.make_dir(ARCHIVE)?;
        if durable {
            store.sync()?;
        }
        let (archive, _) = Archive::open(dir, &[], durable);
        Ok(self.archive.get_or_init(|| Arc::new(archive)))
    }

    /// Writes the blocks of the changed layers anew, and the root. Chunks that `writer` wrote
    /// before are on disk then. Readers do not use the root before [`ArchivedLayers::adopt`].
    ///
    /// # Errors
    /// As the calls that write and rename a file; nothing has changed then. A failed sync of the
    /// directory is reported in [`PublishedRoot::synced`].
    pub(in crate::store) fn publish(
        &self,
        writer: &mut ArchiveWriter<'_>,
        changes: &[Change],
        next_layer: u32,
    ) -> Result<PublishedRoot> {
        let replaced = self.blocks_to_replace(changes);
        let mut layers = self.layers_of(&replaced)?;
        for change in changes {
            match change {
                Change::Put(archived) => drop(layers.insert(archived.layer, archived.clone())),
                Change::Gone(layer) => drop(layers.remove(layer)),
            }
        }
        // Blocks are read at every start, so they do not share frames with content.
        writer.end_frame()?;
        let added = write_blocks(writer, layers)?;
        writer.finish()?;
        let kept = self.state.lock().blocks.clone();
        let kept = kept.into_iter().filter(|(id, _)| !replaced.contains(id));
        let blocks = kept.map(|(_, chunks)| chunks);
        let blocks = blocks.chain(added.iter().map(|(chunks, _)| chunks.clone())).collect();
        let packs = writer.names_without(&[]);
        let (number, synced) = self.write_root(&RootRecord { next_layer, packs, blocks })?;
        Ok(PublishedRoot { number, replaced, added, synced })
    }

    fn write_root(&self, root: &RootRecord) -> Result<(u64, Result<()>)> {
        let none = || Error::damage(format!("publish {ARCHIVE}/{ROOT}"), "there is no archive");
        let archive = self.archive.get().ok_or_else(none)?;
        let number = self.state.lock().number + 1;
        let frame = log::frame(root, number).map_err(|e| e.during(format!("write {ROOT}")))?;
        archive.dir().replace(ROOT, &frame, archive.is_durable())?;
        let synced = if archive.is_durable() { archive.dir().sync() } else { Ok(()) };
        Ok((number, synced))
    }

    /// The blocks that have a changed layer; the last one, if it has room for new layers; and small
    /// ones, if there are many.
    fn blocks_to_replace(&self, changes: &[Change]) -> BTreeSet<BlockId> {
        let state = self.state.lock();
        let of = |layer: LayerId| state.positions.get(&layer).map(|(block, _)| *block);
        let mut replaced: BTreeSet<BlockId> =
            changes.iter().filter_map(|change| of(change.layer())).collect();
        let is_below = |chunks: &[ChunkRef], limit: usize| {
            chunks.iter().map(|chunk| chunk.len as usize).sum::<usize>() < limit
        };
        let is_new = |change: &Change| of(change.layer()).is_none();
        let last = state.blocks.last_key_value();
        if let Some((last, _)) = last.filter(|(_, chunks)| is_below(chunks, FULL_BLOCK))
            && changes.iter().any(is_new)
        {
            replaced.insert(*last);
        }
        let small = state.blocks.iter().filter(|(_, chunks)| is_below(chunks, FULL_BLOCK / 4));
        let small: Vec<BlockId> = small.map(|(id, _)| *id).collect();
        if small.len() > MANY_SMALL {
            replaced.extend(small);
        }
        replaced
    }

    fn layers_of(&self, blocks: &BTreeSet<BlockId>) -> Result<BTreeMap<LayerId, ArchivedLayer>> {
        let mut layers = BTreeMap::new();
        for id in blocks {
            let Some(chunks) = self.state.lock().blocks.get(id).cloned() else { continue };
            let block = self.block(*id, &chunks)?;
            let found = (0..block.layers.len()).filter_map(|index| block.get(index));
            layers.extend(found.map(|archived| (archived.layer, archived)));
        }
        Ok(layers)
    }

    /// Makes readers use a published root.
    pub(in crate::store) fn adopt(&self, published: &mut PublishedRoot) {
        let mut state = self.state.lock();
        let PublishedRoot { number, replaced, added, .. } = published;
        state.number = *number;
        state.blocks.retain(|id, _| !replaced.contains(id));
        state.positions.retain(|_, (block, _)| !replaced.contains(block));
        added.drain(..).for_each(|(chunks, layers)| state.add_block(chunks, &layers));
        drop(state);
        let mut cached = self.blocks.lock();
        replaced.iter().for_each(|id| cached.remove(id));
    }

    /// Writes packs anew of which little is live, and joins small ones. A crash leaves the old
    /// packs or the new ones to the root, and the next start removes the others. Returns the number
    /// of the root, if it changed.
    ///
    /// # Errors
    /// As the calls that write, rename and remove files, and damage of a live chunk. Nothing that
    /// is live is lost. With [`Tidied::Uncertain`] it is unknown which root is on disk.
    pub(in crate::store) fn tidy(&self, next_layer: u32) -> Result<Tidied> {
        let Some(archive) = self.archive.get() else { return Ok(Tidied::Unchanged) };
        let mut writer = archive.writer();
        let live = self.live()?;
        let old = writer.rewrite(&|digest| live.contains(digest))?;
        if old.is_empty() {
            return Ok(Tidied::Unchanged);
        }
        writer.finish()?;
        let blocks = self.state.lock().blocks.values().cloned().collect();
        let packs = writer.names_without(&old);
        let (number, synced) = self.write_root(&RootRecord { next_layer, packs, blocks })?;
        self.state.lock().number = number;
        match synced {
            Ok(()) => writer.remove(&old).map(|()| Tidied::Published(number)),
            Err(error) => Ok(Tidied::Uncertain(error)),
        }
    }
}

/// The outcome of [`ArchivedLayers::tidy`].
pub(in crate::store) enum Tidied {
    /// There was nothing to do.
    Unchanged,
    /// A root with this number is on disk.
    Published(u64),
    /// A sync failed after the root was replaced.
    Uncertain(Error),
}

fn write_blocks(
    writer: &mut ArchiveWriter<'_>,
    layers: BTreeMap<LayerId, ArchivedLayer>,
) -> Result<Vec<(Vec<ChunkRef>, Vec<LayerId>)>> {
    let mut added = Vec::new();
    let (mut block, mut weight) = (Block::default(), 0);
    let mut layers = layers.into_values().peekable();
    while let Some(archived) = layers.next() {
        weight += archived.weight();
        block.push(archived);
        if weight >= FULL_BLOCK || layers.peek().is_none() {
            let bad = |why: String| Error::damage("encode a block of layers", why);
            let bytes = codec::encode(&block).map_err(bad)?;
            let mut chunks = Vec::new();
            for chunk in bytes.chunks(MAX_CHUNK).filter_map(Chunk::new) {
                chunks.push(chunk.reference());
                writer.put(chunk)?;
            }
            added.push((chunks, std::mem::take(&mut block).layers));
            weight = 0;
        }
    }
    Ok(added)
}
