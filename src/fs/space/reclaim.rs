//! The component of [`Fs`] that orders readers of states and those that free space.
//!
//! Always true: as long as a read guard lives, no state of any head loses its content, because
//! space is freed only under the exclusive guard. All heads of a store share one lock for that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLockReadGuard, RwLockWriteGuard};

use crate::fs::Fs;

/// How long [`Fs::exclusive_soon`] waits. Not longer, because a reader may wait for its caller.
const SOON: Duration = Duration::from_millis(300);

/// Frees space of sealed layers on a full disk. Returns the bytes, or none if that cannot be done
/// now. The caller holds no lock.
pub type Reclaimer = dyn Fn() -> Option<u64> + Send + Sync;

/// How long an operation without space waits while a removed file is being freed.
const FREE_LIMIT: Duration = Duration::from_secs(2);
/// How many threads wait at most. If there are more serving threads, one is left to read the
/// FORGET.
const MOST_WAITING: usize = 4;

/// Whether there is something to free, and who frees it.
pub(in crate::fs) struct Reclaim {
    /// Whether content was removed or replaced since space was last freed. Only then is it worth a
    /// search, which costs a sync and as much time as the tree is large.
    has_garbage: AtomicBool,
    /// How often space was freed, or the kernel forgot a removed node. After each such event, an
    /// operation without space is worth another try. Changes only under the lock of `frees`.
    freed: AtomicU64,
    frees: Mutex<Frees>,
    was_freed: Condvar,
    reclaimer: Mutex<Option<Arc<Reclaimer>>>,
}

/// The frees under way, and who waits for one.
#[derive(Default)]
struct Frees {
    /// How many forgotten nodes are being freed, and how many threads punch what nothing needs.
    under_way: usize,
    /// How many threads wait until space is freed.
    waiting: usize,
}

/// A removed node is being freed, which the kernel has forgotten. Its drop counts the free, and
/// notes that there is garbage.
#[must_use]
pub(in crate::fs) struct Free<'a>(&'a Reclaim);

impl Drop for Free<'_> {
    fn drop(&mut self) {
        self.0.note_garbage();
        self.0.count_free(1);
    }
}

/// A thread punches what nothing needs. Its drop counts the free if it has freed space.
#[must_use]
pub(super) struct Punch<'a> {
    reclaim: &'a Reclaim,
    pub(super) has_freed: bool,
}

impl Drop for Punch<'_> {
    fn drop(&mut self) {
        if self.has_freed {
            self.reclaim.count_free(1);
        } else {
            self.reclaim.frees.lock().under_way -= 1;
            self.reclaim.was_freed.notify_all();
        }
    }
}

impl Reclaim {
    pub(in crate::fs) fn new() -> Reclaim {
        Reclaim {
            has_garbage: AtomicBool::new(true),
            freed: AtomicU64::new(0),
            frees: Mutex::default(),
            was_freed: Condvar::new(),
            reclaimer: Mutex::default(),
        }
    }

    /// Notes that content may have become unused.
    pub(in crate::fs) fn note_garbage(&self) {
        self.has_garbage.store(true, Ordering::Relaxed);
    }

    /// Whether content may have become unused since the last call.
    pub(super) fn take_garbage_note(&self) -> bool {
        self.has_garbage.swap(false, Ordering::Relaxed)
    }

    /// Notes that a removed node is being freed, until the caller drops the result.
    pub(in crate::fs) fn begin_free(&self) -> Free<'_> {
        self.frees.lock().under_way += 1;
        Free(self)
    }

    /// Notes that space is being punched, until the caller drops the result.
    pub(super) fn begin_punch(&self) -> Punch<'_> {
        self.frees.lock().under_way += 1;
        Punch { reclaim: self, has_freed: false }
    }

    /// Notes that space was freed, or that a removed node became garbage.
    pub(in crate::fs) fn note_freed(&self) {
        self.count_free(0);
    }

    /// Counts a free, which ends this many of those under way. A thread sees both at once, so it
    /// never finds a free that is neither under way nor done.
    fn count_free(&self, ended: usize) {
        let mut frees = self.frees.lock();
        frees.under_way -= ended;
        self.freed.fetch_add(1, Ordering::Release);
        self.was_freed.notify_all();
    }

    /// How often space was freed or a removed node became garbage, so far. Takes no lock, because
    /// each change asks.
    pub(super) fn frees(&self) -> u64 {
        self.freed.load(Ordering::Acquire)
    }

    /// Waits until space is freed, at most until `end`. While a removed node is being freed, waits
    /// for [`FREE_LIMIT`] instead. Does not wait if [`MOST_WAITING`] threads do already. Returns
    /// whether space was freed after [`Reclaim::frees`] returned `since`.
    pub(super) fn wait_for_free(&self, since: u64, end: Instant) -> bool {
        let free_end = Instant::now() + FREE_LIMIT;
        let mut frees = self.frees.lock();
        if frees.waiting < MOST_WAITING {
            frees.waiting += 1;
            while self.frees() == since {
                let end = if frees.under_way > 0 { free_end } else { end };
                if Instant::now() >= end {
                    break;
                }
                self.was_freed.wait_until(&mut frees, end);
            }
            frees.waiting -= 1;
        }
        self.frees() != since
    }

    /// Whether a thread waits for space.
    #[cfg(test)]
    pub(in crate::fs) fn has_waiting(&self) -> bool {
        self.frees.lock().waiting > 0
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

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_thread_waits_until_a_removed_file_is_freed() {
        let reclaim = Reclaim::new();
        let since = reclaim.frees();
        assert!(!reclaim.wait_for_free(since, Instant::now()), "nothing is being freed");
        let free = reclaim.begin_free();
        assert!(reclaim.take_garbage_note());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| reclaim.wait_for_free(since, Instant::now()));
            drop(free);
            assert!(waits.join().unwrap(), "it is freed");
        });
        assert!(reclaim.take_garbage_note(), "its content is garbage");
        assert!(reclaim.wait_for_free(since, Instant::now() + LONG), "it was freed before");
    }

    #[test]
    fn a_thread_waits_until_another_one_has_punched() {
        for has_freed in [true, false] {
            let reclaim = Reclaim::new();
            let (since, mut punch) = (reclaim.frees(), reclaim.begin_punch());
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| reclaim.wait_for_free(since, Instant::now()));
                while !reclaim.has_waiting() && !waits.is_finished() {
                    std::thread::yield_now();
                }
                punch.has_freed = has_freed;
                drop(punch);
                assert_eq!(waits.join().unwrap(), has_freed);
            });
        }
    }

    #[test]
    fn only_some_threads_wait() {
        let reclaim = Reclaim::new();
        let wait = || reclaim.wait_for_free(reclaim.frees(), Instant::now() + LONG);
        std::thread::scope(|scope| {
            let waits: Vec<_> = (0..MOST_WAITING).map(|_| scope.spawn(wait)).collect();
            while reclaim.frees.lock().waiting < MOST_WAITING {
                std::thread::yield_now();
            }
            assert!(!wait(), "it does not wait");
            reclaim.note_freed();
            assert!(waits.into_iter().all(|wait| wait.join().unwrap()));
        });
    }
}
