//! The past inside the mount: checkpoints as trees below `.jailfs`, through the real binary and a real mount, with the programs
//! that people use.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failure is what a test is for"
)]

#[expect(dead_code, reason = "each test file uses another part of this")]
#[path = "common/live.rs"]
mod harness;
#[path = "past/library.rs"]
mod library;
#[path = "past/programs.rs"]
mod programs;
#[path = "past/walls.rs"]
mod walls;
