//! At which paths the base has some nodes. Nothing but all of the base tells that, so a restore of single paths reads it before the
//! tree is locked: whoever works in the mount would wait for it. What turns out to be needed only then is read for another try.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::lower::Lower;
use crate::fs::{Found, State};
use crate::timeline::diff;
use crate::timeline::restore::partial::Foreign;
use crate::tree::Body;
use crate::types::{FileKind, Ino, TreePath};

/// What was found out.
pub(in crate::timeline) struct BasePaths {
    now: Names,
    then: Names,
}

/// The same of the base in one epoch.
struct Names {
    lower: Arc<Lower>,
    /// The nodes that were looked for.
    wanted: HashSet<Ino>,
    paths: BTreeMap<TreePath, Ino>,
}

impl BasePaths {
    /// Looks for all that is needed as the tree is now.
    pub(in crate::timeline) fn of(
        now: &State,
        then: &State,
        paths: &[TreePath],
    ) -> FsResult<BasePaths> {
        let sought = RefCell::new(BasePaths { now: Names::none(now), then: Names::none(then) });
        let find = |state: &State, wanted: &HashSet<Ino>| {
            let mut sought = sought.borrow_mut();
            sought.in_epoch_mut(state).find(wanted)?;
            sought.tell(state, wanted)
        };
        let changes = diff::changes_by(now, then, paths, &find)?;
        let mut wanted = Foreign::between(now, then).unseen(now, then, &changes);
        for change in &changes {
            let Some(ino) = change.new.ino() else { continue };
            if !places(now, then, &change.new, ino, std::iter::empty())?.1 {
                wanted.insert(ino);
            }
        }
        find(now, &wanted)?;
        Ok(sought.into_inner())
    }

    fn in_epoch(&self, state: &State) -> &Names {
        if Arc::ptr_eq(&state.lower, &self.now.lower) { &self.now } else { &self.then }
    }

    fn in_epoch_mut(&mut self, state: &State) -> &mut Names {
        if Arc::ptr_eq(&state.lower, &self.now.lower) { &mut self.now } else { &mut self.then }
    }

    /// The paths of some nodes.
    ///
    /// # Errors
    /// ESTALE if they were not looked for.
    pub(in crate::timeline) fn tell(
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

    /// What is known of a node in the present base.
    pub(in crate::timeline) fn at_hand(&self, ino: Ino) -> impl Iterator<Item = TreePath> {
        self.now.paths.iter().filter(move |(_, of)| **of == ino).map(|(path, _)| path.clone())
    }
}

impl Names {
    fn none(state: &State) -> Names {
        Names { lower: Arc::clone(&state.lower), wanted: HashSet::new(), paths: BTreeMap::new() }
    }

    fn find(&mut self, wanted: &HashSet<Ino>) -> FsResult<()> {
        let missing: HashSet<Ino> = wanted.difference(&self.wanted).copied().collect();
        self.paths.extend(self.lower.names_of(&missing)?);
        self.wanted.extend(missing);
        Ok(())
    }
}

/// Where the base of `now` has a node, by what is known of it and at `sought`; and whether that is certainly all.
pub(in crate::timeline) fn places(
    now: &State,
    then: &State,
    found: &Found,
    ino: Ino,
    sought: impl Iterator<Item = TreePath>,
) -> FsResult<(BTreeSet<TreePath>, bool)> {
    let mut places: BTreeSet<TreePath> = sought.collect();
    places.extend(match found {
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
    for path in places {
        if let Some((at, node)) = now.lower.lookup(&path)?.filter(|(at, _)| *at == ino) {
            let attr = now.attr(&Found::Base(at, path.clone(), node));
            links = links.max(attr.map_or(0, |attr| attr.meta.nlink));
            is_dir |= attr.is_some_and(|attr| attr.kind == FileKind::Dir);
            there.insert(path);
        }
    }
    // What is in the tree may have no name there at all, and one in the base that the tree does not know.
    let known = if now.tree.node(ino).is_some() { now.tree.links(ino).count() } else { 1 };
    Ok((there, is_dir || links as usize <= known))
}
