//! Runs requests of the kernel while a change has released the core lock.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use super::{CALLER, Place, name, read, seal};
use crate::error::FsError;
use crate::fs::writing::hook::{self, wait_a_little_for};
use crate::fs::{Fs, LinkReply, RenameMode, SetAttr, SetXattr};
use crate::store::content::remap::{Remap, Run};
use crate::store::edits_log::Bounds;
use crate::sys::failpoint;
use crate::tree::{Extent, Source};
use crate::types::{ByteRange, Ino, LayerId, Name, NodeId, TreePath};

/// A place with more nodes: in the base `d/a` to `d/h`, and in the tree the file `d/new`, the
/// directories `d/sub`, `d/void` and `d/void2`, and the link `d/sub/link`.
struct Nodes {
    place: Place,
    new: NodeId,
    sub: NodeId,
    link: NodeId,
    base: NodeId,
}

impl Nodes {
    fn new() -> Nodes {
        let place = Place::new();
        let (fs, dir) = (&place.fs, place.dir);
        let new = fs.mknod(dir, &name("new"), 0o644, 0, 0, CALLER).unwrap().id;
        fs.write(new, 0, b"content of the new file", false).unwrap();
        let sub = fs.mkdir(dir, &name("sub"), 0o755, 0, CALLER).unwrap().id;
        let link = fs.symlink(sub, &name("link"), b"../../d/a", CALLER).unwrap().id;
        fs.mkdir(dir, &name("void"), 0o755, 0, CALLER).unwrap();
        fs.mkdir(dir, &name("void2"), 0o755, 0, CALLER).unwrap();
        let base = place.file("b");
        Nodes { new, sub, link, base, place }
    }

    fn fs(&self) -> &Arc<Fs> {
        &self.place.fs
    }

    fn dir(&self) -> NodeId {
        self.place.dir
    }

    /// Makes a change. Calls `each` in another thread whenever the core lock is released.
    fn change(&self, change: Change, each: impl FnMut() + Send + 'static) {
        hook::set(each);
        change(self);
        hook::clear();
    }

    /// The view of the two directories and of four nodes.
    fn view(&self) -> String {
        view(self.fs(), [self.dir(), self.sub], [self.new, self.base, self.sub, self.link])
    }
}

/// The answers about these directories and nodes, without times. Each node that is looked up for
/// that is forgotten again.
fn view(fs: &Fs, dirs: [NodeId; 2], nodes: [NodeId; 4]) -> String {
    let mut seen = String::new();
    for dir in dirs {
        let mut names = Vec::new();
        let listed = fs.readdir(dir, 0, |entry| {
            names.push(entry.name);
            true
        });
        names.sort();
        writeln!(seen, "{listed:?} {names:?}").unwrap();
        for text in ["a", "b", "new", "sub", "link", "made", "moved"] {
            let found = fs.lookup(dir, &name(text));
            let shown = found.as_ref().map(|found| (found.attr.kind, found.attr.size));
            writeln!(seen, "{text} {shown:?}").unwrap();
            if let Ok(found) = found {
                fs.forget(found.id, 1);
            }
        }
    }
    for id in nodes {
        let attr = fs.getattr(id).map(|attr| (attr.meta.mode, attr.meta.nlink, attr.size));
        let bytes = fs.read(id, 0, 100).map(|plan| plan.read(false));
        writeln!(seen, "{attr:?} {bytes:?} {:?}", fs.listxattr(id)).unwrap();
    }
    seen
}

type Change = fn(&Nodes);

fn rename(nodes: &Nodes, from: &str, to: &str, mode: RenameMode) {
    let [from, to]: [Name; 2] = [from, to].map(name);
    nodes.fs().rename(nodes.dir(), &from, nodes.dir(), &to, mode, 1).unwrap();
}

