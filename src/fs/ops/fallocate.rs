//! Allocates space for files, and makes ranges of them zeros: fallocate(2).
//!
//! Holes that are allocated get fresh addresses in the pool of the upper layer, and blocks of the
//! disk there. They are ordinary extents, so a write overwrites them in place and needs no room.
//!
//! Always true:
//! * If an allocation fails, nothing has changed, and its blocks are free again.
//! * Bytes that the file has stay where they are. If the base or a sealed layer has them, a write
//!   still goes to fresh addresses.

use std::io;
use std::sync::Arc;

use nix::errno::Errno;

use crate::error::{FsError, FsResult};
use crate::fs::edits::Touch;
use crate::fs::ops::privileges::PrivilegeBits;
use crate::fs::ops::writable::Writable;
use crate::fs::writing::Writing;
use crate::fs::{Fs, MAX_FILE_SIZE, Need, Target};
use crate::store::Store;
use crate::store::content::pool::{Unused, block_ceil, block_floor};
use crate::tree::{Edit, Source, Tree};
use crate::types::{ByteRange, Ino, NodeId};

/// Modes of fallocate(2).
const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
pub(super) const ZERO_RANGE: i32 = 16;

/// The arguments of fallocate(2).
#[derive(Clone, Copy)]
struct Fallocate {
    range: ByteRange,
    keeps_size: bool,
    zeroes: bool,
}

impl Fallocate {
    fn parse(mode: i32, offset: u64, len: u64) -> FsResult<Fallocate> {
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
        Ok(Fallocate { range, keeps_size, zeroes })
    }

    /// Why the operation needs space.
    fn need(self) -> Need {
        if self.zeroes { Need::Less } else { Need::More }
    }

    /// The size of a file after the operation, if it had `size` bytes.
    fn new_size(self, size: u64) -> u64 {
        if self.keeps_size { size } else { size.max(self.range.end) }
    }
}

/// The addresses that an allocation of a file has taken so far.
struct Preallocated {
    file: Writable,
    addresses: Vec<ByteRange>,
}

impl Fs {
    /// Allocates the holes of a range of a file, or makes the range zeros (fallocate(2)). Space
    /// beyond the end of the file is not allocated.
    ///
    /// # Errors
    /// EOPNOTSUPP for modes other than keep-size, punch-hole and zero-range; ENOSPC if more is
    /// allocated than is free; as [`Fs::write`].
    pub fn fallocate<'a>(
        &self,
        id: NodeId,
        mode: i32,
        offset: u64,
        len: u64,
        privileges: impl Into<PrivilegeBits<'a>>,
    ) -> FsResult<()> {
        let privileges = privileges.into();
        let change = Fallocate::parse(mode, offset, len)?;
        if !change.zeroes {
            self.check_free_for(id, change.range)?;
        }
        self.with_room(change.need(), || {
            self.change_node(id, |core| {
                let target = core.content_target(id)?;
                core.fallocate(&self.store, target, privileges, change)
            })
        })
    }

    /// Refuses to allocate a range of a file if its holes and what lies behind its end are more
    /// than is free.
    fn check_free_for(&self, id: NodeId, range: ByteRange) -> FsResult<()> {
        let missing = self.with_node(id, |core| {
            let target = core.target(id)?;
            let size = core.attr_of(id, &target)?.size;
            let holes = match target {
                Target::Upper(ino) => holes(&core.tree, ino, range),
                Target::Orphan(key) => holes(core.held.orphans().tree(), key, range),
                Target::Base(..) => {
                    vec![ByteRange { start: range.start.max(size).min(range.end), ..range }]
                }
            };
            Ok(holes.iter().fold(0, |sum: u64, hole| sum.saturating_add(hole.len())))
        })?;
        self.check_free(missing)
    }
}

