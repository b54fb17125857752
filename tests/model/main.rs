//! Runs the whole library without a mount and compares it with a simple model: random operations of
//! programs, with the node numbers that a kernel would hold, between checkpoints, restores,
//! applies, remounts and kills.
//!
//! `JAILFS_MODEL_SEED=N` runs one seed, `JAILFS_MODEL_SEEDS=N` runs the first N. A failure prints
//! its seed and the last operations.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test panics where something is not as it must be, and says what was done before"
)]

mod history;
mod host;
mod ops;
mod rng;
mod tree;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use std::sync::atomic::{AtomicU64, Ordering};

use history::{LEFT, REBASED};
use tree::Times;
use world::World;

/// The number of seeds that take about twenty seconds in a debug build.
const SEEDS: u64 = 30;
const STEPS: u64 = 400;
/// The number of last operations that a failure prints.
const LOG_LINES: usize = 60;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

fn run(seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(seed, dir.path());
    let done = catch_unwind(AssertUnwindSafe(|| {
        world.check(Times::All);
        for step in 0..STEPS {
            if world.rng.one_in(14) {
                world.turn();
            } else {
                world.step();
            }
            if step % 16 == 0 {
                world.check(Times::All);
                world.check_host();
            }
        }
        world.check(Times::All);
        world.check_host();
    }));
    if let Err(panic) = done {
        let log = &world.log;
        eprintln!(
            "JAILFS_MODEL_SEED={seed} failed after {} operations, the last of which were:",
            log.len()
        );
        for line in &log[log.len().saturating_sub(LOG_LINES)..] {
            eprintln!("  {line}");
        }
        resume_unwind(panic);
    }
}

#[test]
fn the_library_does_what_the_simple_model_does() {
    match number("JAILFS_MODEL_SEED") {
        Some(seed) => run(seed),
        None => (1..=number("JAILFS_MODEL_SEEDS").unwrap_or(SEEDS)).for_each(run),
    }
    let count = |of: &AtomicU64| of.load(Ordering::SeqCst);
    eprintln!(
        "{} applies rebased the head while programs wrote, {} did not",
        count(&REBASED),
        count(&LEFT)
    );
}
