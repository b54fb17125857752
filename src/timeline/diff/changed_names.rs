//! Finds where the trees of two states differ, so that a comparison looks nowhere else.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::NamesOf;
use crate::error::FsResult;
use crate::fs::State;
use crate::tree::TreeDiff;
use crate::types::{FileKind, Ino, Name, TreePath};

/// The base paths of differing files of which the trees mention only other names.
pub(super) fn unseen_links(
    old: &State,
    new: &State,
    diff: &TreeDiff,
    names_of: NamesOf<'_>,
) -> FsResult<BTreeSet<TreePath>> {
    let is_unseen = |state: &State, ino: Ino| {
        state.tree.node(ino).is_some_and(|node| {
            node.kind() != FileKind::Dir
                && node.meta.nlink as usize > state.tree.links_of(ino, node).count()
        })
    };
    let differing = diff.nodes.union(&diff.contents).copied();
    let wanted: HashSet<Ino> =
        differing.filter(|ino| is_unseen(old, *ino) || is_unseen(new, *ino)).collect();
    let mut paths: BTreeSet<TreePath> = names_of(old, &wanted)?.into_keys().collect();
    if old.lower.epoch() != new.lower.epoch() {
        paths.extend(names_of(new, &wanted)?.into_keys());
    }
    Ok(paths)
}

/// Groups paths of the base by directory, with the directories that lead to them.
pub(super) fn by_directory(paths: &BTreeSet<TreePath>) -> HashMap<TreePath, BTreeSet<Name>> {
    let mut names: HashMap<TreePath, BTreeSet<Name>> = HashMap::new();
    for path in paths {
        let mut at = path.split();
        while let Some((dir, name)) = at {
            at = dir.split();
            if !names.entry(dir).or_default().insert(name) {
                break;
            }
        }
    }
    names
}

/// The nodes that differ or lead to one that does, and the names in each directory that lead to
/// them.
#[derive(Default)]
pub(super) struct ChangedNames {
    pub(super) nodes: HashSet<Ino>,
    pub(super) names: HashMap<Ino, Vec<Name>>,
}

impl ChangedNames {
    pub(super) fn of(
        old: &State,
        new: &State,
        diff: &TreeDiff,
        touched: &HashMap<TreePath, BTreeSet<Name>>,
    ) -> FsResult<ChangedNames> {
        let mut changed = ChangedNames { nodes: HashSet::from([Ino::ROOT]), names: HashMap::new() };
        let mut finders = [old, new].map(|state| Finder { state, dirs: HashSet::new() });
        for (dir, name) in &diff.names {
            changed.names.entry(*dir).or_default().push(name.clone());
            finders.iter_mut().for_each(|finder| finder.add_dir(*dir, &mut changed));
        }
        // All names that only the newer state has are in `diff.names`. The older state has the
        // others.
        let [in_old, _] = &mut finders;
        diff.nodes.iter().chain(&diff.contents).for_each(|ino| in_old.add(*ino, &mut changed));
        // The walk must enter the directories above a touched path.
        for (dir, names) in touched {
            for path in std::iter::once(dir.clone()).chain(names.iter().map(|name| dir.join(name)))
            {
                for finder in &mut finders {
                    if let Some((ino, _)) = finder.state.lower.lookup(&path)? {
                        finder.add(ino, &mut changed);
                    }
                }
            }
        }
        Ok(changed)
    }
}

/// Finds the names that lead to nodes in one state.
struct Finder<'a> {
    state: &'a State,
    /// Directories whose own names are added already.
    dirs: HashSet<Ino>,
}

impl Finder<'_> {
    fn add(&mut self, ino: Ino, changed: &mut ChangedNames) {
        changed.nodes.insert(ino);
        let Some(node) = self.state.tree.node(ino) else { return };
        for (dir, name) in self.state.tree.links_of(ino, node) {
            changed.names.entry(dir).or_default().push(name.clone());
            self.add_dir(dir, changed);
        }
    }

    fn add_dir(&mut self, mut dir: Ino, changed: &mut ChangedNames) {
        while self.dirs.insert(dir) {
            changed.nodes.insert(dir);
            let Some((above, name)) = self.state.tree.parent(dir) else { return };
            changed.names.entry(above).or_default().push(name.clone());
            dir = above;
        }
    }
}
