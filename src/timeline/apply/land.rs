//! Letting the head lie on the base that an apply has written, while programs go on writing.

use crate::error::{Attempt, FsError, Result};
use crate::fs::{Rebased, Rebasing, State};
use crate::store::record::{LayerKind, OpVerb, Seal};
use crate::sys::clock;
use crate::timeline::apply::rebase::Twin;
use crate::timeline::{Target, Timeline};
use crate::types::Epoch;

/// How often what was written meanwhile is carried over before it is given up. Each time takes as long as what was written
/// during the last one, so programs have to write faster than that for it to come to this.
const TRIES: u32 = 8;

/// Nodes, contents and names that may be carried over while nothing else is answered: some ten milliseconds.
const MOST_AT_LAST: usize = 2000;

/// What is said of the layer with what was written since the sealed state.
const DURING: &str = "during apply";

impl Timeline {
    /// Lets the head lie on the base as an apply made it from a sealed state, with what was written since. If that cannot be, it
    /// stays over the base as it was, which costs the space of the pre-images and nothing else.
    ///
    /// # Errors
    /// What the store or the base answers.
    pub(in crate::timeline) fn land(
        &self,
        sealed: Target,
        epoch: Epoch,
        description: &str,
    ) -> Result<()> {
        let (verb, to) = (OpVerb::Apply, Target { layer: None, epoch });
        let mut twin = Twin { here: self.state_of(sealed)?, there: self.state_of(to)? };
        // Whoever writes before the exchange writes to the layer that is shown, and keeps it there.
        let (mut next, present) =
            self.publish_layer(verb, to, LayerKind::Lands(self.fs.upper_layer()))?;
        let mut why = "programs write faster than that can be carried over".to_owned();
        for _ in 0..TRIES {
            let seal = Seal {
                name: None,
                message: DURING.to_owned(),
                time: clock::now(),
                automatic: true,
            };
            let landing = twin.follow(&self.fs.state(), usize::MAX).and_then(|_| {
                let at_last =
                    |now: &State| Ok(twin.follow(now, MOST_AT_LAST)?.then(|| twin.there.clone()));
                self.fs.rebase(next, seal, at_last)
            });
            match landing {
                Ok(Rebasing::Rebased(landed)) => return self.landed(landed, to, description),
                Ok(Rebasing::Moved(upper)) => next = upper,
                // The new tree is one record, so that a kill leaves all of it or nothing. That can
                // be too long.
                Err(FsError::Store(error)) if error.errno == Some(libc::EFBIG) => {
                    why = error.to_string();
                    break;
                }
                // It cannot be told what the tree is there: it stays where it is.
                Err(
                    error @ (FsError::Stale
                    | FsError::Drift(_)
                    | FsError::AccessDenied
                    | FsError::NotFound
                    | FsError::NotADirectory
                    | FsError::Damage(_)),
                ) => {
                    why = error.to_string();
                    break;
                }
                Err(error) => {
                    return Err(error)
                        .attempt(|| "apply")
                        .map_err(|e| self.unpublish_layer(&present, e));
                }
            }
        }
        log::warn!("apply: the tree stays over the base as it was before: {why}");
        self.with_reserve(|| self.store.set_head(&self.head, &present))
            .map_err(|error| self.refuse_changes(error))
    }

    fn landed(&self, landed: Rebased, to: Target, description: &str) -> Result<()> {
        // First of all, and whatever fails then.
        let told = self.kernel().invalidate(&landed.invalidations);
        let noted = match landed.sealed {
            Some((layer, Ok(()))) => self.log_late_seal(layer, &landed.from, DURING.to_owned()),
            Some((_, Err(error))) => Err(error),
            None => Ok(()),
        };
        let logged = self.log_operation(OpVerb::Apply, description.to_owned(), to);
        // What was carried over is in the new layer alone as soon as gc takes the one before.
        let synced = self.fs.sync().attempt(|| "apply: sync what was written meanwhile");
        logged.and(told).and(noted).and(synced).map_err(|e| e.after("apply was done"))
    }
}
