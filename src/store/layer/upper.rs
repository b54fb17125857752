//! The layer that a head writes to.
//!
//! Always true:
//! * A mark (`Synced`, `SyncedTo`, `Seal`) is appended only after the pool bytes of the records
//!   that it covers are synced. The mark `Redo` has the bytes that are not ([`redo`]).
//! * Before a second mark is appended, the first one is synced. So at most one mark can stand
//!   behind a record that a power cut tore, which is how [`journal`](super::journal) tells a torn
//!   journal from a damaged one.
//! * After a failed sync nothing more is appended. The kernel may have dropped the pages that it
//!   could not write, and a later sync would succeed without them. The next start shows what was
//!   synced before.

use std::fs::File;
use std::sync::Arc;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::content::pool::PoolWriter;
use crate::store::content::unsynced::UnsyncedRanges;
use crate::store::io::dir::StoreDir;
use crate::store::io::fsync_probe::{FsyncProbe, Unsynced};
use crate::store::io::log::{Log, LogWrite};
use crate::store::io::writer::FailedSyncs;
use crate::store::layer::journal::LayerContents;
use crate::store::layer::redo::{self, UnsyncedBytes};
use crate::store::layer::{JOURNAL, NEW_JOURNAL, POOL, dir_name};
use crate::store::record::{Header, Record, Seal};
use crate::types::LayerId;

/// A layer that is being written.
pub struct Upper {
    pub(super) layer: LayerId,
    pub(super) journal: Log<Record>,
    /// Appends content to the pool.
    pub pool: PoolWriter,
    durable: bool,
    /// Tells what a failed sync of the pool lost.
    pool_probe: Arc<FsyncProbe>,
    /// Number of records that are known to be synced.
    pub(super) synced: u64,
    /// Whether the last mark may not be synced.
    pub(super) in_doubt: bool,
    /// Whether the layer holds any operation.
    changed: bool,
    /// Whether a sync failed.
    failed: bool,
    /// Where a failed sync is noted outside the store.
    notes: FailedSyncs,
}

/// A sync of an upper layer, to be done without the lock of that layer.
pub struct SyncWork {
    /// The layer. A sync of one layer proves nothing about another.
    layer: LayerId,
    pool: Arc<File>,
    journal: Arc<File>,
    pool_probe: Arc<FsyncProbe>,
    journal_probe: Arc<FsyncProbe>,
    /// The number of records that survive a power cut when the sync has ended.
    upto: u64,
    /// Whether the journal must be synced first, because its last mark may not be.
    pub in_doubt: bool,
}

impl SyncWork {
    /// Syncs the pool bytes that the records refer to.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync_pool(&self) -> std::result::Result<(), Unsynced> {
        self.pool_probe.sync(&self.pool)
    }

    /// Fails if the kernel could not write pages of the pool since they were synced or copied into
    /// the journal. It may have dropped them, and a reader would get older bytes.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn check_pool(&self) -> std::result::Result<(), Unsynced> {
        self.pool_probe.check(&self.pool)
    }

    /// Syncs the records.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync_journal(&self) -> std::result::Result<(), Unsynced> {
        self.journal_probe.sync(&self.journal)
    }
}

/// The mark of a failed sync. To write it needs no lock.
pub struct FailedMark {
    /// The record in the journal, if that can be written.
    frame: Option<LogWrite>,
    notes: FailedSyncs,
    layer: LayerId,
    /// How many records were synced before.
    synced: u64,
}

impl FailedMark {
    /// Writes the mark to the journal, and notes it outside the store.
    pub fn write(&mut self) {
        if let Some(frame) = &mut self.frame {
            frame.write();
        }
        self.notes.note(self.layer, self.synced);
    }
}

impl Upper {
    /// Creates the directory, journal and pool of a new layer.
    ///
    /// # Errors
    /// As mkdir(2), open(2), pwrite(2), fdatasync(2) and fsync(2).
    pub(in crate::store) fn create(
        layers: &StoreDir,
        header: Header,
        notes: &FailedSyncs,
        durable: bool,
    ) -> Result<Upper> {
        let layer = header.layer;
        let dir = layers.make_dir(&dir_name(layer))?;
        let pool = dir.file(POOL, true)?;
        let journal = Arc::new(dir.file(JOURNAL, true)?);
        let mut journal = Log::append_to(journal, dir.show(JOURNAL), 0, 0)?;
        journal.append(&Record::Header(header))?;
        journal.append(&Record::Opened { writer: notes.writer() })?;
        if durable {
            journal.sync()?;
            dir.sync()?;
            layers.sync()?;
        }
        let synced = journal.count();
        Upper::new(layer, &dir, journal, pool, synced, notes, durable)
    }

