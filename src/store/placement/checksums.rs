//! Writes and reads the checksums of sealed layers.

use std::sync::Arc;

use crate::error::{Attempt, Error, Result};
use crate::store::Store;
use crate::store::content::checksums;
use crate::store::content::checksums::Checksums;
use crate::store::content::remap::Remap;
use crate::store::io::disk;
use crate::store::io::log::Log;
use crate::store::layer::SUMS;
use crate::store::layer::files::Layers;
use crate::types::LayerId;

impl Store {
    /// Computes and publishes the checksums of a sealed pool, without the blocks that its remap
    /// freed.
    ///
    /// # Errors
    /// As pread(2) and the calls that publish a file; the layer then has no checksums.
    pub fn write_checksums(&self, layer: LayerId) -> Result<()> {
        let attempt = || format!("write the checksums of layer {layer}");
        let mut checksums = match self.pool(layer)? {
            Some(pool) => Checksums::of_pool(&pool, &self.pool_data(layer)?).attempt(attempt)?,
            None => Checksums::default(),
        };
        if let Some(remap) = self.remap(layer)? {
            checksums = checksums.without_blocks(&remap.freed_blocks()).with_remapped(&remap);
        }
        self.publish_checksums(layer, checksums)?;
        if self.durable { self.layers.dir_of(layer)?.sync() } else { Ok(()) }
    }

    /// Adapts the checksums of a sealed layer to its remap, which is on disk, before the freed
    /// blocks are punched: drops their checksums and lists the remapped addresses. Checksums that
    /// cannot be read stay as they are; no read is verified against them.
    ///
    /// # Errors
    /// As the calls that publish a file; the checksums are then the old or the new ones.
    pub fn trim_checksums(&self, layer: LayerId, remap: &Remap) -> Result<()> {
        if !self.layer(layer).is_some_and(|info| info.summed) {
            return Ok(());
        }
        let Ok(checksums) = read_checksums(&self.layers, layer) else { return Ok(()) };
        let trimmed = checksums.clone().without_blocks(&remap.freed_blocks()).with_remapped(remap);
        if trimmed == checksums {
            return Ok(());
        }
        self.publish_checksums(layer, trimmed)?;
        if self.durable { self.layers.dir_of(layer)?.sync() } else { Ok(()) }
    }

    fn publish_checksums(&self, layer: LayerId, checksums: Checksums) -> Result<()> {
        let attempt = || format!("write the checksums of layer {layer}");
        let dir = self.layers.dir_of(layer)?;
        let temp = format!("{SUMS}.new");
        dir.remove(&temp)?;
        let file = Arc::new(dir.file(&temp, true)?);
        let mut log = Log::append_to(file, dir.show(&temp), 0, 0)?;
        for record in checksums.into_records() {
            log.append(&record)?;
        }
        if self.durable {
            log.sync()?;
        }
        disk::rename(&dir, &temp, SUMS).attempt(attempt)?;
        let mut state = self.state.lock();
        state.catalog.update(layer, |info| info.summed = true);
        state.invalidate_content(layer);
        Ok(())
    }
}

/// Reads the checksums of a layer.
///
/// # Errors
/// Damage, with file and offset; also if the file is missing.
pub(in crate::store) fn read_checksums(layers: &Layers, layer: LayerId) -> Result<Checksums> {
    let what = layers.show(layer, SUMS);
    let missing = || Error::damage(format!("read {what}"), "the file is missing");
    checksums::parse(&layers.read(layer, SUMS)?.ok_or_else(missing)?, &what)
}
