//! A base on a device whose number has changed, as after a reboot.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Live, shell};

/// Mounts below a base, unmounted at the end in any case.
pub struct Below(PathBuf);

impl Below {
    /// The mount at `path`.
    pub fn at(path: &Path) -> Below {
        Below(path.to_owned())
    }

    pub fn mount(&self, image: &str, options: &str) {
        shell(Path::new("/"), &format!("mount -o {options} {image} {}", self.0.display()));
    }

    pub fn umount(&self) {
        // The last process that used it may still be ending.
        let umount = format!(
            "for n in $(seq 100); do umount {0} && exit; sleep 0.1; done; exit 1",
            self.0.display()
        );
        shell(Path::new("/"), &umount);
    }

    fn dev(&self) -> u64 {
        std::fs::metadata(&self.0).unwrap().dev()
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        let done = Command::new("umount").arg("-l").arg(&self.0).output();
        assert!(
            done.is_ok_and(|done| done.status.success()) || std::thread::panicking(),
            "a mount is left"
        );
    }
}

/// A filesystem in a file, made by `make` and mounted as the base of a sandbox; `fill` runs in it.
pub fn on_image(make: &str, fill: &str) -> (Live, Below, String) {
    let script = format!("{make}; mount -o loop ../image $PWD; cd $PWD; {fill}");
    let mut live = Live::new(&script);
    live.applied = true;
    let below = Below(live.base.clone());
    let image = live.outside().join("image").to_str().unwrap().to_owned();
    (live, below, image)
}

pub const EXT4: &str = "truncate -s 16M ../image; mkfs.ext4 -q ../image";

#[test]
fn a_new_device_number_after_a_reboot_changes_nothing() {
    let fill = "mkdir -p d/e; seq 9000 > part; seq 8000 > d/part; echo a > d/e/a; ln part hard; \
        echo whole > whole";
    let (mut live, below, image) = on_image(EXT4, fill);
    live.sh("echo x >> part; echo x >> d/part; mv d/e f; rm whole");
    live.checkpoint("first");
    live.sh("dd if=/dev/zero of=part bs=1 seek=20000 count=3 conv=notrunc status=none; \
        chmod 600 d/part; mkdir new");
    live.checkpoint("second");
    let (before, first) = (live.snapshot(), below.dev());
    live.umount();
    below.umount();
    // Another filesystem has the number meanwhile.
    let other = live.outside().join("other");
    std::fs::create_dir(&other).unwrap();
    shell(
        live.outside(),
        "truncate -s 16M image2; mkfs.ext4 -q image2; mount -o loop image2 other",
    );
    let other = Below(other);
    // The other filesystem takes the first number, or none does.
    let mut spare = Vec::new();
    loop {
        below.mount(&image, "loop");
        if below.dev() != first {
            break;
        }
        below.umount();
        let at = live.outside().join(format!("spare{}", spare.len()));
        std::fs::create_dir(&at).unwrap();
        shell(
            live.outside(),
            &format!("cp image2 {0}.img; mount -o loop {0}.img {0}", at.display()),
        );
        spare.push(Below(at));
    }
    assert_ne!(below.dev(), first);
    live.mount();
    crate::harness::assert_same(&before, &live.snapshot(), "the tree");
    let status = live.jailfs(&["status"]);
    assert!(!status.contains("changed behind the sandbox"), "{status}");
    assert_eq!(live.jailfs(&["diff", "second"]), "", "nothing differs");
    live.restore("first");
    assert_eq!(live.sh("tail -n1 part; tail -n1 d/part; cat f/a"), "x\nx\na\n");
    live.restore("second");
    crate::harness::assert_same(&before, &live.snapshot(), "the tree, restored");
    live.jailfs(&["apply"]);
    live.check_applied(&["part", "d/part", "f/a"]);
    assert!(!live.base.join("whole").exists());
    live.jailfs(&["apply", "--undo"]);
    assert!(live.base.join("whole").exists());
    live.umount();
    drop((spare, other));
}

