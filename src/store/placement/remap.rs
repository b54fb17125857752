//! Publishes the remaps of sealed layers, and knows which pools they point to.
//!
//! * The checksums of freed blocks are dropped after the remap is on disk and before the blocks are
//!   punched ([`Store::trim_checksums`]). So no block lacks its checksum because of a remap that
//!   was not published, and no punched block is verified against the checksum of its old bytes.
//! * If a rename or sync fails, it is unknown which remap is on disk. The layer is then
//!   *uncertain*, and no space is freed until the store is opened again: see
//!   [`Store::require_certain_remaps`].

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::Store;
use crate::store::archived::{ArchivedLayer, Change};
use crate::store::content::remap;
use crate::store::content::remap::Remap;
use crate::store::io::disk;
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::layer::files::Layers;
use crate::store::layer::{LayerInfo, MAP};
use crate::types::LayerId;

impl Store {
    /// Publishes the remap of a sealed layer. Later readers use it; a reader that uses an earlier
    /// one holds a [`crate::store::ReadGuard`].
    ///
    /// # Errors
    /// As the calls that publish a file; readers then go on with the earlier remap. If it is
    /// unknown which one is on disk, no space is freed any more, see
    /// [`Store::require_certain_remaps`].
    pub fn publish_remap(&self, layer: LayerId, remap: &Remap) -> Result<()> {
        self.publish_remaps(&[(layer, remap.clone())])
    }

    /// Publishes the remaps of many layers: one by one for layers with a directory, then all layers
    /// in the archive at once.
    ///
    /// # Errors
    /// As [`Store::publish_remap`]; some may be published then.
    pub fn publish_remaps(&self, remaps: &[(LayerId, Remap)]) -> Result<()> {
        let mut changes = Vec::new();
        for (layer, remap) in remaps {
            match self.layers.archived.get(*layer)? {
                Some(archived) => {
                    let is_empty = remap.runs().is_empty();
                    let map = if is_empty { None } else { Some(log::frames(remap.records())?) };
                    changes.push(Change::Put(ArchivedLayer { map, ..archived }));
                }
                None => self.publish_remap_file(*layer, remap)?,
            }
        }
        self.change_archive(changes)?;
        self.note_remap_targets(remaps.iter().map(|(_, remap)| remap));
        Ok(())
    }

    fn publish_remap_file(&self, layer: LayerId, remap: &Remap) -> Result<()> {
        let attempt = || format!("write the remap of layer {layer}");
        let dir = self.layers.dir_of(layer)?;
        let temp = format!("{MAP}.new");
        dir.remove(&temp)?;
        let is_empty = remap.runs().is_empty();
        if is_empty {
            self.state.lock().uncertain_remaps.insert(layer);
            dir.remove(MAP)?;
        } else {
            let mut log = Log::append_to(Arc::new(dir.file(&temp, true)?), dir.show(&temp), 0, 0)?;
            for record in remap.records() {
                log.append(&record)?;
            }
            if self.durable {
                log.sync()?;
            }
            self.state.lock().uncertain_remaps.insert(layer);
            disk::rename(&dir, &temp, MAP).attempt(attempt)?;
        }
        if self.durable {
            dir.sync()?;
        }
        let mut state = self.state.lock();
        state.uncertain_remaps.remove(&layer);
        state.catalog.update(layer, |info| info.mapped = !is_empty);
        state.invalidate_content(layer);
        Ok(())
    }

    /// Adds the targets of published remaps to those that [`Store::is_remap_target`] knows.
    fn note_remap_targets<'m>(&self, remaps: impl Iterator<Item = &'m Remap>) {
        if let Some(targets) = &mut self.state.lock().remap_targets {
            targets.extend(remaps.flat_map(|remap| remap.runs()).map(|run| run.layer));
        }
    }

    /// Fails if it is unknown of some layer which remap is on disk. Every caller that frees space
    /// calls this first: what one remap does not need, the other one may.
    ///
    /// # Errors
    /// When an earlier write of a remap failed halfway.
    pub fn require_certain_remaps(&self) -> Result<()> {
        match self.state.lock().uncertain_remaps.first() {
            None => Ok(()),
            Some(layer) => Err(Error::new(
                Kind::Failed,
                "free space",
                format!(
                    "writing the remap of layer {layer} failed, and it is unknown whether the old \
                     or the new one is on disk"
                ),
            )
            .hint("unmount and mount again")),
        }
    }

    /// Makes the remap file of a layer survive a power cut. The process that wrote it may have died
    /// before its sync.
    ///
    /// # Errors
    /// As fsync(2).
    pub fn sync_remap(&self, layer: LayerId) -> Result<()> {
        // The archive is synced before it is used.
        let is_file = |info: &LayerInfo| info.mapped && info.archived.is_none();
        let is_file = self.state.lock().catalog.get(&layer).is_some_and(is_file);
        if is_file && self.durable { self.layers.dir_of(layer)?.sync() } else { Ok(()) }
    }

    /// Whether a remap may point to the pool of a layer. The first call reads every remap; later
    /// ones use its result.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn is_remap_target(&self, layer: LayerId) -> Result<bool> {
        if let Some(targets) = &self.state.lock().remap_targets {
            return Ok(targets.contains(&layer));
        }
        // Only the thread that publishes remaps calls this, so none is published meanwhile.
        let mapped = self.catalog().into_iter().filter(|info| info.mapped);
        let mut targets = BTreeSet::new();
        for info in mapped {
            let remap = read_remap(&self.layers, info.header.layer)?.unwrap_or_default();
            targets.extend(remap.runs().iter().map(|run| run.layer));
        }
        let is_target = targets.contains(&layer);
        self.state.lock().remap_targets = Some(targets);
        Ok(is_target)
    }
}

/// Reads the remap of a layer. `None` if it has none.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn read_remap(layers: &Layers, layer: LayerId) -> Result<Option<Remap>> {
    layers.read(layer, MAP)?.map(|bytes| remap::parse(&bytes, &layers.show(layer, MAP))).transpose()
}
