//! Stores and bases that are in another place than before: moved, copied, on a device with another
//! number, or replaced by others.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
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
#[expect(dead_code, reason = "other tests use the rest of it")]
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

/// Runs jailfs. Returns its output.
fn jailfs(dir: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_jailfs")).args(words).current_dir(dir).output().unwrap()
}

/// Runs jailfs, which must succeed. Returns its output.
#[track_caller]
fn said(dir: &Path, words: &[&str]) -> String {
    let output = jailfs(dir, words);
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs jailfs, which must fail with this exit code. Returns its message.
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
