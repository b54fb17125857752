//! Makes small writes to the pool survive a power cut with a sync of the journal alone.
//!
//! A sync of the upper layer that finds few unsynced bytes in the pool copies them into the journal
//! as a `Redo`, which is also the mark that everything before it is synced. One fdatasync(2) then
//! does what took two.
//!
//! Always true:
//! * A `Redo` has all ranges that no sync of the pool covers and no synced `Redo` has. They are
//!   read under the lock of changes, so nothing is overwritten in place meanwhile.
//! * If a power cut or a failed sync may have taken bytes of a pool, the synced `Redo` records
//!   since the last sync of the pool are written to it again, in order, and synced. That happens
//!   before the pool is read, and before the journal is cut or appended to. Writing them twice
//!   changes nothing, so a power cut meanwhile does no harm.
//! * Pool addresses are allocated once, and no `Redo` that was not synced stays in a journal. So no
//!   `Redo` overwrites the bytes of another file. It can bring back bytes that were freed; they
//!   take space until the layer is sealed.

use std::fs::File;
use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::content::pool::PoolWriter;
use crate::store::io::disk;
use crate::store::layer::journal::LayerContents;
use crate::store::layer::{POOL, dir_name};
use crate::store::record::{PoolBytes, Record};
use crate::sys::lock::{Rank, check_not_held};
use crate::types::{ByteRange, LayerId};

/// Bytes of a pool that are not synced. To read them needs no lock.
pub struct UnsyncedBytes {
    pool: Arc<File>,
    ranges: Vec<ByteRange>,
}

/// Begins a sync of the pool. `None` if the bytes that are not synced are many.
pub(super) fn begin(pool: &mut PoolWriter) -> Option<UnsyncedBytes> {
    let ranges = pool.unsynced.begin_sync()?;
    Some(UnsyncedBytes { pool: Arc::clone(pool.file()), ranges })
}

impl UnsyncedBytes {
    /// Returns the record that can take the place of fdatasync(2). `None` if the pool cannot be
    /// read.
    pub fn read(self) -> Option<Record> {
        check_not_held(Rank::Core);
        let read: Option<Vec<PoolBytes>> =
            self.ranges.into_iter().map(|range| read(&self.pool, range)).collect();
        read.map(Record::Redo)
    }
}

fn read(pool: &File, range: ByteRange) -> Option<PoolBytes> {
    let mut bytes = vec![0; usize::try_from(range.len()).ok()?];
    let len = disk::read_at(pool, &mut bytes, range.start).ok()?;
    (len == bytes.len()).then_some(PoolBytes { at: range.start, bytes })
}

impl LayerContents {
    /// Whether the pool may lack bytes that `Redo` records of the journal have.
    pub fn has_redo(&self) -> bool {
        self.redo_from.is_some()
    }

    /// Calls `each` with the bytes that the pool may lack, in the order in which they were written.
    fn each_redo(&self, mut each: impl FnMut(&PoolBytes) -> Result<()>) -> Result<()> {
        let Some(from) = self.redo_from else { return Ok(()) };
        for record in self.frames.records_from(from).take(self.synced - from) {
            if let Record::Redo(written) = record? {
                written.iter().try_for_each(&mut each)?;
            }
        }
        Ok(())
    }

    /// The end of the bytes that the pool may lack; 0 if there are none.
    ///
    /// # Errors
    /// As [`LayerContents::records`].
    pub fn redo_end(&self) -> Result<u64> {
        let mut end = 0;
        self.each_redo(|written| {
            end = end.max(written.at.saturating_add(written.bytes.len() as u64));
            Ok(())
        })?;
        Ok(end)
    }

    /// Writes the bytes that the pool may lack to it. `what` names the pool in errors.
    ///
    /// # Errors
    /// As pwrite(2) and fdatasync(2). The caller can try again.
    pub(super) fn redo(&self, pool: &File, what: &str, durable: bool) -> Result<()> {
        if !self.has_redo() {
            return Ok(());
        }
        let attempt = || format!("restore the last synced bytes of {what}");
        self.each_redo(|written| {
            disk::write_at(pool, &written.bytes, written.at).attempt(attempt)
        })?;
        if durable { disk::sync(pool).attempt(attempt) } else { Ok(()) }
    }
}

impl Store {
    /// Writes the bytes that the pools of these layers may lack to them.
    ///
    /// # Errors
    /// As open(2), pwrite(2) and fdatasync(2), and damage. The next start tries again.
    pub(in crate::store) fn redo(&self, layers: &[LayerId]) -> Result<()> {
        for layer in layers {
            let contents = self.read_layer(*layer)?;
            let dir = self.layers.dir.dir(&dir_name(*layer))?;
            let pool = dir.file(POOL, true)?;
            self.with_reserve(|| contents.redo(&pool, &dir.show(POOL), self.durable))?;
        }
        Ok(())
    }
}
