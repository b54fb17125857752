//! Content that is deflated: the pools of layers that were gathered.
//!
//! Such a pool is cut into cells of 64 KiB. Each stands where its addresses say, deflated if that pays, and what it then does not
//! need of its 64 KiB is a hole. So addresses, checksums and the giving back of blocks are as in every other pool; only who wants bytes has
//! to inflate the cell that they are in.
//!
//! ```text
//! addresses   0        64 KiB     128 KiB    192 KiB
//! pool        ####.....|##########|##.......|       # stored, . a hole; the one in the middle is stored as it is
//! ```
//!
//! Always true: a deflated cell is needed as a whole as long as a byte of it is; it is never written again.

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
/// A cell is stored as it is, unless it takes at most three quarters of its bytes deflated.
const WORTH: (usize, usize) = (3, 4);
/// Cells of a pool that are kept inflated.
const KEPT: usize = 4;

/// How the cells of a pool are stored.
#[derive(Debug)]
pub struct Cells {
    /// Bytes of each, deflated; 0 of one that is stored as it is.
    lens: Vec<u32>,
    /// Cells that were inflated.
    inflated: Mutex<LruCache<u64, Vec<u8>>>,
}

/// What came of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// So many bytes: fewer than were asked for at the end of the pool.
    Bytes(usize),
    /// It would have to be waited for.
    NotNow,
    /// The block at this address is not as it was written.
    Damaged(u64),
}

impl Cells {
    /// Cells that are stored like this: the bytes of each, deflated, and 0 of one that is stored as it is. None if that cannot be.
    pub(in crate::store) fn new(lens: Vec<u32>) -> Option<Cells> {
        let can_be = lens.iter().all(|len| u64::from(*len) <= CELL);
        can_be.then(|| Cells { lens, inflated: Mutex::new(LruCache::new(KEPT)) })
    }

    /// Bytes that they take in memory at most, about.
    pub(in crate::store) fn weight(&self) -> usize {
        size_of_val(self.lens.as_slice()) + KEPT * CELL as usize
    }

    /// Bytes that the cell of an address takes deflated; none if it is stored as it is.
    fn deflated(&self, at: u64) -> Option<usize> {
        let len = usize::try_from(at / CELL).ok().and_then(|cell| self.lens.get(cell))?;
        usize::try_from(*len).ok().filter(|len| *len > 0)
    }

    /// What has to be there so that a range can be read, cells that are deflated being whole.
    pub fn whole(&self, range: ByteRange) -> ByteRange {
        let start =
            if self.deflated(range.start).is_some() { floor(range.start) } else { range.start };
        let last = range.end.saturating_sub(1);
        let end = if self.deflated(last).is_some() { floor(last) + CELL } else { range.end };
        ByteRange { start, end: end.max(range.end) }
    }

    /// The end of the cell of an address, and, if that is deflated, where it is stored.
    pub(in crate::store) fn cell_of(&self, at: u64) -> (u64, Option<ByteRange>) {
        let stored = self.deflated(at).map(|len| ByteRange::at(floor(at), len as u64));
        (floor(at) + CELL, stored)
    }

    /// Reads bytes of a pool, and holds them against the checksums, if it has any. With `nowait`, gives none for which a cell would have to be
    /// inflated or a disk waited for.
    ///
    /// # Errors
    /// As pread(2).
    fn read(
        &self,
        pool: &File,
        sums: Option<&Checksums>,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> io::Result<Got> {
        let (mut at, mut done) = (offset, 0);
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = usize::try_from(floor(at) + CELL - at).unwrap_or(usize::MAX).min(rest.len());
            let (part, behind) = rest.split_at_mut(len);
            let got = match self.deflated(at) {
                None => read_stored(pool, sums, at, part, nowait)?,
                Some(deflated) => self.read_deflated(pool, sums, (at, deflated), part, nowait)?,
            };
            match got {
                Got::Bytes(got) if got == len => done += got,
                Got::Bytes(got) => return Ok(Got::Bytes(done + got)),
                other => return Ok(other),
            }
            rest = behind;
            at += len as u64;
        }
        Ok(Got::Bytes(done))
    }

