//! Stages the bytes of a write.
//!
//! A write goes to the pool of the upper layer: in place where that layer owns the range, otherwise
//! to fresh addresses, widened to 4 KiB blocks with the bytes that the file has there now. So the
//! first byte that is written to a large base file costs one block, and no sealed state can change.
//!
//! Bytes for fresh addresses are written without a lock ([`stage`](super::stage)), so only syncs
//! and checkpoints wait for them. Other changes wait for bytes that are written in place.
//!
//! Always true:
//! * Addresses to which an edit of the edit history refers are never overwritten.
//! * Nothing that a reader can see changes before the edits are committed, except where a write
//!   overwrites in place. That happens last.

use std::cell::Cell;
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::edits::Touch;
use crate::fs::kernel::orphans::create_scratch;
use crate::fs::merged::answers;
use crate::fs::ops::change::Change;
use crate::fs::ops::privileges::PrivilegeBits;
use crate::fs::ops::stage::{FreshPart, Stage, slice};
use crate::fs::ops::writable::Writable;
use crate::fs::writing::Writing;
use crate::fs::{Core, Need};
use crate::store::Store;
use crate::store::content::pool::{BLOCK, PoolWriter, block_ceil, block_floor};
use crate::tree::{Edit, Source};
use crate::types::{ByteRange, LayerId, NodeId};

/// Where the bytes of a write come from and go to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Position {
    /// From a caller, to the place that it said.
    Given,
    /// From a caller with O_APPEND: the kernel chose the offset by the size that it knows.
    End,
    /// From the kernel's page cache.
    WriteBack,
}

impl Position {
    fn touch(self) -> Touch {
        if self == Position::WriteBack { Touch::WriteBack } else { Touch::Write }
    }
}

/// Lets a test run code while the write of this thread holds no lock.
#[cfg(test)]
pub(super) mod hook {
    use std::cell::Cell;

    /// A moment of a write that has fresh parts.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(in crate::fs::ops) enum When {
        BeforeStore,
        AfterStore,
    }

    type Hook = (When, Box<dyn FnOnce()>);

    thread_local! {
        static HOOK: Cell<Option<Hook>> = const { Cell::new(None) };
    }

    /// Calls `then` at the next such moment.
    pub(in crate::fs::ops) fn set(when: When, then: impl FnOnce() + 'static) {
        HOOK.set(Some((when, Box::new(then))));
    }

    /// Drops the call that was set. Returns whether it was still to be made.
    pub(in crate::fs::ops) fn clear() -> bool {
        HOOK.take().is_some()
    }

    pub(super) fn call(now: When) {
        match HOOK.take() {
            Some((when, then)) if when == now => then(),
            hook => HOOK.set(hook),
        }
    }
}

/// The parts of a write.
#[derive(Default)]
struct Runs {
    /// Ranges that are overwritten in place, each with its address in the pool.
    in_place: Vec<(ByteRange, u64)>,
    /// Ranges that go to fresh addresses.
    fresh: Vec<ByteRange>,
}

impl Runs {
    /// Adds a range that goes to fresh addresses, behind all others, and merges it with an adjacent
    /// one.
    fn push_fresh(&mut self, range: ByteRange) {
        match self.fresh.last_mut() {
            Some(before) if before.end == range.start => before.end = range.end,
            _ => self.fresh.push(range),
        }
    }
}

/// A write whose stages were dropped this many times stores the next one while no other change goes
/// on, so that changes and seals that never end cannot keep it from going on.
pub(super) const MOST_DROPPED: u32 = 8;

/// A write(2) under way. It runs under the locks of a change, is stored without them if it has
/// fresh parts, and then runs again.
pub(super) struct Write<'a> {
    id: NodeId,
    position: Position,
    offset: u64,
    bytes: &'a [u8],
    privileges: PrivilegeBits<'a>,
    waiting: Option<(Planned, Stage)>,
    /// The number of stages that were dropped.
    dropped: u32,
    /// A dropped stage has left content in the pool.
    has_garbage: bool,
}

/// The changes that a write makes to a file.
struct Planned {
    change: Change,
    /// The size of the file before.
    size: u64,
    runs: Runs,
}