/// Each btrfs subvolume gets its device number at the first stat, and subvolumes use the same inode
/// numbers.
#[test]
fn the_subvolumes_of_btrfs_are_told_apart_after_a_reboot() {
    let make = "truncate -s 128M ../image; mkfs.btrfs -q ../image";
    let fill = "for v in a b; do btrfs -q subvolume create $v; echo $v > $v/f; seq 3000 > $v/part; \
        done; echo root > f";
    let (mut live, below, image) = on_image(make, fill);
    let id = |path: &str| {
        let stat = std::fs::metadata(live.base.join(path)).unwrap();
        (stat.dev(), stat.ino())
    };
    let ((a, x), (b, y)) = (id("a/f"), id("b/f"));
    assert!(a != b && x == y, "as btrfs does it");
    live.sh("echo changed >> a/f; echo changed >> a/part; cat b/f b/part > /dev/null");
    live.checkpoint("first");
    let before = live.snapshot();
    live.umount();
    // In the other order, so that each may get the number of the other. Other mounts take numbers,
    // too.
    let dev = |path: &str| std::fs::metadata(live.base.join(path)).unwrap().dev();
    for _ in 0..20 {
        below.umount();
        below.mount(&image, "loop");
        if dev("b") == a || dev("a") == b {
            break;
        }
    }
    assert_ne!((dev("a"), dev("b")), (a, b), "the numbers are others");
    live.mount();
    crate::harness::assert_same(&before, &live.snapshot(), "the tree");
    assert_eq!(
        live.sh("cat b/f; tail -n1 b/part; tail -n1 a/part; cat f"),
        "b\n3000\nchanged\nroot\n"
    );
    live.jailfs(&["apply"]);
    live.check_applied(&["a/f", "b/f", "a/part", "b/part"]);
    live.umount();
}

/// A quota of btrfs, which also applies to root.
#[test]
fn a_quota_gives_edquot_and_every_acknowledged_write_stays() {
    let script = "truncate -s 192M ../image; mkfs.btrfs -q ../image; mkdir -m 700 ../store; \
        mount -o loop ../image ../store
        chmod 700 ../store; btrfs quota enable ../store; btrfs qgroup limit 24M 0/5 ../store
        echo base > f";
    let mut live = Live::with_limit(script, &[], std::time::Duration::from_secs(200));
    let store = Below(live.store.clone());
    live.sh("echo kept > kept; for n in 1 2 3; do echo $n > gone$n; done; \
        head -c 4000000 /dev/urandom > first; md5sum first > sum");
    live.checkpoint("before");
    // Writes that were acknowledged and synced are there, refused ones are not.
    let fill = "
import os, errno
done = 0
f = os.open('big', os.O_CREAT | os.O_WRONLY)
try:
    while done < 200:
        os.write(f, os.urandom(1 << 20)); os.fsync(f); done += 1
except OSError as e:
    print(errno.errorcode[e.errno], done)
";
    let said = shell(&live.mnt, &format!("python3 -c \"{fill}\""));
    let (errno, done) = said.trim().split_once(' ').unwrap();
    assert_eq!(errno, "EDQUOT", "{said}");
    assert!(done.parse::<u64>().unwrap() < 24, "{said}");
    assert_eq!(live.sh("cat kept; md5sum -c sum"), "kept\nfirst: OK\n");
    // Operations that free space are not refused.
    live.sh("rm gone1 gone2 gone3; test ! -e gone3");
    // With a larger quota it goes on.
    shell(&live.store, "btrfs qgroup limit 96M 0/5 .");
    live.sh(&format!("test $(stat -c %s big) -ge {}; rm big", done.parse::<u64>().unwrap() << 20));
    live.restore("before");
    live.sh("head -c 3000000 /dev/urandom > again; sync again; md5sum -c sum");
    live.checkpoint("after");
    live.umount();
    crate::states::check(&live.store, "after the quota was met");
    drop(store);
}

/// The image of the filesystem is on a smaller one, which grows after the first bytes were lost.
/// The kernel reports the loss once to each open file, and to a file that is opened later only if
/// no other process got the report.
#[test]
fn an_apply_fails_if_the_host_lost_its_writes_even_if_another_process_got_the_report() {
    let make =
        "mkdir ../small; mount -t tmpfs -o size=12M none ../small; truncate -s 100M ../small/image
        mkfs.ext4 -q -O ^has_journal -E nodiscard ../small/image; ln -s small/image ../image";
    let (mut live, below, _) = on_image(make, "echo x > x; sync -f .");
    let small = Below(live.outside().join("small"));
    live.sh("head -c 40000000 /dev/urandom > a; for n in $(seq 1500); do echo $n > z$n; done");
    shell(live.outside(), "touch go");
    let look =
        "while test -e go; do sync -f base 2> err || mount -o remount,size=200M none small; done";
    let mut other =
        Command::new("sh").arg("-c").arg(look).current_dir(live.outside()).spawn().unwrap();
    let output = live.try_jailfs(&["apply"]);
    shell(live.outside(), "rm go");
    other.wait().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{message}");
    assert!(
        message.contains("Input/output error") || message.contains("No space left"),
        "{message}"
    );
    live.umount();
    drop((below, small));
}
