//! The chunks that a pull has so far, in a file.
//!
//! ```text
//! magic, 16 bytes | each chunk: length u32, digest, bytes
//! ```
//!
//! If the pull is interrupted, the next one of the same tree goes on with them. The rest of the
//! file after a chunk that is cut or damaged is written anew. A chunk of a description is verified
//! whenever it is read; the sandbox verifies those of the content.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::error::{Attempt, Error, Result};
use crate::store::archive::{ChunkRef, ChunkSource, Digest, MAX_CHUNK};

const MAGIC: &[u8; 16] = b"jailfs-pull   1\n";
/// Bytes before those of a chunk.
const HEADER: u64 = 4 + 32;

/// Chunks in a file.
pub struct Spool {
    file: BufWriter<File>,
    /// The file again, and its lock. Reads need no position.
    reader: Flock<File>,
    /// Its path, unless it was made for this process only.
    path: Option<PathBuf>,
    places: HashMap<Digest, u64>,
    end: u64,
    /// Whether bytes may be in the buffer only.
    is_dirty: bool,
}

fn attempt() -> &'static str {
    "keep chunks in the cache directory"
}

impl Spool {
    /// Opens the file at a path, or another one if a process has it open.
    ///
    /// # Errors
    /// As open(2), read(2) and write(2).
    pub(super) fn open(path: &Path) -> Result<Spool> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = file.open(path).attempt(attempt)?;
        let (lock, path) = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => (lock, Some(path.to_owned())),
            Err(_) => {
                let dir = path.parent().unwrap_or(Path::new("."));
                let file = tempfile::tempfile_in(dir).attempt(attempt)?;
                let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
                (lock.map_err(|(_, errno)| io::Error::from(errno)).attempt(attempt)?, None)
            }
        };
        let writer = lock.try_clone().attempt(attempt)?;
        let mut spool = Spool {
            file: BufWriter::with_capacity(1 << 20, writer),
            reader: lock,
            path,
            places: HashMap::new(),
            end: 0,
            is_dirty: false,
        };
        spool.end = spool.scan().attempt(attempt)?;
        spool.reader.set_len(spool.end).attempt(attempt)?;
        spool.file.seek(SeekFrom::Start(spool.end)).attempt(attempt)?;
        if spool.end == 0 {
            spool.file.write_all(MAGIC).attempt(attempt)?;
            spool.end = MAGIC.len() as u64;
        }
        Ok(spool)
    }

    /// Finds the chunks of an earlier pull. Returns where the next one belongs.
    fn scan(&mut self) -> io::Result<u64> {
        let mut from = BufReader::with_capacity(1 << 20, self.reader.try_clone()?);
        let mut magic = [0; MAGIC.len()];
        if from.read_exact(&mut magic).is_err() || magic != *MAGIC {
            return Ok(0);
        }
        let (mut end, mut bytes) = (MAGIC.len() as u64, Vec::new());
        while let Ok(digest) = read_chunk(&mut from, &mut bytes) {
            self.places.insert(digest, end);
            end += HEADER + bytes.len() as u64;
        }
        Ok(end)
    }

    /// Whether it has a chunk.
    pub(super) fn has(&self, digest: &Digest) -> bool {
        self.places.contains_key(digest)
    }

    /// Adds a chunk whose digest was computed from its bytes.
    ///
    /// # Errors
    /// As write(2).
    pub(super) fn add(&mut self, digest: Digest, bytes: &[u8]) -> Result<()> {
        if self.has(&digest) {
            return Ok(());
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut write = |bytes: &[u8]| self.file.write_all(bytes).attempt(attempt);
        write(&len.to_le_bytes())?;
        write(&digest.0)?;
        write(bytes)?;
        self.places.insert(digest, self.end);
        self.end += HEADER + u64::from(len);
        self.is_dirty = true;
        Ok(())
    }

    /// Makes what was added readable, and keeps it for the next pull.
    ///
    /// # Errors
    /// As write(2).
    pub(super) fn flush(&mut self) -> Result<()> {
        self.is_dirty = false;
        self.file.flush().attempt(attempt)
    }

    /// Removes the file: the pull is complete.
    pub fn remove(self) {
        if let Some(path) = &self.path
            && let Err(error) = std::fs::remove_file(path)
        {
            log::debug!("remove {}: {error}", path.display());
        }
    }
}

