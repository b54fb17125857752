//! Keeps a CPU awake during bursts of requests: a thread of the lowest priority spins on it.
//!
//! Answering a request takes a few microseconds. But the caller sleeps until its reply, and the
//! daemon sleeps until the next request, so each request puts two CPUs to sleep and wakes them. In
//! a virtual machine one wake-up costs ten times as much as the answer.
//!
//! The pair is fastest on one CPU: then neither has to wake another CPU. The spinner can tell where
//! the callers run, because a caller on the spinner's CPU preempts it briefly at each request. Then
//! the serving thread moves to that CPU, once, and the spinner moves to another. Afterwards the
//! kernel schedules both as before.
//!
//! Always true:
//! * Without requests the spinner sleeps, and isolated requests do not wake it. So an idle mount
//!   costs nothing.
//! * No thread waits for the spinner, and it takes hardly any CPU time from others (SCHED_IDLE).
//!   That priority holds only within one session or control group; against threads of others, the
//!   spinner would get a full share. So it pauses, for longer and longer, as soon as another thread
//!   wants the CPU for a while.
//! * A request costs one addition while the spinner is awake, and one look at the clock while it
//!   sleeps.

use std::collections::BTreeSet;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fuse::burst::Burst;
use crate::sys::process;

/// How long a CPU is kept awake after a request.
const SPAN: Duration = Duration::from_micros(500);
/// Spin iterations between two looks at the clock: about a microsecond.
const ROUNDS: u32 = 32;
/// A thread that preempted the spinner for at least this long does work of its own. A caller or the
/// serving thread runs more briefly.
const PREEMPTED_BY_WORK: Duration = Duration::from_millis(1);
/// The spinner pauses once it was preempted by work for this long (0), within a window of this
/// length (1). A kernel thread that writes to a disk runs for a millisecond or two; a time slice of
/// a busy process lasts some 3 milliseconds.
const CROWDED: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(20));
/// The first and the longest pause.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(1600));
/// The spinner was preempted if it did not run for at least this long; a round is much shorter.
const PREEMPTED: Duration = Duration::from_micros(3);
/// Of this many requests in a row, half must have come from the spinner's CPU.
const SAMPLE: u64 = 16;
/// The shortest time between two moves of the serving thread, each of which costs some requests.
const MOVE_INTERVAL: Duration = Duration::from_millis(2);
/// After this long without contention the next pause is half as long, or, if contention ended the
/// spin, the shortest.
const CALM: Duration = Duration::from_millis(50);

/// No CPU.
const NO_CPU: usize = usize::MAX;

/// The handle of the spinning thread. The thread ends soon after this is dropped.
pub(super) struct Spinner {
    shared: Arc<Shared>,
    thread: Thread,
    burst: Mutex<Burst>,
}

struct Shared {
    requests: AtomicU64,
    is_spinning: AtomicBool,
    /// The CPU on which the serving thread runs.
    server_cpu: AtomicUsize,
    /// The CPU to which the serving thread should move.
    move_to: AtomicUsize,
    ends: AtomicBool,
}

impl Spinner {
    /// Starts the thread. A CPU is kept awake until there was no request for as long as [`SPAN`].
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn start() -> std::io::Result<Spinner> {
        let shared = Arc::new(Shared::new());
        let thread_shared = Arc::clone(&shared);
        let thread = Builder::new().name("awake".to_owned()).spawn(move || {
            if let Err(error) = process::set_idle_priority() {
                log::debug!(
                    "cannot lower the priority of the spinner, so it does not run: {error}"
                );
                return;
            }
            let cpus = process::cpus();
            let (mut avoided, mut pause) = (NO_CPU, PAUSES.0);
            while !thread_shared.ends.load(Relaxed) {
                if thread_shared.is_spinning.load(Relaxed) {
                    avoid(&cpus, thread_shared.server_cpu.load(Relaxed), &mut avoided);
                    match thread_shared.spin() {
                        Ended::Quiet { calm: true } => pause = (pause / 2).max(PAUSES.0),
                        Ended::Quiet { calm: false } => {}
                        Ended::ServerMoved => continue,
                        Ended::Crowded { calm } => {
                            pause = if calm { PAUSES.0 } else { pause };
                            std::thread::sleep(pause);
                            pause = (pause * 2).min(PAUSES.1);
                        }
                    }
                    thread_shared.is_spinning.store(false, Relaxed);
                } else {
                    std::thread::park();
                }
            }
        })?;
        let burst = Mutex::new(Burst::new(Instant::now()));
        Ok(Spinner { shared, thread: thread.thread().clone(), burst })
    }

