//! Places the content and the records of sealed layers: reads content wherever it is, publishes
//! checksums and remaps, moves small layers into packs, and gathers their content.
//!
//! * The cached [`Content`] of a layer says what the files of the layer say. It is loaded under the
//!   lock of the catalog and dropped under that lock when one of the files is replaced. So after
//!   [`Store::publish_remap`] returned, no reader finds an older remap.
//! * Moving content changes remaps, never extents. A state, an edit history and a reader all see
//!   the move at once.
//!
//! `content` and `pack` define the data. This folder is above `layer`, because publishing a remap
//! changes both the directory of a layer and the catalog.

mod checksums;
mod gather;
pub mod packing;
mod remap;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::Store;
use crate::store::catalog::State;
use crate::store::content::Content;
use crate::store::content::cells::{Cells, ReadOutcome};
use crate::store::content::checksums::Checksums;
use crate::store::content::live_ranges::{LiveRanges, in_blocks};
use crate::store::content::remap::Remap;
use crate::store::io::log;
use crate::store::layer::files::Layers;
use crate::store::layer::{JOURNAL, LayerInfo, POOL};
use crate::store::record::{LayerKind, Record};
use crate::types::{ByteRange, LayerId};

pub(in crate::store) use checksums::read_checksums;
pub(in crate::store) use remap::read_remap;

/// Cached checksums and remaps may take this many bytes. Beyond that the cache is emptied.
const CACHE_BYTES: usize = 64 << 20;

impl Store {
    /// Translates ranges of addresses into ranges of pools.
    ///
    /// # Errors
    /// Damage of a remap.
    pub fn locate(&self, addresses: &LiveRanges) -> Result<LiveRanges> {
        let mut located = LiveRanges::default();
        for (layer, ranges) in addresses.by_layer() {
            match self.remap(*layer)? {
                None => ranges.iter().for_each(|range| located.add_range(*layer, *range)),
                // In whole blocks, as `Remap::restricted_to` keeps them.
                Some(remap) => {
                    let ranges = ranges.iter().copied().map(in_blocks);
                    for range in ranges.flat_map(|range| remap.locate(*layer, range)) {
                        located.add_range(range.layer, ByteRange::at(range.offset, range.len));
                    }
                }
            }
        }
        Ok(located)
    }

    /// The ranges of the pool of a layer that take space and are not live.
    ///
    /// # Errors
    /// As lseek(2), and damage of the journal of a gathered layer.
    pub fn unused(&self, layer: LayerId, live: &LiveRanges) -> Result<Vec<ByteRange>> {
        let data = self.pool_data(layer)?;
        if data.is_empty() {
            return Ok(data);
        }
        Ok(live.unused(layer, &data, self.content(layer)?.cells.as_deref()))
    }

    /// The content of a layer. If its checksums cannot be read, logs a warning and leaves them out.
    ///
    /// # Errors
    /// As open(2), and damage of the remap.
    pub fn content(&self, layer: LayerId) -> Result<Arc<Content>> {
        let mut state = self.state.lock();
        if let Some(cached) = state.contents.get(&layer) {
            return Ok(cached);
        }
        let content = Arc::new(self.load_content(&state, layer)?);
        if state.contents.values().map(Content::memory).sum::<usize>() > CACHE_BYTES {
            state.contents.clear();
        }
        state.contents.insert(layer, Arc::clone(&content));
        Ok(content)
    }

    fn load_content(&self, state: &State, layer: LayerId) -> Result<Content> {
        let info = state.catalog.get(&layer).ok_or_else(|| {
            Error::new(
                Kind::NoStore,
                format!("open the pool of layer {layer}"),
                "there is no such layer",
            )
        })?;
        let pool = match info.hole {
            None => Some(Arc::new(self.layers.dir_of(layer)?.file(POOL, false)?)),
            Some(_) => None,
        };
        let remap = if info.mapped { read_remap(&self.layers, layer)?.map(Arc::new) } else { None };
        let has_checksums = info.summed && pool.is_some();
        // No file says any more how the pool of a retiring layer is stored.
        let (checksums, cells) = match state.retiring.get(&layer) {
            Some(known) => (Some(Arc::clone(&known.checksums)), known.cells.clone()),
            None => {
                let cells = if pool.is_some() { read_cells(&self.layers, info)? } else { None };
                let checksums = has_checksums.then(|| self.load_checksums(layer)).flatten();
                (checksums, cells.map(Arc::new))
            }
        };
        Ok(Content { pool, checksums, remap, cells })
    }

    fn load_checksums(&self, layer: LayerId) -> Option<Arc<Checksums>> {
        match read_checksums(&self.layers, layer) {
            Ok(checksums) => Some(Arc::new(checksums)),
            Err(error) => {
                ::log::warn!("{error}; reads of layer {layer} are not verified");
                None
            }
        }
    }

