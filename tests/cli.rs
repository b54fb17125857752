//! The command line, as a user or a script uses it: the real program, real daemons, real mounts.
//!
//! Each test has its own directories, home and store, and tests run in parallel. Every command has
//! a time limit of [`PATIENCE`]. If a test itself hangs in the mount, a watchdog unmounts
//! everything and ends it. These tests check the statements of docs/CLI.md.

#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking, and leftovers must be printed"
)]

#[path = "cli/apply.rs"]
mod apply;
#[path = "cli/attempts.rs"]
mod attempts;
#[path = "cli/confine.rs"]
mod confine;
#[path = "cli/daemon.rs"]
mod daemon;
#[path = "cli/danger.rs"]
mod danger;
#[path = "cli/exhausted.rs"]
mod exhausted;
#[path = "cli/heads.rs"]
mod heads;
#[path = "cli/leaks.rs"]
mod leaks;
#[path = "cli/limits.rs"]
mod limits;
#[path = "cli/net.rs"]
mod net;
#[path = "cli/place.rs"]
mod place;
#[path = "cli/rollback.rs"]
mod rollback;
#[path = "cli/run.rs"]
mod run;
#[path = "cli/streams.rs"]
mod streams;
#[path = "cli/terminal.rs"]
mod terminal;
#[path = "cli/trust.rs"]
mod trust;
#[path = "cli/user.rs"]
mod user;
#[path = "cli/verbs.rs"]
mod verbs;
