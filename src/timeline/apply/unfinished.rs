//! Keeps a sandbox usable while a rollback is unfinished: an apply failed or was interrupted, and
//! rolling it back failed as well.
//!
//! * The base is between two states. Readers see it through the pre-images of the apply, as it was
//!   before. So all operations but an apply work as if that apply had never begun.
//! * The epoch of the failed apply has not begun: no layer lies over it.
//! * Another apply is refused. The rollback is retried by `apply --undo`, and whenever the store is
//!   opened.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::Base;
use crate::error::{Error, Kind, Result};
use crate::fs::State;
use crate::fs::merged::pre_images::{PreHistory, read_history};
use crate::store::Store;
use crate::timeline::apply::plan::Plan;
use crate::timeline::apply::pre_images::collect;
use crate::timeline::apply::rollback;
use crate::timeline::apply::rollback::Remaining;
use crate::timeline::diff;
use crate::timeline::diff::PathChange;
use crate::timeline::{Target, Timeline};
use crate::types::{Epoch, LayerId, TreePath};

/// The number of paths that one error names.
const NAMED_PATHS: usize = 10;

/// An apply that is not rolled back yet.
pub(in crate::timeline) struct UnfinishedRollback {
    /// The pre-image layer of the apply.
    layer: LayerId,
    /// The epoch that the apply would have begun.
    epoch: Epoch,
    remaining: Remaining,
}

impl UnfinishedRollback {
    pub(in crate::timeline) fn new(
        layer: LayerId,
        epoch: Epoch,
        remaining: Remaining,
    ) -> UnfinishedRollback {
        UnfinishedRollback { layer, epoch, remaining }
    }

    /// A rollback that failed for a reason that concerns no single path.
    pub(in crate::timeline) fn of_all(
        layer: LayerId,
        epoch: Epoch,
        why: &Error,
    ) -> UnfinishedRollback {
        UnfinishedRollback::new(layer, epoch, remaining_of_all(why))
    }

    /// The epoch of the base before the apply.
    pub(in crate::timeline) fn before(&self) -> Epoch {
        Epoch(self.epoch.0.saturating_sub(1))
    }
}

/// The applies of a store that was just opened.
pub(in crate::timeline) struct RecoveredApplies {
    /// The pre-images of all applies.
    pub(in crate::timeline) applies: PreHistory,
    /// The last apply, if it could not be rolled back.
    pub(in crate::timeline) unfinished: Option<UnfinishedRollback>,
    /// Whether the last apply was rolled back just now.
    pub(in crate::timeline) was_rolled_back: bool,
}

/// Rolls back an apply that was interrupted before the store was opened.
///
/// # Errors
/// Damage.
pub(in crate::timeline) fn recover(
    store: &Arc<Store>,
    base: &Arc<Base>,
) -> Result<RecoveredApplies> {
    let (mut unfinished, mut was_rolled_back) = (None, false);
    for contents in rollback::interrupted(store)? {
        let (layer, epoch) = (contents.info.header.layer, contents.info.header.epoch);
        let images = rollback::images_of(&contents)?;
        let remaining = match rollback::resume(store, base, contents) {
            Ok(None) => {
                was_rolled_back |= images.is_some();
                continue;
            }
            Ok(Some(remaining)) => remaining,
            Err(error) if error.kind == Kind::Damage => return Err(error),
            Err(error) => remaining_of_all(&error),
        };
        let unfinished_now = UnfinishedRollback::new(layer, epoch, remaining);
        log::warn!(
            "an interrupted apply is not rolled back yet: {}",
            describe(&unfinished_now.remaining)
        );
        unfinished = Some((unfinished_now, images));
    }
    let mut applies = read_history(store)?;
    let unfinished = unfinished.map(|(unfinished, images)| {
        applies.extend(images.map(|images| Arc::new(collect(&images, &[]))));
        unfinished
    });
    Ok(RecoveredApplies { applies, unfinished, was_rolled_back })
}

impl Timeline {
    /// The paths of the base that are not rolled back yet, and why. The root stands for a reason
    /// that concerns no single path. None if no rollback is unfinished.
    pub fn unfinished_rollback(&self) -> Option<Vec<(TreePath, String)>> {
        self.unfinished.lock().as_ref().map(|unfinished| unfinished.remaining.clone())
    }

