//! Replaces the tree of a head with another state, in place, while programs run in the mount.
//!
//! Always true:
//! * The present state is sealed before it is replaced, so every restore can be undone. Writes that
//!   arrive between that seal and the switch are sealed right after the switch.
//! * The head's record names the new layer before the filesystem shows the new state. If the switch
//!   fails, the record is reset. If that fails as well, the filesystem refuses all changes, because
//!   the next start could show either state.
//! * The kernel's caches are invalidated directly after the switch, whatever fails later: they
//!   describe a state that is no longer shown.
//!
//! [`Timeline::restore`] replaces the whole tree, [`Timeline::restore_paths`] some paths of it.

mod base_paths;
pub(in crate::timeline) mod copies;
mod epochs;
mod partial;

use crate::error::{Attempt, Error, Result};
use crate::fs::{State, Switched};
use crate::store::layer::Upper;
use crate::store::record::{LayerKind, OpVerb};
use crate::timeline::checkpoint::seal_unused;
use crate::timeline::diff::PathChange;
use crate::timeline::mounts::Mounts;
use crate::timeline::{Target, Timeline, verb_text};
use crate::types::{LayerId, TreePath};

pub use partial::check_paths;

/// The result of a restore.
pub struct RestoreOutcome {
    /// The layer that the restore sealed with the state before it; none if that state was sealed
    /// already.
    pub before: Option<LayerId>,
    /// The operation that led to the state before; none if the log does not have it any more.
    pub undo: Option<u64>,
    /// Mount points inside the mount that the kernel detached, because their directory did not
    /// stay.
    pub detached: Vec<TreePath>,
}

/// Receives each path that a restore changed, with the state before and the state after it.
pub type ChangeSink<'a> = &'a mut dyn FnMut(&State, &State, PathChange) -> Result<()>;

/// The result of the switch to another state.
struct HeadSwitch {
    /// The state that was shown until the switch.
    from: State,
    /// The layer with the writes that arrived after the seal; none if there were none.
    late: Option<LayerId>,
    /// The number of the operation in the log.
    operation: u64,
}

impl Timeline {
    /// Makes the tree equal to `to`, in place, and passes each path that changed to `changes`.
    ///
    /// # Errors
    /// Those of the store, the base and the kernel. An error before the switch changes nothing. An
    /// error after it says that the restore was done.
    pub fn restore(
        &self,
        verb: OpVerb,
        to: Target,
        description: String,
        (mounts, changes): (Mounts, ChangeSink<'_>),
    ) -> Result<RestoreOutcome> {
        let _operation = self.lock_operation();
        self.flush()?;
        let state = self.state_of(to)?;
        let detached = self.detached_mounts((&self.fs.state(), &state), &[], mounts)?;
        let (_, sealed) = self.seal_present(&format!("{} {description}", verb_text(verb)))?;
        let done = format!("the tree is now {description}");
        let HeadSwitch { from, late, operation } =
            self.switch_head(verb, to, &state, description)?;
        self.list_restored(&from, &state, changes).map_err(|error| error.after(done))?;
        let before = late.or(sealed);
        Ok(RestoreOutcome { before, undo: self.operation_before(operation, before), detached })
    }

    /// Restores `to` without comparing the two states, because a command decides how long such a
    /// comparison takes. Returns the state before.
    ///
    /// # Errors
    /// As [`Timeline::restore`].
    pub fn discard(&self, to: Target, description: String) -> Result<State> {
        let _operation = self.lock_operation();
        self.flush()?;
        let state = self.state_of(to)?;
        self.seal_present(&format!("{} {description}", verb_text(OpVerb::Discard)))?;
        Ok(self.switch_head(OpVerb::Discard, to, &state, description)?.from)
    }

    /// The operation that led to the state before `operation`: the one that logged the layer
    /// `sealed`, or without such a layer the latest before it.
    pub(in crate::timeline) fn operation_before(
        &self,
        operation: u64,
        sealed: Option<LayerId>,
    ) -> Option<u64> {
        let ops = self.store.ops();
        let mut older = ops
            .iter()
            .rev()
            .filter(|(number, older)| *number < operation && older.head == self.head);
        let found = match sealed {
            Some(layer) => older.find(|(_, older)| older.tree == Some(layer)),
            None => older.next(),
        };
        found.map(|(number, _)| *number)
    }

    /// Publishes a layer over `to`, shows its state, invalidates the kernel's caches, seals late
    /// writes and logs the operation.
    fn switch_head(
        &self,
        verb: OpVerb,
        to: Target,
        state: &State,
        description: String,
    ) -> Result<HeadSwitch> {
        let (upper, previous) = self.publish_layer(verb, to, LayerKind::Branches)?;
        let switched = self.fs.switch(state.clone(), upper).attempt(|| verb_text(verb));
        let Switched { invalidations, layer, state: from } =
            switched.map_err(|error| self.unpublish_layer(previous, error))?;
        let invalidated = self.kernel().invalidate(&invalidations);
        let late = self.seal_late_writes(layer, &from, verb);
        let logged = self.log_operation(verb, description, to);
        let done = logged.and_then(|operation| {
            invalidated.and(late).map(|late| HeadSwitch { from, late, operation })
        });
        done.map_err(|error| error.after(format!("{} was done", verb_text(verb))))
    }

    /// Creates a layer over a state that is about to be shown, and makes the head's record name it.
    /// Returns the layer, and the one that the record named.
    pub(in crate::timeline) fn publish_layer(
        &self,
        verb: OpVerb,
        to: Target,
        kind: LayerKind,
    ) -> Result<(Upper, LayerId)> {
        let during = |error: Error| error.during(verb_text(verb));
        let previous = self.fs.upper_layer();
        let upper =
            self.store.create_layer(to.layer, &self.head, to.epoch, kind).map_err(during)?;
        self.store
            .set_head(&self.head, upper.layer())
            .map_err(|error| self.unpublish_layer(previous, during(error)))?;
        Ok((upper, previous))
    }

    /// Resets the head's record after a failure that left the state as it was. Returns that
    /// failure.
    pub(in crate::timeline) fn unpublish_layer(&self, previous: LayerId, error: Error) -> Error {
        // The record may be on disk although its sync failed. Only a new write and sync make sure
        // which record the next start reads.
        match self.with_reserve(|| self.store.set_head(&self.head, previous)) {
            Ok(()) => error,
            Err(why) => {
                log::error!("{why}");
                self.refuse_changes(error)
            }
        }
    }

    /// Makes the filesystem refuse all changes, because the next start may show the state before or
    /// the state after. Returns `error` with a hint that says so.
    pub(in crate::timeline) fn refuse_changes(&self, error: Error) -> Error {
        self.fs.stop();
        error.hint(
            "nothing can be changed until it is unmounted and mounted again; then the tree is the \
             one before this or the one after it",
        )
    }

    /// Seals what was written between [`Timeline::seal_present`] and the switch.
    fn seal_late_writes(
        &self,
        mut layer: Upper,
        state: &State,
        verb: OpVerb,
    ) -> Result<Option<LayerId>> {
        if !layer.is_changed() {
            return Ok(None);
        }
        let (id, message) = (layer.layer(), format!("during {}", verb_text(verb)));
        self.with_reserve(|| seal_unused(&self.store, &mut layer, &message))
            .map_err(|error| error.during("seal the tree"))?;
        self.log_late_seal(id, state, message)?;
        Ok(Some(id))
    }
}
