//! The ranges of a pool that were written and may not survive a power cut.
//!
//! Always true: a range that was written is in the list until a sync that began after the write has
//! ended. So a sync that fails, or that the caller gives up, loses no range.

use std::collections::BTreeMap;

use crate::types::ByteRange;

/// A longer list is not kept: the whole pool then counts as not synced.
pub(in crate::store) const MOST_RANGES: usize = 64;
/// Nor is a list of more bytes.
pub(in crate::store) const MOST_BYTES: u64 = 64 << 10;

/// The ranges of a pool that are not known to be synced.
#[derive(Debug, Default)]
pub struct UnsyncedRanges {
    /// Those that the current sync covers.
    covered: RangeList,
    /// Those that were written since it began.
    since: RangeList,
}

impl UnsyncedRanges {
    /// The ranges of a pool that another process may have written to: any.
    pub fn unknown() -> UnsyncedRanges {
        let all = RangeList { is_long: true, ..RangeList::default() };
        UnsyncedRanges { covered: all, since: RangeList::default() }
    }

    /// Notes that a range is written.
    pub fn note(&mut self, range: ByteRange) {
        self.since.add(range);
    }

    /// Begins a sync of all ranges. Returns them; `None` if they are many, or not known.
    pub fn begin_sync(&mut self) -> Option<Vec<ByteRange>> {
        self.covered.add_all(std::mem::take(&mut self.since));
        self.covered.all()
    }

    /// Notes that the sync has ended, and that all ranges that it covers survive a power cut.
    pub fn synced(&mut self) {
        self.covered = RangeList::default();
    }
}

/// Ranges that neither overlap nor touch: the end of each by its start.
#[derive(Debug, Default)]
struct RangeList {
    ends: BTreeMap<u64, u64>,
    bytes: u64,
    /// Whether the list is not kept, because it is too long.
    is_long: bool,
}

impl RangeList {
    fn add(&mut self, mut range: ByteRange) {
        if self.is_long || range.is_empty() {
            return;
        }
        while let Some((start, end)) = self.last_before(range.end).filter(|r| r.1 >= range.start) {
            self.ends.remove(&start);
            self.bytes -= end - start;
            range = ByteRange { start: range.start.min(start), end: range.end.max(end) };
        }
        self.ends.insert(range.start, range.end);
        self.bytes += range.len();
        if self.bytes > MOST_BYTES || self.ends.len() > MOST_RANGES {
            *self = RangeList { is_long: true, ..RangeList::default() };
        }
    }

    /// The last range that begins at `end` or before.
    fn last_before(&self, end: u64) -> Option<(u64, u64)> {
        self.ends.range(..=end).next_back().map(|(start, end)| (*start, *end))
    }

    fn add_all(&mut self, other: RangeList) {
        if other.is_long {
            *self = other;
            return;
        }
        other.ends.into_iter().for_each(|(start, end)| self.add(ByteRange { start, end }));
    }

    fn all(&self) -> Option<Vec<ByteRange>> {
        let ranges = self.ends.iter().map(|(&start, &end)| ByteRange { start, end });
        (!self.is_long).then(|| ranges.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange { start, end }
    }

    #[test]
    fn ranges_that_overlap_or_touch_are_one() {
        let mut ranges = UnsyncedRanges::default();
        for (start, end) in [(10, 20), (40, 50), (20, 25), (5, 10), (30, 41), (60, 60), (12, 14)] {
            ranges.note(range(start, end));
        }
        assert_eq!(ranges.begin_sync(), Some(vec![range(5, 25), range(30, 50)]));
        ranges.note(range(0, 100));
        assert_eq!(ranges.begin_sync(), Some(vec![range(0, 100)]));
    }

    #[test]
    fn a_sync_covers_what_was_written_before_it_began() {
        let mut ranges = UnsyncedRanges::default();
        ranges.note(range(0, 10));
        assert_eq!(ranges.begin_sync(), Some(vec![range(0, 10)]));
        ranges.note(range(5, 15));
        ranges.synced();
        assert_eq!(ranges.begin_sync(), Some(vec![range(5, 15)]), "it was written again");
        ranges.note(range(30, 40));
        let both = vec![range(5, 15), range(30, 40)];
        assert_eq!(ranges.begin_sync(), Some(both), "the last sync did not end");
        ranges.synced();
        assert_eq!(ranges.begin_sync(), Some(Vec::new()));
    }

    #[test]
    fn many_ranges_or_bytes_are_not_listed_until_the_pool_is_synced() {
        let many = (0..=MOST_RANGES as u64).map(|at| range(at * 10, at * 10 + 1)).collect();
        let long = vec![range(0, MOST_BYTES), range(MOST_BYTES, MOST_BYTES + 1)];
        for written in [many, long] {
            let (last, most): (&ByteRange, &[ByteRange]) = written.split_last().unwrap();
            let mut ranges = UnsyncedRanges::default();
            most.iter().for_each(|range| ranges.note(*range));
            assert!(ranges.begin_sync().is_some());
            ranges.note(*last);
            assert_eq!(ranges.begin_sync(), None);
            ranges.note(range(0, 1));
            assert_eq!(ranges.begin_sync(), None);
            ranges.synced();
            assert_eq!(ranges.begin_sync(), Some(Vec::new()));
        }
        assert_eq!(UnsyncedRanges::unknown().begin_sync(), None);
    }
}