    /// Notes that a rollback is unfinished. Returns `error`, the one of the apply, with that added.
    pub(in crate::timeline) fn leave_unfinished(
        &self,
        unfinished: UnfinishedRollback,
        error: Error,
    ) -> Error {
        let why = describe(&unfinished.remaining);
        *self.unfinished.lock() = Some(unfinished);
        let reason = format!("{}; and the base could not be rolled back: {why}", error.reason);
        Error { reason, ..error }.hint(HINT)
    }

    /// Refuses an apply while a rollback is unfinished.
    ///
    /// # Errors
    /// [`Kind::Conflict`], with the paths that are not rolled back yet.
    pub(in crate::timeline) fn check_no_unfinished_rollback(&self) -> Result<()> {
        match &*self.unfinished.lock() {
            None => Ok(()),
            Some(unfinished) => Err(refusal("apply", &unfinished.remaining)),
        }
    }

    /// Plans the rest of a rollback, from the base as it is to the base before the apply. The plan
    /// is empty if the rollback ended when the store was opened. None if the last apply was not
    /// rolled back.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(in crate::timeline) fn plan_rollback(&self) -> Result<Option<Plan>> {
        let Some((before, now)) = self.unfinished.lock().as_ref().map(|u| (u.before(), u.epoch))
        else {
            let base = self.base_state()?;
            let was_rolled_back = self.was_rolled_back.load(Ordering::SeqCst);
            return Ok(was_rolled_back.then(|| rollback_plan(base.clone(), base, Vec::new())));
        };
        let state = |epoch| self.state_of(Target { layer: None, epoch });
        let (from, to) = (state(now)?, state(before)?);
        let changes = diff::changes(&from, &to);
        // An unreadable base is no reason not to try: the plan only informs the caller.
        let changes = changes
            .inspect_err(|error| log::warn!("compare with the base: {error}"))
            .unwrap_or_default();
        Ok(Some(rollback_plan(from, to, changes)))
    }

    /// Retries an unfinished rollback.
    ///
    /// # Errors
    /// [`Kind::Conflict`], with the paths that still could not be rolled back.
    pub(in crate::timeline) fn finish_rollback(&self) -> Result<()> {
        let Some((layer, epoch)) = self.unfinished.lock().as_ref().map(|u| (u.layer, u.epoch))
        else {
            self.was_rolled_back.store(false, Ordering::SeqCst);
            return Ok(());
        };
        let contents = self.store().read_layer(layer)?;
        let remaining = match rollback::resume(self.store(), self.base(), contents) {
            Ok(None) => {
                let history = read_history(self.store())?;
                self.install_history(&history);
                *self.unfinished.lock() = None;
                return Ok(());
            }
            Ok(Some(remaining)) => remaining,
            Err(error) => remaining_of_all(&error),
        };
        let error = refusal("finish the rollback", &remaining);
        *self.unfinished.lock() = Some(UnfinishedRollback::new(layer, epoch, remaining));
        Err(error)
    }
}

fn rollback_plan(from: State, to: State, changes: Vec<PathChange>) -> Plan {
    Plan { is_rollback: true, ..Plan::new(from, to, changes) }
}

const HINT: &str = "the mount shows the base as it was before the apply; 'jailfs status' lists the \
                    paths. When nothing is in the way any more, 'jailfs apply --undo' rolls them \
                    back";

fn refusal(attempt: &str, remaining: &Remaining) -> Error {
    let reason = format!(
        "an earlier apply failed, and the base is not rolled back yet: {}",
        describe(remaining)
    );
    Error::new(Kind::Conflict, attempt, reason).hint(HINT)
}

fn remaining_of_all(error: &Error) -> Remaining {
    vec![(TreePath::root(), error.to_string())]
}

/// Names the paths with their reasons, and the number of those beyond [`NAMED_PATHS`].
fn describe(remaining: &Remaining) -> String {
    let named: Vec<String> = remaining
        .iter()
        .take(NAMED_PATHS)
        .map(|(path, why)| if path.is_root() { why.clone() } else { format!("'{path}' ({why})") })
        .collect();
    match remaining.len().saturating_sub(NAMED_PATHS) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
