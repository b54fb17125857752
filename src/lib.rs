//! A jailed, checkpointed overlay filesystem.
//!
//! A directory (the base) is shown as a mount. Changes in the mount are recorded in layers. A
//! restore goes back to a checkpoint exactly and in place, no path leads out of the mount, and
//! `apply` writes the result into the base. `docs/ARCHITECTURE.md` has the map.
//!
//! The manual of the library is in three modules:
//!
//! * [`sandbox`]: open a base with its store, change files, checkpoint, compare, restore and apply.
//! * [`error`]: the errors, and how to react to them.
//! * [`types`]: names, paths and numbers.
//!
//! [`mount()`] shows a sandbox as a FUSE mount. It works without a mount, too.
//!
//! All other modules are internal. Their ranks are in `docs/ARCHITECTURE.md`, and each imports only
//! from lower ranks (tested by `tests/ranks.rs`).

#[cfg(feature = "registry")]
mod artifact;
mod base;
mod cli;
mod control;
mod daemon;
pub mod error;
mod fs;
mod fuse;
mod jail;
mod oci;
#[cfg(feature = "registry")]
#[cfg_attr(
    not(feature = "crash-points"),
    expect(dead_code, unused_imports, reason = "a client has more than push and pull need")
)]
mod registry;
mod run;
pub mod sandbox;
mod store;
mod sys;
mod tar;
mod timeline;
mod tree;
pub mod types;

pub use fuse::{MountOptions, Mounted, Unmounter, Wake, mount};

#[doc(hidden)]
pub use cli::main;

#[cfg(feature = "crash-points")]
#[doc(hidden)]
pub mod internals;
