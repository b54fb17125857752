//! Reads and writes deflated pools: the pools of gathered layers.
//!
//! Such a pool is cut into cells of 64 KiB. A cell starts at its own address. If deflating pays,
//! only the deflated bytes are stored, and the rest of its 64 KiB is a hole:
//!
//! ```text
//! addresses   0        64 KiB     128 KiB    192 KiB
//! pool        ####.....|##########|##.......|       # stored, . hole; the second is not deflated
//! ```
//!
//! * Addresses, checksums and punching work as in any other pool. Checksums cover the stored bytes.
//! * A deflated cell is needed as a whole while one byte of it is needed.
//! * A cell is never written again.

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use parking_lot::Mutex;

use crate::store::content::checksums::Checksums;
use crate::store::content::pool::{BLOCK, block_ceil};
use crate::store::io::disk;
use crate::store::io::lru_cache::LruCache;
use crate::sys::file::pread_nowait;
use crate::types::ByteRange;

/// Addresses of a cell.
const CELL: u64 = 64 << 10;
/// A cell is deflated only if that takes at most this part of its bytes: three quarters.
const MAX_RATIO: (usize, usize) = (3, 4);
/// How many inflated cells of one pool are cached.
const INFLATED_CELLS: usize = 4;

/// How the cells of a pool are stored.
#[derive(Debug)]
pub struct Cells {
    /// The deflated length of each cell in bytes; 0 for a cell that is not deflated.
    lens: Vec<u32>,
    /// Inflated cells by their first address.
    inflated: Mutex<LruCache<u64, Vec<u8>>>,
}

/// The outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The number of bytes that were read; less than asked for only at the end of the pool.
    Bytes(usize),
    /// The read would have to wait for a disk or inflate a cell, and the caller did not allow it.
    WouldBlock,
    /// The block at this address does not match its checksum, or cannot be inflated.
    Damaged(u64),
}

impl Cells {
    /// Takes the deflated length of each cell, 0 for one that is not deflated. `None` if a length
    /// is larger than a cell.
    pub(in crate::store) fn new(lens: Vec<u32>) -> Option<Cells> {
        let is_valid = lens.iter().all(|len| u64::from(*len) <= CELL);
        is_valid.then(|| Cells { lens, inflated: Mutex::new(LruCache::new(INFLATED_CELLS)) })
    }

    /// Approximate upper bound of the size in memory, in bytes.
    pub(in crate::store) fn memory(&self) -> usize {
        size_of_val(self.lens.as_slice()) + INFLATED_CELLS * CELL as usize
    }

    /// The deflated length of the cell that holds an address. `None` if it is not deflated.
    fn deflated_len(&self, at: u64) -> Option<usize> {
        let len = usize::try_from(at / CELL).ok().and_then(|cell| self.lens.get(cell))?;
        usize::try_from(*len).ok().filter(|len| *len > 0)
    }

    /// Extends a range to all of the deflated cells in which it begins and ends: the addresses that
    /// must be stored so that the range can be read.
    pub fn round_out(&self, range: ByteRange) -> ByteRange {
        let is_deflated = |at| self.deflated_len(at).is_some();
        let start = if is_deflated(range.start) { cell_floor(range.start) } else { range.start };
        let last = range.end.saturating_sub(1);
        let end = if is_deflated(last) { cell_floor(last) + CELL } else { range.end };
        ByteRange { start, end: end.max(range.end) }
    }

    /// The end of the cell that holds an address, and where its deflated bytes are stored.
    pub(in crate::store) fn cell_at(&self, at: u64) -> (u64, Option<ByteRange>) {
        let stored = self.deflated_len(at).map(|len| ByteRange::at(cell_floor(at), len as u64));
        (cell_floor(at) + CELL, stored)
    }

