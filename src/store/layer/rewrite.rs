//! Rewrites the journal of the layer that is being written, as what came of it, while others append
//! to it.
//!
//! ```text
//! Header, Opened, Edits ..., Synced, Opened     what leads from the parent's tree to the layer's
//! Edits ...                                     what came since
//! ```
//!
//! * The new journal stands beside the old one until one rename publishes it. So a process that ends
//!   leaves one of the two, and each of them has every record that was acknowledged.
//! * When it is published, everything before its second `Opened` is synced, with the pool bytes that
//!   it refers to. So it proves at least as much as the old one.
//! * No mark is copied: the marks of the old journal count its records.
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
use crate::store::layer::sealed::edits_in_records;
use crate::store::layer::{JOURNAL, Upper};
use crate::store::record::{Header, Record};
use crate::tree::Edit;
use crate::types::LayerId;

/// The new journal, until it is published.
pub(in crate::store) const NEW_JOURNAL: &str = "journal.new";

/// The end of the journal of an open layer, at some moment.
#[derive(Clone)]
pub struct JournalEnd {
    /// Which layer.
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
}

/// A journal that is about to take the place of the one of an open layer. Dropped before that, it
/// leaves nothing.
pub struct JournalRewrite {
    dir: Arc<StoreDir>,
    log: Log<Record>,
    writer: Writer,
    durable: bool,
    /// Up to where it has the records of the old journal.
    upto: JournalEnd,
    /// How many of its records survive a power cut, with their pool bytes; none before that is so.
    synced: Option<u64>,
    is_published: bool,
}

impl Store {
    /// Begins to rewrite the journal of an open layer: `edits` lead from the parent's tree to what
    /// the layer was at `from`.
    ///
    /// # Errors
    /// As the calls it is made of; nothing is left then.
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
        rewrite.begin(header, edits).map_err(during)?;
        Ok(rewrite)
    }
}

impl JournalRewrite {
    fn begin(&mut self, header: Header, edits: impl Iterator<Item = Edit>) -> Result<()> {
        self.log.append(&Record::Header(header))?;
        self.log.append(&Record::Opened { writer: self.writer })?;
        // An empty one as well: a layer that was changed stays one, see `written_last` in
        // `history/stack.rs`.
        self.log.append(&Record::Edits(Vec::new()))?;
        edits_in_records(edits).try_for_each(|record| self.log.append(&record))?;
        // Nobody waits for this sync, and little is left for the one that others wait for.
        if self.durable { self.log.sync() } else { Ok(()) }
    }

    /// Copies what was appended to the old journal up to `to`. Gives its bytes.
    ///
    /// # Errors
    /// As pread(2) and pwrite(2); if `to` is of another layer; and if the old journal has a record
    /// that an open layer does not have while it is written.
    pub fn follow(&mut self, to: &JournalEnd) -> Result<u64> {
        if to.layer != self.upto.layer || !Arc::ptr_eq(&to.file, &self.upto.file) {
            return Err(self.other("it is not written any more"));
        }
        let bytes = LogBytes::File(Arc::clone(&to.file), to.bytes);
        let what = self.dir.show(JOURNAL);
        frames::each_from(&bytes, &what, (self.upto.bytes, self.upto.count), |payload, at| {
            match log::decode::<Record>(payload, &what, at)? {
                record @ Record::Edits(_) => self.log.append_of_strangers(&record),
                Record::Synced | Record::SyncedTo(_) => Ok(()),
                _ => Err(self.other("its journal has come to its end")),
            }
        })?;
        let copied = to.bytes.saturating_sub(self.upto.bytes);
        self.upto = to.clone();
        Ok(copied)
    }

    /// Says that everything so far survives a power cut, and makes it so. The pool was synced after
    /// the last record was appended to the old journal that was copied.
    ///
    /// # Errors
    /// As pwrite(2) and fdatasync(2).
    pub fn mark_synced(&mut self) -> Result<()> {
        self.log.append(&Record::Synced)?;
        // Everything before it was synced, as before another process goes on: so a bad frame there
        // is damage, and never passes for what a power cut tore.
        self.log.append(&Record::Opened { writer: self.writer })?;
        if self.durable {
            self.log.sync()?;
        }
        self.synced = Some(self.log.count());
        Ok(())
    }

    /// What is left to do after [`Upper::go_on_in`].
    pub fn exchange(&self) -> JournalExchange {
        JournalExchange { dir: Arc::clone(&self.dir), durable: self.durable }
    }

    fn other(&self, why: &str) -> Error {
        let layer = self.upto.layer;
        Error::new(Kind::Failed, format!("rewrite the journal of layer {layer}"), why.to_owned())
    }
}

/// A rewritten journal that took the place of another, which a power cut may still bring back.
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
    /// Where the journal ends now.
    pub fn journal_end(&self) -> JournalEnd {
        JournalEnd {
            layer: self.layer,
            file: self.journal.file(),
            bytes: self.journal.len(),
            count: self.journal.count(),
        }
    }

    /// Goes on in a rewritten journal, which takes the place of the one so far. No sync may be under
    /// way, and none may be acknowledged before [`JournalExchange::sync`].
    ///
    /// # Errors
    /// As rename(2), and when nothing can be written any more; then nothing has changed.
    pub fn go_on_in(&mut self, rewrite: &mut JournalRewrite) -> Result<()> {
        self.check()?;
        rewrite.follow(&self.journal_end())?;
        let Some(synced) = rewrite.synced else { return Err(rewrite.other("it is not synced")) };
        let dir = &rewrite.dir;
        disk::rename(dir, NEW_JOURNAL, JOURNAL)
            .attempt(|| format!("publish {}", dir.show(JOURNAL)))?;
        rewrite.is_published = true;
        // The old file is closed with the rewrite, without any lock.
        std::mem::swap(&mut self.journal, &mut rewrite.log);
        self.synced = synced;
        self.in_doubt = false;
        Ok(())
    }

    /// Says that the exchange of the journal could not be synced, so that nothing can be: a power cut
    /// may bring the old journal back. The next start believes what it finds of the new one.
    pub fn exchange_failed(&mut self) {
        self.sync_failed();
        self.synced = 0;
    }
}
