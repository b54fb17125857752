//! Runs requests of the kernel while a switch to another state has released the core lock.

use std::path::Path;
use std::sync::{Arc, Mutex};

use super::{CALLER, Place, merge, merge_into, name, next_layer, read, seal, switch};
use crate::error::FsError;
use crate::fs::switch::install::MOST_ROUNDS;
use crate::fs::writing::hook::{self, wait_a_little_for};
use crate::fs::{
    DirEntry, Entry, Fs, HandOut, NameSink, Rebasing, RenameMode, SetAttr, State, Switched,
};
use crate::store::record::{LayerKind, Seal};
use crate::sys::clock::now;
use crate::sys::failpoint;
use crate::types::{Epoch, FileKind, NodeId};

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
        hook::set(each);
        let switched = switch(&self.place.fs, &self.sealed);
        hook::clear();
        switched
    }

    /// As [`Changed::restore`]. From call number `from` on, the kernel looks up a name and holds
    /// what it finds, until a lookup waits for the switch. Returns the id that it got last.
    fn restore_with_lookup(&self, text: &'static str, from: usize) -> (Switched, NodeId) {
        let (fs, dir) = (Arc::clone(&self.place.fs), self.place.dir);
        let found = Arc::new(Mutex::new(None));
        let (to, mut calls, mut waits) = (Arc::clone(&found), 0, false);
        let switched = self.restore(move || {
            calls += 1;
            if calls <= from || waits {
                return;
            }
            let asking = Arc::clone(&fs);
            let lookup = std::thread::spawn(move || asking.lookup(dir, &name(text)));
            wait_a_little_for(&lookup);
            waits = !lookup.is_finished();
            if !waits {
                *to.lock().unwrap() = Some(lookup.join().unwrap().unwrap().id);
            }
        });
        let id = found.lock().unwrap().take();
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
    let (asking, b) = (Arc::clone(&fs), changed.place.file("b"));
    changed.restore(move || {
        calls += 1;
        assert_eq!(read(&asking, b), b"CONTENT", "call {calls}");
        assert!(asking.lookup(dir, &name("c")).is_err() && calls < 100);
    });
    assert_eq!(read(&fs, b), b"CONTENT", "its holders keep it");
    assert_eq!(read(&fs, changed.place.file("b")), b"content");
    assert_eq!(read(&fs, changed.place.file("c")), b"content");
    assert!(fs.lookup(dir, &name("made")).is_err());
}

/// Merges. Calls `each` in another thread whenever the core lock is released.
fn merge_with(fs: &Fs, each: impl FnMut() + Send + 'static) {
    hook::set(each);
    merge(fs);
    hook::clear();
}

/// The merge releases the core lock six times. It makes the edits, compares the trees and plans for
/// the root. Then it works out what follows from the plan, in two steps, and writes its record.
/// Lookups that come during these last three wait.
#[test]
fn a_file_that_is_looked_up_during_a_merge_stays_what_it_was_for_its_holders() {
    let [mut answered, mut waited] = [0, 0];
    for at in 0..12 {
        let changed = Changed::new();
        let (fs, dir) = (Arc::clone(&changed.place.fs), changed.place.dir);
        let (asking, started) = (Arc::clone(&fs), Arc::new(Mutex::new(None)));
        let (to, mut calls) = (Arc::clone(&started), 0);
        merge_with(&fs, move || {
            if calls == at {
                let asking = Arc::clone(&asking);
                let lookup = std::thread::spawn(move || {
                    let id = asking.lookup(dir, &name("b")).unwrap().id;
                    (id, read(&asking, id))
                });
                wait_a_little_for(&lookup);
                *to.lock().unwrap() = Some(lookup);
            }
            calls += 1;
        });
        let (id, seen) = started.lock().unwrap().take().unwrap().join().unwrap();
        assert_eq!(read(&fs, id), seen, "at call {at}");
        if seen == b"CON" {
            waited += 1;
        } else {
            assert_eq!((seen, links(&fs, id)), (b"CONTENT".to_vec(), 0), "at call {at}");
            answered += 1;
        }
        assert_eq!(read(&fs, changed.place.file("b")), b"CON");
    }
    assert!(answered > 0 && waited > 0, "{answered} answered, {waited} waited");
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
    let (lookups, late) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (asking, to, to_late) = (Arc::clone(&fs), Arc::clone(&lookups), Arc::clone(&late));
    changed.restore(move || {
        let (mut lookups, asking) = (to.lock().unwrap(), Arc::clone(&asking));
        let next = name(&format!("m{}", lookups.len()));
        let lookup = std::thread::spawn(move || asking.lookup(dir, &next));
        // Around the comparison of the trees and each round before the last one.
        if lookups.len() < 2 + 2 * MOST_ROUNDS {
            (0..100).for_each(|_| wait_a_little_for(&lookup));
            assert!(lookup.is_finished(), "lookup {}", lookups.len());
            lookups.push(lookup.join().unwrap());
        } else {
            wait_a_little_for(&lookup);
            assert!(!lookup.is_finished());
            to_late.lock().unwrap().push(lookup);
        }
    });
    let found = std::mem::take(&mut *lookups.lock().unwrap());
    found.into_iter().for_each(|found| assert_eq!(links(&fs, found.unwrap().id), 0));
    let late = std::mem::take(&mut *late.lock().unwrap());
    assert_eq!(late.len(), 6, "around the last round, and what follows from the plan");
    for lookup in late {
        assert!(lookup.join().unwrap().is_err(), "the restore has removed the file");
    }
}

