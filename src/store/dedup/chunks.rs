//! The chunk table: an index from the hash of a chunk to addresses that may hold it, in the file
//! `chunks`. One table serves all layers of a store.
//!
//! ```text
//! 0       "jailfs-chunks 1\n" | bits u32 | done u32 | count u64 | crc u32
//!         crc: CRC-32C of what is before it
//! 4096    2^bits buckets of 4096 bytes, each 256 entries of 16 bytes:
//!         tag, 6 bytes | layer u32 | address, 6 bytes      little-endian; layer 0: free entry
//! ```
//!
//! * The table only proposes. A caller compares the bytes that are at an address now. So an entry
//!   that is stale, torn by a power cut or forged costs one comparison, and a lost entry costs
//!   space.
//! * The table is therefore never synced, and an invalid table is started anew.
//! * The first `bits` bits of a tag are the number of its bucket, so doubling the table splits each
//!   bucket in two. In a full bucket, a new entry replaces another one.
//!
//! The table is on disk, so the memory of the process does not grow with the store. A lookup is one
//! read of 4 KiB, usually from the page cache.

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
/// The table doubles when its buckets hold more entries than this on average.
const FULL: u64 = 192;
/// Limits the table to 4 GiB, which is about 200 million chunks.
const MOST_BITS: u32 = 20;
/// Bits of a tag.
const TAG_BITS: u32 = 48;

/// An entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The first 48 bits of the hash.
    pub tag: u64,
    /// The layer that has the chunk.
    pub layer: LayerId,
    /// The address of its first byte.
    pub offset: u64,
}

/// The chunk table. One thread uses it at a time.
pub struct ChunkTable {
    file: File,
    bits: u32,
    count: u64,
    searched_below: LayerId,
}

/// The tag of a hash: its first 48 bits.
pub fn tag_of(hash: &blake3::Hash) -> u64 {
    let first = hash.as_bytes().first_chunk::<8>().copied().unwrap_or_default();
    u64::from_be_bytes(first) >> (64 - TAG_BITS)
}

impl Store {
    /// Opens the chunk table, or starts one if there is no valid table.
    ///
    /// # Errors
    /// As open(2), pread(2) and pwrite(2).
    pub fn chunk_table(&self) -> Result<ChunkTable> {
        let attempt = || format!("open {}", self.dir.show(CHUNKS));
        let file = self.dir.file(CHUNKS, true)?;
        match read_head(&file).attempt(attempt)? {
            Some((bits, searched_below, count)) => {
                Ok(ChunkTable { file, bits, count, searched_below })
            }
            None => ChunkTable::start(file).attempt(attempt),
        }
    }

    /// Adds chunks to the table, which doubles if it gets too full.
    ///
    /// # Errors
    /// As pread(2), pwrite(2) and rename(2); some chunks may be missing then.
    pub fn add_chunks(&self, table: &mut ChunkTable, mut new: Vec<Chunk>) -> Result<()> {
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

    fn double(&self, table: &mut ChunkTable) -> Result<()> {
        let attempt = || format!("write {}", self.dir.show(CHUNKS));
        let temp = format!("{CHUNKS}.new");
        self.dir.remove(&temp)?;
        let mut larger = ChunkTable {
            file: self.dir.file(&temp, true)?,
            bits: table.bits + 1,
            count: 0,
            searched_below: table.searched_below,
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

impl ChunkTable {
    fn start(file: File) -> io::Result<ChunkTable> {
        disk::cut(&file, 0)?;
        let table = ChunkTable { file, bits: 0, count: 0, searched_below: LayerId(0) };
        table.write_head()?;
        Ok(table)
    }

    /// Layers below this one were searched and need no search again.
    pub fn searched_below(&self) -> LayerId {
        self.searched_below
    }

    /// Records that the layers below `layer` were searched.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn set_searched_below(&mut self, layer: LayerId) -> Result<()> {
        self.searched_below = layer;
        self.write_head().map_err(|e| Error::io(format!("write {CHUNKS}"), &e))
    }

    /// The layers and addresses that may hold a chunk with this tag, mostly the oldest entry first.
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
        disk::read_at(&self.file, &mut bytes, bucket_start(bucket))?;
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
            let is_known = bytes.chunks_exact(ENTRY).any(|old| old == entry);
            let free = bytes.chunks_exact(ENTRY).position(|old| decode(old).is_none());
            let is_free = free.is_some();
            // Any entry may be replaced: a chunk that is met again is added again.
            let slot = free.unwrap_or((chunk.tag % (BUCKET / ENTRY) as u64) as usize) * ENTRY;
            if let Some(slot) = bytes.get_mut(slot..slot + ENTRY).filter(|_| !is_known) {
                slot.copy_from_slice(&entry);
                self.count += u64::from(is_free);
            }
        }
        disk::write_at(&self.file, &bytes, bucket_start(number))
    }

    fn write_head(&self) -> io::Result<()> {
        let mut head = Vec::with_capacity(HEAD);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&self.bits.to_le_bytes());
        head.extend_from_slice(&self.searched_below.0.to_le_bytes());
        head.extend_from_slice(&self.count.to_le_bytes());
        let crc = crc32c::crc32c(&head);
        head.extend_from_slice(&crc.to_le_bytes());
        disk::write_at(&self.file, &head, 0)
    }
}

