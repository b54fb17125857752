//! The state that a replay of the log of edit histories gives.
//!
//! * [`Histories::replay`] applies one record, at runtime and when the log is read.
//! * [`Histories::release`] only notes which bytes are not needed. A later reclaim frees them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::content::{cost_of, pool_bytes, same_bytes};
use crate::store::edits_log::{Bounds, Content, EditsLogRecord, How, LoggedEdit, Recorded};
use crate::tree::Source;
use crate::types::{ByteRange, LayerId, TreePath};

/// An edit in the history of its path.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) number: u32,
    /// Identifies the edit while the head is open. Numbers start again when a path has no history
    /// left; serials are never reused.
    pub(super) serial: u64,
    /// The file before the edit.
    pub(super) edit: Arc<LoggedEdit>,
    /// How much of the budget it takes, in bytes.
    pub(super) cost: u64,
    /// Whether its content was compared with that of the next edit.
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
}

/// The edit histories of all paths.
#[derive(Default)]
pub struct Histories {
    pub(super) bounds: Bounds,
    pub(super) by_path: BTreeMap<TreePath, PathHistory>,
    /// The number of log records whose content is synced.
    pub(super) synced: u64,
    /// How much of the budget all edits and pending backups take, in bytes.
    pub(super) cost: u64,
    /// Paths with an edit that was not compared with the next one.
    pub(super) uncompared: BTreeSet<TreePath>,
    /// Layers with content that was released since the last trim.
    pub(super) dropped_layers: BTreeSet<LayerId>,
    /// Bytes that were released since the last reclaim.
    pub(super) garbage: u64,
    /// The serial of the next edit.
    pub(super) next_serial: u64,
}

impl Histories {
    /// Replays a log, as far as its content is known to be synced.
    pub fn of(recorded: &Recorded) -> Histories {
        let mut histories = Histories::default();
        for (number, record) in recorded.records().enumerate() {
            histories.replay(&record, number as u64);
        }
        // The first record says who wrote the log. It stands for the content that was synced before
        // a rewrite.
        let believed = recorded.valid.max(1);
        histories.retain_entries(|entry| entry.record < believed);
        histories
    }

    /// All edits: path, number, the number of the log record with the extents, and the file before.
    pub fn all(&self) -> impl Iterator<Item = (&TreePath, u32, u64, &LoggedEdit)> {
        self.by_path.iter().flat_map(|(path, list)| {
            list.entries
                .iter()
                .map(move |entry| (path, entry.number, entry.log_record, &*entry.edit))
        })
    }

    /// Whether edits are recorded.
    pub(in crate::fs) fn is_on(&self) -> bool {
        self.bounds.edits > 0
    }

    pub(super) fn contents(&self) -> impl Iterator<Item = Arc<Content>> {
        self.by_path
            .values()
            .flat_map(|list| &list.entries)
            .filter_map(|entry| entry.edit.content.clone())
    }

    /// Applies a log record with this number.
    pub(super) fn replay(&mut self, record: &EditsLogRecord, number: u64) {
        match record {
            EditsLogRecord::Opened { .. } | EditsLogRecord::SyncFailed => {}
            EditsLogRecord::Bounds(bounds) => self.set_bounds(*bounds),
            EditsLogRecord::Kept(saved) => {
                for (path, edit) in saved {
                    self.push(path, Arc::new(edit.clone()), number);
                }
            }
            EditsLogRecord::Copied { from, to } => self.copy(from, to),
            EditsLogRecord::Moved { from, to } => self.move_below(from, to),
            EditsLogRecord::Exchanged { a, b } => self.exchange(a, b),
            EditsLogRecord::At { path, number } => self.set_undone_to(path, *number),
            EditsLogRecord::Remapped { path, number: edit, extents } => {
                self.remap(path, *edit, extents, number);
            }
            EditsLogRecord::Dropped { path, upto } => self.drop_upto(path, *upto),
            EditsLogRecord::SyncedTo(count) => self.synced = self.synced.max(*count),
            EditsLogRecord::List { path, next, at, edits } => {
                let first = self.next_serial;
                self.next_serial += edits.len() as u64;
                let entries =
                    edits.iter().zip(first..).map(|((edit_number, edit, synced), serial)| Entry {
                        number: *edit_number,
                        serial,
                        cost: cost_of(edit),
                        edit: Arc::new(edit.clone()),
                        compared: false,
                        record: if *synced { 0 } else { number },
                        log_record: number,
                    });
                let list = PathHistory { next: *next, entries: entries.collect(), undone_to: *at };
                self.cost += list.cost();
                self.uncompared.insert(path.clone());
                self.by_path.insert(path.clone(), list);
            }
        }
    }

