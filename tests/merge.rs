//! Merges of heads: through the library, and under programs in real mounts.

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
#[path = "merge/library.rs"]
mod library;
#[path = "merge/mounted.rs"]
mod mounted;
