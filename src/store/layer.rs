//! A layer on disk: `layers/00000007/journal` and `layers/00000007/pool`; what of it is in a pack later is read in the same way.
//!
//! The journal begins with a header and, once the layer is sealed, ends with a seal. Between them every frame is one
//! operation. A record refers only to pool bytes that were written before it, so after a kill the whole journal is true;
//! after a power cut it is true up to what was synced, see `trusted`.

pub(in crate::store) mod files;
pub(in crate::store) mod lost_seals;
mod rewrite;
pub mod sealed;

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::content::pool::PoolWriter;
use crate::store::io::dir::StoreDir;
use crate::store::io::frames;
use crate::store::io::frames::{Frames, LogBytes};
use crate::store::io::fsync_probe::{FsyncProbe, Unsynced};
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::io::writer::{FailedSyncs, Writer};
use crate::store::io::{codec, disk};
use crate::store::layer::files::{Besides, Layers};
use crate::store::pack::PackedLayer;
use crate::store::record::{Header, Record, Seal};
use crate::tree::{Edit, Source};
use crate::types::LayerId;

pub use rewrite::{JournalEnd, JournalExchange, JournalRewrite};

/// The tag of [`Record::Edits`].
const EDITS: u8 = 2;
/// Name of the journal in the directory of a layer.
pub const JOURNAL: &str = "journal";
/// Name of the index in the directory of a layer.
pub const INDEX: &str = "index";
/// Name of the checksums in the directory of a layer.
pub const SUMS: &str = "sums";
/// Name of the map in the directory of a layer.
pub const MAP: &str = "map";
/// Name of the pool in the directory of a layer.
pub const POOL: &str = "pool";

/// The directory name of a layer.
pub fn dir_name(layer: LayerId) -> String {
    format!("{:08}", layer.0)
}

/// What the catalog of a store knows of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerInfo {
    /// Its first record.
    pub header: Header,
    /// Its last record, if it is sealed.
    pub seal: Option<Seal>,
    /// Whether its journal says only what came of it.
    pub compact: bool,
    /// Whether the content in its pool has checksums.
    pub summed: bool,
    /// Whether content of its pool is kept elsewhere.
    pub mapped: bool,
    /// Bytes of its journal.
    pub bytes: u64,
    /// Bytes of its index, if it has one.
    pub index: Option<u64>,
    /// Whether its journal, checksums and map are in a pack.
    pub packed: bool,
    /// Where its addresses end, if all of its content is elsewhere and it has no pool.
    pub hole: Option<u64>,
}

impl LayerInfo {
    pub(super) fn new(
        header: Header,
        seal: Option<Seal>,
        compact: bool,
        bytes: u64,
        besides: Besides,
    ) -> LayerInfo {
        let Besides { summed, mapped, index, packed, hole } = besides;
        LayerInfo { header, seal, compact, summed, mapped, bytes, index, packed, hole }
    }
}

/// A layer as read from disk.
pub struct LayerContents {
    /// What the catalog knows.
    pub info: LayerInfo,
    /// Its journal, header and all.
    frames: Frames<Record>,
    /// Whether any of its records is an operation.
    pub is_changed: bool,
    /// Records that are not among these because a sync failed: as far as they can still be read.
    pub unsynced: Vec<Record>,
    /// Whether a power cut took records, or content that they spoke of.
    pub is_cut: bool,
    /// How many of the records, the header included, are known to have been synced.
    synced: usize,
}

