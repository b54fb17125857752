//! Times: which operation changes which, to the nanosecond, and before 1970.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use jailfs::internals::fuse::MountOptions;
use jailfs::types::{Name, NodeId};
use nix::fcntl::{AT_FDCWD, FallocateFlags, fallocate};
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use crate::both::{Side, as_user, same_also_with_writeback};
use crate::common::Bench;

/// `(mtime, ctime)` of some nodes.
fn times(side: &Side, names: &[&str]) -> Vec<Option<[(i64, i64); 2]>> {
    let of = |name: &&str| {
        let stat = fs::symlink_metadata(side.at(name)).ok()?;
        Some([(stat.mtime(), stat.mtime_nsec()), (stat.ctime(), stat.ctime_nsec())])
    };
    names.iter().map(of).collect()
}

const WATCHED: [&str; 8] = [".", "file", "dir", "dir/in", "link", "other", "new", "dir/moved"];

/// Does something, and records whose mtime and ctime it changed.
fn noted(side: &mut Side, what: &str, act: impl FnOnce(&Side)) {
    let before = times(side, &WATCHED);
    // Longer than a tick of the clock that filesystems use.
    std::thread::sleep(Duration::from_millis(12));
    act(side);
    let after = times(side, &WATCHED);
    let changed: Vec<_> = WATCHED
        .iter()
        .zip(before.iter().zip(&after))
        .filter_map(|(name, (before, after))| match (before, after) {
            (Some(before), Some(after)) if before != after => Some(format!(
                "{name}: mtime {} ctime {}",
                before[0] != after[0],
                before[1] != after[1]
            )),
            (Some(_), None) => Some(format!("{name}: gone")),
            (None, Some(_)) => Some(format!("{name}: new")),
            _ => None,
        })
        .collect();
    side.note(what, changed);
}

fn base(dir: &Path) {
    fs::write(dir.join("file"), "0123456789").unwrap();
    fs::create_dir(dir.join("dir")).unwrap();
    fs::write(dir.join("dir/in"), "in").unwrap();
    symlink("file", dir.join("link")).unwrap();
    fs::write(dir.join("other"), "other").unwrap();
}

fn open(side: &Side, name: &str) -> File {
    OpenOptions::new().read(true).write(true).open(side.at(name)).unwrap()
}

