//! A mount with its writers, and the possible contents of every state that can be restored.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::files::Habit;
use crate::harness::{Live, shell};
use crate::head::{Head, Saved};
use crate::programs::{REPOSITORY, SQLITE};
use crate::rng::Rng;
use crate::span::{Span, State};
use crate::writer::{Kind, Writer, stamp};

/// Makes the base that the writers start from.
const BASE: &str = "
    mkdir -p small/deep big dirs/a/b/c dirs/e stream wal roll git one/deep two/a/b three
    for n in 1 2 3 4 5 6 7 8 9 10 11 12; do seq $n 300 > small/f$n; seq $n 90 > dirs/a/b/f$n
    seq $n > dirs/e/f$n; done
    ln small/f1 small/deep/also; ln -s f2 dirs/a/b/link; chmod 600 small/f3
    seq 60000 > big/one; seq 9000 > big/two
    for n in 1 2 3 4 5 6; do seq $n 200 > one/f$n; seq $n 80 > two/a/f$n; done
    ln one/f1 one/deep/also; ln -s f2 two/a/link; seq 7000 > three/one
";

/// The writers of each head: the directory, what is in it, and whether it belongs to one fork.
const KINDS: [(&str, Kind, bool); 10] = [
    ("small", Kind::Files(Habit::Small), false),
    ("big", Kind::Files(Habit::Big), false),
    ("dirs", Kind::Files(Habit::Dirs), false),
    ("stream", Kind::Stream, false),
    ("git", Kind::Git, false),
    ("wal", Kind::Sqlite { mode: "WAL", synchronous: "NORMAL" }, false),
    ("roll", Kind::Sqlite { mode: "DELETE", synchronous: "FULL" }, false),
    ("one", Kind::Files(Habit::Small), true),
    ("two", Kind::Files(Habit::Dirs), true),
    ("three", Kind::Files(Habit::Big), true),
];

/// The writers of a head.
pub fn writers(seed: u64) -> Vec<Arc<Writer>> {
    let seeds = (0..).map(|at| seed.wrapping_mul(31).wrapping_add(at));
    KINDS.iter().zip(seeds).map(|(kind, seed)| Arc::new(Writer::new(*kind, seed))).collect()
}

/// A checkpoint.
#[derive(Clone)]
pub struct Checkpoint {
    pub id: u64,
    /// The head that made it, and when.
    pub head: String,
    pub made: u64,
    pub name: String,
    pub saved: Saved,
}

pub struct World {
    /// The first head, and its forks. They are unmounted before it.
    pub heads: Vec<Head>,
    pub live: Live,
    pub rng: Rng,
    pub checkpoints: Vec<Checkpoint>,
    /// Operations of the first head whose states can be restored.
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
        std::fs::create_dir(live.outside().join("forks")).unwrap();
        let (name, at) = ("main".to_owned(), live.mnt.clone());
        let main = Head { name, at, writers: writers(seed), fork: None };
        let mut world = World {
            heads: vec![main],
            live,
            rng: Rng::new(seed),
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
        let found = world.read(0, true);
        world.heads[0].go_on(found.clone());
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

    /// The data in the mount of a head.
    pub fn read(&self, head: usize, all: bool) -> Vec<State> {
        self.heads[head].read(&self.live.outside().join("read"), all)
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
        let mut child = command.current_dir("/").stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(delay);
        if let Some(status) = child.try_wait().unwrap() {
            let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
            // A client whose fork was made when the daemon was killed starts a daemon for it.
            assert!(
                said.contains("its sandbox is mounted"),
                "it ended by itself, {status}: {said}"
            );
            return;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        self.kills += 1;
        self.count("of a start");
    }

    /// Keeps the writers' directories from growing for ever.
    pub fn begin_anew_what_is_long(&self) {
        for head in self.heads.iter().filter(|head| head.is_ready()) {
            begin_anew_what_is_long(head);
        }
    }
}

fn begin_anew_what_is_long(head: &Head) {
    for at in (0..head.writers.len()).filter(|at| head.has_running(*at)) {
        let writer = &head.writers[at];
        let dir = head.at.join(writer.name);
        match (writer.kind, writer.now()) {
            (Kind::Stream, State::Numbers(numbers)) if numbers.len() > 600 => {
                numbers
                    .iter()
                    .for_each(|number| std::fs::remove_file(dir.join(number.to_string())).unwrap());
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
