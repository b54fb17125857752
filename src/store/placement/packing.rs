//! Moves sealed layers into packs, changes them there, and moves them back into directories.
//!
//! * A new pack is on disk before anything that it replaces is removed.
//! * The catalog says what the newest pack says.
//! * Policy is elsewhere: `timeline::pack` decides which layers are packed and when.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::content::checksums;
use crate::store::content::checksums::ChecksumsRecord;
use crate::store::content::live_ranges::{LiveRanges, in_blocks};
use crate::store::io::disk;
use crate::store::io::frames;
use crate::store::io::log;
use crate::store::layer;
use crate::store::layer::compact::compact_records;
use crate::store::layer::info::Sidecars;
use crate::store::layer::journal;
use crate::store::layer::{INDEX, JOURNAL, LayerInfo, MAP, POOL, SUMS};
use crate::store::ledger;
use crate::store::ledger::LedgerRecord;
use crate::store::pack::{Change, PackOptions, PackedLayer, PublishedPack};
use crate::store::record::{Header, LayerKind, Record, Seal};
use crate::tree::Edit;
use crate::types::{ByteRange, LayerId};

/// A layer whose journal, checksums or remap take more bytes keeps its directory.
const LARGEST_FILE: usize = 256 << 10;

impl Store {
    /// The packed form of a sealed layer. `None` if it is in a pack already, has no checksums yet,
    /// or is too large. With `edits`, the packed journal consists of these edits.
    ///
    /// # Errors
    /// As open(2), and damage.
    pub fn packed_form(
        &self,
        layer: LayerId,
        edits: Option<impl Iterator<Item = Edit>>,
    ) -> Result<Option<PackedLayer>> {
        let Some(LayerInfo { header, seal: Some(seal), bytes, packed: false, .. }) =
            self.layer(layer)
        else {
            return Ok(None);
        };
        let read = |name: &str| self.layers.read(layer, name);
        let is_large = |bytes: &Option<Vec<u8>>| {
            bytes.as_ref().is_some_and(|bytes| bytes.len() > LARGEST_FILE)
        };
        let (map, sums) = (read(MAP)?, read(SUMS)?);
        if is_large(&map) || is_large(&sums) || sums.is_none() || bytes > 16 * LARGEST_FILE as u64 {
            return Ok(None);
        }
        let journal = match edits {
            Some(edits) => log::frames(compact_records(&header, &seal, edits))?,
            None => read(JOURNAL)?.unwrap_or_default(),
        };
        if journal.len() > LARGEST_FILE {
            return Ok(None);
        }
        let hole =
            if self.own_content(layer)?.is_empty() { Some(self.pool_end(layer)?) } else { None };
        let what = self.layers.show(layer, SUMS);
        let sums = match sums.filter(|_| hole.is_none()) {
            Some(bytes) => {
                let checksums = checksums::parse(&bytes, &what)?.without_remapped();
                Some(log::frames(checksums.into_records())?)
            }
            None => None,
        };
        Ok(Some(PackedLayer { layer, hole, journal, map, sums }))
    }

    /// Writes layers into a new pack, then removes the files that this replaces.
    ///
    /// # Errors
    /// As the calls that publish a file; the layers are then where they were. If it is unknown what
    /// is on disk, no space is freed any more, see [`Store::require_certain_remaps`].
    pub fn pack_layers(&self, layers: Vec<PackedLayer>) -> Result<()> {
        let replaced: Vec<(LayerId, bool)> =
            layers.iter().map(|packed| (packed.layer, packed.hole.is_some())).collect();
        self.publish_pack(layers.into_iter().map(Change::Put).collect(), BTreeMap::new())?;
        for (layer, with_pool) in replaced {
            if let Err(error) = self.layers.clear(layer, with_pool) {
                ::log::warn!("{error}; the next mount removes the old files of layer {layer}");
            }
        }
        Ok(())
    }

    /// Layers in packs that have a pool, oldest first.
    pub fn packed_with_pools(&self) -> Vec<LayerInfo> {
        let mut all = self.catalog();
        all.retain(|info| info.hole.is_none() && self.layers.packs.has(info.header.layer));
        all
    }

