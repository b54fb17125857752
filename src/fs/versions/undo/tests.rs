//! What comes between the two halves of a step, which elsewhere nobody can stop between.

use std::os::unix::ffi::OsStrExt;

use super::*;
use crate::base::Base;
use crate::fs::Caller;
use crate::fs::lower::Lower;
use crate::jail::{Jail, Policy};
use crate::store::record::LayerKind;
use crate::store::{Store, StoreOptions};
use crate::types::{Epoch, NodeId};

struct Place {
    _dir: tempfile::TempDir,
    fs: Fs,
    file: NodeId,
}

fn path() -> TreePath {
    TreePath::parse(b"a").unwrap()
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        std::fs::create_dir(&base).unwrap();
        let name = base.as_os_str().as_bytes().to_vec();
        let jail = Jail {
            policy: Policy::Deny,
            mount_point: b"/mnt".to_vec(),
            base_path: name.clone(),
            allowed_targets: Vec::new(),
        };
        let base = Arc::new(Base::open(&base).unwrap());
        let store = Store::create(&store, &name, base.root_id(), StoreOptions::default()).unwrap();
        let store = Arc::new(store);
        let upper = store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap();
        let lower = Lower::new(base, Arc::clone(&store), Epoch(0), Vec::new());
        let fs = Fs::new(store, Tree::new(), lower, upper, jail);
        fs.open_history("main");
        let me = Caller { uid: 0, gid: 0 };
        let name = Name::new(b"a").unwrap();
        let file = fs.mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, me).unwrap().id;
        Place { _dir: dir, fs, file }
    }

    fn put(&self, text: &str) {
        self.fs.truncate(self.file, 0, false).unwrap();
        self.fs.write(self.file, 0, text.as_bytes(), false).unwrap();
    }

    fn texts(&self) -> Vec<String> {
        let of = |info: VersionInfo| {
            let (state, found) = self.fs.version(&path(), info.number).unwrap();
            String::from_utf8(state.read_all(&found).unwrap()).unwrap()
        };
        self.fs.versions(&path()).into_iter().map(of).collect()
    }

    fn live(&self) -> String {
        let found = self.fs.core().resolve(&path()).unwrap();
        String::from_utf8(self.fs.state().read_all(&found).unwrap()).unwrap()
    }
}

#[test]
fn what_is_written_while_an_undo_is_under_way_is_kept() {
    let place = Place::new();
    for text in ["one", "two", "three"] {
        place.put(text);
    }
    let wanted = place.fs.core().destination(&path(), Step::Undo(1)).unwrap();
    place.fs.write(place.file, 5, b" and more", false).unwrap();
    place.fs.core().place_version(&path(), &wanted).unwrap_or_else(|_| panic!("not undone"));
    assert_eq!(place.live(), "two");
    assert_eq!(place.texts()[0], "three and more", "{:?}", place.texts());
    // It is what a redo leads to.
    let again = place.fs.step(&path(), Step::Redo(1)).unwrap_or_else(|_| panic!("not redone"));
    assert!(again.number.is_some(), "the file as it was when the undo began");
    assert_eq!(place.live(), "three");
    place.fs.step(&path(), Step::Redo(1)).unwrap_or_else(|_| panic!("not redone"));
    assert_eq!(place.live(), "three and more");
}

#[test]
fn what_is_written_while_a_redo_is_under_way_is_kept() {
    let place = Place::new();
    for text in ["one", "two", "three"] {
        place.put(text);
    }
    place.fs.step(&path(), Step::Undo(2)).unwrap_or_else(|_| panic!("not undone"));
    let entry = place.fs.lookup(NodeId::ROOT, &Name::new(b"a").unwrap()).unwrap();
    let wanted = place.fs.core().destination(&path(), Step::Redo(1)).unwrap();
    place.fs.write(entry.id, 0, b"ONE", false).unwrap();
    place.fs.core().place_version(&path(), &wanted).unwrap_or_else(|_| panic!("not redone"));
    assert_eq!(place.live(), "two");
    assert!(place.texts().contains(&"ONE".to_owned()), "{:?}", place.texts());
}
