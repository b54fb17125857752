//! What comes with the names of a directory, around a restore.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::blocked::{Blocked, Opening, waits_in_the_kernel};
use crate::harness::Live;

/// More names than are told one by one.
const MANY: &str = "
import os
for dir in ['many/%d' % n for n in range(70)] + ['late']:
    os.makedirs(dir, exist_ok=True)
    for n in range(300):
        with open(f'{dir}/{n}', 'w') as file: file.write('TEXT')
";

/// Number, size and mode of each file by its name, as a listing and then a look say.
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

/// Restores `start` while a thread takes in what was listed before, which it is kept from until the restore waits for it, or is over.
/// What is seen then in the directory, by somebody who stands in it.
fn restore_while_taking_in(live: &Live, dir: &str) -> BTreeMap<String, (u64, u64, u32)> {
    let (look, listed) = (live.mnt.join("look"), live.mnt.join(dir));
    let blocked = Blocked::new();
    // Somebody stands in the directory, so it is not looked up anew.
    let dir = File::options().read(true).open(&listed).unwrap();
    let inside = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string());
    std::thread::scope(|scope| {
        let opening = Opening(&blocked);
        let reader = scope.spawn(|| {
            // The name came alone, and is asked for. From here on files come to this thread with their names.
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
            assert!(Instant::now() < end, "the restore neither ends nor waits");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(opening);
        assert!(reader.join().unwrap() > 0);
        assert!(restore.wait().unwrap().success());
    });
    seen(&inside)
}

/// The kernel takes a node in that came with a listing from before the restore, when the restore tells it to forget all names at once.
#[test]
fn what_was_listed_before_a_restore_and_is_taken_in_late_is_forgotten() {
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

/// The same of attributes: the file is the same one, and the kernel is told to forget what it does not have yet.
#[test]
fn attributes_that_were_listed_before_a_restore_and_are_taken_in_late_are_forgotten() {
    let mut live =
        Live::new("mkdir look late; echo x > look/at; for n in 1 2 3; do echo x > late/$n; done");
    live.sh("chmod 640 late/*; chmod 1777 late");
    live.checkpoint("start");
    live.sh("chmod 600 late/*");
    live.remount();
    let found = restore_while_taking_in(&live, "late");
    assert_eq!(found.values().map(|(_, _, mode)| mode & 0o7777).collect::<Vec<_>>(), [0o640; 3]);
}

/// A file whose former content somebody holds has another id than its number, and comes with both.
#[test]
fn a_listing_tells_the_number_of_a_file_that_a_restore_brought_back() {
    let live = Live::new(
        "mkdir dir look; echo x > look/at; for n in 1 2 3 4 5; do echo base > dir/$n; done",
    );
    live.sh("for n in 1 2 3; do echo mine > dir/$n; done");
    let dir = live.mnt.join("dir");
    let before = seen(&dir);
    live.checkpoint("start");
    let mut holder = live.puppet("dir");
    holder.run(
        "fds = [os.open(str(n), os.O_RDWR) for n in (1, 2, 4)]; [os.pwrite(fd, b'more', 9) for fd in fds]",
    );
    live.restore("start");
    // The file is looked at, so those of the other directory come with their names.
    seen(&live.mnt.join("look"));
    assert_eq!(seen(&dir), before);
    holder.gives("[os.fstat(fd).st_size for fd in fds]", "[13, 13, 13]");
    holder.gives("{name: os.stat(name).st_ino == int(number) for number, name in (line.split() for line in os.popen('ls -i'))}", "{'1': True, '2': True, '3': True, '4': True, '5': True}");
}
