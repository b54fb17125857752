//! Carries a merge out, in place, while programs run in both heads.
//!
//! * A conflict changes nothing: the merge is planned before anything is sealed.
//! * The other head is sealed first, because the merged tree refers to its layers.
//! * Our head is sealed and switched at one moment. Writes that arrive while the merge is planned
//!   are kept: the plan applies to them if they touch other nodes, or else it is made again.
//! * The head's record names the merged state only after the tree shows it. A crash in between lets
//!   the next merge find changes that both heads have, and equal changes never conflict.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Conflict, Rules, late, with_plan};
use crate::error::{Attempt, Error, FsError, FsResult, Kind, Result};
use crate::fs::{Changed, Invalidations, State};
use crate::store::content::pool::PoolWriter;
use crate::store::layer::Upper;
use crate::store::record::{LayerKind, OpVerb};
use crate::timeline::checkpoint::automatic;
use crate::timeline::mounts::Mounts;
use crate::timeline::restore::ChangeSink;
use crate::timeline::{Target, Timeline, diff};
use crate::tree::{Edit, Misfit};
use crate::types::{LayerId, TreePath};

/// How often a merge is planned again because programs changed the same nodes meanwhile.
const ATTEMPTS: u32 = 8;

/// The changes that a merge made, or would make.
#[derive(Default)]
pub struct MergeOutcome {
    /// The paths that neither head wins, sorted. If there are any, nothing was changed.
    pub conflicts: Vec<Conflict>,
    /// The files that got conflict markers, and the copies of the other head's side, sorted.
    pub unresolved: Vec<TreePath>,
    /// The layer that the merge sealed with the state before it.
    pub before: Option<LayerId>,
    /// The operation that led to the state before; none if the log does not have it any more.
    pub undo: Option<u64>,
    /// Mount points inside the mount that the kernel detached, because their directory did not
    /// stay.
    pub detached: Vec<TreePath>,
}

/// A plan as edits.
#[derive(Default)]
struct Planned {
    conflicts: Vec<Conflict>,
    marked: Vec<TreePath>,
    beside: Vec<TreePath>,
    /// None if there are conflicts.
    edits: Vec<Edit>,
}

impl Planned {
    fn unresolved(&self) -> Vec<TreePath> {
        let all: BTreeSet<&TreePath> = self.marked.iter().chain(&self.beside).collect();
        all.into_iter().cloned().collect()
    }
}

