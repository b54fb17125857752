//! The mounts with their writers, and the possible contents of every state that can be restored.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::forks::{Dormant, Fork};
use crate::harness::Live;
use crate::head::{Head, SLOTS};
use crate::programs::{REPOSITORY, SQLITE};
use crate::rng::Rng;
use crate::span::Span;
use crate::writer::stamp;

/// Makes the base that the writers start from.
const BASE: &str = "
    mkdir -p small/deep big dirs/a/b/c dirs/e stream wal roll git one one-links two two-links
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
    /// The first head.
    pub main: Head,
    /// The mounted forks, one in each slot.
    pub forks: [Option<Fork>; 2],
    /// The forks that are not mounted.
    pub dormant: Vec<Dormant>,
    /// A fork that a kill may have made.
    pub maybe_new: Option<Dormant>,
    /// A fork that a kill may have dropped.
    pub maybe_gone: Option<String>,
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
        SLOTS.iter().for_each(|slot| {
            std::fs::create_dir_all(live.outside().join("forks").join(slot)).unwrap();
        });
        let main = Head::new("main".to_owned(), live.mnt.clone(), None, seed);
        let mut world = World {
            live,
            rng: Rng::new(seed),
            main,
            forks: [None, None],
            dormant: Vec::new(),
            maybe_new: None,
            maybe_gone: None,
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
        let found = world.main.read();
        world.main.go_on(found.clone());
        world.base = found.into_iter().map(Span::exactly).collect();
        world.fill();
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

    /// Runs the program in a mount.
    pub fn jailfs(&self, mnt: &Path, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("-C").arg(mnt).args(words).current_dir("/").output().unwrap()
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
}

impl Drop for World {
    fn drop(&mut self) {
        self.unmount_forks();
    }
}
