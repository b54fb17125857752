//! System calls with safe signatures: the only code that may be `unsafe`.
//!
//! Always true:
//! * A function makes one call, or repeats it where the man page demands that, and decides nothing.
//! * It takes descriptors, never paths that could lead out of a jail. The exceptions take paths
//!   that the system owns (`/proc`, `/dev/fuse`) or that a user typed (a mount point).
//! * Where `nix` has a safe wrapper, callers use that instead.

#![expect(
    unsafe_code,
    reason = "calls that nix does not wrap; each block names the promise it relies on"
)]

pub mod capabilities;
pub mod clock;
pub mod cpu_latency;
pub mod dir;
pub mod failpoint;
pub mod file;
pub mod flags;
pub mod fusectl;
pub mod holders;
pub mod limits;
pub mod lock;
pub mod memory;
pub mod mount;
pub mod mountinfo;
pub mod own_root;
pub mod path;
pub mod proc;
pub mod process;
pub mod socket;
#[cfg(test)]
pub(crate) mod testing;
pub mod view;
pub mod xattr;
