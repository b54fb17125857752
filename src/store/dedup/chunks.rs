//! Which content there is, by its hash: `chunks`, one table for all layers of a store.
//!
//! ```text
//! 0       "jailfs-chunks 1\n" | bits u32 | done u32 | count u64 | crc u32      CRC-32C over what is before it
//! 4096    2^bits buckets of 4096 bytes, each 256 entries of 16 bytes:
//!         tag, 6 bytes | layer u32 | address, 6 bytes                          integers little-endian; layer 0: free
//! ```
//!
//! The first `bits` bits of a tag are the number of its bucket, so the table doubles by cutting every bucket in two. In a
//! full bucket a new entry takes the place of another.
//!
//! Always true: the table only proposes. Whoever finds an address in it compares the bytes that are there now, so an
//! entry that is out of date, torn by a power cut or made up costs a comparison and nothing else, and a lost one costs space. So it is
//! never synced, and a table that is not one begins anew. It lies on disk and not in memory: a look-up is one read of 4 KiB,
//! from the page cache of the host, and what the process itself holds does not grow with the store.

use std::fs::File;
use std::io;

use crate::error::{Attempt, Error, Result};
use crate::store::Store;
use crate::store::io::disk;
use crate::types::LayerId;

/// Name of the table in a store.
pub(in crate::store) const CHUNKS: &str = "chunks";
const MAGIC: &[u8; 16] = b"jailfs-chunks 1\n";
const HEAD: usize = 36;
const BUCKET: usize = 4096;
const ENTRY: usize = 16;
/// Entries of a bucket, on the average, from which on the table doubles.
const FULL: u64 = 192;
/// The table grows to 4 GiB at most: 200 million chunks.
const MOST_BITS: u32 = 20;
/// Bits of a tag.
const TAG_BITS: u32 = 48;

/// Content that has this hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// 48 bits of the hash.
    pub tag: u64,
    /// In which layer.
    pub layer: LayerId,
    /// At which address of its pool it begins.
    pub offset: u64,
}

/// The table. One thread at a time.
pub struct Chunks {
    file: File,
    bits: u32,
    count: u64,
    done: LayerId,
}

/// The 48 bits by which a hash is known.
pub fn tag_of(hash: &blake3::Hash) -> u64 {
    let first = hash.as_bytes().first_chunk::<8>().copied().unwrap_or_default();
    u64::from_be_bytes(first) >> (64 - TAG_BITS)
}

impl Store {
    /// Opens the table, or begins one.
    ///
    /// # Errors
    /// As the calls it is made of.
    pub fn chunks(&self) -> Result<Chunks> {
        let attempt = || format!("open {}", self.dir.show(CHUNKS));
        let file = self.dir.file(CHUNKS, true)?;
        match read_head(&file).attempt(attempt)? {
            Some((bits, done, count)) => Ok(Chunks { file, bits, count, done }),
            None => Chunks::begin(file).attempt(attempt),
        }
    }

    /// Adds chunks to the table. It grows where it must.
    ///
    /// # Errors
    /// As the calls it is made of; some may be missing then.
    pub fn add_chunks(&self, table: &mut Chunks, mut new: Vec<Chunk>) -> Result<()> {
        let attempt = || format!("write {}", self.dir.show(CHUNKS));
        while table.bits < MOST_BITS && table.count + new.len() as u64 > FULL << table.bits {
            self.double(table)?;
        }
        new.sort_unstable_by_key(|chunk| chunk.tag);
        let bits = table.bits;
        for group in new.chunk_by(|a, b| bucket(bits, a.tag) == bucket(bits, b.tag)) {
            table.add_to_bucket(group).attempt(attempt)?;
        }
        table.write_head().attempt(attempt)
    }

