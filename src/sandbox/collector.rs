//! The thread that gives space back by itself, while the sandbox is mounted.
//!
//! It is woken behind every operation and whenever the store has grown; what it does then is for [`crate::timeline`] to say. It
//! works when nobody asks for anything, or at once where room is short. Whoever meets a full disk asks it to, and waits no longer than
//! [`PATIENCE`].
//!
//! Always true: it holds no lock while it waits, and the mount ends without waiting for more than one layer to be collected.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::fs::Fs;
use crate::timeline::gc::Collected;
use crate::timeline::{Due, Policy, Timeline};
use crate::types::LayerId;

/// How long nobody may have asked for anything.
const QUIET: Duration = Duration::from_millis(300);
/// How long it is waited for that.
const LONGEST: Duration = Duration::from_secs(5);
/// How long the kernel gets to let go of what nobody looks at.
const MOMENT: Duration = Duration::from_millis(100);
/// How long a full disk waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// After so many bytes it is looked whether there is something to do.
const GROWTH: u64 = 16 << 20;

/// What it goes by.
#[derive(Clone, Debug, Default)]
pub(super) struct Terms {
    /// None: nothing goes by itself.
    pub(super) policy: Option<Policy>,
    /// States that stay.
    pub(super) spared: BTreeSet<LayerId>,
    /// What the sandbox may store in all.
    pub(super) limit: Option<u64>,
}

/// The thread. It ends, and is waited for, when this is dropped.
pub(super) struct Collector {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What others say to it.
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    work: bool,
    end: bool,
    /// How often somebody asked who met a full disk, and how many of these were answered.
    asked: u64,
    answered: u64,
    /// Whether the last answer was that it cannot be known now.
    not_now: bool,
    /// Bytes that were given back so far.
    given_back: u64,
}

impl Collector {
    pub(super) fn start(
        timeline: &Arc<Timeline>,
        terms: Arc<Mutex<Terms>>,
    ) -> std::io::Result<Collector> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let fs = timeline.fs();
        let all = {
            let Terms { policy, limit, .. } = &*terms.lock();
            policy.as_ref().and_then(|policy| policy.store_bytes).into_iter().chain(*limit).min()
        };
        let every = all.map_or(GROWTH, |bytes| GROWTH.min(bytes / 16).max(64 << 10));
        let grown = Arc::clone(&shared);
        fs.set_growth_notice(every, Some(Box::new(move || grown.wake())));
        let work = Work { timeline: Arc::clone(timeline), terms, shared: Arc::clone(&shared) };
        let thread = std::thread::Builder::new()
            .name("collector".to_owned())
            .spawn(move || work.until_the_end())?;
        Ok(Collector { shared, thread: Some(thread) })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.shared.end();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread that gives space back panicked");
        }
    }
}

impl Shared {
    /// Says that there may be something to do.
    pub(super) fn wake(&self) {
        self.state.lock().work = true;
        self.changed.notify_all();
    }

    /// Says that nothing new is to be begun.
    pub(super) fn end(&self) {
        self.state.lock().end = true;
        self.changed.notify_all();
    }

    /// For whoever met a full disk: has space given back. Gives the bytes, or none if it is not known in time.
    pub(super) fn ask(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let (before, until) = (state.given_back, Instant::now() + PATIENCE);
        state.asked += 1;
        let ticket = state.asked;
        self.changed.notify_all();
        while state.answered < ticket && !state.end {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return None;
            }
        }
        let given_back = state.given_back - before;
        (given_back > 0 || !state.not_now).then_some(given_back)
    }

    /// Waits for work. Gives the number of the last question, and whether that is still to be answered; none at the end.
    fn wait(&self) -> Option<(u64, bool)> {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |s| !s.work && !s.end && s.asked == s.answered);
        state.work = false;
        (!state.end).then_some((state.asked, state.asked != state.answered))
    }

    fn answer(&self, ticket: u64, given_back: Option<u64>) {
        let mut state = self.state.lock();
        state.answered = ticket;
        state.not_now = given_back.is_none();
        state.given_back += given_back.unwrap_or(0);
        self.changed.notify_all();
    }

    fn is_at_end(&self) -> bool {
        self.state.lock().end
    }

    /// Waits until nobody has asked for anything for a while, or somebody waits for us; false if that does not come.
    fn is_quiet(&self, fs: &Fs, until: Instant) -> bool {
        let mut state = self.state.lock();
        while Instant::now() < until && !state.end {
            let before = fs.requests();
            self.changed.wait_while_for(&mut state, |s| !s.end && s.asked == s.answered, QUIET);
            if state.asked != state.answered || fs.requests() == before {
                return !state.end;
            }
        }
        !state.end
    }

    /// Waits for a moment, unless somebody waits for us.
    fn pause(&self) {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |s| !s.end && s.asked == s.answered, MOMENT);
    }
}

/// What the thread works on.
struct Work {
    timeline: Arc<Timeline>,
    terms: Arc<Mutex<Terms>>,
    shared: Arc<Shared>,
}

impl Work {
    fn until_the_end(self) {
        while let Some((ticket, is_full)) = self.shared.wait() {
            let terms = self.terms.lock().clone();
            let Some(policy) = terms.policy else {
                self.shared.answer(ticket, Some(0));
                continue;
            };
            let collected = self.round(&policy, &terms.spared, is_full);
            // First: who waits may be the thread that answers the kernel.
            self.shared.answer(ticket, collected.as_ref().map(|collected| collected.bytes));
            if let Some(collected) = collected {
                self.tell(&collected);
            }
        }
        self.timeline.fs().set_growth_notice(0, None);
    }

    /// Collects if it is time to; none if that cannot be now.
    fn round(
        &self,
        policy: &Policy,
        spared: &BTreeSet<LayerId>,
        is_full: bool,
    ) -> Option<Collected> {
        let fs = self.timeline.fs();
        let due = self.timeline.is_due(policy, spared, is_full);
        if due == Due::Not {
            return Some(Collected::default());
        }
        if !is_full {
            for whole in [true, false] {
                self.timeline.ask_kernel_for_states(policy, spared, whole);
                self.shared.pause();
            }
        }
        let until = Instant::now() + LONGEST;
        let _exclusive = loop {
            if due == Due::WhenIdle && !self.shared.is_quiet(fs, until) {
                return None;
            }
            match fs.exclusive_soon() {
                Some(alone) => break alone,
                None if is_full || Instant::now() >= until || self.shared.is_at_end() => {
                    return None;
                }
                None => self.shared.pause(),
            }
        };
        match self.timeline.collect_by(policy, spared, &|| !self.shared.is_at_end()) {
            Ok(collected) => Some(collected),
            Err(error) => {
                log::warn!("space that nothing needs is not given back: {error}");
                None
            }
        }
    }

    fn tell(&self, collected: &Collected) {
        for info in &collected.dropped {
            let name = info.seal.as_ref().and_then(|seal| seal.name.as_ref());
            let name = name.map(|name| format!(" '{name}'")).unwrap_or_default();
            log::warn!(
                "checkpoint {}{name} was given up, as the options of the mount say",
                info.header.layer
            );
        }
        if !collected.dropped.is_empty() {
            self.timeline.checkpoint_names_changed();
        }
        if collected.bytes > 0 {
            log::info!("{} bytes that nothing needs were given back", collected.bytes);
        }
    }
}
