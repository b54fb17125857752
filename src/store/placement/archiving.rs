//! Moves sealed layers into the archive, and changes them there.
//!
//! * The root of the archive is on disk before anything that it replaces is removed.
//! * The catalog says what the root says.
//! * Content is verified while it is moved. A flipped bit is never moved: a layer with a damaged
//!   block keeps its pool, and a warning names it.
//! * Policy is elsewhere: `timeline::archive` decides which layers are moved and when.

use crate::error::{Attempt, Error, Result};
use crate::store::Store;
use crate::store::archive::chunker::Chunker;
use crate::store::archive::packs::ArchiveWriter;
use crate::store::archive::{Chunk, ChunkSink};
use crate::store::archived::{ArchivedLayer, Change, PublishedRoot, StoredContent, Tidied};
use crate::store::content::live_ranges::LiveRanges;
use crate::store::content::pool::in_blocks;
use crate::store::content::{Bytes, ReadOutcome};
use crate::store::io::log;
use crate::store::layer::compact::compact_records;
use crate::store::layer::journal;
use crate::store::layer::{JOURNAL, LayerInfo, MAP};
use crate::store::ledger::{ARCHIVE_ROOT, LedgerRecord};
use crate::store::record::{Header, LayerKind, Seal};
use crate::tree::Edit;
use crate::types::{ByteRange, LayerId};

/// A layer whose journal or remap takes more bytes keeps its directory.
const LARGEST_FILE: usize = 256 << 10;
/// Bytes that are read at once.
const COPY_LEN: u64 = 1 << 20;

/// The records of a layer that is about to move into the archive.
pub struct ColdLayer {
    layer: LayerId,
    journal: Vec<u8>,
    map: Option<Vec<u8>>,
}

impl ColdLayer {
    /// The bytes of its records.
    pub fn weight(&self) -> usize {
        self.journal.len() + self.map.as_ref().map_or(0, Vec::len)
    }
}

impl Store {
    /// The records of a sealed layer, ready for the archive. `None` if the layer is there already,
    /// has no checksums yet, or has too large records. With `edits`, the journal consists of these
    /// edits.
    ///
    /// # Errors
    /// As open(2), and damage.
    pub fn cold_form(
        &self,
        layer: LayerId,
        edits: Option<impl Iterator<Item = Edit>>,
    ) -> Result<Option<ColdLayer>> {
        let Some(LayerInfo {
            header, seal: Some(seal), bytes, archived: None, summed: true, ..
        }) = self.layer(layer)
        else {
            return Ok(None);
        };
        let map = self.layers.read(layer, MAP)?;
        if map.as_ref().is_some_and(|map| map.len() > LARGEST_FILE)
            || bytes > 16 * LARGEST_FILE as u64
        {
            return Ok(None);
        }
        let journal = match edits {
            Some(edits) => log::frames(compact_records(&header, &seal, edits))?,
            None => self.layers.read(layer, JOURNAL)?.unwrap_or_default(),
        };
        let fits = journal.len() <= LARGEST_FILE;
        Ok(fits.then_some(ColdLayer { layer, journal, map }))
    }

    /// Moves layers into the archive, then removes their directories. Returns those that stay,
    /// because their content cannot be verified.
    ///
    /// # Errors
    /// As the calls that write and publish files; the layers are then where they were. If it is
    /// unknown what is on disk, no space is freed any more, see
    /// [`Store::require_certain_remaps`].
    pub fn archive_layers(&self, cold: Vec<ColdLayer>) -> Result<Vec<LayerId>> {
        let mut writer = self.layers.archived.made(&self.dir, self.durable)?.writer();
        let (mut changes, mut moved, mut stay) = (Vec::new(), Vec::new(), Vec::new());
        for ColdLayer { layer, journal, map } in cold {
            let ranges = self.own_content(layer)?;
            let Some(content) = self.write_content(layer, &ranges, &mut writer)? else {
                stay.push(layer);
                continue;
            };
            let end = self.pool_end(layer)?;
            changes.push(Change::Put(ArchivedLayer { layer, end, journal, map, content }));
            moved.push(layer);
        }
        self.publish_archive(&mut writer, &changes)?;
        drop(writer);
        for layer in moved {
            if let Err(error) = self.layers.clear(layer) {
                ::log::warn!("{error}; the next mount removes the old files of layer {layer}");
            }
        }
        self.note_free();
        Ok(stay)
    }

