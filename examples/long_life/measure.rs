//! Measures a daemon and its store.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use jailfs::error::{Attempt, Error, Kind, Result};

use crate::client;
use crate::load::Load;

/// The durations of an operation.
#[derive(Default)]
pub struct Each(Vec<Duration>);

impl Each {
    pub fn take<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let done = work()?;
        self.0.push(start.elapsed());
        Ok(done)
    }
}

/// The durations of the verbs since the last row.
#[derive(Default)]
pub struct Times {
    pub checkpoint: Each,
    pub restore: Each,
    pub apply: Each,
    pub gc: Each,
}

/// The median and the longest, in units of so many nanoseconds.
struct Spread(f64, f64);

impl Spread {
    fn of(mut all: Vec<Duration>, unit: f64) -> Spread {
        all.sort_unstable();
        let at =
            |index: usize| all.get(index).map_or(f64::NAN, |took| took.as_nanos() as f64 / unit);
        Spread(at(all.len() / 2), at(all.len().saturating_sub(1)))
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_nan() { f.pad("-") } else { f.pad(&format!("{:.1}/{:.0}", self.0, self.1)) }
    }
}

/// The figures of a row.
pub struct Figures {
    minutes: f64,
    rss: u64,
    open: usize,
    layers: usize,
    packs: (usize, u64),
    store: u64,
    journals: u64,
    indexes: u64,
    logs: (u64, u64),
    mounting: f64,
    done: u64,
    missed: u64,
    small: Spread,
    commit: Spread,
    checkpoint: Spread,
    restore: Spread,
    apply: Spread,
    gc: Spread,
}

const MS: f64 = 1e6;

impl Figures {
    /// The names of the columns.
    pub const HEAD: &str = "   min  rss MiB  fds  layers  packs KiB  store MiB  journals KiB  \
        indexes KiB  heads.log B  identities B  mount ms       ops  missed  small us p50/max  \
        commit ms  checkpoint ms    restore ms      apply ms         gc ms";

    /// Takes all figures.
    pub fn take(
        since: Duration,
        store: &Path,
        load: &Load,
        times: &mut Times,
        mounting: f64,
    ) -> Result<Figures> {
        let pid = client(store)?.greeting().pid;
        let mut figures = Figures {
            minutes: since.as_secs_f64() / 60.0,
            rss: resident(pid)?,
            open: fs::read_dir(format!("/proc/{pid}/fd")).attempt(|| "count open files")?.count(),
            layers: 0,
            packs: (0, 0),
            store: 0,
            journals: 0,
            indexes: 0,
            logs: (size(&store.join("heads.log")), size(&store.join("identities"))),
            mounting,
            done: load.done.swap(0, Ordering::Relaxed),
            missed: load.missed.swap(0, Ordering::Relaxed),
            small: Spread::of(taken(&load.small), 1e3),
            commit: Spread::of(taken(&load.commits), MS),
            checkpoint: Spread::of(std::mem::take(&mut times.checkpoint.0), MS),
            restore: Spread::of(std::mem::take(&mut times.restore.0), MS),
            apply: Spread::of(std::mem::take(&mut times.apply.0), MS),
            gc: Spread::of(std::mem::take(&mut times.gc.0), MS),
        };
        for layer in fs::read_dir(store.join("layers")).attempt(|| "list the layers")?.flatten() {
            figures.layers += 1;
            figures.journals += size(&layer.path().join("journal"));
            figures.indexes += size(&layer.path().join("index"));
        }
        for pack in fs::read_dir(store.join("archive")).into_iter().flatten().flatten() {
            figures.packs.0 += 1;
            figures.packs.1 += size(&pack.path());
        }
        figures.store = blocks(store);
        Ok(figures)
    }
}

/// Bytes of all journals of a store.
///
/// # Errors
/// When the layers cannot be listed.
pub fn journals(store: &Path) -> Result<u64> {
    let layers = fs::read_dir(store.join("layers")).attempt(|| "list the layers")?;
    Ok(layers.flatten().map(|layer| size(&layer.path().join("journal"))).sum())
}

fn taken(times: &std::sync::Mutex<Vec<Duration>>) -> Vec<Duration> {
    std::mem::take(&mut *times.lock().unwrap_or_else(PoisonError::into_inner))
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |about| about.len())
}

/// Bytes on disk below a path.
fn blocks(path: &Path) -> u64 {
    let own = fs::symlink_metadata(path).map_or(0, |about| about.blocks() * 512);
    let below =
        fs::read_dir(path).into_iter().flatten().flatten().map(|entry| blocks(&entry.path()));
    own + if path.is_dir() { below.sum() } else { 0 }
}

/// Bytes of memory that a process holds.
fn resident(pid: u32) -> Result<u64> {
    let attempt = || format!("read the memory of process {pid}");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).attempt(attempt)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024)
        .ok_or_else(|| Error::new(Kind::Failed, attempt(), "there is no VmRSS"))
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{:6.1}  {:7.1}  {:3}  {:6}  ",
            self.minutes,
            mib(self.rss),
            self.open,
            self.layers
        )?;
        write!(f, "{:9}  ", format!("{}/{}", self.packs.0, self.packs.1 >> 10))?;
        write!(
            f,
            "{:9.1}  {:12}  {:11}  ",
            mib(self.store),
            self.journals >> 10,
            self.indexes >> 10
        )?;
        write!(f, "{:11}  {:12}  {:8.1}  ", self.logs.0, self.logs.1, self.mounting)?;
        write!(f, "{:8}  {:6}  {:>16}  {:>9}  ", self.done, self.missed, self.small, self.commit)?;
        write!(
            f,
            "{:>13}  {:>12}  {:>12}  {:>12}",
            self.checkpoint, self.restore, self.apply, self.gc
        )
    }
}
