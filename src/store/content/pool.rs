//! Pools: the files that hold content, and the allocator of their addresses.
//!
//! * A pool is a sparse file. An address is an offset in it; a range that was never written takes
//!   no space.
//! * An address is allocated once and never again. So the extents of a sealed state never change.
//! * Addresses can get blocks of the disk before they are written. They read as zeros until then.
//!   lseek(2) calls them holes, so only the number of blocks tells that they take space.
//!
//! The first write to a file gets only the blocks that it needs, so small files lie side by side. A
//! file that keeps growing gets windows of addresses that double from 64 KiB to 4 MiB. Sequential
//! writes then become few extents, even while other files are written.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::store::content::fresh::{FreshWrite, FreshWrites, write_pieces};
use crate::store::content::range_set::RangeSet;
use crate::store::content::unsynced::UnsyncedRanges;
use crate::store::io::disk;
use crate::sys::file::data_in;
use crate::types::{ByteRange, Ino, LayerId};

/// Pools are punched and checksummed in blocks of this many bytes.
pub const BLOCK: u64 = 4096;
const SMALLEST_WINDOW: u64 = 64 << 10;
const LARGEST_WINDOW: u64 = 4 << 20;
/// How many files can have a window at a time. A growing file that lost its window gets a new one.
const MOST_WINDOWS: usize = 4096;

/// The start of the block that holds `offset`.
pub fn block_floor(offset: u64) -> u64 {
    offset & !(BLOCK - 1)
}

/// The first block boundary at or after `offset`; saturates.
pub fn block_ceil(offset: u64) -> u64 {
    offset.checked_add(BLOCK - 1).map_or(!(BLOCK - 1), block_floor)
}

/// Extends a range to whole blocks.
pub(in crate::store) fn in_blocks(range: ByteRange) -> ByteRange {
    ByteRange { start: block_floor(range.start), end: block_ceil(range.end) }
}

/// Addresses that are reserved for one growing file.
struct Window {
    /// The offset in the file whose byte goes to `pool_next`.
    file_next: u64,
    pool_next: u64,
    pool_end: u64,
    size: u64,
    /// The value of [`PoolWriter::uses`] at the last use.
    used: u64,
}

impl Window {
    /// The address for a range of the file, if the range continues the window and fits into it.
    fn place_of(&self, range: ByteRange) -> Option<u64> {
        let fits = self.file_next == range.start
            && self.pool_next.saturating_add(range.len()) <= self.pool_end;
        fits.then_some(self.pool_next)
    }
}

/// A write to addresses of a pool that does not borrow its [`PoolWriter`].
pub struct PoolWrite {
    file: Arc<File>,
}

impl PoolWrite {
    /// Writes bytes at an address (pwrite(2)).
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        write_pieces(&self.file, offset, bytes)
    }
}

/// Blocks of a pool that nothing needs any more.
#[must_use]
pub struct Unused {
    file: Arc<File>,
    parts: Vec<ByteRange>,
}

impl Unused {
    /// Punches the blocks (fallocate(2)). They then read as zeros.
    ///
    /// # Errors
    /// As fallocate(2).
    pub fn punch(&self) -> std::io::Result<()> {
        self.parts.iter().try_for_each(|part| disk::punch(&self.file, *part))
    }
}

/// Addresses that are about to be taken, and whose blocks must be allocated on the disk first.
pub struct Preallocation {
    file: Arc<File>,
    addresses: ByteRange,
}

impl Preallocation {
    /// The addresses.
    pub fn addresses(&self) -> ByteRange {
        self.addresses
    }

    /// Allocates the blocks (fallocate(2)).
    ///
    /// # Errors
    /// As fallocate(2). Some blocks may be allocated even so; the caller punches them.
    pub fn allocate(&self) -> std::io::Result<()> {
        disk::allocate(&self.file, in_blocks(self.addresses))
    }
}

/// Allocates addresses in the pool of the upper layer and writes to it.
pub struct PoolWriter {
    layer: LayerId,
    file: Arc<File>,
    next: u64,
    windows: HashMap<Ino, Window>,
    /// Counts allocations, to find the windows that were not used for long.
    uses: u64,
    /// The ranges that a power cut may take.
    pub(in crate::store) unsynced: UnsyncedRanges,
    /// Addresses below `next` that hold zeros, because they were never written.
    unwritten: RangeSet,
    fresh: Arc<FreshWrites>,
}

