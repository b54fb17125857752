//! `jailfs run --forks`: attempts side by side, of which one wins.
//!
//! Always true:
//! * Each attempt has a head, a mount, walls, private directories for temporary files, limits and a
//!   control socket of its own. All begin with one sealed state of the caller's head.
//! * The caller's head changes only when a winner is taken, in one operation that `op restore`
//!   undoes.
//! * When the race is over, no process of an attempt lives. The forks of the losers are dropped,
//!   unless the caller keeps them. After an interrupt all are dropped.
//!
//! The main thread waits for results and signals. One thread per job takes the next attempt and
//! runs it. All mounts are served by the process that has the store open: this one, or the daemon
//! that has the caller's head mounted.

mod ask;
mod forks;
mod options;
mod output;
mod result;
mod screen;
mod track;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::arena::Arena;
use super::caller::Caller;
use super::finish::STACK;
use super::outcome::Outcome;
use super::{Run, Sandboxed};
use crate::cli::json::Line;
use crate::cli::out;
use crate::daemon::{Access, MadeForks, Serving};
use crate::error::{Attempt, Result};
use crate::run::{End, Interrupts, Spec, Stopper, hidden_inside, keep_descriptors};
use crate::sandbox::{Request, Rev};
use crate::types::LayerId;

pub(super) use options::{Plan, RaceOptions};

use ask::Answer;
use options::Pick;
use result::{Finished, How, can_win, winner};
use screen::Screen;
use track::Track;

/// How often the table is drawn again, and how long a signal waits.
const TICK: Duration = Duration::from_millis(100);
/// How often a race looks whether its attempts are still served.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// The exit code if there is no winner.
const NO_WINNER: Outcome = Outcome::Ended(End::Exited(1));
/// The operations whose states the collection after a race keeps, as `jailfs gc` does.
const OPERATIONS: u64 = 100;

/// A race that is over.
struct Over {
    /// In the order in which they ended.
    finished: Vec<Finished>,
    /// The place of the winner in that list.
    winner: Option<usize>,
    /// The signal that ended the race.
    interrupt: Option<Signal>,
}

/// Runs a race, and decides about the changes of the winner. Returns the outcome that the exit code
/// stands for.
pub(super) fn run(
    run: &Run,
    plan: &Plan,
    sandboxed: &mut Sandboxed,
    spec: &Spec,
) -> Result<Outcome> {
    let interrupts = Interrupts::take()?;
    keep_descriptors()?;
    forks::tell_abandoned(&sandboxed.caller)?;
    let screen = Arc::new(Screen::new(plan.forks));
    let (over, outcome) = match &sandboxed.caller {
        Caller::Here(caller) => {
            // Until the last process of the last attempt has ended.
            let _hiding = caller.hide(&hidden_inside(spec));
            let head = caller.head_name().to_owned();
            let access = Access::OfRun { head, forked: MadeForks::default() };
            let serving = Serving::open(Arc::clone(caller), access)?;
            let arena = Arena::here(serving.begin_race(caller, plan.forks)?);
            Race { run, plan, sandboxed, spec, interrupts, arena, screen }.run()?
        }
        Caller::Mounted(daemon) => {
            let arena = Arena::at(daemon, plan.forks)?;
            Race { run, plan, sandboxed, spec, interrupts, arena, screen }.run()?
        }
    };
    if over.winner.is_some() && over.interrupt.is_none() {
        sandboxed.has_forks = plan.keep_forks && plan.forks > 1;
        sandboxed.finish(run.fate(Outcome::SUCCESS), Outcome::SUCCESS)?;
    }
    Ok(outcome)
}

struct Race<'a> {
    run: &'a Run,
    plan: &'a Plan,
    sandboxed: &'a Sandboxed,
    spec: &'a Spec,
    interrupts: Interrupts,
    arena: Arena<'a>,
    screen: Arc<Screen>,
}

