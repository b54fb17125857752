//! The targets of the benchmark.

/// The most that a step may take, as times the bare disk.
pub fn ratio(group: &str, workload: &str, step: &str) -> Option<f64> {
    let target = match (group, workload, step) {
        ("meta", "find", "fresh") => 4.0,
        ("meta", "find-stat", "fresh") => 3.5,
        ("meta", "find" | "find-stat", "warm") => 1.2,
        ("meta", "git-status" | "ripgrep", "fresh") => 5.0,
        ("meta", "git-status", "warm") => 1.15,
        ("meta", "ls" | "du", "warm") => 1.0,
        ("meta", "grep", "warm") => 1.15,
        ("meta", "ripgrep", "warm") => 1.1,
        ("create", "tree", "untar" | "cp-r") => 2.5,
        ("create", _, "rm-rf") => 2.0,
        ("build", "git-clone", "clone") => 2.0,
        ("build", "git-checkout", "checkout") => 2.5,
        ("build", "cargo", "build" | "rebuild") => 1.05,
        ("build", "venv", "create") => 1.25,
        ("build", "npm", "install") => 1.3,
        ("data", "read", "sequential-fresh") => 2.5,
        ("data", "read", "sequential-warm" | "random-4k-warm") => 1.1,
        ("data", "write", "sequential" | "random-4k") => 1.5,
        ("data", "append", "append-100") => 6.0,
        ("data", "sqlite", "bulk") => 1.2,
        ("data", "sqlite", "wal") => 2.0,
        ("data", "sqlite", "wal-synced") => 1.3,
        ("data", "sqlite", "rollback-synced") => 1.6,
        _ => return None,
    };
    Some(target)
}

/// The most that a step may take, as times fuse-overlayfs.
pub fn peer_ratio(group: &str, workload: &str, step: &str) -> f64 {
    match (group, workload, step) {
        ("meta", "find-stat" | "git-status" | "ripgrep", "fresh")
        | ("create", "tree", "untar" | "cp-r")
        | ("build", "git-clone" | "git-checkout", _)
        | ("data", "read", "sequential-fresh")
        | ("data", "append", "append-100")
        | ("data", "sqlite", "wal") => 0.5,
        _ => 1.0,
    }
}

/// The most that a step may take in itself: seconds, or bytes.
pub fn most(workload: &str, step: &str, operations: u64) -> Option<f64> {
    match (workload, step) {
        ("first-write", "first-4k") => Some(0.001),
        (_, "checkpoint") => Some(0.005),
        ("changed-10" | "changed-many" | "changed-most", "restore") => {
            Some(0.050 + 10e-6 * operations as f64)
        }
        ("memory", "changed-and-cached") => Some(400.0 + 250.0),
        (_, "memory-per-changed-file") => Some(400.0),
        (_, "memory-per-cached-file") => Some(250.0),
        _ => None,
    }
}
