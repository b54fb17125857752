//! Power cuts: every change of a store's files is recorded during random work. Then the test builds
//! a disk as a power cut may leave it: everything that was synced up to some moment, and of the
//! rest whatever the host happened to have written, page by page and in any order. Each such store
//! must open, be completely sound, and hold at least what was synced. It may have lost any entry of
//! the edit history, and must not invent one.
//!
//! `JAILFS_POWER_SEED=N` runs one seed, `JAILFS_POWER_SEEDS=N` runs the first N.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, and prints its figures"
)]

#[path = "power/disk.rs"]
mod disk;
#[path = "power/heads.rs"]
mod heads;
#[path = "power/redo.rs"]
mod redo;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use disk::{Disk, Random};
use jailfs::internals::fs::{Caller, RenameMode};
use jailfs::internals::sys::failpoint::{self, Change};
use jailfs::sandbox::{Detail, Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId, Timestamp, TreePath};

const SEEDS: u64 = 5;
/// Operations of one seed.
const OPERATIONS: usize = 120;
/// Power cuts of one seed.
const CUTS: usize = 60;
const ME: Caller = Caller { uid: 0, gid: 0 };

/// The visible tree: the content of each file by name.
type Files = BTreeMap<String, Vec<u8>>;

/// The knowledge at one moment of the record.
#[derive(Clone, Default)]
struct Known {
    files: Files,
    checkpoints: BTreeMap<String, Files>,
}

/// The states after each operation, and the place in the record at which each was acknowledged.
#[derive(Default)]
struct Story {
    /// After how many changes, and the state then.
    states: Vec<(usize, Known)>,
    /// The last synced state after so many changes: an index of `states`.
    synced: Vec<(usize, usize)>,
}

struct Work {
    base: PathBuf,
    /// Whether it is opened without syncs.
    volatile: bool,
    /// `None` while it is opened again.
    sandbox: Option<Arc<Sandbox>>,
    store: PathBuf,
    random: Random,
    now: Known,
    story: Story,
    record: Arc<Mutex<Vec<Change>>>,
    /// The edit clock: each operation is one edit.
    seconds: Arc<AtomicI64>,
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

impl Work {
    /// Returns the recorded changes and the knowledge about them; from here on it is another boot.
    fn end(self) -> (Vec<Change>, Story, Random) {
        failpoint::set_recorder(None);
        let changes = self.record.lock().unwrap().clone();
        drop(self.sandbox);
        failpoint::set_boot(Some(([2; 16], jailfs::internals::sys::clock::now())));
        (changes, self.story, self.random)
    }

    fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().unwrap()
    }

    /// The test's clock separates edits.
    fn open(&mut self) {
        let options = StoreOptions { volatile: self.volatile, ..StoreOptions::default() };
        let sandbox = Sandbox::create_or_open(&self.base, &self.store, &options).unwrap();
        let clock = Arc::clone(&self.seconds);
        let now = move || Timestamp { secs: clock.load(Ordering::SeqCst), nanos: 0 };
        sandbox.fs().set_edit_clock(Box::new(now));
        self.sandbox = Some(sandbox);
    }

    /// As after a kill: nothing is synced, and the machine goes on.
    fn reopen(&mut self) -> bool {
        self.sandbox = None;
        self.open();
        false
    }

    fn note(&mut self, synced: bool) {
        let at = self.record.lock().unwrap().len();
        self.story.states.push((at, self.now.clone()));
        if synced && !self.volatile {
            self.story.synced.push((at, self.story.states.len() - 1));
        }
    }

    fn id(&self, file: &str) -> Option<NodeId> {
        self.sandbox().fs().lookup(NodeId::ROOT, &name(file)).ok().map(|entry| entry.id)
    }

