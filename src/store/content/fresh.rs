//! Writes to addresses of a pool to which no record refers yet.
//!
//! Such addresses are *fresh*. No reader can find them, so a thread writes to them without the lock
//! of the head, however long the disk takes.
//!
//! Always true:
//! * The table has all fresh addresses, so no thread punches them.
//! * A pool is sealed when no such write is under way. A sealed block never changes, and one block
//!   can hold fresh addresses behind recorded ones.

use std::fs::File;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::store::io::disk;
use crate::types::ByteRange;

/// The most bytes that one pwrite(2) writes. Linux 6.18 takes what one call writes to ext4 into one
/// folio of its page cache if it can, and a later write of a block visits each block of that folio.
/// Writing 1 MiB in pieces of 128 KiB is as fast as in one call, and overwriting single blocks
/// later takes less than half as long.
const PIECE: usize = 128 << 10;

/// Writes bytes at an address of a pool.
///
/// # Errors
/// As pwrite(2).
pub(super) fn write_pieces(pool: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
    let mut pieces = bytes.chunks(PIECE).zip((at..).step_by(PIECE));
    pieces.try_for_each(|(piece, at)| disk::write_at(pool, piece, at))
}

/// The fresh addresses of one pool.
#[derive(Default)]
pub(super) struct FreshWrites {
    table: Mutex<Table>,
    /// A write has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Table {
    entries: Vec<Entry>,
    last: u64,
}

struct Entry {
    number: u64,
    addresses: ByteRange,
    is_under_way: bool,
}

impl FreshWrites {
    /// Adds fresh addresses of a pool. The write to them is under way from now on.
    pub(super) fn begin(self: &Arc<Self>, pool: &Arc<File>, addresses: ByteRange) -> FreshWrite {
        let mut table = self.table.lock();
        table.last += 1;
        let number = table.last;
        table.entries.push(Entry { number, addresses, is_under_way: true });
        FreshWrite { pool: Arc::clone(pool), addresses, number, writes: Arc::clone(self) }
    }

    /// All fresh addresses.
    pub(super) fn addresses(&self) -> Vec<ByteRange> {
        self.table.lock().entries.iter().map(|entry| entry.addresses).collect()
    }

    /// Waits until no write is under way.
    pub(super) fn wait(&self) {
        let mut table = self.table.lock();
        while table.entries.iter().any(|entry| entry.is_under_way) {
            self.ended.wait(&mut table);
        }
    }
}

/// A write to fresh addresses. They are fresh while it lives.
pub struct FreshWrite {
    pool: Arc<File>,
    addresses: ByteRange,
    number: u64,
    writes: Arc<FreshWrites>,
}

impl FreshWrite {
    /// The addresses.
    pub fn addresses(&self) -> ByteRange {
        self.addresses
    }

    /// Whether the addresses are in this pool.
    pub(super) fn is_in(&self, pool: &Arc<File>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Ends the write: writes the parts one behind the other. The caller may hold no lock.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn write(&self, parts: &[&[u8]]) -> io::Result<()> {
        let mut at = self.addresses.start;
        let written = parts.iter().try_for_each(|part| {
            write_pieces(&self.pool, at, part)?;
            at += part.len() as u64;
            Ok(())
        });
        let mut table = self.writes.table.lock();
        let mine = table.entries.iter_mut().find(|entry| entry.number == self.number);
        mine.into_iter().for_each(|entry| entry.is_under_way = false);
        self.writes.ended.notify_all();
        written
    }
}

impl Drop for FreshWrite {
    fn drop(&mut self) {
        self.writes.table.lock().entries.retain(|entry| entry.number != self.number);
        self.writes.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_wait_ends_when_the_last_write_has_ended() {
        let (writes, pool) =
            (Arc::<FreshWrites>::default(), Arc::new(tempfile::tempfile().unwrap()));
        let [written, dropped] = [0, 10].map(|at| writes.begin(&pool, ByteRange::at(at, 10)));
        let (sender, receiver) = channel();
        let waiter = Arc::clone(&writes);
        let thread = std::thread::spawn(move || {
            waiter.wait();
            sender.send(()).unwrap();
        });
        written.write(&[b"01234", b"56789"]).unwrap();
        assert!(receiver.recv_timeout(Duration::from_millis(20)).is_err(), "one is under way");
        drop(dropped);
        receiver.recv_timeout(LIMIT).unwrap();
        thread.join().unwrap();
        assert_eq!(writes.addresses(), [ByteRange::at(0, 10)], "fresh until it is dropped");
        drop(written);
        assert_eq!(writes.addresses(), []);
    }

    #[test]
    fn a_write_that_fails_has_ended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pool = Arc::new(File::options().read(true).open(file.path()).unwrap());
        let writes = Arc::<FreshWrites>::default();
        let write = writes.begin(&pool, ByteRange::at(0, 1));
        assert!(write.write(&[b"x"]).is_err(), "the file is open for reading");
        writes.wait();
    }
}