/// Reads a chunk and verifies it. An error also for one that is cut or damaged.
fn read_chunk(from: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<Digest> {
    let (mut len, mut digest) = ([0; 4], [0; 32]);
    from.read_exact(&mut len)?;
    from.read_exact(&mut digest)?;
    let len = u32::from_le_bytes(len) as usize;
    if len == 0 || len > MAX_CHUNK {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.resize(len, 0);
    from.read_exact(bytes)?;
    match Digest::of(bytes).0 == digest {
        true => Ok(Digest(digest)),
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}

impl Spool {
    /// Appends the bytes of a chunk to `to`, unverified: the receiver compares them.
    ///
    /// # Errors
    /// The chunk is missing; and as read(2).
    pub(super) fn append_unverified(&self, chunk: &ChunkRef, to: &mut Vec<u8>) -> Result<()> {
        let what = || format!("read chunk {}", chunk.digest);
        let missing = || Error::damage(what(), "no pack of the artifact has it");
        let at = *self.places.get(&chunk.digest).ok_or_else(missing)?;
        if self.is_dirty {
            return Err(Error::damage(what(), "it was not written yet"));
        }
        let start = to.len();
        to.resize(start + chunk.len as usize, 0);
        let bytes = to.get_mut(start..).unwrap_or_default();
        self.reader.read_exact_at(bytes, at + HEADER).attempt(what)
    }
}

impl ChunkSource for Spool {
    fn get(&self, chunk: &ChunkRef) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.append_unverified(chunk, &mut bytes)?;
        match Digest::of(&bytes) == chunk.digest {
            true => Ok(bytes),
            false => {
                let attempt = format!("read chunk {}", chunk.digest);
                Err(Error::damage(attempt, "it has another length or other bytes"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::archive::Chunk;

    fn add(spool: &mut Spool, bytes: &[u8]) -> ChunkRef {
        let chunk = Chunk::new(bytes).unwrap();
        spool.add(chunk.digest(), bytes).unwrap();
        chunk.reference()
    }

    #[test]
    fn the_next_pull_goes_on_with_the_chunks_of_the_last_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pull");
        let mut spool = Spool::open(&path).unwrap();
        let (one, two) = (add(&mut spool, b"one"), add(&mut spool, &[2; 60_000]));
        spool.flush().unwrap();
        assert_eq!(spool.get(&one).unwrap(), b"one");
        // Another process at the same time has a file of its own.
        let beside = Spool::open(&path).unwrap();
        assert!(!beside.has(&one.digest));
        beside.remove();
        drop(spool);
        // Cut in the second chunk.
        let len = std::fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
        let mut spool = Spool::open(&path).unwrap();
        assert!(spool.has(&one.digest) && !spool.has(&two.digest));
        add(&mut spool, &[2; 60_000]);
        spool.flush().unwrap();
        drop(spool);
        let spool = Spool::open(&path).unwrap();
        assert_eq!(spool.get(&two).unwrap(), [2; 60_000]);
        let longer = ChunkRef { len: two.len + 1, ..two };
        assert!(spool.get(&longer).is_err());
        spool.remove();
        assert!(!path.exists());
    }

    #[test]
    fn damaged_chunks_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pull");
        let mut spool = Spool::open(&path).unwrap();
        let (one, two) = (add(&mut spool, b"one"), add(&mut spool, b"two"));
        spool.flush().unwrap();
        drop(spool);
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let spool = Spool::open(&path).unwrap();
        assert!(spool.has(&one.digest) && !spool.has(&two.digest));
        drop(spool);
        std::fs::write(&path, "something else").unwrap();
        let spool = Spool::open(&path).unwrap();
        assert!(!spool.has(&one.digest));
    }
}
