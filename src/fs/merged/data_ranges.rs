//! Finds the data of files between their holes, so that work on content costs what the data costs.
//!
//! Always true of what a [`DataRanges`] does not yield:
//! * In one file, it is a hole.
//! * In two files, it is a hole in both, or both have the same bytes of the same file on the host. So
//!   the two are equal there, and no byte has to be read to know it.
//!
//! An extent in a pool is data. An extent in the base is asked for its holes with lseek(2), in the file
//! that was opened beneath the base; a filesystem that cannot tell holes has none. A file of the base
//! that changed behind the sandbox is an error, as when it is read.
//!
//! The extents are looked at in windows, and few ranges are kept at a time: so memory does not grow with
//! the number of extents. A window doubles while it holds few extents, so a hole of terabytes costs some
//! steps.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::FsResult;
use crate::fs::merged::extent_reader::{FIRST_WINDOW, Piece};
use crate::fs::merged::lower::Lower;
use crate::fs::{Found, Fs, State};
use crate::types::{ByteRange, NodeId};

/// The longest range, in bytes, so that a caller can read one at once. No range crosses a multiple of it.
pub const STEP: u64 = 1 << 20;
/// With so many pieces in a window, the next window is shorter.
const MANY_PIECES: usize = 1024;
/// Ranges that are kept; then they are yielded before the search goes on.
const MOST_READY: usize = 4096;

/// Finds where the bytes of a range of a file are, cut at its size.
type Plan<'a> = Box<dyn Fn(ByteRange) -> FsResult<Vec<Piece>> + 'a>;

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

    fn next_data(&self, piece: &Piece, from: u64) -> FsResult<Option<ByteRange>> {
        piece.next_data(from, &self.lower)
    }
}

/// The ranges of a file that hold data, or those in which two files can differ: in order, and at most
/// [`STEP`] bytes each.
pub struct DataRanges<'a> {
    file: Side<'a>,
    /// The other file; none for holes alone.
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

    /// The ranges in `range` in which two files can differ. Behind the end of the shorter file is a hole.
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

    /// Looks at one window.
    fn look(&mut self) -> FsResult<()> {
        let _readings =
            (self.file.lower.reading(), self.other.as_ref().map(|other| other.lower.reading()));
        let window =
            ByteRange { start: self.at, end: self.at.saturating_add(self.window).min(self.end) };
        let ours = (self.file.plan)(window)?;
        let theirs = self.other.as_ref().map_or(Ok(Vec::new()), |other| (other.plan)(window))?;
        self.window = match ours.len() + theirs.len() > MANY_PIECES {
            true => (self.window / 2).max(STEP),
            false => self.window.saturating_mul(2),
        };
        let (mut ours, mut theirs) = (Parts::of(ours), Parts::of(theirs));
        while self.at < window.end && self.ready.len() < MOST_READY {
            let rest = window.end - self.at;
            let len = rest.min(ours.len()).min(theirs.len());
            self.look_at(&ours.take(len), &theirs.take(len))?;
        }
        Ok(())
    }

    /// Looks at what both files have at the present place: pieces of one length.
    fn look_at(&mut self, ours: &Piece, theirs: &Piece) -> FsResult<()> {
        let start = self.at;
        if ours.is_same_place(theirs)? {
            self.at = start + ours.len;
            return Ok(());
        }
        while self.ready.len() < MOST_READY {
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
}

impl Iterator for DataRanges<'_> {
    type Item = FsResult<ByteRange>;

    fn next(&mut self) -> Option<FsResult<ByteRange>> {
        while self.ready.is_empty() && self.at < self.end {
            if let Err(error) = self.look() {
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

/// Pieces that are taken in parts; behind the last one is a hole.
struct Parts {
    rest: VecDeque<Piece>,
}

impl Parts {
    fn of(pieces: Vec<Piece>) -> Parts {
        Parts { rest: pieces.into_iter().filter(|piece| piece.len > 0).collect() }
    }

    /// Bytes up to the end of the first piece.
    fn len(&self) -> u64 {
        self.rest.front().map_or(u64::MAX, |piece| piece.len)
    }

    /// Takes the next bytes, not more than [`Parts::len`].
    fn take(&mut self, len: u64) -> Piece {
        let Some(first) = self.rest.front_mut() else { return Piece::zeros(len) };
        let part = first.part(0, len);
        *first = first.part(len, u64::MAX);
        if first.len == 0 {
            self.rest.pop_front();
        }
        part
    }
}

impl Fs {
    /// The first data in a range of a file, and where the range ends, cut at the size of the file. The
    /// data is at most [`STEP`] bytes; none if the range is a hole.
    ///
    /// # Errors
    /// As [`Fs::read`].
    pub(in crate::fs) fn next_data(
        &self,
        id: NodeId,
        range: ByteRange,
    ) -> FsResult<(u64, Option<ByteRange>)> {
        if id.is_in_snapdir() {
            return self.past_data(id, range);
        }
        let (lower, size) = {
            let mut core = self.core();
            let target = core.content_target(id)?;
            (Arc::clone(&core.lower), core.attr_of(id, &target)?.size)
        };
        let plan: Plan<'_> = Box::new(|range| {
            let mut core = self.core();
            let target = core.content_target(id)?;
            core.plan_of(&target, range)
        });
        first_in(DataRanges::new(Side { plan, lower }, None, crate::tree::within(range, size)))
    }
}

/// The same of a file of a state.
pub(in crate::fs) fn next_data_in(
    state: &State,
    found: &Found,
    range: ByteRange,
) -> FsResult<(u64, Option<ByteRange>)> {
    let size = state.kind_and_size(found).map_or(0, |(_, size)| size);
    first_in(DataRanges::of(state, found, crate::tree::within(range, size)))
}

fn first_in(mut ranges: DataRanges<'_>) -> FsResult<(u64, Option<ByteRange>)> {
    let end = ranges.end;
    Ok((end, ranges.next().transpose()?))
}

impl State {
    /// The data of a file between its holes.
    pub fn data<'a>(&'a self, found: &'a Found) -> DataRanges<'a> {
        let size = self.kind_and_size(found).map_or(0, |(_, size)| size);
        DataRanges::of(self, found, ByteRange { start: 0, end: size })
    }
}