    /// Adds an edit to a path. Drops the oldest ones beyond the bound.
    fn push(&mut self, path: &TreePath, edit: Arc<LoggedEdit>, record: u64) {
        // The file before the first undo comes on top of the edits that the undo may go back to.
        let limit = self.bounds.edits as usize + usize::from(edit.how == How::Undone);
        let list = self.by_path.entry(path.clone()).or_default();
        let back_from_nothing = list.undone_to.is_some()
            && edit.how != How::Undone
            && list.entries.back().is_some_and(|last| last.edit.content.is_none());
        let mut gone = Vec::new();
        if edit.how != How::Undone {
            list.undone_to = None;
            if back_from_nothing {
                gone.extend(list.entries.pop_back());
            }
        }
        let same = list
            .entries
            .back()
            .is_some_and(|last| same_bytes(last.edit.content.as_ref(), edit.content.as_ref()));
        if !same {
            list.next = list.next.max(1);
            let cost = cost_of(&edit);
            let serial = self.next_serial;
            self.next_serial += 1;
            let entry = Entry {
                number: list.next,
                serial,
                edit,
                cost,
                compared: false,
                record,
                log_record: record,
            };
            list.next += 1;
            self.cost += entry.cost;
            list.entries.push_back(entry);
            while list.entries.len() > limit.max(1) {
                gone.extend(list.entries.pop_front());
            }
            self.uncompared.insert(path.clone());
        }
        self.release(gone);
    }

    /// Notes that the bytes of these edits are not needed any more.
    pub(super) fn release(&mut self, gone: Vec<Entry>) {
        for entry in gone {
            self.cost = self.cost.saturating_sub(entry.cost);
            let extents = entry.edit.content.iter().flat_map(|content| &content.extents);
            self.dropped_layers.extend(extents.filter_map(|(_, source)| match source {
                Source::Pool { layer, .. } => Some(*layer),
                Source::Base { .. } => None,
            }));
            if entry.edit.content.as_ref().is_some_and(|content| pool_bytes(content) > 0) {
                self.garbage = self.garbage.saturating_add(entry.cost);
            }
        }
    }

    fn copy(&mut self, from: &TreePath, to: &TreePath) {
        if self.by_path.contains_key(to) {
            return;
        }
        let Some(mut list) = self.by_path.get(from).cloned() else { return };
        // The file before the first undo is no edit of the file at its new path.
        if list.undone_to.take().is_some() {
            list.entries.pop_back();
        }
        self.cost += list.cost();
        self.by_path.insert(to.clone(), list);
    }

    /// The paths at and below `dir` that have a history.
    pub(super) fn below(&self, dir: &TreePath) -> Vec<TreePath> {
        let from = self.by_path.range(dir.clone()..);
        // In byte order, "a-b" is between "a" and "a/b", and "0" follows "/".
        let end = [dir.as_bytes(), b"0"].concat();
        let near = from.take_while(|(path, _)| dir.is_root() || path.as_bytes() < &end[..]);
        near.filter(|(path, _)| path.starts_with(dir)).map(|(path, _)| path.clone()).collect()
    }

    fn move_below(&mut self, from: &TreePath, to: &TreePath) {
        for path in self.below(from) {
            let (Some(list), Some(moved)) = (self.by_path.remove(&path), path.moved(from, to))
            else {
                continue;
            };
            self.uncompared.remove(&path);
            if self.by_path.contains_key(&moved) {
                self.release(list.entries.into());
                continue;
            }
            self.uncompared.insert(moved.clone());
            self.by_path.insert(moved, list);
        }
    }

