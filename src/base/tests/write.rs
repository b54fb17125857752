//! Tests of changing the base.

use super::*;

#[test]
fn names_are_created_moved_and_removed() {
    let fixture = Fixture::new();
    for features in ALL {
        let base = fixture.open(features);
        let writer = base.writer();
        let root = writer.dir(&TreePath::root()).unwrap();
        let temp = WriteDir::stage_name().unwrap();
        let file = root.create_file(&temp).unwrap();
        assert_eq!(root.create_file(&temp).unwrap_err(), FsError::Exists);
        assert_eq!(file.metadata().unwrap().mode(), 0o100_600);
        std::os::unix::fs::FileExt::write_all_at(&file, b"new", 0).unwrap();
        root.mkdir(&name("d"), 0o755).unwrap();
        assert_eq!(root.mkdir(&name("d"), 0o755), Err(FsError::Exists));
        let dir = writer.dir(&path("d")).unwrap();
        root.rename(&temp, &dir, &name("f"), Rename::NoReplace).unwrap();
        assert_eq!(read(&base, "d/f").unwrap(), b"new");
        assert_eq!(root.stat(&temp).unwrap(), None);
        for mode in [0o500, 0o755] {
            root.set_mode(&name("d"), mode).unwrap();
            assert_eq!(root.stat(&name("d")).unwrap().unwrap().mode, 0o040_000 | mode);
        }
        root.hard_link_from(&dir, &name("f"), &name("f2")).unwrap();
        assert_eq!(root.stat(&name("f2")).unwrap().unwrap().nlink, 2);
        root.symlink(&name("l"), b"\xff target").unwrap();
        assert_eq!(base.readlink(&path("l")).unwrap(), b"\xff target");
        root.hard_link_from(&root, &name("l"), &name("l2")).unwrap();
        assert_eq!(root.stat(&name("l2")).unwrap().unwrap().kind, FileKind::Symlink);
        let error = root.rename(&name("f2"), &root, &name("l"), Rename::NoReplace);
        assert_eq!(error, Err(FsError::Exists));
        root.rename(&name("f2"), &root, &name("l"), Rename::Exchange).unwrap();
        assert_eq!(root.stat(&name("f2")).unwrap().unwrap().kind, FileKind::Symlink);
        root.mknod(&name("p"), 0o010_600, 0).unwrap();
        root.mknod(&name("c"), 0o020_600, nix::sys::stat::makedev(1, 3)).unwrap();
        let device = root.stat(&name("c")).unwrap().unwrap();
        assert_eq!((device.kind, device.rdev), (FileKind::Char, nix::sys::stat::makedev(1, 3)));
        assert_eq!(root.mknod(&name("x"), 0o040_600, 0), Err(FsError::Invalid));
        assert_eq!(root.rmdir(&name("d")), Err(FsError::NotEmpty));
        assert_eq!(root.unlink(&name("d")), Err(FsError::IsADirectory));
        assert_eq!(root.rmdir(&name("l")), Err(FsError::NotADirectory));
        assert_eq!(root.open_file(&name("p")).unwrap_err(), FsError::Invalid);
        assert_eq!(Fingerprint::of(&root.open_file(&name("l")).unwrap()).unwrap().size, 3);
        dir.fsync().unwrap();
        dir.unlink(&name("f")).unwrap();
        root.rmdir(&name("d")).unwrap();
        assert_eq!(dir.create_file(&temp).unwrap_err(), FsError::NotFound);
        for at in ["l", "l2", "f2", "p", "c"] {
            root.unlink(&name(at)).unwrap();
        }
        assert_eq!(root.unlink(&name("l")), Err(FsError::NotFound));
        root.fsync().unwrap();
        assert!(base.list(&TreePath::root()).unwrap().is_empty());
    }
}

