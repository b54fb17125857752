//! I/O errors at every call: each store and base call of an operation fails once, or from there on,
//! with each errno that a host may return. Afterwards the store must open, show the state before or
//! after the operation, and work: a write, a sync, a checkpoint, and a restore of every checkpoint.
//!
//! A second rule also fails a call of the recovery: in the rest of the operation, or in the next
//! start. Every state is created by the same calls, so the calls of an operation are the same at
//! every run.
//!
//! By default a part of the calls is tried: each kind of call of each operation, and each errno.
//! `JAILFS_IO_STRIDE=1` tries every call with every errno, `JAILFS_IO_STRIDE=3` one in three.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and prints its figures"
)]

#[path = "io_errors/faulty_base.rs"]
mod faulty_base;
#[path = "io_errors/place.rs"]
mod place;

use std::collections::BTreeMap;

use jailfs::error::Error;
use jailfs::internals::sys::failpoint::{self, Failpoint};
use jailfs::sandbox::Sandbox;
use jailfs::sandbox::{Request, Rev};
use jailfs::types::TreePath;

use place::{Place, Seen, apply, bytes, checkpoint, sync};

/// The errno of a host, and how often it is tried: for one in so many calls. The first call of each
/// kind fails with EIO and with one other errno in any case.
const ERRNOS: [(&str, usize); 7] = [
    ("EIO", 4),
    ("ENOSPC", 47),
    ("EDQUOT", 127),
    ("EROFS", 97),
    ("EACCES", 89),
    ("EPERM", 113),
    ("EINTR", 71),
];

type Act = fn(&Sandbox) -> Result<(), Error>;

/// An operation on a sandbox.
struct Operation {
    /// Creates the state before.
    begin: fn(&Place),
    /// The acts, each acknowledged on its own. If there are none, opening the store is the
    /// operation.
    acts: &'static [Act],
    /// Whether the base is written, so that each attempt needs its own base.
    writes_base: bool,
}

fn stride(usual: usize) -> usize {
    std::env::var("JAILFS_IO_STRIDE").map_or(usual, |stride| stride.parse().unwrap())
}

/// Numbers that are the same at every run (SplitMix64).
fn mixed(seed: usize) -> usize {
    let mut z = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) as usize
}

/// The result of an operation under rules.
struct Outcome {
    /// The number of acts that were acknowledged.
    done: usize,
    error: Option<Error>,
    calls: Vec<(Failpoint, bool)>,
}

impl Operation {
    /// Creates the state before. If the base does not change, only the store is copied.
    fn beginning(&self) -> Box<dyn Fn() -> Place> {
        let begin = self.begin;
        if self.writes_base {
            return Box::new(move || Place::new(begin));
        }
        let first = Place::new(begin);
        Box::new(move || first.copy())
    }

    /// Runs the operation under rules, on request with the next start.
    fn attempt(&self, place: &Place, rules: &str, and_open: bool) -> Outcome {
        let early = (!self.acts.is_empty()).then(|| place.open().unwrap());
        let ((done, error), calls) = failpoint::trace(|| {
            failpoint::with(rules, || {
                let mut done = 0;
                let mut error = None;
                match early.map_or_else(|| place.open(), Ok) {
                    Ok(sandbox) => {
                        for act in self.acts {
                            match act(&sandbox) {
                                Ok(()) => done += 1,
                                Err(failed) => {
                                    error = Some(failed);
                                    break;
                                }
                            }
                        }
                    }
                    Err(failed) => error = Some(failed),
                }
                if and_open {
                    drop(place.open());
                }
                (done, error)
            })
        });
        Outcome { done, error, calls }
    }

    /// The state before, and the states after each act.
    fn states(&self, place: &Place) -> Vec<Seen> {
        let mut states = vec![place.seen()];
        for act in self.acts {
            act(&place.open().unwrap()).unwrap();
            states.push(place.seen());
        }
        states
    }