    fn double(&self, table: &mut Chunks) -> Result<()> {
        let attempt = || format!("write {}", self.dir.show(CHUNKS));
        let temp = format!("{CHUNKS}.new");
        self.dir.remove(&temp)?;
        let mut larger = Chunks {
            file: self.dir.file(&temp, true)?,
            bits: table.bits + 1,
            count: 0,
            done: table.done,
        };
        let bits = larger.bits;
        for number in 0..1u64 << table.bits {
            let mut all = table.entries(number).attempt(attempt)?;
            all.sort_unstable_by_key(|chunk| chunk.tag);
            for half in all.chunk_by(|a, b| bucket(bits, a.tag) == bucket(bits, b.tag)) {
                larger.add_to_bucket(half).attempt(attempt)?;
            }
        }
        larger.write_head().attempt(attempt)?;
        disk::rename(&self.dir, &temp, CHUNKS).attempt(attempt)?;
        *table = larger;
        Ok(())
    }
}

impl Chunks {
    fn begin(file: File) -> io::Result<Chunks> {
        disk::cut(&file, 0)?;
        let table = Chunks { file, bits: 0, count: 0, done: LayerId(0) };
        table.write_head()?;
        Ok(table)
    }

    /// The layers before this one need not be looked at again.
    pub fn done(&self) -> LayerId {
        self.done
    }

    /// Says which layers need not be looked at again.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn set_done(&mut self, before: LayerId) -> Result<()> {
        self.done = before;
        self.write_head().map_err(|e| Error::io(format!("write {CHUNKS}"), &e))
    }

    /// Where content with this hash may be.
    ///
    /// # Errors
    /// As pread(2).
    pub fn find(&self, tag: u64) -> io::Result<Vec<(LayerId, u64)>> {
        let mut found = self.entries(bucket(self.bits, tag))?;
        found.retain(|chunk| chunk.tag == tag);
        Ok(found.into_iter().map(|chunk| (chunk.layer, chunk.offset)).collect())
    }

    fn read_bucket(&self, bucket: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; BUCKET];
        disk::read_at(&self.file, &mut bytes, place(bucket))?;
        Ok(bytes)
    }

    fn entries(&self, bucket: u64) -> io::Result<Vec<Chunk>> {
        Ok(self.read_bucket(bucket)?.chunks_exact(ENTRY).filter_map(decode).collect())
    }

    fn add_to_bucket(&mut self, new: &[Chunk]) -> io::Result<()> {
        let Some(first) = new.first() else { return Ok(()) };
        let number = bucket(self.bits, first.tag);
        let mut bytes = self.read_bucket(number)?;
        for chunk in new {
            let entry = encode(chunk);
            let same = bytes.chunks_exact(ENTRY).any(|old| old == entry);
            let free = bytes.chunks_exact(ENTRY).position(|old| decode(old).is_none());
            let is_new = free.is_some();
            // Any other may go: what is found again is added again.
            let slot = free.unwrap_or((chunk.tag % (BUCKET / ENTRY) as u64) as usize) * ENTRY;
            if let Some(slot) = bytes.get_mut(slot..slot + ENTRY).filter(|_| !same) {
                slot.copy_from_slice(&entry);
                self.count += u64::from(is_new);
            }
        }
        disk::write_at(&self.file, &bytes, place(number))
    }

    fn write_head(&self) -> io::Result<()> {
        let mut head = Vec::with_capacity(HEAD);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&self.bits.to_le_bytes());
        head.extend_from_slice(&self.done.0.to_le_bytes());
        head.extend_from_slice(&self.count.to_le_bytes());
        let crc = crc32c::crc32c(&head);
        head.extend_from_slice(&crc.to_le_bytes());
        disk::write_at(&self.file, &head, 0)
    }
}

/// What a table says of itself; none if it is not one.
fn read_head(file: &File) -> io::Result<Option<(u32, LayerId, u64)>> {
    let mut head = [0; HEAD];
    if disk::read_at(file, &mut head, 0)? < HEAD {
        return Ok(None);
    }
    Ok(parse_head(&head).filter(|(bits, ..)| *bits <= MOST_BITS))
}

