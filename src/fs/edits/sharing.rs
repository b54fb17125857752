//! Maintains the edit histories in the background: stores equal bytes once and keeps to the budget.
//!
//! A tool that rewrites a whole file leaves a whole copy behind with each edit. When no file was
//! edited for a moment, the content before an edit is compared with that before the next one, and
//! the newest with the file. Where bytes are equal, the *older* content then refers to the bytes of
//! the newer one. Only the edit log refers to the old bytes, so they are garbage afterwards.
//!
//! * Bytes are compared, never only their hashes.
//! * Bytes that an edit is changed to refer to are never overwritten: they belong to another edit,
//!   or are pinned before they are read.

use std::sync::Arc;

use super::budget;
use super::by_path::ByPath;
use super::compare::equal_runs;
use super::content::{cost_with, pool_bytes, unshared_bytes};
use super::histories::Histories;
use super::path_history::Entry;
use super::{EditHistory, LogMark, QUIET, pinned_ranges, since};
use crate::error::FsResult;
use crate::fs::merged::answers;
use crate::fs::{Core, Found, Fs};
use crate::store::edits_log::{Content, EditsLogRecord};
use crate::tree::Source;
use crate::types::TreePath;

/// The most bytes of one path that are compared.
const MAX_COMPARED: u64 = 256 << 20;
/// Garbage is reclaimed from this many bytes on while files are edited.
const MUCH_GARBAGE: u64 = 256 << 20;
/// Garbage is reclaimed from this many bytes on while no file is edited.
const SOME_GARBAGE: u64 = 1 << 20;
/// [`Fs::drop_chosen`] drops the edits of this many paths each time it takes the lock of the head.
const DROPPED_AT_ONCE: usize = 64;

/// Whether maintenance is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tended {
    /// Nothing is left until the next edit.
    Done,
    /// Something is left for later.
    Later,
}

impl Fs {
    /// Stores equal bytes once, drops edits beyond the budget, and reclaims their space. While
    /// files are edited it does only the urgent part, unless `at_once`. Stops early when
    /// `is_stopping`.
    pub fn maintain_edits(&self, at_once: bool, is_stopping: &dyn Fn() -> bool) -> Tended {
        self.count_shared_bytes();
        let (is_quiet, is_over, garbage) = {
            let mut core = self.writing();
            core.drop_unneeded_pending();
            let Some(history) = &core.edits else { return Tended::Done };
            let quiet = since(history.now(), history.last_edit).is_none_or(|quiet| quiet >= QUIET);
            (quiet || at_once, history.excess().is_some(), history.garbage)
        };
        if is_quiet {
            while let Some(path) = self.next_uncompared().filter(|_| !is_stopping()) {
                if let Err(error) = self.share_equal_bytes(&path) {
                    log::debug!("compare the contents in the history of '{path}': {error}");
                }
            }
            if let Some(history) = &mut self.writing().edits {
                history.note_compared();
            }
        }
        if is_over {
            self.enforce_budget();
        }
        let garbage = self.core().edits.as_ref().map_or(garbage, |history| history.garbage);
        let wanted = if is_quiet { SOME_GARBAGE } else { MUCH_GARBAGE };
        if garbage >= wanted {
            self.reclaim.note_garbage();
            if self.reclaim_unused().is_some() {
                self.subtract_garbage(garbage);
            }
        }
        self.compact_edits_log();
        let core = self.core();
        let Some(history) = &core.edits else { return Tended::Done };
        let is_left = !history.queue.is_empty() || !history.pending.is_empty();
        let rest = is_left || history.garbage >= SOME_GARBAGE;
        if rest || history.excess().is_some() { Tended::Later } else { Tended::Done }
    }

    /// Once after the histories were read, and only if they may exceed the budget: counts what each
    /// edit does not share with the next one.
    fn count_shared_bytes(&self) {
        let paths: Vec<TreePath> = {
            let mut core = self.writing();
            let Some(history) = &mut core.edits else { return };
            if history.excess().is_none() || std::mem::replace(&mut history.is_counted, true) {
                return;
            }
            history.by_path.iter().map(|(path, _)| path.clone()).collect()
        };
        paths.iter().for_each(|path| self.recount(path));
    }

    fn next_uncompared(&self) -> Option<TreePath> {
        self.writing().edits.as_mut()?.dequeue()
    }

    fn subtract_garbage(&self, bytes: u64) {
        if let Some(history) = &mut self.writing().edits {
            history.garbage = history.garbage.saturating_sub(bytes);
        }
    }

