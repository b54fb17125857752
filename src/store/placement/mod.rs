//! Places the content and the records of sealed layers: reads content wherever it is, publishes
//! checksums and remaps, and moves layers into the archive.
//!
//! * The cached [`Content`] of a layer says what the files of the layer say. It is invalidated
//!   under the lock of the catalog when one of the files is replaced. It is loaded without that
//!   lock, and again if it was invalidated meanwhile. So after [`Store::publish_remap`] returned,
//!   no reader finds an older remap.
//! * Moving content changes neither extents nor addresses. A state, an edit history and a reader
//!   all see the move at once.
//!
//! `content` and `archived` define the data. This folder is above `layer`, because publishing a
//! remap changes both the directory of a layer and the catalog.

pub mod archiving;
mod checksums;
mod remap;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::Store;
use crate::store::catalog::ContentVersion;
use crate::store::content::archived::ArchivedContent;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::content::pool::in_blocks;
use crate::store::content::remap::Remap;
use crate::store::content::{Bytes, Content, ReadOutcome};
use crate::store::layer::files::Layers;
use crate::store::layer::{LayerInfo, POOL};
use crate::sys::lock::{Rank, check_not_held};
use crate::types::{ByteRange, LayerId};

pub(in crate::store) use checksums::read_checksums;
pub(in crate::store) use remap::read_remap;