impl PoolWriter {
    /// Writes to `file`, the pool of `layer`. New addresses begin after its end.
    ///
    /// # Errors
    /// As fstat(2) and lseek(2).
    pub fn new(layer: LayerId, file: Arc<File>) -> std::io::Result<PoolWriter> {
        let about = file.metadata()?;
        let next = block_ceil(about.len());
        let data = data_in(&*file, ByteRange { start: 0, end: next })?;
        let mut unwritten = RangeSet::default();
        // Without more blocks than data, no block is unwritten.
        if about.blocks() * 512 > data.iter().map(ByteRange::len).sum() {
            unwritten.add(ByteRange { start: 0, end: next });
            data.into_iter().for_each(|data| unwritten.remove(in_blocks(data)));
        }
        let (windows, unsynced) = (HashMap::new(), UnsyncedRanges::default());
        let fresh = Arc::default();
        Ok(PoolWriter { layer, file, next, windows, uses: 0, unsynced, unwritten, fresh })
    }

    /// The layer of the pool.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// The pool.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Allocates addresses for `range` of the file `ino`. `growing` says that the range reaches the
    /// end of the file, so that more writes are likely to follow. The addresses continue those of
    /// the bytes before `range` where the window of the file allows it.
    pub fn allocate(&mut self, ino: Ino, range: ByteRange, growing: bool) -> u64 {
        self.place(ino, range, growing).0
    }

