//! Finds the bytes that two contents of a file have in common, by reading and comparing them.
//!
//! The search goes from cheap to expensive: from the end, at equal offsets, then moved bytes by a
//! rolling hash. It only looks at ranges that both contents hold in pools, at different addresses.

use std::collections::BTreeMap;

use super::content::{push_extent, state_of};
use super::rolling_match;
use crate::error::FsResult;
use crate::fs::{Found, Fs, State};
use crate::store::content::pool::BLOCK;
use crate::store::edits_log::Content;
use crate::tree::Source;
use crate::types::{ByteRange, LayerId};

/// Bytes of one read.
const READ_SIZE: u64 = 256 << 10;
/// The most bytes of each content in which moved bytes are searched.
const MAX_MOVED: u64 = 8 << 20;
/// The most runs of equal bytes of two contents.
const MAX_RUNS: usize = 1024;

/// Finds the bytes of `old` in pools that `new` also has. Stops when `left` bytes are compared, and
/// subtracts them.
pub(super) fn equal_runs(
    fs: &Fs,
    old: &Content,
    new: &Content,
    left: &mut u64,
) -> FsResult<EqualRuns> {
    let (old, new) = (Side::of(fs, old), Side::of(fs, new));
    let mut comparison = Comparison { old, new, left, runs: EqualRuns::default() };
    let tail = comparison.compare_tails()?;
    if let Some(rest) = comparison.compare_in_place(tail)? {
        comparison.find_moved(tail, &rest)?;
    }
    Ok(comparison.runs)
}

/// One of the two contents.
struct Side<'a> {
    content: &'a Content,
    state: State,
    found: Found,
}

impl<'a> Side<'a> {
    fn of(fs: &Fs, content: &'a Content) -> Side<'a> {
        let (state, found) = state_of(fs, content);
        Side { content, state, found }
    }

    fn size(&self) -> u64 {
        self.content.node.size()
    }

    fn read(&self, range: ByteRange) -> FsResult<Vec<u8>> {
        self.state.read_range(&self.found, range)
    }
}

struct Comparison<'a> {
    old: Side<'a>,
    new: Side<'a>,
    left: &'a mut u64,
    runs: EqualRuns,
}

impl Comparison<'_> {
    /// Compares from the end if the sizes differ: an insertion moves all bytes after it. Returns
    /// how many bytes are equal.
    fn compare_tails(&mut self) -> FsResult<u64> {
        let (old_size, new_size) = (self.old.size(), self.new.size());
        if old_size == new_size {
            return Ok(0);
        }
        let common = old_size.min(new_size);
        let mut same = 0;
        while same < common {
            let old_hole = hole_before(self.old.content, old_size - same);
            let new_hole = hole_before(self.new.content, new_size - same);
            if let hole @ 1.. = old_hole.min(new_hole).min(common - same) {
                same += hole;
                continue;
            }
            let len = READ_SIZE.min(common - same);
            if !spend(self.left, len) {
                break;
            }
            let a = self.old.read(ByteRange::at(old_size - same - len, len))?;
            let b = self.new.read(ByteRange::at(new_size - same - len, len))?;
            let equal =
                a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x == y).count() as u64;
            same += equal;
            if equal < len {
                break;
            }
        }
        let tail = ByteRange { start: old_size - same, end: old_size };
        for pair in pairs(self.old.content, tail, self.new.content, new_size - same) {
            self.runs.add(pair.old, pair.new, pair.range.len());
        }
        Ok(same)
    }

    /// Compares the bytes before the equal tails at the same offsets, in blocks. Returns the ranges
    /// of `old` that were not found, or `None` if a limit was reached.
    fn compare_in_place(&mut self, tail: u64) -> FsResult<Option<Vec<ByteRange>>> {
        let old_end = self.old.size() - tail;
        let end = self.new.size().min(old_end);
        let mut rest: Vec<ByteRange> = Vec::new();
        for pair in pairs(self.old.content, ByteRange { start: 0, end }, self.new.content, 0) {
            let mut at = pair.range.start;
            while at < pair.range.end {
                let len = READ_SIZE.min(pair.range.end - at);
                if self.runs.by_address.len() >= MAX_RUNS || !spend(self.left, len) {
                    return Ok(None);
                }
                let a = self.old.read(ByteRange::at(at, len))?;
                let b = self.new.read(ByteRange::at(at, len))?;
                let mut by = at - pair.range.start;
                for (x, y) in a.chunks(BLOCK as usize).zip(b.chunks(BLOCK as usize)) {
                    let len = x.len() as u64;
                    if x == y {
                        self.runs.add(pair.old.advanced(by), pair.new.advanced(by), len);
                    } else {
                        push_range(&mut rest, ByteRange::at(pair.range.start + by, len));
                    }
                    by += len;
                }
                at += len;
            }
        }
        push_range(&mut rest, ByteRange { start: end, end: old_end });
        Ok(Some(rest))
    }

    /// Searches the ranges `rest` of `old` anywhere in `new` between the first difference and the
    /// equal tails.
    fn find_moved(&mut self, tail: u64, rest: &[ByteRange]) -> FsResult<()> {
        let new_size = self.new.size();
        let first = rest.first().map_or(new_size, |range| range.start);
        let target = ByteRange { start: first, end: (new_size - tail).max(first) };
        let bytes: u64 = rest.iter().map(ByteRange::len).sum();
        if !(BLOCK..=MAX_MOVED).contains(&bytes)
            || target.len() > MAX_MOVED
            || !spend(self.left, bytes + target.len())
        {
            return Ok(());
        }
        let parts: FsResult<Vec<(u64, Vec<u8>)>> =
            rest.iter().map(|range| Ok((range.start, self.old.read(*range)?))).collect();
        for run in rolling_match::find(&parts?, &self.new.read(target)?) {
            let range = ByteRange::at(run.old, run.len);
            for pair in pairs(self.old.content, range, self.new.content, first + run.new) {
                if self.runs.by_address.len() < MAX_RUNS {
                    self.runs.add(pair.old, pair.new, pair.range.len());
                }
            }
        }
        Ok(())
    }
}

