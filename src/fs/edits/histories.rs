//! The state that a replay of the log of edit histories gives.
//!
//! * [`Histories::apply`] applies one record, at runtime and when the log is read.
//! * [`Histories::release`] only notes which bytes are not needed. A later reclaim frees them.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::by_path::ByPath;
use super::content::{cost_of, pool_bytes, same_bytes};
use super::path_history::{Entry, PathHistory};
use crate::store::edits_log::{Bounds, Content, EditsLogRecord, How, LoggedEdit, Recorded, Replay};
use crate::tree::Source;
use crate::types::{ByteRange, LayerId, TreePath};

/// The edit histories of all paths.
#[derive(Default)]
pub struct Histories {
    pub(super) bounds: Bounds,
    pub(super) by_path: ByPath,
    /// The number of log records whose content is synced.
    pub(super) synced: u64,
    /// How much of the budget all edits and pending backups take, in bytes.
    pub(super) cost: u64,
    /// All paths whose edits are to be compared, and some others.
    pub(super) queue: Vec<TreePath>,
    /// Whether edits were compared since the last `Compared` record.
    pub(super) has_compared: bool,
    /// Whether costs take into account what edits share. After a replay they do not.
    pub(super) is_counted: bool,
    /// Layers with content that was released since the last trim.
    pub(super) dropped_layers: BTreeSet<LayerId>,
    /// Bytes that were released since the last reclaim.
    pub(super) garbage: u64,
    /// The serial of the next edit.
    pub(super) next_serial: u64,
}

impl Replay for Histories {
    fn replay(&mut self, record: EditsLogRecord, number: u64) {
        // An earlier process has freed the bytes of a dropped edit, or gc will.
        self.apply(record, number, &mut |_| ());
    }
}

impl Histories {
    /// The histories of a log that was replayed, as far as their content is known to be synced.
    pub fn of(recorded: &mut Recorded<Histories>) -> Histories {
        let mut histories = std::mem::take(&mut recorded.replayed);
        // The first record says who wrote the log. It stands for the content that was synced before
        // a rewrite.
        let believed = recorded.valid.max(1);
        histories.retain_entries(|entry| entry.record < believed);
        histories.cost = histories.by_path.iter().map(|(_, list)| list.cost()).sum();
        histories
    }

    /// All edits: path, number, the number of the log record with the extents, and the file before.
    pub fn all(&self) -> impl Iterator<Item = (&TreePath, u32, u64, &LoggedEdit)> {
        self.by_path.iter().flat_map(|(path, list)| {
            list.entries
                .iter()
                .map(move |entry| (path, entry.number, entry.log_record, &entry.edit))
        })
    }

    /// Whether edits are recorded.
    pub(in crate::fs) fn is_on(&self) -> bool {
        self.bounds.edits > 0
    }

    pub(super) fn contents(&self) -> impl Iterator<Item = Arc<Content>> {
        self.by_path
            .iter()
            .flat_map(|(_, list)| &list.entries)
            .filter_map(|entry| entry.edit.content.clone())
    }

    /// The histories as they are now, to look at them without the lock of the head.
    pub(super) fn snapshot(&self) -> Histories {
        let (bounds, by_path, synced) = (self.bounds, self.by_path.clone(), self.synced);
        Histories { bounds, by_path, synced, ..Histories::default() }
    }

