//! Pools: the files that hold content bytes.
//!
//! A pool is sparse and its addresses are logical: space that nothing was written to costs nothing. Addresses are given
//! out once and never again, so an extent that a sealed state holds cannot change under it. The first bytes of a file get
//! the blocks that they need, so that small files lie side by side; a file that goes on growing gets windows of
//! addresses that double from 64 KiB to 4 MiB, so that sequential writes stay few extents also between other writers.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use crate::store::io::disk;
use crate::types::{ByteRange, Ino, LayerId};

/// Content is recorded in blocks of this many bytes.
pub const BLOCK: u64 = 4096;
const SMALLEST_WINDOW: u64 = 64 << 10;
const LARGEST_WINDOW: u64 = 4 << 20;
/// Files that can have a window at a time. One that has none any more, and grows all the same, gets a new one.
const MOST_WINDOWS: usize = 4096;

/// The block that holds `offset` begins here.
pub fn block_floor(offset: u64) -> u64 {
    offset & !(BLOCK - 1)
}

/// The first block boundary at or after `offset`; saturates.
pub fn block_ceil(offset: u64) -> u64 {
    offset.checked_add(BLOCK - 1).map_or(!(BLOCK - 1), block_floor)
}

/// Addresses set aside for the file that grows.
struct Window {
    /// Offset in the file that `pool_next` is for.
    file_next: u64,
    pool_next: u64,
    pool_end: u64,
    size: u64,
    /// When it was used last.
    used: u64,
}

/// The pool of the writable layer.
pub struct PoolWriter {
    layer: LayerId,
    file: Arc<File>,
    next: u64,
    windows: HashMap<Ino, Window>,
    /// Counts their uses.
    uses: u64,
}

impl PoolWriter {
    /// Takes `file` as the pool of `layer`; addresses are given out behind what it holds.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn new(layer: LayerId, file: Arc<File>) -> std::io::Result<PoolWriter> {
        let next = block_ceil(file.metadata()?.len());
        Ok(PoolWriter { layer, file, next, windows: HashMap::new(), uses: 0 })
    }

    /// Whose pool it is.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// The file.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Gives out addresses for `range` of the file `ino`. `growing` says that the range reaches the end of the file, so
    /// that more is likely to follow. Addresses continue those of the bytes before, where the window allows.
    pub fn allocate(&mut self, ino: Ino, range: ByteRange, growing: bool) -> u64 {
        self.uses += 1;
        if let Some(window) = self.windows.get_mut(&ino)
            && window.file_next == range.start
            && window.pool_next + range.len() <= window.pool_end
        {
            let at = window.pool_next;
            window.file_next = range.end;
            window.pool_next += range.len();
            window.used = self.uses;
            return at;
        }
        let at = self.next;
        if !growing {
            self.next = block_ceil(at + range.len());
            return at;
        }
        let size = match self.windows.get(&ino) {
            Some(window) if window.file_next == range.start => {
                (window.size * 2).clamp(SMALLEST_WINDOW, LARGEST_WINDOW)
            }
            _ => 0,
        };
        let pool_end = block_ceil(at + range.len().max(size));
        self.next = pool_end;
        self.close_oldest();
        let (file_next, pool_next) = (range.end, at + range.len());
        self.windows.insert(ino, Window { file_next, pool_next, pool_end, size, used: self.uses });
        at
    }

    /// Forgets the windows of files that were not written for long, if there are many.
    fn close_oldest(&mut self) {
        if self.windows.len() >= MOST_WINDOWS {
            let since = self.uses.saturating_sub(MOST_WINDOWS as u64 / 2);
            self.windows.retain(|_, window| window.used > since);
        }
    }

    /// Whether the bytes from `file_offset` on would continue the window of `ino`.
    pub fn continues(&self, ino: Ino, file_offset: u64) -> bool {
        self.windows
            .get(&ino)
            .is_some_and(|w| w.file_next == file_offset && w.pool_next < w.pool_end)
    }

    /// The addresses that were given out and are still to be written, and where those begin that were never given out.
    pub fn reserved(&self) -> (Vec<ByteRange>, u64) {
        let windows =
            self.windows.values().map(|w| ByteRange { start: w.pool_next, end: w.pool_end });
        (windows.filter(|range| !range.is_empty()).collect(), self.next)
    }

    /// Forgets the window of a file that is gone or was cut.
    pub fn close_window(&mut self, ino: Ino) {
        self.windows.remove(&ino);
    }

    /// Gives the space of addresses back that nobody reads any more; they read as zeros from then on.
    ///
    /// # Errors
    /// As fallocate(2).
    pub fn reclaim(&self, range: ByteRange) -> std::io::Result<()> {
        let whole = ByteRange { start: block_floor(range.start), end: block_ceil(range.end) };
        disk::punch(&self.file, whole)
    }

    /// Writes bytes at a logical address.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        disk::write_at(&self.file, bytes, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer() -> PoolWriter {
        PoolWriter::new(LayerId(1), Arc::new(tempfile::tempfile().unwrap())).unwrap()
    }

    #[test]
    fn sequential_writes_get_consecutive_addresses_also_across_other_files() {
        let mut pool = writer();
        let a = pool.allocate(Ino(1), ByteRange::at(0, 1000), true);
        let other = pool.allocate(Ino(2), ByteRange::at(0, 1000), true);
        assert_eq!(other, a + BLOCK, "small files lie side by side");
        assert_eq!(pool.allocate(Ino(1), ByteRange::at(1000, 3000), true), a + 1000);
        let window = pool.allocate(Ino(1), ByteRange::at(4000, 5000), true);
        let far = pool.allocate(Ino(2), ByteRange::at(90_000, 10), true);
        assert!(far >= window + SMALLEST_WINDOW);
        assert!(pool.continues(Ino(1), 9000));
        assert_eq!(pool.allocate(Ino(1), ByteRange::at(9000, 5000), true), window + 5000);
    }

    #[test]
    fn however_many_files_are_written_few_have_a_window_and_who_goes_on_keeps_it() {
        let mut pool = writer();
        let mut next = pool.allocate(Ino(1), ByteRange::at(0, 10), true);
        for step in 1..20_000u64 {
            let at = pool.allocate(Ino(1), ByteRange::at(10 * step, 10), true);
            assert!(
                at == next + 10 || at.is_multiple_of(BLOCK),
                "its addresses go on, or a window begins"
            );
            next = at;
            pool.allocate(Ino(1 + step), ByteRange::at(0, 10), true);
            assert!(pool.windows.len() <= MOST_WINDOWS);
        }
        let (reserved, end) = pool.reserved();
        assert!(reserved.len() <= MOST_WINDOWS && reserved.iter().all(|range| range.end <= end));
        assert!(!pool.continues(Ino(2), 10), "it was not written for long");
    }

    #[test]
    fn no_address_is_given_out_twice() {
        let mut pool = writer();
        let mut given: Vec<ByteRange> = Vec::new();
        let mut at = 0;
        for step in 0..200u64 {
            let len = 1 + (step * 7919) % 90_000;
            let ino = Ino(step % 3);
            let start = if step % 5 == 0 { 0 } else { at };
            let offset = pool.allocate(ino, ByteRange::at(start, len), step % 2 == 0);
            assert!(
                given.iter().all(|g| offset >= g.end || offset + len <= g.start),
                "step {step}"
            );
            given.push(ByteRange::at(offset, len));
            at = start + len;
        }
    }
}
