//! Finds the files of a layer: in its own directory, or in a pack.
//!
//! A pack holds the journal, checksums and remap of many sealed layers. The pool and the index of a
//! layer are always in its own directory.

use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::frames::LogBytes;
use crate::store::layer::info::Sidecars;
use crate::store::layer::{INDEX, JOURNAL, MAP, POOL, SUMS, dir_name};
use crate::store::pack::{PackedLayer, Packs};
use crate::types::LayerId;

/// The largest file that is read into memory as a whole, in bytes.
const IN_MEMORY: u64 = 4 << 20;

/// The layers of a store on disk.
pub struct Layers {
    /// The directory `layers`.
    pub(in crate::store) dir: StoreDir,
    /// The directory `packs`.
    pub(in crate::store) packs: Packs,
}

impl Layers {
    /// Opens the layers of a store, and calls `each` for each layer in a pack.
    ///
    /// # Errors
    /// As [`Packs::open`].
    pub(in crate::store) fn open(
        store: &StoreDir,
        each: &mut dyn FnMut(&PackedLayer),
    ) -> Result<Layers> {
        Ok(Layers { dir: store.dir("layers")?, packs: Packs::open(store, each)? })
    }

    /// The layers that have directories, in order.
    ///
    /// # Errors
    /// As readdir(3).
    pub(in crate::store) fn directories(&self) -> Result<Vec<LayerId>> {
        let mut ids = self.dir.list(|name| name.parse::<u32>().ok().filter(|_| name.len() == 8))?;
        ids.sort_unstable();
        Ok(ids.into_iter().map(LayerId).collect())
    }

    /// The directory of a layer.
    ///
    /// # Errors
    /// As open(2).
    pub(in crate::store) fn dir_of(&self, layer: LayerId) -> Result<StoreDir> {
        self.dir.dir(&dir_name(layer))
    }

    /// The bytes of a journal, checksums, a remap or an index; `None` if the layer has no such
    /// file.
    ///
    /// # Errors
    /// As open(2) and read(2), and damage of a pack.
    pub(in crate::store) fn read(&self, layer: LayerId, name: &str) -> Result<Option<Vec<u8>>> {
        if name != INDEX
            && let Some(packed) = self.packs.get(layer)?
        {
            return Ok(packed_file(packed, name));
        }
        self.dir_of(layer)?.read(name)
    }

    /// As [`Layers::read`], but a long file stays on disk and is read piece by piece.
    ///
    /// # Errors
    /// As [`Layers::read`].
    pub(in crate::store) fn open_log(
        &self,
        layer: LayerId,
        name: &str,
    ) -> Result<Option<LogBytes>> {
        if name != INDEX
            && let Some(packed) = self.packs.get(layer)?
        {
            return Ok(packed_file(packed, name).map(LogBytes::Memory));
        }
        let Some(file) = self.dir_of(layer)?.open_file(name)? else { return Ok(None) };
        let len = file.metadata().attempt(|| format!("stat {}", self.show(layer, name)))?.len();
        // 'jailfs check' holds the logs of all layers at once. It would reach RLIMIT_NOFILE if each
        // of them was an open file.
        if len <= IN_MEMORY {
            return Ok(self.read(layer, name)?.map(LogBytes::Memory));
        }
        Ok(Some(LogBytes::File(Arc::new(file), len)))
    }

    /// The path of a file of a layer, for messages.
    pub(in crate::store) fn show(&self, layer: LayerId, name: &str) -> String {
        match matches!(name, JOURNAL | SUMS | MAP) && self.packs.has(layer) {
            true => format!("the {name} of {}", self.packs.show(layer)),
            false => self.dir.path().join(dir_name(layer)).join(name).display().to_string(),
        }
    }