/// Moves `d/sub` to the root.
fn move_up(nodes: &Nodes) {
    let sub = name("sub");
    nodes.fs().rename(nodes.dir(), &sub, NodeId::ROOT, &sub, RenameMode::Replace, 1).unwrap();
}

fn set(nodes: &Nodes, id: NodeId, set: SetAttr) {
    nodes.fs().setattr(id, set, false).unwrap();
}

const CHANGES: &[(&str, Change)] = &[
    ("mknod", |n| {
        n.fs().mknod(n.dir(), &name("made"), 0o644, 0, 0, CALLER).unwrap();
    }),
    ("mkdir", |n| {
        n.fs().mkdir(n.dir(), &name("made"), 0o755, 0, CALLER).unwrap();
    }),
    ("symlink", |n| {
        n.fs().symlink(n.dir(), &name("made"), b"a", CALLER).unwrap();
    }),
    ("link", |n| {
        n.fs().link(n.new, n.dir(), &name("made")).unwrap();
    }),
    ("link of a base file", |n| {
        n.fs().link(n.base, n.dir(), &name("made")).unwrap();
    }),
    ("unlink", |n| n.fs().unlink(n.dir(), &name("new")).unwrap()),
    ("unlink of a base file", |n| n.fs().unlink(n.dir(), &name("b")).unwrap()),
    ("rmdir", |n| n.fs().rmdir(n.dir(), &name("void")).unwrap()),
    ("rename of a directory over another one", |n| {
        rename(n, "void", "void2", RenameMode::Replace);
    }),
    ("rename", |n| rename(n, "new", "moved", RenameMode::Replace)),
    ("rename over another file", |n| rename(n, "new", "b", RenameMode::Replace)),
    ("exchange", |n| rename(n, "new", "b", RenameMode::Exchange)),
    ("move of a directory into another one", move_up),
    ("chmod", |n| set(n, n.new, SetAttr { mode: Some(0o600), ..SetAttr::default() })),
    ("chmod of a base file", |n| {
        set(n, n.base, SetAttr { mode: Some(0o600), ..SetAttr::default() });
    }),
    ("truncate", |n| n.fs().truncate(n.new, 3, false).unwrap()),
    ("write at the end", |n| n.fs().write(n.new, 23, b" and more", false).unwrap()),
    ("write to a base file", |n| n.fs().write(n.base, 2, b"X", false).unwrap()),
    ("setxattr", |n| n.fs().setxattr(n.new, b"user.x", b"1", SetXattr::default()).unwrap()),
    ("fallocate", |n| n.fs().fallocate(n.new, 0, 0, 10_000, false).unwrap()),
    ("link of a file without a name", |n| {
        let file = n.fs().tmpfile(n.dir(), 0o644, 0, CALLER).unwrap().id;
        n.fs().link(file, n.dir(), &name("made")).unwrap();
    }),
];

#[test]
fn the_kernel_sees_the_state_before_a_change_until_its_record_is_written() {
    for (what, change) in CHANGES {
        let alone = Nodes::new();
        change(&alone);
        let nodes = Arc::new(Nodes::new());
        let (before, seen) = (nodes.view(), Arc::new(Mutex::new(Vec::new())));
        let (asking, to) = (Arc::clone(&nodes), Arc::clone(&seen));
        nodes.change(*change, move || to.lock().unwrap().push(asking.view()));
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert!(!seen.is_empty(), "{what} writes nothing");
        seen.iter()
            .for_each(|seen| assert_eq!(*seen, before, "while the record of {what} is written"));
        assert_eq!(nodes.view(), alone.view(), "after {what}");
        assert_ne!(nodes.view(), before, "{what} changes something");
    }
}

