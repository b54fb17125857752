//! OCI image layouts: a directory with blobs that are named by their digests, and an index of tags.
//!
//! * A blob is written beside its final name and renamed. The index comes last. So a cut at any
//!   step leaves the tag with the old image or the new one.
//! * The same layers give the same manifest: no blob has a time or the name of a machine.
//! * A blob that is read counts only if its size and its digest are right. Sizes that a layout
//!   states are limits and never allocate memory. A digest is checked before it becomes a path.
//!
//! The module reads and writes the layout of the OCI image specification 1.1. Its documents are
//! small, so they are structs for `serde_json` here; the crate `oci-spec` has all of the
//! specification and a builder for each struct, of which nothing else would be used.

mod blob;
mod documents;
mod layout;
#[cfg(feature = "zstd")]
mod zstd;

pub use documents::is_tag;
pub use layout::{Image, Layout, open_tar};
