//! What new files left behind when they were renamed: no version yet, but one as soon as something comes to the name again, for
//! then it was a backup of what is written there.
//!
//! It counts as the versions do, and goes before all of them: when there are too many, when they are too many bytes, when the disk
//! is full, and after a few seconds, because whoever saves a file comes back at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::{EditHistory, MOST_PIECES, cost_of, since};
use crate::fs::Core;
use crate::fs::edits::sharing::unshared_bytes;
use crate::store::edits_log::{Content, EditsLogRecord, Version};
use crate::tree::Source;
use crate::types::{ByteRange, Ino, TreePath};

/// Names are remembered that new files lost by being renamed, so many.
const MOST: usize = 256;
/// So long it is waited for who comes to such a name.
const WAIT: Duration = Duration::from_secs(10);

/// The names, and what they had, oldest first.
pub(super) type PendingBackups = VecDeque<(TreePath, Arc<Version>)>;

impl EditHistory {
    /// Notes what a name had.
    pub(super) fn leave(&mut self, path: TreePath, version: Version) {
        self.cost += cost_of(&version);
        self.away.push_back((path, Arc::new(version)));
        // So that somebody looks after it.
        if let Some(notice) = &self.notice {
            notice();
        }
    }

    /// Something comes to a path: what a new file left there when it was renamed is a version after all.
    pub(super) fn claim(&mut self, path: &TreePath) {
        if let Some(at) = self.away.iter().position(|(away, _)| away == path)
            && let Some((path, version)) = self.away.remove(at)
        {
            self.cost = self.cost.saturating_sub(cost_of(&version));
            self.note(&EditsLogRecord::Kept(vec![(path, Version::clone(&version))]));
        }
    }

    /// Lets the oldest go. `live` is what a file has now: bytes that it still has are no garbage.
    pub(super) fn let_go(&mut self, count: usize, live: impl Fn(Ino) -> Option<Arc<Content>>) {
        for (_, version) in self.away.drain(..count.min(self.away.len())).collect::<Vec<_>>() {
            self.cost = self.cost.saturating_sub(cost_of(&version));
            let Some(content) = &version.content else { continue };
            self.given_up.extend(content.extents.iter().filter_map(|(_, source)| match source {
                Source::Pool { layer, .. } => Some(*layer),
                Source::Base { .. } => None,
            }));
            let unused = unshared_bytes(content, live(content.ino).as_ref());
            self.garbage = self.garbage.saturating_add(unused);
        }
    }

    /// How many of the oldest have waited long enough, or are too many.
    fn pending(&self) -> usize {
        let now = self.now();
        let is_over = |(_, version): &&(TreePath, Arc<Version>)| {
            since(now, version.time).is_none_or(|waited| waited >= WAIT)
        };
        self.away.iter().take_while(is_over).count().max(self.away.len().saturating_sub(MOST))
    }

    /// How many of the oldest must go before a version does, to come below the bound.
    fn beyond_budget(&self) -> usize {
        let Some(mut excess) = self.excess() else { return 0 };
        let mut count = 0;
        for (_, version) in &self.away {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(cost_of(version));
            count += 1;
        }
        count
    }
}

impl Core {
    /// Lets go of what waited long enough, or is too much.
    pub(super) fn let_go_of_pending(&mut self) {
        let count = self.edits.as_ref().map_or(0, EditHistory::pending);
        self.let_go_of_away(count);
    }

    /// The same, and of what must go before a version does. Not with each edit: what is beyond the budget just now may be found to
    /// be shared.
    pub(super) fn tend_away(&mut self) {
        self.let_go_of_pending();
        let count = self.edits.as_ref().map_or(0, EditHistory::beyond_budget);
        self.let_go_of_away(count);
    }

    /// Lets go of all of it. Whether there was any.
    pub(super) fn give_up_away(&mut self) -> bool {
        let count = self.edits.as_ref().map_or(0, |versions| versions.away.len());
        self.let_go_of_away(count);
        count > 0
    }

    fn let_go_of_away(&mut self, count: usize) {
        let (state, Some(versions)) = (&self.state, &mut self.edits) else { return };
        let live = |ino: Ino| {
            let node = state.tree.node(ino)?;
            let extents =
                state.tree.extents(ino).map(|(start, e)| (ByteRange::at(start, e.len), e.source));
            let extents: Vec<_> = extents.take(MOST_PIECES).collect();
            Some(Arc::new(Content {
                ino,
                node: node.as_ref().clone(),
                epoch: state.lower.epoch(),
                extents,
            }))
        };
        versions.let_go(count, live);
    }
}
