//! Runs requests of the kernel while a switch to another state has released the core lock.

use std::sync::{Arc, Mutex};

use super::{CALLER, Place, name, read, seal};
use crate::fs::switch::install::MOST_ROUNDS;
use crate::fs::writing::hook;
use crate::fs::{Fs, State, Switched};
use crate::store::record::{LayerKind, Seal};
use crate::sys::clock::now;
use crate::tree::Edit;
use crate::types::{Epoch, NodeId, TreePath};

/// A filesystem in which `d/b` of the base was overwritten, `d/made` was made and `d/c` was removed
/// after a state was sealed. The kernel holds none of the three.
struct Changed {
    place: Place,
    sealed: State,
}

impl Changed {
    fn new() -> Changed {
        let place = Place::new();
        let (fs, dir) = (&place.fs, place.dir);
        fs.lookup(dir, &name("a")).unwrap();
        let sealed = seal(fs);
        let b = place.file("b");
        fs.write(b, 0, b"CONTENT", false).unwrap();
        let made = fs.mknod(dir, &name("made"), 0o644, 0, 0, CALLER).unwrap().id;
        fs.write(made, 0, b"made", false).unwrap();
        fs.unlink(dir, &name("c")).unwrap();
        fs.forget(b, 1);
        fs.forget(made, 1);
        Changed { place, sealed }
    }

    /// Restores the sealed state. Calls `each` in another thread whenever the core lock is
    /// released.
    fn restore(&self, each: impl FnMut() + Send + 'static) -> Switched {
        let fs = &self.place.fs;
        let upper = fs.store.create_layer(None, "main", Epoch(0), LayerKind::Branches).unwrap();
        hook::set(each);
        let switched = fs.switch(self.sealed.clone(), upper).unwrap();
        hook::clear();
        switched
    }

    /// As [`Changed::restore`]; at the calls from number `from` on, the kernel looks up a name and
    /// holds what it finds. Returns the id that it got.
    fn restore_with_lookup(&self, text: &'static str, from: usize) -> (Switched, NodeId) {
        let (fs, dir) = (Arc::clone(&self.place.fs), self.place.dir);
        let found = Arc::new(Mutex::new((0, None)));
        let to = Arc::clone(&found);
        let switched = self.restore(move || {
            let mut found = to.lock().unwrap();
            found.0 += 1;
            if found.0 > from {
                found.1 = Some(fs.lookup(dir, &name(text)).unwrap().id);
            }
        });
        let (calls, id) = *found.lock().unwrap();
        assert!(calls > from, "{calls} calls");
        (switched, id.unwrap())
    }
}

fn links(fs: &Fs, id: NodeId) -> u32 {
    fs.getattr(id).unwrap().meta.nlink
}

#[test]
fn the_kernel_sees_the_state_before_a_restore_until_the_other_one_is_installed() {
    let changed = Changed::new();
    let (fs, dir) = (Arc::clone(&changed.place.fs), changed.place.dir);
    let mut calls = 0;
    let asking = Arc::clone(&fs);
    changed.restore(move || {
        calls += 1;
        let found = asking.lookup(dir, &name("b")).unwrap().id;
        assert_eq!(read(&asking, found), b"CONTENT", "call {calls}");
        asking.forget(found, 1);
        assert!(asking.lookup(dir, &name("c")).is_err() && calls < 100);
    });
    assert_eq!(read(&fs, changed.place.file("b")), b"content");
    assert_eq!(read(&fs, changed.place.file("c")), b"content");
    assert!(fs.lookup(dir, &name("made")).is_err());
}

