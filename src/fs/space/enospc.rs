//! Makes space on a full disk: reclaims what the upper layer holds and nothing needs, then runs the
//! operation again.
//!
//! Content that was replaced or removed since the last seal lies only in the pool of the upper
//! layer, and no sealed state refers to it. So whatever neither the tree nor a held file refers to
//! can be punched, after the records that dropped it are synced and the reads under way have ended.
//! An operation that itself frees space may also use the store's reserve.
//!
//! The kernel sends the FORGET of a removed file after unlink(2), and a later request can overtake
//! it. So an operation that finds no space waits a moment for such a file.
//!
//! If all that is not enough, the operation drops edits of the edit history. Writes to bytes that
//! only a dropped edit had pinned then go in place, which takes no space.

use std::cell::Cell;
use std::time::Duration;

use nix::errno::Errno;

use crate::error::{FsError, FsResult};
use crate::fs::Fs;
use crate::fs::merged::state::SCRATCH;
use crate::store::content::live_ranges::LiveRanges;
use crate::tree::Source;
use crate::types::ByteRange;

/// Why an operation needs space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// For something new.
    More,
    /// For the record of a change that frees space, or leaves it as it is.
    Less,
    /// For the record of a write in place. These may be many, so they leave half of the reserve to
    /// operations that free space.
    InPlace,
}

/// The result of an attempt to make space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reclaimed {
    Space,
    /// There is nothing to reclaim.
    Nothing,
    /// That cannot be known now: states are being read, or the store is being compacted.
    NotNow,
}

/// How many times the log of the edit history is synced to unpin bytes.
const MOST_SYNCS: usize = 4;
/// How long an operation waits for the FORGET of removed files. The thread that then reads it takes
/// over from this one after one to two milliseconds.
const FORGET_LIMIT: Duration = Duration::from_millis(50);
/// How many times space is made for one operation.
pub const MOST_TRIES: usize = 8;

/// Whether an operation failed for want of space.
fn is_full(error: &FsError) -> bool {
    match error {
        FsError::NoSpace => true,
        FsError::Host(errno) => *errno == Errno::ENOSPC as i32 || *errno == Errno::EDQUOT as i32,
        FsError::Store(error) => error.is_full(),
        _ => false,
    }
}

impl Fs {
    /// Runs an operation. If it fails for want of space, makes space and runs it again. A failed
    /// operation must have changed nothing.
    pub(in crate::fs) fn with_room<T>(
        &self,
        need: Need,
        operation: impl Fn() -> FsResult<T>,
    ) -> FsResult<T> {
        let result = self.with_room_as(&Cell::new(need), operation);
        if need == Need::Less && result.is_ok() {
            self.reclaim.note_garbage();
        }
        result
    }

    /// As [`Fs::with_room`], for an operation that sets itself what it needs, and frees nothing.
    pub(in crate::fs) fn with_room_as<T>(
        &self,
        need: &Cell<Need>,
        operation: impl Fn() -> FsResult<T>,
    ) -> FsResult<T> {
        let mut result = operation();
        // The first reclaimed space may be too little.
        for _ in 0..MOST_TRIES {
            if !result.as_ref().is_err_and(is_full) || !self.make_room(need.get()) {
                break;
            }
            result = operation();
            self.store.keep_reserve();
        }
        result
    }

    /// Makes space on a full disk. Returns whether there may be some now. The caller makes the
    /// store keep its reserve again after the operation.
    pub fn make_room(&self, need: Need) -> bool {
        let mut made = self.try_to_make_room();
        // The edit history goes before an operation fails, half of it first. But only if there is
        // certainly nothing else, and as long as that frees space.
        while made == Reclaimed::Nothing && self.drop_edits_for_space() {
            self.reclaim.note_garbage();
            made = self.try_to_make_room();
        }
        made == Reclaimed::Space
            || match need {
                Need::More => false,
                Need::Less => self.store.release_reserve(),
                Need::InPlace => self.store.release_large_reserve(),
            }
    }

