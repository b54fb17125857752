//! Checkpoints in an OCI registry: what is pushed, and what is pulled.
//!
//! An artifact is a manifest, a tree blob, and the packs that have its chunks. `docs/FORMAT.md` has
//! the tables.
//!
//! Always true:
//! * only the process of the command talks to a registry, never the daemon, so a slow registry
//!   stops no request, and logins stay with the caller;
//! * blobs are pushed before the manifest that names them, so a tag names a whole artifact;
//! * a pull has fetched and verified every chunk before the sandbox hears of it;
//! * nothing that a registry sends is used before its digest was compared, and it takes memory in
//!   proportion to the bytes that were sent.

mod cache;
mod list;
mod manifest;
mod packs;
mod pull;
mod push;
mod sending;
mod spool;

pub use cache::Cache;
pub use list::{Listed, list};
pub use manifest::{About, Artifact};
pub use pull::Pull;
pub use push::{Described, Push, PushOutcome};
