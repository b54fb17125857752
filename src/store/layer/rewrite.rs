//! Rewrites the journal of the upper layer in compact form, while operations go on appending to it.
//!
//! ```text
//! Header, Opened, Edits ..., Synced, Opened     from the parent's tree to the layer's tree
//! Edits ...                                     what was appended since
//! ```
//!
//! * The new journal stands beside the old one until one rename publishes it. So a process that
//!   ends leaves one of the two, and each of them has every acknowledged record.
//! * When it is published, everything before its second `Opened` is synced, with the pool bytes
//!   that it refers to. So it proves at least as much as the old one.
//! * No mark is copied: a mark counts the records of its own journal. The pool is synced, so the
//!   new journal needs no `Redo` either.
//!
//! docs/FORMAT.md has the argument why no power cut can lose a synced record.

use std::fs::File;
use std::sync::Arc;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::frames;
use crate::store::io::frames::LogBytes;
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::io::writer::Writer;
use crate::store::layer::compact::edits_in_records;
use crate::store::layer::upper::Upper;
use crate::store::layer::{JOURNAL, NEW_JOURNAL};
use crate::store::record::{Header, Record};
use crate::tree::Edit;
use crate::types::LayerId;

/// The end of the journal of an upper layer at one moment.
#[derive(Clone)]
pub struct JournalEnd {
    /// The layer.
    pub layer: LayerId,
    file: Arc<File>,
    bytes: u64,
    count: u64,
}

impl JournalEnd {
    /// Bytes of the journal.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes up to it.
    pub(in crate::store) fn log_bytes(&self) -> LogBytes {
        LogBytes::File(Arc::clone(&self.file), self.bytes)
    }

    /// Whether it is the end of this journal. A rewritten journal is another one.
    fn is_of(&self, layer: LayerId, journal: &Arc<File>) -> bool {
        self.layer == layer && Arc::ptr_eq(&self.file, journal)
    }
}

/// A new journal of an upper layer, not yet published. If it is dropped unpublished, it leaves
/// nothing.
pub struct JournalRewrite {
    dir: Arc<StoreDir>,
    log: Log<Record>,
    writer: Writer,
    durable: bool,
    /// The end of the records of the old journal that are copied.
    upto: JournalEnd,
    /// How many of its records survive a power cut, with their pool bytes; `None` before the first
    /// sync.
    synced: Option<u64>,
    is_published: bool,
}

impl Store {
    /// Begins to rewrite the journal of an upper layer. `edits` lead from the parent's tree to the
    /// tree of the layer at `from`.
    ///
    /// # Errors
    /// As open(2), pwrite(2) and fdatasync(2); then nothing is left.
    pub fn begin_journal_rewrite(
        &self,
        from: &JournalEnd,
        edits: impl Iterator<Item = Edit>,
    ) -> Result<JournalRewrite> {
        let during = |e: Error| e.during(format!("rewrite the journal of layer {}", from.layer));
        let header = self.layer(from.layer).map(|info| info.header);
        let header =
            header.ok_or_else(|| during(Error::damage("find its header", "there is none")))?;
        let dir = Arc::new(self.layers.dir_of(from.layer)?);
        dir.remove(NEW_JOURNAL)?;
        let file = Arc::new(dir.file(NEW_JOURNAL, true)?);
        let log = Log::append_to(file, dir.show(JOURNAL), 0, 0)?;
        let mut rewrite = JournalRewrite {
            dir,
            log,
            writer: self.trust.writer,
            durable: self.durable,
            upto: from.clone(),
            synced: None,
            is_published: false,
        };
        rewrite.begin(Header::clone(&header), edits).map_err(during)?;
        Ok(rewrite)
    }
}

impl JournalRewrite {
    fn begin(&mut self, header: Header, edits: impl Iterator<Item = Edit>) -> Result<()> {
        self.log.append(&Record::Header(header))?;
        self.log.append(&Record::Opened { writer: self.writer })?;
        // Even if there are no edits: a layer that was changed must still read as changed, because
        // the next start depends on it (`LayerContents::is_changed`).
        self.log.append(&Record::Edits(Vec::new()))?;
        edits_in_records(edits).try_for_each(|record| self.log.append(&record))?;
        // No operation waits for this sync, and it leaves little for the one that holds them up.
        if self.durable { self.log.sync() } else { Ok(()) }
    }

