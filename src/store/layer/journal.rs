//! Reads the journal of a layer, and decides how much of it is valid.
//!
//! * The same process reads its own journal, or one that an earlier process wrote under the same
//!   boot and mount: all of it is valid, because the kernel still has every write.
//! * Another [`Writer`] wrote the journal: the machine was booted, or the filesystem mounted,
//!   since. A power cut may have lost what was not synced, a journal page or a pool page alike. The
//!   journal is then valid up to the last synced record, and beyond it up to the first record that
//!   refers to pool bytes. Before the pool is read, the bytes of the synced `Redo` records are
//!   written to it again ([`redo`](super::redo)).
//! * A sync failed: the journal is valid up to the last synced record. The kernel may have dropped
//!   the pages that it could not write, also pages of the pool.
//!
//! A bad frame with good frames behind it is the work of a power cut only in a layer that may not
//! be synced to its end; in every other layer it is damage.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::store::archived::ArchivedLayer;
use crate::store::io::codec;
use crate::store::io::frames;
use crate::store::io::frames::{Frames, LogBytes};
use crate::store::io::log;
use crate::store::io::writer::Writer;
use crate::store::layer::files::Layers;
use crate::store::layer::info::LayerInfo;
use crate::store::layer::{INDEX, JOURNAL};
use crate::store::record::{Header, Record, Seal};
use crate::tree::{Edit, Source};
use crate::types::LayerId;

/// A layer begins with two records, and they are synced before anything names the layer.
const SYNCED_AT_BIRTH: usize = 2;
/// The tag of [`Record::Edits`].
const EDITS: u8 = 2;

/// The valid records of a layer, as read from disk.
pub struct LayerContents {
    /// The catalog entry of the layer.
    pub info: LayerInfo,
    /// The valid frames of the journal, with its header.
    pub(super) frames: Frames<Record>,
    /// Whether any of the records is an operation.
    pub is_changed: bool,
    /// Records that are not valid because a sync failed, as far as they can be read.
    pub unsynced: Vec<Record>,
    /// Whether a power cut took records, or pool bytes that they referred to.
    pub is_cut: bool,
    /// How many of the records, with the header, are known to be synced.
    pub(super) synced: usize,
    /// Whether the valid records say so themselves. The mark can be behind the last valid record.
    pub(super) is_marked: bool,
    /// The number of the first `Redo` whose bytes the pool may have lost.
    pub(super) redo_from: Option<usize>,
}

