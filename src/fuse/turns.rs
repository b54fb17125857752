//! Decides which threads take the next requests.
//!
//! By default one thread takes the requests and serves them. On two CPUs, which the programs need,
//! a second one gains little (measured). With one program the two take turns, so each request wakes
//! another CPU. With several programs that write, the two wait for each other's changes. So another
//! thread takes over only when no thread has waited for a request for a [`TICK`]: then all of them
//! wait for a disk. The user can allow more **readers** where there are more CPUs.
//!
//! Always true: at most `most_readers` threads, the readers, wait for a request or read one. Of the
//! idle threads at most one, the **watcher**, wakes up now and then, and it sleeps when no request
//! comes. A reader without a watcher calls another thread to be the watcher: a spare one, or a new
//! one.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long one request may keep the others waiting.
const TICK: Duration = Duration::from_millis(1);

/// How long after a refusal of the host another thread is to be started.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// The turn of a thread that takes the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// No other thread is idle, so the caller starts one, if there may be more.
    pub(super) starts_another: bool,
}

/// The turns of the threads of one session.
pub(super) struct Turns {
    state: Mutex<State>,
    watcher: Condvar,
    spares: Condvar,
    /// When the host last refused to start a thread.
    refused: Mutex<Option<Instant>>,
}

/// The state, whose methods are the steps that a thread takes under the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    /// The threads that wait for a request or read one.
    readers: u8,
    /// The most readers there may be, at least one.
    most_readers: u8,
    has_watcher: bool,
    /// A thread was called to be the watcher, and has not come yet.
    is_called: bool,
    /// The watcher sleeps until a request comes.
    is_calm: bool,
    has_ended: bool,
    /// A request was taken since the watcher looked.
    was_taken: bool,
}

/// The next step of a thread without a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// It is a reader, and calls another thread or not.
    Read {
        calls: bool,
    },
    Watch,
    Spare,
    Leave,
}

impl State {
    fn new(most_readers: u8) -> State {
        State {
            readers: 0,
            most_readers,
            has_watcher: false,
            is_called: false,
            is_calm: false,
            has_ended: false,
            was_taken: false,
        }
    }

    /// A thread asks what it does next; `is_called` if it was called since it asked the last time.
    fn next(&mut self, is_called: bool) -> Next {
        self.is_called &= !is_called;
        if self.has_ended {
            Next::Leave
        } else if self.readers < self.most_readers {
            self.readers += 1;
            let calls = !self.has_watcher && !self.is_called;
            self.is_called |= calls;
            Next::Read { calls }
        } else if self.has_watcher {
            Next::Spare
        } else {
            // A thread that was called may never come: there can be as many as there may be.
            (self.has_watcher, self.is_called, self.was_taken) = (true, false, false);
            Next::Watch
        }
    }

    /// A reader has taken a request. Returns whether it wakes up the watcher.
    fn give(&mut self) -> bool {
        self.readers -= 1;
        self.was_taken = true;
        self.is_calm
    }

    /// The watcher woke up: after a [`TICK`] if `timed_out`. Returns whether it goes on to watch.
    fn watch_on(&mut self, timed_out: bool) -> bool {
        let is_late = timed_out && !self.was_taken;
        if self.has_ended || is_late && self.readers == 0 {
            (self.has_watcher, self.is_calm) = (false, false);
            return false;
        }
        (self.is_calm, self.was_taken) = (is_late, false);
        true
    }
}

impl Turns {
    /// The turns of a session in which at most `most_readers` threads take requests at a time, at
    /// least one.
    pub(super) fn new(most_readers: u8) -> Turns {
        Turns {
            state: Mutex::new(State::new(most_readers.max(1))),
            watcher: Condvar::new(),
            spares: Condvar::new(),
            refused: Mutex::default(),
        }
    }

    /// Waits until this thread is a reader. `None` when the session has ended. `is_new` if the
    /// thread was started because a [`Turn`] said so, and asks for the first time.
    pub(super) fn take(&self, is_new: bool) -> Option<Turn> {
        let mut state = self.state.lock();
        let mut is_called = is_new;
        loop {
            match state.next(std::mem::take(&mut is_called)) {
                Next::Read { calls } => {
                    let mut starts_another = calls && !self.spares.notify_one();
                    if starts_another && self.was_just_refused() {
                        (state.is_called, starts_another) = (false, false);
                    }
                    return Some(Turn { starts_another });
                }
                Next::Watch => self.watch(&mut state),
                Next::Spare => {
                    self.spares.wait(&mut state);
                    is_called = true;
                }
                Next::Leave => return None,
            }
        }
    }

    /// The thread that a [`Turn`] asked for could not be started. Another turn asks again later.
    pub(super) fn refused(&self) {
        *self.refused.lock() = Some(Instant::now());
        self.state.lock().is_called = false;
    }

    fn was_just_refused(&self) -> bool {
        self.refused.lock().is_some_and(|at| at.elapsed() < TRY_AGAIN)
    }

