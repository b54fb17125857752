//! Repeating the same work does not grow a store: only the tree, and the history that is kept, take
//! space. `examples/long_life` shows the same over an hour.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jailfs::internals::fs::Caller;
use jailfs::internals::store::Store;
use jailfs::internals::store::record::LayerKind;
use jailfs::sandbox::{Operation, Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Epoch, LayerId, Name, NodeId};

const ME: Caller = Caller { uid: 0, gid: 0 };
/// Without syncs the work is the same, and much quicker.
const QUICK: StoreOptions = StoreOptions { volatile: true, other_base: false };

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        std::fs::create_dir(place.base()).unwrap();
        (0..20).for_each(|n| {
            std::fs::write(place.base().join(format!("f{n}")), format!("file {n}")).unwrap()
        });
        place
    }

    fn base(&self) -> PathBuf {
        self.0.path().join("base")
    }

    fn store(&self) -> PathBuf {
        self.0.path().join("store")
    }

    fn open(&self) -> Arc<Sandbox> {
        Sandbox::create_or_open(&self.base(), &self.store(), &QUICK).unwrap()
    }
}

fn id(sandbox: &Sandbox, name: &str) -> NodeId {
    let name = Name::new(name.as_bytes()).unwrap();
    let fs = sandbox.fs();
    fs.lookup(NodeId::ROOT, &name)
        .unwrap_or_else(|_| fs.mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, ME).unwrap())
        .id
}

fn put(sandbox: &Sandbox, name: &str, text: &str) {
    let file = id(sandbox, name);
    sandbox.fs().truncate(file, 0, false).unwrap();
    sandbox.fs().write(file, 0, text.as_bytes(), false).unwrap();
    sandbox.fs().forget(file, 1);
}

fn get(sandbox: &Sandbox, name: &str) -> String {
    let file = id(sandbox, name);
    let bytes = sandbox.fs().read(file, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    sandbox.fs().forget(file, 1);
    String::from_utf8(bytes).unwrap()
}

fn number(sandbox: &Sandbox, name: &str) -> u64 {
    sandbox.fs().getattr(id(sandbox, name)).unwrap().ino.0
}

fn ask(sandbox: &Sandbox, request: Request) -> Reply {
    sandbox.handle(request.clone()).unwrap_or_else(|error| panic!("{request:?}: {error}"))
}

fn checkpoint(sandbox: &Sandbox) -> LayerId {
    match ask(sandbox, Request::Checkpoint { name: None, message: String::new() }) {
        Reply::Checkpoint(checkpoint) => checkpoint.id,
        other => panic!("{other:?}"),
    }
}

fn restore(sandbox: &Sandbox, to: LayerId) {
    ask(
        sandbox,
        Request::Restore {
            detach_mounts: false,
            to: Rev::Id(to),
            paths: Vec::new(),
            dry_run: false,
        },
    );
}

fn apply(sandbox: &Sandbox, undo: bool) {
    match ask(
        sandbox,
        Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo,
            consent: jailfs::sandbox::Consent::ALL,
        },
    ) {
        Reply::Applied(applied) => assert!(applied.conflicts.is_empty(), "{:?}", applied.conflicts),
        other => panic!("{other:?}"),
    }
}

fn gc(sandbox: &Sandbox, operations: u64, keep: u64) {
    ask(sandbox, Request::Gc { operations, keep: Some(keep), max_store: None, dry_run: false });
}

fn operations(sandbox: &Sandbox) -> Vec<Operation> {
    match ask(sandbox, Request::OpLog) {
        Reply::OpLog(operations) => operations,
        other => panic!("{other:?}"),
    }
}

fn check(store: &Path) {
    let checked = Sandbox::check_store(store, true).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
}

/// The number of layers in a store.
fn layers(store: &Path) -> usize {
    std::fs::read_dir(store.join("layers")).unwrap().count()
}

