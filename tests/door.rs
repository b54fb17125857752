//! Tests real mounts: the FUSE server keeps the promises of `fs`, and programs see a filesystem
//! that behaves like a local one.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    unsafe_code,
    reason = "a test fails by panicking, and opens files as programs do"
)]

mod common;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{
    FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink,
};
use std::path::Path;
use std::process::Command;

use common::{Bench, is_mounted, snapshot};
use jailfs::internals::fuse::{MountOptions, Wake};
use jailfs::internals::sys::file::{self as sysfile, Rename};
use jailfs::internals::sys::xattr;
use jailfs::types::Name;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, FallocateFlags, fallocate};
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, makedev, mknod, utimensat};
use nix::sys::time::TimeSpec;

fn code(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap())
}

fn write(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) {
    fs::write(path, bytes).unwrap();
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    fs::read(path).unwrap()
}

fn names(dir: impl AsRef<Path>) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn rename(dir: &Path, from: &str, to: &str, how: Rename) -> std::io::Result<()> {
    let dir = File::open(dir).unwrap();
    let (from, to) = (Name::new(from.as_bytes()).unwrap(), Name::new(to.as_bytes()).unwrap());
    sysfile::rename(&dir, &from, &dir, &to, how)
}

#[test]
fn a_mount_starts_and_ends() {
    let mut bench = Bench::over(|base| write(base.join("a"), "from the base"));
    assert!(is_mounted(&bench.at("")));
    assert_eq!(read(bench.at("a")), b"from the base");
    let busy = File::open(bench.at("a")).unwrap();
    let error = bench.mounted().unmounter().unmount(false).unwrap_err();
    assert_eq!(error.kind, jailfs::error::Kind::InUse, "{error}");
    drop(busy);
    bench.unmount();
    assert!(!is_mounted(&bench.at("")));
    assert!(names(bench.at("")).is_empty());
}

#[test]
fn dropping_a_mount_detaches_it() {
    let bench = Bench::new();
    let place = bench.at("");
    drop(bench);
    assert!(!is_mounted(&place));
}

/// The kernel reuses the number of a mount that is gone at once.
#[test]
fn mounts_that_come_and_go_do_not_end_each_other() {
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let bench = Bench::new();
                    write(bench.at("a"), "b");
                    assert_eq!(fs::read(bench.at("a")).unwrap(), b"b");
                }
            });
        }
    });
}

#[test]
fn a_failed_mount_has_an_error_with_a_hint() {
    let bench = Bench::new();
    let missing = bench.base("nowhere");
    let error = jailfs::internals::fuse::mount(
        bench.fs.clone(),
        &missing,
        &bench.store(),
        &MountOptions::default(),
    );
    let error = error.err().unwrap();
    assert_eq!(error.kind, jailfs::error::Kind::CannotMount);
    assert!(error.hint.is_some(), "{error}");
}

#[test]
fn options_reach_the_kernel() {
    let options = MountOptions { read_only: true, noexec: true, ..MountOptions::default() };
    let bench = Bench::with(&options, |base| write(base.join("a"), "x"));
    assert_eq!(code(&fs::write(bench.at("b"), "").unwrap_err()), Errno::EROFS);
    let all = jailfs::internals::sys::mountinfo::read().unwrap();
    let ours = all.iter().find(|e| e.mount_point == bench.at("").as_os_str().as_bytes()).unwrap();
    for option in ["ro", "noexec", "nosuid", "nodev"] {
        assert!(ours.has_option(option), "{option}");
    }
    let base = bench.base("");
    let base = base.as_os_str().as_bytes().trim_ascii_end().strip_suffix(b"/").unwrap();
    assert_eq!((&ours.fs_type[..], &ours.source[..]), (&b"fuse.jailfs"[..], base));
}

/// The kernel sends a sync after each write in a mount with `sync`.
#[test]
fn a_write_is_synced_if_the_mount_asks_for_it() {
    for (vfs, syncs) in [(vec![], 0), (vec!["sync".to_owned()], 3)] {
        let options = MountOptions { vfs, source: b"a source".to_vec(), ..MountOptions::default() };
        let bench = Bench::with(&options, |base| write(base.join("a"), "x"));
        for text in ["one", "two", "three"] {
            fs::write(bench.at("a"), text).unwrap();
        }
        assert_eq!(bench.count("fsync"), syncs);
        let all = jailfs::internals::sys::mountinfo::read().unwrap();
        let point = bench.at("");
        let ours = all.iter().find(|e| e.mount_point == point.as_os_str().as_bytes()).unwrap();
        assert_eq!(ours.source, b"a source");
    }
}

#[test]
fn a_server_that_keeps_a_cpu_awake_answers_all_requests_and_ends() {
    let options = MountOptions { wake: Wake::Spin, ..MountOptions::default() };
    let bench = Bench::with(&options, |base| write(base.join("a"), "x"));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let bench = &bench;
            scope.spawn(move || {
                for at in 0..50 {
                    let path = bench.at(&format!("{thread}-{at}"));
                    write(&path, "new");
                    assert_eq!(
                        (read(&path), read(bench.at("a"))),
                        (b"new".to_vec(), b"x".to_vec())
                    );
                    File::open(&path).unwrap().sync_all().unwrap();
                }
            });
        }
    });
    assert_eq!(fs::read_dir(bench.at("")).unwrap().count(), 201);
}

#[test]
fn files_are_created_written_read_and_truncated() {
    let bench = Bench::over(|base| write(base.join("old"), "0123456789"));
    write(bench.at("new"), "hello");
    assert_eq!(read(bench.at("new")), b"hello");
    let mut append = OpenOptions::new().append(true).open(bench.at("old")).unwrap();
    append.write_all(b"ab").unwrap();
    append.write_all(b"cd").unwrap();
    assert_eq!(read(bench.at("old")), b"0123456789abcd");
    let file = OpenOptions::new().write(true).read(true).open(bench.at("old")).unwrap();
    file.write_all_at(b"XX", 3).unwrap();
    file.set_len(8).unwrap();
    file.set_len(12).unwrap();
    assert_eq!(read(bench.at("old")), b"012XX567\0\0\0\0");
    OpenOptions::new().write(true).truncate(true).open(bench.at("old")).unwrap();
    assert_eq!(fs::metadata(bench.at("old")).unwrap().len(), 0);
    assert_eq!(read(bench.base("old")), b"0123456789");
    let exclusive = OpenOptions::new().write(true).create_new(true).open(bench.at("new"));
    assert_eq!(exclusive.unwrap_err().kind(), ErrorKind::AlreadyExists);
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(bench.at("newer"))
        .unwrap()
        .write_all(b"1")
        .unwrap();
    assert_eq!(read(bench.at("newer")), b"1");
    let large: Vec<u8> = (0..5_000_000_u32).map(|n| (n % 251) as u8).collect();
    write(bench.at("large"), &large);
    assert!(read(bench.at("large")) == large);
}