    /// The ranges of the pool of a layer that take space and are not remapped, in whole blocks.
    ///
    /// # Errors
    /// As lseek(2), and damage of a remap.
    pub fn own_content(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        let mut remapped = LiveRanges::default();
        for range in self.remap(layer)?.map(|remap| remap.freed_blocks()).unwrap_or_default() {
            remapped.add_range(layer, range);
        }
        let mut blocks: Vec<ByteRange> = Vec::new();
        for range in self.unused(layer, &remapped)?.into_iter().map(in_blocks) {
            match blocks.last_mut() {
                Some(last) if last.end >= range.start => last.end = range.end,
                _ => blocks.push(range),
            }
        }
        Ok(blocks)
    }

    /// Publishes a pack with these changes and updates the catalog with it. A layer in `catalog`
    /// gets that entry; any other gets the entry that follows from its change.
    pub(in crate::store) fn publish_pack(
        &self,
        changes: Vec<Change>,
        mut catalog: BTreeMap<LayerId, LayerInfo>,
    ) -> Result<()> {
        if changes.is_empty() {
            return Ok(());
        }
        let is_put = |change: &&Change| matches!(change, Change::Put(_));
        let put = changes.iter().filter(is_put).map(Change::layer).collect();
        let mut infos = Vec::new();
        for change in &changes {
            let layer = change.layer();
            let info = match (catalog.remove(&layer), change) {
                (Some(info), _) => Some(info),
                (None, Change::Put(packed)) => Some(journal::packed_info(&self.layers, packed)?),
                (None, Change::Gone(_)) => None,
            };
            infos.push((layer, info));
        }
        let next_layer = self.state.lock().next_layer;
        let options = PackOptions { next_layer, durable: self.durable, merge: true };
        let mut published = match self.layers.packs.publish(&self.dir, &changes, options) {
            // The changes may be what frees space: use the reserve, and write as little as
            // possible.
            Err(error) if error.is_full() && self.release_reserve() => {
                let options = PackOptions { merge: false, ..options };
                let again = self.layers.packs.publish(&self.dir, &changes, options);
                self.keep_reserve();
                again?
            }
            published => published?,
        };
        let synced = std::mem::replace(&mut published.synced, Ok(()));
        self.adopt_pack(&mut published, infos, synced.is_ok());
        if synced.is_ok() {
            self.layers.packs.remove_replaced(&published);
            let number = u64::from(published.number());
            self.note_in_ledger(&LedgerRecord::Published(ledger::PACKS.to_owned(), number));
            self.note_sealed(put);
        }
        synced
    }

    /// Makes readers use a published pack, and replaces the catalog entries of its layers.
    fn adopt_pack(
        &self,
        published: &mut PublishedPack,
        infos: Vec<(LayerId, Option<LayerInfo>)>,
        is_synced: bool,
    ) {
        let mut state = self.state.lock();
        if !is_synced {
            state.uncertain_remaps.extend(infos.iter().map(|(layer, _)| *layer));
        }
        self.layers.packs.adopt(published);
        for (layer, info) in infos {
            state.contents.remove(&layer);
            match info {
                Some(mut info) => {
                    // Its pool is still there for earlier readers.
                    if state.retiring.contains_key(&layer) {
                        info.hole = None;
                    }
                    state.catalog.insert(layer, info);
                }
                None => drop(state.catalog.remove(&layer)),
            }
        }
    }

    /// Removes layers from the packs. Layers that are in none are skipped.
    pub(in crate::store) fn remove_from_packs(&self, layers: &[LayerId]) -> Result<()> {
        let mut packed = layers.to_vec();
        packed.retain(|layer| self.layers.packs.has(*layer));
        if packed.is_empty() {
            return Ok(());
        }
        self.layers.secure_removal(&packed, self.durable)?;
        self.publish_pack(packed.into_iter().map(Change::Gone).collect(), BTreeMap::new())
    }

