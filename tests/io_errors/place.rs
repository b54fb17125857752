//! A base and a store that are created by the same calls each time, and everything that is visible
//! in them.
//!
//! Times that were not set explicitly are not compared, because they are those of the run. If
//! possible, both are on a filesystem in memory, where a sync costs nothing.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use jailfs::error::{Error, FsError};
use jailfs::internals::fs::{Caller, RenameMode, SetAttr, SetTime, SetXattr};
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{Consent, Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{ByteRange, FileKind, Name, NodeId, Timestamp};

const ME: Caller = Caller { uid: 0, gid: 0 };
/// The time given to everything whose time is set.
const OLD: i64 = 1_000_000_000;
/// Earlier times were set.
const NEW: i64 = 1_500_000_000;

/// Everything visible in a tree, one line for each node.
type Picture = Vec<String>;

/// The content at one moment.
#[derive(PartialEq, Eq)]
pub struct Seen {
    base: Picture,
    tree: Picture,
    checkpoints: BTreeMap<String, Picture>,
}

pub struct Place {
    dir: tempfile::TempDir,
    pub base: PathBuf,
    pub store: PathBuf,
    /// Each edit of a file is one of its own.
    seconds: Arc<AtomicI64>,
}

impl Place {
    pub fn new(begin: fn(&Place)) -> Place {
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }
            .unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        std::fs::create_dir(&base).unwrap();
        let place = Place { dir, base, store, seconds: Arc::default() };
        begin(&place);
        place
    }

    /// A copy of the store, over the same base.
    pub fn copy(&self) -> Place {
        let dir = tempfile::tempdir_in(self.dir.path().parent().unwrap()).unwrap();
        let store = dir.path().join("store");
        copy(&self.store, &store);
        let seconds = Arc::new(AtomicI64::new(self.seconds.load(Ordering::SeqCst)));
        Place { dir, base: self.base.clone(), store, seconds }
    }

    pub fn open(&self) -> Result<Arc<Sandbox>, Error> {
        let sandbox = Sandbox::create_or_open(&self.base, &self.store, &StoreOptions::default())?;
        let clock = Arc::clone(&self.seconds);
        let now = move || Timestamp { secs: clock.fetch_add(2, Ordering::SeqCst), nanos: 0 };
        sandbox.fs().set_edit_clock(Box::new(now));
        Ok(sandbox)
    }

    pub fn fill_base(&self) {
        let at = |path: &str| self.base.join(path);
        std::fs::create_dir_all(at("src/deep")).unwrap();
        std::fs::create_dir(at("docs")).unwrap();
        for (n, file) in ["src/f1", "src/f2", "src/f3", "src/deep/g", "README"].iter().enumerate() {
            std::fs::write(at(file), bytes(n as u64, 3000)).unwrap();
        }
        std::fs::write(at("big"), bytes(9, 50_000)).unwrap();
        std::fs::hard_link(at("README"), at("docs/also")).unwrap();
        symlink("../README", at("docs/link")).unwrap();
        for path in [
            "src/f1",
            "src/f2",
            "src/f3",
            "src/deep/g",
            "README",
            "big",
            "src/deep",
            "src",
            "docs",
            "",
        ] {
            let when =
                std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(OLD as u64);
            std::fs::File::open(at(path))
                .unwrap()
                .set_times(std::fs::FileTimes::new().set_modified(when))
                .unwrap();
        }
    }

    /// A store with two checkpoints, and later changes.
    pub fn work(&self) {
        self.fill_base();
        let sandbox = self.open().unwrap();
        put(&sandbox, "src/f1", &bytes(20, 4000)).unwrap();
        remove(&sandbox, "src/f2").unwrap();
        put(&sandbox, "src/new", &bytes(21, 12_000)).unwrap();
        checkpoint(&sandbox, "c0").unwrap();
        rename(&sandbox, "docs", "manual").unwrap();
        put(&sandbox, "src/f2", &bytes(22, 100)).unwrap();
        write(&sandbox, "big", 10_000, &bytes(23, 3000)).unwrap();
        write(&sandbox, "README", 2990, &bytes(24, 30)).unwrap();
        checkpoint(&sandbox, "c1").unwrap();
        rename(&sandbox, "manual", "docs").unwrap();
        put(&sandbox, "src/f1", &bytes(25, 4100)).unwrap();
        mkdir(&sandbox, "made").unwrap();
        put(&sandbox, "made/inside", &bytes(26, 70_000)).unwrap();
        link(&sandbox, "made/inside", "linked").unwrap();
        remove(&sandbox, "src/deep/g").unwrap();
        attributes(&sandbox, "src/f3").unwrap();
        sync(&sandbox).unwrap();
    }

    /// The same, applied.
    pub fn applied(&self) {
        self.work();
        let sandbox = self.open().unwrap();
        apply(&sandbox, false).unwrap();
        put(&sandbox, "since", &bytes(30, 500)).unwrap();
        sync(&sandbox).unwrap();
    }

    /// An apply that failed in its middle, as did all later calls.
    pub fn cut_off(&self) {
        self.work();
        let sandbox = self.open().unwrap();
        let applied = failpoint::with("fail:base.rename:3+:EIO", || {
            let applied = apply(&sandbox, false);
            drop(sandbox);
            applied
        });
        assert!(applied.is_err());
    }

    /// A store with many small checkpoints, and duplicate content.
    pub fn many_layers(&self) {
        self.fill_base();
        let sandbox = self.open().unwrap();
        for n in 0..4 {
            put(&sandbox, &format!("src/n{n}"), &bytes(40 + n % 2, 70_000)).unwrap();
            put(&sandbox, "src/f1", &bytes(50 + n, 3000)).unwrap();
            write(&sandbox, "big", 8192 * n, &bytes(60 + n, 500)).unwrap();
            checkpoint(&sandbox, &format!("c{n}")).unwrap();
        }
        put(&sandbox, "last", &bytes(70, 500)).unwrap();
        restore(&sandbox, "c2").unwrap();
        put(&sandbox, "other", &bytes(71, 500)).unwrap();
        checkpoint(&sandbox, "fork").unwrap();
        put(&sandbox, "open", &bytes(72, 500)).unwrap();
        sync(&sandbox).unwrap();
    }

    /// The same, with its layers in the archive.
    pub fn archived(&self) {
        self.many_layers();
        let sandbox = self.open().unwrap();
        sandbox.compact().unwrap();
        put(&sandbox, "src/f1", &bytes(80, 3000)).unwrap();
        checkpoint(&sandbox, "later").unwrap();
        assert!(self.store.join("archive/root").exists());
    }

    /// Everything. A checkpoint is read by restoring it, so this works on a copy.
    pub fn seen(&self) -> Seen {
        let sandbox = self.open().unwrap();
        let (tree, names) = (picture(&sandbox), names(&sandbox));
        drop(sandbox);
        let copied = self.copy();
        let sandbox = copied.open().unwrap();
        let look = |name: &String| {
            restore(&sandbox, name).unwrap();
            (name.clone(), picture(&sandbox))
        };
        let checkpoints = names.iter().map(look).collect();
        Seen { base: host(&self.base), tree, checkpoints }
    }

    /// Opens the store, which must show one of the possible states, and work.
    #[track_caller]
    pub fn judge(&self, possible: &[Seen], ever: &[Seen], context: &str) {
        let sandbox =
            self.open().unwrap_or_else(|error| panic!("{context}: it is not opened: {error}"));
        let (tree, base) = (picture(&sandbox), host(&self.base));
        let names = names(&sandbox);
        let is = |seen: &&Seen| seen.tree == tree && seen.base == base;
        if !possible.iter().any(|seen| is(&seen)) {
            neither(possible, (&tree, &base), context);
        }
        let kept = |seen: &Seen| is(&seen) && seen.checkpoints.keys().eq(names.iter());
        assert!(possible.iter().any(kept), "{context}: the checkpoints are {names:?}");
        self.works(sandbox, &tree, ever, context);
        assert_eq!(host(&self.base), base, "{context}: the base changed without an apply");
    }

    /// A write, a sync, a checkpoint, and a restore of every checkpoint succeed, and then the whole
    /// store is sound.
    #[track_caller]
    fn works(&self, sandbox: Arc<Sandbox>, tree: &Picture, ever: &[Seen], context: &str) {
        must(put(&sandbox, "probe", &bytes(99, 5000)), "write", context);
        must(sync(&sandbox), "sync", context);
        must(checkpoint(&sandbox, "probe"), "checkpoint", context);
        let probed = picture(&sandbox);
        assert_eq!(probed.len(), tree.len() + 1, "{context}: a write changed something else");
        for name in names(&sandbox).iter().filter(|name| *name != "probe") {
            must(restore(&sandbox, name), "restore", context);
            let made = ever.iter().find_map(|seen| seen.checkpoints.get(name));
            assert_eq!(
                Some(&picture(&sandbox)),
                made,
                "{context}: checkpoint {name} has other content"
            );
        }
        must(restore(&sandbox, "probe"), "restore", context);
        assert_eq!(picture(&sandbox), probed, "{context}: the new checkpoint has other content");
        drop(sandbox);
        self.is_whole(context);
    }

    /// The store opens, shows this tree, and works, whatever is in the base.
    #[track_caller]
    pub fn works_with(&self, state: &Seen, context: &str) {
        let sandbox = must(self.open(), "open", context);
        assert!(picture(&sandbox) == state.tree, "{context}: the tree is not the expected one");
        self.works(sandbox, &state.tree, std::slice::from_ref(state), context);
    }

    /// The store opens, and all of it is sound.
    #[track_caller]
    pub fn is_sound(&self, context: &str) {
        drop(must(self.open(), "open", context));
        self.is_whole(context);
    }

    #[track_caller]
    fn is_whole(&self, context: &str) {
        let checked = Sandbox::check_store(&self.store, true).unwrap();
        assert!(checked.problems.is_empty(), "{context}: {:#?}", checked.problems);
        assert!(checked.warnings.is_empty(), "{context}: {:#?}", checked.warnings);
    }
}