    fn read(
        &self,
        pool: &File,
        checksums: Option<&Checksums>,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> io::Result<ReadOutcome> {
        let (mut at, mut done) = (offset, 0);
        let mut rest = bytes;
        while !rest.is_empty() {
            let in_cell = usize::try_from(cell_floor(at) + CELL - at).unwrap_or(usize::MAX);
            let len = in_cell.min(rest.len());
            let (part, behind) = rest.split_at_mut(len);
            let got = match self.deflated_len(at) {
                None => read_stored(pool, checksums, at, part, nowait)?,
                Some(deflated) => {
                    self.read_deflated(pool, checksums, (at, deflated), part, nowait)?
                }
            };
            match got {
                ReadOutcome::Bytes(got) if got == len => done += got,
                ReadOutcome::Bytes(got) => return Ok(ReadOutcome::Bytes(done + got)),
                other => return Ok(other),
            }
            rest = behind;
            at += len as u64;
        }
        Ok(ReadOutcome::Bytes(done))
    }

    /// Reads bytes at an address inside one cell, which has `deflated` bytes stored.
    fn read_deflated(
        &self,
        pool: &File,
        checksums: Option<&Checksums>,
        (at, deflated): (u64, usize),
        bytes: &mut [u8],
        nowait: bool,
    ) -> io::Result<ReadOutcome> {
        let cell = cell_floor(at);
        let cached = self.inflated.lock().get(&cell);
        let inflated = match cached {
            Some(inflated) => inflated,
            None if nowait => return Ok(ReadOutcome::WouldBlock),
            None => {
                let mut stored = vec![0; deflated];
                match read_stored(pool, checksums, cell, &mut stored, false)? {
                    ReadOutcome::Bytes(got) if got == deflated => {}
                    ReadOutcome::Bytes(_) => return Ok(ReadOutcome::Bytes(0)),
                    other => return Ok(other),
                }
                let Some(inflated) = inflate(&stored) else {
                    return Ok(ReadOutcome::Damaged(cell));
                };
                let inflated = Arc::new(inflated);
                self.inflated.lock().insert(cell, Arc::clone(&inflated));
                inflated
            }
        };
        let from = usize::try_from(at - cell).unwrap_or(usize::MAX);
        let available = inflated.get(from..).unwrap_or_default();
        let len = available.len().min(bytes.len());
        bytes.iter_mut().zip(available).for_each(|(to, from)| *to = *from);
        Ok(ReadOutcome::Bytes(len))
    }
}

/// Reads bytes of a pool, inflates them where needed, and verifies them against `checksums`. With
/// `nowait`, returns [`ReadOutcome::WouldBlock`] instead of waiting for a disk or inflating a cell.
///
/// # Errors
/// As pread(2).
pub(in crate::store) fn read(
    (pool, cells, checksums): (&File, Option<&Cells>, Option<&Checksums>),
    offset: u64,
    bytes: &mut [u8],
    nowait: bool,
) -> io::Result<ReadOutcome> {
    match cells {
        Some(cells) => cells.read(pool, checksums, offset, bytes, nowait),
        None => read_stored(pool, checksums, offset, bytes, nowait),
    }
}

/// Reads bytes of a pool as they are stored, and verifies them.
fn read_stored(
    pool: &File,
    checksums: Option<&Checksums>,
    at: u64,
    bytes: &mut [u8],
    nowait: bool,
) -> io::Result<ReadOutcome> {
    let got = if nowait {
        match pread_nowait(pool, bytes, at)? {
            // A short read may mean that the rest is not in the page cache.
            Some(got) if got == bytes.len() => got,
            _ => return Ok(ReadOutcome::WouldBlock),
        }
    } else {
        disk::read_at(pool, bytes, at)?
    };
    // Verify also what is missing: a block with a checksum behind the end means a truncated pool.
    bytes.get_mut(got..).unwrap_or_default().fill(0);
    let damaged = checksums.map_or(Ok(None), |checksums| checksums.verify(pool, at, bytes))?;
    Ok(damaged.map_or(ReadOutcome::Bytes(got), ReadOutcome::Damaged))
}

fn cell_floor(at: u64) -> u64 {
    at - at % CELL
}

/// Inflates a cell. `None` if the bytes are not deflated data or yield more than a cell.
fn inflate(deflated: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    // One more than a cell, so that a result that is too long is noticed.
    DeflateDecoder::new(deflated).take(CELL + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= CELL).then_some(bytes)
}

fn deflate(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Writes a deflated pool from its start to its end.
#[derive(Clone, Default)]
pub(in crate::store) struct CellWriter {
    lens: Vec<u32>,
    /// The bytes of the cell that is not full yet.
    open: Vec<u8>,
    /// The first block of each written cell, and the checksums of its stored blocks.
    checksums: Vec<(u64, Vec<u32>)>,
}

impl CellWriter {
    /// The address of the next byte.
    pub fn end(&self) -> u64 {
        self.lens.len() as u64 * CELL + self.open.len() as u64
    }

    /// Appends bytes. The last cell stays in memory until it is full.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn push(&mut self, pool: &File, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = (CELL as usize).saturating_sub(self.open.len());
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.open.extend_from_slice(now);
            bytes = later;
            if self.open.len() as u64 == CELL {
                self.write_open_cell(pool)?;
            }
        }
        Ok(())
    }