    /// Moves a layer from its pack into a directory, with a new journal.
    fn unpack(&self, packed: &PackedLayer, journal: &[u8]) -> Result<()> {
        let layer = packed.layer;
        let Some(info) = self.layer(layer) else { return Ok(()) };
        let dir = self.layers.dir.make_dir(&layer::dir_name(layer))?;
        if let Some(end) = packed.hole {
            let attempt = || format!("write {}", dir.show(POOL));
            let pool = dir.file(POOL, true)?;
            disk::cut(&pool, end).map_err(|e| Error::io(attempt(), &e))?;
            if self.durable {
                disk::sync(&pool).map_err(|e| Error::io(attempt(), &e))?;
            }
        }
        if let Some(map) = &packed.map {
            dir.publish(MAP, map, self.durable)?;
        }
        let none = || log::frames([ChecksumsRecord::End].into_iter());
        let sums = packed.sums.as_ref().map_or_else(none, |sums| Ok(sums.clone()))?;
        dir.publish(SUMS, &sums, self.durable)?;
        dir.publish(JOURNAL, journal, self.durable)?;
        if self.durable {
            self.layers.dir.sync()?;
        }
        let records = frames::outline_of::<Record>(journal)?;
        let Some((Record::Header(header), _, Record::Seal(seal))) = records else {
            return Err(Error::damage(format!("rewrite layer {layer}"), "it is not sealed"));
        };
        let index = dir.size(INDEX)?;
        let sidecars =
            Sidecars { summed: true, mapped: info.mapped, index, packed: false, hole: None };
        let info = LayerInfo::new(header, Some(seal), true, journal.len() as u64, sidecars);
        self.publish_pack(vec![Change::Gone(layer)], BTreeMap::from([(layer, info)]))
    }

    /// Begins to rewrite the journals of sealed layers.
    pub fn journal_rewriter(&self) -> JournalRewriter<'_> {
        JournalRewriter { store: self, changes: Vec::new(), indexed: Vec::new() }
    }
}

/// Rewrites the journals of sealed layers one after the other. Changes of layers in packs are
/// collected and published with one pack. A crash leaves a prefix of the rewrites done.
pub struct JournalRewriter<'a> {
    store: &'a Store,
    changes: Vec<Change>,
    /// Collected layers; their index is not needed any more.
    indexed: Vec<LayerId>,
}

impl JournalRewriter<'_> {
    /// Replaces the journal of a sealed layer with `edits`. `header` may name another parent, and
    /// `seal` may differ, too.
    ///
    /// # Errors
    /// As the calls that publish a file; the journal then stays as it was.
    pub fn rewrite(
        &mut self,
        header: Header,
        seal: Seal,
        edits: impl Iterator<Item = Edit>,
    ) -> Result<()> {
        let layer = header.layer;
        let Some(packed) = self.store.layers.packs.get(layer)? else {
            self.publish()?;
            return self.store.rewrite_journal(&header, &seal, edits);
        };
        let during = |e: Error| e.during(format!("rewrite layer {layer}"));
        let journal = log::frames(compact_records(&header, &seal, edits)).map_err(during)?;
        if journal.len() > LARGEST_FILE {
            self.publish()?;
            return self.store.unpack(&packed, &journal).map_err(during);
        }
        self.changes.push(Change::Put(PackedLayer { journal, ..packed }));
        Ok(())
    }

    /// Removes the records of a sealed layer that is no parent of another. Its content stays,
    /// because other layers may refer to it.
    ///
    /// # Errors
    /// As [`JournalRewriter::rewrite`].
    pub fn collect(&mut self, layer: LayerId) -> Result<()> {
        let attempt = || format!("collect layer {layer}");
        let Some(LayerInfo { header, seal: Some(seal), .. }) = self.store.layer(layer) else {
            return Err(Error::damage(attempt(), "the layer is not sealed"));
        };
        let header = Header { parent: None, kind: LayerKind::Collected, ..header };
        let seal = Seal { name: None, automatic: true, ..seal };
        self.rewrite(header, seal, std::iter::empty())?;
        self.indexed.push(layer);
        Ok(())
    }

    fn publish(&mut self) -> Result<()> {
        let changes = std::mem::take(&mut self.changes);
        self.store.publish_pack(changes, BTreeMap::new()).map_err(|e| e.during("rewrite layers"))
    }

    /// Publishes what was collected and is not on disk yet.
    ///
    /// # Errors
    /// As the calls that publish a file; the collected layers are then as they were.
    pub fn finish(mut self) -> Result<()> {
        self.publish()?;
        self.indexed.iter().try_for_each(|layer| self.store.remove_index(*layer))
    }
}

/// The journal of a gathered layer. `cells` is the deflated length of each cell; `like` gives the
/// epoch and the time.
pub(in crate::store) fn gathered_journal(
    layer: LayerId,
    like: &Header,
    cells: Vec<u32>,
) -> Result<Vec<u8>> {
    let header = Header {
        layer,
        parent: None,
        head: String::new(),
        kind: LayerKind::Gathered,
        ..like.clone()
    };
    let seal = Seal { name: None, message: String::new(), time: like.time, automatic: true };
    let records =
        [Record::Header(header), Record::Compact, Record::Cells(cells), Record::Seal(seal)];
    log::frames(records.into_iter())
}