#[test]
fn a_store_in_which_the_same_is_repeated_does_not_grow() {
    let place = Place::new();
    let mut sandbox = place.open();
    let (mut turns, mut seen) = (0, Vec::new());
    for round in 0..4 {
        for _ in 0..30 {
            turns += 1;
            for n in 0..20 {
                put(&sandbox, &format!("f{n}"), &format!("turn {turns} of file {n}"));
            }
            let kept = checkpoint(&sandbox);
            put(&sandbox, "f3", "this does not stay");
            restore(&sandbox, kept);
            if turns % 2 == 0 {
                apply(&sandbox, false);
            }
            if turns % 8 == 0 {
                apply(&sandbox, true);
                apply(&sandbox, false);
            }
            if turns % 5 == 0 {
                gc(&sandbox, 10, 3);
            }
        }
        let numbers: Vec<u64> = (0..20).map(|n| number(&sandbox, &format!("f{n}"))).collect();
        drop(sandbox);
        check(&place.store());
        sandbox = place.open();
        sandbox.compact().unwrap();
        gc(&sandbox, 10, 3);
        assert_eq!(
            numbers,
            (0..20).map(|n| number(&sandbox, &format!("f{n}"))).collect::<Vec<_>>(),
            "stay"
        );
        assert_eq!(get(&sandbox, "f7"), format!("turn {turns} of file 7"));
        if round > 0 {
            seen.push(layers(&place.store()));
        }
    }
    assert!(seen.iter().all(|layers| *layers < 40), "{seen:?} layers");
}

#[test]
fn operations_keep_their_numbers_when_older_ones_are_dropped() {
    let place = Place::new();
    let mut sandbox = place.open();
    // The log is trimmed when it has twice as many records as are kept.
    for turn in 0..2010 {
        put(&sandbox, "f0", &turn.to_string());
        checkpoint(&sandbox);
        if turn % 500 == 0 && turn < 2000 {
            gc(&sandbox, 5, 2);
        }
    }
    let before = operations(&sandbox);
    gc(&sandbox, 5, 4);
    for _ in 0..2 {
        let after = operations(&sandbox);
        assert_eq!(after.len(), 1000);
        assert_eq!(after, before[..1000]);
        drop(sandbox);
        check(&place.store());
        sandbox = place.open();
    }
    let third = before[2].op;
    ask(&sandbox, Request::OpRestore { detach_mounts: false, op: third });
    assert_eq!(get(&sandbox, "f0"), "2007");
    assert_eq!(operations(&sandbox)[0].op, before[0].op + 1);
    let gone = sandbox.handle(Request::OpRestore { detach_mounts: false, op: 1 }).unwrap_err();
    assert_eq!(gone.kind.exit_code(), 10, "{gone}");
}

/// The head was on another layer already, and writes to the one before were still answered.
#[test]
fn writes_during_an_interrupted_restore_can_be_restored() {
    let place = Place::new();
    let sandbox = place.open();
    put(&sandbox, "f0", "first");
    let first = checkpoint(&sandbox);
    put(&sandbox, "f0", "written during the restore");
    let before = operations(&sandbox).len();
    drop(sandbox);
    {
        let root = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(place.base()).unwrap());
        let store = Store::open(&place.store(), (root, 0), QUICK).unwrap();
        let upper = store.create_layer(Some(first), "main", Epoch(0), LayerKind::Branches).unwrap();
        store.set_head("main", upper.layer()).unwrap();
    }
    check(&place.store());
    for _ in 0..2 {
        let sandbox = place.open();
        assert_eq!(get(&sandbox, "f0"), "first");
        let logged = operations(&sandbox);
        assert_eq!((logged.len(), logged[0].verb.as_str()), (before + 1, "seal"), "once");
        drop(sandbox);
        check(&place.store());
    }
    let sandbox = place.open();
    ask(&sandbox, Request::OpRestore { detach_mounts: false, op: operations(&sandbox)[0].op });
    assert_eq!(get(&sandbox, "f0"), "written during the restore");
}
