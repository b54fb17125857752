//! The history of single files, without a mount: what is one edit, undo and redo, bounds, full disks, crashes and power cuts.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a failure is what a test is for"
)]

#[path = "versions/bounds.rs"]
mod bounds;
#[path = "versions/bytes.rs"]
mod bytes;
#[path = "versions/check.rs"]
mod check;
#[path = "versions/edits.rs"]
mod edits;
#[path = "versions/place.rs"]
mod place;
#[expect(dead_code, reason = "other tests need more of it")]
#[path = "model/rng.rs"]
mod rng;
#[path = "versions/safety.rs"]
mod safety;
#[path = "versions/steps.rs"]
mod steps;
