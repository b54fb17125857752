//! A sandbox beside its model, and the nodes that a kernel would hold.

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use jailfs::error::{FsError, FsResult};
use jailfs::internals::fs::{Attr, Entry, Fs, Invalidations, Kernel};
use jailfs::sandbox::{Operation, Reply, Request};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{FileKind, Ino, LayerId, Name, NodeId};
use parking_lot::Mutex;

use crate::host;
use crate::rng::Rng;
use crate::tree::{Body, Bytes, Id, Node, ROOT, Times, Tree, bytes_differ, join, show};

/// The node behind a number that the kernel holds.
#[derive(Clone)]
pub enum Behind {
    Live(Id),
    /// A file without a name, as its holders see it.
    Orphan(Box<Node>),
    /// A directory that is gone.
    DeadDir,
}

pub struct Held {
    /// Its index among all nodes that were handed out. The host's numbers differ in the next run,
    /// and choices must not.
    pub order: u64,
    pub count: u64,
    pub ino: Id,
    pub behind: Behind,
}

/// A reader that reads a directory in pieces.
pub struct Reader {
    pub dir: NodeId,
    pub cookie: u64,
    pub seen: Vec<Bytes>,
    /// Names that existed all the time.
    pub always: BTreeSet<Bytes>,
    /// Names that existed at some time, or were created again under the same name.
    pub ever: BTreeSet<Bytes>,
    pub again: BTreeSet<Bytes>,
}

/// A kernel that records its invalidations.
#[derive(Default)]
pub struct Invalidated(Mutex<Invalidations>);

impl Kernel for Invalidated {
    fn flush(&self) -> jailfs::error::Result<()> {
        Ok(())
    }

    fn invalidate(&self, what: &Invalidations) -> jailfs::error::Result<()> {
        let mut all = self.0.lock();
        all.names.extend(what.names.iter().cloned());
        all.attrs.extend(what.attrs.iter().copied());
        all.listings.extend(what.listings.iter().copied());
        Ok(())
    }
}

impl Invalidated {
    pub fn take(&self) -> Invalidations {
        std::mem::take(&mut *self.0.lock())
    }
}

pub struct World {
    pub rng: Rng,
    pub log: Vec<String>,
    pub dir: PathBuf,
    pub base: PathBuf,
    pub store: PathBuf,
    pub stores: u32,
    pub root: bool,
    sandbox: Option<Arc<Sandbox>>,
    pub invalidated: Arc<Invalidated>,
    /// The tree that the mount shows.
    pub tree: Tree,
    /// The directory on the host, with the host's inode numbers.
    pub host: Tree,
    /// The base in each epoch, with the inode numbers of the mount.
    pub epochs: Vec<Tree>,
    /// The number of epochs when an apply was undone last.
    pub undone_at: Option<usize>,
    pub held: BTreeMap<NodeId, Held>,
    handed_out: u64,
    /// Names that the kernel looked up, and the nodes it got.
    pub dentries: BTreeMap<(NodeId, Bytes), NodeId>,
    pub readers: Vec<Reader>,
    pub checkpoints: BTreeMap<LayerId, Tree>,
    pub operations: BTreeMap<u64, Tree>,
    /// Operations whose states gc freed.
    pub collected: BTreeSet<u64>,
    /// All numbers that were ever handed out.
    pub numbers: BTreeSet<Id>,
}

impl World {
    pub fn new(seed: u64, dir: &Path) -> World {
        let mut rng = Rng::new(seed);
        let root = nix::unistd::geteuid().is_root();
        let (base, store) = (dir.join("base"), dir.join("store"));
        std::fs::create_dir(&base).unwrap();
        host::make(&base, &mut rng, root);
        let host = host::read(&base);
        let mut world = World {
            rng,
            log: Vec::new(),
            dir: dir.to_owned(),
            base,
            store,
            stores: 0,
            root,
            sandbox: None,
            invalidated: Arc::default(),
            tree: host.clone(),
            epochs: vec![host.clone()],
            undone_at: None,
            numbers: host.nodes.keys().copied().collect(),
            host,
            held: BTreeMap::new(),
            handed_out: 0,
            dentries: BTreeMap::new(),
            readers: Vec::new(),
            checkpoints: BTreeMap::new(),
            collected: BTreeSet::new(),
            operations: BTreeMap::new(),
        };
        world.open();
        world.note_operations(&world.tree.clone());
        world
    }

