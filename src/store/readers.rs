//! Who reads from pools right now, so that a range is given back only when nobody is still reading what it was.
//!
//! Always true: whoever finds out where bytes are takes a [`Reading`] before that knowledge can grow old, and keeps it until
//! the bytes are read. [`Readers::wait_for_all`] returns when all that were taken before it are gone; new ones do not wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// As long as it lives, what was found out before stays true of the pools.
#[derive(Clone)]
pub struct Reading {
    _generation: Arc<()>,
}

/// The readings of a store.
#[derive(Default)]
pub(super) struct Readers {
    generation: Mutex<Arc<()>>,
}

impl Readers {
    pub(super) fn enter(&self) -> Reading {
        Reading { _generation: Arc::clone(&self.generation.lock()) }
    }

    /// Waits until everybody who read before is done; false if that takes longer than `patience`.
    pub(super) fn wait_for_all(&self, patience: Duration) -> bool {
        let before = std::mem::take(&mut *self.generation.lock());
        let end = Instant::now() + patience;
        while Arc::strong_count(&before) > 1 {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_waited_for_those_before_and_not_for_those_after() {
        let readers = Arc::new(Readers::default());
        let before = readers.enter();
        assert!(!readers.wait_for_all(Duration::from_millis(5)), "somebody reads");
        drop(before);
        let before = readers.enter();
        let (begun, waiting) = (Instant::now(), Arc::clone(&readers));
        let waiter = std::thread::spawn(move || waiting.wait_for_all(Duration::from_secs(60)));
        // Somebody who comes while it is waited is in the next generation.
        while Arc::ptr_eq(&readers.generation.lock(), &before._generation) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        let _after = readers.enter();
        drop(before);
        assert!(waiter.join().unwrap());
    }
}