    fn make(&mut self, file: &str) -> NodeId {
        if let Some(id) = self.id(file) {
            return id;
        }
        let made =
            self.sandbox().fs().mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME).unwrap();
        self.now.files.insert(file.to_owned(), Vec::new());
        self.note(false);
        made.id
    }

    fn file(&mut self) -> String {
        format!("f{}", self.random.below(8))
    }

    fn bytes(&mut self) -> Vec<u8> {
        let len = [10, 300, 5000, 20_000][self.random.below(4) as usize];
        let first = self.random.next();
        (0..len).map(|n| (first.wrapping_add(n) % 251) as u8).collect()
    }

    fn operation(&mut self) {
        self.seconds.fetch_add(2, Ordering::SeqCst);
        let synced = match self.random.below(31) {
            0..=7 => self.write(),
            8..=10 => self.replace(),
            11 => self.unlink(),
            12..=14 => self.rename(),
            15..=18 => {
                self.sandbox().fs().sync().unwrap();
                true
            }
            19 | 20 => self.checkpoint(),
            21 => self.restore(),
            22 => self.gc(),
            23..=25 => self.undo(),
            26 | 27 => self.reopen(),
            28 | 29 => self.allocate(),
            _ => {
                self.sandbox().compact().unwrap();
                false
            }
        };
        self.note(synced);
    }

    /// Writes into a file, over its content or behind it. It never overwrites synced bytes, which
    /// may be old or new after a power cut.
    fn write(&mut self) -> bool {
        let (file, bytes) = (self.file(), self.bytes());
        let id = self.make(&file);
        let at = self.now.files.entry(file.clone()).or_default().len();
        self.sandbox().fs().write(id, at as u64, &bytes, false).unwrap();
        self.now.files.entry(file).or_default().extend(bytes);
        false
    }

    /// Allocates space behind the content of a file.
    fn allocate(&mut self) -> bool {
        let (file, len) = (self.file(), self.bytes().len());
        let id = self.make(&file);
        let content = self.now.files.entry(file).or_default();
        let at = content.len();
        content.resize(at + len, 0);
        self.sandbox().fs().fallocate(id, 0, at as u64, len as u64, false).unwrap();
        false
    }

    /// As an editor saves: a new file, then a rename over the old one.
    fn replace(&mut self) -> bool {
        let (file, bytes) = (self.file(), self.bytes());
        let id = self.make("staged");
        self.sandbox().fs().truncate(id, 0, false).unwrap();
        self.sandbox().fs().write(id, 0, &bytes, false).unwrap();
        self.now.files.insert("staged".to_owned(), bytes.clone());
        self.note(false);
        let (root, from, to) = (NodeId::ROOT, name("staged"), name(&file));
        self.sandbox().fs().rename(root, &from, root, &to, RenameMode::Replace, 1).unwrap();
        self.now.files.remove("staged");
        self.now.files.insert(file, bytes);
        false
    }

    fn unlink(&mut self) -> bool {
        let file = self.file();
        if self.now.files.remove(&file).is_some() {
            self.sandbox().fs().unlink(NodeId::ROOT, &name(&file)).unwrap();
        }
        false
    }

    fn rename(&mut self) -> bool {
        let (from, to) = (self.file(), self.file());
        if from != to
            && let Some(content) = self.now.files.remove(&from)
        {
            let root = NodeId::ROOT;
            self.sandbox()
                .fs()
                .rename(root, &name(&from), root, &name(&to), RenameMode::Replace, 1)
                .unwrap();
            self.now.files.insert(to, content);
        }
        false
    }

    fn checkpoint(&mut self) -> bool {
        let label = format!("c{}", self.record.lock().unwrap().len());
        let (name, message) = (Some(label.clone()), String::new());
        let request = match self.random.below(2) {
            0 => Request::Checkpoint { name, message },
            _ => Request::CheckpointEarly { name, message },
        };
        self.sandbox().handle(request).unwrap();
        // It waits until the checkpoint is on the disk.
        self.sandbox().handle(Request::Log).unwrap();
        self.now.checkpoints.insert(label, self.now.files.clone());
        true
    }

    fn restore(&mut self) -> bool {
        let labels: Vec<String> = self.now.checkpoints.keys().cloned().collect();
        if labels.is_empty() {
            return false;
        }
        let label = labels[self.random.below(labels.len() as u64) as usize].clone();
        self.sandbox()
            .handle(Request::Restore {
                detach_mounts: false,
                to: Rev::Name(label.clone()),
                paths: Vec::new(),
                dry_run: false,
            })
            .unwrap();
        self.now.files = self.now.checkpoints[&label].clone();
        true
    }

    /// Undoes an edit, if there is one, or redoes one.
    fn undo(&mut self) -> bool {
        let (file, forward) = (self.file(), self.random.below(3) == 0);
        let path = TreePath::parse(file.as_bytes()).unwrap();
        let request = if forward {
            Request::Redo { path, steps: 1 }
        } else {
            Request::Undo { path, steps: 1 + (self.random.below(2) as u32) }
        };
        if self.sandbox().handle(request).is_err() {
            return false;
        }
        match self.id(&file) {
            Some(id) => {
                let bytes = self
                    .sandbox()
                    .fs()
                    .read(id, 0, u64::MAX)
                    .unwrap()
                    .read(false)
                    .unwrap()
                    .unwrap();
                self.now.files.insert(file, bytes);
            }
            None => drop(self.now.files.remove(&file)),
        }
        true
    }

    fn gc(&mut self) -> bool {
        let keep = (self.random.below(3) == 0).then(|| self.random.below(4));
        let operations = self.random.below(4);
        let request = Request::Gc { operations, keep, max_store: None, dry_run: false };
        let Reply::Collected(collected) = self.sandbox().handle(request).unwrap() else {
            panic!("not a gc")
        };
        for dropped in collected.dropped {
            self.now.checkpoints.remove(&dropped.name.unwrap_or_default());
        }
        false
    }
}

