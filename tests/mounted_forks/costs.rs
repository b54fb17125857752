//! The costs of forks, measured on the build under test. The figures for users are of a release
//! build.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use crate::{Forked, read};

/// The number of forks.
const FORKS: usize = 100;

/// The bytes on disk of a directory.
fn on_disk(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let sizes = entries.map(|entry| {
        let about = entry.path().symlink_metadata().unwrap();
        let inside = if about.is_dir() { on_disk(&entry.path()) } else { 0 };
        about.blocks() * 512 + inside
    });
    sizes.sum()
}

/// The memory of a process that no other process shares, in bytes.
fn memory(pid: i32) -> u64 {
    let rollup = read(format!("/proc/{pid}/smaps_rollup"));
    let kib = |key: &str| -> u64 {
        let line = rollup.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (kib("Private_Clean:") + kib("Private_Dirty:")) << 10
}

/// 100 forks in the time of one command; mounted, in 20 KiB of store and 1 MiB of memory each. A
/// debug build on a busy machine may take many times as long.
#[test]
fn a_hundred_forks_cost_little() {
    let forked = Forked::new("mkdir dir; for n in $(seq 200); do echo $n > dir/$n; done");
    let live = &forked.live;
    live.sh("for n in $(seq 100); do echo changed > dir/$n; done");
    live.checkpoint("before");
    live.jailfs(&["fork", "first"]);
    let (store, slack) = (on_disk(&live.store), 30.0);
    let start = Instant::now();
    live.jailfs(&["fork", "plain", "-n", &FORKS.to_string()]);
    let unmounted = start.elapsed();
    let stored = on_disk(&live.store).saturating_sub(store) / FORKS as u64;
    let (store, before) = (on_disk(&live.store), memory(live.pid().as_raw()));
    let start = Instant::now();
    live.jailfs(&["fork", "m", forked.dir.to_str().unwrap(), "-n", &FORKS.to_string()]);
    let mounted = start.elapsed();
    let stored_mounted = on_disk(&live.store).saturating_sub(store) / FORKS as u64;
    let each = memory(live.pid().as_raw()).saturating_sub(before) / FORKS as u64;
    eprintln!(
        "{FORKS} forks in {unmounted:?}, {stored} bytes of store each; \
         {FORKS} mounted in {mounted:?}, {stored_mounted} bytes of store and {each} of memory each"
    );
    for n in [1, 50, 100] {
        assert_eq!(read(forked.at(&format!("m-{n}")).join("dir/7")), "changed\n");
    }
    assert!(unmounted.as_secs_f64() < 0.1 * slack, "{unmounted:?}");
    assert!(mounted.as_secs_f64() < 1.5 * slack, "{mounted:?}");
    assert!(stored <= 20 << 10, "{stored} bytes of store for each unmounted fork");
    assert!(stored_mounted <= 20 << 10, "{stored_mounted} bytes of store for each mounted fork");
    assert!(each <= 1 << 20, "{each} bytes of memory for each mounted fork");
}