impl LayerContents {
    /// All records after the header.
    ///
    /// # Errors
    /// Damage; none that was not found when the layer was read.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> + '_ {
        self.frames.records_from(1)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.frames.count().saturating_sub(1)
    }

    /// Whether any of them is such.
    ///
    /// # Errors
    /// As [`LayerContents::records`].
    pub fn has(&self, is_such: impl Fn(&Record) -> bool) -> Result<bool> {
        Ok(self.position(is_such)?.is_some())
    }

    /// The first that is such.
    ///
    /// # Errors
    /// As [`LayerContents::records`].
    pub fn position(&self, is_such: impl Fn(&Record) -> bool) -> Result<Option<usize>> {
        for (at, record) in self.records().enumerate() {
            if is_such(&record?) {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}

/// How far the journals of a store are believed.
#[derive(Debug)]
pub struct Trust {
    /// The writer that this process is: a journal of another one is believed as far as it was synced.
    pub writer: Writer,
    /// Layers of which this writer noted a failed sync, and how many records of each were synced before.
    pub failed: Mutex<BTreeMap<LayerId, u64>>,
    /// The oldest layer that is not known to have been synced to its end: the one that the head's record names. All that lies
    /// below it was, before that record was published.
    pub torn_from: LayerId,
}

/// Reads the journal of a layer and cuts from it, in memory, what a power cut may have left without its pool bytes.
///
/// # Errors
/// Damage, with file and offset.
pub(super) fn read(layers: &Layers, layer: LayerId, trust: &Trust) -> Result<LayerContents> {
    read_file(layers, layer, JOURNAL, trust)
}

/// Reads the journal or the index of a layer.
pub(super) fn read_file(
    layers: &Layers,
    layer: LayerId,
    name: &str,
    trust: &Trust,
) -> Result<LayerContents> {
    let what = layers.show(layer, name);
    let missing = || Error::damage(format!("read {what}"), "the file is missing");
    let bytes = layers.open_log(layer, name)?.ok_or_else(missing)?;
    let (mut frames, marks) = read_frames(bytes, &what)?;
    let noted = (name == JOURNAL).then(|| trust.failed.lock().get(&layer).copied()).flatten();
    let noted = noted
        .and_then(|synced| usize::try_from(synced).ok())
        .map(|synced| synced.min(frames.count()));
    let failed = marks.sync_failed().or(noted);
    let is_cut_off = failed.is_some() || marks.is_of_another_writer(trust);
    // Below the head only what a restore left behind that was cut off was never sealed, and so perhaps never synced.
    let was_sealed = marks.behind.iter().any(|record| matches!(record, Record::Seal(_)));
    let may_be_torn = name == JOURNAL && (layer >= trust.torn_from || !was_sealed) && is_cut_off;
    let is_torn = may_be_torn && can_be_torn(&marks.behind);
    if !marks.behind.is_empty() && !is_torn || failed > Some(frames.count()) {
        return Err(log::damage_at(&what, frames.end()));
    }
    let synced = failed.unwrap_or_else(|| marks.synced(frames.count()));
    let trusted = match failed {
        Some(synced) => synced,
        None if is_cut_off => trusted(&frames, synced)?,
        None => frames.count(),
    };
    let is_cut = trusted < frames.count() || !marks.behind.is_empty();
    let unsynced = match failed {
        Some(_) => frames.records_from(trusted).collect::<Result<Vec<_>>>()?,
        None => Vec::new(),
    };
    frames.truncate(trusted);
    let Some(Record::Header(header)) = frames.records_from(0).next().transpose()? else {
        return Err(Error::damage(
            format!("read {what} at offset 0"),
            "the first record is not a header",
        ));
    };
    if header.layer != layer {
        return Err(Error::damage(
            format!("read {what} at offset 0"),
            format!("it is the journal of layer {}", header.layer),
        ));
    }
    let seal = match frames.records_from(frames.count().saturating_sub(1)).next().transpose()? {
        Some(Record::Seal(seal)) => Some(seal),
        _ => None,
    };
    let compact = marks.is_compact && frames.count() > 1;
    let is_changed = marks.first_change.is_some_and(|first| first < frames.count());
    let info = LayerInfo::new(header, seal, compact, frames.end(), layers.besides(layer)?);
    Ok(LayerContents { info, frames, is_changed, unsynced, is_cut, synced })
}

/// The good frames of a journal, and what is to be known of it as a whole. Edits are not decoded: a
/// replay does that, and tells those that are not of this format.
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

/// What the records of a journal say of it. A layer can have as many of them as there were syncs, so none is kept.
#[derive(Default)]
struct Marks {
    /// The last writer.
    writer: Option<Writer>,
    /// How many records were synced before a sync failed, if one failed since then.
    failed: Option<usize>,
    /// How many of the first records are said to be synced.
    synced: usize,
    is_compact: bool,
    /// The number of the first operation.
    first_change: Option<usize>,
    /// All records of good frames behind a bad one.
    behind: Vec<Record>,
}

impl Marks {
    fn note_edits(&mut self, number: usize) {
        self.first_change = self.first_change.or(Some(number));
    }

    fn note(&mut self, number: usize, record: &Record) {
        match record {
            Record::Edits(_) => self.note_edits(number),
            Record::Synced | Record::Seal(_) => self.synced = self.synced.max(number + 1),
            // No more than what is before it.
            Record::SyncedTo(count) => {
                let count = usize::try_from(*count).unwrap_or(0);
                self.synced = self.synced.max(count.min(number));
            }
            Record::SyncFailed(_) => self.failed = failed_at(record),
            Record::Opened { writer } => (self.writer, self.failed) = (Some(*writer), None),
            Record::Compact => self.is_compact |= number == 1,
            Record::Header(_) | Record::PreImage(_) | Record::Left(_) => {}
            Record::Abandoned | Record::Cells(_) => {}
        }
    }

    /// How many records were synced before a sync failed, if one failed since somebody last began to write.
    fn sync_failed(&self) -> Option<usize> {
        let says =
            |record: &&Record| matches!(record, Record::SyncFailed(_) | Record::Opened { .. });
        self.behind.iter().rfind(says).map_or(self.failed, failed_at)
    }

    /// Whether the machine was booted, or the store's filesystem was mounted, since a process last began to write.
    fn is_of_another_writer(&self, trust: &Trust) -> bool {
        self.writer.is_some_and(|writer| writer != trust.writer)
    }

    /// How many of the first `len` records are known to have been synced.
    fn synced(&self, len: usize) -> usize {
        // A layer is begun with two, and they are synced before anything speaks of it.
        self.synced.max(len.min(2))
    }
}

fn failed_at(record: &Record) -> Option<usize> {
    match record {
        Record::SyncFailed(synced) => usize::try_from(*synced).ok(),
        _ => None,
    }
}

/// What the catalog knows of a layer. Of a sealed one only the ends are decoded: what is between is looked at when it is
/// replayed.
///
/// # Errors
/// As [`read`].
pub(super) fn read_info(layers: &Layers, layer: LayerId, trust: &Trust) -> Result<LayerInfo> {
    let what = layers.show(layer, JOURNAL);
    let bytes = layers.open_log(layer, JOURNAL)?;
    let (len, found) = match &bytes {
        Some(bytes) => (bytes.len(), frames::outline::<Record>(bytes, &what)?),
        None => (0, None),
    };
    match found.and_then(|found| sealed(layer, found)) {
        Some((header, compact, seal)) => {
            let besides = layers.besides(layer)?;
            Ok(LayerInfo::new(header, Some(seal), compact, len, besides))
        }
        None => Ok(read(layers, layer, trust)?.info),
    }
}

/// What the catalog knows of a layer that is in a pack.
///
/// # Errors
/// Damage: only a sealed layer can be in one.
pub(super) fn packed_info(layers: &Layers, packed: &PackedLayer) -> Result<LayerInfo> {
    let layer = packed.layer;
    let found = frames::outline_of(&packed.journal)?;
    let Some((header, compact, seal)) = found.and_then(|found| sealed(layer, found)) else {
        let what = layers.show(layer, JOURNAL);
        return Err(Error::damage(
            format!("read {what}"),
            "it is not the journal of a sealed layer",
        ));
    };
    let besides = layers.besides_packed(packed)?;
    Ok(LayerInfo::new(header, Some(seal), compact, packed.journal.len() as u64, besides))
}

/// What the outline of the journal of a sealed layer says, and whether it is compact; none for
/// another journal.
fn sealed(layer: LayerId, outline: frames::Outline<Record>) -> Option<(Header, bool, Seal)> {
    match outline {
        (Record::Header(header), second, Record::Seal(seal)) if header.layer == layer => {
            Some((header, matches!(second, Record::Compact), seal))
        }
        _ => None,
    }
}

/// Whether what was not synced may be lost from the layer on top of a head: another writer wrote it, or a sync failed.
///
/// # Errors
/// Damage, with file and offset.
pub(super) fn was_cut_off(layers: &Layers, trust: &Trust) -> Result<bool> {
    let Some(bytes) = layers.open_log(trust.torn_from, JOURNAL)? else { return Ok(false) };
    let what = layers.show(trust.torn_from, JOURNAL);
    let (_, marks) = read_frames(bytes, &what)?;
    let is_noted = trust.failed.lock().contains_key(&trust.torn_from);
    Ok(marks.is_of_another_writer(trust) || marks.sync_failed().is_some() || is_noted)
}

/// Whether a power cut alone can have left these good frames behind a bad one. A sync is begun only when the one before it
/// has come to its end, and each leaves a record: behind a frame that was never synced there is one at most. And what another process
/// left is synced before this one writes.
fn can_be_torn(behind: &[Record]) -> bool {
    let syncs = |r: &&Record| matches!(r, Record::Synced | Record::SyncedTo(_) | Record::Seal(_));
    let reopened = behind.iter().any(|record| matches!(record, Record::Opened { .. }));
    behind.iter().filter(syncs).count() <= 1 && !reopened
}

/// How many of the records can be trusted if another writer wrote them. The host may have
/// kept a journal page and lost the pool page it speaks of: what is behind the synced records is true only up to the
/// first that refers to pool bytes.
fn trusted(frames: &Frames<Record>, synced: usize) -> Result<usize> {
    let refers = |record: &Record| match record {
        Record::Edits(edits) => {
            edits.iter().any(|e| matches!(e, Edit::Map { to: Some(Source::Pool { .. }), .. }))
        }
        Record::PreImage(image) => image.node.is_some(),
        Record::Header(_) | Record::Opened { .. } | Record::Synced | Record::Seal(_) => false,
        Record::Left(_) | Record::Abandoned | Record::SyncedTo(_) => false,
        Record::Compact | Record::SyncFailed(_) | Record::Cells(_) => false,
    };
    for (number, record) in (synced..).zip(frames.records_from(synced)) {
        if refers(&record?) {
            return Ok(number);
        }
    }
    Ok(frames.count())
}

/// A layer that is being written.
pub struct Upper {
    layer: LayerId,
    journal: Log<Record>,
    /// Where its content goes.
    pub pool: PoolWriter,
    durable: bool,
    /// What a failed sync of the pool means.
    pool_probe: Arc<FsyncProbe>,
    /// Number of records when the journal was last known to be synced.
    synced: u64,
    /// Whether the last record that says what is synced may not be on the disk.
    in_doubt: bool,
    /// Whether it holds any change.
    changed: bool,
    /// Whether a sync failed.
    failed: bool,
    /// Where that is noted outside the store.
    notes: FailedSyncs,
}

/// What [`Upper::begin_sync`] found to do; the slow part runs without the lock on the upper layer.
pub struct SyncWork {
    /// Of which layer: what is synced of one says nothing of another.
    layer: LayerId,
    /// The pool to sync first.
    pool: Arc<File>,
    /// The journal to sync after `Synced` was appended.
    journal: Arc<File>,
    pool_probe: Arc<FsyncProbe>,
    journal_probe: Arc<FsyncProbe>,
    /// How many records that covers.
    upto: u64,
    /// Whether the journal is to be synced first: a second mark proves that the first is on the disk.
    pub in_doubt: bool,
}

impl SyncWork {
    /// Makes the content that the records speak of survive a power cut.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync_pool(&self) -> std::result::Result<(), Unsynced> {
        disk::sync(&self.pool).map_err(|error| self.pool_probe.judge(error))
    }

    /// Makes the records survive one.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync_journal(&self) -> std::result::Result<(), Unsynced> {
        disk::sync(&self.journal).map_err(|error| self.journal_probe.judge(error))
    }
}

