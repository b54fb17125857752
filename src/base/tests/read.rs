//! Tests of reading the base.

use super::*;
use crate::error::if_exists;

/// Checks that lookups in a directory agree with lookups by path. Returns how many names were found
/// by a lookup in the directory.
fn lookups_agree(base: &Arc<Base>, dir: &str) -> usize {
    let dir = path(dir);
    let (lookup, paths) = (base.lookup_in(&dir), base.lookup_paths());
    let writer = base.writer().dir(&dir).ok();
    let listed = base.list(&dir).unwrap_or_default().into_iter().map(|entry| entry.name);
    let mut in_dir = 0;
    for name in listed.chain([name("none"), name("x".repeat(255)), name("f")]) {
        let expected = base.stat(&dir.join(&name));
        assert_eq!(lookup.stat(&name), expected, "{name:?}");
        assert_eq!(paths.stat(&dir.join(&name)), expected, "{name:?}");
        // A mount point is foreign to a reader and refused to a writer.
        if let Some(writer) = &writer {
            match (&expected, writer.stat(&name)) {
                (Ok(stat), Err(FsError::LeavesJail)) => assert!(stat.foreign, "{name:?}"),
                (expected, now) => assert_eq!(now, if_exists(expected.clone()), "{name:?}"),
            }
        }
        if let Some(stat) = lookup.stat_in_dir(&name) {
            assert_eq!(stat, expected, "{name:?}");
            in_dir += usize::from(stat.is_ok());
        }
    }
    assert_eq!(lookup.stat_dir(), base.stat(&dir));
    assert_eq!(paths.stat(&dir), base.stat(&dir));
    in_dir
}

#[test]
fn names_kinds_content_and_metadata_of_the_base_are_shown() {
    let fixture = Fixture::new();
    let long = "x".repeat(255);
    fixture.dir("d/e").file("d/e/f", b"bytes").link("l", "d/e/f").file(&long, b"long");
    let odd = OsStr::from_bytes(b"new\nline\xff");
    std::fs::write(fixture.at("").join(odd), b"odd").unwrap();
    nix::unistd::mkfifo(&fixture.at("p"), Mode::S_IRUSR).unwrap();
    fixture.on_all(|base| {
        let root = base.stat(&TreePath::root()).unwrap();
        assert_eq!((root.dev, root.ino), base.root_id());
        assert_eq!(
            base.path(),
            crate::sys::path::resolve(&fixture.at("")).unwrap().as_os_str().as_bytes()
        );
        let stat = base.stat(&path("d/e/f")).unwrap();
        let host = std::fs::metadata(fixture.at("d/e/f")).unwrap();
        assert_eq!((stat.dev, stat.ino, stat.mode), (host.dev(), host.ino(), host.mode()));
        assert_eq!((stat.kind, stat.size, stat.nlink, stat.foreign), (FileKind::File, 5, 1, false));
        assert_eq!(
            (stat.mtime.secs, i64::from(stat.mtime.nanos)),
            (host.mtime(), host.mtime_nsec())
        );
        assert_eq!(read(base, "d/e/f").unwrap(), b"bytes");
        assert_eq!(read(base, b"new\nline\xff").unwrap(), b"odd");
        assert_eq!(read(base, &long).unwrap(), b"long");
        assert_eq!(base.readlink(&path("l")).unwrap(), b"d/e/f");
        assert_eq!(base.stat(&path("l")).unwrap().kind, FileKind::Symlink);
        assert_eq!(base.stat(&path("p")).unwrap().kind, FileKind::Fifo);
        let listed = names(base, "").unwrap();
        assert_eq!(listed.len(), 5);
        assert_eq!(listed[&b"new\nline\xff"[..]], Some(FileKind::File));
        assert_eq!(listed[&b"l"[..]], Some(FileKind::Symlink));
        assert_eq!(listed[&b"d"[..]], Some(FileKind::Dir));
        assert_eq!(listed[&b"p"[..]], Some(FileKind::Fifo));
        assert_eq!(base.stat(&path("none")).unwrap_err(), FsError::NotFound);
        let counts = ["", "d/e", "none", "l"].map(|dir| lookups_agree(base, dir));
        // The root: five names, and the long one again. `d/e`: "f" twice. The others are no
        // directories. On an overlay, files may be on other devices than directories.
        let is_whole = base.is_local && base.stat(&path("d/e/f")).unwrap().dev == root.dev;
        assert!(!is_whole || counts == [6, 2, 0, 0], "{counts:?}");
        assert_eq!(base.stat(&path("d/e/f/g")).unwrap_err(), FsError::NotFound);
        assert_eq!(base.list(&path("d/e/f")).unwrap_err(), FsError::NotADirectory);
        assert_eq!(base.open_file(&path("d")).unwrap_err(), FsError::IsADirectory);
        assert_eq!(base.readlink(&path("d")).unwrap_err(), FsError::Invalid);
        assert!(base.statvfs().unwrap().blocks() > 0);
    });
}

