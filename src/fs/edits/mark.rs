//! Rewinds the edit histories to a savepoint, for an attempt that is discarded.
//!
//! Edits since the savepoint are dropped, and moves of older edits are undone. Edits that were
//! dropped meanwhile to save space stay dropped.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::all_records;
use super::histories::{Entry, PathHistory};
use crate::fs::Fs;
use crate::store::edits_log::EditsLogRecord;
use crate::types::TreePath;

/// The edit histories at a savepoint, by path.
pub struct EditsSavepoint {
    by_path: BTreeMap<TreePath, PathHistory>,
}

impl Fs {
    /// Records which edits exist now.
    pub fn edits_savepoint(&self) -> EditsSavepoint {
        let core = self.core();
        EditsSavepoint {
            by_path: core.edits.as_ref().map(|history| history.by_path.clone()).unwrap_or_default(),
        }
    }

    /// Rewinds to a savepoint of this head, as far as its edits still exist.
    pub fn rewind_edits(&self, savepoint: &EditsSavepoint) {
        let mut core = self.core();
        core.drop_all_pending();
        let Some(history) = &mut core.edits else { return };
        let now = std::mem::take(&mut history.histories.by_path);
        let mut there: HashMap<u64, Entry> = HashMap::new();
        let mut gone = Vec::new();
        for entry in now.into_values().flat_map(|list| list.entries) {
            // After a rename of a file, both paths have the same edits.
            if let Some(same) = there.insert(entry.serial, entry) {
                gone.push(same);
            }
        }
        let mut by_path = savepoint.by_path.clone();
        for list in by_path.values_mut() {
            let before = list.entries.len();
            // The extents may have changed since; the number at this path has not.
            let present = |old: &Entry| {
                let now = there.get(&old.serial)?;
                Some(Entry { number: old.number, compared: false, ..now.clone() })
            };
            list.entries = list.entries.iter().filter_map(present).collect();
            if list.entries.len() != before {
                // Whether the last entry is the file before an undo is not known any more.
                list.undone_to = None;
            }
        }
        by_path.retain(|_, list| !list.entries.is_empty());
        let stay: BTreeSet<u64> =
            by_path.values().flat_map(|list| &list.entries).map(|entry| entry.serial).collect();
        gone.extend(there.into_values().filter(|entry| !stay.contains(&entry.serial)));
        history.histories.release(gone);
        history.histories.cost = by_path.values().map(PathHistory::cost).sum();
        history.histories.uncompared = by_path.keys().cloned().collect();
        history.histories.by_path = by_path;
        history.active.clear();
        // Any kind of record that changes which edits exist has this effect.
        history.note_change(&EditsLogRecord::Kept(Vec::new()));
        let all = all_records(
            &history.histories.by_path,
            history.histories.bounds,
            history.histories.synced,
        );
        if history.log.rewrite(all) {
            history.renumber_records();
        }
    }
}
