//! Checksums of sealed pools: the CRC-32C of each 4 KiB block that takes space, in
//! `layers/00000007/sums`.
//!
//! * Checksums are computed once, after the seal, when the pool is no longer written. Each read is
//!   verified against them.
//! * A block at the end of a pool counts as padded with zeros.
//! * The upper layer and a layer that was just sealed have no checksums yet and are read without.
//! * The file also lists the remapped addresses, whose blocks may be punched. If the remap is lost
//!   or an older copy of it comes back, reading such a block is an error rather than zeros.

use std::fs::File;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::content::pool::{BLOCK, block_ceil, block_floor};
use crate::store::content::remap::Remap;
use crate::store::io::disk;
use crate::store::io::log;
use crate::sys::file::data_in;
use crate::types::ByteRange;

/// Most blocks in one record.
const RUN: usize = 4096;
/// Bytes per pread(2); a multiple of the block size.
const READ_LEN: u64 = 64 * BLOCK;

/// A record of `sums`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChecksumsRecord {
    /// Consecutive blocks.
    Blocks {
        /// The number of the first block: its address divided by 4096.
        first: u64,
        /// The CRC-32C of each block.
        sums: Vec<u32>,
    },
    /// The last record.
    End,
    /// Addresses that are remapped, in order: their blocks may have been punched.
    Remapped(Vec<ByteRange>),
}

/// The checksums of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checksums {
    /// Runs of consecutive blocks, in order: the number of the first block, and the checksums.
    runs: Vec<(u64, Vec<u32>)>,
    /// Remapped addresses, sorted and merged.
    remapped: Vec<ByteRange>,
}

impl Checksums {
    /// Computes the checksums of the blocks in `ranges` of a pool. Bytes behind the end of the pool
    /// count as zeros.
    ///
    /// # Errors
    /// As pread(2).
    pub(in crate::store) fn of_pool(
        pool: &File,
        ranges: &[ByteRange],
    ) -> std::io::Result<Checksums> {
        let mut checksums = Checksums::default();
        for range in ranges {
            let mut run: (u64, Vec<u32>) = (range.start / BLOCK, Vec::new());
            for_each_block(pool, *range, |at, sum| {
                if run.1.len() == RUN {
                    checksums.runs.push(std::mem::replace(&mut run, (at / BLOCK, Vec::new())));
                }
                run.1.push(sum);
            })?;
            if !run.1.is_empty() {
                checksums.runs.push(run);
            }
        }
        Ok(checksums)
    }

