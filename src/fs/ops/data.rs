//! Operations on the content of files: read, write, truncate, punch, seek.
//!
//! A write goes to the pool of the upper layer: in place where that layer owns the range, else to fresh addresses, with
//! the touched 4 KiB blocks filled from below. So the first byte written to a large file of the base costs a block, and
//! no sealed state can change.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::edits::Touch;
use crate::fs::merged::data_ranges::{Plan, first_data};
use crate::fs::merged::extent_reader;
use crate::fs::merged::extent_reader::{HostExtent, SeekTo};
use crate::fs::merged::read_plan::ReadPlan;
use crate::fs::merged::state::SCRATCH;
use crate::fs::{Core, Fs, MAX_FILE_SIZE, Need, State, Target};
use crate::store::Store;
use crate::store::content::pool::{BLOCK, PoolWriter, block_ceil, block_floor};
use crate::sys::clock;
use crate::tree::{Edit, Extent, Meta, Source, Tree};
use crate::types::{ByteRange, FileKind, Ino, LayerId, NodeId};

const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const GROUP_EXEC: u32 = 0o010;
/// The mode of fallocate(2) that makes a range zeros, and the file as long as it needs.
const ZERO_RANGE: i32 = 16;
/// The attribute that holds file capabilities (capabilities(7)).
pub(in crate::fs) const CAPABILITY: &[u8] = b"security.capability";

impl Fs {
    /// Finds where the bytes of a file are; [`ReadPlan::read`] then reads them without the lock.
    ///
    /// # Errors
    /// EISDIR, EINVAL, or what the base answers.
    pub fn read(&self, id: NodeId, offset: u64, len: u64) -> FsResult<ReadPlan> {
        if id.is_in_snapdir() {
            // At once: what a checkpoint was is known for sure only as long as nobody exchanges the base below it.
            let bytes = self.past_read(id, offset, len, false)?.unwrap_or_default();
            return Ok(ReadPlan::of_bytes(bytes, Arc::clone(&self.core().lower)));
        }
        let mut core = self.core();
        let target = core.content_target(id)?;
        let reading = core.lower.reading();
        let pieces = core.plan_of(&target, ByteRange::at(offset, len))?;
        Ok(ReadPlan::new(pieces, Arc::clone(&core.lower), reading))
    }

    /// Writes bytes into a file. File capabilities go with any change of content; `kill` says that setuid and setgid go,
    /// too, because the caller lacks CAP_FSETID.
    ///
    /// # Errors
    /// EFBIG, or what the store answers; then nothing is changed.
    pub fn write(&self, id: NodeId, offset: u64, bytes: &[u8], kill: bool) -> FsResult<()> {
        self.with_room(Need::More, || self.try_write(id, offset, bytes, kill))
    }