/// From call 4 on, the file is in the plan already, so its attributes are invalidated all the same.
#[test]
fn a_file_that_the_kernel_forgets_during_a_restore_leaves_no_orphan() {
    for from in 0..8 {
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
        assert!(fs.getattr(id).is_err(), "from call {from}");
        assert_eq!(switched.invalidations.attrs.contains(&id), from >= 4, "from call {from}");
    }
}

/// The kernel holds a removed file and one that never had a name when the restore begins. It
/// forgets the first during the restore.
#[test]
fn removed_and_unnamed_files_outlive_a_restore_as_long_as_the_kernel_holds_them() {
    for at in 0..10 {
        let changed = Changed::new();
        let (fs, dir) = (Arc::clone(&changed.place.fs), changed.place.dir);
        let [removed, kept] = ["g", "h"].map(|text| {
            let id = changed.place.file(text);
            fs.unlink(dir, &name(text)).unwrap();
            fs.write(id, 0, b"W", false).unwrap();
            id
        });
        let unnamed = fs.tmpfile(dir, 0o644, 0, CALLER).unwrap().id;
        fs.write(unnamed, 0, b"unnamed", false).unwrap();
        let (asking, mut calls) = (Arc::clone(&fs), 0);
        changed.restore(move || {
            if calls == at {
                asking.forget(removed, 1);
            }
            calls += 1;
        });
        let left = if at < 8 { 2 } else { 3 };
        assert_eq!(fs.live_set().orphans.len(), left, "forgotten at call {at}");
        assert_eq!((read(&fs, kept), links(&fs, kept)), (b"Wontent".to_vec(), 0));
        fs.link(unnamed, dir, &name("linked")).unwrap();
        assert_eq!(read(&fs, changed.place.file("linked")), b"unnamed");
        assert_eq!(read(&fs, changed.place.file("g")), b"content", "the restored file");
    }
}

/// The base of a place.
fn base(place: &Place) -> std::path::PathBuf {
    place._dir.path().join("base")
}

/// A listing in which each name comes with its node, unless the kernel holds the node or must wait
/// for it.
#[derive(Default)]
struct Listed(Vec<(Vec<u8>, Option<Entry>)>);

