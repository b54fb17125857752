//! The packs of one directory, as one source of chunks.
//!
//! ```text
//! archive/<name of the pack, 64 hexadecimal digits>
//! ```
//!
//! * A pack is published whole by rename, and never changes. A chunk is looked up by its digest,
//!   whatever pack has it. So its pack can be written anew, and be there twice for a while.
//! * The caller knows which packs belong to the archive, and removes other files at a start: a
//!   power cut can leave a pack that nothing names, or a file that ends in `.new`.
//! * A reader holds the open file. So a pack is removed while it is read.
//! * One writer at a time: chunks that it found in a pack stay there until it is dropped.
//!
//! In memory are 12 bytes for each chunk, the indexes of the packs that were used last, and at most
//! 16 MiB of frames.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::archive::index::{Index, chunk_in};
use crate::store::archive::reader::Pack;
use crate::store::archive::writer::{FULL_FRAME, FULL_PACK, PackWriter};
use crate::store::archive::{Chunk, ChunkRef, ChunkSink, ChunkSource, Digest};
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::lru_cache::LruCache;
use crate::sys::lock::{Rank, RankedGuard, RankedMutex};

/// How many packs are kept open.
const OPEN_PACKS: usize = 32;
/// How many decompressed frames are cached; each has at most 256 KiB.
const CACHED_FRAMES: usize = 64;
/// A pack of which less than this part is live is written anew: two thirds.
const MIN_LIVE: (u64, u64) = (2, 3);

/// A pack is joined with smaller ones if it has at most so many times the bytes of all of them.
const JOIN_RATIO: u64 = 2;
/// Live bytes that are written anew at once, about: they fit in the reserve of a store.
const MAX_ROUND: u64 = 3 << 20;
/// The smallest space that a file takes on a host, in bytes.
const HOST_BLOCK: u64 = 4096;

/// The number of a pack while the archive is open.
type Slot = u32;

/// A pack of the directory.
#[derive(Clone, Copy)]
struct Known {
    name: Digest,
    /// Bytes of the file.
    bytes: u64,
}

#[derive(Default)]
struct State {
    packs: BTreeMap<Slot, Known>,
    next: Slot,
    /// A pack that has the chunk, by the first eight bytes of its digest.
    places: HashMap<u64, Slot>,
    /// Packs with a damaged frame that is needed. They stay as they are.
    damaged: BTreeSet<Slot>,
}

impl State {
    fn slot_of(&self, name: &Digest) -> Option<Slot> {
        self.packs.iter().find(|(_, known)| known.name == *name).map(|(slot, _)| *slot)
    }

    fn add(&mut self, known: Known, index: &Index) -> Slot {
        let slot = self.next;
        self.next += 1;
        self.packs.insert(slot, known);
        for entry in index.chunks() {
            self.places.insert(prefix(&entry.chunk.digest), slot);
        }
        slot
    }

    fn remove(&mut self, slot: Slot) {
        self.packs.remove(&slot);
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
    writing: RankedMutex<()>,
    state: RankedMutex<State>,
    open: RankedMutex<LruCache<Slot, Pack<File>>>,
    frames: RankedMutex<LruCache<(Slot, u32), Vec<u8>>>,
}

impl Archive {
    /// Opens packs of a directory. Returns the error of each pack that is missing or damaged, too:
    /// then content may be missing.
    pub fn open(dir: StoreDir, names: &[Digest], durable: bool) -> (Archive, Vec<Error>) {
        let archive = Archive {
            dir,
            durable,
            writing: RankedMutex::new(Rank::ArchiveWriter, ()),
            state: RankedMutex::new(Rank::Archive, State::default()),
            open: RankedMutex::new(Rank::Archive, LruCache::new(OPEN_PACKS)),
            frames: RankedMutex::new(Rank::Archive, LruCache::new(CACHED_FRAMES)),
        };
        let mut errors = Vec::new();
        for name in names {
            match archive.open_file(name) {
                Ok(pack) => {
                    let known = Known { name: *name, bytes: pack.bytes() };
                    archive.state.lock().add(known, pack.index());
                }
                Err(error) => errors.push(error),
            }
        }
        (archive, errors)
    }

    /// The directory of the packs.
    pub fn dir(&self) -> &StoreDir {
        &self.dir
    }