impl Upper {
    /// Makes the directory, journal and pool of a new layer.
    ///
    /// # Errors
    /// As the calls it is made of.
    pub(super) fn create(
        layers: &StoreDir,
        header: Header,
        by: &FailedSyncs,
        durable: bool,
    ) -> Result<Upper> {
        let layer = header.layer;
        let dir = layers.make_dir(&dir_name(layer))?;
        let pool = Arc::new(dir.file(POOL, true)?);
        let journal = Arc::new(dir.file(JOURNAL, true)?);
        let mut journal = Log::append_to(journal, dir.show(JOURNAL), 0, 0)?;
        journal.append(&Record::Header(header))?;
        journal.append(&Record::Opened { writer: by.writer() })?;
        if durable {
            journal.sync()?;
            dir.sync()?;
            layers.sync()?;
        }
        let pool_probe = Arc::new(FsyncProbe::of(&pool));
        let pool = PoolWriter::new(layer, pool).attempt(|| format!("stat {}", dir.show(POOL)))?;
        let (synced, notes) = (journal.count(), by.clone());
        let (in_doubt, changed, failed) = (false, false, false);
        Ok(Upper {
            layer,
            journal,
            pool,
            durable,
            pool_probe,
            synced,
            in_doubt,
            changed,
            failed,
            notes,
        })
    }

