//! What edits of single files replaced: the versions of each path, in memory. The log of the store has the same.
//!
//! A version belongs to a **path**, not to a file: what a path had before it was written, replaced, removed or moved away is found
//! by that path, whatever stands there now. Where a file is moved its versions are found by the new path, too; below a
//! directory that is moved, by the new one only.
//!
//! Always true:
//! * the numbers of the versions of a path grow with time, and none is given twice;
//! * the log says what is here: every change is one record, and a replay runs the same code (`take`);
//! * what is here never makes an operation fail, and costs no call where nothing is edited.

mod budget;
mod mark;
mod paths;
mod pending_backups;
mod pinned_ranges;
mod recording;
mod rolling_match;
mod sharing;
mod undo;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use crate::store::Store;
use crate::store::edits_log::{Bounds, Content, EditsLog, EditsLogRecord, How, Recorded, Version};
use crate::sys::clock;
use crate::tree::Source;
use crate::types::{ByteRange, Ino, LayerId, Timestamp, TreePath};

pub use mark::VersionMark;
pub(super) use paths::{Kept, Shown};
use pending_backups::PendingBackups;
use pinned_ranges::PinnedRanges;
pub(super) use recording::Touch;
pub use sharing::Tended;
use undo::same_bytes;
pub(super) use undo::state_of;
pub use undo::{NoStep, Step, Stepped, VersionInfo};

/// An edit ends when the file was not written for so long.
pub const QUIET: Duration = Duration::from_secs(1);
/// A file in more pieces is not kept: its versions would cost more than they are worth.
const MOST_PIECES: usize = 4096;
/// What a version is counted as at least, in bytes, so that their number has a bound.
pub(super) const LEAST_COST: u64 = 4096;
/// What each piece of a version is counted as, in bytes: so much it takes in the log, and more in memory.
const PIECE_COST: u64 = 32;
/// When so many files are being edited, those of which the edit has ended are forgotten.
const MANY_EDITS: usize = 4096;

/// A place in the log, until it is written anew.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    rewritten: u64,
    count: u64,
}

/// Tells when it is.
pub type Clock = Box<dyn Fn() -> Timestamp + Send + Sync>;

/// A version in its list.
#[derive(Clone)]
struct Entry {
    number: u32,
    /// By which whoever holds it knows it again: never another's while the head is open, whereas a number begins anew when a
    /// path has no versions left.
    serial: u64,
    version: Arc<Version>,
    /// Bytes that the version is counted as.
    cost: u64,
    /// Whether its bytes were held against those of the next one.
    settled: bool,
    /// The number of the record of the log that says where its bytes are; 0 if they are known to be synced.
    record: u64,
    /// The number of that record in any case.
    told: u64,
}

/// The versions of a path.
#[derive(Clone, Default)]
struct List {
    next: u32,
    entries: VecDeque<Entry>,
    /// To which version an undo went; what was before the first undo is the last entry then.
    at: Option<u32>,
}

/// A file that is being edited.
struct Going {
    /// When it was last changed.
    last: Timestamp,
    /// Whether this is the edit that made it.
    is_new: bool,
}

/// Which versions there are: what the records of a log say, and nothing else.
#[derive(Default)]
pub struct Known {
    bounds: Bounds,
    lists: BTreeMap<TreePath, List>,
    /// Records of the log of which the content is synced.
    synced: u64,
    /// Bytes that all versions are counted as, and what may become one.
    cost: u64,
    /// Paths of which a version was not held against the next one.
    unsettled: BTreeSet<TreePath>,
    /// Layers of whose content something was given up since they were last looked at.
    given_up: BTreeSet<LayerId>,
    /// Bytes that were given up since space was last given back.
    garbage: u64,
    /// The serial number of the next version.
    next_serial: u64,
}