impl LayerContents {
    /// All valid records after the header.
    ///
    /// # Errors
    /// Damage that was not found when the journal was read.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> + '_ {
        self.frames.records_from(1)
    }

    /// The number of valid records after the header.
    pub fn count(&self) -> usize {
        self.frames.count().saturating_sub(1)
    }

    /// Whether any record matches.
    ///
    /// # Errors
    /// As [`LayerContents::records`].
    pub fn has(&self, matches: impl Fn(&Record) -> bool) -> Result<bool> {
        Ok(self.position(matches)?.is_some())
    }

    /// The seal that was to end the journal, if it was reported before it was written.
    ///
    /// # Errors
    /// As [`LayerContents::records`].
    pub fn reported_seal(&self) -> Result<Option<Seal>> {
        let mut reported = None;
        for record in self.records() {
            match record? {
                Record::Sealing(seal) => reported = Some(seal),
                Record::Edits(_) => reported = None,
                _ => {}
            }
        }
        Ok(reported)
    }

    /// The position of the first record that matches; the record after the header has position 0.
    ///
    /// # Errors
    /// As [`LayerContents::records`].
    pub fn position(&self, matches: impl Fn(&Record) -> bool) -> Result<Option<usize>> {
        for (at, record) in self.records().enumerate() {
            if matches(&record?) {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}

/// The facts that decide how far the journals of a store are valid.
#[derive(Debug)]
pub struct Trust {
    /// This process as a writer. A journal of another writer is valid as far as it was synced.
    pub writer: Writer,
    /// The layers for which this writer noted a failed sync, and how many of their records were
    /// synced before.
    pub failed: Mutex<BTreeMap<LayerId, u64>>,
    /// The oldest layer that may not be synced to its end: the one that a head names. Every older
    /// layer was synced before the head was published.
    pub torn_from: LayerId,
    /// The layers that heads name as their tops and may write to. The layers below each were synced
    /// before the head was published, however old another head is.
    pub tops: BTreeSet<LayerId>,
    /// Layers that were sealed before a head was published that names them.
    pub sealed: BTreeSet<LayerId>,
}

impl Trust {
    /// Whether a layer was synced to its end before a head was published above it.
    fn is_below_a_head(&self, layers: &Layers, layer: LayerId) -> bool {
        let below = |above: LayerId| header_of(layers, above).and_then(|header| header.parent);
        let firsts =
            self.tops.iter().filter_map(|top| below(*top)).chain(self.sealed.iter().copied());
        firsts.into_iter().any(|first| {
            let mut at = Some(first);
            while let Some(above) = at.filter(|above| *above > layer) {
                at = below(above);
            }
            at == Some(layer)
        })
    }
}

/// The header of a layer; `None` if it cannot be read.
fn header_of(layers: &Layers, layer: LayerId) -> Option<Header> {
    let bytes = layers.open_log(layer, JOURNAL).ok()??;
    let mut header = None;
    // The first record is enough. It was synced when the layer was created.
    let _end = frames::each_from(&bytes, "", (0, 0), |payload, _| match codec::decode(payload) {
        Ok(Record::Header(found)) if header.is_none() => {
            header = Some(found);
            Err(Error::damage("", "it is found"))
        }
        _ => Err(Error::damage("", "it is not there")),
    });
    header
}

/// Reads the valid part of the journal of a layer.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn read(
    layers: &Layers,
    layer: LayerId,
    trust: &Trust,
) -> Result<LayerContents> {
    read_log(layers, layer, JOURNAL, trust)
}

/// Reads the journal of an upper layer, to which its head may write meanwhile: only these bytes of
/// it. Records replace zeros in place, so that a reader of the file can see the second of two
/// records without the first.
///
/// # Errors
/// As [`read`].
pub(in crate::store) fn read_bytes(
    layers: &Layers,
    layer: LayerId,
    bytes: LogBytes,
    trust: &Trust,
) -> Result<LayerContents> {
    contents_of(layers, (layer, JOURNAL), bytes, trust)
}

/// Reads the index of a layer, which is a journal of its whole tree.
///
/// # Errors
/// Damage, with file and offset; also if the layer has no index.
pub(in crate::store) fn read_index(
    layers: &Layers,
    layer: LayerId,
    trust: &Trust,
) -> Result<LayerContents> {
    read_log(layers, layer, INDEX, trust)
}

fn read_log(layers: &Layers, layer: LayerId, name: &str, trust: &Trust) -> Result<LayerContents> {
    let missing =
        || Error::damage(format!("read {}", layers.show(layer, name)), "the file is missing");
    let bytes = layers.open_log(layer, name)?.ok_or_else(missing)?;
    contents_of(layers, (layer, name), bytes, trust)
}

fn contents_of(
    layers: &Layers,
    (layer, name): (LayerId, &str),
    bytes: LogBytes,
    trust: &Trust,
) -> Result<LayerContents> {
    let what = layers.show(layer, name);
    let (mut frames, marks) = read_frames(bytes, &what)?;
    let noted = (name == JOURNAL).then(|| noted_failure(trust, layer, frames.count())).flatten();
    let failed = marks.sync_failed().or(noted);
    let is_cut_off = failed.is_some() || marks.is_of_another_writer(trust);
    // An interrupted restore can leave a layer below the head that was never sealed, and so
    // perhaps never synced.
    let was_sealed = marks.behind.iter().any(|record| matches!(record, Record::Seal(_)));
    let may_be_torn = name == JOURNAL && (layer >= trust.torn_from || !was_sealed) && is_cut_off;
    let is_torn =
        may_be_torn && can_be_torn(&marks.behind) && !trust.is_below_a_head(layers, layer);
    if !marks.behind.is_empty() && !is_torn || failed > Some(frames.count()) {
        return Err(log::damage_at(&what, frames.end()));
    }
    let synced = failed.unwrap_or_else(|| marks.synced(frames.count()));
    let valid = match failed {
        Some(synced) => synced,
        None if is_cut_off => valid_after_power_cut(&frames, synced)?,
        None => frames.count(),
    };
    let is_cut = valid < frames.count() || !marks.behind.is_empty();
    let unsynced = match failed {
        Some(_) => frames.records_from(valid).collect::<Result<Vec<_>>>()?,
        None => Vec::new(),
    };
    frames.truncate(valid);
    let (header, seal) = ends_of(&frames, layer, &what)?;
    let compact = marks.is_compact && frames.count() > 1;
    let is_changed = marks.first_change.is_some_and(|first| first < frames.count());
    let is_marked = synced <= SYNCED_AT_BIRTH || marks.are_within(valid, synced);
    let info = LayerInfo::new(header, seal, compact, frames.end(), layers.sidecars(layer)?);
    let redo_from = marks.redo_from.filter(|from| is_cut_off && *from < synced);
    Ok(LayerContents { info, frames, is_changed, unsynced, is_cut, synced, is_marked, redo_from })
}

/// How many of the first `count` records were synced before a sync failed, if this writer noted
/// that for the layer.
fn noted_failure(trust: &Trust, layer: LayerId, count: usize) -> Option<usize> {
    let synced = trust.failed.lock().get(&layer).copied()?;
    usize::try_from(synced).ok().map(|synced| synced.min(count))
}

/// The header of a journal, and its seal if it has one.
fn ends_of(frames: &Frames<Record>, layer: LayerId, what: &str) -> Result<(Header, Option<Seal>)> {
    let damage = |why: String| Error::damage(format!("read {what} at offset 0"), why);
    let Some(Record::Header(header)) = frames.records_from(0).next().transpose()? else {
        return Err(damage("the first record is not a header".to_owned()));
    };
    if header.layer != layer {
        return Err(damage(format!("it is the journal of layer {}", header.layer)));
    }
    let last = frames.records_from(frames.count().saturating_sub(1)).next().transpose()?;
    match last {
        Some(Record::Seal(seal)) => Ok((header, Some(seal))),
        _ => Ok((header, None)),
    }
}

/// Scans a journal. Edits are not decoded: a replay decodes them, and reports those that are not
/// of this format.
fn read_frames(bytes: LogBytes, what: &str) -> Result<(Frames<Record>, Marks)> {
    let mut marks = Marks::default();
    let see = |number, payload: &[u8], at| {
        match codec::variant(payload) {
            Some(EDITS) => marks.note_edits(number),
            _ => marks.note(number, &log::decode(payload, what, at)?),
        }
        Ok(())
    };
    let (frames, behind) = frames::scan_torn(bytes, what, see)?;
    Ok((frames, Marks { behind, ..marks }))
}

/// The facts that a scan collects about a journal. A journal can have a mark for every sync, so the
/// scan keeps the outcome and not the marks.
#[derive(Default)]
struct Marks {
    /// The last writer.
    writer: Option<Writer>,
    /// How many records were synced before a sync failed, unless a process opened the layer since.
    failed: Option<usize>,
    /// How many of the first records are marked as synced.
    synced: usize,
    /// The records up to the mark that says so.
    marked_by: usize,
    /// The number of the first `Redo` since the pool was synced.
    redo_from: Option<usize>,
    is_compact: bool,
    /// The number of the first operation.
    first_change: Option<usize>,
    /// The records of all good frames behind a bad one.
    behind: Vec<Record>,
}

impl Marks {
    fn note_edits(&mut self, number: usize) {
        self.first_change = self.first_change.or(Some(number));
    }

    fn note(&mut self, number: usize, record: &Record) {
        match record {
            Record::Edits(_) => self.note_edits(number),
            Record::Synced | Record::Seal(_) => {
                self.redo_from = None;
                self.note_synced(number + 1, number);
            }
            // A mark cannot cover more records than stand before it.
            Record::SyncedTo(count) => {
                self.redo_from = None;
                let count = usize::try_from(*count).unwrap_or(0);
                self.note_synced(count.min(number), number);
            }
            Record::Redo(_) => {
                self.redo_from = self.redo_from.or(Some(number));
                self.note_synced(number + 1, number);
            }
            Record::SyncFailed(_) => self.failed = failed_at(record),
            Record::Opened { writer } => (self.writer, self.failed) = (Some(*writer), None),
            Record::Compact => self.is_compact |= number == 1,
            Record::Header(_) | Record::PreImage(_) | Record::Left(_) => {}
            Record::Abandoned | Record::Sealing(_) => {}
        }
    }

    /// Notes that record `number` marks the first `count` records as synced.
    fn note_synced(&mut self, count: usize, number: usize) {
        if count > self.synced {
            (self.synced, self.marked_by) = (count, number + 1);
        }
    }

    /// Whether the first `valid` records have a mark that covers `synced` records.
    fn are_within(&self, valid: usize, synced: usize) -> bool {
        self.synced >= synced && self.marked_by <= valid
    }

    /// How many records were synced before a sync failed, unless a process opened the layer since.
    fn sync_failed(&self) -> Option<usize> {
        let decides =
            |record: &&Record| matches!(record, Record::SyncFailed(_) | Record::Opened { .. });
        self.behind.iter().rfind(decides).map_or(self.failed, failed_at)
    }

    /// Whether the machine was booted, or the filesystem of the store mounted, since a process
    /// last opened the layer for writing.
    fn is_of_another_writer(&self, trust: &Trust) -> bool {
        self.writer.is_some_and(|writer| writer != trust.writer)
    }

    /// How many of the first `len` records are known to be synced.
    fn synced(&self, len: usize) -> usize {
        self.synced.max(len.min(SYNCED_AT_BIRTH))
    }
}

fn failed_at(record: &Record) -> Option<usize> {
    match record {
        Record::SyncFailed(synced) => usize::try_from(*synced).ok(),
        _ => None,
    }
}

/// Reads the catalog entry of a layer, and whether its pool may lack bytes that its journal has. Of
/// a sealed journal it decodes only both ends; a replay checks what is between.
///
/// # Errors
/// As [`read`].
pub(in crate::store) fn read_info(
    layers: &Layers,
    layer: LayerId,
    trust: &Trust,
) -> Result<(LayerInfo, bool)> {
    let what = layers.show(layer, JOURNAL);
    let bytes = layers.open_log(layer, JOURNAL)?;
    let (len, outline) = match &bytes {
        Some(bytes) => (bytes.len(), frames::outline::<Record>(bytes, &what)?),
        None => (0, None),
    };
    match outline.and_then(|outline| sealed_ends(layer, outline)) {
        Some((header, compact, seal)) => {
            let sidecars = layers.sidecars(layer)?;
            Ok((LayerInfo::new(header, Some(seal), compact, len, sidecars), false))
        }
        None => {
            let contents = read(layers, layer, trust)?;
            let has_redo = contents.has_redo();
            Ok((contents.info, has_redo))
        }
    }
}

/// Reads the catalog entry of a layer that is in the archive.
///
/// # Errors
/// Damage: the archive holds sealed layers only.
pub(in crate::store) fn archived_info(
    layers: &Layers,
    archived: &ArchivedLayer,
) -> Result<LayerInfo> {
    let layer = archived.layer;
    let outline = frames::outline_of(&archived.journal)?;
    let Some((header, compact, seal)) = outline.and_then(|outline| sealed_ends(layer, outline))
    else {
        let attempt = format!("read {}", layers.show(layer, JOURNAL));
        return Err(Error::damage(attempt, "it is not the journal of a sealed layer"));
    };
    let sidecars = layers.sidecars_of(archived)?;
    Ok(LayerInfo::new(header, Some(seal), compact, archived.journal.len() as u64, sidecars))
}

/// The header and the seal of a sealed journal, and whether the journal is compact; `None` if the
/// journal is not sealed.
fn sealed_ends(layer: LayerId, outline: frames::Outline<Record>) -> Option<(Header, bool, Seal)> {
    match outline {
        (Record::Header(header), second, Record::Seal(seal)) if header.layer == layer => {
            Some((header, matches!(second, Record::Compact), seal))
        }
        _ => None,
    }
}

/// Whether a layer on top of a head may have lost what was not synced: another writer wrote it,
/// or a sync failed.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn was_cut_off(layers: &Layers, trust: &Trust) -> Result<bool> {
    for top in &trust.tops {
        let Some(bytes) = layers.open_log(*top, JOURNAL)? else { continue };
        let (_, marks) = read_frames(bytes, &layers.show(*top, JOURNAL))?;
        let is_noted = trust.failed.lock().contains_key(top);
        if marks.is_of_another_writer(trust) || marks.sync_failed().is_some() || is_noted {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the process that created a layer ended before the first record was complete.
///
/// # Errors
/// As open(2).
pub(in crate::store) fn is_incomplete(layers: &Layers, layer: LayerId) -> Result<bool> {
    let bytes = layers.read(layer, JOURNAL)?.unwrap_or_default();
    Ok(log::read::<Record>(&bytes, "").is_ok_and(|contents| contents.records.is_empty()))
}

/// Whether a power cut alone can leave these good frames behind a bad one.
///
/// A sync begins only when the one before it has ended, and each sync appends a mark. So at most
/// one mark can stand behind a frame that was never synced. And a process syncs what an earlier
/// process wrote before it appends its `Opened`.
fn can_be_torn(behind: &[Record]) -> bool {
    let is_mark = |r: &&Record| {
        matches!(r, Record::Synced | Record::SyncedTo(_) | Record::Seal(_) | Record::Redo(_))
    };
    let reopened = behind.iter().any(|record| matches!(record, Record::Opened { .. }));
    behind.iter().filter(is_mark).count() <= 1 && !reopened
}

/// How many records are valid in a journal of another writer, `synced` of which were synced.
///
/// The kernel may have written a journal page and lost the pool page that it refers to. So behind
/// the synced records the journal is valid up to the first record that refers to pool bytes.
fn valid_after_power_cut(frames: &Frames<Record>, synced: usize) -> Result<usize> {
    let refers_to_pool = |record: &Record| match record {
        Record::Edits(edits) => {
            edits.iter().any(|e| matches!(e, Edit::Map { to: Some(Source::Pool { .. }), .. }))
        }
        Record::PreImage(image) => image.node.is_some(),
        // None is kept that does not count as synced: a later mark would make it valid.
        Record::Redo(_) => true,
        Record::Header(_) | Record::Opened { .. } | Record::Synced | Record::Seal(_) => false,
        Record::Left(_) | Record::Abandoned | Record::SyncedTo(_) => false,
        Record::Compact | Record::SyncFailed(_) | Record::Sealing(_) => false,
    };
    for (number, record) in (synced..).zip(frames.records_from(synced)) {
        if refers_to_pool(&record?) {
            return Ok(number);
        }
    }
    Ok(frames.count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ByteRange, Ino};

    #[test]
    fn after_a_power_cut_records_without_their_pool_bytes_are_invalid() {
        let to = Some(Source::Pool { layer: LayerId(1), offset: 0 });
        let map = || Record::Edits(vec![Edit::Map { ino: Ino(9), range: ByteRange::at(0, 1), to }]);
        let resize = || Record::Edits(vec![Edit::Resize { ino: Ino(9), size: 0 }]);
        let opened = Record::Opened { writer: Writer::new([1; 16], 1) };
        let records = [opened, map(), Record::Synced, resize(), map(), resize()];
        let valid = |records: &[Record]| {
            let (frames, marks) =
                read_frames(LogBytes::Memory(log::frames(records.iter()).unwrap()), "").unwrap();
            valid_after_power_cut(&frames, marks.synced(frames.count())).unwrap()
        };
        assert_eq!(valid(&records), 4, "up to the first that refers to the pool");
        assert_eq!(valid(&records[..3]), 3);
    }
}