impl<'a> Write<'a> {
    pub(super) fn new(
        id: NodeId,
        (position, offset): (Position, u64),
        bytes: &'a [u8],
        privileges: PrivilegeBits<'a>,
    ) -> Write<'a> {
        let (waiting, dropped, has_garbage) = (None, 0, false);
        Write { id, position, offset, bytes, privileges, waiting, dropped, has_garbage }
    }

    /// Whether content was left in the pool to which no record refers.
    pub(super) fn has_garbage(&self) -> bool {
        self.has_garbage
    }

    fn range(&self) -> ByteRange {
        ByteRange::at(self.offset, self.bytes.len() as u64)
    }

    /// Writes the fresh parts to the pool. The caller holds no lock.
    pub(super) fn store(&mut self) {
        let Some((_, stage)) = &mut self.waiting else { return };
        #[cfg(test)]
        hook::call(hook::When::BeforeStore);
        stage.store(self.offset, self.bytes);
        #[cfg(test)]
        hook::call(hook::When::AfterStore);
    }

    /// Plans the write, and records it if its fresh parts are stored. `need` is set to why it needs
    /// space.
    ///
    /// # Errors
    /// EISDIR or EINVAL for a node without content; ENOSPC at the quota; those of the base and of
    /// the host. [`FsError::MustWait`] if the caller must store it and run it again.
    pub(super) fn run(
        &mut self,
        core: &mut Writing<'_>,
        store: &Arc<Store>,
        need: &Cell<Need>,
    ) -> FsResult<()> {
        need.set(Need::More);
        let planned = match self.waiting.take() {
            None => self.plan(core, store)?,
            Some((planned, stage)) if stage.is_next_turn(core) => {
                return self.record(core, planned, Some(stage), need);
            }
            Some((_, stage)) => {
                let planned = self.plan(core, store);
                let fits =
                    |planned: &Planned| core.fits(&stage, planned.change.file, &planned.runs.fresh);
                if planned.as_ref().is_ok_and(fits) {
                    return self.record(core, planned?, Some(stage), need);
                }
                self.drop_stage(core, stage);
                planned?
            }
        };
        let fresh = &planned.runs.fresh;
        if fresh.is_empty() {
            return self.record(core, planned, None, need);
        }
        core.need_bytes(fresh.iter().map(ByteRange::len).sum())?;
        let mut stage = self.begin_stage(core, &planned)?;
        if self.dropped >= MOST_DROPPED {
            core.released(|| stage.store(self.offset, self.bytes));
            return self.record(core, planned, Some(stage), need);
        }
        self.waiting = Some((planned, stage));
        Err(answers::must_wait())
    }

    fn drop_stage(&mut self, core: &mut Writing<'_>, stage: Stage) {
        self.dropped += 1;
        self.has_garbage |= !core.drop_stage(stage);
    }

    fn plan(&self, core: &mut Writing<'_>, store: &Store) -> FsResult<Planned> {
        let target = core.content_target(self.id)?;
        if self.position == Position::End {
            core.check_append(self.id, &target, self.offset)?;
        }
        let change = core.plan_change(target, self.privileges, self.position.touch())?;
        core.prepare_pool_of(store, change.file)?;
        let size = core.tree_of(change.file).size(change.file.key);
        let runs = core.cut_into_runs(change.file, self.range(), size);
        Ok(Planned { change, size, runs })
    }

    fn begin_stage(&self, core: &mut Core, planned: &Planned) -> FsResult<Stage> {
        let (file, range) = (planned.change.file, self.range());
        let size = planned.size.max(range.end);
        let fresh = planned.runs.fresh.iter();
        let parts = fresh.map(|part| core.in_blocks(file, *part, range, size));
        let parts = parts.collect::<FsResult<Vec<_>>>()?;
        core.begin_stage(file, parts)
    }

    /// Overwrites in place, and records all parts. Drops the stage if that fails.
    fn record(
        &mut self,
        core: &mut Writing<'_>,
        planned: Planned,
        stage: Option<Stage>,
        need: &Cell<Need>,
    ) -> FsResult<()> {
        let stored = stage.as_ref().map_or_else(|| Ok(Vec::new()), Stage::stored);
        let recorded = stored.and_then(|stored| self.record_as(core, planned, &stored, need));
        if let (Err(_), Some(stage)) = (&recorded, stage) {
            self.drop_stage(core, stage);
        }
        recorded
    }

    fn record_as(
        &self,
        core: &mut Writing<'_>,
        Planned { change, size, runs }: Planned,
        stored: &[(ByteRange, ByteRange)],
        need: &Cell<Need>,
    ) -> FsResult<()> {
        let file = change.file;
        core.overwrite(file, &runs.in_place, |part| slice(self.bytes, self.offset, part))?;
        let mut edits = Vec::with_capacity(4);
        if self.range().end > size {
            edits.push(Edit::Resize { ino: file.key, size: self.range().end });
        }
        let layer = core.layer_of(file);
        for (blocks, addresses) in stored {
            core.pool_of(file)?.note_written(*addresses);
            let to = Some(Source::Pool { layer, offset: addresses.start });
            edits.push(Edit::Map { ino: file.key, range: *blocks, to });
        }
        if edits.is_empty() {
            need.set(Need::InPlace);
        }
        core.commit_change(change, edits)
    }
}