impl NameSink for Listed {
    fn wants_node(&self, _: FileKind) -> bool {
        true
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn has_time(&mut self) -> bool {
        true
    }

    fn take(&mut self, entry: DirEntry, hand_out: &mut HandOut<'_>) -> bool {
        let node = hand_out();
        self.0.push((entry.name, node));
        true
    }
}

/// While lookups wait for the merge, names come without nodes.
#[test]
fn a_listing_during_a_merge_has_each_name_once_and_its_nodes_stay_what_they_were() {
    let [mut handed_out, mut names_only] = [0, 0];
    for at in 0..12 {
        let changed = Changed::new();
        let (fs, dir) = (Arc::clone(&changed.place.fs), changed.place.dir);
        let (asking, listed) = (Arc::clone(&fs), Arc::new(Mutex::new(Listed::default())));
        let (to, mut calls) = (Arc::clone(&listed), 0);
        merge_with(&fs, move || {
            if calls == at {
                asking.readdir_plus(dir, 0, &mut *to.lock().unwrap()).unwrap();
            }
            calls += 1;
        });
        let listed = std::mem::take(&mut listed.lock().unwrap().0);
        let mut names: Vec<&[u8]> = listed.iter().map(|(name, _)| &**name).collect();
        names.sort_unstable();
        assert_eq!(names, [&b"."[..], b"..", b"a", b"b", b"d", b"e", b"f", b"g", b"h", b"made"]);
        let node_of = |of: &[u8]| listed.iter().find(|(name, _)| name == of).unwrap().1;
        assert_eq!(node_of(b"a"), None, "the kernel holds it");
        assert_eq!(node_of(b"b").is_some(), node_of(b"h").is_some(), "at call {at}");
        match node_of(b"b") {
            Some(b) => {
                assert_eq!((read(&fs, b.id), links(&fs, b.id)), (b"CONTENT".to_vec(), 0));
                handed_out += 1;
            }
            None => names_only += 1,
        }
        assert_eq!(read(&fs, changed.place.file("b")), b"CON");
    }
    assert_eq!([handed_out, names_only], [6, 6]);
}

#[test]
fn a_merge_whose_record_cannot_be_written_changes_nothing_and_lookups_go_on() {
    let changed = Changed::new();
    let (fs, dir) = (Arc::clone(&changed.place.fs), changed.place.dir);
    let (asking, held) = (Arc::clone(&fs), Arc::new(Mutex::new(Vec::new())));
    let (to, mut calls) = (Arc::clone(&held), 0);
    hook::set(move || {
        // Later ones wait for the merge.
        if calls < 6 {
            to.lock().unwrap().push(asking.lookup(dir, &name("b")).unwrap().id);
        }
        calls += 1;
    });
    let next = next_layer(&fs);
    let merged = failpoint::with("fail:store.write:1:EIO", || merge_into(&fs, next));
    hook::clear();
    assert!(matches!(merged, Err(FsError::Store(error)) if error.errno == Some(libc::EIO)));
    let held = std::mem::take(&mut *held.lock().unwrap());
    let b = changed.place.file("b");
    assert_eq!(held, [b; 6], "the id stays");
    assert_eq!((read(&fs, b), links(&fs, b)), (b"CONTENT".to_vec(), 1));
    merge(&fs);
    assert_eq!((read(&fs, b), links(&fs, b)), (b"CONTENT".to_vec(), 0));
    assert_eq!(read(&fs, changed.place.file("b")), b"CON");
}

/// Switches to a state. Calls `event` in another thread at one of the calls of the hook, and
/// returns its result.
fn switch_with<T: Send + 'static>(
    fs: &Arc<Fs>,
    to: &State,
    at: usize,
    event: impl Fn(&Fs) -> T + Send + 'static,
) -> T {
    let result = Arc::new(Mutex::new(None));
    let (asking, told, mut calls) = (Arc::clone(fs), Arc::clone(&result), 0);
    hook::set(move || {
        if calls == at {
            *told.lock().unwrap() = Some(event(&asking));
        }
        calls += 1;
    });
    switch(fs, to);
    hook::clear();
    result.lock().unwrap().take().unwrap()
}

fn chmod(fs: &Fs, id: NodeId) {
    fs.setattr(id, SetAttr { mode: Some(0o700), ..SetAttr::default() }, false).unwrap();
}

fn lookup(fs: &Fs, path: &str) -> Option<NodeId> {
    let down = |dir: NodeId, part: &str| fs.lookup(dir, &name(part)).ok().map(|found| found.id);
    path.split('/').try_fold(NodeId::ROOT, down)
}

/// A filesystem without a record of `d`, which the kernel does not hold, and a state that has one.
/// The base has the directory `x/y`.
fn before_record_of_d() -> (Place, State) {
    let place = Place::new();
    let fs = &place.fs;
    std::fs::create_dir_all(base(&place).join("x/y")).unwrap();
    let first = seal(fs);
    chmod(fs, place.dir);
    let second = seal(fs);
    switch_with(fs, &first, 0, |_| ());
    fs.forget(place.dir, 1);
    (place, second)
}

/// Another process moves `d` to `x/y/b` in the base. If it kept the id that it gets there, the next
/// lookup of `d` would move its dentry up.
#[test]
fn a_directory_that_moves_in_the_base_during_a_restore_gets_another_id_at_its_recorded_place() {
    for at in 0..4 {
        let (place, recorded) = before_record_of_d();
        let (fs, base) = (&place.fs, base(&place));
        let moved = switch_with(fs, &recorded, at, move |fs| {
            std::fs::rename(base.join("d"), base.join("x/y/b")).unwrap();
            lookup(fs, "x/y/b").unwrap()
        });
        assert!(lookup(fs, "d").is_some_and(|now| now != moved), "moved at call {at}");
    }
}