#[test]
fn opening_rereading_and_closing_send_no_request() {
    let bench = Bench::over(|base| write(base.join("a"), vec![7; 100_000]));
    read(bench.at("a"));
    names(bench.at(""));
    // A READ and a READDIR make the kernel request the access time once.
    fs::metadata(bench.at("a")).unwrap();
    fs::metadata(bench.at("")).unwrap();
    let before = bench.mounted().counters().snapshot();
    for _ in 0..10 {
        read(bench.at("a"));
        assert_eq!(names(bench.at("")), ["a"]);
        fs::metadata(bench.at("a")).unwrap();
    }
    let after = bench.mounted().counters().snapshot();
    let asked: Vec<_> = before.iter().zip(&after).filter(|(b, a)| a.1 > b.1).collect();
    assert!(asked.is_empty(), "{asked:?}");
}

#[test]
fn a_missing_name_is_looked_up_once_and_can_be_created() {
    let bench = Bench::new();
    for _ in 0..5 {
        assert_eq!(fs::metadata(bench.at("x")).unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!(bench.count("lookup"), 1);
    write(bench.at("x"), "1");
    assert_eq!(read(bench.at("x")), b"1");
    fs::remove_file(bench.at("x")).unwrap();
    assert!(!bench.at("x").exists());
    fs::create_dir(bench.at("x")).unwrap();
    assert!(bench.at("x").is_dir());
}

#[test]
fn names_are_renamed_replaced_kept_and_exchanged() {
    let bench = Bench::over(|base| {
        for (name, bytes) in [("a", "1"), ("b", "2"), ("c", "3")] {
            write(base.join(name), bytes);
        }
        fs::create_dir(base.join("d")).unwrap();
        write(base.join("d/inner"), "4");
    });
    let top = bench.at("");
    assert_eq!(code(&rename(&top, "a", "b", Rename::NoReplace).unwrap_err()), Errno::EEXIST);
    rename(&top, "a", "e", Rename::NoReplace).unwrap();
    rename(&top, "e", "b", Rename::Replace).unwrap();
    assert_eq!(read(bench.at("b")), b"1");
    rename(&top, "b", "d", Rename::Exchange).unwrap();
    assert_eq!((read(bench.at("d")), read(bench.at("b/inner"))), (b"1".to_vec(), b"4".to_vec()));
    assert_eq!(code(&rename(&top, "c", "nothing", Rename::Exchange).unwrap_err()), Errno::ENOENT);
    assert_eq!(
        code(&fs::rename(bench.at("b"), bench.at("b/inner/x")).unwrap_err()),
        Errno::ENOTDIR
    );
    assert_eq!(code(&fs::rename(bench.at("b"), bench.at("b/x")).unwrap_err()), Errno::EINVAL);
    assert_eq!(code(&fs::rename(bench.at("c"), bench.at("b")).unwrap_err()), Errno::EISDIR);
    assert_eq!(names(top), ["b", "c", "d"]);
    assert_eq!(names(bench.base("")), ["a", "b", "c", "d"]);
}

#[test]
fn a_directory_of_the_base_is_renamed_and_its_old_name_is_created_again() {
    let bench = Bench::over(|base| {
        fs::create_dir_all(base.join("src/deep")).unwrap();
        write(base.join("src/deep/f"), "base");
    });
    fs::rename(bench.at("src"), bench.at("moved")).unwrap();
    assert_eq!(code(&fs::metadata(bench.at("src")).unwrap_err()), Errno::ENOENT);
    fs::create_dir_all(bench.at("src/deep")).unwrap();
    assert!(names(bench.at("src/deep")).is_empty(), "no base node is visible");
    write(bench.at("src/deep/f"), "mine");
    assert_eq!(read(bench.at("moved/deep/f")), b"base");
    write(bench.at("moved/deep/f"), "changed");
    assert_eq!(
        (read(bench.at("src/deep/f")), read(bench.at("moved/deep/f"))),
        (b"mine".to_vec(), b"changed".to_vec())
    );
    assert_eq!(read(bench.base("src/deep/f")), b"base");
}

#[test]
fn removed_names_are_gone_and_can_come_back_as_something_else() {
    let bench = Bench::over(|base| {
        fs::create_dir_all(base.join("d/e")).unwrap();
        write(base.join("d/e/f"), "1");
        write(base.join("d/g"), "2");
        write(base.join("h"), "3");
    });
    assert_eq!(code(&fs::remove_dir(bench.at("d")).unwrap_err()), Errno::ENOTEMPTY);
    assert_eq!(code(&fs::remove_dir(bench.at("h")).unwrap_err()), Errno::ENOTDIR);
    let unlinked = nix::unistd::unlink(&bench.at("d")).unwrap_err();
    assert_eq!(unlinked, Errno::EISDIR);
    fs::remove_dir_all(bench.at("d")).unwrap();
    assert_eq!(names(bench.at("")), ["h"]);
    write(bench.at("d"), "a file now");
    fs::remove_file(bench.at("h")).unwrap();
    fs::create_dir(bench.at("h")).unwrap();
    assert!(names(bench.at("h")).is_empty());
    assert_eq!(read(bench.at("d")), b"a file now");
    fs::remove_dir(bench.at("h")).unwrap();
    assert_eq!(names(bench.at("")), ["d"]);
    let rm = Command::new("rm").arg("-rf").arg(bench.at("d")).status().unwrap();
    assert!(rm.success() && names(bench.at("")).is_empty());
    assert_eq!(names(bench.base("d")), ["e", "g"]);
}

#[test]
fn hard_links_are_one_file_also_those_of_the_base() {
    let bench = Bench::over(|base| {
        fs::create_dir(base.join("d")).unwrap();
        write(base.join("a"), "one");
        fs::hard_link(base.join("a"), base.join("d/b")).unwrap();
    });
    let (a, b) = (fs::metadata(bench.at("a")).unwrap(), fs::metadata(bench.at("d/b")).unwrap());
    assert_eq!((a.ino(), a.nlink()), (b.ino(), 2));
    write(bench.at("a"), "two");
    assert_eq!(read(bench.at("d/b")), b"two");
    fs::hard_link(bench.at("d/b"), bench.at("c")).unwrap();
    assert_eq!(fs::metadata(bench.at("a")).unwrap().nlink(), 3);
    fs::remove_file(bench.at("a")).unwrap();
    assert_eq!(fs::metadata(bench.at("c")).unwrap().nlink(), 2);
    OpenOptions::new().append(true).open(bench.at("c")).unwrap().write_all(b"!").unwrap();
    assert_eq!(read(bench.at("d/b")), b"two!");
    assert_eq!(code(&fs::hard_link(bench.at("d"), bench.at("e")).unwrap_err()), Errno::EPERM);
    assert_eq!(
        (read(bench.base("a")), read(bench.base("d/b"))),
        (b"one".to_vec(), b"one".to_vec())
    );
}

#[test]
fn symlinks_are_followed_inside_and_refused_outside() {
    let bench = Bench::over(|base| {
        fs::create_dir(base.join("d")).unwrap();
        write(base.join("d/f"), "inside");
        symlink("d/f", base.join("in")).unwrap();
        symlink("/etc/passwd", base.join("out")).unwrap();
        symlink("../../etc/passwd", base.join("up")).unwrap();
        symlink(base.join("d/f"), base.join("absolute")).unwrap();
    });
    assert_eq!(read(bench.at("in")), b"inside");
    assert_eq!(fs::read_link(bench.at("in")).unwrap(), Path::new("d/f"));
    for out in ["out", "up"] {
        assert_eq!(code(&fs::read(bench.at(out)).unwrap_err()), Errno::EXDEV, "{out}");
        assert_eq!(code(&fs::read_link(bench.at(out)).unwrap_err()), Errno::EXDEV, "{out}");
        assert!(fs::symlink_metadata(bench.at(out)).unwrap().is_symlink());
    }
    assert_eq!(read(bench.at("absolute")), b"inside");
    write(bench.at("absolute"), "mine");
    assert_eq!(read(bench.base("d/f")), b"inside");
    symlink("/usr/bin/python3", bench.at("made")).unwrap();
    assert_eq!(code(&fs::metadata(bench.at("made")).unwrap_err()), Errno::EXDEV);
    assert_eq!(bench.fs.refusals().1, 5);
    symlink("loop", bench.at("loop")).unwrap();
    assert_eq!(code(&fs::metadata(bench.at("loop")).unwrap_err()), Errno::ELOOP);
}

#[test]
fn fifos_sockets_and_devices_keep_their_type() {
    let null = makedev(1, 3);
    let large = makedev(259, 70_000);
    let bench = Bench::over(|base| {
        nix::unistd::mkfifo(&base.join("fifo"), Mode::S_IRWXU).unwrap();
        mknod(&base.join("null"), SFlag::S_IFCHR, Mode::S_IRWXU, null).unwrap();
    });
    let of = |name: &str| fs::symlink_metadata(bench.at(name)).unwrap();
    assert!(of("fifo").file_type().is_fifo());
    assert!(of("null").file_type().is_char_device());
    assert_eq!(of("null").rdev(), null);
    mknod(&bench.at("block"), SFlag::S_IFBLK, Mode::S_IRUSR, large).unwrap();
    assert!(of("block").file_type().is_block_device());
    assert_eq!((of("block").rdev(), of("block").mode() & 0o7777), (large, 0o400));
    assert_eq!(
        code(&File::open(bench.at("null")).unwrap_err()),
        Errno::EACCES,
        "devices do not work here"
    );
    let listener = std::os::unix::net::UnixListener::bind(bench.at("socket")).unwrap();
    assert!(of("socket").file_type().is_socket());
    std::os::unix::net::UnixStream::connect(bench.at("socket")).unwrap();
    drop(listener);
    let path = bench.at("fifo");
    let writer = std::thread::spawn(move || write(path, "through the fifo"));
    assert_eq!(read(bench.at("fifo")), b"through the fifo");
    writer.join().unwrap();
}

#[test]
fn modes_and_owners_are_kept() {
    let bench = Bench::over(|base| write(base.join("a"), "x"));
    fs::set_permissions(bench.at("a"), PermissionsExt::from_mode(0o4751)).unwrap();
    assert_eq!(fs::metadata(bench.at("a")).unwrap().mode(), 0o104_751);
    std::os::unix::fs::chown(bench.at("a"), Some(12), Some(34)).unwrap();
    let meta = fs::metadata(bench.at("a")).unwrap();
    assert_eq!(
        (meta.uid(), meta.gid(), meta.mode()),
        (12, 34, 0o100_751),
        "a new owner clears setuid"
    );
    std::os::unix::fs::chown(bench.at("a"), None, Some(56)).unwrap();
    let meta = fs::metadata(bench.at("a")).unwrap();
    assert_eq!((meta.uid(), meta.gid()), (12, 56));
    assert_eq!(fs::metadata(bench.base("a")).unwrap().uid(), nix::unistd::getuid().as_raw());
}

/// As an ordinary user: for root the kernel checks nothing.
#[test]
fn the_kernel_checks_permissions_and_ordinary_writers_lose_setuid() {
    let bench = Bench::over(|base| {
        write(base.join("open"), "0123456789");
        fs::set_permissions(base.join("open"), PermissionsExt::from_mode(0o666)).unwrap();
        write(base.join("closed"), "secret");
        fs::set_permissions(base.join("closed"), PermissionsExt::from_mode(0o600)).unwrap();
    });
    let as_nobody = |script: &str| {
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).current_dir(bench.at(""));
        std::os::unix::process::CommandExt::uid(&mut command, 65534);
        std::os::unix::process::CommandExt::gid(&mut command, 65534);
        command.output().unwrap()
    };
    assert!(!as_nobody("cat closed").status.success());
    assert!(!as_nobody("echo > new").status.success());
    for script in ["printf x >> open", "truncate -s 3 open", "fallocate -l 100 open"] {
        fs::set_permissions(bench.at("open"), PermissionsExt::from_mode(0o6777)).unwrap();
        let output = as_nobody(script);
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(fs::metadata(bench.at("open")).unwrap().mode() & 0o7777, 0o777, "{script}");
    }
    fs::set_permissions(bench.at("open"), PermissionsExt::from_mode(0o6777)).unwrap();
    OpenOptions::new().write(true).open(bench.at("open")).unwrap().set_len(1).unwrap();
    assert_eq!(
        fs::metadata(bench.at("open")).unwrap().mode() & 0o7777,
        0o6777,
        "root keeps the bits"
    );
}

#[test]
fn times_are_kept_to_the_nanosecond_also_before_1970() {
    let bench = Bench::over(|base| write(base.join("a"), "x"));
    for (secs, nanos) in [
        (1_234_567_890, 123_456_789),
        (0, 1),
        (-1, 999_999_999),
        (-86_400, 1),
        (-5_000_000_000, 5),
        (1 << 34, 7),
    ] {
        let (atime, mtime) = (TimeSpec::new(secs, nanos), TimeSpec::new(secs + 1, nanos));
        utimensat(AT_FDCWD, &bench.at("a"), &atime, &mtime, UtimensatFlags::FollowSymlink).unwrap();
        let meta = fs::metadata(bench.at("a")).unwrap();
        assert_eq!((meta.atime(), meta.atime_nsec()), (secs, nanos));
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (secs + 1, nanos));
    }
    utimensat(
        AT_FDCWD,
        &bench.at("a"),
        &TimeSpec::UTIME_OMIT,
        &TimeSpec::UTIME_NOW,
        UtimensatFlags::FollowSymlink,
    )
    .unwrap();
    let meta = fs::metadata(bench.at("a")).unwrap();
    assert_eq!(meta.atime(), 1 << 34);
    assert!(meta.mtime() > 1_600_000_000 && meta.mtime() < 1 << 33);
}