impl Writing<'_> {
    fn fallocate(
        &mut self,
        store: &Arc<Store>,
        target: Target,
        privileges: PrivilegeBits<'_>,
        change: Fallocate,
    ) -> FsResult<()> {
        let mut preallocated = None;
        let done =
            self.change_file(store, target, privileges, Touch::Write, |core, store, file| {
                let size = core.tree_of(file).size(file.key);
                let new_size = change.new_size(size);
                let mut edits = Vec::new();
                if new_size > size {
                    edits.push(Edit::Resize { ino: file.key, size: new_size });
                }
                let range = ByteRange { end: change.range.end.min(new_size), ..change.range };
                if change.zeroes {
                    let range = ByteRange { end: range.end.min(size), ..range };
                    edits.extend(unmap(file.key, range));
                } else {
                    let taken = preallocated.insert(Preallocated { file, addresses: Vec::new() });
                    edits.extend(core.stage_allocation(store, taken, range, new_size)?);
                }
                Ok(edits)
            });
        if done.is_err()
            && let Some(taken) = preallocated
        {
            self.release(&taken);
        }
        done
    }

    /// Allocates addresses and blocks for the holes of a range, which ends within `size`, the size
    /// of the file after the operation. Returns the edits that map the addresses: none if the
    /// filesystem of the store cannot allocate blocks.
    ///
    /// # Errors
    /// ENOSPC; those of the host. The caller then releases what was taken.
    fn stage_allocation(
        &mut self,
        store: &Arc<Store>,
        taken: &mut Preallocated,
        range: ByteRange,
        size: u64,
    ) -> FsResult<Vec<Edit>> {
        let file = taken.file;
        let tree = self.tree_of(file);
        let is_last = |hole: ByteRange| hole.end >= tree.size(file.key);
        let holes: Vec<(ByteRange, bool)> = holes(tree, file.key, range)
            .into_iter()
            .map(|hole| in_whole_blocks(tree, file.key, hole, size))
            .map(|hole| (hole, is_last(hole)))
            .collect();
        if holes.is_empty() {
            return Ok(Vec::new());
        }
        self.prepare_pool_of(store, file)?;
        let bytes = holes.iter().map(|(hole, _)| hole.len()).sum();
        self.need_bytes(bytes)?;
        let layer = self.layer_of(file);
        let mut edits = Vec::with_capacity(holes.len());
        for (hole, is_last) in holes {
            let blocks = self.pool_of(file)?.begin_preallocation(file.key, hole);
            let at = blocks.addresses();
            taken.addresses.push(at);
            match self.released(|| blocks.allocate()) {
                Err(error) if is_unsupported(&error) => {
                    self.release(taken);
                    return Ok(Vec::new());
                }
                allocated => allocated?,
            }
            self.pool_of(file)?.end_preallocation(file.key, hole, is_last);
            let to = Some(Source::Pool { layer, offset: at.start });
            edits.push(Edit::Map { ino: file.key, range: hole, to });
        }
        self.quota.add(bytes);
        Ok(edits)
    }

    /// Frees the blocks of an allocation that is not made.
    fn release(&mut self, taken: &Preallocated) {
        if let Ok(pool) = self.pool_of(taken.file) {
            let unused = taken.addresses.iter().map(|at| pool.unused_of_preallocation(*at));
            let unused: Vec<Unused> = unused.collect();
            let freed = self.released(|| unused.iter().try_for_each(Unused::punch));
            if let Err(error) = freed {
                log::debug!("preallocated space of a pool is not freed before its seal: {error}");
            }
        }
        self.quota.measure_soon();
    }
}

/// The edits that make a range of a file, which ends within its size, a hole.
fn unmap(ino: Ino, range: ByteRange) -> Option<Edit> {
    (!range.is_empty()).then_some(Edit::Map { ino, range, to: None })
}

/// Whether a filesystem cannot allocate blocks.
fn is_unsupported(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EOPNOTSUPP as i32)
}

/// The holes in a range of a file. All behind its end is one.
fn holes(tree: &Tree, ino: Ino, range: ByteRange) -> Vec<ByteRange> {
    let segments = tree.segments(ino, range).into_iter();
    let mut holes: Vec<ByteRange> =
        segments.filter(|segment| segment.source.is_none()).map(|segment| segment.range).collect();
    let behind = ByteRange { start: range.start.max(tree.size(ino)), end: range.end };
    match holes.last_mut() {
        _ if behind.is_empty() => {}
        Some(last) if last.end == behind.start => last.end = behind.end,
        _ => holes.push(behind),
    }
    holes
}

/// Widens a hole to whole blocks, as far as it is a hole there and the file has `size` bytes.
fn in_whole_blocks(tree: &Tree, ino: Ino, hole: ByteRange, size: u64) -> ByteRange {
    let data_end = tree.extent_before(ino, hole.start).map_or(0, |(start, e)| start + e.len);
    let next_data = tree.next_data(ino, hole.end).unwrap_or(u64::MAX);
    ByteRange {
        start: block_floor(hole.start).max(data_end),
        end: block_ceil(hole.end).min(next_data).min(size).max(hole.end),
    }
}
