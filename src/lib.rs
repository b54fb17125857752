//! A jailed, checkpointed overlay filesystem.
//!
//! A directory (the base) is shown as a mount. Changes in the mount are recorded in layers. A
//! restore goes back to a checkpoint exactly and in place, no path leads out of the mount, and
//! `apply` writes the result into the base. `docs/ARCHITECTURE.md` has the map.
//!
//! Modules have ranks, and each imports only from lower ranks (tested by `tests/ranks.rs`):
//! `types` | `error` | `sys` | `tree` | `store`, `base`, `jail` | `fs` | `timeline` | `sandbox` |
//! `fuse`, `control` | `daemon`, `run` | `cli`.
//!
//! A logger should drop the records for which [`fuse::is_expected`] is true: fuser logs an error
//! for each READDIRPLUS.

pub mod base;
pub mod cli;
pub mod control;
pub mod daemon;
pub mod error;
pub mod fs;
pub mod fuse;
pub mod jail;
pub mod run;
pub mod sandbox;
pub mod store;
pub mod sys;
pub mod timeline;
pub mod tree;
pub mod types;
