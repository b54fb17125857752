//! States as tree blobs: describes a state of this store, and builds a state from a blob.
//!
//! * A description has everything that the mount shows, base included, and nothing of this store.
//! * A built state has no base below it. Its description is the blob that it was built from.

mod build;
mod content;
mod describe;
#[cfg(test)]
mod tests;

pub use build::build;
pub use describe::describe;