    /// Goes on writing to a layer that was read.
    ///
    /// # Errors
    /// As the calls it is made of.
    pub(super) fn reopen(
        layers: &StoreDir,
        contents: &LayerContents,
        by: &FailedSyncs,
        durable: bool,
    ) -> Result<Upper> {
        let layer = contents.info.header.layer;
        let dir = layers.dir(&dir_name(layer))?;
        if dir.size(rewrite::NEW_JOURNAL)?.is_some() {
            // A process ended while it rewrote the journal.
            dir.remove(rewrite::NEW_JOURNAL)?;
        }
        let journal = Arc::new(dir.file(JOURNAL, false)?);
        let count = contents.frames.count() as u64;
        let mut journal = Log::append_to(journal, dir.show(JOURNAL), contents.frames.end(), count)?;
        // Of what the process before wrote, nothing may be lost with something behind it kept: see `can_be_torn`.
        if durable && (contents.synced as u64) < count {
            let synced =
                disk::sync(&journal.file()).map_err(|error| journal.witness().judge(error));
            if let Err(Unsynced::Lost(_)) = &synced {
                // What is lost would be found by the next start, which would be told that all is well.
                journal.end_with(&Record::SyncFailed(contents.synced as u64));
                by.note(layer, contents.synced as u64);
            }
            let synced = synced.map_err(Unsynced::into_error);
            synced.attempt(|| format!("sync what layer {layer} has"))?;
        }
        journal.append(&Record::Opened { writer: by.writer() })?;
        let pool = Arc::new(dir.file(POOL, true)?);
        let pool_probe = Arc::new(FsyncProbe::of(&pool));
        let pool = PoolWriter::new(layer, pool).attempt(|| format!("stat {}", dir.show(POOL)))?;
        let (synced, changed) = (contents.synced as u64, contents.is_changed);
        by.forget(layer);
        let (in_doubt, failed, notes) = (false, false, by.clone());
        Ok(Upper {
            layer,
            journal,
            pool,
            durable,
            pool_probe,
            synced,
            in_doubt,
            changed,
            failed,
            notes,
        })
    }

