//! Power cuts while forks are made, dropped, merged and picked. The cuts come at every change of
//! the store by these operations, or at one in so many of them. Afterwards each head exists or not
//! as it was acknowledged, shows at least what was synced in it, and works.

use std::ops::Range;

use jailfs::sandbox::MergeTerms;

use super::*;

const SEEDS: u64 = 2;
const OPERATIONS: usize = 90;
/// About so many cuts of one seed.
const CUTS: usize = 70;
/// The names of the forks. They are used again.
const FORKS: [&str; 3] = ["a", "b", "c"];
const MAIN: &str = "main";

/// The states of a head after each operation; none while there is no such head.
#[derive(Default)]
struct Line {
    /// After how many changes, and the state then.
    states: Vec<(usize, Option<Files>)>,
    /// The last synced state after so many changes: an index of `states`.
    synced: Vec<(usize, usize)>,
}

/// An open store with its heads.
struct Heads {
    base: PathBuf,
    store: PathBuf,
    /// `main` is among them. Another head is not open before it is used.
    open: BTreeMap<String, Arc<Sandbox>>,
    now: BTreeMap<String, Files>,
    lines: BTreeMap<String, Line>,
    /// The number of changes after which each checkpoint was there, and its content.
    checkpoints: BTreeMap<String, (usize, Files)>,
    /// The changes by operations on heads.
    critical: Vec<Range<usize>>,
    random: Random,
    record: Arc<Mutex<Vec<Change>>>,
}

impl Heads {
    fn at(&self) -> usize {
        self.record.lock().unwrap().len()
    }

    fn head(&mut self, head: &str) -> Arc<Sandbox> {
        let (base, store) = (&self.base, &self.store);
        let main = self.open.entry(MAIN.to_owned()).or_insert_with(|| {
            Sandbox::create_or_open(base, store, &StoreOptions::default()).unwrap()
        });
        let main = Arc::clone(main);
        let open = self.open.entry(head.to_owned());
        Arc::clone(open.or_insert_with(|| main.head(head).unwrap()))
    }

    fn main(&mut self) -> Arc<Sandbox> {
        self.head(MAIN)
    }

    /// Notes the state of a head after an operation.
    fn note(&mut self, head: &str, is_synced: bool) {
        let at = self.at();
        let line = self.lines.entry(head.to_owned()).or_default();
        line.states.push((at, self.now.get(head).cloned()));
        if is_synced {
            line.synced.push((at, line.states.len() - 1));
        }
    }

    /// Some head that exists.
    fn some(&mut self) -> String {
        let heads: Vec<&String> = self.now.keys().collect();
        heads[self.random.below(heads.len() as u64) as usize].clone()
    }

    /// Some fork that exists, or not.
    fn some_fork(&mut self, exists: bool) -> Option<String> {
        let is_right = |name: &&&str| self.now.contains_key(**name) == exists;
        let names: Vec<&str> = FORKS.iter().filter(is_right).copied().collect();
        let at = self.random.below(names.len().max(1) as u64) as usize;
        names.get(at).map(|name| (*name).to_owned())
    }

    fn operation(&mut self) {
        let head = self.some();
        let begun = self.at();
        match self.random.below(22) {
            0..7 => return self.write(&head),
            7 | 8 => return self.unlink(&head),
            9 => {
                self.head(&head).fs().sync().unwrap();
                return self.note(&head, true);
            }
            10 => return self.checkpoint(&head),
            11 => return self.housekeeping(),
            12 => return self.open.clear(),
            13 => self.restore(&head),
            14..17 => self.fork(&head),
            17 => self.drop_one(),
            18..21 => self.merge(&head),
            _ => self.pick(),
        }
        self.critical.push(begun..self.at());
    }