    fn try_write(&self, id: NodeId, offset: u64, bytes: &[u8], kill: bool) -> FsResult<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > MAX_FILE_SIZE) {
            return Err(FsError::FileTooBig);
        }
        let mut core = self.core();
        core.content_target(id)?;
        core.change_file(&self.store, id, kill, Touch::Write, |core, store, file| {
            core.stage_write(store, file, offset, bytes)
        })
    }

    /// Sets the size of a file; `kill` as for [`Fs::write`].
    ///
    /// # Errors
    /// As [`Fs::write`].
    pub fn truncate(&self, id: NodeId, size: u64, kill: bool) -> FsResult<()> {
        self.with_room(Need::Less, || self.try_truncate(id, size, kill))
    }

    fn try_truncate(&self, id: NodeId, size: u64, kill: bool) -> FsResult<()> {
        if size > MAX_FILE_SIZE {
            return Err(FsError::FileTooBig);
        }
        let mut core = self.core();
        // Who empties it does not care what it was.
        if size > 0 {
            let target = core.target(id)?;
            core.check_coherent(id, &target)?;
        }
        core.change_file(&self.store, id, kill, Touch::Resize(size), |_, _, file| {
            Ok(vec![Edit::Resize { ino: file.key, size }])
        })
    }

    /// Makes room in a file, or a hole (fallocate(2)). Room is not reserved on disk: a later write can still meet a full
    /// disk.
    ///
    /// # Errors
    /// EOPNOTSUPP for modes other than keep-size, punch-hole and zero-range; else as [`Fs::write`].
    pub fn fallocate(
        &self,
        id: NodeId,
        mode: i32,
        offset: u64,
        len: u64,
        kill: bool,
    ) -> FsResult<()> {
        self.with_room(Need::Less, || self.try_fallocate(id, mode, offset, len, kill))
    }

    fn try_fallocate(
        &self,
        id: NodeId,
        mode: i32,
        offset: u64,
        len: u64,
        kill: bool,
    ) -> FsResult<()> {
        const KEEP_SIZE: i32 = 1;
        const PUNCH_HOLE: i32 = 2;
        let keeps_size = mode & KEEP_SIZE != 0;
        let zeroes = match mode & !KEEP_SIZE {
            0 => false,
            PUNCH_HOLE if keeps_size => true,
            ZERO_RANGE => true,
            _ => return Err(FsError::Unsupported),
        };
        let range = ByteRange::at(offset, len);
        if range.is_empty() {
            return Err(FsError::Invalid);
        }
        if range.end > MAX_FILE_SIZE {
            return Err(FsError::FileTooBig);
        }
        let mut core = self.core();
        core.content_target(id)?;
        core.change_file(&self.store, id, kill, Touch::Write, |core, _, file| {
            let size = core.tree_of(file).size(file.key);
            let mut edits = Vec::new();
            let hole = ByteRange { start: range.start, end: range.end.min(size) };
            if zeroes && !hole.is_empty() {
                edits.push(Edit::Map { ino: file.key, range: hole, to: None });
            }
            if !keeps_size && range.end > size {
                edits.push(Edit::Resize { ino: file.key, size: range.end });
            }
            Ok(edits)
        })
    }

    /// Finds data or a hole at or after an offset (lseek(2)).
    ///
    /// # Errors
    /// ENXIO behind the end, or what the base answers.
    pub fn seek(&self, id: NodeId, offset: u64, to: SeekTo) -> FsResult<u64> {
        if id.is_in_snapdir() {
            return self.past_seek(id, offset, to);
        }
        let mut core = self.core();
        let target = core.content_target(id)?;
        let size = core.attr_of(id, &target)?.size;
        if offset >= size {
            return Err(FsError::NoSuchOffset);
        }
        let _reading = core.lower.reading();
        extent_reader::seek(|range| core.plan_of(&target, range), offset, size, to)
    }

    /// Copies bytes from one file into another, and holes as holes; `kill` as for [`Fs::write`]. Gives the number of bytes copied, less than asked at the end of the source.
    ///
    /// # Errors
    /// As [`Fs::read`] and [`Fs::write`]; when something was copied before it, that is told instead, and the next call meets the error.
    pub fn copy_range(
        &self,
        from: NodeId,
        at: u64,
        to: NodeId,
        into: u64,
        len: u64,
        kill: bool,
    ) -> FsResult<u64> {
        let mut done = 0;
        while done < len {
            match self.copy_step((from, at + done), (to, into + done), len - done, kill) {
                Ok(0) => break,
                Ok(copied) => done += copied,
                // Only of what was copied does the kernel forget what it had, and how long the file was.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// The first data in a range of a file, and where the range ends, cut at the size of the file.
    /// The data is at most [`crate::fs::merged::data_ranges::STEP`] bytes; `None` if the range is a
    /// hole.
    ///
    /// # Errors
    /// As [`Fs::read`].
    fn next_data(&self, id: NodeId, range: ByteRange) -> FsResult<(u64, Option<ByteRange>)> {
        if id.is_in_snapdir() {
            return self.past_data(id, range);
        }
        let (lower, size) = {
            let mut core = self.core();
            let target = core.content_target(id)?;
            (Arc::clone(&core.lower), core.attr_of(id, &target)?.size)
        };
        let plan: Plan<'_> = Box::new(|range| {
            let mut core = self.core();
            let target = core.content_target(id)?;
            core.plan_of(&target, range)
        });
        first_data(plan, lower, range, size)
    }

    fn copy_step(
        &self,
        (from, at): (NodeId, u64),
        (to, into): (NodeId, u64),
        len: u64,
        kill: bool,
    ) -> FsResult<u64> {
        let (end, data) = self.next_data(from, ByteRange::at(at, len))?;
        let hole = ByteRange { start: at, end: data.map_or(end, |data| data.start) };
        if !hole.is_empty() {
            self.fallocate(to, ZERO_RANGE, into, hole.len(), kill)?;
            return Ok(hole.len());
        }
        let Some(data) = data else { return Ok(0) };
        let plan = self.read(from, at, data.len())?;
        let bytes = plan.read(false)?.unwrap_or_default();
        // Whoever makes room on a full disk waits for those who read.
        drop(plan);
        if !bytes.is_empty() {
            self.write(to, into, &bytes, kill)?;
        }
        Ok(bytes.len() as u64)
    }
}

