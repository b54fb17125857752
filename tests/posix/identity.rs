//! Inode numbers and hard links.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use crate::harness::Live;

fn number(path: &Path) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}

/// `(dev, ino)` of a path in the mount.
fn identity(live: &Live, path: &str) -> (u64, u64) {
    let stat = fs::symlink_metadata(live.mnt.join(path)).unwrap();
    (stat.dev(), stat.ino())
}

const BASE: &str =
    "mkdir -p dir/sub; echo base > file; echo in > dir/sub/in; ln -s file link; mkfifo fifo";

#[test]
fn an_inode_number_stays_whatever_happens_to_the_file() {
    let mut live = Live::new(BASE);
    let all = ["file", "dir", "dir/sub", "dir/sub/in", "link", "fifo"];
    let before = all.map(|path| identity(&live, path));
    for (path, (_, ino)) in all.iter().zip(before) {
        assert_eq!(ino, number(&live.base.join(path)), "{path} has the number of the base");
    }
    let same = |live: &Live, at: [&str; 6], what: &str| {
        let numbers = at.map(|path| identity(live, path).1);
        assert_eq!(numbers, before.map(|(_, ino)| ino), "after {what}");
        let device = identity(live, "").0;
        assert!(at.iter().all(|path| identity(live, path).0 == device), "one device after {what}");
    };
    live.sh("echo more >> file; chmod 600 file; touch -d 2001-01-01 dir/sub dir/sub/in; \
        setfattr -n user.a -v b dir");
    same(&live, all, "writes and changes of attributes");
    assert_eq!(identity(&live, "file").0, before[0].0, "the device as well");
    live.checkpoint("one");
    live.sh("mv file moved; mv dir other; mv link fifo other; ln other/sub/in hard; \
        truncate -s 0 moved");
    let moved = ["moved", "other", "other/sub", "other/sub/in", "other/link", "other/fifo"];
    same(&live, moved, "renames and a truncation");
    assert_eq!(identity(&live, "moved").0, before[0].0);
    live.restore("one");
    same(&live, all, "a restore");
    assert_eq!(identity(&live, "file").0, before[0].0);
    live.remount();
    same(&live, all, "a remount");
    live.sh("rm file; echo new > file");
    assert_ne!(identity(&live, "file"), before[0], "another file has another number");
    live.restore("one");
    same(&live, all, "the file came back");
}

/// Pairs of hard links in the base; a third link of each is outside the base.
const PAIRS: &str =
    "mkdir d e; echo pair > a; ln a d/b; ln a e/c; ln -s x l; ln l d/l; mkfifo p; ln p e/p";

fn is_one(live: &Live, names: &[&str]) {
    let first = identity(live, names[0]);
    for name in names {
        let stat = fs::symlink_metadata(live.mnt.join(name)).unwrap();
        assert_eq!((stat.dev(), stat.ino()), first, "{name}");
        assert_eq!(stat.nlink(), names.len() as u64, "{name}");
    }
}

#[test]
fn hard_links_of_the_base_stay_linked() {
    let mut live = Live::new(PAIRS);
    live.sh("echo changed > d/b");
    assert_eq!((live.read("a"), live.read("e/c")), ("changed\n".into(), "changed\n".into()));
    is_one(&live, &["a", "d/b", "e/c"]);
    live.checkpoint("one");
    live.sh("mv a d/z; mv d f; chmod 640 f/z; ln e/c fourth; mv l e/m; mv p q");
    is_one(&live, &["f/z", "f/b", "e/c", "fourth"]);
    is_one(&live, &["e/m", "f/l"]);
    is_one(&live, &["q", "e/p"]);
    let mode = |path: &str| fs::metadata(live.mnt.join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode("f/z"), mode("f/b"), mode("e/c")], [0o640; 3]);
    live.sh("rm f/b; echo again > fourth");
    is_one(&live, &["f/z", "e/c", "fourth"]);
    assert_eq!(live.read("e/c"), "again\n");
    live.remount();
    is_one(&live, &["f/z", "e/c", "fourth"]);
    live.restore("one");
    is_one(&live, &["a", "d/b", "e/c"]);
    is_one(&live, &["l", "d/l"]);
    is_one(&live, &["p", "e/p"]);
    live.sh("echo by a > a");
    assert_eq!(live.read("d/b"), "by a\n");
    live.remount();
    is_one(&live, &["a", "d/b", "e/c"]);
    assert_eq!(live.read("e/c"), "by a\n");
}

/// Also if the first operation on a pair renames the directory above one of the two.
#[test]
fn hard_links_of_the_base_stay_linked_if_their_directories_move_first() {
    let live = Live::new(PAIRS);
    live.sh("mv d moved; mv e moved/inner; echo late > moved/b");
    is_one(&live, &["a", "moved/b", "moved/inner/c"]);
    assert_eq!(live.read("moved/inner/c"), "late\n");
    live.sh("rm a");
    is_one(&live, &["moved/b", "moved/inner/c"]);
}
