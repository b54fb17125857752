//! The store that is damaged: small, with a file of every kind, and with older copies of itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jailfs::internals::fs::{Caller, RenameMode, SetAttr, SetXattr};
use jailfs::internals::store::Store;
use jailfs::sandbox::{Checkpoint, Operation, Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{FileKind, Name, NodeId, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };

/// Everything that a store shows.
#[derive(Debug, PartialEq, Eq)]
pub struct Truth {
    pub log: Vec<Checkpoint>,
    pub operations: Vec<Operation>,
    /// Each sealed state, by its number.
    pub states: BTreeMap<String, Vec<String>>,
    /// The present tree.
    pub now: Vec<String>,
    /// The tree after a restore of each of [`World::RESTORED`].
    pub restored: BTreeMap<String, Vec<String>>,
}

pub struct World {
    dir: tempfile::TempDir,
    /// The store at earlier times, oldest first.
    pub ages: Vec<PathBuf>,
    pub whole: PathBuf,
    /// The files of the store that are damaged.
    pub files: BTreeMap<String, Vec<u8>>,
    pub truth: Truth,
    base: String,
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// Random bytes.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| next()).collect();
    bytes.truncate(len);
    bytes
}

struct Work(Arc<Sandbox>);

impl Work {
    fn id(&self, path: &str) -> NodeId {
        path.split('/').filter(|p| !p.is_empty()).fold(NodeId::ROOT, |dir, part| {
            self.0.fs().lookup(dir, &name(part)).unwrap_or_else(|e| panic!("{path}: {e}")).id
        })
    }

    fn parent<'p>(&self, path: &'p str) -> (NodeId, &'p str) {
        let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
        (self.id(dir), last)
    }

    fn write(&self, path: &str, offset: u64, bytes: &[u8]) {
        self.0.fs().write(self.id(path), offset, bytes, false).unwrap();
    }

    fn put(&self, path: &str, bytes: &[u8]) {
        let (dir, last) = self.parent(path);
        let file = match self.0.fs().lookup(dir, &name(last)) {
            Ok(entry) => entry.id,
            Err(_) => self.0.fs().mknod(dir, &name(last), 0o100_644, 0, 0, ME).unwrap().id,
        };
        self.0.fs().truncate(file, 0, false).unwrap();
        self.0.fs().write(file, 0, bytes, false).unwrap();
    }

    fn remove(&self, path: &str) {
        let (dir, last) = self.parent(path);
        self.0.fs().unlink(dir, &name(last)).unwrap();
    }

    fn mkdir(&self, path: &str) {
        let (dir, last) = self.parent(path);
        self.0.fs().mkdir(dir, &name(last), 0o750, 0, ME).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        let ((from, old), (to, new)) = (self.parent(from), self.parent(to));
        self.0.fs().rename(from, &name(old), to, &name(new), RenameMode::Replace, 0).unwrap();
    }

    fn link(&self, file: &str, path: &str) {
        let (dir, last) = self.parent(path);
        self.0.fs().link(self.id(file), dir, &name(last)).unwrap();
    }

    fn xattr(&self, path: &str, value: &[u8]) {
        self.0.fs().setxattr(self.id(path), b"user.colour", value, SetXattr::default()).unwrap();
    }

    fn ask(&self, request: Request) -> Reply {
        self.0.handle(request).unwrap()
    }

    fn checkpoint(&self, name: &str) {
        self.ask(Request::Checkpoint {
            name: Some(name.to_owned()),
            message: format!("message of {name}"),
        });
    }

    fn restore(&self, name: &str) {
        let to = Rev::Name(name.to_owned());
        self.ask(Request::Restore { detach_mounts: false, to, paths: Vec::new(), dry_run: false });
    }

    fn hold(&self, name: &str) {
        self.ask(Request::Hold { rev: Rev::Name(name.to_owned()), held: true });
    }
}

/// Runs a shell script; for copies that keep holes and times.
fn shell(script: &str) {
    let done = std::process::Command::new("sh").arg("-ec").arg(script).status().unwrap();
    assert!(done.success(), "{script}");
}

impl World {
    /// The checkpoints to which each store is restored, in order.
    pub const RESTORED: [&str; 2] = ["c2", "s5"];

