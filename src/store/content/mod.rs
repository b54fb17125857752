//! The content of one layer: its pool, the checksums of the pool, and the remap.
//!
//! * A [`Content`] says what the files of its layer say. [`crate::store::Store::content`] loads it
//!   under the lock of the catalog and drops it under that lock when one of the files is replaced.
//!   So no reader combines a new remap with old checksums.
//! * This folder only knows bytes and addresses. Files of layers and packs are read and published
//!   by [`crate::store::placement`].

pub mod cells;
pub mod checksums;
pub mod live_ranges;
pub mod pool;
pub(in crate::store) mod read_epochs;
pub mod remap;

use std::fs::File;
use std::sync::Arc;

use crate::store::content::cells::{Cells, ReadOutcome};
use crate::store::content::checksums::Checksums;
use crate::store::content::remap::{PoolRange, Remap};
use crate::sys;
use crate::types::{ByteRange, LayerId};

/// The content of a layer.
#[derive(Debug)]
pub struct Content {
    /// The pool of the layer. `None` if the pool was removed because all content is in other pools;
    /// addresses that are not remapped then read as zeros.
    pub pool: Option<Arc<File>>,
    /// Checksums of the pool. `None` before the layer is sealed, and where they cannot be read.
    pub checksums: Option<Arc<Checksums>>,
    /// Which addresses are stored in other pools. `None` if none are.
    pub remap: Option<Arc<Remap>>,
    /// How the pool is deflated. `None` if it is not.
    pub cells: Option<Arc<Cells>>,
}

impl Content {
    /// The content of the upper layer, which has neither checksums nor a remap yet.
    pub(in crate::store) fn of_upper(pool: Arc<File>) -> Content {
        Content { pool: Some(pool), checksums: None, remap: None, cells: None }
    }

    /// Approximate size in memory, in bytes.
    pub(in crate::store) fn memory(&self) -> usize {
        self.checksums.as_ref().map_or(0, |checksums| checksums.len() * 4)
            + self.remap.as_ref().map_or(0, |remap| size_of_val(remap.runs()))
            + self.cells.as_ref().map_or(0, |cells| cells.memory())
    }

    /// Translates a range of addresses into ranges of pools, in order and without gaps. `layer` is
    /// the layer of this content.
    pub fn locate(&self, layer: LayerId, range: ByteRange) -> Vec<PoolRange> {
        match &self.remap {
            None => vec![PoolRange { layer, offset: range.start, len: range.len() }],
            Some(remap) => remap.locate(layer, range),
        }
    }

    /// Reads bytes of its own pool and verifies them against the checksums, if there are any. With
    /// `nowait`, returns [`ReadOutcome::WouldBlock`] instead of waiting for a disk.
    ///
    /// # Errors
    /// As pread(2).
    pub fn read(
        &self,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> std::io::Result<ReadOutcome> {
        self.read_checked(self.checksums.as_deref(), offset, bytes, nowait)
    }

    /// Reads bytes that the caller compares with other bytes. A comparison finds damage by itself,
    /// so checksums are verified only for deflated pools, where damage could break inflating.
    pub(in crate::store) fn read_to_compare(
        &self,
        offset: u64,
        bytes: &mut [u8],
    ) -> std::io::Result<ReadOutcome> {
        let checksums = self.checksums.as_deref().filter(|_| self.cells.is_some());
        self.read_checked(checksums, offset, bytes, false)
    }

    fn read_checked(
        &self,
        checksums: Option<&Checksums>,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> std::io::Result<ReadOutcome> {
        match &self.pool {
            Some(pool) => {
                cells::read((pool, self.cells.as_deref(), checksums), offset, bytes, nowait)
            }
            None => {
                bytes.fill(0);
                Ok(ReadOutcome::Bytes(bytes.len()))
            }
        }
    }

    /// How many bytes at the start of a range of its own pool are stored: the bytes before the
    /// first hole. A hole reads as zeros, but may be space that was punched, so deduplication must
    /// not refer to it.
    ///
    /// # Errors
    /// As lseek(2).
    pub(in crate::store) fn stored_len(&self, range: ByteRange) -> std::io::Result<u64> {
        let Some(pool) = &self.pool else { return Ok(0) };
        let mut at = range.start;
        while at < range.end {
            // A deflated cell is stored at its first address, whatever part of it is asked for.
            let (end, probe) = match self.cells.as_ref().map(|cells| cells.cell_at(at)) {
                Some((end, Some(deflated))) => (end, deflated.start),
                Some((end, None)) => (end, at),
                None => (range.end, at),
            };
            if sys::file::seek_data(&**pool, probe)? != Some(probe) {
                break;
            }
            let hole = match probe == at {
                true => sys::file::seek_hole(&**pool, at)?.unwrap_or(at),
                false => end,
            };
            at = end.min(hole).min(range.end);
            if hole < end {
                break;
            }
        }
        Ok(at - range.start)
    }
}