#[test]
fn requests_during_a_write_in_place_do_not_disturb_it() {
    let nodes = Arc::new(Nodes::new());
    let (asking, seen) = (Arc::clone(&nodes), Arc::new(Mutex::new(Vec::new())));
    let to = Arc::clone(&seen);
    nodes.change(
        |n| n.fs().write(n.new, 0, b"CONTENT", false).unwrap(),
        move || {
            assert_eq!(asking.fs().getattr(asking.new).unwrap().size, 23);
            to.lock().unwrap().push(read(asking.fs(), asking.new));
        },
    );
    let [old, new] = [b"content of the new file", b"CONTENT of the new file"];
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(seen, [old, new, new, new], "around the bytes in place, and around the record");
    assert_eq!(read(nodes.fs(), nodes.new), b"CONTENT of the new file");
}

#[test]
fn a_node_that_the_kernel_forgets_while_it_is_removed_leaves_no_orphan() {
    let removals: [(bool, Change); 3] = [
        (false, |n| n.fs().unlink(n.dir(), &name("new")).unwrap()),
        (true, |n| n.fs().unlink(n.dir(), &name("b")).unwrap()),
        (true, |n| rename(n, "new", "b", RenameMode::Replace)),
    ];
    for (removes_base, change) in removals {
        let nodes = Arc::new(Nodes::new());
        let (asking, id) = (Arc::clone(&nodes), if removes_base { nodes.base } else { nodes.new });
        nodes.change(change, move || asking.fs().forget(id, 1));
        assert!(nodes.fs().getattr(id).is_err());
        assert_eq!(nodes.fs().live_set().orphans.len(), 0, "no orphan stays");
    }
}

/// Makes a change. At one call of the hook another process moves `d` to `e` in the base, and the
/// kernel looks `e` up. Returns the result and the id of `e`; none if the change was over before.
fn change_while_d_moves<T>(
    place: &Place,
    move_at: usize,
    change: impl FnOnce(&Fs) -> T,
) -> Option<(T, NodeId)> {
    let (asking, base) = (Arc::clone(&place.fs), place._dir.path().join("base"));
    let started = Arc::new(Mutex::new(None));
    let (to, mut calls) = (Arc::clone(&started), 0);
    hook::set(move || {
        if calls == move_at {
            std::fs::rename(base.join("d"), base.join("e")).unwrap();
            let asking = Arc::clone(&asking);
            let lookup = std::thread::spawn(move || asking.lookup(NodeId::ROOT, &name("e")));
            wait_a_little_for(&lookup);
            *to.lock().unwrap() = Some(lookup);
        }
        calls += 1;
    });
    let result = change(&place.fs);
    hook::clear();
    let lookup = started.lock().unwrap().take()?;
    Some((result, lookup.join().unwrap().unwrap().id))
}

/// The kernel must not hold the directory at both paths. Otherwise, at the next lookup of the old
/// path, it would move the dentry of the new path there.
#[test]
fn a_directory_that_moves_in_the_base_while_it_is_copied_up_is_another_one_at_its_new_path() {
    let [mut done, mut refused] = [0, 0];
    for move_at in 0..8 {
        let place = Place::new();
        let (fs, file) = (&place.fs, place.file("b"));
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        let changed = change_while_d_moves(&place, move_at, |fs| fs.setattr(file, set, false));
        let Some((result, new)) = changed else { break };
        let old = fs.lookup(NodeId::ROOT, &name("d"));
        if result.is_ok() {
            assert_eq!(old.as_ref().map(|old| old.id), Ok(place.dir), "moved at call {move_at}");
            done += 1;
        } else {
            assert!(old.is_err(), "moved at call {move_at}: {old:?}");
            refused += 1;
        }
        assert_ne!(new, place.dir);
    }
    assert!(done > 0 && refused > 1, "{done} done, {refused} refused");
}

