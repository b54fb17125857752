//! Storing versions once: where an older version has the same bytes as the one after it, it refers to the bytes of that one.
//!
//! A tool that rewrites a whole file leaves a whole copy behind with each edit. In the background, when nothing was edited for a
//! moment, the content of a version is held against that of the next one (of the newest, against the file), at the same offsets
//! and, if the size differs, from the end. Bytes decide. Older versions are changed, because nothing but the log of
//! versions refers to them; what they referred to is then unused and is given back.
//!
//! Always true: what a version is changed to refer to is never written again: it belongs to another version, or is frozen before
//! it is read.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{EditHistory, Entry, Known, QUIET, budget, cost_with, pool_bytes, since};
use crate::error::FsResult;
use crate::fs::edits::rolling_match;
use crate::fs::edits::undo::state_of;
use crate::fs::{Found, Fs};
use crate::store::content::pool::BLOCK;
use crate::store::edits_log::{Content, EditsLogRecord};
use crate::tree::Source;
use crate::types::{ByteRange, LayerId, TreePath};

/// Bytes that are read at once.
const STEP: u64 = 256 << 10;
/// Bytes of one path that are held against each other, at most.
const MOST_COMPARED: u64 = 256 << 20;
/// Bytes of each of two versions that are looked through for what moved, at most.
const MOST_SHIFTED: u64 = 8 << 20;
/// Runs of equal bytes in two versions, at most.
const MOST_RUNS: usize = 1024;
/// Space is given back when so many bytes were given up, also while files are edited.
const MUCH_GARBAGE: u64 = 256 << 20;
/// For less it is not worth it.
const SOME_GARBAGE: u64 = 1 << 20;

/// What is left to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tended {
    /// Nothing, until the next edit.
    Done,
    /// Something, in a moment.
    Later,
}

/// Where bytes are that are also elsewhere: by pool and address, how many and where.
#[derive(Default)]
struct Moves {
    runs: BTreeMap<(LayerId, u64), (u64, Source)>,
}

impl Fs {
    /// Keeps the versions small: stores equal bytes once, gives up what is beyond the budget, and gives its space back.
    /// While files are being edited only what cannot wait is done, unless `at_once`; nothing more when `is_stopping`.
    pub fn tend_versions(&self, at_once: bool, is_stopping: &dyn Fn() -> bool) -> Tended {
        let (is_quiet, is_full, garbage) = {
            let mut core = self.core();
            core.tend_away();
            let Some(versions) = &core.edits else { return Tended::Done };
            let quiet =
                since(versions.now(), versions.last_edit).is_none_or(|quiet| quiet >= QUIET);
            (quiet || at_once, versions.excess().is_some(), versions.garbage)
        };
        if is_quiet {
            while let Some(path) = self.next_unsettled().filter(|_| !is_stopping()) {
                if let Err(error) = self.settle(&path) {
                    log::debug!("the versions of '{path}' are stored as they are: {error}");
                }
            }
        }
        if is_full {
            self.keep_to_budget();
        }
        let garbage = self.core().edits.as_ref().map_or(garbage, |versions| versions.garbage);
        let wanted = if is_quiet { SOME_GARBAGE } else { MUCH_GARBAGE };
        if garbage >= wanted {
            self.reclaim.note_garbage();
            if self.reclaim_unused().is_some() {
                self.take_off_garbage(garbage);
            }
        }
        let mut core = self.core();
        let Some(versions) = &mut core.edits else { return Tended::Done };
        versions.tidy_log();
        let is_left = !versions.unsettled.is_empty() || !versions.away.is_empty();
        let rest = is_left || versions.garbage >= SOME_GARBAGE;
        if rest || versions.excess().is_some() { Tended::Later } else { Tended::Done }
    }

    fn next_unsettled(&self) -> Option<TreePath> {
        self.core().edits.as_mut()?.unsettled.pop_first()
    }

    fn take_off_garbage(&self, bytes: u64) {
        if let Some(versions) = &mut self.core().edits {
            versions.garbage = versions.garbage.saturating_sub(bytes);
        }
    }