    /// Writes a part of the content of a layer into packs ahead of [`Store::archive_layers`], which
    /// then finds most of its chunks there. Nothing needs them until then.
    ///
    /// # Errors
    /// As the calls that write and publish files.
    pub fn archive_ahead(&self, layer: LayerId, ranges: &[ByteRange]) -> Result<()> {
        let mut writer = self.layers.archived.made(&self.dir, self.durable)?.writer();
        self.write_content(layer, ranges, &mut writer)?;
        writer.finish().map(drop)
    }

    /// Writes content of a pool as chunks. `None` if it cannot be verified.
    fn write_content(
        &self,
        layer: LayerId,
        ranges: &[ByteRange],
        writer: &mut ArchiveWriter<'_>,
    ) -> Result<Option<StoredContent>> {
        let attempt = || format!("move the content of layer {layer} into the archive");
        let content = self.content(layer)?;
        if content.checksums.is_none() {
            ::log::warn!("layer {layer} has no checksums; its content is not moved");
            return Ok(None);
        }
        let (mut chunker, mut chunks) = (Chunker::default(), Vec::new());
        let mut put = |chunk: Chunk<'_>| {
            chunks.push(chunk.reference());
            writer.put(chunk)
        };
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let end = range.end.min(at + COPY_LEN);
                let mut bytes = vec![0; usize::try_from(end - at).unwrap_or(0)];
                let got = content.read(at, &mut bytes, false).attempt(attempt)?;
                if let ReadOutcome::Damaged(block) = got {
                    ::log::warn!(
                        "the pool of layer {layer} is damaged at offset {block}; its content is \
                         not moved; 'jailfs check --read-data' tells more"
                    );
                    return Ok(None);
                }
                chunker.push(&bytes, &mut put)?;
                at = end;
            }
        }
        chunker.finish(&mut put)?;
        Ok(Some(StoredContent::new(ranges, chunks)))
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
        let end = self.pool_end(layer)?;
        let mut blocks: Vec<ByteRange> = Vec::new();
        for range in remapped.unused(layer, &self.pool_data(layer)?).into_iter().map(in_blocks) {
            let range = ByteRange { end: range.end.min(end), ..range };
            match blocks.last_mut() {
                Some(last) if last.end >= range.start => last.end = range.end,
                _ if range.start < range.end => blocks.push(range),
                _ => {}
            }
        }
        Ok(blocks)
    }

    /// Publishes changes of layers that are in the archive, and updates the catalog.
    ///
    /// # Errors
    /// As [`Store::archive_layers`].
    pub(in crate::store) fn change_archive(&self, changes: Vec<Change>) -> Result<()> {
        let (false, Some(archive)) = (changes.is_empty(), self.layers.archived.archive()) else {
            return Ok(());
        };
        // The changes may be what frees space.
        self.with_reserve(|| self.publish_archive(&mut archive.writer(), &changes))
    }

    fn publish_archive(&self, writer: &mut ArchiveWriter<'_>, changes: &[Change]) -> Result<()> {
        if changes.is_empty() {
            return Ok(());
        }
        let mut infos = Vec::new();
        for change in changes {
            let info = match change {
                Change::Put(archived) => Some(journal::archived_info(&self.layers, archived)?),
                Change::Gone(_) => None,
            };
            infos.push((change.layer(), info));
        }
        let next_layer = self.state.lock().next_layer;
        let published = self.layers.archived.publish(writer, changes, next_layer)?;
        let result = self.adopt_root(published, infos);
        self.note_free();
        result
    }

    /// Makes readers use a published root, and replaces the catalog entries of its layers.
    fn adopt_root(
        &self,
        mut published: PublishedRoot,
        infos: Vec<(LayerId, Option<LayerInfo>)>,
    ) -> Result<()> {
        let synced = std::mem::replace(&mut published.synced, Ok(()));
        let sealed = infos.iter().filter(|(_, info)| info.is_some()).map(|(layer, _)| *layer);
        let sealed = sealed.collect();
        {
            let mut state = self.state.lock();
            if synced.is_err() {
                state.uncertain_remaps.extend(infos.iter().map(|(layer, _)| *layer));
            }
            self.layers.archived.adopt(&mut published);
            for (layer, info) in infos {
                match info {
                    Some(info) => drop(state.catalog.insert(layer, info)),
                    None => drop(state.catalog.remove(layer)),
                }
                state.invalidate_content(layer);
            }
        }
        if synced.is_ok() {
            let number = published.number();
            self.note_in_ledger(&LedgerRecord::Published(ARCHIVE_ROOT.to_owned(), number));
            self.note_sealed(sealed);
        }
        synced
    }

    /// Writes packs anew of which little is needed, and joins small ones. On a full disk they stay
    /// as they are, and a warning says so.
    ///
    /// # Errors
    /// As the calls that write, publish and remove files, and damage of what is needed. Nothing
    /// that is needed is lost.
    pub fn tidy_archive(&self) -> Result<()> {
        self.require_certain_remaps()?;
        let next_layer = self.state.lock().next_layer;
        loop {
            match self.with_reserve(|| self.layers.archived.tidy(next_layer)) {
                Ok(Tidied::Unchanged) => return Ok(()),
                Ok(Tidied::Published(number)) => {
                    self.note_free();
                    self.note_in_ledger(&LedgerRecord::Published(ARCHIVE_ROOT.to_owned(), number));
                }
                Ok(Tidied::Uncertain(error)) => {
                    // Which layer does not matter: no space is freed any more.
                    self.state.lock().uncertain_remaps.insert(LayerId(0));
                    return Err(error);
                }
                Err(error) if error.is_full() => {
                    ::log::warn!("{error}; packs of the archive with little content stay for now");
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Frees addresses of layers: punches pools, and takes chunks out of the archive. Nothing may
    /// refer to them, now or later. Returns the bytes.
    ///
    /// # Errors
    /// As [`Store::punch_pool`], and as the calls that publish a file.
    pub fn free(&self, unused: &[(LayerId, Vec<ByteRange>)]) -> Result<u64> {
        let (mut bytes, mut changes) = (0, Vec::new());
        for (layer, ranges) in unused {
            match &self.content(*layer)?.bytes {
                Bytes::Pool(_) => bytes += self.punch_pool(*layer, ranges)?,
                Bytes::Archive(archived) => {
                    let Some(layer) = self.layers.archived.get(*layer)? else { continue };
                    bytes += ranges.iter().map(ByteRange::len).sum::<u64>();
                    let content = archived.without(ranges);
                    changes.push(Change::Put(ArchivedLayer { content, ..layer }));
                }
            }
        }
        self.change_archive(changes)?;
        Ok(bytes)
    }

    /// Takes layers out of the archive. Layers that are not in it are skipped.
    pub(in crate::store) fn remove_from_archive(&self, layers: &[LayerId]) -> Result<()> {
        let mut archived = layers.to_vec();
        archived.retain(|layer| self.layers.archived.has(*layer));
        if archived.is_empty() {
            return Ok(());
        }
        self.layers.secure_removal(&archived, self.durable)?;
        self.change_archive(archived.into_iter().map(Change::Gone).collect())
    }

    /// Begins to rewrite the journals of sealed layers.
    pub fn journal_rewriter(&self) -> JournalRewriter<'_> {
        JournalRewriter { store: self, changes: Vec::new(), indexed: Vec::new() }
    }
}

/// Rewrites the journals of sealed layers one after the other. Changes of layers in the archive are
/// collected and published at once. A crash leaves a prefix of the rewrites done.
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
        let Some(archived) = self.store.layers.archived.get(layer)? else {
            self.publish()?;
            return self.store.rewrite_journal(&header, &seal, edits);
        };
        let during = |e: Error| e.during(format!("rewrite layer {layer}"));
        let journal = log::frames(compact_records(&header, &seal, edits)).map_err(during)?;
        self.changes.push(Change::Put(ArchivedLayer { journal, ..archived }));
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
        let kind = LayerKind::Collected;
        let header = Header { parent: None, kind, ..Header::clone(&header) };
        let seal = Seal { name: None, automatic: true, ..Seal::clone(&seal) };
        self.rewrite(header, seal, std::iter::empty())?;
        self.indexed.push(layer);
        Ok(())
    }

    fn publish(&mut self) -> Result<()> {
        let changes = std::mem::take(&mut self.changes);
        self.store.change_archive(changes).map_err(|e| e.during("rewrite layers"))
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
