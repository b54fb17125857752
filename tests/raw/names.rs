//! Invalid names, in every request that has a name.

use nix::errno::Errno;

use crate::common::raw::{
    Body, CREATE, GETXATTR, LINK, LOOKUP, MKDIR, MKNOD, REMOVEXATTR, RENAME, RENAME2, RMDIR, ROOT,
    Raw, SETXATTR, SYMLINK, UNLINK,
};

/// Every request that names a file, with `name` in it. `node` is a file to be linked.
fn with_name(name: &[u8], node: u64) -> Vec<(&'static str, u32, Body)> {
    let new = Body::new;
    vec![
        ("lookup", LOOKUP, new().name(name)),
        ("mknod", MKNOD, new().u32(0o100_644).u32(0).u32(0).u32(0).name(name)),
        ("mkdir", MKDIR, new().u32(0o755).u32(0).name(name)),
        ("unlink", UNLINK, new().name(name)),
        ("rmdir", RMDIR, new().name(name)),
        ("symlink", SYMLINK, new().name(name).name(b"target")),
        ("link", LINK, new().u64(node).name(name)),
        ("rename from", RENAME, new().u64(ROOT).name(name).name(b"free")),
        ("rename to", RENAME, new().u64(ROOT).name(b"file").name(name)),
        ("rename2 from", RENAME2, new().u64(ROOT).u32(1).u32(0).name(name).name(b"free")),
        ("rename2 to", RENAME2, new().u64(ROOT).u32(2).u32(0).name(b"file").name(name)),
    ]
}

fn server() -> (Raw, u64) {
    let mut raw = Raw::over(|base| std::fs::write(base.join("file"), "of the base").unwrap());
    let file = raw.lookup(ROOT, b"file").unwrap().node;
    (raw, file)
}

fn listed(raw: &mut Raw) -> Vec<Vec<u8>> {
    let mut names: Vec<_> =
        raw.readdir(ROOT, 0, 1 << 16).unwrap().into_iter().map(|(_, name)| name).collect();
    names.sort();
    names
}

#[test]
fn an_invalid_name_is_refused_in_every_request() {
    let (mut raw, file) = server();
    let long = [b'x'; 256];
    let longer = vec![b'y'; 100_000];
    let bad: [(&[u8], Errno); 9] = [
        (b"", Errno::EINVAL),
        (b".", Errno::EINVAL),
        (b"..", Errno::EINVAL),
        (b"a/b", Errno::EINVAL),
        (b"/", Errno::EINVAL),
        (b"/etc/passwd", Errno::EINVAL),
        (b"../file", Errno::EINVAL),
        (&long, Errno::ENAMETOOLONG),
        (&longer, Errno::ENAMETOOLONG),
    ];
    for (name, errno) in bad {
        for (what, opcode, body) in with_name(name, file) {
            let shown = name.get(..name.len().min(20)).unwrap_or_default().escape_ascii();
            assert_eq!(raw.ask(opcode, ROOT, body), Err(errno), "{what} '{shown}'");
        }
    }
    assert_eq!(listed(&mut raw), [&b"."[..], b"..", b"file"], "nothing came and nothing went");
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn any_255_bytes_are_a_valid_name() {
    let (mut raw, _) = server();
    let odd: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').chain([b'x']).collect();
    assert_eq!(odd.len(), 255);
    let made = raw.mknod(ROOT, &odd, 0o100_600).unwrap();
    assert_eq!(raw.lookup(ROOT, &odd).unwrap().node, made.node);
    assert!(listed(&mut raw).contains(&odd));
    raw.end().unwrap();
}

/// In the protocol a name ends at its first zero byte; bytes after it are ignored.
#[test]
fn a_name_ends_at_its_first_zero_byte() {
    let (mut raw, _) = server();
    let made = raw.mknod(ROOT, b"cut\0/../../etc", 0o100_600).unwrap();
    assert_eq!(raw.lookup(ROOT, b"cut").unwrap().node, made.node);
    assert_eq!(listed(&mut raw), [&b"."[..], b"..", b"cut", b"file"]);
    raw.end().unwrap();
}

/// The kernel creates files by MKNOD, because CREATE is answered with ENOSYS. A CREATE request
/// changes nothing.
#[test]
fn create_is_not_supported_for_any_name() {
    let (mut raw, _) = server();
    for name in [&b"new"[..], b"", b"..", b"a/b", &[b'x'; 300]] {
        let body = Body::new().u32(0o102).u32(0o644).u32(0).u32(0).name(name);
        assert_eq!(raw.ask(CREATE, ROOT, body), Err(Errno::ENOSYS));
    }
    assert_eq!(listed(&mut raw).len(), 3);
    raw.end().unwrap();
}

#[test]
fn a_symlink_needs_a_target_of_valid_length() {
    let (mut raw, _) = server();
    for (len, expected) in [
        (0, Err(Errno::ENOENT)),
        (4095, Ok(())),
        (4096, Err(Errno::ENAMETOOLONG)),
        (90_000, Err(Errno::ENAMETOOLONG)),
    ] {
        let body = Body::new().name(b"link").name(&vec![b'l'; len]);
        assert_eq!(raw.ask(SYMLINK, ROOT, body).map(|_| ()), expected, "{len}");
    }
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn an_attribute_name_has_1_to_255_bytes() {
    let (mut raw, file) = server();
    let room = |name: &[u8]| Body::new().u32(100).u32(0).name(name);
    for name in [&b""[..], &[b'n'; 256], &[b'n'; 90_000]] {
        // Their namespaces do not exist (xattr(7)).
        assert_eq!(
            raw.ask(GETXATTR, file, room(name)),
            Err(Errno::EOPNOTSUPP),
            "{} bytes",
            name.len()
        );
        let body = Body::new().u32(2).u32(0).u32(0).u32(0).name(name).bytes(b"ab");
        assert_eq!(raw.ask(SETXATTR, file, body), Err(Errno::ERANGE));
        let body = Body::new().name(name);
        assert_eq!(raw.ask(REMOVEXATTR, file, body), Err(Errno::EOPNOTSUPP));
    }
    assert_eq!(raw.ask(GETXATTR, file, room(b"user.none")), Err(Errno::ENODATA));
    assert_eq!(raw.ask(REMOVEXATTR, file, Body::new().name(b"user.none")), Err(Errno::ENODATA));
    raw.still_serves();
    raw.end().unwrap();
}