    fn write(&mut self, head: &str) {
        let file = format!("f{}", self.random.below(6));
        let len = [10, 300, 9000][self.random.below(3) as usize];
        let first = self.random.next();
        let bytes: Vec<u8> = (0..len).map(|n| (first.wrapping_add(n) % 251) as u8).collect();
        let sandbox = self.head(head);
        let (fs, named) = (sandbox.fs(), name(&file));
        let id = match fs.lookup(NodeId::ROOT, &named) {
            Ok(entry) => entry.id,
            Err(_) => {
                let made = fs.mknod(NodeId::ROOT, &named, 0o100_644, 0, 0, ME).unwrap().id;
                self.now.entry(head.to_owned()).or_default().insert(file.clone(), Vec::new());
                self.note(head, false);
                made
            }
        };
        let content = self.now.entry(head.to_owned()).or_default().entry(file).or_default();
        fs.write(id, content.len() as u64, &bytes, false).unwrap();
        content.extend(bytes);
        self.note(head, false);
    }

    fn unlink(&mut self, head: &str) {
        let file = format!("f{}", self.random.below(6));
        if self.now.get_mut(head).and_then(|files| files.remove(&file)).is_some() {
            self.head(head).fs().unlink(NodeId::ROOT, &name(&file)).unwrap();
            self.note(head, false);
        }
    }

    fn checkpoint(&mut self, head: &str) {
        let label = format!("c{}", self.at());
        let request = Request::Checkpoint { name: Some(label.clone()), message: String::new() };
        self.head(head).handle(request).unwrap();
        self.note(head, true);
        self.checkpoints.insert(label, (self.at(), self.now[head].clone()));
    }

    fn housekeeping(&mut self) {
        let main = self.main();
        let request = Request::Gc { operations: 2, keep: None, max_store: None, dry_run: false };
        main.handle(request).unwrap();
        main.compact().unwrap();
    }

    fn restore_to(&mut self, head: &str, to: Rev) {
        let request =
            Request::Restore { to, paths: Vec::new(), dry_run: false, detach_mounts: false };
        self.head(head).handle(request).unwrap();
    }

    /// Restores a checkpoint of any head.
    fn restore(&mut self, head: &str) {
        let labels: Vec<&String> = self.checkpoints.keys().collect();
        let at = self.random.below(labels.len().max(1) as u64) as usize;
        let Some(label) = labels.get(at).map(|label| (*label).clone()) else { return };
        self.restore_to(head, Rev::Name(label.clone()));
        self.now.insert(head.to_owned(), self.checkpoints[&label].1.clone());
        self.note(head, true);
    }

    /// Makes one fork or two.
    fn fork(&mut self, head: &str) {
        let Some(first) = self.some_fork(false) else { return };
        let many = self.random.below(2) as usize;
        let more = FORKS.iter().filter(|name| !self.now.contains_key(**name) && **name != first);
        let mut names = vec![first.clone()];
        names.extend(more.take(many).map(|name| (*name).to_owned()));
        self.head(head).handle(Request::Fork { names: names.clone(), from: None }).unwrap();
        for name in names {
            self.now.insert(name.clone(), self.now[head].clone());
            self.note(&name, true);
        }
        self.note(head, true);
    }

    fn drop_one(&mut self) {
        let Some(name) = self.some_fork(true) else { return };
        self.drop_fork(name);
    }

    fn drop_fork(&mut self, name: String) {
        self.open.remove(&name);
        self.main().handle(Request::DropFork { name: name.clone() }).unwrap();
        self.now.remove(&name);
        self.note(&name, true);
    }

    fn merge(&mut self, head: &str) {
        let other = self.some();
        if other == head {
            return;
        }
        let terms = MergeTerms { head: other.clone(), ..MergeTerms::default() };
        let into = self.head(head);
        let Reply::Merged(merged) = into.handle(Request::Merge(terms)).unwrap() else {
            panic!("not a merge")
        };
        if !merged.conflicts.is_empty() {
            return;
        }
        // Whether a merge is right is the subject of other tests.
        self.now.insert(head.to_owned(), read_all(&into));
        self.note(head, merged.before.is_some());
        self.note(&other, true);
    }

    /// The first head gets the tree of a fork, and the fork is dropped.
    fn pick(&mut self) {
        let Some(winner) = self.some_fork(true) else { return };
        self.restore_to(MAIN, Rev::Head { head: winner.clone(), back: 0 });
        self.note(&winner, true);
        self.now.insert(MAIN.to_owned(), self.now[&winner].clone());
        self.note(MAIN, true);
        self.drop_fork(winner);
    }
}

