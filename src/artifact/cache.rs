//! Files in the cache directory of the user, which make the next push or pull shorter.
//!
//! ```text
//! indexes/NAME   the index of a pack, by its digest
//! pulls/TREE     the chunks that an interrupted pull has, by the digest of the tree
//! parents/KEY    the manifest that a store pushed or pulled last in a repository
//! ```
//!
//! Everything in it is verified when it is read, and may go at any time. A failed write is no
//! failure of the command.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::{NamedTempFile, TempDir};

use crate::error::{Attempt, Result};
use crate::registry::Digest as BlobDigest;
use crate::store::archive::{Digest, MAX_INDEX};

/// Files of interrupted pulls are kept so long.
const PULLS: Duration = Duration::from_secs(7 * 24 * 3600);
/// The most bytes of indexes.
const INDEXES: u64 = 256 << 20;

/// The cache directory.
pub struct Cache {
    dir: PathBuf,
    /// The directory, if it lives as long as the command only.
    _temporary: Option<TempDir>,
}

impl Cache {
    /// The cache in a directory, which is made if it is missing.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn open(dir: &Path) -> Result<Cache> {
        let cache = Cache { dir: dir.to_owned(), _temporary: None };
        for part in ["indexes", "pulls", "parents"] {
            let path = dir.join(part);
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.attempt(|| format!("make the directory '{}'", path.display()))?;
        }
        Ok(cache)
    }

    /// A cache that lives as long as the command only.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn temporary() -> Result<Cache> {
        let dir = tempfile::tempdir().attempt(|| "make a directory for temporary files")?;
        let cache = Cache::open(dir.path())?;
        Ok(Cache { _temporary: Some(dir), ..cache })
    }

    fn path(&self, part: &str, name: &str) -> PathBuf {
        self.dir.join(part).join(name)
    }

    /// The bytes of an index, if they are there and right.
    pub(super) fn index(&self, name: &Digest) -> Option<Vec<u8>> {
        let path = self.path("indexes", &name.to_string());
        let bytes = read(&path, MAX_INDEX as u64).ok()?;
        (Digest::of(&bytes) == *name).then_some(bytes)
    }

    /// Keeps an index.
    pub(super) fn keep_index(&self, name: &Digest, bytes: &[u8]) {
        self.keep("indexes", &name.to_string(), bytes);
    }

    /// The manifest that a store pushed or pulled last in a repository.
    pub(super) fn parent(&self, key: &str) -> Option<BlobDigest> {
        let bytes = read(&self.path("parents", &name_of(key)), 100).ok()?;
        BlobDigest::parse(std::str::from_utf8(&bytes).ok()?.trim()).ok()
    }

    /// Remembers that manifest.
    pub(super) fn set_parent(&self, key: &str, manifest: &BlobDigest) {
        self.keep("parents", &name_of(key), manifest.to_string().as_bytes());
    }

    /// Where the chunks of an interrupted pull are.
    pub(super) fn pull(&self, tree: &Digest) -> PathBuf {
        self.path("pulls", &tree.to_string())
    }

    /// A new file, which goes with the result.
    pub(super) fn new_file(&self) -> io::Result<NamedTempFile> {
        NamedTempFile::new_in(self.dir.join("pulls"))
    }

    fn keep(&self, part: &str, name: &str, bytes: &[u8]) {
        let write = || -> io::Result<()> {
            let mut file = NamedTempFile::new_in(self.dir.join(part))?;
            file.write_all(bytes)?;
            file.persist(self.path(part, name)).map(drop).map_err(|error| error.error)
        };
        if let Err(error) = write() {
            log::debug!("cache {part}/{name}: {error}");
        }
    }

    /// Removes old files: interrupted pulls after a week, and the indexes that were written first
    /// above 256 MiB.
    pub fn prune(&self) {
        let now = SystemTime::now();
        let is_old = |time: &SystemTime| now.duration_since(*time).is_ok_and(|age| age > PULLS);
        for (path, ..) in self.files("pulls").into_iter().filter(|(_, time, _)| is_old(time)) {
            remove(&path);
        }
        let mut indexes = self.files("indexes");
        indexes.sort_by_key(|(_, time, _)| std::cmp::Reverse(*time));
        let mut bytes = 0_u64;
        for (path, _, len) in indexes {
            bytes = bytes.saturating_add(len);
            if bytes > INDEXES {
                remove(&path);
            }
        }
    }

    fn files(&self, part: &str) -> Vec<(PathBuf, SystemTime, u64)> {
        let Ok(entries) = std::fs::read_dir(self.dir.join(part)) else { return Vec::new() };
        let entries = entries.flatten().filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            Some((entry.path(), metadata.modified().ok()?, metadata.len()))
        });
        entries.collect()
    }
}

fn name_of(key: &str) -> String {
    Digest::of(key.as_bytes()).to_string()
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        log::debug!("remove {}: {error}", path.display());
    }
}

/// The bytes of a file of at most `most` bytes.
fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    OpenOptions::new().read(true).open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other("too long")),
        false => Ok(bytes),
    }
}
