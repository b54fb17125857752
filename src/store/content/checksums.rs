//! Checksums of the content of sealed pools: CRC-32C of every block of 4 KiB that takes space, in `layers/00000007/sums`.
//!
//! They are made once, after the seal, when nobody writes to the pool any more, and are held against the bytes at every
//! read. A block at the end of a pool counts with zeros behind it. A layer that has none yet (the head's upper layer, and one
//! that was sealed a moment ago) is read without.

use std::fs::File;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::content::pool::{BLOCK, block_ceil, block_floor};
use crate::store::content::remap::Map;
use crate::store::io::disk;
use crate::store::io::log;
use crate::sys::file::data_in;
use crate::types::ByteRange;

/// Blocks in one record.
const RUN: usize = 4096;
/// Bytes that are read at once; whole blocks.
const PIECE: u64 = 64 * BLOCK;

/// A record of `sums`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChecksumsRecord {
    /// Blocks that follow each other.
    Blocks {
        /// The number of the first: its address, divided by 4096.
        first: u64,
        /// The CRC-32C of each.
        sums: Vec<u32>,
    },
    /// The last record.
    End,
    /// A map said that the bytes of these addresses are elsewhere, in order: their blocks may have been given back.
    Elsewhere(Vec<ByteRange>),
}

/// The checksums of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checksums {
    /// Runs by their first block, in order.
    runs: Vec<(u64, Vec<u32>)>,
    /// Addresses whose bytes are elsewhere by a map, in order, and none next to another. Without that map they would be read as
    /// zeros.
    elsewhere: Vec<ByteRange>,
}