#[test]
fn a_directory_that_is_removed_while_it_is_listed_is_not_found() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    let base = Base::open(dir.path()).unwrap();
    let opened = base.open_quietly(&path("d"), OFlag::O_RDONLY | OFlag::O_DIRECTORY).unwrap();
    std::fs::remove_dir(dir.path().join("d")).unwrap();
    assert_eq!(read_names(&opened, 0, &path("d")), Err(FsError::NotFound));
}

#[test]
fn reading_leaves_no_trace() {
    for features in ALL {
        let fixture = Fixture::new();
        fixture.dir("d").file("d/f", b"bytes").link("l", "d");
        let all = ["", "d", "d/f", "l"];
        let old = TimeSpec::new(1000, 0);
        for at in all {
            let at = fixture.at(at);
            let at = if at.ends_with("base/") { at.parent().unwrap().join("base") } else { at };
            utimensat(AT_FDCWD, &at, &old, &old, UtimensatFlags::NoFollowSymlink).unwrap();
        }
        let before = all.map(|at| times(&fixture.at(at)));
        let base = fixture.open(features);
        for at in all.map(path) {
            base.stat(&at).unwrap();
            base.xattrs(&at).unwrap();
        }
        assert_eq!(base.list(&path("")).unwrap().len() + base.list(&path("d")).unwrap().len(), 3);
        assert_eq!(read(&base, "d/f").unwrap(), b"bytes");
        if features.view {
            // Without the view, reading a symlink always updates its access time.
            assert_eq!(base.readlink(&path("l")).unwrap(), b"d");
        }
        assert_eq!(all.map(|at| times(&fixture.at(at))), before, "{features:?}");
    }
}

#[test]
fn nothing_can_be_written_through_the_view() {
    let fixture = Fixture::new();
    fixture.file("f", b"bytes");
    let base = fixture.open(ALL[0]);
    let view = base.view.as_ref().unwrap();
    for flags in [OFlag::O_RDWR, OFlag::O_WRONLY | OFlag::O_TRUNC] {
        assert_eq!(base.resolver.open(view, b"f", flags).unwrap_err(), Errno::EROFS);
    }
    let object = base.resolver.open(view, b"f", O_PATH).unwrap();
    assert_eq!(xattr::set(&object, b"user.x", b"").unwrap_err().raw_os_error(), Some(libc::EROFS));
}

#[test]
fn a_fingerprint_differs_after_a_change_that_keeps_size_and_mtime() {
    let fixture = Fixture::new();
    fixture.file("f", b"12345");
    fixture.on_all(|base| {
        let before = base.stat(&path("f")).unwrap().fingerprint();
        assert_eq!(Fingerprint::of(&base.open_file(&path("f")).unwrap()).unwrap(), before);
        assert_eq!(base.stat(&path("f")).unwrap().fingerprint(), before);
        std::thread::sleep(Duration::from_millis(20));
        fixture.file("f", b"54321");
        let old = TimeSpec::new(before.mtime.secs, before.mtime.nanos.into());
        utimensat(AT_FDCWD, &fixture.at("f"), &old, &old, UtimensatFlags::NoFollowSymlink).unwrap();
        let after = base.stat(&path("f")).unwrap().fingerprint();
        assert_eq!((after.size, after.mtime), (before.size, before.mtime));
        assert_ne!(after, before, "ctime cannot be set back");
    });
}

fn host_object(at: &Path) -> OwnedFd {
    open(at, OFlag::O_PATH | OFlag::O_NOFOLLOW, Mode::empty()).unwrap()
}

#[test]
fn extended_attributes_are_shown_sorted_and_of_the_link_itself() {
    let fixture = Fixture::new();
    fixture.dir("d").file("f", b"").link("l", "f").file("plain", b"");
    let file = host_object(&fixture.at("f"));
    let all = pairs(&[
        (b"security.capability", CAP),
        (b"system.posix_acl_access", ACL),
        (b"trusted.t", b"\0"),
        (b"user.\xff", b""),
        (b"user.a", &[7; 1000]),
    ]);
    for (key, value) in all.iter().rev() {
        xattr::set(&file, key, value).unwrap();
    }
    let mut all = all;
    all.sort();
    xattr::set(host_object(&fixture.at("l")), b"trusted.link", b"1").unwrap();
    xattr::set(host_object(&fixture.at("d")), b"system.posix_acl_default", ACL).unwrap();
    fixture.on_all(|base| {
        assert_eq!(base.xattrs(&path("f")).unwrap(), all);
        assert_eq!(base.xattrs(&path("l")).unwrap(), pairs(&[(b"trusted.link", b"1")]));
        assert_eq!(base.xattrs(&path("d")).unwrap(), pairs(&[(b"system.posix_acl_default", ACL)]));
        assert!(base.xattrs(&path("plain")).unwrap().is_empty());
    });
}

