//! Looking at several names of one directory, as whoever lists it does.
//!
//! A path of the base is looked at by opening it beneath the root, which is three calls. Where many names of one directory are looked
//! at, the directory is opened so, and each name is one statx(2) in it. That call enters what is mounted there, so it must not
//! ask whoever serves that (it may be us; FUSE is not asked), and says in which mount it was. Where the kernel or the filesystem
//! cannot do it so, each name is looked at by its path.

use std::cell::OnceCell;
use std::os::fd::OwnedFd;

use nix::fcntl::OFlag;

use crate::base::resolve::Place;
use crate::base::{Base, BaseStat};
use crate::error::FsResult;
use crate::sys;
use crate::types::{Name, TreePath};

/// A directory of the base of which several names are looked at. It is opened at the first of them, and is not looked for again: this
/// lives as long as one request.
pub struct Near<'a> {
    base: &'a Base,
    path: &'a TreePath,
    dir: OnceCell<Option<OwnedFd>>,
}

impl Near<'_> {
    /// What is at a name of the directory, as [`Base::stat`] says of its path.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn stat(&self, name: &Name) -> FsResult<BaseStat> {
        match self.at_once(name) {
            Some(stat) => Ok(stat),
            None => self.base.stat(&self.path.join(name)),
        }
    }

    /// What can be said at once of a name; none if something stands in the way.
    pub(super) fn at_once(&self, name: &Name) -> Option<BaseStat> {
        let dir = self.dir.get_or_init(|| self.open()).as_ref()?;
        let found = sys::file::statx_in(dir, name).ok()??;
        let stat = BaseStat::from_statx(&found).ok()?;
        let is_ours = self.base.plain.place == Place::Mount(found.stx_mnt_id) && stat.dev == self.base.id.0;
        is_ours.then_some(stat)
    }

    fn open(&self) -> Option<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let is_quick = self.base.answers_at_once && matches!(self.base.plain.place, Place::Mount(_));
        is_quick.then(|| self.base.resolver.open(&self.base.plain, self.path.as_bytes(), flags).ok())?
    }
}

impl Base {
    /// A directory of which several names are to be looked at.
    pub fn near<'a>(&'a self, dir: &'a TreePath) -> Near<'a> {
        Near { base: self, path: dir, dir: OnceCell::new() }
    }
}
