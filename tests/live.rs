//! Checkpoint and restore in place, under live processes, through the real binary and a real mount.

#[path = "live/cwd.rs"]
mod cwd;
#[path = "live/exact.rs"]
mod exact;
#[path = "live/files.rs"]
mod files;
#[path = "common/live.rs"]
mod harness;
#[path = "live/maps.rs"]
mod maps;
#[path = "live/whole.rs"]
mod whole;
