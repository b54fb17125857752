//! Rewinds the edit histories to a savepoint, for an attempt that is discarded.
//!
//! Edits since the savepoint are dropped, and moves of older edits are undone. Edits that were
//! dropped meanwhile to save space stay dropped.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::by_path::ByPath;
use super::path_history::Entry;
use crate::fs::Fs;
use crate::store::edits_log::EditsLogRecord;
use crate::types::TreePath;

/// The edit histories at a savepoint, by path.
pub struct EditsSavepoint {
    by_path: ByPath,
}

impl Fs {
    /// Records which edits exist now.
    pub fn edits_savepoint(&self) -> EditsSavepoint {
        let core = self.writing();
        EditsSavepoint {
            by_path: core.edits.as_ref().map(|history| history.by_path.clone()).unwrap_or_default(),
        }
    }

    /// Rewinds to a savepoint of this head, as far as its edits still exist.
    pub fn rewind_edits(&self, savepoint: &EditsSavepoint) {
        let mut core = self.writing();
        core.drop_all_pending();
        let Some(history) = &mut core.edits else { return };
        let now = std::mem::take(&mut history.histories.by_path);
        let mut there: HashMap<u64, Entry> = HashMap::new();
        // Edits that were compared, with the next one.
        let mut compared: HashSet<(TreePath, u64, Option<u64>)> = HashSet::new();
        let mut gone = Vec::new();
        let mut queued: HashSet<TreePath> = HashSet::new();
        for (path, list) in now.iter() {
            if list.is_queued {
                queued.insert(path.clone());
            }
            let pairs = list.with_next().filter(|(entry, _)| entry.compared);
            compared.extend(pairs.map(|(entry, next)| (path.clone(), entry.serial, next)));
            for entry in &list.entries {
                // After a rename of a file, both paths have the same edits.
                if let Some(same) = there.insert(entry.serial, entry.clone()) {
                    gone.push(same);
                }
            }
        }
        let mut by_path = savepoint.by_path.clone();
        by_path.change_all(|path, list| {
            let before = list.entries.len();
            // The extents may have changed since; the number at this path has not.
            let present = |old: &Entry| {
                let now = there.get(&old.serial)?;
                Some(Entry { number: old.number, ..now.clone() })
            };
            list.entries = list.entries.iter().filter_map(present).collect();
            let is_known =
                |(entry, next): (&Entry, _)| compared.contains(&(path.clone(), entry.serial, next));
            let known: Vec<bool> = list.with_next().map(is_known).collect();
            list.entries.iter_mut().zip(known).for_each(|(entry, known)| entry.compared = known);
            list.is_queued = queued.contains(path) || !list.is_compared();
            if list.entries.len() != before {
                // Whether the last entry is the file before an undo is not known any more.
                list.undone_to = None;
            }
        });
        by_path.remove_empty();
        let stay: BTreeSet<u64> =
            by_path.iter().flat_map(|(_, list)| &list.entries).map(|entry| entry.serial).collect();
        gone.extend(there.into_values().filter(|entry| !stay.contains(&entry.serial)));
        history.histories.release(gone);
        history.histories.cost = by_path.iter().map(|(_, list)| list.cost()).sum();
        let queued = by_path.iter().filter(|(_, list)| list.is_queued);
        history.histories.queue = queued.map(|(path, _)| path.clone()).collect();
        history.histories.by_path = by_path;
        history.active.clear();
        // Any kind of record that changes which edits exist has this effect.
        history.note_change(&EditsLogRecord::Kept(Vec::new()));
        history.log.request_rewrite();
        core.write_edits();
    }
}