    /// Counts a request, and wakes the spinner if it completes a burst.
    pub(super) fn note_request(&self) {
        self.shared.requests.fetch_add(1, Relaxed);
        let move_to = self.shared.move_to.load(Relaxed);
        if move_to != NO_CPU {
            self.shared.move_to.store(NO_CPU, Relaxed);
            self.shared.server_cpu.store(move_to_cpu(move_to), Relaxed);
        }
        if !self.shared.is_spinning.load(Relaxed)
            && self.burst.lock().is_reached(Instant::now(), SPAN)
        {
            self.shared.server_cpu.store(process::cpu().unwrap_or(NO_CPU), Relaxed);
            self.shared.is_spinning.store(true, Relaxed);
            self.thread.unpark();
        }
    }
}

/// Moves this thread to a CPU; afterwards the kernel may schedule it anywhere again. Returns the
/// CPU on which it then runs.
fn move_to_cpu(cpu: usize) -> usize {
    let all = process::cpus();
    if !all.contains(&cpu) {
        // Not in the affinity mask, or the mask is unknown: the mask could not be restored.
        return process::cpu().unwrap_or(NO_CPU);
    }
    let moved =
        process::set_affinity(&BTreeSet::from([cpu])).and_then(|()| process::set_affinity(&all));
    if let Err(error) = moved {
        log::warn!("the serving thread is not allowed on every CPU any more: {error}");
    }
    process::cpu().unwrap_or(NO_CPU)
}

/// Keeps this thread off one CPU.
fn avoid(cpus: &BTreeSet<usize>, cpu: usize, avoided: &mut usize) {
    if *avoided == cpu {
        return;
    }
    *avoided = cpu;
    let others = cpus.iter().copied().filter(|other| *other != cpu).collect();
    if let Err(error) = process::set_affinity(&others) {
        log::debug!("the spinner may run on any CPU: {error}");
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
        self.thread.unpark();
    }
}

/// Why the spinner stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// No request for a whole span; `calm` if there was no contention for long.
    Quiet { calm: bool },
    /// Other threads want the CPU; `calm` if none did for long before.
    Crowded { calm: bool },
    /// The serving thread moved to another CPU.
    ServerMoved,
}

impl Shared {
    fn new() -> Shared {
        Shared {
            requests: AtomicU64::new(0),
            is_spinning: AtomicBool::new(false),
            server_cpu: AtomicUsize::new(NO_CPU),
            move_to: AtomicUsize::new(NO_CPU),
            ends: AtomicBool::new(false),
        }
    }

    /// Spins until there was no request for as long as [`SPAN`], or other threads want the CPU.
    fn spin(&self) -> Ended {
        let (server_cpu, begun) = (self.server_cpu.load(Relaxed), Instant::now());
        let (mut seen, mut since, mut last) = (self.requests.load(Relaxed), begun, begun);
        let mut origin = RequestOrigin::new(seen, begun);
        let mut contention = Contention { preempted: Duration::ZERO, since: begun };
        while !self.ends.load(Relaxed) {
            (0..ROUNDS).for_each(|_| spin_loop());
            let (requests, now) = (self.requests.load(Relaxed), Instant::now());
            let away = now.duration_since(last);
            if contention.is_high(now, away) {
                return Ended::Crowded { calm: last.duration_since(begun) >= CALM };
            }
            if self.server_cpu.load(Relaxed) != server_cpu {
                return Ended::ServerMoved;
            }
            if origin.is_this_cpu(requests, now, away) {
                self.move_to.store(process::cpu().unwrap_or(NO_CPU), Relaxed);
            }
            last = now;
            if requests != seen {
                (seen, since) = (requests, now);
            } else if now.duration_since(since) >= SPAN {
                break;
            }
        }
        Ended::Quiet { calm: last.duration_since(begun) >= CALM }
    }
}

/// Measures for how long other threads kept the spinner from its CPU.
struct Contention {
    preempted: Duration,
    since: Instant,
}

impl Contention {
    /// Whether other threads want the CPU. The spinner did not run just now for as long as `away`.
    fn is_high(&mut self, now: Instant, away: Duration) -> bool {
        if away >= PREEMPTED_BY_WORK {
            let is_old = now.duration_since(self.since) > CROWDED.1;
            let preempted = if is_old { Duration::ZERO } else { self.preempted };
            *self = Contention {
                preempted: preempted + away,
                since: if is_old { now } else { self.since },
            };
        }
        self.preempted >= CROWDED.0
    }
}

