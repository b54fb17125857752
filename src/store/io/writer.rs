//! Identifies the page cache that took the writes of a journal, and notes failed syncs.
//!
//! A journal is valid to its end only while the kernel still has all writes: under the same boot of
//! the machine, and in the same mount of the store's filesystem. A filesystem that failed and was
//! mounted again shows only what reached the disk.
//!
//! * A [`Writer`] is one boot and one mount. Equal writers wrote to the same page cache.
//! * A failed sync is also noted in `/dev/shm`, because the filesystem that failed may not take the
//!   record of it. The next start reads the note, cuts the journal, and removes the note.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::error::{Attempt, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::log as frames;
use crate::sys::{file, proc};
use crate::types::LayerId;

/// The directory of the notes. It is in memory, on every Linux with POSIX shared memory
/// (shm_overview(7)).
const NOTES: &str = "/dev/shm";

/// One boot of the machine and one mount of the store's filesystem.
///
/// | bytes | content |
/// |---|---|
/// | 0-7 | the first half of `/proc/sys/kernel/random/boot_id` |
/// | 8-15 | the mount id, little-endian; unique within a boot since Linux 6.8 (statx(2)) |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Writer([u8; 16]);

impl Writer {
    /// This process as a writer of the store in `dir`.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub(in crate::store) fn of(dir: &StoreDir) -> Result<Writer> {
        let boot = proc::boot_id().attempt(|| "read the boot id")?;
        // Before Linux 6.8 the kernel reuses mount ids, and before 5.8 it has none: see the known
        // gaps in SEMANTICS.md.
        let mount = file::unique_mount_id(dir).or_else(|| file::mount_id(dir)).unwrap_or(0);
        Ok(Writer::new(boot, mount))
    }

    /// The writer under this boot and in this mount.
    pub const fn new(boot: [u8; 16], mount: u64) -> Writer {
        let ([b0, b1, b2, b3, b4, b5, b6, b7, ..], [m0, m1, m2, m3, m4, m5, m6, m7]) =
            (boot, mount.to_le_bytes());
        Writer([b0, b1, b2, b3, b4, b5, b6, b7, m0, m1, m2, m3, m4, m5, m6, m7])
    }

    /// Whether both writers belong to the same boot.
    pub fn is_of_same_boot(self, other: Writer) -> bool {
        self.0.iter().zip(other.0).take(8).all(|(ours, theirs)| *ours == theirs)
    }
}

/// A sync that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FailedSync {
    writer: Writer,
    layer: LayerId,
    /// How many records of its journal were synced before that.
    synced: u64,
}

/// The notes of failed syncs of one store.
#[derive(Clone, Debug)]
pub(in crate::store) struct FailedSyncs {
    writer: Writer,
    path: PathBuf,
}

impl FailedSyncs {
    /// The notes of the store in `dir`.
    ///
    /// # Errors
    /// As fstat(2).
    pub(in crate::store) fn of(dir: &StoreDir, writer: Writer) -> Result<FailedSyncs> {
        let stat = nix::sys::stat::fstat(dir).map_err(std::io::Error::from);
        let stat = stat.attempt(|| format!("stat {}", dir.path().display()))?;
        // A new directory can get the inode number of a removed one, but not its time of birth.
        let born = file::birth(dir).unwrap_or_default();
        let name = format!(
            "jailfs-failed-sync-{:x}-{:x}-{:x}.{:x}",
            stat.st_dev, stat.st_ino, born.secs, born.nanos
        );
        Ok(FailedSyncs { writer, path: Path::new(NOTES).join(name) })
    }

    /// The writer of new notes.
    pub(in crate::store) fn writer(&self) -> Writer {
        self.writer
    }

