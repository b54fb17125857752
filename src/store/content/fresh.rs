//! Writes to addresses of a pool to which no record refers yet.
//!
//! Addresses are *fresh* from their allocation until a record refers to them or the write is
//! dropped. No reader can find them, so a thread can write to them without the lock of the head,
//! however long the disk takes.
//!
//! Always true:
//! * The table has all fresh addresses. `PoolWriter::reserved` lists them, and `PoolWriter::unused`
//!   leaves them out, so no thread punches them.
//! * A pool is sealed when no such write is under way, and none begins later. A sealed block never
//!   changes, and one block can hold fresh addresses behind recorded ones.

use std::fs::File;
use std::io;
use std::sync::Arc;

use nix::errno::Errno;
use parking_lot::{Condvar, Mutex};

use crate::store::io::disk;
use crate::types::{ByteRange, Ino};

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
    /// No write may begin any more.
    is_closed: bool,
}

struct Entry {
    number: u64,
    addresses: ByteRange,
    is_under_way: bool,
}

impl FreshWrites {
    /// Adds fresh addresses of a pool. `window` is the file in whose window they are.
    pub(super) fn add(
        self: &Arc<Self>,
        pool: &Arc<File>,
        addresses: ByteRange,
        window: Option<Ino>,
    ) -> FreshWrite {
        let mut table = self.table.lock();
        table.last += 1;
        let number = table.last;
        table.entries.push(Entry { number, addresses, is_under_way: false });
        let (pool, writes) = (Arc::clone(pool), Arc::clone(self));
        FreshWrite { pool, addresses, window, number, writes }
    }

    /// All fresh addresses.
    pub(super) fn addresses(&self) -> Vec<ByteRange> {
        self.table.lock().entries.iter().map(|entry| entry.addresses).collect()
    }

    /// Refuses all further writes, and waits until none is under way.
    pub(super) fn close(&self) {
        let mut table = self.table.lock();
        table.is_closed = true;
        while table.entries.iter().any(|entry| entry.is_under_way) {
            self.ended.wait(&mut table);
        }
    }
}

/// A write to fresh addresses. They are fresh while it lives.
pub struct FreshWrite {
    pool: Arc<File>,
    addresses: ByteRange,
    window: Option<Ino>,
    number: u64,
    writes: Arc<FreshWrites>,
}

impl FreshWrite {
    /// The addresses.
    pub fn addresses(&self) -> ByteRange {
        self.addresses
    }

    /// The file in whose window the addresses are.
    pub(super) fn window(&self) -> Option<Ino> {
        self.window
    }

    /// Whether the addresses are in this pool.
    pub(super) fn is_in(&self, pool: &Arc<File>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Writes the parts one behind the other.
    ///
    /// # Errors
    /// As pwrite(2); ESTALE if the pool is sealed. Then no record can refer to the addresses.
    pub fn write(&self, parts: &[&[u8]]) -> io::Result<()> {
        self.set_under_way(true)?;
        let written = self.write_parts(parts);
        self.set_under_way(false)?;
        written
    }

    fn write_parts(&self, parts: &[&[u8]]) -> io::Result<()> {
        let mut at = self.addresses.start;
        let filled = parts.iter().filter(|part| !part.is_empty());
        // One call for a short write costs less than one for each part of it.
        if filled.clone().count() > 1 && self.addresses.len() <= PIECE as u64 {
            return write_pieces(&self.pool, at, &parts.concat());
        }
        for part in filled {
            write_pieces(&self.pool, at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn set_under_way(&self, is_under_way: bool) -> io::Result<()> {
        let mut table = self.writes.table.lock();
        if is_under_way && table.is_closed {
            return Err(io::Error::from_raw_os_error(Errno::ESTALE as i32));
        }
        let mine = table.entries.iter_mut().find(|entry| entry.number == self.number);
        mine.into_iter().for_each(|entry| entry.is_under_way = is_under_way);
        self.writes.ended.notify_all();
        Ok(())
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

    /// Ends the write of an entry as another thread would.
    fn end(write: &FreshWrite) {
        write.set_under_way(false).unwrap();
    }

    #[test]
    fn a_pool_closes_when_the_last_write_has_ended_and_then_refuses_others() {
        let writes = Arc::<FreshWrites>::default();
        let pool = Arc::new(tempfile::tempfile().unwrap());
        let [ended, dropped, late] =
            [0, 10, 20].map(|at| writes.add(&pool, ByteRange::at(at, 10), None));
        ended.write(&[b"01234", b"56789"]).unwrap();
        ended.set_under_way(true).unwrap();
        dropped.set_under_way(true).unwrap();
        let (sender, receiver) = channel();
        let closing = Arc::clone(&writes);
        let thread = std::thread::spawn(move || {
            closing.close();
            sender.send(()).unwrap();
        });
        while !writes.table.lock().is_closed {
            std::thread::yield_now();
        }
        end(&ended);
        assert!(receiver.recv_timeout(Duration::from_millis(20)).is_err(), "one is under way");
        assert_eq!(late.write(&[b"late"]).unwrap_err().raw_os_error(), Some(Errno::ESTALE as i32));
        drop(dropped);
        receiver.recv_timeout(LIMIT).unwrap();
        thread.join().unwrap();
        assert_eq!(writes.addresses(), [0, 20].map(|at| ByteRange::at(at, 10)), "until the drop");
        drop((ended, late));
        assert_eq!(writes.addresses(), []);
        assert_eq!(pool.metadata().unwrap().len(), 10, "the late write wrote nothing");
    }

    #[test]
    fn a_write_that_fails_has_ended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pool = Arc::new(File::options().read(true).open(file.path()).unwrap());
        let writes = Arc::<FreshWrites>::default();
        let write = writes.add(&pool, ByteRange::at(0, 1), None);
        assert!(write.write(&[b"x"]).is_err(), "the file is open for reading");
        writes.close();
    }
}
