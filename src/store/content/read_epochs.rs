//! Who reads from pools right now, so that a range is given back only when nobody is still reading what it was.
//!
//! Always true: whoever finds out where bytes are takes a [`ReadGuard`] before that knowledge can grow old, and keeps it until
//! the bytes are read. [`ReadEpochs::wait_for_all`] returns when all that were taken before it are gone; new ones do not wait.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// As long as it lives, what was found out before stays true of the pools.
#[derive(Clone)]
pub struct ReadGuard {
    _generation: Arc<()>,
}

/// The readings of a store.
#[derive(Default)]
pub(in crate::store) struct ReadEpochs {
    generations: Mutex<Generations>,
}

#[derive(Default)]
struct Generations {
    current: Arc<()>,
    /// Those before, of which somebody was still reading when it was waited for last.
    before: Vec<Weak<()>>,
}

impl ReadEpochs {
    pub(in crate::store) fn enter(&self) -> ReadGuard {
        ReadGuard { _generation: Arc::clone(&self.generations.lock().current) }
    }

    /// Waits until everybody who read before is done; false if that takes longer than `patience`. Then the next one waits for them, too.
    pub(in crate::store) fn wait_for_all(&self, patience: Duration) -> bool {
        let before = {
            let mut generations = self.generations.lock();
            let ended = Arc::downgrade(&std::mem::take(&mut generations.current));
            generations.before.push(ended);
            generations.before.retain(|generation| generation.strong_count() > 0);
            generations.before.clone()
        };
        let end = Instant::now() + patience;
        while before.iter().any(|generation| generation.strong_count() > 0) {
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
        let readers = Arc::new(ReadEpochs::default());
        let before = readers.enter();
        assert!(!readers.wait_for_all(Duration::from_millis(5)), "somebody reads");
        assert!(!readers.wait_for_all(Duration::from_millis(5)), "and goes on reading");
        drop(before);
        assert!(readers.wait_for_all(Duration::from_millis(5)), "until it is done");
        let before = readers.enter();
        let (begun, waiting) = (Instant::now(), Arc::clone(&readers));
        let waiter = std::thread::spawn(move || waiting.wait_for_all(Duration::from_secs(60)));
        // Somebody who comes while it is waited is in the next generation.
        while Arc::ptr_eq(&readers.generations.lock().current, &before._generation) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        let _after = readers.enter();
        drop(before);
        assert!(waiter.join().unwrap());
    }
}