/// The versions of a head.
pub struct EditHistory {
    known: Known,
    going: HashMap<Ino, Going>,
    /// When there are so many of them, those that have ended are forgotten.
    many_going: usize,
    /// What new files left behind when they were renamed. If something comes to the name again, it was a way to save.
    away: PendingBackups,
    frozen: PinnedRanges,
    log: EditsLog,
    /// How many times the log was written anew.
    rewritten: u64,
    clock: Clock,
    /// When the last edit began.
    last_edit: Timestamp,
    /// When it last changed which versions there are; another time after each change.
    changed: Timestamp,
    /// Called at the beginning of an edit.
    notice: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Deref for EditHistory {
    type Target = Known;
    fn deref(&self) -> &Known {
        &self.known
    }
}

impl DerefMut for EditHistory {
    fn deref_mut(&mut self) -> &mut Known {
        &mut self.known
    }
}

/// What bytes of pools a version refers to, in the order of the file.
fn pool_bytes(content: &Content) -> u64 {
    content.extents.iter().filter(|(_, s)| !s.is_base()).map(|(range, _)| range.len()).sum()
}

fn since(now: Timestamp, then: Timestamp) -> Option<Duration> {
    let nanos = |t: Timestamp| i128::from(t.secs) * 1_000_000_000 + i128::from(t.nanos);
    let between = nanos(now).checked_sub(nanos(then))?;
    u64::try_from(between).ok().map(Duration::from_nanos)
}

impl Going {
    /// Whether the edit goes on; a clock that was set back ends it.
    fn goes_on(&self, now: Timestamp) -> bool {
        since(now, self.last).is_some_and(|quiet| quiet < QUIET)
    }
}

impl EditHistory {
    /// Reads the versions of a head from the store. Nothing is written yet.
    pub(super) fn open(store: &Arc<Store>, head: &str) -> EditHistory {
        let (mut log, recorded) = EditsLog::open(store, head);
        let mut known = Known::of(&recorded);
        drop(recorded);
        let ends = pool_ends(store, known.contents());
        if known.keep_only(|entry| is_there(&ends, &entry.version)) {
            log.mark_stale();
        }
        known.garbage = 0;
        known.given_up.clear();
        EditHistory {
            known,
            going: HashMap::new(),
            many_going: MANY_EDITS,
            away: PendingBackups::new(),
            frozen: PinnedRanges::default(),
            log,
            rewritten: 0,
            clock: Box::new(clock::now),
            last_edit: Timestamp::default(),
            changed: clock::now(),
            notice: None,
        }
    }

    /// Notes a change: here, and in the log.
    fn note(&mut self, record: &EditsLogRecord) {
        let number = self.log.next_number();
        self.take(record, number);
        self.note_change(record);
        let anew = {
            let EditHistory { log, known: Known { lists, bounds, synced, .. }, .. } = self;
            log.append(record, || all_records(lists, *bounds, *synced))
        };
        if anew {
            self.numbers_anew();
        }
    }

    /// The log was written anew: its records have other numbers.
    fn numbers_anew(&mut self) {
        let synced = self.synced;
        // Behind who wrote it, and the bounds.
        for (at, list) in (2..).zip(self.lists.values_mut()) {
            for entry in &mut list.entries {
                entry.record = if entry.record < synced { 0 } else { at };
                entry.told = at;
            }
        }
        self.synced = 1;
        self.rewritten += 1;
    }

    /// Where the log ends. Everything to which its records refer was written before.
    pub(super) fn mark(&self) -> Mark {
        Mark { rewritten: self.rewritten, count: self.log.count() }
    }

    /// Says that everything was synced that was written before a mark was taken.
    pub(super) fn note_synced(&mut self, mark: Mark) {
        if mark.rewritten == self.rewritten
            && mark.count > self.synced + 1
            && !self.log.has_failed()
        {
            self.note(&EditsLogRecord::SyncedTo(mark.count));
        }
    }

    /// Says that something could not be synced.
    pub(super) fn note_sync_failed(&mut self) {
        if self.is_on() {
            self.note(&EditsLogRecord::SyncFailed);
        }
    }

