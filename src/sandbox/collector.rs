//! The background thread that collects garbage while the sandbox is mounted.
//!
//! * It holds no lock while it waits.
//! * It ends after the current layer when the sandbox is unmounted.
//! * An operation that met a full disk waits for it at most [`ASK_LIMIT`].
//!
//! The thread wakes after each operation and whenever the store has grown by a certain amount. The
//! policy in [`crate::timeline`] decides whether a collection pays. If it does, the thread waits
//! until the mount is idle, except when space is short. The decision looks at all checkpoints. So
//! after a decision not to collect, the thread rests, for several times as long as the decision
//! took.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLockWriteGuard};

use crate::fs::Fs;
use crate::timeline::gc::Collected;
use crate::timeline::{Common, Due, Policy};
use crate::types::LayerId;

/// The mount is idle after this long without a request.
const IDLE: Duration = Duration::from_millis(300);
/// How long a round waits for an idle mount. Then it collects anyway, unless a request reads a
/// state.
const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// How long the kernel gets to FORGET nodes of states that no process uses.
const FORGET_DELAY: Duration = Duration::from_millis(100);
/// How long an operation that met a full disk waits for a collection.
const ASK_LIMIT: Duration = Duration::from_secs(2);
/// (factor, limit): after a decision not to collect, the thread rests for the factor times as long
/// as the decision took, but at most for the limit.
const REST: (u32, Duration) = (10, Duration::from_secs(1));
/// The thread wakes when the store has grown by this many bytes. Less with a small limit.
const GROWTH: u64 = 16 << 20;

/// The rules of the collection.
#[derive(Clone, Debug, Default)]
pub(super) struct CollectionTerms {
    /// The states that may be dropped; `None` turns the collection off.
    pub(super) policy: Option<Policy>,
    /// States that are kept in any case.
    pub(super) pinned: BTreeSet<LayerId>,
    /// States that races keep; once for each race.
    pub(super) kept_by_races: Vec<LayerId>,
    /// The most that the sandbox may store, in bytes.
    pub(super) limit: Option<u64>,
}

impl CollectionTerms {
    /// All states that are kept in any case.
    pub(super) fn spared(&self) -> BTreeSet<LayerId> {
        self.pinned.iter().chain(&self.kept_by_races).copied().collect()
    }
}

/// The running thread. Dropping it ends the thread and waits for it.
pub(super) struct Collector {
    handle: Arc<CollectorHandle>,
    terms: Arc<Mutex<CollectionTerms>>,
    thread: Option<JoinHandle<()>>,
}

/// Wakes, asks and ends the thread.
pub(super) struct CollectorHandle {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    work: bool,
    end: bool,
    /// How many operations have asked for space, and how many of these were answered.
    asked: u64,
    answered: u64,
    /// Whether the last round could not run, so it is unknown how much it would have freed.
    is_unknown: bool,
    /// Bytes that were freed so far.
    freed: u64,
}

impl Collector {
    pub(super) fn start(
        common: &Arc<Common>,
        terms: Arc<Mutex<CollectionTerms>>,
    ) -> std::io::Result<Collector> {
        let handle = Arc::new(CollectorHandle { state: Mutex::default(), changed: Condvar::new() });
        let (of_thread, common) = (Arc::clone(&terms), Arc::clone(common));
        let thread = Thread { common, terms: of_thread, handle: Arc::clone(&handle) };
        let thread =
            std::thread::Builder::new().name("collector".to_owned()).spawn(move || thread.run())?;
        Ok(Collector { handle, terms, thread: Some(thread) })
    }

    /// Wakes the thread from now on when a head has written a certain amount.
    pub(super) fn watch(&self, fs: &Fs) {
        let limit = {
            let CollectionTerms { policy, limit, .. } = &*self.terms.lock();
            policy.as_ref().and_then(|policy| policy.store_bytes).into_iter().chain(*limit).min()
        };
        let every = limit.map_or(GROWTH, |bytes| GROWTH.min(bytes / 16).max(64 << 10));
        let grown = Arc::clone(&self.handle);
        fs.set_growth_notice(every, Some(Box::new(move || grown.wake())));
    }

    pub(super) fn handle(&self) -> &Arc<CollectorHandle> {
        &self.handle
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.handle.end();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the garbage collection thread panicked");
        }
    }
}

impl CollectorHandle {
    /// Reports that there may be something to collect.
    pub(super) fn wake(&self) {
        self.state.lock().work = true;
        self.changed.notify_all();
    }

    /// Ends the thread after the current layer.
    pub(super) fn end(&self) {
        self.state.lock().end = true;
        self.changed.notify_all();
    }

