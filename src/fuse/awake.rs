//! Keeping a CPU awake: while requests come one after the other, a thread of the lowest priority goes round in circles, so that
//! the CPU on which it does so does not fall asleep.
//!
//! Answering a request takes a few microseconds. But who asks sleeps until it is answered, and the daemon until it is asked: at each
//! request two CPUs fall asleep and are woken, and in a virtual machine each time costs ten times as much as the answer.
//!
//! Asker and answerer on one CPU are fastest: neither has to wake another CPU. The thread sees when they are not: with each request it is kept from
//! its CPU for a moment, by who asks. Then the thread that answers comes there, once, and this one goes to the other; where
//! each runs from then on is left to the kernel, as before.
//!
//! Always true:
//! * without requests the thread sleeps, and one request now and then does not wake it: an idle mount costs nothing;
//! * nobody ever waits for the thread, and whoever wants the CPU hardly loses any of it: the thread has the lowest priority (SCHED_IDLE). That
//!   counts only among the threads of a session or control group; where others are kept apart they would share the CPU with it. So as soon as
//!   somebody else had it for a while, the thread pauses, for longer and longer;
//! * a request costs an addition while the thread is awake, and a look at the clock while it sleeps.

use std::collections::BTreeSet;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::sys::process;

/// For how long a CPU is kept awake after a request where that pays.
const SPAN: Duration = Duration::from_micros(500);
/// So many requests, each soon after the one before, wake the thread.
const BURST: u32 = 8;
/// Rounds between two looks at the clock: about a microsecond.
const ROUNDS: u32 = 32;
/// Who did not have the CPU for so long was kept from it by somebody who works, not by who answers or is answered.
const KEPT: Duration = Duration::from_millis(1);
/// Somebody else wants the CPU who keeps the thread from it for so long, in a while so long. Who writes to a disk for it does so for a
/// millisecond or two; a turn of a busy process takes some 3 milliseconds.
const CROWDED: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(20));
/// How long it pauses then, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(1600));
/// Who did not have the CPU for so long made room for somebody; a round takes a fraction of it.
const MOMENT: Duration = Duration::from_micros(3);
/// Of so many requests in turn, half must have come from the CPU of the thread.
const SAMPLE: u64 = 16;
/// The thread that answers is not asked to come more often, wherever the requests come from: each time costs some requests.
const STAYS: Duration = Duration::from_millis(2);
/// After so long without others the next pause is half as long, or, if somebody comes then, as the first.
const CALM: Duration = Duration::from_millis(50);

/// For how long a CPU is kept awake after a request if nobody said so. Only in a virtual machine, where waking one costs so much; not where
/// the time of CPUs is rationed (by the quota of a control group), because circles would use it up; and a CPU alone never waits for another.
pub(super) fn default_span() -> Duration {
    let cpus = process::cpus().len();
    let is_rationed = std::thread::available_parallelism().is_ok_and(|share| share.get() < cpus);
    let pays = cpus == 2 && !is_rationed && process::is_in_virtual_machine();
    if pays { SPAN } else { Duration::ZERO }
}

/// No CPU.
const NOWHERE: usize = usize::MAX;

/// The thread that keeps a CPU awake, as those see it who take requests. It ends soon after this is dropped.
pub(super) struct Awake {
    shared: Arc<Shared>,
    thread: Thread,
    span: Duration,
    burst: Mutex<Burst>,
}

struct Shared {
    requests: AtomicU64,
    is_up: AtomicBool,
    /// The CPU on which requests are taken.
    elsewhere: AtomicUsize,
    /// The CPU from which they come, for who takes them to come there.
    come_to: AtomicUsize,
    ends: AtomicBool,
}

/// How many requests came, each soon after the one before.
struct Burst {
    last: Instant,
    requests: u32,
}

impl Awake {
    /// Starts the thread. A CPU is kept awake until there was no request for as long as `span`.
    ///
    /// # Errors
    /// No thread could be started.
    pub(super) fn start(span: Duration) -> std::io::Result<Awake> {
        let shared = Arc::new(Shared::new());
        let of_thread = Arc::clone(&shared);
        let thread = Builder::new().name("awake".to_owned()).spawn(move || {
            if let Err(error) = process::give_way() {
                log::debug!("no CPU is kept awake: {error}");
                return;
            }
            let cpus = process::cpus();
            let (mut left, mut pause) = (NOWHERE, PAUSES.0);
            while !of_thread.ends.load(Relaxed) {
                if of_thread.is_up.load(Relaxed) {
                    leave(&cpus, of_thread.elsewhere.load(Relaxed), &mut left);
                    match of_thread.circle(span) {
                        Ended::Quiet { calm: true } => pause = (pause / 2).max(PAUSES.0),
                        Ended::Quiet { calm: false } => {}
                        Ended::Changed => continue,
                        Ended::Crowded { calm } => {
                            pause = if calm { PAUSES.0 } else { pause };
                            std::thread::sleep(pause);
                            pause = (pause * 2).min(PAUSES.1);
                        }
                    }
                    of_thread.is_up.store(false, Relaxed);
                } else {
                    std::thread::park();
                }
            }
        })?;
        let burst = Mutex::new(Burst { last: Instant::now(), requests: 0 });
        Ok(Awake { shared, thread: thread.thread().clone(), span, burst })
    }

