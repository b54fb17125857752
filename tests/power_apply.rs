//! Power cuts of `apply`, of `apply --undo`, and of the start that rolls them back: these write the
//! base, too.
//!
//! The base is an ext4 of its own. After each change of a store's files, the host is made to write
//! some part of the base, or nothing, and now and then the disk below it is copied: that is what a
//! power cut leaves of it. The store is built as in `tests/power.rs`. It must then open over that
//! base and make it whole: in the state before or after, with every checkpoint unchanged, and the
//! verb can be done again.
//!
//! `JAILFS_POWER_SEED=N` runs one seed, `JAILFS_POWER_SEEDS=N` runs the first N.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and the host writes its own files"
)]

#[path = "power/disk.rs"]
mod disk;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;
#[path = "common/host.rs"]
mod host;
#[path = "power/meanwhile.rs"]
mod meanwhile;
#[path = "common/states.rs"]
mod states;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use disk::{Disk, Random};
use harness::{Live, assert_same, shell};
use host::host;
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::Sandbox;
use jailfs::sandbox::{Change, Reply, Request};
use states::{check, states};

const SEEDS: u64 = 1;
/// The changes to the tree by one seed.
const OPERATIONS: usize = 40;
/// One in so many changes of the store is followed by a power cut.
const RARELY: u64 = 24;
/// And of the changes by a start that recovers from a power cut.
const MORE_RARELY: u64 = 60;

const FILL: &str = "
    mkdir -p src/deep docs empty; for n in 1 2 3 4 5 6; do seq $n 400 > src/f$n; done
    echo readme > README; ln README docs/also; ln -s ../README docs/link; seq 9000 > big
    mkfifo src/pipe
    setfattr -n user.x -v y src/f1; chmod 640 src/f2; touch -d 2001-01-01 src/f3; rmdir lost+found
    sync -f .";

/// The number of failpoints of a start, or more.
const LONGEST_START: u64 = 600;

/// A script with random changes.
fn work(random: &mut Random) -> String {
    let files = [
        "src/f1",
        "src/f2",
        "src/f3",
        "src/f4",
        "README",
        "docs/also",
        "big",
        "src/deep/n1",
        "docs/n2",
        "n3",
    ];
    let mut file = || files[random.below(files.len() as u64) as usize];
    let mut script = String::new();
    let mut picks = Vec::new();
    for _ in 0..OPERATIONS {
        picks.push((file(), file()));
    }
    for (at, (one, other)) in picks.into_iter().enumerate() {
        let line = match random.below(15) {
            0 | 1 => format!("echo {at} >> {one}"),
            2 | 3 => format!("seq {at} 2000 > {one}.tmp && mv {one}.tmp {one}"),
            4 => format!("rm -f {one}"),
            5 => format!("mv -f {one} {other}"),
            6 => format!("rm -f {other}; ln {one} {other}"),
            7 => format!("ln -sf target{at} {one}"),
            8 => format!("chmod {} {one}", 600 + random.below(60)),
            9 => format!("touch -h -d @{} {one}", 1_000_000_000 + at),
            10 => format!("setfattr -n user.at -v {at} {one}"),
            11 => format!("rm -rf d{0}; mkdir -p d{0}/e; seq 3000 > d{0}/e/f", at % 3),
            12 => format!("rm -rf {one}; mkdir {one}; echo {at} > {one}/inside"),
            13 => format!("[ ! -e docs ] || mv -T docs moved{}", at % 2),
            _ => format!("mkdir -p docs; mv -T d{0} docs/d{0}", at % 3),
        };
        // A change that is impossible after earlier ones is skipped.
        script.push_str(&format!("({line}) 2> /dev/null || :\n"));
    }
    script
}

/// The content at one moment.
#[derive(Clone, PartialEq, Eq)]
struct Seen {
    base: String,
    /// The tree and every checkpoint, compared with the base.
    states: BTreeMap<String, Vec<Change>>,
}

/// The result of a power cut.
struct Left {
    /// The disk of the base.
    base: PathBuf,
    store: PathBuf,
    /// The number of changes of the store.
    at: usize,
    context: String,
    /// Whether the verb was done and acknowledged.
    acknowledged: bool,
}

struct World {
    live: Live,
    random: Random,
    /// The number of boots.
    boots: u8,
    cuts: usize,
}

/// Unmounts the base in any case.
struct Mounted(PathBuf);

