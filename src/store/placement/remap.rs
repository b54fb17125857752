//! Publishes where the content of sealed layers is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::Store;
use crate::store::content::checksums;
use crate::store::content::remap;
use crate::store::content::remap::Map;
use crate::store::io::disk;
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::layer::files::Layers;
use crate::store::layer::{LayerInfo, MAP, SUMS};
use crate::store::pack::{Change, Packed};
use crate::types::LayerId;

impl Store {
    /// Says what of the content of a sealed layer is elsewhere. When this returns, nobody finds out by the map before where
    /// bytes are; who did so earlier holds a [`crate::store::ReadGuard`].
    ///
    /// # Errors
    /// As the calls it is made of; the map before goes on being used. If it is not known which one is on the disk, nothing is
    /// given back any more, see [`Store::require_no_doubt`].
    pub fn publish_remap(&self, layer: LayerId, map: &Map) -> Result<()> {
        self.publish_remaps(&[(layer, map.clone())])
    }

    /// The same for many layers, one after the other; those that are in packs at once, as the last.
    ///
    /// # Errors
    /// As [`Store::publish_remap`]; some may be published then.
    pub fn publish_remaps(&self, maps: &[(LayerId, Map)]) -> Result<()> {
        let mut packed = Vec::new();
        for (layer, map) in maps {
            match self.layers.packs.get(*layer)? {
                Some(known) => packed.push(Change::Put(self.with_remap(known, map)?)),
                None => self.publish_map_file(*layer, map)?,
            }
        }
        self.publish_packed(packed, BTreeMap::new())?;
        self.note_homes(maps.iter().map(|(_, map)| map));
        Ok(())
    }

    /// What a layer in a pack is with another map: what a block held that was given up must not be held against what is left of it.
    pub(in crate::store) fn with_remap(&self, packed: Packed, map: &Map) -> Result<Packed> {
        let layer = packed.layer;
        let sums = match &packed.sums {
            None => None,
            Some(bytes) => {
                let sums = checksums::parse(bytes, &self.layers.show(layer, SUMS))?;
                Some(log::frames(sums.without(&map.given_up()).into_records())?)
            }
        };
        let map = if map.runs().is_empty() { None } else { Some(log::frames(map.records())?) };
        Ok(Packed { map, sums, ..packed })
    }

    fn publish_map_file(&self, layer: LayerId, map: &Map) -> Result<()> {
        let attempt = || format!("write the map of layer {layer}");
        let dir = self.layers.dir_of(layer)?;
        let temp = format!("{MAP}.new");
        dir.remove(&temp)?;
        // First, and for good: what a block held that was given up must not be held against what is left of it.
        self.thin_checksums(layer, map)?;
        if map.runs().is_empty() {
            self.state.lock().doubtful.insert(layer);
            dir.remove(MAP)?;
        } else {
            let mut log = Log::append_to(Arc::new(dir.file(&temp, true)?), dir.show(&temp), 0, 0)?;
            for record in map.records() {
                log.append(&record)?;
            }
            if self.durable {
                log.sync()?;
            }
            self.state.lock().doubtful.insert(layer);
            disk::rename(&dir, &temp, MAP).attempt(attempt)?;
        }
        if self.durable {
            dir.sync()?;
        }
        let mut state = self.state.lock();
        state.doubtful.remove(&layer);
        state.contents.remove(&layer);
        if let Some(info) = state.catalog.get_mut(&layer) {
            info.mapped = !map.runs().is_empty();
        }
        Ok(())
    }

    /// Notes where maps lead to that were published.
    pub(in crate::store) fn note_homes<'m>(&self, maps: impl Iterator<Item = &'m Map>) {
        if let Some(homes) = &mut self.state.lock().homes {
            homes.extend(maps.flat_map(|map| map.runs()).map(|run| run.layer));
        }
    }

    /// Makes sure that it is known of every layer where its content is: who gives space back needs that.
    ///
    /// # Errors
    /// When a map could not be written and may be on the disk all the same.
    pub fn require_no_doubt(&self) -> Result<()> {
        match self.state.lock().doubtful.first() {
            None => Ok(()),
            Some(layer) => Err(Error::new(
                Kind::Failed,
                "give space back",
                format!(
                    "a write of the map of layer {layer} failed, and it may be on the disk or not"
                ),
            )
            .hint("unmount and mount again")),
        }
    }

    /// Makes the map of a layer that was found at the start survive a power cut: who wrote it may not have come so far.
    ///
    /// # Errors
    /// As fsync(2).
    pub fn settle_remap(&self, layer: LayerId) -> Result<()> {
        // Packs are only used when they survive one.
        let is_file = |info: &LayerInfo| info.mapped && !info.packed;
        let is_file = self.state.lock().catalog.get(&layer).is_some_and(is_file);
        if is_file && self.durable { self.layers.dir_of(layer)?.sync() } else { Ok(()) }
    }

    /// Whether the map of another layer, or its own, may lead to the pool of a layer. Reads every map once.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn is_home(&self, layer: LayerId) -> Result<bool> {
        if let Some(homes) = &self.state.lock().homes {
            return Ok(homes.contains(&layer));
        }
        // Maps are published by one thread at a time, the one that asks.
        let mapped = self.catalog().into_iter().filter(|info| info.mapped);
        let mut homes = BTreeSet::new();
        for info in mapped {
            let map = read_remap(&self.layers, info.header.layer)?.unwrap_or_default();
            homes.extend(map.runs().iter().map(|run| run.layer));
        }
        let is_home = homes.contains(&layer);
        self.state.lock().homes = Some(homes);
        Ok(is_home)
    }
}

/// Reads the map of a layer; none if it has none.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn read_remap(layers: &Layers, layer: LayerId) -> Result<Option<Map>> {
    layers.read(layer, MAP)?.map(|bytes| remap::parse(&bytes, &layers.show(layer, MAP))).transpose()
}