    /// Fails calls and compares the result with the states.
    fn under(&self, rules: &str, place: &Place, states: &[Seen], and_open: bool) -> Outcome {
        let _said = Said(rules);
        let outcome = self.attempt(place, rules, and_open);
        let failed: Vec<&str> = outcome
            .calls
            .iter()
            .filter(|(_, failed)| *failed)
            .map(|(step, _)| step.name())
            .collect();
        let context = format!("{rules} ({}): {:?}", failed.join(", "), outcome.error);
        // Changes that were not synced may be lost if a sync failed.
        let is_sync = |step: &Failpoint| {
            matches!(step, Failpoint::StoreSync | Failpoint::StoreSyncDir | Failpoint::StoreCheck)
        };
        let mut all_failed = outcome.calls.iter().filter(|(_, failed)| *failed);
        let first_is_sync =
            all_failed.next().is_some_and(|(step, _)| *step == Failpoint::StoreSync);
        if self.writes_base && first_is_sync && all_failed.next().is_some() {
            // A limit that docs/SEMANTICS.md names: a sync of the journal of an apply failed, and
            // then the start that rolls it back. The changes of the apply may then look like those
            // of another program.
            place.is_sound(&context);
            return outcome;
        }
        let may_lose = outcome.calls.iter().any(|(step, failed)| *failed && is_sync(step));
        let first = if may_lose { 0 } else { outcome.done };
        let last = (outcome.done + 1).min(states.len() - 1);
        place.judge(&states[first..=last], states, &context);
        outcome
    }
}

/// Prints the rules when a test fails.
struct Said<'a>(&'a str);

impl Drop for Said<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("under {}", self.0);
        }
    }
}

/// Fails every call of an operation, and calls of the recovery.
fn at_every_call(operation: &Operation) {
    with_errnos(operation, &ERRNOS);
}

fn with_errnos(operation: &Operation, errnos: &[(&str, usize)]) {
    let begin = operation.beginning();
    let states = operation.states(&begin());
    let kinds: Vec<Failpoint> =
        operation.attempt(&begin(), "", false).calls.iter().map(|(kind, _)| *kind).collect();
    let calls = kinds.len();
    // With its number among the kinds, the first call of each.
    let mut firsts = BTreeMap::new();
    let is_first = |(at, kind): &(usize, &Failpoint)| !kinds[..*at].contains(kind);
    for (number, (at, _)) in kinds.iter().enumerate().filter(is_first).enumerate() {
        firsts.insert(at + 1, number);
    }
    let (mut cases, mut acknowledged) = (0, 0);
    let mut try_one = |rules: &str, and_open: bool| {
        let outcome = operation.under(rules, &begin(), &states, and_open);
        cases += 1;
        acknowledged += usize::from(outcome.error.is_none());
    };
    for at in 1..=calls {
        for (number, (errno, rarely)) in errnos.iter().enumerate() {
            let is_due = |first: &usize| number == 0 || number == first % errnos.len();
            if (at + number).is_multiple_of(stride(*rarely)) || firsts.get(&at).is_some_and(is_due)
            {
                try_one(&format!("fail:all:{at}:{errno}"), false);
            }
        }
        // From there on.
        if at.is_multiple_of(stride(19)) {
            let errno = ["EIO", "ENOSPC", "EROFS", "EDQUOT"][at / stride(19) % 4];
            try_one(&format!("fail:all:{at}+:{errno}"), false);
        }
        // A call of the recovery fails as well: one after the first failure, the start included.
        if at.is_multiple_of(stride(31)) {
            let first = format!("fail:all:{at}:EIO");
            let recovery = operation.attempt(&begin(), &first, true).calls.len() - at;
            for further in 0..3 {
                let second = at + mixed(at * 3 + further) % recovery.max(1);
                let errno = ["EIO", "ENOSPC", "EROFS"][further];
                try_one(&format!("{first},fail:all:{second}:{errno}"), true);
            }
        }
    }
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    eprintln!("{name}: {calls} calls, {cases} cases, {acknowledged} of them acknowledged");
    assert!(calls > 0);
}