    /// As [`PoolWriter::allocate`]. Also returns whether the addresses are in the window of the
    /// file.
    fn place(&mut self, ino: Ino, range: ByteRange, growing: bool) -> (u64, bool) {
        self.uses += 1;
        if let Some(window) = self.windows.get_mut(&ino)
            && let Some(at) = window.place_of(range)
        {
            window.file_next = range.end;
            window.pool_next += range.len();
            window.used = self.uses;
            return (at, true);
        }
        let at = self.next;
        if !growing {
            self.next = block_ceil(at + range.len());
            return (at, false);
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
        (at, true)
    }

    /// Allocates addresses as [`PoolWriter::allocate`] does, for a write without the lock of the
    /// head. [`PoolWriter::note_written`] follows, before a record refers to them.
    pub fn allocate_fresh(&mut self, ino: Ino, range: ByteRange, growing: bool) -> FreshWrite {
        let (at, is_in_window) = self.place(ino, range, growing);
        let addresses = ByteRange::at(at, range.len());
        self.fresh.add(&self.file, addresses, is_in_window.then_some(ino))
    }

    /// Ends a write to fresh addresses to which no record will refer. Returns its blocks, for the
    /// caller to punch: without the first one if other addresses share it, and without the last one
    /// if a later write of the file may have gone on in it. The flag is false in the latter case.
    pub fn end_fresh(&mut self, write: FreshWrite) -> (Unused, bool) {
        let addresses = write.addresses();
        let goes_on = match write.window() {
            None => false,
            Some(ino) => {
                let is_last = |window: &mut Window| window.pool_next == addresses.end;
                let is_last = self.windows.get_mut(&ino).is_some_and(is_last);
                if is_last {
                    self.windows.remove(&ino);
                }
                !is_last
            }
        };
        drop(write);
        let start = block_ceil(addresses.start);
        let end = if goes_on { block_floor(addresses.end) } else { addresses.end };
        (self.unused(ByteRange { start, end: end.max(start) }), !goes_on)
    }

    /// Whether a write is one to this pool.
    pub fn owns(&self, write: &FreshWrite) -> bool {
        write.is_in(&self.file)
    }

    /// Refuses all further writes to fresh addresses, and waits for those that are under way.
    pub(in crate::store) fn close_fresh(&self) {
        self.fresh.close();
    }

    /// Returns the addresses that [`PoolWriter::allocate`] would return, but does not take them.
    /// The caller can release the core lock for [`Preallocation::allocate`]. If that succeeds, it
    /// calls [`PoolWriter::end_preallocation`] with the same range. If not, the addresses stay
    /// available. The caller holds the lock of changes, so no other change takes them meanwhile.
    pub fn begin_preallocation(&self, ino: Ino, range: ByteRange) -> Preallocation {
        let place = self.windows.get(&ino).and_then(|window| window.place_of(range));
        let addresses = ByteRange::at(place.unwrap_or(self.next), range.len());
        Preallocation { file: Arc::clone(&self.file), addresses }
    }

    /// Takes the addresses of [`PoolWriter::begin_preallocation`], which have blocks now. They read
    /// as zeros until they are written.
    pub fn end_preallocation(&mut self, ino: Ino, range: ByteRange, growing: bool) {
        let addresses = ByteRange::at(self.allocate(ino, range, growing), range.len());
        self.unsynced.note(addresses);
        self.unwritten.add(addresses);
    }

    /// The blocks of preallocated addresses to which no record refers. The first block stays if the
    /// addresses before them share it.
    pub fn unused_of_preallocation(&self, addresses: ByteRange) -> Unused {
        let start = block_ceil(addresses.start);
        self.unused(ByteRange { start, end: addresses.end.max(start) })
    }

    /// Whether addresses hold zeros because they were never written.
    pub fn has_unwritten(&self) -> bool {
        !self.unwritten.is_empty()
    }

    /// The parts of a range of the pool that were written, in whole blocks. The rest holds zeros.
    pub fn written_in(&self, addresses: ByteRange) -> Vec<ByteRange> {
        self.unwritten.missing_in(addresses)
    }

    /// Drops windows that were not used for long, if there are too many.
    fn close_oldest(&mut self) {
        if self.windows.len() >= MOST_WINDOWS {
            let since = self.uses.saturating_sub(MOST_WINDOWS as u64 / 2);
            self.windows.retain(|_, window| window.used > since);
        }
    }

    /// Whether a write at `file_offset` would continue the window of `ino`.
    pub fn continues(&self, ino: Ino, file_offset: u64) -> bool {
        self.windows
            .get(&ino)
            .is_some_and(|w| w.file_next == file_offset && w.pool_next < w.pool_end)
    }

    /// The addresses to which no record refers and that are not free: the rest of each window, and
    /// fresh ones. Also the first address that was never allocated.
    pub fn reserved(&self) -> (Vec<ByteRange>, u64) {
        let windows =
            self.windows.values().map(|w| ByteRange { start: w.pool_next, end: w.pool_end });
        let reserved = windows.chain(self.fresh.addresses());
        (reserved.filter(|range| !range.is_empty()).collect(), self.next)
    }

    /// Drops the window of a file that was removed or truncated.
    pub fn close_window(&mut self, ino: Ino) {
        self.windows.remove(&ino);
    }

    /// The blocks of a range that no reader needs any more, except blocks with fresh addresses. A
    /// block that the range only touches counts as a whole.
    pub fn unused(&self, range: ByteRange) -> Unused {
        let mut fresh = RangeSet::default();
        self.fresh.addresses().into_iter().for_each(|range| fresh.add(in_blocks(range)));
        Unused { file: Arc::clone(&self.file), parts: fresh.missing_in(in_blocks(range)) }
    }

    /// Writes bytes at an address.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.begin_write(ByteRange::at(offset, bytes.len() as u64)).write(offset, bytes)
    }

    /// Notes that addresses are written, and returns the write. The caller can release the core
    /// lock for it.
    pub fn begin_write(&mut self, addresses: ByteRange) -> PoolWrite {
        // Also if the write fails: it may have written a part.
        self.note_written(addresses);
        PoolWrite { file: Arc::clone(&self.file) }
    }

