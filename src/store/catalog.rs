//! The layers of an open store: the catalog, and how layers are created, reopened and sealed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::content::Content;
use crate::store::indexed_catalog::{Catalog, Unsettled};
use crate::store::io::disk;
use crate::store::io::lru_cache::LruCache;
use crate::store::layer::info::Sidecars;
use crate::store::layer::journal;
use crate::store::layer::{JOURNAL, LayerContents, LayerInfo, POOL, Upper};
use crate::store::record::{Header, LayerKind, Seal};
use crate::sys::clock;
use crate::types::{Epoch, LayerId, Timestamp};

/// Layers whose pools are kept open. Few in tests, so that content is often loaded again.
const OPEN_POOLS: usize = if cfg!(test) { 2 } else { 128 };

/// Cached checksums and remaps may take this many bytes. Beyond that the cache is emptied.
const CACHE_BYTES: usize = 64 << 20;

/// A version of the content of a layer. Content that was loaded counts as long as the version is
/// the one from before the load. `None` if there is no such layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentVersion(Option<u64>);

/// The layers of an open store.
pub(in crate::store) struct State {
    pub catalog: Catalog,
    contents: LruCache<LayerId, Content>,
    /// How many times content was invalidated.
    invalidations: u64,
    /// The number of the last one of each layer of the catalog; none if there was none.
    invalidated: BTreeMap<LayerId, u64>,
    /// Layers whose pools remaps point to. `None` before the first use.
    pub remap_targets: Option<BTreeSet<LayerId>>,
    /// Layers of which it is unknown whether the old or the new remap is on disk.
    pub uncertain_remaps: BTreeSet<LayerId>,
    /// The number of the next new layer.
    pub next_layer: u32,
}

impl State {
    /// The state of a store that was just opened.
    pub fn new(catalog: BTreeMap<LayerId, LayerInfo>, next_layer: u32) -> State {
        State {
            catalog: catalog.into(),
            contents: LruCache::new(OPEN_POOLS),
            invalidations: 0,
            invalidated: BTreeMap::new(),
            remap_targets: None,
            uncertain_remaps: BTreeSet::new(),
            next_layer,
        }
    }

    /// The content of a layer, if it is cached.
    pub fn cached_content(&mut self, layer: LayerId) -> Option<Arc<Content>> {
        self.contents.get(&layer)
    }

    /// Caches the content of a layer. If much is cached already, drops that.
    pub fn cache_content(&mut self, layer: LayerId, content: Arc<Content>) {
        if self.contents.values().map(Content::memory).sum::<usize>() > CACHE_BYTES {
            self.contents.clear();
        }
        self.contents.insert(layer, content);
    }

    /// Drops the cached content of a layer, because its files were replaced, moved or removed. The
    /// catalog has the new entry of the layer already, or none.
    pub fn invalidate_content(&mut self, layer: LayerId) {
        self.contents.remove(&layer);
        self.invalidations += 1;
        if self.catalog.get(&layer).is_some() {
            self.invalidated.insert(layer, self.invalidations);
        } else {
            self.invalidated.remove(&layer);
        }
    }

    /// The present version of the content of a layer.
    pub fn content_version(&self, layer: LayerId) -> ContentVersion {
        let invalidated = self.invalidated.get(&layer).copied().unwrap_or_default();
        ContentVersion(self.catalog.get(&layer).map(|_| invalidated))
    }
}

impl Store {
    /// The catalog entry of a layer.
    pub fn layer(&self, id: LayerId) -> Option<LayerInfo> {
        self.state.lock().catalog.get(&id).cloned()
    }

    /// All layers, oldest first.
    pub fn catalog(&self) -> Vec<LayerInfo> {
        self.state.lock().catalog.values().cloned().collect()
    }

    /// The number of layers.
    pub fn layer_count(&self) -> u64 {
        self.state.lock().catalog.len() as u64
    }

    /// The layers that `is_meant` accepts, oldest first. `is_meant` runs under the lock of the
    /// catalog and must take no lock.
    pub fn layers_where(&self, is_meant: impl Fn(&LayerInfo) -> bool) -> Vec<LayerInfo> {
        self.state.lock().catalog.values().filter(|info| is_meant(info)).cloned().collect()
    }

    /// This layer and all newer ones, oldest first.
    pub fn layers_from(&self, first: LayerId) -> Vec<LayerInfo> {
        self.state.lock().catalog.range(first..).map(|(_, info)| info.clone()).collect()
    }

    /// The newest layer.
    pub fn newest_layer(&self) -> Option<LayerId> {
        self.state.lock().catalog.last_key_value().map(|(layer, _)| *layer)
    }