/// The content of a layer as its files have it.
struct Loaded {
    content: Content,
    /// Why its checksums could not be read.
    unverified: Option<Error>,
}

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

    /// The addresses of a layer that may take space and are not live.
    ///
    /// # Errors
    /// As fstat(2) and lseek(2), and damage of the archive.
    pub fn unused(&self, layer: LayerId, live: &LiveRanges) -> Result<Vec<ByteRange>> {
        if let Bytes::Archive(archived) = &self.content(layer)?.bytes {
            return Ok(archived.unused(&live.of(layer)));
        }
        Ok(live.unused(layer, &self.pool_space(layer)?))
    }

    /// The content of a layer. If its checksums cannot be read, logs a warning and leaves them out.
    ///
    /// # Errors
    /// As open(2), and damage of the remap.
    pub fn content(&self, layer: LayerId) -> Result<Arc<Content>> {
        self.content_by(layer, |info| self.load_content(layer, info))
    }

    fn content_by(
        &self,
        layer: LayerId,
        mut load: impl FnMut(Option<LayerInfo>) -> Result<Loaded>,
    ) -> Result<Arc<Content>> {
        loop {
            let (info, version) = {
                let mut state = self.state.lock();
                if let Some(cached) = state.cached_content(layer) {
                    return Ok(cached);
                }
                (state.catalog.get(&layer).cloned(), state.content_version(layer))
            };
            let loaded = load(info);
            let mut state = self.state.lock();
            // Another thread may have been faster.
            if let Some(cached) = state.cached_content(layer) {
                return Ok(cached);
            }
            if state.content_version(layer) == version {
                let Loaded { content, unverified } = loaded?;
                let content = Arc::new(content);
                state.cache_content(layer, Arc::clone(&content));
                drop(state);
                if let Some(error) = unverified {
                    ::log::warn!("{error}; reads of layer {layer} are not verified");
                }
                return Ok(content);
            }
        }
    }

    /// The content of a layer if it is cached.
    ///
    /// # Errors
    /// The present version of the content, if it is not cached.
    pub fn cached_content(
        &self,
        layer: LayerId,
    ) -> std::result::Result<Arc<Content>, ContentVersion> {
        let mut state = self.state.lock();
        state.cached_content(layer).ok_or_else(|| state.content_version(layer))
    }

    fn load_content(&self, layer: LayerId, info: Option<LayerInfo>) -> Result<Loaded> {
        check_not_held(Rank::Core);
        let info = info.ok_or_else(|| {
            Error::new(
                Kind::NoStore,
                format!("open the pool of layer {layer}"),
                "there is no such layer",
            )
        })?;
        let remap = if info.mapped { read_remap(&self.layers, layer)?.map(Arc::new) } else { None };
        if info.archived.is_some() {
            let archived = archived_content(&self.layers, layer)?.ok_or_else(|| {
                Error::damage(format!("read layer {layer}"), "it is not in the archive")
            })?;
            let content = Content { bytes: Bytes::Archive(archived), checksums: None, remap };
            return Ok(Loaded { content, unverified: None });
        }
        let pool = Arc::new(self.layers.dir_of(layer)?.file(POOL, false)?);
        let (checksums, unverified) = match info.summed.then(|| read_checksums(&self.layers, layer))
        {
            None => (None, None),
            Some(Ok(checksums)) => (Some(Arc::new(checksums)), None),
            Some(Err(error)) => (None, Some(error)),
        };
        let content = Content { bytes: Bytes::Pool(pool), checksums, remap };
        Ok(Loaded { content, unverified })
    }

    /// The pool of a layer. `None` if the layer is in the archive.
    ///
    /// # Errors
    /// As [`Store::content`].
    pub fn pool(&self, layer: LayerId) -> Result<Option<Arc<File>>> {
        Ok(self.content(layer)?.pool().cloned())
    }

    /// The end of the addresses of a layer.
    ///
    /// # Errors
    /// As [`Store::content`] and fstat(2).
    pub fn pool_end(&self, layer: LayerId) -> Result<u64> {
        self.content(layer)?.end().attempt(|| format!("stat the pool of layer {layer}"))
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
            let got = match source.read_to_compare(range.offset, part).attempt(attempt)? {
                ReadOutcome::Bytes(got) => got,
                ReadOutcome::WouldBlock | ReadOutcome::Damaged(_) => 0,
            };
            done += got;
            if got < part.len() {
                break;
            }
        }
        Ok(done)
    }

    /// How many bytes of content of a layer are its own, and how many are remapped. `None` if there
    /// is no such layer.
    ///
    /// # Errors
    /// As [`Store::content`] and lseek(2).
    pub fn content_space(&self, layer: LayerId) -> Result<Option<(u64, u64)>> {
        if self.layer(layer).is_none() {
            return Ok(None);
        }
        let remapped = read_remap(&self.layers, layer)?.map_or(0, |remap| remap.bytes());
        match self.stored_ranges(layer) {
            Ok(data) => Ok(Some((data.iter().map(ByteRange::len).sum(), remapped))),
            // gc may have removed the layer meanwhile.
            Err(_) if self.layer(layer).is_none() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The addresses of a layer that take space.
    fn stored_ranges(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        match &self.content(layer)?.bytes {
            Bytes::Archive(archived) => Ok(archived.stored()),
            Bytes::Pool(_) => self.pool_data(layer),
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

/// The content of a layer in the archive. `None` for other layers.
///
/// # Errors
/// Damage of the archive.
pub(in crate::store) fn archived_content(
    layers: &Layers,
    layer: LayerId,
) -> Result<Option<ArchivedContent>> {
    let (Some(archive), Some(found)) = (layers.archived.archive(), layers.archived.get(layer)?)
    else {
        return Ok(None);
    };
    let content = ArchivedContent::new(layer, Arc::clone(archive), found.end, found.content);
    let damage = || {
        let attempt = format!("read {}", layers.show(layer, POOL));
        Error::damage(attempt, "its ranges and its chunks do not have the same length")
    };
    content.map(Some).ok_or_else(damage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;
    use crate::store::content::remap::Run;
    use crate::store::record::LayerKind;
    use crate::types::Epoch;

    #[test]
    fn no_reader_finds_an_older_remap_after_a_newer_one_was_published() {
        let place = tempfile::tempdir().unwrap();
        let options = StoreOptions { volatile: true, ..StoreOptions::default() };
        let store = Store::create(&place.path().join("store"), b"/base", (1, 1), options).unwrap();
        let layer = store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap();
        let layer = layer.layer();
        let publish = |end: u64| {
            let mut remap = Remap::default();
            remap.push(Run { start: 0, end, layer: LayerId(7), offset: 0 });
            store.publish_remap(layer, &remap).unwrap();
        };
        publish(1);
        let mut loads = 0;
        let content = store.content_by(layer, |info| {
            loads += 1;
            let loaded = store.load_content(layer, info);
            match loads {
                1 => publish(2),
                // For example, the layer has moved into the archive.
                2 => {
                    publish(3);
                    return Err(Error::damage("read a file of the layer", "it is gone"));
                }
                _ => {}
            }
            loaded
        });
        let [loaded, cached] = [content.unwrap(), store.content(layer).unwrap()];
        assert_eq!((loads, loaded.remap.as_ref().map(|remap| remap.bytes())), (3, Some(3)));
        assert!(Arc::ptr_eq(&loaded, &cached));
    }
}