    pub fn sandbox(&self) -> &Arc<Sandbox> {
        self.sandbox.as_ref().unwrap()
    }

    pub fn fs(&self) -> Arc<Fs> {
        Arc::clone(self.sandbox().fs())
    }

    pub fn say(&mut self, what: String) {
        self.log.push(what);
    }

    /// Opens the store, as a mount does: the kernel holds only the root.
    pub fn open(&mut self) {
        let volatile = !self.rng.one_in(8);
        let sandbox = Sandbox::create_or_open(
            &self.base,
            &self.store,
            &StoreOptions { volatile, ..StoreOptions::default() },
        );
        let sandbox = sandbox.unwrap_or_else(|e| panic!("open {}: {e}", self.store.display()));
        sandbox.attach(Arc::clone(&self.invalidated) as Arc<dyn Kernel>);
        self.sandbox = Some(sandbox);
        let root = Held { order: 0, count: 1, ino: ROOT, behind: Behind::Live(ROOT) };
        self.held = BTreeMap::from([(NodeId::ROOT, root)]);
        self.dentries.clear();
        self.readers.clear();
    }

    pub fn close(&mut self) {
        let sandbox = self.sandbox.take().unwrap();
        assert_eq!(Arc::strong_count(&sandbox), 1, "another thread holds it");
    }

    pub fn ask(&self, request: Request) -> Reply {
        let text = format!("{request:?}");
        self.sandbox().handle(request).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    /// Records the state that each new operation of the log led to; `before` is the state before
    /// the last request.
    pub fn note_operations(&mut self, before: &Tree) -> Vec<String> {
        let now = self.tree.clone();
        self.note_operations_as(|op| if op.verb == "seal" { before } else { &now })
    }

    /// The same, for a caller that knows that state.
    pub fn note_operations_as<'t>(
        &mut self,
        state: impl Fn(&Operation) -> &'t Tree,
    ) -> Vec<String> {
        let Reply::OpLog(all) = self.ask(Request::OpLog) else { panic!("not a log") };
        let mut verbs = Vec::new();
        for op in all.into_iter().rev() {
            if let MapEntry::Vacant(operation) = self.operations.entry(op.op) {
                operation.insert(state(&op).clone());
                verbs.push(op.verb);
            }
        }
        verbs
    }

    /// All held nodes, in the order in which they were handed out.
    pub fn handed_out(&self) -> Vec<NodeId> {
        let mut ids: Vec<NodeId> = self.held.keys().copied().collect();
        ids.sort_by_key(|id| self.held[id].order);
        ids
    }

    /// The live node behind a held number, if there is one.
    pub fn live(&self, id: NodeId) -> Option<Id> {
        match self.held.get(&id)?.behind {
            Behind::Live(ino) => Some(ino),
            Behind::Orphan(_) | Behind::DeadDir => None,
        }
    }

    /// The directory behind a number, or the error that every operation on it must give.
    pub fn as_dir(&self, id: NodeId) -> Result<Id, FsError> {
        match self.held[&id].behind {
            Behind::Live(ino) if self.tree.node(ino).is_dir() => Ok(ino),
            Behind::Live(_) => Err(FsError::NotADirectory),
            Behind::Orphan(_) | Behind::DeadDir => Err(FsError::NotFound),
        }
    }

