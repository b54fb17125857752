//! Counts what an operation costs: how often it takes the core lock, and how many base nodes it
//! looks up. And lets others change a file between the parts of a write.

mod interleaving;
mod late_forgets;
#[cfg(feature = "shuttle")]
mod schedules;
mod switches;

use std::cell::Cell;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;
use std::sync::Arc;

use crate::base::Base;
use crate::error::FsResult;
use crate::fs::merged::lower::{LOOKUPS, Lower};
use crate::fs::ops::write::MOST_DROPPED;
use crate::fs::ops::write::hook::{self, When};
use crate::fs::{Caller, DirEntry, Fs, HandOut, Invalidations, NameSink, SetAttr, State, Switched};
use crate::jail::{Jail, Policy};
use crate::store::layer::Upper;
use crate::store::record::{LayerKind, Seal};
use crate::store::{Store, StoreOptions};
use crate::tree::{Edit, Tree};
use crate::types::{Epoch, FileKind, Ino, Name, NodeId, TreePath};

/// A filesystem whose base has files `a` to `h` in the directory `d`.
struct Place {
    _dir: tempfile::TempDir,
    fs: Arc<Fs>,
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
        Place { _dir: dir, fs: Arc::new(fs), dir: dir_id }
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

/// The content of `file`, and what is written into it: a part of its second block.
const OLD: [u8; 10_000] = [b'a'; 10_000];
const AT: usize = 4100;
const NEW: &[u8] = b"new";

fn read(fs: &Fs, id: NodeId) -> Vec<u8> {
    fs.read(id, 0, 1 << 20).unwrap().read(false).unwrap().unwrap()
}

fn seal(fs: &Fs) -> State {
    let next = next_layer(fs);
    let time = crate::sys::clock::now();
    let seal = Seal { name: None, message: String::new(), time, automatic: false };
    fs.seal(next, seal, None).unwrap().1
}

/// Switches to a state, as a restore does.
fn switch(fs: &Fs, to: &State) -> Switched {
    let upper = fs.store.create_layer(None, "main", Epoch(0), LayerKind::Branches).unwrap();
    fs.switch(to.clone(), upper).unwrap()
}

/// Cuts `d/b` to three bytes, as a merge does.
fn merge(fs: &Fs) -> Invalidations {
    merge_into(fs, next_layer(fs)).unwrap()
}

fn next_layer(fs: &Fs) -> Upper {
    let below = Some(fs.upper_layer());
    fs.store.create_layer(below, "main", Epoch(0), LayerKind::Continues).unwrap()
}

/// As [`merge`]. Writes go to `next` from then on.
fn merge_into(fs: &Fs, next: Upper) -> FsResult<Invalidations> {
    let time = crate::sys::clock::now();
    let seal = Seal { name: None, message: String::new(), time, automatic: true };
    let merged = fs.seal_and_change(next, seal, |now| {
        let b = now.resolve(&TreePath::parse(b"d/b").unwrap())?.ino().unwrap();
        let edits = vec![Edit::Resize { ino: b, size: 3 }];
        let mut after = now.clone();
        edits.iter().try_for_each(|edit| after.tree.apply(edit)).unwrap();
        Ok((edits, after))
    });
    merged.unwrap().to.map(|(_, invalidations)| invalidations)
}

/// Writes into a file of a sealed layer, and runs `other` before the bytes are in the pool, and in
/// another sandbox after that, before they are recorded. The file must be as `model` says, whose
/// argument is the content before the write.
fn write_around(other: impl Fn(&Fs, NodeId, NodeId) + 'static, model: fn(&mut Vec<u8>)) {
    let other = Arc::new(other);
    for when in [When::BeforeStore, When::AfterStore] {
        write_with(when, Arc::clone(&other), model);
    }
}

fn write_with(
    when: When,
    other: Arc<impl Fn(&Fs, NodeId, NodeId) + 'static>,
    model: fn(&mut Vec<u8>),
) {
    let place = Place::new();
    let file = place.fs.mknod(place.dir, &name("file"), 0o644, 0, 0, CALLER).unwrap().id;
    place.fs.write(file, 0, &OLD, false).unwrap();
    let sealed = seal(&place.fs);
    let (fs, dir) = (Arc::clone(&place.fs), place.dir);
    hook::set(when, move || other(&fs, dir, file));
    place.fs.write(file, AT as u64, NEW, false).unwrap();
    assert!(!hook::clear(), "the write goes to fresh addresses");
    let mut wanted = OLD.to_vec();
    model(&mut wanted);
    wanted.resize(wanted.len().max(AT + NEW.len()), 0);
    wanted[AT..AT + NEW.len()].copy_from_slice(NEW);
    assert!(read(&place.fs, file) == wanted, "the file after both");
    place.fs.reclaim.note_garbage();
    assert!(place.fs.reclaim_unused().is_some());
    assert!(read(&place.fs, file) == wanted, "the file after unused space was punched");
    let path = crate::types::TreePath::parse(b"d/file").unwrap();
    let found = sealed.resolve(&path).unwrap();
    assert!(sealed.read_all(&found).unwrap() == OLD, "the sealed state");
}

fn setattr(fs: &Fs, file: NodeId, size: Option<u64>) {
    let set = SetAttr { size, mode: Some(0o600), ..SetAttr::default() };
    fs.setattr(file, set, true).unwrap();
}

#[test]
fn a_write_that_nothing_interrupts_is_recorded_as_it_was_stored() {
    write_around(|_, _, _| (), |_| ());
}

#[test]
fn a_read_between_the_parts_of_a_write_changes_nothing() {
    write_around(|fs, _, file| assert!(read(fs, file) == OLD, "no byte is visible"), |_| ());
}

#[test]
fn a_seal_between_the_parts_of_a_write_holds_the_old_content() {
    write_around(|fs, _, _| drop(seal(fs)), |_| ());
}

#[test]
fn a_write_between_the_parts_of_another_one_to_the_same_block_stays() {
    let other = |fs: &Fs, _, file| fs.write(file, 4200, b"other", false).unwrap();
    write_around(other, |content| content[4200..4205].copy_from_slice(b"other"));
    let last = |fs: &Fs, _, file| fs.write(file, AT as u64, b"others", false).unwrap();
    write_around(last, |content| content[AT..AT + 6].copy_from_slice(b"others"));
}

#[test]
fn a_truncation_between_the_parts_of_a_write_stays() {
    write_around(|fs, _, file| setattr(fs, file, Some(4000)), |content| content.truncate(4000));
    write_around(|fs, _, file| setattr(fs, file, Some(0)), Vec::clear);
}

#[test]
fn a_change_of_attributes_between_the_parts_of_a_write_stays() {
    let other = |fs: &Fs, _, file| setattr(fs, file, None);
    write_around(other, |_| ());
}

#[test]
fn a_hole_between_the_parts_of_a_write_stays() {
    const PUNCH_HOLE_AND_KEEP_SIZE: i32 = 3;
    let other = |fs: &Fs, _, file| {
        fs.fallocate(file, PUNCH_HOLE_AND_KEEP_SIZE, 4096, 4096, false).unwrap();
    };
    write_around(other, |content| content[4096..8192].fill(0));
}

#[test]
fn a_removal_between_the_parts_of_a_write_leaves_the_file_to_those_who_hold_it() {
    write_around(|fs, dir, _| fs.unlink(dir, &name("file")).unwrap(), |_| ());
}

#[test]
fn unused_space_that_is_punched_between_the_parts_of_a_write_is_not_that_of_the_write() {
    let other = |fs: &Fs, _, _| {
        fs.reclaim.note_garbage();
        assert!(fs.reclaim_unused().is_some(), "the write holds no read guard any more");
    };
    write_with(When::AfterStore, Arc::new(other), |_| ());
}

/// Runs `other` after each time that the bytes of a write are in the pool. Returns how often that
/// was.
fn stages_of_a_write(other: impl Fn(&Fs, NodeId) + 'static) -> u32 {
    /// The code that the hook calls, and how often it did.
    struct Repeated<F> {
        fs: Arc<Fs>,
        file: NodeId,
        calls: Cell<u32>,
        other: F,
    }
    fn arm<F: Fn(&Fs, NodeId) + 'static>(repeated: Rc<Repeated<F>>) {
        hook::set(When::AfterStore, move || {
            repeated.calls.set(repeated.calls.get() + 1);
            (repeated.other)(&repeated.fs, repeated.file);
            arm(repeated);
        });
    }
    let place = Place::new();
    let file = place.fs.mknod(place.dir, &name("file"), 0o644, 0, 0, CALLER).unwrap().id;
    place.fs.write(file, 0, &OLD, false).unwrap();
    seal(&place.fs);
    let (fs, calls) = (Arc::clone(&place.fs), Cell::new(0));
    let repeated = Rc::new(Repeated { fs, file, calls, other });
    arm(Rc::clone(&repeated));
    place.fs.write(file, AT as u64, NEW, false).unwrap();
    hook::clear();
    assert_eq!(&read(&place.fs, file)[AT..AT + NEW.len()], NEW);
    repeated.calls.get()
}

