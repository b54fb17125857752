//! The bytes that a write puts at fresh addresses of a pool, without a lock.
//!
//! Under the locks of a change, the operation allocates the addresses, and finds out where the
//! bytes are that the file has around the write. Then it ends, and the thread releases the locks.
//! [`Stage::store`] reads those bytes, and writes all to the pool. The operation runs again, and
//! records the addresses.
//!
//! Always true: a stage is recorded only if the file has the same bytes around the write as when it
//! was begun. Otherwise the operation begins another one.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::Core;
use crate::fs::merged::lower::Lower;
use crate::fs::merged::read_plan::ReadPlan;
use crate::fs::ops::writable::Writable;
use crate::fs::writing::Writing;
use crate::store::content::fresh::FreshWrite;
use crate::store::content::pool::PoolWriter;
use crate::tree::Segment;
use crate::types::ByteRange;

/// A part of a write that goes to fresh addresses, and the blocks that it takes.
pub(super) struct FreshPart {
    pub(super) part: ByteRange,
    pub(super) blocks: ByteRange,
}

impl FreshPart {
    /// The bytes of the blocks before and behind the part.
    fn beside(&self) -> [ByteRange; 2] {
        let FreshPart { part, blocks } = self;
        [
            ByteRange { start: blocks.start, end: part.start },
            ByteRange { start: part.end, end: blocks.end },
        ]
    }
}

/// How to read the bytes before and behind a part; `None` if there are none.
type Beside = [Option<ReadPlan>; 2];

/// The write of one part.
struct PartWrite {
    fresh: FreshPart,
    beside: Beside,
    to: FreshWrite,
}

/// A version of the bytes beside the parts. A change of the file can map others there, or end the
/// file before them. `Core::fill_start` and `Core::fill_end` leave out bytes that a write could
/// overwrite in place, so the others change only after their addresses are unpinned.
#[derive(PartialEq)]
struct Around {
    segments: Vec<Segment>,
    unpinned: u64,
}

/// The fresh parts of one write.
pub(super) struct Stage {
    /// The turn of the core in which it was begun.
    turn: u64,
    file: Writable,
    lower: Arc<Lower>,
    parts: Vec<PartWrite>,
    around: Option<Around>,
    /// How the write to the pool ended.
    stored: Option<FsResult<()>>,
}

impl Stage {
    /// Whether no other operation took the core lock since the stage was begun. Then nothing has
    /// changed.
    pub(super) fn is_next_turn(&self, core: &Core) -> bool {
        core.turn == self.turn + 1
    }

    /// Reads the bytes around the parts, and writes all to the pool. `bytes` are those of the write
    /// that begins at `offset` of the file. Does nothing the second time.
    pub(super) fn store(&mut self, offset: u64, bytes: &[u8]) {
        let store = || {
            // All reads come first: their guards keep space from being freed, and the disk can take
            // long for the writes.
            let beside: Vec<_> = self.parts.iter_mut().map(PartWrite::read_beside).collect();
            let mut parts = self.parts.iter().zip(beside);
            parts.try_for_each(|(part, beside)| part.store(offset, bytes, &beside?))
        };
        self.stored.get_or_insert_with(store);
    }

    /// The blocks of the file and their addresses.
    ///
    /// # Errors
    /// Why the write to the pool failed.
    pub(super) fn stored(&self) -> FsResult<Vec<(ByteRange, ByteRange)>> {
        let early = Err(FsError::Damage("a write is recorded before it is stored"));
        self.stored.clone().unwrap_or(early)?;
        Ok(self.parts.iter().map(|part| (part.fresh.blocks, part.to.addresses())).collect())
    }
}

impl PartWrite {
    /// Reads the bytes before and behind the part.
    fn read_beside(&mut self) -> FsResult<[Vec<u8>; 2]> {
        let [left, right] = self.fresh.beside();
        let [plan_left, plan_right] = std::mem::take(&mut self.beside);
        Ok([bytes_beside(plan_left, left.len())?, bytes_beside(plan_right, right.len())?])
    }

    fn store(&self, offset: u64, bytes: &[u8], [left, right]: &[Vec<u8>; 2]) -> FsResult<()> {
        Ok(self.to.write(&[left, slice(bytes, offset, self.fresh.part)?, right])?)
    }
}

/// Reads `len` bytes next to a write, with zeros after the end of the file.
fn bytes_beside(plan: Option<ReadPlan>, len: u64) -> FsResult<Vec<u8>> {
    let read = plan.map(|plan| plan.read(false)).transpose()?;
    let mut bytes = read.flatten().unwrap_or_default();
    bytes.resize(usize::try_from(len).map_err(|_| FsError::Invalid)?, 0);
    Ok(bytes)
}

