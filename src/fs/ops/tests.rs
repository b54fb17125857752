//! Counts what an operation costs: how often it takes the core lock, and how many base nodes it
//! looks up.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use crate::base::Base;
use crate::fs::merged::lower::{LOOKUPS, Lower};
use crate::fs::{Caller, Fs, SetAttr};
use crate::jail::{Jail, Policy};
use crate::store::record::LayerKind;
use crate::store::{Store, StoreOptions};
use crate::tree::Tree;
use crate::types::{Epoch, Name, NodeId};

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
