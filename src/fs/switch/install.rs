//! Installs another state in place, while the kernel holds nodes of the present one.
//!
//! The lock of changes is held all the time, so the present state stays as it is. The core lock is
//! released while the plan is made, while the daemon works out what changes, and while the record
//! is written: the base and the disk may be slow, and the kernel may hold many nodes. Programs look
//! nodes up and forget them meanwhile, so the plan is completed in rounds.
//!
//! From the last round on, lookups that find a node wait. The changes are then carried out before
//! the core lock is released again.

use crate::error::FsResult;
use crate::fs::merged::answers::at_once;
use crate::fs::switch::Invalidations;
use crate::fs::switch::plan::{Changes, LeftToBase, SwitchPlan};
use crate::fs::writing::Writing;
use crate::fs::{Core, State};
use crate::types::Ino;

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
        let dirs = self.released(|| plan.dirs());
        let dirs = dirs.into_iter().filter_map(|dir| Some((dir, self.held.id_of(dir)?))).collect();
        let records = self.held.orphans().records().clone();
        let mut changes = self.released(|| plan.into_changes(&dirs, records));
        record(self)?;
        // Only FORGET can have come since the last `take_unplanned`.
        for id in self.held.take_changed() {
            debug_assert!(self.held.get(id).is_none(), "lookups wait");
            changes.orphan_records.remove(id);
        }
        self.held.end_watch();
        Ok(self.carry_out(changes, after.clone()))
    }
}

impl Core {
    /// Carries a plan out. Nothing can fail any more.
    fn carry_out(&mut self, changes: Changes, after: State) -> Invalidations {
        let Changes { orphans, orphan_records, recorded, left_to_base, .. } = changes;
        let Changes { aliases, switched_names, invalidations, .. } = changes;
        // FORGET of such a file would have taken its aliases along.
        let is_held = |(ino, _): &(Ino, _)| self.held.ids_of(*ino).next().is_some();
        for (ino, names) in aliases.into_iter().filter(is_held) {
            self.coherence.add_aliases(ino, names);
        }
        self.coherence.note_switched_names(switched_names);
        self.links.cut_off(&self.held, &orphans);
        self.state = after;
        self.held.make_orphans(&orphans, orphan_records);
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