#[test]
fn extended_attributes_are_kept_and_name_the_store() {
    let bench = Bench::over(|base| {
        write(base.join("a"), "x");
        xattr::set(File::open(base.join("a")).unwrap(), b"user.base", b"from the base").unwrap();
    });
    let file = File::open(bench.at("a")).unwrap();
    assert_eq!(xattr::get(&file, b"user.base").unwrap(), b"from the base");
    xattr::set(&file, b"user.mine", &[0xff; 3000]).unwrap();
    assert_eq!(xattr::get(&file, b"user.mine").unwrap(), [0xff; 3000]);
    let listed: BTreeSet<Vec<u8>> = xattr::list(&file).unwrap().into_iter().collect();
    assert_eq!(listed, [b"user.base".to_vec(), b"user.mine".to_vec()].into_iter().collect());
    xattr::remove(&file, b"user.base").unwrap();
    assert_eq!(code(&xattr::get(&file, b"user.base").unwrap_err()), Errno::ENODATA);
    assert_eq!(code(&xattr::remove(&file, b"user.base").unwrap_err()), Errno::ENODATA);
    for node in [file, File::open(bench.at("")).unwrap()] {
        assert_eq!(
            xattr::get(&node, b"user.jailfs.store").unwrap(),
            bench.store().as_os_str().as_bytes()
        );
        assert_eq!(code(&xattr::set(&node, b"user.jailfs.store", b"x").unwrap_err()), Errno::EPERM);
        assert_eq!(code(&xattr::set(&node, b"user.jailfs.other", b"x").unwrap_err()), Errno::EPERM);
        assert_eq!(code(&xattr::remove(&node, b"user.jailfs.store").unwrap_err()), Errno::EPERM);
        assert_eq!(code(&xattr::get(&node, b"user.jailfs.other").unwrap_err()), Errno::ENODATA);
    }
    let below = File::open(bench.base("a")).unwrap();
    assert_eq!(xattr::list(&below).unwrap(), [b"user.base".to_vec()]);
}

