//! Restores single files and directories: some paths become as in another state, the rest of the
//! tree stays.
//!
//! * The cost is what differs at the paths: the difference of the two states is applied to the
//!   present tree.
//! * A node has one content for all its names. So a restored name gets the node that it had only if
//!   no name outside of the paths stands for that node now.
//! * Otherwise (the file was moved away, or it is a hard link of a name outside) the name gets a
//!   copy under a fresh inode number. It becomes a hard link again only if the name outside is what
//!   it was as well.
//! * A name of the base that needs no record is restored by removing what hides it.

mod dirs;
mod links;
mod merge;
#[cfg(test)]
mod tests;

use crate::error::{Attempt, Error, FsError, FsResult, Kind, Result};
use crate::fs::{Changed, Invalidations, State};
use crate::store::record::{LayerKind, OpVerb, Seal};
use crate::sys::clock;
use crate::timeline::mounts::Mounts;
use crate::timeline::restore::base_paths::BasePaths;
use crate::timeline::restore::copies::Copies;
use crate::timeline::restore::{ChangeSink, RestoreOutcome};
use crate::timeline::{Target, Timeline, verb_text};
use crate::types::{LayerId, TreePath};
use merge::merge;

/// How often a restore of paths starts over because the tree changed meanwhile.
const ATTEMPTS: u32 = 8;

impl Timeline {
    /// Makes the tree equal to `to` at some paths, in place, and passes each path that changed to
    /// `changes`.
    ///
    /// # Errors
    /// A path that neither state has, or that lies below a file now; else as [`Timeline::restore`].
    pub fn restore_paths(
        &self,
        verb: OpVerb,
        to: Target,
        paths: &[TreePath],
        description: String,
        (mounts, changes): (Mounts, ChangeSink<'_>),
    ) -> Result<RestoreOutcome> {
        let _operation = self.lock_operation();
        let attempt = || format!("{} {description}", verb_text(verb));
        self.flush()?;
        let then = self.state_of(to)?;
        for tries in 1.. {
            let now = self.fs.state();
            check_paths(&now, &then, paths).map_err(|e| e.during(attempt()))?;
            let detached = self.detached_mounts((&now, &then), paths, mounts)?;
            let (changed, next) = self.seal_and_merge((&now, &then), paths, &attempt())?;
            let is_shown = changed.to.is_ok();
            let during = |error: Error| match is_shown {
                true => error.after(format!("{} was done", attempt())),
                false => error,
            };
            let invalidated = changed
                .to
                .as_ref()
                .map_or(Ok(()), |(_, invalidations)| self.kernel().invalidate(invalidations));
            let sealed = self.publish_sealed(&changed, next, &attempt());
            if matches!(changed.to, Err(FsError::Stale)) && tries < ATTEMPTS {
                sealed?;
                continue;
            }
            let shown = shown_state(changed.to, &attempt())?;
            let listed = self.list_restored(&changed.from, &shown, changes);
            sealed.map_err(during)?;
            let after =
                self.with_reserve(|| self.seal(automatic(attempt()), None)).map_err(during)?;
            let restored = Target { layer: Some(after), epoch: self.epoch() };
            let operation =
                self.log_operation(verb, description.clone(), restored).map_err(during)?;
            invalidated.map_err(during)?;
            let before = Some(changed.layer);
            let undo = self.operation_before(operation, before);
            listed.map_err(during)?;
            return Ok(RestoreOutcome { before, undo, detached });
        }
        Err(Error::damage(attempt(), "the loop has no end"))
    }

    /// Seals the present state, and switches to the merged one at the same moment. Returns what the
    /// filesystem made of that, and the layer that is written to since.
    fn seal_and_merge(
        &self,
        (now, then): (&State, &State),
        paths: &[TreePath],
        attempt: &str,
    ) -> Result<(Changed, LayerId)> {
        let below = Some(self.fs.upper_layer());
        let mut next =
            self.store.create_layer(below, &self.head, self.epoch(), LayerKind::Continues)?;
        let above = next.layer();
        let copies = Copies::make(now, then, paths, &mut next.pool).attempt(|| attempt)?;
        let base_paths = BasePaths::of(now, then, paths).attempt(|| attempt)?;
        let mut fresh = || Ok(self.store.identities().lock().fresh()?);
        let seal = automatic(format!("before {attempt}"));
        let changed = self.fs.seal_and_change(next, seal, |now| {
            merge(now, then, paths, (&copies, &base_paths), &mut fresh)
        })?;
        Ok((changed, above))
    }

    /// Makes the head's record name the layer `next`, and logs the sealed state.
    pub(in crate::timeline) fn publish_sealed(
        &self,
        changed: &Changed,
        next: LayerId,
        attempt: &str,
    ) -> Result<()> {
        changed.sealed.clone()?;
        self.with_reserve(|| self.store.set_head(&self.head, next))?;
        self.trees.lock().keep(changed.layer, changed.from.tree.clone());
        let sealed = Target { layer: Some(changed.layer), epoch: self.epoch() };
        self.log_operation(OpVerb::Seal, format!("before {attempt}"), sealed).map(drop)
    }
}

fn automatic(message: String) -> Seal {
    Seal { name: None, message, time: clock::now(), automatic: true }
}

/// The state that is shown since, if the filesystem switched to it.
///
/// # Errors
/// Why it did not switch. All changes are one record of the journal, so that a crash leaves all or
/// none of them, and can be too long for one record.
fn shown_state(to: FsResult<(State, Invalidations)>, attempt: &str) -> Result<State> {
    match to {
        Err(FsError::Store(error)) if error.errno == Some(libc::EFBIG) => {
            Err(error.during(attempt).hint("restore fewer paths at once, or the whole tree"))
        }
        to => Ok(to.attempt(|| attempt)?.0),
    }
}

/// Refuses paths that are in neither state.
///
/// # Errors
/// `NoStore`, with a hint; those of the base.
pub fn check_paths(now: &State, then: &State, paths: &[TreePath]) -> Result<()> {
    for path in paths {
        let found = |state: &State| state.resolve(path).attempt(|| format!("find '{path}'"));
        if found(now)?.ino().is_none() && found(then)?.ino().is_none() {
            let why = "neither the checkpoint nor the tree has it";
            return Err(Error::new(Kind::NoStore, format!("find '{path}'"), why)
                .hint("'jailfs show ID:PATH' lists what a checkpoint has"));
        }
    }
    Ok(())
}
