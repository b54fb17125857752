//! Requests that are truncated, unknown, or not expected at this time.

use nix::errno::Errno;

use crate::common::raw::{
    ACCESS, Body, DESTROY, FLUSH, FSYNC, FSYNCDIR, GETATTR, INIT, INTERRUPT, IOCTL, LINK, LOOKUP,
    MKDIR, MKNOD, OPEN, OPENDIR, READ, READDIR, READDIRPLUS, RELEASE, RELEASEDIR, RENAME, RENAME2,
    ROOT, Raw, SETATTR, STATFS, SYMLINK, TMPFILE,
};

#[test]
fn unknown_operations_get_enosys() {
    let mut raw = Raw::new();
    let unknown =
        [0, 7, 19, 48, 49, 50, 52, 53, 61, 62, 100, 4095, 4097, 65_536, 1 << 31, u32::MAX];
    for opcode in unknown {
        for body in [Body::new(), Body::new().u64(0).u64(0).u64(0), Body::new().name(b"name")] {
            assert_eq!(raw.ask(opcode, ROOT, body), Err(Errno::ENOSYS), "{opcode}");
        }
    }
    raw.still_serves();
    raw.end().unwrap();
}

/// Operations that the kernel does by itself after one ENOSYS get ENOSYS each time.
#[test]
fn operations_that_the_kernel_need_not_send_are_answered_nevertheless() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    let open = || Body::new().u32(0o2).u32(0);
    assert_eq!(raw.ask(OPEN, file, open()), Err(Errno::ENOSYS));
    assert_eq!(raw.ask(OPENDIR, ROOT, open()), Err(Errno::ENOSYS));
    assert_eq!(raw.ask(FLUSH, file, Body::new().u64(9).u32(0).u32(0).u64(0)), Err(Errno::ENOSYS));
    assert_eq!(raw.ask(ACCESS, file, Body::new().u32(7).u32(0)), Err(Errno::ENOSYS));
    let ioctl = Body::new().u64(0).u32(0).u32(0x5401).u64(0).u32(0).u32(0);
    assert_eq!(raw.ask(IOCTL, file, ioctl), Err(Errno::ENOTTY));
    // A RELEASE of a handle that was not handed out succeeds.
    let release = || Body::new().u64(99).u32(0).u32(0).u64(0);
    raw.ask(RELEASE, file, release()).unwrap();
    raw.ask(RELEASEDIR, ROOT, release()).unwrap();
    raw.ask(FSYNC, file, Body::new().u64(99).u32(1).u32(0)).unwrap();
    raw.ask(FSYNCDIR, ROOT, Body::new().u64(99).u32(0).u32(0)).unwrap();
    assert_eq!(raw.ask(STATFS, ROOT, Body::new()).unwrap().len(), 80);
    // INTERRUPT has no effect, because no request takes long.
    assert_eq!(raw.ask(INTERRUPT, 0, Body::new().u64(12_345)), Err(Errno::ENOSYS));
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn a_second_init_is_refused() {
    let mut raw = Raw::new();
    let mut body = Body::new().u32(7).u32(45).u32(0);
    for _ in 0..13 {
        body = body.u32(0);
    }
    assert_eq!(raw.ask(INIT, 0, body), Err(Errno::EIO));
    raw.still_serves();
    raw.end().unwrap();
}

/// A complete request of each of these kinds.
fn complete(file: u64) -> Vec<(&'static str, u32, u64, Body)> {
    let new = Body::new;
    let mut times = new().u32((1 << 4) | (1 << 5)).u32(0);
    for _ in 0..10 {
        times = times.u64(1);
    }
    vec![
        ("lookup", LOOKUP, ROOT, new().name(b"nothing")),
        ("getattr", GETATTR, file, new().u32(0).u32(0).u64(0)),
        ("setattr", SETATTR, file, times),
        ("symlink", SYMLINK, ROOT, new().name(b"link").name(b"target")),
        ("mknod", MKNOD, ROOT, new().u32(0o100_644).u32(0).u32(0).u32(0).name(b"new")),
        ("mkdir", MKDIR, ROOT, new().u32(0o755).u32(0).name(b"dir")),
        ("tmpfile", TMPFILE, ROOT, new().u32(0).u32(0o100_644).u32(0).u32(0).name(b"/")),
        ("rename", RENAME, ROOT, new().u64(ROOT).name(b"file").name(b"other")),
        ("rename2", RENAME2, ROOT, new().u64(ROOT).u32(1).u32(0).name(b"file").name(b"other")),
        ("link", LINK, ROOT, new().u64(file).name(b"another")),
        ("read", READ, file, new().u64(0).u64(0).u32(9).u32(0).u64(0).u32(0).u32(0)),
        ("readdir", READDIR, ROOT, new().u64(0).u64(0).u32(4096).u32(0).u64(0).u32(0).u32(0)),
        (
            "readdirplus",
            READDIRPLUS,
            ROOT,
            new().u64(0).u64(0).u32(4096).u32(0).u64(0).u32(0).u32(0),
        ),
    ]
}

#[test]
fn a_truncated_request_is_refused_and_changes_nothing() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    let before = raw.readdir(ROOT, 0, 1 << 16).unwrap();
    let attr = raw.getattr(file).unwrap();
    for (what, opcode, node, body) in complete(file) {
        for cut in 0..body.0.len() {
            let part = Body::new().bytes(body.0.get(..cut).unwrap());
            assert_eq!(raw.ask(opcode, node, part), Err(Errno::EINVAL), "{what} cut at {cut}");
        }
    }
    assert_eq!(raw.readdir(ROOT, 0, 1 << 16).unwrap(), before);
    assert_eq!(raw.getattr(file).unwrap(), attr);
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn bytes_after_a_request_are_ignored() {
    let mut raw = Raw::new();
    let made = Body::new().u32(0o755).u32(0).name(b"dir").bytes(&[0xff; 100_000]);
    raw.ask(MKDIR, ROOT, made).unwrap();
    assert!(raw.lookup(ROOT, b"dir").is_ok());
    raw.still_serves();
    raw.end().unwrap();
}

/// No kernel sends a message that is shorter than its header says. After one, the connection cannot
/// be trusted: the session ends with an error, and acknowledged changes stay.
#[test]
fn an_invalid_message_ends_the_session_and_loses_nothing() {
    let header = |len: u32, opcode: u32| {
        Body::new().u32(len).u32(opcode).u64(1001).u64(ROOT).u64(0).u64(0).0
    };
    let messages: Vec<Vec<u8>> = vec![
        vec![0],
        vec![0xff; 39],
        header(41, LOOKUP),
        header(u32::MAX, LOOKUP),
        // Shorter than its own header.
        header(0, GETATTR),
        header(39, GETATTR),
    ];
    for message in messages {
        let mut raw = Raw::new();
        raw.mknod(ROOT, b"kept", 0o100_644).unwrap();
        raw.send_bytes(&message);
        let error = raw.wait().unwrap_err();
        assert_eq!(error.kind, jailfs::error::Kind::Failed, "{error}");
        let names = raw.fs.names(jailfs::types::NodeId::ROOT).unwrap();
        assert_eq!(names.iter().map(|name| name.as_bytes()).collect::<Vec<_>>(), [b"kept"]);
        raw.fs.sync().unwrap();
    }
}

#[test]
fn destroy_ends_the_session() {
    let mut raw = Raw::new();
    raw.still_serves();
    raw.send(DESTROY, 0, &Body::new());
    raw.wait().unwrap();
}