impl Checksums {
    /// Reads `ranges` of a pool and makes the checksums of their blocks. Bytes behind the end of the pool count as zeros.
    ///
    /// # Errors
    /// As pread(2).
    pub(in crate::store) fn of_pool(
        pool: &File,
        ranges: &[ByteRange],
    ) -> std::io::Result<Checksums> {
        let mut sums = Checksums::default();
        for range in ranges {
            let mut run: (u64, Vec<u32>) = (range.start / BLOCK, Vec::new());
            for_each_block(pool, *range, |at, sum| {
                if run.1.len() == RUN {
                    sums.runs.push(std::mem::replace(&mut run, (at / BLOCK, Vec::new())));
                }
                run.1.push(sum);
            })?;
            if !run.1.is_empty() {
                sums.runs.push(run);
            }
        }
        Ok(sums)
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|(_, sums)| sums.len()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The checksums of other blocks than those in `ranges`, which are in order.
    #[must_use]
    pub fn without(self, ranges: &[ByteRange]) -> Checksums {
        let mut runs = Vec::new();
        for (first, sums) in self.runs {
            let mut rest = sums.as_slice();
            let mut at = first;
            for range in ranges.iter().map(|r| (r.start / BLOCK, r.end.div_ceil(BLOCK))) {
                let len = rest.len() as u64;
                let (from, to) = (range.0.clamp(at, at + len), range.1.clamp(at, at + len));
                let (before, behind) =
                    rest.split_at(usize::try_from(from - at).unwrap_or(rest.len()));
                if !before.is_empty() && from < to {
                    runs.push((at, before.to_vec()));
                }
                if from < to {
                    rest =
                        behind.get(usize::try_from(to - from).unwrap_or(0)..).unwrap_or_default();
                    at = to;
                }
            }
            if !rest.is_empty() {
                runs.push((at, rest.to_vec()));
            }
        }
        Checksums { runs, elsewhere: self.elsewhere }
    }

    /// The same with what a map says to be elsewhere.
    #[must_use]
    pub(in crate::store) fn with_remap(mut self, map: &Map) -> Checksums {
        let ranges = map.runs().iter().map(|run| ByteRange { start: run.start, end: run.end });
        self.elsewhere.extend(ranges);
        self.elsewhere.sort_unstable_by_key(|range| range.start);
        self.elsewhere.dedup_by(|next, before| {
            let joins = next.start <= before.end;
            before.end = if joins { before.end.max(next.end) } else { before.end };
            joins
        });
        self
    }

    /// The same for a place where they never part from their map.
    #[must_use]
    pub(in crate::store) fn beside_map(self) -> Checksums {
        Checksums { elsewhere: Vec::new(), ..self }
    }

    /// The first block in a range of a pool that was given back because of a map, which is not there any more.
    fn given_back(&self, pool: &File, range: ByteRange) -> std::io::Result<Option<u64>> {
        let begin = self.elsewhere.partition_point(|known| known.end <= range.start);
        let known = self.elsewhere.get(begin..).unwrap_or_default().iter();
        for part in known.take_while(|known| known.start < range.end) {
            let mut at = block_floor(part.start.max(range.start));
            while at < part.end.min(range.end) {
                if self.of(at / BLOCK).is_none()
                    && data_in(pool, ByteRange::at(at, BLOCK))?.is_empty()
                {
                    return Ok(Some(at));
                }
                at += BLOCK;
            }
        }
        Ok(None)
    }

    /// The parts of a range, in whole blocks, of which there are checksums.
    fn known_in(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> + '_ {
        let (from, to) = (range.start / BLOCK, range.end.div_ceil(BLOCK));
        let begin = self.runs.partition_point(|(first, sums)| first + sums.len() as u64 <= from);
        let runs = self.runs.get(begin..).unwrap_or_default().iter();
        runs.take_while(move |(first, _)| *first < to).map(move |(first, sums)| {
            let end = first + sums.len() as u64;
            ByteRange { start: from.max(*first) * BLOCK, end: to.min(end) * BLOCK }
        })
    }

    /// Adds the checksums of the blocks from number `first` on, behind all others.
    pub fn push(&mut self, first: u64, sums: Vec<u32>) {
        self.runs.push((first, sums));
    }

    /// What is written of them.
    pub fn into_records(self) -> impl Iterator<Item = ChecksumsRecord> {
        let blocks =
            self.runs.into_iter().map(|(first, sums)| ChecksumsRecord::Blocks { first, sums });
        let elsewhere =
            (!self.elsewhere.is_empty()).then_some(ChecksumsRecord::Elsewhere(self.elsewhere));
        blocks.chain(elsewhere).chain([ChecksumsRecord::End])
    }

    fn of(&self, block: u64) -> Option<u32> {
        let at = self.runs.partition_point(|(first, _)| *first <= block).checked_sub(1)?;
        let (first, sums) = self.runs.get(at)?;
        sums.get(usize::try_from(block - first).ok()?).copied()
    }

    /// Holds the bytes that were read from `offset` of a pool on against their checksums. Gives the address of the first
    /// block that is not as it was written.
    ///
    /// # Errors
    /// As pread(2): of blocks that were read in part, the rest is read.
    pub fn check(&self, pool: &File, offset: u64, bytes: &[u8]) -> std::io::Result<Option<u64>> {
        let end = offset + bytes.len() as u64;
        let mut at = offset;
        while at < end {
            let block = block_floor(at);
            let next = (block + BLOCK).min(end);
            if let Some(wanted) = self.of(block / BLOCK) {
                let whole = (at == block && next == block + BLOCK)
                    .then(|| bytes.get((at - offset) as usize..(next - offset) as usize))
                    .flatten();
                let found = match whole {
                    Some(whole) => crc32c::crc32c(whole),
                    None => crc32c::crc32c(&read_block(pool, block)?),
                };
                if found != wanted {
                    return Ok(Some(block));
                }
            }
            at = next;
        }
        self.given_back(pool, ByteRange { start: offset, end })
    }
}

/// Gives address and checksum of each block that lies in a range, also in part. Read in large pieces: a call for each block
/// costs more than its checksum.
fn for_each_block(
    pool: &File,
    range: ByteRange,
    mut then: impl FnMut(u64, u32),
) -> std::io::Result<()> {
    let (mut at, end) = (block_floor(range.start), block_ceil(range.end));
    let mut piece = vec![0; end.saturating_sub(at).min(PIECE) as usize];
    while at < end {
        let len = (end - at).min(PIECE) as usize;
        let piece = piece.get_mut(..len).unwrap_or_default();
        let filled = disk::read_at(pool, piece, at)?;
        // Behind the end of a pool are zeros.
        piece.get_mut(filled..).unwrap_or_default().fill(0);
        for block in piece.chunks(BLOCK as usize) {
            then(at, crc32c::crc32c(block));
            at += BLOCK;
        }
    }
    Ok(())
}

/// A block of a pool, with zeros behind its end.
fn read_block(pool: &File, at: u64) -> std::io::Result<[u8; BLOCK as usize]> {
    let mut block = [0; BLOCK as usize];
    disk::read_at(pool, &mut block, at)?;
    Ok(block)
}

/// Reads checksums from the bytes of their file.
///
/// # Errors
/// Damage, with file and offset.
pub(in crate::store) fn parse(bytes: &[u8], what: &str) -> Result<Checksums> {
    let mut records: Vec<ChecksumsRecord> =
        log::read(bytes, what)?.records.into_iter().map(|(record, _)| record).collect();
    if records.pop() != Some(ChecksumsRecord::End) {
        return Err(Error::damage(
            format!("read {what} at offset {}", bytes.len()),
            "its end is missing",
        ));
    }
    let mut sums = Checksums::default();
    for record in records {
        match record {
            ChecksumsRecord::Blocks { first, sums: run } => sums.runs.push((first, run)),
            ChecksumsRecord::Elsewhere(ranges) => sums.elsewhere.extend(ranges),
            ChecksumsRecord::End => {
                return Err(Error::damage(format!("read {what}"), "it ends twice"));
            }
        }
    }
    Ok(sums)
}

/// The blocks of `ranges` of a pool that are not as they were written.
///
/// # Errors
/// As pread(2).
pub(in crate::store) fn damaged(
    pool: &File,
    sums: &Checksums,
    ranges: &[ByteRange],
) -> std::io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for part in ranges.iter().flat_map(|range| sums.known_in(*range)) {
        for_each_block(pool, part, |at, sum| {
            if sums.of(at / BLOCK).is_some_and(|wanted| wanted != sum) {
                found.push(at);
            }
        })?;
    }
    for range in ranges {
        found.extend(sums.given_back(pool, *range)?);
    }
    found.dedup();
    Ok(found)
}

