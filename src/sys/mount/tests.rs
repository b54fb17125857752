//! Tests of mounting and unmounting.

use super::*;
use crate::sys::testing::run_as_ordinary_user;
use nix::sched::{CloneFlags, unshare};
use std::os::unix::fs::PermissionsExt;

/// Runs `test` in a thread with its own mount namespace.
fn in_private_mounts(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .unwrap();
        test();
    });
    thread.join().unwrap();
}

fn options() -> FuseMountOptions {
    FuseMountOptions {
        source: b"a,b \\c".to_vec(),
        allow_other: false,
        read_only: false,
        max_read: Some(1 << 20),
        ..FuseMountOptions::default()
    }
}

fn mounted_at(path: &Path) -> Option<crate::sys::mountinfo::Entry> {
    let wanted = path.as_os_str().as_bytes();
    crate::sys::mountinfo::read().unwrap().into_iter().rfind(|entry| entry.mount_point == wanted)
}

fn check_mount(dir: &Path) {
    let device = mount_fuse(dir, &options()).unwrap();
    let entry = mounted_at(dir).unwrap();
    assert_eq!(entry.fs_type, b"fuse.jailfs");
    assert_eq!(entry.source, b"a,b \\c");
    assert!(entry.has_option("nosuid") && entry.has_option("nodev") && entry.has_option("rw"));
    let shown = String::from_utf8(entry.super_options).unwrap();
    assert!(shown.contains("default_permissions") && shown.contains("max_read=1048576"), "{shown}");
    let flags = nix::fcntl::fcntl(&device, nix::fcntl::FcntlArg::F_GETFD).unwrap();
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    drop(device);
    unmount(dir, true).unwrap();
    assert!(mounted_at(dir).is_none());
    let again = unmount(dir, false).unwrap_err();
    assert_ne!(again.to_string(), "", "unmounting nothing is an error");
}

#[test]
fn root_mounts_and_unmounts_directly() {
    in_private_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        check_mount(dir.path());
        let device =
            mount_fuse(dir.path(), &FuseMountOptions { read_only: true, ..options() }).unwrap();
        assert!(mounted_at(dir.path()).unwrap().has_option("ro"));
        drop(device);
        unmount(dir.path(), false).unwrap();
    });
}

const USER_DIR: &str = "JAILFS_TEST_USER_MOUNT";

/// Runs the next test in a process of an ordinary user, who may open `/dev/fuse` as on most
/// systems.
#[test]
fn an_ordinary_user_mounts_through_the_helper() {
    in_private_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let device = dir.path().join("fuse");
        let number = nix::sys::stat::makedev(10, 229);
        nix::sys::stat::mknod(&device, nix::sys::stat::SFlag::S_IFCHR, Mode::empty(), number)
            .unwrap();
        std::fs::set_permissions(&device, PermissionsExt::from_mode(0o666)).unwrap();
        mount(Some(&device), DEVICE, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let point = dir.path().join("point");
        std::fs::create_dir(&point).unwrap();
        nix::unistd::chown(&point, Some(65534.into()), Some(65534.into())).unwrap();
        let test = "sys::mount::tests::ordinary_user";
        run_as_ordinary_user(test, (USER_DIR, point.as_os_str()));
    });
}

#[test]
fn ordinary_user() {
    let Some(dir) = std::env::var_os(USER_DIR) else {
        return;
    };
    assert!(!nix::unistd::getuid().is_root());
    let dir = Path::new(&dir);
    check_mount(dir);
    let error = mount_fuse(dir, &FuseMountOptions { allow_other: true, ..options() }).unwrap_err();
    assert!(
        matches!(&error, MountError::Helper(text) if text.contains("user_allow_other")),
        "{error}"
    );
    assert!(error.hint().unwrap().contains("/etc/fuse.conf"));
    let view = clone_private_readonly(open(dir, OFlag::O_PATH, Mode::empty()).unwrap());
    assert_eq!(view.unwrap_err().raw_os_error(), Some(libc::EPERM));
}

#[test]
fn a_link_in_the_place_of_the_mount_point_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("there/point")).unwrap();
    std::os::unix::fs::symlink("there", dir.path().join("link")).unwrap();
    std::os::unix::fs::symlink("there/point", dir.path().join("point")).unwrap();
    for planted in ["link/point", "point"] {
        let error = mount_fuse(&dir.path().join(planted), &options()).unwrap_err();
        let MountError::Mount(error) = &error else { panic!("{planted}: {error}") };
        assert_eq!(error.raw_os_error(), Some(libc::ENOTDIR), "{planted}");
    }
}

#[test]
fn a_missing_mount_point_is_reported() {
    let error = mount_fuse(Path::new("/nonexistent/jailfs"), &options()).unwrap_err();
    assert!(
        matches!(&error, MountError::Mount(error) if error.raw_os_error() == Some(libc::ENOENT)),
        "{error}"
    );
}

#[test]
fn the_source_reaches_the_helper_unharmed() {
    let value = helper_options(&FuseMountOptions { read_only: true, ..options() });
    assert_eq!(
        value.as_bytes(),
        b"default_permissions,subtype=jailfs,nosuid,nodev,ro,max_read=1048576,fsname=a\\,b \\\\c"
    );
    let loose =
        FuseMountOptions { suid: true, dev: true, noexec: true, ..FuseMountOptions::default() };
    assert_eq!(
        helper_options(&loose).as_bytes(),
        b"default_permissions,subtype=jailfs,suid,dev,noexec,fsname="
    );
}

#[test]
fn a_private_view_reads_and_refuses_writes() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), b"bytes").unwrap();
    let plain = open(dir.path(), OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    let view = clone_private_readonly(&plain).unwrap();
    let there = |fd: &OwnedFd| {
        let stat = nix::sys::stat::fstatat(fd, "f", nix::fcntl::AtFlags::empty()).unwrap();
        (stat.st_dev, stat.st_ino)
    };
    assert_eq!(there(&plain), there(&view));
    let write = nix::fcntl::openat(&view, "f", OFlag::O_RDWR, Mode::empty());
    assert_eq!(write.unwrap_err(), Errno::EROFS);
    let create = nix::fcntl::openat(&view, "g", OFlag::O_RDWR | OFlag::O_CREAT, Mode::empty());
    assert_eq!(create.unwrap_err(), Errno::EROFS);
}
