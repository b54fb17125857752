//! Finds the data of files between their holes, so that work on content costs only what the data
//! costs.
//!
//! A range that [`DataRanges`] does not yield is:
//! * in one file, a hole;
//! * in two files, a hole in both, or the same bytes of the same file on the host. So the files are
//!   equal there, and nothing has to be read to know it.
//!
//! All of a pool is data. The holes of a base file come from lseek(2), on the file as it was opened
//! beneath the base; a filesystem without SEEK_DATA reports none. A base file that changed behind
//! the sandbox is an error, as when it is read.
//!
//! The search looks at the extents in windows and keeps few ranges at a time, so its memory does
//! not grow with the number of extents. A window doubles while it holds few extents, so a hole of
//! terabytes takes few steps.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::FsResult;
use crate::fs::merged::extent_reader::{FIRST_WINDOW, HostExtent};
use crate::fs::merged::lower::Lower;
use crate::fs::merged::state::{Found, State};
use crate::tree::within;
use crate::types::ByteRange;

/// The longest range, in bytes, so that a caller can read one at once. No range crosses a multiple
/// of it.
pub const STEP: u64 = 1 << 20;
/// With more extents than this in a window, the next window is shorter.
const MANY_EXTENTS: usize = 1024;
/// With this many ranges found, the search yields them before it goes on.
const MAX_READY: usize = 4096;

/// Returns the extents of a range of a file, cut at its size.
pub(in crate::fs) type Plan<'a> = Box<dyn Fn(ByteRange) -> FsResult<Vec<HostExtent>> + 'a>;

/// A file that is searched.
struct Side<'a> {
    plan: Plan<'a>,
    lower: Arc<Lower>,
}

impl<'a> Side<'a> {
    fn of(state: &'a State, found: &'a Found) -> Side<'a> {
        let plan = Box::new(|range| state.plan(found, range));
        Side { plan, lower: Arc::clone(&state.lower) }
    }

    fn next_data(&self, extent: &HostExtent, from: u64) -> FsResult<Option<ByteRange>> {
        extent.next_data(from, self.lower.problem_log())
    }
}

/// Yields the ranges of a file that hold data, or those in which two files can differ: in order,
/// and at most [`STEP`] bytes each.
pub struct DataRanges<'a> {
    file: Side<'a>,
    /// The file to compare with, if any.
    other: Option<Side<'a>>,
    at: u64,
    end: u64,
    window: u64,
    ready: VecDeque<ByteRange>,
}

impl<'a> DataRanges<'a> {
    /// The data in `range` of a file.
    pub fn of(state: &'a State, found: &'a Found, range: ByteRange) -> DataRanges<'a> {
        DataRanges::new(Side::of(state, found), None, range)
    }

    /// The ranges within `range` in which two files can differ. The shorter file counts as extended
    /// by a hole.
    pub fn unlike(
        (a_state, a): (&'a State, &'a Found),
        (b_state, b): (&'a State, &'a Found),
        range: ByteRange,
    ) -> DataRanges<'a> {
        DataRanges::new(Side::of(a_state, a), Some(Side::of(b_state, b)), range)
    }

    fn new(file: Side<'a>, other: Option<Side<'a>>, range: ByteRange) -> DataRanges<'a> {
        let ready = VecDeque::new();
        DataRanges { file, other, at: range.start, end: range.end, window: FIRST_WINDOW, ready }
    }

    /// Searches one window.
    fn search(&mut self) -> FsResult<()> {
        let _guards =
            (self.file.lower.reading(), self.other.as_ref().map(|other| other.lower.reading()));
        let window =
            ByteRange { start: self.at, end: self.at.saturating_add(self.window).min(self.end) };
        let ours = (self.file.plan)(window)?;
        let theirs = self.other.as_ref().map_or(Ok(Vec::new()), |other| (other.plan)(window))?;
        self.window = match ours.len() + theirs.len() > MANY_EXTENTS {
            true => (self.window / 2).max(STEP),
            false => self.window.saturating_mul(2),
        };
        let (mut ours, mut theirs) = (ExtentQueue::of(ours), ExtentQueue::of(theirs));
        while self.at < window.end && self.ready.len() < MAX_READY {
            let rest = window.end - self.at;
            let len = rest.min(ours.len()).min(theirs.len());
            self.compare(&ours.take(len), &theirs.take(len))?;
        }
        Ok(())
    }

    /// Compares the extents of both files at the current offset. They have the same length.
    fn compare(&mut self, ours: &HostExtent, theirs: &HostExtent) -> FsResult<()> {
        let start = self.at;
        if ours.is_same_storage(theirs)? {
            self.at = start + ours.len;
            return Ok(());
        }
        while self.ready.len() < MAX_READY {
            let from = self.at - start;
            let of_other = match &self.other {
                Some(other) => other.next_data(theirs, from)?,
                None => None,
            };
            let both = [self.file.next_data(ours, from)?, of_other];
            let Some(data) = both.into_iter().flatten().min_by_key(|data| data.start) else {
                self.at = start + ours.len;
                return Ok(());
            };
            self.at = start + data.end;
            self.push(ByteRange { start: start + data.start, end: self.at });
        }
        Ok(())
    }

    fn push(&mut self, range: ByteRange) {
        match self.ready.back_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ready.push_back(range),
        }
    }

    /// Where the searched range ends, and the first range that would be yielded.
    pub(in crate::fs) fn first(mut self) -> FsResult<(u64, Option<ByteRange>)> {
        let end = self.end;
        Ok((end, self.next().transpose()?))
    }
}

