//! Mutexes with a rank. A thread that holds one waits only for those of a higher rank.
//!
//! So no threads can wait for each other in a circle. A debug build checks it each time, even if
//! the mutex is free, and panics at the first thread that breaks the order. A release build checks
//! nothing.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

#[cfg(not(all(test, feature = "shuttle")))]
use parking_lot::{Mutex, MutexGuard};
#[cfg(all(test, feature = "shuttle"))]
use shuttle::thread_local;
#[cfg(all(test, feature = "shuttle"))]
use shuttle_parking_lot::{Mutex, MutexGuard};

/// The ranks, from the first to be taken to the last. ARCHITECTURE.md explains the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// One operation on states at a time.
    Operation,
    /// The index of known content.
    KnownContent,
    /// Held while sealed layers are rewritten.
    Compaction,
    /// The content that closed heads refer to.
    ClosedHeads,
    /// The table of open heads.
    OpenHeads,
    /// Whether the base is the one that the store was made for.
    BaseIdentity,
    /// The cached trees of sealed layers.
    Trees,
    /// The applies so far.
    Applies,
    /// A rollback that failed.
    UnfinishedRollback,
    /// When a head was last made or dropped.
    HeadsChanged,
    /// The syncs of a head.
    SyncGate,
    /// The lock of changes of a head.
    Writing,
    /// The state of a head.
    Core,
    /// The open files of the base.
    OpenFiles,
    /// The pack that is written to the archive.
    ArchiveWriter,
    /// The layers that were searched for equal content.
    Deduplicated,
    /// The layers that are kept out of the archive.
    KeptOutOfArchive,
    /// The catalog of the layers.
    Catalog,
    /// The records of the heads.
    HeadRecords,
    /// The held layers.
    Holds,
    /// The operation log.
    OperationLog,
    /// The log of inode numbers.
    Identities,
    /// The ledger.
    Ledger,
    /// The space that is kept for a full disk.
    Reserve,
    /// Tables and caches of the archive.
    Archive,
}

/// A mutex with a rank.
#[derive(Debug)]
pub struct RankedMutex<T> {
    rank: Rank,
    mutex: Mutex<T>,
}

impl<T> RankedMutex<T> {
    /// A mutex of this rank.
    pub const fn new(rank: Rank, value: T) -> RankedMutex<T> {
        RankedMutex { rank, mutex: Mutex::new(value) }
    }

    /// Waits for the mutex.
    pub fn lock(&self) -> RankedGuard<'_, T> {
        Held::check(self.rank);
        self.guard(self.mutex.lock())
    }

    /// Takes the mutex if no thread holds it. It may have any rank, because nothing waits.
    pub fn try_lock(&self) -> Option<RankedGuard<'_, T>> {
        self.mutex.try_lock().map(|guard| self.guard(guard))
    }

    /// Waits for the mutex for at most `limit`.
    pub fn try_lock_for(&self, limit: Duration) -> Option<RankedGuard<'_, T>> {
        Held::check(self.rank);
        #[cfg(not(all(test, feature = "shuttle")))]
        let guard = self.mutex.try_lock_for(limit);
        // Shuttle has no clock, so the limit is over at once.
        #[cfg(all(test, feature = "shuttle"))]
        let (guard, _) = (self.mutex.try_lock(), limit);
        guard.map(|guard| self.guard(guard))
    }

    /// The value. No other thread can hold the mutex.
    pub fn get_mut(&mut self) -> &mut T {
        self.mutex.get_mut()
    }

    fn guard<'a>(&self, guard: MutexGuard<'a, T>) -> RankedGuard<'a, T> {
        RankedGuard { guard, held: Held::new(self.rank) }
    }
}

/// A mutex that this thread holds.
pub struct RankedGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    held: Held,
}

impl<T> RankedGuard<'_, T> {
    /// Lets the next thread that waits for the mutex have it, and then waits for it again.
    pub fn yield_to_waiting(&mut self) {
        MutexGuard::bump(&mut self.guard);
    }

    /// Releases the mutex while it calls `meanwhile`, and then waits for it again.
    pub fn released<R>(&mut self, meanwhile: impl FnOnce() -> R) -> R {
        let RankedGuard { guard, held } = self;
        held.pause();
        let result = MutexGuard::unlocked(guard, meanwhile);
        held.resume();
        result
    }
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Panics in a debug build if this thread holds a mutex of a rank. The caller is about to wait for
/// something slow.
pub fn check_not_held(rank: Rank) {
    #[cfg(debug_assertions)]
    {
        let is_held = HELD.with(|held| held.borrow().contains(&rank));
        assert!(!is_held, "a thread that holds {rank:?} waits for the base or the store");
    }
    #[cfg(not(debug_assertions))]
    let _ = rank;
}

