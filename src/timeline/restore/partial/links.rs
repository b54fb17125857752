//! Decides which node a restored name gets, by the names that the node has outside of the paths.

use std::collections::{BTreeSet, HashSet};

use super::merge::{FreshNumbers, Merge};
use crate::error::{FsError, FsResult};
use crate::fs::{Found, State};
use crate::timeline::diff::PathChange;
use crate::timeline::restore::base_paths::paths_in_base;
use crate::tree::Meta;
use crate::types::{Ino, Timestamp, TreePath};

impl Merge<'_> {
    /// The inode number that a restored name of a file gets: `wanted`, or a fresh one if names
    /// outside of the paths keep that node.
    pub(super) fn node_for(
        &mut self,
        change: &PathChange,
        wanted: Ino,
        fresh: FreshNumbers<'_>,
    ) -> FsResult<Ino> {
        if let Some(placed) = self.placed.get(&wanted) {
            return Ok(*placed);
        }
        let outside = self.paths_outside(&change.new, wanted)?;
        let ino = if outside.is_empty() {
            wanted
        } else if self.is_unchanged_link(change, wanted, &outside)? {
            self.joined.insert(wanted);
            wanted
        } else {
            fresh()?
        };
        self.placed.insert(wanted, ino);
        Ok(ino)
    }

    /// Whether the file was a hard link of a name outside, and that name is unchanged.
    fn is_unchanged_link(
        &self,
        change: &PathChange,
        wanted: Ino,
        outside: &[TreePath],
    ) -> FsResult<bool> {
        for path in outside {
            let (old, new) = (self.now.resolve(path)?, self.then.resolve(path)?);
            if new.ino() != Some(wanted) {
                continue;
            }
            let (a, a_extents) = self.now.record(&old)?;
            let (b, b_extents) = self.then.record(&change.new)?;
            let same = |meta: Meta| Meta { nlink: 0, ctime: Timestamp::default(), ..meta };
            return Ok(a.body == b.body
                && a_extents == b_extents
                && a.xattrs == b.xattrs
                && same(a.meta) == same(b.meta)
                && self.epochs.is_same_epoch);
        }
        Ok(false)
    }

    /// The paths outside of the restored ones at which the present state shows a node.
    pub(super) fn paths_outside(&self, found: &Found, ino: Ino) -> FsResult<Vec<TreePath>> {
        let tree = &self.now.tree;
        let mut names: BTreeSet<TreePath> =
            tree.links(ino).filter_map(|(dir, name)| tree.path_in(dir, name)).collect();
        for path in self.known_base_paths(found, ino)? {
            names.extend(shown_as(self.now, &path)?);
        }
        let mut outside = Vec::new();
        for path in names.into_iter().filter(|path| !self.is_inside(path)) {
            if self.now.resolve(&path)?.ino() == Some(ino) {
                outside.push(path);
            }
        }
        Ok(outside)
    }

    /// The paths at which the present base has a node.
    fn known_base_paths(&self, found: &Found, ino: Ino) -> FsResult<BTreeSet<TreePath>> {
        let (places, is_all) =
            paths_in_base(self.now, self.then, found, ino, self.base_paths.known_paths(ino))?;
        if !is_all {
            self.base_paths.paths_of(self.now, &HashSet::from([ino]))?;
        }
        Ok(places)
    }

    /// Copies up a node that is to get a further name, if the present state shows it in the base.
    /// From then on the tree counts its links.
    pub(super) fn copy_up_shown(&mut self, found: &Found, ino: Ino) -> FsResult<()> {
        if self.state.tree.node(ino).is_some() {
            return Ok(());
        }
        for path in self.known_base_paths(found, ino)? {
            if let Some(shown) = shown_as(&self.state, &path)?
                && self.state.resolve(&shown)?.ino() == Some(ino)
            {
                return self.copy_up(&path).map(drop);
            }
        }
        Ok(())
    }
}

/// The path at which a state shows a path of the base; none if something hides it.
fn shown_as(state: &State, path: &TreePath) -> FsResult<Option<TreePath>> {
    let Some((above, name)) = path.split() else { return Ok(None) };
    let Some((dir, _)) = state.lower.lookup(&above)? else { return Ok(None) };
    match state.dir_path(dir, Some(&above)) {
        Ok(dir) => Ok(Some(dir.join(&name))),
        Err(FsError::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}