    /// Writes the log anew if much of it is of no use any more, or if it could not be written.
    fn tidy_log(&mut self) {
        if !self.log.has_failed() && !self.log.is_long() {
            return;
        }
        let all = all_records(&self.lists, self.bounds, self.synced);
        if self.log.rewrite(all) {
            self.numbers_anew();
        }
    }
}

impl Known {
    /// What the records of a log say, of which the first so many are believed.
    pub fn of(recorded: &Recorded) -> Known {
        let mut known = Known::default();
        for (number, record) in recorded.records().enumerate() {
            known.take(&record, number as u64);
        }
        // The first record says who wrote; it stands for what was synced before the log was written anew.
        let believed = recorded.believed.max(1);
        known.keep_only(|entry| entry.record < believed);
        known
    }

    /// Every version: its path, its number, the number of the record that says where its bytes are, and what it is.
    pub fn all(&self) -> impl Iterator<Item = (&TreePath, u32, u64, &Version)> {
        self.lists.iter().flat_map(|(path, list)| {
            list.entries.iter().map(move |entry| (path, entry.number, entry.told, &*entry.version))
        })
    }

    /// Whether anything is kept.
    pub(super) fn is_on(&self) -> bool {
        self.bounds.versions > 0
    }

    fn contents(&self) -> impl Iterator<Item = Arc<Content>> {
        self.lists
            .values()
            .flat_map(|list| &list.entries)
            .filter_map(|entry| entry.version.content.clone())
    }

    /// Changes what is here by a record of the log, which has this number.
    fn take(&mut self, record: &EditsLogRecord, number: u64) {
        match record {
            EditsLogRecord::Opened { .. } | EditsLogRecord::SyncFailed => {}
            EditsLogRecord::Bounds(bounds) => self.bound(*bounds),
            EditsLogRecord::Kept(kept) => {
                for (path, version) in kept {
                    self.push(path, Arc::new(version.clone()), number);
                }
            }
            EditsLogRecord::Copied { from, to } => self.copy(from, to),
            EditsLogRecord::Moved { from, to } => self.move_below(from, to),
            EditsLogRecord::Exchanged { a, b } => self.exchange(a, b),
            EditsLogRecord::At { path, number } => self.set_at(path, *number),
            EditsLogRecord::Remapped { path, number: version, extents } => {
                self.remap(path, *version, extents, number);
            }
            EditsLogRecord::Dropped { path, upto } => self.drop_upto(path, *upto),
            EditsLogRecord::SyncedTo(count) => self.synced = self.synced.max(*count),
            EditsLogRecord::List { path, next, at, versions } => {
                let first = self.next_serial;
                self.next_serial += versions.len() as u64;
                let entries = versions.iter().zip(first..).map(
                    |((version_number, version, synced), serial)| Entry {
                        number: *version_number,
                        serial,
                        cost: cost_of(version),
                        version: Arc::new(version.clone()),
                        settled: false,
                        record: if *synced { 0 } else { number },
                        told: number,
                    },
                );
                let list = List { next: *next, entries: entries.collect(), at: *at };
                self.cost += list.cost();
                self.unsettled.insert(path.clone());
                self.lists.insert(path.clone(), list);
            }
        }
    }

    /// Adds a version to a path. The oldest goes if there are too many.
    fn push(&mut self, path: &TreePath, version: Arc<Version>, record: u64) {
        // What an undo replaced comes on top of those that it may go back to.
        let limit = self.bounds.versions as usize + usize::from(version.how == How::Undone);
        let list = self.lists.entry(path.clone()).or_default();
        let back_from_nothing = list.at.is_some()
            && version.how != How::Undone
            && list.entries.back().is_some_and(|last| last.version.content.is_none());
        let mut gone = Vec::new();
        if version.how != How::Undone {
            list.at = None;
            if back_from_nothing {
                gone.extend(list.entries.pop_back());
            }
        }
        let same = list.entries.back().is_some_and(|last| {
            same_bytes(last.version.content.as_ref(), version.content.as_ref())
        });
        if !same {
            list.next = list.next.max(1);
            let cost = cost_of(&version);
            let serial = self.next_serial;
            self.next_serial += 1;
            let entry = Entry {
                number: list.next,
                serial,
                version,
                cost,
                settled: false,
                record,
                told: record,
            };
            list.next += 1;
            self.cost += entry.cost;
            list.entries.push_back(entry);
            while list.entries.len() > limit.max(1) {
                gone.extend(list.entries.pop_front());
            }
            self.unsettled.insert(path.clone());
        }
        self.forget(gone);
    }

