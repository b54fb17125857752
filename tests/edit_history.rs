//! The edit history, without a mount: the limits of one edit, undo and redo, bounds, full disks,
//! crashes and power cuts.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

#[path = "edit_history/bounds.rs"]
mod bounds;
#[path = "edit_history/bytes.rs"]
mod bytes;
#[path = "edit_history/check.rs"]
mod check;
#[path = "edit_history/edits.rs"]
mod edits;
#[path = "edit_history/place.rs"]
mod place;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "model/rng.rs"]
mod rng;
#[path = "edit_history/safety.rs"]
mod safety;
#[path = "edit_history/steps.rs"]
mod steps;
