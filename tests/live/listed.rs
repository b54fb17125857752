//! Nodes that come with the names of a directory (READDIRPLUS), around a restore.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::blocked::{Blocked, Opening, waits_in_the_kernel};
use crate::harness::Live;

/// More names than are invalidated one by one.
const MANY: &str = "
import os
for dir in ['many/%d' % n for n in range(70)] + ['late']:
    os.makedirs(dir, exist_ok=True)
    for n in range(300):
        with open(f'{dir}/{n}', 'w') as file: file.write('TEXT')
";

/// The inode number, size and mode of each file by name, as a listing and then a stat report them.
fn seen(dir: &Path) -> BTreeMap<String, (u64, u64, u32)> {
    let look = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        let stat = entry.metadata().unwrap();
        assert_eq!(entry.ino(), stat.ino(), "{entry:?}");
        (entry.file_name().into_string().unwrap(), (stat.ino(), stat.len(), stat.mode()))
    };
    std::fs::read_dir(dir).unwrap().map(look).collect()
}

fn fill(live: &Live, text: &str) {
    live.sh(&format!("python3 -c \"{}\"", MANY.replace("TEXT", text)));
}

/// Restores `start` while a thread processes an older listing: it is blocked until the restore
/// waits for it, or is over. Returns what a process in that directory sees then.
fn restore_while_taking_in(live: &Live, dir: &str) -> BTreeMap<String, (u64, u64, u32)> {
    let (look, listed) = (live.mnt.join("look"), live.mnt.join(dir));
    let blocked = Blocked::new();
    // A process is in the directory, so the directory is not looked up again.
    let dir = File::options().read(true).open(&listed).unwrap();
    let inside = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string());
    std::thread::scope(|scope| {
        let opening = Opening(&blocked);
        let reader = scope.spawn(|| {
            // The name comes without attributes and is looked up. From here on, this thread gets
            // files with attributes.
            seen(&look);
            blocked.list(&dir)
        });
        blocked.wait();
        let mut restore = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let mut restore = restore
            .arg("-C")
            .arg(&live.mnt)
            .args(["restore", "start"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while restore.try_wait().unwrap().is_none() && !waits_in_the_kernel(live.pid()) {
            assert!(Instant::now() < end, "the restore neither ends nor blocks");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(opening);
        assert!(reader.join().unwrap() > 0);
        assert!(restore.wait().unwrap().success());
    });
    seen(&inside)
}

/// The kernel instantiates a node from a listing that is older than the restore, while the restore
/// invalidates all names at once.
#[test]
fn a_name_listed_before_a_restore_and_instantiated_late_is_invalidated() {
    let mut live = Live::with_options("mkdir look; echo x > look/at", &["--volatile"]);
    fill(&live, "start");
    live.checkpoint("start");
    fill(&live, "changed");
    live.remount();
    live.sh("find many -type f -size +100k");
    let found = restore_while_taking_in(&live, "late");
    assert_eq!(found.len(), 300);
    let wanted = live.json(&["show", "start:late"]);
    for (name, (ino, size, _)) in found {
        let node = wanted.iter().find(|node| node["path"] == format!("late/{name}")).unwrap();
        assert_eq!((node["ino"].as_u64(), size), (Some(ino), 5), "{name}");
        assert_eq!(std::fs::read(live.mnt.join("late").join(name)).unwrap(), b"start");
    }
    let [start, changed] =
        ["start", "changed"].map(|text| live.sh(&format!("grep -rlx {text} . | wc -l")));
    assert_eq!((start.trim(), changed.trim()), ("21300", "0"));
}

/// The same for attributes: the file keeps its node, and the kernel must not keep attributes that
/// arrive after the invalidation.
#[test]
fn attributes_listed_before_a_restore_and_cached_late_are_invalidated() {
    let mut live =
        Live::new("mkdir look late; echo x > look/at; for n in 1 2 3; do echo x > late/$n; done");
    live.sh("chmod 640 late/*; chmod 1777 late");
    live.checkpoint("start");
    live.sh("chmod 600 late/*");
    live.remount();
    let found = restore_while_taking_in(&live, "late");
    assert_eq!(found.values().map(|(_, _, mode)| mode & 0o7777).collect::<Vec<_>>(), [0o640; 3]);
}

/// If the former content of a file is still open, the restored file has an id that differs from its
/// inode number. A listing must report both.
#[test]
fn a_listing_reports_the_inode_number_of_a_restored_file() {
    let live = Live::new(
        "mkdir dir look; echo x > look/at; for n in 1 2 3 4 5; do echo base > dir/$n; done",
    );
    live.sh("for n in 1 2 3; do echo mine > dir/$n; done");
    let dir = live.mnt.join("dir");
    let before = seen(&dir);
    live.checkpoint("start");
    let mut holder = live.puppet("dir");
    holder.run(
        "fds = [os.open(str(n), os.O_RDWR) for n in (1, 2, 4)]; \
         [os.pwrite(fd, b'more', 9) for fd in fds]",
    );
    live.restore("start");
    // This thread stats the file, so the files of the other directory come with attributes.
    seen(&live.mnt.join("look"));
    assert_eq!(seen(&dir), before);
    holder.gives("[os.fstat(fd).st_size for fd in fds]", "[13, 13, 13]");
    holder.gives(
        "{name: os.stat(name).st_ino == int(number) for number, name in (line.split() for line in \
         os.popen('ls -i'))}",
        "{'1': True, '2': True, '3': True, '4': True, '5': True}",
    );
}