/// Notes that this thread holds a mutex of a rank.
#[cfg(debug_assertions)]
struct Held(Rank);

#[cfg(debug_assertions)]
thread_local! {
    /// The ranks of the mutexes that this thread holds, in the order in which it took them.
    static HELD: std::cell::RefCell<Vec<Rank>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[cfg(debug_assertions)]
impl Held {
    fn check(rank: Rank) {
        let highest = HELD.with(|held| held.borrow().iter().copied().max());
        if let Some(highest) = highest {
            assert!(highest < rank, "a thread that holds {highest:?} must not wait for {rank:?}");
        }
    }

    fn new(rank: Rank) -> Held {
        HELD.with(|held| held.borrow_mut().push(rank));
        Held(rank)
    }

    fn pause(&self) {
        // A thread that ends may have lost its list.
        let forget = |held: &std::cell::RefCell<Vec<Rank>>| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|rank| *rank == self.0) {
                held.remove(at);
            }
        };
        HELD.try_with(forget).unwrap_or_default();
    }

    /// Ends a pause. The caller has waited for the mutex.
    fn resume(&self) {
        Held::check(self.0);
        HELD.with(|held| held.borrow_mut().push(self.0));
    }
}

#[cfg(debug_assertions)]
impl Drop for Held {
    fn drop(&mut self) {
        self.pause();
    }
}

/// A release build notes nothing.
#[cfg(not(debug_assertions))]
struct Held;

#[cfg(not(debug_assertions))]
impl Held {
    fn check(_: Rank) {}

    fn new(_: Rank) -> Held {
        Held
    }

    fn pause(&self) {}

    fn resume(&self) {}
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    static OPERATION: RankedMutex<()> = RankedMutex::new(Rank::Operation, ());
    static CORE: RankedMutex<u32> = RankedMutex::new(Rank::Core, 0);
    static ARCHIVE: RankedMutex<()> = RankedMutex::new(Rank::Archive, ());

    /// Whether a thread of its own ends without a panic.
    fn is_allowed(take: impl FnOnce() + Send + 'static) -> bool {
        std::thread::spawn(take).join().is_ok()
    }

    #[test]
    fn a_thread_waits_only_for_mutexes_of_a_higher_rank() {
        assert!(is_allowed(|| {
            let _held = (OPERATION.lock(), CORE.lock(), ARCHIVE.lock());
        }));
        assert!(!is_allowed(|| {
            let _held = (CORE.lock(), OPERATION.lock());
        }));
        assert!(!is_allowed(|| {
            let _held = (CORE.lock(), CORE.try_lock_for(Duration::from_millis(1)));
        }));
        assert!(is_allowed(|| *CORE.lock() += 1), "the mutex was released");
    }

    #[test]
    fn a_rank_counts_until_its_mutex_is_released() {
        assert!(is_allowed(|| {
            let core = CORE.lock();
            drop(ARCHIVE.lock());
            drop(core);
            drop(OPERATION.lock());
        }));
        assert!(!is_allowed(|| {
            let core = CORE.lock();
            let archive = ARCHIVE.lock();
            drop(core);
            drop((OPERATION.lock(), archive));
        }));
    }

    #[test]
    fn a_released_mutex_is_free_until_its_holder_goes_on() {
        assert!(is_allowed(|| {
            let mut core = CORE.lock();
            core.released(|| drop((OPERATION.lock(), CORE.lock())));
            assert!(CORE.try_lock().is_none(), "held again");
        }));
        assert!(!is_allowed(|| {
            let mut core = CORE.lock();
            core.released(|| ());
            drop(OPERATION.lock());
        }));
        assert!(!is_allowed(|| {
            let mut core = CORE.lock();
            let _archive = core.released(|| ARCHIVE.lock());
        }));
    }

    #[test]
    fn a_thread_that_does_not_wait_may_take_any_mutex() {
        assert!(is_allowed(|| {
            let _held = (ARCHIVE.lock(), OPERATION.try_lock());
        }));
    }
}