    fn write_open_cell(&mut self, pool: &File) -> io::Result<()> {
        let at = self.lens.len() as u64 * CELL;
        let bytes = std::mem::take(&mut self.open);
        let deflated = deflate(&bytes)?;
        let pays = deflated.len() <= bytes.len() / MAX_RATIO.1 * MAX_RATIO.0;
        let stored = if pays { &deflated } else { &bytes };
        disk::write_at(pool, stored, at)?;
        self.lens.push(if pays { u32::try_from(stored.len()).unwrap_or(0) } else { 0 });
        let blocks = stored.chunks(BLOCK as usize).map(checksum_of_block);
        self.checksums.push((at / BLOCK, blocks.collect()));
        Ok(())
    }

    /// Rolls back to an earlier state of this writer, which the caller cloned.
    ///
    /// # Errors
    /// As ftruncate(2).
    pub fn roll_back(&mut self, pool: &File, savepoint: CellWriter) -> io::Result<()> {
        *self = savepoint;
        disk::cut(pool, self.lens.len() as u64 * CELL)
    }

    /// Writes the last cell. Returns the deflated length of each cell, as [`Cells::new`] takes
    /// them, and the checksums of the pool.
    ///
    /// # Errors
    /// As pwrite(2) and ftruncate(2).
    pub fn finish(mut self, pool: &File) -> io::Result<(Vec<u32>, Checksums)> {
        let end = self.end();
        if !self.open.is_empty() {
            self.write_open_cell(pool)?;
        }
        // The length of a pool is the end of its addresses, also if the last cell is deflated.
        disk::cut(pool, block_ceil(end))?;
        let mut checksums = Checksums::default();
        self.checksums.into_iter().for_each(|(first, run)| checksums.push(first, run));
        Ok((self.lens, checksums))
    }
}