impl Mounted {
    fn new(image: &Path, at: &Path) -> Mounted {
        // Without ext4's protection, which writes the content of a file that is renamed over
        // another.
        let options = "loop,noatime,noauto_da_alloc";
        shell(Path::new("/"), &format!("mount -o {options} {} {}", image.display(), at.display()));
        Mounted(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(std::process::Command::new("umount").arg(&self.0).status());
    }
}

impl World {
    fn boot(&mut self) {
        self.boots += 1;
        failpoint::set_boot(Some(([self.boots; 16], jailfs::internals::sys::clock::now())));
    }

    fn seen(&self, store: &Path) -> Seen {
        Seen { base: host(&self.live.base), states: states(store) }
    }

    /// Works with a store, and cuts the power now and then. Returns the results, the end included.
    fn cut<T>(
        &mut self,
        (image, store): (&Path, &Path),
        rarely: u64,
        context: &str,
        work: impl FnOnce() -> T,
    ) -> (T, Vec<Left>) {
        self.cut_while((image, store), rarely, context, false, work)
    }

    /// The same for work in several threads: the base is frozen while its disk is copied.
    fn cut_while<T>(
        &mut self,
        (image, store): (&Path, &Path),
        rarely: u64,
        context: &str,
        freezes: bool,
        work: impl FnOnce() -> T,
    ) -> (T, Vec<Left>) {
        let (disk, root) = Disk::of_dir(store);
        let (base, outside) = (self.live.base.clone(), self.live.outside().to_owned());
        let (first, image) = (self.cuts, image.to_owned());
        let random = Random(self.random.next());
        let recording = Recording {
            disk,
            base,
            image,
            outside,
            first,
            random,
            rarely,
            freezes,
            changes: 0,
            moments: Vec::new(),
        };
        let recording = Arc::new(Mutex::new(recording));
        let into = Arc::clone(&recording);
        failpoint::set_recorder(Some(Box::new(move |change| into.lock().unwrap().note(&change))));
        let done = work();
        failpoint::set_recorder(None);
        let mut recording = recording.lock().unwrap();
        recording.keep_moment();
        let (moments, all) = (std::mem::take(&mut recording.moments), recording.changes);
        drop(recording);
        let last = moments.len() - 1;
        let mut left = Vec::new();
        for (number, (at, disk, base)) in moments.into_iter().enumerate() {
            let store = self.live.outside().join(format!("cut{}", self.cuts));
            self.cuts += 1;
            disk.cut(&mut self.random, root, &store);
            let context = format!("{context}, after {at} of {all} changes");
            left.push(Left { base, store, at, context, acknowledged: number == last });
        }
        (done, left)
    }

    /// Opens the result of a power cut, and cuts the power of that as well.
    fn recover(&mut self, left: Left, verb: &Request, before: &Seen, after: &Seen, depth: usize) {
        let Left { base, store, context, acknowledged, .. } = left;
        // A power cut of this recovery belongs to another test.
        let mounted = Mounted::new(&base, &self.live.base);
        self.boot();
        // The recovering start may be interrupted without another boot.
        let step = 1 + self.random.below(LONGEST_START);
        failpoint::with(&format!("fail:any:{step}+:EIO"), || drop(Sandbox::open(&store)));
        let open =
            || drop(Sandbox::open(&store).unwrap_or_else(|error| panic!("{context}: {error}")));
        let further = if depth > 0 {
            self.cut((&base, &store), MORE_RARELY, &format!("{context}, opened"), open).1
        } else {
            open();
            Vec::new()
        };
        self.judge(&store, verb, before, after, (&context, acknowledged));
        drop(mounted);
        std::fs::remove_file(&base).unwrap();
        std::fs::remove_dir_all(&store).unwrap();
        for left in further {
            // Opening is no promise: the verb was acknowledged, or was not.
            self.recover(Left { acknowledged, ..left }, verb, before, after, depth - 1);
        }
    }