/// The bytes of `part` in a write whose bytes begin at `offset` of the file.
pub(super) fn slice(bytes: &[u8], offset: u64, part: ByteRange) -> FsResult<&[u8]> {
    let from = usize::try_from(part.start - offset).map_err(|_| FsError::Invalid)?;
    let to = usize::try_from(part.end - offset).map_err(|_| FsError::Invalid)?;
    bytes.get(from..to).ok_or(FsError::Damage("a part of a write lies outside of it"))
}

impl Core {
    /// Begins the stage of a write. Once an address is allocated, nothing fails.
    ///
    /// # Errors
    /// Those of the base; damage if an orphan has no scratch file.
    pub(super) fn begin_stage(&mut self, file: Writable, fresh: Vec<FreshPart>) -> FsResult<Stage> {
        // All reads are planned before the first error counts, so that the base is asked once.
        let planned: Vec<FsResult<Beside>> =
            fresh.iter().map(|fresh| self.plan_beside(file, fresh)).collect();
        let planned = planned.into_iter().collect::<FsResult<Vec<_>>>()?;
        let around = self.around(file, fresh.iter());
        let size = self.tree_of(file).size(file.key);
        self.quota.add(fresh.iter().map(|fresh| fresh.blocks.len()).sum());
        let pool = self.pool_of(file)?;
        let parts = fresh.into_iter().zip(planned).map(|(fresh, beside)| {
            let to = pool.allocate_fresh(file.key, fresh.blocks, fresh.blocks.end >= size);
            PartWrite { fresh, beside, to }
        });
        let parts = parts.collect();
        Ok(Stage {
            turn: self.turn,
            file,
            lower: Arc::clone(&self.lower),
            parts,
            around,
            stored: None,
        })
    }

    /// Whether a stage can be recorded as these parts of a file.
    pub(super) fn fits(&mut self, stage: &Stage, file: Writable, parts: &[ByteRange]) -> bool {
        let staged = || stage.parts.iter().map(|part| &part.fresh);
        if stage.file != file
            || !Arc::ptr_eq(&stage.lower, &self.lower)
            || !staged().map(|fresh| fresh.part).eq(parts.iter().copied())
        {
            return false;
        }
        let owns = |pool: &mut PoolWriter| stage.parts.iter().all(|part| pool.owns(&part.to));
        self.pool_of(file).is_ok_and(owns) && self.around(file, staged()) == stage.around
    }

    /// Finds out where the bytes beside a part are.
    fn plan_beside(&self, file: Writable, fresh: &FreshPart) -> FsResult<Beside> {
        let plan = |range: ByteRange| -> FsResult<Option<ReadPlan>> {
            if range.is_empty() {
                return Ok(None);
            }
            let guard = self.lower.reading();
            let extents = self.plan_of(&file.target(), range)?;
            Ok(Some(ReadPlan::new(extents, Arc::clone(&self.lower), guard)))
        };
        let [left, right] = fresh.beside().map(plan);
        Ok([left?, right?])
    }

    /// The present version of the bytes beside the parts; `None` if there are none.
    fn around<'a>(
        &self,
        file: Writable,
        fresh: impl Iterator<Item = &'a FreshPart>,
    ) -> Option<Around> {
        let tree = self.tree_of(file);
        let mut beside = fresh.flat_map(FreshPart::beside).filter(|range| !range.is_empty());
        let first = beside.next()?;
        let segments = |range| tree.segments(file.key, range);
        let segments = std::iter::once(first).chain(beside).flat_map(segments).collect();
        Some(Around { segments, unpinned: self.unpinned() })
    }
}

impl Writing<'_> {
    /// Drops a stage, and frees its blocks. Returns whether all of them are free.
    pub(super) fn drop_stage(&mut self, stage: Stage) -> bool {
        // The quota counts the blocks until the store is measured.
        self.quota.measure_soon();
        // If a record may be in the journal that could not be cut off, its content stays.
        let is_writable = self.upper.check().is_ok();
        let Ok(pool) = self.pool_of(stage.file) else { return false };
        let (mut unused, mut is_free) = (Vec::new(), true);
        for PartWrite { to, .. } in stage.parts {
            if !is_writable || !pool.owns(&to) {
                is_free = false;
                continue;
            }
            let (blocks, are_all) = pool.end_fresh(to);
            unused.push(blocks);
            is_free &= are_all;
        }
        for blocks in unused {
            if let Err(error) = self.released(|| blocks.punch()) {
                log::debug!("the blocks of a dropped write are not freed yet: {error}");
                is_free = false;
            }
        }
        is_free
    }
}
