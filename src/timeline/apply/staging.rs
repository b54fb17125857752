//! Chooses names for staged content, and opens directories whose mode denies access to their owner.
//!
//! Always true: before anything is written, each name for staging is recorded twice: as a pre-image
//! of a path that does not exist, and as a path at which the apply will leave nothing. So readers,
//! who look through the pre-images, never see staged content. And a rollback can tell it from what
//! the apply writes for an agent that chose such a name.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::{Base, BaseWriter, WriteDir};
use crate::error::{FsError, FsResult, Result, if_exists};
use crate::fs::{Found, State};
use crate::store::layer::{LayerContents, Upper};
use crate::store::record::{Left, Record};
use crate::types::{FileKind, Name, TreePath};

/// How many names are tried in one directory.
const TRIES: usize = 16;
/// The mode bits that the owner of a directory needs to change it.
const OPEN: u32 = 0o700;

/// One name for each directory in which content is staged, one node at a time.
pub(in crate::timeline) struct Stages(BTreeMap<TreePath, Name>);

impl Stages {
    /// Chooses names that do not exist in the base.
    pub(in crate::timeline) fn choose(from: &State, dirs: BTreeSet<TreePath>) -> FsResult<Stages> {
        let mut names = BTreeMap::new();
        for dir in dirs {
            let name = free_name(from, &dir)?;
            names.insert(dir, name);
        }
        Ok(Stages(names))
    }

    /// Records the names in the layer of an apply, before its pre-images are said to be complete.
    ///
    /// # Errors
    /// Those of writing the store.
    pub(in crate::timeline) fn record(&self, layer: &mut Upper) -> Result<()> {
        self.paths().try_for_each(|path| layer.record(&Record::Left(Left { path, print: None })))
    }

    /// The names that an apply recorded in its layer.
    ///
    /// # Errors
    /// Damage.
    pub(in crate::timeline) fn of(contents: &LayerContents) -> Result<Stages> {
        let mut names = BTreeMap::new();
        for record in contents.records() {
            match record? {
                Record::Left(Left { path, print: None }) => names.extend(path.split()),
                Record::Synced => break,
                _ => {}
            }
        }
        Ok(Stages(names))
    }

    /// The name in a directory.
    ///
    /// # Errors
    /// [`FsError::Drift`] for a directory in which nothing had to be staged when the apply began:
    /// another program changed it since.
    pub(in crate::timeline) fn name_in(&self, dir: &TreePath) -> FsResult<Name> {
        self.0.get(dir).cloned().ok_or_else(|| FsError::Drift(dir.clone()))
    }

    /// The paths of all names.
    pub(in crate::timeline) fn paths(&self) -> impl Iterator<Item = TreePath> {
        self.0.iter().map(|(dir, name)| dir.join(name))
    }

    /// Whether content may be staged at a path.
    pub(in crate::timeline) fn has(&self, path: &TreePath) -> bool {
        path.split().is_some_and(|(dir, name)| self.0.get(&dir) == Some(&name))
    }

    /// Removes staged content that is still there. A directory is never staged content. Returns
    /// what could not be removed.
    pub(in crate::timeline) fn remove_left(&self, base: &Base) -> BTreeMap<TreePath, FsError> {
        let remove = |dir: &TreePath, name: &Name| -> FsResult<()> {
            let left = if_exists(base.stat(&dir.join(name)))?;
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

    /// Removes the content that was staged for a path, if there is any.
    pub(in crate::timeline) fn remove_for(
        &self,
        writer: &BaseWriter<'_>,
        path: &TreePath,
    ) -> FsResult<()> {
        let staged = path.split().and_then(|(dir, _)| Some((self.0.get(&dir)?, dir)));
        let Some((name, dir)) = staged else { return Ok(()) };
        match writer.dir(&dir) {
            Err(FsError::NotFound | FsError::NotADirectory | FsError::LeavesJail) => Ok(()),
            dir => if_exists(dir?.unlink(name)).map(drop),
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

/// Whether the mode of a directory can deny us access. It does not apply to root.
pub(in crate::timeline) fn modes_apply_to_us() -> bool {
    !nix::unistd::geteuid().is_root()
}

/// Gives us access to our own directories among `paths` whose mode denies it. Returns their modes
/// before. The caller restores the mode with [`close`], or sets the attributes that the directory
/// is to have. With `goes_on`, a directory that cannot be opened is left as it is.
pub(in crate::timeline) fn open<'p>(
    base: &Base,
    paths: impl Iterator<Item = &'p TreePath>,
    goes_on: bool,
) -> FsResult<BTreeMap<TreePath, u32>> {
    let mut opened = BTreeMap::new();
    for path in paths.filter(|_| modes_apply_to_us()) {
        match open_one(base, path) {
            Ok(mode) => opened.extend(mode.map(|mode| (path.clone(), mode))),
            Err(_) if goes_on => {}
            Err(error) => return Err(error),
        }
    }
    Ok(opened)
}

/// Opens one directory, if it is ours and its mode denies us access. Returns its mode before.
fn open_one(base: &Base, path: &TreePath) -> FsResult<Option<u32>> {
    let Some(stat) = if_exists(base.stat(path))? else { return Ok(None) };
    let is_closed = stat.kind == FileKind::Dir && !stat.foreign && stat.mode & OPEN != OPEN;
    let is_ours = stat.uid == nix::unistd::geteuid().as_raw();
    let (true, Some((dir, name))) = (is_closed && is_ours, path.split()) else { return Ok(None) };
    base.writer().dir(&dir)?.set_mode(&name, stat.mode | OPEN)?;
    Ok(Some(stat.mode))
}

/// Restores the mode of a directory that [`open`] opened, if it still exists.
pub(in crate::timeline) fn close(base: &Base, path: &TreePath, mode: u32) -> FsResult<()> {
    match (if_exists(base.stat(path))?, path.split()) {
        (Some(_), Some((dir, name))) => base.writer().dir(&dir)?.set_mode(&name, mode),
        (None, _) | (_, None) => Ok(()),
    }
}