    /// Its number.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// Appends one record.
    ///
    /// # Errors
    /// When it cannot be written, or must not be; the journal then ends where it ended before.
    pub fn record(&mut self, record: &Record) -> Result<()> {
        self.journal.append_of_strangers(record)?;
        self.changed |= matches!(record, Record::Edits(_));
        Ok(())
    }

    /// Whether anything was changed since the layer was begun.
    pub fn is_changed(&self) -> bool {
        self.changed
    }

    /// What must be synced so that everything recorded until now survives a power cut; none if it does already.
    pub fn begin_sync(&self) -> Option<SyncWork> {
        let upto = self.journal.count();
        (self.durable && self.synced < upto).then(|| SyncWork {
            layer: self.layer,
            pool: Arc::clone(self.pool.file()),
            journal: self.journal.file(),
            pool_probe: Arc::clone(&self.pool_probe),
            journal_probe: self.journal.witness(),
            upto,
            in_doubt: self.in_doubt,
        })
    }

    /// Says that something of it could not be synced. Nothing can be written to it any more: the host may have lost what
    /// was written since the last sync, which a later sync would not tell. The next start shows what was synced.
    pub fn sync_failed(&mut self) {
        self.journal.end_with(&Record::SyncFailed(self.synced));
        self.notes.note(self.layer, self.synced);
        self.failed = true;
    }

    /// Takes nothing more, because of a sync that failed elsewhere. What it has is believed at the next start.
    pub fn stop(&mut self) {
        self.journal.sync_has_failed();
        self.failed = true;
    }

    /// Says why nothing can be recorded in it any more, if so.
    ///
    /// # Errors
    /// EIO, with the reason.
    pub fn check(&self) -> Result<()> {
        self.journal.check()
    }

    /// Whether something of it could not be synced.
    pub fn is_failed(&self) -> bool {
        self.failed
    }

    /// Syncs the journal behind a mark. If there is no room for it, `room` may make some.
    fn sync_journal(&mut self, room: &dyn Fn() -> bool) -> Result<()> {
        // Not by the log itself, which then could not say what happened.
        let (file, witness) = (self.journal.file(), self.journal.witness());
        let sync = || disk::sync(&file).map_err(|error| witness.judge(error));
        let synced = match sync() {
            Err(Unsynced::Full(_)) if room() => sync(),
            synced => synced,
        };
        if synced.is_err() {
            // Also if only room was missing: the mark is written, and nobody may write behind it.
            self.sync_failed();
        }
        let synced = synced.map_err(Unsynced::into_error);
        synced.attempt(|| format!("sync the journal of layer {}", self.layer))
    }

