//! The content of files: which parts are holes, and their bytes.
//!
//! A part of a file is a hole if it is a whole number of granules of zeros, wherever its bytes come
//! from: a state that was imported has its content in other places, and must give the same archive.
//! A granule grows with the file, so that a map has at most half a million ranges. To find the
//! holes, a large file is read twice.

use std::io;

use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::{DataRanges, Found, State};
use crate::types::ByteRange;

/// Files up to this size have no holes in an archive. Their bytes are read once.
const SMALL: u64 = 1 << 20;
/// The smallest granule, in bytes.
const GRANULE: u64 = 64 << 10;
/// The most granules of a file.
const MOST_GRANULES: u64 = 1 << 20;
/// A file is stored with its holes if they are at least this long together, in bytes.
const WORTH: u64 = 1 << 20;
/// The longest part that is read at once, in bytes.
const STEP: u64 = 1 << 20;

/// How a file is stored.
pub(super) enum Layout {
    /// A small file, which was read already.
    Bytes(Vec<u8>),
    /// All of a file of this size.
    Whole(u64),
    /// Its data between the holes.
    Data(Vec<ByteRange>),
}

impl Layout {
    /// Looks at the bytes of a file.
    ///
    /// # Errors
    /// Those of reading it.
    pub(super) fn of(state: &State, found: &Found, size: u64) -> FsResult<Layout> {
        if size <= SMALL {
            return Ok(Layout::Bytes(state.read_range(found, ByteRange::at(0, size))?));
        }
        let granule = (size / MOST_GRANULES).next_power_of_two().max(GRANULE);
        let mut data: Vec<ByteRange> = Vec::new();
        for range in DataRanges::of(state, found, ByteRange::at(0, size)) {
            let range = range?;
            let bytes = state.read_range(found, range)?;
            let mut at = range.start;
            let mut rest: &[u8] = &bytes;
            while at < range.end {
                let end = (at / granule + 1).saturating_mul(granule).min(range.end);
                let len = usize::try_from(end - at).unwrap_or(rest.len()).min(rest.len());
                let (part, behind) = rest.split_at(len);
                if !is_zero(part) {
                    push(&mut data, at / granule * granule, granule, size);
                }
                (at, rest) = (end, behind);
            }
        }
        let stored: u64 = data.iter().map(ByteRange::len).sum();
        Ok(if size - stored >= WORTH { Layout::Data(data) } else { Layout::Whole(size) })
    }

    /// The ranges with data; `None` if the whole file is stored.
    pub(super) fn holes(&self) -> Option<Vec<ByteRange>> {
        match self {
            Layout::Data(data) => Some(data.clone()),
            Layout::Bytes(_) | Layout::Whole(_) => None,
        }
    }
}

/// Appends a granule to the ranges, which are in order.
fn push(data: &mut Vec<ByteRange>, start: u64, granule: u64, size: u64) {
    let end = start.saturating_add(granule).min(size);
    match data.last_mut() {
        Some(last) if last.end >= start => last.end = last.end.max(end),
        _ => data.push(ByteRange { start, end }),
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(32).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Passes the stored bytes of a file to `put`.
///
/// # Errors
/// Those of reading the file and of `put`.
pub(super) fn copy(
    state: &State,
    found: &Found,
    layout: Layout,
    go: &dyn Fn() -> bool,
    mut put: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<()> {
    let ranges = match layout {
        Layout::Bytes(bytes) => return put(&bytes).map_err(|error| write_failed(&error)),
        Layout::Whole(size) => vec![ByteRange::at(0, size)],
        Layout::Data(data) => data,
    };
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            if !go() {
                let why = "the sandbox is being closed";
                return Err(Error::new(Kind::Failed, "read the content", why));
            }
            let part = ByteRange { start: at, end: at.saturating_add(STEP).min(range.end) };
            let bytes = state.read_range(found, part).attempt(|| "read the content")?;
            put(&bytes).map_err(|error| write_failed(&error))?;
            at = part.end;
        }
    }
    Ok(())
}

/// The error of a full disk or a closed pipe, for people.
fn write_failed(error: &io::Error) -> Error {
    Error::io("write the archive", error)
}