    fn exchange(&mut self, a: &TreePath, b: &TreePath) {
        let mut take = |from: &TreePath, to: &TreePath| -> Vec<(TreePath, PathHistory)> {
            let paths = self.below(from);
            paths
                .into_iter()
                .filter_map(|p| Some((p.moved(from, to)?, self.by_path.remove(&p)?)))
                .collect()
        };
        let moved = [take(a, b), take(b, a)].concat();
        for (path, list) in moved {
            self.uncompared.insert(path.clone());
            self.by_path.insert(path, list);
        }
    }

    fn set_undone_to(&mut self, path: &TreePath, number: Option<u32>) {
        let Some(list) = self.by_path.get_mut(path) else { return };
        let was = std::mem::replace(&mut list.undone_to, number);
        // All is redone: the file before the first undo is current again, and no edit any more.
        if was.is_some() && number.is_none() {
            let top = list.entries.pop_back();
            self.release(top.into_iter().collect());
        }
    }

    fn remap(
        &mut self,
        path: &TreePath,
        number: u32,
        extents: &[(ByteRange, Source)],
        record: u64,
    ) {
        let Some(list) = self.by_path.get_mut(path) else { return };
        let Some(entry) = list.entries.iter_mut().find(|entry| entry.number == number) else {
            return;
        };
        let Some(content) = &entry.edit.content else { return };
        let content = Content { extents: extents.to_vec(), ..Content::clone(content) };
        entry.edit = Arc::new(LoggedEdit {
            content: Some(Arc::new(content)),
            ..LoggedEdit::clone(&entry.edit)
        });
        (entry.record, entry.log_record) = (record, record);
    }

    fn drop_upto(&mut self, path: &TreePath, upto: u32) {
        let Some(list) = self.by_path.get_mut(path) else { return };
        let mut gone = Vec::new();
        while list.entries.front().is_some_and(|first| first.number <= upto) {
            gone.extend(list.entries.pop_front());
        }
        let exists = |number: &u32| list.entries.iter().any(|entry| entry.number == *number);
        list.undone_to = list.undone_to.filter(exists);
        if list.entries.is_empty() {
            self.by_path.remove(path);
            self.uncompared.remove(path);
        }
        self.release(gone);
    }

    fn set_bounds(&mut self, bounds: Bounds) {
        self.bounds = bounds;
        if bounds.edits == 0 {
            let by_path = std::mem::take(&mut self.by_path);
            self.uncompared.clear();
            self.release(by_path.into_values().flat_map(|list| list.entries).collect());
        }
    }

    /// Drops the entries for which `keep` is false, without a log record: the next replay does the
    /// same. Returns whether there were any.
    pub(super) fn retain_entries(&mut self, keep: impl Fn(&Entry) -> bool) -> bool {
        let mut gone = Vec::new();
        for list in self.by_path.values_mut() {
            let (kept, lost): (Vec<Entry>, Vec<Entry>) =
                std::mem::take(&mut list.entries).into_iter().partition(|entry| keep(entry));
            if !lost.is_empty() {
                // Whether the last entry is the file before an undo is not known any more.
                list.undone_to = None;
            }
            list.entries = kept.into();
            gone.extend(lost);
        }
        self.by_path.retain(|_, list| !list.entries.is_empty());
        let found = !gone.is_empty();
        self.release(gone);
        found
    }
}

impl PathHistory {
    /// The cost of all edits of the path.
    pub(super) fn cost(&self) -> u64 {
        self.entries.iter().map(|entry| entry.cost).sum()
    }
}

/// The histories as the records of a new log.
pub(super) fn all_records(
    by_path: &BTreeMap<TreePath, PathHistory>,
    bounds: Bounds,
    synced: u64,
) -> Vec<EditsLogRecord> {
    let list = |(path, list): (&TreePath, &PathHistory)| EditsLogRecord::List {
        path: path.clone(),
        next: list.next,
        at: list.undone_to,
        edits: list
            .entries
            .iter()
            .map(|entry| (entry.number, LoggedEdit::clone(&entry.edit), entry.record < synced))
            .collect(),
    };
    std::iter::once(EditsLogRecord::Bounds(bounds)).chain(by_path.iter().map(list)).collect()
}