    /// Gives up versions until they take no more than they may.
    fn keep_to_budget(&self) {
        let large: Vec<TreePath> = {
            let core = self.core();
            let Some(versions) = &core.edits else { return };
            let is_large = |entry: &Entry| entry.cost > SOME_GARBAGE;
            let large = versions.lists.iter().filter(|(_, list)| list.entries.iter().any(is_large));
            large.map(|(path, _)| path.clone()).collect()
        };
        // What is counted in full may be shared with the file as it is.
        for path in large {
            self.count_anew(&path);
        }
        let (costs, excess) = {
            let core = self.core();
            let Some(versions) = &core.edits else { return };
            let Some(excess) = versions.excess() else { return };
            (versions.costs(), excess)
        };
        self.give_up_versions(costs, excess);
    }

    fn give_up_versions(&self, costs: Vec<budget::Costs>, bytes: u64) {
        let chosen = budget::choose(costs, bytes);
        if let Some(versions) = &mut self.core().edits {
            versions.give_up(chosen);
        }
    }

    /// For a full disk: gives up half of what versions take, or all of it if that is little. Whether there was anything.
    pub(in crate::fs) fn give_up_history(&self) -> bool {
        let (costs, all) = {
            let mut core = self.core();
            // What is no version yet goes first.
            if core.give_up_away() {
                return true;
            }
            let Some(versions) = &core.edits else { return false };
            (versions.costs(), versions.cost)
        };
        if all == 0 {
            return false;
        }
        log::warn!("the disk is full: older versions of files are given up");
        self.give_up_versions(costs, if all < SOME_GARBAGE { all } else { all / 2 });
        true
    }

    /// The versions of a path, and the file as it is, which is not written in place any more.
    fn line_of(&self, path: &TreePath) -> Option<(Vec<Entry>, Option<Arc<Content>>)> {
        let mut core = self.core();
        let list = core.edits.as_ref()?.lists.get(path)?;
        let entries: Vec<Entry> = list.entries.iter().cloned().collect();
        let live = match core.resolve(path) {
            Ok(found @ Found::Upper(..)) => core.content_found(&found),
            Ok(Found::Base(..) | Found::Nothing(_)) | Err(_) => None,
        };
        if let Some(live) = &live {
            core.freeze(live);
        }
        Some((entries, live))
    }

    fn settle(&self, path: &TreePath) -> FsResult<()> {
        let _guard = self.read_guard();
        let Some((entries, live)) = self.line_of(path) else { return Ok(()) };
        let mut contents: Vec<Option<Arc<Content>>> =
            entries.iter().map(|entry| entry.version.content.clone()).chain([live]).collect();
        let mut left = MOST_COMPARED;
        // The newest first: what refers to its bytes then is what all older ones are held against.
        for at in (0..entries.len()).rev() {
            let is_new =
                entries.get(at).is_some_and(|entry| !entry.settled) || at + 1 == entries.len();
            let pair =
                (contents.get(at).cloned().flatten(), contents.get(at + 1).cloned().flatten());
            let (Some(old), Some(new)) = pair else { continue };
            if !is_new {
                continue;
            }
            let moves = self.equal_bytes(&old, &new, &mut left)?;
            for content in contents.iter_mut().take(at + 1).flatten() {
                if let Some(extents) = moves.applied(&content.extents) {
                    *content = Arc::new(Content { extents, ..Content::clone(content) });
                }
            }
        }
        self.publish(path, &entries, &contents);
        Ok(())
    }

    /// Says where versions are now, if they are still there.
    fn publish(&self, path: &TreePath, entries: &[Entry], contents: &[Option<Arc<Content>>]) {
        let mut core = self.core();
        let Some(versions) = &mut core.edits else { return };
        for (at, (entry, content)) in entries.iter().zip(contents).enumerate() {
            let next = contents.get(at + 1).and_then(Option::as_ref);
            versions.publish(path, entry, content.as_ref(), next);
        }
    }

