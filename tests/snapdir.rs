//! The snapshot directory: checkpoints as trees below `.jailfs`, and the edit history, through the
//! real binary and a real mount, with the programs that people use.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[path = "common/mod.rs"]
mod common;
#[path = "snapdir/forks.rs"]
mod forks;
#[expect(dead_code, reason = "each test file uses a part of this")]
#[path = "common/live.rs"]
mod harness;
#[path = "snapdir/history.rs"]
mod history;
#[path = "snapdir/library.rs"]
mod library;
#[path = "snapdir/programs.rs"]
mod programs;
#[path = "snapdir/walls.rs"]
mod walls;