    /// The number of blocks that have a checksum.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|(_, sums)| sums.len()).sum()
    }

    /// Whether no block has a checksum.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Removes the checksums of the blocks in `ranges`, which are sorted.
    #[must_use]
    pub fn without_blocks(self, ranges: &[ByteRange]) -> Checksums {
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
        Checksums { runs, remapped: self.remapped }
    }

    /// Adds the addresses of a remap to the list of remapped addresses.
    #[must_use]
    pub(in crate::store) fn with_remapped(mut self, remap: &Remap) -> Checksums {
        let ranges = remap.runs().iter().map(|run| ByteRange { start: run.start, end: run.end });
        self.remapped.extend(ranges);
        self.remapped.sort_unstable_by_key(|range| range.start);
        self.remapped.dedup_by(|next, before| {
            let joins = next.start <= before.end;
            before.end = if joins { before.end.max(next.end) } else { before.end };
            joins
        });
        self
    }

    /// The first block in a range that was remapped and is punched. A caller that reads it from
    /// this pool has lost the remap.
    fn first_punched(&self, pool: &File, range: ByteRange) -> std::io::Result<Option<u64>> {
        let begin = self.remapped.partition_point(|known| known.end <= range.start);
        let known = self.remapped.get(begin..).unwrap_or_default().iter();
        for part in known.take_while(|known| known.start < range.end) {
            let mut at = block_floor(part.start.max(range.start));
            while at < part.end.min(range.end) {
                if self.get(at / BLOCK).is_none()
                    && data_in(pool, ByteRange::at(at, BLOCK))?.is_empty()
                {
                    return Ok(Some(at));
                }
                at += BLOCK;
            }
        }
        Ok(None)
    }

    /// The parts of a range, extended to whole blocks, that have checksums.
    fn covered(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> + '_ {
        let (from, to) = (range.start / BLOCK, range.end.div_ceil(BLOCK));
        let begin = self.runs.partition_point(|(first, sums)| first + sums.len() as u64 <= from);
        let runs = self.runs.get(begin..).unwrap_or_default().iter();
        runs.take_while(move |(first, _)| *first < to).map(move |(first, sums)| {
            let end = first + sums.len() as u64;
            ByteRange { start: from.max(*first) * BLOCK, end: to.min(end) * BLOCK }
        })
    }

    /// Appends the checksums of consecutive blocks from number `first` on. They come after all
    /// blocks that are already there.
    pub fn push(&mut self, first: u64, sums: Vec<u32>) {
        self.runs.push((first, sums));
    }

    /// The records of the file.
    pub fn into_records(self) -> impl Iterator<Item = ChecksumsRecord> {
        let blocks =
            self.runs.into_iter().map(|(first, sums)| ChecksumsRecord::Blocks { first, sums });
        let remapped =
            (!self.remapped.is_empty()).then_some(ChecksumsRecord::Remapped(self.remapped));
        blocks.chain(remapped).chain([ChecksumsRecord::End])
    }

    fn get(&self, block: u64) -> Option<u32> {
        let at = self.runs.partition_point(|(first, _)| *first <= block).checked_sub(1)?;
        let (first, sums) = self.runs.get(at)?;
        sums.get(usize::try_from(block - first).ok()?).copied()
    }

    /// Verifies bytes that were read at `offset` of a pool. Returns the address of the first block
    /// that does not match its checksum, or that was remapped and punched.
    ///
    /// # Errors
    /// As pread(2): the rest of a block of which `bytes` has only a part is read.
    pub fn verify(&self, pool: &File, offset: u64, bytes: &[u8]) -> std::io::Result<Option<u64>> {
        let end = offset + bytes.len() as u64;
        let mut at = offset;
        while at < end {
            let block = block_floor(at);
            let next = (block + BLOCK).min(end);
            if let Some(wanted) = self.get(block / BLOCK) {
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
        self.first_punched(pool, ByteRange { start: offset, end })
    }
}

/// Calls `then` with the address and the checksum of each block that overlaps a range. Reads many
/// blocks at once: a system call per block costs more than its checksum.
fn for_each_block(
    pool: &File,
    range: ByteRange,
    mut then: impl FnMut(u64, u32),
) -> std::io::Result<()> {
    let (mut at, end) = (block_floor(range.start), block_ceil(range.end));
    let mut buffer = vec![0; end.saturating_sub(at).min(READ_LEN) as usize];
    while at < end {
        let len = (end - at).min(READ_LEN) as usize;
        let bytes = buffer.get_mut(..len).unwrap_or_default();
        let filled = disk::read_at(pool, bytes, at)?;
        // Behind the end of a pool are zeros.
        bytes.get_mut(filled..).unwrap_or_default().fill(0);
        for block in bytes.chunks(BLOCK as usize) {
            then(at, crc32c::crc32c(block));
            at += BLOCK;
        }
    }
    Ok(())
}

/// Reads a block of a pool; bytes behind its end are zeros.
fn read_block(pool: &File, at: u64) -> std::io::Result<[u8; BLOCK as usize]> {
    let mut block = [0; BLOCK as usize];
    disk::read_at(pool, &mut block, at)?;
    Ok(block)
}

/// Parses the bytes of a file of checksums. `what` names the file in errors.
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
    let mut checksums = Checksums::default();
    for record in records {
        match record {
            ChecksumsRecord::Blocks { first, sums } => checksums.runs.push((first, sums)),
            ChecksumsRecord::Remapped(ranges) => checksums.remapped.extend(ranges),
            ChecksumsRecord::End => {
                return Err(Error::damage(format!("read {what}"), "it has two end records"));
            }
        }
    }
    Ok(checksums)
}

