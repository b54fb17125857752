//! Replaces the tree, or paths in it, with another state, and lists what that changed.

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::State;
use crate::sandbox::{Changes, Detail, Restored, Rev, Sandbox};
use crate::store::record::OpVerb;
use crate::timeline::Target;
use crate::timeline::diff;
use crate::timeline::diff::PathChange;
use crate::timeline::mounts::Mounts;
use crate::timeline::restore::{RestoreOutcome, check_paths};
use crate::types::TreePath;

/// How many paths the operation log names.
const MAX_NAMED: usize = 3;

/// The tree as it was before [`Sandbox::reset_to`]. Later changes of the tree do not affect it.
pub struct ReplacedState(State);

impl Sandbox {
    pub(super) fn restore(
        &self,
        to: &Rev,
        paths: &[TreePath],
        dry_run: bool,
        mounts: Mounts,
    ) -> Result<Restored> {
        if dry_run {
            return self.preview(to, paths);
        }
        let target = self.restorable(to)?;
        if !paths.is_empty() && !paths.iter().any(TreePath::is_root) {
            return self.restore_paths(target, paths, mounts);
        }
        self.replace((OpVerb::Restore, mounts), target, self.describe(target))
    }

    /// Lists what a restore would change. It changes nothing, in no head.
    fn preview(&self, to: &Rev, paths: &[TreePath]) -> Result<Restored> {
        let (then, description) = match to {
            Rev::Head { head, back: 0 } if head != self.head_name() => {
                (self.state(to)?, format!("head '{head}' as it is now"))
            }
            _ => {
                let target = self.target(to)?;
                (self.timeline.state_of(target)?, self.describe(target))
            }
        };
        self.timeline.flush()?;
        let now = self.fs().state();
        if paths.is_empty() || paths.iter().any(TreePath::is_root) {
            let walk = diff::compare_records(&now, &then);
            let changes = self.list(&now, &then, walk, "list what would change")?;
            return self.would_restore((&now, &then), &[], description, changes);
        }
        check_paths(&now, &then, paths)?;
        let mut lister = self.lister(Detail::NameStatus);
        let changes = diff::changes_at(&now, &then, paths).attempt(|| "list what would change")?;
        changes.iter().try_for_each(|change| lister.add(&now, &then, change))?;
        let description = describe_paths(&description, paths);
        self.would_restore((&now, &then), paths, description, lister.finish())
    }

    /// The sealed state that a restore goes to. The present tree of another head is sealed for it.
    fn restorable(&self, to: &Rev) -> Result<Target> {
        match to {
            Rev::Head { head, back: 0 } if head != self.head_name() => {
                let why = format!("before a restore in head '{}'", self.head_name());
                self.seen_head(head)?.timeline.seal_for_other(&why)
            }
            _ => self.target(to),
        }
    }

    pub(super) fn discard(&self, mounts: Mounts) -> Result<Restored> {
        let target = self.target(&Rev::Base)?;
        self.replace((OpVerb::Discard, mounts), target, self.describe(target))
    }

    pub(super) fn restore_operation(&self, op: u64, mounts: Mounts) -> Result<Restored> {
        let found = self.operations().into_iter().find(|o| o.op == op).ok_or_else(|| {
            Error::new(
                Kind::NoStore,
                format!("restore operation {op}"),
                "there is no such operation",
            )
            .hint("'jailfs op log' lists them")
        })?;
        let target = Target { layer: found.tree, epoch: found.epoch };
        self.replace((OpVerb::OpRestore, mounts), target, format!("operation {op}"))
    }

    fn replace(
        &self,
        (verb, mounts): (OpVerb, Mounts),
        target: Target,
        description: String,
    ) -> Result<Restored> {
        let mut lister = self.lister(Detail::NameStatus);
        let mut list = |from: &State, to: &State, change: PathChange| lister.add(from, to, &change);
        let RestoreOutcome { before, undo, detached } =
            self.timeline.restore(verb, target, description.clone(), (mounts, &mut list))?;
        Ok(Restored { to: description, before, undo, detached, changes: lister.finish() })
    }

    fn restore_paths(
        &self,
        target: Target,
        paths: &[TreePath],
        mounts: Mounts,
    ) -> Result<Restored> {
        let description = describe_paths(&self.describe(target), paths);
        let mut lister = self.lister(Detail::NameStatus);
        let mut list = |from: &State, to: &State, change: PathChange| lister.add(from, to, &change);
        let RestoreOutcome { before, undo, detached } = self.timeline.restore_paths(
            OpVerb::Restore,
            target,
            paths,
            description.clone(),
            (mounts, &mut list),
        )?;
        Ok(Restored { to: description, before, undo, detached, changes: lister.finish() })
    }

    /// The answer to a dry run.
    fn would_restore(
        &self,
        states: (&State, &State),
        paths: &[TreePath],
        to: String,
        changes: Changes,
    ) -> Result<Restored> {
        let detached = self.timeline.detached_mounts(states, paths, Mounts::Detach)?;
        Ok(Restored { to, before: None, undo: None, detached, changes })
    }

    /// Makes the tree equal to `to`, as a discard does, but without listing what that changes. So
    /// its duration does not depend on how much the programs in the mount wrote. Returns the tree
    /// as it was, for [`Sandbox::changes_to`].
    ///
    /// # Errors
    /// As for [`Request::Restore`](crate::sandbox::Request::Restore).
    pub fn reset_to(&self, to: &Rev) -> Result<ReplacedState> {
        let target = self.target(to)?;
        Ok(ReplacedState(self.timeline.discard(target, self.describe(target))?))
    }

    /// Lists how `state` differs from the tree as it is now.
    ///
    /// # Errors
    /// The base or the store cannot be read.
    pub fn changes_to(&self, state: &ReplacedState) -> Result<Changes> {
        let now = self.fs().state();
        self.list(&now, &state.0, diff::compare(&now, &state.0), "list what was discarded")
    }
}

/// Names the restored paths for the operation log.
fn describe_paths(state: &str, paths: &[TreePath]) -> String {
    let named: Vec<String> = paths.iter().take(MAX_NAMED).map(|path| format!("'{path}'")).collect();
    let more = match paths.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{} of {state}{more}", named.join(", "))
}