#[test]
fn a_missing_label_is_requested_once() {
    const LABEL: &[u8] = b"security.selinux";
    let bench = Bench::over(|base| (0..50).for_each(|n| write(base.join(format!("f{n}")), "x")));
    let list = || {
        let before = bench.count("getxattr");
        assert!(Command::new("ls").arg("-l").arg(bench.at("")).output().unwrap().status.success());
        bench.count("getxattr") - before
    };
    let file = File::open(bench.at("f1")).unwrap();
    let has_labels = jailfs::internals::sys::proc::has_filesystem(b"selinuxfs").unwrap();
    let (none, most) = if has_labels { (Errno::ENODATA, 60) } else { (Errno::EOPNOTSUPP, 5) };
    assert_eq!(code(&xattr::get(&file, LABEL).unwrap_err()), none);
    // ACLs are requested the first time, and cached.
    list();
    assert!(list() <= most, "{}", list());
    assert_eq!(code(&xattr::get(&file, b"security.capability").unwrap_err()), Errno::ENODATA);
    // If one file has a label, the others have none, and that is another answer.
    xattr::set(&file, LABEL, b"system_u:object_r:tmp_t:s0").unwrap();
    assert_eq!(xattr::get(&file, LABEL).unwrap(), b"system_u:object_r:tmp_t:s0");
    let other = File::open(bench.at("f2")).unwrap();
    assert_eq!(code(&xattr::get(&other, LABEL).unwrap_err()), Errno::ENODATA);
}

/// A program that stats the files that it lists looks some up, and then gets the others with the
/// listing. A program that does not gets only names.
#[test]
fn statting_listed_files_costs_few_requests() {
    let bench = Bench::over(|base| {
        for dir in 0..20 {
            fs::create_dir(base.join(format!("d{dir}"))).unwrap();
            (0..20).for_each(|n| write(base.join(format!("d{dir}/f{n}")), "x"));
        }
    });
    let messages = || ["lookup", "readdirplus", "readdir"].map(|operation| bench.count(operation));
    let cost = |program: &str, words: &[&str], lines: usize| {
        let before = messages();
        let said = Command::new(program).arg(bench.at("")).args(words).output().unwrap();
        assert_eq!(said.stdout.split(|byte| *byte == b'\n').count() - 1, lines);
        let after = messages();
        [0, 1, 2].map(|at| after[at] - before[at])
    };
    // Each directory is read twice: the second answer is empty.
    let [lookups, listed, plain] = cost("find", &["-type", "f"], 400);
    assert!(lookups <= 1 && listed <= 60 && plain == 0, "names: {lookups} {listed} {plain}");
    assert!(bench.fs.held_nodes() <= 21, "no process looked at files");
    assert_eq!(cost("find", &["-type", "f"], 400)[0], 0);
    // The names are cached, so each file gets a request.
    assert_eq!(cost("find", &["-size", "-9"], 421)[0], 400);
    let bench_again = Bench::over(|base| {
        for dir in 0..20 {
            fs::create_dir(base.join(format!("d{dir}"))).unwrap();
            (0..20).for_each(|n| write(base.join(format!("d{dir}/f{n}")), "x"));
        }
    });
    let found =
        Command::new("find").arg(bench_again.at("")).args(["-size", "-9"]).output().unwrap();
    assert_eq!(found.stdout.split(|byte| *byte == b'\n').count() - 1, 421);
    let lookups = bench_again.count("lookup");
    assert!((20..=25).contains(&lookups), "those of the first directory: {lookups}");
    assert_eq!(bench_again.fs.held_nodes(), 421);
}

