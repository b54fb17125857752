//! Finds nodes that were renamed between two states, by their inode numbers.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::Dir;
use crate::error::{FsError, FsResult};
use crate::fs::State;
use crate::tree::{Body, Dentry, TreeDiff};
use crate::types::{Ino, Name, TreePath};

/// The place of a node: its directory, and its name there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    dir: Ino,
    name: Name,
}

/// The renames between two states.
#[derive(Default)]
pub(super) struct Renames {
    /// The directory and name that a node came to, by the place that it left.
    new_places: HashMap<Place, (Dir, Name)>,
    /// The directory and the name that it left, by the place it came to.
    old_places: HashMap<Place, (Dir, Name)>,
    /// The renames that a trial walk has met.
    pub(super) trial: Option<Trial>,
}

/// The ends of renames that a walk met, each by the place that the node left.
#[derive(Default)]
pub(super) struct Trial {
    left: HashSet<Place>,
    arrived: HashSet<Place>,
}

impl Renames {
    pub(super) fn is_empty(&self) -> bool {
        self.old_places.is_empty()
    }

    pub(super) fn find(old: &State, new: &State, diff: &TreeDiff) -> FsResult<Renames> {
        let mut renames = Renames::default();
        // Directories by number, as the other state sees their paths: many names share one.
        let (mut in_new, mut in_old) = (SamePath::default(), SamePath::default());
        let mut moved_dirs: HashSet<Ino> = HashSet::new();
        for (dir, name) in &diff.names {
            let Some(Dentry::Child { ino, .. }) = new.tree.dentry(*dir, name) else {
                continue;
            };
            let Ok(base) = new.lower_path(*dir) else { continue };
            let is_new_name = in_old.is_free((new, old), (*dir, base.clone()), name)?;
            for (above, old_name) in old_places(old, new, *ino)? {
                let place = Place { dir: above.0, name: old_name.clone() };
                // The rename of a directory covers the nodes in it.
                let went_along = above.0 == *dir && old_name == *name && moved_dirs.contains(dir);
                // If another node stands at the old path now, that path is a change of its own, and
                // a rename would list it twice.
                if is_new_name
                    && !went_along
                    && !renames.new_places.contains_key(&place)
                    && in_new.is_free((old, new), above.clone(), &old_name)?
                {
                    let arrived = Place { dir: *dir, name: name.clone() };
                    renames.new_places.insert(place, ((*dir, base.clone()), name.clone()));
                    renames.old_places.insert(arrived, (above, old_name));
                    moved_dirs.insert(*ino);
                    break;
                }
            }
        }
        Ok(renames)
    }

    /// The directory and name to which the node went that is gone from a name of `dir`, if it was
    /// renamed.
    pub(super) fn leaves(&mut self, dir: Option<&Dir>, name: Option<&Name>) -> Option<(Dir, Name)> {
        let (dir, name) = dir.zip(name)?;
        let place = Place { dir: dir.0, name: name.clone() };
        let to = self.new_places.get(&place)?.clone();
        if let Some(trial) = &mut self.trial {
            trial.left.insert(place);
        }
        Some(to)
    }

    /// The directory and name that the node at a name of `dir` left, if it was renamed.
    pub(super) fn arrives(
        &mut self,
        dir: Option<&Dir>,
        name: Option<&Name>,
    ) -> Option<(Dir, Name)> {
        let (dir, name) = dir.zip(name)?;
        let from = self.old_places.get(&Place { dir: dir.0, name: name.clone() })?.clone();
        if let Some(trial) = &mut self.trial {
            trial.arrived.insert(Place { dir: from.0.0, name: from.1.clone() });
        }
        Some(from)
    }

    /// Ends a trial, and drops the renames of which the walk met only one end. Below a renamed
    /// directory both ends have other paths than the trees say, and another node may stand there.
    /// Returns whether it dropped any.
    pub(super) fn drop_half(&mut self) -> bool {
        let Some(Trial { left, arrived }) = self.trial.take() else { return false };
        let before = self.new_places.len();
        self.new_places.retain(|old, _| left.contains(old) && arrived.contains(old));
        self.old_places.retain(|_, (dir, name)| {
            self.new_places.contains_key(&Place { dir: dir.0, name: name.clone() })
        });
        self.new_places.len() < before
    }
}

/// Finds what one state has at the path of a directory of another state.
#[derive(Default)]
struct SamePath(HashMap<Ino, AtPath>);

/// The node at the path of a directory in the other state.
enum AtPath {
    /// The directory has no path: no name leads to it.
    NoPath,
    NoDir,
    Dir(Dir),
}

impl SamePath {
    /// Whether the state `there` has nothing at the path of `name` in the directory `dir` of
    /// `here`. False if the directory has no path.
    fn is_free(
        &mut self,
        (here, there): (&State, &State),
        dir: Dir,
        name: &Name,
    ) -> FsResult<bool> {
        let found = match self.0.entry(dir.0) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(match here.dir_path(dir.0, dir.1.as_ref()) {
                Ok(path) => there.as_dir(&there.resolve(&path)?).map_or(AtPath::NoDir, AtPath::Dir),
                Err(FsError::NotFound) => AtPath::NoPath,
                Err(error) => return Err(error),
            }),
        };
        match found {
            AtPath::Dir((dir, base)) => Ok(there.find(*dir, base.as_ref(), name)?.ino().is_none()),
            AtPath::NoDir => Ok(true),
            AtPath::NoPath => Ok(false),
        }
    }
}

/// The directories and names of a node in the older state, as far as the records tell.
fn old_places(old: &State, new: &State, ino: Ino) -> FsResult<Vec<(Dir, Name)>> {
    if old.tree.node(ino).is_some() {
        let places = old.tree.links(ino).filter_map(|(dir, name)| {
            let base = old.lower_path(dir).ok()?;
            Some(((dir, base), name.clone()))
        });
        return Ok(places.collect());
    }
    let base = new.tree.node(ino).and_then(|node| match &node.body {
        Body::Dir { base } => base.clone(),
        Body::File { origin, .. } => origin.as_ref().map(|o| o.path.clone()),
        Body::Symlink { .. } | Body::Special => None,
    });
    let Some((above, name)) = base.as_ref().and_then(TreePath::split) else {
        return Ok(Vec::new());
    };
    let Some((dir, _)) = old.lower.lookup(&above)? else { return Ok(Vec::new()) };
    match old.dir_path(dir, Some(&above)) {
        Ok(path) => {
            let Some((dir, base)) = old.as_dir(&old.resolve(&path)?) else { return Ok(Vec::new()) };
            let found = old.find(dir, base.as_ref(), &name)?;
            Ok((found.ino() == Some(ino)).then_some(((dir, base), name)).into_iter().collect())
        }
        Err(FsError::NotFound) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}