/// A file that is being changed: which tree its record is in, and under which number.
#[derive(Clone, Copy)]
pub(in crate::fs) struct Subject {
    pub(in crate::fs) key: Ino,
    pub(in crate::fs) orphan: bool,
}

/// A run of a write: in place at an address that the upper layer owns, or to be written elsewhere.
enum Run {
    Owned(ByteRange, u64),
    Fresh(ByteRange),
}

impl Core {
    pub(in crate::fs) fn tree_of(&self, subject: Subject) -> &Tree {
        if subject.orphan { self.held.orphans().tree() } else { &self.tree }
    }

    /// Where the bytes of a range of a file are, cut at its size.
    pub(in crate::fs) fn plan_of(
        &self,
        target: &Target,
        range: ByteRange,
    ) -> FsResult<Vec<HostExtent>> {
        let scratch = self.held.orphans().scratch_file();
        match target {
            Target::Upper(ino) => self.plan_in(&self.tree, *ino, range, None),
            Target::Orphan(key) => {
                let known = State { tree: Tree::new(), lower: self.lower_of_orphan(*key) };
                known.plan_in(self.held.orphans().tree(), *key, range, scratch)
            }
            Target::Base(_, path, node) => self.plan_lower(path, node, range),
        }
    }

    /// Changes the content of a file by the edits that `stage` gives, and its times and privileges with it.
    fn change_file(
        &mut self,
        store: &Arc<Store>,
        id: NodeId,
        kill: bool,
        touch: Touch,
        stage: impl FnOnce(&mut Core, &Arc<Store>, Subject) -> FsResult<Vec<Edit>>,
    ) -> FsResult<()> {
        let subject = self.subject(id)?;
        match self.tree_of(subject).node(subject.key).map(|n| n.kind()) {
            Some(FileKind::File) => {}
            Some(FileKind::Dir) => return Err(FsError::IsADirectory),
            Some(_) | None => return Err(FsError::Invalid),
        }
        // It cannot be read, so nobody knows what is replaced.
        if self.tree_of(subject).node(subject.key).is_some_and(|node| self.hides_node(node)) {
            return Err(FsError::AccessDenied);
        }
        if !subject.orphan {
            // Before the bytes: those that are written in place need no record to be seen.
            self.upper.check()?;
            self.before_change(subject.key, touch);
        }
        // With the writeback cache the kernel keeps mtime itself, and sends what it changes. By
        // truncate(2) to the same size it does not, so that the two would differ from then on.
        let size = self.tree_of(subject).size(subject.key);
        let keeps_mtime = self.coherence.is_writeback() && touch == Touch::Resize(size);
        let mut edits = stage(self, store, subject)?;
        let node = self.tree_of(subject).node(subject.key).ok_or(FsError::NotFound)?;
        let mut meta = node.meta;
        meta.ctime = clock::now();
        if !keeps_mtime {
            meta.mtime = meta.ctime;
        }
        if kill {
            kill_privileges(&mut meta);
        }
        if node.xattrs.as_ref().is_some_and(|x| x.contains_key(CAPABILITY)) {
            edits.push(Edit::Xattr { ino: subject.key, name: CAPABILITY.to_vec(), value: None });
        }
        edits.push(Edit::Meta { ino: subject.key, meta });
        self.commit_to(subject, edits)
    }

