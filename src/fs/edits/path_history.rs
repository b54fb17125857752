//! The edit history of one path, and its edits.
//!
//! Always true:
//! * the numbers of the edits ascend;
//! * a serial stands for one edit, also if two paths have it after a rename.

use std::collections::VecDeque;

use crate::store::edits_log::LoggedEdit;

/// An edit in the history of its path.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) number: u32,
    /// Identifies the edit while the head is open. Numbers start again when a path has no history
    /// left; serials are never reused.
    pub(super) serial: u64,
    /// The file before the edit.
    pub(super) edit: LoggedEdit,
    /// How much of the budget it takes, in bytes.
    pub(super) cost: u64,
    /// Whether its content was compared with that of the next edit, or the file. While an undo
    /// makes it the current content, its extents stay, and it counts as compared.
    pub(super) compared: bool,
    /// The number of the log record with its extents; 0 if its bytes are known to be synced.
    pub(super) record: u64,
    /// The number of that record, also after a sync.
    pub(super) log_record: u64,
}

/// The edit history of a path.
#[derive(Clone, Default)]
pub(super) struct PathHistory {
    /// The number of the next edit.
    pub(super) next: u32,
    /// Oldest first.
    pub(super) entries: VecDeque<Entry>,
    /// The edit that an undo went back to. The last entry is then the file before the first undo.
    pub(super) undone_to: Option<u32>,
    /// Whether its edits are to be compared. Then the path is in the queue of the histories. If an
    /// edit of another path was not compared, it could not be read: it is tried again after the
    /// next edit of the path, or by the next process.
    pub(super) is_queued: bool,
}

impl PathHistory {
    /// The cost of all edits of the path.
    pub(super) fn cost(&self) -> u64 {
        self.entries.iter().map(|entry| entry.cost).sum()
    }

    /// Each edit with the serial of the next one.
    pub(super) fn with_next(&self) -> impl Iterator<Item = (&Entry, Option<u64>)> {
        let next = self.entries.iter().skip(1).map(|entry| Some(entry.serial));
        self.entries.iter().zip(next.chain([None]))
    }

    /// Whether all edits of the path were compared.
    pub(super) fn is_compared(&self) -> bool {
        self.entries.iter().all(|entry| entry.compared)
    }

    /// Changes to which edit an undo went, and returns where it was. From now on the extents of
    /// that edit can change again.
    pub(super) fn undo_to(&mut self, number: Option<u32>) -> Option<u32> {
        let was = std::mem::replace(&mut self.undone_to, number);
        if let Some(was) = was.filter(|was| Some(*was) != number) {
            let mut entries = self.entries.iter_mut();
            entries.find(|entry| entry.number == was).iter_mut().for_each(|e| e.compared = false);
        }
        was
    }
}