    /// Refuses to take more bytes than are free or can be freed without dropping edits.
    ///
    /// # Errors
    /// ENOSPC; as [`Fs::statfs`].
    pub(in crate::fs) fn check_free(&self, bytes: u64) -> FsResult<()> {
        let is_free = || -> FsResult<bool> {
            let space = self.statfs()?;
            Ok(bytes <= space.available.saturating_mul(u64::from(space.block_size)))
        };
        match is_free()? || self.try_to_make_room() == Reclaimed::Space && is_free()? {
            true => Ok(()),
            false => Err(FsError::NoSpace),
        }
    }

    fn try_to_make_room(&self) -> Reclaimed {
        let made = self.reclaim_all();
        if made != Reclaimed::Nothing || !self.wait_for_removed_files() {
            return made;
        }
        // Their scratch space is free already, whatever this finds.
        let _bytes = self.reclaim_unused();
        Reclaimed::Space
    }

    /// Waits a moment until a removed file is freed, if there is one. Returns whether there was
    /// garbage.
    fn wait_for_removed_files(&self) -> bool {
        let may_come = {
            let core = self.core();
            let (orphans, upper) = (core.held.orphans().tree(), core.upper.layer());
            let is_freed_then = |source| match source {
                Source::Pool { layer, .. } => layer == upper || layer == SCRATCH,
                _ => false,
            };
            orphans.all_extents().any(|(_, extent)| is_freed_then(extent.source))
        };
        self.reclaim.wait_for_garbage(may_come, FORGET_LIMIT)
    }

    /// Reclaims the space of the upper layer, or else that of the sealed ones.
    fn reclaim_all(&self) -> Reclaimed {
        let own = self.reclaim_unused();
        if own.is_some_and(|bytes| bytes > 0) {
            return Reclaimed::Space;
        }
        match self.reclaim.ask_reclaimer() {
            Some(bytes) if bytes > 0 => Reclaimed::Space,
            Some(_) if own.is_some() => Reclaimed::Nothing,
            _ => Reclaimed::NotNow,
        }
    }

    /// Punches what nothing needs of the pool of the upper layer, and unpins what dropped edits
    /// pinned. Returns the bytes, or none if that cannot be done now, because a state is being
    /// read.
    pub(in crate::fs) fn reclaim_unused(&self) -> Option<u64> {
        let _exclusive = self.exclusive_soon()?;
        if !self.reclaim.take_garbage_note() {
            return Some(0);
        }
        let punched = self.punch_unused();
        if punched.is_none() {
            // The next call tries again.
            self.reclaim.note_garbage();
        }
        punched
    }

    fn punch_unused(&self) -> Option<u64> {
        let live = self.live_set();
        if self.sync().is_err() {
            return None;
        }
        let mut mark = self.store.with_reserve(|| self.secure_edits_to()).ok()?;
        if !self.store.wait_for_read_epochs() {
            return None;
        }
        let mut ranges = LiveRanges::default();
        for (_, extent) in live.state.tree.all_extents().chain(live.orphans.all_extents()) {
            ranges.add(extent.source, extent.len);
        }
        ranges.add_extents(live.edits.iter().flat_map(|content| &content.extents));
        for range in &live.reserved {
            ranges.add_range(live.upper, *range);
        }
        ranges.add_range(live.upper, ByteRange { start: live.end, end: u64::MAX });
        let unused = self.store.unused(live.upper, &ranges).ok()?;
        let bytes = self.store.punch_pool(live.upper, &unused).ok()?;
        self.measure_store();
        for _ in 0..MOST_SYNCS {
            if let Some(unpinned) = self.unpin_dropped_edits(mark) {
                return Some(bytes + unpinned);
            }
            mark = self.secure_edits_to().ok()?;
        }
        // Programs append records all the time. Without space, the operation fails.
        (bytes > 0).then_some(bytes)
    }
}
