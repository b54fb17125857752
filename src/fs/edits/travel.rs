//! Edit histories that leave the store, or come from another one.

use super::path_history::PathHistory;
use super::state_of;
use crate::fs::{Found, Fs, State};
use crate::store::edits_log::{Content, EditsLogRecord, LoggedEdit};
use crate::types::TreePath;

/// The edit history of a path.
#[derive(Clone, Debug)]
pub struct PathEdits {
    /// The path.
    pub path: TreePath,
    /// The number of its next edit.
    pub next: u32,
    /// The edit that an undo went back to.
    pub undone_to: Option<u32>,
    /// The edits with their numbers, newest first.
    pub edits: Vec<(u32, LoggedEdit)>,
}

impl Fs {
    /// The edit histories of all paths, ascending. To read the content, hold [`Fs::read_guard`]
    /// from before this call.
    pub fn edit_histories(&self) -> Vec<PathEdits> {
        let mut core = self.writing();
        let Some(history) = &mut core.edits else { return Vec::new() };
        history.claim_all_pending();
        let of = |(path, list): (&TreePath, &PathHistory)| PathEdits {
            path: path.clone(),
            next: list.next,
            undone_to: list.undone_to,
            edits: list.entries.iter().rev().map(|e| (e.number, e.edit.clone())).collect(),
        };
        let all = history.by_path.iter();
        all.filter(|(_, list)| !list.entries.is_empty()).map(of).collect()
    }

    /// The content of an edit as a state with this single file, and the file in it.
    pub fn state_of_edit(&self, content: &Content) -> (State, Found) {
        state_of(self, content)
    }

    /// Replaces the histories of these paths, as far as the bounds of this head allow: the oldest
    /// edits are left out. Returns the number of edits that it took. The content must be synced.
    /// Hold [`Fs::read_guard`] from before it was written, so that it is not freed meanwhile.
    pub fn adopt_edits(&self, all: Vec<PathEdits>) -> u64 {
        let mut core = self.writing();
        let mut count = 0;
        for one in all {
            for content in one.edits.iter().filter_map(|(_, edit)| edit.content.as_ref()) {
                core.pin(content);
            }
            let Some(history) = core.edits.as_mut().filter(|history| history.is_on()) else {
                return 0;
            };
            // The file before the first undo comes on top, as in `Histories::push`.
            let most = history.bounds.edits as usize + usize::from(one.undone_to.is_some());
            let kept = one.edits.into_iter().take(most);
            let kept = kept.map(|(number, edit)| (number, edit, true));
            let mut edits: Vec<_> = kept.collect();
            edits.reverse();
            let at = one.undone_to.filter(|at| edits.iter().any(|(number, ..)| number == at));
            count += edits.len() as u64;
            history.append(EditsLogRecord::Dropped { path: one.path.clone(), upto: u32::MAX });
            if !edits.is_empty() {
                let (path, next) = (one.path, one.next);
                history.append(EditsLogRecord::List { path, next, at, edits });
            }
        }
        if let Some(history) = &mut core.edits {
            // The files are other ones now, so their next writes begin edits.
            history.active.clear();
            history.notice.iter().for_each(|notice| notice());
        }
        count
    }
}
