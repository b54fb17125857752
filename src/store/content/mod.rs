//! The content of one layer: its pool or its chunks, the checksums of the pool, and the remap.
//!
//! * A [`Content`] says what the files of its layer say. [`crate::store::Store::content`] loads it
//!   again if one of the files is replaced meanwhile. So no reader combines an old remap with
//!   checksums that were trimmed for a newer one.
//! * This folder only knows bytes and addresses. Files of layers and the archive are read and
//!   published by [`crate::store::placement`].

pub mod archived;
pub mod checksums;
pub mod fresh;
pub mod live_ranges;
pub mod pool;
pub mod range_set;
pub(in crate::store) mod read_epochs;
pub mod remap;
pub(in crate::store) mod unsynced;

use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::store::content::archived::ArchivedContent;
use crate::store::content::checksums::Checksums;
use crate::store::content::remap::{PoolRange, Remap};
use crate::store::io::disk;
use crate::sys;
use crate::types::{ByteRange, LayerId};

/// The outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The number of bytes that were read; less than asked for only at the end of the addresses.
    Bytes(usize),
    /// The read would have to wait for a disk or decompress a frame, and the caller did not allow
    /// it.
    WouldBlock,
    /// The block or the chunk at this address is not what it was.
    Damaged(u64),
}

/// Where the bytes of a layer are.
#[derive(Debug)]
pub enum Bytes {
    /// In its pool, each at its address.
    Pool(Arc<File>),
    /// In the archive.
    Archive(ArchivedContent),
}

/// The content of a layer.
#[derive(Debug)]
pub struct Content {
    /// Where its bytes are.
    pub bytes: Bytes,
    /// Checksums of the pool. `None` before the layer is sealed, where they cannot be read, and in
    /// the archive, which has its own.
    pub checksums: Option<Arc<Checksums>>,
    /// Which addresses are stored in other layers. `None` if none are.
    pub remap: Option<Arc<Remap>>,
}

impl Content {
    /// The content of the upper layer, which has neither checksums nor a remap yet.
    pub(in crate::store) fn of_upper(pool: Arc<File>) -> Content {
        Content { bytes: Bytes::Pool(pool), checksums: None, remap: None }
    }

    /// The pool. `None` if the layer is in the archive.
    pub fn pool(&self) -> Option<&Arc<File>> {
        match &self.bytes {
            Bytes::Pool(pool) => Some(pool),
            Bytes::Archive(_) => None,
        }
    }

    /// The end of the addresses.
    ///
    /// # Errors
    /// As fstat(2).
    pub(in crate::store) fn end(&self) -> io::Result<u64> {
        match &self.bytes {
            Bytes::Pool(pool) => Ok(pool.metadata()?.len()),
            Bytes::Archive(archived) => Ok(archived.end()),
        }
    }

    /// Approximate size in memory, in bytes.
    pub(in crate::store) fn memory(&self) -> usize {
        let archived = match &self.bytes {
            Bytes::Pool(_) => 0,
            Bytes::Archive(archived) => archived.memory(),
        };
        self.checksums.as_ref().map_or(0, |checksums| checksums.len() * 4)
            + self.remap.as_ref().map_or(0, |remap| size_of_val(remap.runs()))
            + archived
    }

    /// Translates a range of addresses into ranges of layers, in order and without gaps. `layer` is
    /// the layer of this content.
    pub fn locate(&self, layer: LayerId, range: ByteRange) -> Vec<PoolRange> {
        match &self.remap {
            None => vec![PoolRange { layer, offset: range.start, len: range.len() }],
            Some(remap) => remap.locate(layer, range),
        }
    }

    /// Reads its own bytes and verifies them, if there is anything to verify them with. With
    /// `nowait`, returns [`ReadOutcome::WouldBlock`] instead of waiting.
    ///
    /// # Errors
    /// As pread(2).
    pub fn read(&self, offset: u64, bytes: &mut [u8], nowait: bool) -> io::Result<ReadOutcome> {
        self.read_checked(self.checksums.as_deref(), offset, bytes, nowait)
    }

    /// Reads bytes that the caller compares with other bytes. A comparison finds damage by itself,
    /// so the checksums of a pool are not verified.
    pub(in crate::store) fn read_to_compare(
        &self,
        offset: u64,
        bytes: &mut [u8],
    ) -> io::Result<ReadOutcome> {
        self.read_checked(None, offset, bytes, false)
    }

    fn read_checked(
        &self,
        checksums: Option<&Checksums>,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> io::Result<ReadOutcome> {
        match &self.bytes {
            Bytes::Pool(pool) => read_pool(pool, checksums, offset, bytes, nowait),
            Bytes::Archive(archived) => archived.read(offset, bytes, nowait),
        }
    }

    /// How many bytes at the start of a range of its own addresses are stored: the bytes before the
    /// first hole. A hole reads as zeros, but may be space that was punched, so deduplication must
    /// not refer to it.
    ///
    /// # Errors
    /// As lseek(2).
    pub(in crate::store) fn stored_len(&self, range: ByteRange) -> io::Result<u64> {
        let hole = match &self.bytes {
            Bytes::Archive(archived) => archived.next_hole(range.start),
            Bytes::Pool(pool) => match sys::file::seek_data(&**pool, range.start)? {
                Some(data) if data == range.start => {
                    sys::file::seek_hole(&**pool, range.start)?.unwrap_or(range.start)
                }
                _ => range.start,
            },
        };
        Ok(hole.min(range.end) - range.start)
    }
}

/// Reads bytes of a pool, and verifies them.
fn read_pool(
    pool: &File,
    checksums: Option<&Checksums>,
    at: u64,
    bytes: &mut [u8],
    nowait: bool,
) -> io::Result<ReadOutcome> {
    let got = if nowait {
        match sys::file::pread_nowait(pool, bytes, at)? {
            // A short read may mean that the rest is not in the page cache.
            Some(got) if got == bytes.len() => got,
            _ => return Ok(ReadOutcome::WouldBlock),
        }
    } else {
        disk::read_at(pool, bytes, at)?
    };
    // Verify also what is missing: a block with a checksum behind the end means a truncated pool.
    bytes.get_mut(got..).unwrap_or_default().fill(0);
    let damaged = checksums.map_or(Ok(None), |checksums| checksums.verify(pool, at, bytes))?;
    Ok(damaged.map_or(ReadOutcome::Bytes(got), ReadOutcome::Damaged))
}