#[test]
fn a_file_below_a_directory_that_was_moved_in_the_base_and_back_can_be_written() {
    let place = Place::new();
    let (fs, base) = (&place.fs, place._dir.path().join("base"));
    let file = place.file("b");
    std::fs::rename(base.join("d"), base.join("e")).unwrap();
    let moved = fs.lookup(NodeId::ROOT, &name("e")).unwrap().id;
    std::fs::rename(base.join("e"), base.join("d")).unwrap();
    fs.write(file, 0, b"CONTENT", false).unwrap();
    let now = fs.lookup(NodeId::ROOT, &name("d")).unwrap().id;
    assert_ne!(now, moved);
    assert_eq!(read(fs, fs.lookup(now, &name("b")).unwrap().id), b"CONTENT");
    assert!(fs.lookup(NodeId::ROOT, &name("e")).is_err());
}

/// The kernel does not walk to an open file again, so ESTALE would not help the program.
#[test]
fn a_write_below_a_directory_that_moves_in_the_base_meanwhile_succeeds_or_reports_the_change() {
    let mut changed = 0;
    for move_at in 0..10 {
        let place = Place::new();
        let file = place.file("b");
        let write = |fs: &Fs| fs.write(file, 0, b"CONTENT", false);
        let Some((written, _)) = change_while_d_moves(&place, move_at, write) else { break };
        match written {
            Ok(_) => assert_eq!(read(&place.fs, file), b"CONTENT", "moved at call {move_at}"),
            Err(FsError::Drift(_)) => changed += 1,
            Err(error) => panic!("moved at call {move_at}: {error}"),
        }
    }
    assert!(changed > 0);
}

/// `d` is copied up for a rename of `d/x`. Meanwhile another process moves `d/x` away in the base.
/// The kernel looks it up there and forgets it again, and the other process moves it back. So the
/// kernel's dentry is that of an orphan, which must not move. Returns whether the rename took
/// place, or none if it was over before the move.
fn rename_while_it_is_cut_off(move_at: usize, mode: RenameMode) -> Option<bool> {
    let place = Place::new();
    let (fs, base) = (Arc::clone(&place.fs), place._dir.path().join("base"));
    std::fs::create_dir(base.join("d/x")).unwrap();
    std::fs::create_dir(base.join("up")).unwrap();
    let (old, dir) = (place.file("x"), place.dir);
    fs.lookup(NodeId::ROOT, &name("up")).unwrap();
    let (asking, mut calls) = (Arc::clone(&fs), 0);
    let moved = Arc::new(Mutex::new(false));
    let to = Arc::clone(&moved);
    hook::set(move || {
        if calls == move_at {
            *to.lock().unwrap() = true;
            std::fs::rename(base.join("d/x"), base.join("e")).unwrap();
            let asked = Arc::clone(&asking);
            let lookup = std::thread::spawn(move || {
                let found = asked.lookup(NodeId::ROOT, &name("e"));
                found.into_iter().for_each(|found| asked.forget(found.id, 1));
            });
            wait_a_little_for(&lookup);
            std::fs::rename(base.join("e"), base.join("d/x")).unwrap();
        }
        calls += 1;
    });
    let renamed = fs.rename(dir, &name("x"), NodeId::ROOT, &name("up"), mode, 1);
    hook::clear();
    if !*moved.lock().unwrap() {
        return None;
    }
    if let Err(error) = &renamed {
        assert_eq!(*error, FsError::Stale, "moved at call {move_at}");
    } else {
        let now = fs.lookup(NodeId::ROOT, &name("up")).map(|found| found.id);
        assert_eq!(now, Ok(old), "moved at call {move_at}");
    }
    Some(renamed.is_ok())
}

#[test]
fn a_directory_that_was_cut_off_during_its_rename_does_not_move() {
    for mode in [RenameMode::Replace, RenameMode::Exchange] {
        let renames: Vec<bool> =
            (0..20).filter_map(|at| rename_while_it_is_cut_off(at, mode)).collect();
        assert!(renames.contains(&true) && renames.contains(&false), "{mode:?}: {renames:?}");
    }
}

