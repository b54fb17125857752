//! A writer in one directory of the mount, which records the operations that were acknowledged.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::files::{self, Habit, Tree};
use crate::head::Head;
use crate::programs;
use crate::rng::Rng;
use crate::span::{Op, Span, State};

/// The state that all writers of a mount share: whether they go on, and their errors.
#[derive(Default)]
pub struct Control {
    /// The writers finish their present operation and stop.
    pub stop: AtomicBool,
    /// The daemon is about to be killed, so errors are expected.
    pub killed: AtomicBool,
    /// While a writer holds this, no kill may come.
    pub undisturbed: Mutex<()>,
    failures: Mutex<Vec<String>>,
}

impl Control {
    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.is_killed()
    }

    pub fn is_killed(&self) -> bool {
        self.killed.load(Ordering::SeqCst)
    }

    /// Reports a failure, which is an error unless the daemon was killed.
    pub fn failed(&self, what: String) {
        if !self.is_killed() {
            self.failures.lock().unwrap().push(what);
            self.killed.store(true, Ordering::SeqCst);
        }
    }

    pub fn check(&self) {
        let failures = self.failures.lock().unwrap();
        assert!(failures.is_empty(), "writers failed without a kill: {failures:#?}");
    }
}

/// Running writers. Dropping this waits until all have stopped.
pub struct Working {
    control: Arc<Control>,
    threads: Vec<JoinHandle<()>>,
}

impl Working {
    pub fn start<'a>(
        heads: impl IntoIterator<Item = &'a Head>,
        which: impl Fn(&Head, usize) -> bool,
        control: &Arc<Control>,
    ) -> Working {
        control.stop.store(false, Ordering::SeqCst);
        let mut threads = Vec::new();
        for head in heads {
            for at in (0..head.writers.len()).filter(|at| which(head, *at)) {
                let (writer, mnt) = (Arc::clone(&head.writers[at]), head.at.clone());
                let control = Arc::clone(control);
                threads.push(std::thread::spawn(move || writer.work(&mnt, &control)));
            }
        }
        Working { control: Arc::clone(control), threads }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.control.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.control.failed("a writer panicked".to_owned());
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Files(Habit),
    /// Symlinks that are numbered by name: one call makes one, and needs no other.
    Stream,
    Git,
    Sqlite {
        mode: &'static str,
        synchronous: &'static str,
    },
}

/// The operations begun and acknowledged since a known state.
struct Journal {
    start: State,
    now: State,
    ops: Vec<Op>,
    acked: usize,
}

pub struct Writer {
    /// The writer's directory in the mount, and in the base.
    pub name: &'static str,
    pub kind: Kind,
    /// Whether the directory belongs to one fork.
    pub is_for_forks: bool,
    journal: Mutex<Journal>,
    rng: Mutex<Rng>,
}

/// Makes every operation unique.
static STAMP: AtomicU64 = AtomicU64::new(1);

pub fn stamp() -> u64 {
    STAMP.fetch_add(1, Ordering::SeqCst)
}

