//! Answers `status` and the operation log.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;

use crate::error::{Attempt, Result};
use crate::fs::State;
use crate::sandbox::diff::compare;
use crate::sandbox::{Operation, Sandbox, Status};
use crate::timeline::diff::{PathChange, What};
use crate::timeline::verb_text;
use crate::types::{LayerId, TreePath};

/// The problem of a base path on which another filesystem is mounted.
const MOUNT_INSIDE: &str = "something else is mounted there; it is shown empty";
/// The maximum number of problems with the base that `status` lists.
const MAX_PROBLEMS: usize = 100;

impl Sandbox {
    pub(super) fn status(&self) -> Result<Status> {
        // A failed flush becomes a problem in the list: `status` must work when other parts fail.
        let flushed = self.timeline.flush().map_err(|error| (TreePath::root(), error.to_string()));
        let last = self.last_checkpoint();
        let since = match last {
            Some(id) => self.timeline.state_of(self.sealed_target(id)?)?,
            None => self.timeline.base_state()?,
        };
        let now = self.fs().state();
        let changed = count_changes(last.is_none(), &since, &now, "the last checkpoint")?;
        let to_apply = match last {
            None => changed,
            Some(_) => count_changes(true, &self.timeline.base_state()?, &now, "the base")?,
        };
        let (refusals, refused_count) = self.fs().refusals();
        let mount = self.mount_point.lock().clone();
        Ok(Status {
            head: self.head_name().to_owned(),
            base: self.shared.base_path.as_os_str().as_bytes().to_owned(),
            store: self.shared.store_path.as_os_str().as_bytes().to_owned(),
            pid: mount.as_ref().map(|_| std::process::id()),
            mount: mount.map(|m| m.as_os_str().as_bytes().to_owned()),
            checkpoint: last.map(|id| self.checkpoint_info(id)).transpose()?,
            changed,
            to_apply,
            epoch: self.timeline.base_epoch(),
            store_bytes: self.timeline.store().disk_usage(),
            kernel_nodes: self.fs().held_nodes() as u64 - 1,
            refusals,
            refused_count,
            base_problems: self.base_problems(flushed.err()),
            sync_failed: self.fs().sync_has_failed(),
            unresolved: self.timeline.unresolved()?,
            rollback: self.timeline.unfinished_rollback(),
        })
    }

    /// The problems with the base, after `first`: paths that failed, mounts inside the base, and
    /// drift.
    fn base_problems(&self, first: Option<(TreePath, String)>) -> Vec<(TreePath, String)> {
        let mut problems: Vec<_> = first.into_iter().chain(self.fs().base_problems()).collect();
        match self.fs().state().lower.base().mounts_inside() {
            Ok(mounts) => {
                problems.extend(mounts.into_iter().map(|path| (path, MOUNT_INSIDE.to_owned())))
            }
            Err(error) => {
                problems.push((TreePath::root(), format!("its mounts cannot be listed: {error}")))
            }
        }
        match self.timeline.changed_in_base(MAX_PROBLEMS) {
            Ok(changed) => {
                let known: BTreeSet<TreePath> =
                    problems.iter().map(|(path, _)| path.clone()).collect();
                problems.extend(changed.into_iter().filter(|(path, _)| !known.contains(path)));
            }
            Err(error) => problems.push((TreePath::root(), error.to_string())),
        }
        problems.truncate(MAX_PROBLEMS);
        problems
    }

    /// The operations of the log, newest first.
    pub(super) fn operations(&self) -> Vec<Operation> {
        let ops = self.timeline.store().ops();
        let numbered = ops.into_iter().map(|(number, op)| Operation {
            op: number,
            head: op.head,
            time: op.time,
            verb: verb_text(op.verb).to_owned(),
            description: op.description,
            tree: op.tree,
            epoch: op.epoch,
        });
        let mut operations: Vec<Operation> = numbered.collect();
        operations.reverse();
        if let Some(fence) = self.fs().fence() {
            let is_seen = |tree: LayerId| fence.states.contains(&tree);
            operations.retain(|op| op.head == fence.head || op.tree.is_none_or(is_seen));
        }
        operations
    }
}

/// How many paths differ between two states, apart from the times of directories.
fn count_changes(with_base: bool, old: &State, new: &State, name: &str) -> Result<u64> {
    let is_listed = |change: &PathChange| change.what != What::DirTimes;
    compare(with_base, old, new)
        .and_then(|walk| walk.count_of(is_listed))
        .attempt(|| format!("compare with {name}"))
}