    /// Reads bytes at an address of a cell that takes so many bytes deflated.
    fn read_deflated(
        &self,
        pool: &File,
        sums: Option<&Checksums>,
        (at, deflated): (u64, usize),
        bytes: &mut [u8],
        nowait: bool,
    ) -> io::Result<Got> {
        let cell = floor(at);
        let kept = self.inflated.lock().get(&cell);
        let whole = match kept {
            Some(whole) => whole,
            None if nowait => return Ok(Got::NotNow),
            None => {
                let mut stored = vec![0; deflated];
                match read_stored(pool, sums, cell, &mut stored, false)? {
                    Got::Bytes(got) if got == deflated => {}
                    Got::Bytes(_) => return Ok(Got::Bytes(0)),
                    other => return Ok(other),
                }
                let Some(whole) = inflate(&stored) else { return Ok(Got::Damaged(cell)) };
                let whole = Arc::new(whole);
                self.inflated.lock().insert(cell, Arc::clone(&whole));
                whole
            }
        };
        let from = usize::try_from(at - cell).unwrap_or(usize::MAX);
        let there = whole.get(from..).unwrap_or_default();
        let len = there.len().min(bytes.len());
        bytes.iter_mut().zip(there).for_each(|(to, from)| *to = *from);
        Ok(Got::Bytes(len))
    }
}

/// Reads bytes of a pool, which may be deflated, and holds them against the checksums, if it has any. With `nowait`, gives none for which it would
/// have to be waited.
///
/// # Errors
/// As pread(2).
pub(in crate::store) fn read(
    (pool, cells, sums): (&File, Option<&Cells>, Option<&Checksums>),
    offset: u64,
    bytes: &mut [u8],
    nowait: bool,
) -> io::Result<Got> {
    match cells {
        Some(cells) => cells.read(pool, sums, offset, bytes, nowait),
        None => read_stored(pool, sums, offset, bytes, nowait),
    }
}

/// Reads bytes of a pool as they are stored.
fn read_stored(
    pool: &File,
    sums: Option<&Checksums>,
    at: u64,
    bytes: &mut [u8],
    nowait: bool,
) -> io::Result<Got> {
    let got = if nowait {
        match pread_nowait(pool, bytes, at)? {
            // A short answer may mean that the rest is not in memory.
            Some(got) if got == bytes.len() => got,
            _ => return Ok(Got::NotNow),
        }
    } else {
        disk::read_at(pool, bytes, at)?
    };
    // What has checksums behind the end of a pool was cut off.
    bytes.get_mut(got..).unwrap_or_default().fill(0);
    let damaged = sums.map_or(Ok(None), |sums| sums.check(pool, at, bytes))?;
    Ok(damaged.map_or(Got::Bytes(got), Got::Damaged))
}

fn floor(at: u64) -> u64 {
    at - at % CELL
}

/// None if it is not the content of a cell.
fn inflate(deflated: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    // One more than a cell can have.
    DeflateDecoder::new(deflated).take(CELL + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= CELL).then_some(bytes)
}

fn deflate(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// A pool that is being filled, cell by cell.
#[derive(Clone, Default)]
pub(in crate::store) struct CellWriter {
    lens: Vec<u32>,
    /// The cell that is not full yet.
    open: Vec<u8>,
    /// Checksums of what is written, by the first block of each cell.
    sums: Vec<(u64, Vec<u32>)>,
}

impl CellWriter {
    /// Where the next byte goes.
    pub fn end(&self) -> u64 {
        self.lens.len() as u64 * CELL + self.open.len() as u64
    }

    /// Adds bytes.
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
                self.write(pool)?;
            }
        }
        Ok(())
    }

    /// Writes the cell that is open.
    fn write(&mut self, pool: &File) -> io::Result<()> {
        let at = self.lens.len() as u64 * CELL;
        let bytes = std::mem::take(&mut self.open);
        let deflated = deflate(&bytes)?;
        let is_worth_it = deflated.len() <= bytes.len() / WORTH.1 * WORTH.0;
        let stored = if is_worth_it { &deflated } else { &bytes };
        disk::write_at(pool, stored, at)?;
        self.lens.push(if is_worth_it { u32::try_from(stored.len()).unwrap_or(0) } else { 0 });
        self.sums.push((at / BLOCK, stored.chunks(BLOCK as usize).map(sum_of_block).collect()));
        Ok(())
    }

    /// Goes back to what was copied `before`.
    ///
    /// # Errors
    /// As ftruncate(2).
    pub fn back_to(&mut self, pool: &File, before: CellWriter) -> io::Result<()> {
        *self = before;
        disk::cut(pool, self.lens.len() as u64 * CELL)
    }

    /// Writes what is not written yet. Gives how the cells are stored, and the checksums of the pool.
    ///
    /// # Errors
    /// As pwrite(2) and ftruncate(2).
    pub fn finish(mut self, pool: &File) -> io::Result<(Vec<u32>, Checksums)> {
        let end = self.end();
        if !self.open.is_empty() {
            self.write(pool)?;
        }
        // Its addresses are those of what is in it.
        disk::cut(pool, block_ceil(end))?;
        let mut sums = Checksums::default();
        self.sums.into_iter().for_each(|(first, run)| sums.push(first, run));
        Ok((self.lens, sums))
    }
}