    /// Applies a log record with this number. Calls `gone` with each edit that it drops, whose cost
    /// the caller subtracts.
    pub(super) fn apply(
        &mut self,
        record: EditsLogRecord,
        number: u64,
        gone: &mut dyn FnMut(Entry),
    ) {
        match record {
            EditsLogRecord::Opened { .. } | EditsLogRecord::SyncFailed => {}
            EditsLogRecord::Bounds(bounds) => self.set_bounds(bounds, gone),
            EditsLogRecord::Kept(saved) => {
                saved.into_iter().for_each(|(path, edit)| self.push(path, edit, number, gone));
            }
            EditsLogRecord::Copied { from, to } => self.copy(&from, to),
            EditsLogRecord::Moved { from, to } => self.move_below(&from, &to, gone),
            EditsLogRecord::Exchanged { a, b } => self.exchange(&a, &b),
            EditsLogRecord::At { path, number } => self.set_undone_to(path, number, gone),
            EditsLogRecord::Remapped { path, number: edit, extents } => {
                self.remap(&path, edit, extents, number);
            }
            EditsLogRecord::Dropped { path, upto } => self.drop_upto(&path, upto, gone),
            EditsLogRecord::SyncedTo(count) => self.synced = self.synced.max(count),
            EditsLogRecord::Compared { except } => self.mark_compared(&except),
            EditsLogRecord::List { path, next, at, edits } => {
                let first = self.next_serial;
                self.next_serial += edits.len() as u64;
                let entries =
                    edits.into_iter().zip(first..).map(|((edit_number, edit, synced), serial)| {
                        Entry {
                            number: edit_number,
                            serial,
                            cost: cost_of(&edit),
                            edit,
                            compared: false,
                            record: if synced { 0 } else { number },
                            log_record: number,
                        }
                    });
                let entries = entries.collect();
                let list = PathHistory { next, entries, undone_to: at, is_queued: true };
                self.cost += list.cost();
                self.put(path, list);
            }
        }
    }

    /// Notes that the edits of a path are to be compared.
    fn enqueue(&mut self, path: TreePath) {
        if let Some(list) = self.by_path.get_mut(&path)
            && !std::mem::replace(&mut list.is_queued, true)
        {
            self.queue.push(path);
        }
    }

    /// Takes a path whose edits are to be compared.
    pub(super) fn dequeue(&mut self) -> Option<TreePath> {
        while let Some(path) = self.queue.pop() {
            let list = self.by_path.get_mut(&path);
            if list.is_some_and(|list| std::mem::take(&mut list.is_queued)) {
                return Some(path);
            }
        }
        None
    }

