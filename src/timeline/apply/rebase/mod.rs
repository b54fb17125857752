//! Rebases the head onto the base that an apply has written, while programs keep writing.
//!
//! After an apply of everything, the base has the sealed state that was applied. The head can lie
//! over that base with a small tree: what programs wrote since the seal. That frees the space of
//! the layers and of the pre-images.
//!
//! * Most of the work is done without a lock: [`state`] computes what the present state is over the
//!   new base. It catches up with the writes that arrive meanwhile until few are left. Only these
//!   are handled under the lock of changes, where the filesystem then exchanges the two states.
//! * Until the exchange, programs write to the old layer. The new layer begins with the whole new
//!   tree as one record, so a crash leaves all of it or nothing.
//! * If the head cannot be rebased, it stays over the old base. That costs the space of the
//!   pre-images and nothing else.

mod state;

use crate::error::{Attempt, FsError, FsResult, Result};
use crate::fs::{Rebased, Rebasing, State};
use crate::store::layer::Upper;
use crate::store::record::{LayerKind, OpVerb, Seal};
use crate::sys::clock;
use crate::timeline::{Target, Timeline};
use crate::types::Epoch;
use state::RebasedState;

/// How often the rebased state catches up with new writes. Each round takes as long as what was
/// written during the round before, so the rounds only fail to converge if programs write faster
/// than that.
const ROUNDS: u32 = 8;

/// The number of nodes, contents and names to catch up with under the lock of changes: about
/// ten milliseconds of work.
const MOST_UNDER_LOCK: usize = 2000;

/// The message in the seal of the layer with the writes that arrived since the applied state.
const DURING: &str = "during apply";

impl Timeline {
    /// Rebases the head onto the base as an apply of the state `sealed` left it in `epoch`, and
    /// logs the apply. If the head cannot be rebased, it stays as it is, and nothing is logged.
    ///
    /// # Errors
    /// Those of the store and the base.
    pub(in crate::timeline) fn rebase_head(
        &self,
        sealed: Target,
        epoch: Epoch,
        description: &str,
    ) -> Result<()> {
        let onto = Target { layer: None, epoch };
        let mut rebased = RebasedState::new(self.state_of(sealed)?, self.state_of(onto)?);
        let (mut next, previous) =
            self.publish_layer(OpVerb::Apply, onto, LayerKind::Rebased(self.fs.upper_layer()))?;
        let mut why = "programs write faster than jailfs can catch up".to_owned();
        for _ in 0..ROUNDS {
            match self.catch_up_and_switch(&mut rebased, next) {
                Ok(Rebasing::Rebased(switched)) => {
                    return self.finish_rebase(switched, onto, description);
                }
                Ok(Rebasing::Moved(upper)) => next = upper,
                Err(error) if leaves_head(&error) => {
                    why = describe(&error);
                    break;
                }
                Err(error) => {
                    return Err(error)
                        .attempt(|| "apply")
                        .map_err(|error| self.unpublish_layer(previous, error));
                }
            }
        }
        log::warn!("apply: the tree stays over the base as it was before: {why}");
        self.with_reserve(|| self.store.set_head(&self.head, previous))
            .map_err(|error| self.refuse_changes(error))
    }

    /// Catches up with the present state without a lock. Then the filesystem switches to the
    /// rebased state, unless too much was written meanwhile.
    fn catch_up_and_switch(&self, rebased: &mut RebasedState, next: Upper) -> FsResult<Rebasing> {
        rebased.advance(&self.fs.state(), usize::MAX)?;
        let seal =
            Seal { name: None, message: DURING.to_owned(), time: clock::now(), automatic: true };
        self.fs.rebase(next, seal, |now: &State| {
            Ok(rebased.advance(now, MOST_UNDER_LOCK)?.then(|| rebased.onto.clone()))
        })
    }

    /// Invalidates the kernel's caches, logs the apply, and syncs the rebased state.
    fn finish_rebase(&self, switched: Rebased, onto: Target, description: &str) -> Result<()> {
        let invalidated = self.kernel().invalidate(&switched.invalidations);
        let sealed = match switched.sealed {
            Some((layer, Ok(()))) => self.log_late_seal(layer, &switched.from, DURING.to_owned()),
            Some((_, Err(error))) => Err(error),
            None => Ok(()),
        };
        let logged = self.log_operation(OpVerb::Apply, description.to_owned(), onto);
        // As soon as gc takes the old layer, the new layer alone has these writes.
        let synced = self.fs.sync().attempt(|| "apply: sync what was written meanwhile");
        logged
            .and(invalidated)
            .and(sealed)
            .and(synced)
            .map_err(|error| error.after("apply was done"))
    }
}

/// Says why the head cannot be rebased.
fn describe(error: &FsError) -> String {
    match error {
        FsError::Stale => {
            "a file changed of which a hard link was never looked up in the tree, and \
                           finding it takes a scan of the base"
                .to_owned()
        }
        error => error.to_string(),
    }
}

/// Whether an error means that the head cannot be rebased and stays as it is. All other errors are
/// failures of the store or the host.
fn leaves_head(error: &FsError) -> bool {
    match error {
        // The new tree is one record of the journal, and can be too long for one.
        FsError::Store(error) => error.errno == Some(libc::EFBIG),
        // It cannot be told what the present state is over the new base.
        FsError::Stale
        | FsError::Drift(_)
        | FsError::AccessDenied
        | FsError::NotFound
        | FsError::NotADirectory
        | FsError::Damage(_) => true,
        _ => false,
    }
}