#[test]
fn each_operation_changes_the_same_times_as_on_the_host() {
    same_also_with_writeback(base, |side| {
        noted(side, "read", |side| drop(fs::read(side.at("file")).unwrap()));
        noted(side, "list", |side| assert!(fs::read_dir(side.at("dir")).unwrap().count() > 0));
        noted(side, "write", |side| open(side, "file").write_all(b"x").unwrap());
        noted(side, "write nothing", |side| assert_eq!(open(side, "file").write(b"").unwrap(), 0));
        noted(side, "cut", |side| open(side, "file").set_len(5).unwrap());
        noted(side, "cut to the same size", |side| open(side, "file").set_len(5).unwrap());
        noted(side, "open with O_TRUNC", |side| drop(File::create(side.at("file")).unwrap()));
        noted(side, "and again, empty", |side| drop(File::create(side.at("file")).unwrap()));
        noted(side, "make room", |side| {
            fallocate(open(side, "file"), FallocateFlags::empty(), 0, 100).unwrap();
        });
        noted(side, "punch", |side| {
            fallocate(open(side, "file"), FallocateFlags::from_bits_retain(3), 0, 10).unwrap();
        });
        noted(side, "chmod", |side| {
            fs::set_permissions(side.at("file"), PermissionsExt::from_mode(0o600)).unwrap();
        });
        noted(side, "chmod to the same", |side| {
            fs::set_permissions(side.at("file"), PermissionsExt::from_mode(0o600)).unwrap();
        });
        noted(side, "chown", |side| {
            std::os::unix::fs::chown(side.at("dir"), Some(7), None).unwrap()
        });
        noted(side, "set an attribute", |side| {
            jailfs::internals::sys::xattr::set(open(side, "file"), b"user.a", b"v").unwrap();
        });
        noted(side, "remove it", |side| {
            jailfs::internals::sys::xattr::remove(open(side, "file"), b"user.a").unwrap()
        });
        noted(side, "set mtime", |side| {
            open(side, "file")
                .set_modified(std::time::UNIX_EPOCH + Duration::from_secs(5))
                .unwrap();
        });
        noted(side, "link", |side| fs::hard_link(side.at("other"), side.at("new")).unwrap());
        noted(side, "unlink", |side| fs::remove_file(side.at("new")).unwrap());
        noted(side, "rename", |side| fs::rename(side.at("other"), side.at("new")).unwrap());
        noted(side, "rename over", |side| fs::rename(side.at("new"), side.at("file")).unwrap());
        noted(side, "rename elsewhere", |side| {
            fs::rename(side.at("file"), side.at("dir/moved")).unwrap()
        });
        noted(side, "make", |side| drop(File::create_new(side.at("new")).unwrap()));
        noted(side, "make a directory", |side| fs::create_dir(side.at("other")).unwrap());
        noted(side, "rename a directory", |side| {
            fs::rename(side.at("other"), side.at("dir/other")).unwrap()
        });
        noted(side, "remove it", |side| fs::remove_dir(side.at("dir/other")).unwrap());
        noted(side, "remove a link", |side| fs::remove_file(side.at("link")).unwrap());
        noted(side, "fail to make", |side| drop(fs::create_dir(side.at("dir")).unwrap_err()));
        noted(side, "fail to remove", |side| drop(fs::remove_dir(side.at("dir")).unwrap_err()));
        noted(side, "rename to itself", |side| fs::rename(side.at("new"), side.at("new")).unwrap());
    });
}

/// The kernel sends no time for a write within the same tick of its clock as a truncation.
#[test]
fn with_a_writeback_cache_the_time_that_programs_saw_stays() {
    let options = MountOptions { writeback: true, ..MountOptions::default() };
    let bench = Bench::with(&options, |_| ());
    for round in 0..50 {
        let mut file = File::create(bench.at("f")).unwrap();
        file.write_all(&[7; 5000]).unwrap();
        let about = file.metadata().unwrap();
        let seen = (about.mtime(), about.mtime_nsec());
        file.sync_all().unwrap();
        let name = Name::new(b"f").unwrap();
        let kept = bench.fs.lookup(NodeId::ROOT, &name).unwrap().attr.meta.mtime;
        assert_eq!((kept.secs, i64::from(kept.nanos)), seen, "round {round}");
    }
}

fn set(path: &Path, atime: (i64, i64), mtime: (i64, i64)) -> nix::Result<()> {
    let of = |(secs, nanos)| TimeSpec::new(secs, nanos);
    utimensat(AT_FDCWD, path, &of(atime), &of(mtime), UtimensatFlags::NoFollowSymlink)
}

const OMIT: i64 = libc::UTIME_OMIT;
const NOW: i64 = libc::UTIME_NOW;

