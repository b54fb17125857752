//! Writes between the two halves of a step, where no other test can stop.

use std::os::unix::ffi::OsStrExt;

use parking_lot::Mutex;

use super::*;
use crate::base::Base;
use crate::fs::Caller;
use crate::fs::merged::lower::Lower;
use crate::fs::writing::hook;
use crate::jail::{Jail, Policy};
use crate::store::record::LayerKind;
use crate::store::{Store, StoreOptions};
use crate::tree::Tree;
use crate::types::{ByteRange, Epoch, NodeId};

struct Place {
    _dir: tempfile::TempDir,
    fs: Arc<Fs>,
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
        fs.open_edits("main");
        let me = Caller { uid: 0, gid: 0 };
        let name = Name::new(b"a").unwrap();
        let file = fs.mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, me).unwrap().id;
        Place { _dir: dir, fs: Arc::new(fs), file }
    }

    fn put(&self, text: &str) {
        self.fs.truncate(self.file, 0, false).unwrap();
        self.fs.write(self.file, 0, text.as_bytes(), false).unwrap();
    }

    fn texts(&self) -> Vec<String> {
        let of = |info: EditInfo| {
            let (state, found) = self.fs.before_edit(&path(), info.number).unwrap();
            String::from_utf8(state.read_all(&found).unwrap()).unwrap()
        };
        self.fs.history(&path()).into_iter().map(of).collect()
    }

    fn live(&self) -> String {
        let found = self.fs.with_core(|core| core.resolve(&path())).unwrap();
        String::from_utf8(self.fs.state().read_all(&found).unwrap()).unwrap()
    }
}

#[test]
fn a_write_during_an_undo_is_kept() {
    let place = Place::new();
    for text in ["one", "two", "three"] {
        place.put(text);
    }
    let wanted = place.fs.change(|core| core.resolve_step(&path(), Step::Undo(1))).unwrap();
    place.fs.write(place.file, 5, b" and more", false).unwrap();
    place
        .fs
        .change(|core| core.install_content(&path(), &wanted))
        .unwrap_or_else(|_| panic!("not undone"));
    assert_eq!(place.live(), "two");
    assert_eq!(place.texts()[0], "three and more", "{:?}", place.texts());
    // A redo leads to it.
    let again = place.fs.step(&path(), Step::Redo(1)).unwrap_or_else(|_| panic!("not redone"));
    assert!(again.number.is_some(), "the file as it was when the undo began");
    assert_eq!(place.live(), "three");
    place.fs.step(&path(), Step::Redo(1)).unwrap_or_else(|_| panic!("not redone"));
    assert_eq!(place.live(), "three and more");
}

#[test]
fn a_write_during_a_redo_is_kept() {
    let place = Place::new();
    for text in ["one", "two", "three"] {
        place.put(text);
    }
    place.fs.step(&path(), Step::Undo(2)).unwrap_or_else(|_| panic!("not undone"));
    let entry = place.fs.lookup(NodeId::ROOT, &Name::new(b"a").unwrap()).unwrap();
    let wanted = place.fs.change(|core| core.resolve_step(&path(), Step::Redo(1))).unwrap();
    place.fs.write(entry.id, 0, b"ONE", false).unwrap();
    place
        .fs
        .change(|core| core.install_content(&path(), &wanted))
        .unwrap_or_else(|_| panic!("not redone"));
    assert_eq!(place.live(), "two");
    assert!(place.texts().contains(&"ONE".to_owned()), "{:?}", place.texts());
}

fn read(fs: &Fs, id: NodeId) -> Vec<u8> {
    fs.read(id, 0, 100).unwrap().read(false).unwrap().unwrap()
}

#[test]
fn a_file_that_is_looked_up_during_an_undo_stays_what_it_was_for_its_holders() {
    let place = Place::new();
    place.put("one");
    place.put("two");
    place.fs.forget(place.file, 1);
    let (asking, found) = (Arc::clone(&place.fs), Arc::new(Mutex::new(Vec::new())));
    let to = Arc::clone(&found);
    let name = Name::new(b"a").unwrap();
    hook::set(move || {
        let (asking, name) = (Arc::clone(&asking), name.clone());
        let lookup = std::thread::spawn(move || {
            let id = asking.lookup(NodeId::ROOT, &name).unwrap().id;
            (id, read(&asking, id))
        });
        hook::wait_a_little_for(&lookup);
        to.lock().push(lookup);
    });
    place.fs.step(&path(), Step::Undo(1)).unwrap_or_else(|_| panic!("not undone"));
    hook::clear();
    assert_eq!(place.live(), "one");
    let lookups = std::mem::take(&mut *found.lock());
    let found: Vec<_> = lookups.into_iter().map(|lookup| lookup.join().unwrap()).collect();
    let id = found.first().unwrap().0;
    assert_eq!(read(&place.fs, id), b"two");
    // Those that come late wait for the undo, and find the file as it is then.
    for (same, seen) in &found {
        assert_eq!(*same == id, seen == b"two", "{found:?}");
    }
    let now = place.fs.lookup(NodeId::ROOT, &Name::new(b"a").unwrap()).unwrap().id;
    assert_ne!(now, id);
    assert_eq!(read(&place.fs, now), b"one");
}

#[test]
fn an_undo_installs_an_edit_whose_extents_changed_meanwhile() {
    let place = Place::new();
    let text = |end: &str| "0123456789abcdef".repeat(1024) + end;
    for end in ["one", "two", "three"] {
        place.put(&text(end));
    }
    let wanted = place.fs.change(|core| core.resolve_step(&path(), Step::Undo(1))).unwrap();
    place.fs.maintain_edits(true, &|| false);
    place
        .fs
        .change(|core| core.install_content(&path(), &wanted))
        .unwrap_or_else(|_| panic!("not undone"));
    assert!(place.live() == text("two"));
    place.fs.step(&path(), Step::Undo(1)).unwrap_or_else(|_| panic!("not undone"));
    assert!(place.live() == text("one"), "one edit further back");
}

