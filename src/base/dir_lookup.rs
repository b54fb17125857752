//! Looks up names of one directory of the base with one system call each.
//!
//! To stat a path, [`Base::stat`] opens it beneath the root, which takes three calls. A request
//! that looks at several names of one directory opens the directory once, and then each name is one
//! statx(2).
//!
//! * statx(2) crosses into a filesystem that is mounted on the name. It must not ask the server of
//!   that filesystem, which may be this process and would then wait for itself. The kernel does not
//!   ask a FUSE server here.
//! * The answer names the mount that it comes from, so a mount point is noticed.
//! * Where the kernel or the filesystem does not support this, each name is looked up by its path.

use std::cell::{OnceCell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::fcntl::OFlag;

use crate::base::resolve::{MountId, Root};
use crate::base::{Base, BaseStat};
use crate::error::{FsError, FsResult};
use crate::sys;
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::lock::{Rank, check_not_held};
use crate::types::{Name, TreePath};

/// A directory of the base for lookups during one request. It is opened at the first lookup.
pub struct DirLookup {
    base: Arc<Base>,
    path: TreePath,
    dir: OnceCell<Option<OwnedFd>>,
}

impl DirLookup {
    /// The path of the directory.
    pub fn path(&self) -> &TreePath {
        &self.path
    }

    /// As [`Base::stat`] of the directory itself.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn stat_dir(&self) -> FsResult<BaseStat> {
        match self.dir() {
            Some(dir) => self.base.stat_of(dir),
            None => self.base.stat(&self.path),
        }
    }

    /// As [`Base::stat`] of a name in the directory.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn stat(&self, name: &Name) -> FsResult<BaseStat> {
        self.stat_in_dir(name).unwrap_or_else(|| self.base.stat(&self.path.join(name)))
    }

    /// The result of statx(2) in the opened directory. `None` if only a lookup by path can tell.
    pub(super) fn stat_in_dir(&self, name: &Name) -> Option<FsResult<BaseStat>> {
        let stat = stat_in_mount(self.dir()?, &self.base.plain.mount, name)?;
        match stat {
            Ok(stat) if stat.dev != self.base.id.0 => None,
            stat => Some(stat),
        }
    }

    fn dir(&self) -> Option<&OwnedFd> {
        self.dir.get_or_init(|| self.open()).as_ref()
    }

    fn open(&self) -> Option<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let is_supported = self.base.is_local && matches!(self.base.plain.mount, MountId::Mount(_));
        is_supported
            .then(|| self.base.resolver.open(&self.base.plain, self.path.as_bytes(), flags).ok())?
    }
}

/// The result of statx(2) in the directory `dir`, for a node of the same mount. `None` if only a
/// lookup that opens the node can tell.
pub(super) fn stat_in(dir: &Root, name: &Name) -> Option<FsResult<BaseStat>> {
    stat_in_mount(&dir.fd, &dir.mount, name)
}

fn stat_in_mount(dir: &OwnedFd, mount: &MountId, name: &Name) -> Option<FsResult<BaseStat>> {
    check_not_held(Rank::Core);
    let found =
        match failpoint::hit(Failpoint::BaseOpen).and_then(|()| sys::file::statx_in(dir, name)) {
            Ok(found) => found?,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                return Some(Err(FsError::NotFound));
            }
            Err(_) => return None,
        };
    let stat = BaseStat::from_statx(&found).ok()?;
    (*mount == MountId::Mount(found.stx_mnt_id)).then_some(Ok(stat))
}

/// Looks up many paths of the base. It keeps the directory of the last path open, so the paths of
/// one directory cost one system call each if they follow each other.
///
/// If a directory is renamed meanwhile, the answers are those from before, until a path of another
/// directory is looked up. So no directory may be renamed by the caller itself meanwhile.
pub struct PathLookup<'a> {
    base: &'a Arc<Base>,
    last: RefCell<Option<DirLookup>>,
}

impl PathLookup<'_> {
    /// As [`Base::stat`].
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn stat(&self, path: &TreePath) -> FsResult<BaseStat> {
        let Some((dir, name)) = path.split() else { return self.base.stat(path) };
        let mut last = self.last.borrow_mut();
        match &mut *last {
            Some(last) if *last.path() == dir => last.stat(&name),
            last => last.insert(self.base.lookup_in(&dir)).stat(&name),
        }
    }
}

impl Base {
    /// Prepares lookups of names in the directory `dir`.
    pub fn lookup_in(self: &Arc<Base>, dir: &TreePath) -> DirLookup {
        DirLookup { base: Arc::clone(self), path: dir.clone(), dir: OnceCell::new() }
    }

    /// Prepares lookups of many paths.
    pub fn lookup_paths(self: &Arc<Base>) -> PathLookup<'_> {
        PathLookup { base: self, last: RefCell::default() }
    }
}
