//! Writes new packs, and decides which older ones they merge.
//!
//! Publishing has two steps: [`Packs::publish`] writes the pack, and [`Packs::adopt`] makes readers
//! use it. The caller updates the catalog between the two, under the lock of the catalog.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::log::Log;
use crate::store::pack::block;
use crate::store::pack::{
    Block, Change, Frame, HOST_BLOCK, PACKS, Pack, PackRecord, PackedLayer, Packs, Position,
    file_name, numbers_in,
};
use crate::types::LayerId;

/// A block is written once it holds this many bytes.
const BLOCK_BYTES: usize = 256 << 10;
/// A pack is merged into a new one if it has at most this many times the bytes of the new one.
const MERGE_RATIO: u64 = 2;

/// How a pack is published.
#[derive(Clone, Copy, Debug)]
pub(in crate::store) struct PackOptions {
    /// All layer numbers below this one are used.
    pub next_layer: u32,
    /// Whether to sync.
    pub durable: bool,
    /// Whether the new pack may merge others. That takes space until those are removed.
    pub merge: bool,
}

/// A pack that is on disk and that no reader uses yet.
pub(in crate::store) struct PublishedPack {
    pack: Pack,
    positions: BTreeMap<LayerId, Position>,
    gone: BTreeSet<LayerId>,
    /// The packs that it replaces.
    replaced: BTreeSet<u32>,
    /// Whether it survives a power cut.
    pub synced: Result<()>,
}

impl PublishedPack {
    /// The number of the pack.
    pub fn number(&self) -> u32 {
        self.pack.number
    }
}

/// The contents of a new pack.
struct Plan<'c> {
    number: u32,
    since: u32,
    replaced: BTreeSet<u32>,
    entries: BTreeMap<LayerId, Entry<'c>>,
    gone: BTreeSet<LayerId>,
}

/// A layer of a new pack.
enum Entry<'c> {
    New(&'c PackedLayer),
    /// Copied from an older pack.
    Merged(Position, Arc<File>),
}

impl Packs {
    /// Writes a pack with these changes and renames it to its place. Readers do not use it before
    /// [`Packs::adopt`]. Callers publish one pack at a time.
    ///
    /// # Errors
    /// As the calls that write and rename a file; nothing has changed then. A failed sync of the
    /// directory is reported in [`PublishedPack::synced`].
    pub(in crate::store) fn publish(
        &self,
        store: &StoreDir,
        changes: &[Change],
        options: PackOptions,
    ) -> Result<PublishedPack> {
        let _publishing = self.publishing.lock();
        let dir = self.make_dir(store, options.durable)?;
        let plan = self.plan(changes, options.merge);
        let temp = format!("{}.new", file_name(plan.number));
        let published = self.write_pack(dir, plan, options);
        // A partial file takes space for nothing.
        if published.is_err()
            && let Err(error) = dir.remove(&temp)
        {
            ::log::warn!("{error}");
        }
        published
    }

    fn write_pack(
        &self,
        dir: &StoreDir,
        plan: Plan<'_>,
        options: PackOptions,
    ) -> Result<PublishedPack> {
        let PackOptions { next_layer, durable, .. } = options;
        let number = plan.number;
        let (name, temp) = (file_name(number), format!("{}.new", file_name(number)));
        let attempt = || format!("publish {}", dir.show(&name));
        dir.remove(&temp)?;
        let file = Arc::new(dir.file(&temp, true)?);
        let mut log = Log::append_to(Arc::clone(&file), dir.show(&temp), 0, 0)?;
        log.append(&PackRecord::Begins { number, since: plan.since, next_layer })?;
        let layers = plan.entries.len() + plan.gone.len();
        let positions = self.write_layers(&mut log, number, plan.entries)?;
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
        Ok(PublishedPack { pack, positions, gone: plan.gone, replaced: plan.replaced, synced })
    }

    /// The directory of the packs, created at the first use.
    fn make_dir(&self, store: &StoreDir, durable: bool) -> Result<&StoreDir> {
        if let Some(dir) = self.dir.get() {
            return Ok(dir);
        }
        let made = store.make_dir(PACKS)?;
        if durable {
            store.sync()?;
        }
        Ok(self.dir.get_or_init(|| made))
    }