    /// Drops edits until the histories are within the budget.
    fn enforce_budget(&self) {
        let by_path = |core: &Core| core.edits.as_ref().map(|history| history.by_path.clone());
        let Some(all) = by_path(&self.core()) else { return };
        let is_large = |entry: &Entry| entry.cost > SOME_GARBAGE;
        let large = all.iter().filter(|(_, list)| list.entries.iter().any(is_large));
        // Large edits that are counted in full may share bytes with the present file.
        large.for_each(|(path, _)| self.recount(path));
        drop(all);
        let (all, excess) = {
            let core = self.core();
            let Some(excess) = core.edits.as_ref().and_then(|history| history.excess()) else {
                return;
            };
            (by_path(&core), excess)
        };
        self.drop_chosen(&all.unwrap_or_default(), excess);
    }

    /// Drops edits with a cost of at least `bytes`. `by_path` are the edits to choose from.
    fn drop_chosen(&self, by_path: &ByPath, bytes: u64) {
        let chosen = budget::choose(budget::costs(by_path), bytes);
        let with_serial = |(path, upto): (TreePath, u32)| {
            let entries = &by_path.get(&path)?.entries;
            let serial = entries.iter().find(|entry| entry.number == upto)?.serial;
            Some((path, upto, serial))
        };
        let chosen: Vec<_> = chosen.into_iter().filter_map(with_serial).collect();
        for some in chosen.chunks(DROPPED_AT_ONCE) {
            if let Some(history) = &mut self.writing().edits {
                history.drop_edits(some);
            }
        }
    }

    /// Makes room on a full disk: drops all pending backups; if there are none, half of the
    /// histories by cost, or all if that is little. Returns whether there was anything.
    pub(in crate::fs) fn drop_edits_for_space(&self) -> bool {
        let (by_path, all) = {
            let mut core = self.writing();
            let is_dropped = core.drop_all_pending();
            let Some(history) = &mut core.edits else { return false };
            if is_dropped {
                history.pinned.note_dropped();
                return true;
            }
            (history.by_path.clone(), history.cost)
        };
        if all == 0 {
            return false;
        }
        log::warn!("the disk is full: dropping older edits of files");
        self.drop_chosen(&by_path, if all < SOME_GARBAGE { all } else { all / 2 });
        self.writing().edits.iter_mut().for_each(|history| history.pinned.note_dropped());
        true
    }

    /// Unpins the bytes that only edits pinned which were dropped to make space. Writes to them
    /// then go in place. Returns how many bytes it unpinned.
    ///
    /// The log is synced up to the mark. If it has more records, a power cut could bring dropped
    /// edits back. Then this unpins nothing, and returns `None`. The caller holds
    /// [`Fs::exclusive`], so no reader has a dropped edit.
    pub(in crate::fs) fn unpin_dropped_edits(&self, synced: Option<LogMark>) -> Option<u64> {
        let mut core = self.writing();
        let layer = core.upper.layer();
        let Core { edits: Some(history), state, held, .. } = &mut *core else { return Some(0) };
        if !history.pinned.is_loose() {
            return Some(0);
        }
        if synced != Some(history.log_mark()) {
            return None;
        }
        let contents: Vec<Arc<Content>> = history.contents().collect();
        let edited = contents.iter().flat_map(|content| &content.extents);
        let edited = edited.map(|(range, source)| (*source, range.len()));
        // A file that was undone can share its bytes with a removed one that is still open.
        let orphans = held.orphans().tree().all_extents();
        let orphans = orphans.map(|(_, extent)| (extent.source, extent.len));
        let shared = pinned_ranges::shared(&state.tree, layer).into_iter();
        let shared = shared.map(|range| (Source::Pool { layer, offset: range.start }, range.len()));
        Some(history.pinned.keep_only(edited.chain(orphans).chain(shared)))
    }

    /// The edits of a path, and the present file, whose bytes are pinned.
    fn edits_and_file(&self, path: &TreePath) -> Option<(Vec<Entry>, Option<Arc<Content>>)> {
        let found: FsResult<_> = self.change(|core| {
            let list = core.edits.as_ref().and_then(|history| history.by_path.get(path));
            let Some(list) = list else { return Ok(None) };
            let entries: Vec<Entry> = list.entries.iter().cloned().collect();
            let live = match answers::known(core.resolve(path))? {
                Some(found @ Found::Upper(..)) => core.content_found(&found)?,
                Some(Found::Base(..) | Found::Nothing(_)) | None => None,
            };
            if let Some(live) = &live {
                core.pin(live);
            }
            Ok(Some((entries, live)))
        });
        found.ok().flatten()
    }