    fn forget(&mut self, gone: Vec<Entry>) {
        for entry in gone {
            self.cost = self.cost.saturating_sub(entry.cost);
            let extents = entry.version.content.iter().flat_map(|content| &content.extents);
            self.given_up.extend(extents.filter_map(|(_, source)| match source {
                Source::Pool { layer, .. } => Some(*layer),
                Source::Base { .. } => None,
            }));
            if entry.version.content.as_ref().is_some_and(|content| pool_bytes(content) > 0) {
                self.garbage = self.garbage.saturating_add(entry.cost);
            }
        }
    }

    fn copy(&mut self, from: &TreePath, to: &TreePath) {
        if self.lists.contains_key(to) {
            return;
        }
        let Some(mut list) = self.lists.get(from).cloned() else { return };
        // What an undo replaced is not what the file was.
        if list.at.take().is_some() {
            list.entries.pop_back();
        }
        self.cost += list.cost();
        self.lists.insert(to.clone(), list);
    }

    /// The paths at or below one.
    fn below(&self, dir: &TreePath) -> Vec<TreePath> {
        let from = self.lists.range(dir.clone()..);
        // In the order of bytes, "a-b" stands between "a" and "a/b".
        let end = [dir.as_bytes(), b"0"].concat();
        let near = from.take_while(|(path, _)| dir.is_root() || path.as_bytes() < &end[..]);
        near.filter(|(path, _)| path.starts_with(dir)).map(|(path, _)| path.clone()).collect()
    }

    fn move_below(&mut self, from: &TreePath, to: &TreePath) {
        for path in self.below(from) {
            let (Some(list), Some(moved)) = (self.lists.remove(&path), path.moved(from, to)) else {
                continue;
            };
            self.unsettled.remove(&path);
            if self.lists.contains_key(&moved) {
                self.forget(list.entries.into());
                continue;
            }
            self.unsettled.insert(moved.clone());
            self.lists.insert(moved, list);
        }
    }

    fn exchange(&mut self, a: &TreePath, b: &TreePath) {
        let mut take = |from: &TreePath, to: &TreePath| -> Vec<(TreePath, List)> {
            let paths = self.below(from);
            paths
                .into_iter()
                .filter_map(|p| Some((p.moved(from, to)?, self.lists.remove(&p)?)))
                .collect()
        };
        let moved = [take(a, b), take(b, a)].concat();
        for (path, list) in moved {
            self.unsettled.insert(path.clone());
            self.lists.insert(path, list);
        }
    }

    fn set_at(&mut self, path: &TreePath, number: Option<u32>) {
        let Some(list) = self.lists.get_mut(path) else { return };
        let was = std::mem::replace(&mut list.at, number);
        // Back at what was before the first undo: that is no version any more.
        if was.is_some() && number.is_none() {
            let top = list.entries.pop_back();
            self.forget(top.into_iter().collect());
        }
    }

    fn remap(
        &mut self,
        path: &TreePath,
        number: u32,
        extents: &[(ByteRange, Source)],
        record: u64,
    ) {
        let Some(list) = self.lists.get_mut(path) else { return };
        let Some(entry) = list.entries.iter_mut().find(|entry| entry.number == number) else {
            return;
        };
        let Some(content) = &entry.version.content else { return };
        let content = Content { extents: extents.to_vec(), ..Content::clone(content) };
        entry.version = Arc::new(Version {
            content: Some(Arc::new(content)),
            ..Version::clone(&entry.version)
        });
        (entry.record, entry.told) = (record, record);
    }

