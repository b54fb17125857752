//! Finds paths that another program changed in the base since the tree has seen them.
//!
//! When the tree copies up a node or hides a name, it keeps the fingerprint of what was there. If
//! the base has another fingerprint now, that is a conflict. The tree has no fingerprint of a name
//! that it never looked at. Such a name conflicts if its change time is later than the beginning of
//! the epoch, which the layers of the epoch record. When gc replaces layers, the new layer takes
//! over that time.

use crate::base::{BaseStat, PathLookup};
use crate::error::{Attempt, FsResult, Result, if_exists};
use crate::fs::State;
use crate::store::record::LayerKind;
use crate::timeline::Timeline;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Dentry};
use crate::types::{Epoch, FileKind, Fingerprint, Ino, Timestamp, TreePath};

impl Timeline {
    /// The paths among the changes that conflict with the base, and how.
    pub(in crate::timeline) fn conflicts(
        &self,
        to: &State,
        changes: &[PathChange],
    ) -> FsResult<Vec<(TreePath, String)>> {
        let mut expected = Expectations::of(to, self.epoch_began(to.lower.epoch()));
        let mut conflicts = Vec::new();
        for change in changes {
            let how = expected.conflict_at(&change.path, change.what == What::Deleted)?;
            conflicts.extend(how.map(|how| (change.path.clone(), how.to_owned())));
        }
        Ok(conflicts)
    }

    /// The paths at which the tree copied up or hides something of the base that is not the same
    /// any more, and how they differ; `most` paths at most.
    ///
    /// # Errors
    /// Those of the base.
    pub fn changed_in_base(&self, most: usize) -> Result<Vec<(TreePath, String)>> {
        let state = self.fs().state();
        let mut expected = Expectations::of(&state, self.epoch_began(state.lower.epoch()));
        let mut found = Vec::new();
        for (dir, node) in state.tree.nodes() {
            let Body::Dir { base: Some(base) } = &node.body else { continue };
            for (name, _) in state.tree.dentries(dir) {
                let path = base.join(name);
                let how = expected
                    .conflict_at(&path, false)
                    .attempt(|| format!("look at '{path}' in the base"))?;
                found.extend(how.map(|how| (path, how.to_owned())));
                if found.len() >= most {
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }

    /// The time since which the base is as an epoch shows it.
    ///
    /// Later applies changed the base as well, but they recorded what they left at each path that
    /// they touched. At all other paths, a later change time means another program.
    fn epoch_began(&self, epoch: Epoch) -> Timestamp {
        let mut all = self.store().catalog();
        all.retain(|layer| layer.header.epoch == epoch);
        let (applies, begun): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|layer| layer.header.kind == LayerKind::PreImage);
        // The apply that began the epoch sealed its layer first. The maximum guards against a clock
        // that was set back.
        let applied =
            applies.into_iter().filter_map(|layer| layer.seal).map(|seal| seal.time).max();
        let first = begun.into_iter().map(|layer| layer.header.time).min();
        applied.into_iter().chain(first).max().unwrap_or_default()
    }
}

/// The node that the tree expects the base to have at a path.
enum Expected {
    Nothing,
    Print(Fingerprint),
    /// The tree never looked at the path.
    Unknown,
}

/// Compares the base with what a tree has seen of it, path by path.
struct Expectations<'a> {
    to: &'a State,
    /// The time since which the base is as the epoch of the tree shows it.
    since: Timestamp,
    lookup: PathLookup<'a>,
    /// The directory of the last path, and its number in the base, if the base has it.
    last_dir: Option<(TreePath, Option<Ino>)>,
}

impl<'a> Expectations<'a> {
    fn of(to: &'a State, since: Timestamp) -> Expectations<'a> {
        Expectations { to, since, lookup: to.lower.base().lookup_paths(), last_dir: None }
    }

    /// How the base differs at a path from what the tree has seen; none if it does not.
    fn conflict_at(&mut self, path: &TreePath, is_to_go: bool) -> FsResult<Option<&'static str>> {
        if self.to.lower.is_half_applied(path) {
            return Ok(None);
        }
        let there = if_exists(self.lookup.stat(path))?;
        let is_dir = |stat: &BaseStat| stat.kind == FileKind::Dir;
        Ok(match (self.at(path)?, &there) {
            (Expected::Nothing | Expected::Unknown, None) => None,
            (Expected::Nothing, Some(_)) => Some("it appeared in the base"),
            (Expected::Print(_), None) => Some("it was removed from the base"),
            // A directory whose names changed is no conflict, unless the directory is to be
            // removed.
            (Expected::Print(print), Some(stat)) if is_dir(stat) && !is_to_go => {
                let has_stable_inodes = self.to.lower.base().has_stable_inodes();
                let is_same = print.ino == stat.ino || !has_stable_inodes;
                (!is_same).then_some("it was replaced in the base")
            }
            (Expected::Print(print), Some(stat)) => {
                let is_same = self.to.lower.is_as(&print, &stat.fingerprint());
                (!is_same).then_some("it changed in the base")
            }
            (Expected::Unknown, Some(stat)) => {
                (!is_dir(stat) && stat.ctime > self.since).then_some("it changed in the base")
            }
        })
    }

    /// The node that the tree expects at a path.
    fn at(&mut self, path: &TreePath) -> FsResult<Expected> {
        if let Some(left) = self.to.lower.left_since(path) {
            return Ok(left.map_or(Expected::Nothing, Expected::Print));
        }
        let Some((dir, name)) = path.split() else { return Ok(Expected::Unknown) };
        // The fingerprint is in the directory that merges this directory of the base, wherever that
        // directory stands in the tree now.
        let Some(ino) = self.number_of(&dir)? else { return Ok(Expected::Nothing) };
        let merges_it = matches!(
            self.to.tree.node(ino).map(|n| &n.body),
            Some(Body::Dir { base: Some(base) }) if *base == dir
        );
        Ok(match self.to.tree.dentry(ino, &name).filter(|_| merges_it) {
            Some(Dentry::Child { hides: Some(print), .. } | Dentry::Whiteout(print)) => {
                Expected::Print(**print)
            }
            Some(Dentry::Child { hides: None, .. }) => Expected::Nothing,
            None => Expected::Unknown,
        })
    }

    fn number_of(&mut self, dir: &TreePath) -> FsResult<Option<Ino>> {
        match &self.last_dir {
            Some((last, ino)) if last == dir => Ok(*ino),
            _ => {
                let ino = self.to.lower.lookup(dir)?.map(|(ino, _)| ino);
                self.last_dir = Some((dir.clone(), ino));
                Ok(ino)
            }
        }
    }
}
