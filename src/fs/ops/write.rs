//! Stages the bytes of a write.
//!
//! A write goes to the pool of the upper layer: in place where that layer owns the range, otherwise
//! to fresh addresses, widened to 4 KiB blocks with the bytes that the file has there now. So the
//! first byte that is written to a large base file costs one block, and no sealed state can change.
//!
//! Always true:
//! * Addresses to which an edit of the edit history refers are never overwritten.
//! * Staging changes nothing that a reader can see, except where it overwrites in place.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::Core;
use crate::fs::merged::read_plan::ReadPlan;
use crate::fs::ops::writable::Writable;
use crate::store::Store;
use crate::store::content::pool::{BLOCK, PoolWriter, block_ceil, block_floor};
use crate::tree::{Edit, Extent, Source};
use crate::types::{ByteRange, LayerId};

/// A part of a write.
enum Run {
    /// Overwrites a range in place, at this address of the pool.
    InPlace(ByteRange, u64),
    /// Goes to fresh addresses.
    Fresh(ByteRange),
}

/// The blocks that a fresh run takes, and the bytes that the file has in them before and after the
/// run.
struct Fill {
    blocks: ByteRange,
    left: Vec<u8>,
    right: Vec<u8>,
}

/// Adds a range to the runs that go to fresh addresses, and merges it with an adjacent one.
fn push_fresh(runs: &mut Vec<Run>, range: ByteRange) {
    match runs.last_mut() {
        Some(Run::Fresh(before)) if before.end == range.start => before.end = range.end,
        _ => runs.push(Run::Fresh(range)),
    }
}

impl Core {
    /// Writes bytes to the pool. Returns the edits that make them visible.
    ///
    /// # Errors
    /// ENOSPC at the quota; those of the host.
    pub(super) fn stage_write(
        &mut self,
        store: &Arc<Store>,
        file: Writable,
        offset: u64,
        bytes: &[u8],
    ) -> FsResult<Vec<Edit>> {
        self.open_pool_of(store, file)?;
        let range = ByteRange::at(offset, bytes.len() as u64);
        let size = self.tree_of(file).size(file.key);
        let mut edits = Vec::with_capacity(3);
        if range.end > size {
            edits.push(Edit::Resize { ino: file.key, size: range.end });
        }
        let runs = self.cut_into_runs(file, range, size);
        let fresh = runs.iter().map(|run| match run {
            Run::InPlace(..) => 0,
            Run::Fresh(part) => part.len(),
        });
        self.need_bytes(store, fresh.sum())?;
        // All that must be read is read before the first byte is written.
        let mut fills = Vec::new();
        for run in &runs {
            if let Run::Fresh(part) = run {
                let blocks = self.fill_range(file, *part, range, size.max(range.end))?;
                fills.push(self.fill_of(file, *part, blocks)?);
            }
        }
        let mut fills = fills.into_iter();
        for run in runs {
            match run {
                Run::InPlace(part, at) => {
                    self.pool_of(file)?.write(at, slice(bytes, offset, part)?)?;
                }
                Run::Fresh(part) => {
                    let fill = fills.next().ok_or(FsError::Damage("a run without its block"))?;
                    edits.push(self.write_fresh(file, slice(bytes, offset, part)?, fill, size)?);
                }
            }
        }
        Ok(edits)
    }

    /// The present bytes around `part` in `blocks`.
    fn fill_of(&self, file: Writable, part: ByteRange, blocks: ByteRange) -> FsResult<Fill> {
        let left = self.current_bytes(file, ByteRange { start: blocks.start, end: part.start });
        let right = self.current_bytes(file, ByteRange { start: part.end, end: blocks.end });
        Ok(Fill { blocks, left: left?, right: right? })
    }

    /// Writes bytes and those around them to fresh addresses.
    fn write_fresh(
        &mut self,
        file: Writable,
        bytes: &[u8],
        Fill { blocks, left, right }: Fill,
        size: u64,
    ) -> FsResult<Edit> {
        self.quota.add(blocks.len());
        let layer = self.layer_of(file);
        let pool = self.pool_of(file)?;
        let at = pool.allocate(file.key, blocks, blocks.end >= size);
        if left.is_empty() && right.is_empty() {
            pool.write(at, bytes)?;
        } else {
            pool.write(at, &[&left, bytes, &right].concat())?;
        }
        let to = Some(Source::Pool { layer, offset: at });
        Ok(Edit::Map { ino: file.key, range: blocks, to })
    }

    /// Creates the scratch file if the content of a node is to be written there. Otherwise notes
    /// that the pool has content that may get a record later.
    pub(super) fn open_pool_of(&mut self, store: &Store, file: Writable) -> FsResult<()> {
        if self.is_in_scratch(file) {
            self.held.orphans_mut().scratch(store)?;
        } else if file.is_orphan {
            self.upper.note_changed();
        }
        Ok(())
    }

    /// The pool to which the content of a node is written.
    pub(super) fn pool_of(&mut self, file: Writable) -> FsResult<&mut PoolWriter> {
        if !self.is_in_scratch(file) {
            return Ok(&mut self.upper.pool);
        }
        self.held
            .orphans_mut()
            .open_scratch()
            .ok_or(FsError::Damage("an orphan is written without a scratch file"))
    }

