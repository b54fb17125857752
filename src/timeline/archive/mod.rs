//! Moves cold layers into the archive of the store, and describes a state as a tree blob.
//!
//! A description has everything that the mount shows, base included, and nothing of this store. An
//! import builds a state from it again (`timeline/import/state.rs`).

#[cfg(test)]
mod build;
mod cold;
mod content;
mod describe;
mod edits;
#[cfg(test)]
mod tests;

pub(in crate::timeline) use content::PieceSink;
pub use describe::Describer;
#[cfg(test)]
use describe::describe;
pub(in crate::timeline) use describe::{base_path, cut, record_digest};
pub use edits::describe_edits;