fn restore(sandbox: &Sandbox, to: &str, paths: &[&str]) -> Result<(), Error> {
    let paths = paths.iter().map(|path| TreePath::parse(path.as_bytes()).unwrap()).collect();
    let request =
        Request::Restore { to: Rev::parse(to), paths, dry_run: false, detach_mounts: false };
    sandbox.handle(request).map(drop)
}

fn undo(sandbox: &Sandbox, path: &str) -> Result<(), Error> {
    let path = TreePath::parse(path.as_bytes()).unwrap();
    sandbox.handle(Request::Undo { path, steps: 1 }).map(drop)
}

fn gc(sandbox: &Sandbox, keep: Option<u64>) -> Result<(), Error> {
    let request = Request::Gc { operations: 0, keep, max_store: None, dry_run: false };
    sandbox.handle(request).map(drop)
}

#[test]
fn a_store_is_created_or_can_be_created_again() {
    at_every_call(&Operation { writes_base: true, begin: Place::fill_base, acts: &[] });
}

#[test]
fn a_store_opens_or_can_be_opened_again() {
    at_every_call(&Operation { writes_base: false, begin: Place::work, acts: &[] });
}

#[test]
fn synced_writes_stay() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::work,
        acts: &[
            |sandbox| place::create(sandbox, "src/added"),
            |sandbox| place::write(sandbox, "src/added", 0, &bytes(3, 9000)),
            sync,
            |sandbox| place::write(sandbox, "big", 5000, &bytes(4, 6000)),
            |sandbox| place::rename(sandbox, "src/f2", "src/f3"),
            |sandbox| place::remove(sandbox, "README"),
            sync,
        ],
    });
}

#[test]
fn a_checkpoint_exists_or_not() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::work,
        acts: &[|sandbox| checkpoint(sandbox, "green")],
    });
}

#[test]
fn a_failed_restore_was_done_or_not() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::work,
        acts: &[|sandbox| restore(sandbox, "c0", &[])],
    });
}

#[test]
fn a_failed_restore_of_paths_was_done_or_not() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::work,
        acts: &[|sandbox| restore(sandbox, "c0", &["src", "big"])],
    });
}

#[test]
fn a_failed_discard_was_done_or_not() {
    let acts: &[Act] =
        &[|sandbox| sandbox.handle(Request::Discard { detach_mounts: false }).map(drop)];
    at_every_call(&Operation { writes_base: false, begin: Place::work, acts });
}

#[test]
fn a_failed_undo_was_done_or_not() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::work,
        acts: &[|sandbox| undo(sandbox, "src/f1")],
    });
}

#[test]
fn a_failed_apply_is_rolled_back_or_done() {
    at_every_call(&Operation {
        writes_base: true,
        begin: Place::work,
        acts: &[|sandbox| apply(sandbox, false)],
    });
}

#[test]
fn a_failed_undo_of_an_apply_is_rolled_back_or_done() {
    at_every_call(&Operation {
        writes_base: true,
        begin: Place::applied,
        acts: &[|sandbox| apply(sandbox, true)],
    });
}

#[test]
fn a_start_rolls_an_interrupted_apply_back_or_can_be_repeated() {
    let operation = Operation { writes_base: true, begin: Place::cut_off, acts: &[] };
    let errnos: Vec<_> = ERRNOS.into_iter().filter(|(errno, _)| *errno != "EPERM").collect();
    with_errnos(&operation, &errnos);
}

#[test]
fn a_failed_drop_or_gc_loses_no_other_checkpoint() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::work,
        acts: &[
            |sandbox| sandbox.handle(Request::Drop { rev: Rev::parse("c0") }).map(drop),
            |sandbox| gc(sandbox, None),
            |sandbox| gc(sandbox, Some(1)),
        ],
    });
}

#[test]
fn failed_housekeeping_changes_no_state() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::many_layers,
        acts: &[Sandbox::compact],
    });
}

#[test]
fn a_failed_gc_over_the_archive_loses_no_other_checkpoint() {
    at_every_call(&Operation {
        writes_base: false,
        begin: Place::archived,
        acts: &[|sandbox| gc(sandbox, Some(2)), Sandbox::compact],
    });
}
