//! Makes space on a full disk: reclaims what the upper layer holds and nothing needs, then runs the
//! operation again.
//!
//! Content that was replaced or removed since the last seal lies only in the pool of the upper
//! layer, and no sealed state refers to it. So whatever neither the tree nor a held file refers to
//! can be punched, after the records that dropped it are synced and the reads under way have ended.
//! An operation that itself frees space may also use the store's reserve.
//!
//! The kernel sends the FORGET of a removed file only after unlink(2) has ended, so a later request
//! can come before it. So an operation that finds no space soon after a removal waits for the
//! FORGET. It also runs again if another thread has freed space meanwhile.
//!
//! If all that is not enough, the operation drops edits of the edit history. Writes to bytes that
//! only a dropped edit had pinned then go in place, which takes no space.

use std::cell::Cell;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::error::{FsError, FsResult};
use crate::fs::Fs;
use crate::store::content::live_ranges::LiveRanges;
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
/// How long after a removal an operation still waits for the FORGET. Another serving thread begins
/// to read requests one to two milliseconds after this one begins to wait, and so gets the FORGET.
const FORGET_LIMIT: Duration = Duration::from_millis(50);
/// How many times space is made for one operation.
pub const MOST_TRIES: usize = 8;
/// In this many of the first tries, it is enough that another thread has freed space. Later ones
/// ignore that. Otherwise threads that free and take space in turn could keep the operation from
/// dropping edits and from using the reserve.
const MOST_TRIES_FOR_OTHERS: usize = 4;

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
    /// Runs an operation. If it fails for want of space, makes space and runs it again. If it fails
    /// at a limit of the head soon after a removal, waits for the FORGET and runs it again. A
    /// failed operation must have changed nothing.
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
        let mut frees = self.reclaim.frees();
        let mut result = self.retry_measured(&operation);
        // The first reclaimed space may be too little.
        for tries in 0..MOST_TRIES {
            let since = (tries < MOST_TRIES_FOR_OTHERS).then_some(frees);
            let has_room = match &result {
                Err(error) if is_full(error) => self.make_room_since(need.get(), since),
                Err(FsError::LimitReached) => self.was_freed(since),
                _ => false,
            };
            if !has_room {
                break;
            }
            frees = self.reclaim.frees();
            result = self.retry_measured(&operation);
            self.store.keep_reserve();
        }
        result
    }

    /// Makes space on a full disk. Returns whether there may be some now. The caller makes the
    /// store keep its reserve again after the operation.
    pub fn make_room(&self, need: Need) -> bool {
        self.make_room_since(need, None)
    }

    /// As [`Fs::make_room`], but also returns true if another thread has freed space after
    /// [`Reclaim::frees`](super::reclaim::Reclaim::frees) returned `since`.
    fn make_room_since(&self, need: Need, since: Option<u64>) -> bool {
        let mut made = self.try_to_make_room(since);
        // The edit history goes before an operation fails, half of it first. But only if there is
        // certainly nothing else, and as long as that frees space.
        while made == Reclaimed::Nothing && self.drop_edits_for_space() {
            self.reclaim.note_garbage();
            made = self.try_to_make_room(None);
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
        let is_free = || {
            let space = self.statfs()?;
            let free = space.available.saturating_mul(u64::from(space.block_size));
            if bytes <= free { Ok(()) } else { Err(FsError::NoSpace) }
        };
        let check = || self.retry_measured(is_free);
        for _ in 0..MOST_TRIES_FOR_OTHERS {
            let since = self.reclaim.frees();
            match check() {
                Err(FsError::NoSpace) => {}
                checked => return checked,
            }
            if self.try_to_make_room(Some(since)) != Reclaimed::Space {
                return Err(FsError::NoSpace);
            }
        }
        check()
    }

    fn try_to_make_room(&self, since: Option<u64>) -> Reclaimed {
        let made = self.reclaim_all();
        if made != Reclaimed::Space && self.was_freed(since) { Reclaimed::Space } else { made }
    }

    /// Whether space was freed after [`Reclaim::frees`](super::reclaim::Reclaim::frees) returned
    /// `since`. Soon after a removal, waits for that. Without `since`, returns false at once.
    fn was_freed(&self, since: Option<u64>) -> bool {
        let Some(since) = since else { return false };
        let removed = self.core().held.orphans().last_removal();
        let end = removed.map_or_else(Instant::now, |removed| removed + FORGET_LIMIT);
        self.reclaim.wait_for_free(since, end)
    }

    /// Reclaims the space of the upper layer, or else that of the sealed ones.
    fn reclaim_all(&self) -> Reclaimed {
        let own = self.reclaim_unused();
        if own.is_some_and(|bytes| bytes > 0) {
            return Reclaimed::Space;
        }
        match self.reclaim.ask_reclaimer() {
            Some(bytes) if bytes > 0 => {
                self.core().quota.measure_soon();
                self.reclaim.note_freed();
                Reclaimed::Space
            }
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
        let mut punch = self.reclaim.begin_punch();
        let punched = self.punch_unused();
        if punched.is_none() {
            // The next call tries again.
            self.reclaim.note_garbage();
        }
        punch.has_freed = punched.is_some_and(|bytes| bytes > 0);
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