/// Reads bits, `searched_below` and count from the head of a table. `None` if it is not valid.
fn read_head(file: &File) -> io::Result<Option<(u32, LayerId, u64)>> {
    let mut head = [0; HEAD];
    if disk::read_at(file, &mut head, 0)? < HEAD {
        return Ok(None);
    }
    Ok(parse_head(&head).filter(|(bits, ..)| *bits <= MOST_BITS))
}

fn parse_head(head: &[u8; HEAD]) -> Option<(u32, LayerId, u64)> {
    let (checked, crc) = head.split_last_chunk::<4>()?;
    let (magic, rest) = checked.split_first_chunk::<16>()?;
    let (bits, rest) = rest.split_first_chunk::<4>()?;
    let (searched, rest) = rest.split_first_chunk::<4>()?;
    let count = rest.first_chunk::<8>()?;
    let is_valid = magic == MAGIC && crc32c::crc32c(checked) == u32::from_le_bytes(*crc);
    let searched = LayerId(u32::from_le_bytes(*searched));
    is_valid.then_some((u32::from_le_bytes(*bits), searched, u64::from_le_bytes(*count)))
}

/// The number of the bucket of a tag.
fn bucket(bits: u32, tag: u64) -> u64 {
    tag >> (TAG_BITS - bits)
}

/// The offset of a bucket in the file.
fn bucket_start(bucket: u64) -> u64 {
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

    fn new_store(dir: &tempfile::TempDir) -> Store {
        let options = StoreOptions { volatile: true, ..StoreOptions::default() };
        Store::create(dir.path(), b"/", (0, 0), options).unwrap()
    }

    #[test]
    fn an_added_chunk_is_still_found_after_the_table_has_grown() {
        let dir = tempfile::tempdir().unwrap();
        let store = new_store(&dir);
        let mut table = store.chunk_table().unwrap();
        assert_eq!(table.find(5).unwrap(), []);
        for part in 0..10 {
            store
                .add_chunks(&mut table, (part * 1000..part * 1000 + 1000).map(chunk).collect())
                .unwrap();
        }
        table.set_searched_below(LayerId(7)).unwrap();
        assert_eq!((table.bits, table.count), (6, 10_000));
        let again = store.chunk_table().unwrap();
        assert_eq!(again.searched_below(), LayerId(7));
        for n in 0..10_000 {
            let Chunk { tag, layer, offset } = chunk(n);
            assert!(again.find(tag).unwrap().contains(&(layer, offset)), "{n}");
        }
        assert_eq!(again.find(1 << 47).unwrap(), []);
    }

    #[test]
    fn a_full_bucket_replaces_entries_and_an_invalid_table_is_started_anew() {
        let dir = tempfile::tempdir().unwrap();
        let store = new_store(&dir);
        let mut table = store.chunk_table().unwrap();
        let same = |n: u64| Chunk { tag: 77, layer: LayerId(1), offset: n };
        store.add_chunks(&mut table, (0..190).map(same).collect()).unwrap();
        store.add_chunks(&mut table, (0..190).map(same).collect()).unwrap();
        assert_eq!(table.find(77).unwrap().len(), 190, "no entry is added twice");
        store.add_chunks(&mut table, (200..500).map(same).collect()).unwrap();
        assert_eq!(table.find(77).unwrap().len(), 256);
        table.file.write_all_at(b"x", 20).unwrap();
        let anew = store.chunk_table().unwrap();
        assert_eq!((anew.searched_below(), anew.find(77).unwrap()), (LayerId(0), vec![]));
    }
}