#[track_caller]
fn must<T>(done: Result<T, Error>, what: &str, context: &str) -> T {
    done.unwrap_or_else(|error| panic!("{context}: {what}: {error}"))
}

#[track_caller]
fn neither(possible: &[Seen], (tree, base): (&Picture, &Picture), context: &str) -> ! {
    let short = |line: &&String| line.chars().take(160).collect::<String>();
    let differs = |was: &Picture, is: &Picture| -> (Vec<String>, Vec<String>) {
        let missing =
            was.iter().filter(|line| !is.contains(line)).map(|line| short(&line)).collect();
        (missing, is.iter().filter(|line| !was.contains(line)).map(|line| short(&line)).collect())
    };
    let all: Vec<_> = possible
        .iter()
        .map(|seen| (differs(&seen.tree, tree), differs(&seen.base, base)))
        .collect();
    panic!(
        "{context}: it is none of {} states. Each (missing, new) in (tree, base): {all:#?}",
        possible.len()
    );
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    std::fs::set_permissions(to, from.metadata().unwrap().permissions()).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (kind, to) = (entry.file_type().unwrap(), to.join(entry.file_name()));
        if kind.is_dir() {
            copy(&entry.path(), &to);
        } else if kind.is_file() && entry.file_name() != "reserve" {
            copy_file(&entry.path(), &to);
        }
    }
}

