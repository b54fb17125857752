//! A day of work in an hour: writers of several kinds in a mount, a checkpoint every second,
//! restores in between, applies, and a gc that keeps the last checkpoints. Each row shows what the
//! daemon and its store take at that time. A figure that grows while the tree does not is a leak.
//!
//! ```sh
//! cargo run --release --example long_life -- --minutes 60
//! ```
//!
//! * `--keep N`: so many checkpoints are kept (60; 0 for all and no gc).
//! * `--checkpoints no`: no checkpoint, restore, apply or gc, so one journal takes everything. At
//!   the end its length is compared with what a checkpoint makes of it.
//! * `--seed N` chooses the load, and `--rows N` how many rows there are.
//!
//! The daemon is this program itself, in a process of its own. At each row the writers pause while
//! the store is copied. The copy is mounted, to see how long that takes.

#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "an example prints its result, and programs in a mount may make any call"
)]

mod load;
mod measure;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jailfs::error::{Attempt, Error, Kind, Result};
use jailfs::internals::control::{Client, connect};
use jailfs::internals::daemon::{self, Choice, Plan};
use jailfs::sandbox::{Reply, Request, Rev};

use load::{Load, Rng};
use measure::{Figures, Times};

const USAGE: &str =
    "usage: long_life [--minutes N] [--keep N] [--checkpoints yes|no] [--seed N] [--rows N]";
/// The most copies of a store in use, until one was not changed meanwhile.
const COPIES: u32 = 20;
/// The time between two checkpoints.
const SECOND: Duration = Duration::from_secs(1);
/// The number of checkpoints between two restores, two applies, and two collections.
const RESTORE: u64 = 15;
const APPLY: u64 = 100;
const GC: u64 = 60;

fn main() -> ExitCode {
    // The daemon is this program, started again, and so is its guard.
    let is_ours = |word: std::ffi::OsString| word == daemon::VERB || word == daemon::guard::VERB;
    if std::env::args_os().nth(1).is_some_and(is_ours) {
        return jailfs::main();
    }
    let Some(options) = Options::parse(std::env::args().skip(1)) else {
        println!("{USAGE}");
        return ExitCode::from(2);
    };
    match live(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("long_life: error: {error}");
            ExitCode::from(error.kind.exit_code())
        }
    }
}

struct Options {
    minutes: f64,
    keep: u64,
    checkpoints: bool,
    seed: u64,
    rows: u32,
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Option<Options> {
        let mut options = Options { minutes: 60.0, keep: 60, checkpoints: true, seed: 1, rows: 20 };
        while let Some(word) = words.next() {
            let value = words.next()?;
            match word.as_str() {
                "--minutes" => options.minutes = value.parse().ok()?,
                "--keep" => options.keep = value.parse().ok()?,
                "--checkpoints" if value == "yes" || value == "no" => {
                    options.checkpoints = value == "yes";
                }
                "--seed" => options.seed = value.parse().ok()?,
                "--rows" => options.rows = value.parse().ok().filter(|rows| *rows > 0)?,
                _ => return None,
            }
        }
        Some(options)
    }
}

/// The directories of the run.
struct Place {
    dir: tempfile::TempDir,
    base: PathBuf,
    mnt: PathBuf,
    store: PathBuf,
}

impl Place {
    fn new() -> Result<Place> {
        let dir = tempfile::tempdir().attempt(|| "make a directory")?;
        let path =
            jailfs::internals::sys::path::resolve(dir.path()).attempt(|| "find the directory")?;
        let (base, mnt, store) = (path.join("base"), path.join("mnt"), path.join("store"));
        for made in [&base, &mnt, &path.join("other")] {
            std::fs::create_dir(made).attempt(|| format!("make '{}'", made.display()))?;
        }
        Ok(Place { dir, base, mnt, store })
    }

    fn mount(&self) -> Result<()> {
        mount(&self.base, &self.mnt, &self.store)
    }

    /// Measures the time to mount a copy of the store, in milliseconds. Background work may remove
    /// a file while it is being copied; then the store is copied again.
    fn time_to_mount(&self) -> Result<f64> {
        let copy = self.dir.path().join("copy");
        for _ in 1..COPIES {
            if let Ok(took) = self.mount_copy(&copy) {
                return Ok(took);
            }
            std::fs::remove_dir_all(&copy).attempt(|| "remove the copy")?;
        }
        self.mount_copy(&copy)
    }

    fn mount_copy(&self, copy: &Path) -> Result<f64> {
        let other = self.dir.path().join("other");
        command(Command::new("cp").arg("-a").arg("--sparse=always").arg(&self.store).arg(copy))?;
        let start = Instant::now();
        mount(&self.base, &other, copy)?;
        let took = start.elapsed().as_secs_f64() * 1e3;
        umount(copy)?;
        std::fs::remove_dir_all(copy).attempt(|| "remove the copy")?;
        Ok(took)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for mnt in [&self.mnt, &self.dir.path().join("other")] {
            // A mount that is over already cannot be unmounted.
            drop(jailfs::internals::sys::mount::unmount(mnt, true));
        }
    }
}