#[test]
fn bytes_of_edits_that_were_dropped_for_space_are_overwritten_in_place_again() {
    let place = Place::new();
    let text = "0123456789abcdef".repeat(512);
    place.put(&text);
    let ino = place.fs.getattr(place.file).unwrap().ino;
    let layer = place.fs.upper_layer();
    let source = || place.fs.core().tree.extents(ino).next().unwrap().1.source;
    let Source::Pool { offset, .. } = source() else { panic!("{:?}", source()) };
    let pinned = || place.fs.core().first_pinned(layer, ByteRange::at(offset, 8192));
    // A moment later, a write begins an edit of the file. The edit has the bytes before it.
    let soon = crate::sys::clock::now();
    let later = Timestamp { secs: soon.secs + 2, ..soon };
    place.fs.set_edit_clock(Box::new(move || later));
    place.fs.write(place.file, 0, b"written", false).unwrap();
    assert_eq!(pinned(), Some(ByteRange::at(offset, 8192)));
    assert_eq!(place.texts()[0], text);
    place.fs.reclaim.note_garbage();
    place.fs.reclaim_unused().unwrap();
    assert_eq!(pinned(), Some(ByteRange::at(offset, 8192)), "there is an edit");
    assert!(place.fs.drop_edits_for_space());
    assert_eq!(pinned(), Some(ByteRange::at(offset, 8192)), "a reader may still have the edit");
    place.fs.reclaim.note_garbage();
    assert!(place.fs.reclaim_unused().unwrap() >= 8192);
    assert_eq!(pinned(), None);
    let at = source();
    place.fs.write(place.file, 5000, b"in place", false).unwrap();
    assert_eq!(source(), at);
    let mut wanted = text;
    wanted.replace_range(..7, "written");
    wanted.replace_range(5000..5008, "in place");
    assert!(place.live() == wanted);
}

#[test]
fn an_edit_whose_number_another_one_has_by_now_is_not_dropped() {
    let place = Place::new();
    for text in ["one", "two", "three"] {
        place.put(text);
    }
    let drop_first = |later: u64| {
        let mut core = place.fs.core();
        let history = core.edits.as_mut().unwrap();
        let first = &history.by_path.get(&path()).unwrap().entries[0];
        let chosen = (path(), first.number, first.serial + later);
        history.drop_edits(&[chosen]);
    };
    let texts = place.texts();
    drop_first(1);
    assert_eq!(place.texts(), texts);
    drop_first(0);
    assert_eq!(place.texts(), texts[..texts.len() - 1], "the oldest is gone");
}

#[test]
fn bytes_of_a_removed_file_that_is_still_open_stay_pinned_when_edits_are_dropped() {
    let place = Place::new();
    let text = "0123456789abcdef".repeat(512);
    place.put(&text);
    place.fs.unlink(NodeId::ROOT, &Name::new(b"a").unwrap()).unwrap();
    // The file comes back with the bytes of the removed one, which is held.
    place.fs.step(&path(), Step::Undo(1)).unwrap_or_else(|_| panic!("not undone"));
    let layer = place.fs.upper_layer();
    let ino = place.fs.lookup(NodeId::ROOT, &Name::new(b"a").unwrap()).unwrap().attr.ino;
    let (_, extent) = place.fs.core().tree.extents(ino).next().unwrap();
    let Source::Pool { offset, .. } = extent.source else { panic!("{extent:?}") };
    while place.fs.drop_edits_for_space() {}
    place.fs.reclaim.note_garbage();
    place.fs.reclaim_unused().unwrap();
    let part = ByteRange::at(offset, 8192);
    assert_eq!(place.fs.core().first_pinned(layer, part), Some(part));
    let id = place.fs.lookup(NodeId::ROOT, &Name::new(b"a").unwrap()).unwrap().id;
    place.fs.write(id, 0, b"written", false).unwrap();
    let held = place.fs.read(place.file, 0, 8192).unwrap().read(false).unwrap().unwrap();
    assert!(held == text.as_bytes());
}

#[test]
fn bytes_that_a_file_refers_to_twice_are_not_overwritten_in_place() {
    let place = Place::new();
    place.put(&"0123456789abcdef".repeat(512));
    place.fs.set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    let ino = place.fs.getattr(place.file).unwrap().ino;
    let layer = place.fs.upper_layer();
    let (_, first) = place.fs.core().tree.extents(ino).next().unwrap();
    let Source::Pool { offset, .. } = first.source else { panic!("{first:?}") };
    // Map the second block to the second half of the first and the first half of the second.
    let to = Some(Source::Pool { layer, offset: offset + 2048 });
    let edit = Edit::Map { ino, range: ByteRange::at(4096, 4096), to };
    place.fs.writing().commit(vec![edit]).unwrap();
    // Reopen, so that the pinned ranges come from the tree alone.
    place.fs.open_edits("main");
    let pinned = |from: u64| {
        place.fs.core().first_pinned(layer, ByteRange { start: offset + from, end: offset + 8192 })
    };
    assert_eq!(pinned(0), Some(ByteRange::at(offset + 2048, 2048)));
    assert_eq!(pinned(4096), None, "bytes with one reference are overwritten in place");
    let mut wanted = place.live();
    place.fs.write(place.file, 3000, b"written", false).unwrap();
    wanted.replace_range(3000..3007, "written");
    assert!(place.live() == wanted);
}
