//! The daemon is killed again and again, at random moments, under the load of several writers and of the verbs. What is there
//! when it is mounted again is what was acknowledged, in order, and nothing else but perhaps what was in flight.
//!
//! `JAILFS_KILLS=N` kills that many times, `JAILFS_KILL_SEED=N` chooses the moments and the load; what really happens also
//! depends on the machine, so a seed that failed is tried several times. A failure prints its seed and what was done before.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failure is what a test is for, and the figures are worth a line"
)]

#[path = "kill/files.rs"]
mod files;
#[expect(dead_code, reason = "other tests need more of it")]
#[path = "common/live.rs"]
mod harness;
#[path = "kill/programs.rs"]
mod programs;
#[path = "model/rng.rs"]
mod rng;
#[path = "kill/round.rs"]
mod round;
#[path = "kill/span.rs"]
mod span;
#[path = "kill/verbs.rs"]
mod verbs;
#[path = "kill/world.rs"]
mod world;
#[path = "kill/writer.rs"]
mod writer;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

use world::World;

/// So many that the test takes some twenty seconds in a debug build.
const KILLS: u64 = 20;
/// How much of what was done a failure tells.
const TOLD: usize = 40;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

#[test]
fn whatever_was_acknowledged_is_there_after_every_kill() {
    let kills = number("JAILFS_KILLS").unwrap_or(KILLS);
    let by_the_clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 % 1_000_000;
    let seed = number("JAILFS_KILL_SEED").unwrap_or_else(by_the_clock);
    eprintln!("JAILFS_KILL_SEED={seed} JAILFS_KILLS={kills}");
    let mut world = World::new(seed, kills);
    let done = catch_unwind(AssertUnwindSafe(|| {
        while world.kills < kills {
            world.round();
        }
    }));
    eprintln!("{}", world.figures());
    if let Err(panic) = done {
        eprintln!("JAILFS_KILL_SEED={seed} failed after {} kills; the last that was done:", world.kills);
        for line in &world.log[world.log.len().saturating_sub(TOLD)..] {
            eprintln!("  {line}");
        }
        world.keep();
        resume_unwind(panic);
    }
}
