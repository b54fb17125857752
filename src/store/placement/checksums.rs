//! Writes and reads the checksums of sealed layers.

use std::sync::Arc;

use crate::error::{Attempt, Error, Result};
use crate::store::Store;
use crate::store::content::checksums;
use crate::store::content::checksums::Checksums;
use crate::store::content::remap::Map;
use crate::store::io::disk;
use crate::store::io::log::Log;
use crate::store::layer::SUMS;
use crate::store::layer::files::Layers;
use crate::types::LayerId;

impl Store {
    /// Makes the checksums of a sealed pool, but for blocks that its map gave up.
    ///
    /// # Errors
    /// As the calls it is made of; there are none then.
    pub fn write_checksums(&self, layer: LayerId) -> Result<()> {
        let attempt = || format!("write the checksums of layer {layer}");
        let mut sums = match self.pool(layer)? {
            Some(pool) => Checksums::of_pool(&pool, &self.pool_data(layer)?).attempt(attempt)?,
            None => Checksums::default(),
        };
        if let Some(map) = self.map(layer)? {
            sums = sums.without(&map.given_up()).with_remap(&map);
        }
        self.publish_sums(layer, sums)?;
        if self.durable { self.layers.dir_of(layer)?.sync() } else { Ok(()) }
    }

    /// Takes the checksums of blocks that a map is about to give up out of those of a sealed pool, and notes in them what is elsewhere by
    /// the map; for the next sync of its directory. Such as cannot be read stay as they are: nothing is held against them.
    ///
    /// # Errors
    /// As the calls it is made of; they are as before then, or as they are to be.
    pub(in crate::store) fn thin_checksums(&self, layer: LayerId, map: &Map) -> Result<()> {
        if !self.layer(layer).is_some_and(|info| info.summed) {
            return Ok(());
        }
        let Ok(sums) = read_checksums(&self.layers, layer) else { return Ok(()) };
        let rest = sums.clone().without(&map.given_up()).with_remap(map);
        if rest == sums {
            return Ok(());
        }
        self.publish_sums(layer, rest)
    }

    fn publish_sums(&self, layer: LayerId, sums: Checksums) -> Result<()> {
        let attempt = || format!("write the checksums of layer {layer}");
        let dir = self.layers.dir_of(layer)?;
        let temp = format!("{SUMS}.new");
        dir.remove(&temp)?;
        let file = Arc::new(dir.file(&temp, true)?);
        let mut log = Log::append_to(file, dir.show(&temp), 0, 0)?;
        for record in sums.into_records() {
            log.append(&record)?;
        }
        if self.durable {
            log.sync()?;
        }
        disk::rename(&dir, &temp, SUMS).attempt(attempt)?;
        let mut state = self.state.lock();
        state.contents.remove(&layer);
        if let Some(info) = state.catalog.get_mut(&layer) {
            info.summed = true;
        }
        Ok(())
    }
}

/// Reads the checksums of a layer.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn read_checksums(layers: &Layers, layer: LayerId) -> Result<Checksums> {
    let what = layers.show(layer, SUMS);
    let missing = || Error::damage(format!("read {what}"), "the file is missing");
    checksums::parse(&layers.read(layer, SUMS)?.ok_or_else(missing)?, &what)
}
