//! The same state has the same description, wherever and however it is stored.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::build::build;
use super::describe;
use crate::base::Base;
use crate::error::{Error, Kind, Result};
use crate::fs::merged::lower::Lower;
use crate::fs::{Caller, Fs, SetAttr, SetTime, SetXattr, State};
use crate::jail::{Jail, Policy};
use crate::store::archive::tree_blob::{Event, Piece, TreeBlob, load};
use crate::store::archive::{Chunk, ChunkRef, ChunkSink, ChunkSource, Digest};
use crate::store::record::{LayerKind, Record};
use crate::store::{Store, StoreOptions};
use crate::tree::Tree;
use crate::types::{Epoch, Name, NodeId, Timestamp, TreePath};

const CALLER: Caller = Caller { uid: 0, gid: 0 };

/// Chunks in memory.
#[derive(Default)]
struct Chunks(BTreeMap<Digest, Vec<u8>>);

impl Chunks {
    fn bytes_beyond(&self, before: &Chunks) -> usize {
        let is_new = |(digest, _): &(&Digest, &Vec<u8>)| !before.0.contains_key(digest);
        self.0.iter().filter(is_new).map(|(_, bytes)| bytes.len()).sum()
    }
}

impl ChunkSink for Chunks {
    fn put(&mut self, chunk: Chunk<'_>) -> Result<()> {
        self.0.insert(chunk.digest(), chunk.bytes().to_vec());
        Ok(())
    }
}

impl ChunkSource for Chunks {
    fn get(&self, chunk: &ChunkRef) -> Result<Vec<u8>> {
        let missing = || Error::new(Kind::NoStore, "read a chunk", "it is missing");
        self.0.get(&chunk.digest).cloned().ok_or_else(missing)
    }
}

/// A base and a store.
struct World {
    dir: tempfile::TempDir,
    base: Arc<Base>,
    store: Arc<Store>,
}

impl World {
    fn new(fill: impl FnOnce(&Path)) -> World {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        std::fs::create_dir(&base).unwrap();
        fill(&base);
        let path = base.as_os_str().as_bytes().to_vec();
        let base = Arc::new(Base::open(&base).unwrap());
        let options = StoreOptions { volatile: true, ..StoreOptions::default() };
        let store = Arc::new(Store::create(&store, &path, base.root_id(), options).unwrap());
        World { dir, base, store }
    }

    /// A head that shows what `fill` makes in a new layer.
    fn head(&self, fill: impl FnOnce(&mut crate::store::layer::Upper) -> Tree) -> Fs {
        let mut upper =
            self.store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap();
        let tree = fill(&mut upper);
        let lower =
            Lower::new(Arc::clone(&self.base), Arc::clone(&self.store), Epoch(0), Vec::new());
        let jail = Jail {
            policy: Policy::Deny,
            mount_point: b"/mnt".to_vec(),
            base_path: self.dir.path().join("base").as_os_str().as_bytes().to_vec(),
            allowed_targets: Vec::new(),
        };
        Fs::new(Arc::clone(&self.store), tree, lower, upper, jail)
    }

    /// A head that shows the state of a blob.
    fn pulled(&self, blob: &TreeBlob, chunks: &Chunks) -> Fs {
        self.head(|upper| {
            let tree = build(&self.store, &mut upper.pool, blob, chunks).unwrap();
            tree.verify().unwrap();
            let edits = Tree::new().edits_to(&tree).collect();
            upper.record(&Record::Edits(edits)).unwrap();
            tree
        })
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn id(fs: &Fs, path: &str) -> NodeId {
    let path = TreePath::parse(path.as_bytes()).unwrap();
    let names = path.names().filter(|name| !name.as_bytes().is_empty());
    names.fold(NodeId::ROOT, |dir, name| fs.lookup(dir, &name).unwrap().id)
}

fn write(fs: &Fs, path: &str, offset: u64, bytes: &[u8]) {
    fs.write(id(fs, path), offset, bytes, false).unwrap();
}

fn make(fs: &Fs, file: &str, bytes: &[u8]) {
    fs.mknod(NodeId::ROOT, &name(file), 0o640, 0, 0, CALLER).unwrap();
    write(fs, file, 0, bytes);
}

fn described(state: &State) -> (TreeBlob, Chunks) {
    let mut chunks = Chunks::default();
    let blob = describe(state, &mut chunks).unwrap();
    (blob, chunks)
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut random = seed | 1;
    let next = |_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 56) as u8
    };
    (0..len).map(next).collect()
}

/// The events of a description.
fn events(blob: &TreeBlob, chunks: &Chunks) -> Vec<Event> {
    let mut events = Vec::new();
    load(blob, chunks, &mut |event| {
        events.push(event);
        Ok(())
    })
    .unwrap();
    events
}

/// A base with all kinds of nodes, and changes of all kinds over it.
fn fill_base(base: &Path) {
    std::fs::create_dir_all(base.join("d/e")).unwrap();
    std::fs::create_dir_all(base.join("gone")).unwrap();
    std::fs::write(base.join("d/text"), "in the base\n".repeat(9000)).unwrap();
    std::fs::hard_link(base.join("d/text"), base.join("d/e/linked")).unwrap();
    std::fs::write(base.join(std::ffi::OsStr::from_bytes(b"\xff\n")), [0; 5]).unwrap();
    std::os::unix::fs::symlink("d/text", base.join("link")).unwrap();
    let sparse = std::fs::OpenOptions::new().create_new(true).write(true).open(base.join("sparse"));
    let sparse = sparse.unwrap();
    sparse.set_len(3 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (3 << 20) - 3).unwrap();
}

