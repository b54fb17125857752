//! The index of a pack: which frames it has, and which chunks each frame consists of.
//!
//! ```text
//! index   number of frames, then each frame
//! frame   method u8 | stored length | digest of the stored bytes | number of chunks, then each
//! chunk   length | digest
//! ```
//!
//! * Frames lie back to back, and chunks too. So an offset is the sum of the lengths before it, and
//!   none can lead outside.
//! * The digest of the index names the pack: it covers the digests of all frames, so it covers
//!   every byte of the pack.

use crate::store::archive::bytes::{self, Input};
use crate::store::archive::compress::{Method, compress, decompress};
use crate::store::archive::{ChunkRef, Digest, Flaw, MAX_CHUNK, MAX_FRAME, MAX_INDEX};

/// The fewest bytes that the index has for a frame, and for a chunk.
const LEAST_FRAME: usize = 1 + 1 + 32 + 1 + LEAST_CHUNK;
const LEAST_CHUNK: usize = 1 + 32;

/// A frame of a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// How its bytes are stored.
    pub method: Method,
    /// The offset of its first byte, counted from the first byte of the first frame.
    pub offset: u64,
    /// Stored bytes: 1 to [`MAX_FRAME`].
    pub stored: u32,
    /// Bytes of its chunks: 1 to [`MAX_FRAME`].
    pub raw: u32,
    /// The digest of the stored bytes.
    pub digest: Digest,
    /// Its chunks, as numbers of [`Index::chunks`].
    pub chunks: std::ops::Range<u32>,
}

/// A chunk of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The chunk.
    pub chunk: ChunkRef,
    /// The number of its frame.
    pub frame: u32,
    /// The offset of its first byte among the bytes of the frame.
    pub offset: u32,
}

/// The index of a pack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    frames: Vec<Frame>,
    entries: Vec<Entry>,
    /// The numbers of the entries, in order of their digests.
    by_digest: Vec<u32>,
}

impl Index {
    /// The frames, in order.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// The chunks, in order of their places.
    pub fn chunks(&self) -> &[Entry] {
        &self.entries
    }

    /// The chunks of a frame, in order.
    pub fn chunks_of(&self, frame: &Frame) -> &[Entry] {
        self.entries.get(frame.chunks.start as usize..frame.chunks.end as usize).unwrap_or_default()
    }

    /// Where a chunk is.
    pub fn find(&self, digest: &Digest) -> Option<Entry> {
        let entry = |at: &u32| self.entries.get(*at as usize);
        let key = |at: &u32| entry(at).map(|entry| entry.chunk.digest);
        let found = self.by_digest.binary_search_by(|at| key(at).cmp(&Some(*digest))).ok()?;
        self.by_digest.get(found).and_then(entry).copied()
    }

    /// The bytes of all frames together.
    pub fn stored(&self) -> u64 {
        self.frames.last().map_or(0, |last| last.offset + u64::from(last.stored))
    }