#[test]
fn space_is_allocated_and_holes_are_punched_and_found() {
    let bench = Bench::new();
    let mut file =
        OpenOptions::new().read(true).write(true).create_new(true).open(bench.at("f")).unwrap();
    file.write_all(&vec![1; 1 << 20]).unwrap();
    fallocate(&file, FallocateFlags::empty(), 1 << 20, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 4 << 20, 4096).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, punch, 256 << 10, 256 << 10).unwrap();
    let bytes = read(bench.at("f"));
    assert!(
        bytes[..256 << 10].iter().all(|&b| b == 1)
            && bytes[256 << 10..512 << 10].iter().all(|&b| b == 0)
    );
    assert!(
        bytes[512 << 10..1 << 20].iter().all(|&b| b == 1)
            && bytes[1 << 20..].iter().all(|&b| b == 0)
    );
    assert_eq!(sysfile::seek_hole(&file, 0).unwrap(), Some(256 << 10));
    assert_eq!(sysfile::seek_data(&file, 256 << 10).unwrap(), Some(512 << 10));
    // Allocated space counts as data.
    assert_eq!(sysfile::seek_data(&file, 1 << 20).unwrap(), Some(1 << 20));
    assert_eq!(sysfile::seek_hole(&file, 1 << 20).unwrap(), Some(2 << 20));
    let collapse = fallocate(&file, FallocateFlags::FALLOC_FL_COLLAPSE_RANGE, 0, 4096);
    assert_eq!(collapse.unwrap_err(), Errno::EOPNOTSUPP);
    assert_eq!(file.seek(SeekFrom::End(-1)).unwrap(), (2 << 20) - 1);
}

#[test]
fn ranges_are_copied() {
    let bench = Bench::over(|base| {
        write(base.join("from"), (0..200_000_u32).map(|n| n as u8).collect::<Vec<_>>())
    });
    let from = File::open(bench.at("from")).unwrap();
    let to = OpenOptions::new().write(true).create_new(true).open(bench.at("to")).unwrap();
    let (mut at, mut into) = (1000, 5);
    // SAFETY: copy_file_range(2) reads and writes the two offsets, which are borrowed mutably, and
    // no other memory.
    let copied = unsafe {
        libc::copy_file_range(
            from.as_raw_fd(),
            &raw mut at,
            to.as_raw_fd(),
            &raw mut into,
            150_000,
            0,
        )
    };
    assert_eq!((copied, at, into), (150_000, 151_000, 150_005));
    assert_eq!(read(bench.at("to"))[5..], read(bench.base("from"))[1000..151_000]);
    fs::copy(bench.at("from"), bench.at("whole")).unwrap();
    assert_eq!(read(bench.at("whole")), read(bench.base("from")));
}

