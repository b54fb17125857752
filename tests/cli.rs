//! The command line, as a person or a script meets it: the real program, real daemons, real mounts.
//!
//! Each test has directories, a home and so a store of its own, and they run side by side. Every command is given
//! [`PATIENCE`]; a test that hangs in the mount itself is ended by a watchdog, which takes its mounts away first. What
//! docs/CLI.md says is what is tested here.

#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    reason = "a failure is what a test is for, and what is left behind must be said"
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