    /// Syncs the pool, and before it a mark of which it is not known whether it is on the disk.
    fn sync_pool(&mut self, room: &dyn Fn() -> bool) -> std::io::Result<()> {
        let (pool, journal) = (Arc::clone(self.pool.file()), self.journal.file());
        let (of_pool, of_journal) = (Arc::clone(&self.pool_probe), self.journal.witness());
        let in_doubt = self.in_doubt;
        let sync = || {
            if in_doubt {
                disk::sync(&journal).map_err(|error| of_journal.judge(error))?;
            }
            disk::sync(&pool).map_err(|error| of_pool.judge(error))
        };
        let synced = match sync() {
            Err(Unsynced::Full(_)) if room() => sync(),
            synced => synced,
        };
        match &synced {
            Ok(()) => self.in_doubt = false,
            Err(Unsynced::Full(_)) => {}
            Err(Unsynced::Lost(_)) => self.sync_failed(),
        }
        synced.map_err(Unsynced::into_error)
    }

    /// Says that the pool was synced as `work` asked; the journal is to be synced next. Records that came meanwhile may
    /// speak of pool bytes that are not synced, so the record says how many are covered.
    ///
    /// # Errors
    /// When the record cannot be written, and when the work was another layer's.
    pub fn pool_synced(&mut self, work: &SyncWork) -> Result<()> {
        if work.layer != self.layer {
            let attempt = format!("say what is synced of layer {}", self.layer);
            return Err(Error::new(Kind::Failed, attempt, format!("it was layer {}", work.layer)));
        }
        self.journal.append(&Record::SyncedTo(work.upto))?;
        self.in_doubt = true;
        Ok(())
    }

    /// Says that the last mark is on the disk.
    pub fn mark_synced(&mut self, work: &SyncWork) {
        self.in_doubt &= work.layer != self.layer;
    }

    /// Says that the journal was synced as `work` asked.
    pub fn journal_synced(&mut self, work: &SyncWork) {
        if work.layer != self.layer {
            return;
        }
        self.in_doubt = false;
        let upto = work.upto;
        // The record that says so needs no sync of its own, or every sync would ask for the next.
        let all = if self.journal.count() == upto + 1 { upto + 1 } else { upto };
        self.synced = self.synced.max(all);
    }

    /// Bytes of the journal.
    pub fn journal_len(&self) -> u64 {
        self.journal.len()
    }

    /// Makes everything recorded until now survive a power cut, and says so in the journal.
    ///
    /// # Errors
    /// As the calls it is made of.
    pub fn sync(&mut self) -> Result<()> {
        let layer = self.layer;
        if self.durable {
            self.sync_pool(&|| false).attempt(|| format!("sync layer {layer}"))?;
        }
        self.journal.append(&Record::Synced)?;
        if self.durable {
            self.sync_journal(&|| false)?;
            self.synced = self.journal.count();
        }
        Ok(())
    }