/// `d/sub/link` leads up two levels, which stays inside until `d/sub` is moved to the root.
#[test]
fn no_link_is_followed_while_its_directory_moves_up() {
    let alone = Nodes::new();
    let text = alone.fs().readlink(alone.link, 1);
    assert!(matches!(text, Ok(LinkReply::Text(_))), "it stays inside from where it is");
    let nodes = Arc::new(Nodes::new());
    let readers = Arc::new(Mutex::new(Vec::new()));
    let (asking, to) = (Arc::clone(&nodes), Arc::clone(&readers));
    nodes.change(move_up, move || {
        let asking = Arc::clone(&asking);
        let reader = std::thread::spawn(move || asking.fs().readlink(asking.link, 1));
        wait_a_little_for(&reader);
        to.lock().unwrap().push(reader);
    });
    let readers = std::mem::take(&mut *readers.lock().unwrap());
    assert!(!readers.is_empty());
    for reader in readers {
        let text = reader.join().unwrap();
        let is_followed = matches!(text, Ok(LinkReply::Text(_)));
        assert!(!is_followed, "its text leads out of the directory's new place");
    }
    assert!(!matches!(nodes.fs().readlink(nodes.link, 1), Ok(LinkReply::Text(_))));
}

/// The bytes of a file of the store; none if there is no such file.
fn stored(nodes: &Nodes, file: &str) -> Vec<u8> {
    std::fs::read(nodes.place._dir.path().join("store").join(file)).unwrap_or_default()
}

/// A failed write of a record leaves a log that must be rewritten.
fn fail_log(nodes: &Nodes) {
    let bounds = Bounds { edits: 7, ..Bounds::default() };
    failpoint::with("fail:store.write:1:EIO", || nodes.fs().set_edit_bounds(bounds));
}

/// Appends records until it pays to rewrite the log.
fn fill_log(nodes: &Nodes) {
    for edits in (1..=2).cycle().take(8000) {
        nodes.fs().set_edit_bounds(Bounds { edits, ..Bounds::default() });
    }
}

const LOG: &str = "history/main";
const JOURNAL: &str = "layers/00000001/journal";

/// A write to the log of the edit history, or to the journal: the file that changes, a change
/// before it, and the write.
const STORED: &[(&str, &str, Change, Change)] = &[
    ("a rewrite of a log that could not be written", LOG, fail_log, |n| {
        n.fs().maintain_edits(true, &|| false);
    }),
    (
        "a rewind",
        LOG,
        |_| (),
        |n| {
            n.fs().rewind_edits(&n.fs().edits_savepoint());
        },
    ),
    ("a rewrite before content is freed", LOG, fail_log, |n| n.fs().secure_edits().unwrap()),
    ("the removal of a log that cannot be written", LOG, fail_log, |n| {
        failpoint::with("fail:store.rename:1:EIO", || n.fs().secure_edits().unwrap());
    }),
    ("the exchange of the log for a new one", LOG, fill_log, |n| {
        n.fs().maintain_edits(true, &|| false);
    }),
    ("the mark of a failed sync in the journal", JOURNAL, |_| (), fail_sync),
    ("the mark of a failed sync in the log", LOG, |_| (), fail_sync),
];

fn fail_sync(nodes: &Nodes) {
    failpoint::with("fail:store.check:1:EIO", || nodes.fs().sync().unwrap_err());
}

