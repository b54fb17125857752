//! Walks of the kernel that may be under way: which directory must not come nearer to the root than what was served
//! climbs.
//!
//! The kernel walks the text of a link after we gave it, and does not say when it is done. All it says is that it let go
//! of the link, and it holds a link until it has walked all but the last component of its text. So for each link, from
//! the answer until it is forgotten, there are **marks**: a directory, and how many `..` a walk that stands there may
//! still take. What is always true: every place where a walk of a link's text can stand before its last `..` is marked
//! with at least what is left of its climb, or is so far below a mark that the mark holds it, too.
//!
//! * An answer marks the directory of the link. That holds the directories above it: they are one `..` nearer to the root
//!   and one `..` of the walk is used up.
//! * A directory that moves takes along who stands at or below it, but not who has passed it on the way up. So when a
//!   directory leaves another one, this one is marked with what is then left ([`Walks::leave`]).
//! * A directory that is removed moves no more by itself, but with the one above it, which gets its marks
//!   ([`Walks::remove`]).
//! * What became of the link meanwhile does not matter: moved, removed or linked elsewhere, a walk goes on.
//!
//! One `..` is always possible outside the root, so a mark of 1 is none.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// The marks. `L` stands for links and `D` for directories, as the kernel holds them.
#[derive(Debug)]
pub struct Walks<L, D> {
    marks: HashMap<D, BTreeMap<L, usize>>,
    links: HashMap<L, BTreeSet<D>>,
}

impl<L, D> Default for Walks<L, D> {
    fn default() -> Walks<L, D> {
        Walks { marks: HashMap::new(), links: HashMap::new() }
    }
}

impl<L: Copy + Ord + Hash, D: Copy + Ord + Hash> Walks<L, D> {
    /// A text that climbs `up` levels was served for `link`, which the kernel may have met in `dir`.
    pub fn serve(&mut self, link: L, dir: D, up: usize) {
        if up > 1 {
            let mark = self.marks.entry(dir).or_default().entry(link).or_default();
            *mark = up.max(*mark);
            self.links.entry(link).or_default().insert(dir);
        }
    }

    /// A directory is about to leave `parent`. `below` says how many levels a directory is below it: 0 for itself, none
    /// for one that is elsewhere.
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

    /// A directory was removed from `parent`; of several, the lower ones first.
    pub fn remove(&mut self, dir: D, parent: D) {
        let Some(marks) = self.marks.remove(&dir) else { return };
        for (link, up) in marks {
            if let Some(dirs) = self.links.get_mut(&link) {
                dirs.remove(&dir);
            }
            self.serve(link, parent, up.saturating_sub(1));
        }
    }

    /// Whether a directory may stand at `depth`: 1 is right below the root. `below` as in [`Walks::leave`].
    pub fn may_stand_at(&self, depth: usize, below: impl Fn(D) -> Option<usize>) -> bool {
        let mut marked = self.marks.iter().filter_map(|(dir, marks)| Some((marks, below(*dir)?)));
        marked.all(|(marks, levels)| marks.values().all(|up| *up <= depth + levels))
    }

    /// The kernel let go of a link: no walk of its text is under way.
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

    /// The kernel let go of a directory: nobody stands there.
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

    /// The directories that are marked.
    pub fn dirs(&self) -> impl Iterator<Item = D> + '_ {
        self.marks.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The directories `c/b/a` and so on: 3 is in 2, 2 in 1, 1 in the root.
    fn below(top: u32) -> impl Fn(u32) -> Option<usize> {
        move |dir| dir.checked_sub(top).map(|levels| levels as usize)
    }

    #[test]
    fn who_is_marked_holds_those_above() {
        let mut walks = Walks::default();
        walks.serve('l', 3, 3);
        assert!(walks.may_stand_at(3, below(3)));
        assert!(!walks.may_stand_at(2, below(3)));
        assert!(walks.may_stand_at(2, below(2)), "where it is");
        assert!(!walks.may_stand_at(1, below(2)));
        assert!(walks.may_stand_at(1, below(4)), "nobody is marked there");
        walks.forget_link('l');
        assert!(walks.may_stand_at(1, below(3)));
        assert!(walks.marks.is_empty() && walks.links.is_empty());
    }

    #[test]
    fn who_has_passed_a_directory_does_not_move_with_it() {
        let mut walks = Walks::default();
        walks.serve('l', 3, 3);
        walks.leave(2, below(3));
        // 3 is elsewhere now; a walk may stand in 2 with two steps to go.
        let gone = |top| move |dir: u32| (dir < 3 && dir >= top).then(|| (dir - top) as usize);
        assert!(!walks.may_stand_at(1, gone(2)));
        walks.leave(1, gone(2));
        assert_eq!(walks.marks[&2], BTreeMap::from([('l', 2)]));
        assert!(!walks.marks.contains_key(&1), "one step is always possible");
        walks.forget_dir(2);
        assert_eq!(walks.dirs().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn a_removed_directory_leaves_its_marks_to_the_one_above() {
        let mut walks = Walks::default();
        walks.serve('l', 3, 3);
        walks.serve('m', 3, 2);
        walks.remove(3, 2);
        assert_eq!(walks.marks, HashMap::from([(2, BTreeMap::from([('l', 2)]))]));
        walks.remove(2, 1);
        assert!(walks.marks.is_empty());
    }
}