    /// Ends the layer: its bytes, then the seal, each synced. Nobody writes to it any more. `room` may make room where there is
    /// none for a sync, and says whether it did. Gives the bytes of its journal.
    ///
    /// # Errors
    /// As the calls it is made of; the layer then stays unsealed. It can be tried again; if not, a later start joins it with the
    /// one above.
    pub fn seal(&mut self, seal: Seal, room: &dyn Fn() -> bool) -> Result<u64> {
        let layer = self.layer;
        let during = |e: Error| e.during(format!("seal layer {layer}"));
        if self.durable {
            self.sync_pool(room).attempt(|| "sync the pool").map_err(during)?;
        }
        // Its name and message come from the caller.
        self.journal.append_of_strangers(&Record::Seal(seal))?;
        if self.durable {
            self.sync_journal(room)?;
        }
        Ok(self.journal.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock;
    use crate::types::{ByteRange, Ino};

    /// Writers under two boots.
    const ONE: Writer = Writer::new([1; 16], 1);
    const TWO: Writer = Writer::new([2; 16], 1);

    fn trust(writer: Writer, torn_from: LayerId) -> Trust {
        Trust { writer, failed: Mutex::default(), torn_from }
    }

    fn notes(layers: &Layers) -> FailedSyncs {
        FailedSyncs::of(&layers.dir, ONE).unwrap()
    }

    fn map() -> Record {
        let to = Some(Source::Pool { layer: LayerId(1), offset: 0 });
        Record::Edits(vec![Edit::Map { ino: Ino(9), range: ByteRange::at(0, 1), to }])
    }

    fn resize() -> Record {
        Record::Edits(vec![Edit::Resize { ino: Ino(9), size: 0 }])
    }

    #[test]
    fn after_a_power_cut_records_without_their_bytes_are_not_trusted() {
        let records =
            [Record::Opened { writer: ONE }, map(), Record::Synced, resize(), map(), resize()];
        let trusted = |records: &[Record]| {
            let (frames, marks) =
                read_frames(LogBytes::Memory(log::frames(records.iter()).unwrap()), "").unwrap();
            trusted(&frames, marks.synced(frames.count())).unwrap()
        };
        assert_eq!(trusted(&records), 4, "up to the first that refers to the pool");
        assert_eq!(trusted(&records[..3]), 3);
    }

    fn records(contents: &LayerContents) -> Vec<Record> {
        contents.records().collect::<Result<_>>().unwrap()
    }

    fn layers(store: &std::path::Path) -> Layers {
        let store = StoreDir::open(store).unwrap();
        store.make_dir("layers").unwrap();
        Layers::open(&store, &mut |_| ()).unwrap()
    }

    /// A layer that is written under the first boot.
    fn begin(layers: &Layers) -> Upper {
        begin_layer(layers, LayerId(1))
    }

    fn begin_layer(layers: &Layers, layer: LayerId) -> Upper {
        let header = Header {
            layer,
            parent: None,
            head: "main".into(),
            epoch: crate::types::Epoch(0),
            kind: crate::store::record::LayerKind::Continues,
            time: crate::types::Timestamp::default(),
        };
        Upper::create(&layers.dir, header, &notes(layers), true).unwrap()
    }

    /// After a restore that a power cut cut off, what was written meanwhile lies below the head, and was never sealed.
    #[test]
    fn below_the_head_a_power_cut_can_tear_only_what_was_never_sealed() {
        for is_sealed in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let layers = layers(dir.path());
            let mut upper = begin(&layers);
            upper.record(&resize()).unwrap();
            let torn_at = upper.journal_len();
            upper.record(&resize()).unwrap();
            upper.record(&resize()).unwrap();
            if is_sealed {
                let time = crate::types::Timestamp::default();
                let seal = Seal { name: None, message: String::new(), time, automatic: true };
                upper.seal(seal, &|| false).unwrap();
            }
            let journal = layers.dir_of(LayerId(1)).unwrap().file(JOURNAL, false).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&journal, &[0; 8], torn_at).unwrap();
            let found = read(&layers, LayerId(1), &trust(TWO, LayerId(2)));
            match is_sealed {
                true => assert_eq!(found.err().map(|e| e.kind), Some(crate::error::Kind::Damage)),
                false => {
                    assert_eq!(records(&found.unwrap()), [Record::Opened { writer: ONE }, resize()])
                }
            }
        }
    }

    #[test]
    fn what_was_synced_of_one_layer_says_nothing_of_another() {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let (mut before, mut after) = (begin(&layers), begin_layer(&layers, LayerId(2)));
        for _ in 0..5 {
            before.record(&map()).unwrap();
        }
        let work = before.begin_sync().unwrap();
        after.record(&map()).unwrap();
        assert!(after.pool_synced(&work).is_err());
        after.journal_synced(&work);
        assert!(after.begin_sync().is_some(), "it has a record that nobody synced");
    }

