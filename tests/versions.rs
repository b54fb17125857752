//! The history of single files, without a mount: what is one edit, undo and redo, bounds, full disks, crashes and power cuts.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a failure is what a test is for"
)]

#[path = "versions/bounds.rs"]
mod bounds;
#[path = "versions/edits.rs"]
mod edits;
#[path = "versions/place.rs"]
mod place;
#[path = "versions/safety.rs"]
mod safety;
#[path = "versions/steps.rs"]
mod steps;