    /// The bytes of the index.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.entries.len() * 35 + self.frames.len() * 40 + 8);
        bytes::put_number(&mut out, self.frames.len() as u64);
        for frame in &self.frames {
            out.push(frame.method.tag());
            bytes::put_number(&mut out, u64::from(frame.stored));
            out.extend_from_slice(&frame.digest.0);
            bytes::put_number(&mut out, frame.chunks.len() as u64);
            for entry in self.chunks_of(frame) {
                bytes::put_number(&mut out, u64::from(entry.chunk.len));
                out.extend_from_slice(&entry.chunk.digest.0);
            }
        }
        out
    }

    /// Reads an index. Takes memory in proportion to the bytes that are there.
    ///
    /// # Errors
    /// The first flaw.
    pub fn parse(mut encoded: &[u8]) -> Result<Index, Flaw> {
        if encoded.len() > MAX_INDEX {
            return Err(Flaw::new("an index of more than 16 MiB"));
        }
        let mut index = Index::default();
        let most = (encoded.len() / LEAST_FRAME) as u64;
        for _ in 0..bytes::at_most(&mut encoded, most, "the number of frames")? {
            index.parse_frame(&mut encoded)?;
        }
        if !encoded.is_empty() {
            return Err(Flaw::new("bytes after the last frame"));
        }
        index.sort()?;
        Ok(index)
    }

    fn parse_frame(&mut self, input: &mut &[u8]) -> Result<(), Flaw> {
        let method = Method::from_tag(input.byte()?)
            .ok_or_else(|| Flaw::new("a frame that is compressed in an unknown way"))?;
        let stored = bytes::at_most(input, MAX_FRAME as u64, "the length of a frame")? as u32;
        let digest = bytes::digest(input)?;
        let most = (input.len() / LEAST_CHUNK) as u64;
        let mut chunks = Vec::new();
        for _ in 0..bytes::at_most(input, most, "the number of chunks")? {
            let len = bytes::at_most(input, MAX_CHUNK as u64, "the length of a chunk")? as u32;
            chunks.push(ChunkRef { digest: bytes::digest(input)?, len });
        }
        self.push(method, stored, digest, &chunks)
    }

    /// Appends a frame. [`Index::sort`] must follow after the last one.
    fn push(
        &mut self,
        method: Method,
        stored: u32,
        digest: Digest,
        chunks: &[ChunkRef],
    ) -> Result<(), Flaw> {
        let (first, frame) = (self.entries.len() as u32, self.frames.len() as u32);
        let mut raw = 0_u32;
        for chunk in chunks {
            if chunk.len == 0 {
                return Err(Flaw::new("an empty chunk"));
            }
            self.entries.push(Entry { chunk: *chunk, frame, offset: raw });
            raw = raw.saturating_add(chunk.len);
        }
        let is_right = match method {
            Method::Stored => stored == raw,
            Method::Deflate => stored < raw,
        };
        if raw == 0 || stored == 0 || raw as usize > MAX_FRAME || !is_right {
            return Err(Flaw::new("a frame whose length does not fit its chunks"));
        }
        let chunks = first..self.entries.len() as u32;
        let offset = self.stored();
        self.frames.push(Frame { method, offset, stored, raw, digest, chunks });
        Ok(())
    }

    fn sort(&mut self) -> Result<(), Flaw> {
        let digest = |at: &u32| self.entries.get(*at as usize).map(|entry| entry.chunk.digest);
        let mut sorted: Vec<u32> = (0..self.entries.len() as u32).collect();
        sorted.sort_unstable_by_key(digest);
        if sorted.iter().zip(sorted.iter().skip(1)).any(|(a, b)| digest(a) == digest(b)) {
            return Err(Flaw::new("a chunk twice"));
        }
        self.by_digest = sorted;
        Ok(())
    }

    /// Decompresses the stored bytes of a frame, and verifies them and each of its chunks.
    ///
    /// # Errors
    /// The flaw.
    pub fn open_frame(&self, frame: &Frame, stored: &[u8]) -> Result<Vec<u8>, Flaw> {
        if Digest::of(stored) != frame.digest {
            return Err(Flaw::new("the bytes of a frame are not those that the index names"));
        }
        let raw = decompress(frame.method, stored, frame.raw as usize)?;
        for entry in self.chunks_of(frame) {
            let chunk = chunk_in(&raw, entry);
            if chunk.map(Digest::of) != Some(entry.chunk.digest) {
                let digest = entry.chunk.digest;
                return Err(Flaw::new(format!("the bytes of chunk {digest} are others")));
            }
        }
        Ok(raw)
    }
}

/// The bytes of a chunk among those of its frame.
pub fn chunk_in<'b>(frame: &'b [u8], entry: &Entry) -> Option<&'b [u8]> {
    let start = entry.offset as usize;
    frame.get(start..start + entry.chunk.len as usize)
}

/// Builds the index while a pack is written.
#[derive(Default)]
pub(super) struct IndexBuilder {
    index: Index,
}

impl IndexBuilder {
    /// Compresses a frame with these chunks, appends it, and returns the bytes to store.
    pub(super) fn add_frame(&mut self, raw: &[u8], chunks: &[ChunkRef]) -> Result<Vec<u8>, Flaw> {
        let (method, stored) = compress(raw);
        let len = u32::try_from(stored.len()).unwrap_or(u32::MAX);
        self.index.push(method, len, Digest::of(&stored), chunks)?;
        Ok(stored)
    }

    /// Appends a frame of another pack.
    pub(super) fn copy_frame(&mut self, from: &Frame, chunks: &[ChunkRef]) -> Result<(), Flaw> {
        self.index.push(from.method, from.stored, from.digest, chunks)
    }

    /// Bytes that the index takes, about.
    pub(super) fn len(&self) -> usize {
        self.index.entries.len() * 36 + self.index.frames.len() * 40
    }

    pub(super) fn finish(mut self) -> Result<Index, Flaw> {
        self.index.sort()?;
        Ok(self.index)
    }
}
