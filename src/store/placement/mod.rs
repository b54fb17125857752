//! Where the content and the records of sealed layers are, and how they move.

mod checksums;
mod gather;
pub mod packing;
mod remap;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::content::Content;
use crate::store::content::cells::{Cells, Got};
use crate::store::content::checksums::Checksums;
use crate::store::content::live_ranges::{LiveRanges, in_blocks};
use crate::store::content::remap::Map;
use crate::store::io::log;
use crate::store::layer::files::Layers;
use crate::store::layer::{JOURNAL, LayerInfo, POOL};
use crate::store::record::{LayerKind, Record};
use crate::store::{State, Store};
use crate::types::{ByteRange, LayerId};

pub(in crate::store) use checksums::read_checksums;
pub(in crate::store) use remap::read_remap;

/// Bytes of checksums and maps that are kept in memory; then it begins anew.
const KEPT: usize = 64 << 20;

impl Store {
    /// Where all of it is on disk.
    ///
    /// # Errors
    /// Damage of a map.
    pub fn locate(&self, ranges: &LiveRanges) -> Result<LiveRanges> {
        let mut places = LiveRanges::default();
        for (layer, ranges) in ranges.pools() {
            match self.map(*layer)? {
                None => ranges.iter().for_each(|range| places.add_range(*layer, *range)),
                // As much as stays of a map.
                Some(map) => {
                    let ranges = ranges.iter().copied().map(in_blocks);
                    for place in ranges.flat_map(|range| map.places(*layer, range)) {
                        places.add_range(place.layer, ByteRange::at(place.offset, place.len));
                    }
                }
            }
        }
        Ok(places)
    }

    /// What of the pool of a layer takes space and is not used.
    ///
    /// # Errors
    /// As lseek(2), and damage of what says how it is stored.
    pub fn unused(&self, layer: LayerId, used: &LiveRanges) -> Result<Vec<ByteRange>> {
        let data = self.pool_data(layer)?;
        if data.is_empty() {
            return Ok(data);
        }
        Ok(used.unused(layer, &data, self.content(layer)?.cells.as_deref()))
    }

    /// The content of a layer. Checksums that cannot be read are none, and the log says so.
    ///
    /// # Errors
    /// As open(2), and damage of the map.
    pub fn content(&self, layer: LayerId) -> Result<Arc<Content>> {
        let mut state = self.state.lock();
        if let Some(known) = state.contents.get(&layer) {
            return Ok(known);
        }
        let content = Arc::new(self.load_content(&state, layer)?);
        if state.contents.values().map(Content::weight).sum::<usize>() > KEPT {
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
        let file = match info.hole {
            None => Some(Arc::new(self.layers.dir_of(layer)?.file(POOL, false)?)),
            Some(_) => None,
        };
        let map: Option<Arc<Map>> =
            if info.mapped { read_remap(&self.layers, layer)?.map(Arc::new) } else { None };
        let has_sums = info.summed && file.is_some();
        // Of what lingers no file says any more how it is stored.
        let (sums, cells) = match state.lingering.get(&layer) {
            Some(known) => (Some(Arc::clone(&known.sums)), known.cells.clone()),
            None => {
                let cells = if file.is_some() { read_cells(&self.layers, info)? } else { None };
                (has_sums.then(|| self.load_sums(layer)).flatten(), cells.map(Arc::new))
            }
        };
        Ok(Content { file, sums, map, cells })
    }

    fn load_sums(&self, layer: LayerId) -> Option<Arc<Checksums>> {
        match read_checksums(&self.layers, layer) {
            Ok(sums) => Some(Arc::new(sums)),
            Err(error) => {
                ::log::warn!(
                    "{error}; the content of layer {layer} is served without being checked"
                );
                None
            }
        }
    }

    /// The pool of a layer; none if it has none because all of its content is elsewhere.
    ///
    /// # Errors
    /// As [`Store::content`].
    pub fn pool(&self, layer: LayerId) -> Result<Option<Arc<File>>> {
        Ok(self.content(layer)?.file.clone())
    }

    /// Where the addresses of a layer end.
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

    /// What of the content of a layer is elsewhere; none also for a layer that is not there.
    ///
    /// # Errors
    /// As [`Store::content`].
    pub fn map(&self, layer: LayerId) -> Result<Option<Arc<Map>>> {
        match self.layer(layer) {
            Some(info) if info.mapped => Ok(self.content(layer)?.map.clone()),
            _ => Ok(None),
        }
    }

    /// Reads bytes at addresses of a layer, wherever they are; fewer at the end of a pool, and before a block that is not as it was written.
    /// Hold a [`super::ReadGuard`], or see afterwards whether [`Store::sweeps`] is what it was.
    ///
    /// # Errors
    /// As [`Store::content`] and pread(2).
    pub fn read_at(&self, layer: LayerId, offset: u64, bytes: &mut [u8]) -> Result<usize> {
        let attempt = || format!("read the content of layer {layer}");
        let content = self.content(layer)?;
        let mut done = 0;
        for place in content.places(layer, ByteRange::at(offset, bytes.len() as u64)) {
            let other = if place.layer == layer { None } else { Some(self.content(place.layer)?) };
            let of = other.as_ref().unwrap_or(&content);
            let end = done + usize::try_from(place.len).unwrap_or(usize::MAX);
            let Some(part) = bytes.get_mut(done..end) else { break };
            let got = match of.file {
                Some(_) => match of.read_to_compare(place.offset, part).attempt(attempt)? {
                    Got::Bytes(got) => got,
                    Got::NotNow | Got::Damaged(_) => 0,
                },
                None => {
                    let left = self.pool_end(place.layer)?.saturating_sub(place.offset);
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

    /// How many bytes of content of a layer are in its own pool, and how many elsewhere; none for a layer that is not there.
    ///
    /// # Errors
    /// As [`Store::content`] and lseek(2).
    pub fn content_space(&self, layer: LayerId) -> Result<Option<(u64, u64)>> {
        let Some(info) = self.layer(layer) else { return Ok(None) };
        let shared = read_remap(&self.layers, layer)?.map_or(0, |map| map.bytes());
        match self.pool_data(layer) {
            Ok(data) => Ok(Some((data.iter().map(ByteRange::len).sum(), shared))),
            // It may have gone meanwhile.
            Err(_) if self.layer(info.header.layer).is_none() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Notes that content to which a state may have referred is about to be given back: what was found equal before may not be
    /// there any more.
    pub fn note_sweep(&self) {
        self.sweeps.fetch_add(1, Ordering::SeqCst);
    }

    /// How often something was given back.
    pub fn sweeps(&self) -> u64 {
        self.sweeps.load(Ordering::SeqCst)
    }
}

/// How the content of a layer is deflated, if it is.
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
        .ok_or_else(|| damage("nothing says how its pool is stored"))?;
    let records = log::read::<Record>(&bytes, &what)?.records;
    let lens = records.into_iter().find_map(|(record, _)| match record {
        Record::Cells(lens) => Some(lens),
        _ => None,
    });
    let too_long = || damage("a cell takes more than it holds");
    lens.map(|lens| Cells::new(lens).ok_or_else(too_long)).transpose()
}
