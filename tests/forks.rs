//! Heads without a mount: forks are independent, cost the same whatever the tree holds, and no
//! operation of one head changes what another shows or needs.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failure is what a test is for")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs as host;
use std::sync::Arc;

use jailfs::error::{Error, Kind};
use jailfs::internals::fs::Caller;
use jailfs::internals::store::checkpoint_names::name_of;
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{Detail, Fork, Node, Operation, Reply, Request, Rev, Sandbox, StoreOptions};
use jailfs::types::{FileKind, Name, NodeId, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };

struct Place {
    _dir: tempfile::TempDir,
    base: std::path::PathBuf,
    store: std::path::PathBuf,
}

impl Place {
    /// A base with files `a`, `b` and `dir/c`.
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        host::create_dir_all(base.join("dir")).unwrap();
        for path in ["a", "b", "dir/c"] {
            host::write(base.join(path), format!("{path} of the base\n")).unwrap();
        }
        Place { _dir: dir, base, store }
    }

    fn open(&self) -> Arc<Sandbox> {
        Sandbox::create_or_open(&self.base, &self.store, &StoreOptions::default()).unwrap()
    }

    fn is_sound(&self) {
        let checked = Sandbox::check_store(&self.store, true).unwrap();
        assert_eq!((checked.problems, checked.warnings), (Vec::new(), Vec::new()));
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

fn put(sandbox: &Sandbox, path: &str, text: &str) {
    let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
    let dir = id(sandbox, dir);
    let file = match sandbox.fs().lookup(dir, &name(last)) {
        Ok(entry) => entry.id,
        Err(_) => sandbox.fs().mknod(dir, &name(last), 0o100_644, 0, 0, ME).unwrap().id,
    };
    sandbox.fs().truncate(file, 0, false).unwrap();
    sandbox.fs().write(file, 0, text.as_bytes(), false).unwrap();
}

fn get(sandbox: &Sandbox, path: &str) -> String {
    let fs = sandbox.fs();
    let bytes = fs.read(id(sandbox, path), 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    String::from_utf8(bytes).unwrap()
}

fn remove(sandbox: &Sandbox, path: &str) {
    let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
    sandbox.fs().unlink(id(sandbox, dir), &name(last)).unwrap();
}

fn try_fork(sandbox: &Sandbox, names: &[&str], from: Option<&str>) -> Result<Vec<Fork>, Error> {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    match sandbox.handle(Request::Fork { names, from: from.map(Rev::parse) })? {
        Reply::Forked(forks) => Ok(forks),
        other => panic!("{other:?}"),
    }
}

fn fork(sandbox: &Sandbox, name: &str) -> Fork {
    try_fork(sandbox, &[name], None).unwrap().remove(0)
}

fn forks(sandbox: &Sandbox) -> Vec<Fork> {
    match sandbox.handle(Request::Forks).unwrap() {
        Reply::Forks(forks) => forks,
        other => panic!("{other:?}"),
    }
}

fn names(sandbox: &Sandbox) -> Vec<String> {
    forks(sandbox).into_iter().map(|fork| fork.name).collect()
}

fn drop_fork(sandbox: &Sandbox, name: &str) -> Result<(), Error> {
    sandbox.handle(Request::DropFork { name: name.to_owned() }).map(drop)
}

fn checkpoint(sandbox: &Sandbox, name: &str) {
    let request = Request::Checkpoint { name: Some(name.to_owned()), message: String::new() };
    sandbox.handle(request).unwrap();
}

fn restore(sandbox: &Sandbox, to: &str) {
    sandbox
        .handle(Request::Restore {
            to: Rev::parse(to),
            paths: Vec::new(),
            dry_run: false,
            detach_mounts: false,
        })
        .unwrap();
}

fn apply(sandbox: &Sandbox, paths: &[&str], undo: bool) -> Result<Reply, Error> {
    let paths = paths.iter().map(|path| TreePath::parse(path.as_bytes()).unwrap()).collect();
    sandbox.handle(Request::Apply { paths, dry_run: false, undo, consent: Default::default() })
}

fn gc(sandbox: &Sandbox) {
    let request = Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false };
    sandbox.handle(request).unwrap();
}

fn operations(sandbox: &Sandbox) -> Vec<Operation> {
    match sandbox.handle(Request::OpLog).unwrap() {
        Reply::OpLog(operations) => operations,
        other => panic!("{other:?}"),
    }
}

fn store_bytes(sandbox: &Sandbox) -> u64 {
    match sandbox.handle(Request::Info).unwrap() {
        Reply::Info(info) => info.store_bytes,
        other => panic!("{other:?}"),
    }
}

/// Every path of a state: its attributes and its bytes.
type Seen = BTreeMap<String, (Node, Vec<u8>)>;

fn seen(sandbox: &Sandbox, rev: &str) -> Seen {
    let mut all = Seen::new();
    let mut left = vec![TreePath::root()];
    while let Some(path) = left.pop() {
        let request = Request::Show { rev: Rev::parse(rev), path: path.clone(), offset: 0 };
        let Reply::Shown(shown) = sandbox.handle(request).unwrap() else { panic!() };
        if shown.node.file == FileKind::Dir {
            left.extend(shown.entries.iter().map(|node| node.path.clone()));
        }
        all.insert(path.to_string(), (shown.node, shown.bytes));
    }
    all
}

#[test]
fn a_fork_begins_with_the_tree_and_goes_its_own_way() {
    let place = Place::new();
    let main = place.open();
    put(&main, "a", "changed\n");
    put(&main, "new", "new\n");
    let before = seen(&main, "@");
    let made = fork(&main, "try");
    assert_eq!((made.parent.as_deref(), made.forked_at), (Some("main"), Some(made.top)));
    assert_eq!(seen(&main, "try@"), before, "a fork that is not open can be read");
    let fork = main.head("try").unwrap();
    assert_eq!(fork.head_name(), "try");
    assert_eq!(seen(&fork, "@"), before);
    put(&fork, "a", "by the fork\n");
    put(&main, "b", "by main\n");
    remove(&fork, "new");
    assert_eq!((get(&main, "a"), get(&fork, "a")), ("changed\n".into(), "by the fork\n".into()));
    assert_eq!(get(&fork, "b"), "b of the base\n");
    assert_eq!(get(&main, "new"), "new\n");
    assert!(Arc::ptr_eq(&fork, &main.head("try").unwrap()), "one sandbox for each head");
    let (of_main, of_fork) = (seen(&main, "@"), seen(&fork, "@"));
    assert_eq!((seen(&fork, "main@"), seen(&main, "try@")), (of_main.clone(), of_fork.clone()));
    drop((main, fork));
    place.is_sound();
    let main = place.open();
    assert_eq!((seen(&main, "@"), seen(&main, "try@")), (of_main, of_fork.clone()));
    assert_eq!(seen(&main.head("try").unwrap(), "@"), of_fork);
}

#[test]
fn a_fork_of_a_fork_and_of_older_states() {
    let place = Place::new();
    let main = place.open();
    put(&main, "a", "1\n");
    checkpoint(&main, "one");
    put(&main, "a", "2\n");
    for (name, from, a) in [
        ("now", "@", "2\n"),
        ("old", "one", "1\n"),
        ("bare", "base", "a of the base\n"),
        ("again", "old@", "1\n"),
        ("back", "now@-1", "1\n"),
    ] {
        try_fork(&main, &[name], Some(from)).unwrap();
        assert_eq!(get(&main.head(name).unwrap(), "a"), a, "{name}");
    }
    let again = main.head("again").unwrap();
    put(&again, "a", "3\n");
    let made = fork(&again, "third");
    assert_eq!(made.parent.as_deref(), Some("again"));
    drop(again);
    assert_eq!(get(&main.head("third").unwrap(), "a"), "3\n");
    let made = try_fork(&main, &["t-1", "t-2", "t-3"], None).unwrap();
    assert_eq!(made.len(), 3);
    assert_eq!(get(&main.head("t-3").unwrap(), "a"), "2\n");
    place.is_sound();
}

#[test]
fn log_and_status_say_the_head() {
    let place = Place::new();
    let main = place.open();
    fork(&main, "try");
    let fork = main.head("try").unwrap();
    put(&fork, "a", "x\n");
    checkpoint(&fork, "in-fork");
    let Reply::Status(status) = fork.handle(Request::Status).unwrap() else { panic!() };
    assert_eq!((status.head.as_str(), status.changed), ("try", 0));
    let Reply::Log(log) = main.handle(Request::Log).unwrap() else { panic!() };
    let made = log.iter().find(|c| c.name.as_deref() == Some("in-fork")).unwrap();
    assert_eq!((made.head.as_str(), made.current), ("try", false));
    let last = &operations(&main)[0];
    assert_eq!((last.head.as_str(), last.verb.as_str()), ("try", "checkpoint"));
    let forked = &operations(&main)[1];
    assert_eq!((forked.verb.as_str(), forked.description.as_str()), ("fork", "try"));
    // Below 'main' there is no checkpoint.
    let diff = |from: &str, to: &str| {
        main.handle(Request::Diff {
            from: Rev::parse(from),
            to: Rev::parse(to),
            paths: Vec::new(),
            detail: Detail::NameStatus,
        })
    };
    assert!(diff("@-1", "@").is_err());
    let Reply::Diff(changes) = diff("main@", "try@-1").unwrap() else { panic!() };
    assert_eq!(changes.to_vec().unwrap().len(), 1);
    assert_eq!(diff("absent@", "@").unwrap_err().kind, Kind::NoStore);
}

/// The number of calls and the bytes of the store, not the time: those are the same at every run.
#[test]
fn a_fork_costs_the_same_for_any_number_of_changed_files() {
    let cost = |changed: usize| {
        let place = Place::new();
        let main = place.open();
        for number in 0..changed {
            put(&main, &format!("file-{number}"), "x");
        }
        put(&main, "last", "x");
        checkpoint(&main, "sealed");
        // The first fork raises the format of the store.
        fork(&main, "first");
        let before = store_bytes(&main);
        let (_, calls) = failpoint::trace(|| fork(&main, "try"));
        (calls.len(), store_bytes(&main) - before)
    };
    let (few, many) = (cost(0), cost(10_000));
    assert_eq!(few.0, many.0, "calls");
    assert!(many.1 <= few.1.max(20 << 10), "{few:?} {many:?}");
}

#[test]
fn an_apply_leaves_other_heads_exact() {
    for paths in [&[][..], &["a", "dir"][..]] {
        let place = Place::new();
        let main = place.open();
        put(&main, "b", "copied up\n");
        try_fork(&main, &["open", "closed", "unused"], None).unwrap();
        let open = main.head("open").unwrap();
        put(&open, "dir/own", "own\n");
        let closed = main.head("closed").unwrap();
        put(&closed, "b", "closed\n");
        drop(closed);
        put(&main, "a", "applied\n");
        put(&main, "dir/c", "applied too\n");
        put(&main, "dir/new", "made\n");
        let before = ["open@", "closed@", "unused@"].map(|rev| seen(&main, rev));
        let same = |when: &str| {
            let now = ["open@", "closed@", "unused@"].map(|rev| seen(&main, rev));
            assert_eq!(now, before, "{paths:?}: {when}");
            assert_eq!(get(&open, "dir/c"), "dir/c of the base\n");
        };
        apply(&main, paths, false).unwrap();
        assert_eq!(host::read_to_string(place.base.join("a")).unwrap(), "applied\n");
        same("after the apply");
        put(&open, "dir/own2", "own\n");
        remove(&open, "dir/own2");
        apply(&main, &[], true).unwrap();
        assert_eq!(host::read_to_string(place.base.join("a")).unwrap(), "a of the base\n");
        let now = seen(&open, "@");
        let is_file = |(_, (node, _)): &(&String, &(Node, Vec<u8>))| node.file == FileKind::File;
        assert!(now.iter().filter(is_file).eq(before[0].iter().filter(is_file)), "after the undo");
        apply(&main, &[], false).unwrap();
        gc(&main);
        let now = seen(&main.head("closed").unwrap(), "@");
        assert_eq!(now, before[1], "{paths:?}: opened after the applies and gc");
        drop((open, main));
        place.is_sound();
        let main = place.open();
        assert_eq!(seen(&main, "unused@"), before[2], "{paths:?}: after another start");
    }
}

/// Each change of the base fails once, so the apply is rolled back.
#[test]
fn an_apply_that_is_rolled_back_leaves_other_heads_exact() {
    let (mut failed, mut number) = (0, 0);
    loop {
        number += 1;
        let place = Place::new();
        let main = place.open();
        fork(&main, "try");
        let other = main.head("try").unwrap();
        put(&other, "b", "other\n");
        let before = seen(&other, "@");
        put(&main, "a", "applied\n");
        put(&main, "dir/c", "applied too\n");
        remove(&main, "b");
        let rule = format!("fail:base:{number}:EIO");
        let applied = failpoint::with(&rule, || apply(&main, &[], false));
        assert_eq!(seen(&other, "@"), before, "{rule}: {applied:?}");
        drop((other, main));
        assert_eq!(seen(&place.open(), "try@"), before, "{rule}: after another start");
        if applied.is_ok() {
            break;
        }
        failed += 1;
    }
    assert!(failed > 5, "it failed {failed} times");
}

#[test]
fn a_restore_in_one_head_leaves_another_alone() {
    let place = Place::new();
    let main = place.open();
    put(&main, "a", "1\n");
    checkpoint(&main, "one");
    put(&main, "a", "2\n");
    fork(&main, "try");
    let other = main.head("try").unwrap();
    put(&other, "b", "other\n");
    let before = seen(&other, "@");
    let held = id(&other, "b");
    restore(&main, "one");
    restore(&main, "base");
    assert_eq!(seen(&other, "@"), before);
    assert_eq!(id(&other, "b"), held);
    let of_main = seen(&main, "@");
    restore(&other, "one");
    assert_eq!(get(&other, "a"), "1\n");
    assert_eq!(seen(&main, "@"), of_main);
    // An undo is one of the own head.
    let undo = operations(&main).into_iter().find(|op| op.head == "main").unwrap();
    assert_eq!(undo.verb, "restore");
}

#[test]
fn dropping_a_head_and_gc_free_what_only_it_needed() {
    let place = Place::new();
    let main = place.open();
    put(&main, "a", "main\n");
    fork(&main, "try");
    gc(&main);
    let before = store_bytes(&main);
    let other = main.head("try").unwrap();
    let megabyte: String = (0..1 << 20).map(|n: u32| char::from(b'a' + (n % 23) as u8)).collect();
    put(&other, "large", &megabyte);
    fork(&other, "child");
    put(&other, "larger", &megabyte);
    drop(other);
    assert!(store_bytes(&main) > before + (2 << 20));
    drop_fork(&main, "try").unwrap();
    gc(&main);
    let child = main.head("child").unwrap();
    assert_eq!(get(&child, "large"), megabyte, "the child of a dropped head needs it");
    assert!(child.fs().lookup(NodeId::ROOT, &name("larger")).is_err());
    drop(child);
    drop_fork(&main, "child").unwrap();
    gc(&main);
    let after = store_bytes(&main);
    assert!(after <= before + (64 << 10), "{before} bytes, then {after}");
    assert_eq!(names(&main), ["main"]);
    drop(main);
    place.is_sound();
    assert_eq!(get(&place.open(), "a"), "main\n");
}

#[test]
fn gc_keeps_the_newest_checkpoints_of_each_head() {
    let place = Place::new();
    let main = place.open();
    let work = |sandbox: &Sandbox, head: &str| {
        for n in 1..=3 {
            put(sandbox, "a", &format!("{head} {n}\n"));
            checkpoint(sandbox, &format!("{head}{n}"));
        }
    };
    work(&main, "main");
    for head in ["try", "gone", "lost"] {
        fork(&main, head);
        work(&main.head(head).unwrap(), head);
    }
    drop_fork(&main, "gone").unwrap();
    drop_fork(&main, "lost").unwrap();
    let kept = || -> Vec<String> {
        let Reply::Log(log) = main.handle(Request::Log).unwrap() else { panic!("no log") };
        log.into_iter().rev().filter_map(|one| one.name).collect()
    };
    let keep = |n| Request::Gc { operations: 0, keep: Some(n), max_store: None, dry_run: false };
    main.handle(keep(2)).unwrap();
    assert_eq!(kept(), ["main2", "main3", "try2", "try3", "lost2", "lost3"]);
    main.handle(keep(1)).unwrap();
    assert_eq!(kept(), ["main3", "try3", "lost3"]);
    restore(&main, "try3");
    assert_eq!(get(&main, "a"), "try 3\n");
    drop(main);
    place.is_sound();
}

#[test]
fn gc_frees_nothing_that_another_head_needs() {
    let place = Place::new();
    let main = place.open();
    let text = |what: &str| what.repeat(20_000);
    put(&main, "shared", &text("shared"));
    try_fork(&main, &["open", "closed", "unused"], None).unwrap();
    let open = main.head("open").unwrap();
    put(&open, "own", &text("own of open"));
    put(&open, "orphan", &text("orphan"));
    let orphan = id(&open, "orphan");
    remove(&open, "orphan");
    put(&open, "edited", &text("before"));
    checkpoint(&open, "sealed");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    put(&open, "edited", &text("after"));
    let closed = main.head("closed").unwrap();
    put(&closed, "own", &text("own of closed"));
    put(&closed, "edited", &text("before"));
    std::thread::sleep(std::time::Duration::from_millis(1100));
    put(&closed, "edited", &text("after"));
    remove(&closed, "shared");
    drop(closed);
    remove(&main, "shared");
    restore(&main, "base");
    main.handle(Request::Drop { rev: Rev::parse("sealed") }).unwrap();
    let before = ["open@", "closed@", "unused@"].map(|rev| seen(&main, rev));
    for _ in 0..2 {
        gc(&main);
        main.compact().unwrap();
    }
    let now = ["open@", "closed@", "unused@"].map(|rev| seen(&main, rev));
    assert_eq!(now, before);
    let read = open.fs().read(orphan, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    assert_eq!(read, text("orphan").into_bytes());
    let undo = |sandbox: &Sandbox| {
        let path = TreePath::parse(b"edited").unwrap();
        sandbox.handle(Request::Undo { path, steps: 1 }).unwrap();
        assert_eq!(get(sandbox, "edited"), text("before"), "{}", sandbox.head_name());
    };
    undo(&open);
    let closed = main.head("closed").unwrap();
    undo(&closed);
    assert_eq!(get(&main.head("unused").unwrap(), "shared"), text("shared"));
    drop((open, closed, main));
    place.is_sound();
}

#[test]
fn a_new_head_of_an_old_name_has_nothing_of_the_old_one() {
    let place = Place::new();
    let main = place.open();
    put(&main, "a", "main\n");
    fork(&main, "try");
    let other = main.head("try").unwrap();
    put(&other, "a", "old\n");
    restore(&other, "base");
    put(&other, "a", "older\n");
    drop(other);
    assert_eq!(drop_fork(&main, "try"), Ok(()));
    fork(&main, "try");
    let other = main.head("try").unwrap();
    assert_eq!(get(&other, "a"), "main\n");
    let path = TreePath::parse(b"a").unwrap();
    let Reply::History(edits) = other.handle(Request::History { path }).unwrap() else { panic!() };
    assert_eq!(edits.len(), 0);
    drop((main, other));
    place.is_sound();
    assert_eq!(get(&place.open().head("try").unwrap(), "a"), "main\n");
}

#[test]
fn the_first_head_is_not_special() {
    let place = Place::new();
    let main = place.open();
    put(&main, "a", "main\n");
    fork(&main, "try");
    drop(main);
    let other = Sandbox::open_head(&place.store, "try").unwrap();
    drop_fork(&other, "main").unwrap();
    gc(&other);
    assert_eq!((get(&other, "a"), names(&other)), ("main\n".to_owned(), vec!["try".to_owned()]));
    assert!(drop_fork(&other, "try").is_err(), "the last head");
    drop(other);
    assert_eq!(Sandbox::open(&place.store).map(drop).unwrap_err().kind, Kind::NoStore);
    let other = Sandbox::open_head(&place.store, "try").unwrap();
    fork(&other, "main");
    assert_eq!(get(&other.head("main").unwrap(), "a"), "main\n");
}

#[test]
fn bad_names_and_heads_are_refused() {
    let place = Place::new();
    let main = place.open();
    fork(&main, "try");
    let kind = |names: &[&str]| try_fork(&main, names, None).unwrap_err().kind;
    let long = "x".repeat(300);
    for bad in ["", "7", "base", "@", "a@", "a/b", ".", "..", ".x", "-n", "a.new", "a.bad", &long] {
        assert_eq!(kind(&[bad]), Kind::Usage, "{bad}");
        let place = Place::new();
        let options = StoreOptions::default();
        let first = Sandbox::create_or_open_head(&place.base, &place.store, &options, bad);
        assert_eq!(first.map(drop).unwrap_err().kind, Kind::Usage, "the first head is '{bad}'");
        assert_eq!(names(&place.open()), ["main"]);
    }
    assert_eq!(kind(&["try"]), Kind::Failed);
    assert_eq!(kind(&["main"]), Kind::Failed);
    assert_eq!(kind(&["x", "x"]), Kind::Failed);
    assert_eq!(kind(&["fine", "a@b"]), Kind::Usage);
    assert_eq!(try_fork(&main, &["y"], Some("nothing")).unwrap_err().kind, Kind::NoStore);
    assert_eq!(try_fork(&main, &["y"], Some("absent@")).unwrap_err().kind, Kind::NoStore);
    assert_eq!(names(&main), ["main", "try"]);
    assert_eq!(main.head("absent").map(drop).unwrap_err().kind, Kind::NoStore);
    assert_eq!(drop_fork(&main, "absent").unwrap_err().kind, Kind::NoStore);
    // Such a name would lead to the record of another head, or to another file of the store.
    assert_eq!(main.head("./main").map(drop).unwrap_err().kind, Kind::NoStore);
    assert_eq!(drop_fork(&main, "./x").unwrap_err().kind, Kind::NoStore);
    assert_eq!(drop_fork(&main, "main").unwrap_err().kind, Kind::InUse);
    let open = main.head("try").unwrap();
    assert_eq!(drop_fork(&main, "try").unwrap_err().kind, Kind::InUse);
    drop(open);
    drop_fork(&main, "try").unwrap();
    for bad in ["x@", "x@-3", "@x", "me@example.com"] {
        let request = Request::Checkpoint { name: Some(bad.to_owned()), message: String::new() };
        assert_eq!(main.handle(request).unwrap_err().kind, Kind::Usage, "{bad}");
    }
}

/// Every call of a fork and of a drop fails once, or from there on.
#[test]
fn a_fork_or_drop_that_fails_leaves_the_heads_before_or_after() {
    for errno in ["EIO", "ENOSPC"] {
        for from_there in ["", "+"] {
            let (mut number, mut failed) = (0, 0);
            loop {
                number += 1;
                let place = Place::new();
                let main = place.open();
                put(&main, "a", "main\n");
                fork(&main, "old");
                put(&main.head("old").unwrap(), "a", "old\n");
                put(&main, "a", "now\n");
                // After a failed sync, what was not synced before may be lost.
                main.fs().sync().unwrap();
                let rule = format!("fail:any:{number}{from_there}:{errno}");
                let work = || try_fork(&main, &["new"], None).and_then(|_| drop_fork(&main, "old"));
                let (did, calls) = failpoint::trace(|| failpoint::with(&rule, work));
                let found = names(&main);
                let possible = [&["main", "old"][..], &["main", "new", "old"], &["main", "new"]];
                assert!(possible.iter().any(|names| *names == found), "{rule}: {found:?} {did:?}");
                drop(main);
                let main = place.open();
                let again = names(&main);
                assert!(possible.iter().any(|names| *names == again), "{rule}: {again:?} {did:?}");
                assert_eq!(get(&main, "a"), "now\n", "{rule}");
                for (head, a) in [("new", "now\n"), ("old", "old\n")] {
                    if again.iter().any(|name| name == head) {
                        assert_eq!(get(&main.head(head).unwrap(), "a"), a, "{rule}");
                    }
                }
                gc(&main);
                drop(main);
                place.is_sound();
                if calls.iter().all(|(_, has_failed)| !has_failed) {
                    break;
                }
                failed += u32::from(did.is_err());
            }
            // If the disk is full once, the next attempt succeeds.
            let is_retried = errno == "ENOSPC" && from_there.is_empty();
            assert!(number > 20, "{errno}{from_there}: there were {number} calls");
            assert!(is_retried || failed > 10, "{errno}{from_there}: it failed {failed} times");
        }
    }
}

/// The bytes of file `a` in the state that a text means for a head, or the error.
fn a_in(sandbox: &Sandbox, rev: &str) -> Result<String, Error> {
    let path = TreePath::parse(b"a").unwrap();
    match sandbox.handle(Request::Show { rev: Rev::parse(rev), path, offset: 0 })? {
        Reply::Shown(shown) => Ok(String::from_utf8(shown.bytes).unwrap()),
        other => panic!("{other:?}"),
    }
}

/// Asserts that a name means the same checkpoint whether it is searched alone, or after so many
/// others that all names of the head were collected.
fn names_mean_the_same_among_many(sandbox: &Sandbox) {
    let store = sandbox.fs().store();
    let catalog = store.catalog();
    let names: BTreeSet<&str> = catalog.iter().filter_map(name_of).chain(["missing"]).collect();
    for head in ["main", "one", "two", "try", "later", "none"] {
        let many = store.checkpoint_names(head, |_| true);
        (0..10).for_each(|_| assert_eq!(many.own("missing"), None));
        for name in &names {
            let alone = store.checkpoint_names(head, |_| true).own(name);
            assert_eq!(alone, many.own(name), "{head}: {name}");
        }
    }
}

#[test]
fn checkpoints_of_several_heads_can_have_one_name() {
    let place = Place::new();
    let main = place.open();
    put(&main, "a", "early\n");
    checkpoint(&main, "early");
    let [one, two] = ["one", "two"].map(|name| {
        fork(&main, name);
        main.head(name).unwrap()
    });
    for (head, text) in [(&one, "one\n"), (&two, "two\n")] {
        put(head, "a", text);
        checkpoint(head, "green");
    }
    let again = |head: &Sandbox, name: &str| {
        let request = Request::Checkpoint { name: Some(name.to_owned()), message: String::new() };
        head.handle(request).map(drop)
    };
    for (head, name) in [(&one, "green"), (&one, "early"), (&main, "early")] {
        assert_eq!(again(head, name).unwrap_err().kind, Kind::Failed, "{name}");
    }
    assert_eq!(again(&main, "a@b").unwrap_err().kind, Kind::Usage);
    // The own one first. Without one, the only one; and no guess.
    assert_eq!((a_in(&one, "green").unwrap(), a_in(&two, "green").unwrap()), both("one", "two"));
    assert_eq!(
        (a_in(&one, "early").unwrap(), a_in(&one, "main@early").unwrap()),
        both("early", "early")
    );
    let error = a_in(&main, "green").unwrap_err();
    assert_eq!(
        (error.kind, error.reason.as_str()),
        (Kind::Usage, "it can be one@green, two@green")
    );
    for head in [&main, &one, &two] {
        assert_eq!(a_in(head, "one@green").unwrap(), "one\n");
        assert_eq!(a_in(head, "two@green").unwrap(), "two\n");
        assert_eq!(a_in(head, "two@early").unwrap(), "early\n", "it comes from that state");
        assert_eq!(a_in(head, "main@green").unwrap_err().kind, Kind::NoStore);
    }
    names_mean_the_same_among_many(&main);
    // A restore to another state does not take a checkpoint from the head that made it.
    restore(&one, "base");
    assert_eq!(a_in(&one, "green").unwrap(), "one\n");
    assert_eq!(again(&one, "green").unwrap_err().kind, Kind::Failed);
    // A merge brings no checkpoints along.
    main.handle(Request::Merge(jailfs::sandbox::MergeTerms {
        head: "two".to_owned(),
        ..Default::default()
    }))
    .unwrap();
    assert_eq!(get(&main, "a"), "two\n");
    put(&main, "a", "main\n");
    checkpoint(&main, "green");
    assert_eq!(a_in(&main, "green").unwrap(), "main\n");
    // A restore does. The lineage comes first then, and the number stays.
    let Reply::Log(log) = main.handle(Request::Log).unwrap() else { panic!() };
    let number = log[0].id.to_string();
    restore(&main, "two@green");
    assert_eq!(a_in(&main, "green").unwrap(), "two\n");
    names_mean_the_same_among_many(&main);
    assert_eq!(a_in(&main, "main@green").unwrap(), "two\n");
    assert_eq!(a_in(&main, &number).unwrap(), "main\n");
    restore(&main, &number);
    assert_eq!(a_in(&main, "green").unwrap(), "main\n");
    place.is_sound();
}

fn both(a: &str, b: &str) -> (String, String) {
    (format!("{a}\n"), format!("{b}\n"))
}

#[test]
fn the_names_of_a_dropped_head_stay_until_another_one_takes_them() {
    let place = Place::new();
    let main = place.open();
    let make = |text: &str| {
        fork(&main, "try");
        let head = main.head("try").unwrap();
        put(&head, "a", text);
        checkpoint(&head, "green");
    };
    make("first\n");
    drop_fork(&main, "try").unwrap();
    for rev in ["green", "try@green"] {
        assert_eq!(a_in(&main, rev).unwrap(), "first\n", "{rev}");
    }
    make("second\n");
    assert_eq!(a_in(&main, "try@green").unwrap(), "second\n");
    let Reply::Log(log) = main.handle(Request::Log).unwrap() else { panic!() };
    let first = log.iter().rfind(|one| one.name.as_deref() == Some("green")).unwrap();
    let error = a_in(&main, "green").unwrap_err();
    assert_eq!(error.reason, format!("it can be {}, try@green", first.id));
    drop_fork(&main, "try").unwrap();
    let error = a_in(&main, "try@green").unwrap_err();
    assert_eq!(error.reason.matches(", ").count(), 1, "two numbers: {}", error.reason);
    gc(&main);
    main.handle(Request::Drop { rev: Rev::Id(first.id) }).unwrap();
    gc(&main);
    assert_eq!(a_in(&main, "try@green").unwrap(), "second\n");
    // A fork keeps the names of its lineage, whatever becomes of the head that it came from.
    try_fork(&main, &["later"], Some("try@green")).unwrap();
    let later = main.head("later").unwrap();
    put(&main, "a", "main\n");
    checkpoint(&main, "green");
    assert_eq!(a_in(&later, "green").unwrap(), "second\n");
    assert_eq!(a_in(&main, "later@green").unwrap(), "second\n");
    names_mean_the_same_among_many(&main);
}