    pub fn new() -> World {
        let dir =
            tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })
                .unwrap();
        let (base, whole) = (dir.path().join("base"), dir.path().join("store"));
        shell(&format!(
            "mkdir -p '{0}/d/deep'; cd '{0}'; echo readme > README; seq 900 > d/numbers; \
             seq 3000 > big
             echo twin > twin; ln twin d/pair; ln -s ../README d/link; echo gone > d/gone",
            base.display()
        ));
        let mut ages = Vec::new();
        let mut age = |whole: &Path| {
            let to = dir.path().join(format!("age{}", ages.len()));
            shell(&format!("cp -a '{}' '{}'", whole.display(), to.display()));
            ages.push(to);
        };
        let open =
            || Work(Sandbox::create_or_open(&base, &whole, &StoreOptions::default()).unwrap());
        first(&open());
        age(&whole);
        second(&open());
        age(&whole);
        third(&open());
        age(&whole);
        fourth(&open(), &whole);
        age(&whole);
        fifth(&open());
        // The operation log no longer names the older states.
        Store::open(&whole, (1, 1), StoreOptions::default()).unwrap().trim_ops(3).unwrap();
        age(&whole);
        sixth(&open());
        let mut world = World {
            files: files(&whole),
            ages,
            base: seen_of_base(&base),
            truth: Truth {
                log: Vec::new(),
                operations: Vec::new(),
                states: BTreeMap::new(),
                now: Vec::new(),
                restored: BTreeMap::new(),
            },
            whole,
            dir,
        };
        let place = world.place();
        world.copy_to(place.path());
        world.truth = truth(&Sandbox::open(&place.path().join("store")).unwrap());
        assert!(world.truth.log.iter().filter(|c| !c.automatic).count() > 10);
        world.assert_rich();
        drop(place);
        world
    }

    /// A directory for copies.
    pub fn place(&self) -> tempfile::TempDir {
        tempfile::tempdir_in(self.dir.path()).unwrap()
    }

    /// Copies the store to `store` in a directory.
    pub fn copy_to(&self, place: &Path) {
        let to = place.join("store");
        if to.exists() {
            std::fs::remove_dir_all(&to).unwrap();
        }
        copy(&self.whole, &to);
    }

    /// Whether the base is as it was.
    pub fn base_is_whole(&self) -> bool {
        seen_of_base(&self.dir.path().join("base")) == self.base
    }

    /// The upper layer.
    pub fn open_layer(&self) -> String {
        let last = self.files.keys().rfind(|file| file.starts_with("layers/")).unwrap();
        last.rsplit_once('/').unwrap().0.to_owned()
    }

    /// Whether content of a pool has no checksums yet.
    pub fn is_unsummed(&self, file: &str) -> bool {
        let sums = file.strip_suffix("pool").map(|dir| format!("{dir}sums"));
        sums.is_some_and(|sums| !self.files.contains_key(&sums))
    }

    /// Asserts that the store has a file of every kind.
    fn assert_rich(&self) {
        let has = |part: &str| self.files.keys().any(|file| file.contains(part));
        for part in [
            "format",
            "base",
            "heads/main",
            "heads.log",
            "identities",
            "holds",
            "history/main",
            "chunks",
            "archive/root",
            "/journal",
            "/pool",
            "/sums",
            "/map",
            "/index",
            "ledger",
        ] {
            assert!(has(part), "the store has no '{part}': {:?}", self.files.keys());
        }
        let is_pack = |name: &String| name.starts_with("archive/") && name != "archive/root";
        assert!(self.files.keys().any(is_pack), "no pack: {:?}", self.files.keys());
    }
}

/// Content in several extents, links, attributes.
fn first(work: &Work) {
    work.put("a", &noise(1, 20_000));
    work.mkdir("made");
    work.put("made/text", b"some text\n");
    work.link("made/text", "made/also");
    work.xattr("made/text", b"green");
    work.0.fs().symlink(work.id("made"), &name("link"), b"../README", ME).unwrap();
    work.0.fs().mknod(work.id("made"), &name("fifo"), 0o010_640, 0, 0, ME).unwrap();
    work.checkpoint("c1");
    work.write("a", 5000, &noise(2, 6000));
    work.write("big", 4000, b"in the middle of a file of the base");
    work.rename("d/numbers", "made/numbers");
    work.remove("d/gone");
    work.checkpoint("c2");
    work.0.fs().sync().unwrap();
}