fn read_all(sandbox: &Sandbox) -> Files {
    let state = sandbox.fs().state();
    let request = Request::Diff {
        from: Rev::Base,
        to: Rev::Now,
        paths: Vec::new(),
        detail: Detail::NameStatus,
    };
    let Reply::Diff(changes) = sandbox.handle(request).unwrap() else { panic!("not a diff") };
    let mut files = Files::new();
    for change in changes.to_vec().unwrap() {
        let found = state.resolve(&change.path).unwrap();
        let size = change.new_size.unwrap_or(0);
        let range = jailfs::types::ByteRange { start: 0, end: size };
        files.insert(
            change.path.to_string().trim_matches('\'').to_owned(),
            state.read_range(&found, range).unwrap(),
        );
    }
    files
}

fn read_known(sandbox: &Sandbox) -> Known {
    let mut known = Known { files: read_all(sandbox), checkpoints: BTreeMap::new() };
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!("not a log") };
    for checkpoint in log.into_iter().filter(|c| !c.automatic) {
        sandbox
            .handle(Request::Restore {
                detach_mounts: false,
                to: Rev::Id(checkpoint.id),
                paths: Vec::new(),
                dry_run: false,
            })
            .unwrap();
        known.checkpoints.insert(checkpoint.name.unwrap(), read_all(sandbox));
    }
    known
}

/// Compares the result of a power cut after `at` changes with the knowledge.
fn judge(story: &Story, at: usize, found: &Known, context: &str) {
    let synced =
        story.synced.iter().rev().find(|(done, _)| *done <= at).map_or(0, |(_, state)| *state);
    // The operation in flight may be there.
    let last =
        story.states.iter().position(|(done, _)| *done > at).unwrap_or(story.states.len() - 1);
    let possible = &story.states[synced..=last];
    assert!(
        possible.iter().any(|(_, known)| known.files == found.files),
        "{context}: the tree is none of the {} states since the last sync: {:?}",
        possible.len(),
        found.files.iter().map(|(name, bytes)| (name, bytes.len())).collect::<Vec<_>>()
    );
    for (label, files) in &found.checkpoints {
        let made = story.states.iter().find_map(|(_, known)| known.checkpoints.get(label));
        assert!(made == Some(files), "{context}: checkpoint {label} has other content");
    }
    for label in story.states[synced].1.checkpoints.keys() {
        let dropped = possible.iter().any(|(_, known)| !known.checkpoints.contains_key(label));
        assert!(
            dropped || found.checkpoints.contains_key(label),
            "{context}: checkpoint {label} is gone"
        );
    }
}

/// Reads the whole edit history: each entry is a former content. Returns their number.
fn judge_edits(sandbox: &Sandbox, ever: &BTreeSet<Vec<u8>>, context: &str) -> usize {
    let names = (0..8).map(|n| format!("f{n}")).chain(["staged".to_owned()]);
    let mut count = 0;
    for file in names {
        let path = TreePath::parse(file.as_bytes()).unwrap();
        for edit in sandbox.fs().history(&path) {
            let Some((state, found)) = sandbox.fs().before_edit(&path, edit.number) else {
                continue;
            };
            let read = state.read_all(&found);
            let bytes =
                read.unwrap_or_else(|error| panic!("{context}: {file}@{}: {error}", edit.number));
            assert!(ever.contains(&bytes), "{context}: {file}@{} never was", edit.number);
            count += 1;
        }
    }
    count
}

/// A new store, with the number of its directory, and of the changes that created it. Later changes
/// are recorded.
fn begin(seed: u64, dir: &Path) -> (Work, u64, usize) {
    let (base, store) = (dir.join("base"), dir.join("store"));
    std::fs::create_dir(&base).unwrap();
    failpoint::set_boot(Some(([1; 16], jailfs::internals::sys::clock::now())));
    let record: Arc<Mutex<Vec<Change>>> = Arc::default();
    let into = Arc::clone(&record);
    failpoint::set_recorder(Some(Box::new(move |change| into.lock().unwrap().push(change))));
    std::fs::create_dir(&store).unwrap();
    let root = std::os::unix::fs::MetadataExt::ino(&store.metadata().unwrap());
    drop(Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap());
    let made = record.lock().unwrap().len();
    let (now, story, seconds) = (Known::default(), Story::default(), Arc::default());
    let (sandbox, random, volatile) = (None, Random(seed), false);
    let mut work = Work { base, volatile, sandbox, store, random, now, story, record, seconds };
    work.open();
    work.note(true);
    (work, root, made)
}