    /// The opened base is whole: as before, or as planned.
    fn judge(
        &self,
        store: &Path,
        verb: &Request,
        before: &Seen,
        after: &Seen,
        (context, done): (&str, bool),
    ) {
        check(store, context);
        let staged = shell(&self.live.base, "find . -name '.jailfs-*'");
        assert_eq!(staged, "", "{context}: staged files are left");
        let found = self.seen(store);
        check(store, context);
        if found.base == after.base {
            same(&found, after, context);
            return;
        }
        assert!(!done, "{context}: an acknowledged apply is gone");
        same(&found, before, context);
        let sandbox = Sandbox::open(store).unwrap();
        let Reply::Applied(applied) = sandbox.handle(verb.clone()).unwrap() else {
            panic!("no apply")
        };
        assert_eq!(applied.conflicts, [], "{context}: done again");
        drop(sandbox);
        same(&self.seen(store), after, &format!("{context}, done again"));
        check(store, context);
    }
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

/// Compares two moments, and shows only the differences.
#[track_caller]
fn same(found: &Seen, wanted: &Seen, context: &str) {
    assert_same(&lines(&wanted.base), &lines(&found.base), &format!("{context}: the base"));
    assert!(found.states.keys().eq(wanted.states.keys()), "{context}: other checkpoints");
    for (id, state) in &wanted.states {
        let lines =
            |changes: &[Change]| changes.iter().map(|c| format!("{c:?}")).collect::<Vec<_>>();
        assert_same(&lines(state), &lines(&found.states[id]), &format!("{context}: state {id}"));
    }
}

/// A store while it is written to, and the results of power cuts.
struct Recording {
    disk: Disk,
    base: PathBuf,
    image: PathBuf,
    outside: PathBuf,
    first: usize,
    random: Random,
    rarely: u64,
    /// Whether other threads write the base meanwhile.
    freezes: bool,
    changes: usize,
    moments: Vec<(usize, Disk, PathBuf)>,
}

impl Recording {
    fn note(&mut self, change: &failpoint::Change) {
        self.disk.apply(change);
        self.changes += 1;
        CHANGES.store(self.changes, Ordering::SeqCst);
        self.write_some();
        if self.random.below(self.rarely) == 0 {
            self.keep_moment();
        }
    }

    fn keep_moment(&mut self) {
        let copy = self.outside.join(format!("image{}", self.first + self.moments.len()));
        if self.freezes {
            shell(&self.base, "fsfreeze -f .");
        }
        let copied = std::fs::copy(&self.image, &copy);
        if self.freezes {
            shell(&self.base, "fsfreeze -u .");
        }
        copied.unwrap();
        self.moments.push((self.changes, self.disk.clone(), copy));
    }