    /// Counts the versions of a path by what only they refer to.
    fn count_anew(&self, path: &TreePath) {
        let Some((entries, live)) = self.line_of(path) else { return };
        let contents: Vec<Option<Arc<Content>>> =
            entries.iter().map(|entry| entry.version.content.clone()).chain([live]).collect();
        let mut core = self.core();
        let Some(versions) = &mut core.edits else { return };
        for (at, entry) in entries.iter().enumerate() {
            let (Some(content), next) =
                (contents.get(at).and_then(Option::as_ref), contents.get(at + 1))
            else {
                continue;
            };
            versions.set_cost(
                path,
                entry.number,
                own_bytes(content, next.and_then(Option::as_ref)),
            );
        }
    }

    /// Where bytes of `old` are in pools that are the same in `new`.
    fn equal_bytes(&self, old: &Content, new: &Content, left: &mut u64) -> FsResult<Moves> {
        let sizes = (old.node.size(), new.node.size());
        let common = sizes.0.min(sizes.1);
        let mut moves = Moves::default();
        let (old_state, old_found) = state_of(self, old);
        let (new_state, new_found) = state_of(self, new);
        let both = |at: u64, new_at: u64, len: u64| -> FsResult<(Vec<u8>, Vec<u8>)> {
            Ok((
                old_state.read_range(&old_found, ByteRange::at(at, len))?,
                new_state.read_range(&new_found, ByteRange::at(new_at, len))?,
            ))
        };
        // From the end, where the size differs: what was put in or taken out moves all that is behind it.
        let mut same = 0;
        while sizes.0 != sizes.1 && same < common {
            let holes = (hole_before(old, sizes.0 - same), hole_before(new, sizes.1 - same));
            if let hole @ 1.. = holes.0.min(holes.1).min(common - same) {
                same += hole;
                continue;
            }
            let len = STEP.min(common - same);
            if !take(left, len) {
                break;
            }
            let (a, b) = both(sizes.0 - same - len, sizes.1 - same - len, len)?;
            let equal =
                a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x == y).count() as u64;
            same += equal;
            if equal < len {
                break;
            }
        }
        for pair in
            pairs(old, ByteRange { start: sizes.0 - same, end: sizes.0 }, new, sizes.1 - same)
        {
            moves.add(pair.old, pair.new, pair.range.len());
        }
        let mut rest: Vec<ByteRange> = Vec::new();
        for pair in pairs(old, ByteRange { start: 0, end: common.min(sizes.0 - same) }, new, 0) {
            let mut at = pair.range.start;
            while at < pair.range.end {
                let len = STEP.min(pair.range.end - at);
                if moves.runs.len() >= MOST_RUNS || !take(left, len) {
                    return Ok(moves);
                }
                let (a, b) = both(at, at, len)?;
                let mut by = at - pair.range.start;
                for (x, y) in a.chunks(BLOCK as usize).zip(b.chunks(BLOCK as usize)) {
                    let len = x.len() as u64;
                    if x == y {
                        moves.add(pair.old.advanced(by), pair.new.advanced(by), len);
                    } else {
                        extend(&mut rest, ByteRange::at(pair.range.start + by, len));
                    }
                    by += len;
                }
                at += len;
            }
        }
        // What is neither at the same place nor at the end can be anywhere behind the first difference.
        extend(&mut rest, ByteRange { start: common.min(sizes.0 - same), end: sizes.0 - same });
        let first = rest.first().map_or(sizes.1, |range| range.start);
        let behind = ByteRange { start: first, end: (sizes.1 - same).max(first) };
        let bytes: u64 = rest.iter().map(ByteRange::len).sum();
        if !(BLOCK..=MOST_SHIFTED).contains(&bytes)
            || behind.len() > MOST_SHIFTED
            || !take(left, bytes + behind.len())
        {
            return Ok(moves);
        }
        let parts: FsResult<Vec<(u64, Vec<u8>)>> = rest
            .iter()
            .map(|range| Ok((range.start, old_state.read_range(&old_found, *range)?)))
            .collect();
        for run in rolling_match::find(&parts?, &new_state.read_range(&new_found, behind)?) {
            for pair in pairs(old, ByteRange::at(run.old, run.len), new, first + run.new) {
                if moves.runs.len() < MOST_RUNS {
                    moves.add(pair.old, pair.new, pair.range.len());
                }
            }
        }
        Ok(moves)
    }
}

