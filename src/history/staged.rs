//! What an apply needs beside the content it writes: names under which content is staged, and a way into directories that
//! their owner closed.
//!
//! Always true: a name for staging is recorded as a path at which nothing was, before anything is written. So nobody who looks
//! through the pre-images sees what is staged, and whoever takes the apply back knows it from what a person gave such a name.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::{Base, BaseWriter, WriteDir};
use crate::error::{FsError, FsResult};
use crate::fs::{Found, State};
use crate::history::apply::{Images, found};
use crate::types::{FileKind, Name, TreePath};

/// How many names are tried in one directory.
const TRIES: usize = 16;
/// What the owner of a directory needs to change it.
const OPEN: u32 = 0o700;

/// One name in each directory in which something is staged, one thing at a time.
pub(super) struct Stages(BTreeMap<TreePath, Name>);

impl Stages {
    /// Names that nothing has.
    pub(super) fn choose(from: &State, dirs: BTreeSet<TreePath>) -> FsResult<Stages> {
        let mut names = BTreeMap::new();
        for dir in dirs {
            let name = free_name(from, &dir)?;
            names.insert(dir, name);
        }
        Ok(Stages(names))
    }

    /// Those that an apply recorded.
    pub(super) fn of(images: &Images) -> Stages {
        let staged = images.iter().filter(|(_, image)| image.is_none()).filter_map(|(path, _)| path.split());
        Stages(staged.filter(|(_, name)| WriteDir::is_stage_name(name)).collect())
    }

    /// The name in a directory.
    ///
    /// # Errors
    /// [`FsError::Drift`] in one in which nothing had to be staged when the apply began: somebody changed it since.
    pub(super) fn name_in(&self, dir: &TreePath) -> FsResult<Name> {
        self.0.get(dir).cloned().ok_or_else(|| FsError::Drift(dir.clone()))
    }

    /// The paths of all of them.
    pub(super) fn paths(&self) -> impl Iterator<Item = TreePath> {
        self.0.iter().map(|(dir, name)| dir.join(name))
    }

    /// Whether something may be staged at a path.
    pub(super) fn has(&self, path: &TreePath) -> bool {
        path.split().is_some_and(|(dir, name)| self.0.get(&dir) == Some(&name))
    }

    /// Removes what is still there. A directory is nothing that was staged.
    pub(super) fn remove_left(&self, base: &Base) -> FsResult<()> {
        for (dir, name) in &self.0 {
            let left = found(base.stat(&dir.join(name)))?;
            if left.is_some_and(|stat| stat.kind != FileKind::Dir) {
                base.writer().dir(dir)?.unlink(name)?;
            }
        }
        Ok(())
    }

    /// Removes what was staged for a path, if anything is.
    pub(super) fn remove_in(&self, writer: &BaseWriter<'_>, path: &TreePath) -> FsResult<()> {
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
pub(super) fn can_be_kept_out() -> bool {
    !nix::unistd::geteuid().is_root()
}

/// Lets the owner, who we are, into those directories of the base among `paths` that it closed to itself. What they were is given, and set back by
/// [`close`] or by giving them the attributes they are to have.
pub(super) fn open<'p>(
    base: &Base,
    paths: impl Iterator<Item = &'p TreePath>,
) -> FsResult<BTreeMap<TreePath, u32>> {
    let mut opened = BTreeMap::new();
    // What is somebody else's is not ours to open.
    let me = nix::unistd::geteuid();
    for path in paths.filter(|_| can_be_kept_out()) {
        let Some(stat) = found(base.stat(path))? else { continue };
        let is_closed = stat.kind == FileKind::Dir && !stat.foreign && stat.mode & OPEN != OPEN;
        if let (true, Some((dir, name))) = (is_closed && stat.uid == me.as_raw(), path.split()) {
            base.writer().dir(&dir)?.set_mode(&name, stat.mode | OPEN)?;
            opened.insert(path.clone(), stat.mode);
        }
    }
    Ok(opened)
}

/// Closes directories that [`open`] opened, if they are there.
pub(super) fn close<'p>(
    base: &Base,
    opened: impl DoubleEndedIterator<Item = (&'p TreePath, &'p u32)>,
) -> FsResult<()> {
    // The deepest first: behind a closed one nothing is reached.
    for (path, mode) in opened.rev() {
        if let (Some(_), Some((dir, name))) = (found(base.stat(path))?, path.split()) {
            base.writer().dir(&dir)?.set_mode(&name, *mode)?;
        }
    }
    Ok(())
}