    /// The host writes a part of the base, as it may at any time: all names so far, or the content
    /// of a file, or nothing.
    fn write_some(&mut self) {
        let what = self.random.below(8);
        // A listed name may be gone at once if other threads write the base.
        if what > 2 || self.freezes && what > 0 {
            return;
        }
        let mut files = Vec::new();
        let mut dirs = vec![self.base.clone()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(&dir).unwrap().map(Result::unwrap) {
                match entry.file_type().unwrap() {
                    kind if kind.is_dir() => dirs.push(entry.path()),
                    kind if kind.is_file() => files.push(entry.path()),
                    _ => {}
                }
            }
        }
        match what {
            0 => File::open(&self.base).unwrap().sync_all().unwrap(),
            _ if files.is_empty() => {}
            what => {
                let file =
                    File::open(&files[self.random.below(files.len() as u64) as usize]).unwrap();
                if what == 1 {
                    file.sync_all().unwrap()
                } else {
                    jailfs::internals::sys::file::sync_file_range_all(&file).unwrap()
                }
            }
        }
    }
}

/// One base and store: an apply, its undo, and the results of all power cuts.
fn run(seed: u64) -> usize {
    let mut random = Random(seed);
    let make = "truncate -s 24M ../image; mkfs.ext4 -q -b 4096 -J size=4 ../image; \
        mount -o loop,noatime,noauto_da_alloc ../image $PWD";
    let mut live =
        Live::with_limit(&format!("{make}; cd $PWD; {FILL}"), &[], Duration::from_secs(300));
    let mounted = Mounted(live.base.clone());
    live.applied = true;
    for name in ["first", "second"] {
        live.sh(&work(&mut random));
        live.checkpoint(name);
    }
    live.sh(&work(&mut random));
    live.umount();
    let (store, image) = (live.store.clone(), live.outside().join("image"));
    let mut world = World { live, random, boots: 0, cuts: 0 };
    world.boot();
    let mut all = Vec::new();
    let mut before = world.seen(&store);
    for undo in [false, true] {
        let verb = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo,
            consent: jailfs::sandbox::Consent::ALL,
        };
        let context =
            format!("JAILFS_POWER_SEED={seed}, {}", if undo { "undone" } else { "applied" });
        shell(&world.live.base, "sync -f .");
        let work = || {
            let sandbox = Sandbox::open(&store).unwrap();
            let Reply::Applied(applied) = sandbox.handle(verb.clone()).unwrap() else {
                panic!("no apply")
            };
            assert!(
                applied.conflicts.is_empty() && applied.changes.len() > 10,
                "{context}: {applied:?}"
            );
        };
        let (_, left) = world.cut((&image, &store), RARELY, &context, work);
        let after = world.seen(&store);
        all.push((verb, before, after.clone(), left));
        before = after;
    }
    drop(mounted);
    for (verb, before, after, lefts) in all {
        for left in lefts {
            world.recover(left, &verb, &before, &after, 1);
        }
    }
    world.cuts
}

/// The number of recorded changes of the store.
static CHANGES: AtomicUsize = AtomicUsize::new(0);

/// Boots and records are global to the process.
static TURN: Mutex<()> = Mutex::new(());

/// The claims of an interrupted apply are lost with the power, but its changes are in the base.
/// Among them are hard links of one file, one of which was staged. Rolling one link back changes
/// the times of all, and that may be interrupted as well.
#[test]
fn an_interrupted_apply_is_rolled_back_although_the_power_cut_lost_its_claims() {
    let _turn = TURN.lock();
    let mut live =
        Live::with_limit("mkdir old; echo old > old/file", &[], Duration::from_secs(200));
    live.applied = true;
    live.sh("mkdir new; seq 100 > new/one; ln new/one new/two; ln new/one old/three; \
        echo new > old/file");
    let after = host(&live.mnt);
    live.umount();
    let (base, store, cut) = (live.base.clone(), live.store.clone(), live.outside().join("cut"));
    let before = host(&base);
    let verb = Request::Apply {
        paths: Vec::new(),
        dry_run: false,
        undo: false,
        consent: jailfs::sandbox::Consent::ALL,
    };
    let mut random = Random(1);
    let mut boot = 0;
    let mut boots = || {
        boot += 1;
        failpoint::set_boot(Some(([boot; 16], jailfs::internals::sys::clock::now())));
    };
    boots();
    let mut mended = 0;
    for moment in 1.. {
        let (disk, root) = Disk::of_dir(&store);
        let disk = Arc::new(Mutex::new(disk));
        let into = Arc::clone(&disk);
        failpoint::set_recorder(Some(Box::new(move |change| into.lock().unwrap().apply(&change))));
        let applied = failpoint::with(&format!("fail:any:{moment}+:EIO"), || {
            Sandbox::open(&store).and_then(|sandbox| sandbox.handle(verb.clone()))
        });
        failpoint::set_recorder(None);
        let Err(error) = applied else { break };
        disk.lock().unwrap().clone().cut(&mut random, root, &cut);
        boots();
        // The start that rolls it back is interrupted as well, each time a little later.
        for step in (1 + random.below(6)..90).step_by(6) {
            failpoint::with(&format!("fail:any:{step}+:EIO"), || drop(Sandbox::open(&cut)));
        }
        drop(
            Sandbox::open(&cut).unwrap_or_else(|error| panic!("cut off at step {moment}: {error}")),
        );
        let found = host(&base);
        // The seal may have reached the disk, whatever was answered.
        if found == after {
            break;
        }
        assert_same(
            &lines(&before),
            &lines(&found),
            &format!("cut off at step {moment} ({error}): the base"),
        );
        std::fs::remove_dir_all(&store).unwrap();
        std::fs::rename(&cut, &store).unwrap();
        mended += 1;
    }
    failpoint::set_boot(None);
    assert!(mended > 70, "{mended} moments");
    assert_same(&lines(&after), &lines(&host(&base)), "applied: the base");
}

#[test]
fn an_apply_and_its_undo_interrupted_by_a_power_cut_are_rolled_back_or_done() {
    let _turn = TURN.lock();
    let number = |variable: &str| std::env::var(variable).ok().map(|text| text.parse().unwrap());
    let cuts: usize = match number("JAILFS_POWER_SEED") {
        Some(seed) => run(seed),
        None => (1..=number("JAILFS_POWER_SEEDS").unwrap_or(SEEDS)).map(run).sum(),
    };
    eprintln!("{cuts} power cuts");
}
