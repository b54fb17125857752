//! Damages every file of a store in every way that a disk, a copy or a user can. Then the store is
//! opened, read, restored and checked. Each answer is an error that names the file, or correct.
//!
//! * `JAILFS_DAMAGE_EVERY=1` tries all cases; the default tries one of so many that it takes some
//!   tens of seconds.
//! * `JAILFS_DAMAGE_SEED=N` chooses others.
//! * `JAILFS_DAMAGE_CASE='layers/00000004/journal cut 123'` tries this one.
//!
//! `tests/damage/corpus/` has the cases that failed once, and one of each kind.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

#[path = "damage/cases.rs"]
mod cases;
#[path = "damage/judge.rs"]
mod judge;
#[path = "damage/world.rs"]
mod world;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use cases::Case;
use judge::Verdict;
use world::World;

/// One in so many of the cases is tried.
const EVERY: u64 = 30;
/// The time limit of a case.
const LONGEST: Duration = Duration::from_secs(120);
/// The limit of the process's address space: a length in a damaged file must not be trusted.
const MOST_MEMORY: u64 = 6 << 30;

/// Creating it takes as long as a hundred cases.
static WORLD: LazyLock<World> = LazyLock::new(|| {
    use nix::sys::resource::{Resource, setrlimit};
    setrlimit(Resource::RLIMIT_AS, MOST_MEMORY, MOST_MEMORY).unwrap();
    World::new()
});

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// Tries cases on two threads. Returns the failures. `expect` is the expected outcome of each.
fn try_all(cases: &[(Case, Option<Verdict>)]) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    let counts = Mutex::new(std::collections::BTreeMap::<Verdict, usize>::new());
    let running: Arc<Mutex<Vec<(String, Instant)>>> = Arc::default();
    let watched = Arc::downgrade(&running);
    std::thread::spawn(move || {
        while let Some(running) = watched.upgrade() {
            for (case, begun) in running.lock().unwrap().iter() {
                if begun.elapsed() > LONGEST {
                    eprintln!("'{case}' has no end");
                    std::process::abort();
                }
            }
            drop(running);
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let place = WORLD.place();
                while let Some((case, wanted)) = cases.get(next.fetch_add(1, Ordering::SeqCst)) {
                    running.lock().unwrap().push((case.to_string(), Instant::now()));
                    let tried = || judge::judge(&WORLD, place.path(), case);
                    let judged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(tried));
                    running.lock().unwrap().retain(|(other, _)| *other != case.to_string());
                    match judged.unwrap_or_else(|_| Err("the check panics".to_owned())) {
                        Err(why) => wrong.lock().unwrap().push(format!("'{case}': {why}")),
                        Ok(verdict) => {
                            if wanted.is_some_and(|wanted| wanted != verdict) {
                                let message =
                                    format!("'{case}' is {verdict:?}, and not {wanted:?}");
                                wrong.lock().unwrap().push(message);
                            }
                            eprintln!("'{case}' is {verdict:?}");
                            *counts.lock().unwrap().entry(verdict).or_default() += 1;
                        }
                    }
                }
            });
        }
    });
    eprintln!("{} cases: {:?}", cases.len(), counts.into_inner().unwrap());
    wrong.into_inner().unwrap()
}

#[track_caller]
fn none_fails(cases: &[(Case, Option<Verdict>)], seed: u64) {
    let mut wrong = try_all(cases);
    wrong.sort();
    let some: Vec<String> = wrong.iter().take(60).cloned().collect();
    assert!(
        wrong.is_empty(),
        "seed {seed}: {} of {} cases:\n{}",
        wrong.len(),
        cases.len(),
        some.join("\n")
    );
}

#[test]
fn every_damaged_file_gives_an_error_or_the_correct_answer() {
    let seed = number("JAILFS_DAMAGE_SEED", 20);
    let all = match std::env::var("JAILFS_DAMAGE_CASE") {
        Ok(text) => text.lines().map(|line| Case::parse(line, &WORLD).unwrap()).collect(),
        Err(_) => cases::sample(cases::all(&WORLD), number("JAILFS_DAMAGE_EVERY", EVERY), seed),
    };
    let all: Vec<(Case, Option<Verdict>)> = all.into_iter().map(|case| (case, None)).collect();
    none_fails(&all, seed);
}

/// Lines of `corpus/*.txt`: a file, the damage, and the expected outcome; see the file itself.
#[test]
fn cases_that_failed_once_are_reported() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/damage/corpus");
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (case, wanted) =
                line.rsplit_once("->").unwrap_or_else(|| panic!("no '->' in '{line}'"));
            let verdict = Verdict::parse(wanted.trim());
            cases.push((
                Case::parse(case.trim(), &WORLD).unwrap_or_else(|why| panic!("{line}: {why}")),
                verdict,
            ));
        }
    }
    assert!(cases.len() > 20);
    none_fails(&cases, 0);
}
