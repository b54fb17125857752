//! While the disk of a store delays changes, programs still look up and read other files.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use harness::{Live, shell};

/// The disk of a store; unmounted after the mount.
struct Disk(PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.0).output());
    }
}

/// A disk on which every write waits. Thawed at the end in any case.
struct Frozen<'a>(&'a Path);

impl Frozen<'_> {
    fn freeze(disk: &Path) -> Frozen<'_> {
        shell(disk, "fsfreeze -f .");
        Frozen(disk)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        drop(Command::new("fsfreeze").arg("-u").arg(self.0).output());
    }
}

/// Of the threads of a daemon that answer requests: how many there are, and how many wait for a
/// disk.
fn answering(pid: nix::unistd::Pid) -> (usize, usize) {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let stats = threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok())
        .filter(|stat| ["session", "serve", "worker"].iter().any(|name| stat.contains(name)));
    let is_in_wait =
        stats.map(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" D")));
    is_in_wait.fold((0, 0), |(all, waiting), waits| (all + 1, waiting + usize::from(waits)))
}

/// Waits until a thread that answers requests waits for a disk, and there are at least so many.
fn wait_for_disk(live: &Live, threads: usize) {
    let is_there = || {
        let (all, waiting) = answering(live.pid());
        all >= threads && waiting > 0
    };
    while !is_there() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads that the kernel cannot answer itself, in a directory that no program has looked at.
const READS: &str = "
for n in range(40):
    assert not os.path.lexists(f'{d}/absent{n}')
    assert os.stat(f'{d}/{n}').st_size == 8
    assert open(f'{d}/{n}').read() == 'content\\n'
    assert os.readlink(f'{d}/link{n}') == str(n)
assert len(os.listdir(d)) == 80
";

/// Changes that a disk takes late, each with the result that a program sees after it.
const CHANGES: &[(&str, &str)] = &[
    ("assert os.write(f, b'x' * 300_000) == 300_000", "os.stat('w/f').st_size == 300_005"),
    ("assert os.pwrite(f, b'FIRST', 0) == 5", "os.pread(f, 6, 0) == b'FIRSTx'"),
    ("os.fsync(f)", "os.stat('w/f').st_size == 300_005"),
    ("os.mkdir('w/new')", "os.path.isdir('w/new')"),
    ("os.symlink('to', 'w/link')", "os.readlink('w/link') == 'to'"),
    ("os.link('w/f', 'w/other')", "os.stat('w/f').st_nlink == 2"),
    ("os.chmod('w/base', 0o600)", "os.stat('w/base').st_mode == 0o100600"),
    ("os.setxattr('w/base', 'user.a', b'1')", "os.getxattr('w/base', 'user.a') == b'1'"),
    ("os.truncate('w/base', 3)", "os.stat('w/base').st_size == 3"),
    ("os.rename('w/base', 'w/moved')", "os.stat('w/moved').st_size == 3"),
    ("os.unlink('w/moved')", "not os.path.lexists('w/moved')"),
    ("os.rename('w/new', 'into/new')", "os.path.isdir('into/new')"),
    ("os.rmdir('into/new')", "not os.path.lexists('into/new')"),
    ("os.chmod('dir', 0o700)", "os.stat('dir').st_mode == 0o40700"),
    ("os.posix_fallocate(f, 0, 2_000_000)", "os.stat('w/f').st_size == 2_000_000"),
    ("os.ftruncate(gone, 10)", "os.fstat(gone).st_size == 10"),
    ("os.close(gone)", "len(os.listdir('w')) == 3"),
];

/// A mount whose store has a disk of its own. The base has the directories `d0` to `d16` for
/// [`READS`], and `w`, `dir` and `into` for changes.
fn live() -> (Live, Disk) {
    let script = "mkdir -m 700 ../store; truncate -s 64M ../image; mkfs.ext4 -q ../image; \
        mount -o loop ../image ../store; chmod 700 ../store; mkdir w dir into; echo base > w/base; \
        for d in $(seq 0 16); do mkdir d$d; for n in $(seq 0 39); do \
            echo content > d$d/$n; ln -s $n d$d/link$n; done; done";
    let live = Live::with_limit(script, &[], Duration::from_secs(100));
    let disk = Disk(live.store.clone());
    (live, disk)
}

#[test]
fn a_change_that_the_disk_takes_late_delays_no_reader() {
    let (live, _disk) = live();
    let (mut writer, mut reader) = (live.puppet(""), live.puppet(""));
    writer.run("f = os.open('w/f', os.O_RDWR | os.O_CREAT); os.write(f, b'first')");
    // `kept` keeps the scratch file of the removed files open, so the last close of `gone` must
    // punch blocks of it.
    for file in ["gone", "kept"] {
        writer.run(&format!("{file} = os.open('w/x', os.O_RDWR | os.O_CREAT); os.unlink('w/x')"));
    }
    writer.run("os.write(gone, b'removed' * 10_000)");
    for (at, (change, result)) in CHANGES.iter().enumerate() {
        // The next write to these bytes goes in place.
        writer.run("os.pwrite(f, b'a', 0)");
        let frozen = Frozen::freeze(&live.store);
        writer.begin(change);
        wait_for_disk(&live, 1);
        reader.run(&format!("d = 'd{at}'{READS}"));
        drop(frozen);
        writer.answer().unwrap();
        writer.gives(result, "True");
    }
    writer.end();
    reader.end();
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
}

/// Whether a thread of a daemon waits for a disk. Threads that answer commands have other names
/// than those that [`answering`] counts.
fn some_thread_waits_for_disk(pid: nix::unistd::Pid) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let mut stats =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
    stats.any(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" D")))
}