    /// There is a request.
    pub(super) fn note_request(&self) {
        self.shared.requests.fetch_add(1, Relaxed);
        let come_to = self.shared.come_to.load(Relaxed);
        if come_to != NOWHERE {
            self.shared.come_to.store(NOWHERE, Relaxed);
            self.shared.elsewhere.store(go_to(come_to), Relaxed);
        }
        if !self.shared.is_up.load(Relaxed) && self.burst.lock().goes_on(Instant::now(), self.span) {
            self.shared.elsewhere.store(process::cpu().unwrap_or(NOWHERE), Relaxed);
            self.shared.is_up.store(true, Relaxed);
            self.thread.unpark();
        }
    }
}

/// Moves this thread to a CPU, from which the kernel may move it on. The one that it is on then.
fn go_to(cpu: usize) -> usize {
    let all = process::cpus();
    if !all.contains(&cpu) {
        // Also where nobody says which there are: then it could not be let go again.
        return process::cpu().unwrap_or(NOWHERE);
    }
    let moved = process::stay_on(&BTreeSet::from([cpu])).and_then(|()| process::stay_on(&all));
    if let Err(error) = moved {
        log::warn!("the thread that answers may not run on every CPU: {error}");
    }
    process::cpu().unwrap_or(NOWHERE)
}

/// Lets this thread run on all these CPUs but one.
fn leave(cpus: &BTreeSet<usize>, cpu: usize, left: &mut usize) {
    if *left == cpu {
        return;
    }
    *left = cpu;
    let others = cpus.iter().copied().filter(|other| *other != cpu).collect();
    if let Err(error) = process::stay_on(&others) {
        log::debug!("the thread that keeps a CPU awake runs anywhere: {error}");
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
        self.thread.unpark();
    }
}

impl Burst {
    /// One more request; whether there were enough of them.
    fn goes_on(&mut self, now: Instant, span: Duration) -> bool {
        let is_soon = now.duration_since(self.last) < span;
        self.last = now;
        self.requests = if is_soon { self.requests.saturating_add(1) } else { 0 };
        self.requests >= BURST
    }
}

/// Why it went round no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// There are no requests; `calm` if nobody else wanted the CPU for long.
    Quiet { calm: bool },
    /// Somebody else wanted the CPU; `calm` if nobody did for long before.
    Crowded { calm: bool },
    /// Who takes the requests came to this CPU.
    Changed,
}

impl Shared {
    fn new() -> Shared {
        Shared {
            requests: AtomicU64::new(0),
            is_up: AtomicBool::new(false),
            elsewhere: AtomicUsize::new(NOWHERE),
            come_to: AtomicUsize::new(NOWHERE),
            ends: AtomicBool::new(false),
        }
    }

    /// Goes round until there was no request for as long as `span`, or somebody else wanted the CPU.
    fn circle(&self, span: Duration) -> Ended {
        let (elsewhere, begun) = (self.elsewhere.load(Relaxed), Instant::now());
        let (mut seen, mut since, mut last) = (self.requests.load(Relaxed), begun, begun);
        let mut asked = Asked::new(seen, begun);
        let mut others = Others { kept: Duration::ZERO, since: begun };
        while !self.ends.load(Relaxed) {
            (0..ROUNDS).for_each(|_| spin_loop());
            let (requests, now) = (self.requests.load(Relaxed), Instant::now());
            let away = now.duration_since(last);
            if others.want(now, away) {
                return Ended::Crowded { calm: last.duration_since(begun) >= CALM };
            }
            if self.elsewhere.load(Relaxed) != elsewhere {
                return Ended::Changed;
            }
            if asked.come_from_here(requests, now, away) {
                self.come_to.store(process::cpu().unwrap_or(NOWHERE), Relaxed);
            }
            last = now;
            if requests != seen {
                (seen, since) = (requests, now);
            } else if now.duration_since(since) >= span {
                break;
            }
        }
        Ended::Quiet { calm: last.duration_since(begun) >= CALM }
    }
}

/// For how long others kept the thread from its CPU.
struct Others {
    kept: Duration,
    since: Instant,
}

impl Others {
    /// Whether somebody wants the CPU, which the thread did not have just now for as long as `away`.
    fn want(&mut self, now: Instant, away: Duration) -> bool {
        if away >= KEPT {
            let is_old = now.duration_since(self.since) > CROWDED.1;
            let kept = if is_old { Duration::ZERO } else { self.kept };
            *self = Others { kept: kept + away, since: if is_old { now } else { self.since } };
        }
        self.kept >= CROWDED.0
    }
}

