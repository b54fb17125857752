//! The space that a store takes on disk, and how blocks of its pools are freed.

use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::content::pool::block_ceil;
use crate::store::dedup::chunks::CHUNKS;
use crate::store::io::disk;
use crate::store::layer::{INDEX, JOURNAL, LayerInfo, MAP, POOL, SUMS};
use crate::sys::file::data_in;
use crate::types::{ByteRange, LayerId};

impl Store {
    /// Bytes that the store takes on disk.
    pub fn disk_usage(&self) -> u64 {
        let chunks =
            self.dir.file(CHUNKS, false).and_then(|file| file.metadata().attempt(String::new));
        let (_, archive) = self.layers.archived.space();
        // The files are looked at without the lock on the catalog, so that no reader waits.
        let layers: u64 =
            self.with_directories().into_iter().map(|layer| self.layer_usage(layer)).sum();
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

    /// Frees ranges of the pool of a layer. Nothing may refer to them, now or later.
    ///
    /// # Errors
    /// As fallocate(2). A filesystem that cannot punch holes is no error; nothing is freed then.
    pub fn punch_pool(&self, layer: LayerId, ranges: &[ByteRange]) -> Result<()> {
        let Some(pool) = self.pool(layer)? else { return Ok(()) };
        let is_sealed = self.layer(layer).is_some_and(|info| info.seal.is_some());
        for range in ranges {
            // The kernel zeroes the last block of a file instead of freeing it, unless the range
            // covers the whole block.
            let end = if is_sealed { block_ceil(range.end) } else { range.end };
            match disk::punch(&pool, ByteRange { end, ..*range }) {
                Err(error) if error.raw_os_error() == Some(Errno::EOPNOTSUPP as i32) => {
                    return Ok(());
                }
                other => other.attempt(|| format!("free space in the pool of layer {layer}"))?,
            }
        }
        Ok(())
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