#[test]
fn times_can_be_set_as_on_the_host() {
    same_also_with_writeback(base, |side| {
        let note_times = |side: &mut Side, what: &str, name: &str| {
            let stat = fs::symlink_metadata(side.at(name)).unwrap();
            side.note(what, (stat.atime(), stat.atime_nsec(), stat.mtime(), stat.mtime_nsec()));
        };
        for name in ["file", "dir", "link"] {
            for (secs, nanos) in [
                (0, 0),
                (0, 1),
                (1_700_000_000, 999_999_999),
                (-1, 0),
                (-1, 999_999_999),
                (-86_400 * 365, 5),
                (-(1 << 31) + 5, 1),
                ((1 << 31) + 7, 8),
                ((1 << 33) + 1, 123_456_789),
            ] {
                let path = side.at(name);
                side.tried("set", set(&path, (secs, nanos), (secs, nanos)));
                note_times(side, name, name);
                side.tried("one of them", set(&path, (0, OMIT), (secs + 1, nanos)));
                note_times(side, name, name);
            }
        }
        side.tried("neither", set(&side.at("file"), (0, OMIT), (0, OMIT)));
        note_times(side, "neither", "file");
        side.tried("a bad one", set(&side.at("file"), (0, 1_000_000_000), (0, 0)));
        side.tried("a negative one", set(&side.at("file"), (0, -5), (0, 0)));
        // Permissions: the owner can set any time, a user with write access only the present.
        fs::set_permissions(side.at("file"), PermissionsExt::from_mode(0o666)).unwrap();
        fs::set_permissions(side.at("dir/in"), PermissionsExt::from_mode(0o644)).unwrap();
        let (open, closed) = (side.at("file"), side.at("dir/in"));
        let tries = as_user(1000, &[], || {
            [
                set(&open, (0, NOW), (0, NOW)),
                set(&open, (5, 5), (5, 5)),
                set(&open, (0, OMIT), (0, NOW)),
                set(&closed, (0, NOW), (0, NOW)),
                set(&closed, (0, OMIT), (0, OMIT)),
            ]
        });
        side.note("another user", tries);
    });
}

/// Times that the host's filesystem cannot store, but the protocol can: they are kept, and do no
/// harm.
#[test]
fn times_at_the_ends_of_the_range_are_kept() {
    let bench = crate::common::Bench::over(base);
    for secs in [i64::MAX, i64::MAX - 1, 1 << 62, i64::MIN + 2, -(1 << 62)] {
        for nanos in [0, 1, 999_999_999] {
            set(&bench.at("file"), (secs, nanos), (secs, nanos)).unwrap();
            let stat = fs::metadata(bench.at("file")).unwrap();
            assert_eq!(stat.mtime(), secs);
        }
    }
    assert_eq!(fs::read_to_string(bench.at("file")).unwrap(), "0123456789");
}

/// As with `noatime`: reading does not write. A record for each first read would change the store,
/// and reads from the page cache would not be counted anyway.
#[test]
fn reading_changes_no_access_time_but_utimensat_does() {
    let bench = crate::common::Bench::over(base);
    let old = (1_000_000_000, 1);
    fs::write(bench.at("mine"), "mine").unwrap();
    let all = ["file", "dir", "dir/in", "link", "mine"];
    for name in all {
        // Older than mtime and ctime: relatime would set it.
        set(&bench.at(name), old, (0, NOW)).unwrap();
    }
    let asked = bench.fs.upper_is_changed();
    assert!(asked);
    for _ in 0..2 {
        for name in ["file", "dir/in", "mine"] {
            fs::read(bench.at(name)).unwrap();
        }
        assert_eq!(fs::read_dir(bench.at("dir")).unwrap().count(), 1);
        fs::read_link(bench.at("link")).unwrap();
    }
    for name in all {
        let stat = fs::symlink_metadata(bench.at(name)).unwrap();
        assert_eq!((stat.atime(), stat.atime_nsec()), old, "{name}");
    }
    // A new file gets its creation time as access time, and a change of content is no access.
    fs::write(bench.at("new"), "x").unwrap();
    let stat = fs::metadata(bench.at("new")).unwrap();
    assert!(stat.atime() > 1_700_000_000 && stat.atime() <= stat.mtime());
    set(&bench.at("new"), (7, 8), (0, OMIT)).unwrap();
    fs::write(bench.at("new"), "y").unwrap();
    let stat = fs::metadata(bench.at("new")).unwrap();
    assert_eq!((stat.atime(), stat.atime_nsec()), (7, 8));
}

/// The kernel would ask for birth times with a message for each file.
#[test]
fn a_file_has_no_birth_time() {
    let bench = crate::common::Bench::over(base);
    fs::write(bench.at("mine"), "mine").unwrap();
    for name in ["file", "dir", "link", "mine"] {
        assert!(fs::symlink_metadata(bench.at(name)).unwrap().created().is_err(), "{name}");
    }
}