/// Adds a range to ranges that are in order.
fn extend(ranges: &mut Vec<ByteRange>, range: ByteRange) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ if range.is_empty() => {}
        _ => ranges.push(range),
    }
}

/// Takes so many from what is left, if there is that much.
fn take(left: &mut u64, len: u64) -> bool {
    let enough = *left >= len;
    *left = left.saturating_sub(len);
    enough
}

/// A range of an older content, and where it and its counterpart in a newer one are.
struct Pair {
    range: ByteRange,
    old: Source,
    new: Source,
}

/// The ranges of `range` of `old` that are in a pool, and in another place in `new`, where the range begins at `start`.
fn pairs(old: &Content, range: ByteRange, new: &Content, start: u64) -> Vec<Pair> {
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let there = start + (at - range.start);
        let (a, a_end) = source_at(old, at);
        let (b, b_end) = source_at(new, there);
        let end = a_end.min(at.saturating_add(b_end - there)).min(range.end);
        if let (Some(a), Some(b)) = (a, b)
            && a != b
            && !a.is_base()
            && !b.is_base()
        {
            found.push(Pair { range: ByteRange { start: at, end }, old: a, new: b });
        }
        at = end;
    }
    found
}

/// Where a byte is, and up to where the following ones follow it there; none in a hole.
fn source_at(content: &Content, at: u64) -> (Option<Source>, u64) {
    let next = content.extents.partition_point(|(range, _)| range.end <= at);
    match content.extents.get(next) {
        Some((range, source)) if range.start <= at => {
            (Some(source.advanced(at - range.start)), range.end)
        }
        Some((range, _)) => (None, range.start),
        None => (None, u64::MAX),
    }
}

/// The length of the hole that ends at `end`.
fn hole_before(content: &Content, end: u64) -> u64 {
    let next = content.extents.partition_point(|(range, _)| range.start < end);
    let before = next.checked_sub(1).and_then(|last| content.extents.get(last));
    end.saturating_sub(before.map_or(0, |(range, _)| range.end))
}

/// Bytes that a version is counted as which has a newer one.
fn own_bytes(old: &Content, new: Option<&Arc<Content>>) -> u64 {
    cost_with(old, unshared_bytes(old, new))
}

/// Bytes in pools to which `old` refers and `new` does not.
pub(super) fn unshared_bytes(old: &Content, new: Option<&Arc<Content>>) -> u64 {
    let mut shared: Vec<(LayerId, ByteRange)> =
        new.map_or_else(Vec::new, |new| in_pools(new).collect());
    shared.sort_unstable_by_key(|(layer, range)| (*layer, range.start));
    let own = in_pools(old).map(|(layer, range)| {
        let first = shared.partition_point(|(other, r)| (*other, r.end) <= (layer, range.start));
        let near = shared
            .iter()
            .skip(first)
            .take_while(|(other, r)| *other == layer && r.start < range.end);
        let common: u64 =
            near.map(|(_, r)| r.end.min(range.end).saturating_sub(r.start.max(range.start))).sum();
        range.len().saturating_sub(common)
    });
    own.sum()
}

fn in_pools(content: &Content) -> impl Iterator<Item = (LayerId, ByteRange)> {
    content.extents.iter().filter_map(|(range, source)| match source {
        Source::Pool { layer, offset } => Some((*layer, ByteRange::at(*offset, range.len()))),
        Source::Base { .. } => None,
    })
}

