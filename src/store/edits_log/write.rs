//! Writes the log of the edit history, and syncs it, without the lock of the head.
//!
//! [`EditsLog`](super::EditsLog) begins each write and ends it.

use std::fs::File;
use std::sync::Arc;

use super::{CurrentRecords, DIR, EditsLogRecord, NEW, Rewritten, SMALL_LOG, Standing};
use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::log::{self, Log};

/// A log of a head that is to be written. It takes no lock.
pub struct LogRewrite {
    pub(super) store: Arc<Store>,
    pub(super) head: String,
    /// The name of the new file.
    pub(super) name: String,
    /// Whether records are appended to the old log meanwhile.
    pub(super) is_beside: bool,
    /// Bytes of the present log.
    pub(super) len: u64,
    pub(super) rewritten: Rewritten,
    /// The rewrites and the records of the present log.
    pub(super) state: (u64, u64),
    /// Lives as long as the rewrite is under way.
    pub(super) under_way: Arc<()>,
}

/// A log that was written, beside the present one.
pub struct NewLog {
    pub(super) store: Arc<Store>,
    pub(super) head: String,
    pub(super) log: Log<EditsLogRecord>,
    pub(super) name: String,
    pub(super) rewritten: Rewritten,
    pub(super) state: (u64, u64),
    _under_way: Arc<()>,
}

impl LogRewrite {
    /// Whether a rewrite would make the log much shorter. `edits` returns how many edits there are.
    ///
    /// The length after the last rewrite is the measure, also that of an earlier process, because
    /// records differ much in length. If most edits of that time were dropped, it counts in part.
    pub fn pays(&self, edits: impl FnOnce() -> u64) -> bool {
        if self.len <= SMALL_LOG {
            return false;
        }
        let Rewritten { len, edits: then, .. } = self.rewritten;
        let described = len.saturating_mul(edits().min(then)).checked_div(then).unwrap_or(0);
        self.len > described.saturating_mul(2).saturating_add(SMALL_LOG)
    }

    /// Writes the new log with these records.
    ///
    /// # Errors
    /// As unlink(2), open(2), pwrite(2) and fdatasync(2).
    pub fn write(self, all: Vec<EditsLogRecord>) -> Result<NewLog> {
        let dir = self.store.dir.make_dir(DIR)?;
        dir.remove(&self.name)?;
        let written = self.write_in(&dir, all);
        if written.is_err() {
            // The disk may be full. The next rewrite removes the file too.
            drop(dir.remove(&self.name));
        }
        let (log, rewritten) = written?;
        let LogRewrite { store, head, name, state, under_way: _under_way, .. } = self;
        Ok(NewLog { store, head, log, name, rewritten, state, _under_way })
    }

    fn write_in(
        &self,
        dir: &StoreDir,
        all: Vec<EditsLogRecord>,
    ) -> Result<(Log<EditsLogRecord>, Rewritten)> {
        let file = Arc::new(dir.file(&self.name, true)?);
        let count = all.len() as u64 + 1;
        let edits = all.iter().map(EditsLogRecord::edits).sum();
        let opened = EditsLogRecord::Opened { writer: self.store.trust.writer };
        let bytes = log::frames(std::iter::once(opened).chain(all))?;
        disk::write_at(&file, &bytes, 0).attempt(|| format!("write {}", dir.show(&self.name)))?;
        if self.is_beside && self.store.durable {
            // A power cut after the rename must not lose edits that were safe before.
            disk::sync(&file).attempt(|| format!("sync {}", dir.show(&self.name)))?;
        }
        let len = bytes.len() as u64;
        let log = Log::append_to(file, dir.show(&self.head), len, count)?;
        Ok((log, Rewritten { len, edits, has_ended: true }))
    }
}

impl NewLog {
    /// Puts the log in the place of the old one.
    fn publish(self) -> Result<NewLog> {
        let dir = self.store.dir.make_dir(DIR)?;
        disk::rename(&dir, &self.name, &self.head)
            .attempt(|| format!("publish {}", dir.show(&self.head)))?;
        Ok(self)
    }

    fn discard(&self) -> Result<()> {
        self.store.dir.make_dir(DIR)?.remove(&self.name)
    }
}

/// A write to the log of a head. It needs no lock.
pub struct EditsWrite {
    pub(super) store: Arc<Store>,
    pub(super) head: String,
    /// The log before the write.
    pub(super) standing: Standing,
    pub(super) work: Work,
}

