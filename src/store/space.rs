//! The space that a store takes on disk, and how blocks of its pools are freed.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use nix::errno::Errno;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::content::pool::block_ceil;
use crate::store::dedup::chunks::CHUNKS;
use crate::store::io::disk;
use crate::store::layer::{INDEX, JOURNAL, LayerInfo, MAP, POOL, SUMS};
use crate::sys::file::data_in;
use crate::sys::lock::{Rank, check_not_held};
use crate::types::{ByteRange, LayerId};

/// The most bytes that a filesystem takes for its own lists of the blocks of a small file.
const OWN_BLOCKS: u64 = 64 << 10;

/// Bytes that a file takes on disk.
fn allocated_bytes(file: &File) -> std::io::Result<u64> {
    Ok(file.metadata()?.blocks() * 512)
}

/// Bytes of data in ranges of a file.
fn data_bytes(file: &File, ranges: &[ByteRange]) -> std::io::Result<u64> {
    ranges.iter().try_fold(0, |sum, range| {
        Ok(sum + data_in(file, *range)?.iter().map(ByteRange::len).sum::<u64>())
    })
}

impl Store {
    /// Bytes that the store takes on disk. It looks at files of each layer.
    pub fn disk_usage(&self) -> u64 {
        check_not_held(Rank::Core);
        // The files are looked at without the lock on the catalog, so that no reader waits.
        let layers: u64 =
            self.with_directories().into_iter().map(|layer| self.layer_usage(layer)).sum();
        // Last, so that a layer that moves there meanwhile counts twice rather than not at all.
        let (_, archive) = self.layers.archived.space();
        let chunks =
            self.dir.file(CHUNKS, false).and_then(|file| file.metadata().attempt(String::new));
        layers + archive + chunks.map_or(0, |about| about.blocks() * 512)
    }

    /// The layers that have directories.
    fn with_directories(&self) -> Vec<LayerId> {
        let state = self.state.lock();
        let has_dir = |info: &&LayerInfo| info.archived.is_none() || info.index.is_some();
        state.catalog.values().filter(has_dir).map(|info| info.header.layer).collect()
    }

    /// Bytes that the directory of a layer takes on disk.
    pub fn layer_usage(&self, layer: LayerId) -> u64 {
        let Ok(dir) = self.layers.dir_of(layer) else { return 0 };
        [POOL, JOURNAL, INDEX, SUMS, MAP]
            .iter()
            .filter_map(|name| Some(dir.file(name, false).ok()?.metadata().ok()?.blocks() * 512))
            .sum()
    }

    /// Frees ranges of the pool of a layer. Nothing may refer to them, now or later. Returns the
    /// bytes.
    ///
    /// # Errors
    /// As fallocate(2), fstat(2) and lseek(2). A filesystem that cannot punch holes is no error;
    /// nothing is freed then.
    pub fn punch_pool(&self, layer: LayerId, ranges: &[ByteRange]) -> Result<u64> {
        let Some(pool) = self.pool(layer)? else { return Ok(0) };
        let attempt = || format!("free space in the pool of layer {layer}");
        let is_sealed = self.layer(layer).is_some_and(|info| info.seal.is_some());
        let data = data_bytes(&pool, ranges).attempt(attempt)?;
        let allocated = allocated_bytes(&pool).attempt(attempt)?;
        for range in ranges {
            // The kernel zeroes the last block of a file instead of freeing it, unless the range
            // covers the whole block.
            let end = if is_sealed { block_ceil(range.end) } else { range.end };
            match disk::punch(&pool, ByteRange { end, ..*range }) {
                Err(error) if error.raw_os_error() == Some(Errno::EOPNOTSUPP as i32) => {
                    return Ok(0);
                }
                other => other.attempt(attempt)?,
            }
        }
        // Of holes in the ranges, only the number of blocks tells whether they took space.
        let freed = allocated.saturating_sub(allocated_bytes(&pool).attempt(attempt)?);
        let most = ranges.iter().map(ByteRange::len).sum();
        let freed = freed.min(most).max(data);
        if freed > 0 {
            self.note_free();
        }
        Ok(freed)
    }

    /// Counts that files of the store became smaller, or were removed.
    pub(in crate::store) fn note_free(&self) {
        self.frees.fetch_add(1, Ordering::Relaxed);
    }

    /// How often files of the store became smaller, or were removed, since the store was opened. A
    /// measurement of the store that began before may count that space as taken.
    pub fn frees(&self) -> u64 {
        self.frees.load(Ordering::Relaxed)
    }

    /// The ranges of a pool that may take space on disk: its data, and also its holes if some of
    /// them have blocks.
    ///
    /// # Errors
    /// As fstat(2) and lseek(2).
    pub fn pool_space(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        let data = self.pool_data(layer)?;
        let Some(pool) = self.pool(layer)? else { return Ok(data) };
        let allocated =
            allocated_bytes(&pool).attempt(|| format!("stat the pool of layer {layer}"))?;
        let bytes: u64 = data.iter().map(ByteRange::len).sum();
        // A filesystem counts blocks of its own, too, so a small difference means nothing.
        match allocated > bytes + bytes / 64 + OWN_BLOCKS {
            true => Ok(vec![ByteRange { start: 0, end: self.pool_end(layer)? }]),
            false => Ok(data),
        }
    }

    /// Bytes of data in ranges of a layer's addresses.
    ///
    /// # Errors
    /// As lseek(2).
    pub fn data_bytes(&self, layer: LayerId, ranges: &[ByteRange]) -> Result<u64> {
        match self.pool(layer)? {
            Some(pool) => {
                data_bytes(&pool, ranges).attempt(|| format!("read the pool of layer {layer}"))
            }
            None => Ok(ranges.iter().map(ByteRange::len).sum()),
        }
    }

    /// The ranges of the pool of a layer that take space on disk, in whole blocks of the
    /// filesystem.
    ///
    /// # Errors
    /// As lseek(2).
    pub fn pool_data(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        let Some(pool) = self.pool(layer)? else { return Ok(Vec::new()) };
        data_in(&*pool, ByteRange { start: 0, end: u64::MAX })
            .attempt(|| format!("read the pool of layer {layer}"))
    }
}
