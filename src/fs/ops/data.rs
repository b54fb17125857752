//! Operations on the content of files: read, write, truncate, seek, copy.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::edits::Touch;
use crate::fs::merged::data_ranges::{Plan, first_data};
use crate::fs::merged::extent_reader;
use crate::fs::merged::extent_reader::{HostExtent, SeekTo};
use crate::fs::merged::lower::Lower;
use crate::fs::merged::read_plan::ReadPlan;
use crate::fs::ops::fallocate::ZERO_RANGE;
use crate::fs::ops::privileges::PrivilegeBits;
use crate::fs::ops::write::{Position, Write};
use crate::fs::writing::Writing;
use crate::fs::{Core, Fs, MAX_FILE_SIZE, Need, State, Target};
use crate::tree::{Edit, Tree};
use crate::types::{ByteRange, NodeId};

impl Fs {
    /// Finds where the bytes of a file are. [`ReadPlan::read`] then reads them without a lock.
    ///
    /// # Errors
    /// EISDIR or EINVAL for a node without content; those of the base.
    pub fn read(&self, id: NodeId, offset: u64, len: u64) -> FsResult<ReadPlan> {
        if id.is_in_snapdir() {
            // Read at once: an apply may exchange the base below the checkpoint at any later time.
            let bytes = self.snapdir_read(id, offset, len, false)?.unwrap_or_default();
            return Ok(ReadPlan::of_bytes(bytes, Arc::clone(&self.core().lower)));
        }
        self.with_content(id, |core| {
            let target = core.content_target(id)?;
            let guard = core.lower.reading();
            let extents = core.plan_of(&target, ByteRange::at(offset, len))?;
            Ok(ReadPlan::new(extents, Arc::clone(&core.lower), guard))
        })
    }

    /// Reads by a plan that [`Fs::read`] made with the same arguments. If an apply wrote the base
    /// meanwhile, reads by a new plan.
    ///
    /// # Errors
    /// As [`Fs::read`] and [`ReadPlan::read`].
    pub fn read_by(&self, plan: ReadPlan, id: NodeId, offset: u64, len: u64) -> FsResult<Vec<u8>> {
        let (read, lower) = (plan.read(false), Arc::clone(plan.lower()));
        drop(plan);
        match read {
            Err(_) if !self.reads_through(&lower) => {
                self.read_by(self.read(id, offset, len)?, id, offset, len)
            }
            read => Ok(read?.unwrap_or_default()),
        }
    }

    /// Whether this is how the head reads the base now. An apply changes that before it writes.
    pub(super) fn reads_through(&self, lower: &Arc<Lower>) -> bool {
        Arc::ptr_eq(&self.core().lower, lower)
    }