fn parse_head(head: &[u8; HEAD]) -> Option<(u32, LayerId, u64)> {
    let (told, crc) = head.split_last_chunk::<4>()?;
    let (magic, rest) = told.split_first_chunk::<16>()?;
    let (bits, rest) = rest.split_first_chunk::<4>()?;
    let (done, rest) = rest.split_first_chunk::<4>()?;
    let count = rest.first_chunk::<8>()?;
    let is_whole = magic == MAGIC && crc32c::crc32c(told) == u32::from_le_bytes(*crc);
    let done = LayerId(u32::from_le_bytes(*done));
    is_whole.then_some((u32::from_le_bytes(*bits), done, u64::from_le_bytes(*count)))
}

/// The number of the bucket of a tag.
fn bucket(bits: u32, tag: u64) -> u64 {
    tag >> (TAG_BITS - bits)
}

/// Where a bucket begins in the file.
fn place(bucket: u64) -> u64 {
    (bucket + 1) * BUCKET as u64
}

fn encode(chunk: &Chunk) -> [u8; ENTRY] {
    let low = |number: u64| number.to_le_bytes().into_iter().take(6);
    let bytes = low(chunk.tag).chain(chunk.layer.0.to_le_bytes()).chain(low(chunk.offset));
    let mut entry = [0; ENTRY];
    entry.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    entry
}

fn decode(entry: &[u8]) -> Option<Chunk> {
    let (tag, rest) = entry.split_first_chunk::<6>()?;
    let (layer, rest) = rest.split_first_chunk::<4>()?;
    let layer = LayerId(u32::from_le_bytes(*layer));
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    (layer != LayerId(0)).then(|| Chunk { tag: number(tag), layer, offset: number(rest) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::store::StoreOptions;

    fn chunk(n: u64) -> Chunk {
        let tag = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
        Chunk { tag, layer: LayerId(n as u32 % 1000 + 1), offset: n * 3 }
    }

    #[test]
    fn what_was_added_is_found_also_when_the_table_has_grown() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(
            dir.path(),
            b"/",
            (0, 0),
            StoreOptions { volatile: true, ..StoreOptions::default() },
        )
        .unwrap();
        let mut table = store.chunks().unwrap();
        assert_eq!(table.find(5).unwrap(), []);
        for part in 0..10 {
            store
                .add_chunks(&mut table, (part * 1000..part * 1000 + 1000).map(chunk).collect())
                .unwrap();
        }
        table.set_done(LayerId(7)).unwrap();
        assert_eq!((table.bits, table.count), (6, 10_000));
        let again = store.chunks().unwrap();
        assert_eq!(again.done(), LayerId(7));
        for n in 0..10_000 {
            let Chunk { tag, layer, offset } = chunk(n);
            assert!(again.find(tag).unwrap().contains(&(layer, offset)), "{n}");
        }
        assert_eq!(again.find(1 << 47).unwrap(), []);
    }

    #[test]
    fn a_full_bucket_gives_up_others_and_a_table_that_is_none_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(
            dir.path(),
            b"/",
            (0, 0),
            StoreOptions { volatile: true, ..StoreOptions::default() },
        )
        .unwrap();
        let mut table = store.chunks().unwrap();
        let same = |n: u64| Chunk { tag: 77, layer: LayerId(1), offset: n };
        store.add_chunks(&mut table, (0..190).map(same).collect()).unwrap();
        store.add_chunks(&mut table, (0..190).map(same).collect()).unwrap();
        assert_eq!(table.find(77).unwrap().len(), 190, "none is there twice");
        store.add_chunks(&mut table, (200..500).map(same).collect()).unwrap();
        assert_eq!(table.find(77).unwrap().len(), 256);
        table.file.write_all_at(b"x", 20).unwrap();
        let anew = store.chunks().unwrap();
        assert_eq!((anew.done(), anew.find(77).unwrap()), (LayerId(0), vec![]));
    }
}
