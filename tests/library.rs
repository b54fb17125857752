//! The library without a mount: checkpoints, restores and applies on small trees.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

use std::fs as host;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use jailfs::error::{Error, FsError, Kind};
use jailfs::internals::fs::{Caller, RenameMode, SetAttr, SetXattr};
use jailfs::internals::store::Store;
use jailfs::internals::store::record::{OpRecord, OpVerb};
use jailfs::internals::sys::failpoint::{self, Failpoint};
use jailfs::sandbox::{ChangeKind, Detail, Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Epoch, LayerId, Name, NodeId, Timestamp, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };

struct Place {
    _dir: tempfile::TempDir,
    base: std::path::PathBuf,
    store: std::path::PathBuf,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        host::create_dir(&base).unwrap();
        Place { _dir: dir, base, store }
    }

    fn open(&self) -> Arc<Sandbox> {
        Sandbox::create_or_open(&self.base, &self.store, &StoreOptions::default()).unwrap()
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.base.join(path);
        host::create_dir_all(path.parent().unwrap()).unwrap();
        host::write(path, text).unwrap();
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn id(sandbox: &Sandbox, path: &str) -> NodeId {
    path.split('/').filter(|p| !p.is_empty()).fold(NodeId::ROOT, |dir, part| {
        sandbox.fs().lookup(dir, &name(part)).unwrap_or_else(|e| panic!("{path}: {e}")).id
    })
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

fn put(sandbox: &Sandbox, path: &str, text: &str) {
    let (dir, last) = split(path);
    let dir = id(sandbox, dir);
    let file = match sandbox.fs().lookup(dir, &name(last)) {
        Ok(entry) => entry.id,
        Err(_) => sandbox.fs().mknod(dir, &name(last), 0o100_644, 0, 0, ME).unwrap().id,
    };
    sandbox.fs().truncate(file, 0, false).unwrap();
    sandbox.fs().write(file, 0, text.as_bytes(), false).unwrap();
}

fn get(sandbox: &Sandbox, path: &str) -> String {
    let bytes =
        sandbox.fs().read(id(sandbox, path), 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    String::from_utf8(bytes).unwrap()
}

fn rm(sandbox: &Sandbox, path: &str) {
    let (dir, last) = split(path);
    sandbox.fs().unlink(id(sandbox, dir), &name(last)).unwrap();
}

fn checkpoint(sandbox: &Sandbox, text: &str) -> LayerId {
    let request = Request::Checkpoint { name: Some(text.to_owned()), message: String::new() };
    match sandbox.handle(request).unwrap() {
        Reply::Checkpoint(checkpoint) => checkpoint.id,
        other => panic!("{other:?}"),
    }
}

fn restore(sandbox: &Sandbox, rev: &str) {
    sandbox
        .handle(Request::Restore {
            detach_mounts: false,
            to: Rev::parse(rev),
            paths: Vec::new(),
            dry_run: false,
        })
        .unwrap();
}

fn diff(sandbox: &Sandbox, from: &str, to: &str) -> Vec<(ChangeKind, String)> {
    let request = Request::Diff {
        from: Rev::parse(from),
        to: Rev::parse(to),
        paths: vec![],
        detail: Detail::Patch,
    };
    match sandbox.handle(request).unwrap() {
        Reply::Diff(changes) => {
            changes.to_vec().unwrap().into_iter().map(|c| (c.kind, c.path.to_string())).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn apply(sandbox: &Sandbox, paths: &[&str], undo: bool) -> (usize, Vec<String>) {
    let paths = paths.iter().map(|p| TreePath::parse(p.as_bytes()).unwrap()).collect();
    match sandbox
        .handle(Request::Apply { paths, dry_run: false, undo, consent: Default::default() })
        .unwrap()
    {
        Reply::Applied(a) => {
            (a.changes.len(), a.conflicts.into_iter().map(|c| c.0.to_string()).collect())
        }
        other => panic!("{other:?}"),
    }
}

/// Everything visible in a tree, without change times.
fn picture(sandbox: &Sandbox) -> Vec<String> {
    fn walk(sandbox: &Sandbox, dir: NodeId, path: &str, lines: &mut Vec<String>) {
        let attr = sandbox.fs().getattr(dir).unwrap();
        lines.push(format!("{path}/ {:o} {} {:?}", attr.meta.mode, attr.ino.0, attr.meta.mtime));
        for child in sandbox.fs().names(dir).unwrap() {
            let entry = sandbox.fs().lookup(dir, &child).unwrap();
            let path = format!("{path}/{child}");
            match entry.attr.kind {
                jailfs::types::FileKind::Dir => walk(sandbox, entry.id, &path, lines),
                jailfs::types::FileKind::File => {
                    let text = sandbox
                        .fs()
                        .read(entry.id, 0, u64::MAX)
                        .unwrap()
                        .read(false)
                        .unwrap()
                        .unwrap();
                    lines.push(format!(
                        "{path} {:?} {:?}",
                        entry.attr,
                        String::from_utf8_lossy(&text)
                    ));
                }
                _ => lines.push(format!(
                    "{path} {:?} {:?}",
                    entry.attr,
                    sandbox.fs().link_text(entry.id)
                )),
            }
        }
    }
    let mut lines = Vec::new();
    walk(sandbox, NodeId::ROOT, "", &mut lines);
    lines
}

#[test]
fn writes_go_to_the_store_and_not_to_the_base() {
    let place = Place::new();
    place.write("a/b", "base");
    let ino = host::metadata(place.base.join("a/b")).unwrap().ino();
    {
        let sandbox = place.open();
        assert_eq!(get(&sandbox, "a/b"), "base");
        put(&sandbox, "a/b", "changed");
        put(&sandbox, "a/new", "new");
    }
    assert_eq!(host::read_to_string(place.base.join("a/b")).unwrap(), "base");
    assert!(!place.base.join("a/new").exists());
    let sandbox = place.open();
    assert_eq!((get(&sandbox, "a/b"), get(&sandbox, "a/new")), ("changed".into(), "new".into()));
    assert_eq!(sandbox.fs().getattr(id(&sandbox, "a/b")).unwrap().ino.0, ino, "the number stays");
}

#[test]
fn a_restore_is_exact() {
    let place = Place::new();
    place.write("dir/one", "1");
    place.write("dir/sub/two", "2");
    place.write("gone/x", "x");
    let sandbox = place.open();
    put(&sandbox, "kept", "kept");
    put(&sandbox, "dir/one", "one");
    let before = picture(&sandbox);
    checkpoint(&sandbox, "green");
    put(&sandbox, "dir/one", "other");
    put(&sandbox, "added", "added");
    rm(&sandbox, "kept");
    rm(&sandbox, "gone/x");
    sandbox.fs().rmdir(NodeId::ROOT, &name("gone")).unwrap();
    sandbox
        .fs()
        .rename(NodeId::ROOT, &name("dir"), NodeId::ROOT, &name("moved"), RenameMode::Replace, 0)
        .unwrap();
    sandbox.fs().mkdir(NodeId::ROOT, &name("dir"), 0o700, 0, ME).unwrap();
    put(&sandbox, "dir/fresh", "fresh");
    let after = picture(&sandbox);
    restore(&sandbox, "green");
    assert_eq!(picture(&sandbox), before);
    let Reply::OpLog(ops) = sandbox.handle(Request::OpLog).unwrap() else { panic!() };
    let sealed = ops.iter().find(|o| o.verb == "seal").unwrap().op;
    sandbox.handle(Request::OpRestore { detach_mounts: false, op: sealed }).unwrap();
    assert_eq!(picture(&sandbox), after, "a restore can be undone");
    drop(sandbox);
    let sandbox = place.open();
    assert_eq!(picture(&sandbox), after, "and it stays so");
    restore(&sandbox, "green");
    assert_eq!(picture(&sandbox), before);
}

#[test]
fn holders_of_a_changed_file_get_an_orphan_and_those_of_an_unchanged_one_keep_it() {
    let place = Place::new();
    place.write("same", "same");
    place.write("other", "base");
    let sandbox = place.open();
    checkpoint(&sandbox, "start");
    let (same, other) = (id(&sandbox, "same"), id(&sandbox, "other"));
    put(&sandbox, "other", "changed");
    restore(&sandbox, "start");
    sandbox.fs().write(other, 0, b"late", false).unwrap();
    assert_eq!(get(&sandbox, "other"), "base", "a late write goes to the old content");
    let orphan = sandbox.fs().read(other, 0, 100).unwrap().read(false).unwrap().unwrap();
    assert_eq!(orphan, b"lateged", "which its holder still reads");
    assert_eq!(sandbox.fs().getattr(other).unwrap().meta.nlink, 0);
    assert_ne!(id(&sandbox, "other"), other);
    assert_eq!(id(&sandbox, "same"), same);
    sandbox.fs().write(same, 0, b"S", false).unwrap();
    assert_eq!(get(&sandbox, "same"), "Same");
    assert!(
        sandbox.fs().link(other, NodeId::ROOT, &name("back")).is_err(),
        "an orphan gets no new name"
    );
}

#[test]
fn a_moved_directory_is_gone_for_processes_inside() {
    let place = Place::new();
    place.write("d/f", "f");
    place.write("stays/f", "f");
    let sandbox = place.open();
    checkpoint(&sandbox, "start");
    let stays = id(&sandbox, "stays");
    sandbox
        .fs()
        .rename(NodeId::ROOT, &name("d"), NodeId::ROOT, &name("e"), RenameMode::Replace, 0)
        .unwrap();
    let (moved, file) = (id(&sandbox, "e"), id(&sandbox, "e/f"));
    restore(&sandbox, "start");
    assert!(sandbox.fs().lookup(moved, &name("f")).is_err());
    assert!(sandbox.fs().mkdir(moved, &name("n"), 0o755, 0, ME).is_err());
    assert!(sandbox.fs().lookup(stays, &name("f")).is_ok());
    assert_eq!(id(&sandbox, "d/f"), file, "a file in it that did not change keeps its holders");
}

#[test]
fn apply_writes_the_tree_to_the_base_and_older_checkpoints_stay_exact() {
    let place = Place::new();
    for n in 0..5 {
        place.write(&format!("d/f{n}"), &format!("base {n}"));
    }
    place.write("twin", "twin");
    host::hard_link(place.base.join("twin"), place.base.join("pair")).unwrap();
    let sandbox = place.open();
    let before = picture(&sandbox);
    checkpoint(&sandbox, "start");
    put(&sandbox, "d/f0", "changed");
    rm(&sandbox, "d/f1");
    put(&sandbox, "twin", "both");
    sandbox.fs().mkdir(NodeId::ROOT, &name("empty"), 0o711, 0, ME).unwrap();
    sandbox.fs().symlink(NodeId::ROOT, &name("link"), b"d/f2", ME).unwrap();
    sandbox
        .fs()
        .setattr(id(&sandbox, "d/f2"), SetAttr { mode: Some(0o600), ..SetAttr::default() }, false)
        .unwrap();
    sandbox
        .fs()
        .rename(id(&sandbox, "d"), &name("f3"), NodeId::ROOT, &name("up"), RenameMode::Replace, 0)
        .unwrap();
    let wanted = picture(&sandbox);
    let (count, conflicts) = apply(&sandbox, &[], false);
    assert!(count >= 7 && conflicts.is_empty(), "{count} {conflicts:?}");
    let read = |path: &str| host::read_to_string(place.base.join(path));
    assert_eq!(read("d/f0").unwrap(), "changed");
    assert!(read("d/f1").is_err() && read("d/f3").is_err());
    assert_eq!(read("up").unwrap(), "base 3");
    assert_eq!((read("twin").unwrap(), read("pair").unwrap()), ("both".into(), "both".into()));
    assert_eq!(host::metadata(place.base.join("pair")).unwrap().nlink(), 2);
    assert_eq!(
        host::metadata(place.base.join("empty")).unwrap().permissions().mode() & 0o777,
        0o711
    );
    assert_eq!(host::read_link(place.base.join("link")).unwrap(), Path::new("d/f2"));
    let strip = |lines: Vec<String>| -> Vec<String> {
        // The host sets change times, reading the base above changed access times, and blocks
        // depend on the place of bytes.
        let part = |l: &str, from: &str, to: &str| {
            l.split(from).nth(1).map(|r| r.split(to).next().unwrap().to_owned())
        };
        let cut = |l: String| match part(&l, "mtime", "ctime") {
            Some(mtime) => {
                format!(
                    "{} {mtime} {:?}",
                    l.split("atime").next().unwrap(),
                    part(&l, "size", "blocks")
                )
            }
            None => l,
        };
        lines.into_iter().map(cut).collect()
    };
    assert_eq!(
        strip(picture(&sandbox)),
        strip(wanted.clone()),
        "the mount shows the same, numbers included"
    );
    assert_eq!(diff(&sandbox, "base", "@"), vec![]);
    drop(sandbox);
    let sandbox = place.open();
    assert_eq!(strip(picture(&sandbox)), strip(wanted.clone()));
    restore(&sandbox, "start");
    assert_eq!(picture(&sandbox), before, "the checkpoint is as it was, although the base is not");
    assert_ne!(diff(&sandbox, "base", "@"), vec![]);
    let (_, conflicts) = apply(&sandbox, &[], false);
    assert!(conflicts.is_empty(), "{conflicts:?}");
    assert_eq!((read("d/f0").unwrap(), read("d/f1").unwrap()), ("base 0".into(), "base 1".into()));
    let (_, conflicts) = apply(&sandbox, &[], true);
    assert!(conflicts.is_empty(), "{conflicts:?}");
    assert_eq!(read("d/f0").unwrap(), "changed", "the last apply is rolled back");
}

#[test]
fn a_changed_base_is_a_conflict_and_stays_untouched() {
    let place = Place::new();
    place.write("f", "base");
    place.write("g", "base");
    let sandbox = place.open();
    put(&sandbox, "f", "mine");
    put(&sandbox, "g", "mine");
    put(&sandbox, "new", "mine");
    std::thread::sleep(std::time::Duration::from_millis(20));
    place.write("f", "theirs");
    place.write("new", "theirs");
    let (_, conflicts) = apply(&sandbox, &[], false);
    assert_eq!(conflicts, ["f", "new"]);
    assert_eq!(host::read_to_string(place.base.join("g")).unwrap(), "base");
    assert_eq!(
        apply(&sandbox, &["g"], false).1,
        Vec::<String>::new(),
        "the rest can be applied by path"
    );
    assert_eq!(host::read_to_string(place.base.join("g")).unwrap(), "mine");
    assert_eq!(get(&sandbox, "f"), "mine");
}

#[test]
fn the_first_byte_written_to_a_large_file_costs_a_block() {
    let place = Place::new();
    let file = host::File::create(place.base.join("large")).unwrap();
    file.set_len(1 << 30).unwrap();
    let sandbox = place.open();
    let large = id(&sandbox, "large");
    sandbox.fs().write(large, (1 << 29) + 5, b"x", false).unwrap();
    let pool = host::metadata(place.store.join("layers/00000001/pool")).unwrap();
    assert!(pool.blocks() * 512 <= 8192, "{} blocks", pool.blocks());
    let around = sandbox.fs().read(large, (1 << 29) + 4, 3).unwrap().read(false).unwrap().unwrap();
    assert_eq!(around, b"\0x\0");
    assert_eq!(sandbox.fs().getattr(large).unwrap().size, 1 << 30);
}

#[test]
fn a_diff_lists_the_changes() {
    let place = Place::new();
    place.write("d/edit", "a\nb\n");
    place.write("d/gone", "x");
    place.write("old/deep/file", "y");
    let sandbox = place.open();
    put(&sandbox, "d/edit", "a\nc\n");
    rm(&sandbox, "d/gone");
    put(&sandbox, "d/new", "n");
    sandbox
        .fs()
        .rename(NodeId::ROOT, &name("old"), NodeId::ROOT, &name("renamed"), RenameMode::Replace, 0)
        .unwrap();
    let expected = [
        (ChangeKind::Modified, "d/edit".to_owned()),
        (ChangeKind::Deleted, "d/gone".to_owned()),
        (ChangeKind::Added, "d/new".to_owned()),
        (ChangeKind::Renamed, "renamed".to_owned()),
    ];
    assert_eq!(diff(&sandbox, "base", "@"), expected);
    checkpoint(&sandbox, "c");
    assert_eq!(diff(&sandbox, "c", "@"), vec![]);
    assert_eq!(diff(&sandbox, "base", "c"), expected);
}

#[test]
fn two_files_of_the_base_never_share_a_number_after_an_apply_by_path() {
    let place = Place::new();
    place.write("a", "text");
    let sandbox = place.open();
    sandbox
        .fs()
        .rename(NodeId::ROOT, &name("a"), NodeId::ROOT, &name("b"), RenameMode::Replace, 0)
        .unwrap();
    assert_eq!(apply(&sandbox, &["b"], false).1, Vec::<String>::new());
    assert!(place.base.join("a").exists() && place.base.join("b").exists());
    restore(&sandbox, "base");
    let number = |path: &str| sandbox.fs().getattr(id(&sandbox, path)).unwrap().ino;
    assert_ne!(number("a"), number("b"));
    put(&sandbox, "b", "other");
    assert_eq!((get(&sandbox, "a"), get(&sandbox, "b")), ("text".into(), "other".into()));
}

/// The longest attribute value that the mount accepts, which is more than a host's filesystem
/// accepts.
fn make_unappliable(sandbox: &Sandbox, path: &str) {
    sandbox
        .fs()
        .setxattr(id(sandbox, path), b"user.large", &[b'x'; 65_536], SetXattr::default())
        .unwrap();
}

fn fails_to_apply(sandbox: &Sandbox) {
    let refused = sandbox.handle(Request::Apply {
        paths: vec![],
        dry_run: false,
        undo: false,
        consent: Default::default(),
    });
    assert!(refused.is_err(), "the host takes no attribute as large as that");
}

#[test]
fn an_apply_that_fails_leaves_base_and_tree_as_they_were() {
    let place = Place::new();
    let long = "0123456789abcdef".repeat(1000);
    for path in ["a", "b", "z"] {
        place.write(path, &long);
    }
    place.write("gone/deep", "x");
    place.write("twin", &long);
    host::hard_link(place.base.join("twin"), place.base.join("pair")).unwrap();
    let sandbox = place.open();
    checkpoint(&sandbox, "start");
    let start = picture(&sandbox);
    // Most of each file is still in the base.
    for path in ["a", "b", "twin"] {
        sandbox.fs().write(id(&sandbox, path), 5, b"mine", false).unwrap();
    }
    rm(&sandbox, "gone/deep");
    sandbox.fs().rmdir(NodeId::ROOT, &name("gone")).unwrap();
    put(&sandbox, "new", "new");
    make_unappliable(&sandbox, "z");
    let changed = picture(&sandbox);
    fails_to_apply(&sandbox);
    for path in ["a", "b", "z", "twin", "pair"] {
        assert_eq!(
            host::read_to_string(place.base.join(path)).unwrap(),
            long,
            "{path} of the base"
        );
    }
    assert_eq!(host::read_to_string(place.base.join("gone/deep")).unwrap(), "x");
    assert!(!place.base.join("new").exists());
    assert_eq!(picture(&sandbox), changed, "the tree does not see it");
    fails_to_apply(&sandbox);
    assert_eq!(picture(&sandbox), changed, "not even twice");
    drop(sandbox);
    let sandbox = place.open();
    assert_eq!(picture(&sandbox), changed, "and a start does not change that");
    restore(&sandbox, "start");
    assert_eq!(picture(&sandbox), start);
    restore(&sandbox, "@-1");
    put(&sandbox, "a", "short");
    let (_, conflicts) = apply(&sandbox, &[], false);
    assert_eq!(conflicts, Vec::<String>::new(), "no other program changed the base");
    assert_eq!(host::read_to_string(place.base.join("a")).unwrap(), "short");
    fails_to_undo_nothing(&sandbox, &place, &long);
}

fn fails_to_undo_nothing(sandbox: &Sandbox, place: &Place, long: &str) {
    make_unappliable(sandbox, "z");
    fails_to_apply(sandbox);
    apply(sandbox, &[], true);
    let undone = host::read_to_string(place.base.join("a")).unwrap();
    assert_eq!(undone, long, "undo is for the last apply that did something");
}

/// Cuts the last frame off a log: 16 bytes of header, whose first four are the length of the rest.
fn cut_last_frame(log: &Path) {
    let bytes = host::read(log).unwrap();
    let (mut at, mut last) = (0, 0);
    while at < bytes.len() {
        last = at;
        at += 16 + u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    }
    host::OpenOptions::new().write(true).open(log).unwrap().set_len(last as u64).unwrap();
}

#[test]
fn an_interrupted_apply_is_rolled_back_at_the_next_start() {
    let place = Place::new();
    let long = "0123456789abcdef".repeat(1000);
    place.write("a", &long);
    place.write("d/gone", "x");
    let sandbox = place.open();
    sandbox.fs().write(id(&sandbox, "a"), 5, b"mine", false).unwrap();
    put(&sandbox, "new", "new");
    rm(&sandbox, "d/gone");
    let changed = picture(&sandbox);
    assert_eq!(apply(&sandbox, &["a", "new", "d"], false).1, Vec::<String>::new());
    assert!(place.base.join("new").exists() && !place.base.join("d/gone").exists());
    drop(sandbox);
    // As if it had been killed right before the seal, which commits the apply.
    let layers = host::read_dir(place.store.join("layers")).unwrap();
    let last = layers.map(|entry| entry.unwrap().path()).max().unwrap();
    cut_last_frame(&last.join("journal"));
    // The ledger is written after the seal.
    host::remove_file(place.store.join("ledger")).unwrap();
    for _ in 0..2 {
        let sandbox = place.open();
        assert_eq!(host::read_to_string(place.base.join("a")).unwrap(), long);
        assert_eq!(host::read_to_string(place.base.join("d/gone")).unwrap(), "x");
        assert!(!place.base.join("new").exists());
        assert_eq!(picture(&sandbox), changed);
    }
    let sandbox = place.open();
    assert_eq!(
        apply(&sandbox, &[], false).1,
        Vec::<String>::new(),
        "no other program changed the base"
    );
    assert!(get(&sandbox, "a").starts_with("01234mine9"));
    assert!(host::read_to_string(place.base.join("a")).unwrap().starts_with("01234mine9"));
}

#[test]
fn a_replaced_base_file_is_never_shown_as_the_old_one() {
    let place = Place::new();
    place.write("seen", "old");
    place.write("covered", "old");
    let sandbox = place.open();
    assert_eq!((get(&sandbox, "seen"), get(&sandbox, "covered")), ("old".into(), "old".into()));
    sandbox
        .fs()
        .setattr(
            id(&sandbox, "covered"),
            SetAttr { mode: Some(0o600), ..SetAttr::default() },
            false,
        )
        .unwrap();
    for path in ["seen", "covered"] {
        place.write("fresh", "new");
        host::rename(place.base.join("fresh"), place.base.join(path)).unwrap();
    }
    let copied_up = id(&sandbox, "covered");
    assert!(sandbox.fs().read(copied_up, 0, 9).is_err(), "the bytes that were copied up are gone");
    // A kernel that has dropped it looks it up again.
    let old = id(&sandbox, "seen");
    sandbox.fs().forget(old, 9);
    assert_eq!(
        get(&sandbox, "seen"),
        "new",
        "content that was never copied up is shown as it is now"
    );
    let Reply::Status(status) = sandbox.handle(Request::Status).unwrap() else { panic!() };
    assert!(status.base_problems.iter().any(|(path, _)| path.to_string() == "covered"));
    // Rewritten in place, while it is open here.
    host::write(place.base.join("seen"), "now").unwrap();
    assert_eq!(get(&sandbox, "seen"), "now");
}

/// Content goes to the layers of different states, some of which are gone when it gets its name.
#[test]
fn content_without_a_name_survives_checkpoints_gc_and_applies_until_it_gets_one() {
    let place = Place::new();
    place.write("f", "base");
    let sandbox = place.open();
    let fs = sandbox.fs();
    let file = fs.tmpfile(NodeId::ROOT, 0o640, 0, ME).unwrap().id;
    let mut wanted = String::new();
    for round in 0..6 {
        let piece = format!("written in round {round}\n").repeat(400);
        fs.write(file, wanted.len() as u64, piece.as_bytes(), false).unwrap();
        wanted.push_str(&piece);
        put(&sandbox, "f", &format!("round {round}"));
        checkpoint(&sandbox, &format!("c{round}"));
        match round {
            1 => drop(apply(&sandbox, &[], false)),
            2 => restore(&sandbox, "c0"),
            3 => {
                sandbox.handle(Request::Drop { rev: Rev::parse("c1") }).unwrap();
                sandbox.handle(Request::Drop { rev: Rev::parse("c2") }).unwrap();
            }
            _ => {}
        }
        let gc = Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false };
        sandbox.handle(gc).unwrap();
        sandbox.compact().unwrap();
    }
    let before = picture(&sandbox);
    assert!(before.iter().all(|line| !line.contains("late")));
    assert_eq!(fs.link(file, NodeId::ROOT, &name("late")).unwrap().id, file);
    assert_eq!(get(&sandbox, "late"), wanted);
    fs.sync().unwrap();
    checkpoint(&sandbox, "named");
    drop(sandbox);
    assert!(Sandbox::check_store(&place.store, true).unwrap().problems.is_empty());
    let sandbox = place.open();
    assert_eq!(get(&sandbox, "late"), wanted);
    restore(&sandbox, "c5");
    assert_eq!(picture(&sandbox), before);
}

#[test]
fn a_link_of_a_file_without_a_name_that_fails_can_be_tried_again() {
    let mut failed = 0;
    for step in 1..=4 {
        let place = Place::new();
        let sandbox = place.open();
        let fs = sandbox.fs();
        let file = fs.tmpfile(NodeId::ROOT, 0o600, 0, ME).unwrap().id;
        fs.write(file, 0, b"content", false).unwrap();
        let link = || fs.link(file, NodeId::ROOT, &name("f"));
        let first = failpoint::with(&format!("fail:store.write:{step}:EIO"), link);
        if first.is_err() {
            failed += 1;
            assert_eq!(fs.getattr(file).unwrap().meta.nlink, 0);
            assert!(fs.lookup(NodeId::ROOT, &name("f")).is_err());
            link().unwrap();
        }
        assert_eq!(get(&sandbox, "f"), "content");
        assert_eq!(fs.getattr(file).unwrap().meta.nlink, 1);
    }
    assert!(failed > 0);
}

/// Otherwise no sync would ever reach the pool to which it was written.
#[test]
fn content_without_a_name_is_sealed_although_nothing_else_changed() {
    for verb in ["restore", "apply"] {
        let place = Place::new();
        place.write("f", "base");
        let sandbox = place.open();
        let fs = sandbox.fs();
        put(&sandbox, "f", "changed");
        checkpoint(&sandbox, "c");
        put(&sandbox, "f", "changed again");
        checkpoint(&sandbox, "d");
        let file = fs.tmpfile(NodeId::ROOT, 0o600, 0, ME).unwrap().id;
        fs.write(file, 0, &[7; 100_000], false).unwrap();
        let written_to = fs.upper_layer();
        match verb {
            "restore" => restore(&sandbox, "c"),
            _ => drop(apply(&sandbox, &[], false)),
        }
        assert_ne!(fs.upper_layer(), written_to, "{verb}");
        let layer = fs.store().layer(written_to).unwrap();
        assert!(layer.seal.is_some(), "{verb}: it is not sealed");
        fs.link(file, NodeId::ROOT, &name("late")).unwrap();
        assert_eq!(get(&sandbox, "late").len(), 100_000);
        drop(sandbox);
        assert!(Sandbox::check_store(&place.store, true).unwrap().problems.is_empty());
    }
}

#[test]
fn attributes_that_only_the_host_can_interpret_are_refused() {
    let place = Place::new();
    place.write("f", "");
    let sandbox = place.open();
    let set =
        |name: &[u8]| sandbox.fs().setxattr(id(&sandbox, "f"), name, b"x", SetXattr::default());
    assert_eq!(set(b"system.odd"), Err(jailfs::error::FsError::Unsupported));
    assert_eq!((set(b"user.odd"), set(b"trusted.odd")), (Ok(()), Ok(())));
}

#[test]
fn very_many_checkpoints_keep_few_files_open() {
    let place = Place::new();
    let sandbox = place.open();
    for n in 0..300 {
        put(&sandbox, &format!("f{n}"), "x");
        checkpoint(&sandbox, &format!("c{n}"));
    }
    for n in 0..300 {
        assert_eq!(get(&sandbox, &format!("f{n}")), "x");
    }
    let layers = place.store.join("layers");
    let open = host::read_dir("/proc/self/fd").unwrap();
    let ours = open.filter(|fd| {
        host::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to.starts_with(&layers))
    });
    assert!(ours.count() < 150, "a process may hold only so many");
}

/// A checkpoint that was killed before its seal: `main` still names the layer that was to be
/// sealed.
fn checkpoint_without_seal(place: &Place) {
    let published = ["heads/main", "heads.log", "ledger"].map(|name| place.store.join(name));
    let sandbox = place.open();
    put(&sandbox, "before", "before");
    let before = published.each_ref().map(|path| host::read(path).unwrap());
    let layer = checkpoint(&sandbox, "never");
    put(&sandbox, "after", "after");
    drop(sandbox);
    cut_last_frame(&place.store.join(format!("layers/{:08}/journal", layer.0)));
    for (path, bytes) in published.iter().zip(before) {
        host::write(path, bytes).unwrap();
    }
}

#[test]
fn an_interrupted_checkpoint_loses_nothing_and_does_not_exist() {
    let place = Place::new();
    checkpoint_without_seal(&place);
    for _ in 0..2 {
        let sandbox = place.open();
        assert_eq!(
            (get(&sandbox, "before"), get(&sandbox, "after")),
            ("before".into(), "after".into())
        );
        let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!() };
        let seals: Vec<_> = log.iter().map(|c| (c.automatic, c.name.clone())).collect();
        assert_eq!(seals, [(true, None)], "the layer below is sealed now, as an unnamed state");
    }
}

#[test]
fn a_gc_after_a_failed_seal_keeps_the_content_of_that_layer() {
    let mut failed = 0;
    for step in 1..=8 {
        let place = Place::new();
        let sandbox = place.open();
        put(&sandbox, "f", "of the layer whose seal failed");
        let request = Request::Checkpoint { name: None, message: String::new() };
        let made =
            failpoint::with(&format!("fail:store.write:{step}:EIO"), || sandbox.handle(request));
        failed += usize::from(made.is_err());
        put(&sandbox, "g", "of the one above");
        let gc = Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false };
        sandbox.handle(gc).unwrap();
        let is_whole = |sandbox: Arc<Sandbox>| {
            assert_eq!(get(&sandbox, "f"), "of the layer whose seal failed", "step {step}");
            assert_eq!(get(&sandbox, "g"), "of the one above", "step {step}");
            drop(sandbox);
            let checked = Sandbox::check_store(&place.store, true).unwrap();
            assert!(checked.problems.is_empty(), "step {step}: {:?}", checked.problems);
        };
        is_whole(sandbox);
        is_whole(place.open());
    }
    assert!(failed > 1);
}

#[test]
fn a_compaction_passes_over_a_layer_whose_seal_failed() {
    let mut unsealed = 0;
    for step in 1..=8 {
        let place = Place::new();
        let sandbox = place.open();
        put(&sandbox, "f", "of the layer whose seal failed");
        let request = Request::Checkpoint { name: None, message: String::new() };
        let _made =
            failpoint::with(&format!("fail:store.write:{step}:EIO"), || sandbox.handle(request));
        let store = sandbox.fs().store();
        let below = store.layer(sandbox.fs().upper_layer()).unwrap().header.parent;
        unsealed += usize::from(below.is_some_and(|id| store.layer(id).unwrap().seal.is_none()));
        sandbox.compact().unwrap_or_else(|error| panic!("step {step}: {error}"));
        assert_eq!(get(&sandbox, "f"), "of the layer whose seal failed", "step {step}");
    }
    assert!(unsealed > 0, "no seal failed after the next layer was begun");
}

/// After the rename, the new log is at the place of the old one: records appended to the old one
/// would never be read.
#[test]
fn nothing_is_acknowledged_into_a_log_that_has_been_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let op = |number: u32| OpRecord {
        head: "main".to_owned(),
        time: Timestamp::default(),
        verb: OpVerb::Checkpoint,
        description: number.to_string(),
        tree: None,
        epoch: Epoch(0),
    };
    let store = Store::create(&path, b"/base", (1, 1), StoreOptions::default()).unwrap();
    for number in 1..=10 {
        store.append_op(op(number)).unwrap();
    }
    let trimmed = failpoint::with("fail:store.sync-dir:1:EIO", || store.trim_ops(3));
    let acknowledged = store.append_op(op(11)).is_ok();
    drop(store);
    let store = Store::open(&path, (1, 1), StoreOptions::default()).unwrap();
    let descriptions: Vec<String> = store.ops().into_iter().map(|(_, op)| op.description).collect();
    assert_eq!(descriptions, ["8", "9", "10"], "{trimmed:?}");
    assert!(!acknowledged, "the caller learned that the operation is in the log");
    assert_eq!(store.append_op(op(11)).unwrap(), 11);
}

/// The head is published by a rename and a sync of its directory. Either can fail, and so can the
/// rollback.
#[test]
fn a_restore_whose_publishing_fails_says_whether_it_was_done() {
    let restore = || Request::Restore {
        detach_mounts: false,
        to: Rev::Back(1),
        paths: Vec::new(),
        dry_run: false,
    };
    for rule in
        ["fail:store.sync-dir:#:EIO", "fail:store.sync-dir:#+:EIO", "fail:store.rename:#+:EIO"]
    {
        let (mut kept, mut stopped) = (0, 0);
        for step in 1.. {
            let place = Place::new();
            let sandbox = place.open();
            put(&sandbox, "f", "then");
            checkpoint(&sandbox, "then");
            put(&sandbox, "f", "now");
            sandbox.fs().sync().unwrap();
            let rule = rule.replace('#', &step.to_string());
            let result = failpoint::with(&rule, || sandbox.handle(restore()));
            let seen = get(&sandbox, "f");
            let was_done = result.as_ref().map_or_else(|error| error.is_done, |_| true);
            assert_eq!(seen, if was_done { "then" } else { "now" }, "{rule}: {result:?}");
            kept += usize::from(!was_done);
            // If the content of the disk is unknown, no change that could be lost is accepted.
            let file = id(&sandbox, "f");
            match sandbox.fs().write(file, 0, b"THE", false) {
                Ok(()) => assert!(get(&sandbox, "f").starts_with("THE"), "{rule}"),
                Err(error) => {
                    let Reply::Status(status) = sandbox.handle(Request::Status).unwrap() else {
                        panic!()
                    };
                    assert!(status.sync_failed && result.is_err(), "{rule}: {error}");
                    stopped += 1;
                }
            }
            let seen = get(&sandbox, "f");
            drop(sandbox);
            assert_eq!(
                get(&place.open(), "f"),
                seen,
                "{rule}: the next start shows another tree: {result:?}"
            );
            assert!(
                Sandbox::check_store(&place.store, true).unwrap().problems.is_empty(),
                "{rule}"
            );
            if result.is_ok() {
                break;
            }
        }
        assert!(
            kept > 1 && (stopped > 0) == rule.contains('+'),
            "{rule}: {kept} kept, {stopped} stopped"
        );
    }
}

/// Of a sync of many bytes, the content comes first.
#[test]
fn a_sync_of_few_bytes_is_one_sync_of_the_disk() {
    let place = Place::new();
    let sandbox = place.open();
    put(&sandbox, "f", "first");
    sandbox.fs().sync().unwrap();
    let file = id(&sandbox, "f");
    let syncs = |bytes: &[u8]| {
        let (synced, calls) = failpoint::trace(|| {
            sandbox.fs().write(file, 0, bytes, false).unwrap();
            sandbox.fs().sync()
        });
        synced.unwrap();
        calls.iter().filter(|(call, _)| *call == Failpoint::StoreSync).count()
    };
    let small: usize = (0..100).map(|n| syncs(&[n; 100])).sum();
    assert_eq!(small, 100);
    assert_eq!((syncs(&[7; 100_000]), syncs(&[8; 100])), (2, 1));
}

/// A sync of few bytes has one step, the records; a sync of many has the content before it.
#[test]
fn a_sync_without_space_is_reported_and_the_next_one_makes_up_for_it() {
    let place = Place::new();
    let sandbox = place.open();
    for errno in ["EDQUOT", "ENOSPC"] {
        let wanted = if errno == "EDQUOT" { nix::libc::EDQUOT } else { nix::libc::ENOSPC };
        for (first, times) in [(1, 1), (2, 1), (1, 20_000), (2, 20_000), (3, 20_000)] {
            let name = format!("{errno}{first} of {times}");
            put(&sandbox, &name, &"written".repeat(times));
            let result = failpoint::with(&format!("fail:store.sync:{first}+:{errno}"), || {
                sandbox.fs().sync()
            });
            match result.map_err(Error::from) {
                Err(error) => assert_eq!(error.errno, Some(wanted), "{name}"),
                Ok(()) => assert!(first > 2 || times == 1 && first > 1, "{name}: fewer steps"),
            }
            // The reserve is for it, so one failure is never too much.
            let file = id(&sandbox, &name);
            sandbox.fs().write(file, 0, b"more of it", false).unwrap();
            failpoint::with(&format!("fail:store.sync:{first}:{errno}"), || sandbox.fs().sync())
                .unwrap();
            checkpoint(&sandbox, &name);
            let Reply::Status(status) = sandbox.handle(Request::Status).unwrap() else {
                panic!("no status")
            };
            assert!(!status.sync_failed, "{name}");
        }
    }
    drop(sandbox);
    assert!(Sandbox::check_store(&place.store, true).unwrap().problems.is_empty());
    assert_eq!(get(&place.open(), "EDQUOT2 of 1"), "more of it");
}

#[test]
fn after_a_failed_sync_nothing_is_promised_and_the_next_start_shows_what_was_synced() {
    // Many bytes are synced first, few with their records.
    for (times, failing, lost) in [
        (1, "fail:store.sync:1:EIO", b"ws"),
        (20_000, "fail:store.sync:1:EIO", b"ws"),
        // The pool was synced.
        (20_000, "fail:store.sync:2:EIO", b"ww"),
    ] {
        let written = "written".repeat(times);
        let place = Place::new();
        let sandbox = place.open();
        put(&sandbox, "f", "synced");
        sandbox.fs().sync().unwrap();
        put(&sandbox, "f", &written);
        let result = failpoint::with(failing, || sandbox.fs().sync());
        assert!(result.is_err(), "{failing}");
        // By now the host would report success.
        assert!(sandbox.fs().sync().is_err(), "{failing}");
        let file = id(&sandbox, "f");
        match sandbox.fs().write(file, 0, b"more", false) {
            Err(FsError::Store(error)) => {
                assert_eq!(error.errno, Some(nix::libc::EIO), "{failing}")
            }
            other => panic!("{failing}: {other:?}"),
        }
        let request = Request::Checkpoint { name: None, message: String::new() };
        assert!(sandbox.handle(request).is_err(), "{failing}");
        assert_eq!(get(&sandbox, "f"), written, "the content can be copied out");
        let Reply::Status(status) = sandbox.handle(Request::Status).unwrap() else {
            panic!("no status")
        };
        assert!(status.sync_failed);
        drop(sandbox);
        // As if the host had lost it, and bytes that only the journal has for certain.
        let pool = place.store.join("layers/00000001/pool");
        let left = host::read(&pool)
            .unwrap()
            .iter()
            .map(|byte| if lost.contains(byte) { 0 } else { *byte })
            .collect::<Vec<u8>>();
        host::write(&pool, left).unwrap();
        let sandbox = place.open();
        assert_eq!(get(&sandbox, "f"), "synced", "{failing}");
        put(&sandbox, "f", "again");
        checkpoint(&sandbox, "again");
        drop(sandbox);
        assert!(Sandbox::check_store(&place.store, true).unwrap().problems.is_empty());
    }
}

#[test]
fn a_request_after_a_checkpoint_that_is_reported_early_sees_it() {
    let place = Place::new();
    let sandbox = place.open();
    let early = |name: &str| {
        let message = "m".to_owned();
        sandbox.handle(Request::CheckpointEarly { name: Some(name.to_owned()), message })
    };
    for round in 0..20 {
        put(&sandbox, "f", &format!("{round}"));
        let name = format!("c{round}");
        let Ok(Reply::Checkpoint(made)) = early(&name) else { panic!("{name}") };
        put(&sandbox, "f", "later");
        let Ok(Reply::Log(log)) = sandbox.handle(Request::Log) else { panic!("no log") };
        assert_eq!(log.first(), Some(&made));
        assert_eq!((made.name.as_deref(), &*made.message), (Some(&*name), "m"));
        let again = early(&name).unwrap_err();
        assert!(again.reason.contains("of this head has this name"), "{again}");
        restore(&sandbox, &name);
        assert_eq!(get(&sandbox, "f"), format!("{round}"));
    }
    drop(sandbox);
    assert!(Sandbox::check_store(&place.store, true).unwrap().problems.is_empty());
    assert_eq!(get(&place.open(), "f"), "19");
}

#[test]
fn a_message_that_could_hold_a_frame_of_a_journal_is_refused() {
    let place = Place::new();
    let sandbox = place.open();
    let message = || "a\0b".to_owned();
    for request in [
        Request::Checkpoint { name: None, message: message() },
        Request::CheckpointEarly { name: None, message: message() },
    ] {
        let error = sandbox.handle(request).unwrap_err();
        assert_eq!((error.kind, &*error.reason), (Kind::Usage, "the message has a NUL byte"));
    }
    put(&sandbox, "f", "later");
    sandbox.fs().sync().unwrap();
    checkpoint(&sandbox, "one");
}

#[test]
fn a_layer_that_was_never_synced_is_there_after_its_sync_failed() {
    let place = Place::new();
    drop(place.open());
    let sandbox = place.open();
    put(&sandbox, "f", "lost");
    assert!(failpoint::with("fail:store.sync:1:EIO", || sandbox.fs().sync()).is_err());
    drop(sandbox);
    assert!(Sandbox::check_store(&place.store, true).unwrap().problems.is_empty());
    let sandbox = place.open();
    assert!(sandbox.fs().lookup(NodeId::ROOT, &name("f")).is_err(), "it was not synced");
    put(&sandbox, "f", "again");
    sandbox.fs().sync().unwrap();
    drop(sandbox);
    assert_eq!(get(&place.open(), "f"), "again");
}