/// The addresses of the blocks in `ranges` of a pool that fail verification.
///
/// # Errors
/// As pread(2).
pub(in crate::store) fn damaged_blocks(
    pool: &File,
    checksums: &Checksums,
    ranges: &[ByteRange],
) -> std::io::Result<Vec<u64>> {
    let mut damaged = Vec::new();
    for part in ranges.iter().flat_map(|range| checksums.covered(*range)) {
        for_each_block(pool, part, |at, sum| {
            if checksums.get(at / BLOCK).is_some_and(|wanted| wanted != sum) {
                damaged.push(at);
            }
        })?;
    }
    for range in ranges {
        damaged.extend(checksums.first_punched(pool, *range)?);
    }
    damaged.dedup();
    Ok(damaged)
}

/// How many bytes in `ranges` of a pool take space but have no checksum.
///
/// # Errors
/// As lseek(2).
pub(in crate::store) fn bytes_without_checksum(
    pool: &File,
    checksums: &Checksums,
    ranges: &[ByteRange],
) -> std::io::Result<u64> {
    let mut bytes = 0;
    for range in ranges {
        let mut at = range.start;
        let end = ByteRange { start: range.end, end: range.end };
        for covered in checksums.covered(*range).chain([end]) {
            let data = data_in(pool, ByteRange { start: at, end: covered.start })?;
            bytes += data.iter().map(|range| range.len()).sum::<u64>();
            at = at.max(covered.end);
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::content::remap::Run;
    use crate::types::LayerId;
    use std::os::unix::fs::FileExt;

    #[test]
    fn freed_blocks_have_no_checksums() {
        let sums = || Checksums {
            runs: vec![(2, vec![2, 3, 4, 5]), (6, vec![6]), (9, vec![9, 10])],
            ..Checksums::default()
        };
        let blocks = |start: u64, end: u64| ByteRange { start: start * BLOCK, end: end * BLOCK };
        let left = |ranges: &[ByteRange]| -> Vec<u64> {
            let left = sums().without_blocks(ranges);
            (0..20).filter(|block| left.get(*block) == Some(*block as u32)).collect()
        };
        assert_eq!(left(&[]), [2, 3, 4, 5, 6, 9, 10]);
        assert_eq!(left(&[blocks(0, 2), blocks(7, 9), blocks(11, 20)]), [2, 3, 4, 5, 6, 9, 10]);
        assert_eq!(left(&[blocks(3, 4), blocks(5, 10)]), [2, 4, 10]);
        assert_eq!(left(&[blocks(0, 20)]), [0; 0]);
    }

    #[test]
    fn blocks_that_are_read_together_have_the_same_checksums_as_blocks_that_are_read_alone() {
        let pool = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..3 * READ_LEN + 5000).map(|n| (n % 253) as u8).collect();
        pool.write_all_at(&bytes, 0).unwrap();
        for (start, end) in [
            (0, bytes.len() as u64),
            (4097, READ_LEN + 1),
            (3 * READ_LEN, 4 * READ_LEN),
            (8192, 8192),
        ] {
            let mut found = Vec::new();
            for_each_block(&pool, ByteRange { start, end }, |at, sum| found.push((at, sum)))
                .unwrap();
            let alone = (block_floor(start)..end).step_by(BLOCK as usize);
            let alone = alone.map(|at| (at, crc32c::crc32c(&read_block(&pool, at).unwrap())));
            assert_eq!(found, alone.collect::<Vec<_>>(), "{start}..{end}");
        }
    }

    #[test]
    fn bytes_that_take_space_without_a_checksum_are_counted() {
        let pool = tempfile::tempfile().unwrap();
        let blocks = |start: u64, end: u64| ByteRange { start: start * BLOCK, end: end * BLOCK };
        // A hole from block 16 on, and bytes behind it.
        pool.write_all_at(&[7; 16 * BLOCK as usize], 0).unwrap();
        pool.write_all_at(&[7; 4 * BLOCK as usize], 64 * BLOCK).unwrap();
        let runs = vec![(2, vec![0; 4]), (8, vec![0; 2]), (65, vec![0; 8])];
        let sums = Checksums { runs, ..Checksums::default() };
        let count = |ranges: &[ByteRange]| bytes_without_checksum(&pool, &sums, ranges).unwrap();
        assert_eq!(count(&[blocks(2, 6), blocks(8, 10), blocks(65, 68)]), 0);
        assert_eq!(count(&[blocks(0, 80)]), (2 + 2 + 6 + 1) * BLOCK);
        assert_eq!(count(&[blocks(20, 40)]), 0, "it is a hole");
        let part = ByteRange { start: BLOCK + 100, end: 2 * BLOCK + 5 };
        assert_eq!(count(&[part, blocks(6, 7)]), BLOCK - 100 + BLOCK);
    }

    /// The remap is missing, or an older copy came back.
    #[test]
    fn a_punched_block_whose_remap_is_lost_is_reported_and_not_read_as_zeros() {
        let pool = tempfile::tempfile().unwrap();
        pool.set_len(8 * BLOCK).unwrap();
        pool.write_all_at(&[7; BLOCK as usize], BLOCK).unwrap();
        let mut remap = Remap::default();
        // The first block is punched, the second one not yet.
        for (start, end) in [(0, 100), (BLOCK, BLOCK + 100), (4 * BLOCK + 10, 5 * BLOCK)] {
            remap.push(Run { start, end, layer: LayerId(9), offset: start });
        }
        let sums = Checksums::default().with_remapped(&remap);
        let read = |start: u64, len: usize| sums.verify(&pool, start, &vec![0; len]).unwrap();
        assert_eq!(read(50, 10), Some(0));
        assert_eq!(read(100, 10), None, "the rest of that block was never stored");
        assert_eq!(read(BLOCK, 10), None);
        assert_eq!((read(BLOCK, 4 * BLOCK as usize), read(4 * BLOCK, 10)), (Some(4 * BLOCK), None));
        let bytes = log::frames(sums.into_records()).unwrap();
        let again = parse(&bytes, "sums").unwrap();
        let ranges = [ByteRange { start: 0, end: 8 * BLOCK }];
        assert_eq!(damaged_blocks(&pool, &again, &ranges).unwrap(), [0]);
        let again = Checksums { remapped: Vec::new(), ..again };
        assert!(damaged_blocks(&pool, &again, &ranges).unwrap().is_empty());
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
            sums.verify(&pool, 8192 + from as u64, &part).unwrap()
        };
        assert_eq!((read(0, 10_000), read(5, 9), read(4000, 4100)), (None, None, None));
        pool.write_all_at(&[bytes[5000] ^ 1], 8192 + 5000).unwrap();
        assert_eq!((read(0, 10_000), read(4990, 5010)), (Some(12_288), Some(12_288)));
        assert_eq!(read(0, 4096), None, "other blocks match");
        assert_eq!(read(4096, 4097), Some(12_288), "one byte is verified with its whole block");
        let found = |start, end| damaged_blocks(&pool, &sums, &[ByteRange { start, end }]).unwrap();
        assert_eq!((found(0, 1 << 40), found(12_300, 12_301)), (vec![12_288], vec![12_288]));
        assert_eq!(
            (found(0, 12_288), found(16_384, 1 << 40), found(12_288, 12_288)),
            (vec![], vec![], vec![])
        );
    }
}
