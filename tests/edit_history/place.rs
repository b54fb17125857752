//! A base, a store, and a sandbox over both whose edit clock the test moves.

use std::fs as host;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use jailfs::internals::fs::{Caller, RenameMode};
use jailfs::sandbox::{Detail, EditKind, FileEdit, FileRev, Reply, Request, Rev, Stepped};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId, Timestamp, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };

pub struct Place {
    _dir: tempfile::TempDir,
    pub base: PathBuf,
    pub store: PathBuf,
    seconds: Arc<AtomicI64>,
}

/// An open sandbox.
pub struct Work {
    pub sandbox: Arc<Sandbox>,
    seconds: Arc<AtomicI64>,
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

pub fn path(text: &str) -> TreePath {
    TreePath::parse(text.as_bytes()).unwrap()
}

pub fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

impl Place {
    pub fn new(files: &[(&str, &str)]) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        host::create_dir(&base).unwrap();
        for (path, text) in files {
            let path = base.join(path);
            host::create_dir_all(path.parent().unwrap()).unwrap();
            host::write(path, text).unwrap();
        }
        Place { _dir: dir, base, store, seconds: Arc::new(AtomicI64::new(1_000_000)) }
    }

    pub fn open(&self) -> Work {
        self.open_with(StoreOptions::default())
    }

    pub fn open_with(&self, options: StoreOptions) -> Work {
        self.around(Sandbox::create_or_open(&self.base, &self.store, &options).unwrap())
    }

    /// Wraps a sandbox and its edit clock.
    pub fn around(&self, sandbox: Arc<Sandbox>) -> Work {
        let seconds = Arc::clone(&self.seconds);
        let clock = move || Timestamp { secs: seconds.load(Ordering::SeqCst), nanos: 0 };
        sandbox.fs().set_edit_clock(Box::new(clock));
        Work { sandbox, seconds: Arc::clone(&self.seconds) }
    }

    /// Bytes of the pools on disk.
    pub fn pools(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let layers = host::read_dir(self.store.join("layers")).unwrap();
        let pools = layers.map(|layer| layer.unwrap().path().join("pool"));
        pools.map(|pool| host::metadata(pool).map_or(0, |about| about.blocks() * 512)).sum()
    }
}

impl Work {
    /// Moves the clock so far that every edit has ended.
    pub fn rest(&self) {
        self.seconds.fetch_add(2, Ordering::SeqCst);
    }

    pub fn id(&self, path: &str) -> NodeId {
        let parts = path.split('/').filter(|part| !part.is_empty());
        parts.fold(NodeId::ROOT, |dir, part| {
            let found = self.sandbox.fs().lookup(dir, &name(part));
            found.unwrap_or_else(|error| panic!("{path}: {error}")).id
        })
    }

    pub fn exists(&self, path: &str) -> bool {
        let (dir, last) = split(path);
        self.sandbox.fs().lookup(self.id(dir), &name(last)).is_ok()
    }

    pub fn make(&self, path: &str) -> NodeId {
        let (dir, last) = split(path);
        self.sandbox.fs().mknod(self.id(dir), &name(last), 0o100_644, 0, 0, ME).unwrap().id
    }

    pub fn mkdir(&self, path: &str) {
        let (dir, last) = split(path);
        self.sandbox.fs().mkdir(self.id(dir), &name(last), 0o755, 0, ME).unwrap();
    }

    /// Like a shell redirect: creates or truncates the file, and writes.
    pub fn put(&self, path: &str, text: &str) {
        let file = if self.exists(path) { self.id(path) } else { self.make(path) };
        self.sandbox.fs().truncate(file, 0, false).unwrap();
        self.sandbox.fs().write(file, 0, text.as_bytes(), false).unwrap();
    }

    pub fn write(&self, path: &str, offset: u64, bytes: &[u8]) {
        self.sandbox.fs().write(self.id(path), offset, bytes, false).unwrap();
    }

    pub fn truncate(&self, path: &str, size: u64) {
        self.sandbox.fs().truncate(self.id(path), size, false).unwrap();
    }

