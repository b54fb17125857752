//! Tests what happens under the lock of changes, which no test through a mount can observe.

use std::os::unix::ffi::OsStrExt;

use std::sync::Arc;

use super::*;
use crate::base::Base;
use crate::fs::Fs;
use crate::fs::merged::lower::Lower;
use crate::jail::{Jail, Policy};
use crate::store::{Store, StoreOptions};
use crate::tree::Tree;
use crate::types::{Epoch, Name, NodeId};

fn open(dir: &std::path::Path) -> Fs {
    let (base, store) = (dir.join("base"), dir.join("store"));
    std::fs::create_dir(&base).unwrap();
    for file in ["a", "b"] {
        std::fs::write(base.join(file), format!("{file} of the base")).unwrap();
        std::fs::hard_link(base.join(file), base.join(format!("{file}-too"))).unwrap();
    }
    let name = base.as_os_str().as_bytes().to_vec();
    let base = Arc::new(Base::open(&base).unwrap());
    let store =
        Arc::new(Store::create(&store, &name, base.root_id(), StoreOptions::default()).unwrap());
    let upper = store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap();
    let lower = Lower::new(base, Arc::clone(&store), Epoch(0), Vec::new());
    let jail = Jail {
        policy: Policy::Deny,
        mount_point: b"/mnt".to_vec(),
        base_path: name,
        allowed_targets: Vec::new(),
    };
    Fs::new(store, Tree::new(), lower, upper, jail)
}

#[test]
fn the_base_is_not_scanned_for_names_while_the_tree_is_locked() {
    let dir = tempfile::tempdir().unwrap();
    let fs = open(dir.path());
    let write = |file: &[u8]| {
        let id = fs.lookup(NodeId::ROOT, &Name::new(file).unwrap()).unwrap().id;
        fs.write(id, 0, b"A", false).unwrap();
        fs.state()
    };
    let paths = [TreePath::parse(b"a").unwrap()];
    let copies = Copies::default();
    let then = fs.state();
    let merged = |now: &State, known: &BasePaths| {
        merge(now, &then, &paths, (&copies, known), &mut || {
            Ok(fs.store().identities().lock().fresh()?)
        })
    };
    // No scan has looked for the file that has another name.
    let before = BasePaths::of(&then, &then, &paths).unwrap();
    let now = write(b"a");
    assert_eq!(merged(&now, &before).err(), Some(FsError::Stale));
    let found = BasePaths::of(&now, &then, &paths).unwrap();
    assert!(merged(&now, &found).is_ok_and(|(edits, _)| !edits.is_empty()));
    // Another such file, which is written meanwhile, needs a scan as well.
    let now = write(b"b");
    assert_eq!(merged(&now, &found).err(), Some(FsError::Stale));
    let found = BasePaths::of(&now, &then, &paths).unwrap();
    assert!(merged(&now, &found).is_ok());
}
