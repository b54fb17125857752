//! The content of a layer, as whoever reads it needs it: the pool, the checksums of what is in it, and where the rest is.
//!
//! Always true: what is kept in memory of a layer is what its files say. It is loaded under the lock of the catalog, and
//! dropped under it when one of the files was replaced, so nobody finds a new map with old checksums, or an old map after
//! [`Store::publish_remap`] has returned.

pub mod cells;
pub mod checksums;
pub mod live_ranges;
pub mod pool;
pub(in crate::store) mod read_epochs;
pub mod remap;

use std::fs::File;
use std::sync::Arc;

use crate::store::content::cells::{Cells, Got};
use crate::store::content::checksums::Checksums;
use crate::store::content::remap::{Map, Place};
use crate::sys;
use crate::types::{ByteRange, LayerId};

/// The content of a layer.
#[derive(Debug)]
pub struct Content {
    /// Its pool; none if all of its content is elsewhere, and then the rest of its addresses are zeros.
    pub file: Option<Arc<File>>,
    /// What the bytes in the pool are held against, once the layer is sealed.
    pub sums: Option<Arc<Checksums>>,
    /// What of it is kept elsewhere, if anything is.
    pub map: Option<Arc<Map>>,
    /// How it is deflated, if it is.
    pub cells: Option<Arc<Cells>>,
}

impl Content {
    /// The content of a layer that is being written.
    pub(in crate::store) fn of_upper(file: Arc<File>) -> Content {
        Content { file: Some(file), sums: None, map: None, cells: None }
    }

    /// Bytes that it takes in memory, about.
    pub(in crate::store) fn weight(&self) -> usize {
        self.sums.as_ref().map_or(0, |sums| sums.len() * 4)
            + self.map.as_ref().map_or(0, |map| size_of_val(map.runs()))
            + self.cells.as_ref().map_or(0, |cells| cells.weight())
    }

    /// Where a range of the pool's addresses is.
    pub fn places(&self, layer: LayerId, range: ByteRange) -> Vec<Place> {
        match &self.map {
            None => vec![Place { layer, offset: range.start, len: range.len() }],
            Some(map) => map.places(layer, range),
        }
    }

    /// Reads bytes of its own pool, and holds them against the checksums, if it has any. With `nowait`, gives none for which it would have to be
    /// waited.
    ///
    /// # Errors
    /// As pread(2).
    pub fn read(&self, offset: u64, bytes: &mut [u8], nowait: bool) -> std::io::Result<Got> {
        self.read_checked(self.sums.as_deref(), offset, bytes, nowait)
    }

    /// The same for who holds the bytes against others: checksums say no more, but of what has to be inflated.
    pub(in crate::store) fn read_to_compare(
        &self,
        offset: u64,
        bytes: &mut [u8],
    ) -> std::io::Result<Got> {
        let sums = self.sums.as_deref().filter(|_| self.cells.is_some());
        self.read_checked(sums, offset, bytes, false)
    }

    fn read_checked(
        &self,
        sums: Option<&Checksums>,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> std::io::Result<Got> {
        match &self.file {
            Some(pool) => cells::read((pool, self.cells.as_deref(), sums), offset, bytes, nowait),
            None => {
                bytes.fill(0);
                Ok(Got::Bytes(bytes.len()))
            }
        }
    }

    /// How many bytes from the first on of a range of its own pool are stored. A hole in a pool reads as zeros, but may be what was given back of
    /// something else.
    ///
    /// # Errors
    /// As lseek(2).
    pub(in crate::store) fn stored(&self, range: ByteRange) -> std::io::Result<u64> {
        let Some(pool) = &self.file else { return Ok(0) };
        let mut at = range.start;
        while at < range.end {
            let cell = self.cells.as_ref().map(|cells| cells.cell_of(at));
            let (end, probe) = match cell {
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
