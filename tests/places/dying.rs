//! A store whose filesystem shuts down and comes back during the same boot.
//!
//! Synced data is there afterwards. Other data may be lost, but is never shown as something else.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::device::Below;
use crate::harness::{Live, shell};

const LIMIT: Duration = Duration::from_secs(200);

/// Shuts a filesystem down without writing its cached data (FS_IOC_SHUTDOWN with NOLOGFLUSH,
/// linux/fs.h).
const SHUTDOWN: &str = "import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587d, struct.pack('I', 2))";

/// Appends blocks to a file, each with a letter of its own, and syncs only the first one.
const APPENDS: &str = "import os
f = os.open('f', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
os.write(f, b'a' * 3600); os.fsync(f)
for letter in b'bcd': os.write(f, bytes([letter]) * 3600)";

/// Prints the result of an fsync(2) in the mount.
const FSYNC: &str = "import errno, os
f = os.open('f', os.O_WRONLY)
try: os.fsync(f); print('synced')
except OSError as e: print(errno.errorcode[e.errno])";

fn python(dir: &Path, script: &str, argument: &str) -> String {
    shell(dir, &format!("python3 -c \"{script}\" {argument}"))
}

/// A sandbox whose store is on a filesystem of its own.
fn with_store_on(make: &str) -> (Live, Below) {
    let script = format!(
        "{make} ../image; mkdir -m 700 ../store; mount -o loop ../image ../store; \
         chmod 700 ../store; echo base > b"
    );
    let live = Live::with_limit(&script, &[], LIMIT);
    let below = Below::at(&live.store);
    (live, below)
}

/// The letters of `f` in order. No byte may be there that was not written to that place.
fn letters(live: &Live) -> String {
    let bytes = std::fs::read(live.mnt.join("f")).unwrap();
    assert_eq!(bytes.len() % 3600, 0, "whole appends");
    let letter = |block: &[u8]| {
        assert!(block.iter().all(|byte| *byte == block[0]), "a block is whole");
        char::from(block[0])
    };
    bytes.chunks(3600).map(letter).collect()
}

/// Where the daemon notes a failed sync, besides the store.
fn note_prefix(live: &Live) -> String {
    let stat = std::fs::metadata(&live.store).unwrap();
    format!("jailfs-failed-sync-{:x}-{:x}-", stat.dev(), stat.ino())
}

fn note_of(prefix: &str) -> PathBuf {
    let of_store = |path: &PathBuf| path.to_str().is_some_and(|path| path.contains(prefix));
    let notes = std::fs::read_dir("/dev/shm").unwrap().map(|note| note.unwrap().path());
    notes.into_iter().find(of_store).unwrap()
}

fn shows_what_was_synced(make: &str, reaches_disk: &str) {
    let (mut live, store) = with_store_on(make);
    python(&live.mnt, APPENDS, "");
    // Writeback may do the same at any time.
    shell(&live.store, &format!("for f in layers/*/{reaches_disk}; do sync $f; done"));
    let prefix = note_prefix(&live);
    python(Path::new("/"), SHUTDOWN, live.store.to_str().unwrap());
    assert_eq!(python(&live.mnt, FSYNC, "").trim(), "EIO", "a sync reports that the disk is gone");
    live.umount_or_kill();
    // Another mount is enough to start a new session.
    std::fs::remove_file(note_of(&prefix)).unwrap();
    let image = live.outside().join("image");
    store.umount();
    store.mount(image.to_str().unwrap(), "loop");
    live.mount();
    let shown = letters(&live);
    assert!("abcd".starts_with(&shown) && shown.starts_with('a'), "{make}: {shown}");
    crate::states::check(&live.store, "after its filesystem came back");
    // The mount goes on, also after the lost blocks.
    live.sh("python3 -c \"open('f', 'ab').write(b'z' * 3600)\"; sync f");
    live.checkpoint("after");
    live.remount();
    assert_eq!(letters(&live), format!("{shown}z"));
    live.umount();
    crate::states::check(&live.store, "sealed");
    drop(store);
}

#[test]
fn a_store_on_ext4_that_shut_down_shows_what_was_synced() {
    for file in ["journal", "pool"] {
        shows_what_was_synced("truncate -s 64M ../image; mkfs.ext4 -q", file);
    }
}

#[test]
fn a_store_on_xfs_that_shut_down_shows_what_was_synced() {
    for file in ["journal", "pool"] {
        shows_what_was_synced("truncate -s 400M ../image; mkfs.xfs -q", file);
    }
}

/// The disk below the filesystem is full for a while, like a thin volume: writes fail, and later
/// they succeed.
#[test]
fn a_store_whose_disk_failed_for_a_while_shows_what_was_synced() {
    for (make, filesystem) in [("mkfs.ext4 -q", "ext4"), ("mkfs.btrfs -q", "btrfs")] {
        let script = format!(
            "mkdir -m 700 ../thin ../store; mount -t tmpfs -o size=160M tmpfs ../thin
             truncate -s 400M ../thin/image; {make} ../thin/image
             mount -o loop ../thin/image ../store; chmod 700 ../store; echo base > b"
        );
        let mut live = Live::with_limit(&script, &[], LIMIT);
        let thin = Below::at(&live.outside().join("thin"));
        let store = Below::at(&live.store);
        python(&live.mnt, APPENDS, "");
        // No more writes reach the disk.
        live.sh("sync f");
        shell(
            &live.store,
            "sync -f .; head -c 200M /dev/zero > ../thin/filler 2>/dev/null || true",
        );
        live.sh(
            "head -c 30M /dev/urandom > big || true; python3 -c \"open('f', 'ab').write(b'e' * \
             3600)\" || true",
        );
        let answer = python(&live.mnt, FSYNC, "");
        assert_ne!(answer.trim(), "synced", "{filesystem}: the disk accepted no write");
        live.umount_or_kill();
        store.umount();
        shell(live.outside(), "rm thin/filler; mount -o remount,size=600M thin");
        store.mount(live.outside().join("thin/image").to_str().unwrap(), "loop");
        live.mount();
        let shown = letters(&live);
        assert!("abcde".starts_with(&shown) && shown.starts_with("abcd"), "{filesystem}: {shown}");
        crate::states::check(&live.store, "after its disk came back");
        live.checkpoint("after");
        live.umount();
        drop((store, thin));
    }
}