impl Writing<'_> {
    /// Overwrites parts of a file, each at its address in the pool, with the bytes that `bytes_of`
    /// returns.
    ///
    /// # Errors
    /// As pwrite(2).
    fn overwrite<'b>(
        &mut self,
        file: Writable,
        parts: &[(ByteRange, u64)],
        bytes_of: impl Fn(ByteRange) -> FsResult<&'b [u8]>,
    ) -> FsResult<()> {
        if parts.is_empty() {
            return Ok(());
        }
        self.write_edits();
        let pool = self.pool_of(file)?;
        let begin = |(part, at): &(ByteRange, u64)| {
            let bytes = bytes_of(*part)?;
            Ok((pool.begin_write(ByteRange::at(*at, part.len())), *at, bytes))
        };
        let writes = parts.iter().map(begin).collect::<FsResult<Vec<_>>>()?;
        let mut writes = writes.into_iter();
        Ok(self.released(|| writes.try_for_each(|(to, at, bytes)| to.write(at, bytes)))?)
    }
}

impl Writing<'_> {
    /// Creates the scratch file if the content of a node is to be written there. Otherwise notes
    /// that the pool has content that may get a record later.
    pub(super) fn prepare_pool_of(&mut self, store: &Store, file: Writable) -> FsResult<()> {
        if !self.is_in_scratch(file) {
            if file.is_orphan {
                self.upper.note_changed();
            }
        } else if self.held.orphans().scratch_file().is_none() {
            let scratch = self.released(|| create_scratch(store))?;
            self.held.orphans_mut().use_scratch(file.key, scratch);
        }
        Ok(())
    }
}

impl Core {
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
    fn cut_into_runs(&self, file: Writable, range: ByteRange, size: u64) -> Runs {
        let layer = self.layer_of(file);
        let mut runs = Runs::default();
        for segment in self.tree_of(file).segments(file.key, range) {
            match segment.source {
                Some(Source::Pool { layer: owner, offset }) if owner == layer => {
                    self.cut_owned(&mut runs, segment.range, offset, layer);
                }
                _ => runs.push_fresh(segment.range),
            }
        }
        let tail = ByteRange { start: range.start.max(size), end: range.end };
        if !tail.is_empty() {
            runs.push_fresh(tail);
        }
        runs
    }

    /// Cuts a range that the upper layer owns at the addresses that are pinned by an edit.
    fn cut_owned(&self, runs: &mut Runs, range: ByteRange, offset: u64, layer: LayerId) {
        let end = offset + range.len();
        let in_file = |from: u64, to: u64| ByteRange {
            start: range.start + (from - offset),
            end: range.start + (to - offset),
        };
        let mut at = offset;
        while let Some(pinned) = self.first_pinned(layer, ByteRange { start: at, end }) {
            if at < pinned.start {
                runs.in_place.push((in_file(at, pinned.start), at));
            }
            runs.push_fresh(in_file(pinned.start, pinned.end));
            at = pinned.end;
        }
        if at < end {
            runs.in_place.push((in_file(at, end), at));
        }
    }

    /// The parts of a range of a file that may be overwritten in place, in order.
    fn overwritable(&self, file: Writable, range: ByteRange) -> Vec<ByteRange> {
        let size = self.tree_of(file).size(file.key);
        let range = ByteRange { end: range.end.min(size), ..range };
        if range.start >= range.end {
            return Vec::new();
        }
        let runs = self.cut_into_runs(file, range, size);
        runs.in_place.into_iter().map(|(part, _)| part).collect()
    }

    /// Widens a fresh run of the write `of` to whole blocks. Excluded are bytes that may be written
    /// in place, and bytes that an adjacent run of the same write covers. `size` is the size of the
    /// file after the write.
    fn in_blocks(
        &mut self,
        file: Writable,
        part: ByteRange,
        of: ByteRange,
        size: u64,
    ) -> FsResult<FreshPart> {
        let mut blocks = part;
        if part.start == of.start && !self.pool_of(file)?.continues(file.key, part.start) {
            blocks.start = self.fill_start(file, part);
        }
        if part.end == of.end {
            blocks.end = self.fill_end(file, part, block_ceil(part.end).min(size).max(part.end));
        }
        debug_assert!(blocks.len() <= part.len() + 2 * BLOCK);
        Ok(FreshPart { part, blocks })
    }

    /// Where the block of the first byte of `part` begins, or where bytes that may be written in
    /// place end before it.
    fn fill_start(&self, file: Writable, part: ByteRange) -> u64 {
        let before = ByteRange { start: block_floor(part.start), end: part.start };
        self.overwritable(file, before).last().map_or(before.start, |range| range.end)
    }

    /// Where the block of the last byte of `part` ends, at most at `end`, or where bytes that may
    /// be written in place begin after it.
    fn fill_end(&self, file: Writable, part: ByteRange, end: u64) -> u64 {
        let behind = ByteRange { start: part.end, end };
        self.overwritable(file, behind).first().map_or(end, |range| range.start)
    }
}
