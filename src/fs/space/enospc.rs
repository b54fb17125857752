//! What is done when the disk is full: what the upper layer holds and nobody needs any more is given back, and the operation is
//! tried once more. What gives space back may use the store's reserve besides.
//!
//! Content that was written and replaced or removed since the last seal lies only in the pool of the upper layer, to which no
//! sealed state can refer. So what the tree and the held files do not refer to can go, once the records that gave it up
//! are synced and whoever was reading is done.

use std::sync::atomic::Ordering;

use nix::errno::Errno;

use crate::error::{FsError, FsResult};
use crate::fs::Fs;
use crate::store::content::live_ranges::LiveRanges;

/// What an operation needs room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Something new.
    More,
    /// The record of something that gives space back, or leaves it as it is.
    Less,
}

/// What came of making room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    Quota,
    /// There was nothing to give back.
    Nothing,
    /// It cannot be known now: somebody looks at states, or the store is being tidied up.
    NotNow,
}

/// How many times room is made for one operation.
pub const MOST_TRIES: usize = 8;

/// Whether an operation failed because there is no room.
fn is_full(error: &FsError) -> bool {
    match error {
        FsError::NoSpace => true,
        FsError::Host(errno) => *errno == Errno::ENOSPC as i32 || *errno == Errno::EDQUOT as i32,
        FsError::Store(error) => error.is_full(),
        _ => false,
    }
}

impl Fs {
    /// Does something; if there is no room for it, makes room and does it again. It must have done nothing if it fails.
    pub(crate) fn with_room<T>(
        &self,
        need: Need,
        operation: impl Fn() -> FsResult<T>,
    ) -> FsResult<T> {
        let mut result = operation();
        // What is given back first may be too little; then history goes, and so on, until there is nothing left to go.
        for _ in 0..MOST_TRIES {
            if !result.as_ref().is_err_and(is_full) || !self.make_room(need) {
                break;
            }
            result = operation();
            self.store.keep_reserve();
        }
        if need == Need::Less && result.is_ok() {
            self.note_garbage();
        }
        result
    }

    /// Says that something may have become unused. Only then is it worth to look for it, which costs a sync, and as much as the
    /// tree is large.
    pub(in crate::fs) fn note_garbage(&self) {
        self.has_garbage.store(true, Ordering::Relaxed);
    }

    /// Makes room on a full disk. Whether there may be some now; then the store is to keep its reserve again after the operation.
    pub fn make_room(&self, need: Need) -> bool {
        let mut made = self.try_to_make_room();
        // What single files were is given up before an operation fails: half of it, then the other half. But only if it is known
        // that there is nothing else, and as long as that gives room back.
        while made == Made::Nothing && self.drop_edits_for_space() {
            self.note_garbage();
            made = self.try_to_make_room();
        }
        made == Made::Quota || need == Need::Less && self.store.release_reserve()
    }

    fn try_to_make_room(&self) -> Made {
        let own = self.reclaim();
        if own.is_some_and(|bytes| bytes > 0) {
            return Made::Quota;
        }
        let more_room = self.reclaimer.lock().clone();
        match more_room.map_or(Some(0), |more_room| more_room()) {
            Some(bytes) if bytes > 0 => Made::Quota,
            Some(_) if own.is_some() => Made::Nothing,
            _ => Made::NotNow,
        }
    }

    /// Gives back what of the upper layer nobody needs; bytes, or none if that cannot be now.
    pub(in crate::fs) fn reclaim(&self) -> Option<u64> {
        // Whoever looks at a state may still need what is gone from the tree.
        let _exclusive = self.exclusive_soon()?;
        if !self.has_garbage.swap(false, Ordering::Relaxed) {
            return Some(0);
        }
        let given = self.give_back_unused();
        if given.is_none() {
            // It is looked for again.
            self.note_garbage();
        }
        given
    }

    fn give_back_unused(&self) -> Option<u64> {
        let reach = self.live_set();
        if self.sync().is_err()
            || self.secure_edits().is_err()
            || !self.store.wait_for_read_epochs()
        {
            return None;
        }
        let mut used = LiveRanges::default();
        for (_, extent) in reach.state.tree.all_extents().chain(reach.orphans.all_extents()) {
            used.add(extent.source, extent.len);
        }
        used.add_extents(reach.versions.iter().flat_map(|content| &content.extents));
        for range in &reach.reserved {
            used.add_range(reach.upper, *range);
        }
        used.add_range(reach.upper, crate::types::ByteRange { start: reach.end, end: u64::MAX });
        let unused = self.store.unused(reach.upper, &used).ok()?;
        self.store.punch_pool(reach.upper, &unused).ok()?;
        self.look_at_store();
        Some(unused.iter().map(|range| range.len()).sum())
    }
}
