//! Layers in packs: how they come there, how what is said of them changes, and how they leave.
//!
//! Always true: a pack is on the disk before anything that it takes the place of is removed, and the catalog says what the newest pack
//! says. Which layers are put in packs, and when, is not decided here.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::store::content::checksums;
use crate::store::content::checksums::ChecksumsRecord;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::content::pool::{block_ceil, block_floor};
use crate::store::io::disk;
use crate::store::io::frames;
use crate::store::io::log;
use crate::store::layer;
use crate::store::layer::files::Besides;
use crate::store::layer::sealed::compact_records;
use crate::store::layer::{INDEX, JOURNAL, LayerInfo, MAP, POOL, SUMS};
use crate::store::ledger;
use crate::store::ledger::LedgerRecord;
use crate::store::pack::{Change, Packed, Publishing};
use crate::store::record::{Edit, Header, LayerKind, Record, Seal};
use crate::store::{FORMAT_WITH_PACKS, Store, format_text};
use crate::types::{ByteRange, LayerId};

/// What is larger, without its content, has a directory of its own.
const LARGEST: usize = 256 << 10;

impl Store {
    /// What a sealed layer is in a pack; none if it is in one, or takes so much that it does not pay. With `edits`, its
    /// journal says only these.
    ///
    /// # Errors
    /// As open(2), and damage.
    pub fn packed_form(
        &self,
        layer: LayerId,
        edits: Option<impl Iterator<Item = Edit>>,
    ) -> Result<Option<Packed>> {
        let Some(LayerInfo { header, seal: Some(seal), bytes, packed: false, .. }) =
            self.layer(layer)
        else {
            return Ok(None);
        };
        let read = |name: &str| self.layers.read(layer, name);
        let large =
            |bytes: &Option<Vec<u8>>| bytes.as_ref().is_some_and(|bytes| bytes.len() > LARGEST);
        let (map, sums) = (read(MAP)?, read(SUMS)?);
        if large(&map) || large(&sums) || sums.is_none() || bytes > 16 * LARGEST as u64 {
            return Ok(None);
        }
        let journal = match edits {
            Some(edits) => log::frames(compact_records(&header, &seal, edits))?,
            None => read(JOURNAL)?.unwrap_or_default(),
        };
        if journal.len() > LARGEST {
            return Ok(None);
        }
        let hole =
            if self.own_content(layer)?.is_empty() { Some(self.pool_end(layer)?) } else { None };
        let what = self.layers.show(layer, SUMS);
        let sums = match sums.filter(|_| hole.is_none()) {
            Some(bytes) => {
                Some(log::frames(checksums::parse(&bytes, &what)?.beside_map().into_records())?)
            }
            None => None,
        };
        Ok(Some(Packed { layer, hole, journal, map, sums }))
    }

    /// Puts layers in a pack. What it takes the place of goes.
    ///
    /// # Errors
    /// As the calls it is made of; the layers are then where they were. If it is not known what is on the disk, nothing is given
    /// back any more, see [`Store::require_no_doubt`].
    pub fn put_in_packs(&self, layers: Vec<Packed>) -> Result<()> {
        let left: Vec<(LayerId, bool)> =
            layers.iter().map(|packed| (packed.layer, packed.hole.is_some())).collect();
        self.publish_packed(layers.into_iter().map(Change::Put).collect(), BTreeMap::new())?;
        for (layer, with_pool) in left {
            if let Err(error) = self.layers.clear(layer, with_pool) {
                ::log::warn!("{error}; the next start removes what is left of layer {layer}");
            }
        }
        Ok(())
    }

    /// Layers in packs that have pools of their own, oldest first.
    pub fn packed_with_pools(&self) -> Vec<LayerInfo> {
        let mut all = self.catalog();
        all.retain(|info| info.hole.is_none() && self.layers.packs.has(info.header.layer));
        all
    }

    /// What of the pool of a layer takes space and is content of it, in whole blocks.
    ///
    /// # Errors
    /// As lseek(2), and damage of a map.
    pub fn own_content(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        let mut elsewhere = LiveRanges::default();
        for range in self.map(layer)?.map(|map| map.given_up()).unwrap_or_default() {
            elsewhere.add_range(layer, range);
        }
        let mut blocks: Vec<ByteRange> = Vec::new();
        for range in self.unused(layer, &elsewhere)? {
            let range = ByteRange { start: block_floor(range.start), end: block_ceil(range.end) };
            match blocks.last_mut() {
                Some(last) if last.end >= range.start => last.end = range.end,
                _ => blocks.push(range),
            }
        }
        Ok(blocks)
    }