    /// Adds an edit to a path. Drops the oldest ones beyond the bound.
    fn push(&mut self, path: TreePath, edit: LoggedEdit, record: u64, gone: &mut dyn FnMut(Entry)) {
        // The file before the first undo comes on top of the edits that the undo may go back to.
        let limit = self.bounds.edits as usize + usize::from(edit.how == How::Undone);
        let Some(list) = self.by_path.get_or_default(&path) else { return };
        let back_from_nothing = list.undone_to.is_some()
            && edit.how != How::Undone
            && list.entries.back().is_some_and(|last| last.edit.content.is_none());
        let mut is_reset = false;
        if edit.how != How::Undone {
            is_reset = list.undo_to(None).is_some();
            if back_from_nothing {
                list.entries.pop_back().into_iter().for_each(&mut *gone);
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
                list.entries.pop_front().into_iter().for_each(&mut *gone);
            }
        }
        if (!same || is_reset) && !std::mem::replace(&mut list.is_queued, true) {
            self.queue.push(path);
        }
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

    fn copy(&mut self, from: &TreePath, to: TreePath) {
        if self.by_path.contains(&to) {
            return;
        }
        let Some(mut list) = self.by_path.get(from).cloned() else { return };
        // The file before the first undo is no edit of the file at its new path.
        if list.undo_to(None).is_some() {
            list.entries.pop_back();
        }
        self.cost += list.cost();
        list.is_queued |= !list.is_compared();
        self.put(to, list);
    }

    fn put(&mut self, path: TreePath, list: PathHistory) {
        if list.is_queued {
            self.queue.push(path.clone());
        }
        self.by_path.insert(path, list);
    }

    /// The paths at and below `dir` that have a history.
    pub(super) fn below(&self, dir: &TreePath) -> Vec<TreePath> {
        let from = self.by_path.from(dir);
        // In byte order, "a-b" is between "a" and "a/b", and "0" follows "/".
        let end = [dir.as_bytes(), b"0"].concat();
        let near = from.take_while(|(path, _)| dir.is_root() || path.as_bytes() < &end[..]);
        near.filter(|(path, _)| path.starts_with(dir)).map(|(path, _)| path.clone()).collect()
    }

    fn move_below(&mut self, from: &TreePath, to: &TreePath, gone: &mut dyn FnMut(Entry)) {
        for path in self.below(from) {
            let (Some(list), Some(moved)) = (self.by_path.remove(&path), path.moved(from, to))
            else {
                continue;
            };
            if self.by_path.contains(&moved) {
                list.entries.into_iter().for_each(&mut *gone);
            } else {
                self.put(moved, list);
            }
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
        moved.into_iter().for_each(|(path, list)| self.put(path, list));
    }

    /// Notes that all edits were compared, except those of some paths.
    fn mark_compared(&mut self, except: &[TreePath]) {
        let except: BTreeSet<&TreePath> = except.iter().collect();
        let by_path = &mut self.by_path;
        self.queue.retain(|path| {
            let Some(list) = by_path.get_mut(path).filter(|list| list.is_queued) else {
                return false;
            };
            if except.contains(path) {
                return true;
            }
            list.is_queued = false;
            list.entries.iter_mut().for_each(|entry| entry.compared = true);
            false
        });
        self.has_compared = false;
    }

    fn set_undone_to(&mut self, path: TreePath, number: Option<u32>, gone: &mut dyn FnMut(Entry)) {
        let Some(list) = self.by_path.get_mut(&path) else { return };
        let was = list.undo_to(number);
        // All is redone: the file before the first undo is current again, and no edit any more.
        if was.is_some() && number.is_none() {
            list.entries.pop_back().into_iter().for_each(gone);
        }
        if was.is_some() && was != number {
            self.enqueue(path);
        }
    }

    fn remap(
        &mut self,
        path: &TreePath,
        number: u32,
        extents: Vec<(ByteRange, Source)>,
        record: u64,
    ) {
        let Some(list) = self.by_path.get_mut(path) else { return };
        let Some(entry) = list.entries.iter_mut().find(|entry| entry.number == number) else {
            return;
        };
        let Some(content) = &mut entry.edit.content else { return };
        Arc::make_mut(content).extents = extents;
        (entry.record, entry.log_record) = (record, record);
    }

    fn drop_upto(&mut self, path: &TreePath, upto: u32, gone: &mut dyn FnMut(Entry)) {
        let Some(list) = self.by_path.get_mut(path) else { return };
        while list.entries.front().is_some_and(|first| first.number <= upto) {
            list.entries.pop_front().into_iter().for_each(&mut *gone);
        }
        let exists = |number: &u32| list.entries.iter().any(|entry| entry.number == *number);
        list.undone_to = list.undone_to.filter(exists);
        if list.entries.is_empty() {
            self.by_path.remove(path);
        }
    }

    fn set_bounds(&mut self, bounds: Bounds, gone: &mut dyn FnMut(Entry)) {
        self.bounds = bounds;
        if bounds.edits == 0 {
            let by_path = std::mem::take(&mut self.by_path);
            self.queue.clear();
            by_path.iter().flat_map(|(_, list)| &list.entries).cloned().for_each(gone);
        }
    }

    /// The record of which edits were compared.
    pub(super) fn compared_record(&self) -> EditsLogRecord {
        let is_left = |(_, list): &(&TreePath, &PathHistory)| list.is_queued || !list.is_compared();
        let left = self.by_path.iter().filter(is_left).map(|(path, _)| path.clone());
        EditsLogRecord::Compared { except: left.collect() }
    }

    /// The histories as the records of a new log.
    pub(super) fn records(&self) -> Vec<EditsLogRecord> {
        let logged = |entry: &Entry| (entry.number, entry.edit.clone(), entry.record < self.synced);
        let list = |(path, list): (&TreePath, &PathHistory)| EditsLogRecord::List {
            path: path.clone(),
            next: list.next,
            at: list.undone_to,
            edits: list.entries.iter().map(logged).collect(),
        };
        let bounds = std::iter::once(EditsLogRecord::Bounds(self.bounds));
        bounds.chain(self.by_path.iter().map(list)).chain([self.compared_record()]).collect()
    }

    /// Drops the entries for which `keep` is false, without a log record: the next replay does the
    /// same. Returns whether there were any.
    pub(super) fn retain_entries(&mut self, keep: impl Fn(&Entry) -> bool) -> bool {
        let (mut gone, mut changed) = (Vec::new(), Vec::new());
        let keeps_all = |list: &PathHistory| list.entries.iter().all(&keep);
        let lists = self.by_path.iter().filter(|(_, list)| !keeps_all(list));
        let paths: Vec<TreePath> = lists.map(|(path, _)| path.clone()).collect();
        for path in paths {
            let Some(list) = self.by_path.get_mut(&path) else { continue };
            let (kept, lost): (Vec<Entry>, Vec<Entry>) =
                std::mem::take(&mut list.entries).into_iter().partition(|entry| keep(entry));
            list.entries = kept.into();
            // Whether the last entry is the file before an undo is not known any more.
            list.undone_to = None;
            // The next one of an edit may be another now.
            list.entries.iter_mut().for_each(|entry| entry.compared = false);
            changed.push(path);
            gone.extend(lost);
        }
        changed.into_iter().for_each(|path| self.enqueue(path));
        self.by_path.remove_empty();
        let found = !gone.is_empty();
        self.release(gone);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Body, Meta, Node};
    use crate::types::{Epoch, Ino, Timestamp};

    fn path(text: &str) -> TreePath {
        TreePath::parse(text.as_bytes()).unwrap()
    }

    /// An edit whose content is at this offset of a pool.
    fn kept(of: &str, offset: u64) -> EditsLogRecord {
        let time = Timestamp::default();
        let (atime, mtime, ctime) = (time, time, time);
        let mode = 0o100_644;
        let meta = Meta { mode, uid: 0, gid: 0, nlink: 1, rdev: 0, atime, mtime, ctime };
        let body = Body::File { size: 10, origin: None };
        let source = Source::Pool { layer: LayerId(1), offset };
        let content = Content {
            ino: Ino(7),
            node: Node { meta, xattrs: None, body },
            epoch: Epoch(0),
            extents: vec![(ByteRange::at(0, 10), source)],
        };
        let edit = LoggedEdit { time, how: How::Written, content: Some(Arc::new(content)) };
        EditsLogRecord::Kept(vec![(path(of), edit)])
    }

    fn compared(except: &[&str]) -> EditsLogRecord {
        EditsLogRecord::Compared { except: except.iter().map(|text| path(text)).collect() }
    }

    fn replayed(records: &[EditsLogRecord]) -> Histories {
        let mut histories = Histories::default();
        records.iter().zip(0..).for_each(|(record, at)| histories.replay(record.clone(), at));
        histories
    }

    /// The paths that are compared after a replay, and of each path which edits were compared.
    fn claims(histories: &Histories) -> (Vec<String>, Vec<String>) {
        let of = |(path, list): (&TreePath, &PathHistory)| {
            let marks = list.entries.iter().map(|entry| if entry.compared { '+' } else { '-' });
            format!("{path}{}", marks.collect::<String>())
        };
        let queued = histories.by_path.iter().filter(|(_, list)| list.is_queued);
        let paths: Vec<String> = queued.map(|(path, _)| path.to_string()).collect();
        let mut queue: Vec<String> = histories.queue.iter().map(TreePath::to_string).collect();
        queue.sort_unstable();
        assert!(paths.iter().all(|path| queue.binary_search(path).is_ok()), "{queue:?}");
        (paths, histories.by_path.iter().map(of).collect())
    }

    #[test]
    fn a_record_says_of_the_edits_before_it_that_they_were_compared() {
        let log = [
            kept("a", 0),
            kept("b", 10),
            compared(&[]),
            kept("a", 20),
            compared(&["a"]),
            kept("b", 30),
            compared(&["a"]),
            compared(&[]),
        ];
        let expected: [(&[&str], &[&str]); 9] = [
            (&[], &[]),
            (&["a"], &["a-"]),
            (&["a", "b"], &["a-", "b-"]),
            (&[], &["a+", "b+"]),
            (&["a"], &["a+-", "b+"]),
            (&["a"], &["a+-", "b+"]),
            (&["a", "b"], &["a+-", "b+-"]),
            (&["a"], &["a+-", "b++"]),
            (&[], &["a++", "b++"]),
        ];
        for (count, (paths, marks)) in expected.iter().enumerate() {
            let histories = replayed(&log[..count]);
            let owned = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(claims(&histories), (owned(paths), owned(marks)), "{count} records");
            // A rewritten log gives the same paths.
            let again = replayed(&histories.records());
            assert_eq!(claims(&again).0, claims(&histories).0, "{count} records");
        }
    }

    #[test]
    fn an_edit_whose_next_one_a_power_cut_took_is_compared_again() {
        let mut histories = replayed(&[kept("a", 0), kept("b", 10), kept("a", 20), compared(&[])]);
        assert_eq!(claims(&histories).0.len(), 0);
        assert!(histories.retain_entries(|entry| entry.record < 2));
        assert_eq!(claims(&histories), (vec!["a".into()], vec!["a-".into(), "b+".into()]));
    }

    #[test]
    fn a_rename_keeps_which_edits_were_compared() {
        let of = |from: &str, to: &str| (path(from), path(to));
        let ((from, to), (a, b)) = (of("d", "e"), of("d", "f"));
        let log = [kept("d/old", 0), kept("f", 5), compared(&[]), kept("d/new", 10)];
        let moved = [&log[..], &[EditsLogRecord::Moved { from, to }]].concat();
        let moved = claims(&replayed(&moved));
        assert_eq!(
            moved,
            (vec!["e/new".into()], ["e/new-", "e/old+", "f+"].map(Into::into).into())
        );
        let exchanged = [&log[..], &[EditsLogRecord::Exchanged { a, b }]].concat();
        let exchanged = claims(&replayed(&exchanged));
        let marks = ["d+", "f/new-", "f/old+"].map(Into::into).into();
        assert_eq!(exchanged, (vec!["f/new".into()], marks));
        let (from, to) = of("d/new", "x");
        let copied = [&log[..], &[EditsLogRecord::Copied { from, to }]].concat();
        assert_eq!(claims(&replayed(&copied)).0, ["d/new", "x"]);
    }

    #[test]
    fn a_snapshot_keeps_the_edits_of_its_moment() {
        let mut histories = replayed(&[kept("a", 0), kept("b", 10)]);
        let snapshot = histories.snapshot();
        let contents: Vec<_> = histories.contents().collect();
        let changes = [kept("c", 20), EditsLogRecord::Dropped { path: path("a"), upto: 1 }];
        changes.into_iter().zip(2..).for_each(|(record, at)| histories.replay(record, at));
        let extents = vec![(ByteRange::at(0, 10), Source::Pool { layer: LayerId(1), offset: 50 })];
        let remapped = EditsLogRecord::Remapped { path: path("b"), number: 1, extents };
        histories.replay(remapped, 4);
        assert_eq!(snapshot.contents().collect::<Vec<_>>(), contents);
        assert_eq!(claims(&histories).1, ["b-", "c-"]);
        assert_ne!(histories.contents().next(), contents.get(1).cloned());
    }

    #[test]
    fn an_edit_is_compared_again_when_an_undo_has_left_it() {
        let at = |number| EditsLogRecord::At { path: path("a"), number };
        let log = [kept("a", 0), kept("a", 10), kept("a", 20), at(Some(1)), compared(&[])];
        assert_eq!(claims(&replayed(&log)).1, ["a+++"]);
        for (next, marks) in [(at(Some(2)), "a-++"), (at(None), "a-+"), (kept("a", 30), "a-++-")] {
            let (paths, found) = claims(&replayed(&[&log[..], &[next]].concat()));
            assert_eq!((paths, found), (vec!["a".into()], vec![marks.into()]));
        }
    }
}
