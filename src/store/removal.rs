//! Removes layers.
//!
//! Always true:
//! * The ledger records the removal, synced, before a sealed layer goes.
//! * The journal is the first file to go. A directory without a journal is no layer, and the next
//!   removal takes the rest of it.

use std::collections::BTreeSet;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::io::disk;
use crate::store::layer;
use crate::store::layer::{INDEX, JOURNAL, MAP, POOL, SUMS};
use crate::types::LayerId;

impl Store {
    /// Removes a layer with its pool. Nothing may refer to it.
    ///
    /// # Errors
    /// As unlink(2), rmdir(2) and fsync(2); the next removal takes the rest.
    pub fn remove_layer(&self, layer: LayerId) -> Result<()> {
        self.remove_layers(&[layer])
    }

    /// Removes layers with their pools. Nothing may refer to them.
    ///
    /// # Errors
    /// As [`Store::remove_layer`].
    pub fn remove_layers(&self, layers: &[LayerId]) -> Result<()> {
        self.note_gone(layers)?;
        self.remove_from_archive(layers)?;
        layers.iter().try_for_each(|layer| self.remove_directory(*layer))
    }

    /// Removes a layer to which nothing leads, as [`Store::remove_layer`]. If it is the newest one,
    /// its empty directory stays, so that its number is not used again.
    ///
    /// # Errors
    /// As [`Store::remove_layer`].
    pub fn remove_unused(&self, layer: LayerId) -> Result<()> {
        if layer.0 + 1 < self.next_layer().0 {
            return self.remove_layer(layer);
        }
        self.note_gone(&[layer])?;
        self.remove_files(layer)
    }

    pub(in crate::store) fn remove_directory(&self, layer: LayerId) -> Result<()> {
        let name = layer::dir_name(layer);
        let exists = self.layers.dir.size(&name)?.is_some();
        self.remove_files(layer)?;
        let what = || format!("remove {}", self.layers.dir.show(&name));
        if exists { disk::remove_dir(&self.layers.dir, &name).attempt(what) } else { Ok(()) }
    }

    fn remove_files(&self, layer: LayerId) -> Result<()> {
        if self.layers.dir.size(&layer::dir_name(layer))?.is_some() {
            let dir = self.layers.dir_of(layer)?;
            for file in
                [JOURNAL, POOL, INDEX, SUMS, MAP, "journal.new", "index.new", "sums.new", "map.new"]
            {
                dir.remove(file)?;
            }
        }
        let mut state = self.state.lock();
        state.catalog.remove(layer);
        state.invalidate_content(layer);
        drop(state);
        self.note_free();
        Ok(())
    }

    /// Removes a layer that was just created and that nothing refers to. No start finds it any
    /// more, even after a power cut.
    ///
    /// # Errors
    /// As unlink(2) and fsync(2); a start may then find the layer.
    pub fn withdraw_layer(&self, layer: LayerId) -> Result<()> {
        let dir = self.layers.dir_of(layer)?;
        dir.remove(JOURNAL)?;
        if self.durable {
            dir.sync()?;
        }
        if let Err(error) = self.remove_layer(layer) {
            self.state.lock().catalog.remove(layer);
            log::warn!("{error}; gc removes it");
        }
        Ok(())
    }

    /// Removes directories that are no layers: the process that created or removed the layer ended
    /// before it was done.
    ///
    /// The directory with the highest number stays, so that no number is used twice.
    ///
    /// # Errors
    /// As [`Store::remove_layer`].
    pub fn remove_incomplete_layers(&self) -> Result<()> {
        let known: BTreeSet<LayerId> = self.state.lock().catalog.keys().copied().collect();
        let newest = known.last().copied().unwrap_or(LayerId(0));
        let directories = self.layers.directories()?;
        let is_incomplete = |layer: &LayerId| *layer < newest && !known.contains(layer);
        directories.into_iter().filter(is_incomplete).try_for_each(|layer| self.remove_layer(layer))
    }
}
