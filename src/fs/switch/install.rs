//! Installs another state in place, while the kernel holds nodes of the present one.
//!
//! The lock of changes is held all the time, so the present state stays as it is. The core lock is
//! released while the plan is made and the record is written, because the base and the disk may be
//! slow. Programs look nodes up and forget them meanwhile, so the plan is completed in rounds.
//!
//! Lookups that find a node wait during the last round and the record. The plan is then carried out
//! before the core lock is released again.

use crate::error::FsResult;
use crate::fs::merged::answers::at_once;
use crate::fs::switch::Invalidations;
use crate::fs::switch::plan::{Changes, LeftToBase, NewOrphan, SwitchPlan};
use crate::fs::writing::Writing;
use crate::fs::{Core, State};

/// The number of rounds before the last one. Each one plans only the nodes that programs have
/// looked up during the round before, so there are soon few.
pub(in crate::fs) const MOST_ROUNDS: usize = 4;

impl Writing<'_> {
    /// Replaces the state, and calls `record` when nothing else can fail any more. Returns what the
    /// kernel must invalidate. `same_content` says that every file has the same content in `after`,
    /// wherever that is stored.
    ///
    /// # Errors
    /// Those of the base and of `record`; then nothing has changed.
    pub(in crate::fs) fn install(
        &mut self,
        after: &State,
        same_content: bool,
        record: impl FnOnce(&mut Self) -> FsResult<()>,
    ) -> FsResult<Invalidations> {
        let before = self.state.clone();
        let how = (same_content, self.coherence.is_writeback());
        self.held.watch();
        let mut plan = self.released(|| at_once(|| SwitchPlan::new((&before, after), how)))?;
        for _ in 0..MOST_ROUNDS {
            let unplanned = plan.take_unplanned(self);
            if unplanned.is_empty() {
                break;
            }
            self.released(|| at_once(|| plan.add(unplanned)))?;
        }
        self.held.close();
        let unplanned = plan.take_unplanned(self);
        if !unplanned.is_empty() {
            self.released(|| at_once(|| plan.add(unplanned)))?;
        }
        record(self)?;
        // The kernel may have sent FORGET since the last look.
        let held = plan.take_unplanned(self);
        debug_assert!(held.is_empty(), "lookups wait");
        self.held.end_watch();
        let changes = plan.into_changes(|ino| self.held.id_of(ino));
        Ok(self.carry_out(changes, &before, after.clone()))
    }
}

impl Core {
    /// Carries a plan out. Nothing can fail any more.
    fn carry_out(&mut self, changes: Changes, before: &State, after: State) -> Invalidations {
        let Changes { orphans, recorded, left_to_base, aliases, invalidations } = changes;
        for (ino, names) in aliases {
            self.coherence.add_aliases(ino, names);
        }
        self.coherence.note_switched_names(&invalidations.names);
        self.links.cut_off(&self.held, &orphans.iter().map(|(id, _)| *id).collect());
        self.state = after;
        for (id, NewOrphan { ino, record, .. }) in orphans {
            let kept = record.map(|record| {
                self.held.make_orphan(id, record, before.lower.epoch(), |meta| meta.nlink = 0)
            });
            // The state is installed, so there is no way back.
            if let Some(Err(error)) = &kept {
                log::error!("cannot keep node {} for its holders: {error}", ino.0);
            }
            if !matches!(kept, Some(Ok(()))) {
                self.held.make_orphan_without_record(id);
            }
        }
        for (id, node) in recorded {
            self.coherence.note_recorded(&mut self.held, id, &node);
        }
        for (id, LeftToBase { path, cached }) in left_to_base {
            self.held.set_base_path(id, Some(path));
            if let Some(cached) = cached {
                self.coherence.note_left_to_base(&mut self.held, id, cached);
            }
        }
        invalidations
    }
}
