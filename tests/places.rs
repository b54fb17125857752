//! Stores and bases that are not where they were: moved, copied, on a device of another number, or exchanged for others.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a failure is what a test is for"
)]

#[path = "places/base.rs"]
mod base;
#[path = "places/clock.rs"]
mod clock;
#[path = "places/device.rs"]
mod device;
#[path = "places/drift.rs"]
mod drift;
#[path = "places/dying.rs"]
mod dying;
#[expect(dead_code, reason = "other tests need more of it")]
#[path = "common/live.rs"]
mod harness;
#[path = "places/kept.rs"]
mod kept;
#[path = "common/states.rs"]
mod states;
#[path = "places/store.rs"]
mod store;

use std::path::Path;
use std::process::{Command, Output};

/// Runs jailfs; what it answers.
fn jailfs(dir: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_jailfs")).args(words).current_dir(dir).output().unwrap()
}

/// Runs jailfs, which must succeed; what it says.
#[track_caller]
fn said(dir: &Path, words: &[&str]) -> String {
    let output = jailfs(dir, words);
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs jailfs, which must be refused with this exit code; what it says about it.
#[track_caller]
fn refused(dir: &Path, words: &[&str], code: i32) -> String {
    let output = jailfs(dir, words);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
    said
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
