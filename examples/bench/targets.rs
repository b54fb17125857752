//! The targets of the benchmark.

/// The most that a step may take, as times the bare disk.
pub fn ratio(group: &str, workload: &str, step: &str) -> Option<f64> {
    let target = match (group, workload, step) {
        ("meta", "find" | "find-stat", "fresh") => 4.0,
        ("meta", "find" | "find-stat", "warm") => 1.2,
        ("meta", "git-status", "fresh") => 2.5,
        ("meta", "git-status", "warm") => 1.15,
        ("meta", "ls" | "du", "warm") => 1.0,
        ("meta", "grep", "warm") => 1.15,
        ("meta", "ripgrep", "warm") => 1.1,
        ("create", "tree", "untar") => 4.0,
        ("create", "tree", "cp-r") => 3.0,
        ("create", _, "rm-rf") => 2.0,
        ("build", "git-clone", "clone") => 2.0,
        ("build", "cargo", "build" | "rebuild") => 1.05,
        ("build", "venv", "create") => 1.25,
        ("build", "npm", "install") => 1.3,
        ("data", "read", "sequential-warm" | "random-4k-warm") => 1.1,
        ("data", "write", "sequential" | "random-4k") => 1.5,
        ("data", "sqlite", "bulk") => 1.2,
        ("data", "sqlite", "wal") => 1.1,
        _ => return None,
    };
    Some(target)
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