/// Where requests come from, as the thread sees it that goes round.
struct Asked {
    /// What was counted when the sample began.
    requests: u64,
    /// How often somebody else had the CPU for a moment since then.
    moments: u64,
    /// When who answers last came to another CPU, or might have.
    since: Instant,
}

impl Asked {
    fn new(requests: u64, since: Instant) -> Asked {
        Asked { requests, moments: 0, since }
    }

    /// Whether they come from this CPU, which the thread did not have just now for as long as `away`.
    fn come_from_here(&mut self, requests: u64, now: Instant, away: Duration) -> bool {
        self.moments += u64::from(away >= MOMENT);
        if requests.wrapping_sub(self.requests) < SAMPLE {
            return false;
        }
        let here = self.moments >= SAMPLE / 2 && now.duration_since(self.since) >= STAYS;
        *self = Asked::new(requests, if here { now } else { self.since });
        here
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Duration = Duration::from_millis(1);

    fn in_time(is_so: impl Fn() -> bool) -> bool {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_so() && Instant::now() < end {
            std::thread::sleep(SPAN);
        }
        is_so()
    }

    #[test]
    fn only_requests_that_come_one_after_the_other_keep_a_cpu_awake() {
        let begun = Instant::now();
        let mut burst = Burst { last: begun, requests: 0 };
        assert!((1..100).all(|at| !burst.goes_on(begun + SPAN * at, SPAN)), "each a span after the other");
        let soon = begun + SPAN * 200;
        assert!((0..BURST).all(|_| !burst.goes_on(soon, SPAN)));
        assert!(burst.goes_on(soon, SPAN));
    }

    #[test]
    fn who_answers_is_asked_to_come_where_half_of_the_requests_come_from_and_not_again_at_once() {
        let begun = Instant::now();
        let (brief, kept) = (MOMENT / 3, MOMENT);
        // Rounds of the thread with a request each; in every `nth` somebody else had the CPU for a moment.
        let sample = |asked: &mut Asked, from: u64, now: Instant, nth: u64| {
            (1..=SAMPLE)
                .filter(|at| asked.come_from_here(from + at, now, if at % nth == 0 { kept } else { brief }))
                .count()
        };
        let mut asked = Asked::new(0, begun);
        assert_eq!(sample(&mut asked, 0, begun + STAYS, 3), 0, "a third is somebody else");
        assert_eq!(sample(&mut asked, SAMPLE, begun + STAYS, 2), 1);
        assert_eq!(sample(&mut asked, SAMPLE * 2, begun + STAYS + STAYS / 2, 1), 0, "it came a moment ago");
        assert_eq!(sample(&mut asked, SAMPLE * 3, begun + STAYS * 2, 1), 1);
        assert!((0..1000).all(|_| !asked.come_from_here(SAMPLE * 4, begun + STAYS * 9, kept)), "nobody asks");
    }

    #[test]
    fn who_works_is_told_from_who_comes_for_a_moment() {
        let (begun, ms) = (Instant::now(), Duration::from_millis);
        let none = || Others { kept: Duration::ZERO, since: begun };
        let mut others = none();
        assert!((1..1000).all(|at| !others.want(begun + ms(30) * at, ms(2))), "it writes to a disk");
        let mut others = none();
        assert!((1..100_000).all(|at| !others.want(begun + KEPT * at, KEPT / 2)), "it asks, or answers");
        let mut others = none();
        let turns = (1..).take_while(|at| !others.want(begun + ms(6) * *at, ms(3))).count();
        assert_eq!(turns, 1, "of two that work each has every second turn");
        assert!(none().want(begun, CROWDED.0));
    }

    #[test]
    fn who_comes_to_another_cpu_may_run_on_all_of_them_as_before() {
        let all = process::cpus();
        for cpu in &all {
            // Where it runs the moment after is not ours to say.
            assert!((0..100).any(|_| go_to(*cpu) == *cpu));
            assert_eq!(process::cpus(), all);
        }
        assert!(all.contains(&go_to(NOWHERE)), "nothing can be moved there");
        assert_eq!(process::cpus(), all);
    }

    #[test]
    fn a_cpu_is_kept_awake_during_requests_and_not_after_the_last() {
        let awake = Awake::start(SPAN).unwrap();
        for _ in 0..3 {
            assert!(!awake.shared.is_up.load(Relaxed));
            while !awake.shared.is_up.load(Relaxed) {
                awake.note_request();
            }
            assert!(in_time(|| !awake.shared.is_up.load(Relaxed)), "nothing is asked any more");
        }
        let shared = Arc::downgrade(&awake.shared);
        drop(awake);
        assert!(in_time(|| shared.upgrade().is_none()), "the thread has ended");
    }
}
