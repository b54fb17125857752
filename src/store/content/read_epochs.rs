//! Tracks readers of pools, so that space is punched only after every reader that may still need it
//! is done.
//!
//! * A reader takes a [`ReadGuard`] before it looks up where bytes are, and holds it until the
//!   bytes are read.
//! * [`ReadEpochs::wait_for_all`] ends the current epoch and waits for the guards of all earlier
//!   epochs. It does not wait for guards that are taken later: those readers see the new remaps.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// While it lives, ranges of pools that were looked up after it was taken stay readable.
#[derive(Clone)]
pub struct ReadGuard {
    _epoch: Arc<()>,
}

/// The read epochs of a store.
#[derive(Default)]
pub(in crate::store) struct ReadEpochs {
    epochs: Mutex<Epochs>,
}

#[derive(Default)]
struct Epochs {
    /// Each guard holds a reference to the epoch in which it was taken.
    current: Arc<()>,
    /// Earlier epochs that still had guards at the last wait.
    ended: Vec<Weak<()>>,
}

impl ReadEpochs {
    pub(in crate::store) fn enter(&self) -> ReadGuard {
        ReadGuard { _epoch: Arc::clone(&self.epochs.lock().current) }
    }

    /// Waits until every guard that exists now is dropped. Returns false if that takes longer than
    /// `patience`; the next wait then also waits for these guards.
    pub(in crate::store) fn wait_for_all(&self, patience: Duration) -> bool {
        let ended = {
            let mut epochs = self.epochs.lock();
            let last = Arc::downgrade(&std::mem::take(&mut epochs.current));
            epochs.ended.push(last);
            epochs.ended.retain(|epoch| epoch.strong_count() > 0);
            epochs.ended.clone()
        };
        let end = Instant::now() + patience;
        while ended.iter().any(|epoch| epoch.strong_count() > 0) {
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
    fn a_wait_covers_guards_taken_before_it_and_none_taken_after() {
        let readers = Arc::new(ReadEpochs::default());
        let before = readers.enter();
        assert!(!readers.wait_for_all(Duration::from_millis(5)), "a guard is held");
        assert!(!readers.wait_for_all(Duration::from_millis(5)), "and it is still held");
        drop(before);
        assert!(readers.wait_for_all(Duration::from_millis(5)), "no guard is left");
        let before = readers.enter();
        let (begun, waiting) = (Instant::now(), Arc::clone(&readers));
        let waiter = std::thread::spawn(move || waiting.wait_for_all(Duration::from_secs(60)));
        // Wait until the other thread has ended the epoch of `before`.
        while Arc::ptr_eq(&readers.epochs.lock().current, &before._epoch) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        let _after = readers.enter();
        drop(before);
        assert!(waiter.join().unwrap());
    }
}
