//! Looking at a directory and at names of it, as whoever looks one up does, or lists them.
//!
//! A path of the base is looked at by opening it beneath the root, which is three calls. Where a directory is looked at and then names of
//! it, the directory is opened so, and each name is one statx(2) in it. That call enters what is mounted there, so it must not
//! ask whoever serves that (it may be us; FUSE is not asked), and says in which mount it was. Where the kernel or the filesystem
//! cannot do it so, each name is looked at by its path.

use std::cell::OnceCell;
use std::os::fd::OwnedFd;

use nix::fcntl::OFlag;

use crate::base::resolve::Place;
use crate::base::{Base, BaseStat};
use crate::error::{FsError, FsResult};
use crate::sys;
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::types::{Name, TreePath};

/// A directory of the base that is looked at with names of it. It is opened at the first look, and is not looked for again: this lives as
/// long as one request.
pub struct DirLookup<'a> {
    base: &'a Base,
    path: &'a TreePath,
    dir: OnceCell<Option<OwnedFd>>,
}

impl DirLookup<'_> {
    /// Where the directory is.
    pub fn path(&self) -> &TreePath {
        self.path
    }

    /// What the directory itself is, as [`Base::stat`] says of its path.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn stat_dir(&self) -> FsResult<BaseStat> {
        match self.dir() {
            Some(dir) => self.base.stat_of(dir),
            None => self.base.stat(self.path),
        }
    }

    /// What is at a name of the directory, as [`Base::stat`] says of its path.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn stat(&self, name: &Name) -> FsResult<BaseStat> {
        self.at_once(name).unwrap_or_else(|| self.base.stat(&self.path.join(name)))
    }

    /// What can be said at once of a name; none if something stands in the way.
    pub(super) fn at_once(&self, name: &Name) -> Option<FsResult<BaseStat>> {
        let dir = self.dir()?;
        let found = match failpoint::hit(Failpoint::BaseOpen)
            .and_then(|()| sys::file::statx_in(dir, name))
        {
            Ok(found) => found?,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                return Some(Err(FsError::NotFound));
            }
            Err(_) => return None,
        };
        let stat = BaseStat::from_statx(&found).ok()?;
        let is_ours =
            self.base.plain.place == Place::Mount(found.stx_mnt_id) && stat.dev == self.base.id.0;
        is_ours.then_some(Ok(stat))
    }

    fn dir(&self) -> Option<&OwnedFd> {
        self.dir.get_or_init(|| self.open()).as_ref()
    }

    fn open(&self) -> Option<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let is_quick =
            self.base.answers_at_once && matches!(self.base.plain.place, Place::Mount(_));
        is_quick
            .then(|| self.base.resolver.open(&self.base.plain, self.path.as_bytes(), flags).ok())?
    }
}

impl Base {
    /// A directory that is to be looked at, with names of it.
    pub fn near<'a>(&'a self, dir: &'a TreePath) -> DirLookup<'a> {
        DirLookup { base: self, path: dir, dir: OnceCell::new() }
    }
}