    /// The files that a layer has besides its journal.
    ///
    /// # Errors
    /// As fstatat(2), and damage of a pack.
    pub(in crate::store) fn sidecars(&self, layer: LayerId) -> Result<Sidecars> {
        match self.packs.get(layer)? {
            Some(packed) => self.packed_sidecars(&packed),
            None => {
                let dir = self.dir_of(layer)?;
                let (summed, mapped) = (dir.size(SUMS)?.is_some(), dir.size(MAP)?.is_some());
                Ok(Sidecars { summed, mapped, index: dir.size(INDEX)?, packed: false, hole: None })
            }
        }
    }

    /// The files that a layer in a pack has besides its journal.
    ///
    /// # Errors
    /// As fstatat(2).
    pub(in crate::store) fn packed_sidecars(&self, packed: &PackedLayer) -> Result<Sidecars> {
        // Most layers in packs have no directory.
        let index = match self.dir.size(&dir_name(packed.layer))? {
            Some(_) => self.dir_of(packed.layer)?.size(INDEX)?,
            None => None,
        };
        Ok(Sidecars {
            summed: true,
            mapped: packed.map.is_some(),
            index,
            packed: true,
            hole: packed.hole,
        })
    }

    /// Removes the files that an interrupted move into a pack left behind. `directories` are the
    /// layers that have directories.
    ///
    /// # Errors
    /// As unlink(2), and damage of a pack.
    pub(in crate::store) fn remove_leftovers(&self, directories: &[LayerId]) -> Result<()> {
        self.packs.remove_old()?;
        for layer in directories.iter().copied().filter(|layer| self.packs.has(*layer)) {
            let Some(packed) = self.packs.get(layer)? else { continue };
            let dir = self.dir_of(layer)?;
            let is_empty = packed.hole.is_some();
            let is_left = is_empty && (dir.size(POOL)?.is_some() || dir.size(INDEX)?.is_none());
            if is_left || dir.size(JOURNAL)?.is_some() {
                self.clear(layer, is_empty)?;
            }
        }
        Ok(())
    }

    /// Removes the files of a layer that a pack holds too; `with_pool`, the pool as well. Removes
    /// the directory if it is empty then.
    ///
    /// A power cut may bring the files back. That does no harm as long as the layer is in a pack.
    ///
    /// # Errors
    /// As unlink(2) and rmdir(2); the next start removes the rest.
    pub(in crate::store) fn clear(&self, layer: LayerId, with_pool: bool) -> Result<()> {
        let name = dir_name(layer);
        if self.dir.size(&name)?.is_none() {
            return Ok(());
        }
        let dir = self.dir_of(layer)?;
        for name in [MAP, SUMS, "map.new", "sums.new", "journal.new", "index.new"] {
            dir.remove(name)?;
        }
        if with_pool {
            dir.remove(POOL)?;
        }
        // Last: `remove_leftovers` takes a journal as the sign that files are left.
        dir.remove(JOURNAL)?;
        if with_pool && dir.size(INDEX)?.is_none() {
            disk::remove_dir(&self.dir, &name)
                .attempt(|| format!("remove {}", self.dir.show(&name)))?;
        }
        Ok(())
    }

    /// Makes sure that no power cut brings back a journal of layers that are about to leave their
    /// pack.
    ///
    /// # Errors
    /// As unlink(2) and fsync(2).
    pub(in crate::store) fn secure_removal(&self, layers: &[LayerId], durable: bool) -> Result<()> {
        for layer in layers {
            if self.dir.size(&dir_name(*layer))?.is_some() {
                let dir = self.dir_of(*layer)?;
                dir.remove(JOURNAL)?;
                if durable {
                    dir.sync()?;
                }
            }
        }
        if durable { self.dir.sync() } else { Ok(()) }
    }
}

/// A file of a layer that is in a pack.
fn packed_file(packed: PackedLayer, name: &str) -> Option<Vec<u8>> {
    match name {
        JOURNAL => Some(packed.journal),
        SUMS => packed.sums,
        MAP => packed.map,
        _ => None,
    }
}