/// Compares a head after a power cut that came after `at` changes with what was acknowledged.
fn judge_head(line: &Line, at: usize, found: &Option<Files>, context: &str) {
    let synced =
        line.synced.iter().rev().find(|(done, _)| *done <= at).map_or(0, |(_, state)| *state);
    // The operation in flight may be there.
    let last = line.states.iter().position(|(done, _)| *done > at).unwrap_or(line.states.len() - 1);
    // Before the first note there was no such head.
    let absent = (!line.synced.iter().any(|(done, _)| *done <= at)).then_some(&None);
    let mut possible = line.states[synced..=last].iter().map(|(_, state)| state).chain(absent);
    let sizes = |files: &Option<Files>| {
        files.as_ref().map(|files| {
            files.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect::<Vec<_>>()
        })
    };
    assert!(
        possible.any(|state| state == found),
        "{context}: it is {:?}, and was {:?}",
        sizes(found),
        line.states[synced..=last].iter().map(|(_, state)| sizes(state)).collect::<Vec<_>>()
    );
}

/// A store after a power cut: each head is as it was acknowledged, and works.
fn judge_heads(heads: &Heads, store: &Path, at: usize, context: &str) {
    let main = Sandbox::open(store).unwrap_or_else(|error| panic!("{context}: {error}"));
    let Reply::Forks(listed) = main.handle(Request::Forks).unwrap() else { panic!("no list") };
    let mut open = Vec::new();
    for (head, line) in &heads.lines {
        let context = format!("{context}, head {head}");
        let exists = listed.iter().any(|fork| fork.name == *head);
        let sandbox =
            exists.then(|| main.head(head).unwrap_or_else(|error| panic!("{context}: {error}")));
        judge_head(line, at, &sandbox.as_deref().map(read_all), &context);
        open.extend(sandbox.map(|sandbox| (head, sandbox)));
    }
    let Reply::Log(log) = main.handle(Request::Log).unwrap() else { panic!("not a log") };
    for (label, (made, files)) in &heads.checkpoints {
        let Some(found) = log.iter().find(|one| one.name.as_deref() == Some(label)) else {
            assert!(*made > at, "{context}: checkpoint {label} is gone");
            continue;
        };
        let request = Request::Restore {
            to: Rev::Id(found.id),
            paths: Vec::new(),
            dry_run: false,
            detach_mounts: false,
        };
        main.handle(request).unwrap();
        assert_eq!(&read_all(&main), files, "{context}: checkpoint {label} has other content");
    }
    for (head, sandbox) in &open {
        let file = name("probe");
        let id = sandbox.fs().mknod(NodeId::ROOT, &file, 0o100_644, 0, 0, ME).unwrap().id;
        sandbox.fs().write(id, 0, head.as_bytes(), false).unwrap();
        let request = Request::Checkpoint { name: None, message: String::new() };
        let made = sandbox.handle(request);
        assert!(made.is_ok(), "{context}, head {head}: {made:?}");
    }
    drop((open, main));
    let checked = Sandbox::check_store(store, true).unwrap();
    assert!(checked.problems.is_empty(), "{context}: {:#?}", checked.problems);
    assert!(checked.warnings.is_empty(), "{context}: {:#?}", checked.warnings);
}

fn run_heads(seed: u64) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let (work, root, _) = begin(seed, dir.path());
    let Work { base, store, record, random, sandbox, .. } = work;
    drop(sandbox);
    let now = BTreeMap::from([(MAIN.to_owned(), Files::new())]);
    let mut heads = Heads {
        base,
        store,
        open: BTreeMap::new(),
        now,
        lines: BTreeMap::new(),
        checkpoints: BTreeMap::new(),
        critical: Vec::new(),
        random,
        record,
    };
    heads.note(MAIN, true);
    for _ in 0..OPERATIONS {
        heads.operation();
    }
    heads.open.clear();
    failpoint::set_recorder(None);
    failpoint::set_boot(Some(([2; 16], jailfs::internals::sys::clock::now())));
    let changes = heads.record.lock().unwrap().clone();
    // After each change, that before the first one included.
    let places: Vec<usize> = heads.critical.iter().cloned().flatten().collect();
    let step = places.len().div_ceil(CUTS);
    let mut random = Random(seed);
    let mut cuts = 0;
    for at in places.iter().copied().skip(seed as usize % step).step_by(step) {
        let mut disk = Disk::default();
        changes[..at].iter().for_each(|change| disk.apply(change));
        let copy = dir.path().join(format!("cut{cuts}"));
        disk.cut(&mut random, root, &copy);
        let context = format!("JAILFS_POWER_SEED={seed}, after {at} of {} changes", changes.len());
        judge_heads(&heads, &copy, at, &context);
        cuts += 1;
    }
    cuts
}