    /// Publishes a pack that says these changes, and with it what the catalog says of the layers; something else where `catalog` says so.
    pub(in crate::store) fn publish_packed(
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
                (None, Change::Put(packed)) => Some(layer::packed_info(&self.layers, packed)?),
                (None, Change::Gone(_)) => None,
            };
            infos.push((layer, info));
        }
        self.require_format(FORMAT_WITH_PACKS)?;
        let next_layer = self.state.lock().next_layer;
        let how = Publishing { next_layer, durable: self.durable, takes_in: true };
        let mut published = match self.layers.packs.publish(&self.dir, &changes, how) {
            // It may be the way to give space back.
            Err(error) if error.is_full() && self.release_reserve() => {
                let how = Publishing { takes_in: false, ..how };
                let again = self.layers.packs.publish(&self.dir, &changes, how);
                self.keep_reserve();
                again?
            }
            published => published?,
        };
        let synced = std::mem::replace(&mut published.synced, Ok(()));
        {
            let mut state = self.state.lock();
            if synced.is_err() {
                state.doubtful.extend(infos.iter().map(|(layer, _)| *layer));
            }
            self.layers.packs.adopt(&mut published);
            for (layer, info) in infos {
                state.contents.remove(&layer);
                match info {
                    Some(mut info) => {
                        if state.lingering.contains_key(&layer) {
                            info.hole = None;
                        }
                        state.catalog.insert(layer, info);
                    }
                    None => drop(state.catalog.remove(&layer)),
                }
            }
        }
        if synced.is_ok() {
            self.layers.packs.remove_replaced(&published);
            let number = u64::from(published.number());
            self.note_in_ledger(&LedgerRecord::Published(ledger::PACKS.to_owned(), number));
            self.note_sealed(put);
        }
        synced
    }

    /// Says that the store has what came with a format, before the first of it is there: who does not know packs would take their layers for
    /// lost, and who does not know cells deflated bytes for content.
    pub(in crate::store) fn require_format(&self, format: u32) -> Result<()> {
        if self.format.load(Ordering::Relaxed) < format {
            // Also where nothing else is synced: without it nobody could say why the store is not believed after a power cut.
            self.dir.publish("format", format_text(format).as_bytes(), true)?;
            self.format.store(format, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Takes layers out of the packs that are in one.
    pub(in crate::store) fn forget_packed(&self, layers: &[LayerId]) -> Result<()> {
        let mut packed = layers.to_vec();
        packed.retain(|layer| self.layers.packs.has(*layer));
        if packed.is_empty() {
            return Ok(());
        }
        self.layers.secure_removal(&packed, self.durable)?;
        self.publish_packed(packed.into_iter().map(Change::Gone).collect(), BTreeMap::new())
    }

    /// Gives a layer a directory of its own again, with this journal.
    fn unpack(&self, packed: &Packed, journal: &[u8]) -> Result<()> {
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
        let besides =
            Besides { summed: true, mapped: info.mapped, index, packed: false, hole: None };
        let info = LayerInfo::new(header, Some(seal), true, journal.len() as u64, besides);
        self.publish_packed(vec![Change::Gone(layer)], BTreeMap::from([(layer, info)]))
    }

    /// Begins to rewrite journals of sealed layers.
    pub fn rewriting(&self) -> Rewriting<'_> {
        Rewriting { store: self, changes: Vec::new(), indexed: Vec::new() }
    }
}

/// Journals that are rewritten one after the other; those of layers in packs come on the disk together. Cut off anywhere, those before
/// some moment are rewritten, and no later ones.
pub struct Rewriting<'a> {
    store: &'a Store,
    changes: Vec<Change>,
    /// Layers whose index is not needed any more.
    indexed: Vec<LayerId>,
}

impl Rewriting<'_> {
    /// Rewrites the journal of a sealed layer as `edits`, under a header that may name another parent, and with a seal
    /// that may say something else.
    ///
    /// # Errors
    /// As the calls it is made of; the journal then stays as it was.
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
        if journal.len() > LARGEST {
            self.publish()?;
            return self.store.unpack(&packed, &journal).map_err(during);
        }
        self.changes.push(Change::Put(Packed { journal, ..packed }));
        Ok(())
    }

    /// Gives up the records of a sealed layer that no other lies on; its content stays.
    ///
    /// # Errors
    /// As [`Rewriting::rewrite`].
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
        self.store.publish_packed(changes, BTreeMap::new()).map_err(|e| e.during("rewrite layers"))
    }

    /// Puts on the disk what is not there yet.
    ///
    /// # Errors
    /// As the calls it is made of; those layers are then as they were.
    pub fn finish(mut self) -> Result<()> {
        self.publish()?;
        self.indexed.iter().try_for_each(|layer| self.store.remove_index(*layer))
    }
}

/// The journal of a layer that holds content of others, deflated like this.
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