    /// Opens a layer for appending after its journal was read.
    ///
    /// # Errors
    /// As open(2), pwrite(2) and fdatasync(2).
    pub(in crate::store) fn reopen(
        layers: &StoreDir,
        contents: &LayerContents,
        notes: &FailedSyncs,
        durable: bool,
    ) -> Result<Upper> {
        let layer = contents.info.header.layer;
        let dir = layers.dir(&dir_name(layer))?;
        if dir.size(NEW_JOURNAL)?.is_some() {
            // A process ended while it rewrote the journal.
            dir.remove(NEW_JOURNAL)?;
        }
        let pool = dir.file(POOL, true)?;
        contents.redo(&pool, &dir.show(POOL), durable)?;
        let journal = Arc::new(dir.file(JOURNAL, false)?);
        let (synced, count) = (contents.synced as u64, contents.frames.count() as u64);
        let mut journal = Log::append_to(journal, dir.show(JOURNAL), contents.frames.end(), count)?;
        if !contents.is_marked || contents.has_redo() {
            // The mark was cut off with the records that are not valid. Without a new one, the
            // next power cut would take records that were synced. And the pool is synced: it needs
            // no `Redo` any more.
            journal.append(&Record::SyncedTo(synced))?;
        }
        // Sync what the last process appended, before `Opened` stands behind it: a power cut must
        // not lose one of those records and keep a later one.
        if durable && synced < journal.count() {
            let done = journal.probe().sync(&journal.file());
            if let Err(Unsynced::Lost(_)) = &done {
                // The next start would read the lost records from the page cache, if nothing said
                // that they are lost.
                journal.end_with(&Record::SyncFailed(synced));
                notes.note(layer, synced);
            }
            done.map_err(Unsynced::into_error)
                .attempt(|| format!("sync what layer {layer} has"))?;
        }
        journal.append(&Record::Opened { writer: notes.writer() })?;
        let mut upper = Upper::new(layer, &dir, journal, pool, synced, notes, durable)?;
        upper.changed = contents.is_changed;
        upper.pool.unsynced = UnsyncedRanges::unknown();
        notes.forget(layer);
        Ok(upper)
    }

    fn new(
        layer: LayerId,
        dir: &StoreDir,
        journal: Log<Record>,
        pool: File,
        synced: u64,
        notes: &FailedSyncs,
        durable: bool,
    ) -> Result<Upper> {
        let pool = Arc::new(pool);
        let pool_probe = Arc::new(FsyncProbe::of(&pool));
        let pool = PoolWriter::new(layer, pool).attempt(|| format!("stat {}", dir.show(POOL)))?;
        Ok(Upper {
            layer,
            journal,
            pool,
            durable,
            pool_probe,
            synced,
            in_doubt: false,
            changed: false,
            failed: false,
            notes: notes.clone(),
        })
    }

    /// The id of the layer.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// Appends one record.
    ///
    /// # Errors
    /// As pwrite(2), and EINVAL for a record that holds a whole frame
    /// ([`Log::append_untrusted`]). The journal then ends where it ended before.
    pub fn record(&mut self, record: &Record) -> Result<()> {
        let mut frame = self.begin_record(record)?;
        frame.write();
        self.end_record(record, frame).map(drop)
    }

    /// As [`Upper::record`], in steps: the caller writes the frame, and then calls
    /// [`Upper::end_record`]. Nothing else is appended meanwhile.
    ///
    /// # Errors
    /// As [`Upper::record`], but for those of pwrite(2).
    pub fn begin_record(&mut self, record: &Record) -> Result<LogWrite> {
        self.journal.begin_append_untrusted(record)
    }

    /// Counts a record whose frame was written. Returns its bytes.
    ///
    /// # Errors
    /// As pwrite(2). The journal then ends where it ended before.
    pub fn end_record(&mut self, record: &Record, frame: LogWrite) -> Result<u64> {
        let before = self.journal.len();
        self.journal.end_append(frame)?;
        self.changed |= matches!(record, Record::Edits(_));
        Ok(self.journal.len() - before)
    }

    /// Notes that the pool has content to which a later record may refer. So the layer is sealed,
    /// and its pool synced, when another one takes its place.
    pub fn note_changed(&mut self) {
        self.changed = true;
    }

    /// Whether the layer holds any operation, or such content.
    pub fn is_changed(&self) -> bool {
        self.changed
    }

    /// Bytes of the journal.
    pub fn journal_len(&self) -> u64 {
        self.journal.len()
    }

    /// Fails if nothing can be recorded any more.
    ///
    /// # Errors
    /// EIO, with the reason.
    pub fn check(&self) -> Result<()> {
        self.journal.check()
    }

    /// Whether a sync failed, or the layer was stopped.
    pub fn is_failed(&self) -> bool {
        self.failed
    }