    /// The layers that are not settled in this way, oldest first.
    pub fn unsettled(&self, which: Unsettled) -> Vec<LayerInfo> {
        self.state.lock().catalog.unsettled(which).cloned().collect()
    }

    /// The number of listed checkpoints, and the time of the last seal among them.
    pub fn listed(&self) -> (usize, Option<Timestamp>) {
        self.state.lock().catalog.listed()
    }

    /// The layers that have a name, oldest first.
    pub fn layers_named(&self, name: &str) -> Vec<LayerInfo> {
        self.state.lock().catalog.named(name).cloned().collect()
    }

    /// Calls `look` with each layer, oldest first. `look` runs under the lock of the catalog and
    /// must take no lock.
    pub fn for_each_layer(&self, look: impl FnMut(&LayerInfo)) {
        self.state.lock().catalog.values().for_each(look);
    }

    /// The newest layer that continues `top` for this head. There is one if a process ended after
    /// it created the layer and before it published the head.
    pub fn continued(&self, head: &str, top: LayerId) -> Option<LayerId> {
        let state = self.state.lock();
        let mut above = state.catalog.values().filter(|l| {
            l.header.parent == Some(top)
                && l.header.kind == LayerKind::Continues
                && self.is_of(l, head)
        });
        above.next_back().map(|l| l.header.layer)
    }

    /// Reads the journal of a layer.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn read_layer(&self, id: LayerId) -> Result<LayerContents> {
        journal::read(&self.layers, id, &self.trust)
    }

    /// Creates a layer.
    ///
    /// # Errors
    /// As [`Upper::create`]; the number of the layer stays used.
    pub fn create_layer(
        &self,
        parent: Option<LayerId>,
        head: &str,
        epoch: Epoch,
        kind: LayerKind,
    ) -> Result<Upper> {
        let layer = {
            let mut state = self.state.lock();
            let id = state.next_layer;
            state.next_layer += 1;
            LayerId(id)
        };
        let header =
            Header { layer, parent, head: head.to_owned(), epoch, kind, time: clock::now() };
        let upper =
            Upper::create(&self.layers.dir, header.clone(), &self.failed_syncs, self.durable)
                .map_err(|e| e.during(format!("create layer {layer}")))?;
        let info = LayerInfo::new(header, None, false, upper.journal_len(), Sidecars::default());
        let content = Arc::new(Content::of_upper(Arc::clone(upper.pool.file())));
        let mut state = self.state.lock();
        state.catalog.insert(layer, info);
        state.cache_content(layer, content);
        Ok(upper)
    }

    /// Opens a layer for appending after its journal was read.
    ///
    /// # Errors
    /// As [`Upper::reopen`].
    pub fn reopen_layer(&self, contents: &LayerContents) -> Result<Upper> {
        let upper = Upper::reopen(&self.layers.dir, contents, &self.failed_syncs, self.durable)?;
        self.trust.failed.lock().remove(&upper.layer());
        let content = Content::of_upper(Arc::clone(upper.pool.file()));
        self.state.lock().cache_content(upper.layer(), Arc::new(content));
        Ok(upper)
    }

    /// Closes the pool of a layer that no open head writes to. The next reader opens it again.
    pub fn close_pool(&self, layer: LayerId) {
        self.state.lock().invalidate_content(layer);
    }

    /// Syncs the pool and the journal of a layer.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync_layer(&self, layer: LayerId) -> Result<()> {
        // A layer was synced before it went into the archive.
        if !self.durable || self.layers.archived.has(layer) {
            return Ok(());
        }
        let dir = self.layers.dir_of(layer)?;
        for name in [POOL, JOURNAL] {
            disk::sync(&dir.file(name, false)?).attempt(|| format!("sync {}", dir.show(name)))?;
        }
        Ok(())
    }

    /// Seals a layer. This is the only way in which a layer that was written is sealed.
    ///
    /// # Errors
    /// As pwrite(2) and fdatasync(2). The layer is then not sealed, and the caller can try again.
    pub fn seal_layer(&self, upper: &mut Upper, seal: Seal) -> Result<()> {
        let layer = upper.layer();
        let bytes = upper.seal(seal.clone(), &|| self.release_reserve());
        self.keep_reserve();
        let bytes = bytes?;
        self.state.lock().catalog.update(layer, |info| {
            info.seal = Some(Arc::new(seal));
            info.bytes = bytes;
        });
        self.note_sealed(vec![layer]);
        Ok(())
    }
}
