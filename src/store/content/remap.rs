//! The remap of a sealed layer: which of its addresses are stored in other pools, in
//! `layers/00000007/map`.
//!
//! Extents hold addresses and never change, and the same extent is part of many states. When
//! content turns out to equal older content, the remap of its layer points there, and the blocks in
//! the layer's own pool are punched.
//!
//! * A remap points to stored bytes, never to addresses that are themselves remapped. So a read
//!   takes one translation.
//! * The bytes at the target equal those that were at the address. A reader sees the same bytes
//!   before and after the remap is published.
//! * Blocks that a remap frees are punched only after the remap is on disk and after every reader
//!   that may use an earlier one is done.
//! * An address that is not remapped is stored at the same offset of the layer's own pool.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::content::pool::{block_ceil, block_floor};
use crate::store::io::log;
use crate::types::{ByteRange, LayerId};

/// Most runs in one record.
const RUNS: usize = 4096;

/// A record of `map`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemapRecord {
    /// Runs, in order of their addresses.
    Runs(Vec<PackedRun>),
    /// The last record.
    End,
}

/// A run as it is written: differences, because small numbers take fewer bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedRun {
    /// Bytes from the end of the run before, or from address 0, to the start of this one.
    pub gap: u64,
    /// Length in bytes.
    pub len: u64,
    /// The layer whose pool holds the bytes.
    pub layer: LayerId,
    /// The offset in that pool minus the address.
    pub shift: i64,
}

/// A range of addresses whose bytes are stored in another pool, or elsewhere in the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first address.
    pub start: u64,
    /// The address after the last one.
    pub end: u64,
    /// The layer whose pool holds the bytes.
    pub layer: LayerId,
    /// The offset of the first byte in that pool.
    pub offset: u64,
}

impl Run {
    /// The range of the pool that holds the bytes.
    pub fn target(&self) -> ByteRange {
        ByteRange::at(self.offset, self.end - self.start)
    }
}

/// A range of the pool of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolRange {
    /// The layer of the pool.
    pub layer: LayerId,
    /// The offset in the pool.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Which addresses of a layer are stored in other pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remap {
    /// Sorted; none is empty and none overlap.
    runs: Vec<Run>,
}

