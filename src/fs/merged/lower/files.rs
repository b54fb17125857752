//! Open files of the base.
//!
//! The files that were read last stay open for the next read. All epochs of a base share them.
//! Always true: a file is used only if its fingerprint is the expected one.

use std::fs::File;
use std::sync::Arc;

use crate::base::{Base, BaseStat};
use crate::error::FsResult;
use crate::fs::merged::fingerprint;
use crate::store::io::lru_cache::LruCache;
use crate::sys::lock::{Rank, RankedMutex, check_not_held};
use crate::types::{Fingerprint, TreePath};

/// The most base files that stay open for the next read.
const OPEN_FILES: usize = 128;

/// The open files of a base.
#[derive(Clone)]
pub(super) struct BaseFiles {
    base: Arc<Base>,
    open: Arc<RankedMutex<LruCache<TreePath>>>,
}

impl BaseFiles {
    pub(super) fn of(base: Arc<Base>) -> BaseFiles {
        BaseFiles {
            base,
            open: Arc::new(RankedMutex::new(Rank::OpenFiles, LruCache::new(OPEN_FILES))),
        }
    }

    /// Opens the file at a path, or finds it open. `print` is the fingerprint that it should have.
    /// Returns the fingerprint that it has.
    pub(super) fn open_as(
        &self,
        path: &TreePath,
        print: &Fingerprint,
    ) -> FsResult<(Arc<File>, Fingerprint)> {
        if let Some(found) = self.cached(path, print)? {
            return Ok(found);
        }
        let file = self.open_anew(path, &self.base.stat(path)?)?;
        let now = Fingerprint::of(&file)?;
        Ok((file, now))
    }

    /// Opens the file that a lookup has found as `seen`, or finds it open.
    pub(super) fn open_seen(&self, path: &TreePath, seen: &BaseStat) -> FsResult<Arc<File>> {
        match self.cached(path, &seen.fingerprint())? {
            Some((file, _)) => Ok(file),
            None => self.open_anew(path, seen),
        }
    }

    /// As [`Lower::is_as`](crate::fs::merged::lower::Lower::is_as).
    pub(super) fn is_as(&self, expected: &Fingerprint, found: &Fingerprint) -> bool {
        let same_number = Fingerprint { ino: found.ino, ..*expected };
        fingerprint::matches(expected, found)
            || (!self.base.has_stable_inodes() && fingerprint::matches(&same_number, found))
    }

    /// A file that is open already and has this fingerprint.
    fn cached(
        &self,
        path: &TreePath,
        print: &Fingerprint,
    ) -> FsResult<Option<(Arc<File>, Fingerprint)>> {
        let Some(file) = self.open.lock().get(path) else { return Ok(None) };
        check_not_held(Rank::Core);
        let now = Fingerprint::of(&file)?;
        Ok(self.is_as(print, &now).then_some((file, now)))
    }

    fn open_anew(&self, path: &TreePath, seen: &BaseStat) -> FsResult<Arc<File>> {
        let file = Arc::new(self.base.open_file_with_stat(path, seen)?);
        self.open.lock().insert(path.clone(), Arc::clone(&file));
        Ok(file)
    }
}
