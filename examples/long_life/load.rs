//! The writers: small files, big files, renames of directories, and git. Their tree keeps about the
//! same size.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use std::sync::{Mutex, PoisonError, RwLock};

use jailfs::error::{Attempt, Result};

/// Random numbers, the same for the same seed (xorshift64*).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// From 0 to `end - 1`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) % end
    }
}

/// The counters that the writers and the measuring thread share.
#[derive(Default)]
pub struct Load {
    over: AtomicBool,
    /// Held by each writer during a step; held alone while they pause.
    between: RwLock<()>,
    /// Operations so far.
    pub done: AtomicU64,
    /// Operations that failed, because a restore removed their file.
    pub missed: AtomicU64,
    /// The durations of operations on small files since the last measurement.
    pub small: Mutex<Vec<Duration>>,
    /// The durations of commits.
    pub commits: Mutex<Vec<Duration>>,
}

impl Load {
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Runs `act` while no writer is in the middle of a step.
    pub fn paused<T>(&self, work: impl FnOnce() -> T) -> T {
        let _alone = self.between.write().unwrap_or_else(PoisonError::into_inner);
        work()
    }

    fn run(&self, pause: Duration, mut step: impl FnMut() -> io::Result<()>) {
        while !self.over.load(Ordering::Relaxed) {
            {
                let _working = self.between.read().unwrap_or_else(PoisonError::into_inner);
                let counter = if step().is_ok() { &self.done } else { &self.missed };
                counter.fetch_add(1, Ordering::Relaxed);
            }
            // This imitates a user at work; it is no benchmark.
            std::thread::sleep(pause);
        }
    }

    fn timed(
        &self,
        times: &Mutex<Vec<Duration>>,
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let start = Instant::now();
        work()?;
        times.lock().unwrap_or_else(PoisonError::into_inner).push(start.elapsed());
        Ok(())
    }
}

const SMALL: u64 = 2000;
const BIG: u64 = 8 << 20;

/// Fills a base.
pub fn fill(base: &Path) -> Result<()> {
    let attempt = || "fill the base";
    for dir in 0..20 {
        let path = base.join(format!("src/d{dir}"));
        fs::create_dir_all(&path).attempt(attempt)?;
        for file in 0..50 {
            fs::write(path.join(format!("f{file}.rs")), format!("fn f{file}() {{}}\n").repeat(40))
                .attempt(attempt)?;
        }
    }
    for dir in ["small", "big", "trees/a/b", "repo"] {
        fs::create_dir_all(base.join(dir)).attempt(attempt)?;
    }
    let init = "git init -q; git config user.name l; git config user.email l@l; \
        git config gc.auto 0; seq 100 > f; git add f; git commit -qm first";
    crate::command(Command::new("sh").args(["-ec", init]).current_dir(base.join("repo")))
}

/// Starts the writers.
pub fn start(load: &Arc<Load>, mnt: &Path, seed: u64) -> Vec<JoinHandle<()>> {
    type Writer = fn(&Load, &Path, Rng);
    let writers: [Writer; 4] = [small, big, trees, git];
    let begin = |(number, writer): (usize, &Writer)| {
        let (load, mnt, writer) = (Arc::clone(load), mnt.to_owned(), *writer);
        let rng = Rng::new(seed.wrapping_add(100 + number as u64));
        std::thread::spawn(move || writer(&load, &mnt, rng))
    };
    writers.iter().enumerate().map(begin).collect()
}

/// Files as a build makes them: written anew, moved over others, removed.
fn small(load: &Load, mnt: &Path, mut rng: Rng) {
    let dir = mnt.join("small");
    load.run(Duration::from_millis(2), || {
        let path = dir.join(format!("n{}", rng.below(SMALL)));
        let size = rng.below(20_000) as usize;
        load.timed(&load.small, || match rng.below(10) {
            0 => match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            },
            1..4 => {
                let temp = dir.join("temp");
                fs::write(&temp, vec![b'r'; size])?;
                fs::rename(&temp, &path)
            }
            4 => {
                let source = mnt.join(format!("src/d{}/f{}.rs", rng.below(20), rng.below(50)));
                OpenOptions::new()
                    .write(true)
                    .open(source)?
                    .write_all_at(b"// edited", rng.below(400))
            }
            _ => fs::write(&path, vec![b'w'; size]),
        })
    });
}

/// Logs and databases: appended to, overwritten in the middle, begun anew.
fn big(load: &Load, mnt: &Path, mut rng: Rng) {
    let dir = mnt.join("big");
    load.run(Duration::from_millis(20), || {
        let path = dir.join(format!("b{}", rng.below(4)));
        let mut file: File = OpenOptions::new().append(true).create(true).open(&path)?;
        let size = file.metadata()?.len();
        if size > BIG {
            return file.set_len(0);
        }
        file.write_all(&vec![b'a'; 40_000])?;
        let over = OpenOptions::new().write(true).open(&path)?;
        over.write_all_at(&[b'o'; 4096], rng.below(size + 1))?;
        if rng.below(50) == 0 { over.sync_all() } else { Ok(()) }
    });
}

/// Directories that are moved with their content.
fn trees(load: &Load, mnt: &Path, mut rng: Rng) {
    let dir = mnt.join("trees");
    load.run(Duration::from_millis(50), || {
        let (from, to) =
            (dir.join(format!("t{}", rng.below(6))), dir.join(format!("t{}", rng.below(6))));
        if from.exists() && !to.exists() {
            return fs::rename(from, to);
        }
        if rng.below(8) == 0 {
            return if from.exists() { fs::remove_dir_all(from) } else { Ok(()) };
        }
        fs::create_dir_all(from.join("x/y"))?;
        fs::write(from.join(format!("x/y/{}", rng.below(10))), b"in a tree")
    });
}

/// Commits; the repository begins anew when it has many.
fn git(load: &Load, mnt: &Path, mut rng: Rng) {
    let repo = mnt.join("repo");
    let mut commits = 0;
    load.run(Duration::from_millis(500), || {
        commits += 1;
        let script = if commits % 200 == 0 {
            "git checkout -q --orphan new; git commit -qm first; \
             git branch -D master main 2> /dev/null || true; git branch -m master; \
             git reflog expire --expire=now --all; git gc -q --prune=now"
                .to_owned()
        } else {
            format!(
                "seq {} > f{}; git add -A; git commit -qm {commits}",
                rng.below(1000),
                rng.below(30)
            )
        };
        // A checkpoint may have been made in the middle of a commit. Its restore brings back the
        // lock of a git process that is gone.
        let script = format!("rm -f .git/*.lock .git/refs/heads/*.lock; {script}");
        load.timed(&load.commits, || {
            let status =
                Command::new("sh").args(["-c", &script]).current_dir(&repo).output()?.status;
            if status.success() { Ok(()) } else { Err(io::Error::other("git failed")) }
        })
    });
}
