//! Guards path walks of the kernel against renames: a directory must not move so near to the root
//! that a walk which stands in it climbs out.
//!
//! The kernel walks the text of a link after READLINK, and does not report the end of the walk. It
//! holds the link until it has walked all but the last component, and then sends FORGET. So from
//! the reply until FORGET, a link has **marks**: a directory, and how many `..` a walk that stands
//! there may still take.
//!
//! Always true: each directory in which a walk can stand before its last `..` has a mark of at
//! least the `..` that are left, or is so far below a marked directory that its mark suffices.
//!
//! * A reply marks the link's directory. That covers the directories above it too: each is one
//!   level nearer to the root, and one `..` of the walk is used up.
//! * A directory that moves takes the walks below it along, but not those that have climbed past
//!   it. So its old parent is marked with what those have left ([`ClimbGuard::leave`]).
//! * A removed directory can move only together with its parent, which inherits its marks
//!   ([`ClimbGuard::remove`]).
//! * Moving, removing or linking the link itself changes nothing: the walk goes on.
//!
//! Outside the root one `..` is always possible, so a mark of 1 is not stored.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// The marks. `L` identifies a link and `D` a directory, as the kernel holds them.
#[derive(Debug)]
pub struct ClimbGuard<L, D> {
    marks: HashMap<D, BTreeMap<L, usize>>,
    links: HashMap<L, BTreeSet<D>>,
}

impl<L, D> Default for ClimbGuard<L, D> {
    fn default() -> ClimbGuard<L, D> {
        ClimbGuard { marks: HashMap::new(), links: HashMap::new() }
    }
}

impl<L: Copy + Ord + Hash, D: Copy + Ord + Hash> ClimbGuard<L, D> {
    /// A text that climbs `up` levels was served for `link`, which the kernel may have found in
    /// `dir`.
    pub fn serve(&mut self, link: L, dir: D, up: usize) {
        if up > 1 {
            let mark = self.marks.entry(dir).or_default().entry(link).or_default();
            *mark = up.max(*mark);
            self.links.entry(link).or_default().insert(dir);
        }
    }

    /// A directory is about to leave `parent`. `below` returns how many levels a directory is below
    /// the moved one: 0 for that itself, `None` for a directory elsewhere.
    pub fn leave(&mut self, parent: D, below: impl Fn(D) -> Option<usize>) {
        let marked = self.marks.iter().filter_map(|(dir, marks)| Some((marks, below(*dir)?)));
        let passed: Vec<(L, usize)> = marked
            .flat_map(|(marks, levels)| {
                marks.iter().map(move |(link, up)| (*link, up.saturating_sub(levels + 1)))
            })
            .collect();
        for (link, up) in passed {
            self.serve(link, parent, up);
        }
    }

    /// A directory was removed from `parent`. Of nested directories, remove the deepest first.
    pub fn remove(&mut self, dir: D, parent: D) {
        let Some(marks) = self.marks.remove(&dir) else { return };
        for (link, up) in marks {
            if let Some(dirs) = self.links.get_mut(&link) {
                dirs.remove(&dir);
            }
            self.serve(link, parent, up.saturating_sub(1));
        }
    }

    /// Whether a directory may move to `depth`, where 1 is directly below the root. `below` as in
    /// [`ClimbGuard::leave`].
    pub fn may_stand_at(&self, depth: usize, below: impl Fn(D) -> Option<usize>) -> bool {
        let mut marked = self.marks.iter().filter_map(|(dir, marks)| Some((marks, below(*dir)?)));
        marked.all(|(marks, levels)| marks.values().all(|up| *up <= depth + levels))
    }

    /// The kernel sent FORGET for a link: no walk of its text is under way.
    pub fn forget_link(&mut self, link: L) {
        for dir in self.links.remove(&link).unwrap_or_default() {
            if let Some(marks) = self.marks.get_mut(&dir) {
                marks.remove(&link);
                if marks.is_empty() {
                    self.marks.remove(&dir);
                }
            }
        }
    }

    /// The kernel sent FORGET for a directory: no walk stands in it.
    pub fn forget_dir(&mut self, dir: D) {
        for link in self.marks.remove(&dir).unwrap_or_default().into_keys() {
            if let Some(dirs) = self.links.get_mut(&link) {
                dirs.remove(&dir);
                if dirs.is_empty() {
                    self.links.remove(&link);
                }
            }
        }
    }

    /// The marked directories.
    pub fn dirs(&self) -> impl Iterator<Item = D> + '_ {
        self.marks.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The directories `a/b/c`: 3 is in 2, 2 in 1, 1 in the root.
    fn below(top: u32) -> impl Fn(u32) -> Option<usize> {
        move |dir| dir.checked_sub(top).map(|levels| levels as usize)
    }

    #[test]
    fn a_mark_also_holds_the_directories_above() {
        let mut guard = ClimbGuard::default();
        guard.serve('l', 3, 3);
        assert!(guard.may_stand_at(3, below(3)));
        assert!(!guard.may_stand_at(2, below(3)));
        assert!(guard.may_stand_at(2, below(2)), "its present depth");
        assert!(!guard.may_stand_at(1, below(2)));
        assert!(guard.may_stand_at(1, below(4)), "no mark there");
        guard.forget_link('l');
        assert!(guard.may_stand_at(1, below(3)));
        assert!(guard.marks.is_empty() && guard.links.is_empty());
    }

    #[test]
    fn a_walk_that_climbed_past_a_directory_does_not_move_with_it() {
        let mut guard = ClimbGuard::default();
        guard.serve('l', 3, 3);
        guard.leave(2, below(3));
        // 3 has moved elsewhere. A walk may stand in 2 with two `..` to go.
        let gone = |top| move |dir: u32| (dir < 3 && dir >= top).then(|| (dir - top) as usize);
        assert!(!guard.may_stand_at(1, gone(2)));
        guard.leave(1, gone(2));
        assert_eq!(guard.marks[&2], BTreeMap::from([('l', 2)]));
        assert!(!guard.marks.contains_key(&1), "one `..` is always possible");
        guard.forget_dir(2);
        assert_eq!(guard.dirs().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn a_removed_directory_leaves_its_marks_to_its_parent() {
        let mut guard = ClimbGuard::default();
        guard.serve('l', 3, 3);
        guard.serve('m', 3, 2);
        guard.remove(3, 2);
        assert_eq!(guard.marks, HashMap::from([(2, BTreeMap::from([('l', 2)]))]));
        guard.remove(2, 1);
        assert!(guard.marks.is_empty());
    }
}