/// As above, but it is back in its place when the restore begins, and the kernel has not noticed.
#[test]
fn a_directory_that_was_moved_in_the_base_and_back_gets_another_id_in_a_restore() {
    let (place, recorded) = before_record_of_d();
    let (fs, base) = (&place.fs, base(&place));
    std::fs::rename(base.join("d"), base.join("x/y/b")).unwrap();
    let moved = lookup(fs, "x/y/b").unwrap();
    std::fs::rename(base.join("x/y/b"), base.join("d")).unwrap();
    switch_with(fs, &recorded, 0, |_| ());
    assert!(lookup(fs, "d").is_some_and(|now| now != moved));
}

/// The state after has records of `d` and `d/sub`. The old `d` is cut off, and so is all below it.
#[test]
fn a_directory_below_one_that_moves_in_the_base_during_a_restore_is_cut_off() {
    for at in 0..4 {
        let place = Place::new();
        let (fs, base) = (Arc::clone(&place.fs), base(&place));
        std::fs::create_dir(base.join("d/sub")).unwrap();
        let first = seal(&fs);
        let sub = place.file("sub");
        chmod(&fs, sub);
        let second = seal(&fs);
        switch_with(&fs, &first, 0, |_| ());
        assert_eq!(lookup(&fs, "d/sub"), Some(sub));
        switch_with(&fs, &second, at, move |fs| {
            std::fs::rename(base.join("d"), base.join("e")).unwrap();
            lookup(fs, "e").unwrap()
        });
        assert!(lookup(&fs, "d/sub").is_some_and(|now| now != sub), "moved at call {at}");
    }
}

/// The state after hides `d/b`.
#[test]
fn a_file_that_comes_under_a_hidden_name_in_the_base_during_a_restore_has_no_name_after_it() {
    for at in 0..4 {
        let place = Place::new();
        let (fs, dir, base) = (Arc::clone(&place.fs), place.dir, base(&place));
        let first = seal(&fs);
        fs.unlink(dir, &name("b")).unwrap();
        let second = seal(&fs);
        switch_with(&fs, &first, 0, |_| ());
        let new = switch_with(&fs, &second, at, move |fs| {
            std::fs::write(base.join("new"), "new").unwrap();
            std::fs::rename(base.join("new"), base.join("d/b")).unwrap();
            fs.lookup(dir, &name("b")).unwrap().id
        });
        assert_eq!((links(&fs, new), read(&fs, new)), (0, b"new".to_vec()), "at call {at}");
    }
}

/// All nodes count in the switch, because a directory moves. Programs still have the dentry of the
/// file that another process replaced, and would get ENOENT by it.
#[test]
fn the_name_of_a_file_that_was_replaced_in_the_base_is_invalidated_by_a_restore() {
    let place = Place::new();
    let (fs, dir, base) = (&place.fs, place.dir, base(&place));
    place.file("b");
    let moved = fs.mkdir(dir, &name("moved"), 0o755, 0, CALLER).unwrap().id;
    fs.mkdir(moved, &name("x"), 0o755, 0, CALLER).unwrap();
    let both = seal(fs);
    fs.rename(moved, &name("x"), dir, &name("x"), RenameMode::Replace, 1).unwrap();
    std::fs::write(base.join("new"), "new").unwrap();
    std::fs::rename(base.join("new"), base.join("d/b")).unwrap();
    let switched = switch(fs, &both);
    assert!(switched.invalidations.names.contains(&(dir, name("b"))));
}

/// The bytes of all files of a layer.
fn layer_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let len = |entry: std::fs::DirEntry| entry.metadata().unwrap().len();
    entries.filter(|entry| entry.path().is_file()).map(len).sum()
}

/// A start of the store would take the new layer for the present one as soon as it has the record.
#[test]
fn the_layer_of_a_rebase_gets_its_record_when_nothing_else_can_fail() {
    let changed = Changed::new();
    let fs = &changed.place.fs;
    let next = fs.store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap();
    let dir = changed.place._dir.path().join("store/layers").join(format!("{:08}", next.layer().0));
    let empty = layer_bytes(&dir);
    let (sizes, counted) = (Arc::new(Mutex::new(Vec::new())), dir.clone());
    let to = Arc::clone(&sizes);
    hook::set(move || to.lock().unwrap().push(layer_bytes(&counted)));
    let seal = Seal { name: None, message: String::new(), time: now(), automatic: true };
    let rebased = fs.rebase(next, seal, |now| Ok(Some(now.clone())));
    hook::clear();
    assert!(matches!(rebased, Ok(Rebasing::Rebased(_))));
    let sizes = sizes.lock().unwrap();
    let (last, before) = sizes.split_last().unwrap();
    assert!(before.len() > 4 && before.iter().all(|size| *size == empty) && *last > empty);
}