/// Copies a file with its holes.
fn copy_file(from: &Path, to: &Path) {
    let (from, to) = (std::fs::File::open(from).unwrap(), std::fs::File::create_new(to).unwrap());
    let about = from.metadata().unwrap();
    to.set_permissions(about.permissions()).unwrap();
    to.set_len(about.len()).unwrap();
    for range in
        jailfs::internals::sys::file::data_in(&from, ByteRange { start: 0, end: about.len() })
            .unwrap()
    {
        let mut bytes = vec![0; range.len() as usize];
        from.read_exact_at(&mut bytes, range.start).unwrap();
        to.write_all_at(&bytes, range.start).unwrap();
    }
}

/// Unique bytes.
pub fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed + 1;
    let next = |_| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

fn time(secs: i64) -> String {
    if secs < NEW { secs.to_string() } else { "now".to_owned() }
}

/// Everything that the host shows of a directory.
fn host(base: &Path) -> Picture {
    fn walk(path: &Path, shown: &str, lines: &mut Picture) {
        let about = path.symlink_metadata().unwrap();
        let (mode, owner) = (about.mode(), (about.uid(), about.gid()));
        let mut line = format!("{shown} {mode:o} {owner:?} {}", time(about.mtime()));
        if about.is_symlink() {
            // Its times were not set.
            line = format!("{shown} {:?}", std::fs::read_link(path).unwrap());
        } else {
            let open = std::fs::File::open(path).unwrap();
            for name in jailfs::internals::sys::xattr::list(&open).unwrap() {
                let value = jailfs::internals::sys::xattr::get(&open, &name).unwrap();
                line += &format!(" {}={value:?}", String::from_utf8_lossy(&name));
            }
        }
        if about.is_file() {
            line += &format!(" {} {:?}", about.nlink(), blake(&std::fs::read(path).unwrap()));
        }
        lines.push(line);
        if about.is_dir() {
            let mut names: Vec<_> =
                std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            for name in names {
                let name = name.as_bytes();
                let below = format!("{shown}/{}", String::from_utf8_lossy(name));
                walk(&path.join(std::ffi::OsStr::from_bytes(name)), &below, lines);
            }
        }
    }
    let mut lines = Vec::new();
    walk(base, "", &mut lines);
    lines
}

