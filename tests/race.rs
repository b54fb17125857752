//! `jailfs run --forks`: attempts side by side, of which one wins. Real programs, real mounts.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    reason = "a failure is what a test is for, and what is left behind must be said"
)]

#[path = "race/ends.rs"]
mod ends;
#[path = "race/example.rs"]
mod example;
#[path = "race/mounted.rs"]
mod mounted;
#[path = "race/picks.rs"]
mod picks;
#[path = "cli/place.rs"]
#[expect(dead_code, reason = "these tests use some of its functions")]
mod place;
#[path = "race/walls.rs"]
mod walls;

use place::{Place, Said, parse};
use serde_json::Value;

/// The lines of a race: the attempts, in the order of their numbers, and the last line.
fn race(said: &Said) -> (Vec<Value>, Value) {
    let mut lines = parse(&said.out);
    let last = lines.pop().unwrap_or_else(|| panic!("no line: {said:?}"));
    assert_eq!(last["type"], "race", "{said:?}");
    assert!(lines.iter().all(|line| line["type"] == "attempt"), "{said:?}");
    lines.sort_by_key(|line| line["attempt"].as_u64());
    (lines, last)
}

/// The names of the heads of the base's store.
fn heads(place: &Place) -> Vec<String> {
    let heads = place.json("base", "forks");
    heads.iter().map(|head| head["name"].as_str().expect("a name").to_owned()).collect()
}

/// Runs a race with `--pick PICK`, in which PICK may have spaces.
fn pick(place: &Place, options: &str, pick: &str, script: &str) -> Said {
    let options = std::iter::once("run").chain(options.split_whitespace());
    place.call("base", options.chain(["--pick", pick, "--", "sh", "-c", script]))
}
