//! Answers an apply and its dry run.

use crate::error::Result;
use crate::sandbox::{Applied, Consent, Detail, MAX_NOT_KEPT, Sandbox, date};
use crate::sys::flags;
use crate::timeline::apply;
use crate::types::TreePath;

impl Sandbox {
    pub(super) fn apply(
        &self,
        paths: &[TreePath],
        dry_run: bool,
        undo: bool,
        consent: Consent,
    ) -> Result<Applied> {
        let plan = match (undo, dry_run) {
            (false, false) => self.timeline.apply(paths, consent)?,
            (false, true) => self.timeline.plan_apply(paths, consent)?,
            (true, false) => self.timeline.undo_apply()?,
            (true, true) => self.timeline.plan_undo()?,
        };
        let mut lister = match dry_run {
            true => self.lister_for_review(Detail::NameStatus),
            false => self.lister(Detail::NameStatus),
        };
        plan.changes.iter().try_for_each(|change| lister.add(&plan.from, &plan.to, change))?;
        let not_kept_count = plan.not_kept.len() as u64;
        let not_kept = plan.not_kept.into_iter().take(MAX_NOT_KEPT);
        Ok(Applied {
            changes: lister.finish(),
            epoch: self.timeline.base_epoch(),
            conflicts: plan.conflicts,
            refused: plan.refused,
            not_kept: not_kept.map(|(path, lost)| (path, not_kept_text(lost))).collect(),
            not_kept_count,
            is_rollback: plan.is_rollback,
        })
    }
}

/// Describes for people which attributes of a file the base cannot store.
fn not_kept_text(lost: apply::plan::NotKept) -> String {
    match lost {
        apply::plan::NotKept::Time { wanted, kept } => {
            let (wanted, kept) = (date::utc(wanted), date::utc(kept));
            format!("the filesystem of the base cannot hold its time {wanted}, and has {kept}")
        }
        apply::plan::NotKept::Flags(lost) => {
            format!("its flags '{}' of chattr(1) are lost", flags::letters(lost))
        }
    }
}