    /// The pool of a layer. `None` if the pool was removed because all content is in other pools.
    ///
    /// # Errors
    /// As [`Store::content`].
    pub fn pool(&self, layer: LayerId) -> Result<Option<Arc<File>>> {
        Ok(self.content(layer)?.pool.clone())
    }

    /// The end of the addresses of a layer.
    ///
    /// # Errors
    /// As [`Store::content`] and fstat(2).
    pub fn pool_end(&self, layer: LayerId) -> Result<u64> {
        match (self.pool(layer)?, self.layer(layer).and_then(|info| info.hole)) {
            (Some(pool), _) => {
                Ok(pool.metadata().attempt(|| format!("stat the pool of layer {layer}"))?.len())
            }
            (None, end) => Ok(end.unwrap_or(0)),
        }
    }

    /// The remap of a layer. `None` if it has none, or if there is no such layer.
    ///
    /// # Errors
    /// As [`Store::content`].
    pub fn remap(&self, layer: LayerId) -> Result<Option<Arc<Remap>>> {
        match self.layer(layer) {
            Some(info) if info.mapped => Ok(self.content(layer)?.remap.clone()),
            _ => Ok(None),
        }
    }

    /// Reads bytes at addresses of a layer, through its remap, for comparison with other bytes.
    /// Returns how many bytes were read: less than asked for at the end of a pool, and before a
    /// damaged block. The caller holds a [`super::ReadGuard`], or checks afterwards that
    /// [`Store::sweeps`] has not changed.
    ///
    /// # Errors
    /// As [`Store::content`] and pread(2).
    pub fn read_at(&self, layer: LayerId, offset: u64, bytes: &mut [u8]) -> Result<usize> {
        let attempt = || format!("read the content of layer {layer}");
        let content = self.content(layer)?;
        let mut done = 0;
        for range in content.locate(layer, ByteRange::at(offset, bytes.len() as u64)) {
            let other = if range.layer == layer { None } else { Some(self.content(range.layer)?) };
            let source = other.as_ref().unwrap_or(&content);
            let end = done + usize::try_from(range.len).unwrap_or(usize::MAX);
            let Some(part) = bytes.get_mut(done..end) else { break };
            let got = match source.pool {
                Some(_) => match source.read_to_compare(range.offset, part).attempt(attempt)? {
                    ReadOutcome::Bytes(got) => got,
                    ReadOutcome::WouldBlock | ReadOutcome::Damaged(_) => 0,
                },
                None => {
                    let left = self.pool_end(range.layer)?.saturating_sub(range.offset);
                    let zeros = usize::try_from(left).unwrap_or(usize::MAX).min(part.len());
                    part.iter_mut().take(zeros).for_each(|byte| *byte = 0);
                    zeros
                }
            };
            done += got;
            if got < part.len() {
                break;
            }
        }
        Ok(done)
    }

    /// How many bytes of content of a layer are in its own pool, and how many are remapped. `None`
    /// if there is no such layer.
    ///
    /// # Errors
    /// As [`Store::content`] and lseek(2).
    pub fn content_space(&self, layer: LayerId) -> Result<Option<(u64, u64)>> {
        let Some(info) = self.layer(layer) else { return Ok(None) };
        let remapped = read_remap(&self.layers, layer)?.map_or(0, |remap| remap.bytes());
        match self.pool_data(layer) {
            Ok(data) => Ok(Some((data.iter().map(ByteRange::len).sum(), remapped))),
            // gc may have removed the layer meanwhile.
            Err(_) if self.layer(info.header.layer).is_none() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Counts a sweep: content that a state may have referred to is about to be punched. Matches
    /// that were found before may then be gone.
    pub fn note_sweep(&self) {
        self.sweeps.fetch_add(1, Ordering::SeqCst);
    }

    /// How many sweeps there were since the store was opened.
    pub fn sweeps(&self) -> u64 {
        self.sweeps.load(Ordering::SeqCst)
    }
}

/// How the pool of a gathered layer is deflated. `None` for other layers.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn read_cells(layers: &Layers, info: &LayerInfo) -> Result<Option<Cells>> {
    if info.header.kind != LayerKind::Gathered {
        return Ok(None);
    }
    let layer = info.header.layer;
    let what = layers.show(layer, JOURNAL);
    let damage = |why: &str| Error::damage(format!("read {what}"), why);
    let bytes = layers
        .read(layer, JOURNAL)?
        .ok_or_else(|| damage("the journal, which says how the pool is deflated, is missing"))?;
    let records = log::read::<Record>(&bytes, &what)?.records;
    let lens = records.into_iter().find_map(|(record, _)| match record {
        Record::Cells(lens) => Some(lens),
        _ => None,
    });
    let too_long = || damage("a deflated cell is longer than a cell");
    lens.map(|lens| Cells::new(lens).ok_or_else(too_long)).transpose()
}