/// The checksum of a block, behind whose end are zeros.
fn sum_of_block(bytes: &[u8]) -> u32 {
    let mut block = [0; BLOCK as usize];
    block.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    crc32c::crc32c(&block)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text, noise, a cell that is text and noise, and a short one of text.
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
    fn what_is_read_is_what_was_written_wherever_it_begins_and_ends() {
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
                (Got::Bytes(to - from), &content[from..to].to_vec()),
                "{from}..{to}"
            );
        }
        let mut bytes = vec![0; 10_000];
        let at_the_end = cells.read(&pool, Some(&sums), 205_000, &mut bytes, false).unwrap();
        assert_eq!(at_the_end, Got::Bytes(content.len() - 205_000));
    }

    #[test]
    fn who_does_not_want_to_wait_gets_what_was_inflated_before() {
        let (pool, cells, sums, content) = written();
        let mut bytes = vec![0; 100];
        let mut read = |nowait| cells.read(&pool, Some(&sums), 7, &mut bytes, nowait).unwrap();
        assert_eq!(
            (read(true), read(false), read(true)),
            (Got::NotNow, Got::Bytes(100), Got::Bytes(100))
        );
        assert_eq!(bytes, content[7..107]);
    }

    #[test]
    fn a_flipped_bit_of_a_cell_is_told_also_when_another_part_of_it_is_read() {
        use std::os::unix::fs::FileExt;
        let (pool, cells, sums, _) = written();
        let mut byte = [0];
        pool.read_exact_at(&mut byte, 2).unwrap();
        pool.write_all_at(&[byte[0] ^ 4], 2).unwrap();
        let read = |from| cells.read(&pool, Some(&sums), from, &mut [0; 8], false).unwrap();
        assert_eq!((read(65_000), read(65_536)), (Got::Damaged(0), Got::Bytes(8)));
        // Without checksums it is found by what it is inflated to, or not at all.
        pool.write_all_at(&[0xff; 64], 0).unwrap();
        assert_eq!(cells.read(&pool, None, 65_000, &mut [0; 8], false).unwrap(), Got::Damaged(0));
    }

    #[test]
    fn a_range_in_deflated_cells_needs_them_whole() {
        let (_, cells, _, _) = written();
        let whole = |start, end| {
            let ByteRange { start, end } = cells.whole(ByteRange { start, end });
            (start, end)
        };
        assert_eq!(whole(5, 6), (0, 65_536));
        assert_eq!(whole(65_536, 65_540), (65_536, 65_540), "it is stored as it is");
        assert_eq!(whole(65_535, 131_073), (0, 196_608));
        assert_eq!(whole(1 << 40, (1 << 40) + 1), (1 << 40, (1 << 40) + 1), "behind the end");
    }

    #[test]
    fn what_was_gone_back_over_is_not_there() {
        let pool = tempfile::tempfile().unwrap();
        let mut writer = CellWriter::default();
        writer.push(&pool, &[7; 100_000]).unwrap();
        let before = writer.clone();
        writer.push(&pool, &content()).unwrap();
        writer.back_to(&pool, before).unwrap();
        assert_eq!(writer.end(), 100_000);
        writer.push(&pool, &[8; 50_000]).unwrap();
        let (lens, sums) = writer.finish(&pool).unwrap();
        let cells = Cells::new(lens).unwrap();
        let mut bytes = vec![0; 150_000];
        assert_eq!(
            cells.read(&pool, Some(&sums), 0, &mut bytes, false).unwrap(),
            Got::Bytes(150_000)
        );
        assert!(bytes[..100_000] == [7; 100_000] && bytes[100_000..] == [8; 50_000]);
    }
}
