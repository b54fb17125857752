//! Checkpoints and restores in place, under live processes, through the real binary and a real
//! mount. `JAILFS_THREADS=N` has N threads serve it.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[path = "live/blocked.rs"]
mod blocked;
#[path = "live/cwd.rs"]
mod cwd;
#[path = "live/exact.rs"]
mod exact;
#[path = "live/files.rs"]
mod files;
#[path = "live/full.rs"]
mod full;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;
#[path = "live/listed.rs"]
mod listed;
#[path = "live/maps.rs"]
mod maps;
#[path = "live/rename_barrier.rs"]
mod rename_barrier;
#[path = "live/shared.rs"]
mod shared;
#[path = "live/unasked.rs"]
mod unasked;
#[path = "live/upkeep.rs"]
mod upkeep;
#[path = "live/wake.rs"]
mod wake;
#[path = "live/whole.rs"]
mod whole;
#[path = "live/window.rs"]
mod window;
