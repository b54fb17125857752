//! Hand-made requests that no kernel sends, with invalid names, node numbers, sizes and lengths.
//!
//! Each gets the errno that a local filesystem or the kernel itself gives in such a case. It
//! changes nothing that it must not, and the server goes on.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking, and opens files as programs do"
)]

#[path = "../common/mod.rs"]
mod common;
mod ends;
mod names;
mod nodes;
mod notifications;
mod numbers;
mod odd;
mod plus;
mod random;