pub(super) enum Work {
    /// Append these records.
    Append(Vec<EditsLogRecord>),
    /// Write a new log with the current records, and put it in the place of the old one.
    Rewrite(LogRewrite, CurrentRecords),
    /// Put this log in the place of the old one.
    Publish(NewLog),
    /// Remove this log, which another one has overtaken.
    Discard(NewLog),
}

impl EditsWrite {
    /// Does the work. It also closes the file of a log that was replaced. The close frees its
    /// blocks, and that can take long.
    pub fn write(self) -> WrittenEdits {
        let EditsWrite { store, head, standing, work } = self;
        let published = match work {
            Work::Append(records) => {
                let appended = append_to(&store, &head, standing, &records);
                return WrittenEdits(appended.map(Outcome::Kept));
            }
            Work::Rewrite(rewrite, all) => {
                let new = rewrite.write(all()).and_then(NewLog::publish);
                return WrittenEdits(new.map(Outcome::Replaced));
            }
            Work::Publish(new) => new.publish().map(Some),
            Work::Discard(new) => new.discard().map(|()| None),
        };
        let published = published.unwrap_or_else(|error| {
            ::log::debug!("{error}; the log of the edit history stays as long as it is");
            None
        });
        WrittenEdits(Ok(published.map_or(Outcome::Kept(standing), Outcome::Replaced)))
    }
}

/// Appends records, each with one write. A log that must be rewritten takes none.
fn append_to(
    store: &Store,
    head: &str,
    standing: Standing,
    records: &[EditsLogRecord],
) -> Result<Standing> {
    let mut log = match standing {
        Standing::Open(log) => log,
        Standing::Untouched(end, count) => {
            let dir = store.dir.make_dir(DIR)?;
            let file = Arc::new(dir.file(head, true)?);
            let mut log = Log::append_to(file, dir.show(head), end, count)?;
            log.append(&EditsLogRecord::Opened { writer: store.trust.writer })?;
            log
        }
        Standing::Stale | Standing::Failed => return Ok(standing),
    };
    records.iter().try_for_each(|record| log.append(record))?;
    Ok(Standing::Open(log))
}

/// The result of a write to the log.
pub struct WrittenEdits(pub(super) Result<Outcome>);

pub(super) enum Outcome {
    /// A new log is in the place of the old one.
    Replaced(NewLog),
    /// The log is not another one.
    Kept(Standing),
}

/// A log that is to be synced before content is freed. To open it needs no lock.
pub struct DueSync {
    pub(super) store: Arc<Store>,
    pub(super) head: String,
    pub(super) log: ToSync,
    /// The rewrites and the records of the log.
    pub(super) state: (u64, u64),
}

pub(super) enum ToSync {
    /// This process has written to it.
    Open(Arc<File>),
    /// An earlier process wrote it, and may have been killed before it synced.
    Untouched,
    /// It could not be written, and has edits that are dropped.
    Old,
}

impl DueSync {
    /// Opens the log, or removes an old one, which needs no space. Meanwhile nothing else writes to
    /// the log. Returns the sync that the caller must do, without holding a lock.
    ///
    /// # Errors
    /// As mkdir(2), open(2) and unlink(2). Then no content may be freed.
    pub fn open(self) -> Result<Option<LogSync>> {
        let DueSync { store, head, log, state } = self;
        let dir = store.dir.make_dir(DIR)?;
        let file = match log {
            ToSync::Open(file) => Some(file),
            ToSync::Untouched => Some(Arc::new(dir.file(&head, false)?)),
            ToSync::Old => {
                dir.remove(&format!("{head}{NEW}"))?;
                dir.remove(&head)?;
                None
            }
        };
        Ok(store.durable.then_some(LogSync { file, dir, state }))
    }
}

/// A sync that is due before content is freed. It needs no lock.
pub struct LogSync {
    /// The log; `None` if it was removed.
    pub(super) file: Option<Arc<File>>,
    dir: StoreDir,
    /// The rewrites and the records of the log.
    pub(super) state: (u64, u64),
}

impl LogSync {
    /// Syncs the log and its directory.
    ///
    /// # Errors
    /// As fdatasync(2) and fsync(2).
    pub fn sync(&self) -> Result<()> {
        if let Some(file) = &self.file {
            disk::sync(file).attempt(|| "sync the edit history")?;
        }
        self.dir.sync()
    }
}