/// Guesses from the spinner's preemptions whether requests come from its CPU.
struct RequestOrigin {
    /// The count of requests at the start of the sample.
    requests: u64,
    /// How often the spinner was preempted since then.
    preemptions: u64,
    /// When the serving thread was last asked to move.
    since: Instant,
}

impl RequestOrigin {
    fn new(requests: u64, since: Instant) -> RequestOrigin {
        RequestOrigin { requests, preemptions: 0, since }
    }

    /// Whether requests come from this CPU. The spinner did not run just now for as long as `away`.
    fn is_this_cpu(&mut self, requests: u64, now: Instant, away: Duration) -> bool {
        self.preemptions += u64::from(away >= PREEMPTED);
        if requests.wrapping_sub(self.requests) < SAMPLE {
            return false;
        }
        let here =
            self.preemptions >= SAMPLE / 2 && now.duration_since(self.since) >= MOVE_INTERVAL;
        *self = RequestOrigin::new(requests, if here { now } else { self.since });
        here
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_time(is_so: impl Fn() -> bool) -> bool {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_so() && Instant::now() < end {
            std::thread::sleep(SPAN);
        }
        is_so()
    }

    #[test]
    fn the_server_moves_where_half_of_the_requests_come_from_but_not_too_often() {
        let begun = Instant::now();
        let (brief, preempted) = (PREEMPTED / 3, PREEMPTED);
        // One request per round. In every `nth` round the spinner is preempted.
        let sample = |origin: &mut RequestOrigin, from: u64, now: Instant, nth: u64| {
            (1..=SAMPLE)
                .filter(|at| {
                    origin.is_this_cpu(
                        from + at,
                        now,
                        if at % nth == 0 { preempted } else { brief },
                    )
                })
                .count()
        };
        let mut origin = RequestOrigin::new(0, begun);
        assert_eq!(sample(&mut origin, 0, begun + MOVE_INTERVAL, 3), 0, "only a third");
        assert_eq!(sample(&mut origin, SAMPLE, begun + MOVE_INTERVAL, 2), 1);
        assert_eq!(
            sample(&mut origin, SAMPLE * 2, begun + MOVE_INTERVAL + MOVE_INTERVAL / 2, 1),
            0,
            "it has just moved"
        );
        assert_eq!(sample(&mut origin, SAMPLE * 3, begun + MOVE_INTERVAL * 2, 1), 1);
        assert!(
            (0..1000).all(|_| !origin.is_this_cpu(
                SAMPLE * 4,
                begun + MOVE_INTERVAL * 9,
                preempted
            )),
            "no requests"
        );
    }

    #[test]
    fn a_working_thread_is_told_from_a_caller() {
        let (begun, ms) = (Instant::now(), Duration::from_millis);
        let none = || Contention { preempted: Duration::ZERO, since: begun };
        let mut contention = none();
        assert!(
            (1..1000).all(|at| !contention.is_high(begun + ms(30) * at, ms(2))),
            "a writer to a disk"
        );
        let mut contention = none();
        assert!(
            (1..100_000).all(
                |at| !contention.is_high(begun + PREEMPTED_BY_WORK * at, PREEMPTED_BY_WORK / 2)
            ),
            "a caller"
        );
        let mut contention = none();
        let turns = (1..).take_while(|at| !contention.is_high(begun + ms(6) * *at, ms(3))).count();
        assert_eq!(turns, 1, "a busy thread takes every second slice");
        assert!(none().is_high(begun, CROWDED.0));
    }

    #[test]
    fn a_moved_thread_keeps_its_affinity_mask() {
        let all = process::cpus();
        for cpu in &all {
            // The kernel may move the thread again at once.
            assert!((0..100).any(|_| move_to_cpu(*cpu) == *cpu));
            assert_eq!(process::cpus(), all);
        }
        assert!(all.contains(&move_to_cpu(NO_CPU)), "there is no such CPU");
        assert_eq!(process::cpus(), all);
    }

    #[test]
    fn the_spinner_sleeps_again_after_the_last_request() {
        let spinner = Spinner::start().unwrap();
        for _ in 0..3 {
            assert!(!spinner.shared.is_spinning.load(Relaxed));
            while !spinner.shared.is_spinning.load(Relaxed) {
                spinner.note_request();
            }
            assert!(in_time(|| !spinner.shared.is_spinning.load(Relaxed)), "no more requests");
        }
        let shared = Arc::downgrade(&spinner.shared);
        drop(spinner);
        assert!(in_time(|| shared.upgrade().is_none()), "the thread has ended");
    }
}