    /// Whether it syncs.
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Removes the files of the directory that are neither packs of the archive nor `kept`.
    ///
    /// # Errors
    /// As readdir(3) and unlink(2).
    pub fn remove_others(&self, kept: &str) -> Result<()> {
        let is_known = |name: &str| {
            Digest::parse(name).is_some_and(|name| self.state.lock().slot_of(&name).is_some())
        };
        let is_left = |name: &str| !matches!(name, "." | "..") && name != kept && !is_known(name);
        let left = self.dir.list(|name| is_left(name).then(|| name.to_owned()))?;
        left.iter().try_for_each(|name| self.dir.remove(name))
    }

    fn open_file(&self, name: &Digest) -> Result<Pack<File>> {
        let what = self.dir.show(&name.to_string());
        let missing = || Error::damage(format!("read {what}"), "the file is missing");
        let file = self.dir.open_file(&name.to_string())?.ok_or_else(missing)?;
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
        let known = self.state.lock().packs.get(&slot).copied();
        let Some(Known { name, .. }) = known else { return Ok(None) };
        let pack = match self.open_file(&name) {
            // Its chunks were written anew meanwhile.
            Err(_) if !self.state.lock().packs.contains_key(&slot) => return Ok(None),
            pack => Arc::new(pack?),
        };
        self.open.lock().insert(slot, Arc::clone(&pack));
        Ok(Some(pack))
    }

    /// The number of packs, and the space that they take, in bytes.
    pub fn space(&self) -> (usize, u64) {
        let state = self.state.lock();
        let bytes = |known: &Known| known.bytes.next_multiple_of(HOST_BLOCK);
        (state.packs.len(), state.packs.values().map(bytes).sum())
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
        let slots: Vec<Slot> = self.state.lock().packs.keys().copied().collect();
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

    /// Begins to add chunks, as the only writer.
    pub fn writer(&self) -> ArchiveWriter<'_> {
        let writing = self.writing.lock();
        ArchiveWriter { archive: self, _writing: writing, pack: None, written: Vec::new() }
    }

    /// Ends a pack and gives it its name.
    fn publish(&self, pack: PackWriter<FileWriter>, temp: &str) -> Result<Digest> {
        let attempt = || format!("publish {}", self.dir.show(temp));
        let (writer, name, index) = pack.finish().attempt(attempt)?;
        if self.durable {
            disk::sync(&writer.file).attempt(attempt)?;
        }
        disk::rename(&self.dir, temp, &name.to_string()).attempt(attempt)?;
        if self.durable {
            self.dir.sync()?;
        }
        let mut state = self.state.lock();
        if state.slot_of(&name).is_none() {
            state.add(Known { name, bytes: writer.at }, &index);
        }
        Ok(name)
    }

    /// The packs that are worth writing anew. If some have nothing live, only these, because that
    /// needs no space. Otherwise some of which little is live, and small ones that become one
    /// with them, so that there are few.
    fn worth_rewriting(&self, is_live: &dyn Fn(&Digest) -> bool) -> Result<Vec<Slot>> {
        let (mut dead, mut sparse, mut dense) = (Vec::new(), Vec::new(), Vec::new());
        let (packs, damaged) = {
            let state = self.state.lock();
            (state.packs.clone(), state.damaged.clone())
        };
        for (slot, known) in packs.into_iter().filter(|(slot, _)| !damaged.contains(slot)) {
            let Some(pack) = self.pack(slot)? else { continue };
            let live = live_bytes(pack.index(), is_live);
            match live * MIN_LIVE.1 < pack.index().stored() * MIN_LIVE.0 {
                _ if live == 0 => dead.push(slot),
                true => sparse.push((live, slot)),
                false => dense.push((known.bytes, slot)),
            }
        }
        if !dead.is_empty() {
            return Ok(dead);
        }
        sparse.sort_unstable();
        dense.sort_unstable();
        let (mut chosen, mut sum) = (Vec::new(), 0);
        for (live, slot) in sparse {
            chosen.push(slot);
            sum += live;
            if sum > MAX_ROUND {
                return Ok(chosen);
            }
        }
        let least = if chosen.is_empty() { 2 } else { 0 };
        let mut joined = Vec::new();
        for (bytes, slot) in dense {
            let is_small = sum == 0 || bytes <= JOIN_RATIO * sum.max(HOST_BLOCK);
            if !is_small || bytes >= FULL_PACK / 2 {
                break;
            }
            joined.push(slot);
            sum += bytes;
        }
        chosen.extend(joined.iter().filter(|_| joined.len() >= least));
        Ok(chosen)
    }
}

impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Archive").field("dir", &self.dir.path()).finish_non_exhaustive()
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
    _writing: RankedGuard<'a, ()>,
    /// The pack that is written, and its name until it is published.
    pack: Option<(PackWriter<FileWriter>, String)>,
    written: Vec<Digest>,
}