    /// Notes that addresses are written.
    pub fn note_written(&mut self, addresses: ByteRange) {
        self.unsynced.note(addresses);
        if self.has_unwritten() {
            self.unwritten.remove(in_blocks(addresses));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer() -> PoolWriter {
        PoolWriter::new(LayerId(1), Arc::new(tempfile::tempfile().unwrap())).unwrap()
    }

    #[test]
    fn sequential_writes_get_consecutive_addresses_between_writes_to_other_files() {
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
    fn windows_are_bounded_and_a_file_in_steady_use_keeps_its_window() {
        let mut pool = writer();
        let mut next = pool.allocate(Ino(1), ByteRange::at(0, 10), true);
        for step in 1..20_000u64 {
            let at = pool.allocate(Ino(1), ByteRange::at(10 * step, 10), true);
            assert!(
                at == next + 10 || at.is_multiple_of(BLOCK),
                "its addresses continue, or a new window begins"
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
    fn addresses_whose_blocks_were_not_allocated_are_used_again() {
        let mut pool = writer();
        let (first, larger) = (ByteRange::at(0, 4 * BLOCK), ByteRange::at(0, 64 * BLOCK));
        let at = pool.begin_preallocation(Ino(1), larger).addresses();
        assert_eq!(pool.begin_preallocation(Ino(1), first).addresses().start, at.start);
        pool.end_preallocation(Ino(1), first, true);
        let range = ByteRange::at(first.end, BLOCK);
        let next = pool.begin_preallocation(Ino(1), range).addresses();
        assert_eq!(next.start, at.start + first.end, "the others are used again");
        pool.end_preallocation(Ino(1), range, true);
        assert!(pool.begin_preallocation(Ino(2), first).addresses().start >= next.end);
    }

    #[test]
    fn dropped_addresses_are_punched_and_those_beside_them_stay() {
        let mut pool = writer();
        let write = |pool: &mut PoolWriter, at, len: usize| {
            let write = pool.allocate_fresh(Ino(1), ByteRange::at(at, len as u64), true);
            write.write(&[&vec![b'x'; len]]).unwrap();
            write
        };
        let free = |pool: &mut PoolWriter, write| {
            let (unused, are_all) = pool.end_fresh(write);
            unused.punch().unwrap();
            are_all
        };
        let data = |pool: &PoolWriter| data_in(&*pool.file, ByteRange::at(0, 1 << 20)).unwrap();
        let kept = write(&mut pool, 0, 1000).addresses();
        let dropped = write(&mut pool, 1000, 9000);
        assert_eq!(kept, ByteRange::at(0, 1000));
        let window = dropped.addresses();
        let next = write(&mut pool, 10_000, 500).addresses();
        assert_eq!(next.start, window.end, "the next write goes on in the last block");
        assert!(!free(&mut pool, dropped), "so that block stays");
        let last = ByteRange { start: block_floor(next.start), end: next.end };
        assert_eq!(data(&pool), [ByteRange::at(0, BLOCK), last]);
        let dropped = write(&mut pool, 10_500, 20_000);
        let second = block_ceil(dropped.addresses().start);
        assert!(free(&mut pool, dropped));
        assert_eq!(data(&pool).last().unwrap().end, second, "the first block is shared");
        // A write in the window that ends before the end of the file.
        let window = write(&mut pool, 30_500, 100).addresses();
        assert_eq!(window.start % BLOCK, 0);
        let first = pool.allocate_fresh(Ino(1), ByteRange::at(30_600, 3000), true).addresses();
        let inside = pool.allocate_fresh(Ino(1), ByteRange::at(33_600, 500), false);
        assert_eq!(inside.addresses().start, first.end);
        let next = write(&mut pool, 34_100, 10).addresses();
        assert_eq!(next.start, inside.addresses().end);
        assert!(!free(&mut pool, inside), "the next write went on in the last block");
        assert!(data(&pool).last().unwrap().end >= next.end);
        pool.close_window(Ino(1));
        let after = write(&mut pool, 40_000, 10);
        assert!(after.addresses().start.is_multiple_of(BLOCK), "no write goes on there");
        assert!(free(&mut pool, after));
    }

    #[test]
    fn no_address_is_allocated_twice() {
        let mut pool = writer();
        let mut allocated: Vec<ByteRange> = Vec::new();
        let mut at = 0;
        for step in 0..200u64 {
            let len = 1 + (step * 7919) % 90_000;
            let ino = Ino(step % 3);
            let start = if step % 5 == 0 { 0 } else { at };
            let offset = pool.allocate(ino, ByteRange::at(start, len), step % 2 == 0);
            assert!(
                allocated.iter().all(|g| offset >= g.end || offset + len <= g.start),
                "step {step}"
            );
            allocated.push(ByteRange::at(offset, len));
            at = start + len;
        }
    }
}
