//! Where the files of the layers are: each layer's in a directory of its own, or, but for its pool and its index, in a pack.

use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::frames::LogBytes;
use crate::store::layer::{INDEX, JOURNAL, MAP, POOL, SUMS, dir_name};
use crate::store::pack::{PackedLayer, Packs};
use crate::types::LayerId;

/// Bytes of a file that is held in memory as a whole, at most.
const IN_MEMORY: u64 = 4 << 20;

/// The layers of a store on disk.
pub struct Layers {
    /// `layers`.
    pub(in crate::store) dir: StoreDir,
    /// `packs`.
    pub(in crate::store) packs: Packs,
}

/// What a layer has besides its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store) struct Besides {
    /// Whether the content in its pool has checksums, or there is none.
    pub summed: bool,
    /// Whether it has a map.
    pub mapped: bool,
    /// Bytes of its index, if it has one.
    pub index: Option<u64>,
    /// Whether it is in a pack.
    pub packed: bool,
    /// Where its addresses end, if it has no pool.
    pub hole: Option<u64>,
}

impl Layers {
    /// The layers of a store.
    ///
    /// # Errors
    /// As [`Packs::open`].
    pub(in crate::store) fn open(
        store: &StoreDir,
        each: &mut dyn FnMut(&PackedLayer),
    ) -> Result<Layers> {
        Ok(Layers { dir: store.dir("layers")?, packs: Packs::open(store, each)? })
    }

    /// The numbers of the directories, in order.
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

    /// The bytes of a journal, checksums, a map or an index; none if the layer has no such file.
    ///
    /// # Errors
    /// As open(2), and damage of a pack.
    pub(in crate::store) fn read(&self, layer: LayerId, name: &str) -> Result<Option<Vec<u8>>> {
        if name != INDEX
            && let Some(packed) = self.packs.get(layer)?
        {
            return Ok(of_packed(packed, name));
        }
        self.dir_of(layer)?.read(name)
    }

    /// The same, without holding a long file in memory: its bytes are read when they are looked at.
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
            return Ok(of_packed(packed, name).map(LogBytes::Memory));
        }
        let Some(file) = self.dir_of(layer)?.open_file(name)? else { return Ok(None) };
        let len = file.metadata().attempt(|| format!("stat {}", self.show(layer, name)))?.len();
        // A check has the logs of all layers at once, and only so many files can be open.
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

    /// What a layer has besides its records.
    ///
    /// # Errors
    /// As fstatat(2), and damage of a pack.
    pub(in crate::store) fn besides(&self, layer: LayerId) -> Result<Besides> {
        match self.packs.get(layer)? {
            Some(packed) => self.besides_packed(&packed),
            None => {
                let dir = self.dir_of(layer)?;
                let (summed, mapped) = (dir.size(SUMS)?.is_some(), dir.size(MAP)?.is_some());
                Ok(Besides { summed, mapped, index: dir.size(INDEX)?, packed: false, hole: None })
            }
        }
    }

    /// The same of a layer that is in a pack.
    ///
    /// # Errors
    /// As fstatat(2).
    pub(in crate::store) fn besides_packed(&self, packed: &PackedLayer) -> Result<Besides> {
        // Most have no directory.
        let index = match self.dir.size(&dir_name(packed.layer))? {
            Some(_) => self.dir_of(packed.layer)?.size(INDEX)?,
            None => None,
        };
        Ok(Besides {
            summed: true,
            mapped: packed.map.is_some(),
            index,
            packed: true,
            hole: packed.hole,
        })
    }

    /// Removes from the directories of layers that are in packs what a step that was cut off left there.
    ///
    /// # Errors
    /// As unlink(2), and damage of a pack.
    pub(in crate::store) fn remove_left(&self, directories: &[LayerId]) -> Result<()> {
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

    /// Takes out of the directory of a layer what a pack has of it, and the pool if it is not needed; and the directory, if nothing
    /// else is in it. A power cut may bring it back, which does not matter as long as the layer is in a pack.
    ///
    /// # Errors
    /// As the calls it is made of; what is left is removed at the next start.
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
        // The last: as long as it is there, somebody finds that there is something to remove.
        dir.remove(JOURNAL)?;
        if with_pool && dir.size(INDEX)?.is_none() {
            disk::remove_dir(&self.dir, &name)
                .attempt(|| format!("remove {}", self.dir.show(&name)))?;
        }
        Ok(())
    }

    /// Makes sure that no directory of these layers, which are in packs, comes back with a journal: they are about to be in none.
    ///
    /// # Errors
    /// As the calls it is made of.
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
fn of_packed(packed: PackedLayer, name: &str) -> Option<Vec<u8>> {
    match name {
        JOURNAL => Some(packed.journal),
        SUMS => packed.sums,
        MAP => packed.map,
        _ => None,
    }
}