#[test]
fn a_file_that_is_looked_up_during_a_merge_stays_what_it_was_for_its_holders() {
    let changed = Changed::new();
    let (fs, dir) = (Arc::clone(&changed.place.fs), changed.place.dir);
    let next = fs.upper_layer();
    let next = fs.store.create_layer(Some(next), "main", Epoch(0), LayerKind::Continues).unwrap();
    let seal = Seal { name: None, message: String::new(), time: now(), automatic: true };
    let (asking, found) = (Arc::clone(&fs), Arc::new(Mutex::new(None)));
    let to = Arc::clone(&found);
    hook::set(move || {
        let id = asking.lookup(dir, &name("b")).unwrap().id;
        assert_eq!(read(&asking, id), b"CONTENT");
        *to.lock().unwrap() = Some(id);
    });
    let merged = fs.seal_and_change(next, seal, |now| {
        let b = now.resolve(&TreePath::parse(b"d/b").unwrap())?.ino().unwrap();
        let edits = vec![Edit::Resize { ino: b, size: 3 }];
        let mut after = now.clone();
        edits.iter().try_for_each(|edit| after.tree.apply(edit)).unwrap();
        Ok((edits, after))
    });
    hook::clear();
    assert!(merged.unwrap().to.is_ok());
    let id = found.lock().unwrap().unwrap();
    assert_eq!((read(&fs, id), links(&fs, id)), (b"CONTENT".to_vec(), 0));
    assert_eq!(read(&fs, changed.place.file("b")), b"CON");
}

/// At the first calls the plan has no held node yet. At the later ones it must be completed, as
/// often as a lookup comes.
#[test]
fn a_file_that_is_looked_up_during_a_restore_stays_what_it_was_for_its_holders() {
    for from in 0..4 {
        let changed = Changed::new();
        let (switched, id) = changed.restore_with_lookup("b", from);
        let fs = &changed.place.fs;
        assert_eq!((read(fs, id), links(fs, id)), (b"CONTENT".to_vec(), 0), "from call {from}");
        let now = changed.place.file("b");
        assert_ne!(now, id);
        assert_eq!(read(fs, now), b"content");
        assert!(switched.invalidations.attrs.contains(&id));
        assert!(switched.invalidations.names.contains(&(changed.place.dir, name("b"))));
    }
}

#[test]
fn a_new_file_that_is_looked_up_during_a_restore_has_no_name_after_it() {
    for from in 0..4 {
        let changed = Changed::new();
        let (_, id) = changed.restore_with_lookup("made", from);
        let fs = &changed.place.fs;
        assert_eq!((read(fs, id), links(fs, id)), (b"made".to_vec(), 0), "from call {from}");
    }
}

#[test]
fn a_file_that_both_states_have_keeps_its_id_when_it_is_looked_up_during_a_restore() {
    for from in 0..4 {
        let changed = Changed::new();
        let (_, id) = changed.restore_with_lookup("d", from);
        assert_eq!(changed.place.file("d"), id, "from call {from}");
    }
}

#[test]
fn files_that_are_looked_up_one_after_another_during_a_restore_have_no_names_after_it() {
    let place = Place::new();
    let sealed = seal(&place.fs);
    let (fs, dir) = (Arc::clone(&place.fs), place.dir);
    let changed = Changed { place, sealed };
    for number in 0..20 {
        let made = fs.mknod(dir, &name(&format!("m{number}")), 0o644, 0, 0, CALLER).unwrap().id;
        fs.forget(made, 1);
    }
    let found = Arc::new(Mutex::new(Vec::new()));
    let (asking, to) = (Arc::clone(&fs), Arc::clone(&found));
    changed.restore(move || {
        let mut found = to.lock().unwrap();
        let next = name(&format!("m{}", found.len()));
        found.push(asking.lookup(dir, &next).unwrap().id);
    });
    let found = found.lock().unwrap();
    // Around the comparison of the trees, and around each round without the lock.
    assert_eq!(found.len(), 2 + 2 * MOST_ROUNDS);
    found.iter().for_each(|id| assert_eq!(links(&fs, *id), 0));
}

#[test]
fn a_file_that_the_kernel_forgets_during_a_restore_leaves_no_orphan() {
    for from in 0..4 {
        let changed = Changed::new();
        let (fs, id) = (Arc::clone(&changed.place.fs), changed.place.file("b"));
        let (asking, mut calls) = (Arc::clone(&fs), 0);
        let switched = changed.restore(move || {
            calls += 1;
            if calls > from {
                asking.forget(id, 1);
            }
        });
        assert_eq!(fs.live_set().orphans.len(), 0, "from call {from}");
        assert!(fs.getattr(id).is_err() && !switched.invalidations.attrs.contains(&id));
    }
}