impl Writer {
    pub fn new((name, kind, is_for_forks): (&'static str, Kind, bool), seed: u64) -> Writer {
        let empty = match kind {
            Kind::Files(_) => State::Tree(Tree::default()),
            Kind::Stream => State::Numbers(Default::default()),
            Kind::Git | Kind::Sqlite { .. } => State::Lines(Vec::new()),
        };
        let journal = Journal { start: empty.clone(), now: empty, ops: Vec::new(), acked: 0 };
        let (journal, rng) = (Mutex::new(journal), Mutex::new(Rng::new(seed)));
        Writer { name, kind, is_for_forks, journal, rng }
    }

    /// Records that an operation begins.
    pub fn begin(&self, op: Op) {
        let mut journal = self.journal.lock().unwrap();
        journal.now.apply(&op);
        journal.ops.push(op);
    }

    /// Records that it was acknowledged.
    pub fn acknowledge(&self) {
        let mut journal = self.journal.lock().unwrap();
        journal.acked = journal.ops.len();
    }

    /// Sets the known state.
    pub fn set(&self, state: State) {
        let mut journal = self.journal.lock().unwrap();
        *journal = Journal { start: state.clone(), now: state, ops: Vec::new(), acked: 0 };
    }

    /// The number of acknowledged operations.
    pub fn acked(&self) -> usize {
        self.journal.lock().unwrap().acked
    }

    /// The possible states if at least so many operations were done.
    pub fn span(&self, from: usize) -> Span {
        let journal = self.journal.lock().unwrap();
        Span { start: journal.start.clone(), ops: journal.ops.clone(), from }
    }

    /// The state after all operations that were begun.
    pub fn now(&self) -> State {
        self.journal.lock().unwrap().now.clone()
    }

    pub fn lines(&self) -> Vec<String> {
        match self.now() {
            State::Lines(lines) => lines,
            State::Tree(_) | State::Numbers(_) => Vec::new(),
        }
    }

    /// Writes until it is told to stop, or the daemon is gone.
    pub fn work(&self, mnt: &Path, control: &Control) {
        let dir = mnt.join(self.name);
        match self.kind {
            Kind::Files(habit) => self.work_on_files(&dir, habit, control),
            Kind::Stream => self.work_on_stream(&dir, control),
            Kind::Git => programs::commit(self, &dir, control),
            Kind::Sqlite { mode, synchronous } => {
                programs::transact(self, &dir, (mode, synchronous), control)
            }
        }
    }

    fn work_on_files(&self, dir: &Path, habit: Habit, control: &Control) {
        let mut rng = self.rng.lock().unwrap();
        while !control.is_over() {
            let op = match &self.journal.lock().unwrap().now {
                State::Tree(tree) => habit.choose(&mut rng, tree, stamp()),
                state => panic!("{state:?}"),
            };
            self.begin(Op::File(op.clone()));
            match files::perform(dir, &op) {
                Ok(ino) => self.acknowledge_file(ino),
                Err(error) => {
                    let now = files::describe(dir, &op);
                    return control.failed(format!("{}: {op:?}: {error}; {now}", self.name));
                }
            }
            if rng.one_in(60)
                && let Err(error) = files::sync(dir, &op)
            {
                control.failed(format!("{}: sync after {op:?}: {error}", self.name));
            }
            if rng.one_in(3) {
                // A writer that never rests would starve the others.
                std::thread::sleep(std::time::Duration::from_micros(rng.below(1500)));
            }
        }
    }

    fn acknowledge_file(&self, number: u64) {
        let mut journal = self.journal.lock().unwrap();
        if let Some(Op::File(files::Op::Create(_, ino))) = journal.ops.last_mut() {
            *ino = number;
        }
        journal.acked = journal.ops.len();
    }

    fn work_on_stream(&self, dir: &Path, control: &Control) {
        let mut rng = self.rng.lock().unwrap();
        while !control.is_over() {
            let number = stamp();
            self.begin(Op::Number(number));
            match std::os::unix::fs::symlink(number.to_string(), dir.join(number.to_string())) {
                Ok(()) => self.acknowledge(),
                Err(error) => return control.failed(format!("{}: {number}: {error}", self.name)),
            }
            std::thread::sleep(std::time::Duration::from_micros(200 + rng.below(2000)));
        }
    }

    /// The data now. Outside the mount it is read from a copy, because reading may write.
    pub fn read(&self, root: &Path, scratch: Option<&Path>) -> Result<State, String> {
        let dir = root.join(self.name);
        match self.kind {
            Kind::Files(_) if scratch.is_some() => {
                Ok(State::Tree(Tree::read(&dir).without_numbers()))
            }
            Kind::Files(_) => {
                let tree = Tree::read(&dir);
                let wrong = tree.wrong_links();
                if wrong.is_empty() { Ok(State::Tree(tree)) } else { Err(wrong.join(", ")) }
            }
            Kind::Stream => Ok(State::Numbers(numbers(&dir))),
            Kind::Git => programs::read_commits(&self.copied(dir, scratch)).map(State::Lines),
            Kind::Sqlite { .. } => {
                programs::read_table(&self.copied(dir, scratch)).map(State::Lines)
            }
        }
    }

    fn copied(&self, dir: PathBuf, scratch: Option<&Path>) -> PathBuf {
        let Some(scratch) = scratch else { return dir };
        let copy = scratch.join(self.name);
        let script = "rm -rf \"$2\"; mkdir -p \"$(dirname \"$2\")\"; cp -a \"$1\" \"$2\"";
        let status = std::process::Command::new("sh")
            .args(["-ec", script, "sh"])
            .arg(&dir)
            .arg(&copy)
            .status();
        assert!(status.unwrap().success(), "copy {}", dir.display());
        copy
    }
}

fn numbers(dir: &Path) -> std::collections::BTreeSet<u64> {
    let entries =
        std::fs::read_dir(dir).unwrap_or_else(|error| panic!("list {}: {error}", dir.display()));
    entries
        .map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let text = std::fs::read_link(dir.join(&name)).unwrap();
            assert_eq!(text.to_str(), Some(name.as_str()), "a link is made whole");
            name.parse::<u64>().unwrap()
        })
        .collect()
}
