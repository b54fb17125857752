//! The blob: the list of the chunks of a tree stream.
//!
//! ```text
//! magic, 16 bytes | number of entries | number of chunks | each chunk: length, digest
//! ```

use crate::error::{Error, Result};
use crate::store::archive::bytes::{self, Input};
use crate::store::archive::tree_blob::reader::TreeReader;
use crate::store::archive::{ChunkRef, ChunkSource, Digest, Flaw, MAX_CHUNK};

const MAGIC: &[u8; 16] = b"jailfs-state  1\n";
/// The most bytes of a blob: for a stream of about 30 GiB.
pub const MAX_BLOB: usize = 64 << 20;
/// The fewest bytes of a chunk in a blob.
const LEAST_CHUNK: usize = 1 + 32;

/// The list of the chunks of a tree stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeBlob {
    entries: u64,
    chunks: Vec<ChunkRef>,
}

impl TreeBlob {
    pub(super) fn new(entries: u64, chunks: Vec<ChunkRef>) -> TreeBlob {
        TreeBlob { entries, chunks }
    }

    /// The number of entries of the state, hard links included.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// The chunks of the stream, in order.
    pub fn chunks(&self) -> &[ChunkRef] {
        &self.chunks
    }

    /// The name of the state.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.encode())
    }

    /// The bytes of the blob.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        bytes::put_number(&mut out, self.entries);
        bytes::put_number(&mut out, self.chunks.len() as u64);
        for chunk in &self.chunks {
            bytes::put_number(&mut out, u64::from(chunk.len));
            out.extend_from_slice(&chunk.digest.0);
        }
        out
    }

    /// Reads a blob. Takes memory in proportion to the bytes that are there.
    ///
    /// # Errors
    /// The first flaw.
    pub fn parse(encoded: &[u8]) -> std::result::Result<TreeBlob, Flaw> {
        let mut input = encoded;
        let mut magic = [0; MAGIC.len()];
        input.fill(&mut magic)?;
        if magic != *MAGIC || encoded.len() > MAX_BLOB {
            return Err(Flaw::new("it is not a state of a version that this program knows"));
        }
        let entries = bytes::number(&mut input)?;
        let most = (input.len() / LEAST_CHUNK) as u64;
        let mut chunks = Vec::new();
        for _ in 0..bytes::at_most(&mut input, most, "the number of chunks")? {
            let len = bytes::at_most(&mut input, MAX_CHUNK as u64, "the length of a chunk")?;
            if len == 0 {
                return Err(Flaw::new("an empty chunk"));
            }
            chunks.push(ChunkRef { digest: bytes::digest(&mut input)?, len: len as u32 });
        }
        match input.is_empty() {
            true => Ok(TreeBlob { entries, chunks }),
            false => Err(Flaw::new("bytes after the last chunk")),
        }
    }
}

/// The bytes of chunks, one after the other.
struct ChunkInput<'a> {
    source: &'a dyn ChunkSource,
    rest: std::slice::Iter<'a, ChunkRef>,
    chunk: Vec<u8>,
    at: usize,
}

impl ChunkInput<'_> {
    /// The bytes that are left of a chunk; empty only at the end.
    fn left(&mut self) -> std::result::Result<&[u8], Flaw> {
        while self.at >= self.chunk.len() {
            let Some(next) = self.rest.next() else { return Ok(&[]) };
            self.chunk = self.source.get(next).map_err(|error| Flaw::new(error.to_string()))?;
            self.at = 0;
            if self.chunk.len() != next.len as usize {
                return Err(Flaw::new("a chunk of another length"));
            }
        }
        Ok(self.chunk.get(self.at..).unwrap_or_default())
    }
}

impl Input for ChunkInput<'_> {
    fn byte(&mut self) -> std::result::Result<u8, Flaw> {
        let byte = self.left()?.first().copied().ok_or_else(bytes::cut_off)?;
        self.at += 1;
        Ok(byte)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> std::result::Result<(), Flaw> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = self.left()?;
            let len = left.len().min(rest.len());
            let (now, later) = rest.split_at_mut(len);
            now.copy_from_slice(left.get(..len).unwrap_or_default());
            if len == 0 {
                return Err(bytes::cut_off());
            }
            self.at += len;
            rest = later;
        }
        Ok(())
    }

    fn is_at_end(&mut self) -> std::result::Result<bool, Flaw> {
        Ok(self.left()?.is_empty())
    }
}

/// Reads the entries of a state, whose chunks `source` has. Calls `each` for each event, in order.
///
/// # Errors
/// Damage, with the path of the entry; a chunk that is missing; and those of `each`.
pub fn load(
    blob: &TreeBlob,
    source: &dyn ChunkSource,
    each: &mut dyn FnMut(super::layout::Event) -> Result<()>,
) -> Result<()> {
    let what = format!("state {}", blob.digest());
    let input = ChunkInput { source, rest: blob.chunks.iter(), chunk: Vec::new(), at: 0 };
    let mut reader = TreeReader::new(input, what.clone());
    while let Some(event) = reader.next_event()? {
        each(event)?;
    }
    match reader.entries() == blob.entries {
        true => Ok(()),
        false => Err(Error::damage(format!("read {what}"), "it has another number of entries")),
    }
}