/// Bytes in `ranges` of a pool that take space and have no checksums.
///
/// # Errors
/// As lseek(2).
pub(in crate::store) fn unknown(
    pool: &File,
    sums: &Checksums,
    ranges: &[ByteRange],
) -> std::io::Result<u64> {
    let mut unknown = 0;
    for range in ranges {
        let mut at = range.start;
        let end = ByteRange { start: range.end, end: range.end };
        for known in sums.known_in(*range).chain([end]) {
            let data = data_in(pool, ByteRange { start: at, end: known.start })?;
            unknown += data.iter().map(|range| range.len()).sum::<u64>();
            at = at.max(known.end);
        }
    }
    Ok(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::content::remap::Run;
    use crate::types::LayerId;
    use std::os::unix::fs::FileExt;

    #[test]
    fn blocks_that_were_given_up_have_no_checksums() {
        let sums = || Checksums {
            runs: vec![(2, vec![2, 3, 4, 5]), (6, vec![6]), (9, vec![9, 10])],
            ..Checksums::default()
        };
        let blocks = |start: u64, end: u64| ByteRange { start: start * BLOCK, end: end * BLOCK };
        let left = |ranges: &[ByteRange]| -> Vec<u64> {
            let left = sums().without(ranges);
            (0..20).filter(|block| left.of(*block) == Some(*block as u32)).collect()
        };
        assert_eq!(left(&[]), [2, 3, 4, 5, 6, 9, 10]);
        assert_eq!(left(&[blocks(0, 2), blocks(7, 9), blocks(11, 20)]), [2, 3, 4, 5, 6, 9, 10]);
        assert_eq!(left(&[blocks(3, 4), blocks(5, 10)]), [2, 4, 10]);
        assert_eq!(left(&[blocks(0, 20)]), [0; 0]);
    }

    #[test]
    fn blocks_that_are_read_together_have_the_checksums_that_each_has_alone() {
        let pool = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..3 * PIECE + 5000).map(|n| (n % 253) as u8).collect();
        pool.write_all_at(&bytes, 0).unwrap();
        for (start, end) in
            [(0, bytes.len() as u64), (4097, PIECE + 1), (3 * PIECE, 4 * PIECE), (8192, 8192)]
        {
            let mut found = Vec::new();
            for_each_block(&pool, ByteRange { start, end }, |at, sum| found.push((at, sum)))
                .unwrap();
            let alone = (block_floor(start)..end).step_by(BLOCK as usize);
            let alone = alone.map(|at| (at, crc32c::crc32c(&read_block(&pool, at).unwrap())));
            assert_eq!(found, alone.collect::<Vec<_>>(), "{start}..{end}");
        }
    }

    #[test]
    fn what_takes_space_and_has_no_checksum_is_counted() {
        let pool = tempfile::tempfile().unwrap();
        let blocks = |start: u64, end: u64| ByteRange { start: start * BLOCK, end: end * BLOCK };
        // A hole from block 16 on, and bytes behind it.
        pool.write_all_at(&[7; 16 * BLOCK as usize], 0).unwrap();
        pool.write_all_at(&[7; 4 * BLOCK as usize], 64 * BLOCK).unwrap();
        let runs = vec![(2, vec![0; 4]), (8, vec![0; 2]), (65, vec![0; 8])];
        let sums = Checksums { runs, ..Checksums::default() };
        let count = |ranges: &[ByteRange]| unknown(&pool, &sums, ranges).unwrap();
        assert_eq!(count(&[blocks(2, 6), blocks(8, 10), blocks(65, 68)]), 0);
        assert_eq!(count(&[blocks(0, 80)]), (2 + 2 + 6 + 1) * BLOCK);
        assert_eq!(count(&[blocks(20, 40)]), 0, "it is a hole");
        let part = ByteRange { start: BLOCK + 100, end: 2 * BLOCK + 5 };
        assert_eq!(count(&[part, blocks(6, 7)]), BLOCK - 100 + BLOCK);
    }

    /// The map that said where the bytes are is missing, or an older copy.
    #[test]
    fn what_was_given_back_because_of_a_map_is_never_read_as_zeros() {
        let pool = tempfile::tempfile().unwrap();
        pool.set_len(8 * BLOCK).unwrap();
        pool.write_all_at(&[7; BLOCK as usize], BLOCK).unwrap();
        let mut map = Map::default();
        // The first block is a hole, and the second one was not given back yet.
        for (start, end) in [(0, 100), (BLOCK, BLOCK + 100), (4 * BLOCK + 10, 5 * BLOCK)] {
            map.push(Run { start, end, layer: LayerId(9), offset: start });
        }
        let sums = Checksums::default().with_remap(&map);
        let read = |start: u64, len: usize| sums.check(&pool, start, &vec![0; len]).unwrap();
        assert_eq!(read(50, 10), Some(0));
        assert_eq!(read(100, 10), None, "what is beside it in a block was zero before");
        assert_eq!(read(BLOCK, 10), None);
        assert_eq!((read(BLOCK, 4 * BLOCK as usize), read(4 * BLOCK, 10)), (Some(4 * BLOCK), None));
        let bytes = log::frames(sums.into_records()).unwrap();
        let again = parse(&bytes, "sums").unwrap();
        let ranges = [ByteRange { start: 0, end: 8 * BLOCK }];
        assert_eq!(damaged(&pool, &again, &ranges).unwrap(), [0]);
        assert!(damaged(&pool, &again.beside_map(), &ranges).unwrap().is_empty());
    }

    #[test]
    fn a_flipped_bit_is_found_wherever_a_read_begins_and_ends() {
        let pool = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..10_000u32).map(|n| (n % 251) as u8).collect();
        pool.write_all_at(&bytes, 8192).unwrap();
        let run = (2..5)
            .map(|block| crc32c::crc32c(&read_block(&pool, block * BLOCK).unwrap()))
            .collect();
        let sums = Checksums { runs: vec![(2, run)], ..Checksums::default() };
        let read = |from: usize, to: usize| {
            let mut part = vec![0; to - from];
            pool.read_exact_at(&mut part, 8192 + from as u64).unwrap();
            sums.check(&pool, 8192 + from as u64, &part).unwrap()
        };
        assert_eq!((read(0, 10_000), read(5, 9), read(4000, 4100)), (None, None, None));
        pool.write_all_at(&[bytes[5000] ^ 1], 8192 + 5000).unwrap();
        assert_eq!((read(0, 10_000), read(4990, 5010)), (Some(12_288), Some(12_288)));
        assert_eq!(read(0, 4096), None, "other blocks are as they were");
        assert_eq!(read(4096, 4097), Some(12_288), "a byte is as good as its block");
        let found = |start, end| damaged(&pool, &sums, &[ByteRange { start, end }]).unwrap();
        assert_eq!((found(0, 1 << 40), found(12_300, 12_301)), (vec![12_288], vec![12_288]));
        assert_eq!(
            (found(0, 12_288), found(16_384, 1 << 40), found(12_288, 12_288)),
            (vec![], vec![], vec![])
        );
    }
}
