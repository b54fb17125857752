//! The histories of all paths as a map that is cheap to clone.
//!
//! Garbage collection, compaction and the budget look at all edits. They take a clone under the
//! lock of the head, and look at it without the lock, so no request waits for them.

use std::sync::Arc;

use super::path_history::PathHistory;
use crate::tree::PersistentMap;
use crate::types::TreePath;

/// Histories by path, ascending. A clone copies one pointer.
#[derive(Clone, Default)]
pub(super) struct ByPath(PersistentMap<TreePath, Arc<PathHistory>>);

impl ByPath {
    pub(super) fn get(&self, path: &TreePath) -> Option<&PathHistory> {
        self.0.get(path).map(|list| &**list)
    }

    pub(super) fn contains(&self, path: &TreePath) -> bool {
        self.0.contains_key(path)
    }

    /// All histories.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&TreePath, &PathHistory)> {
        self.0.iter().map(|(path, list)| (path, &**list))
    }

    /// All histories from that of `path` on.
    pub(super) fn from(&self, path: &TreePath) -> impl Iterator<Item = (&TreePath, &PathHistory)> {
        self.0.at_or_after(path).map(|(path, list)| (path, &**list))
    }

    /// The number of edits of all paths.
    pub(super) fn edits(&self) -> u64 {
        self.iter().map(|(_, list)| list.entries.len() as u64).sum()
    }

    /// The history of a path, to change it. A clone that has it too keeps it as it is.
    pub(super) fn get_mut(&mut self, path: &TreePath) -> Option<&mut PathHistory> {
        self.0.get_mut(path).map(Arc::make_mut)
    }

    /// Returns the history of a path, to change it. A path without one gets an empty one.
    pub(super) fn get_or_default(&mut self, path: &TreePath) -> Option<&mut PathHistory> {
        if !self.contains(path) {
            self.0.insert(path.clone(), Arc::default());
        }
        self.get_mut(path)
    }

    pub(super) fn insert(&mut self, path: TreePath, list: PathHistory) {
        self.0.insert(path, Arc::new(list));
    }

    pub(super) fn remove(&mut self, path: &TreePath) -> Option<PathHistory> {
        self.0.remove(path).map(Arc::unwrap_or_clone)
    }

    /// Calls `change` with each history, in order.
    pub(super) fn change_all(&mut self, mut change: impl FnMut(&TreePath, &mut PathHistory)) {
        self.0.change_all(|path, list| change(path, Arc::make_mut(list)));
    }

    /// Removes the histories without edits.
    pub(super) fn remove_empty(&mut self) {
        let is_empty = |(_, list): &(&TreePath, &PathHistory)| list.entries.is_empty();
        let empty: Vec<TreePath> = self.iter().filter(is_empty).map(|(p, _)| p.clone()).collect();
        empty.iter().for_each(|path| drop(self.0.remove(path)));
    }
}