    /// Cuts a write into runs in place and fresh runs.
    fn cut_into_runs(&self, file: Writable, range: ByteRange, size: u64) -> Vec<Run> {
        let layer = self.layer_of(file);
        let mut runs: Vec<Run> = Vec::new();
        for segment in self.tree_of(file).segments(file.key, range) {
            match segment.source {
                Some(Source::Pool { layer: owner, offset }) if owner == layer => {
                    self.cut_owned(&mut runs, segment.range, offset, layer);
                }
                _ => push_fresh(&mut runs, segment.range),
            }
        }
        let tail = ByteRange { start: range.start.max(size), end: range.end };
        if !tail.is_empty() {
            push_fresh(&mut runs, tail);
        }
        runs
    }

    /// Cuts a range that the upper layer owns at the addresses that are pinned by an edit.
    fn cut_owned(&self, runs: &mut Vec<Run>, range: ByteRange, offset: u64, layer: LayerId) {
        let end = offset + range.len();
        let in_file = |from: u64, to: u64| ByteRange {
            start: range.start + (from - offset),
            end: range.start + (to - offset),
        };
        let mut at = offset;
        while let Some(pinned) = self.first_pinned(layer, ByteRange { start: at, end }) {
            if at < pinned.start {
                runs.push(Run::InPlace(in_file(at, pinned.start), at));
            }
            push_fresh(runs, in_file(pinned.start, pinned.end));
            at = pinned.end;
        }
        if at < end {
            runs.push(Run::InPlace(in_file(at, end), at));
        }
    }

    /// Widens a fresh run of the write `of` to whole blocks. Excluded are bytes that may be written
    /// in place, and bytes that an adjacent run of the same write covers. `size` is the size of the
    /// file after the write.
    fn fill_range(
        &mut self,
        file: Writable,
        part: ByteRange,
        of: ByteRange,
        size: u64,
    ) -> FsResult<ByteRange> {
        let mut blocks = part;
        if part.start == of.start && !self.pool_of(file)?.continues(file.key, part.start) {
            blocks.start = self.fill_start(file, part);
        }
        if part.end == of.end {
            blocks.end = self.fill_end(file, part, block_ceil(part.end).min(size).max(part.end));
        }
        debug_assert!(blocks.len() <= part.len() + 2 * BLOCK);
        Ok(blocks)
    }

    /// Where the block of the first byte of `part` begins, or where bytes that may be written in
    /// place end before it.
    fn fill_start(&self, file: Writable, part: ByteRange) -> u64 {
        let first = block_floor(part.start);
        let mut at = part.start;
        while let Some((start, extent)) = self.tree_of(file).extent_before(file.key, at) {
            let end = start + extent.len;
            if end <= first {
                break;
            }
            let before = ByteRange { start: start.max(first), end: end.min(part.start) };
            if self.may_overwrite(file, before) {
                return before.end;
            }
            at = start;
        }
        first
    }

    /// Where the block of the last byte of `part` ends, at most at `end`, or where bytes that may
    /// be written in place begin after it.
    fn fill_end(&self, file: Writable, part: ByteRange, end: u64) -> u64 {
        let mut at = part.end;
        while at < end {
            match self.tree_of(file).extent_at(file.key, at) {
                Some((start, extent)) => {
                    let extent_end = start + extent.len;
                    let after = ByteRange { start: at, end: extent_end.min(end) };
                    if self.may_overwrite(file, after) {
                        return at;
                    }
                    at = extent_end;
                }
                None => at = self.tree_of(file).next_data(file.key, at).unwrap_or(end),
            }
        }
        end
    }

    /// Whether bytes of a file, which are of one extent, may be overwritten in place.
    fn may_overwrite(&self, file: Writable, part: ByteRange) -> bool {
        let layer = self.layer_of(file);
        match self.tree_of(file).extent_at(file.key, part.start) {
            Some((start, Extent { source: Source::Pool { layer: owner, offset }, .. }))
                if owner == layer =>
            {
                let at = ByteRange::at(offset + (part.start - start), part.len());
                self.first_pinned(layer, at).is_none()
            }
            _ => false,
        }
    }

    /// The bytes of a file as they are now, with zeros after its end.
    fn current_bytes(&self, file: Writable, range: ByteRange) -> FsResult<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let guard = self.lower.reading();
        let extents = self.plan_of(&file.target(), range)?;
        let plan = ReadPlan::new(extents, Arc::clone(&self.lower), guard);
        let mut bytes = plan.read(false)?.unwrap_or_default();
        bytes.resize(usize::try_from(range.len()).map_err(|_| FsError::Invalid)?, 0);
        Ok(bytes)
    }
}

/// The bytes of `part` in a write whose bytes begin at `offset` of the file.
fn slice(bytes: &[u8], offset: u64, part: ByteRange) -> FsResult<&[u8]> {
    let from = usize::try_from(part.start - offset).map_err(|_| FsError::Invalid)?;
    let to = usize::try_from(part.end - offset).map_err(|_| FsError::Invalid)?;
    bytes.get(from..to).ok_or(FsError::Damage("a run of a write lies outside of it"))
}