/// The hook is called before and after each release of the core lock. So a file that differs
/// between the two was written while the lock was free.
#[test]
fn the_kernel_gets_answers_while_the_log_of_edits_or_the_mark_of_a_failed_sync_is_written() {
    for (what, file, prepare, write) in STORED {
        let nodes = Nodes::new();
        nodes.fs().open_edits("main");
        nodes.fs().truncate(nodes.new, 0, false).unwrap();
        nodes.fs().write(nodes.new, 0, b"content of the new file", false).unwrap();
        prepare(&nodes);
        let nodes = Arc::new(nodes);
        let (before, seen) = (nodes.view(), Arc::new(Mutex::new(Vec::new())));
        let edits = |nodes: &Nodes| nodes.fs().names_with_edits(&TreePath::parse(b"d").unwrap());
        let (asking, to) = (Arc::clone(&nodes), Arc::clone(&seen));
        nodes.change(*write, move || {
            to.lock().unwrap().push((asking.view(), edits(&asking), stored(&asking, file)));
        });
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        let is_written = |around: &[(_, _, Vec<u8>)]| around[0].2 != around[1].2;
        assert!(seen.chunks_exact(2).any(is_written), "{what}: {} looks", seen.len());
        for (view, names, _) in seen {
            assert_eq!(view, before, "during {what}");
            assert_eq!(names, edits(&nodes), "during {what}");
        }
        assert_eq!(edits(&nodes).len(), 1, "after {what}");
    }
}

/// Writes three blocks of the file `d/new`, each in a layer of its own, and seals the layers.
/// Returns where the blocks are. The cache of the store holds the content of two layers in tests.
fn write_into_three_layers(nodes: &Nodes) -> Vec<(LayerId, ByteRange)> {
    for (offset, byte) in [(0, b'a'), (4096, b'b'), (8192, b'c')] {
        nodes.fs().write(nodes.new, offset, &[byte; 4096], false).unwrap();
        seal(nodes.fs());
    }
    let place = |(_, extent): (u64, Extent)| match extent.source {
        Source::Pool { layer, offset } => (layer, ByteRange::at(offset, extent.len)),
        Source::Base { .. } => panic!("the file is new"),
    };
    nodes.fs().state().tree.extents(Ino(nodes.new.0)).map(place).collect()
}

/// Reads the file when no layer is open. Calls `each` in another thread whenever the core lock is
/// released.
fn read_closed(
    nodes: &Nodes,
    places: &[(LayerId, ByteRange)],
    each: impl FnMut() + Send + 'static,
) -> Vec<u8> {
    places.iter().for_each(|(layer, _)| nodes.fs().store().close_pool(*layer));
    hook::set(each);
    let content = read(nodes.fs(), nodes.new);
    hook::clear();
    content
}

fn blocks(of: [u8; 3]) -> Vec<u8> {
    of.map(|byte| [byte; 4096]).concat()
}

#[test]
fn the_kernel_gets_answers_while_a_read_opens_sealed_layers() {
    let nodes = Arc::new(Nodes::new());
    let places = write_into_three_layers(&nodes);
    let (before, seen) = (nodes.view(), Arc::new(Mutex::new(Vec::new())));
    let (asking, to) = (Arc::clone(&nodes), Arc::clone(&seen));
    let content = read_closed(&nodes, &places, move || to.lock().unwrap().push(asking.view()));
    assert_eq!((places.len(), content), (3, blocks(*b"abc")));
    assert_eq!(*seen.lock().unwrap(), [before], "all three layers are opened at once");
}

/// The content of the first layer is only in an answer, because the cache is too small. Other bytes
/// show which place the read found.
#[test]
fn a_read_does_not_use_content_of_a_layer_that_moved_after_it_was_loaded() {
    let nodes = Arc::new(Nodes::new());
    let places = write_into_three_layers(&nodes);
    let [(moved, from), (layer, to)] = [places[0], places[1]];
    let (asking, calls) = (Arc::clone(&nodes), Arc::new(Mutex::new(0)));
    let count = Arc::clone(&calls);
    let content = read_closed(&nodes, &places, move || {
        let mut calls = count.lock().unwrap();
        *calls += 1;
        if *calls == 1 {
            let mut remap = Remap::default();
            remap.push(Run { start: from.start, end: from.end, layer, offset: to.start });
            asking.fs().store().publish_remap(moved, &remap).unwrap();
        }
    });
    assert_eq!((content, *calls.lock().unwrap()), (blocks(*b"bbc"), 2));
}
