//! Where the content of a sealed pool is, as far as it is not in the pool itself: `layers/00000007/map`.
//!
//! Extents hold addresses of a pool and never change; the same extent stands in many states. When content turns out to be
//! equal to older content, the map of its layer says where that is, and the blocks in the layer's own pool are given back.
//!
//! Always true:
//! * a map leads to where bytes are, never to a range that is itself mapped away: one step from an address to a disk;
//! * the bytes that it leads to are those that were at the address, so whoever reads finds the same before and after;
//! * blocks that a map gives up are punched only after it is on the disk, and when nobody reads by the one before.
//!
//! What is not in the map is at home: at the same offset of the layer's own pool.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::content::pool::{block_ceil, block_floor};
use crate::store::io::log;
use crate::types::{ByteRange, LayerId};

/// Runs in one record.
const RUNS: usize = 4096;

/// A record of `map`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemapRecord {
    /// Runs, in order of their addresses.
    Runs(Vec<PackedRun>),
    /// The last record.
    End,
}

/// A run as it is written: what is likely to be small is what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedRun {
    /// Bytes from the end of the run before (of the first one, from 0) to its first.
    pub gap: u64,
    /// Bytes of the run.
    pub len: u64,
    /// In whose pool it is.
    pub layer: LayerId,
    /// Its offset there, less its own address.
    pub shift: i64,
}

/// A range of a pool's addresses whose bytes are elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// In whose pool the bytes are.
    pub layer: LayerId,
    /// Where in that pool the first one is.
    pub offset: u64,
}

impl Run {
    /// Where its bytes are.
    pub fn home(&self) -> ByteRange {
        ByteRange::at(self.offset, self.end - self.start)
    }
}

/// Where a run of bytes is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In whose pool.
    pub layer: LayerId,
    /// From which offset on.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What of a pool is elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Map {
    /// In order, none empty, none overlapping another.
    runs: Vec<Run>,
}

impl Map {
    /// Adds a run behind all others; it becomes part of the last one where it continues that.
    pub fn push(&mut self, run: Run) {
        if let Some(last) = self.runs.last_mut()
            && last.end == run.start
            && last.layer == run.layer
            && last.home().end == run.offset
        {
            last.end = run.end;
            return;
        }
        debug_assert!(
            run.start < run.end && self.runs.last().is_none_or(|last| last.end <= run.start)
        );
        self.runs.push(run);
    }