/// Appends a range to sorted ranges.
fn push_range(ranges: &mut Vec<ByteRange>, range: ByteRange) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ if range.is_empty() => {}
        _ => ranges.push(range),
    }
}

/// Subtracts `len` from `left`. Returns whether there was as much.
fn spend(left: &mut u64, len: u64) -> bool {
    let is_enough = *left >= len;
    *left = left.saturating_sub(len);
    is_enough
}

/// A range of the old content, its address, and the address of its counterpart in the new content.
struct Pair {
    range: ByteRange,
    old: Source,
    new: Source,
}

/// Splits `range` of `old` into parts that both contents have in pools, at different addresses. In
/// `new` the range starts at `start`.
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

/// The address of the byte at `at` (`None` in a hole), and the end of the extent or hole.
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

/// The length of the hole that ends at `end`; 0 if there is none.
fn hole_before(content: &Content, end: u64) -> u64 {
    let next = content.extents.partition_point(|(range, _)| range.start < end);
    let before = next.checked_sub(1).and_then(|last| content.extents.get(last));
    end.saturating_sub(before.map_or(0, |(range, _)| range.end))
}

/// Runs of equal bytes: addresses in pools, and where the same bytes are also.
#[derive(Default)]
pub(super) struct EqualRuns {
    /// By layer and offset: the length, and the other address. Runs do not overlap.
    by_address: BTreeMap<(LayerId, u64), (u64, Source)>,
}

impl EqualRuns {
    /// Adds a run: the bytes at `from` are also at `to`. A run that overlaps a known one is
    /// ignored.
    fn add(&mut self, from: Source, to: Source, len: u64) {
        let Source::Pool { layer, offset } = from else { return };
        let before = self
            .by_address
            .range_mut(..=(layer, offset))
            .next_back()
            .filter(|((l, _), _)| *l == layer);
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
            .by_address
            .range((layer, offset)..)
            .next()
            .is_some_and(|((l, start), _)| *l == layer && *start < offset + len);
        if !overlaps {
            self.by_address.insert((layer, offset), (len, to));
        }
    }

    /// Rewrites extents to the other addresses; `None` if no run applies. A run shorter than a
    /// block is ignored, because its block could not be freed.
    pub(super) fn applied(
        &self,
        extents: &[(ByteRange, Source)],
    ) -> Option<Vec<(ByteRange, Source)>> {
        let mut moved = Vec::with_capacity(extents.len());
        let mut any = false;
        for (range, source) in extents {
            let Source::Pool { layer, offset } = *source else {
                push_extent(&mut moved, *range, *source);
                continue;
            };
            let (mut at, end) = (offset, offset + range.len());
            let place = |from: u64, to: u64| ByteRange {
                start: range.start + (from - offset),
                end: range.start + (to - offset),
            };
            let first = self
                .by_address
                .range(..=(layer, at))
                .next_back()
                .map_or((layer, at), |(key, _)| *key);
            let near =
                self.by_address.range(first..(layer, end)).filter(|(_, (len, _))| *len >= BLOCK);
            for ((_, start), (len, to)) in near.filter(|((l, _), _)| *l == layer) {
                let (from, upto) = ((*start).max(at), (start + len).min(end));
                if from >= upto {
                    continue;
                }
                if at < from {
                    push_extent(&mut moved, place(at, from), source.advanced(at - offset));
                }
                push_extent(&mut moved, place(from, upto), to.advanced(from - start));
                any = true;
                at = upto;
            }
            if at < end {
                push_extent(&mut moved, place(at, end), source.advanced(at - offset));
            }
        }
        any.then_some(moved)
    }
}
