//! What no kernel sends: hand-made requests with names, numbers, sizes and lengths that make no sense.
//!
//! Each is answered with the errno that a local filesystem or the kernel itself gives in such a case, changes nothing that
//! it must not, and leaves a server that serves.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may stop at whatever it does not expect, and touches files as programs do"
)]

#[path = "../common/mod.rs"]
mod common;
mod names;
mod nodes;
mod numbers;
mod odd;
mod plus;
mod random;
