//! A jailed, checkpointed overlay filesystem.
//!
//! A directory (the base) is shown as a mount; what is written there is recorded in layers; a restore goes back
//! exactly and in place; nothing leads out; `apply` takes the result home. `docs/ARCHITECTURE.md` is the map.
//!
//! Modules stand in ranks, and each imports only from lower ranks (a test holds this):
//! `error`, `types` | `sys` | `store`, `base`, `jail` | `tree` | `fs`, `history` | `sandbox` | `fuse`, `control` |
//! `cli`, `daemon`, `run`.
//!
//! Whoever has a log leaves out what [`fuse::is_expected`] says: fuser writes an error for each listing of a directory.

pub mod base;
pub mod cli;
pub mod control;
pub mod daemon;
pub mod error;
pub mod fs;
pub mod fuse;
pub mod history;
pub mod jail;
pub mod run;
pub mod sandbox;
pub mod store;
pub mod sys;
pub mod tree;
pub mod types;