impl Iterator for DataRanges<'_> {
    type Item = FsResult<ByteRange>;

    fn next(&mut self) -> Option<FsResult<ByteRange>> {
        while self.ready.is_empty() && self.at < self.end {
            if let Err(error) = self.search() {
                self.at = self.end;
                self.ready.clear();
                return Some(Err(error));
            }
        }
        let first = self.ready.front_mut()?;
        let cut = (first.start / STEP).saturating_add(1).saturating_mul(STEP);
        let range = ByteRange { start: first.start, end: first.end.min(cut) };
        first.start = range.end;
        if first.is_empty() {
            self.ready.pop_front();
        }
        Some(Ok(range))
    }
}

/// Extents that are taken in parts. After the last one comes a hole without end.
struct ExtentQueue {
    rest: VecDeque<HostExtent>,
}

impl ExtentQueue {
    fn of(extents: Vec<HostExtent>) -> ExtentQueue {
        ExtentQueue { rest: extents.into_iter().filter(|extent| extent.len > 0).collect() }
    }

    /// Bytes up to the end of the first extent.
    fn len(&self) -> u64 {
        self.rest.front().map_or(u64::MAX, |extent| extent.len)
    }

    /// Takes the next bytes, at most [`ExtentQueue::len`].
    fn take(&mut self, len: u64) -> HostExtent {
        let Some(first) = self.rest.front_mut() else { return HostExtent::hole(len) };
        let part = first.part(0, len);
        *first = first.part(len, u64::MAX);
        if first.len == 0 {
            self.rest.pop_front();
        }
        part
    }
}

/// The first data in a range of a file that `plan` describes, and where the range ends, cut at
/// `size`. The data is at most [`STEP`] bytes long; `None` if the range is a hole.
pub(in crate::fs) fn first_data(
    plan: Plan<'_>,
    lower: Arc<Lower>,
    range: ByteRange,
    size: u64,
) -> FsResult<(u64, Option<ByteRange>)> {
    DataRanges::new(Side { plan, lower }, None, within(range, size)).first()
}

impl State {
    /// The data of a file between its holes.
    pub fn data<'a>(&'a self, found: &'a Found) -> DataRanges<'a> {
        let size = self.kind_and_size(found).map_or(0, |(_, size)| size);
        DataRanges::of(self, found, ByteRange { start: 0, end: size })
    }

    /// As [`first_data`], for a file of this state.
    pub(in crate::fs) fn first_data(
        &self,
        found: &Found,
        range: ByteRange,
    ) -> FsResult<(u64, Option<ByteRange>)> {
        let size = self.kind_and_size(found).map_or(0, |(_, size)| size);
        DataRanges::of(self, found, within(range, size)).first()
    }
}