impl Moves {
    /// Bytes at `from` are also at `to`.
    fn add(&mut self, from: Source, to: Source, len: u64) {
        let Source::Pool { layer, offset } = from else { return };
        let before =
            self.runs.range_mut(..=(layer, offset)).next_back().filter(|((l, _), _)| *l == layer);
        if let Some(((_, start), (run, source))) = before {
            if start + *run == offset && source.advanced(*run) == to {
                *run += len;
                return;
            }
            if start + *run > offset {
                return;
            }
        }
        let overlaps = self
            .runs
            .range((layer, offset)..)
            .next()
            .is_some_and(|((l, start), _)| *l == layer && *start < offset + len);
        if !overlaps {
            self.runs.insert((layer, offset), (len, to));
        }
    }

    /// The same content by its new places; none if nothing of it moved. Short runs stay: they would free no block.
    fn applied(&self, extents: &[(ByteRange, Source)]) -> Option<Vec<(ByteRange, Source)>> {
        let mut moved = Vec::with_capacity(extents.len());
        let mut any = false;
        for (range, source) in extents {
            let Source::Pool { layer, offset } = *source else {
                push(&mut moved, *range, *source);
                continue;
            };
            let (mut at, end) = (offset, offset + range.len());
            let place = |from: u64, to: u64| ByteRange {
                start: range.start + (from - offset),
                end: range.start + (to - offset),
            };
            let first =
                self.runs.range(..=(layer, at)).next_back().map_or((layer, at), |(key, _)| *key);
            let near = self.runs.range(first..(layer, end)).filter(|(_, (len, _))| *len >= BLOCK);
            for ((l, start), (len, to)) in near.filter(|((l, _), _)| *l == layer) {
                debug_assert_eq!(*l, layer);
                let (from, upto) = ((*start).max(at), (start + len).min(end));
                if from >= upto {
                    continue;
                }
                if at < from {
                    push(&mut moved, place(at, from), source.advanced(at - offset));
                }
                push(&mut moved, place(from, upto), to.advanced(from - start));
                any = true;
                at = upto;
            }
            if at < end {
                push(&mut moved, place(at, end), source.advanced(at - offset));
            }
        }
        any.then_some(moved)
    }
}

/// Adds a range, or lets the last one go on.
pub(super) fn push(extents: &mut Vec<(ByteRange, Source)>, range: ByteRange, source: Source) {
    match extents.last_mut() {
        Some((last, from)) if last.end == range.start && from.advanced(last.len()) == source => {
            last.end = range.end;
        }
        _ => extents.push((range, source)),
    }
}

impl EditHistory {
    fn publish(
        &mut self,
        path: &TreePath,
        was: &Entry,
        content: Option<&Arc<Content>>,
        next: Option<&Arc<Content>>,
    ) {
        let entry = |versions: &EditHistory| {
            let list = versions.lists.get(path)?;
            list.entries.iter().position(|entry| {
                entry.number == was.number && entry.version.content == was.version.content
            })
        };
        let Some(at) = entry(self) else { return };
        // An undo put this version there. It is recognised by where its bytes are, so it keeps them
        // until the file is edited, and is compared again then.
        if self.lists.get(path).is_some_and(|list| list.at == Some(was.number)) {
            return;
        }
        let (Some(content), Some(old)) = (content, &was.version.content) else { return };
        if content.extents != old.extents {
            let before = pool_bytes(old);
            self.garbage =
                self.garbage.saturating_add(before.saturating_sub(unshared_bytes(content, next)));
            let (number, extents) = (was.number, content.extents.clone());
            self.note(&EditsLogRecord::Remapped { path: path.clone(), number, extents });
        }
        if let Some(entry) = self.lists.get_mut(path).and_then(|list| list.entries.get_mut(at)) {
            entry.settled = true;
        }
        self.set_cost(path, was.number, own_bytes(content, next));
    }
}

impl Known {
    fn set_cost(&mut self, path: &TreePath, number: u32, cost: u64) {
        let list = self.lists.get_mut(path);
        let entry =
            list.and_then(|list| list.entries.iter_mut().find(|entry| entry.number == number));
        if let Some(entry) = entry {
            self.cost = self.cost.saturating_sub(entry.cost).saturating_add(cost);
            entry.cost = cost;
        }
    }
}
