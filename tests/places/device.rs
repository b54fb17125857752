//! A base on a device that has another number than before, as after a reboot.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Live, shell};

/// Mounts below a base, taken away at the end, whatever happens.
pub struct Below(PathBuf);

impl Below {
    fn mount(&self, image: &str, options: &str) {
        shell(Path::new("/"), &format!("mount -o {options} {image} {}", self.0.display()));
    }

    fn umount(&self) {
        shell(Path::new("/"), &format!("umount {}", self.0.display()));
    }

    fn dev(&self) -> u64 {
        std::fs::metadata(&self.0).unwrap().dev()
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        let done = Command::new("umount").arg("-l").arg(&self.0).output();
        assert!(done.is_ok_and(|done| done.status.success()) || std::thread::panicking(), "a mount is left");
    }
}

/// A filesystem in a file, made by `make`, mounted as the base of a sandbox; `fill` runs in it.
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
fn a_device_that_is_called_otherwise_after_a_reboot_changes_nothing() {
    let fill =
        "mkdir -p d/e; seq 9000 > part; seq 8000 > d/part; echo a > d/e/a; ln part hard; echo whole > whole";
    let (mut live, below, image) = on_image(EXT4, fill);
    live.sh("echo x >> part; echo x >> d/part; mv d/e f; rm whole");
    live.checkpoint("first");
    live.sh("dd if=/dev/zero of=part bs=1 seek=20000 count=3 conv=notrunc status=none; chmod 600 d/part; mkdir new");
    live.checkpoint("second");
    let (before, first) = (live.snapshot(), below.dev());
    live.umount();
    below.umount();
    // Somebody else has the number meanwhile.
    let other = live.outside().join("other");
    std::fs::create_dir(&other).unwrap();
    shell(live.outside(), "truncate -s 16M image2; mkfs.ext4 -q image2; mount -o loop image2 other");
    let other = Below(other);
    // The first number is taken by the other filesystem, or else by nobody.
    let mut spare = Vec::new();
    loop {
        below.mount(&image, "loop");
        if below.dev() != first {
            break;
        }
        below.umount();
        let at = live.outside().join(format!("spare{}", spare.len()));
        std::fs::create_dir(&at).unwrap();
        shell(live.outside(), &format!("cp image2 {0}.img; mount -o loop {0}.img {0}", at.display()));
        spare.push(Below(at));
    }
    assert_ne!(below.dev(), first);
    live.mount();
    crate::harness::assert_same(&before, &live.snapshot(), "the tree");
    let status = live.jailfs(&["status"]);
    assert!(!status.contains("changed behind"), "{status}");
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

/// Each subvolume has a device number of its own, given out when it is first looked at, and they number their files alike.
#[test]
fn the_subvolumes_of_btrfs_are_told_apart_after_a_reboot() {
    let make = "truncate -s 128M ../image; mkfs.btrfs -q ../image";
    let fill = "for v in a b; do btrfs -q subvolume create $v; echo $v > $v/f; seq 3000 > $v/part; done; echo root > f";
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
    below.umount();
    below.mount(&image, "loop");
    // In the other order, so that each has the number that the other one had.
    let dev = |path: &str| std::fs::metadata(live.base.join(path)).unwrap().dev();
    dev("b");
    assert_eq!((dev("b"), dev("a")), (a, b), "the numbers are exchanged");
    live.mount();
    crate::harness::assert_same(&before, &live.snapshot(), "the tree");
    assert_eq!(live.sh("cat b/f; tail -n1 b/part; tail -n1 a/part; cat f"), "b\n3000\nchanged\nroot\n");
    live.jailfs(&["apply"]);
    live.check_applied(&["a/f", "b/f", "a/part", "b/part"]);
    live.umount();
}
