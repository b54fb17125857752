//! Power cuts of a whole disk while everything runs: programs, checkpoints, applies and garbage
//! collection.
//!
//! Base and store are on an ext4 in a file. Each cut is a reflink clone of that file
//! (ioctl_ficlone(2)): the disk as it was at one moment. Mounting the clone replays the ext4
//! journal, and jailfs opens the store on it. Then everything that was synced or acknowledged
//! before the clone began must be there, and everything that is there must be whole.
//!
//! A cut looks at all names, and reads a bounded part of the content: what is new, and samples of
//! the rest that differ from cut to cut. So its cost does not grow with the number of cuts.
//!
//! `JAILFS_CUTS=N` makes N cuts.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and prints its figures"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use harness::{Live, shell, text};

/// The number of cuts that take about twenty seconds in a debug build.
const CUTS: u64 = 6;
/// A cut reads the content of so many of the newest files of a directory,
const NEWEST_FILES: u64 = 200;
/// and of so many others.
const SAMPLED_FILES: u64 = 100;
/// It looks into so many of the newest checkpoints,
const NEWEST_CHECKPOINTS: usize = 4;
/// and into so many others.
const SAMPLED_CHECKPOINTS: usize = 4;
/// The number of checkpoints that garbage collection keeps.
const KEPT_CHECKPOINTS: usize = 40;

/// The outer filesystem can clone files. The inner one has base and store.
const DISK: &str = "
    truncate -s 24G ../outer.img; mkfs.xfs -q -m reflink=1 ../outer.img
    mkdir ../outer ../disk ../cut ../seen
    mkdir -m 700 ../store; mount -o loop ../outer.img ../outer
    truncate -s 8G ../outer/disk.img; mkfs.ext4 -q ../outer/disk.img
    mount -o loop ../outer/disk.img ../disk
    mkdir ../disk/base; mkdir -m 700 ../disk/store
    mount --bind ../disk/base $PWD; mount --bind ../disk/store ../store
    cd ../base; mkdir promises blocks; seq 50000 > blocks/of-the-base";

/// Mounts that are unmounted at the end in any case, the last one first.
struct Mounts(Vec<PathBuf>);

impl Drop for Mounts {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            drop(Command::new("umount").arg("-l").arg(path).output());
        }
    }
}

