//! Receives the content of a file.
//!
//! Pieces that equal the file that stands there now stay by reference, at their place in its
//! extents. Others go to the pool of the new layer, except aligned pieces of zeros, which become
//! holes. So neither an archive that changed little nor one of zeros takes much space.

use std::io::Read;
use std::sync::Arc;

use super::bad;
use super::builder::Builder;
use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::{DataRanges, Extents, Found, MAX_FILE_SIZE, State};
use crate::tar;
use crate::tree::{Body, Node, Source};
use crate::types::{ByteRange, Ino};

/// The longest piece that is received at once, in bytes.
const STEP: u64 = 1 << 20;
/// New content that lies together is written in pieces of so many bytes.
const WRITE: usize = 1 << 20;
/// Aligned pieces of this many zeros become holes.
const ZEROS: u64 = 64 << 10;

/// The file that stands there now.
pub(super) struct Old {
    pub(super) found: Found,
    pub(super) node: Arc<Node>,
    extents: Extents,
    size: u64,
}

impl Old {
    /// The file that was found, if it is one, and one that may be read.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn of(state: &State, found: &Found) -> FsResult<Option<Old>> {
        if state.is_hidden(found) || state.kind(found).is_none() {
            return Ok(None);
        }
        let (node, extents) = state.record(found)?;
        let Body::File { size, .. } = node.body else { return Ok(None) };
        Ok(Some(Old { found: found.clone(), node, extents, size }))
    }

    /// The extents of a range.
    fn part(&self, range: ByteRange, to: &mut Extents) {
        let first = self.extents.partition_point(|(extent, _)| extent.end <= range.start);
        let rest = self.extents.get(first..).unwrap_or_default();
        for (extent, source) in rest.iter().take_while(|(extent, _)| extent.start < range.end) {
            let part =
                ByteRange { start: extent.start.max(range.start), end: extent.end.min(range.end) };
            to.push((part, source.advanced(part.start - extent.start)));
        }
    }
}

/// Content that was received.
#[derive(Default)]
pub(super) struct Content {
    pub(super) extents: Extents,
    /// Whether it is that of the file that stands there now.
    pub(super) is_same: bool,
}

/// A file that is being received.
pub(super) struct Receiving<'a, 'b> {
    builder: &'a mut Builder<'b>,
    ino: Ino,
    old: Option<&'a Old>,
    content: Content,
    /// New content that is not written yet, and where it begins in the file.
    pending: Vec<u8>,
    pending_at: u64,
}

/// Receives the content of the current entry for the file `ino`.
///
/// # Errors
/// Those of the archive, the store and the base; ENOSPC above the limit.
pub(super) fn receive<R: Read>(
    builder: &mut Builder<'_>,
    ino: Ino,
    old: Option<&Old>,
    entry: &tar::Entry,
    reader: &mut tar::Reader<R>,
) -> Result<Content> {
    let tar::Kind::File { size, data } = &entry.kind else {
        return Err(bad(&entry.path, "it is not a file"));
    };
    if *size > MAX_FILE_SIZE {
        let why = format!("it has {size} bytes, and a file has at most {MAX_FILE_SIZE}");
        return Err(bad(&entry.path, why));
    }
    let mut receiving = Receiving::new(builder, ino, old, *size);
    let whole = [ByteRange::at(0, *size)];
    let mut at = 0;
    let mut buffer = vec![0; usize::try_from(STEP.min(*size)).unwrap_or(0)];
    for range in data.as_deref().unwrap_or(&whole) {
        let hole = ByteRange { start: at, end: range.start };
        receiving.hole(hole).attempt(|| "compare the content").map_err(|e| during(entry, e))?;
        at = range.start;
        while at < range.end {
            let end = (at / STEP + 1).saturating_mul(STEP).min(range.end);
            let len = usize::try_from(end - at).unwrap_or(0).min(buffer.len());
            let bytes = buffer.get_mut(..len).unwrap_or_default();
            fill(reader, bytes, entry)?;
            receiving.piece(at, bytes).map_err(|error| during(entry, error))?;
            at = end;
        }
    }
    let hole = ByteRange { start: at, end: *size };
    receiving.hole(hole).attempt(|| "compare the content").map_err(|e| during(entry, e))?;
    receiving.finish().map_err(|error| during(entry, error))
}

fn during(entry: &tar::Entry, error: Error) -> Error {
    error.during(format!("import entry '{}'", crate::types::quoted(&entry.path)))
}

fn fill<R: Read>(
    reader: &mut tar::Reader<R>,
    mut bytes: &mut [u8],
    entry: &tar::Entry,
) -> Result<()> {
    while !bytes.is_empty() {
        match reader.data(bytes)? {
            0 => return Err(bad(&entry.path, "it has fewer bytes than its header says")),
            got => bytes = bytes.get_mut(got..).unwrap_or_default(),
        }
    }
    Ok(())
}

