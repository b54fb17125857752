//! Going back to the versions that there were at a moment: what was kept since, and every move of what was kept before, is as if
//! it had not been.
//!
//! What was given up meanwhile, for want of room, stays given up.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Entry, List, all_records};
use crate::fs::Fs;
use crate::store::edits_log::EditsLogRecord;
use crate::types::TreePath;

/// The versions that there were at a moment, by path.
pub struct VersionMark {
    lists: BTreeMap<TreePath, List>,
}

impl Fs {
    /// Remembers which versions there are.
    pub fn mark_versions(&self) -> VersionMark {
        let core = self.core();
        VersionMark {
            lists: core.edits.as_ref().map(|versions| versions.lists.clone()).unwrap_or_default(),
        }
    }

    /// Makes the versions what they were at a mark of this head, as far as they are still there.
    pub fn go_back_to_versions(&self, mark: &VersionMark) {
        let mut core = self.core();
        core.give_up_away();
        let Some(versions) = &mut core.edits else { return };
        let now = std::mem::take(&mut versions.known.lists);
        let mut there: HashMap<u64, Entry> = HashMap::new();
        let mut gone = Vec::new();
        for entry in now.into_values().flat_map(|list| list.entries) {
            // Where a file was moved, both of its paths have it.
            if let Some(same) = there.insert(entry.serial, entry) {
                gone.push(same);
            }
        }
        let mut lists = mark.lists.clone();
        for list in lists.values_mut() {
            let before = list.entries.len();
            // Where its bytes are may have changed since; its number at this path has not.
            let kept = |old: &Entry| {
                let now = there.get(&old.serial)?;
                Some(Entry { number: old.number, settled: false, ..now.clone() })
            };
            list.entries = list.entries.iter().filter_map(kept).collect();
            if list.entries.len() != before {
                // Which of them was on top of an undo is not known any more.
                list.at = None;
            }
        }
        lists.retain(|_, list| !list.entries.is_empty());
        let stay: BTreeSet<u64> =
            lists.values().flat_map(|list| &list.entries).map(|entry| entry.serial).collect();
        gone.extend(there.into_values().filter(|entry| !stay.contains(&entry.serial)));
        versions.known.forget(gone);
        versions.known.cost = lists.values().map(List::cost).sum();
        versions.known.unsettled = lists.keys().cloned().collect();
        versions.known.lists = lists;
        versions.going.clear();
        // Any record that changes which versions there are would do.
        versions.note_change(&EditsLogRecord::Kept(Vec::new()));
        let all = all_records(&versions.known.lists, versions.known.bounds, versions.known.synced);
        if versions.log.rewrite(all) {
            versions.numbers_anew();
        }
    }
}