impl Remap {
    /// Appends a run after all others. Merges it with the last one if it continues that.
    pub fn push(&mut self, run: Run) {
        if let Some(last) = self.runs.last_mut()
            && last.end == run.start
            && last.layer == run.layer
            && last.target().end == run.offset
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

    /// How many bytes are remapped.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// The blocks of the layer's own pool that are no longer needed. Bytes of these blocks that are
    /// not remapped are zeros.
    pub fn freed_blocks(&self) -> Vec<ByteRange> {
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

    /// Translates a range of addresses of the layer `own` into ranges of pools, in order and
    /// without gaps.
    pub fn locate(&self, own: LayerId, range: ByteRange) -> Vec<PoolRange> {
        let mut located = Vec::new();
        let mut at = range.start;
        let in_own = |from: u64, to: u64| PoolRange { layer: own, offset: from, len: to - from };
        let first = self.runs.partition_point(|run| run.end <= range.start);
        for run in self.runs.iter().skip(first).take_while(|run| run.start < range.end) {
            if run.start > at {
                located.push(in_own(at, run.start));
                at = run.start;
            }
            let end = run.end.min(range.end);
            located.push(PoolRange {
                layer: run.layer,
                offset: run.offset + (at - run.start),
                len: end - at,
            });
            at = end;
        }
        if at < range.end {
            located.push(in_own(at, range.end));
        }
        located
    }

    /// Drops the parts that no block with a byte in `ranges` needs. `ranges` is sorted and does not
    /// overlap. Of each run, one contiguous part stays, from the first needed block to the last: a
    /// run that was cut into many would make the file larger.
    pub fn restricted_to(&self, ranges: &[ByteRange]) -> Remap {
        let mut rest = Remap::default();
        let mut ranges = ranges.iter().peekable();
        for run in &self.runs {
            while ranges.next_if(|range| block_ceil(range.end) <= run.start).is_some() {}
            let mut of_run = ranges.clone().take_while(|range| block_floor(range.start) < run.end);
            let Some(first) = of_run.next().copied() else { continue };
            let last = of_run.last().copied().unwrap_or(first);
            let start = block_floor(first.start).max(run.start);
            let end = block_ceil(last.end).min(run.end);
            rest.push(Run { start, end, offset: run.offset + (start - run.start), ..*run });
        }
        rest
    }

    fn packed_runs(&self) -> Vec<PackedRun> {
        let mut before = 0;
        let pack = |run: &Run| {
            let gap = run.start - before;
            before = run.end;
            let shift = run.offset.wrapping_sub(run.start).cast_signed();
            PackedRun { gap, len: run.end - run.start, layer: run.layer, shift }
        };
        self.runs.iter().map(pack).collect()
    }

    /// The records of the file.
    pub(in crate::store) fn records(&self) -> impl Iterator<Item = RemapRecord> + use<> {
        let packed = self.packed_runs();
        let runs: Vec<RemapRecord> =
            packed.chunks(RUNS).map(|runs| RemapRecord::Runs(runs.to_vec())).collect();
        runs.into_iter().chain([RemapRecord::End])
    }

    /// Appends a run that was read from disk. `None` if it is not valid after those before.
    fn push_packed(&mut self, run: &PackedRun) -> Option<()> {
        let before = self.runs.last().map_or(0, |run| run.end);
        let start = before.checked_add(run.gap)?;
        let end = start.checked_add(run.len).filter(|end| *end > start)?;
        let offset = start.checked_add_signed(run.shift)?;
        offset.checked_add(run.len)?;
        (run.layer != LayerId(0))
            .then(|| self.runs.push(Run { start, end, layer: run.layer, offset }))
    }
}

/// Parses the bytes of a remap file. `what` names the file in errors.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn parse(bytes: &[u8], what: &str) -> Result<Remap> {
    let contents = log::read::<RemapRecord>(bytes, what)?;
    let mut records = contents.records;
    if contents.torn > 0 || records.pop().map(|(record, _)| record) != Some(RemapRecord::End) {
        let at = contents.end;
        return Err(Error::damage(format!("read {what} at offset {at}"), "its end is missing"));
    }
    let mut remap = Remap::default();
    for (record, end) in &records {
        let bad = || Error::damage(format!("read {what} before offset {end}"), "not a valid run");
        let RemapRecord::Runs(runs) = record else { return Err(bad()) };
        runs.iter().try_for_each(|run| remap.push_packed(run)).ok_or_else(bad)?;
    }
    Ok(remap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, end: u64, layer: u32, offset: u64) -> Run {
        Run { start, end, layer: LayerId(layer), offset }
    }

    fn remap() -> Remap {
        let mut remap = Remap::default();
        remap.push(run(4096, 8192, 3, 77));
        remap.push(run(8192, 12_288, 3, 77 + 4096));
        remap.push(run(12_288, 13_000, 2, 0));
        remap.push(run(20_480, 24_576, 3, 20_480));
        remap
    }

    #[test]
    fn every_address_is_located_exactly_once() {
        let remap = remap();
        assert_eq!(remap.runs().len(), 3, "a run that continues another is merged");
        let in_pool = |layer, offset, len| PoolRange { layer: LayerId(layer), offset, len };
        assert_eq!(
            remap.locate(LayerId(9), ByteRange { start: 0, end: 4096 }),
            [in_pool(9, 0, 4096)]
        );
        assert_eq!(
            remap.locate(LayerId(9), ByteRange { start: 4000, end: 30_000 }),
            [
                in_pool(9, 4000, 96),
                in_pool(3, 77, 8192),
                in_pool(2, 0, 712),
                in_pool(9, 13_000, 7480),
                in_pool(3, 20_480, 4096),
                in_pool(9, 24_576, 5424)
            ]
        );
        assert_eq!(
            remap.locate(LayerId(9), ByteRange { start: 5000, end: 5001 }),
            [in_pool(3, 981, 1)]
        );
        let blocks = |start: u64, end: u64| ByteRange { start: start * 4096, end: end * 4096 };
        assert_eq!(remap.freed_blocks(), [blocks(1, 4), blocks(5, 6)]);
    }

    #[test]
    fn a_restricted_remap_drops_what_no_range_needs() {
        let range = |start, end| ByteRange { start, end };
        let rest = remap().restricted_to(&[
            range(0, 100),
            range(9000, 9001),
            range(12_300, 12_301),
            range(30_000, 40_000),
        ]);
        assert_eq!(rest.runs(), [run(8192, 12_288, 3, 77 + 4096), run(12_288, 13_000, 2, 0)]);
        assert_eq!(remap().restricted_to(&[range(0, u64::MAX)]), remap());
        assert!(remap().restricted_to(&[]).runs().is_empty());
    }

    #[test]
    fn a_remap_is_read_back_as_it_was_written() {
        let mut read = Remap::default();
        remap().packed_runs().iter().try_for_each(|run| read.push_packed(run)).unwrap();
        assert_eq!(read, remap());
        for wrong in [
            PackedRun { gap: 0, len: 0, layer: LayerId(1), shift: 0 },
            PackedRun { gap: 0, len: 1, layer: LayerId(0), shift: 0 },
            PackedRun { gap: 5, len: 1, layer: LayerId(1), shift: -6 },
            PackedRun { gap: u64::MAX, len: 1, layer: LayerId(1), shift: 0 },
            PackedRun { gap: 1, len: u64::MAX, layer: LayerId(1), shift: 0 },
        ] {
            assert_eq!(Remap::default().push_packed(&wrong), None, "{wrong:?}");
        }
    }
}