    /// Makes the edits of a path share equal bytes.
    fn share_equal_bytes(&self, path: &TreePath) -> FsResult<()> {
        let _guard = self.read_guard();
        let Some((entries, live)) = self.edits_and_file(path) else { return Ok(()) };
        let mut contents: Vec<Option<Arc<Content>>> =
            entries.iter().map(|entry| entry.edit.content.clone()).chain([live]).collect();
        let mut left = MAX_COMPARED;
        // The newest first: all older contents are then compared with one that already shares.
        for at in (0..entries.len()).rev() {
            let is_new =
                entries.get(at).is_some_and(|entry| !entry.compared) || at + 1 == entries.len();
            let pair =
                (contents.get(at).cloned().flatten(), contents.get(at + 1).cloned().flatten());
            let (Some(old), Some(new)) = pair else { continue };
            if !is_new {
                continue;
            }
            let runs = equal_runs(self, &old, &new, &mut left)?;
            for content in contents.iter_mut().take(at + 1).flatten() {
                if let Some(extents) = runs.applied(&content.extents) {
                    *content = Arc::new(Content { extents, ..Content::clone(content) });
                }
            }
        }
        self.publish(path, &entries, &contents);
        Ok(())
    }

    /// Publishes the new extents of edits that still exist.
    fn publish(&self, path: &TreePath, entries: &[Entry], contents: &[Option<Arc<Content>>]) {
        let mut core = self.writing();
        let Some(history) = &mut core.edits else { return };
        for (at, (entry, content)) in entries.iter().zip(contents).enumerate() {
            let next = contents.get(at + 1).and_then(Option::as_ref);
            history.publish(path, entry, content.as_ref(), next);
        }
    }

    /// Counts for each edit of a path only the bytes that the next one does not share.
    fn recount(&self, path: &TreePath) {
        let Some((entries, live)) = self.edits_and_file(path) else { return };
        let contents: Vec<Option<Arc<Content>>> =
            entries.iter().map(|entry| entry.edit.content.clone()).chain([live]).collect();
        let mut core = self.writing();
        let Some(history) = &mut core.edits else { return };
        for (at, entry) in entries.iter().enumerate() {
            let (Some(content), next) =
                (contents.get(at).and_then(Option::as_ref), contents.get(at + 1))
            else {
                continue;
            };
            history.set_cost(path, entry.number, own_cost(content, next.and_then(Option::as_ref)));
        }
    }
}

/// The cost of an edit with content `old`, if the next one has `new`.
fn own_cost(old: &Content, new: Option<&Arc<Content>>) -> u64 {
    cost_with(old, unshared_bytes(old, new))
}

impl EditHistory {
    fn publish(
        &mut self,
        path: &TreePath,
        was: &Entry,
        content: Option<&Arc<Content>>,
        next: Option<&Arc<Content>>,
    ) {
        let Some(list) = self.by_path.get(path) else { return };
        let is_it =
            |entry: &Entry| entry.number == was.number && entry.edit.content == was.edit.content;
        let Some(at) = list.entries.iter().position(is_it) else { return };
        // An undo made this the current content. A step recognizes it by its extents, so they stay
        // until the file is edited. It is compared again then.
        if list.undone_to == Some(was.number) {
            return self.set_compared(path, at);
        }
        if let (Some(content), Some(old)) = (content, &was.edit.content)
            && content.extents != old.extents
        {
            let before = pool_bytes(old);
            self.garbage =
                self.garbage.saturating_add(before.saturating_sub(unshared_bytes(content, next)));
            let (number, extents) = (was.number, content.extents.clone());
            self.append(EditsLogRecord::Remapped { path: path.clone(), number, extents });
        }
        self.set_compared(path, at);
        if let Some(content) = content {
            self.set_cost(path, was.number, own_cost(content, next));
        }
    }
}

impl Histories {
    fn set_compared(&mut self, path: &TreePath, at: usize) {
        let list = self.by_path.get_mut(path);
        if let Some(entry) = list.and_then(|list| list.entries.get_mut(at)) {
            self.has_compared |= !std::mem::replace(&mut entry.compared, true);
        }
    }

    fn set_cost(&mut self, path: &TreePath, number: u32, cost: u64) {
        let list = self.by_path.get_mut(path);
        let entry =
            list.and_then(|list| list.entries.iter_mut().find(|entry| entry.number == number));
        if let Some(entry) = entry {
            self.cost = self.cost.saturating_sub(entry.cost).saturating_add(cost);
            entry.cost = cost;
        }
    }
}
