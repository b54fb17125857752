//! The packs of one directory, as one source of chunks.
//!
//! ```text
//! archive/<name of the pack, 64 hexadecimal digits>
//! ```
//!
//! * A pack is published whole by rename, and never changes. Nothing refers to a pack: a chunk is
//!   looked up by its digest. So a pack can be written anew elsewhere, be twice as large for a
//!   while, or come from another machine.
//! * A power cut leaves a pack, or a file that ends in `.new`, which the next start removes.
//! * A reader holds the open file. So a pack is removed while it is read.
//!
//! In memory are 12 bytes for each chunk, the indexes of the packs that were used last, and at most
//! 16 MiB of frames.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Attempt, Error, Result};
use crate::store::archive::index::{Index, chunk_in};
use crate::store::archive::reader::Pack;
use crate::store::archive::writer::PackWriter;
use crate::store::archive::{Chunk, ChunkRef, ChunkSink, ChunkSource, Digest};
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::lru_cache::LruCache;

/// How many packs are kept open.
const OPEN_PACKS: usize = 32;
/// How many decompressed frames are cached; each has at most 256 KiB.
const CACHED_FRAMES: usize = 64;
/// A pack of which less than this part is live is written anew: one half.
const MIN_LIVE: (u64, u64) = (1, 2);

/// The number of a pack while the archive is open.
type Slot = u32;

#[derive(Default)]
struct State {
    names: BTreeMap<Slot, Digest>,
    next: Slot,
    /// A pack that has the chunk, by the first eight bytes of its digest.
    places: HashMap<u64, Slot>,
}

impl State {
    fn slot_of(&self, name: &Digest) -> Option<Slot> {
        self.names.iter().find(|(_, known)| *known == name).map(|(slot, _)| *slot)
    }

    fn add(&mut self, name: Digest, index: &Index) -> Slot {
        let slot = self.next;
        self.next += 1;
        self.names.insert(slot, name);
        for entry in index.chunks() {
            self.places.insert(prefix(&entry.chunk.digest), slot);
        }
        slot
    }

    fn remove(&mut self, slot: Slot) {
        self.names.remove(&slot);
        self.places.retain(|_, at| *at != slot);
    }
}

fn prefix(digest: &Digest) -> u64 {
    digest.0.first_chunk::<8>().map_or(0, |first| u64::from_le_bytes(*first))
}

/// The packs of a directory.
pub struct Archive {
    dir: StoreDir,
    durable: bool,
    /// Serialises those who publish and remove packs.
    writing: Mutex<()>,
    state: Mutex<State>,
    open: Mutex<LruCache<Slot, Pack<File>>>,
    frames: Mutex<LruCache<(Slot, u32), Vec<u8>>>,
}

/// The outcome of [`Archive::rewrite`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rewritten {
    /// Packs that are gone.
    pub removed: usize,
    /// Packs that took in what is live of them.
    pub written: usize,
}

impl Archive {
    /// Opens the packs in a directory, and removes files that an interrupted write left. A damaged
    /// pack is an error: content may be missing.
    ///
    /// # Errors
    /// As open(2) and readdir(3), and damage.
    pub fn open(dir: StoreDir, durable: bool) -> Result<Archive> {
        for temp in dir.list(|name| name.ends_with(".new").then(|| name.to_owned()))? {
            dir.remove(&temp)?;
        }
        let mut names = dir.list(Digest::parse)?;
        names.sort_unstable();
        let archive = Archive {
            dir,
            durable,
            writing: Mutex::new(()),
            state: Mutex::default(),
            open: Mutex::new(LruCache::new(OPEN_PACKS)),
            frames: Mutex::new(LruCache::new(CACHED_FRAMES)),
        };
        for name in names {
            let pack = archive.open_file(&name)?;
            archive.state.lock().add(name, pack.index());
        }
        Ok(archive)
    }

    fn open_file(&self, name: &Digest) -> Result<Pack<File>> {
        let file = self.dir.file(&name.to_string(), false)?;
        let what = self.dir.show(&name.to_string());
        let pack = Pack::open(file, what.clone())?;
        if pack.name() != *name {
            let why = format!("it is pack {}", pack.name());
            return Err(Error::damage(format!("read {what}"), why));
        }
        Ok(pack)
    }

    fn pack(&self, slot: Slot) -> Result<Option<Arc<Pack<File>>>> {
        if let Some(open) = self.open.lock().get(&slot) {
            return Ok(Some(open));
        }
        let Some(name) = self.state.lock().names.get(&slot).copied() else { return Ok(None) };
        let pack = match self.open_file(&name) {
            // Its chunks were written anew meanwhile.
            Err(_) if !self.state.lock().names.contains_key(&slot) => return Ok(None),
            pack => Arc::new(pack?),
        };
        self.open.lock().insert(slot, Arc::clone(&pack));
        Ok(Some(pack))
    }

    /// The names of the packs.
    pub fn names(&self) -> Vec<Digest> {
        self.state.lock().names.values().copied().collect()
    }