    /// Copies the records that were appended to the old journal up to `to`. Returns their bytes.
    ///
    /// # Errors
    /// As pread(2) and pwrite(2). Fails if `to` is of another layer, or if the old journal has a
    /// record that an upper layer does not get while it is written.
    pub fn follow(&mut self, to: &JournalEnd) -> Result<u64> {
        if !to.is_of(self.upto.layer, &self.upto.file) {
            return Err(self.error("the layer is no longer the upper layer"));
        }
        let bytes = LogBytes::File(Arc::clone(&to.file), to.bytes);
        let what = self.dir.show(JOURNAL);
        frames::each_from(&bytes, &what, (self.upto.bytes, self.upto.count), |payload, at| {
            match log::decode::<Record>(payload, &what, at)? {
                record @ Record::Edits(_) => self.log.append_untrusted(&record),
                Record::Synced | Record::SyncedTo(_) | Record::Redo(_) => Ok(()),
                _ => Err(self.error("the layer no longer takes changes")),
            }
        })?;
        let copied = to.bytes.saturating_sub(self.upto.bytes);
        self.upto = to.clone();
        Ok(copied)
    }

    /// Syncs the new journal and appends the mark that says so. The caller has synced the pool
    /// after the last copied record was appended to the old journal.
    ///
    /// # Errors
    /// As pwrite(2) and fdatasync(2).
    pub fn mark_synced(&mut self) -> Result<()> {
        self.log.append(&Record::Synced)?;
        // Everything before `Opened` is synced, as always. So a bad frame there is damage, and
        // never reads as torn by a power cut.
        self.log.append(&Record::Opened { writer: self.writer })?;
        if self.durable {
            self.log.sync()?;
        }
        self.synced = Some(self.log.count());
        Ok(())
    }

    /// Publishes the new journal in place of the old one, which ends at `end`. The caller has
    /// checked that the layer can be written to, and calls [`Upper::go_on_in`] before anything else
    /// is recorded.
    ///
    /// No sync of the layer may be under way. None may be acknowledged before
    /// [`JournalExchange::sync`].
    ///
    /// # Errors
    /// As rename(2). Then nothing has changed.
    pub fn publish(&mut self, end: &JournalEnd) -> Result<()> {
        self.follow(end)?;
        if self.synced.is_none() {
            return Err(self.error("the new journal is not synced"));
        }
        let dir = &self.dir;
        disk::rename(dir, NEW_JOURNAL, JOURNAL)
            .attempt(|| format!("publish {}", dir.show(JOURNAL)))?;
        self.is_published = true;
        Ok(())
    }

    /// The sync that is due after [`Upper::go_on_in`].
    pub fn exchange(&self) -> JournalExchange {
        JournalExchange { dir: Arc::clone(&self.dir), durable: self.durable }
    }

    fn error(&self, why: &str) -> Error {
        let layer = self.upto.layer;
        Error::new(Kind::Failed, format!("rewrite the journal of layer {layer}"), why.to_owned())
    }
}

/// The exchange of a journal for its rewritten form, which a power cut may still undo.
pub struct JournalExchange {
    dir: Arc<StoreDir>,
    durable: bool,
}

impl JournalExchange {
    /// Makes the exchange survive a power cut.
    ///
    /// # Errors
    /// As fsync(2).
    pub fn sync(&self) -> Result<()> {
        if self.durable { self.dir.sync() } else { Ok(()) }
    }
}

impl Drop for JournalRewrite {
    fn drop(&mut self) {
        if !self.is_published
            && let Err(error) = self.dir.remove(NEW_JOURNAL)
        {
            ::log::warn!("{error}; the next rewrite removes it");
        }
    }
}

impl Upper {
    /// The current end of the journal.
    pub fn journal_end(&self) -> JournalEnd {
        JournalEnd {
            layer: self.layer,
            file: self.journal.file(),
            bytes: self.journal.len(),
            count: self.journal.count(),
        }
    }

    /// Whether the records up to `end` survive a power cut.
    pub fn has_synced(&self, end: &JournalEnd) -> bool {
        end.is_of(self.layer, &self.journal.file()) && end.count <= self.synced
    }

    /// Appends to a published journal from now on. Does nothing for one that is not published.
    pub fn go_on_in(&mut self, rewrite: &mut JournalRewrite) {
        let Some(synced) = rewrite.synced.filter(|_| rewrite.is_published) else { return };
        // The old file is closed with the rewrite, which the caller drops without any lock: the
        // close frees its blocks, and that can take long.
        std::mem::swap(&mut self.journal, &mut rewrite.log);
        self.synced = synced;
        self.in_doubt = false;
    }

    /// Notes, after a failed sync, that it was that of the exchange of the journal: a power cut may
    /// bring the old journal back. The next start believes what it finds in the new one.
    pub fn exchange_failed(&mut self) {
        self.synced = 0;
    }
}
