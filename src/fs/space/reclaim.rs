//! The component of [`Fs`] that orders readers of states and those that free space.
//!
//! Always true: as long as a read guard lives, no state of any head loses its content, because
//! space is freed only under the exclusive guard. All heads of a store share one lock for that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLockReadGuard, RwLockWriteGuard};

use crate::fs::Fs;

/// How long [`Fs::exclusive_soon`] waits. Not longer, because a reader may wait for its caller.
const SOON: Duration = Duration::from_millis(300);

/// Frees space of sealed layers on a full disk. Returns the bytes, or none if that cannot be done
/// now. The caller holds no lock.
pub type Reclaimer = dyn Fn() -> Option<u64> + Send + Sync;

/// Whether there is something to free, and who frees it.
pub(in crate::fs) struct Reclaim {
    /// Whether content was removed or replaced since space was last freed. Only then is it worth a
    /// search, which costs a sync and as much time as the tree is large.
    has_garbage: AtomicBool,
    reclaimer: Mutex<Option<Arc<Reclaimer>>>,
}

impl Reclaim {
    pub(in crate::fs) fn new() -> Reclaim {
        Reclaim { has_garbage: AtomicBool::new(true), reclaimer: Mutex::default() }
    }

    /// Notes that content may have become unused.
    pub(in crate::fs) fn note_garbage(&self) {
        self.has_garbage.store(true, Ordering::Relaxed);
    }

    /// Whether content may have become unused since the last call.
    pub(super) fn take_garbage_note(&self) -> bool {
        self.has_garbage.swap(false, Ordering::Relaxed)
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
