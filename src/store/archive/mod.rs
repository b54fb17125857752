//! Archive packs: content by digest, in files that never change and that any machine can read.
//!
//! * A **chunk** is 1 byte to 64 KiB of content. Its name is its BLAKE3 digest, so it says nothing
//!   about a layer, an address or a machine.
//! * A **pack** holds chunks in compressed frames, and an index that says where each chunk is.
//! * A **tree blob** describes one state: every name, attribute and list of chunks. The same state
//!   gives the same bytes everywhere.
//! * A **history** lists the checkpoints that lead to a state.
//!
//! Always true:
//! * no byte of a chunk is used before its digest was verified;
//! * a reader needs memory for the index and one frame, whatever the file says;
//! * bytes that are not exactly what a writer writes are refused, so no two files mean the same.
//!
//! This folder knows only bytes. `docs/FORMAT.md` has the tables.

pub mod bytes;
pub mod chunker;
pub mod compress;
#[cfg_attr(
    not(feature = "registry"),
    expect(dead_code, reason = "only push and pull use the rest of it")
)]
pub mod edits;
#[cfg(feature = "registry")]
pub mod history;
pub mod index;
pub mod packs;
pub mod reader;
#[cfg(test)]
mod tests;
#[cfg_attr(
    not(feature = "registry"),
    expect(dead_code, unused_imports, reason = "only push and pull use the rest of it")
)]
pub mod tree_blob;
pub mod writer;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Result;

/// The most bytes of a chunk.
pub const MAX_CHUNK: usize = 64 << 10;
/// The most bytes of the chunks of one frame.
pub const MAX_FRAME: usize = 256 << 10;
/// The most bytes of an index.
pub const MAX_INDEX: usize = 16 << 20;

/// The name of bytes: their BLAKE3 hash.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// Reads 64 hexadecimal digits in lower case.
    pub fn parse(text: &str) -> Option<Digest> {
        let mut digest = [0; 32];
        if text.len() != 64 || text.bytes().any(|byte| !byte.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, at) in digest.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
        }
        Some(Digest(digest)).filter(|digest| digest.to_string() == text)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Bytes with their digest. Only [`Chunk::new`] makes one, so the two belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<'b> {
    digest: Digest,
    bytes: &'b [u8],
}

impl<'b> Chunk<'b> {
    /// Hashes bytes. `None` if they are empty or more than [`MAX_CHUNK`].
    pub fn new(bytes: &'b [u8]) -> Option<Chunk<'b>> {
        let is_valid = !bytes.is_empty() && bytes.len() <= MAX_CHUNK;
        is_valid.then(|| Chunk { digest: Digest::of(bytes), bytes })
    }

    /// The digest.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The bytes.
    pub fn bytes(&self) -> &'b [u8] {
        self.bytes
    }

    /// The name and the length of the chunk.
    pub fn reference(&self) -> ChunkRef {
        // At most MAX_CHUNK, so it fits.
        ChunkRef { digest: self.digest, len: u32::try_from(self.bytes.len()).unwrap_or(u32::MAX) }
    }
}

/// The name and the length of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ChunkRef {
    /// The digest of its bytes.
    pub digest: Digest,
    /// Bytes: 1 to [`MAX_CHUNK`].
    pub len: u32,
}

/// The reason why bytes that were read are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw(pub String);

impl Flaw {
    /// A flaw with this description.
    pub fn new(what: impl Into<String>) -> Flaw {
        Flaw(what.into())
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Takes chunks: a pack that is written, a list of what is missing elsewhere, or a test.
pub trait ChunkSink {
    /// Takes a chunk. The sink may have it already.
    ///
    /// # Errors
    /// As write(2).
    fn put(&mut self, chunk: Chunk<'_>) -> Result<()>;
}

/// Gives chunks by name.
pub trait ChunkSource {
    /// The bytes of a chunk, which the source has verified.
    ///
    /// # Errors
    /// The chunk is missing or damaged.
    fn get(&self, chunk: &ChunkRef) -> Result<Vec<u8>>;
}
