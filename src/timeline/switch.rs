//! Replacing the present state by another one, in place: restore, discard and undo.
//!
//! Always true:
//! * the present state is sealed before it is replaced, and the rest of it right after the switch, so
//!   every switch can be undone;
//! * the head's record names the new layer before the new state is visible. If the switch fails, the
//!   record is rolled back, or the filesystem stops taking changes.

use crate::error::{Attempt, Error, Result};
use crate::fs::{State, Switched};
use crate::store::layer::Upper;
use crate::store::record::{HeadRecord, LayerKind, OpVerb};
use crate::timeline::mounts::Mounts;
use crate::timeline::{Target, Timeline, diff, verb_text};
use crate::types::{LayerId, TreePath};

/// The effects of an operation that replaced the state.
pub struct Replaced {
    /// The layer that holds the state before it, if it was sealed for this operation.
    pub before: Option<LayerId>,
    /// The number of the operation that led to the state before it; none if the log no longer has
    /// it.
    pub undo: Option<u64>,
    /// The mount points inside the mount whose mounts the kernel detached.
    pub detached: Vec<TreePath>,
}

/// Receives each change of an operation, with the state before it and the state after it.
pub type ChangeSink<'a> = &'a mut dyn FnMut(&State, &State, diff::PathChange) -> Result<()>;

impl Timeline {
    /// Makes `to` the present state, in place, and lists the changes.
    ///
    /// # Errors
    /// The store, the base or the kernel failed. An error before the new state is visible changes
    /// nothing. An error while listing says that the restore was done.
    pub fn replace(
        &self,
        verb: OpVerb,
        to: Target,
        description: String,
        (mounts, list): (Mounts, ChangeSink<'_>),
    ) -> Result<Replaced> {
        let _operation = self.lock_operation();
        self.flush()?;
        let state = self.state_of(to)?;
        let detached = self.detached_mounts((&self.fs.state(), &state), &[], mounts)?;
        let (_, before) = self.seal_changes(&format!("{} {description}", verb_text(verb)))?;
        let done = format!("the tree is now {description}");
        let (from, rest, op) = self.install(verb, to, &state, description)?;
        self.list_restored(&from, &state, list).map_err(|error| error.after(done))?;
        let before = rest.or(before);
        Ok(Replaced { before, undo: self.op_before(op, before), detached })
    }

    /// As [`Timeline::replace`], but does not compare the two states, which can take arbitrarily
    /// long if a command made it so. Returns the state before.
    ///
    /// # Errors
    /// As [`Timeline::replace`].
    pub fn go_back(&self, to: Target, description: String) -> Result<State> {
        let _operation = self.lock_operation();
        self.flush()?;
        let state = self.state_of(to)?;
        self.seal_changes(&format!("{} {description}", verb_text(OpVerb::Discard)))?;
        let (from, _, _) = self.install(OpVerb::Discard, to, &state, description)?;
        Ok(from)
    }

    /// The operation that led to the state before operation `op`: the one that sealed that state,
    /// or else the last operation before `op`.
    pub(super) fn op_before(&self, op: u64, sealed: Option<LayerId>) -> Option<u64> {
        let ops = self.store.ops();
        let mut older =
            ops.iter().rev().filter(|(number, older)| *number < op && older.head == self.head);
        let found = match sealed {
            Some(layer) => older.find(|(_, older)| older.tree == Some(layer)),
            None => older.next(),
        };
        found.map(|(number, _)| *number)
    }

    /// Installs a state as the head's. Returns the state before, the layer with what was written
    /// since the last seal, if anything was, and the number of the operation.
    fn install(
        &self,
        verb: OpVerb,
        to: Target,
        state: &State,
        description: String,
    ) -> Result<(State, Option<LayerId>, u64)> {
        let (upper, present) = self.publish(verb, to, LayerKind::Branches)?;
        let switched = self.fs.switch(state.clone(), upper).attempt(|| verb_text(verb));
        let Switched { forgotten, layer, state: from } =
            switched.map_err(|error| self.rollback_head(&present, error))?;
        // Invalidate before anything else can fail: the kernel's caches still hold the old state.
        let invalidated = self.kernel().forget(&forgotten);
        let rest = self.seal_replaced(layer, &from, verb);
        let logged = self.log_operation(verb, description, to);
        let done = logged.and_then(|op| invalidated.and(rest).map(|rest| (from, rest, op)));
        done.map_err(|e| e.after(format!("{} was done", verb_text(verb))))
    }

    /// Creates a layer over a state that is about to be installed, and makes it the head's. Returns
    /// the layer, and the head's record to roll back to.
    pub(super) fn publish(
        &self,
        verb: OpVerb,
        to: Target,
        kind: LayerKind,
    ) -> Result<(Upper, HeadRecord)> {
        let during = |e: Error| e.during(verb_text(verb));
        let present = HeadRecord { layer: self.fs.upper_layer() };
        let upper =
            self.store.create_layer(to.layer, &self.head, to.epoch, kind).map_err(during)?;
        let published = self.store.set_head(&self.head, &HeadRecord { layer: upper.layer() });
        published.map_err(|error| self.rollback_head(&present, during(error)))?;
        Ok((upper, present))
    }

    /// Rolls the head's record back after a failure before the switch, also if the record was
    /// published and only its sync failed. Returns the failure.
    pub(super) fn rollback_head(&self, present: &HeadRecord, error: Error) -> Error {
        // Write the record anew: after a failed sync of a directory, its content is unknown until
        // it was written and synced again.
        match self.with_reserve(|| self.store.set_head(&self.head, present)) {
            Ok(()) => error,
            Err(why) => {
                log::error!("{why}");
                self.stop(error)
            }
        }
    }

    /// Refuses all further changes, because it is unknown which state the next mount would show.
    pub(super) fn stop(&self, error: Error) -> Error {
        self.fs.stop();
        error.hint(
            "unmount and mount again before you change anything; \
             the tree is then the one before this operation or the one after it",
        )
    }
}