    /// Writes bytes into a file.
    ///
    /// # Errors
    /// EFBIG; those of the store. Then nothing is changed.
    pub fn write<'a>(
        &self,
        id: NodeId,
        offset: u64,
        bytes: &[u8],
        privileges: impl Into<PrivilegeBits<'a>>,
    ) -> FsResult<()> {
        self.write_at(id, (Position::Given, offset), bytes, privileges.into())
    }

    /// Writes bytes that the kernel had in its page cache. With a writeback cache it keeps mtime
    /// itself, and sends it.
    ///
    /// # Errors
    /// As [`Fs::write`].
    pub fn write_back<'a>(
        &self,
        id: NodeId,
        offset: u64,
        bytes: &[u8],
        privileges: impl Into<PrivilegeBits<'a>>,
    ) -> FsResult<()> {
        self.write_at(id, (Position::WriteBack, offset), bytes, privileges.into())
    }

    /// Appends bytes to a file; `offset` is the end of the file as the caller knows it.
    ///
    /// # Errors
    /// As [`Fs::write`]; [`FsError::Drift`] if a base file ends elsewhere by now.
    pub fn append<'a>(
        &self,
        id: NodeId,
        offset: u64,
        bytes: &[u8],
        privileges: impl Into<PrivilegeBits<'a>>,
    ) -> FsResult<()> {
        self.write_at(id, (Position::End, offset), bytes, privileges.into())
    }

    fn write_at(
        &self,
        id: NodeId,
        (position, offset): (Position, u64),
        bytes: &[u8],
        privileges: PrivilegeBits<'_>,
    ) -> FsResult<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > MAX_FILE_SIZE) {
            return Err(FsError::FileTooBig);
        }
        let need = Cell::new(Need::More);
        self.with_room_as(&need, || {
            let write = RefCell::new(Write::new(id, (position, offset), bytes, privileges));
            let run = |core: &mut Writing<'_>| write.borrow_mut().run(core, &self.store, &need);
            let written = self.change_node_and_wait(id, run, || write.borrow_mut().store());
            if write.into_inner().has_garbage() {
                self.reclaim.note_garbage();
            }
            written
        })
    }

    /// Sets the size of a file, in bytes.
    ///
    /// # Errors
    /// As [`Fs::write`].
    pub fn truncate<'a>(
        &self,
        id: NodeId,
        size: u64,
        privileges: impl Into<PrivilegeBits<'a>>,
    ) -> FsResult<()> {
        let privileges = privileges.into();
        let touch = Touch::Resize(size);
        self.with_room(Need::Less, || {
            self.change_node(id, |core| {
                let target = core.target(id)?;
                core.check_truncate(id, &target, size)?;
                core.change_file(&self.store, target, privileges, touch, |_, _, file| {
                    Ok(vec![Edit::Resize { ino: file.key, size }])
                })
            })
        })
    }

    /// Finds data or a hole at or after an offset (lseek(2)).
    ///
    /// # Errors
    /// ENXIO at or after the end; those of the base.
    pub fn seek(&self, id: NodeId, offset: u64, to: SeekTo) -> FsResult<u64> {
        if id.is_in_snapdir() {
            return self.snapdir_seek(id, offset, to);
        }
        let (size, _guard) = self.with_node(id, |core| {
            let target = core.content_target(id)?;
            Ok((core.attr_of(id, &target)?.size, core.lower.reading()))
        })?;
        if offset >= size {
            return Err(FsError::NoSuchOffset);
        }
        extent_reader::seek(|range| self.plan_now(id, range), offset, size, to)
    }

    /// Where the bytes of a range of a file are now, cut at its size. The caller holds a read
    /// guard.
    fn plan_now(&self, id: NodeId, range: ByteRange) -> FsResult<Vec<HostExtent>> {
        self.with_content(id, |core| {
            let target = core.content_target(id)?;
            core.plan_of(&target, range)
        })
    }

    /// Copies bytes from one file into another, and holes as holes. Returns the number of bytes,
    /// which is less than `len` at the end of the source.
    ///
    /// # Errors
    /// As [`Fs::read`] and [`Fs::write`]. After a part was copied, an error ends the copy, and the
    /// next call meets it again.
    pub fn copy_range<'a>(
        &self,
        from: NodeId,
        at: u64,
        to: NodeId,
        into: u64,
        len: u64,
        privileges: impl Into<PrivilegeBits<'a>>,
    ) -> FsResult<u64> {
        let privileges = privileges.into();
        let mut done = 0;
        while done < len {
            match self.copy_step((from, at + done), (to, into + done), len - done, privileges) {
                Ok(0) => break,
                Ok(copied) => done += copied,
                // The kernel drops pages and the size of the target only for the bytes that the
                // reply reports, so what was copied must be reported.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Copies the hole at `at`, or else the first data after it. Returns 0 at the end of the
    /// source.
    fn copy_step(
        &self,
        (from, at): (NodeId, u64),
        (to, into): (NodeId, u64),
        len: u64,
        privileges: PrivilegeBits<'_>,
    ) -> FsResult<u64> {
        let (end, data) = self.next_data(from, ByteRange::at(at, len))?;
        let hole = ByteRange { start: at, end: data.map_or(end, |data| data.start) };
        if !hole.is_empty() {
            self.fallocate(to, ZERO_RANGE, into, hole.len(), privileges)?;
            return Ok(hole.len());
        }
        let Some(data) = data else { return Ok(0) };
        // Making room on a full disk waits for all readers, so this read ends before the write.
        let bytes = self.read_by(self.read(from, at, data.len())?, from, at, data.len())?;
        if !bytes.is_empty() {
            self.write(to, into, &bytes, privileges)?;
        }
        Ok(bytes.len() as u64)
    }

    /// The first data in a range of a file, at most [`crate::fs::merged::data_ranges::STEP`] bytes,
    /// and where the range ends, cut at the size of the file; `None` if the range is a hole.
    ///
    /// # Errors
    /// As [`Fs::read`].
    fn next_data(&self, id: NodeId, range: ByteRange) -> FsResult<(u64, Option<ByteRange>)> {
        if id.is_in_snapdir() {
            return self.snapdir_data(id, range);
        }
        let (target, lower, size, guard) = self.with_content(id, |core| {
            let target = core.content_target(id)?;
            let size = core.attr_of(id, &target)?.size;
            Ok((target, Arc::clone(&core.lower), size, core.lower.reading()))
        })?;
        let plan: Plan<'_> = match target {
            // A lower never changes, so no lock is needed.
            Target::Base(_, path, node) => {
                let lower = Arc::clone(&lower);
                Box::new(move |range| lower.plan(&path, &node, range))
            }
            Target::Upper(_) | Target::Orphan(_) => Box::new(|range| self.plan_now(id, range)),
        };
        let found = first_data(plan, Arc::clone(&lower), range, size);
        drop(guard);
        if found.is_err() && !self.reads_through(&lower) {
            return self.next_data(id, range);
        }
        found
    }
}

impl Core {
    /// Where the bytes of a range of a file are, cut at its size.
    ///
    /// # Errors
    /// As [`State::plan`].
    pub(in crate::fs) fn plan_of(
        &self,
        target: &Target,
        range: ByteRange,
    ) -> FsResult<Vec<HostExtent>> {
        match target {
            Target::Upper(ino) => self.plan_in(&self.tree, *ino, range, None),
            Target::Orphan(key) => {
                let state = State { tree: Tree::new(), lower: self.lower_of_orphan(*key) };
                let scratch = self.held.orphans().scratch_file();
                state.plan_in(self.held.orphans().tree(), *key, range, scratch)
            }
            Target::Base(_, path, node) => self.lower.plan(path, node, range),
        }
    }

    /// Refuses to set the size of a file. Emptying a file is allowed even if the kernel's copy of
    /// its content is stale, because that content does not matter.
    ///
    /// # Errors
    /// EFBIG; [`FsError::Drift`] if the kernel caches another content.
    pub(super) fn check_truncate(
        &mut self,
        id: NodeId,
        target: &Target,
        size: u64,
    ) -> FsResult<()> {
        if size > MAX_FILE_SIZE {
            return Err(FsError::FileTooBig);
        }
        if size > 0 { self.check_coherent(id, target) } else { Ok(()) }
    }
}
