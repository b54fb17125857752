//! Filesystem test suites of others, on real mounts: pjdfstest, fsx and stress-ng.
//!
//! pjdfstest and fsx are programs from crates.io. The README's test command installs them below
//! `target/tools`. A test that does not find its program fails with a message.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking, and prints a suite's figures"
)]

#[path = "suites/fsx.rs"]
mod fsx;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;
#[path = "suites/pjdfstest.rs"]
mod pjdfstest;
#[path = "suites/stress.rs"]
mod stress;

use std::path::{Path, PathBuf};

/// The path of a program that the test command installs.
fn tool(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let path = target.join("tools/bin").join(name);
    assert!(
        path.exists(),
        "{} is missing; the test command in README.md installs it",
        path.display()
    );
    path
}