#[test]
fn attributes_become_exactly_the_wanted_ones() {
    let fixture = Fixture::new();
    fixture.dir("d").file("f", b"x").link("l", "target").file("target", b"");
    nix::unistd::mkfifo(&fixture.at("p"), Mode::S_IRUSR).unwrap();
    let user = pairs(&[(b"trusted.t", b"1"), (b"user.u", b"2")]);
    let acl = pairs(&[(b"security.capability", CAP), (b"system.posix_acl_access", ACL)]);
    let default = pairs(&[(b"system.posix_acl_default", ACL)]);
    let trusted = pairs(&[(b"trusted.t", b"1")]);
    let (atime, mtime) =
        (Timestamp { secs: 5, nanos: 6 }, Timestamp { secs: -7, nanos: 999_999_999 });
    // Name, mode, owner, extended attributes.
    type Row<'a> = (&'a str, u32, u32, &'a [(Vec<u8>, Vec<u8>)]);
    let rows: &[Row<'_>] = &[
        ("f", 0o4755, 1000, &user),
        ("f", 0o640, 1000, &acl),
        ("f", 0o000, 0, &[]),
        ("f", 0o6555, 1, &trusted),
        ("d", 0o3775, 1000, &default),
        ("d", 0o555, 2, &user),
        ("d", 0o700, 2, &[]),
        ("l", 0o777, 1000, &trusted),
        ("l", 0o777, 0, &[]),
        ("p", 0o622, 1000, &trusted),
        ("p", 0o400, 0, &[]),
    ];
    let untouched = times(&fixture.at("target"));
    fixture.on_all(|base| {
        let root = base.writer().dir(&TreePath::root()).unwrap();
        for (at, mode, id, xattrs) in rows {
            let wanted = Attributes {
                mode: *mode,
                uid: *id,
                gid: id + 1,
                atime,
                mtime,
                xattrs,
                may_keep_owner: false,
            };
            for _ in 0..2 {
                root.set_attributes(&name(at), &wanted).unwrap();
                let stat = root.stat(&name(at)).unwrap().unwrap();
                assert_eq!(stat.mode & PERM_BITS, *mode, "{at}");
                assert_eq!(
                    (stat.uid, stat.gid, stat.atime, stat.mtime),
                    (*id, id + 1, atime, mtime),
                    "{at}"
                );
                assert_eq!(base.xattrs(&path(at)).unwrap(), *xattrs, "{at}");
            }
        }
    });
    assert_eq!(times(&fixture.at("target")), untouched, "the target of the symlink is unchanged");
}

#[test]
fn a_directory_gets_its_own_attributes_after_a_change_inside() {
    let fixture = Fixture::new();
    fixture.dir("d");
    let user = pairs(&[(b"trusted.t", b"1"), (b"user.u", b"2")]);
    let (atime, mtime) = (Timestamp { secs: 5, nanos: 6 }, Timestamp { secs: -7, nanos: 9 });
    fixture.on_all(|base| {
        let dir = base.writer().dir(&path("d")).unwrap();
        dir.mkdir(&name("x"), 0o700).unwrap();
        dir.rmdir(&name("x")).unwrap();
        let wanted = Attributes {
            mode: 0o1777,
            uid: 3,
            gid: 4,
            atime,
            mtime,
            xattrs: &user,
            may_keep_owner: false,
        };
        dir.set_own_attributes(&wanted).unwrap();
        let stat = base.stat(&path("d")).unwrap();
        assert_eq!((stat.mode & PERM_BITS, stat.uid, stat.gid, stat.mtime), (0o1777, 3, 4, mtime));
        assert_eq!(dir.own_stat().unwrap(), stat);
        assert_eq!(base.xattrs(&path("d")).unwrap(), user);
    });
}

#[test]
fn an_owner_sets_attributes_of_a_file_it_may_not_write() {
    let fixture = Fixture::new();
    fixture.file("f", b"");
    std::fs::set_permissions(fixture.at("f"), PermissionsExt::from_mode(0o444)).unwrap();
    for at in ["f", "."] {
        nix::unistd::chown(&fixture.at(at), Some(65534.into()), Some(65534.into())).unwrap();
    }
    for features in [ALL[1], ALL[3]] {
        let base = fixture.open(features);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                nix::unistd::setfsgid(65534.into());
                nix::unistd::setfsuid(65534.into());
                let root = base.writer().dir(&TreePath::root()).unwrap();
                for xattrs in [pairs(&[(b"user.u", b"1")]), Vec::new()] {
                    let (atime, mtime) =
                        (Timestamp { secs: 1, nanos: 2 }, Timestamp { secs: 3, nanos: 4 });
                    let wanted = Attributes {
                        mode: 0o444,
                        uid: 65534,
                        gid: 65534,
                        atime,
                        mtime,
                        xattrs: &xattrs,
                        may_keep_owner: false,
                    };
                    root.set_attributes(&name("f"), &wanted).unwrap();
                    assert_eq!(base.xattrs(&path("f")).unwrap(), xattrs);
                    assert_eq!(base.stat(&path("f")).unwrap().mode, 0o100_444);
                }
                let given = Attributes {
                    mode: 0o444,
                    uid: 0,
                    gid: 65534,
                    atime: Timestamp::default(),
                    mtime: Timestamp::default(),
                    xattrs: &[],
                    may_keep_owner: false,
                };
                let refused = root.set_attributes(&name("f"), &given);
                assert_eq!(refused, Err(FsError::NotPermitted));
                let given = Attributes { mode: 0o6444, may_keep_owner: true, ..given };
                let is = root.set_attributes(&name("f"), &given).unwrap();
                assert_eq!((is.uid, is.mode), (65534, 0o100_444));
                let (mut file, opened) = root.open_to_rewrite(&name("f")).unwrap();
                assert_eq!(opened.ino, is.ino);
                std::io::Write::write_all(&mut file, b"its owner writes").unwrap();
            });
        });
    }
}
