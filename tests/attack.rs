//! The jail of the mount against an attacker: a table of attacks in several configurations, races
//! on real mounts, and the same attacks where they must be seen to succeed.

#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

#[path = "attack/apply.rs"]
mod apply;
#[path = "attack/base.rs"]
mod base;
mod common;
#[path = "attack/place.rs"]
mod place;
#[path = "attack/policies.rs"]
mod policies;
#[path = "attack/races.rs"]
mod races;
#[path = "attack/table.rs"]
mod table;
#[path = "attack/walks.rs"]
mod walks;
