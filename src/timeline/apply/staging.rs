//! What an apply needs beside the content it writes: names under which content is staged, and a way into directories that
//! their owner closed.
//!
//! Always true: a name for staging is recorded as a path at which nothing was, before anything is written. So nobody who looks
//! through the pre-images sees what is staged, and whoever takes the apply back knows it from what a person gave such a name.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::{Base, BaseWriter, WriteDir};
use crate::error::{FsError, FsResult};
use crate::fs::{Found, State};
use crate::timeline::apply::{Images, found};
use crate::types::{FileKind, Name, TreePath};

/// How many names are tried in one directory.
const TRIES: usize = 16;
/// What the owner of a directory needs to change it.
const OPEN: u32 = 0o700;

/// One name in each directory in which something is staged, one thing at a time.
pub(in crate::timeline) struct Stages(BTreeMap<TreePath, Name>);

impl Stages {
    /// Names that nothing has.
    pub(in crate::timeline) fn choose(from: &State, dirs: BTreeSet<TreePath>) -> FsResult<Stages> {
        let mut names = BTreeMap::new();
        for dir in dirs {
            let name = free_name(from, &dir)?;
            names.insert(dir, name);
        }
        Ok(Stages(names))
    }

    /// Those that an apply recorded.
    pub(in crate::timeline) fn of(images: &Images) -> Stages {
        let staged =
            images.iter().filter(|(_, image)| image.is_none()).filter_map(|(path, _)| path.split());
        Stages(staged.filter(|(_, name)| WriteDir::is_stage_name(name)).collect())
    }

    /// The name in a directory.
    ///
    /// # Errors
    /// [`FsError::Drift`] in one in which nothing had to be staged when the apply began: somebody changed it since.
    pub(in crate::timeline) fn name_in(&self, dir: &TreePath) -> FsResult<Name> {
        self.0.get(dir).cloned().ok_or_else(|| FsError::Drift(dir.clone()))
    }

    /// The paths of all of them.
    pub(in crate::timeline) fn paths(&self) -> impl Iterator<Item = TreePath> {
        self.0.iter().map(|(dir, name)| dir.join(name))
    }

    /// Whether something may be staged at a path.
    pub(in crate::timeline) fn has(&self, path: &TreePath) -> bool {
        path.split().is_some_and(|(dir, name)| self.0.get(&dir) == Some(&name))
    }

    /// Removes what is still there. A directory is nothing that was staged. Returns what could not
    /// be removed.
    pub(in crate::timeline) fn remove_left(&self, base: &Base) -> BTreeMap<TreePath, FsError> {
        let remove = |dir: &TreePath, name: &Name| -> FsResult<()> {
            let left = found(base.stat(&dir.join(name)))?;
            match left.filter(|stat| stat.kind != FileKind::Dir) {
                Some(_) => base.writer().dir(dir)?.unlink(name),
                None => Ok(()),
            }
        };
        let failed = self
            .0
            .iter()
            .filter_map(|(dir, name)| Some((dir.join(name), remove(dir, name).err()?)));
        failed.collect()
    }

    /// Removes what was staged for a path, if anything is.
    pub(in crate::timeline) fn remove_in(
        &self,
        writer: &BaseWriter<'_>,
        path: &TreePath,
    ) -> FsResult<()> {
        let staged = path.split().and_then(|(dir, _)| Some((self.0.get(&dir)?, dir)));
        let Some((name, dir)) = staged else { return Ok(()) };
        match writer.dir(&dir) {
            Err(FsError::NotFound | FsError::NotADirectory | FsError::LeavesJail) => Ok(()),
            dir => found(dir?.unlink(name)).map(drop),
        }
    }
}

fn free_name(from: &State, dir: &TreePath) -> FsResult<Name> {
    for _ in 0..TRIES {
        let name = WriteDir::stage_name()?;
        if matches!(from.resolve(&dir.join(&name))?, Found::Nothing(_)) {
            return Ok(name);
        }
    }
    Err(FsError::Exists)
}

/// Whether a mode can keep us out of a directory. Root enters anyway.
pub(in crate::timeline) fn can_be_kept_out() -> bool {
    !nix::unistd::geteuid().is_root()
}

/// Lets the owner, who we are, into those directories of the base among `paths` that it closed to
/// itself. Returns their modes, which [`close`] sets back, or whoever gives them the attributes
/// that they are to have. With `goes_on`, a directory that cannot be opened stays as it is.
pub(in crate::timeline) fn open<'p>(
    base: &Base,
    paths: impl Iterator<Item = &'p TreePath>,
    goes_on: bool,
) -> FsResult<BTreeMap<TreePath, u32>> {
    let mut opened = BTreeMap::new();
    for path in paths.filter(|_| can_be_kept_out()) {
        match open_one(base, path) {
            Ok(mode) => opened.extend(mode.map(|mode| (path.clone(), mode))),
            Err(_) if goes_on => {}
            Err(error) => return Err(error),
        }
    }
    Ok(opened)
}

/// Opens one directory, if it is closed and ours. Returns its mode before.
fn open_one(base: &Base, path: &TreePath) -> FsResult<Option<u32>> {
    let Some(stat) = found(base.stat(path))? else { return Ok(None) };
    let is_closed = stat.kind == FileKind::Dir && !stat.foreign && stat.mode & OPEN != OPEN;
    // What is somebody else's is not ours to open.
    let is_ours = stat.uid == nix::unistd::geteuid().as_raw();
    let (true, Some((dir, name))) = (is_closed && is_ours, path.split()) else { return Ok(None) };
    base.writer().dir(&dir)?.set_mode(&name, stat.mode | OPEN)?;
    Ok(Some(stat.mode))
}

/// Closes a directory that [`open`] opened, if it is there.
pub(in crate::timeline) fn close(base: &Base, path: &TreePath, mode: u32) -> FsResult<()> {
    match (found(base.stat(path))?, path.split()) {
        (Some(_), Some((dir, name))) => base.writer().dir(&dir)?.set_mode(&name, mode),
        (None, _) | (_, None) => Ok(()),
    }
}