/// A branch, and an apply.
fn second(work: &Work) {
    work.put("a", &noise(3, 9000));
    work.restore("c1");
    work.put("branch", &noise(4, 5000));
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    work.0.fs().setattr(work.id("README"), mode, false).unwrap();
    work.checkpoint("c3");
    work.put("twin", b"both\n");
    work.write("big", 9000, b"for the base");
    let paths = ["twin", "big"].map(|path| TreePath::parse(path.as_bytes()).unwrap()).to_vec();
    let consent = Default::default();
    work.ask(Request::Apply { paths, dry_run: false, undo: false, consent });
    work.checkpoint("c4");
    work.hold("c2");
    work.0.fs().sync().unwrap();
}

/// Many small checkpoints that share content, archived.
fn third(work: &Work) {
    for step in 0..24_u64 {
        let mut content = noise(100, 9000);
        content.extend(std::iter::repeat_n(step as u8, 7000));
        work.put("log", &content);
        work.put(&format!("s{}", step % 5), format!("{step}\n").repeat(900).as_bytes());
        work.checkpoint(&format!("s{step}"));
    }
    work.ask(Request::Drop { rev: Rev::Name("s3".to_owned()) });
    work.0.compact().unwrap();
    work.0.fs().sync().unwrap();
}

/// More of the same, some of which is dropped. Its records stay files: a directory blocks the path
/// of the root of the archive.
fn fourth(work: &Work, store: &Path) {
    for step in 0..6_u64 {
        let mut content = noise(100, 9000);
        content.extend(noise(200 + step, 5000));
        work.put("log", &content);
        work.put("fresh", &noise(300 + step, 9000));
        work.checkpoint(&format!("t{step}"));
    }
    work.hold("c3");
    work.ask(Request::Drop { rev: Rev::Name("t1".to_owned()) });
    work.ask(Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false });
    let root = store.join("archive/root.new");
    std::fs::create_dir(&root).unwrap();
    work.0.compact().unwrap_err();
    std::fs::remove_dir(&root).unwrap();
    work.0.fs().sync().unwrap();
}

/// A leaf that only the operation log names, without checksums.
fn fifth(work: &Work) {
    work.put("leaf", &noise(400, 9000));
    work.checkpoint("leaf");
    work.restore("t4");
    work.put("fresh", &noise(401, 6000));
    work.checkpoint("u1");
    work.put("fresh", &noise(402, 3000));
    work.checkpoint("u2");
    work.checkpoint("u3");
    work.0.fs().sync().unwrap();
}

/// Changes that are in no checkpoint yet.
fn sixth(work: &Work) {
    for dropped in ["u1", "u2"] {
        work.ask(Request::Drop { rev: Rev::Name(dropped.to_owned()) });
    }
    work.ask(Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false });
    work.put("open", &noise(500, 5000));
    work.0.fs().sync().unwrap();
    work.put("open", &noise(501, 4000));
    work.rename("made", "moved");
    work.0.fs().sync().unwrap();
}

fn copy(from: &Path, to: &Path) {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).create(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => copy(&entry.path(), &to),
            _ if entry.file_name() == "reserve" || entry.file_name() == "lock" => {}
            _ => copy_with_holes(&entry.path(), &to),
        }
    }
}

/// Holes of pools stay holes: a layer has checksums only for allocated blocks.
fn copy_with_holes(from: &Path, to: &Path) {
    write_with_holes(to, &std::fs::read(from).unwrap());
}

pub fn write_with_holes(path: &Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    let is_pool = path.ends_with("pool");
    for (at, block) in bytes.chunks(4096).enumerate() {
        if !is_pool || block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, at as u64 * 4096).unwrap();
        }
    }
}