    fn drop_upto(&mut self, path: &TreePath, upto: u32) {
        let Some(list) = self.lists.get_mut(path) else { return };
        let mut gone = Vec::new();
        while list.entries.front().is_some_and(|first| first.number <= upto) {
            gone.extend(list.entries.pop_front());
        }
        let kept = |number: &u32| list.entries.iter().any(|entry| entry.number == *number);
        list.at = list.at.filter(kept);
        // The number of the next one is remembered as long as something is kept.
        if list.entries.is_empty() {
            self.lists.remove(path);
            self.unsettled.remove(path);
        }
        self.forget(gone);
    }

    fn bound(&mut self, bounds: Bounds) {
        self.bounds = bounds;
        if bounds.versions == 0 {
            let lists = std::mem::take(&mut self.lists);
            self.unsettled.clear();
            self.forget(lists.into_values().flat_map(|list| list.entries).collect());
        }
    }

    /// Gives up what is not to be believed; the log is not told, and says the same the next time.
    /// Removes the entries for which `keep` is false. Whether there were any.
    fn keep_only(&mut self, keep: impl Fn(&Entry) -> bool) -> bool {
        let mut gone = Vec::new();
        for list in self.lists.values_mut() {
            let (kept, lost): (Vec<Entry>, Vec<Entry>) =
                std::mem::take(&mut list.entries).into_iter().partition(|entry| keep(entry));
            if !lost.is_empty() {
                // Which of them was on top of an undo is not known any more.
                list.at = None;
            }
            list.entries = kept.into();
            gone.extend(lost);
        }
        self.lists.retain(|_, list| !list.entries.is_empty());
        let found = !gone.is_empty();
        self.forget(gone);
        found
    }
}

impl List {
    fn cost(&self) -> u64 {
        self.entries.iter().map(|entry| entry.cost).sum()
    }
}

/// What a version is counted as that has so many bytes for itself: these, and what it takes to say where its bytes are.
fn cost_with(content: &Content, own: u64) -> u64 {
    own.saturating_add(PIECE_COST.saturating_mul(content.extents.len() as u64)).max(LEAST_COST)
}

fn cost_of(version: &Version) -> u64 {
    version.content.as_ref().map_or(LEAST_COST, |content| cost_with(content, pool_bytes(content)))
}

/// Everything that is known, as records.
fn all_records(
    lists: &BTreeMap<TreePath, List>,
    bounds: Bounds,
    synced: u64,
) -> Vec<EditsLogRecord> {
    let list = |(path, list): (&TreePath, &List)| EditsLogRecord::List {
        path: path.clone(),
        next: list.next,
        at: list.at,
        versions: list
            .entries
            .iter()
            .map(|entry| (entry.number, Version::clone(&entry.version), entry.record < synced))
            .collect(),
    };
    std::iter::once(EditsLogRecord::Bounds(bounds)).chain(lists.iter().map(list)).collect()
}

/// Where the pools end to which versions refer, of the layers that are there.
fn pool_ends(store: &Store, contents: impl Iterator<Item = Arc<Content>>) -> HashMap<LayerId, u64> {
    let mut ends = HashMap::new();
    for (_, source) in contents.flat_map(|content| content.extents.clone()) {
        let Source::Pool { layer, .. } = source else { continue };
        if ends.contains_key(&layer) || store.layer(layer).is_none() {
            continue;
        }
        let end = store.pool_end(layer).unwrap_or_else(|error| {
            // The content may be there. If it is dropped here, gc frees it, and the log still names it.
            log::warn!("{error}");
            u64::MAX
        });
        ends.insert(layer, end);
    }
    ends
}

/// Whether the pools are there to which a version refers, and reach so far.
fn is_there(ends: &HashMap<LayerId, u64>, version: &Version) -> bool {
    let Some(content) = &version.content else { return true };
    content.extents.iter().all(|(range, source)| match source {
        Source::Base { .. } => true,
        Source::Pool { layer, offset } => {
            ends.get(layer).is_some_and(|end| offset.saturating_add(range.len()) <= *end)
        }
    })
}