    /// Opens a pack by its name. `None` if there is none.
    ///
    /// # Errors
    /// As open(2), and damage.
    pub fn by_name(&self, name: &Digest) -> Result<Option<Arc<Pack<File>>>> {
        let slot = self.state.lock().slot_of(name);
        slot.map_or(Ok(None), |slot| self.pack(slot))
    }

    /// Whether a pack has a chunk.
    ///
    /// # Errors
    /// As open(2), and damage.
    pub fn has(&self, digest: &Digest) -> Result<bool> {
        Ok(self.find(digest)?.is_some())
    }

    /// A pack that has a chunk.
    fn find(&self, digest: &Digest) -> Result<Option<(Slot, Arc<Pack<File>>)>> {
        loop {
            let first = self.state.lock().places.get(&prefix(digest)).copied();
            let Some(first) = first else { return Ok(None) };
            // The pack may have been removed meanwhile; then the place is another one by now.
            let Some(pack) = self.pack(first)? else { continue };
            if pack.index().find(digest).is_some() {
                return Ok(Some((first, pack)));
            }
            return self.find_in_all(digest);
        }
    }

    /// Two digests with the same beginning: only a search tells where the other one is.
    fn find_in_all(&self, digest: &Digest) -> Result<Option<(Slot, Arc<Pack<File>>)>> {
        let slots: Vec<Slot> = self.state.lock().names.keys().copied().collect();
        for slot in slots {
            if let Some(pack) = self.pack(slot)?
                && pack.index().find(digest).is_some()
            {
                return Ok(Some((slot, pack)));
            }
        }
        Ok(None)
    }

    /// Reads bytes of a chunk from an offset in it. Returns false if no pack has the chunk; with
    /// `nowait` also if its frame is not in memory.
    ///
    /// # Errors
    /// As pread(2), and damage; a range beyond the end of the chunk counts as damage.
    pub fn read_at(
        &self,
        digest: &Digest,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> Result<bool> {
        let Some((slot, pack)) = self.find(digest)? else { return Ok(false) };
        let Some(entry) = pack.index().find(digest) else { return Ok(false) };
        let cached = self.frames.lock().get(&(slot, entry.frame));
        let frame = match cached {
            Some(frame) => frame,
            None if nowait => return Ok(false),
            None => {
                let Some(frame) = pack.index().frames().get(entry.frame as usize) else {
                    return Ok(false);
                };
                let raw = Arc::new(pack.frame(frame)?);
                self.frames.lock().insert((slot, entry.frame), Arc::clone(&raw));
                raw
            }
        };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let part = chunk_in(&frame, &entry)
            .and_then(|chunk| chunk.get(from..from.saturating_add(bytes.len())));
        let beyond = || Error::damage(format!("read chunk {digest}"), "it is shorter");
        bytes.copy_from_slice(part.ok_or_else(beyond)?);
        Ok(true)
    }

    /// Begins to add chunks.
    pub fn writer(&self) -> ArchiveWriter<'_> {
        ArchiveWriter { archive: self, pack: None, written: Vec::new() }
    }

    /// Ends a pack and gives it its name.
    fn publish(&self, pack: PackWriter<FileWriter>, temp: &str) -> Result<Digest> {
        let attempt = || format!("publish {}", self.dir.show(temp));
        let (writer, name, index) = pack.finish().attempt(attempt)?;
        if self.durable {
            disk::sync(&writer.file).attempt(attempt)?;
        }
        let _writing = self.writing.lock();
        disk::rename(&self.dir, temp, &name.to_string()).attempt(attempt)?;
        if self.durable {
            self.dir.sync()?;
        }
        let mut state = self.state.lock();
        if state.slot_of(&name).is_none() {
            state.add(name, &index);
        }
        Ok(name)
    }

    /// Removes the packs without a live chunk, and writes the live chunks of those anew of which
    /// less than half is live. The new packs are on disk before an old one is removed.
    ///
    /// # Errors
    /// As the calls that write and remove files, and damage of a live chunk. Nothing live is lost.
    pub fn rewrite(&self, is_live: &dyn Fn(&Digest) -> bool) -> Result<Rewritten> {
        let slots: Vec<Slot> = self.state.lock().names.keys().copied().collect();
        let mut sparse = Vec::new();
        let mut writer = self.writer();
        for slot in slots {
            let Some(pack) = self.pack(slot)? else { continue };
            let live = live_bytes(pack.index(), is_live);
            if live * MIN_LIVE.1 >= pack.index().stored() * MIN_LIVE.0 && live > 0 {
                continue;
            }
            sparse.push(slot);
            copy_live(&pack, is_live, &mut writer)?;
        }
        let written = writer.finish()?;
        let _writing = self.writing.lock();
        let mut removed = 0;
        for slot in sparse {
            let name = self.state.lock().names.get(&slot).copied();
            // A pack whose copy has the same chunks in the same order is the copy.
            let Some(name) = name.filter(|name| !written.contains(name)) else { continue };
            self.state.lock().remove(slot);
            self.open.lock().remove(&slot);
            self.dir.remove(&name.to_string())?;
            removed += 1;
        }
        Ok(Rewritten { removed, written: written.len() })
    }
}

