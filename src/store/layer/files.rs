//! Finds the files of a layer: in its own directory, or in the archive.
//!
//! The archive holds the journal, remap and content of sealed layers. An index is always in the
//! directory of its layer.

use std::sync::Arc;

use crate::error::{Attempt, Result};
use crate::store::archived::{ARCHIVE, ArchivedLayer, ArchivedLayers};
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::frames::LogBytes;
use crate::store::layer::info::Sidecars;
use crate::store::layer::{INDEX, JOURNAL, MAP, POOL, SUMS, dir_name};
use crate::types::LayerId;

/// The largest file that is read into memory as a whole, in bytes.
const IN_MEMORY: u64 = 4 << 20;

/// The layers of a store on disk.
pub struct Layers {
    /// The directory `layers`.
    pub(in crate::store) dir: StoreDir,
    /// The directory `archive`.
    pub(in crate::store) archived: ArchivedLayers,
}

impl Layers {
    /// Opens the layers of a store, and calls `each` for each layer in the archive.
    ///
    /// # Errors
    /// As [`ArchivedLayers::open`].
    pub(in crate::store) fn open(
        store: &StoreDir,
        durable: bool,
        each: &mut dyn FnMut(ArchivedLayer),
    ) -> Result<Layers> {
        let dir = store.dir("layers")?;
        Ok(Layers { dir, archived: ArchivedLayers::open(store, durable, each)? })
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
    /// As open(2) and read(2), and damage of the archive.
    pub(in crate::store) fn read(&self, layer: LayerId, name: &str) -> Result<Option<Vec<u8>>> {
        self.look_up(layer, name, |archived| file_of(archived, name), |dir| dir.read(name))
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
        let in_archive = |archived| file_of(archived, name).map(LogBytes::Memory);
        let in_directory = |dir: StoreDir| {
            let Some(file) = dir.open_file(name)? else { return Ok(None) };
            let len = file.metadata().attempt(|| format!("stat {}", dir.show(name)))?.len();
            // 'jailfs check' holds the logs of all layers at once. It would reach RLIMIT_NOFILE if
            // each of them was an open file.
            if len <= IN_MEMORY {
                return Ok(dir.read(name)?.map(LogBytes::Memory));
            }
            Ok(Some(LogBytes::File(Arc::new(file), len)))
        };
        self.look_up(layer, name, in_archive, in_directory)
    }

    /// Looks for a file of a layer in the archive, and then in the directory of the layer. The
    /// archive never has an index.
    ///
    /// If the layer moves into the archive between the two, its files vanish one after the other.
    /// So the archive is asked again.
    fn look_up<T>(
        &self,
        layer: LayerId,
        name: &str,
        in_archive: impl Fn(ArchivedLayer) -> T,
        in_directory: impl FnOnce(StoreDir) -> Result<T>,
    ) -> Result<T> {
        if name == INDEX {
            return self.dir_of(layer).and_then(in_directory);
        }
        if let Some(archived) = self.archived.get(layer)? {
            return Ok(in_archive(archived));
        }
        let found = self.dir_of(layer).and_then(in_directory);
        match self.archived.get(layer)? {
            Some(archived) => Ok(in_archive(archived)),
            None => found,
        }
    }

    /// The path of a file of a layer, for messages.
    pub(in crate::store) fn show(&self, layer: LayerId, name: &str) -> String {
        match name != INDEX && self.archived.has(layer) {
            true => {
                let archive = self.dir.path().with_file_name(ARCHIVE);
                format!("the {name} of layer {layer} in {}", archive.display())
            }
            false => self.dir.path().join(dir_name(layer)).join(name).display().to_string(),
        }
    }

    /// The files that a layer has besides its journal.
    ///
    /// # Errors
    /// As fstatat(2), and damage of the archive.
    pub(in crate::store) fn sidecars(&self, layer: LayerId) -> Result<Sidecars> {
        let index = self.index_size(layer)?;
        let in_archive = |archived| sidecars_in_archive(&archived, index);
        self.look_up(layer, JOURNAL, in_archive, |dir| {
            let (summed, mapped) = (dir.size(SUMS)?.is_some(), dir.size(MAP)?.is_some());
            Ok(Sidecars { summed, mapped, index, archived: None })
        })
    }

    /// The files that a layer in the archive has besides its journal.
    ///
    /// # Errors
    /// As fstatat(2).
    pub(in crate::store) fn sidecars_of(&self, archived: &ArchivedLayer) -> Result<Sidecars> {
        Ok(sidecars_in_archive(archived, self.index_size(archived.layer)?))
    }

    /// Bytes of the index of a layer; `None` if it has none. Most layers in the archive have no
    /// directory.
    fn index_size(&self, layer: LayerId) -> Result<Option<u64>> {
        self.dir.size(&format!("{}/{INDEX}", dir_name(layer)))
    }

    /// Removes the files that an interrupted move into the archive left behind. `directories` are
    /// the layers that have directories.
    ///
    /// # Errors
    /// As readdir(3) and unlink(2).
    pub(in crate::store) fn remove_leftovers(&self, directories: &[LayerId]) -> Result<()> {
        self.archived.remove_leftovers()?;
        let moved = directories.iter().copied().filter(|layer| self.archived.has(*layer));
        for layer in moved {
            let dir = self.dir_of(layer)?;
            if dir.size(JOURNAL)?.is_some() || dir.size(INDEX)?.is_none() {
                self.clear(layer)?;
            }
        }
        Ok(())
    }

    /// Removes the files of a layer that is in the archive, except its index. Removes the directory
    /// if it is empty then.
    ///
    /// A power cut may bring the files back. That does no harm as long as the layer is in the
    /// archive.
    ///
    /// # Errors
    /// As unlink(2) and rmdir(2); the next start removes the rest.
    pub(in crate::store) fn clear(&self, layer: LayerId) -> Result<()> {
        let name = dir_name(layer);
        if self.dir.size(&name)?.is_none() {
            return Ok(());
        }
        let dir = self.dir_of(layer)?;
        for name in [POOL, MAP, SUMS, "map.new", "sums.new", "journal.new", "index.new"] {
            dir.remove(name)?;
        }
        // Last: `remove_leftovers` takes a journal as the sign that files are left.
        dir.remove(JOURNAL)?;
        if dir.size(INDEX)?.is_none() {
            disk::remove_dir(&self.dir, &name)
                .attempt(|| format!("remove {}", self.dir.show(&name)))?;
        }
        Ok(())
    }

    /// Makes sure that no power cut brings back a journal of layers that are about to leave the
    /// archive.
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

/// A file of a layer that is in the archive.
fn file_of(archived: ArchivedLayer, name: &str) -> Option<Vec<u8>> {
    match name {
        JOURNAL => Some(archived.journal),
        MAP => archived.map,
        _ => None,
    }
}

fn sidecars_in_archive(archived: &ArchivedLayer, index: Option<u64>) -> Sidecars {
    let (mapped, end) = (archived.map.is_some(), archived.end);
    Sidecars { summed: true, mapped, index, archived: Some(end) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::archived::{Change, StoredContent};

    fn archive(layers: &Layers, store: &StoreDir, layer: LayerId) {
        let (journal, content) = (b"archived".to_vec(), StoredContent::default());
        let change = Change::Put(ArchivedLayer { layer, end: 9, journal, map: None, content });
        let mut writer = layers.archived.made(store, false).unwrap().writer();
        let mut published = layers.archived.publish(&mut writer, &[change], 9).unwrap();
        layers.archived.adopt(&mut published);
        layers.clear(layer).unwrap();
    }

    #[test]
    fn a_layer_that_moves_into_the_archive_while_its_files_are_read_is_read_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = StoreDir::open(dir.path()).unwrap();
        store.make_dir("layers").unwrap();
        let layers = Layers::open(&store, false, &mut |_| ()).unwrap();
        let layer = LayerId(7);
        let directory = layers.dir.make_dir(&dir_name(layer)).unwrap();
        directory.publish(JOURNAL, b"plain", false).unwrap();
        assert_eq!(layers.read(layer, JOURNAL).unwrap().as_deref(), Some(b"plain".as_slice()));
        let in_archive = |archived| file_of(archived, JOURNAL);
        let found = layers.look_up(layer, JOURNAL, in_archive, |dir| {
            archive(&layers, &store, layer);
            dir.read(JOURNAL)
        });
        assert_eq!(found.unwrap().as_deref(), Some(b"archived".as_slice()));
    }
}
