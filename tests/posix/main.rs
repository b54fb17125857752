//! Compares the view of programs. Each test does the same in a plain directory of the host and in a
//! mount, and compares the outcomes, down to the errno. Where the host gives no reference (inode
//! numbers across a restore, for example), the test asserts the promise.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::print_stderr,
    unsafe_code,
    reason = "a test fails by panicking, and opens files as programs do"
)]

mod acls;
mod both;
mod coherent;
#[path = "../common/mod.rs"]
mod common;
mod dirs;
mod errnos;
#[path = "../common/live.rs"]
#[expect(dead_code, reason = "each test file uses a part of this")]
mod harness;
mod identity;
mod owners;
mod rename;
mod room;
mod space;
mod times;
mod tmpfile;
mod watch;