/// The promises so far, shared by all threads.
#[derive(Default)]
struct Promises {
    stop: AtomicBool,
    /// Files that were begun, and files whose fsync was acknowledged.
    begun: AtomicU64,
    synced: AtomicU64,
    /// Checkpoints that were acknowledged and that no garbage collection may have dropped: name,
    /// the number of files synced before the request, and begun after it.
    checkpoints: Mutex<Vec<(String, u64, u64)>>,
    /// Files that the base has for certain, because their apply was acknowledged.
    applied: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// Most files are small, so that the disk has room for many, and some have several extents.
fn content(number: u64) -> Vec<u8> {
    let line = format!("{number} is what this file says\n");
    let most = if number.is_multiple_of(16) { 900 } else { 40 };
    line.repeat(1 + usize::try_from(number * 37 % most).unwrap()).into_bytes()
}

impl Promises {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::SeqCst)
    }

    /// Creates one file after the other and syncs each.
    fn promise(&self, mnt: &Path) {
        while self.goes_on() {
            let number = self.begun.fetch_add(1, Ordering::SeqCst);
            let written =
                File::create(mnt.join(format!("promises/{number}"))).and_then(|mut file| {
                    file.write_all(&content(number)).and_then(|()| file.sync_all())
                });
            match written {
                Ok(()) => self.synced.store(number + 1, Ordering::SeqCst),
                Err(error) => return self.fail(format!("promise {number}: {error}")),
            }
            // Each cut lists all of them, so they must not become too many.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Overwrites, truncates and removes, unsynced.
    fn churn(&self, mnt: &Path) {
        for round in 0_u64.. {
            if !self.goes_on() {
                return;
            }
            let path = mnt.join(format!("blocks/{}", round % 40));
            let bytes = content(round);
            let done = match round % 11 {
                0 => std::fs::rename(&path, mnt.join(format!("blocks/{}", round % 7))),
                1 => File::options()
                    .create(true)
                    .append(true)
                    .open(mnt.join("blocks/of-the-base"))
                    .and_then(|mut f| {
                        // Each apply keeps what the base has of it, so it must not grow for ever.
                        if f.metadata()?.len() > 1 << 20 {
                            f.set_len(0)?;
                        }
                        f.write_all(&bytes)
                    }),
                _ => std::fs::write(&path, bytes),
            };
            if let Err(error) = done
                && error.kind() != std::io::ErrorKind::NotFound
            {
                return self.fail(format!("churn: {error}"));
            }
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    /// Makes checkpoints, applies and drops, one after the other.
    fn govern(&self, mnt: &Path) {
        for round in 0_u64.. {
            if !self.goes_on() {
                return;
            }
            let (name, before) = (format!("c{round}"), self.synced.load(Ordering::SeqCst));
            if !self.jailfs(mnt, &["checkpoint", &name]) {
                return;
            }
            let after = self.begun.load(Ordering::SeqCst);
            self.checkpoints.lock().unwrap().push((name, before, after));
            if round % 3 == 2 {
                let before = self.synced.load(Ordering::SeqCst);
                if !self.jailfs(mnt, &["apply"]) {
                    return;
                }
                self.applied.store(before, Ordering::SeqCst);
            }
            if round % 5 == 4 && !self.collect(mnt, round % 20 == 19) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Collects garbage, and on request drops old checkpoints.
    fn collect(&self, mnt: &Path, drops: bool) -> bool {
        let keep = KEPT_CHECKPOINTS.to_string();
        let mut words = vec!["gc", "--operations", "3"];
        if drops {
            words.extend(["--keep", &keep]);
            // From now on a cut may find them or not.
            let mut checkpoints = self.checkpoints.lock().unwrap();
            let old = checkpoints.len().saturating_sub(KEPT_CHECKPOINTS);
            checkpoints.drain(..old);
        }
        self.jailfs(mnt, &words)
    }

    fn jailfs(&self, mnt: &Path, words: &[&str]) -> bool {
        let output = Command::new(env!("CARGO_BIN_EXE_jailfs"))
            .arg("-C")
            .arg(mnt)
            .args(words)
            .output()
            .unwrap();
        if !output.status.success() {
            self.fail(format!("{words:?}: {}", text(&output)));
        }
        output.status.success()
    }

    fn fail(&self, what: String) {
        self.failures.lock().unwrap().push(what);
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// So many of the first `count` numbers, spread over all of them, others for each `cut`.
fn sample(count: u64, many: u64, cut: u64) -> impl Iterator<Item = u64> {
    let step = (count / many.max(1)).max(1);
    (0..count).skip((cut.wrapping_mul(0x9e37_79b9) % step) as usize).step_by(step as usize)
}

/// The files of a promise directory: their numbers start at 0 without gaps, and each that is read
/// is whole. The file that was being written, after all synced ones, may be incomplete.
fn count(dir: &Path, (synced, begun): (u64, u64), cut: u64) {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let names: Vec<u64> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| name(entry).to_str().unwrap().parse().unwrap())
        .collect();
    let found = names.len() as u64;
    assert!(
        (synced..=begun).contains(&found),
        "{}: {found} files of {synced} to {begun}",
        dir.display()
    );
    // As many numbers as files, all of them different, and none too large: there is no gap.
    assert!(names.iter().all(|number| *number < found), "{}: a gap in {names:?}", dir.display());
    let older = found.saturating_sub(NEWEST_FILES);
    for number in sample(older, SAMPLED_FILES, cut).chain(older..found) {
        let bytes = std::fs::read(dir.join(number.to_string())).unwrap();
        let wanted = content(number);
        let is_whole = if number < synced { bytes == wanted } else { wanted.starts_with(&bytes) };
        let differs = bytes.iter().zip(&wanted).position(|(is, wanted)| is != wanted);
        let (is, len) =
            (bytes.get(differs.unwrap_or(0)..).map(|b| &b[..b.len().min(40)]), wanted.len());
        let name = dir.join(number.to_string());
        let at = format!(
            "{}: {} bytes of {len}, differs at {differs:?}: {is:?}",
            name.display(),
            bytes.len()
        );
        assert!(is_whole, "{at}, synced {synced}, begun {begun}");
    }
}

/// Cuts the power once, and checks the result.
fn cut(live: &Live, promises: &Promises, number: u64) {
    let outside = live.outside();
    // Recorded before the cut: all of this must be there.
    let synced = promises.synced.load(Ordering::SeqCst);
    let applied = promises.applied.load(Ordering::SeqCst);
    let checkpoints = promises.checkpoints.lock().unwrap().clone();
    shell(outside, "cp --reflink=always outer/disk.img outer/cut.img");
    let begun = promises.begun.load(Ordering::SeqCst);
    shell(outside, "mount -o loop outer/cut.img cut");
    let _cut = Mounts(vec![outside.join("cut"), outside.join("seen")]);
    // A power cut is followed by a boot. The store records its base; this is the same base at
    // another path.
    shell(
        outside,
        &format!(
            "JAILFS_BOOT={number:x}@$(($(date +%s) + 1)) {} mount cut/base seen --store cut/store",
            env!("CARGO_BIN_EXE_jailfs")
        ),
    );
    let seen = outside.join("seen");
    count(&seen.join("promises"), (synced, begun), number);
    let listed = shell(&seen, &format!("{} log --json", env!("CARGO_BIN_EXE_jailfs")));
    // A collection that begins after this list was made may drop the oldest.
    let kept = promises.checkpoints.lock().unwrap().clone();
    let is_kept = |checkpoint: &&(String, u64, u64)| kept.contains(checkpoint);
    let checkpoints: Vec<_> = checkpoints.iter().filter(is_kept).collect();
    for (name, ..) in &checkpoints {
        assert!(
            listed.contains(&format!("\"name\":\"{name}\"")),
            "cut {number}: checkpoint {name} is lost"
        );
    }
    let older = checkpoints.len().saturating_sub(NEWEST_CHECKPOINTS);
    let others = sample(older as u64, SAMPLED_CHECKPOINTS as u64, number).map(|at| at as usize);
    for (name, least, most) in others.chain(older..checkpoints.len()).map(|at| checkpoints[at]) {
        let dir = seen.join(format!(".jailfs/checkpoints/{name}/promises"));
        count(&dir, (*least, *most), number);
    }
    count(&outside.join("cut/base/promises"), (applied, begun), number);
    shell(&seen, &format!("cd /; {} umount {}", env!("CARGO_BIN_EXE_jailfs"), seen.display()));
    let check = Command::new(env!("CARGO_BIN_EXE_jailfs"))
        .args(["check", "--read-data", "--store"])
        .arg(outside.join("cut/store"))
        .output()
        .unwrap();
    assert!(check.status.success(), "cut {number}: {}", text(&check));
    // The daemon may still be ending.
    shell(
        outside,
        "for n in $(seq 100); do umount cut && break; sleep 0.1; done; rm outer/cut.img",
    );
}

#[test]
fn a_clone_of_the_disk_at_any_moment_keeps_every_promise() {
    let cuts = std::env::var("JAILFS_CUTS")
        .map_or(CUTS, |text| text.parse().expect("JAILFS_CUTS is a number"));
    let mut live = Live::with_limit(DISK, &[], Duration::from_secs(100 + 20 * cuts));
    let outside = live.outside().to_owned();
    let _mounts =
        Mounts(["outer", "disk", "base", "store"].map(|name| outside.join(name)).to_vec());
    live.applied = true;
    let promises = Promises::default();
    let mnt = live.mnt.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| promises.promise(&mnt));
        scope.spawn(|| promises.churn(&mnt));
        scope.spawn(|| promises.govern(&mnt));
        let stop = Stop(&promises);
        for number in 1..=cuts {
            std::thread::sleep(Duration::from_millis(100 + number * 137 % 400));
            if !promises.goes_on() {
                break;
            }
            cut(&live, &promises, number);
        }
        drop(stop);
    });
    let failures = promises.failures.lock().unwrap();
    assert!(failures.is_empty(), "{failures:#?}");
    eprintln!("{cuts} cuts, {} files synced", promises.synced.load(Ordering::SeqCst));
    live.umount();
}

/// Stops the work, also by a panic.
struct Stop<'a>(&'a Promises);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::SeqCst);
    }
}
