//! Plans an apply: lists the changes, the conflicts with the base, and what needs consent.

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::State;
use crate::timeline::Timeline;
use crate::timeline::apply::protected;
use crate::timeline::apply::protected::Consent;
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};
use crate::types::{Timestamp, TreePath};

/// The longest path that an apply writes into the base, in bytes. Most programs cannot name a
/// longer one (path_resolution(7), PATH_MAX).
const LONGEST_PATH: usize = 4095;

/// The changes that an apply would make.
pub struct Plan {
    /// The base as it is.
    pub from: State,
    /// The state that the base is to become.
    pub to: State,
    /// The paths that differ, sorted, times of directories included.
    pub changes: Vec<PathChange>,
    /// Paths that changed in the base, and how. Then nothing is written.
    pub conflicts: Vec<(TreePath, String)>,
    /// Paths that need the consent of the caller, and why. Then nothing is written.
    pub refused: Vec<(TreePath, String)>,
    /// Known once the plan is written: what the base did not keep.
    pub not_kept: Vec<(TreePath, NotKept)>,
    /// Whether the plan only finishes the rollback of an earlier apply.
    pub is_rollback: bool,
}

/// A property of a file that the base did not keep when an apply wrote, replaced or removed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// The filesystem of the base cannot hold this modification time.
    Time {
        /// The time in the tree.
        wanted: Timestamp,
        /// The time in the base.
        kept: Timestamp,
    },
    /// The new file could not be given these inode flags (chattr(1)).
    Flags(u32),
}

impl Plan {
    /// A plan that makes `from` equal to `to`, without conflicts.
    pub(in crate::timeline) fn new(from: State, to: State, changes: Vec<PathChange>) -> Plan {
        Plan {
            from,
            to,
            changes,
            conflicts: Vec::new(),
            refused: Vec::new(),
            not_kept: Vec::new(),
            is_rollback: false,
        }
    }

    /// Whether there are changes, and nothing that keeps them from being written.
    pub(in crate::timeline) fn is_writable(&self) -> bool {
        self.conflicts.is_empty() && self.refused.is_empty() && !self.changes.is_empty()
    }

    /// Describes the plan for the operation log.
    pub(in crate::timeline) fn describe(&self) -> String {
        format!("{} paths", self.changes.len())
    }
}

impl Timeline {
    /// Plans to make the base equal to `to`, at and below `paths` if there are any.
    ///
    /// # Errors
    /// Those of the base and the store; a path that is too long for the base.
    pub(in crate::timeline) fn plan(
        &self,
        to: State,
        paths: &[TreePath],
        consent: Consent,
    ) -> Result<Plan> {
        let from = self.base_state()?;
        let mut changes = writable_changes(&from, &to, paths)?;
        if !paths.is_empty() {
            changes = select(changes, paths);
        }
        let conflicts = self.conflicts(&to, &changes).attempt(|| "compare with the base")?;
        let refused = protected::refused(&self.protected(), (&from, &to), &changes, paths, consent)
            .attempt(|| "look for what needs consent")?;
        Ok(Plan { conflicts, refused, ..Plan::new(from, to, changes) })
    }
}

/// Lists the changes that an apply of `paths` writes to the base, or an apply of everything if
/// there are no paths.
///
/// # Errors
/// Those of reading the base; a path that is too long for the base. The list ends there, so that a
/// command that nests directories does not decide how much memory the list takes.
fn writable_changes(from: &State, to: &State, paths: &[TreePath]) -> Result<Vec<PathChange>> {
    let attempt = || "compare with the base";
    let mut changes = Vec::new();
    for change in diff::compare_for_apply(from, to).attempt(attempt)? {
        let change = change.attempt(attempt)?;
        if change.path.as_bytes().len() <= LONGEST_PATH {
            changes.push(change);
        } else if paths.is_empty() || paths.iter().any(|named| change.path.starts_with(named)) {
            let top = change
                .path
                .names()
                .next()
                .map(|name| TreePath::root().join(&name))
                .unwrap_or_default();
            let why =
                format!("a path below it is longer than {LONGEST_PATH} bytes; nothing is written");
            return Err(Error::new(Kind::Conflict, format!("apply '{top}'"), why)
                .hint("remove it in the sandbox, or apply other paths by naming them"));
        }
    }
    Ok(changes)
}

/// The changes at and below `paths`, and the new directories that lead to them.
fn select(changes: Vec<PathChange>, paths: &[TreePath]) -> Vec<PathChange> {
    let is_selected = |change: &PathChange| {
        paths.iter().any(|path| {
            let leads =
                matches!(change.what, What::Added | What::Type) && path.starts_with(&change.path);
            change.path.starts_with(path) || leads
        })
    };
    changes.into_iter().filter(is_selected).collect()
}
