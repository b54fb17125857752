//! Decides which thread takes the next request.
//!
//! One thread takes the requests and serves them. A second one that waits beside it would be slower
//! (measured): with one client the two would take turns, and each request would wake another CPU;
//! with several clients they would wait for the lock of the head. So another thread takes over only
//! from a thread that has served one request for more than a [`TICK`], because it waits for a disk.
//!
//! Always true: at most one thread waits for a request, the **reader**. Of the idle threads at most
//! one, the **watcher**, wakes up now and then, and it sleeps when no request comes.

use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long one request may keep the others waiting.
const TICK: Duration = Duration::from_millis(1);

/// The turns of the threads of one session.
#[derive(Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    watcher: Condvar,
    spares: Condvar,
}

#[derive(Default)]
struct State {
    has_reader: bool,
    has_watcher: bool,
    /// The watcher sleeps until a request comes.
    is_calm: bool,
    has_ended: bool,
    /// The number of requests that were taken.
    taken: u64,
}

impl Turns {
    /// Waits until this thread is the reader. Returns false when the session has ended.
    pub(super) fn take(&self) -> bool {
        let mut state = self.state.lock();
        while !state.has_ended {
            if !state.has_reader {
                state.has_reader = true;
                if !state.has_watcher {
                    self.spares.notify_one();
                }
                return true;
            }
            if state.has_watcher {
                self.spares.wait(&mut state);
            } else {
                self.watch(&mut state);
            }
        }
        false
    }

    /// The reader has taken a request, and is about to serve it.
    pub(super) fn give(&self) {
        let mut state = self.state.lock();
        state.has_reader = false;
        state.taken += 1;
        if state.is_calm {
            self.watcher.notify_one();
        }
    }

    /// The session has ended.
    pub(super) fn end(&self) {
        self.state.lock().has_ended = true;
        self.watcher.notify_all();
        self.spares.notify_all();
    }

    /// Waits as the watcher until the session needs another reader.
    fn watch(&self, state: &mut MutexGuard<'_, State>) {
        state.has_watcher = true;
        let mut taken = state.taken;
        loop {
            let is_late = if state.is_calm {
                self.watcher.wait(state);
                state.is_calm = false;
                false
            } else {
                self.watcher.wait_for(state, TICK).timed_out() && state.taken == taken
            };
            if state.has_ended || is_late && !state.has_reader {
                break;
            }
            state.is_calm = is_late;
            taken = state.taken;
        }
        (state.has_watcher, state.is_calm) = (false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};

    /// Starts a thread that takes one turn and says so.
    fn another(turns: &Arc<Turns>, said: &Sender<bool>) -> std::thread::JoinHandle<()> {
        let (turns, said) = (Arc::clone(turns), said.clone());
        std::thread::spawn(move || said.send(turns.take()).unwrap())
    }

    fn wait_for_watcher(turns: &Turns, is_calm: bool) {
        let is_there = || {
            let state = turns.state.lock();
            state.has_watcher && (state.is_calm || !is_calm)
        };
        while !is_there() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_second_thread_takes_over_from_one_that_serves_for_long() {
        let turns = Arc::new(Turns::default());
        let (said, heard) = channel();
        assert!(turns.take());
        let helpers = [another(&turns, &said), another(&turns, &said)];
        wait_for_watcher(&turns, true);
        turns.give();
        assert!(heard.recv().unwrap(), "the first helper, after a tick");
        turns.give();
        assert!(heard.recv().unwrap(), "the second one");
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    }

    #[test]
    fn every_request_is_taken_by_one_thread() {
        let turns = Turns::default();
        let (readers, left) = (AtomicUsize::new(0), Mutex::new(20_000_u32));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while turns.take() {
                        assert_eq!(readers.fetch_add(1, Ordering::SeqCst), 0, "one reader");
                        let request = {
                            let mut left = left.lock();
                            *left -= 1;
                            *left
                        };
                        readers.fetch_sub(1, Ordering::SeqCst);
                        if request == 0 {
                            return turns.end();
                        }
                        turns.give();
                    }
                });
            }
        });
        assert_eq!(*left.lock(), 0);
    }
}