#[test]
fn syncs_and_statfs_answer() {
    let bench = Bench::new();
    let mut file = File::create(bench.at("f")).unwrap();
    file.write_all(b"x").unwrap();
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    File::open(bench.at("")).unwrap().sync_all().unwrap();
    let threads: Vec<_> = (0..16)
        .map(|n| {
            let path = bench.at(&format!("t{n}"));
            std::thread::spawn(move || {
                let mut file = File::create(path).unwrap();
                for _ in 0..5 {
                    file.write_all(b"x").unwrap();
                    file.sync_all().unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    let (ours, host) = (
        nix::sys::statvfs::statvfs(&bench.at("")).unwrap(),
        nix::sys::statvfs::statvfs(&bench.store()).unwrap(),
    );
    assert_eq!(
        (ours.blocks(), ours.fragment_size(), ours.name_max()),
        (host.blocks(), host.fragment_size(), 255)
    );
}

#[test]
fn an_unlinked_file_lives_as_long_as_it_is_open() {
    let bench = Bench::over(|base| write(base.join("a"), "from the base"));
    let mut file = OpenOptions::new().read(true).write(true).open(bench.at("a")).unwrap();
    fs::remove_file(bench.at("a")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    file.write_all(b"FROM").unwrap();
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "FROM the base");
    write(bench.at("a"), "another");
    file.write_all_at(b"old", 0).unwrap();
    assert_eq!(read(bench.at("a")), b"another");
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    let linked = nix::unistd::linkat(
        AT_FDCWD,
        again.as_str(),
        AT_FDCWD,
        &bench.at("b"),
        nix::fcntl::AtFlags::AT_SYMLINK_FOLLOW,
    );
    assert_eq!(linked.unwrap_err(), Errno::ENOENT);
    let held = bench.fs.held_nodes();
    drop(file);
    let start = std::time::Instant::now();
    while bench.fs.held_nodes() >= held && start.elapsed().as_secs() < 5 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(bench.fs.held_nodes() < held, "the kernel forgets it with the last descriptor");
}

/// A shared writable mapping of a file.
struct Mapping(*mut u8, usize);

impl Mapping {
    fn of(file: &File, len: usize) -> Mapping {
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: mmap(2) of a whole open file at an address that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Mapping(at.cast(), len)
    }

    fn set(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.1);
        // SAFETY: the range lies in the mapping, and only this thread writes to it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.add(at), bytes.len()) }
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < self.1);
        // SAFETY: the byte lies in the mapping.
        unsafe { self.0.add(at).read_volatile() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: munmap(2) of exactly what was mapped and is not used again.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}

#[test]
fn mappings_and_descriptors_see_each_other() {
    let bench = Bench::over(|base| write(base.join("a"), vec![b'.'; 10_000]));
    let file = OpenOptions::new().read(true).write(true).open(bench.at("a")).unwrap();
    let mapping = Mapping::of(&file, 10_000);
    mapping.set(5000, b"mapped");
    let mut got = [0; 6];
    File::open(bench.at("a")).unwrap().read_exact_at(&mut got, 5000).unwrap();
    assert_eq!(&got, b"mapped");
    OpenOptions::new().write(true).open(bench.at("a")).unwrap().write_all_at(b"W", 9000).unwrap();
    assert_eq!(mapping.get(9000), b'W');
    drop((mapping, file));
    assert_eq!(&read(bench.at("a"))[5000..5006], b"mapped");
}

#[test]
fn dirty_pages_of_mappings_are_flushed() {
    for options in
        [MountOptions::default(), MountOptions { writeback: true, ..MountOptions::default() }]
    {
        let bench = Bench::with(&options, |base| {
            fs::create_dir(base.join("d")).unwrap();
            write(base.join("d/a"), vec![b'.'; 10_000]);
        });
        let open = |path: &str| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(bench.at(path))
                .unwrap()
        };
        let (old, new) = (open("d/a"), open("new"));
        new.set_len(4096).unwrap();
        let (m, n) = (Mapping::of(&old, 10_000), Mapping::of(&new, 4096));
        fs::rename(bench.at("d"), bench.at("e")).unwrap();
        for round in 0..3_u8 {
            m.set(5000, &[b'a' + round]);
            n.set(7, &[b'A' + round]);
            bench.mounted().kernel().flush().unwrap();
            let stored = |path: &str, at: u64| {
                let path = jailfs::types::TreePath::parse(path.as_bytes()).unwrap();
                let state = bench.fs.state();
                let found = state.resolve(&path).unwrap();
                let id = jailfs::types::NodeId(found.ino().unwrap().0);
                bench.fs.read(id, at, 1).unwrap().read(false).unwrap().unwrap()[0]
            };
            assert_eq!(
                (stored("e/a", 5000), stored("new", 7)),
                (b'a' + round, b'A' + round),
                "{options:?}"
            );
        }
    }
}

#[test]
fn locks_work_without_requests() {
    let bench = Bench::over(|base| write(base.join("a"), "x"));
    let (one, two) = (File::open(bench.at("a")).unwrap(), File::open(bench.at("a")).unwrap());
    one.lock().unwrap();
    assert!(matches!(two.try_lock(), Err(std::fs::TryLockError::WouldBlock)));
    one.unlock().unwrap();
    two.try_lock().unwrap();
    let script = "import fcntl,os,sys\n\
        f=open('a','r+'); fcntl.lockf(f, fcntl.LOCK_EX)\n\
        if os.fork()==0:\n \
         g=open('a','r+')\n \
         try: fcntl.lockf(g, fcntl.LOCK_EX|fcntl.LOCK_NB)\n \
         except OSError: os._exit(3)\n \
         os._exit(0)\n\
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))";
    let status =
        Command::new("python3").arg("-c").arg(script).current_dir(bench.at("")).status().unwrap();
    assert_eq!(status.code(), Some(3), "the second process must not get the lock");
    assert_eq!(bench.count("locks"), 0);
}

#[test]
fn names_are_bytes() {
    let odd: Vec<Vec<u8>> = vec![
        b"new\nline".to_vec(),
        b"\xff\xfe".to_vec(),
        b" ".to_vec(),
        b"-rf".to_vec(),
        b"\\".to_vec(),
        vec![b'n'; 255],
    ];
    let bench = Bench::over(|base| {
        for name in &odd {
            write(base.join(OsStr::from_bytes(name)), name);
        }
    });
    let listed = |path: &Path| -> BTreeSet<Vec<u8>> {
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_vec()).collect()
    };
    assert_eq!(listed(&bench.at("")), odd.iter().cloned().collect());
    fs::create_dir(bench.at("d")).unwrap();
    for name in &odd {
        let name = OsStr::from_bytes(name);
        assert_eq!(read(bench.at("").join(name)), name.as_bytes());
        write(bench.at("d").join(name), "made");
    }
    assert_eq!(listed(&bench.at("d")), odd.iter().cloned().collect());
    let long = "n".repeat(256);
    assert_eq!(code(&fs::metadata(bench.at(&long)).unwrap_err()), Errno::ENAMETOOLONG);
    assert_eq!(code(&fs::write(bench.at(&long), "").unwrap_err()), Errno::ENAMETOOLONG);
    assert_eq!(code(&fs::rename(bench.at("d"), bench.at(&long)).unwrap_err()), Errno::ENAMETOOLONG);
}

#[test]
fn a_directory_of_the_base_with_100_000_names_is_listed_completely() {
    let bench = Bench::over(|base| {
        for n in 0..100_000 {
            File::create(base.join(format!("a name of usual length {n:06}"))).unwrap();
        }
    });
    fs::remove_file(bench.at("a name of usual length 050000")).unwrap();
    write(bench.at("new"), "");
    let listed = names(bench.at(""));
    assert_eq!(listed.len(), 100_000);
    assert!(
        listed.iter().collect::<BTreeSet<_>>().len() == 100_000
            && listed.contains(&"new".to_string())
    );
}

#[test]
fn a_directory_can_be_emptied_while_it_is_read() {
    let bench = Bench::over(|base| {
        for n in 0..3000 {
            File::create(base.join(format!("{n}"))).unwrap();
        }
    });
    for n in 3000..6000 {
        File::create(bench.at(&format!("{n}"))).unwrap();
    }
    let mut met = BTreeSet::new();
    for entry in fs::read_dir(bench.at("")).unwrap() {
        let entry = entry.unwrap();
        assert!(met.insert(entry.file_name()), "met twice: {entry:?}");
        fs::remove_file(entry.path()).unwrap();
    }
    assert_eq!(met.len(), 6000);
    assert!(names(bench.at("")).is_empty());
    // rewinddir shows the names that were added since.
    let mut dir =
        nix::dir::Dir::open(&bench.at(""), nix::fcntl::OFlag::O_CLOEXEC, Mode::empty()).unwrap();
    assert_eq!(dir.iter().count(), 2);
    write(bench.at("late"), "");
    assert_eq!(dir.iter().count(), 3);
}

#[test]
fn the_parent_of_the_root_is_not_a_directory_of_the_host() {
    let bench = Bench::over(|base| fs::create_dir(base.join("d")).unwrap());
    let root = fs::metadata(bench.at("")).unwrap().ino();
    assert_eq!(root, 1);
    for dir in ["", "d"] {
        let mut dir =
            nix::dir::Dir::open(&bench.at(dir), nix::fcntl::OFlag::O_CLOEXEC, Mode::empty())
                .unwrap();
        let up = dir.iter().map(Result::unwrap).find(|e| e.file_name() == c"..").unwrap();
        assert_eq!(up.ino(), root);
    }
}

#[test]
fn no_operation_in_the_mount_changes_the_base() {
    let bench = Bench::over(|base| {
        fs::create_dir_all(base.join("d/e")).unwrap();
        for name in ["a", "d/b", "d/e/c"] {
            write(base.join(name), name.repeat(5000));
        }
        fs::hard_link(base.join("a"), base.join("d/linked")).unwrap();
        symlink("a", base.join("link")).unwrap();
        nix::unistd::mkfifo(&base.join("fifo"), Mode::S_IRWXU).unwrap();
        // Old access times, which reading through an ordinary mount would change.
        for name in ["d/e/c", "d/b", "a", "d/e", "d", "link", ""] {
            let path = base.join(name);
            let path = if name.is_empty() { base } else { &path };
            let old = TimeSpec::new(1_000_000, 5);
            utimensat(AT_FDCWD, path, &old, &old, UtimensatFlags::NoFollowSymlink).unwrap();
        }
    });
    let before = snapshot(&bench.base("").join("."));
    let script = "set -e; cat a d/b d/e/c link > /dev/null; ls -laR . > /dev/null; \
        find . | wc -l > /dev/null\n\
        echo more >> a; printf x > d/b; chmod 700 d; touch -d 2001-01-01 d/e; mv d moved; mkdir d; \
        echo 1 > d/b\n\
        ln a hard; rm link; ln -s d link; rm fifo; mkfifo fifo; \
        setfattr -n user.x -v 1 a 2>/dev/null || true\n\
        truncate -s 3 moved/e/c; cp -a moved copy; rm -rf moved; sync -f .; \
        rmdir d 2>/dev/null || true; rm -rf ./*";
    let output =
        Command::new("sh").arg("-c").arg(script).current_dir(bench.at("")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(names(bench.at("")).is_empty());
    let after = snapshot(&bench.base("").join("."));
    for (was, is) in before.iter().zip(&after) {
        assert_eq!(was, is);
    }
    assert_eq!(before.len(), after.len());
}

#[test]
fn one_byte_into_a_gibibyte_costs_a_block() {
    let bench = Bench::over(|base| {
        let file = File::create(base.join("huge")).unwrap();
        file.set_len(1 << 30).unwrap();
        file.write_all_at(b"end", (1 << 30) - 3).unwrap();
    });
    let file = OpenOptions::new().read(true).write(true).open(bench.at("huge")).unwrap();
    file.write_all_at(b"!", 123_456_789).unwrap();
    file.sync_all().unwrap();
    assert!(bench.pool_bytes() <= 16 << 10, "{} bytes", bench.pool_bytes());
    let mut got = [0; 3];
    file.read_exact_at(&mut got, 123_456_788).unwrap();
    assert_eq!(&got, b"\0!\0");
    file.read_exact_at(&mut got, (1 << 30) - 3).unwrap();
    assert_eq!(&got, b"end");
    assert_eq!(file.metadata().unwrap().len(), 1 << 30);
}

#[test]
fn programs_run_from_the_mount() {
    let bench = Bench::over(|base| {
        write(base.join("old.sh"), "#!/bin/sh\necho old $1\n");
        fs::set_permissions(base.join("old.sh"), PermissionsExt::from_mode(0o755)).unwrap();
        fs::copy("/bin/true", base.join("program")).unwrap();
    });
    let mut new = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(bench.at("new.sh"))
        .unwrap();
    new.write_all(b"#!/bin/sh\necho new $1\n").unwrap();
    drop(new);
    for (script, said) in [("old.sh", "old 1\n"), ("new.sh", "new 1\n")] {
        let output = Command::new(bench.at(script)).arg("1").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), said);
    }
    assert!(Command::new(bench.at("program")).status().unwrap().success());
}

#[test]
fn acls_work_and_defaults_are_inherited() {
    let bench = Bench::over(|base| fs::create_dir(base.join("d")).unwrap());
    // Version 2; user::rwx, user:1000:rw-, group::r-x, mask::rwx, other::---
    let entry = |tag: u16, perm: u16, id: u32| {
        [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let none = u32::MAX;
    let entries = [
        entry(1, 7, none),
        entry(2, 6, 1000),
        entry(4, 5, none),
        entry(0x10, 7, none),
        entry(0x20, 0, none),
    ];
    let acl = [&2_u32.to_le_bytes()[..], &entries.concat()].concat();
    xattr::set(File::open(bench.at("d")).unwrap(), b"system.posix_acl_default", &acl).unwrap();
    let file =
        OpenOptions::new().write(true).create_new(true).mode(0o666).open(bench.at("d/f")).unwrap();
    let inherited = xattr::get(&file, b"system.posix_acl_access").unwrap();
    assert_eq!(inherited.len(), acl.len());
    assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o660, "the default ACL, not the umask");
    fs::create_dir(bench.at("d/e")).unwrap();
    assert_eq!(
        xattr::get(File::open(bench.at("d/e")).unwrap(), b"system.posix_acl_default").unwrap(),
        acl
    );
    fs::set_permissions(bench.at("d/f"), PermissionsExt::from_mode(0o640)).unwrap();
    let changed = xattr::get(&file, b"system.posix_acl_access").unwrap();
    assert_eq!(changed[4 + 3 * 8 + 2], 4, "chmod of the group sets the mask");
}

/// Installs `state` again, as a restore does.
fn switch_to(
    bench: &Bench,
    state: jailfs::internals::fs::State,
) -> jailfs::internals::fs::Invalidations {
    use jailfs::internals::store::record::LayerKind;
    bench.mounted().kernel().flush().unwrap();
    let parent = Some(bench.fs.upper_layer());
    let upper = bench
        .fs
        .store()
        .create_layer(parent, "main", jailfs::types::Epoch(0), LayerKind::Branches)
        .unwrap();
    let forgotten = bench.fs.switch(state, upper).unwrap().invalidations;
    bench.mounted().kernel().invalidate(&forgotten).unwrap();
    forgotten
}

#[test]
fn a_switch_shows_another_state_in_place() {
    let bench = Bench::over(|base| {
        fs::create_dir_all(base.join("kept/deep")).unwrap();
        fs::create_dir(base.join("moved")).unwrap();
        for name in ["same", "changed", "kept/removed", "kept/deep/f"] {
            write(base.join(name), "before");
        }
    });
    write(bench.at("mine"), "before");
    let before = bench.fs.state();
    let seen = snapshot(&bench.at("").join("."));
    let same = File::open(bench.at("same")).unwrap();
    let mapped = OpenOptions::new().read(true).write(true).open(bench.at("changed")).unwrap();
    let mapping = Mapping::of(&mapped, 6);
    let standing = File::open(bench.at("kept")).unwrap();

    write(bench.at("mine"), "after");
    mapping.set(0, b"MAPPED");
    fs::remove_file(bench.at("kept/removed")).unwrap();
    write(bench.at("new"), "after");
    fs::rename(bench.at("moved"), bench.at("kept/moved")).unwrap();
    fs::set_permissions(bench.at("kept/deep"), PermissionsExt::from_mode(0o700)).unwrap();
    let in_moved = File::open(bench.at("kept/moved")).unwrap();
    assert!(!bench.at("gone").exists());
    names(bench.at("kept"));
    fs::metadata(bench.at("kept/deep")).unwrap();

    switch_to(&bench, before);
    assert_eq!(snapshot(&bench.at("").join(".")), seen, "every name, byte, mode and time");
    let mut count = 0;
    jailfs::internals::sys::dir::for_each(&standing, |_, _, _| count += 1).unwrap();
    assert_eq!(count, 2, "a process in a kept directory works on");
    assert_eq!(
        nix::fcntl::openat(&in_moved, "x", nix::fcntl::OFlag::O_CREAT, Mode::S_IRWXU).unwrap_err(),
        Errno::ENOENT
    );
    assert_eq!(
        (mapping.get(0), mapped.metadata().unwrap().nlink()),
        (b'M', 0),
        "a process that holds the old content keeps it"
    );
    mapping.set(0, b"again");
    mapped.sync_all().unwrap();
    assert_eq!(read(bench.at("changed")), b"before");
    let mut bytes = String::new();
    (&same).read_to_string(&mut bytes).unwrap();
    assert_eq!((bytes.as_str(), same.metadata().unwrap().nlink()), ("before", 1));
    // The inode number stays although the kernel has another node, at once and later.
    assert_eq!(fs::metadata(bench.at("changed")).unwrap().ino(), mapped.metadata().unwrap().ino());
    let again = OpenOptions::new().read(true).write(true).open(bench.at("changed")).unwrap();
    let mapping = Mapping::of(&again, 6);
    mapping.set(0, b"second");
    bench.mounted().kernel().flush().unwrap();
    let now = bench.fs.state();
    fs::write(bench.at("changed"), "third").unwrap();
    switch_to(&bench, now);
    assert_eq!(
        read(bench.at("changed")),
        b"second",
        "mappings of renumbered files are flushed, too"
    );
}

#[test]
fn very_many_names_are_invalidated_at_once_but_never_below_a_mount() {
    const MANY: usize = 20_500;
    for mount_inside in [false, true] {
        let bench = Bench::over(|base| fs::create_dir(base.join("inner")).unwrap());
        fs::create_dir(bench.at("d")).unwrap();
        let emptied = bench.fs.state();
        let inner = bench.at("inner");
        if mount_inside {
            let none = None::<&str>;
            nix::mount::mount(Some("t"), &inner, Some("tmpfs"), nix::mount::MsFlags::empty(), none)
                .unwrap();
        }
        for n in 0..MANY {
            assert!(!bench.at(&format!("d/{n}")).exists());
            File::create(bench.at(&format!("d/{n}"))).unwrap();
        }
        let invalidations = switch_to(&bench, emptied);
        assert!(invalidations.names.len() > 20_000);
        assert!(names(bench.at("d")).is_empty());
        assert!((0..MANY).all(|n| !bench.at(&format!("d/{n}")).exists()));
        assert_eq!(is_mounted(&inner), mount_inside);
        if mount_inside {
            nix::mount::umount(&inner).unwrap();
        }
    }
}

/// Set in the process that runs tests again as an ordinary user.
const ORDINARY: &str = "JAILFS_TEST_ORDINARY_USER";

/// Through fusermount3, and without access to other users' processes.
#[test]
fn an_ordinary_user_can_mount_and_everything_works() {
    if std::env::var_os(ORDINARY).is_some() || !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--test-threads=1"]).env(ORDINARY, "1").current_dir("/");
    let tests = [
        "a_mount_starts_and_ends",
        "dropping_a_mount_detaches_it",
        "options_reach_the_kernel",
        "files_are_created_written_read_and_truncated",
        "opening_rereading_and_closing_send_no_request",
        "names_are_renamed_replaced_kept_and_exchanged",
        "symlinks_are_followed_inside_and_refused_outside",
        "extended_attributes_are_kept_and_name_the_store",
        "an_unlinked_file_lives_as_long_as_it_is_open",
        "dirty_pages_of_mappings_are_flushed",
        "a_switch_shows_another_state_in_place",
    ];
    command.args(tests);
    std::os::unix::process::CommandExt::uid(&mut command, 65534);
    std::os::unix::process::CommandExt::gid(&mut command, 65534);
    let run = std::thread::spawn(move || {
        open_device_to_all();
        command.output().unwrap()
    });
    let output = run.join().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(&format!("{} passed", tests.len())), "{text}");
}

/// As in containers whose seccomp profile does not know openat2(2), or forbids it.
#[test]
fn without_openat2_everything_works() {
    const MASK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/mask.py");
    for errno in ["ENOSYS", "EPERM"] {
        let mut command = Command::new("python3");
        command.args(["-I", MASK, errno]).arg(std::env::current_exe().unwrap()).current_dir("/");
        let skipped =
            ["without_openat2", "an_ordinary_user", "with_100_000_names", "very_many_names"];
        let output =
            command.args(skipped.iter().flat_map(|name| ["--skip", name])).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{errno}: {text}\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            text.contains(" passed; 0 failed; 0 ignored; 0 measured; 4 filtered out"),
            "{text}"
        );
    }
}

/// Gives this thread and its children a mount namespace in which all users can use `/dev/fuse`, as
/// on a usual host; containers often reserve it for root.
fn open_device_to_all() {
    use nix::mount::{MsFlags, mount};
    let none = None::<&str>;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("fuse");
    mknod(&device, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(10, 229)).unwrap();
    fs::set_permissions(&device, PermissionsExt::from_mode(0o666)).unwrap();
    mount(Some(&device), "/dev/fuse", none, MsFlags::MS_BIND, none).unwrap();
}