    /// Asks for space, for an operation that met a full disk. Returns the freed bytes, or `None` if
    /// the answer is not known within [`ASK_LIMIT`].
    pub(super) fn ask(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let (before, until) = (state.freed, Instant::now() + ASK_LIMIT);
        state.asked += 1;
        let ticket = state.asked;
        self.changed.notify_all();
        while state.answered < ticket && !state.end {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return None;
            }
        }
        let freed = state.freed - before;
        (freed > 0 || !state.is_unknown).then_some(freed)
    }

    /// Waits for work. Returns the number of the last question and whether it is still open; `None`
    /// at the end.
    fn wait(&self) -> Option<(u64, bool)> {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |s| !s.work && !s.end && s.asked == s.answered);
        state.work = false;
        (!state.end).then_some((state.asked, state.asked != state.answered))
    }

    fn answer(&self, ticket: u64, freed: Option<u64>) {
        let mut state = self.state.lock();
        state.answered = ticket;
        state.is_unknown = freed.is_none();
        state.freed += freed.unwrap_or(0);
        self.changed.notify_all();
    }

    fn is_at_end(&self) -> bool {
        self.state.lock().end
    }

    /// Waits until the mount is idle, an operation asks for space, or `until`. Returns false at the
    /// end.
    fn wait_for_idle(&self, common: &Common, until: Instant) -> bool {
        let mut state = self.state.lock();
        while Instant::now() < until && !state.end {
            let before = common.requests();
            self.changed.wait_while_for(&mut state, |s| !s.end && s.asked == s.answered, IDLE);
            if state.asked != state.answered || common.requests() == before {
                return !state.end;
            }
        }
        !state.end
    }

    /// Waits for some time, or until an operation asks for space.
    fn pause(&self, time: Duration) {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |s| !s.end && s.asked == s.answered, time);
    }
}

/// The data of the thread.
struct Thread {
    common: Arc<Common>,
    terms: Arc<Mutex<CollectionTerms>>,
    handle: Arc<CollectorHandle>,
}

impl Thread {
    fn run(self) {
        while let Some((ticket, is_full)) = self.handle.wait() {
            let terms = self.terms.lock().clone();
            let Some(policy) = terms.policy.clone() else {
                self.handle.answer(ticket, Some(0));
                continue;
            };
            let (begin, spared) = (Instant::now(), terms.spared());
            let due = self.common.is_due(&policy, &spared, is_full);
            if due == Due::Not {
                self.handle.answer(ticket, Some(0));
                let (factor, limit) = REST;
                self.handle.pause((begin.elapsed() * factor).min(limit));
                continue;
            }
            let collected = self.collect(&policy, &spared, (due, is_full));
            // Answer before the notifications below: the asking thread may be the one that serves
            // the kernel, and those wait for the kernel.
            self.handle.answer(ticket, collected.as_ref().map(|collected| collected.bytes));
            if let Some(collected) = collected {
                self.report(&collected);
            }
        }
    }

    /// Collects garbage. Returns `None` if that is not possible now.
    fn collect(
        &self,
        policy: &Policy,
        pinned: &BTreeSet<LayerId>,
        (due, is_full): (Due, bool),
    ) -> Option<Collected> {
        if !is_full {
            for whole in [true, false] {
                self.common.ask_kernel_for_states(policy, pinned, whole);
                self.handle.pause(FORGET_DELAY);
            }
        }
        let _exclusive = self.wait_for_readers(due == Due::WhenIdle, is_full)?;
        match self.common.collect_by(policy, pinned, &|| !self.handle.is_at_end()) {
            Ok(collected) => Some(collected),
            Err(error) => {
                log::warn!("collect garbage: {error}");
                None
            }
        }
    }

    /// Waits until no request reads a state, and keeps new ones out. Returns `None` if that takes
    /// too long, for a full disk after the first try.
    fn wait_for_readers(&self, when_idle: bool, is_full: bool) -> Option<RwLockWriteGuard<'_, ()>> {
        let until = Instant::now() + IDLE_LIMIT;
        loop {
            if when_idle && !self.handle.wait_for_idle(&self.common, until) {
                return None;
            }
            match self.common.exclusive_soon() {
                Some(guard) => return Some(guard),
                None if is_full || Instant::now() >= until || self.handle.is_at_end() => {
                    return None;
                }
                None => self.handle.pause(FORGET_DELAY),
            }
        }
    }

    /// Logs a collection, and invalidates the names of dropped checkpoints.
    fn report(&self, collected: &Collected) {
        for info in &collected.dropped {
            let name = info.seal.as_ref().and_then(|seal| seal.name.as_ref());
            let name = name.map(|name| format!(" '{name}'")).unwrap_or_default();
            log::warn!(
                "dropped checkpoint {}{name}, as the options of the mount allow",
                info.header.layer
            );
        }
        if !collected.dropped.is_empty() {
            self.common.checkpoint_names_changed();
        }
        if collected.bytes > 0 {
            log::info!("the garbage collection freed {} bytes", collected.bytes);
        }
    }
}