/// The files of a store, without those that have no effect.
pub fn files(store: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(dir: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                walk(&entry.path(), &format!("{path}/"), found);
            } else if !matches!(path.as_str(), "README" | "lock" | "reserve" | "daemon.log") {
                found.insert(path, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(store, "", &mut found);
    found
}

fn seen_of_base(base: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    fn walk(path: &Path, lines: &mut Vec<String>) {
        let about = std::fs::symlink_metadata(path).unwrap();
        let content = if about.is_file() { std::fs::read(path).unwrap() } else { Vec::new() };
        lines.push(format!(
            "{} {} {:o} {} {} {}",
            path.display(),
            about.ino(),
            about.mode(),
            about.mtime_nsec(),
            about.ctime_nsec(),
            crc32c::crc32c(&content)
        ));
        if about.is_dir() {
            let entries = std::fs::read_dir(path).unwrap();
            let mut below: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
            below.sort();
            below.iter().for_each(|path| walk(path, lines));
        }
    }
    let mut lines = Vec::new();
    walk(base, &mut lines);
    lines.join("\n")
}

fn truth(sandbox: &Sandbox) -> Truth {
    let (log, operations) = (log(sandbox), operations(sandbox));
    let states =
        log.iter().map(|c| (c.id.to_string(), state(sandbox, &Rev::Id(c.id)).unwrap())).collect();
    let now = live(sandbox).unwrap();
    let mut restored = BTreeMap::new();
    for name in World::RESTORED {
        restore(sandbox, name).unwrap();
        restored.insert(name.to_owned(), live(sandbox).unwrap());
    }
    Truth { log, operations, states, now, restored }
}

pub fn log(sandbox: &Sandbox) -> Vec<Checkpoint> {
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!("not a log") };
    log
}

pub fn operations(sandbox: &Sandbox) -> Vec<Operation> {
    let Reply::OpLog(log) = sandbox.handle(Request::OpLog).unwrap() else { panic!("not a log") };
    log
}

pub fn restore(sandbox: &Sandbox, name: &str) -> Result<(), String> {
    let to = Rev::Name(name.to_owned());
    let request = Request::Restore { detach_mounts: false, to, paths: Vec::new(), dry_run: false };
    sandbox.handle(request).map(drop).map_err(|error| error.to_string())
}

/// Everything that is visible in a state.
pub fn state(sandbox: &Sandbox, rev: &Rev) -> Result<Vec<String>, String> {
    let mut lines = Vec::new();
    let mut dirs = vec![TreePath::parse(b"").unwrap()];
    let show = |path: &TreePath, offset: u64| {
        let asked = Request::Show { rev: rev.clone(), path: path.clone(), offset };
        match sandbox.handle(asked).map_err(|error| error.to_string())? {
            Reply::Shown(shown) => Ok::<_, String>(shown),
            other => panic!("{other:?}"),
        }
    };
    while let Some(dir) = dirs.pop() {
        let shown = show(&dir, 0)?;
        lines.push(format!("{:?}", shown.node));
        for node in shown.entries {
            match node.file {
                FileKind::Dir => dirs.push(node.path),
                _ => {
                    let (mut bytes, mut at) = (0, 0);
                    loop {
                        let part = show(&node.path, at)?.bytes;
                        bytes = crc32c::crc32c_append(bytes, &part);
                        at += part.len() as u64;
                        if part.is_empty() || node.file != FileKind::File {
                            break;
                        }
                    }
                    lines.push(format!("{node:?} {at} {bytes:08x}"));
                }
            }
        }
    }
    Ok(lines)
}

/// Everything that is visible in the present tree, without what reading changes.
pub fn live(sandbox: &Sandbox) -> Result<Vec<String>, String> {
    let fs = sandbox.fs();
    let text = |error: jailfs::error::FsError| error.to_string();
    let mut lines = Vec::new();
    let mut dirs = vec![(NodeId::ROOT, String::new())];
    while let Some((dir, path)) = dirs.pop() {
        for child in fs.names(dir).map_err(text)? {
            let entry = fs.lookup(dir, &child).map_err(text)?;
            let path = format!("{path}/{child}");
            let meta = entry.attr.meta;
            let mut line = format!(
                "{path} {} {:o} {} {} {} {:?}",
                entry.attr.ino.0, meta.mode, meta.uid, meta.nlink, entry.attr.size, meta.mtime
            );
            match entry.attr.kind {
                FileKind::Dir => dirs.push((entry.id, path)),
                FileKind::File => {
                    let plan = fs.read(entry.id, 0, u64::MAX).map_err(text)?;
                    let bytes = plan.read(false).map_err(text)?.unwrap();
                    line += &format!(" {} {:08x}", bytes.len(), crc32c::crc32c(&bytes));
                }
                FileKind::Symlink => {
                    line += &format!(" {:?}", fs.link_text(entry.id).map_err(text)?)
                }
                _ => {}
            }
            for name in fs.listxattr(entry.id).map_err(text)?.split(|byte| *byte == 0) {
                if !name.is_empty() {
                    let value = fs.getxattr(entry.id, name).map_err(text)?;
                    line += &format!(" {name:?}={value:?}");
                }
            }
            lines.push(line);
        }
    }
    Ok(lines)
}