impl<'a, 'b> Receiving<'a, 'b> {
    /// Begins to receive `size` bytes for the file `ino`. `old` stands there now.
    pub(super) fn new(
        builder: &'a mut Builder<'b>,
        ino: Ino,
        old: Option<&'a Old>,
        size: u64,
    ) -> Receiving<'a, 'b> {
        let is_same = old.is_some_and(|old| old.size == size);
        let content = Content { extents: Vec::new(), is_same };
        Receiving { builder, ino, old, content, pending: Vec::new(), pending_at: 0 }
    }

    /// Ends the file.
    ///
    /// # Errors
    /// As pwrite(2).
    pub(super) fn finish(mut self) -> Result<Content> {
        self.flush()?;
        self.builder.layer.pool.close_window(self.ino);
        // Pieces that stay are noted before the new content in front of them is written.
        self.content.extents.sort_unstable_by_key(|(range, _)| range.start);
        self.content.extents.dedup_by(|next, last| {
            let (range, source) = &mut *last;
            let continues = range.end == next.0.start && source.advanced(range.len()) == next.1;
            if continues {
                range.end = next.0.end;
            }
            continues
        });
        Ok(self.content)
    }

    /// Takes all of the content that stands there now. False: nothing of `size` bytes stands there.
    pub(super) fn keep(&mut self, size: u64) -> bool {
        let Some(old) = self.old.filter(|old| old.size == size) else { return false };
        self.content.extents.clone_from(&old.extents);
        true
    }

    /// Takes content that an earlier state of the same import has stored.
    pub(super) fn take(&mut self, stored: &Extents) {
        self.content.is_same &= self.old.is_some_and(|old| old.extents == *stored);
        self.content.extents.clone_from(stored);
    }

    /// Takes a range that the archive has as a hole.
    pub(super) fn hole(&mut self, range: ByteRange) -> FsResult<()> {
        let Some(old) = self.old else { return Ok(()) };
        let range = ByteRange { start: range.start.min(old.size), end: range.end.min(old.size) };
        if range.is_empty() {
            return Ok(());
        }
        let state = &self.builder.state;
        // A long hole is compared no further once the file is another one.
        if self.content.is_same && is_zero_in(state, &old.found, range)? {
            old.part(range, &mut self.content.extents);
        } else {
            self.content.is_same = false;
        }
        Ok(())
    }

    /// Takes a piece of content.
    pub(super) fn piece(&mut self, start: u64, bytes: &[u8]) -> Result<()> {
        let range = ByteRange::at(start, bytes.len() as u64);
        if let Some(old) = self.old.filter(|old| range.end <= old.size) {
            let there = self.builder.state.read_range(&old.found, range);
            if there.attempt(|| "compare the content")? == bytes {
                old.part(range, &mut self.content.extents);
                return Ok(());
            }
        }
        self.content.is_same = false;
        let mut run = range.start..range.start;
        let mut at = range.start;
        while at < range.end {
            let end = (at / ZEROS + 1).saturating_mul(ZEROS).min(range.end);
            let is_hole = end - at == ZEROS && is_zero(part(bytes, start, at, end));
            if is_hole {
                self.write(run.start, part(bytes, start, run.start, run.end))?;
                run = end..end;
            } else {
                run.end = end;
            }
            at = end;
        }
        self.write(run.start, part(bytes, start, run.start, run.end))
    }

    fn write(&mut self, start: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let len = bytes.len() as u64;
        let limits = &mut self.builder.limits;
        limits.content = limits.content.checked_sub(len).ok_or_else(|| {
            let full = Error::new(Kind::Failed, "write the content", "no space left");
            Error { errno: Some(libc::ENOSPC), ..full }
        })?;
        if start != self.pending_at + self.pending.len() as u64 || self.pending.len() >= WRITE {
            self.flush()?;
            self.pending_at = start;
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    /// Writes the content that is pending.
    fn flush(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let range = ByteRange::at(self.pending_at, self.pending.len() as u64);
        let pool = &mut self.builder.layer.pool;
        let offset = pool.allocate(self.ino, range, true);
        pool.write(offset, &self.pending).attempt(|| "write the content")?;
        self.content.extents.push((range, Source::Pool { layer: pool.layer(), offset }));
        self.pending.clear();
        Ok(())
    }
}

/// The part of `bytes`, which begin at `start`, from `from` to `to`.
fn part(bytes: &[u8], start: u64, from: u64, to: u64) -> &[u8] {
    let at = |offset: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
    bytes.get(at(from)..at(to)).unwrap_or_default()
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Whether a range of a file holds only zeros. A hole is not read.
fn is_zero_in(state: &State, found: &Found, range: ByteRange) -> FsResult<bool> {
    for data in DataRanges::of(state, found, range) {
        if !is_zero(&state.read_range(found, data?)?) {
            return Ok(false);
        }
    }
    Ok(true)
}