    /// The runs, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Bytes that are elsewhere.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// The blocks of the layer's own pool that hold nothing any more: what is in them and not in the map are zeros.
    pub fn given_up(&self) -> Vec<ByteRange> {
        let mut ranges: Vec<ByteRange> = Vec::new();
        for run in &self.runs {
            let range = ByteRange { start: block_floor(run.start), end: block_ceil(run.end) };
            match ranges.last_mut() {
                Some(last) if last.end >= range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        ranges
    }

    /// Where a range of addresses of the pool of `own` is, in order and without gaps.
    pub fn places(&self, own: LayerId, range: ByteRange) -> Vec<Place> {
        let mut places = Vec::new();
        let mut at = range.start;
        let home = |from: u64, to: u64| Place { layer: own, offset: from, len: to - from };
        let first = self.runs.partition_point(|run| run.end <= range.start);
        for run in self.runs.iter().skip(first).take_while(|run| run.start < range.end) {
            if run.start > at {
                places.push(home(at, run.start));
                at = run.start;
            }
            let end = run.end.min(range.end);
            places.push(Place {
                layer: run.layer,
                offset: run.offset + (at - run.start),
                len: end - at,
            });
            at = end;
        }
        if at < range.end {
            places.push(home(at, range.end));
        }
        places
    }

    /// The part of it that speaks of blocks in which one of `ranges` has a byte; they are in order and do not overlap. In whole
    /// blocks: what is left is about as long as what is needed.
    pub fn only(&self, ranges: &[ByteRange]) -> Map {
        let mut rest = Map::default();
        let mut ranges = ranges.iter().peekable();
        for run in &self.runs {
            while ranges.next_if(|range| block_ceil(range.end) <= run.start).is_some() {}
            let mut of_run = ranges.clone().take_while(|range| block_floor(range.start) < run.end);
            // From the first to the last that is needed: a run is never cut into many.
            let Some(first) = of_run.next().copied() else { continue };
            let last = of_run.last().copied().unwrap_or(first);
            let start = block_floor(first.start).max(run.start);
            let end = block_ceil(last.end).min(run.end);
            rest.push(Run { start, end, offset: run.offset + (start - run.start), ..*run });
        }
        rest
    }

    fn pack(&self) -> Vec<PackedRun> {
        let mut before = 0;
        let pack = |run: &Run| {
            let gap = run.start - before;
            before = run.end;
            let shift = run.offset.wrapping_sub(run.start).cast_signed();
            PackedRun { gap, len: run.end - run.start, layer: run.layer, shift }
        };
        self.runs.iter().map(pack).collect()
    }

    /// What is written of it.
    pub(in crate::store) fn records(&self) -> impl Iterator<Item = RemapRecord> + use<> {
        let packed = self.pack();
        let runs: Vec<RemapRecord> =
            packed.chunks(RUNS).map(|runs| RemapRecord::Runs(runs.to_vec())).collect();
        runs.into_iter().chain([RemapRecord::End])
    }

    /// Adds a run that was read; none if it cannot be one.
    fn unpack(&mut self, run: &PackedRun) -> Option<()> {
        let before = self.runs.last().map_or(0, |run| run.end);
        let start = before.checked_add(run.gap)?;
        let end = start.checked_add(run.len).filter(|end| *end > start)?;
        let offset = start.checked_add_signed(run.shift)?;
        offset.checked_add(run.len)?;
        (run.layer != LayerId(0))
            .then(|| self.runs.push(Run { start, end, layer: run.layer, offset }))
    }
}

/// Reads a map from the bytes of its file.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn parse(bytes: &[u8], what: &str) -> Result<Map> {
    let contents = log::read::<RemapRecord>(bytes, what)?;
    let mut records = contents.records;
    if contents.torn > 0 || records.pop().map(|(record, _)| record) != Some(RemapRecord::End) {
        let at = contents.end;
        return Err(Error::damage(format!("read {what} at offset {at}"), "its end is missing"));
    }
    let mut map = Map::default();
    for (record, end) in &records {
        let bad =
            || Error::damage(format!("read {what} before offset {end}"), "not a run of a map");
        let RemapRecord::Runs(runs) = record else { return Err(bad()) };
        runs.iter().try_for_each(|run| map.unpack(run)).ok_or_else(bad)?;
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, end: u64, layer: u32, offset: u64) -> Run {
        Run { start, end, layer: LayerId(layer), offset }
    }

    fn map() -> Map {
        let mut map = Map::default();
        map.push(run(4096, 8192, 3, 77));
        map.push(run(8192, 12_288, 3, 77 + 4096));
        map.push(run(12_288, 13_000, 2, 0));
        map.push(run(20_480, 24_576, 3, 20_480));
        map
    }

    #[test]
    fn every_address_is_in_one_place() {
        let map = map();
        assert_eq!(map.runs().len(), 3, "what continues a run is part of it");
        let place = |layer, offset, len| Place { layer: LayerId(layer), offset, len };
        assert_eq!(map.places(LayerId(9), ByteRange { start: 0, end: 4096 }), [place(9, 0, 4096)]);
        assert_eq!(
            map.places(LayerId(9), ByteRange { start: 4000, end: 30_000 }),
            [
                place(9, 4000, 96),
                place(3, 77, 8192),
                place(2, 0, 712),
                place(9, 13_000, 7480),
                place(3, 20_480, 4096),
                place(9, 24_576, 5424)
            ]
        );
        assert_eq!(
            map.places(LayerId(9), ByteRange { start: 5000, end: 5001 }),
            [place(3, 981, 1)]
        );
        let blocks = |start: u64, end: u64| ByteRange { start: start * 4096, end: end * 4096 };
        assert_eq!(map.given_up(), [blocks(1, 4), blocks(5, 6)]);
    }

    #[test]
    fn what_is_not_needed_is_left_out() {
        let range = |start, end| ByteRange { start, end };
        let only = map().only(&[
            range(0, 100),
            range(9000, 9001),
            range(12_300, 12_301),
            range(30_000, 40_000),
        ]);
        assert_eq!(only.runs(), [run(8192, 12_288, 3, 77 + 4096), run(12_288, 13_000, 2, 0)]);
        assert_eq!(map().only(&[range(0, u64::MAX)]), map());
        assert!(map().only(&[]).runs().is_empty());
    }

    #[test]
    fn a_map_is_read_as_it_was_written() {
        let mut read = Map::default();
        map().pack().iter().try_for_each(|run| read.unpack(run)).unwrap();
        assert_eq!(read, map());
        for wrong in [
            PackedRun { gap: 0, len: 0, layer: LayerId(1), shift: 0 },
            PackedRun { gap: 0, len: 1, layer: LayerId(0), shift: 0 },
            PackedRun { gap: 5, len: 1, layer: LayerId(1), shift: -6 },
            PackedRun { gap: u64::MAX, len: 1, layer: LayerId(1), shift: 0 },
            PackedRun { gap: 1, len: u64::MAX, layer: LayerId(1), shift: 0 },
        ] {
            assert_eq!(Map::default().unpack(&wrong), None, "{wrong:?}");
        }
    }
}