#[test]
fn a_write_ends_also_if_a_seal_comes_between_its_parts_each_time() {
    assert_eq!(stages_of_a_write(|fs, _| drop(seal(fs))), MOST_DROPPED);
}

#[test]
fn changes_of_attributes_and_of_other_blocks_do_not_make_a_write_begin_again() {
    assert_eq!(stages_of_a_write(|fs, file| setattr(fs, file, None)), 1);
    assert_eq!(stages_of_a_write(|fs, file| fs.write(file, 9000, b"other", false).unwrap()), 1);
    let other = |fs: &Fs, file| fs.write(file, AT as u64 + 100, b"other", false).unwrap();
    assert_eq!(stages_of_a_write(other), 1, "the rest of the block is in place then");
}

/// The edit history pins a part of an extent; the rest of it is still written in place.
#[test]
fn a_write_in_place_beside_pinned_bytes_of_the_same_extent_stays() {
    let place = Place::new();
    place.fs.open_edits("main");
    let file = place.fs.mknod(place.dir, &name("file"), 0o644, 0, 0, CALLER).unwrap().id;
    place.fs.write(file, 0, &[b'a'; 1000], false).unwrap();
    let soon = crate::sys::clock::now();
    let later = crate::types::Timestamp { secs: soon.secs + 2, ..soon };
    place.fs.set_edit_clock(Box::new(move || later));
    // Begins an edit, which pins the first 1,000 bytes.
    place.fs.write(file, 1000, &[b'b'; 500], false).unwrap();
    for (at, beside) in [(2000, 1200), (600, 1000)] {
        let fs = Arc::clone(&place.fs);
        hook::set(When::AfterStore, move || fs.write(file, beside, &[b'c'; 100], false).unwrap());
        place.fs.write(file, at, &[b'd'; 100], false).unwrap();
        assert!(!hook::clear(), "the write at {at} goes to fresh addresses");
    }
    let mut wanted = [&[b'a'; 1000][..], &[b'b'; 500], &[0; 500], &[b'd'; 100]].concat();
    wanted[600..700].fill(b'd');
    wanted[1000..1100].fill(b'c');
    wanted[1200..1300].fill(b'c');
    assert!(read(&place.fs, file) == wanted);
}