    #[test]
    fn a_journal_whose_sync_failed_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        upper.record(&resize()).unwrap();
        // The pool first, then the journal.
        let synced = crate::sys::failpoint::with("fail:store.sync:2:EIO", || upper.sync());
        assert!(synced.is_err() && upper.is_failed() && upper.check().is_err());
        let trust = trust(ONE, LayerId(0));
        let found = read(&layers, LayerId(1), &trust).unwrap();
        assert_eq!(
            records(&found),
            [Record::Opened { writer: ONE }],
            "what was not synced is not believed"
        );
    }

    #[test]
    fn a_failed_sync_that_the_journal_cannot_say_is_believed_by_its_note() {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        upper.record(&resize()).unwrap();
        upper.sync().unwrap();
        upper.record(&resize()).unwrap();
        // The disk takes the mark of the sync, and nothing more.
        let failing = "fail:store.sync:1+:EIO,fail:store.write:1+:EIO";
        assert!(crate::sys::failpoint::with(failing, || upper.sync()).is_err());
        let records_with = |failed| {
            let trust = Trust { failed: Mutex::new(failed), ..trust(ONE, LayerId(0)) };
            records(&read(&layers, LayerId(1), &trust).unwrap()).len()
        };
        assert_eq!(records_with(BTreeMap::new()), 4, "the journal alone looks whole");
        assert_eq!(
            records_with(notes(&layers).read()),
            3,
            "opened, the first change, the mark behind it"
        );
        notes(&layers).forget_all();
    }

    /// Somebody writes a frame that says that a sync failed into an attribute, and a power cut tears its record.
    #[test]
    fn bytes_of_strangers_never_pass_for_records() {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        let forged = log::frame(&Record::SyncFailed(1), 3).unwrap();
        let with = |value: Vec<u8>| {
            Record::Edits(vec![Edit::Xattr {
                ino: Ino(9),
                name: b"user.a".to_vec(),
                value: Some(value),
            }])
        };
        let refused =
            upper.record(&with([b"before".to_vec(), forged.clone(), b"behind".to_vec()].concat()));
        assert_eq!(
            refused.err().and_then(|error| error.errno),
            Some(nix::errno::Errno::EINVAL as i32)
        );
        upper.record(&with(forged.split_last().unwrap().1.to_vec())).unwrap();
        upper.record(&with(vec![0; 1000])).unwrap();
        // A number that no frame can have by then is not believed by those who read it.
        upper.record(&with(log::frame(&Record::SyncFailed(1), 1 << 40).unwrap())).unwrap();
        let torn_at = upper.journal_len();
        upper.record(&with(log::frame(&Record::SyncFailed(1), 1 << 40).unwrap())).unwrap();
        let journal = layers.dir_of(LayerId(1)).unwrap().file(JOURNAL, false).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&journal, &[0; 8], torn_at).unwrap();
        let trust = trust(TWO, LayerId(0));
        assert!(read(&layers, LayerId(1), &trust).unwrap().unsynced.is_empty());
    }

    /// The name and the message of a checkpoint are its maker's. A power cut tears the seal, which is
    /// the last record.
    #[test]
    fn a_message_that_holds_a_frame_never_passes_for_records() {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        upper.record(&resize()).unwrap();
        // A frame that is text: its checksum has to be, too.
        let forged = (1..1000).find_map(|n| {
            let frame = log::frame(&Record::SyncFailed(1), n).unwrap();
            String::from_utf8([b"before".to_vec(), frame, b"behind".to_vec()].concat()).ok()
        });
        let seal =
            |message: String| Seal { name: None, message, time: clock::now(), automatic: false };
        let refused = upper.seal(seal(forged.unwrap()), &|| false);
        assert_eq!(
            refused.err().and_then(|error| error.errno),
            Some(nix::errno::Errno::EINVAL as i32)
        );
        upper.seal(seal("another message".to_owned()), &|| false).unwrap();
        let trust = trust(TWO, LayerId(0));
        assert!(read(&layers, LayerId(1), &trust).unwrap().info.seal.is_some());
    }

    #[test]
    fn what_a_process_before_wrote_is_synced_before_another_one_writes() {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        upper.record(&resize()).unwrap();
        let length = upper.journal_len();
        drop(upper);
        let trust = trust(ONE, LayerId(1));
        let contents = || read(&layers, LayerId(1), &trust).unwrap();
        let reopen = || Upper::reopen(&layers.dir, &contents(), &notes(&layers), true);
        assert!(crate::sys::failpoint::with("fail:store.sync:1:ENOSPC", reopen).is_err());
        let journal = layers.dir_of(LayerId(1)).unwrap();
        assert_eq!(
            journal.size(JOURNAL).unwrap(),
            Some(length),
            "nothing is lost, and nothing was written"
        );
        // The host would answer by now that all is well, and would not have what was to be synced.
        assert!(crate::sys::failpoint::with("fail:store.sync:1:EIO", reopen).is_err());
        assert_eq!(
            records(&contents()),
            [Record::Opened { writer: ONE }],
            "what was not synced is not believed"
        );
        drop(reopen().unwrap());
        assert_eq!(
            records(&contents()),
            [Record::Opened { writer: ONE }, Record::Opened { writer: ONE }]
        );
    }

    #[test]
    fn what_was_synced_is_trusted_also_if_others_wrote_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        upper.record(&map()).unwrap();
        let work = upper.begin_sync().unwrap();
        upper.record(&map()).unwrap();
        upper.pool_synced(&work).unwrap();
        upper.journal_synced(&work);
        let trust = trust(TWO, LayerId(0));
        let after_cut = records(&read(&layers, LayerId(1), &trust).unwrap());
        assert_eq!(
            after_cut,
            [Record::Opened { writer: ONE }, map()],
            "the synced one, and not the next"
        );
        upper.record(&map()).unwrap();
        let rest = upper.begin_sync().unwrap();
        upper.pool_synced(&rest).unwrap();
        upper.journal_synced(&rest);
        assert!(upper.begin_sync().is_none(), "a sync after a sync has nothing to do");
    }
}
