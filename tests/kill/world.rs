//! A mount with its writers, and the possible contents of every state that can be restored.

use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::files::Habit;
use crate::harness::{Live, shell};
use crate::programs::{REPOSITORY, SQLITE};
use crate::rng::Rng;
use crate::span::{Span, State};
use crate::writer::{Kind, Writer, stamp};

/// Makes the base that the writers start from.
const BASE: &str = "
    mkdir -p small/deep big dirs/a/b/c dirs/e stream wal roll git
    for n in 1 2 3 4 5 6 7 8 9 10 11 12; do seq $n 300 > small/f$n; seq $n 90 > dirs/a/b/f$n
    seq $n > dirs/e/f$n; done
    ln small/f1 small/deep/also; ln -s f2 dirs/a/b/link; chmod 600 small/f3
    seq 60000 > big/one; seq 9000 > big/two
";

/// One state of all writers. Each may be anywhere in its span.
pub type Saved = Vec<Span>;

/// A checkpoint.
pub struct Checkpoint {
    pub id: u64,
    pub name: String,
    pub saved: Saved,
}

pub struct World {
    pub live: Live,
    pub rng: Rng,
    pub writers: Vec<Arc<Writer>>,
    pub checkpoints: Vec<Checkpoint>,
    /// Operations whose states can be restored.
    pub operations: BTreeMap<u64, Saved>,
    /// The state of the base.
    pub base: Saved,
    /// The base before the last apply, if it is known.
    pub before_apply: Option<Saved>,
    /// Whether the base may have changed since it was last read.
    pub base_is_new: bool,
    pub kills: u64,
    /// The actions so far.
    pub log: Vec<String>,
    counts: BTreeMap<&'static str, u64>,
    began: Instant,
}

impl World {
    pub fn new(seed: u64, kills: u64) -> World {
        let limit = Duration::from_secs(120 + 12 * kills);
        let databases =
            format!("for db in wal roll; do python3 -I -S -c '{SQLITE}' make $db/db; done");
        let mut live =
            Live::with_limit(&format!("{BASE}{databases}\ncd git{REPOSITORY}"), &[], limit);
        live.applied = true;
        let kinds = [
            ("small", Kind::Files(Habit::Small)),
            ("big", Kind::Files(Habit::Big)),
            ("dirs", Kind::Files(Habit::Dirs)),
            ("stream", Kind::Stream),
            ("git", Kind::Git),
            ("wal", Kind::Sqlite { mode: "WAL", synchronous: "NORMAL" }),
            ("roll", Kind::Sqlite { mode: "DELETE", synchronous: "FULL" }),
        ];
        let writer = |(at, (name, kind)): (usize, &(&'static str, Kind))| {
            Arc::new(Writer::new(name, *kind, seed.wrapping_mul(31).wrapping_add(at as u64)))
        };
        let writers: Vec<Arc<Writer>> = kinds.iter().enumerate().map(writer).collect();
        let mut world = World {
            live,
            rng: Rng::new(seed),
            writers,
            checkpoints: Vec::new(),
            operations: BTreeMap::new(),
            base: Vec::new(),
            before_apply: None,
            base_is_new: false,
            kills: 0,
            log: Vec::new(),
            counts: BTreeMap::new(),
            began: Instant::now(),
        };
        let found = world.read();
        for (writer, state) in world.writers.iter().zip(&found) {
            writer.set(state.clone());
        }
        world.base = found.into_iter().map(Span::exactly).collect();
        world
    }

    pub fn note(&mut self, line: String) {
        self.log.push(line);
    }

    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    pub fn figures(&self) -> String {
        let seconds = self.began.elapsed().as_secs();
        let counts: Vec<_> =
            self.counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
        format!(
            "{} kills in {seconds} s: {}; {} operations",
            self.kills,
            counts.join(", "),
            stamp()
        )
    }

    /// Keeps all directories for the analysis of a failure.
    pub fn keep(&self) {
        if std::env::var_os("JAILFS_KILL_KEEP").is_some() {
            let kept = std::env::temp_dir().join(format!("jailfs-kill-{}", std::process::id()));
            let mut copy = Command::new("cp");
            copy.arg("-a").args([&self.live.store, &self.live.base]).arg(&kept);
            std::fs::create_dir_all(&kept).unwrap();
            eprintln!("store and base are kept in {} ({:?})", kept.display(), copy.status());
        }
    }

    /// The data in the mount.
    pub fn read(&self) -> Vec<State> {
        let root = &self.live.mnt;
        let read = |writer: &Writer| {
            writer.read(root, None).unwrap_or_else(|error| panic!("{}: {error}", writer.name))
        };
        // The programs are slow, so they run in parallel.
        std::thread::scope(|scope| {
            let readers: Vec<_> =
                self.writers.iter().map(|writer| scope.spawn(move || read(writer))).collect();
            readers.into_iter().map(|reader| reader.join().unwrap()).collect()
        })
    }

    /// The position of each writer.
    pub fn marks(&self) -> Vec<usize> {
        self.writers.iter().map(|writer| writer.acked()).collect()
    }

    /// The possible data since `marks` were taken.
    pub fn since(&self, marks: &[usize]) -> Saved {
        self.writers.iter().zip(marks).map(|(writer, from)| writer.span(*from)).collect()
    }

    /// The states of a saved one that are there.
    pub fn settle(&self, saved: &Saved, found: &[State]) -> Result<Vec<State>, String> {
        let settle = |at: usize| {
            saved[at].settle(&found[at]).map_err(|why| format!("{}: {why}", self.writers[at].name))
        };
        (0..saved.len()).map(settle).collect()
    }

    /// Continues from the found data.
    pub fn go_on(&self, states: Vec<State>) {
        for (writer, state) in self.writers.iter().zip(states) {
            writer.set(state);
        }
    }

    /// Runs the program; it must not fail here.
    pub fn jailfs(&self, words: &[&str]) -> Output {
        self.live.try_jailfs(words)
    }

    /// Starts the daemon and kills it before, while or after it mounts.
    pub fn kill_a_start(&mut self) {
        let delay = Duration::from_micros(self.rng.below(90_000));
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command
            .args(["mount", "-f"])
            .args([&self.live.base, &self.live.mnt])
            .arg("--store")
            .arg(&self.live.store);
        let mut child = command.current_dir("/").stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(delay);
        let alive = child.try_wait().unwrap().is_none();
        assert!(alive, "it ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        self.kills += 1;
        self.count("of a start");
    }

    /// Keeps the writers' directories from growing for ever.
    pub fn begin_anew_what_is_long(&self) {
        for writer in &self.writers {
            let dir = self.live.mnt.join(writer.name);
            match (writer.kind, writer.span(0).start) {
                (Kind::Stream, State::Numbers(numbers)) if numbers.len() > 600 => {
                    numbers.iter().for_each(|number| {
                        std::fs::remove_file(dir.join(number.to_string())).unwrap()
                    });
                    writer.set(State::Numbers(Default::default()));
                }
                (Kind::Git, State::Lines(lines)) if lines.len() > 60 => {
                    shell(&dir, "rm -rf .git *");
                    shell(&dir, REPOSITORY);
                    writer.set(State::Lines(vec!["first".to_owned()]));
                }
                _ => {}
            }
        }
    }
}
