//! Compresses frames, and decompresses them into exactly the bytes that the index promises.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use crate::store::archive::Flaw;

/// How the bytes of a frame are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// As they are.
    Stored,
    /// Deflated (RFC 1951).
    Deflate,
}

impl Method {
    /// The byte that stands for the method.
    pub fn tag(self) -> u8 {
        match self {
            Method::Stored => 0,
            Method::Deflate => 1,
        }
    }

    /// The method that a byte stands for.
    pub fn from_tag(tag: u8) -> Option<Method> {
        match tag {
            0 => Some(Method::Stored),
            1 => Some(Method::Deflate),
            _ => None,
        }
    }
}

/// Compresses bytes. Bytes that do not become shorter are stored as they are, and so are those of
/// which a sample does not: deflating them all would take 30 times as long as hashing them. The
/// same bytes are always stored alike, so equal chunks make equal packs. Bytes of which only the
/// sampled ones are noise take more space than they need.
pub fn compress(raw: &[u8]) -> (Method, Vec<u8>) {
    let is_worth_it = raw.len() < LEAST_SAMPLED || deflate(&sample(raw)).is_some();
    match is_worth_it.then(|| deflate(raw)).flatten() {
        Some(stored) => (Method::Deflate, stored),
        None => (Method::Stored, raw.to_vec()),
    }
}

/// Deflates bytes, if that makes them shorter.
fn deflate(raw: &[u8]) -> Option<Vec<u8>> {
    // A result that does not fit is not shorter.
    let mut stored = Vec::with_capacity(raw.len().saturating_sub(1));
    let mut deflate = Compress::new(Compression::default(), false);
    let status = deflate.compress_vec(raw, &mut stored, FlushCompress::Finish);
    (matches!(status, Ok(Status::StreamEnd)) && stored.len() < raw.len()).then_some(stored)
}

/// Shorter bytes are compressed without a sample.
const LEAST_SAMPLED: usize = 16 << 10;
/// The number of pieces in a sample, and their bytes.
const PIECES: usize = 8;
const PIECE: usize = 512;

/// Pieces from all over the bytes.
fn sample(raw: &[u8]) -> Vec<u8> {
    let pieces = raw.chunks(raw.len().div_ceil(PIECES).max(1));
    pieces.flat_map(|part| part.iter().take(PIECE)).copied().collect()
}

/// Decompresses bytes that become exactly `len` bytes. Writes no more than that, whatever the bytes
/// are.
///
/// # Errors
/// They become other than `len` bytes, or are not compressed bytes.
pub fn decompress(method: Method, stored: &[u8], len: usize) -> Result<Vec<u8>, Flaw> {
    match method {
        Method::Stored if stored.len() == len => Ok(stored.to_vec()),
        Method::Stored => Err(Flaw::new("a stored frame of another length")),
        Method::Deflate => {
            let mut raw = vec![0; len];
            let mut inflate = Decompress::new(false);
            let status = inflate.decompress(stored, &mut raw, FlushDecompress::Finish);
            let is_whole = matches!(status, Ok(Status::StreamEnd))
                && inflate.total_out() == len as u64
                && inflate.total_in() == stored.len() as u64;
            if is_whole { Ok(raw) } else { Err(Flaw::new("a frame that does not decompress")) }
        }
    }
}