impl Race<'_> {
    /// Holds the race, and concludes it.
    fn run(&self) -> Result<(Over, Outcome)> {
        let over = self.hold().inspect_err(|_| {
            self.drop_forks(None, true);
            drop(self.arena.finish());
        })?;
        let outcome = self.conclude(&over)?;
        self.arena.finish()?;
        Ok((over, outcome))
    }

    /// Runs the attempts until the race is decided, and finds the winner.
    fn hold(&self) -> Result<Over> {
        let mut over = self.attempts()?;
        let winner = over.winner.and_then(|at| over.finished.get(at));
        self.screen.end(winner.map(|one| one.number));
        let failed = over.finished.iter().map(|one| match &one.how {
            How::Failed(error) => Some(error),
            How::Ran(_) | How::NotRun => None,
        });
        if over.interrupt.is_none()
            && let Some(errors) = failed.collect::<Option<Vec<_>>>()
            && let Some(error) = errors.first()
        {
            return Err(forks::all_failed(error));
        }
        if self.plan.pick == Pick::Ask && over.interrupt.is_none() {
            match ask::ask(&over.finished, &self.interrupts)? {
                Answer::Winner(winner) => over.winner = winner,
                Answer::Interrupted(signal) => over.interrupt = Some(signal),
            }
        }
        Ok(over)
    }

    fn attempts(&self) -> Result<Over> {
        let (stopper, stop) = Stopper::new()?;
        let track = Track {
            run: self.run,
            spec: self.spec,
            arena: &self.arena,
            stop,
            score: match &self.plan.pick {
                Pick::Score(command) => Some(command),
                Pick::First | Pick::Ask | Pick::Keep => None,
            },
            screen: Arc::clone(&self.screen),
            has_named_walls: AtomicBool::new(false),
        };
        let (next, (sender, results)) = (AtomicUsize::new(0), mpsc::channel());
        thread::scope(|scope| {
            for _ in 0..self.plan.jobs {
                let (sender, track, next) = (sender.clone(), &track, &next);
                let stopper = &stopper;
                let work = move || self.work((track, next), stopper, &sender);
                let thread = thread::Builder::new().name("attempt".to_owned()).stack_size(STACK);
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    stopper.stop();
                    return Err(error).attempt(|| "start a thread for an attempt");
                }
            }
            drop(sender);
            self.wait(&results, &stopper)
        })
    }

    /// Runs one attempt after the other until none is left.
    fn work(
        &self,
        (track, next): (&Track<'_>, &AtomicUsize),
        stopper: &Stopper,
        results: &Sender<Finished>,
    ) {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(head) = self.arena.names().get(at) else { return };
            let number = u32::try_from(at + 1).unwrap_or(u32::MAX);
            let one = track.run(number, head.clone());
            // No other attempt begins after the first success.
            if self.plan.pick == Pick::First && can_win(&one) && one.how.is_success() {
                stopper.stop();
            }
            if results.send(one).is_err() {
                return;
            }
        }
    }

    /// Collects the results. Ends the race when it is decided, or at a signal.
    fn wait(&self, results: &mpsc::Receiver<Finished>, stopper: &Stopper) -> Result<Over> {
        let mut over = Over { finished: Vec::new(), winner: None, interrupt: None };
        let (mut lost, mut checked) = (None, Instant::now());
        loop {
            match results.recv_timeout(TICK) {
                Ok(one) => {
                    over.finished.push(one);
                    if let Some(one) = over.finished.last() {
                        self.screen.finished(one)?;
                    }
                    over.winner = winner(&self.plan.pick, &over.finished);
                }
                Err(RecvTimeoutError::Timeout) => self.screen.tick(),
                Err(RecvTimeoutError::Disconnected) => return lost.map_or(Ok(over), Err),
            }
            if lost.is_none() && checked.elapsed() >= CHECK_EVERY {
                // Commands without a tree must not run on, and none of them wins.
                lost = self.arena.check().inspect_err(|_| stopper.stop()).err();
                checked = Instant::now();
            }
            if let Some(signal) = self.interrupts.next()? {
                over.interrupt.get_or_insert(signal);
                stopper.stop();
            }
        }
    }

    /// Makes the winner the caller's head, and drops the forks that are not kept.
    fn conclude(&self, over: &Over) -> Result<Outcome> {
        let winner = over.winner.filter(|_| over.interrupt.is_none());
        let winner = winner.and_then(|at| over.finished.get(at));
        let mut undo = None;
        if let Some(one) = winner
            && let Some(state) = one.state
        {
            undo = self.take(state)?;
            out::note(&format!("attempt {} has won; its changes are in the sandbox", one.number));
            if let Some(undo) = undo {
                out::note(&format!("undo: jailfs op restore {undo}"));
            }
        }
        let kept = self.drop_forks(winner.map(|one| &*one.head), over.interrupt.is_some());
        if !kept.is_empty() {
            out::note(&format!("kept as forks: {}", kept.join(", ")));
        }
        self.screen.result(&Line::Race {
            pick: self.plan.pick.word(),
            attempts: over.finished.len(),
            winner: winner.map(|one| one.number),
            checkpoint: winner.and_then(|one| one.state).map(|state| state.0),
            head: self.sandboxed.caller.head().to_owned(),
            undo,
            interrupted: over.interrupt.is_some(),
            kept,
        })?;
        if let Some(signal) = over.interrupt {
            out::note("interrupted: all attempts are ended, and their forks are dropped");
            return Ok(Outcome::Ended(End::Killed(signal as u8)));
        }
        if winner.is_some() || self.plan.pick == Pick::Keep {
            return Ok(Outcome::SUCCESS);
        }
        out::note("no attempt has won; the sandbox is as before");
        Ok(NO_WINNER)
    }

    /// Makes the winner's state that of the caller's head. If that fails, all forks are kept.
    fn take(&self, state: LayerId) -> Result<Option<u64>> {
        let caller = &self.sandboxed.caller;
        let has_changed = forks::has_changed(caller, self.arena.start());
        let taken =
            has_changed.and_then(|changed| Ok((forks::take(caller, Rev::Id(state))?, changed)));
        let (undo, has_changed) = taken.inspect_err(|_| {
            if self.arena.finish().is_ok() {
                out::note("the forks of the attempts are kept");
            }
        })?;
        if has_changed {
            out::note(
                "the tree was changed while the race ran; the winner has replaced these changes, \
                 and the undo brings them back",
            );
        }
        Ok(undo)
    }

    /// Drops the forks of the losers unless they are kept, and that of the winner. Returns the
    /// forks that stay.
    fn drop_forks(&self, winner: Option<&str>, all: bool) -> Vec<String> {
        let (caller, names) = (&self.sandboxed.caller, self.arena.names());
        let is_kept = |name: &&String| self.plan.keep_forks && !all && Some(&***name) != winner;
        let kept: Vec<String> = names.iter().filter(is_kept).cloned().collect();
        let is_dropped = |name: &&String| !kept.contains(name) && Some(&***name) != winner;
        let losers: Vec<String> = names.iter().filter(is_dropped).cloned().collect();
        let mut dropped = self.arena.drop_forks(losers);
        if let Some(winner) = winner {
            let name = winner.to_owned();
            dropped = dropped.and(caller.call(Request::DropFork { name }).map(drop));
        }
        if let Err(error) = dropped {
            out::note(&format!("warning: {error}"));
        }
        if kept.is_empty() {
            let (keep, max_store) = (None, None);
            let request = Request::Gc { operations: OPERATIONS, keep, max_store, dry_run: false };
            if let Err(error) = caller.call(request) {
                log::warn!("unused space was not freed: {error}");
            }
        }
        kept
    }
}
