//! Requests about nodes that were not handed out, or that were forgotten.

use nix::errno::Errno;

use crate::common::raw::{
    BATCH_FORGET, Body, COPY_FILE_RANGE, FALLOCATE, FSYNC, GETATTR, GETXATTR, LINK, LISTXATTR,
    LOOKUP, LSEEK, MKDIR, MKNOD, READ, READDIR, READDIRPLUS, READLINK, REMOVEXATTR, RENAME, RMDIR,
    ROOT, Raw, SETATTR, SETXATTR, SYMLINK, UNLINK, WRITE,
};

/// One request of each kind about a node, valid except for the node.
fn every_request() -> Vec<(&'static str, u32, Body)> {
    let new = Body::new;
    let place = |size: u32| new().u64(0).u64(0).u32(size).u32(0).u64(0).u32(0).u32(0);
    let mut size = new().u32(1 << 3).u32(0).u64(0).u64(7);
    for _ in 0..16 {
        size = size.u32(0);
    }
    vec![
        ("lookup", LOOKUP, new().name(b"x")),
        ("getattr", GETATTR, new().u32(0).u32(0).u64(0)),
        ("setattr", SETATTR, size),
        ("readlink", READLINK, new()),
        ("symlink", SYMLINK, new().name(b"x").name(b"y")),
        ("mknod", MKNOD, new().u32(0o100_644).u32(0).u32(0).u32(0).name(b"x")),
        ("mkdir", MKDIR, new().u32(0o755).u32(0).name(b"x")),
        ("unlink", UNLINK, new().name(b"x")),
        ("rmdir", RMDIR, new().name(b"x")),
        ("rename", RENAME, new().u64(ROOT).name(b"x").name(b"y")),
        ("link into", LINK, new().u64(ROOT).name(b"x")),
        ("read", READ, place(10)),
        ("write", WRITE, place(1).bytes(b"x")),
        ("setxattr", SETXATTR, new().u32(1).u32(0).u32(0).u32(0).name(b"user.x").bytes(b"v")),
        ("getxattr", GETXATTR, new().u32(9).u32(0).name(b"user.x")),
        ("listxattr", LISTXATTR, new().u32(9).u32(0)),
        ("removexattr", REMOVEXATTR, new().name(b"user.x")),
        ("readdir", READDIR, place(4096)),
        ("readdirplus", READDIRPLUS, place(4096)),
        ("fallocate", FALLOCATE, new().u64(0).u64(0).u64(10).u32(0).u32(0)),
        ("lseek", LSEEK, new().u64(0).u64(0).u32(3).u32(0)),
        ("copy", COPY_FILE_RANGE, new().u64(0).u64(0).u64(ROOT).u64(0).u64(0).u64(9).u64(0)),
    ]
}

fn all_are_refused(raw: &mut Raw, node: u64) {
    for (what, opcode, body) in every_request() {
        let answer = match opcode {
            // A negative answer has a form of its own there.
            LOOKUP => raw.lookup(node, b"x").map(|_| Vec::new()),
            _ => raw.ask(opcode, node, body),
        };
        assert_eq!(answer, Err(Errno::ENOENT), "{what} of node {node}");
    }
}

#[test]
fn a_node_that_was_not_handed_out_is_stale() {
    let mut raw = Raw::over(|base| std::fs::write(base.join("file"), "x").unwrap());
    for node in [0, 2, 12_345, 1 << 48, (1 << 48) + 1, 1 << 62, u64::MAX - 1, u64::MAX] {
        all_are_refused(&mut raw, node);
    }
    // A number that the base has, but that was not looked up.
    let number = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(raw.base("file")).unwrap());
    all_are_refused(&mut raw, number);
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn a_forgotten_node_is_stale_until_it_is_looked_up_again() {
    let mut raw = Raw::over(|base| {
        std::fs::create_dir(base.join("dir")).unwrap();
        std::fs::write(base.join("dir/file"), "x").unwrap();
    });
    let dir = raw.lookup(ROOT, b"dir").unwrap();
    let file = raw.lookup(dir.node, b"file").unwrap();
    raw.write(file.node, 0, b"changed").unwrap();
    raw.forget(file.node, 1);
    raw.forget(dir.node, 1);
    all_are_refused(&mut raw, file.node);
    all_are_refused(&mut raw, dir.node);
    assert_eq!(raw.fs.held_nodes(), 1, "the root");
    let again = raw.lookup(ROOT, b"dir").unwrap();
    assert_eq!((again.node, again.attr.ino), (dir.node, dir.attr.ino));
    let again = raw.lookup(again.node, b"file").unwrap();
    assert_eq!(raw.read(again.node, 0, 100).unwrap(), b"changed");
    raw.end().unwrap();
}