/// Everything that the tree shows.
fn picture(sandbox: &Sandbox) -> Picture {
    fn walk(sandbox: &Sandbox, id: NodeId, path: &str, lines: &mut Picture) {
        let fs = sandbox.fs();
        let attr = fs.getattr(id).unwrap_or_else(|error| panic!("{path}: {error}"));
        let meta = &attr.meta;
        let mut line =
            format!("{path} {:o} {} {} {}", meta.mode, meta.uid, meta.gid, time(meta.mtime.secs));
        let listed = fs.listxattr(id).unwrap_or_else(|error| panic!("{path}: {error}"));
        for name in listed.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            line +=
                &format!(" {}={:?}", String::from_utf8_lossy(name), fs.getxattr(id, name).unwrap());
        }
        match attr.kind {
            FileKind::File => {
                let read = fs.read(id, 0, u64::MAX).and_then(|plan| plan.read(false));
                let bytes = read.unwrap_or_else(|error| panic!("{path}: {error}")).unwrap();
                assert_eq!(bytes.len() as u64, attr.size, "{path}");
                line += &format!(" {} {:?}", meta.nlink, blake(&bytes));
            }
            FileKind::Symlink => line = format!("{path} {:?}", fs.link_text(id).unwrap()),
            _ => {}
        }
        lines.push(line);
        if attr.kind == FileKind::Dir {
            let mut names = fs.names(id).unwrap_or_else(|error| panic!("{path}: {error}"));
            names.sort();
            for name in names {
                let below = format!("{path}/{name}");
                let entry = fs.lookup(id, &name).unwrap_or_else(|error| panic!("{below}: {error}"));
                walk(sandbox, entry.id, &below, lines);
            }
        }
    }
    let mut lines = Vec::new();
    walk(sandbox, NodeId::ROOT, "", &mut lines);
    lines
}

/// A digest of content.
fn blake(bytes: &[u8]) -> (usize, String) {
    (bytes.len(), blake3::hash(bytes).to_hex().as_str()[..16].to_owned())
}

fn names(sandbox: &Sandbox) -> Vec<String> {
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!("not a log") };
    let mut names: Vec<String> =
        log.into_iter().filter(|made| !made.automatic).map(|made| made.name.unwrap()).collect();
    names.sort();
    names
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn attempt<T>(what: &str, done: Result<T, FsError>) -> Result<T, Error> {
    jailfs::error::Attempt::attempt(done, || what.to_owned())
}

fn id(sandbox: &Sandbox, path: &str) -> Result<NodeId, FsError> {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let mut at = NodeId::ROOT;
    for part in parts {
        at = sandbox.fs().lookup(at, &name(part))?.id;
    }
    Ok(at)
}