#[test]
fn reading_without_permission_is_access_denied() {
    let fixture = Fixture::new();
    fixture.dir("closed/d").file("closed/f", b"").file("f", b"");
    for at in ["closed", "f"] {
        std::fs::set_permissions(fixture.at(at), PermissionsExt::from_mode(0o000)).unwrap();
    }
    for features in [ALL[1], ALL[3]] {
        let base = fixture.open(features);
        let error = |result: FsResult<()>| assert_eq!(result, Err(FsError::AccessDenied));
        // setfsuid(2) is per thread and drops the capabilities for file access.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                nix::unistd::setfsuid(65534.into());
                error(base.open_file(&path("f")).map(drop));
                error(base.list(&path("closed")).map(drop));
                error(base.stat(&path("closed/f")).map(drop));
                assert!(base.stat(&path("closed")).is_ok() && base.stat(&path("f")).is_ok());
                error(base.writer().dir(&path("closed")).map(drop));
                let refused = Base::open(&fixture.at("closed")).unwrap_err();
                assert!(refused.hint.is_some() && refused.errno == Some(libc::EACCES), "{refused}");
                // For a user that is not the owner, the call is repeated without O_NOATIME.
                assert!(base.list(&path("")).is_ok());
            });
        });
    }
}

#[test]
fn a_base_that_is_no_directory_is_an_error_with_a_hint() {
    let fixture = Fixture::new();
    fixture.file("f", b"").dir("d").link("l", "d");
    for (at, errno) in [("none", libc::ENOENT), ("f", libc::ENOTDIR)] {
        let error = Base::open(&fixture.at(at)).unwrap_err();
        assert_eq!(error.errno, Some(errno));
        assert!(error.hint.is_some() && error.attempt.contains(at), "{error}");
    }
    let by_link = Base::open(&fixture.at("l")).unwrap();
    assert!(by_link.path().ends_with(b"/base/d"), "a symlink in the path of the user is followed");
}

/// Runs `test` in a thread with a mount namespace of its own.
fn in_private_mounts(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .unwrap();
        test();
    });
    thread.join().unwrap();
}

#[test]
fn a_mount_inside_the_base_is_an_empty_directory() {
    in_private_mounts(|| {
        let fixture = Fixture::new();
        fixture
            .dir("tmp/under")
            .dir("bind")
            .file("bound", b"base")
            .file("outer", b"outer")
            .dir("d")
            .file("d/f", b"");
        let under =
            ["tmp", "bind", "bound"].map(|at| std::fs::metadata(fixture.at(at)).unwrap().ino());
        let attach = |from: &Path, to: &str, kind: &str, flags| {
            mount(Some(from), &fixture.at(to), Some(kind), flags, None::<&str>).unwrap();
        };
        let before = Arc::new(fixture.open(ALL[0]));
        attach(Path::new("none"), "tmp", "tmpfs", MsFlags::empty());
        fixture.file("tmp/secret", b"secret");
        // A bind mount of the same filesystem has the same st_dev.
        attach(&fixture.at("d"), "bind", "", MsFlags::MS_BIND);
        attach(&fixture.at("outer"), "bound", "", MsFlags::MS_BIND);
        let check = |base: &Arc<Base>| {
            for (at, ino) in ["tmp", "bind", "bound"].into_iter().zip(under) {
                let stat = base.stat(&path(at)).unwrap();
                assert!(
                    stat.foreign && stat.ino == ino && stat.dev == base.root_id().0,
                    "{at}: {stat:?}"
                );
                let kind = if at == "bound" { FileKind::File } else { FileKind::Dir };
                assert_eq!(
                    (stat.kind, FileKind::from_mode(stat.mode), stat.size),
                    (kind, Some(kind), 0)
                );
                assert!(base.list(&path(at)).unwrap().is_empty());
                assert!(base.xattrs(&path(at)).unwrap().is_empty());
                assert_eq!(base.open_file(&path(at)).unwrap_err(), FsError::AccessDenied);
                assert_eq!(base.writer().dir(&path(at)).err(), Some(FsError::LeavesJail));
                let root = base.writer().dir(&TreePath::root()).unwrap();
                assert_eq!(root.stat(&name(at)).unwrap_err(), FsError::LeavesJail);
            }
            for at in ["tmp/secret", "tmp/under", "bind/f"] {
                assert_eq!(base.stat(&path(at)).unwrap_err(), FsError::NotFound, "{at}");
                assert_eq!(base.open_file(&path(at)).unwrap_err(), FsError::NotFound, "{at}");
            }
            assert_eq!(names(base, "").unwrap().len(), 5);
            assert!(!base.stat(&path("d")).unwrap().foreign);
            assert!(lookups_agree(base, "") <= 2, "mounted filesystems are not looked at");
            assert_eq!([lookups_agree(base, "tmp"), lookups_agree(base, "bind")], [0, 0]);
        };
        check(&before);
        fixture.on_all(check);
        let listed: Vec<String> =
            before.mounts_inside().unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(listed, ["bind", "bound", "tmp"]);
        for at in ["tmp", "bind", "bound"] {
            crate::sys::mount::unmount(&fixture.at(at), true).unwrap();
        }
    });
}