    /// Chooses the packs to merge, and collects the layers of the new pack.
    fn plan<'c>(&self, changes: &'c [Change], merge: bool) -> Plan<'c> {
        let state = self.state.lock();
        let number = state.packs.last().map_or(1, |pack| pack.number + 1);
        let weight = |change: &Change| match change {
            Change::Put(packed) => packed.weight() as u64,
            Change::Gone(_) => 0,
        };
        let mut bytes = changes.iter().map(weight).sum::<u64>().max(HOST_BLOCK);
        let mut live: BTreeMap<u32, usize> = BTreeMap::new();
        for position in state.positions.values() {
            *live.entry(position.pack).or_default() += 1;
        }
        let mut first = state.packs.len();
        for (at, pack) in state.packs.iter().enumerate().rev() {
            // Newer records have replaced more than half of it.
            let is_stale = live.get(&pack.number).copied().unwrap_or(0) * 2 < pack.layers;
            if merge && (pack.bytes.max(HOST_BLOCK) <= MERGE_RATIO * bytes || is_stale) {
                first = at;
                bytes = state.packs.iter().skip(at).map(|pack| pack.bytes).sum::<u64>().max(bytes);
            }
        }
        let (kept, merged) = state.packs.split_at(first);
        let replaced: BTreeSet<u32> = merged.iter().map(|pack| pack.number).collect();
        let since = merged.iter().map(|pack| pack.since).min().unwrap_or(number);
        let mut entries = BTreeMap::new();
        for (layer, position) in &state.positions {
            if let Some(pack) = merged.iter().find(|pack| pack.number == position.pack) {
                entries.insert(*layer, Entry::Merged(*position, Arc::clone(&pack.file)));
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
        // No older pack is left that could name these layers.
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
    ) -> Result<BTreeMap<LayerId, Position>> {
        let mut positions = BTreeMap::new();
        let (mut block, mut weight) = (Block::default(), 0);
        let mut entries = entries.into_iter().peekable();
        while let Some((layer, entry)) = entries.next() {
            let packed = match entry {
                Entry::New(packed) => packed.clone(),
                Entry::Merged(position, file) => self.load(layer, position, &file)?,
            };
            weight += packed.weight();
            block.push(packed);
            if weight >= BLOCK_BYTES || entries.peek().is_none() {
                let (start, seq) = (log.len(), log.count());
                log.append(&block::deflate(&block)?)?;
                let frame = Frame { start, len: log.len() - start, seq };
                for (index, layer) in block.layers.iter().enumerate() {
                    positions.insert(*layer, Position { pack: number, frame, index });
                }
                (block, weight) = (Block::default(), 0);
            }
        }
        Ok(positions)
    }

    /// Makes readers use a published pack.
    pub(in crate::store) fn adopt(&self, published: &mut PublishedPack) {
        let mut state = self.state.lock();
        let PublishedPack { pack, positions, gone, replaced, .. } = published;
        state.packs.retain(|pack| !replaced.contains(&pack.number));
        state.packs.push(pack.clone());
        state.positions.retain(|layer, at| !replaced.contains(&at.pack) && !gone.contains(layer));
        state.positions.append(positions);
        state.gone = std::mem::take(gone);
    }

    /// Removes the packs that a published one replaces. A failure is only logged: a replaced pack
    /// does no harm.
    pub(in crate::store) fn remove_replaced(&self, published: &PublishedPack) {
        for number in &published.replaced {
            if let Some(Err(error)) = self.dir.get().map(|dir| dir.remove(&file_name(*number))) {
                ::log::warn!("{error}; the file is not needed any more");
            }
        }
    }

    /// Removes replaced packs that an earlier process left.
    pub(in crate::store) fn remove_old(&self) -> Result<()> {
        let Some(dir) = self.dir.get() else { return Ok(()) };
        let state = self.state.lock();
        let is_old = |number: &u32| state.packs.iter().all(|pack| pack.number != *number);
        let mut old = numbers_in(dir)?.into_iter().filter(is_old);
        old.try_for_each(|number| dir.remove(&file_name(number)))
    }
}