fn parent(sandbox: &Sandbox, path: &str) -> Result<(NodeId, Name), FsError> {
    let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
    Ok((id(sandbox, dir)?, name(last)))
}

/// Creates an empty file.
pub fn create(sandbox: &Sandbox, path: &str) -> Result<(), Error> {
    let made = parent(sandbox, path)
        .and_then(|(dir, last)| sandbox.fs().mknod(dir, &last, 0o100_644, 0, 0, ME));
    attempt("create", made.map(drop))
}

/// Gives a file its content.
pub fn put(sandbox: &Sandbox, path: &str, bytes: &[u8]) -> Result<(), Error> {
    let put = || {
        let (dir, last) = parent(sandbox, path)?;
        let file = match sandbox.fs().lookup(dir, &last) {
            Ok(entry) => entry.id,
            Err(FsError::NotFound) => sandbox.fs().mknod(dir, &last, 0o100_644, 0, 0, ME)?.id,
            Err(error) => return Err(error),
        };
        sandbox.fs().truncate(file, 0, false)?;
        sandbox.fs().write(file, 0, bytes, false)
    };
    attempt("put", put())
}

pub fn write(sandbox: &Sandbox, path: &str, at: u64, bytes: &[u8]) -> Result<(), Error> {
    attempt("write", id(sandbox, path).and_then(|file| sandbox.fs().write(file, at, bytes, false)))
}

pub fn remove(sandbox: &Sandbox, path: &str) -> Result<(), Error> {
    attempt("remove", parent(sandbox, path).and_then(|(dir, last)| sandbox.fs().unlink(dir, &last)))
}

pub fn rename(sandbox: &Sandbox, from: &str, to: &str) -> Result<(), Error> {
    let rename = || {
        let ((dir, last), (to_dir, to)) = (parent(sandbox, from)?, parent(sandbox, to)?);
        sandbox.fs().rename(dir, &last, to_dir, &to, RenameMode::Replace, 1)
    };
    attempt("rename", rename())
}

fn mkdir(sandbox: &Sandbox, path: &str) -> Result<(), Error> {
    let made =
        parent(sandbox, path).and_then(|(dir, last)| sandbox.fs().mkdir(dir, &last, 0o755, 0, ME));
    attempt("mkdir", made.map(drop))
}

fn link(sandbox: &Sandbox, from: &str, to: &str) -> Result<(), Error> {
    let link = || {
        let (dir, last) = parent(sandbox, to)?;
        sandbox.fs().link(id(sandbox, from)?, dir, &last).map(drop)
    };
    attempt("link", link())
}

/// Mode, owner and time, and an extended attribute.
fn attributes(sandbox: &Sandbox, path: &str) -> Result<(), Error> {
    let mtime = Some(SetTime::To(Timestamp { secs: OLD + 5, nanos: 0 }));
    let set = SetAttr { mode: Some(0o640), uid: Some(77), mtime, ..SetAttr::default() };
    let set = || {
        let id = id(sandbox, path)?;
        sandbox.fs().setxattr(id, b"trusted.x", b"value", SetXattr::default())?;
        sandbox.fs().setattr(id, set, false).map(drop)
    };
    attempt("set attributes", set())
}

pub fn sync(sandbox: &Sandbox) -> Result<(), Error> {
    attempt("sync", sandbox.fs().sync())
}

pub fn checkpoint(sandbox: &Sandbox, name: &str) -> Result<(), Error> {
    let request = Request::Checkpoint { name: Some(name.to_owned()), message: String::new() };
    sandbox.handle(request).map(drop)
}

pub fn restore(sandbox: &Sandbox, to: &str) -> Result<(), Error> {
    let to = Rev::parse(to);
    let request = Request::Restore { to, paths: Vec::new(), dry_run: false, detach_mounts: false };
    sandbox.handle(request).map(drop)
}

pub fn apply(sandbox: &Sandbox, undo: bool) -> Result<(), Error> {
    let request = Request::Apply { paths: Vec::new(), dry_run: false, undo, consent: Consent::ALL };
    sandbox.handle(request).map(drop)
}