    /// Notes that a sync of a layer failed. `synced` records of its journal were synced before.
    pub(in crate::store) fn note(&self, layer: LayerId, synced: u64) {
        let record = FailedSync { writer: self.writer, layer, synced };
        let append = || -> Result<()> {
            let frame = frames::frame(&record, self.all().len() as u64)?;
            let flags = OFlag::O_WRONLY
                | OFlag::O_CREAT
                | OFlag::O_APPEND
                | OFlag::O_NOFOLLOW
                | OFlag::O_CLOEXEC;
            let opened =
                openat(nix::fcntl::AT_FDCWD, &self.path, flags, Mode::S_IRUSR | Mode::S_IWUSR);
            let opened = opened.map(File::from).map_err(std::io::Error::from);
            opened
                .and_then(|mut note| note.write_all(&frame))
                .attempt(|| format!("write '{}'", self.path.display()))
        };
        if let Err(error) = append() {
            log::error!("a failed sync of layer {layer} is noted in its journal only: {error}");
        }
    }

    /// The layers for which this writer noted a failed sync, and how many records of each were
    /// synced before.
    pub(in crate::store) fn read(&self) -> BTreeMap<LayerId, u64> {
        let mut failed = BTreeMap::new();
        for note in self.all().into_iter().filter(|note| note.writer == self.writer) {
            let synced = failed.entry(note.layer).or_insert(note.synced);
            *synced = note.synced.min(*synced);
        }
        failed
    }

    /// All notes, of this writer and of others.
    fn all(&self) -> Vec<FailedSync> {
        // Ignore a file that another user made.
        let is_ours = |stat: std::fs::Metadata| {
            stat.is_file() && [0, geteuid().as_raw()].contains(&stat.uid())
        };
        if !std::fs::symlink_metadata(&self.path).is_ok_and(is_ours) {
            return Vec::new();
        }
        let bytes = std::fs::read(&self.path).unwrap_or_default();
        let notes = frames::read_torn::<FailedSync>(&bytes, "notes of failed syncs");
        notes.map_or_else(
            |_| Vec::new(),
            |notes| notes.contents.records.into_iter().map(|(note, _)| note).collect(),
        )
    }

    /// Removes the notes of a layer, after everything left in its journal is synced.
    pub(in crate::store) fn forget(&self, layer: LayerId) {
        let (mut kept, before) = (self.all(), self.all().len());
        kept.retain(|note| note.writer == self.writer && note.layer != layer);
        if kept.len() < before {
            self.replace(&kept);
        }
    }

    /// Removes all notes, for a new store in a directory that may have held another one.
    pub(in crate::store) fn forget_all(&self) {
        if !self.all().is_empty() {
            self.replace(&[]);
        }
    }

    fn replace(&self, notes: &[FailedSync]) {
        let replaced = || -> Result<()> {
            let attempt = || format!("write '{}'", self.path.display());
            if notes.is_empty() {
                return std::fs::remove_file(&self.path).attempt(attempt);
            }
            let bytes = frames::frames(notes.iter())?;
            let mut file = tempfile::NamedTempFile::new_in(NOTES).attempt(attempt)?;
            file.write_all(&bytes).attempt(attempt)?;
            file.persist(&self.path).map(drop).map_err(|error| error.error).attempt(attempt)
        };
        if let Err(error) = replaced() {
            log::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_boot_or_another_mount_is_another_writer() {
        let writer = Writer::new([7; 16], 3);
        assert_eq!(writer, Writer::new([7; 16], 3));
        assert_ne!(writer, Writer::new([7; 16], 4));
        assert!(writer.is_of_same_boot(Writer::new([7; 16], 4)));
        assert!(!writer.is_of_same_boot(Writer::new([8; 16], 3)));
    }

    #[test]
    fn a_failed_sync_is_noted_outside_the_store() {
        let at = tempfile::tempdir().unwrap();
        let dir = StoreDir::open(at.path()).unwrap();
        let writer = Writer::of(&dir).unwrap();
        let notes = FailedSyncs::of(&dir, writer).unwrap();
        notes.note(LayerId(4), 9);
        notes.note(LayerId(4), 7);
        notes.note(LayerId(5), 2);
        assert_eq!(notes.read(), [(LayerId(4), 7), (LayerId(5), 2)].into());
        let later = FailedSyncs { writer: Writer::new([1; 16], 1), ..notes.clone() };
        assert!(later.read().is_empty(), "a note of another mount does not count");
        notes.forget(LayerId(4));
        assert_eq!(notes.read(), [(LayerId(5), 2)].into());
        notes.forget(LayerId(5));
        assert!(notes.read().is_empty());
    }
}