    pub fn node(&self, id: NodeId) -> Option<&Node> {
        match &self.held.get(&id)?.behind {
            Behind::Live(ino) => Some(self.tree.node(*ino)),
            Behind::Orphan(node) => Some(node),
            Behind::DeadDir => None,
        }
    }

    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        match &mut self.held.get_mut(&id).unwrap().behind {
            Behind::Live(ino) => self.tree.node_mut(*ino),
            Behind::Orphan(node) => node,
            Behind::DeadDir => panic!("a directory that is gone"),
        }
    }

    /// The number under which a live node is held.
    pub fn held_as(&self, ino: Id) -> Option<NodeId> {
        self.held
            .iter()
            .find(|(_, h)| matches!(h.behind, Behind::Live(i) if i == ino))
            .map(|(id, _)| *id)
    }

    /// Records a node that the filesystem handed out for `ino`.
    pub fn take(&mut self, entry: &Entry, ino: Id, place: (NodeId, &[u8])) {
        assert_eq!(entry.attr.ino.0, ino, "the number of {}", show(place.1));
        match self.held.get_mut(&entry.id) {
            Some(held) => {
                assert!(
                    matches!(held.behind, Behind::Live(i) if i == ino),
                    "number {:?} stands for two nodes",
                    entry.id
                );
                held.count += 1;
            }
            None => {
                assert_eq!(self.held_as(ino), None, "a node has two numbers");
                let behind = Behind::Live(ino);
                self.handed_out += 1;
                self.held.insert(entry.id, Held { order: self.handed_out, count: 1, ino, behind });
            }
        }
        self.dentries.insert((place.0, place.1.to_vec()), entry.id);
        self.check_attr(&entry.attr, ino);
    }

    pub fn check_attr(&self, attr: &Attr, ino: Id) {
        let node = self.tree.node(ino);
        let what = || self.tree.paths().into_iter().find(|p| p.1 == ino).map(|p| show(&p.0));
        assert_eq!(attr.ino.0, ino, "number of {:?}", what());
        assert_eq!(attr.kind, node.kind(), "kind of {:?}", what());
        assert_eq!(attr.meta.mode, node.mode, "mode of {:?}", what());
        assert_eq!((attr.meta.uid, attr.meta.gid), (node.uid, node.gid), "owner of {:?}", what());
        assert_eq!(attr.meta.nlink, self.tree.nlink(ino), "links of {:?} ({ino})", what());
        if let Some(bytes) = node.bytes() {
            assert_eq!(attr.size, bytes.len() as u64, "size of {:?}", what());
        }
    }

    /// Copies the times that an operation set to now. With `mtime` also that of the content.
    pub fn touched(&mut self, id: NodeId, mtime: bool) {
        let Some(Held { behind, .. }) = self.held.get(&id) else { return };
        match behind {
            Behind::Live(ino) => self.touched_node(*ino, mtime),
            Behind::Orphan(_) => {
                let meta = self.fs().getattr(id).unwrap().meta;
                let node = self.node_mut(id);
                node.ctime = meta.ctime;
                if mtime {
                    node.mtime = meta.mtime;
                }
            }
            Behind::DeadDir => {}
        }
    }

    pub fn touched_node(&mut self, ino: Id, mtime: bool) {
        let state = self.fs().state();
        let node = state
            .tree
            .node(Ino(ino))
            .unwrap_or_else(|| panic!("{ino} was changed and not copied up"));
        let wanted = self.tree.node_mut(ino);
        let now = jailfs::internals::sys::clock::now();
        let recent = |t: jailfs::types::Timestamp| t <= now && t.secs + 2 > now.secs;
        assert!(recent(node.meta.ctime), "ctime {:?} is not now", node.meta.ctime);
        wanted.ctime = node.meta.ctime;
        if mtime {
            assert!(recent(node.meta.mtime), "mtime {:?} is not now", node.meta.mtime);
            wanted.mtime = node.meta.mtime;
        }
    }

    /// Compares an answer with the expected error.
    pub fn expect<T: Debug>(&self, got: FsResult<T>, wanted: Result<(), FsError>) -> Option<T> {
        match (got, wanted) {
            (Ok(got), Ok(())) => Some(got),
            (Err(got), Err(wanted)) if got == wanted => None,
            (got, wanted) => panic!("got {got:?}, expected {wanted:?}"),
        }
    }

    /// Updates the holders' view of a node that lost its last name.
    pub fn orphaned(&mut self, ino: Id, node: Node) {
        if let Some(id) = self.held_as(ino) {
            let dir = node.is_dir();
            let behind = if dir { Behind::DeadDir } else { Behind::Orphan(Box::new(node)) };
            self.held.get_mut(&id).unwrap().behind = behind;
            if !dir {
                self.touched(id, false);
            }
        }
    }

    /// Drops what the kernel holds of a node, unless a name below it or a reader needs it.
    pub fn forget(&mut self, id: NodeId, all: bool) {
        let busy = self.readers.iter().any(|r| r.dir == id)
            || self.dentries.keys().any(|(dir, _)| *dir == id);
        let held = self.held.get_mut(&id).unwrap();
        let count = if all { held.count } else { 1 };
        if id == NodeId::ROOT || (busy && count == held.count) {
            return;
        }
        held.count -= count;
        if held.count == 0 {
            self.held.remove(&id);
            self.dentries.retain(|_, child| *child != id);
        }
        self.fs().forget(id, count);
    }

    /// Tells the readers of directories which names exist now.
    pub fn update_readers(&mut self) {
        for at in (0..self.readers.len()).rev() {
            let Some(dir) = self.live(self.readers[at].dir) else {
                self.readers.remove(at);
                continue;
            };
            let names: BTreeSet<Bytes> = self.tree.node(dir).names().keys().cloned().collect();
            let reader = &mut self.readers[at];
            let gone: Vec<Bytes> = reader.ever.difference(&names).cloned().collect();
            reader.again.extend(gone);
            reader.always.retain(|name| names.contains(name));
            reader.ever.extend(names);
        }
    }

    /// Compares everything that can be seen with the model.
    pub fn check(&mut self, times: Times) {
        self.fs()
            .state()
            .tree
            .verify()
            .unwrap_or_else(|e| panic!("the tree contradicts itself: {e}"));
        let seen = self.read_merged();
        if let Some(how) = self.tree.differs(&seen, true, times) {
            panic!("the merged tree is not as it should be: {how}");
        }
        if times == Times::NoChange {
            for (id, node) in &mut self.tree.nodes {
                (node.atime, node.ctime) = (seen.node(*id).atime, seen.node(*id).ctime);
            }
        }
        self.check_held();
    }

    pub fn check_host(&self) {
        let now = host::read(&self.base);
        if let Some(how) = self.host.differs(&now, true, Times::All) {
            panic!("the base was changed: {how}");
        }
    }

    fn check_held(&self) {
        let fs = self.fs();
        for (id, held) in &self.held {
            let attr = fs.getattr(*id).unwrap_or_else(|e| panic!("getattr of held {id:?}: {e}"));
            match &held.behind {
                Behind::Live(ino) => self.check_attr(&attr, *ino),
                Behind::Orphan(node) => {
                    assert_eq!(
                        (attr.ino.0, attr.meta.nlink),
                        (held.ino, 0),
                        "an orphan is in no directory"
                    );
                    assert_eq!(
                        (attr.meta.mode, attr.meta.mtime),
                        (node.mode, node.mtime),
                        "of an orphan"
                    );
                    match &node.body {
                        Body::File(bytes) => {
                            let got =
                                fs.read(*id, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
                            if let Some(how) = bytes_differ(bytes, &got) {
                                panic!("orphan {id:?}: {how}");
                            }
                        }
                        Body::Link(text) => assert_eq!(&fs.link_text(*id).unwrap(), text),
                        Body::Dir(_) | Body::Special => {}
                    }
                }
                Behind::DeadDir => {
                    assert_eq!(attr.ino.0, held.ino);
                    let any = Name::new(b"a").unwrap();
                    assert_eq!(fs.lookup(*id, &any).unwrap_err(), FsError::NotFound);
                    assert_eq!(fs.readdir(*id, 0, |_| true).unwrap_err(), FsError::NotFound);
                }
            }
        }
        assert_eq!(fs.held_nodes(), self.held.len(), "the held nodes are counted");
    }

    /// Reads the whole mount, like `find` and `cat`, and then drops all nodes.
    pub fn read_merged(&self) -> Tree {
        let mut tree = Tree::default();
        let fs = self.fs();
        let attr = fs.getattr(NodeId::ROOT).unwrap();
        self.read_node(&fs, NodeId::ROOT, &attr, &[], &mut tree);
        for (id, nlink) in tree.nodes.keys().map(|id| (*id, tree.nlink(*id))).collect::<Vec<_>>() {
            let state = fs.state();
            if let Some(node) = state.tree.node(Ino(id)) {
                assert_eq!(node.meta.nlink, nlink, "links of {id}");
            }
        }
        tree
    }

    fn read_node(&self, fs: &Fs, id: NodeId, attr: &Attr, path: &[u8], tree: &mut Tree) {
        let body = match attr.kind {
            FileKind::File => {
                let plan =
                    fs.read(id, 0, u64::MAX).unwrap_or_else(|e| panic!("read {}: {e}", show(path)));
                let bytes = plan.read(false).unwrap_or_else(|e| panic!("read {}: {e}", show(path)));
                Body::File(Rc::new(bytes.unwrap()))
            }
            FileKind::Symlink => Body::Link(fs.link_text(id).unwrap()),
            FileKind::Dir => {
                let listed = list(fs, id);
                let sorted: Vec<Bytes> =
                    fs.names(id).unwrap().iter().map(|n| n.as_bytes().to_vec()).collect();
                assert_eq!(
                    listed.keys().cloned().collect::<Vec<_>>(),
                    sorted,
                    "names of {}",
                    show(path)
                );
                Body::Dir(listed.iter().map(|(name, (ino, _))| (name.clone(), ino.0)).collect())
            }
            _ => Body::Special,
        };
        let mut xattrs = BTreeMap::new();
        for name in fs.listxattr(id).unwrap().split(|b| *b == 0).filter(|n| !n.is_empty()) {
            xattrs.insert(name.to_vec(), fs.getxattr(id, name).unwrap());
        }
        let meta = attr.meta;
        let node = Node {
            mode: meta.mode,
            uid: meta.uid,
            gid: meta.gid,
            atime: meta.atime,
            mtime: meta.mtime,
            ctime: meta.ctime,
            xattrs,
            body,
        };
        tree.nodes.insert(attr.ino.0, node.clone());
        if let Body::Dir(names) = &node.body {
            for (name, ino) in names {
                let path = join(path, name);
                let entry = fs.lookup(id, &Name::new(name).unwrap());
                let entry = entry.unwrap_or_else(|e| panic!("lookup of {}: {e}", show(&path)));
                assert_eq!(entry.attr.ino.0, *ino, "readdir and lookup of {}", show(&path));
                if !tree.nodes.contains_key(ino) {
                    self.read_node(fs, entry.id, &entry.attr, &path, tree);
                }
                fs.forget(entry.id, 1);
            }
        }
    }
}

/// The names of a directory, read at once.
fn list(fs: &Fs, id: NodeId) -> BTreeMap<Bytes, (Ino, FileKind)> {
    let mut names = BTreeMap::new();
    fs.readdir(id, 0, |entry| {
        if entry.name != b"." && entry.name != b".." {
            assert!(
                names.insert(entry.name.clone(), (entry.ino, entry.kind)).is_none(),
                "listed twice"
            );
        }
        true
    })
    .unwrap();
    names
}
