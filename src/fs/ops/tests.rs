//! Counts what an operation costs: how often it takes the core lock, and how many base nodes it
//! looks up.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use crate::base::Base;
use crate::fs::merged::lower::{LOOKUPS, Lower};
use crate::fs::{Caller, DirEntry, Fs, HandOut, NameSink, SetAttr};
use crate::jail::{Jail, Policy};
use crate::store::record::LayerKind;
use crate::store::{Store, StoreOptions};
use crate::tree::Tree;
use crate::types::{Epoch, FileKind, Name, NodeId};

/// A filesystem whose base has files `a` to `h` in the directory `d`.
struct Place {
    _dir: tempfile::TempDir,
    fs: Fs,
    /// The directory `d`.
    dir: NodeId,
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

const CALLER: Caller = Caller { uid: 0, gid: 0 };

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        std::fs::create_dir_all(base.join("d")).unwrap();
        for file in ["a", "b", "c", "d", "e", "f", "g", "h"] {
            std::fs::write(base.join("d").join(file), "content").unwrap();
        }
        let path = base.as_os_str().as_bytes().to_vec();
        let jail = Jail {
            policy: Policy::Deny,
            mount_point: b"/mnt".to_vec(),
            base_path: path.clone(),
            allowed_targets: Vec::new(),
        };
        let base = Arc::new(Base::open(&base).unwrap());
        let store = Store::create(&store, &path, base.root_id(), StoreOptions::default()).unwrap();
        let store = Arc::new(store);
        let upper = store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap();
        let lower = Lower::new(base, Arc::clone(&store), Epoch(0), Vec::new());
        let fs = Fs::new(store, Tree::new(), lower, upper, jail);
        fs.attach_kernel(false);
        let dir_id = fs.lookup(NodeId::ROOT, &name("d")).unwrap().id;
        Place { _dir: dir, fs, dir: dir_id }
    }

    fn file(&self, file: &str) -> NodeId {
        self.fs.lookup(self.dir, &name(file)).unwrap().id
    }

    /// As [`Place::cost`], with the search for stale caches by the server of a mount.
    fn served<T>(&self, id: NodeId, operation: impl FnOnce(&Fs) -> T) -> (u64, u64) {
        self.cost(|fs| {
            operation(fs);
            assert!(!fs.needs_invalidation(id) && fs.take_invalidations().0.is_empty());
        })
    }

    /// How often `operation` takes the core lock, and how many base nodes it looks up.
    fn cost<T>(&self, operation: impl FnOnce(&Fs) -> T) -> (u64, u64) {
        let (locks, lookups) = (self.fs.requests(), LOOKUPS.get());
        operation(&self.fs);
        (self.fs.requests() - locks, LOOKUPS.get() - lookups)
    }
}

#[test]
fn an_operation_resolves_its_node_once_and_takes_the_lock_again_only_after_asking_the_base() {
    let place = Place::new();
    let dir = place.dir;
    assert_eq!(
        place.served(dir, |fs| fs.lookup(dir, &name("a")).unwrap()),
        (2, 2),
        "directory and name"
    );
    let [a, b, c] = ["a", "b", "c"].map(|file| place.file(file));
    assert_eq!(place.served(a, |fs| fs.getattr(a).unwrap()), (2, 1));
    assert_eq!(place.cost(|fs| fs.read(a, 0, 7).unwrap()), (2, 1));
    // Each copy-up looks at the directories above the node up to one in the tree. It asks for their
    // attributes on the way. The rest of the block that is written is then opened and read.
    assert_eq!(place.cost(|fs| fs.write(a, 2, b"X", false).unwrap()), (7, 3));
    assert_eq!(place.cost(|fs| fs.write(b, 2, b"X", false).unwrap()), (5, 2));
    assert_eq!(place.cost(|fs| fs.write(b, 3, b"X", false).unwrap()), (1, 0));
    let set = SetAttr { size: Some(3), mode: Some(0o600), ..SetAttr::default() };
    assert_eq!(place.served(c, |fs| fs.setattr(c, set, true).unwrap()), (3, 2));
    assert_eq!(place.cost(|fs| fs.setattr(c, set, true).unwrap()), (1, 0));
    assert_eq!(place.cost(|fs| fs.getattr(c).unwrap()), (1, 0));
}

#[test]
fn an_operation_on_names_resolves_its_directory_once() {
    let place = Place::new();
    let dir = place.dir;
    let create = |fs: &Fs, file: &str| fs.mknod(dir, &name(file), 0o644, 0, 0, CALLER).unwrap();
    assert_eq!(place.cost(|fs| create(fs, "new")), (4, 3), "directory, name, root to copy up");
    assert_eq!(place.cost(|fs| create(fs, "newer")), (2, 1), "name");
    assert_eq!(place.cost(|fs| fs.unlink(dir, &name("d")).unwrap()), (2, 1));
    let e = place.file("e");
    assert_eq!(place.cost(|fs| fs.link(e, dir, &name("link")).unwrap()), (3, 3), "name, e, d");
    assert_eq!(place.cost(|fs| fs.unlink(dir, &name("link")).unwrap()), (1, 0));
}

/// A sink that has no time for the first questions, and takes one name.
struct Late {
    waits: u32,
    names: Vec<Vec<u8>>,
}

impl NameSink for Late {
    fn wants_node(&self, _: FileKind) -> bool {
        true
    }

    fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    fn has_time(&mut self) -> bool {
        self.waits = self.waits.saturating_sub(1);
        self.waits == 0
    }

    fn take(&mut self, entry: DirEntry, hand_out: &mut HandOut<'_>) -> bool {
        assert!(hand_out().is_some());
        self.names.push(entry.name);
        true
    }
}

#[test]
fn a_reply_has_a_name_also_if_time_is_up_before_the_first() {
    let place = Place::new();
    // Behind `.` and `..`.
    let mut sink = Late { waits: 4, names: Vec::new() };
    place.fs.readdir(place.dir, 0, |_| true).unwrap();
    place.fs.readdir_plus(place.dir, 2, &mut sink).unwrap();
    assert_eq!(sink.names, [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]);
}