#[test]
fn a_checkpoint_or_a_restore_that_the_disk_takes_late_delays_no_reader() {
    let (live, _disk) = live();
    let mut reader = live.puppet("");
    live.checkpoint("c");
    for (at, words) in [["checkpoint", "d"], ["restore", "c"], ["restore", "d"]].iter().enumerate()
    {
        live.sh(&format!("echo changed{at} > w/base; echo new > w/new{at}; chmod 70{at} dir"));
        let frozen = Frozen::freeze(&live.store);
        std::thread::scope(|scope| {
            let command = scope.spawn(|| live.try_jailfs(words));
            while !some_thread_waits_for_disk(live.pid()) {
                std::thread::sleep(Duration::from_millis(5));
            }
            reader.run(&format!("d = 'd{at}'{READS}"));
            assert!(!command.is_finished(), "{words:?}");
            drop(frozen);
            let output = command.join().unwrap();
            assert!(output.status.success(), "{words:?}: {}", harness::text(&output));
        });
    }
    assert_eq!(live.read("w/base"), "changed0\n");
    assert!(live.exists("w/new0") && !live.exists("w/new1"));
    reader.end();
}

/// Reads of files that the kernel knows and of names that are missing.
const KNOWN_READS: &str = "
for n in range(40):
    assert not os.path.lexists(f'd0/gone{n}')
    assert open(f'd0/{n}').read() == 'content\\n'
    assert 'x' not in os.listdir('d0')
";

/// The first undo records the version before it in the log of the edit history. So the second one
/// writes the record of the switch first.
#[test]
fn an_undo_that_the_disk_takes_late_delays_no_read_of_a_known_file() {
    let (live, _disk) = live();
    let mut reader = live.puppet("");
    live.sh("for n in 1 2 3; do echo $n > w/file; done");
    assert!(live.try_jailfs(&["undo", "w/file"]).status.success());
    reader.run(&format!("d = 'd0'{READS}"));
    let frozen = Frozen::freeze(&live.store);
    std::thread::scope(|scope| {
        let undo = scope.spawn(|| live.try_jailfs(&["undo", "w/file"]));
        while !some_thread_waits_for_disk(live.pid()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        reader.run(KNOWN_READS);
        assert!(!undo.is_finished());
        drop(frozen);
        let output = undo.join().unwrap();
        assert!(output.status.success(), "{}", harness::text(&output));
    });
    assert_eq!(live.read("w/file"), "1\n");
    reader.end();
}

/// It reserves inode numbers, which takes a sync.
#[test]
fn the_first_new_node_after_a_mount_delays_no_reader() {
    let (live, _disk) = live();
    let (mut writer, mut reader) = (live.puppet(""), live.puppet(""));
    writer.run("os.chmod('w', 0o700)");
    let frozen = Frozen::freeze(&live.store);
    writer.begin("os.mkdir('w/new')");
    wait_for_disk(&live, 1);
    reader.run(&format!("d = 'd0'{READS}"));
    drop(frozen);
    writer.answer().unwrap();
    writer.end();
    reader.end();
}

#[test]
fn ten_changes_at_once_that_the_disk_takes_late_delay_no_reader() {
    let (live, _disk) = live();
    let mut writers: Vec<_> = (0..10).map(|_| live.puppet("")).collect();
    let mut reader = live.puppet("");
    for (at, writer) in writers.iter_mut().enumerate() {
        writer.run(&format!("os.mkdir('w/{at}')"));
    }
    let frozen = Frozen::freeze(&live.store);
    for (at, writer) in writers.iter_mut().enumerate() {
        writer.begin(&format!("os.mkdir('w/{at}/new')"));
    }
    // All ten, and one more.
    wait_for_disk(&live, 11);
    reader.run(&format!("d = 'd0'{READS}"));
    drop(frozen);
    for (at, writer) in writers.iter_mut().enumerate() {
        writer.answer().unwrap();
        writer.gives(&format!("os.path.isdir('w/{at}/new')"), "True");
    }
    writers.into_iter().for_each(harness::Puppet::end);
    reader.end();
}