    /// Stops the layer after a failed sync: nothing can be recorded any more, and the next start
    /// shows what was synced before.
    pub fn sync_failed(&mut self) {
        let mut mark = self.begin_failed();
        mark.write();
        self.end_failed(mark);
    }

    /// As [`Upper::sync_failed`], in steps: stops the layer, and returns the mark that says so. The
    /// caller writes it, and then calls [`Upper::end_failed`].
    pub fn begin_failed(&mut self) -> FailedMark {
        self.failed = true;
        let frame = self.journal.begin_close(&Record::SyncFailed(self.synced));
        FailedMark { frame, notes: self.notes.clone(), layer: self.layer, synced: self.synced }
    }

    /// Ends what [`Upper::begin_failed`] began, once the mark was written.
    pub fn end_failed(&mut self, mark: FailedMark) {
        if let Some(frame) = mark.frame {
            self.journal.end_close(frame);
        }
    }

    /// Stops the layer because a sync failed elsewhere. The next start shows all of it.
    pub fn stop(&mut self) {
        self.journal.mark_sync_failed();
        self.failed = true;
    }
}

/// A sync in steps. Between them the caller does the syncs, reads the unsynced bytes and writes the
/// frames, without the core lock:
///
/// 1. [`Upper::begin_sync`]
/// 2. [`Upper::begin_redo`], [`Upper::begin_redo_mark`] and [`Upper::end_redo`]; or
///    [`SyncWork::sync_pool`], [`Upper::begin_mark`] and [`Upper::end_mark`]
/// 3. [`Upper::begin_write_ahead`] and [`Upper::end_write_ahead`]
/// 4. [`SyncWork::sync_journal`] and [`Upper::journal_synced`]
impl Upper {
    /// The sync that makes all current records survive a power cut; `None` if they do already.
    pub fn begin_sync(&mut self) -> Option<SyncWork> {
        (self.durable && self.synced < self.journal.count()).then(|| self.sync_work())
    }

    /// The sync of everything, also of a pool whose bytes the journal has.
    pub fn sync_work(&mut self) -> SyncWork {
        self.pool.unsynced.begin_sync();
        SyncWork {
            layer: self.layer,
            pool: Arc::clone(self.pool.file()),
            journal: self.journal.file(),
            pool_probe: Arc::clone(&self.pool_probe),
            journal_probe: self.journal.probe(),
            upto: self.journal.count(),
            in_doubt: self.in_doubt,
        }
    }

    /// Notes that the last mark is synced.
    pub fn mark_synced(&mut self, work: &SyncWork) {
        self.in_doubt &= work.layer != self.layer;
    }

    /// Begins a mark that holds the unsynced bytes of the pool, instead of a sync of the pool: the
    /// bytes to be read. `None` if that cannot be done: if the bytes are many, for example. The
    /// caller has synced the identities. It lets no other thread append a record before
    /// [`Upper::end_redo`], because the mark must cover all records.
    pub fn begin_redo(&mut self, work: &SyncWork) -> Option<UnsyncedBytes> {
        if work.layer != self.layer || self.in_doubt {
            return None;
        }
        redo::begin(&mut self.pool)
    }

    /// The frame of the mark with the bytes that were read. `None` if it cannot be appended.
    pub fn begin_redo_mark(&mut self, redo: &Record) -> Option<LogWrite> {
        let frame = self.journal.begin_append_untrusted(redo);
        frame.inspect_err(|error| log::debug!("{error}; the pool is synced instead")).ok()
    }

    /// Ends what [`Upper::begin_redo`] began, once the frame was written. Returns whether that
    /// worked.
    pub fn end_redo(&mut self, work: &mut SyncWork, frame: LogWrite) -> bool {
        if let Err(error) = self.journal.end_append(frame) {
            log::debug!("{error}; the pool is synced instead");
            return false;
        }
        self.in_doubt = true;
        work.upto = self.journal.count();
        true
    }

    /// Notes that the pool is synced.
    pub fn note_pool_synced(&mut self, work: &SyncWork) {
        if work.layer == self.layer {
            self.pool.unsynced.synced();
        }
    }

    /// Begins the mark for a synced pool.
    ///
    /// Records that were appended during the sync may refer to pool bytes that are not synced. So
    /// the mark says how many records it covers.
    ///
    /// # Errors
    /// If nothing can be recorded any more, or `work` is a sync of another layer.
    pub fn begin_mark(&mut self, work: &SyncWork) -> Result<LogWrite> {
        if work.layer != self.layer {
            let attempt = format!("mark layer {} as synced", self.layer);
            let why = format!("the sync was of layer {}", work.layer);
            return Err(Error::new(Kind::Failed, attempt, why));
        }
        self.note_pool_synced(work);
        self.journal.begin_append(&Record::SyncedTo(work.upto))
    }

