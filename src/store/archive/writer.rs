//! Writes a pack from its start to its end.
//!
//! ```text
//! magic, 16 bytes | frames | index | length of the index u64 | digest of the index | magic
//! ```

use std::collections::HashSet;
use std::io::{self, Write};

use crate::store::archive::index::{Entry, Frame, Index, IndexBuilder};
use crate::store::archive::{Chunk, ChunkRef, Digest, Flaw, MAX_FRAME, MAX_INDEX};

/// The first and the last bytes of a pack.
pub const MAGIC: &[u8; 16] = b"jailfs-pack   1\n";
/// Bytes of the magic before the first frame.
pub const HEAD: u64 = MAGIC.len() as u64;
/// Bytes after the index: its length, its digest, the magic.
pub const FOOT: u64 = 8 + 32 + HEAD;
/// A frame ends when its chunks have so many bytes: enough to compress well, few enough to read one
/// page of it in a fraction of a millisecond.
pub const FULL_FRAME: usize = 128 << 10;
/// A pack is full when it has so many bytes.
pub const FULL_PACK: u64 = 24 << 20;

/// Writes a pack to `W`.
pub struct PackWriter<W> {
    out: W,
    index: IndexBuilder,
    /// Stored bytes of the frames that were written.
    stored: u64,
    /// The chunks of the frame that is not written yet.
    open: Vec<u8>,
    open_chunks: Vec<ChunkRef>,
    known: HashSet<Digest>,
}

fn invalid(flaw: Flaw) -> io::Error {
    io::Error::other(flaw.0)
}

impl<W: Write> PackWriter<W> {
    /// Begins a pack.
    ///
    /// # Errors
    /// As write(2).
    pub fn new(mut out: W) -> io::Result<PackWriter<W>> {
        out.write_all(MAGIC)?;
        Ok(PackWriter {
            out,
            index: IndexBuilder::default(),
            stored: 0,
            open: Vec::new(),
            open_chunks: Vec::new(),
            known: HashSet::new(),
        })
    }

    /// Adds a chunk. Returns false if the pack has it already.
    ///
    /// # Errors
    /// As write(2).
    pub fn add(&mut self, chunk: Chunk<'_>) -> io::Result<bool> {
        if !self.known.insert(chunk.digest()) {
            return Ok(false);
        }
        if self.open.len() + chunk.bytes().len() > MAX_FRAME {
            self.end_frame()?;
        }
        self.open.extend_from_slice(chunk.bytes());
        self.open_chunks.push(chunk.reference());
        if self.open.len() >= FULL_FRAME {
            self.end_frame()?;
        }
        Ok(true)
    }

    /// Copies a frame of another pack with its stored bytes, which the caller has verified. Returns
    /// false, with nothing done, if the pack has one of its chunks already.
    ///
    /// # Errors
    /// As write(2).
    pub fn copy(&mut self, frame: &Frame, chunks: &[Entry], stored: &[u8]) -> io::Result<bool> {
        if chunks.iter().any(|entry| self.known.contains(&entry.chunk.digest)) {
            return Ok(false);
        }
        self.end_frame()?;
        let chunks: Vec<ChunkRef> = chunks.iter().map(|entry| entry.chunk).collect();
        self.known.extend(chunks.iter().map(|chunk| chunk.digest));
        self.index.copy_frame(frame, &chunks).map_err(invalid)?;
        self.out.write_all(stored)?;
        self.stored += stored.len() as u64;
        Ok(true)
    }

    /// Ends the frame: the next chunk begins another one. Chunks that are read together, and those
    /// that are alike, belong in one frame.
    ///
    /// # Errors
    /// As write(2).
    pub fn end_frame(&mut self) -> io::Result<()> {
        if self.open_chunks.is_empty() {
            return Ok(());
        }
        let stored = self.index.add_frame(&self.open, &self.open_chunks).map_err(invalid)?;
        self.out.write_all(&stored)?;
        self.stored += stored.len() as u64;
        self.open.clear();
        self.open_chunks.clear();
        Ok(())
    }

    /// Whether the next chunk belongs in another pack.
    pub fn is_full(&self) -> bool {
        self.stored >= FULL_PACK || self.index.len() >= MAX_INDEX / 2
    }

    /// Writes the end of the pack. Returns its name and its index.
    ///
    /// # Errors
    /// As write(2).
    pub fn finish(mut self) -> io::Result<(W, Digest, Index)> {
        self.end_frame()?;
        let index = self.index.finish().map_err(invalid)?;
        let encoded = index.encode();
        let digest = Digest::of(&encoded);
        self.out.write_all(&encoded)?;
        self.out.write_all(&(encoded.len() as u64).to_le_bytes())?;
        self.out.write_all(&digest.0)?;
        self.out.write_all(MAGIC)?;
        self.out.flush()?;
        Ok((self.out, digest, index))
    }
}