fn mount(base: &Path, mnt: &Path, store: &Path) -> Result<()> {
    daemon::background(&Plan {
        base: base.to_owned(),
        mount_point: mnt.to_owned(),
        head: "main".to_owned(),
        store: store.to_owned(),
        choice: Choice::default(),
    })
}

fn umount(store: &Path) -> Result<()> {
    let mut client = client(store)?;
    client.call(&Request::Unmount)?;
    client.wait_for_end(Duration::from_secs(60));
    Ok(())
}

fn client(store: &Path) -> Result<Client> {
    let missing = || Error::new(Kind::NoStore, "talk to the daemon", "there is none");
    connect(store)?.ok_or_else(missing)
}

fn command(command: &mut Command) -> Result<()> {
    let output = command.output().attempt(|| format!("run {command:?}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::new(Kind::Failed, format!("run {command:?}"), said))
}

fn live(options: &Options) -> Result<()> {
    let place = Place::new()?;
    load::fill(&place.base)?;
    place.mount()?;
    let load = Arc::new(Load::default());
    let writers = load::start(&load, &place.mnt, options.seed);
    let done = drive(&place, &load, options);
    load.end();
    for writer in writers {
        if writer.join().is_err() {
            return Err(Error::new(Kind::Failed, "join a writer", "it panicked"));
        }
    }
    done?;
    umount(&place.store)
}

/// Makes a checkpoint a second, and the restores, applies and collections.
fn drive(place: &Place, load: &Load, options: &Options) -> Result<()> {
    let mut rng = Rng::new(options.seed);
    let mut times = Times::default();
    let start = Instant::now();
    let all = Duration::from_secs_f64(options.minutes * 60.0);
    let row = all / options.rows;
    println!("{}", Figures::HEAD);
    let mut next_row = Duration::ZERO;
    let mut count = 0;
    loop {
        if start.elapsed() >= next_row {
            let mounting = load.paused(|| place.time_to_mount())?;
            println!(
                "{}",
                Figures::take(start.elapsed(), &place.store, load, &mut times, mounting)?
            );
            next_row += row;
        }
        if start.elapsed() >= all {
            return if options.checkpoints { Ok(()) } else { compare_journal(place, load) };
        }
        let second = Instant::now();
        count += 1;
        if options.checkpoints {
            turn(place, load, options, &mut times, (&mut rng, count))?;
        }
        if let Some(rest) = SECOND.checked_sub(second.elapsed()) {
            std::thread::sleep(rest);
        }
    }
}

/// Compares the journal with the compacted form of the same layer, which a checkpoint makes.
fn compare_journal(place: &Place, load: &Load) -> Result<()> {
    load.paused(|| {
        let long = measure::journals(&place.store)?;
        let name = Request::Checkpoint { name: None, message: String::new() };
        client(&place.store)?.call(&name)?;
        let until = Instant::now() + Duration::from_secs(60);
        let mut compacted = measure::journals(&place.store)?;
        while compacted >= long && Instant::now() < until {
            std::thread::sleep(SECOND);
            compacted = measure::journals(&place.store)?;
        }
        println!("the journal: {} KiB, compacted: {} KiB", long >> 10, compacted >> 10);
        Ok(())
    })
}

fn turn(
    place: &Place,
    load: &Load,
    options: &Options,
    times: &mut Times,
    (rng, count): (&mut Rng, u64),
) -> Result<()> {
    let ask = |request: Request| client(&place.store)?.call(&request);
    times.checkpoint.take(|| ask(Request::Checkpoint { name: None, message: String::new() }))?;
    if count.is_multiple_of(RESTORE) {
        let back = 1 + rng.below(options.keep.clamp(1, 20)) as u32;
        // git and the other writers hold files across operations. Here they are between two of
        // them.
        load.paused(|| {
            times.restore.take(|| {
                ask(Request::Restore {
                    detach_mounts: false,
                    to: Rev::Back(back),
                    paths: Vec::new(),
                    dry_run: false,
                })
            })
        })?;
    }
    if count.is_multiple_of(APPLY) {
        let apply = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: jailfs::sandbox::Consent::ALL,
        };
        let Reply::Applied(applied) = times.apply.take(|| ask(apply))? else {
            return Err(Error::new(Kind::Failed, "apply", "an answer to something else"));
        };
        if let Some((path, why)) = applied.conflicts.first() {
            return Err(Error::new(Kind::Conflict, format!("apply '{path}'"), why));
        }
    }
    if count.is_multiple_of(GC) && options.keep > 0 {
        let gc = Request::Gc {
            operations: 100,
            keep: Some(options.keep),
            max_store: None,
            dry_run: false,
        };
        times.gc.take(|| ask(gc))?;
    }
    Ok(())
}