fn change(fs: &Fs) {
    write(fs, "d/text", 5000, b"changed");
    make(fs, "new", &noise(200_000, 3));
    make(fs, "zeros", &[0; 20_000]);
    let long_ago = SetTime::To(Timestamp { secs: -1_000_000_000, nanos: 999_999_999 });
    let (uid, gid) = (Some(7), Some(70_000));
    let set = SetAttr { mode: Some(0o4755), uid, gid, mtime: Some(long_ago), ..SetAttr::default() };
    fs.setattr(id(fs, "new"), set, false).unwrap();
    fs.setxattr(id(fs, "new"), b"user.a", b"\0\xff", SetXattr::default()).unwrap();
    fs.setxattr(id(fs, "d"), b"user.empty", b"", SetXattr::default()).unwrap();
    fs.link(id(fs, "new"), id(fs, "d"), &name("again")).unwrap();
    fs.mknod(id(fs, "d"), &name("pipe"), 0o010_600, 0, 0, CALLER).unwrap();
    fs.mknod(id(fs, "d"), &name("null"), 0o020_666, 0x103, 0, CALLER).unwrap();
    fs.symlink(id(fs, "d"), &name("out"), b"/etc/passwd", CALLER).unwrap();
    fs.rmdir(NodeId::ROOT, &name("gone")).unwrap();
    fs.unlink(NodeId::ROOT, &name("link")).unwrap();
}

#[test]
fn a_state_has_the_same_description_in_another_store() {
    let here = World::new(fill_base);
    let fs = here.head(|_| Tree::new());
    change(&fs);
    let (blob, chunks) = described(&fs.state());
    assert_eq!(described(&fs.state()).0.digest(), blob.digest());
    // Another base, and a store in which everything is in the upper layer.
    let there = World::new(|base| std::fs::write(base.join("other"), "base").unwrap());
    let pulled = there.pulled(&blob, &chunks);
    let (again, chunks_again) = described(&pulled.state());
    assert_eq!(events(&again, &chunks_again), events(&blob, &chunks));
    assert_eq!(again.digest(), blob.digest());
    assert!(again.entries() > 10);
    let read = |fs: &Fs, path: &str| {
        let state = fs.state();
        let found = state.resolve(&TreePath::parse(path.as_bytes()).unwrap()).unwrap();
        (state.attr(&found).map(|attr| attr.meta), state.read_all(&found).unwrap())
    };
    for path in ["new", "d/again", "zeros", "sparse"] {
        assert_eq!(read(&pulled, path).1, read(&fs, path).1, "{path}");
    }
    for path in ["new", "d/again", "zeros"] {
        assert_eq!(read(&pulled, path).0, read(&fs, path).0, "{path}");
    }
    assert_eq!(id(&pulled, "new"), id(&pulled, "d/again"), "one file with two names");
    // A change gives another description, and going back the same one.
    let mode = |fs: &Fs, mode| {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        fs.setattr(id(fs, "d/pipe"), set, false).unwrap();
    };
    let before = pulled.state();
    mode(&pulled, 0o601);
    assert_ne!(described(&pulled.state()).0.digest(), blob.digest());
    assert_eq!(described(&before).0.digest(), blob.digest());
}

#[test]
fn holes_are_blocks_of_zeros_however_a_file_was_written() {
    let mut content = vec![0; 50_000];
    content[20_480..30_000].copy_from_slice(&noise(9520, 1));
    let pieces = |fs: &Fs, path: &str| {
        let (blob, chunks) = described(&fs.state());
        let events = events(&blob, &chunks);
        let is_it =
            |event: &Event| event.name().is_some_and(|name| name.as_bytes() == path.as_bytes());
        let from = events.iter().position(is_it).unwrap() + 1;
        let of_file = |event: &&Event| matches!(event, Event::Piece(_));
        events[from..].iter().take_while(of_file).cloned().collect::<Vec<_>>()
    };
    let world = World::new(|base| std::fs::write(base.join("base"), &content).unwrap());
    let fs = world.head(|_| Tree::new());
    make(&fs, "once", &content);
    make(&fs, "sparse", &[]);
    write(&fs, "sparse", 20_480, &content[20_480..30_000]);
    let size = SetAttr { size: Some(50_000), ..SetAttr::default() };
    fs.setattr(id(&fs, "sparse"), size, false).unwrap();
    make(&fs, "pieces", &[1; 50_000]);
    for at in (0..50_000).step_by(777).rev() {
        write(&fs, "pieces", at as u64, &content[at..(at + 777).min(50_000)]);
    }
    let expected = pieces(&fs, "base");
    let lens: Vec<u64> = expected
        .iter()
        .map(|event| match event {
            Event::Piece(piece) => piece.len(),
            _ => 0,
        })
        .collect();
    assert_eq!(lens.iter().sum::<u64>(), 50_000);
    assert_eq!(expected[0], Event::Piece(Piece::Hole(20_480)));
    // The block in which the noise ends has zeros behind it.
    assert_eq!(expected.last(), Some(&Event::Piece(Piece::Hole(50_000 - 32_768))));
    for path in ["once", "sparse", "pieces"] {
        assert_eq!(pieces(&fs, path), expected, "{path}");
    }
}

#[test]
fn a_byte_in_front_of_a_large_file_moves_little() {
    let content = noise(12 << 20, 9);
    let world = World::new(|base| std::fs::write(base.join("large"), &content).unwrap());
    let fs = world.head(|_| Tree::new());
    let (_, before) = described(&fs.state());
    write(&fs, "large", 0, &[&[1], &content[..]].concat());
    let (blob, after) = described(&fs.state());
    let moved = after.bytes_beyond(&before) + blob.encode().len();
    assert!(moved < 256 << 10, "{moved} bytes");
}
