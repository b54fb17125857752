//! READDIRPLUS: nodes come as LOOKUP would answer them, are counted, and are only those that fit
//! into the answer.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::common::raw::{Body, FORGET, READDIRPLUS, ROOT, Raw, RawListed, UNLINK};

/// One of everything that a base may have, and a directory inside.
fn everything(base: &Path) {
    std::fs::write(base.join("file"), "of the base").unwrap();
    std::fs::write(base.join("pair"), "two names").unwrap();
    std::fs::hard_link(base.join("pair"), base.join("twin")).unwrap();
    std::fs::create_dir(base.join("dir")).unwrap();
    std::fs::write(base.join("dir/within"), "x").unwrap();
    std::os::unix::fs::symlink("file", base.join("link")).unwrap();
    nix::unistd::mkfifo(&base.join("pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let device = nix::sys::stat::makedev(259, 300);
    nix::sys::stat::mknod(
        &base.join("device"),
        nix::sys::stat::SFlag::S_IFBLK,
        nix::sys::stat::Mode::S_IRUSR,
        device,
    )
    .unwrap();
    // Before 1970, with a fraction.
    let old = std::time::UNIX_EPOCH - std::time::Duration::new(1000, 250_000_000);
    std::fs::File::options()
        .write(true)
        .open(base.join("file"))
        .unwrap()
        .set_modified(old)
        .unwrap();
}

/// All names of a directory. One answer instantiates nodes for a short time only, so there may be
/// several.
fn whole(raw: &mut Raw, node: u64) -> Vec<RawListed> {
    let mut all: Vec<RawListed> = Vec::new();
    loop {
        let part =
            raw.readdirplus(node, all.last().map_or(0, |last| last.cookie), 1 << 16).unwrap();
        if part.is_empty() {
            return all;
        }
        all.extend(part);
    }
}

fn by_name(listed: Vec<RawListed>) -> BTreeMap<Vec<u8>, RawListed> {
    listed.into_iter().map(|listed| (listed.name.clone(), listed)).collect()
}

/// Makes the server count the caller as a thread that stats the files that it lists.
fn look(raw: &mut Raw) {
    raw.mknod(ROOT, b"lookedat", 0o100_644).unwrap();
    whole(raw, ROOT);
    let node = raw.lookup(ROOT, b"lookedat").unwrap().node;
    raw.forget(node, 2);
    raw.settle();
}

/// Forgets all nodes of a listing.
fn forget_all(raw: &mut Raw, listed: &[RawListed]) {
    for entry in listed.iter().filter_map(|listed| listed.entry) {
        raw.forget(entry.node, 1);
    }
    raw.settle();
}

#[test]
fn directories_come_with_attributes_and_files_for_threads_that_stat_them() {
    let mut raw = Raw::over(everything);
    let alone = by_name(whole(&mut raw, ROOT));
    let kinds = [
        ("file", 8),
        ("pair", 8),
        ("twin", 8),
        ("dir", 4),
        ("link", 10),
        ("pipe", 1),
        ("device", 6),
    ];
    assert_eq!(alone.len(), kinds.len() + 2);
    for (name, kind) in kinds.into_iter().chain([(".", 4), ("..", 4)]) {
        let listed = &alone[name.as_bytes()];
        assert_eq!((listed.kind, listed.entry.is_some()), (kind, name == "dir"), "{name}");
    }
    assert_eq!(raw.fs.held_nodes(), 2, "the root and the directory");
    let within = alone[&b"dir"[..]].entry.unwrap();
    assert_eq!(raw.lookup(ROOT, b"dir").unwrap(), within, "as it is looked up");
    raw.forget(within.node, 2);

    look(&mut raw);
    let listed = whole(&mut raw, ROOT);
    let all = by_name(listed.clone());
    // The same caller got the directory before; of two names of one node one is enough.
    let came = |name: &str| all[name.as_bytes()].entry;
    assert_eq!(came("dir"), None);
    assert_ne!(came("pair").is_some(), came("twin").is_some());
    for (name, kind) in kinds.into_iter().filter(|(name, _)| came(name).is_some()) {
        let entry = came(name).unwrap();
        assert_eq!(
            (all[name.as_bytes()].ino, all[name.as_bytes()].kind),
            (entry.attr.ino, kind),
            "{name}"
        );
        assert_eq!(raw.getattr(entry.node).unwrap(), entry.attr, "{name}");
        assert_eq!(raw.lookup(ROOT, name.as_bytes()).unwrap(), entry, "{name}");
        raw.forget(entry.node, 1);
    }
    assert_eq!(came("file").unwrap().attr.times[1], (u64::MAX - 1000, 750_000_000));
    assert_eq!(came("device").unwrap().attr.rdev, (259 << 8) | 44 | (256 << 12));
    forget_all(&mut raw, &listed);
    raw.forget(within.node, 1);
    raw.settle();
    assert_eq!(raw.fs.held_nodes(), 1, "each was given once");
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn nodes_that_the_kernel_holds_come_without_attributes() {
    let mut raw = Raw::over(everything);
    look(&mut raw);
    let file = raw.lookup(ROOT, b"file").unwrap();
    let listed = whole(&mut raw, ROOT);
    assert_eq!(by_name(listed.clone())[&b"file"[..]].entry, None);
    let held = raw.fs.held_nodes();
    let again = whole(&mut raw, ROOT);
    assert!(again.iter().all(|listed| listed.entry.is_none()), "{again:?}");
    assert_eq!(raw.fs.held_nodes(), held);
    raw.forget(file.node, 1);
    raw.settle();
    let again = whole(&mut raw, ROOT);
    assert_eq!(by_name(again)[&b"file"[..]].entry, Some(file), "it was forgotten");
    raw.end().unwrap();
}

#[test]
fn a_node_comes_with_a_name_if_both_fit() {
    let mut raw = Raw::over(|base| {
        for at in 100..200 {
            std::fs::write(base.join(format!("file-{at}")), "x").unwrap();
        }
    });
    look(&mut raw);
    for room in [0, 1, 151, 159] {
        assert_eq!(raw.readdirplus(ROOT, 0, room).unwrap(), [], "no name fits into {room} bytes");
    }
    assert_eq!(raw.fs.held_nodes(), 1);
    // "." takes 160 bytes, and so does a file.
    let (mut after, mut all) = (0, Vec::new());
    for room in [160, 161, 319, 320, 1000].into_iter().cycle() {
        let part = raw.readdirplus(ROOT, after, room).unwrap();
        let Some(last) = part.last() else { break };
        assert!(last.cookie > after && part.len() <= room as usize / 160);
        after = last.cookie;
        all.extend(part);
        let given = all.iter().filter(|listed| listed.entry.is_some()).count();
        assert_eq!(raw.fs.held_nodes(), 1 + given, "no node but those in the answers");
    }
    assert_eq!(all.len(), 103, "each name once");
    let plain: Vec<_> = raw.readdir(ROOT, 0, 1 << 16).unwrap();
    let names = all.iter().map(|listed| (listed.cookie, listed.name.clone()));
    assert_eq!(names.collect::<Vec<_>>(), plain, "in the order of a plain listing");
    forget_all(&mut raw, &all);
    assert_eq!(raw.fs.held_nodes(), 1);
    raw.end().unwrap();
}

#[test]
fn a_changed_directory_is_listed_as_it_is() {
    let mut raw = Raw::over(everything);
    look(&mut raw);
    let file = raw.lookup(ROOT, b"file").unwrap();
    raw.write(file.node, 0, b"changed").unwrap();
    raw.forget(file.node, 1);
    let new = raw.mknod(ROOT, b"new", 0o100_600).unwrap();
    raw.forget(new.node, 1);
    let gone = Body::new().name(b"pipe");
    raw.ask(UNLINK, ROOT, gone).unwrap();
    let all = by_name(whole(&mut raw, ROOT));
    assert!(!all.contains_key(&b"pipe"[..]));
    let changed = all[&b"file"[..]].entry.unwrap();
    assert_eq!((changed.attr.ino, changed.attr.size), (file.attr.ino, 11));
    assert_eq!(raw.read(changed.node, 0, 100).unwrap(), b"changedbase");
    assert_eq!(all[&b"new"[..]].entry.unwrap().attr.ino, new.attr.ino);
    let file = all[&b"file"[..]].entry.unwrap().node;
    assert_eq!(raw.readdirplus(file, 0, 4096), Err(Errno::ENOTDIR));
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn nodes_that_did_not_reach_the_kernel_are_forgotten() {
    let mut raw = Raw::over(everything);
    look(&mut raw);
    // "dir" came with its attributes.
    assert_eq!(raw.fs.held_nodes(), 2);
    raw.refuse_answers();
    let place = Body::new().u64(0).u64(0).u32(1 << 16).u32(0).u64(0).u32(0).u32(0);
    raw.send(READDIRPLUS, ROOT, &place);
    // A request without an answer was sent after it: it is done when this one is answered.
    let served = Instant::now() + Duration::from_secs(20);
    raw.send(FORGET, ROOT, &Body::new().u64(0));
    while raw.mounted_count("forget") < 2 {
        assert!(Instant::now() < served);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(raw.fs.held_nodes(), 2);
}