#[test]
fn a_write_in_place_and_to_fresh_addresses_is_the_last_where_it_is_recorded_last() {
    let place = Place::new();
    let file = place.fs.mknod(place.dir, &name("file"), 0o644, 0, 0, CALLER).unwrap().id;
    place.fs.write(file, 0, &OLD, false).unwrap();
    seal(&place.fs);
    place.fs.write(file, 0, &[b'b'; 4096], false).unwrap();
    let fs = Arc::clone(&place.fs);
    hook::set(When::AfterStore, move || fs.write(file, 4000, &[b'c'; 200], false).unwrap());
    place.fs.write(file, 4090, &[b'd'; 50], false).unwrap();
    assert!(!hook::clear(), "the second block is fresh");
    let mut wanted = OLD.to_vec();
    wanted[..4096].fill(b'b');
    wanted[4000..4200].fill(b'c');
    wanted[4090..4140].fill(b'd');
    assert!(read(&place.fs, file) == wanted);
}

/// A debug build panics if a thread writes the record of the number under the core lock.
#[test]
fn a_base_node_gets_a_number_of_its_own_without_the_core_lock() {
    let place = Place::new();
    let fs = &place.fs;
    let [a, b] = ["a", "b"]
        .map(|file| std::fs::metadata(place._dir.path().join("base/d").join(file)).unwrap());
    fs.store.identities().lock().name(a.dev(), a.ino(), Ino(b.ino())).unwrap();
    let found = fs.lookup(place.dir, &name("b")).unwrap();
    assert!(found.attr.ino >= Ino::OWN_RANGE);
    assert_eq!(fs.lookup(place.dir, &name("a")).unwrap().attr.ino, Ino(b.ino()));
    assert_eq!(fs.lookup(place.dir, &name("b")).unwrap().attr.ino, found.attr.ino);
    assert_eq!(read(fs, found.id), b"content");
}

/// The tree has a record with the number of `b`. The base has that number under another name.
#[test]
fn a_base_node_whose_number_the_tree_has_gets_another_one_without_the_core_lock() {
    let place = Place::new();
    let (fs, base) = (&place.fs, place._dir.path().join("base/d"));
    let b = place.file("b");
    fs.write(b, 0, b"CONTENT", false).unwrap();
    std::fs::rename(base.join("b"), base.join("new")).unwrap();
    let found = fs.lookup(place.dir, &name("new")).unwrap();
    assert!(found.id != b && found.attr.ino >= Ino::OWN_RANGE);
    assert_eq!((read(fs, found.id), read(fs, b)), (b"content".to_vec(), b"CONTENT".to_vec()));
}

/// As above, in the middle of a listing that an apply has made old, so each name is looked up.
#[test]
fn a_listing_goes_on_when_a_base_node_needs_another_number() {
    let place = Place::new();
    let (fs, base) = (&place.fs, place._dir.path().join("base/d"));
    fs.write(place.file("b"), 0, b"CONTENT", false).unwrap();
    std::fs::rename(base.join("b"), base.join("new")).unwrap();
    let (mut names, mut at) = (Vec::new(), 0);
    while names.len() < 12 {
        let before = names.len();
        fs.readdir(place.dir, at, |entry| {
            at = entry.cookie;
            names.push(entry.name);
            false
        })
        .unwrap();
        if names.len() == before {
            break;
        }
        fs.set_lower(fs.state().lower.in_epoch(Epoch(1)));
    }
    names.retain(|name| !name.starts_with(b"."));
    names.sort_unstable();
    let wanted = ["a", "b", "c", "d", "e", "f", "g", "h", "new"];
    assert_eq!(names, wanted.map(|name| name.as_bytes().to_vec()));
}