/// The stored bytes that the live chunks of a pack take, about: those of each frame by the part of
/// it that is live.
fn live_bytes(index: &Index, is_live: &dyn Fn(&Digest) -> bool) -> u64 {
    let of_frame = |frame| {
        let chunks = index.chunks_of(frame).iter().filter(|entry| is_live(&entry.chunk.digest));
        let live: u64 = chunks.map(|entry| u64::from(entry.chunk.len)).sum();
        (live * u64::from(frame.stored)).div_ceil(u64::from(frame.raw))
    };
    index.frames().iter().map(of_frame).sum()
}

fn copy_live(
    pack: &Pack<File>,
    is_live: &dyn Fn(&Digest) -> bool,
    writer: &mut ArchiveWriter<'_>,
) -> Result<()> {
    for frame in pack.index().frames() {
        let live = |digest: &Digest| is_live(digest);
        let chunks = pack.index().chunks_of(frame);
        if !chunks.iter().any(|entry| live(&entry.chunk.digest)) {
            continue;
        }
        // Verified: a flipped bit is never copied.
        let raw = pack.frame(frame)?;
        let live = chunks.iter().filter(|entry| live(&entry.chunk.digest));
        for chunk in live.filter_map(|entry| chunk_in(&raw, entry)).filter_map(Chunk::new) {
            writer.add(chunk)?;
        }
    }
    Ok(())
}

impl ChunkSource for Archive {
    fn get(&self, chunk: &ChunkRef) -> Result<Vec<u8>> {
        let mut bytes = vec![0; chunk.len as usize];
        match self.read_at(&chunk.digest, 0, &mut bytes, false)? {
            true => Ok(bytes),
            false => {
                let attempt = format!("read chunk {}", chunk.digest);
                Err(Error::damage(attempt, "no pack of the archive has it"))
            }
        }
    }
}

/// Writes at the end of a file, a mebibyte at once.
struct FileWriter {
    file: File,
    at: u64,
    buffer: Vec<u8>,
}

impl Write for FileWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= 1 << 20 {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        disk::write_at(&self.file, &self.buffer, self.at)?;
        self.at += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// Adds chunks to an archive in as many packs as they need. A pack that is not finished is dropped.
pub struct ArchiveWriter<'a> {
    archive: &'a Archive,
    /// The pack that is written, and its name until it is published.
    pack: Option<(PackWriter<FileWriter>, String)>,
    written: Vec<Digest>,
}

impl ArchiveWriter<'_> {
    /// Adds a chunk, even if a pack has it.
    fn add(&mut self, chunk: Chunk<'_>) -> Result<()> {
        let (pack, temp) = match &mut self.pack {
            Some(pack) => pack,
            none => none.insert(begin(self.archive)?),
        };
        pack.add(chunk).attempt(|| format!("write {}", self.archive.dir.show(temp)))?;
        if pack.is_full() { self.publish() } else { Ok(()) }
    }

    /// Ends the frame that is written: see [`PackWriter::end_frame`].
    ///
    /// # Errors
    /// As write(2).
    pub fn end_frame(&mut self) -> Result<()> {
        match &mut self.pack {
            None => Ok(()),
            Some((pack, temp)) => {
                pack.end_frame().attempt(|| format!("write {}", self.archive.dir.show(temp)))
            }
        }
    }

    fn publish(&mut self) -> Result<()> {
        let Some((pack, temp)) = self.pack.take() else { return Ok(()) };
        let published = self.archive.publish(pack, &temp);
        if published.is_err() {
            self.remove(&temp);
        }
        self.written.push(published?);
        Ok(())
    }

    /// Publishes the last pack. Returns the names of all packs that were written: from now on they
    /// survive a power cut.
    ///
    /// # Errors
    /// As write(2), fsync(2) and rename(2).
    pub fn finish(mut self) -> Result<Vec<Digest>> {
        self.publish()?;
        Ok(std::mem::take(&mut self.written))
    }

    fn remove(&self, temp: &str) {
        if let Err(error) = self.archive.dir.remove(temp) {
            ::log::warn!("{error}; the next start removes it");
        }
    }
}

/// Begins a pack under a name that no other writer uses.
fn begin(archive: &Archive) -> Result<(PackWriter<FileWriter>, String)> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let temp = format!("{}.new", NEXT.fetch_add(1, Ordering::Relaxed));
    let file = archive.dir.file(&temp, true)?;
    let attempt = || format!("write {}", archive.dir.show(&temp));
    // It is a leftover if it has bytes.
    disk::cut(&file, 0).attempt(attempt)?;
    let writer = FileWriter { file, at: 0, buffer: Vec::new() };
    Ok((PackWriter::new(writer).attempt(attempt)?, temp))
}

impl ChunkSink for ArchiveWriter<'_> {
    fn put(&mut self, chunk: Chunk<'_>) -> Result<()> {
        if self.archive.has(&chunk.digest())? {
            return Ok(());
        }
        self.add(chunk)
    }
}

impl Drop for ArchiveWriter<'_> {
    fn drop(&mut self) {
        if let Some((_, temp)) = self.pack.take() {
            self.remove(&temp);
        }
    }
}
