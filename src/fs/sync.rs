//! Makes completed operations durable: fsync(2) and syncfs(2) of the mount.
//!
//! Always true:
//! * One sync, seal or journal rewrite runs at a time, behind the sync gate. Callers that wait for
//!   the gate often find their work done by the sync before.
//! * A sync of few bytes is one fdatasync(2), of the journal. Otherwise the pool is synced first.
//! * No sync succeeds while a layer below is not sealed, or the last journal exchange is not
//!   synced.
//! * After a failed fsync nothing can be changed any more, because the host may have dropped the
//!   pages and would report success the next time. A full disk is no such failure: nothing is lost,
//!   and a later sync tries again.

use crate::error::{FsResult, Result};
use crate::fs::edits::{EditHistory, LogMark};
use crate::fs::writing::Writing;
use crate::fs::{Core, Fs};
use crate::store::io::fsync_probe::Unsynced;
use crate::store::layer::{JournalExchange, SyncWork, Upper};
use crate::store::record::Seal;

/// The work to do before the next sync or seal succeeds. A lock around it is the sync gate.
#[derive(Default)]
pub(super) struct SyncGate {
    /// Layers whose seal failed, the lowest last, each with the seal to write.
    pub(super) unsealed: Vec<(Upper, Seal)>,
    /// The last exchange of the journal, if it is not synced.
    pub(super) exchange: Option<JournalExchange>,
}

impl Fs {
    /// Makes all operations that completed before the call survive a power cut.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync(&self) -> FsResult<()> {
        if !self.store.durable() {
            return Ok(());
        }
        let (end, mark) = {
            let core = self.writing();
            (core.upper.journal_end(), core.edits.as_ref().map(EditHistory::log_mark))
        };
        let mut gate = self.sync_gate.lock();
        self.finish_pending(&mut gate)?;
        let mut work = {
            let mut core = self.writing();
            // A sync that another caller waited for may cover this call, even if there are new
            // records since.
            let work = if core.upper.has_synced(&end) { None } else { core.upper.begin_sync() };
            let Some(work) = work else {
                if !core.upper.is_failed() {
                    core.note_edits_synced(mark);
                }
                return Ok(());
            };
            work
        };
        if work.in_doubt {
            self.sync_step(|| work.sync_journal())?;
            self.writing().upper.mark_synced(&work);
        }
        self.sync_identities()?;
        self.sync_step(|| work.check_pool())?;
        if !self.append_redo(&mut work) {
            self.sync_step(|| work.sync_pool())?;
            self.sync_identities()?;
            self.store.with_reserve(|| self.append_mark(&mut work))?;
        }
        self.sync_step(|| work.sync_journal())?;
        let mut core = self.writing();
        core.upper.journal_synced(&work);
        core.note_edits_synced(mark);
        Ok(())
    }

    /// Appends a mark with the unsynced bytes of the pool, if they are few and the inode numbers of
    /// all records are synced.
    fn append_redo(&self, work: &mut SyncWork) -> bool {
        let mut core = self.writing();
        let are_numbers_synced = self.store.identities().try_lock().is_some_and(|i| i.is_synced());
        let unsynced = if are_numbers_synced { core.upper.begin_redo(work) } else { None };
        let redo = unsynced.and_then(|unsynced| core.released(|| unsynced.read()));
        let frame = redo.and_then(|redo| core.upper.begin_redo_mark(&redo));
        let Some(mut frame) = frame else { return false };
        core.released(|| frame.write());
        let is_appended = core.upper.end_redo(work, frame);
        if is_appended {
            core.write_ahead();
        }
        is_appended
    }

    /// Appends the mark for a synced pool.
    fn append_mark(&self, work: &mut SyncWork) -> Result<()> {
        let mut core = self.writing();
        let mut frame = core.upper.begin_mark(work)?;
        core.released(|| frame.write());
        core.upper.end_mark(work, frame)?;
        core.write_ahead();
        Ok(())
    }

    /// Refuses all further changes. Completed operations stay.
    pub fn stop(&self) {
        self.writing().upper.stop();
    }

    /// Whether a sync has failed since the head was opened.
    pub fn sync_has_failed(&self) -> bool {
        self.core().upper.is_failed()
    }

    /// Syncs the inode numbers that the store has given out.
    pub(super) fn sync_identities(&self) -> Result<()> {
        let mut identities = self.store.identities().lock();
        let synced = self.store.with_reserve(|| identities.sync());
        let is_broken = identities.is_broken();
        drop(identities);
        if is_broken {
            self.writing().sync_failed();
        }
        synced
    }

    /// Runs one fsync, with the reserve of the store if the disk is full.
    pub(super) fn sync_step(
        &self,
        sync: impl Fn() -> std::result::Result<(), Unsynced>,
    ) -> FsResult<()> {
        let mut synced = sync();
        if matches!(synced, Err(Unsynced::Full(_))) && self.store.release_reserve() {
            synced = sync();
            self.store.keep_reserve();
        }
        if matches!(synced, Err(Unsynced::Lost(_))) {
            self.writing().sync_failed();
        }
        Ok(synced.map_err(Unsynced::into_error)?)
    }
}

impl Writing<'_> {
    /// An fsync failed: refuses all further changes, and marks what was not synced as lost.
    pub(super) fn sync_failed(&mut self) {
        let mut mark = self.upper.begin_failed();
        self.released(|| mark.write());
        self.upper.end_failed(mark);
        if let Some(edits) = &mut self.edits {
            edits.note_sync_failed();
        }
    }

    /// Writes zeros behind the last record of the journal, if they are due.
    fn write_ahead(&mut self) {
        if let Some(mut zeros) = self.upper.begin_write_ahead() {
            self.released(|| zeros.write());
            self.upper.end_write_ahead(zeros);
        }
    }
}

impl Core {
    /// Everything is synced that was written before a mark was taken in the log of the edit
    /// history.
    pub(super) fn note_edits_synced(&mut self, mark: Option<LogMark>) {
        if let (Some(mark), Some(edits)) = (mark, &mut self.edits) {
            edits.note_synced(mark);
        }
    }
}