fn run(seed: u64) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let (mut work, root, made) = begin(seed, dir.path());
    for _ in 0..OPERATIONS {
        work.operation();
    }
    let (changes, story, mut random) = work.end();
    let states = story.states.iter().flat_map(|(_, known)| known.files.values().cloned());
    let ever: BTreeSet<Vec<u8>> = states.chain([Vec::new()]).collect();
    let mut edits = 0;
    for cut in 0..CUTS {
        let at = made + random.below((changes.len() - made) as u64 + 1) as usize;
        let mut disk = Disk::default();
        changes[..at].iter().for_each(|change| disk.apply(change));
        let copy: PathBuf = dir.path().join(format!("cut{cut}"));
        disk.cut(&mut random, root, &copy);
        let context =
            format!("JAILFS_POWER_SEED={seed}, cut {cut}, after {at} of {} changes", changes.len());
        let sandbox = Sandbox::open(&copy).unwrap_or_else(|error| panic!("{context}: {error}"));
        edits += judge_edits(&sandbox, &ever, &context);
        let found = read_known(&sandbox);
        judge(&story, at, &found, &context);
        drop(sandbox);
        let checked = Sandbox::check_store(&copy, true).unwrap();
        assert!(checked.problems.is_empty(), "{context}: {:#?}", checked.problems);
        assert!(checked.warnings.is_empty(), "{context}: {:#?}", checked.warnings);
    }
    assert!(edits > CUTS / 4, "JAILFS_POWER_SEED={seed}: only {edits} edits survived {CUTS} cuts");
    CUTS
}

/// A store that is written with syncs, then without, then with syncs again. Returns how many power
/// cuts left a store that does not open.
fn run_volatile(seed: u64) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let (mut work, root, made) = begin(seed, dir.path());
    let now = |work: &Work| work.record.lock().unwrap().len();
    let mut reopened = Vec::new();
    for volatile in [false, true, false] {
        work.volatile = volatile;
        let begun = now(&work);
        work.reopen();
        reopened.push((begun, now(&work)));
        // Unsynced changes are synced when the store is opened with syncs.
        work.note(reopened.len() == 3);
        for _ in 0..OPERATIONS / 4 {
            work.operation();
        }
    }
    let (changes, story, mut random) = work.end();
    let (without, with) = (reopened[1], reopened[2]);
    let mut refused = 0;
    for cut in 0..CUTS {
        let at = made + random.below((changes.len() - made) as u64 + 1) as usize;
        let mut disk = Disk::default();
        changes[..at].iter().for_each(|change| disk.apply(change));
        let copy: PathBuf = dir.path().join(format!("cut{cut}"));
        disk.cut(&mut random, root, &copy);
        let context =
            format!("JAILFS_POWER_SEED={seed}, cut {cut}, after {at} of {} changes", changes.len());
        let sandbox = match Sandbox::open(&copy) {
            Ok(sandbox) => sandbox,
            Err(error) => {
                assert!(without.0 < at && at <= with.1, "{context}: {error}");
                assert!(error.reason.contains("--volatile"), "{context}: {error}");
                let problems = Sandbox::check_store(&copy, false).unwrap().problems;
                assert!(problems.iter().any(|problem| problem.contains("--volatile")), "{context}");
                refused += 1;
                continue;
            }
        };
        assert!(at <= without.1 || with.0 <= at, "{context}: it was opened");
        judge(&story, at, &read_known(&sandbox), &context);
        drop(sandbox);
        let checked = Sandbox::check_store(&copy, true).unwrap();
        assert!(checked.problems.is_empty(), "{context}: {:#?}", checked.problems);
    }
    refused
}

/// Held while changes are recorded, because that is global to the process.
static RECORDING: Mutex<()> = Mutex::new(());

#[test]
fn unsynced_changes_are_not_trusted_before_they_are_synced() {
    let _exclusive = RECORDING.lock().unwrap();
    let seeds = 1..=std::env::var("JAILFS_POWER_SEEDS").map_or(2, |text| text.parse().unwrap());
    let refused: usize = seeds.map(run_volatile).sum();
    assert!(refused > CUTS / 4, "only {refused} cuts were between");
}

#[test]
fn after_any_power_cut_the_store_opens_and_holds_what_was_synced() {
    let _exclusive = RECORDING.lock().unwrap();
    let number = |variable: &str| std::env::var(variable).ok().map(|text| text.parse().unwrap());
    let cuts: usize = match number("JAILFS_POWER_SEED") {
        Some(seed) => run(seed),
        None => (1..=number("JAILFS_POWER_SEEDS").unwrap_or(SEEDS)).map(run).sum(),
    };
    eprintln!("{cuts} power cuts");
}
