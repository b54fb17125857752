//! The decisions of the caller of a merge: which paths are merged, and which head wins where.

use super::glob::Glob;
use super::three::Side;
use crate::types::TreePath;

/// The choices of the caller.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// The paths that are merged; all if there are none.
    pub paths: Vec<TreePath>,
    /// Conflicts at and below these paths are decided for our head.
    pub ours: Vec<TreePath>,
    /// Conflicts at and below these paths are decided for the other head.
    pub theirs: Vec<TreePath>,
    /// Units besides `.git`.
    pub units: Vec<Glob>,
    /// The names of both heads, if both sides of a conflict are kept: text with markers, anything
    /// else with the other side beside ours.
    pub markers: Option<(String, String)>,
}

impl Rules {
    /// The side that the caller chose for an object with some paths.
    ///
    /// At each path the longest chosen path decides. A file can have several names. Then the names
    /// that the caller wrote down decide, not the directories above the others. None if the choices
    /// contradict each other.
    pub(super) fn choice(&self, paths: &[TreePath]) -> Option<Side> {
        let is_named = |path: &&TreePath| self.ours.contains(path) || self.theirs.contains(path);
        let has_named = paths.iter().any(|path| is_named(&path));
        let deciding = paths.iter().filter(|path| !has_named || is_named(path));
        let mut choices = deciding.filter_map(|path| self.choice_at(path));
        let first = choices.next()?;
        choices.all(|side| side == first).then_some(first)
    }

    fn choice_at(&self, path: &TreePath) -> Option<Side> {
        let longest = |chosen: &[TreePath]| {
            let at = chosen.iter().filter(|at| path.starts_with(at));
            at.map(|at| at.as_bytes().len() + 1).max().unwrap_or(0)
        };
        match (longest(&self.ours), longest(&self.theirs)) {
            (0, 0) => None,
            (ours, theirs) if ours >= theirs => Some(Side::Ours),
            _ => Some(Side::Theirs),
        }
    }

    /// Whether one of some paths of an object is merged.
    pub(super) fn includes(&self, paths: &[TreePath]) -> bool {
        self.paths.is_empty()
            || paths.iter().any(|path| self.paths.iter().any(|only| path.starts_with(only)))
    }

    /// Whether one of some paths leads to a path that is merged.
    pub(super) fn leads(&self, paths: &[TreePath]) -> bool {
        paths.iter().any(|path| self.paths.iter().any(|only| only.starts_with(path)))
    }

    /// The unit that one of some paths belongs to, and the path in it that the pattern matches.
    pub(super) fn unit(&self, paths: &[TreePath]) -> Option<(Unit, TreePath)> {
        let git = Glob::git();
        let globs: Vec<&Glob> = std::iter::once(&git).chain(&self.units).collect();
        paths.iter().find_map(|path| {
            globs.iter().enumerate().find_map(|(pattern, glob)| {
                let (matched, dir) = glob.unit_of(path)?;
                Some((Unit { dir, pattern }, matched))
            })
        })
    }
}

/// A unit: what a pattern matches in one directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Unit {
    dir: TreePath,
    pattern: usize,
}