#[test]
fn forgetting_more_lookups_than_there_were_forgets_all() {
    let mut raw = Raw::over(|base| std::fs::write(base.join("file"), "x").unwrap());
    let file = raw.lookup(ROOT, b"file").unwrap();
    raw.lookup(ROOT, b"file").unwrap();
    raw.forget(file.node, u64::MAX);
    assert_eq!(raw.getattr(file.node), Err(Errno::ENOENT));
    raw.forget(file.node, u64::MAX);
    raw.forget(ROOT, u64::MAX);
    raw.forget(77, 1);
    raw.forget(0, 0);
    assert_eq!(raw.lookup(ROOT, b"file").unwrap().node, file.node);
    raw.forget(file.node, 0);
    assert!(raw.getattr(file.node).is_ok(), "freeing no range");
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn batch_forget_drops_many_nodes() {
    let mut raw = Raw::new();
    let nodes: Vec<u64> = (0..500)
        .map(|n| raw.mknod(ROOT, format!("f{n}").as_bytes(), 0o100_644).unwrap().node)
        .collect();
    assert_eq!(raw.fs.held_nodes(), 501);
    let mut body = Body::new().u32(502).u32(0).u64(ROOT).u64(9).u64(12_345).u64(1);
    for node in &nodes {
        body = body.u64(*node).u64(1);
    }
    raw.send(BATCH_FORGET, 0, &body);
    raw.still_serves();
    assert_eq!(raw.fs.held_nodes(), 1);
    raw.end().unwrap();
}

/// An open file that was unlinked: its node answers until FORGET, and keeps nothing afterwards.
#[test]
fn an_unlinked_node_answers_until_it_is_forgotten() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap();
    raw.write(file.node, 0, b"bytes").unwrap();
    raw.ask(UNLINK, ROOT, Body::new().name(b"file")).unwrap();
    assert_eq!(raw.getattr(file.node).unwrap().nlink, 0);
    raw.write(file.node, 5, b" more").unwrap();
    assert_eq!(raw.read(file.node, 0, 100).unwrap(), b"bytes more");
    assert_eq!(raw.link(file.node, ROOT, b"back"), Err(Errno::ENOENT));
    raw.forget(file.node, 1);
    assert_eq!(raw.getattr(file.node), Err(Errno::ENOENT));
    raw.end().unwrap();
}

#[test]
fn requests_fail_on_the_wrong_kind_of_node() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o100_644).unwrap().node;
    let fifo = raw.mknod(ROOT, b"fifo", 0o010_644).unwrap().node;
    let dir = raw.mkdir(ROOT, b"dir").unwrap().node;
    let place = |size: u32| Body::new().u64(0).u64(0).u32(size).u32(0).u64(0).u32(0).u32(0);
    let room = || Body::new().u64(0).u64(0).u64(10).u32(0).u32(0);
    let cases = [
        ("list a file", READDIR, file, place(4096), Errno::ENOTDIR),
        ("look up in a file", LOOKUP, file, Body::new().name(b"x"), Errno::ENOTDIR),
        ("make in a file", MKDIR, file, Body::new().u32(0o755).u32(0).name(b"x"), Errno::ENOTDIR),
        ("read a directory", READ, dir, place(10), Errno::EISDIR),
        ("write a directory", WRITE, dir, place(1).bytes(b"x"), Errno::EISDIR),
        ("read a fifo", READ, fifo, place(10), Errno::EINVAL),
        ("write a fifo", WRITE, fifo, place(1).bytes(b"x"), Errno::EINVAL),
        ("make room in a directory", FALLOCATE, dir, room(), Errno::EISDIR),
        ("the text of a file", READLINK, file, Body::new(), Errno::EINVAL),
        ("the text of a directory", READLINK, dir, Body::new(), Errno::EINVAL),
        ("remove a directory as a file", UNLINK, ROOT, Body::new().name(b"dir"), Errno::EISDIR),
        ("remove a file as a directory", RMDIR, ROOT, Body::new().name(b"file"), Errno::ENOTDIR),
        ("link a directory", LINK, ROOT, Body::new().u64(dir).name(b"x"), Errno::EPERM),
        ("make a directory by mknod", MKNOD, ROOT, node_of(0o040_755), Errno::EINVAL),
        ("make a link by mknod", MKNOD, ROOT, node_of(0o120_777), Errno::EINVAL),
        ("make no kind", MKNOD, ROOT, node_of(0o170_000), Errno::EINVAL),
        ("into itself", RENAME, ROOT, Body::new().u64(dir).name(b"dir").name(b"x"), Errno::EINVAL),
        (
            "move into a file",
            RENAME,
            ROOT,
            Body::new().u64(file).name(b"dir").name(b"x"),
            Errno::ENOTDIR,
        ),
    ];
    for (what, opcode, node, body, errno) in cases {
        assert_eq!(raw.ask(opcode, node, body), Err(errno), "{what}");
    }
    raw.ask(FSYNC, file, Body::new().u64(0).u32(0).u32(0)).unwrap();
    raw.still_serves();
    raw.end().unwrap();
}

fn node_of(mode: u32) -> Body {
    Body::new().u32(mode).u32(0).u32(0).u32(0).name(b"x")
}
