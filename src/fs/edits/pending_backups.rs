//! Contents of new files that were renamed away: pending until their old name is used again.
//!
//! A program that saves `a` may first write a backup and rename it. If a file comes to the old name
//! soon, the pending content becomes an edit of that name. Otherwise it is dropped: after
//! [`EXPIRY`], beyond [`MAX_PENDING`], over the budget, or on a full disk. Pending backups count
//! towards the budget and are dropped before any edit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::content::{cost_of, unshared_bytes};
use super::{EditHistory, MAX_EXTENTS, since};
use crate::fs::Core;
use crate::store::edits_log::{Content, EditsLogRecord, LoggedEdit};
use crate::tree::Source;
use crate::types::{ByteRange, Ino, TreePath};

/// The most pending backups.
const MAX_PENDING: usize = 256;
/// How long a backup stays pending.
const EXPIRY: Duration = Duration::from_secs(10);

/// Names and contents, oldest first.
pub(super) type PendingBackups = VecDeque<(TreePath, Arc<LoggedEdit>)>;

impl EditHistory {
    /// Adds a pending backup.
    pub(super) fn add_pending(&mut self, path: TreePath, edit: LoggedEdit) {
        self.cost += cost_of(&edit);
        self.pending.push_back((path, Arc::new(edit)));
        // Wakes the thread that drops it after it expired.
        if let Some(notice) = &self.notice {
            notice();
        }
    }

    /// A file comes to a path: the pending backup of the path becomes an edit.
    pub(super) fn claim_pending(&mut self, path: &TreePath) {
        if let Some(at) = self.pending.iter().position(|(name, _)| name == path)
            && let Some((path, edit)) = self.pending.remove(at)
        {
            self.cost = self.cost.saturating_sub(cost_of(&edit));
            self.append(EditsLogRecord::Kept(vec![(path, LoggedEdit::clone(&edit))]));
        }
    }

    /// All pending backups become edits.
    pub(super) fn claim_all_pending(&mut self) {
        let paths: Vec<TreePath> = self.pending.iter().map(|(path, _)| path.clone()).collect();
        paths.iter().for_each(|path| self.claim_pending(path));
    }

    /// Drops the oldest. `live` returns the present content of a file: bytes that it still refers
    /// to are not garbage.
    pub(super) fn drop_oldest_pending(
        &mut self,
        count: usize,
        live: impl Fn(Ino) -> Option<Arc<Content>>,
    ) {
        for (_, edit) in self.pending.drain(..count.min(self.pending.len())).collect::<Vec<_>>() {
            self.cost = self.cost.saturating_sub(cost_of(&edit));
            let Some(content) = &edit.content else { continue };
            self.dropped_layers.extend(content.extents.iter().filter_map(
                |(_, source)| match source {
                    Source::Pool { layer, .. } => Some(*layer),
                    Source::Base { .. } => None,
                },
            ));
            let unused = unshared_bytes(content, live(content.ino).as_ref());
            self.garbage = self.garbage.saturating_add(unused);
        }
    }

    /// How many of the oldest are expired or too many.
    fn expired_pending(&self) -> usize {
        let now = self.now();
        let is_over = |(_, edit): &&(TreePath, Arc<LoggedEdit>)| {
            since(now, edit.time).is_none_or(|waited| waited >= EXPIRY)
        };
        self.pending
            .iter()
            .take_while(is_over)
            .count()
            .max(self.pending.len().saturating_sub(MAX_PENDING))
    }

    /// How many of the oldest must be dropped to get within the budget.
    fn beyond_budget(&self) -> usize {
        let Some(mut excess) = self.excess() else { return 0 };
        let mut count = 0;
        for (_, edit) in &self.pending {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(cost_of(edit));
            count += 1;
        }
        count
    }
}

impl Core {
    /// Drops what is expired or too many.
    pub(super) fn drop_expired_pending(&mut self) {
        let count = self.edits.as_ref().map_or(0, EditHistory::expired_pending);
        self.drop_pending(count);
    }

    /// Also drops what is beyond the budget. Not called for each edit: comparing contents may show
    /// that they share their bytes.
    pub(super) fn drop_unneeded_pending(&mut self) {
        self.drop_expired_pending();
        let count = self.edits.as_ref().map_or(0, EditHistory::beyond_budget);
        self.drop_pending(count);
    }

    /// Drops all. Returns whether there was any.
    pub(super) fn drop_all_pending(&mut self) -> bool {
        let count = self.edits.as_ref().map_or(0, |history| history.pending.len());
        self.drop_pending(count);
        count > 0
    }

    fn drop_pending(&mut self, count: usize) {
        let (state, Some(history)) = (&self.state, &mut self.edits) else { return };
        let live = |ino: Ino| {
            let node = state.tree.node(ino)?;
            let extents =
                state.tree.extents(ino).map(|(start, e)| (ByteRange::at(start, e.len), e.source));
            let extents: Vec<_> = extents.take(MAX_EXTENTS).collect();
            Some(Arc::new(Content {
                ino,
                node: node.as_ref().clone(),
                epoch: state.lower.epoch(),
                extents,
            }))
        };
        history.drop_oldest_pending(count, live);
    }
}
