//! Invalid offsets, sizes and flags.

use nix::errno::Errno;

use crate::common::raw::{
    Body, COPY_FILE_RANGE, FALLOCATE, GETXATTR, LISTXATTR, LSEEK, READ, READDIR, RENAME2, ROOT,
    Raw, SETATTR, SETXATTR, UNLINK, WRITE, u32_at, u64_at,
};

/// The largest file size, that of ext4 with blocks of 4 KiB.
const LARGEST: u64 = (1 << 44) - 4096;
const I64_MAX: u64 = i64::MAX as u64;

fn at(offset: u64, size: u32) -> Body {
    Body::new().u64(0).u64(offset).u32(size).u32(0).u64(0).u32(0).u32(0)
}

fn set_size(size: u64) -> Body {
    let mut body = Body::new().u32(1 << 3).u32(0).u64(0).u64(size);
    for _ in 0..16 {
        body = body.u32(0);
    }
    body
}

#[test]
fn writes_and_sizes_end_at_the_largest_file() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    for (offset, errno) in [
        (LARGEST, Errno::EFBIG),
        (1 << 62, Errno::EFBIG),
        (I64_MAX, Errno::EFBIG),
        (I64_MAX + 1, Errno::EINVAL),
        (u64::MAX, Errno::EINVAL),
    ] {
        assert_eq!(
            raw.ask(WRITE, file, at(offset, 2).bytes(b"xy")),
            Err(errno),
            "write at {offset}"
        );
    }
    assert_eq!(raw.write(file, LARGEST - 2, b"xy"), Ok(2));
    assert_eq!(raw.getattr(file).unwrap().size, LARGEST);
    assert!(raw.getattr(file).unwrap().blocks <= 16, "two bytes take a block");
    for size in [LARGEST + 1, 1 << 62, I64_MAX, I64_MAX + 1, u64::MAX] {
        assert_eq!(raw.ask(SETATTR, file, set_size(size)), Err(Errno::EFBIG), "size {size}");
    }
    raw.ask(SETATTR, file, set_size(3)).unwrap();
    assert_eq!(raw.read(file, 0, 10).unwrap(), [0; 3]);
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn reads_beyond_the_end_return_nothing() {
    let mut raw = Raw::over(|base| std::fs::write(base.join("file"), "0123456789").unwrap());
    let file = raw.lookup(ROOT, b"file").unwrap().node;
    assert_eq!(raw.read(file, 8, u32::MAX).unwrap(), b"89");
    for offset in [10, 1 << 40, LARGEST, I64_MAX] {
        assert_eq!(raw.read(file, offset, u32::MAX).unwrap(), b"", "read at {offset}");
    }
    assert_eq!(raw.read(file, u64::MAX, 1), Err(Errno::EINVAL));
    assert_eq!(raw.read(file, 0, 0).unwrap(), b"");
    // No answer is larger than a kernel's request allows.
    raw.ask(SETATTR, file, set_size(1 << 40)).unwrap();
    let zeros = raw.ask(READ, file, at(4096, u32::MAX)).unwrap();
    assert_eq!(zeros.len(), 1 << 20);
    assert!(zeros.iter().all(|byte| *byte == 0));
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn fallocate_checks_its_range_and_mode() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    let room =
        |offset: u64, len: u64, mode: u32| Body::new().u64(0).u64(offset).u64(len).u32(mode).u32(0);
    const PUNCH: u32 = 3;
    for (offset, len, mode, errno) in [
        (0, 0, 0, Errno::EINVAL),
        (0, u64::MAX, 0, Errno::EINVAL),
        (u64::MAX, 1, 0, Errno::EINVAL),
        (I64_MAX, I64_MAX, 0, Errno::EFBIG),
        (I64_MAX, I64_MAX, PUNCH, Errno::EFBIG),
        (LARGEST, 1, 1, Errno::EFBIG),
        (0, LARGEST + 1, 16, Errno::EFBIG),
        // Punching a hole without keeping the size, and modes that do not exist.
        (0, 1, 2, Errno::EOPNOTSUPP),
        (0, 4096, 8, Errno::EOPNOTSUPP),
        (0, 4096, 32, Errno::EOPNOTSUPP),
        (0, 4096, 64, Errno::EOPNOTSUPP),
        (0, 4096, u32::MAX, Errno::EOPNOTSUPP),
    ] {
        assert_eq!(
            raw.ask(FALLOCATE, file, room(offset, len, mode)),
            Err(errno),
            "{offset} {len} {mode}"
        );
    }
    assert_eq!(raw.getattr(file).unwrap().size, 0);
    raw.ask(FALLOCATE, file, room(LARGEST - 10, 10, 0)).unwrap();
    assert_eq!(raw.getattr(file).unwrap().size, LARGEST);
    raw.ask(FALLOCATE, file, room(1, LARGEST - 2, PUNCH)).unwrap();
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn lseek_accepts_only_offsets_inside_the_file() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    raw.write(file, 0, b"data").unwrap();
    let seek = |offset: u64, whence: u32| Body::new().u64(0).u64(offset).u32(whence).u32(0);
    for (offset, whence, errno) in [
        (4, 3, Errno::ENXIO),
        (4, 4, Errno::ENXIO),
        (I64_MAX, 3, Errno::ENXIO),
        (u64::MAX, 3, Errno::ENXIO),
        (u64::MAX, 4, Errno::ENXIO),
        (0, 5, Errno::EINVAL),
        (0, u32::MAX, Errno::EINVAL),
    ] {
        assert_eq!(raw.ask(LSEEK, file, seek(offset, whence)), Err(errno), "{offset} {whence}");
    }
    assert_eq!(u64_at(&raw.ask(LSEEK, file, seek(1, 4)).unwrap(), 0), 4);
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn a_copy_ends_with_its_source_and_at_the_largest_file() {
    let mut raw = Raw::over(|base| std::fs::write(base.join("from"), vec![7; 10_000]).unwrap());
    let from = raw.lookup(ROOT, b"from").unwrap().node;
    let to = raw.mknod(ROOT, b"to", 0o100_644).unwrap().node;
    let copy = |offset: u64, into: u64, len: u64, flags: u64| {
        Body::new().u64(0).u64(offset).u64(to).u64(0).u64(into).u64(len).u64(flags)
    };
    for (offset, into, len, flags, errno) in [
        (0, 0, 10, 1, Errno::EINVAL),
        (0, 0, 10, u64::MAX, Errno::EINVAL),
        (u64::MAX, 0, 10, 0, Errno::EINVAL),
        (0, u64::MAX, 10, 0, Errno::EINVAL),
        (0, I64_MAX, 10, 0, Errno::EFBIG),
        (0, LARGEST, 10, 0, Errno::EFBIG),
    ] {
        assert_eq!(
            raw.ask(COPY_FILE_RANGE, from, copy(offset, into, len, flags)),
            Err(errno),
            "{offset}"
        );
    }
    for (offset, len, copied) in [
        (0, u64::MAX, 10_000),
        (9_999, u64::MAX, 1),
        (10_000, 5, 0),
        (I64_MAX, u64::MAX, 0),
        (0, 0, 0),
    ] {
        let answer = raw.ask(COPY_FILE_RANGE, from, copy(offset, 0, len, 0)).unwrap();
        assert_eq!(u32_at(&answer, 0), copied, "{len} bytes from {offset}");
    }
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn a_listing_continues_after_any_cookie() {
    let mut raw = Raw::new();
    for name in [&b"a"[..], b"b", b"c"] {
        raw.mknod(ROOT, name, 0o100_644).unwrap();
    }
    assert_eq!(raw.readdir(ROOT, 0, u32::MAX).unwrap().len(), 5);
    assert_eq!(raw.readdir(ROOT, 0, 1 << 30).unwrap().len(), 5);
    for room in [0, 1, 31] {
        assert_eq!(raw.readdir(ROOT, 0, room).unwrap(), [], "no name fits into {room} bytes");
    }
    for after in [100, 1 << 32, I64_MAX, I64_MAX + 1, u64::MAX - 1, u64::MAX] {
        assert_eq!(raw.readdir(ROOT, after, 4096).unwrap(), [], "behind {after}");
    }
    // Name by name, as a reader with the smallest buffer does.
    let mut names = Vec::new();
    let mut after = 0;
    while let Some((cookie, name)) = raw.readdir(ROOT, after, 32).unwrap().pop() {
        assert!(cookie > after);
        (after, _) = (cookie, names.push(name));
    }
    assert_eq!(names, [&b"."[..], b"..", b"a", b"b", b"c"]);
    assert_eq!(raw.ask(READDIR, ROOT, at(0, 0)).unwrap(), b"");
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn a_listing_continues_while_names_come_and_go() {
    let mut raw = Raw::over(|base| {
        for at in 10..60 {
            std::fs::write(base.join(format!("f{at}")), b"").unwrap();
        }
    });
    raw.mknod(ROOT, b"new", 0o100_644).unwrap();
    let first = raw.readdir(ROOT, 0, 640).unwrap();
    let (after, _) = *first.last().unwrap();
    assert!((3..52).contains(&first.len()), "a part: {} names", first.len());
    // A name of the base, one of the tree, and one that comes back: none was read yet.
    for name in [&b"f59"[..], b"new", b"f58"] {
        raw.ask(UNLINK, ROOT, Body::new().name(name)).unwrap();
    }
    raw.mknod(ROOT, b"f58", 0o010_644).unwrap();
    raw.mknod(ROOT, b"later", 0o100_644).unwrap();
    let rest = raw.readdir(ROOT, after, 1 << 16).unwrap();
    let names: Vec<_> = first.iter().chain(&rest).skip(2).map(|(_, name)| name.clone()).collect();
    let expected: Vec<_> = (10..59).map(|at| format!("f{at}").into_bytes()).collect();
    assert_eq!(names, expected);
    let again = raw.readdir(ROOT, 0, 1 << 16).unwrap();
    assert_eq!(again.last().unwrap().1, b"later", "a new name is behind the others");
    assert!(again.iter().all(|(cookie, name)| {
        first.iter().chain(&rest).all(|(old, of)| (old == cookie) == (of == name))
    }));
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn the_end_of_a_listing_is_reported_without_reading_the_base() {
    let mut base_dir = None;
    let mut raw = Raw::over(|base| {
        std::fs::create_dir(base.join("d")).unwrap();
        std::fs::write(base.join("d/f"), b"").unwrap();
        base_dir = Some(base.join("d"));
    });
    let dir = raw.lookup(ROOT, b"d").unwrap().node;
    let all = raw.readdir(dir, 0, 1 << 16).unwrap();
    assert_eq!(all.len(), 3);
    let in_base = base_dir.unwrap();
    std::fs::remove_file(in_base.join("f")).unwrap();
    std::fs::remove_dir(in_base).unwrap();
    let (last, _) = *all.last().unwrap();
    assert_eq!(raw.readdir(dir, last, 4096).unwrap(), []);
    assert_eq!(raw.readdir(dir, last, 4096).unwrap(), [], "repeated any number of times");
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn attribute_requests_check_sizes_and_flags() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    let set = |name: &[u8], value: &[u8], flags: u32| {
        Body::new().u32(value.len() as u32).u32(flags).u32(0).u32(0).name(name).bytes(value)
    };
    assert_eq!(raw.ask(SETXATTR, file, set(b"user.a", &[1; 65_537], 0)), Err(Errno::E2BIG));
    assert_eq!(raw.ask(SETXATTR, file, set(b"user.a", &[1; 1 << 20], 0)), Err(Errno::E2BIG));
    raw.ask(SETXATTR, file, set(b"user.a", &[1; 65_536], 0)).unwrap();
    assert_eq!(raw.ask(SETXATTR, file, set(b"user.a", b"", 1)), Err(Errno::EEXIST));
    assert_eq!(raw.ask(SETXATTR, file, set(b"user.b", b"", 2)), Err(Errno::ENODATA));
    assert_eq!(raw.ask(SETXATTR, file, set(b"user.b", b"", 3)), Err(Errno::ENODATA));
    assert_eq!(raw.ask(SETXATTR, file, set(b"user.a", b"", u32::MAX)), Err(Errno::EEXIST));
    let get = |room: u32| Body::new().u32(room).u32(0).name(b"user.a");
    assert_eq!(u32_at(&raw.ask(GETXATTR, file, get(0)).unwrap(), 0), 65_536);
    assert_eq!(raw.ask(GETXATTR, file, get(65_535)), Err(Errno::ERANGE));
    assert_eq!(raw.ask(GETXATTR, file, get(u32::MAX)).unwrap().len(), 65_536);
    let list = |room: u32| Body::new().u32(room).u32(0);
    assert_eq!(raw.ask(LISTXATTR, file, list(1)), Err(Errno::ERANGE));
    assert_eq!(raw.ask(LISTXATTR, file, list(u32::MAX)).unwrap(), b"user.a\0");
    // All names together have at most 64 KiB, because listxattr(2) cannot return more.
    let mut names = 0;
    let refused = loop {
        let name = format!("user.{names:0>200}");
        match raw.ask(SETXATTR, file, set(name.as_bytes(), b"v", 0)) {
            Ok(_) => names += 1,
            Err(errno) => break errno,
        }
    };
    assert_eq!(refused, Errno::ENOSPC);
    assert!((300..330).contains(&names), "{names}");
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn unknown_rename_flags_are_refused() {
    let mut raw = Raw::new();
    raw.mknod(ROOT, b"a", 0o100_644).unwrap();
    raw.mknod(ROOT, b"b", 0o100_644).unwrap();
    for flags in [3, 4, 5, 6, 7, 8, 1 << 31, u32::MAX] {
        let body = Body::new().u64(ROOT).u32(flags).u32(0).name(b"a").name(b"b");
        assert_eq!(raw.ask(RENAME2, ROOT, body), Err(Errno::EINVAL), "{flags:#x}");
    }
    assert!(raw.lookup(ROOT, b"a").is_ok() && raw.lookup(ROOT, b"b").is_ok());
    raw.end().unwrap();
}

/// Bits that are not permissions do not get into a mode, and do not change the file type.
#[test]
fn a_mode_has_only_permission_bits_and_one_type() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    let mut body = Body::new().u32(1).u32(0);
    for _ in 0..6 {
        body = body.u64(0);
    }
    body = body.u32(0).u32(0).u32(0).u32(u32::MAX).u32(0).u32(0).u32(0).u32(0);
    raw.ask(SETATTR, file, body).unwrap();
    assert_eq!(raw.getattr(file).unwrap().mode, 0o107_777);
    raw.still_serves();
    raw.end().unwrap();
}