impl Timeline {
    /// Merges another head of the store into this one, and passes each path that changed to
    /// `changes`. A `dry_run` changes nothing and finds out what would change.
    ///
    /// # Errors
    /// [`Kind::Usage`] for this head itself; [`Kind::NoStore`] if gc removed the base as the merge
    /// base saw it; those of the store, the base and the kernel. An error before the switch changes
    /// nothing. An error after it says that the merge was done.
    pub fn merge(
        &self,
        other: &Timeline,
        rules: &Rules,
        dry_run: bool,
        (mounts, changes): (Mounts, ChangeSink<'_>),
    ) -> Result<MergeOutcome> {
        let attempt = format!("merge '{}'", other.head());
        if other.head() == self.head() {
            let why = "it is the head that it would be merged into";
            return Err(
                Error::new(Kind::Usage, attempt, why).hint("'jailfs forks' lists the other heads")
            );
        }
        let _operation = self.lock_operation();
        self.flush()?;
        other.flush()?;
        let base = self.merge_base(other, &attempt)?;
        let (ours, theirs) = (self.fs().state(), other.fs().state());
        let mut scratch = scratch().attempt(|| attempt.as_str())?;
        let foreseen = plan((&base, &ours, &theirs), rules, &mut scratch).attempt(|| &attempt)?;
        if dry_run {
            let merged = with_edits(&ours, &foreseen.edits).attempt(|| &attempt)?;
            for change in diff::compare_records(&ours, &merged).attempt(|| &attempt)? {
                changes(&ours, &merged, change.attempt(|| &attempt)?)?;
            }
        }
        if dry_run || !foreseen.conflicts.is_empty() {
            let unresolved = foreseen.unresolved();
            let conflicts = foreseen.conflicts;
            return Ok(MergeOutcome { conflicts, unresolved, ..MergeOutcome::default() });
        }
        self.carry_out(other, (&base, &attempt), rules, (mounts, changes))
    }

    /// The state that both heads had in common last. Heads without one began with the base.
    fn merge_base(&self, other: &Timeline, attempt: &str) -> Result<State> {
        let begin = Target { layer: None, epoch: self.epoch().min(other.epoch()) };
        let common = self.common_seal(self.head(), other.head())?.unwrap_or(begin);
        self.state_of(common).map_err(|error| error.during(attempt))
    }

    /// Seals both heads, and switches ours to the merged tree.
    fn carry_out(
        &self,
        other: &Timeline,
        (base, attempt): (&State, &str),
        rules: &Rules,
        (mounts, changes): (Mounts, ChangeSink<'_>),
    ) -> Result<MergeOutcome> {
        let (target, _) = other.seal_present(&format!("it is merged into '{}'", self.head()))?;
        let theirs = other.state_of(target)?;
        for tries in 1.. {
            let ours = self.fs().state();
            let mut next = self.layer_above()?;
            let above = next.layer();
            let states = (base, &ours, &theirs);
            let planned = plan(states, rules, &mut next.pool).attempt(|| attempt)?;
            let unresolved = planned.unresolved();
            let Planned { conflicts, marked, beside, edits } = planned;
            if !conflicts.is_empty() {
                return Ok(MergeOutcome { conflicts, ..MergeOutcome::default() });
            }
            let merged = target.layer.filter(|_| rules.paths.is_empty());
            if edits.is_empty() {
                let noted =
                    merged.map_or(Ok(()), |merged| self.note_contained(other.head(), merged));
                return noted.map(|()| MergeOutcome::default());
            }
            let shown = with_edits(&ours, &edits).attempt(|| attempt)?;
            let detached = self.detached_mounts((&ours, &shown), &[], mounts)?;
            self.note_unresolved(&marked, &beside)?;
            let seal = automatic(format!("before {attempt}"));
            let changed = self.fs().seal_and_change(next, seal, |now| {
                let edits = late::onto(&ours, now, &edits).ok_or(FsError::Stale)?;
                let merged = with_edits(now, &edits)?;
                Ok((edits, merged))
            })?;
            if matches!(changed.to, Err(FsError::Stale)) && tries < ATTEMPTS {
                self.publish_sealed(&changed, above, attempt)?;
                continue;
            }
            let undo = self.finish_merge((&changed, above), attempt, merged, changes)?;
            let before = Some(changed.layer);
            return Ok(MergeOutcome { conflicts, unresolved, before, undo, detached });
        }
        Err(Error::damage(attempt, "the loop has no end"))
    }

    /// Records a merge that changes nothing, in a new state. Otherwise the next merge would take a
    /// change that both heads made, and ours took back since, for a new one.
    fn note_contained(&self, head: &str, layer: LayerId) -> Result<()> {
        if self.comes_from(layer)? {
            return Ok(());
        }
        let seal = automatic(format!("merge '{head}', which has no other changes"));
        let into = self.with_reserve(|| self.seal(seal.clone(), None))?;
        self.note_merged(layer, into)
    }

    /// A layer for the writes after the merge.
    fn layer_above(&self) -> Result<Upper> {
        let below = Some(self.fs().upper_layer());
        self.store().create_layer(below, self.head(), self.epoch(), LayerKind::Continues)
    }

    /// Tells the kernel and the store of the switch. Returns the operation that led to the state
    /// before.
    fn finish_merge(
        &self,
        (changed, above): (&Changed, LayerId),
        attempt: &str,
        merged: Option<LayerId>,
        changes: ChangeSink<'_>,
    ) -> Result<Option<u64>> {
        let invalidated = match &changed.to {
            Ok((_, invalidations)) => self.kernel().invalidate(invalidations),
            Err(_) => Ok(()),
        };
        let sealed = self.publish_sealed(changed, above, attempt);
        let shown = shown_state(&changed.to, attempt)?;
        let done = |error: Error| error.after(format!("{attempt} was done"));
        let listed = self.list_restored(&changed.from, &shown, changes);
        sealed.map_err(done)?;
        let message = automatic(attempt.to_owned());
        let after = self.with_reserve(|| self.seal(message.clone(), None)).map_err(done)?;
        if let Some(layer) = merged {
            self.note_merged(layer, after).map_err(done)?;
        }
        let to = Target { layer: Some(after), epoch: self.epoch() };
        let description = attempt.trim_start_matches("merge ").to_owned();
        let operation = self.log_operation(OpVerb::Merge, description, to).map_err(done)?;
        invalidated.map_err(done)?;
        listed.map_err(done)?;
        Ok(self.operation_before(operation, Some(changed.layer)))
    }
}

/// Plans a merge. Merged bytes are written to `pool`.
fn plan(
    states: (&State, &State, &State),
    rules: &Rules,
    pool: &mut PoolWriter,
) -> FsResult<Planned> {
    with_plan(states, rules, |plan| {
        let conflicts = plan.conflicts().to_vec();
        if !conflicts.is_empty() {
            return Ok(Planned { conflicts, ..Planned::default() });
        }
        let (edits, beside) = plan.edits(pool)?;
        Ok(Planned { conflicts, marked: plan.marked().to_vec(), beside, edits })
    })
}

/// A pool for bytes that nothing will read.
fn scratch() -> FsResult<PoolWriter> {
    Ok(PoolWriter::new(LayerId(0), Arc::new(tempfile::tempfile()?))?)
}

fn with_edits(state: &State, edits: &[Edit]) -> FsResult<State> {
    let mut state = state.clone();
    for edit in edits {
        state.tree.apply(edit).map_err(|Misfit(what)| FsError::Damage(what))?;
    }
    Ok(state)
}

/// The state that is shown since, if the filesystem switched to it.
///
/// # Errors
/// Why it did not switch. All changes are one record of the journal, so that a crash leaves all or
/// none of them, and can be too long for one record.
fn shown_state(to: &FsResult<(State, Invalidations)>, attempt: &str) -> Result<State> {
    match to.as_ref().map(|(state, _)| state.clone()) {
        Ok(state) => Ok(state),
        Err(FsError::Store(error)) if error.errno == Some(libc::EFBIG) => {
            Err(error.clone().during(attempt).hint("merge fewer paths at once"))
        }
        Err(FsError::Stale) => {
            let why = "programs changed the same files again and again while it was made";
            Err(Error::new(Kind::InUse, attempt, why).hint("try again when they are done"))
        }
        Err(error) => Err::<State, FsError>(error.clone()).attempt(|| attempt),
    }
}