/// The checksum of a block that is padded with zeros.
fn checksum_of_block(bytes: &[u8]) -> u32 {
    let mut block = [0; BLOCK as usize];
    block.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    crc32c::crc32c(&block)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cell of text, one of noise, one of both, and a short one of text.
    fn content() -> Vec<u8> {
        let text = |n: usize| (0..n).map(|at| b"to be or not"[at % 12]).collect::<Vec<u8>>();
        let mut random = 1_u64;
        let mut noise = |n: usize| -> Vec<u8> {
            let next = |_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 56) as u8
            };
            (0..n).map(next).collect()
        };
        [text(65_536), noise(65_536), text(60_000), noise(5536), text(9000)].concat()
    }

    fn written() -> (File, Cells, Checksums, Vec<u8>) {
        let pool = tempfile::tempfile().unwrap();
        let mut writer = CellWriter::default();
        let content = content();
        for part in content.chunks(5000) {
            writer.push(&pool, part).unwrap();
        }
        assert_eq!(writer.end(), content.len() as u64);
        let (lens, sums) = writer.finish(&pool).unwrap();
        assert!(Cells::new(vec![5, 65_537]).is_none());
        (pool, Cells::new(lens).unwrap(), sums, content)
    }

    #[test]
    fn a_read_returns_what_was_written_wherever_it_begins_and_ends() {
        let (pool, cells, sums, content) = written();
        assert_eq!(
            cells.lens.iter().map(|len| *len > 0).collect::<Vec<_>>(),
            [true, false, true, true]
        );
        assert_eq!(pool.metadata().unwrap().len(), block_ceil(content.len() as u64));
        for (from, to) in
            [(0, content.len()), (5, 9), (65_530, 65_540), (60_000, 131_080), (196_607, 205_600)]
        {
            let mut bytes = vec![0; to - from];
            let got = cells.read(&pool, Some(&sums), from as u64, &mut bytes, false).unwrap();
            assert_eq!(
                (got, &bytes),
                (ReadOutcome::Bytes(to - from), &content[from..to].to_vec()),
                "{from}..{to}"
            );
        }
        let mut bytes = vec![0; 10_000];
        let at_the_end = cells.read(&pool, Some(&sums), 205_000, &mut bytes, false).unwrap();
        assert_eq!(at_the_end, ReadOutcome::Bytes(content.len() - 205_000));
    }

    #[test]
    fn a_read_without_waiting_returns_only_cells_that_are_cached() {
        let (pool, cells, sums, content) = written();
        let mut bytes = vec![0; 100];
        let mut read = |nowait| cells.read(&pool, Some(&sums), 7, &mut bytes, nowait).unwrap();
        assert_eq!(
            (read(true), read(false), read(true)),
            (ReadOutcome::WouldBlock, ReadOutcome::Bytes(100), ReadOutcome::Bytes(100))
        );
        assert_eq!(bytes, content[7..107]);
    }

    #[test]
    fn a_flipped_bit_is_reported_by_a_read_of_any_part_of_its_cell() {
        use std::os::unix::fs::FileExt;
        let (pool, cells, sums, _) = written();
        let mut byte = [0];
        pool.read_exact_at(&mut byte, 2).unwrap();
        pool.write_all_at(&[byte[0] ^ 4], 2).unwrap();
        let read = |from| cells.read(&pool, Some(&sums), from, &mut [0; 8], false).unwrap();
        assert_eq!((read(65_000), read(65_536)), (ReadOutcome::Damaged(0), ReadOutcome::Bytes(8)));
        // Without checksums, damage is noticed only where inflating fails.
        pool.write_all_at(&[0xff; 64], 0).unwrap();
        assert_eq!(
            cells.read(&pool, None, 65_000, &mut [0; 8], false).unwrap(),
            ReadOutcome::Damaged(0)
        );
    }

    #[test]
    fn a_range_is_rounded_out_to_whole_deflated_cells() {
        let (_, cells, _, _) = written();
        let whole = |start, end| {
            let ByteRange { start, end } = cells.round_out(ByteRange { start, end });
            (start, end)
        };
        assert_eq!(whole(5, 6), (0, 65_536));
        assert_eq!(whole(65_536, 65_540), (65_536, 65_540), "this cell is not deflated");
        assert_eq!(whole(65_535, 131_073), (0, 196_608));
        assert_eq!(whole(1 << 40, (1 << 40) + 1), (1 << 40, (1 << 40) + 1), "behind the end");
    }

    #[test]
    fn a_rollback_leaves_nothing_of_what_was_written_after_the_savepoint() {
        let pool = tempfile::tempfile().unwrap();
        let mut writer = CellWriter::default();
        writer.push(&pool, &[7; 100_000]).unwrap();
        let savepoint = writer.clone();
        writer.push(&pool, &content()).unwrap();
        writer.roll_back(&pool, savepoint).unwrap();
        assert_eq!(writer.end(), 100_000);
        writer.push(&pool, &[8; 50_000]).unwrap();
        let (lens, sums) = writer.finish(&pool).unwrap();
        let cells = Cells::new(lens).unwrap();
        let mut bytes = vec![0; 150_000];
        assert_eq!(
            cells.read(&pool, Some(&sums), 0, &mut bytes, false).unwrap(),
            ReadOutcome::Bytes(150_000)
        );
        assert!(bytes[..100_000] == [7; 100_000] && bytes[100_000..] == [8; 50_000]);
    }
}
