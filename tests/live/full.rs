//! A store on a disk that is completely full: programs get ENOSPC, every acknowledged operation
//! stays, and operations that free space succeed.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::harness::{Live, Puppet, assert_same};

/// The small disk of a store; unmounted after the mount.
struct Disk {
    at: PathBuf,
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A disk that is still in use is detached.
        let done = Command::new("umount").arg("-l").arg(&self.at).status();
        assert!(
            done.is_ok_and(|status| status.success()) || std::thread::panicking(),
            "umount {}",
            self.at.display()
        );
    }
}

/// A sandbox whose store is on a disk of this size.
struct Small {
    live: Live,
    _disk: Disk,
}

fn small(base: &str) -> Small {
    let disk = "mkdir -m 700 ../store; mount -t tmpfs -o size=24m,mode=700 small ../store";
    let live = Live::with_limit(&format!("{base}\n{disk}"), &[], Duration::from_secs(200));
    let _disk = Disk { at: live.store.clone() };
    Small { live, _disk }
}

const FILL: &str = "
import errno
P = b''.join(bytes([k]) * 1000 for k in range(251)) * 2
def pattern(path, at, n):
    at = (at + 1000 * len(path)) % 251_000
    return P[at:at + n]
def fill(path, step=200_000):
    f = open(path, 'ab', buffering=0)
    done = f.tell()
    try:
        while True:
            done += f.write(pattern(path, done, step))
    except OSError as e:
        assert e.errno == errno.ENOSPC, e
    f.close()
    return done
def holds(path, done, step=200_000):
    f = open(path, 'rb')
    for at in range(0, done, step):
        part = f.read(min(step, done - at))
        assert part == pattern(path, at, min(step, done - at)), (path, at)
    return f.read(1) == b''
def swarm(dir):
    os.mkdir(dir)
    try:
        for n in range(1_000_000):
            open('%s/%d' % (dir, n), 'x').close()
    except OSError as e:
        assert e.errno == errno.ENOSPC, e
    return n
";

fn filler(live: &Live) -> Puppet {
    let mut puppet = live.puppet("");
    puppet.run(FILL);
    puppet
}

#[test]
fn a_full_disk_loses_nothing_and_deleting_frees_space() {
    let mut small = small("seq 5000 > base; echo gone > gone");
    let live = &mut small.live;
    live.sh("seq 3000 > kept; rm gone; mkdir d; echo x > d/x");
    live.checkpoint("before");
    let before = live.snapshot();
    let mut puppet = filler(live);
    puppet.run("done = fill('large')");
    puppet.gives("done > 10_000_000 and holds('large', done)", "True");
    puppet.gives("open('kept').read().count('\\n')", "3000");
    puppet.fail("open('kept', 'ab', buffering=0).write(b'x' * 1_000_000)");
    puppet.run("os.unlink('large')");
    // At once, and as much as before.
    puppet.run("done = fill('again')");
    puppet.gives("done > 10_000_000 and holds('again', done)", "True");
    puppet.run("os.truncate('again', 100_000); more = fill('more')");
    puppet.gives("more > 8_000_000 and holds('more', more) and holds('again', 100_000)", "True");
    puppet.end();
    // A restore on the full disk, and an undo of it.
    live.restore("before");
    assert_same(&before, &live.snapshot(), "the checkpoint");
    let said = live.json(&["op", "log"]);
    let op = said.iter().find(|op| op["verb"] == "seal").unwrap()["op"].to_string();
    live.jailfs(&["op", "restore", &op]);
    assert_eq!(std::fs::metadata(live.mnt.join("again")).unwrap().len(), 100_000);
    live.restore("before");
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
    live.jailfs(&["gc", "--operations", "0"]);
    let mut puppet = filler(live);
    puppet.gives("fill('after gc') > 10_000_000", "True");
    puppet.end();
    // A kill and an unmount on the full disk.
    let full = live.snapshot();
    live.kill_and_mount();
    assert_same(&full, &live.snapshot(), "the store of a killed daemon on a full disk");
    live.remount();
    assert_same(&full, &live.snapshot(), "the store after an unmount on a full disk");
}

#[test]
fn many_small_files_that_fill_the_disk_can_be_removed() {
    let mut small = small("echo base > base");
    let live = &mut small.live;
    live.checkpoint("before");
    let before = live.snapshot();
    let mut puppet = filler(live);
    puppet.run("done = fill('large'); n = swarm('swarm')");
    puppet.gives("n == len(os.listdir('swarm'))", "True");
    puppet.end();
    live.sh("rm -r swarm large; echo there is room > again");
    live.restore("before");
    assert_same(&before, &live.snapshot(), "the checkpoint");
    live.sh("head -c 8000000 /dev/urandom > more");
    live.kill_and_mount();
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
}