    pub fn bytes(&self, path: &str) -> Vec<u8> {
        self.sandbox.fs().read(self.id(path), 0, u64::MAX).unwrap().read(false).unwrap().unwrap()
    }

    pub fn get(&self, path: &str) -> String {
        String::from_utf8(self.bytes(path)).unwrap()
    }

    pub fn rm(&self, path: &str) {
        let (dir, last) = split(path);
        self.sandbox.fs().unlink(self.id(dir), &name(last)).unwrap();
    }

    pub fn rmdir(&self, path: &str) {
        let (dir, last) = split(path);
        self.sandbox.fs().rmdir(self.id(dir), &name(last)).unwrap();
    }

    pub fn mv(&self, from: &str, to: &str) {
        self.mv_as(from, to, RenameMode::Replace);
    }

    pub fn mv_as(&self, from: &str, to: &str, mode: RenameMode) {
        let ((a, from), (b, to)) = (split(from), split(to));
        let (a, b) = (self.id(a), self.id(b));
        self.sandbox.fs().rename(a, &name(from), b, &name(to), mode, 0).unwrap();
    }

    pub fn history(&self, of: &str) -> Vec<FileEdit> {
        match self.sandbox.handle(Request::History { path: path(of) }).unwrap() {
            Reply::History(edits) => edits,
            other => panic!("{other:?}"),
        }
    }

    /// The former contents of a path, oldest first.
    pub fn texts(&self, of: &str) -> Vec<String> {
        let mut edits = self.history(of);
        edits.reverse();
        edits.iter().map(|edit| self.edit(of, edit.number)).collect()
    }

    pub fn edit(&self, of: &str, number: u32) -> String {
        let Some((state, found)) = self.sandbox.fs().before_edit(&path(of), number) else {
            return "(no file)".to_owned();
        };
        String::from_utf8(state.read_all(&found).unwrap()).unwrap()
    }

    pub fn edits(&self, of: &str) -> Vec<EditKind> {
        let mut edits = self.history(of);
        edits.reverse();
        edits.iter().map(|edit| edit.kind).collect()
    }

    pub fn undo(&self, of: &str, steps: u32) -> Result<Stepped, jailfs::error::Error> {
        self.step(Request::Undo { path: path(of), steps })
    }

    pub fn redo(&self, of: &str, steps: u32) -> Result<Stepped, jailfs::error::Error> {
        self.step(Request::Redo { path: path(of), steps })
    }

    fn step(&self, request: Request) -> Result<Stepped, jailfs::error::Error> {
        match self.sandbox.handle(request)? {
            Reply::Stepped(stepped) => Ok(stepped),
            other => panic!("{other:?}"),
        }
    }

    pub fn patch(&self, of: &str, number: u32) -> String {
        let from = FileRev { path: path(of), edit: Some(number) };
        let to = FileRev { edit: None, ..from.clone() };
        match self.sandbox.handle(Request::FileDiff { from, to, detail: Detail::Patch }).unwrap() {
            Reply::Diff(changes) => {
                let patches =
                    changes.to_vec().unwrap().into_iter().filter_map(|change| change.patch);
                patches.map(|patch| String::from_utf8(patch).unwrap()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn checkpoint(&self, name: &str) {
        let request = Request::Checkpoint { name: Some(name.to_owned()), message: String::new() };
        self.sandbox.handle(request).unwrap();
    }

    pub fn restore(&self, rev: &str) {
        self.sandbox
            .handle(Request::Restore {
                detach_mounts: false,
                to: Rev::parse(rev),
                paths: Vec::new(),
                dry_run: false,
            })
            .unwrap();
    }

    pub fn apply(&self) {
        let request = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: Default::default(),
        };
        let Reply::Applied(applied) = self.sandbox.handle(request).unwrap() else {
            panic!("not applied")
        };
        assert!(applied.conflicts.is_empty());
    }

    pub fn gc(&self, operations: u64) {
        let request = Request::Gc { operations, keep: None, max_store: None, dry_run: false };
        self.sandbox.handle(request).unwrap();
    }
}