    /// Covers what is behind an id, or takes the orphan.
    pub(in crate::fs) fn subject(&mut self, id: NodeId) -> FsResult<Subject> {
        match self.target(id)? {
            Target::Orphan(key) => Ok(Subject { key, orphan: true }),
            Target::Upper(_) | Target::Base(..) => {
                Ok(Subject { key: self.copy_up(id)?, orphan: false })
            }
        }
    }

    /// Commits edits of a live node; those of an orphan concern nobody but its holders and are not recorded.
    pub(in crate::fs) fn commit_to(&mut self, subject: Subject, edits: Vec<Edit>) -> FsResult<()> {
        if !subject.orphan {
            return self.commit(edits);
        }
        if self.held.orphans_mut().apply(subject.key, &edits)? {
            self.quota.measure_soon();
        }
        Ok(())
    }

    /// Writes bytes to the pool and gives the edits that show them.
    fn stage_write(
        &mut self,
        store: &Arc<Store>,
        file: Subject,
        offset: u64,
        bytes: &[u8],
    ) -> FsResult<Vec<Edit>> {
        if file.orphan {
            self.held.orphans_mut().scratch(store)?;
        }
        let layer = if file.orphan { SCRATCH } else { self.upper.layer() };
        let range = ByteRange::at(offset, bytes.len() as u64);
        let size = self.tree_of(file).size(file.key);
        let mut edits = Vec::with_capacity(3);
        if range.end > size {
            edits.push(Edit::Resize { ino: file.key, size: range.end });
        }
        let runs = self.runs(file, range, size, layer);
        let fresh = runs.iter().map(|run| match run {
            Run::Owned(..) => 0,
            Run::Fresh(part) => part.len(),
        });
        self.need_bytes(store, fresh.sum())?;
        for run in runs {
            match run {
                Run::Owned(part, at) => self.pool(file)?.write(at, slice(bytes, offset, part)?)?,
                Run::Fresh(part) => {
                    let whole = self.fill_range(file, part, range, size.max(range.end), layer)?;
                    let left = self
                        .current_bytes(file, ByteRange { start: whole.start, end: part.start })?;
                    let right =
                        self.current_bytes(file, ByteRange { start: part.end, end: whole.end })?;
                    self.quota.add(whole.len());
                    let pool = self.pool(file)?;
                    let at = pool.allocate(file.key, whole, whole.end >= size);
                    let middle = slice(bytes, offset, part)?;
                    if left.is_empty() && right.is_empty() {
                        pool.write(at, middle)?;
                    } else {
                        pool.write(at, &[&left, middle, &right].concat())?;
                    }
                    let to = Some(Source::Pool { layer, offset: at });
                    edits.push(Edit::Map { ino: file.key, range: whole, to });
                }
            }
        }
        Ok(edits)
    }

    fn pool(&mut self, file: Subject) -> FsResult<&mut PoolWriter> {
        if !file.orphan {
            return Ok(&mut self.upper.pool);
        }
        self.held
            .orphans_mut()
            .open_scratch()
            .ok_or(FsError::Damage("an orphan is written without a scratch file"))
    }