#[test]
fn after_any_power_cut_each_head_is_as_it_was_acknowledged() {
    let _exclusive = RECORDING.lock().unwrap();
    let number = |variable: &str| std::env::var(variable).ok().map(|text| text.parse().unwrap());
    let cuts: usize = match number("JAILFS_POWER_SEED") {
        Some(seed) => run_heads(seed),
        None => (1..=number("JAILFS_POWER_SEEDS").unwrap_or(SEEDS)).map(run_heads).sum(),
    };
    eprintln!("{cuts} power cuts during operations on heads");
}

/// A fork is used once and then lies idle, while `main` goes on. Its layer may have lost its end in
/// a power cut; the newer layers below the top of `main` may not.
#[test]
fn a_torn_layer_below_a_head_is_refused_however_old_a_fork_is() {
    let _exclusive = RECORDING.lock().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (base, store) = (dir.path().join("base"), dir.path().join("store"));
    std::fs::create_dir(&base).unwrap();
    failpoint::set_boot(Some(([1; 16], jailfs::internals::sys::clock::now())));
    let main = Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap();
    let make = |sandbox: &Sandbox, file: &str| {
        sandbox.fs().mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME).unwrap();
    };
    (0..8).for_each(|n| make(&main, &format!("first{n}")));
    main.handle(Request::Fork { names: vec!["old".to_owned()], from: None }).unwrap();
    let old = main.head("old").unwrap();
    (0..8).for_each(|n| make(&old, &format!("old{n}")));
    for round in 0..3 {
        (0..8).for_each(|n| make(&main, &format!("f{round}{n}")));
        let name = Some(format!("c{round}"));
        main.handle(Request::Checkpoint { name, message: String::new() }).unwrap();
    }
    (0..8).for_each(|n| make(&main, &format!("last{n}")));
    let Reply::Forks(heads) = main.handle(Request::Forks).unwrap() else { panic!("no list") };
    let tops: Vec<u32> = heads.iter().map(|head| head.top.0).collect();
    drop((main, old));
    failpoint::set_boot(Some(([2; 16], jailfs::internals::sys::clock::now())));
    let (mut refused, mut torn) = (0, 0);
    for entry in std::fs::read_dir(store.join("layers")).unwrap().map(Result::unwrap) {
        let layer: u32 = entry.file_name().to_str().unwrap().parse().unwrap();
        let cut = dir.path().join(format!("cut{layer}"));
        let copied = std::process::Command::new("cp").arg("-a").args([&store, &cut]).status();
        assert!(copied.unwrap().success());
        let journal = cut.join("layers").join(entry.file_name()).join("journal");
        let mut bytes = std::fs::read(&journal).unwrap();
        let at = bytes.len() / 2;
        bytes[at - 8..at].fill(0);
        std::fs::write(&journal, &bytes).unwrap();
        match Sandbox::open(&cut) {
            Ok(main) => {
                assert!(tops.contains(&layer), "layer {layer} is torn, and nothing says so");
                let old = main.head("old").unwrap();
                assert!(old.fs().lookup(NodeId::ROOT, &name("first7")).is_ok());
                torn += 1;
            }
            Err(error) => {
                let says = error.to_string();
                assert!(!tops.contains(&layer), "layer {layer}: {says}");
                let is_named = says.contains(&format!("{:08}/journal at offset", layer));
                assert!(is_named && !says.contains("seal"), "layer {layer}: {says}");
                refused += 1;
            }
        }
    }
    assert!(refused == 4 && torn == 2, "{refused} layers were refused, {torn} were not");
}