    /// Ends what [`Upper::begin_mark`] began, once the frame was written.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn end_mark(&mut self, work: &mut SyncWork, frame: LogWrite) -> Result<()> {
        self.journal.end_append(frame)?;
        self.in_doubt = true;
        // The mark needs no sync of its own, or every sync would ask for another.
        if self.journal.count() == work.upto + 1 {
            work.upto += 1;
        }
        Ok(())
    }

    /// The zeros that the journal gets behind its mark, if they are due
    /// ([`Log::begin_write_ahead`]).
    pub fn begin_write_ahead(&mut self) -> Option<LogWrite> {
        self.journal.begin_write_ahead()
    }

    /// Counts zeros that were written.
    pub fn end_write_ahead(&mut self, zeros: LogWrite) {
        self.journal.end_write_ahead(zeros);
    }

    /// Notes that the journal is synced.
    pub fn journal_synced(&mut self, work: &SyncWork) {
        if work.layer != self.layer {
            return;
        }
        self.in_doubt = false;
        self.pool.unsynced.synced();
        self.synced = self.synced.max(work.upto);
    }
}

/// A sync in one call, for a layer that no other thread writes to.
impl Upper {
    /// Makes all current records survive a power cut, and appends the mark that says so.
    ///
    /// # Errors
    /// As pwrite(2) and fdatasync(2).
    pub fn sync(&mut self) -> Result<()> {
        self.end_with_mark(&Record::Synced, &|| false)
    }

    /// Syncs the layer and ends it with its seal. Writes to fresh addresses end before that.
    /// Returns the bytes of the journal. `make_room` is called if the disk is too full for a sync,
    /// and says whether it freed space.
    ///
    /// # Errors
    /// As pwrite(2) and fdatasync(2). The layer is then not sealed, and the caller can try again;
    /// if it does not, a later start seals the layer. Writes to fresh addresses are refused in any
    /// case.
    pub(in crate::store) fn seal(
        &mut self,
        seal: Seal,
        make_room: &dyn Fn() -> bool,
    ) -> Result<u64> {
        let layer = self.layer;
        self.pool.close_fresh();
        self.end_with_mark(&Record::Seal(seal), make_room)
            .map_err(|error| error.during(format!("seal layer {layer}")))?;
        Ok(self.journal.len())
    }

    /// Syncs the pool, appends a mark that covers all records, and syncs the journal.
    fn end_with_mark(&mut self, mark: &Record, make_room: &dyn Fn() -> bool) -> Result<()> {
        let layer = self.layer;
        if self.durable {
            self.sync_pool(make_room).attempt(|| format!("sync the pool of layer {layer}"))?;
        }
        // A sealed journal ends with its seal.
        match self.journal.cut_zeros() {
            Err(_) if make_room() => self.journal.cut_zeros()?,
            cut => cut?,
        }
        // The name and the message in a seal come from the user.
        self.journal.append_untrusted(mark)?;
        if self.durable {
            self.sync_journal(make_room)
                .attempt(|| format!("sync the journal of layer {layer}"))?;
            self.synced = self.journal.count();
        }
        Ok(())
    }

    /// Syncs the pool, and before it a mark that may not be synced.
    fn sync_pool(&mut self, make_room: &dyn Fn() -> bool) -> std::io::Result<()> {
        let work = self.sync_work();
        let synced = retry_if_full(make_room, || {
            if work.in_doubt {
                work.sync_journal()?;
            }
            work.sync_pool()
        });
        match &synced {
            Ok(()) => {
                self.in_doubt = false;
                self.note_pool_synced(&work);
            }
            Err(Unsynced::Full(_)) => {}
            Err(Unsynced::Lost(_)) => self.sync_failed(),
        }
        synced.map_err(Unsynced::into_error)
    }

    /// Syncs the journal behind a mark.
    fn sync_journal(&mut self, make_room: &dyn Fn() -> bool) -> std::io::Result<()> {
        // Not by `Log::sync`: it would close the log, and `SyncFailed` could not be appended.
        let work = self.sync_work();
        let synced = retry_if_full(make_room, || work.sync_journal());
        if synced.is_err() {
            // Even if only space was missing: the mark is written, and nothing may stand behind it.
            self.sync_failed();
        }
        synced.map_err(Unsynced::into_error)
    }
}

/// Syncs, and once more if the disk was full and `make_room` freed space.
fn retry_if_full(
    make_room: &dyn Fn() -> bool,
    sync: impl Fn() -> std::result::Result<(), Unsynced>,
) -> std::result::Result<(), Unsynced> {
    match sync() {
        Err(Unsynced::Full(_)) if make_room() => sync(),
        synced => synced,
    }
}