impl ArchiveWriter<'_> {
    /// The pack that is written; the next one if it is full.
    fn with_pack<T>(
        &mut self,
        write: impl FnOnce(&mut PackWriter<FileWriter>) -> io::Result<T>,
    ) -> Result<T> {
        let (pack, temp) = match &mut self.pack {
            Some(pack) => pack,
            none => none.insert(begin(self.archive)?),
        };
        let done = write(pack).attempt(|| format!("write {}", self.archive.dir.show(temp)))?;
        if pack.is_full() {
            self.publish()?;
        }
        Ok(done)
    }

    /// Adds a chunk, even if another pack has it.
    fn add(&mut self, chunk: Chunk<'_>) -> Result<()> {
        self.with_pack(|pack| pack.add(chunk)).map(drop)
    }

    /// Writes the live chunks of the packs anew that are worth it. Returns these packs. When they
    /// are not needed any more, [`ArchiveWriter::remove`] removes them. A pack with a damaged chunk
    /// that is live stays, and a warning names it.
    ///
    /// # Errors
    /// As the calls that read and write files.
    pub fn rewrite(&mut self, is_live: &dyn Fn(&Digest) -> bool) -> Result<Vec<Slot>> {
        let mut rewritten = Vec::new();
        for slot in self.archive.worth_rewriting(is_live)? {
            let Some(pack) = self.archive.pack(slot)? else { continue };
            match self.copy_live(&pack, is_live) {
                Ok(()) => rewritten.push(slot),
                Err(error) if error.kind == Kind::Damage => {
                    ::log::warn!("{error}; the pack stays as it is");
                    self.archive.state.lock().damaged.insert(slot);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(rewritten)
    }

    /// Copies the live chunks of a pack. Each is verified, so a flipped bit is never copied.
    fn copy_live(&mut self, pack: &Pack<File>, is_live: &dyn Fn(&Digest) -> bool) -> Result<()> {
        for frame in pack.index().frames() {
            let chunks = pack.index().chunks_of(frame);
            let live: Vec<_> = chunks.iter().filter(|entry| is_live(&entry.chunk.digest)).collect();
            if live.is_empty() {
                continue;
            }
            // Chunks of a small frame compress better together with others.
            if live.len() == chunks.len() && frame.raw as usize >= FULL_FRAME / 2 {
                let stored = pack.stored_frame(frame)?;
                if self.with_pack(|pack| pack.copy(frame, chunks, &stored))? {
                    continue;
                }
            }
            let raw = pack.frame(frame)?;
            for chunk in live.iter().filter_map(|entry| chunk_in(&raw, entry)) {
                let Some(chunk) = Chunk::new(chunk) else { continue };
                self.add(chunk)?;
            }
        }
        Ok(())
    }

    /// The names of the packs that the archive has without some of them.
    pub fn names_without(&self, gone: &[Slot]) -> Vec<Digest> {
        let state = self.archive.state.lock();
        let stays =
            |slot: &Slot, known: &Known| !gone.contains(slot) || self.written.contains(&known.name);
        let kept = state.packs.iter().filter(|(slot, known)| stays(slot, known));
        kept.map(|(_, known)| known.name).collect()
    }

    /// Removes packs without a live chunk of their own.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn remove(&self, packs: &[Slot]) -> Result<()> {
        for slot in packs {
            let known = self.archive.state.lock().packs.get(slot).copied();
            // A pack whose copy has the same chunks in the same order is the copy.
            let Some(known) = known.filter(|known| !self.written.contains(&known.name)) else {
                continue;
            };
            self.archive.state.lock().remove(*slot);
            self.archive.open.lock().remove(slot);
            self.archive.dir.remove(&known.name.to_string())?;
        }
        Ok(())
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
            self.drop_file(&temp);
        }
        self.written.push(published?);
        Ok(())
    }

    /// Publishes the last pack. Returns the names of all packs that were written: from now on they
    /// survive a power cut. Other writers wait until this one is dropped.
    ///
    /// # Errors
    /// As write(2), fsync(2) and rename(2).
    pub fn finish(&mut self) -> Result<&[Digest]> {
        self.publish()?;
        Ok(&self.written)
    }

    fn drop_file(&self, temp: &str) {
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
            self.drop_file(&temp);
        }
    }
}