    /// Cuts a write into runs that are owned and runs that are not.
    fn runs(&self, file: Subject, range: ByteRange, size: u64, layer: LayerId) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let fresh = |runs: &mut Vec<Run>, part: ByteRange| match runs.last_mut() {
            Some(Run::Fresh(before)) if before.end == part.start => before.end = part.end,
            _ => runs.push(Run::Fresh(part)),
        };
        for segment in self.tree_of(file).segments(file.key, range) {
            match segment.source {
                Some(Source::Pool { layer: owner, offset }) if owner == layer => {
                    self.owned_runs(&mut runs, segment.range, offset, layer, &fresh);
                }
                _ => fresh(&mut runs, segment.range),
            }
        }
        let tail = ByteRange { start: range.start.max(size), end: range.end };
        if !tail.is_empty() {
            fresh(&mut runs, tail);
        }
        runs
    }

    /// Cuts a run that the upper layer owns into what may be written in place, and what a version refers to.
    fn owned_runs(
        &self,
        runs: &mut Vec<Run>,
        range: ByteRange,
        offset: u64,
        layer: LayerId,
        fresh: &impl Fn(&mut Vec<Run>, ByteRange),
    ) {
        let end = offset + range.len();
        let place = |from: u64, to: u64| ByteRange {
            start: range.start + (from - offset),
            end: range.start + (to - offset),
        };
        let mut at = offset;
        while let Some(frozen) = self.first_frozen(layer, ByteRange { start: at, end }) {
            if at < frozen.start {
                runs.push(Run::Owned(place(at, frozen.start), at));
            }
            fresh(runs, place(frozen.start, frozen.end));
            at = frozen.end;
        }
        if at < end {
            runs.push(Run::Owned(place(at, end), at));
        }
    }

    /// The blocks that a fresh run of a write touches, without what the upper layer owns of them already, and without what is
    /// next to it in the same write: that is another run, which writes its own bytes.
    fn fill_range(
        &mut self,
        file: Subject,
        part: ByteRange,
        of: ByteRange,
        size: u64,
        layer: LayerId,
    ) -> FsResult<ByteRange> {
        // Whether these bytes of the file, which are of one extent, may be written in place.
        let owned =
            |core: &Core, part: ByteRange| match core.tree_of(file).extent_at(file.key, part.start)
            {
                Some((start, Extent { source: Source::Pool { layer: owner, offset }, .. }))
                    if owner == layer =>
                {
                    let at = ByteRange::at(offset + (part.start - start), part.len());
                    core.first_frozen(layer, at).is_none()
                }
                _ => false,
            };
        let mut whole = part;
        if part.start == of.start && !self.pool(file)?.continues(file.key, part.start) {
            whole.start = block_floor(part.start);
            let mut at = part.start;
            while let Some((start, extent)) = self.tree_of(file).extent_before(file.key, at) {
                let end = start + extent.len;
                if end <= whole.start {
                    break;
                }
                if owned(
                    self,
                    ByteRange { start: start.max(whole.start), end: end.min(part.start) },
                ) {
                    whole.start = end.min(part.start);
                    break;
                }
                at = start;
            }
        }
        if part.end == of.end {
            whole.end = block_ceil(part.end).min(size).max(part.end);
        }
        let mut at = part.end;
        while at < whole.end {
            match self.tree_of(file).extent_at(file.key, at) {
                Some((start, extent)) => {
                    let end = start + extent.len;
                    if owned(self, ByteRange { start: at, end: end.min(whole.end) }) {
                        whole.end = at;
                    }
                    at = end;
                }
                None => at = self.tree_of(file).next_data(file.key, at).unwrap_or(whole.end),
            }
        }
        debug_assert!(whole.len() <= part.len() + 2 * BLOCK);
        Ok(whole)
    }

    /// The bytes of a file as they are now; zeros behind its end.
    fn current_bytes(&self, file: Subject, range: ByteRange) -> FsResult<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let target = if file.orphan { Target::Orphan(file.key) } else { Target::Upper(file.key) };
        let reading = self.lower.reading();
        let plan = ReadPlan::new(self.plan_of(&target, range)?, Arc::clone(&self.lower), reading);
        let mut bytes = plan.read(false)?.unwrap_or_default();
        bytes.resize(usize::try_from(range.len()).map_err(|_| FsError::Invalid)?, 0);
        Ok(bytes)
    }
}

/// The part of `bytes`, which begin at `offset` of the file, that `part` names.
fn slice(bytes: &[u8], offset: u64, part: ByteRange) -> FsResult<&[u8]> {
    let from = usize::try_from(part.start - offset).map_err(|_| FsError::Invalid)?;
    let to = usize::try_from(part.end - offset).map_err(|_| FsError::Invalid)?;
    bytes.get(from..to).ok_or(FsError::Damage("a run of a write lies outside of it"))
}

/// What a write or a change of size or owner by an ordinary caller takes from a file.
pub(in crate::fs) fn kill_privileges(meta: &mut Meta) {
    if meta.mode & crate::types::TYPE_BITS == FileKind::Dir.type_bits() {
        return;
    }
    meta.mode &= !SETUID;
    if meta.mode & GROUP_EXEC != 0 {
        meta.mode &= !SETGID;
    }
}
