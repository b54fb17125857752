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

/// Compresses bytes. Bytes that do not become shorter are stored as they are, and so are those that
/// look random: deflating them would take 30 times as long as hashing them.
pub fn compress(raw: &[u8]) -> (Method, Vec<u8>) {
    if looks_random(raw) {
        return (Method::Stored, raw.to_vec());
    }
    // A result that does not fit is not shorter.
    let mut stored = Vec::with_capacity(raw.len().saturating_sub(1));
    let mut deflate = Compress::new(Compression::default(), false);
    match deflate.compress_vec(raw, &mut stored, FlushCompress::Finish) {
        Ok(Status::StreamEnd) if stored.len() < raw.len() => (Method::Deflate, stored),
        _ => (Method::Stored, raw.to_vec()),
    }
}

/// Bytes below this number are always compressed: too few to judge, and quick to compress.
const LEAST_JUDGED: usize = 16 << 10;
/// The sum over all byte values of the squared distance from their mean count, in units of that
/// mean. It is 255 on average for random bytes, with a deviation of 23. Bytes whose frequencies
/// alone make them one percent shorter have at least 1,800.
const RANDOM: u64 = 512;
/// One of so many positions is compared with earlier ones, chosen by the bytes that stand there.
const ANCHORS: u32 = 64;
/// One repeated anchor in so many is taken for chance.
const CHANCE: usize = 64;

/// Whether bytes look as if nothing made them shorter: all values are equally frequent, and hardly
/// any eight bytes occur twice. The judgement depends on the bytes only, so equal chunks make equal
/// packs.
fn looks_random(raw: &[u8]) -> bool {
    raw.len() >= LEAST_JUDGED && is_flat(raw) && !repeats(raw)
}

/// Whether all values of a byte are about equally frequent.
fn is_flat(raw: &[u8]) -> bool {
    // Four tables, so that a count does not wait for the one before it.
    let mut tables = [[0u32; 256]; 4];
    for group in raw.chunks(4) {
        for (table, byte) in tables.iter_mut().zip(group) {
            if let Some(count) = table.get_mut(usize::from(*byte)) {
                *count += 1;
            }
        }
    }
    let len = raw.len() as u64;
    let mut distance = 0;
    for value in 0..256 {
        let count = tables.iter().filter_map(|table| table.get(value)).copied().sum::<u32>();
        distance += (u64::from(count) * 256).abs_diff(len).pow(2);
    }
    distance / (256 * len) < RANDOM
}

/// Whether more than a few groups of eight bytes occur twice.
fn repeats(raw: &[u8]) -> bool {
    let mut seen = vec![0u64; 4096];
    let (mut anchors, mut repeated) = (0, 0);
    for window in raw.windows(8) {
        let Some(first) = window.first_chunk::<4>() else { continue };
        let mixed = u32::from_le_bytes(*first).wrapping_mul(0x9e37_79b1);
        if mixed >= u32::MAX / ANCHORS {
            continue;
        }
        let group = window.first_chunk::<8>().map_or(0, |group| u64::from_le_bytes(*group));
        if let Some(slot) = seen.get_mut(mixed as usize % 4096) {
            repeated += usize::from(*slot == group);
            *slot = group;
        }
        anchors += 1;
    }
    repeated > anchors / CHANCE
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
