//! The log of operations, `heads.log`: every operation that changed which state a head shows.
//!
//! Operations are numbered from 1. The first ones can be trimmed; the others keep their numbers,
//! because the frames of the log begin with any number.

use std::sync::Arc;

use crate::error::Result;
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::ledger::LedgerRecord;
use crate::store::record::OpRecord;

/// The file of the log.
pub(super) const HEADS_LOG: &str = "heads.log";

/// The log of operations of an open store.
pub(super) struct OpLog {
    log: Log<OpRecord>,
    records: Vec<OpRecord>,
    /// How many operations before the first record were trimmed.
    trimmed: u64,
}

impl OpLog {
    /// Opens the log, and reads it.
    ///
    /// # Errors
    /// As open(2), and damage.
    pub fn open(dir: &StoreDir) -> Result<OpLog> {
        let bytes = dir.read(HEADS_LOG)?.unwrap_or_default();
        let (contents, trimmed) = log::read_numbered::<OpRecord>(&bytes, &dir.show(HEADS_LOG))?;
        let records: Vec<OpRecord> = contents.records.into_iter().map(|r| r.0).collect();
        let file = Arc::new(dir.file(HEADS_LOG, true)?);
        let count = trimmed + records.len() as u64;
        let log = Log::append_to(file, dir.show(HEADS_LOG), contents.end, count)?;
        Ok(OpLog { log, records, trimmed })
    }

    /// The operations that are in the log.
    pub fn records(&self) -> &[OpRecord] {
        &self.records
    }

    /// The number of the last operation.
    pub fn count(&self) -> u64 {
        self.trimmed + self.records.len() as u64
    }

    /// The operations that are in the log, each with its number.
    fn numbered(&self) -> Vec<(u64, OpRecord)> {
        (self.trimmed + 1..).zip(self.records.iter().cloned()).collect()
    }
}

/// Reads the log of a store that is not open: each operation with its number.
///
/// # Errors
/// Damage, with file and offset.
pub(super) fn read(dir: &StoreDir) -> Result<Vec<(u64, OpRecord)>> {
    let bytes = dir.read(HEADS_LOG)?.unwrap_or_default();
    let (contents, trimmed) = log::read_numbered::<OpRecord>(&bytes, &dir.show(HEADS_LOG))?;
    Ok((trimmed + 1..).zip(contents.records.into_iter().map(|(op, _)| op)).collect())
}

impl Store {
    /// Appends an operation, synced, and returns its number.
    ///
    /// # Errors
    /// As pwrite(2) and fdatasync(2).
    pub fn append_op(&self, op: OpRecord) -> Result<u64> {
        let mut ops = self.ops.lock();
        ops.log.append(&op)?;
        if self.durable
            && let Err(error) = ops.log.sync()
        {
            // The record is in the file already. So only the sync is tried again.
            let synced = match error.is_full() && self.release_reserve() {
                true => ops.log.sync(),
                false => Err(error),
            };
            self.keep_reserve();
            if synced.is_err() {
                ops.log.mark_sync_failed();
            }
            synced?;
        }
        ops.records.push(op);
        let count = ops.log.count();
        self.note_in_ledger(&LedgerRecord::Operations(count));
        drop(ops);
        self.note_numbers();
        Ok(count)
    }

    /// The operations, oldest first, each with its number.
    pub fn ops(&self) -> Vec<(u64, OpRecord)> {
        self.ops.lock().numbered()
    }

    /// Trims the log to its last `kept` operations, if it has more than twice as many.
    ///
    /// # Errors
    /// As [`Log::publish`]; the log is then unchanged.
    pub fn trim_ops(&self, kept: usize) -> Result<()> {
        let mut ops = self.ops.lock();
        let excess = ops.records.len().saturating_sub(kept);
        if excess <= kept {
            return Ok(());
        }
        let rest = ops.records.get(excess..).unwrap_or_default().to_vec();
        let trimmed = ops.trimmed + excess as u64;
        let log = self
            .publish_log(HEADS_LOG, trimmed, rest.iter())
            .map_err(|error| error.during("trim the log of operations"))?;
        *ops = OpLog { log, records: rest, trimmed };
        Ok(())
    }

    /// Removes the operations after number `last`. If that would leave none, the newest one stays,
    /// because the log gets the next number from its last record.
    ///
    /// # Errors
    /// As [`Log::publish`]; the log is then unchanged.
    pub fn cut_ops(&self, last: u64) -> Result<()> {
        let mut ops = self.ops.lock();
        let count = ops.records.len();
        let kept = usize::try_from(last.saturating_sub(ops.trimmed)).unwrap_or(usize::MAX);
        if kept >= count {
            return Ok(());
        }
        let (from, to) = if kept == 0 { (count - 1, count) } else { (0, kept) };
        let records = ops.records.get(from..to).unwrap_or_default().to_vec();
        let trimmed = ops.trimmed + from as u64;
        self.lower_ledger(&LedgerRecord::Operations(trimmed + records.len() as u64))?;
        let log = self
            .publish_log(HEADS_LOG, trimmed, records.iter())
            .map_err(|error| error.during("cut the log of operations"))?;
        *ops = OpLog { log, records, trimmed };
        Ok(())
    }
}
