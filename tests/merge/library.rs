//! Merges without a mount: what is recorded, what stays reachable, and what a failure leaves.

use std::fs as host;
use std::sync::Arc;

use jailfs::error::{Error, Kind};
use jailfs::internals::fs::{Caller, RenameMode};
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{MergeTerms, Merged, Reply, Request, Rev, Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };
const TEXT: &str = "1\n2\n3\n4\n5\n6\n";

struct Place {
    _dir: tempfile::TempDir,
    base: std::path::PathBuf,
    store: std::path::PathBuf,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        host::create_dir_all(base.join("dir")).unwrap();
        for path in ["a", "b", "dir/c"] {
            host::write(base.join(path), TEXT).unwrap();
        }
        Place { _dir: dir, base, store }
    }

    fn open(&self) -> Arc<Sandbox> {
        Sandbox::create_or_open(&self.base, &self.store, &StoreOptions::default()).unwrap()
    }

    /// The first head, and a fork of it.
    fn forked(&self) -> (Arc<Sandbox>, Arc<Sandbox>) {
        let main = self.open();
        let names = vec!["try".to_owned()];
        main.handle(Request::Fork { names, from: None }).unwrap();
        let fork = main.head("try").unwrap();
        (main, fork)
    }
}

fn path(text: &str) -> TreePath {
    TreePath::parse(text.as_bytes()).unwrap()
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

fn terms(head: &str) -> MergeTerms {
    MergeTerms { head: head.to_owned(), ..MergeTerms::default() }
}

fn try_merge(into: &Sandbox, terms: MergeTerms) -> Result<Merged, Error> {
    match into.handle(Request::Merge(terms))? {
        Reply::Merged(merged) => Ok(merged),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn merge(into: &Sandbox, head: &str) -> Merged {
    let merged = try_merge(into, terms(head)).unwrap();
    assert_eq!(merged.conflicts, Vec::new());
    merged
}

fn operations(sandbox: &Sandbox) -> usize {
    match sandbox.handle(Request::OpLog).unwrap() {
        Reply::OpLog(all) => all.len(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_merge_begins_where_the_first_one_ended() {
    let place = Place::new();
    let (main, fork) = place.forked();
    put(&main, "a", "1 main\n2\n3\n4\n5\n6\n");
    put(&fork, "a", "1\n2\n3\n4\n5\n6 try\n");
    merge(&main, "try");
    assert_eq!(get(&main, "a"), "1 main\n2\n3\n4\n5\n6 try\n");
    // The same line again, in both: without the first merge it would conflict.
    put(&fork, "a", "1\n2\n3\n4\n5\n6 again\n");
    merge(&main, "try");
    assert_eq!(get(&main, "a"), "1 main\n2\n3\n4\n5\n6 again\n");
    // The other way round, all of `main` is new.
    merge(&fork, "main");
    assert_eq!(get(&fork, "a"), "1 main\n2\n3\n4\n5\n6 again\n");
    assert!(merge(&main, "try").changes.is_empty());
}

#[test]
fn a_merge_that_was_undone_can_be_made_again() {
    let place = Place::new();
    let (main, fork) = place.forked();
    put(&fork, "a", "try\n");
    put(&main, "b", "main\n");
    let merged = merge(&main, "try");
    let undo = Request::OpRestore { op: merged.undo.unwrap(), detach_mounts: false };
    main.handle(undo).unwrap();
    assert_eq!((get(&main, "a").as_str(), get(&main, "b").as_str()), (TEXT, "main\n"));
    merge(&main, "try");
    assert_eq!((get(&main, "a").as_str(), get(&main, "b").as_str()), ("try\n", "main\n"));
}

#[test]
fn a_conflict_changes_nothing_and_markers_are_listed_until_they_are_gone() {
    let place = Place::new();
    let (main, fork) = place.forked();
    put(&main, "a", "main\n");
    put(&fork, "a", "try\n");
    put(&fork, "b", "try\n");
    let (before, layers) = (operations(&main), main.handle(Request::Log).unwrap());
    let merged = try_merge(&main, terms("try")).unwrap();
    let did = "changed content".to_owned();
    assert_eq!(merged.conflicts, [(path("a"), did.clone(), did)]);
    assert_eq!((get(&main, "a").as_str(), get(&main, "b").as_str()), ("main\n", TEXT));
    assert_eq!((operations(&main), main.handle(Request::Log).unwrap()), (before, layers));
    let marked = try_merge(&main, MergeTerms { markers: true, ..terms("try") }).unwrap();
    assert_eq!(marked.unresolved, [path("a")]);
    assert_eq!(get(&main, "a"), "<<<<<<< main\nmain\n=======\ntry\n>>>>>>> try\n");
    let unresolved = || match main.handle(Request::Status).unwrap() {
        Reply::Status(status) => status.unresolved,
        other => panic!("{other:?}"),
    };
    assert_eq!(unresolved(), [path("a")]);
    put(&main, "a", "resolved\n");
    assert_eq!(unresolved(), Vec::new());
}

#[test]
fn markers_keep_both_sides_and_status_lists_the_copy_until_it_is_gone() {
    let place = Place::new();
    let (main, fork) = place.forked();
    put(&main, "dir/c", "\0main");
    put(&fork, "dir/c", "\0try");
    put(&main, "b", "main\n");
    fork.fs().unlink(NodeId::ROOT, &name("b")).unwrap();
    let dry = MergeTerms { markers: true, dry_run: true, ..terms("try") };
    let copies = [path("b~try"), path("dir/c~try")];
    assert_eq!(try_merge(&main, dry).unwrap().unresolved, copies);
    let merged = try_merge(&main, MergeTerms { markers: true, ..terms("try") }).unwrap();
    assert_eq!((merged.conflicts.len(), &merged.unresolved[..]), (0, &copies[..]));
    drop((main, fork));
    let main = place.open();
    assert_eq!(
        (get(&main, "dir/c").as_str(), get(&main, "dir/c~try").as_str()),
        ("\0main", "\0try")
    );
    assert_eq!(
        (get(&main, "b").as_str(), get(&main, "b~try").as_str()),
        ("main\n", "'try': removed\n")
    );
    let unresolved = || match main.handle(Request::Status).unwrap() {
        Reply::Status(status) => status.unresolved,
        other => panic!("{other:?}"),
    };
    assert_eq!(unresolved(), copies);
    main.fs().unlink(NodeId::ROOT, &name("b~try")).unwrap();
    assert_eq!(unresolved(), copies[1..]);
    // The next merge begins with this one, and the copy is a file of its own.
    put(&main.head("try").unwrap(), "a", "again\n");
    merge(&main, "try");
    assert_eq!(get(&main, "a"), "again\n");
    assert_eq!(
        (get(&main, "dir/c").as_str(), get(&main, "dir/c~try").as_str()),
        ("\0main", "\0try")
    );
    let undo = Request::OpRestore { op: merged.undo.unwrap(), detach_mounts: false };
    main.handle(undo).unwrap();
    assert_eq!(unresolved(), Vec::new());
    drop(main);
    let checked = Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
}

fn apply(sandbox: &Sandbox) {
    let apply = Request::Apply {
        paths: Vec::new(),
        dry_run: false,
        undo: false,
        consent: Default::default(),
    };
    match sandbox.handle(apply).unwrap() {
        Reply::Applied(applied) => assert_eq!(applied.conflicts, Vec::new()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn heads_merge_around_an_apply_and_a_gc() {
    let both = "1 main\n2\n3\n4\n5\n6 try\n";
    for into_main in [true, false] {
        let place = Place::new();
        let (main, fork) = place.forked();
        put(&main, "a", "1 main\n2\n3\n4\n5\n6\n");
        put(&main, "new", "main\n");
        put(&fork, "a", "1\n2\n3\n4\n5\n6 try\n");
        put(&fork, "b", "try\n");
        apply(&main);
        // After the apply both go on.
        put(&main, "dir/c", "main\n");
        put(&fork, "dir/d", "try\n");
        let gc = Request::Gc { operations: 0, keep: Some(0), max_store: None, dry_run: false };
        main.handle(gc.clone()).unwrap();
        let (into, from) = if into_main { (&main, "try") } else { (&fork, "main") };
        let merged = merge(into, from);
        let expected = [("a", both), ("b", "try\n"), ("new", "main\n"), ("dir/c", "main\n")];
        for (path, text) in expected.into_iter().chain([("dir/d", "try\n")]) {
            assert_eq!(get(into, path), text, "{path} {into_main}");
        }
        assert!(merge(into, from).changes.is_empty(), "a second merge finds nothing");
        apply(into);
        for (path, text) in expected {
            assert_eq!(host::read_to_string(place.base.join(path)).unwrap(), text, "{path}");
        }
        let undo = Request::OpRestore { op: merged.undo.unwrap(), detach_mounts: false };
        into.handle(undo).unwrap();
        assert_eq!(get(into, "dir/c"), if into_main { "main\n" } else { TEXT });
        main.handle(gc).unwrap();
        drop((main, fork));
        let checked = Sandbox::check_store(&place.store, true).unwrap();
        assert_eq!(checked.problems, Vec::<String>::new());
    }
}

#[test]
fn a_dry_run_lists_and_changes_nothing() {
    let place = Place::new();
    let (main, fork) = place.forked();
    put(&fork, "a", "try\n");
    put(&fork, "new", "try\n");
    let before = operations(&main);
    let merged = try_merge(&main, MergeTerms { dry_run: true, ..terms("try") }).unwrap();
    let paths: Vec<String> =
        merged.changes.to_vec().unwrap().iter().map(|change| change.path.to_string()).collect();
    assert_eq!(paths, ["a", "new"]);
    assert_eq!((get(&main, "a").as_str(), operations(&main)), (TEXT, before));
}

#[test]
fn bad_input_is_refused() {
    let place = Place::new();
    let (main, _fork) = place.forked();
    let kind = |terms| try_merge(&main, terms).unwrap_err().kind;
    assert_eq!(kind(terms("main")), Kind::Usage);
    assert_eq!(kind(terms("nothing")), Kind::NoStore);
    assert_eq!(kind(MergeTerms { units: vec![b"..".to_vec()], ..terms("try") }), Kind::Usage);
}

/// The bytes that a merge took over stay when the head that wrote them is gone.
#[test]
fn no_byte_of_either_head_is_unreachable_after_a_merge() {
    let place = Place::new();
    let (main, fork) = place.forked();
    let long: String = (0..20_000).map(|line| format!("{line}\n")).collect();
    put(&fork, "new", &long);
    put(&main, "own", &long);
    let merged = merge(&main, "try");
    // Both sealed states can be read.
    for (state, path) in [(format!("{}", merged.before.unwrap()), "own"), ("try@".into(), "new")] {
        let (rev, path) = (Rev::parse(&state), TreePath::parse(path.as_bytes()).unwrap());
        main.handle(Request::Show { rev, path, offset: 0 }).unwrap();
    }
    put(&fork, "new", "gone\n");
    drop(fork);
    main.handle(Request::DropFork { name: "try".to_owned() }).unwrap();
    let gc = Request::Gc { operations: 0, keep: Some(0), max_store: None, dry_run: false };
    main.handle(gc).unwrap();
    assert_eq!(get(&main, "new"), long);
    drop(main);
    let checked = Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
    let main = place.open();
    assert_eq!((get(&main, "new"), get(&main, "own")), (long.clone(), long));
}

/// The merge copies a directory of the base up. A program moves other directories all the time.
#[test]
fn a_merge_goes_on_while_programs_move_other_directories() {
    let place = Place::new();
    let (main, fork) = place.forked();
    put(&fork, "dir/c", "try\n");
    main.fs().mkdir(NodeId::ROOT, &name("d0"), 0o755, 0, ME).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (root, names) = (NodeId::ROOT, [name("d0"), name("d1")]);
            for [from, to] in [[0, 1], [1, 0]].iter().cycle() {
                let (from, to) = (&names[*from], &names[*to]);
                main.fs().rename(root, from, root, to, RenameMode::Replace, 1).unwrap();
                if is_over.load(std::sync::atomic::Ordering::SeqCst) {
                    break;
                }
            }
        });
        let merged = try_merge(&main, terms("try"));
        is_over.store(true, std::sync::atomic::Ordering::SeqCst);
        merged.unwrap();
    });
    assert_eq!(get(&main, "dir/c"), "try\n");
}

/// Every call of a merge fails once, or from there on.
#[test]
fn a_merge_that_fails_leaves_the_tree_before_or_after() {
    let before = ("1 main\n2\n3\n4\n5\n6\n".to_owned(), "main\n".to_owned());
    let after = ("1 main\n2\n3\n4\n5\n6 try\n".to_owned(), "main\n".to_owned());
    for errno in ["EIO", "ENOSPC"] {
        for from_there in ["", "+"] {
            let (mut number, mut failed) = (0, 0);
            loop {
                number += 1;
                let place = Place::new();
                let (main, fork) = place.forked();
                put(&main, "b", &before.1);
                put(&main, "a", &before.0);
                put(&fork, "a", "1\n2\n3\n4\n5\n6 try\n");
                put(&fork, "new", "try\n");
                // Unsynced content may be lost if a sync fails.
                main.fs().sync().unwrap();
                fork.fs().sync().unwrap();
                let rule = format!("fail:any:{number}{from_there}:{errno}");
                let (did, calls) =
                    failpoint::trace(|| failpoint::with(&rule, || try_merge(&main, terms("try"))));
                let is_done = did.as_ref().map_or_else(|error| error.is_done, |_| true);
                let shown = (get(&main, "a"), get(&main, "b"));
                assert_eq!(&shown, if is_done { &after } else { &before }, "{rule}: {did:?}");
                drop((main, fork));
                let options = StoreOptions::default();
                let main = Sandbox::create_or_open(&place.base, &place.store, &options);
                let main = main.unwrap_or_else(|error| panic!("{rule}: {error} after {did:?}"));
                let again = (get(&main, "a"), get(&main, "b"));
                assert!(again == before || again == after, "{rule}: {again:?} {did:?}");
                assert_eq!(get(&main.head("try").unwrap(), "new"), "try\n", "{rule}");
                drop(main);
                let checked = Sandbox::check_store(&place.store, true).unwrap();
                assert_eq!(checked.problems, Vec::<String>::new(), "{rule}");
                if calls.iter().all(|(_, has_failed)| !has_failed) {
                    assert!(did.is_ok(), "{rule}: {did:?}");
                    break;
                }
                failed += 1;
            }
            assert!(failed > 5, "{errno}{from_there}: it failed {failed} times");
        }
    }
}
