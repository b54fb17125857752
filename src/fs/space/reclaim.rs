//! The component of [`Fs`] that orders readers of states and those that free space.
//!
//! Always true: as long as a read guard lives, no state of any head loses its content, because
//! space is freed only under the exclusive guard. All heads of a store share one lock for that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLockReadGuard, RwLockWriteGuard};

use crate::fs::Fs;

/// How long [`Fs::exclusive_soon`] waits. Not longer, because a reader may wait for its caller.
const SOON: Duration = Duration::from_millis(300);

/// Frees space of sealed layers on a full disk. Returns the bytes, or none if that cannot be done
/// now. The caller holds no lock.
pub type Reclaimer = dyn Fn() -> Option<u64> + Send + Sync;

/// Whether there is something to free, and who frees it.
pub(in crate::fs) struct Reclaim {
    garbage: Mutex<Garbage>,
    noted: Condvar,
    reclaimer: Mutex<Option<Arc<Reclaimer>>>,
}

/// Notes of content that may have become unused.
struct Garbage {
    /// Whether content was removed or replaced since space was last freed. Only then is it worth a
    /// search, which costs a sync and as much time as the tree is large.
    is_noted: bool,
    /// How many removed files are being freed.
    frees: usize,
}

/// A removed file is being freed. Dropping it notes that there is garbage.
#[must_use]
pub(in crate::fs) struct Free<'a>(&'a Reclaim);

impl Drop for Free<'_> {
    fn drop(&mut self) {
        let mut garbage = self.0.garbage.lock();
        garbage.frees -= 1;
        garbage.is_noted = true;
        self.0.noted.notify_all();
    }
}

impl Reclaim {
    pub(in crate::fs) fn new() -> Reclaim {
        let garbage = Mutex::new(Garbage { is_noted: true, frees: 0 });
        Reclaim { garbage, noted: Condvar::new(), reclaimer: Mutex::default() }
    }

    /// Notes that content may have become unused.
    pub(in crate::fs) fn note_garbage(&self) {
        self.garbage.lock().is_noted = true;
        self.noted.notify_all();
    }

    /// Notes that a removed file is being freed, until the caller drops the result.
    pub(in crate::fs) fn begin_free(&self) -> Free<'_> {
        self.garbage.lock().frees += 1;
        Free(self)
    }

    /// Whether content may have become unused since the last call.
    pub(super) fn take_garbage_note(&self) -> bool {
        std::mem::take(&mut self.garbage.lock().is_noted)
    }

    /// Waits until content may have become unused, for at most `limit`. It does not wait if no
    /// removed file is being freed and, as the caller says, none `may_come`. Returns whether
    /// content may have become unused.
    pub(super) fn wait_for_garbage(&self, may_come: bool, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut garbage = self.garbage.lock();
        while !garbage.is_noted && (may_come || garbage.frees > 0) {
            if self.noted.wait_until(&mut garbage, end).timed_out() {
                break;
            }
        }
        garbage.is_noted
    }

    /// Asks the reclaimer for space; 0 bytes if there is none.
    pub(super) fn ask_reclaimer(&self) -> Option<u64> {
        let reclaimer = self.reclaimer.lock().clone();
        reclaimer.map_or(Some(0), |reclaimer| reclaimer())
    }
}

impl Fs {
    /// A read guard also for a thread that holds one.
    pub(in crate::fs) fn read_again(&self) -> RwLockReadGuard<'_, ()> {
        self.store.states().read_recursive()
    }

    /// A read guard, if no thread frees space.
    pub(in crate::fs) fn try_read(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.store.states().try_read()
    }

    /// As long as the guard lives, no state loses its content: no space is freed.
    pub fn read_guard(&self) -> RwLockReadGuard<'_, ()> {
        self.store.states().read()
    }

    /// Waits until no read guard lives, and keeps others from getting one: for freeing space.
    pub fn exclusive(&self) -> RwLockWriteGuard<'_, ()> {
        self.store.states().write()
    }

    /// As [`Fs::exclusive`], if no read guard lives right now.
    pub fn try_exclusive(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.store.states().try_write()
    }

    /// As [`Fs::exclusive`], if no read guard lives within 300 ms.
    pub fn exclusive_soon(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.store.states().try_write_for(SOON)
    }

    /// Sets the function that frees space beyond what the upper layer can.
    pub fn set_reclaimer(&self, reclaimer: Arc<Reclaimer>) {
        *self.reclaim.reclaimer.lock() = Some(reclaimer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_waits_until_a_removed_file_is_freed() {
        let reclaim = Reclaim::new();
        let wait = |limit| reclaim.wait_for_garbage(false, limit);
        assert!(reclaim.take_garbage_note());
        assert!(!wait(Duration::from_secs(60)), "nothing is being freed");
        let free = reclaim.begin_free();
        assert!(!wait(Duration::ZERO), "it is not freed yet");
        std::thread::scope(|scope| {
            scope.spawn(move || drop(free));
            assert!(wait(Duration::from_secs(60)), "it is freed");
        });
    }
}
