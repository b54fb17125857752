//! An apply that has failed, or was cut off, and whose rollback has failed as well.
//!
//! * The base is between two states. The pre-images of the apply go on showing what it was before,
//!   so everything that reads, and everything that changes the tree, works as if the apply had
//!   never been begun.
//! * The epoch that the apply would have begun has not begun: no layer lies over it.
//! * Only another apply is refused. The rollback is tried again when a person asks for it, and
//!   whenever the store is opened.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::Base;
use crate::error::{Error, Kind, Result};
use crate::fs::State;
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::{PreHistory, read_history};
use crate::store::Store;
use crate::timeline::apply::rollback;
use crate::timeline::apply::rollback::Remaining;
use crate::timeline::apply::{Plan, collect};
use crate::timeline::diff;
use crate::timeline::diff::PathChange;
use crate::timeline::{Target, Timeline};
use crate::types::{Epoch, LayerId, TreePath};

/// Paths that one error names.
const NAMED: usize = 10;

/// An apply whose rollback has not come to its end.
pub(in crate::timeline) struct Unfinished {
    layer: LayerId,
    /// The epoch that it would have begun.
    epoch: Epoch,
    remaining: Remaining,
}

impl Unfinished {
    pub(in crate::timeline) fn new(
        layer: LayerId,
        epoch: Epoch,
        remaining: Remaining,
    ) -> Unfinished {
        Unfinished { layer, epoch, remaining }
    }

    /// After a failure that concerns no single path.
    pub(in crate::timeline) fn whole(layer: LayerId, epoch: Epoch, why: &Error) -> Unfinished {
        Unfinished::new(layer, epoch, whole(why))
    }

    /// The epoch of the base before it.
    pub(in crate::timeline) fn before(&self) -> Epoch {
        Epoch(self.epoch.0.saturating_sub(1))
    }
}

/// The applies of a store that is opened.
pub(in crate::timeline) struct Found {
    /// All of them.
    pub(in crate::timeline) applies: PreHistory,
    /// The last of them, if its rollback did not come to its end.
    pub(in crate::timeline) unfinished: Option<Unfinished>,
    /// Whether the last of them was rolled back just now.
    pub(in crate::timeline) was_rolled_back: bool,
}

/// Rolls back what was cut off.
///
/// # Errors
/// Damage.
pub(in crate::timeline) fn roll_back_all(store: &Arc<Store>, base: &Arc<Base>) -> Result<Found> {
    let (mut unfinished, mut was_rolled_back) = (None, false);
    for contents in rollback::unfinished(store)? {
        let (layer, epoch) = (contents.info.header.layer, contents.info.header.epoch);
        let images = rollback::images_of(&contents)?;
        let remaining = match rollback::resume(store, base, contents) {
            Ok(None) => {
                was_rolled_back |= images.is_some();
                continue;
            }
            Ok(Some(remaining)) => remaining,
            Err(error) if error.kind == Kind::Damage => return Err(error),
            Err(error) => whole(&error),
        };
        let unfinished_now = Unfinished::new(layer, epoch, remaining);
        log::warn!(
            "an apply that was cut off is not rolled back yet: {}",
            told(&unfinished_now.remaining)
        );
        unfinished = Some((unfinished_now, images));
    }
    let mut applies = read_history(store)?;
    let unfinished = unfinished.map(|(unfinished, images)| {
        applies.extend(images.map(|images| Arc::new(collect(&images, &[]))));
        unfinished
    });
    Ok(Found { applies, unfinished, was_rolled_back })
}

impl Timeline {
    /// The paths of the base that a rollback has not set back yet, and why; the root, for what
    /// concerns no single path. None if there is no such rollback.
    pub fn unfinished_rollback(&self) -> Option<Vec<(TreePath, String)>> {
        self.unfinished.lock().as_ref().map(|unfinished| unfinished.remaining.clone())
    }

    /// Notes that a rollback did not come to its end. Returns the error of the apply, which also
    /// says that.
    pub(in crate::timeline) fn leave_unfinished(
        &self,
        unfinished: Unfinished,
        error: Error,
    ) -> Error {
        let why = told(&unfinished.remaining);
        *self.unfinished.lock() = Some(unfinished);
        let reason = format!("{}; and the base could not be set back: {why}", error.reason);
        Error { reason, ..error }.hint(HINT)
    }

    /// Refuses what would write the base while a rollback has not come to its end.
    pub(in crate::timeline) fn check_finished(&self) -> Result<()> {
        match &*self.unfinished.lock() {
            None => Ok(()),
            Some(unfinished) => Err(refusal("apply", &unfinished.remaining)),
        }
    }

    /// What is left of a rollback: from the base as it is to what it was, which is nothing if the
    /// rollback ended when the store was opened. None if the last apply was not rolled back.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(in crate::timeline) fn plan_rollback(&self) -> Result<Option<Plan>> {
        let Some((before, now)) = self.unfinished.lock().as_ref().map(|u| (u.before(), u.epoch))
        else {
            let base = self.base_state()?;
            let was_rolled_back = self.was_rolled_back.load(Ordering::SeqCst);
            return Ok(was_rolled_back.then(|| rollback(base.clone(), base, Vec::new())));
        };
        let state = |epoch| self.state_of(Target { layer: None, epoch });
        let (from, to) = (state(now)?, state(before)?);
        let changes = diff::changes(&from, &to);
        // What cannot be read is not listed, and is no reason not to try.
        let changes = changes
            .inspect_err(|error| log::warn!("compare with the base: {error}"))
            .unwrap_or_default();
        Ok(Some(rollback(from, to, changes)))
    }

    /// Tries again to roll back an apply.
    ///
    /// # Errors
    /// [`Kind::Conflict`], with the paths that still could not be set back.
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
                let shown = self.fs().state().lower.epoch();
                let (base, store) = (Arc::clone(self.base()), Arc::clone(self.store()));
                self.fs().set_lower(Lower::new(base, store, shown, history.clone()));
                *self.applies.lock() = history;
                *self.unfinished.lock() = None;
                return Ok(());
            }
            Ok(Some(remaining)) => remaining,
            Err(error) => whole(&error),
        };
        let error = refusal("finish the rollback", &remaining);
        *self.unfinished.lock() = Some(Unfinished::new(layer, epoch, remaining));
        Err(error)
    }
}

fn rollback(from: State, to: State, changes: Vec<PathChange>) -> Plan {
    Plan {
        from,
        to,
        changes,
        conflicts: Vec::new(),
        refused: Vec::new(),
        not_kept: Vec::new(),
        is_rollback: true,
    }
}

const HINT: &str = "the mount shows the base as it was before; 'jailfs status' lists the paths. When nothing \
                    is in the way any more, 'jailfs apply --undo' sets them back";

fn refusal(attempt: &str, remaining: &Remaining) -> Error {
    let reason = format!("an apply failed, and the base is not set back yet: {}", told(remaining));
    Error::new(Kind::Conflict, attempt, reason).hint(HINT)
}

fn whole(error: &Error) -> Remaining {
    vec![(TreePath::root(), error.to_string())]
}

/// The paths, with their reasons; the first of them, if they are many.
fn told(remaining: &Remaining) -> String {
    let named = remaining
        .iter()
        .take(NAMED)
        .map(|(path, why)| if path.is_root() { why.clone() } else { format!("'{path}' ({why})") });
    let named: Vec<String> = named.collect();
    match remaining.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
