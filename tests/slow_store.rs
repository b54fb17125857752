//! A disk of the store that takes a write late delays no request that needs no disk.

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

/// Whether a thread of a process waits for a disk.
fn waits_for_disk(pid: nix::unistd::Pid) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" D"))
    })
}

const READS: &str = "
for n in range(300):
    assert not os.path.lexists(f'absent{n}')
    assert os.stat(f'd/{n}').st_size == 8
    assert open(f'd/{n}').read() == 'content\\n'
    assert os.readlink(f'd/link{n}') == str(n)
assert len(os.listdir('d')) == 600
assert os.stat('new').st_size == 5
";

#[test]
fn a_write_to_fresh_addresses_that_the_disk_takes_late_delays_no_reader() {
    let script = "mkdir -m 700 ../store; truncate -s 64M ../image; mkfs.ext4 -q ../image; \
        mount -o loop ../image ../store; chmod 700 ../store; mkdir d; \
        for n in $(seq 0 299); do echo content > d/$n; ln -s $n d/link$n; done";
    let live = Live::with_limit(script, &[], Duration::from_secs(100));
    let _disk = Disk(live.store.clone());
    let (mut writer, mut reader) = (live.puppet(""), live.puppet(""));
    writer.run("f = os.open('new', os.O_RDWR | os.O_CREAT); os.write(f, b'first')");
    let frozen = Frozen::freeze(&live.store);
    writer.begin("assert os.write(f, b'x' * 300_000) == 300_000");
    while !waits_for_disk(live.pid()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    reader.run(READS);
    drop(frozen);
    writer.answer().unwrap();
    writer.gives("os.pread(f, 400_000, 0) == b'first' + b'x' * 300_000", "True");
    writer.end();
    reader.end();
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
}