    /// A reader, the caller, has taken a request, and is about to serve it.
    pub(super) fn give(&self) {
        let mut state = self.state.lock();
        if state.give() {
            self.watcher.notify_one();
        }
    }

    /// The session has ended.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        state.has_ended = true;
        self.watcher.notify_all();
        self.spares.notify_all();
    }

    /// Waits as the watcher until the session needs another reader.
    fn watch(&self, state: &mut MutexGuard<'_, State>) {
        loop {
            let timed_out = if state.is_calm {
                self.watcher.wait(state);
                false
            } else {
                self.watcher.wait_for(state, TICK).timed_out()
            };
            if !state.watch_on(timed_out) {
                return;
            }
        }
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
        std::thread::spawn(move || said.send(turns.take(false).is_some()).unwrap())
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
        let turns = Arc::new(Turns::new(1));
        let (said, heard) = channel();
        assert_eq!(turns.take(true), Some(Turn { starts_another: true }));
        let helpers = [another(&turns, &said), another(&turns, &said)];
        wait_for_watcher(&turns, true);
        turns.give();
        assert!(heard.recv().unwrap(), "the first helper, after a tick");
        turns.give();
        assert!(heard.recv().unwrap(), "the second one");
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    }

    #[test]
    fn a_thread_that_the_host_refused_is_asked_for_again_later() {
        let turns = Turns::new(1);
        let takes = |is_new| {
            let turn = turns.take(is_new).unwrap();
            turns.give();
            turn.starts_another
        };
        assert!(takes(true));
        turns.refused();
        assert!(!takes(false), "at once");
        *turns.refused.lock() = Instant::now().checked_sub(TRY_AGAIN);
        assert!(takes(false));
        assert!(!takes(false), "one that was called and has not come yet");
    }

    #[test]
    fn no_more_threads_read_than_may() {
        for most in [1, 2] {
            let seen = most_readers_of_four_threads(most);
            assert!((1..=usize::from(most)).contains(&seen), "{seen} of {most}");
        }
    }

    /// The most threads that were readers at the same time, while four took 20,000 requests.
    fn most_readers_of_four_threads(most: u8) -> usize {
        let turns = Turns::new(most);
        let (readers, left) = (AtomicUsize::new(0), Mutex::new(20_000_u32));
        let seen = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while turns.take(false).is_some() {
                        let others = readers.fetch_add(1, Ordering::SeqCst);
                        seen.fetch_max(others + 1, Ordering::SeqCst);
                        let request = {
                            let mut left = left.lock();
                            *left = left.saturating_sub(1);
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
        seen.into_inner()
    }

    /// All orders of the steps of three threads, as the locks and condition variables allow them.
    mod orders {
        use std::collections::BTreeSet;

        use super::super::{Next, State};

        /// Where a thread is. It runs until it waits or serves, so a step is what one lock covers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        enum At {
            /// It can be started.
            New,
            /// Before it asks what it does next.
            Asks {
                is_called: bool,
            },
            Reads,
            Serves,
            /// Waits as the watcher.
            Watches,
            /// Was woken up as the watcher, by the timer or not.
            WokenWatcher {
                timed_out: bool,
            },
            Spare,
            Left,
        }

        /// A state of the session: of the turns and of each thread.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        struct Session {
            turns: State,
            threads: [At; 3],
        }

        /// Whether a step happens by itself, sooner or later.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Step {
            /// A thread that can run runs.
            Runs,
            /// A timer expires.
            Timer,
            /// A request comes, is done, or ends the session; a thread wakes up for no reason.
            Chance,
        }

        impl Session {
            fn begin(most_readers: u8) -> Session {
                Session {
                    turns: State::new(most_readers),
                    threads: [At::Asks { is_called: false }, At::New, At::New],
                }
            }

            fn count(&self, at: At) -> usize {
                self.threads.iter().filter(|thread| **thread == at).count()
            }

            /// The state in which one thread has gone on.
            fn with(&self, thread: usize, at: At) -> Session {
                let mut after = *self;
                after.threads[thread] = at;
                after
            }

            /// The states that may follow, each with one of the waiting threads awake.
            fn wake_one(&self, waiting: At, woken: At) -> Vec<Session> {
                let all: Vec<_> = (0..3)
                    .filter(|thread| self.threads[*thread] == waiting)
                    .map(|thread| self.with(thread, woken))
                    .collect();
                if all.is_empty() { vec![*self] } else { all }
            }

            /// The thread ends the session.
            fn end(&self, thread: usize) -> Session {
                let mut after = self.with(thread, At::Left);
                after.turns.has_ended = true;
                for thread in &mut after.threads {
                    match thread {
                        At::Watches => *thread = At::WokenWatcher { timed_out: false },
                        At::Spare => *thread = At::Asks { is_called: true },
                        At::New => *thread = At::Left,
                        _ => {}
                    }
                }
                after
            }

            /// The thread asks what it does next.
            fn ask(mut self, thread: usize, is_called: bool) -> Vec<Session> {
                match self.turns.next(is_called) {
                    Next::Leave => vec![self.with(thread, At::Left)],
                    Next::Watch => vec![self.with(thread, At::Watches)],
                    Next::Spare => vec![self.with(thread, At::Spare)],
                    Next::Read { calls } => {
                        let after = self.with(thread, At::Reads);
                        let idle = if after.count(At::Spare) > 0 { At::Spare } else { At::New };
                        let called = At::Asks { is_called: true };
                        if calls { after.wake_one(idle, called) } else { vec![after] }
                    }
                }
            }

            /// The states that may follow.
            fn steps(&self) -> Vec<(Step, Session)> {
                let mut steps = Vec::new();
                for (thread, at) in self.threads.into_iter().enumerate() {
                    let mut after = *self;
                    match at {
                        At::Asks { is_called } => {
                            let asked = self.ask(thread, is_called).into_iter();
                            steps.extend(asked.map(|s| (Step::Runs, s)));
                        }
                        At::Reads => {
                            let wakes = after.turns.give();
                            let given = after.with(thread, At::Serves);
                            let woken = At::WokenWatcher { timed_out: false };
                            let given = if wakes {
                                given.wake_one(At::Watches, woken)
                            } else {
                                vec![given]
                            };
                            steps.extend(given.into_iter().map(|s| (Step::Chance, s)));
                            steps.push((Step::Chance, self.end(thread)));
                        }
                        At::Serves => {
                            let asks = At::Asks { is_called: false };
                            steps.push((Step::Chance, self.with(thread, asks)));
                            steps.push((Step::Chance, self.end(thread)));
                        }
                        At::Watches => {
                            let woken = |timed_out| At::WokenWatcher { timed_out };
                            if !self.turns.is_calm {
                                steps.push((Step::Timer, self.with(thread, woken(true))));
                            }
                            steps.push((Step::Chance, self.with(thread, woken(false))));
                        }
                        At::WokenWatcher { timed_out } => {
                            let goes_on = after.turns.watch_on(timed_out);
                            let asks = At::Asks { is_called: false };
                            let at = if goes_on { At::Watches } else { asks };
                            steps.push((Step::Runs, after.with(thread, at)));
                        }
                        At::Spare => {
                            let asks = At::Asks { is_called: true };
                            steps.push((Step::Chance, self.with(thread, asks)));
                        }
                        At::New | At::Left => {}
                    }
                }
                steps
            }

            fn needs_chance((step, _): &(Step, Session)) -> bool {
                *step == Step::Chance
            }

            /// Checks that `wanted` comes about by itself: threads run; if none can, timers end.
            fn must_reach(&self, wanted: impl Fn(&Session) -> bool + Copy, left: usize) {
                if wanted(self) {
                    return;
                }
                assert!(left > 0, "{self:?} does not get further by itself");
                let steps = self.steps();
                let kind = if steps.iter().any(|(step, _)| *step == Step::Runs) {
                    Step::Runs
                } else {
                    Step::Timer
                };
                let next: Vec<_> = steps.iter().filter(|(step, _)| *step == kind).collect();
                assert!(!next.is_empty(), "{self:?} has stopped");
                next.into_iter().for_each(|(_, after)| after.must_reach(wanted, left - 1));
            }

            fn check(&self) {
                let readers = self.count(At::Reads);
                if !self.turns.has_ended {
                    assert_eq!(readers, usize::from(self.turns.readers), "{self:?}");
                    assert!(self.turns.readers <= self.turns.most_readers, "{self:?}");
                }
                let watchers = self
                    .threads
                    .iter()
                    .filter(|at| matches!(at, At::Watches | At::WokenWatcher { .. }));
                assert!(watchers.count() <= 1, "{self:?}");
                let busy = self.count(At::Serves);
                if self.turns.has_ended {
                    // The kernel ends the wait of a reader.
                    self.must_reach(|end| end.count(At::Left) + busy + readers == 3, 12);
                } else if busy < 3 {
                    // However long the others serve, another thread becomes the reader.
                    self.must_reach(|later| later.count(At::Reads) > 0, 12);
                }
                if readers > 0 {
                    // Without requests all sleep soon, and no timer runs.
                    self.must_reach(|later| later.steps().iter().all(Self::needs_chance), 12);
                }
            }
        }

        #[test]
        fn in_each_order_of_steps_a_thread_reads_and_none_is_forgotten() {
            for most_readers in 1..=3 {
                let begin = Session::begin(most_readers);
                let (mut known, mut left) = (BTreeSet::from([begin]), vec![begin]);
                while let Some(session) = left.pop() {
                    session.check();
                    for (_, after) in session.steps() {
                        if known.insert(after) {
                            left.push(after);
                        }
                    }
                }
                assert!(known.len() > 100, "{}", known.len());
                // All that may read do so at some time.
                let reads = |session: &Session| session.turns.readers;
                assert_eq!(known.iter().map(reads).max(), Some(most_readers));
            }
        }
    }
}
