//! Finds the base paths of given inodes.
//!
//! The base has no reverse index, so this scans it. A restore of paths scans before it takes the
//! lock of changes, so that no program waits for the scan. If it finds under the lock that it needs
//! more, it starts over with another scan.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::lower::Lower;
use crate::fs::{Found, State};
use crate::timeline::diff;
use crate::timeline::restore::epochs::EpochDiff;
use crate::tree::Body;
use crate::types::{FileKind, Ino, TreePath};

/// The base paths of the inodes that a restore needs.
pub(in crate::timeline) struct BasePaths {
    now: EpochPaths,
    then: EpochPaths,
}

/// The same in one epoch of the base.
struct EpochPaths {
    lower: Arc<Lower>,
    /// The inodes that the scans looked for.
    wanted: HashSet<Ino>,
    paths: BTreeMap<TreePath, Ino>,
}

impl BasePaths {
    /// Finds all paths that a restore of `paths` from `then` needs, if the tree stays as in `now`.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(in crate::timeline) fn of(
        now: &State,
        then: &State,
        paths: &[TreePath],
    ) -> FsResult<BasePaths> {
        let found =
            RefCell::new(BasePaths { now: EpochPaths::none(now), then: EpochPaths::none(then) });
        let find = |state: &State, wanted: &HashSet<Ino>| {
            let mut found = found.borrow_mut();
            found.in_epoch_mut(state).find(wanted)?;
            found.paths_of(state, wanted)
        };
        let changes = diff::changes_by(now, then, paths, &find)?;
        let mut wanted = EpochDiff::between(now, then).without_known_path(now, then, &changes);
        for change in &changes {
            let Some(ino) = change.new.ino() else { continue };
            if !paths_in_base(now, then, &change.new, ino, std::iter::empty())?.1 {
                wanted.insert(ino);
            }
        }
        find(now, &wanted)?;
        Ok(found.into_inner())
    }

    fn in_epoch(&self, state: &State) -> &EpochPaths {
        if Arc::ptr_eq(&state.lower, &self.now.lower) { &self.now } else { &self.then }
    }

    fn in_epoch_mut(&mut self, state: &State) -> &mut EpochPaths {
        if Arc::ptr_eq(&state.lower, &self.now.lower) { &mut self.now } else { &mut self.then }
    }

    /// The base paths of some inodes in the epoch of `state`.
    ///
    /// # Errors
    /// [`FsError::Stale`] if no scan looked for them.
    pub(in crate::timeline) fn paths_of(
        &self,
        state: &State,
        wanted: &HashSet<Ino>,
    ) -> FsResult<BTreeMap<TreePath, Ino>> {
        let names = self.in_epoch(state);
        if !wanted.is_subset(&names.wanted)
            || !Arc::ptr_eq(&names.lower, &state.lower) && !wanted.is_empty()
        {
            return Err(FsError::Stale);
        }
        let is_wanted = |(_, ino): &(&TreePath, &Ino)| wanted.contains(*ino);
        Ok(names.paths.iter().filter(is_wanted).map(|(path, ino)| (path.clone(), *ino)).collect())
    }

    /// The known paths of an inode in the present base.
    pub(in crate::timeline) fn known_paths(&self, ino: Ino) -> impl Iterator<Item = TreePath> {
        self.now.paths.iter().filter(move |(_, of)| **of == ino).map(|(path, _)| path.clone())
    }
}

impl EpochPaths {
    fn none(state: &State) -> EpochPaths {
        EpochPaths {
            lower: Arc::clone(&state.lower),
            wanted: HashSet::new(),
            paths: BTreeMap::new(),
        }
    }

    fn find(&mut self, wanted: &HashSet<Ino>) -> FsResult<()> {
        let missing: HashSet<Ino> = wanted.difference(&self.wanted).copied().collect();
        self.paths.extend(self.lower.names_of(&missing)?);
        self.wanted.extend(missing);
        Ok(())
    }
}

/// The paths at which the base of `now` has an inode, among the `known` ones and the one that the
/// record of `then` names; and whether these are certainly all.
pub(in crate::timeline) fn paths_in_base(
    now: &State,
    then: &State,
    found: &Found,
    ino: Ino,
    known: impl Iterator<Item = TreePath>,
) -> FsResult<(BTreeSet<TreePath>, bool)> {
    let mut paths: BTreeSet<TreePath> = known.collect();
    paths.extend(match found {
        Found::Base(_, path, _) => Some(path.clone()),
        Found::Upper(ino, _) => match then.tree.node(*ino).map(|node| &node.body) {
            Some(Body::File { origin: Some(origin), .. }) => Some(origin.path.clone()),
            Some(Body::Dir { base }) => base.clone(),
            _ => None,
        },
        Found::Nothing(_) => None,
    });
    let (mut links, mut is_dir) = (now.tree.node(ino).map_or(0, |node| node.meta.nlink), false);
    let mut there = BTreeSet::new();
    for path in paths {
        if let Some((at, node)) = now.lower.lookup(&path)?.filter(|(at, _)| *at == ino) {
            let attr = now.attr(&Found::Base(at, path.clone(), node));
            links = links.max(attr.map_or(0, |attr| attr.meta.nlink));
            is_dir |= attr.is_some_and(|attr| attr.kind == FileKind::Dir);
            there.insert(path);
        }
    }
    // A node of the tree may have no name in the tree, and one in the base that the tree does not
    // mention.
    let in_tree = if now.tree.node(ino).is_some() { now.tree.links(ino).count() } else { 1 };
    Ok((there, is_dir || links as usize <= in_tree))
}
