//! Writes the tree into the base, and undoes that.
//!
//! Always true:
//! * Before the first write to the base, a synced pre-image layer holds everything that the apply
//!   will overwrite or remove.
//! * An apply counts as done when its pre-image layer is sealed. Until then it is rolled back:
//!   directly if it fails, or at the next start of jailfs if it was interrupted.
//! * Each sealed pre-image layer begins an epoch of the base. States of earlier epochs read what
//!   the apply changed from the pre-images.
//! * An apply that was rolled back is an epoch as well. The base has the same bytes again but in
//!   new files of the host, and the epoch records which inode number each of them has.
//!
//! The steps of an apply, each of which a crash can interrupt:
//!
//! 1. [`plan`] compares the base with the tree. A path that changed in the base since the tree
//!    copied it up is a [`conflict`], and then nothing is written. [`preflight`] looks for other
//!    obstacles.
//! 2. [`pre_images`] records what the base has at each path that will be touched.
//! 3. [`write`] stages new content next to its target and renames it over the target.
//! 4. [`post_images`] records what the base has now, and the pre-image layer is sealed.
//! 5. [`rebase`] moves the head onto the new base.
//!
//! An apply, a rollback and an undo share the code of step 3: each makes a list of paths equal to a
//! state.

pub(in crate::timeline) mod claims;
pub(in crate::timeline) mod conflict;
pub mod plan;
pub(in crate::timeline) mod post_images;
pub(in crate::timeline) mod pre_images;
pub(in crate::timeline) mod preflight;
pub mod protected;
pub(in crate::timeline) mod rebase;
pub(in crate::timeline) mod rollback;
pub(in crate::timeline) mod staging;
pub(in crate::timeline) mod transaction;
pub(in crate::timeline) mod unfinished;
pub(in crate::timeline) mod write;

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::fs::State;
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::PreHistory;
use crate::store::layer::LayerInfo;
use crate::store::record::{LayerKind, OpVerb};
use crate::timeline::apply::plan::Plan;
use crate::timeline::apply::protected::Consent;
use crate::timeline::apply::rollback::ROLLED_BACK;
use crate::timeline::{Common, Target, Timeline};
use crate::types::{Epoch, TreePath};

/// The seal message of an undo.
const UNDO: &str = "undo";

impl Common {
    pub(in crate::timeline) fn lower(&self, epoch: Epoch, history: &PreHistory) -> Lower {
        Lower::new(Arc::clone(self.base()), Arc::clone(self.store()), epoch, history.clone())
    }

    /// Makes the states that all open heads show, and all states from now on, read the base through
    /// `history`. The caller holds the operation lock, so no head is opened meanwhile.
    pub(in crate::timeline) fn install_history(&self, history: &PreHistory) {
        *self.applies.lock() = history.clone();
        for fs in self.open_filesystems() {
            fs.set_lower(self.lower(fs.state().lower.epoch(), history));
        }
    }

    /// The epoch of the last apply, if it is not undone. An apply that was rolled back does not
    /// count.
    pub(super) fn last_undoable(&self) -> Option<Epoch> {
        let layers = self.store().catalog();
        let is_written = |l: &&LayerInfo| {
            let seal = l.seal.as_ref().filter(|_| l.header.kind == LayerKind::PreImage);
            seal.is_some_and(|seal| seal.message != ROLLED_BACK)
        };
        let last = layers.iter().rfind(is_written)?;
        let is_undo = last.seal.as_ref().is_some_and(|seal| seal.message == UNDO);
        (!is_undo).then_some(last.header.epoch)
    }
}

impl Timeline {
    /// Plans an apply of the changes at and below `paths`, or of all changes if there are no paths.
    ///
    /// # Errors
    /// Those of the base and the store.
    pub fn plan_apply(&self, paths: &[TreePath], consent: Consent) -> Result<Plan> {
        let _operation = self.lock_operation();
        self.flush()?;
        self.plan(self.fs.state(), paths, consent)
    }

    /// Writes the tree into the base: the changes at and below `paths`, or all changes if there are
    /// no paths. Returns the plan that was carried out. If the plan has conflicts or refused paths,
    /// nothing is written.
    ///
    /// # Errors
    /// Those of the base and the store. The base is then as it was before, unless the error says
    /// that the base was written or could not be rolled back.
    pub fn apply(&self, paths: &[TreePath], consent: Consent) -> Result<Plan> {
        let _operation = self.lock_operation();
        self.check_no_unfinished_rollback()?;
        self.flush()?;
        let (sealed, _) = self.seal_present("apply")?;
        let mut plan = self.plan(self.state_of(sealed)?, paths, consent)?;
        if !plan.is_writable() {
            return Ok(plan);
        }
        let epoch = self.write_plan(&mut plan, "")?;
        // After an apply of some paths the head stays over the base as it was before, which the
        // pre-images keep readable. After an apply of everything it can be rebased.
        let rebased = match paths.is_empty() {
            true => self.rebase_head(sealed, epoch, &plan.describe()),
            false => Ok(()),
        };
        self.log_apply(&plan, sealed, epoch).and(rebased).map_err(after_writing)?;
        Ok(plan)
    }

    /// Plans what [`Timeline::undo_apply`] would do.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if there was no apply; those of the base and the store.
    pub fn plan_undo(&self) -> Result<Plan> {
        let _operation = self.lock_operation();
        match self.plan_rollback()? {
            Some(rollback) => Ok(rollback),
            None => self.plan(self.state_before(self.apply_to_undo()?)?, &[], Consent::ALL),
        }
    }

    /// Makes the base equal to what it was before the last apply. If the last apply has an
    /// unfinished rollback, this tries to finish it. The tree in the mount stays as it is.
    ///
    /// # Errors
    /// As [`Timeline::apply`].
    pub fn undo_apply(&self) -> Result<Plan> {
        let _operation = self.lock_operation();
        self.flush()?;
        if let Some(rollback) = self.plan_rollback()? {
            return self.finish_rollback().map(|()| rollback);
        }
        let applied = self.apply_to_undo()?;
        let mut plan = self.plan(self.state_before(applied)?, &[], Consent::ALL)?;
        if plan.is_writable() {
            let (sealed, _) = self.seal_present("undo apply")?;
            self.write_plan(&mut plan, UNDO)?;
            self.log_operation(OpVerb::UndoApply, plan.describe(), sealed)
                .map_err(after_writing)?;
        }
        Ok(plan)
    }

    /// Logs an apply, unless [`Timeline::rebase_head`] has done so already.
    fn log_apply(&self, plan: &Plan, sealed: Target, epoch: Epoch) -> Result<()> {
        let is_rebased = self.fs().state().lower.epoch() == epoch;
        if is_rebased {
            return Ok(());
        }
        self.log_operation(OpVerb::Apply, plan.describe(), sealed).map(drop)
    }

    /// The epoch of the apply that an undo is for.
    fn apply_to_undo(&self) -> Result<Epoch> {
        self.last_undoable().ok_or_else(|| {
            let why = match self.applies.lock().is_empty() {
                true => "nothing was applied yet",
                false => "the last apply is undone already",
            };
            Error::new(Kind::NoStore, "undo apply", why)
        })
    }

    /// The base as it was before an apply.
    fn state_before(&self, applied: Epoch) -> Result<State> {
        self.state_of(Target { layer: None, epoch: Epoch(applied.0.saturating_sub(1)) })
    }
}

/// Marks an error that came after the base was written and the apply was sealed.
fn after_writing(error: Error) -> Error {
    error.after("the base was written").hint("'jailfs apply --undo' undoes it")
}
