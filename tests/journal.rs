//! Rewrites of the upper layer's journal while programs write: it stays near the size of its
//! shortest form, and neither a kill nor a power cut loses anything.
//!
//! `JAILFS_JOURNAL_SEEDS=N` runs the power cuts of N seeds. `JAILFS_JOURNAL_SCALE=N` does N times
//! as much in the mount.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking, and prints its figures"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "power/disk.rs"]
mod disk;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use disk::{Disk, Random};
use harness::Live;
use jailfs::internals::fs::{Caller, Fs, RenameMode};
use jailfs::internals::sys::failpoint::{self, Change};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId};

const ME: Caller = Caller { uid: 0, gid: 0 };
/// Power cuts of one seed.
const CUTS: usize = 60;
/// A kill before one in so many disk changes, and before each change of names.
const KILL_STRIDE: usize = 7;

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A file that gets a line in each turn, and then another name: both show how far the writer came.
struct Writer {
    fs: Arc<Fs>,
    file: NodeId,
    /// Half turns: a line is one, a rename the other.
    done: u64,
}

impl Writer {
    fn new(fs: &Arc<Fs>) -> Writer {
        let file = fs.mknod(NodeId::ROOT, &name("even"), 0o100_644, 0, 0, ME).unwrap().id;
        Writer { fs: Arc::clone(fs), file, done: 0 }
    }

    fn half_turn(&mut self) {
        let turn = self.done / 2;
        if self.done.is_multiple_of(2) {
            self.fs.write(self.file, turn * 8, &turn.to_le_bytes(), false).unwrap();
        } else {
            let (from, to) = if turn.is_multiple_of(2) { ("even", "odd") } else { ("odd", "even") };
            let root = NodeId::ROOT;
            self.fs.rename(root, &name(from), root, &name(to), RenameMode::Replace, 1).unwrap();
        }
        self.done += 1;
    }
}

/// The number of half turns that a sandbox shows.
fn done(sandbox: &Sandbox, context: &str) -> u64 {
    let found = ["even", "odd"].map(|text| sandbox.fs().lookup(NodeId::ROOT, &name(text)).ok());
    let (at, file) = match found {
        [Some(entry), None] => (0, entry.id),
        [None, Some(entry)] => (1, entry.id),
        other => panic!("{context}: the file has no name, or two: {other:?}"),
    };
    let bytes = sandbox.fs().read(file, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    let lines: Vec<u64> =
        bytes.chunks(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect();
    assert!(
        lines.iter().copied().eq(0..lines.len() as u64),
        "{context}: a line is not what was written"
    );
    let turns = lines.len() as u64;
    // The name says whether the last line was followed by its rename.
    if turns % 2 == at { 2 * turns } else { 2 * turns - 1 }
}

/// The acknowledged half turns after each number of disk changes.
type Story = Vec<(usize, u64)>;

struct Recorded {
    changes: Vec<Change>,
    root: u64,
    /// Before the first change during a rewrite.
    begun: usize,
    acknowledged: Story,
    synced: Story,
}

/// Records all changes of a store while its journal is rewritten several times and a writer goes
/// on.
fn record(dir: &Path) -> Recorded {
    let (base, store) = (dir.join("base"), dir.join("store"));
    std::fs::create_dir(&base).unwrap();
    failpoint::set_boot(Some(([1; 16], jailfs::internals::sys::clock::now())));
    let record: Arc<Mutex<Vec<Change>>> = Arc::default();
    let into = Arc::clone(&record);
    failpoint::set_recorder(Some(Box::new(move |change| into.lock().unwrap().push(change))));
    std::fs::create_dir(&store).unwrap();
    let root = std::os::unix::fs::MetadataExt::ino(&store.metadata().unwrap());
    let sandbox = Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap();
    let now = || record.lock().unwrap().len();
    let mut writer = Writer::new(sandbox.fs());
    let (mut acknowledged, mut synced) = (Story::new(), Story::new());
    (0..300).for_each(|_| writer.half_turn());
    sandbox.fs().sync().unwrap();
    let begun = now();
    acknowledged.push((begun, writer.done));
    synced.push((begun, writer.done));
    std::thread::scope(|scope| {
        let rewriting = scope.spawn(|| (0..4).for_each(|_| sandbox.compact().unwrap()));
        while !rewriting.is_finished() {
            writer.half_turn();
            acknowledged.push((now(), writer.done));
            if writer.done.is_multiple_of(9) {
                sandbox.fs().sync().unwrap();
                synced.push((now(), writer.done));
            }
        }
        rewriting.join().unwrap();
    });
    failpoint::set_recorder(None);
    let changes = record.lock().unwrap().clone();
    Recorded { changes, root, begun, acknowledged, synced }
}

impl Recorded {
    /// The part of the record before change `at`.
    fn last(story: &Story, at: usize) -> u64 {
        story.iter().rev().find(|(changes, _)| *changes <= at).map_or(0, |(_, done)| *done)
    }

    fn disk(&self, at: usize) -> Disk {
        let mut disk = Disk::default();
        self.changes[..at].iter().for_each(|change| disk.apply(change));
        disk
    }

    fn is_exchange(&self, at: usize) -> bool {
        matches!(&self.changes[at], Change::Rename { from, .. } if from == "journal.new")
    }

    /// Opens the remaining store and returns how far the writer was.
    fn open(store: &Path, context: &str) -> u64 {
        let sandbox = Sandbox::open(store).unwrap_or_else(|error| panic!("{context}: {error}"));
        let found = done(&sandbox, context);
        sandbox.fs().sync().unwrap();
        drop(sandbox);
        let checked = Sandbox::check_store(store, true).unwrap();
        assert!(checked.problems.is_empty(), "{context}: {:#?}", checked.problems);
        found
    }
}

/// Held while changes are recorded, because that is global to the process.
static RECORDING: Mutex<()> = Mutex::new(());

#[test]
fn a_kill_at_any_failpoint_of_a_rewrite_loses_no_acknowledged_change() {
    let _exclusive = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let recorded = record(dir.path());
    let len = recorded.changes.len();
    let exchanges = (recorded.begun..len).filter(|at| recorded.is_exchange(*at)).count();
    // A rewrite that finds the journal short already does nothing.
    assert!(exchanges >= 2, "{exchanges} rewrites");
    let is_near = |at: usize| {
        (at..(at + 3).min(len)).any(|at| !matches!(recorded.changes[at], Change::Write { .. }))
    };
    let mut kills = 0;
    for at in (recorded.begun..=len).filter(|at| at % KILL_STRIDE == 0 || is_near(*at)) {
        let context = format!("killed after {at} of {len} changes");
        let mut disk = recorded.disk(at);
        // The host goes on: it has all writes.
        disk.apply(&Change::SyncAll {});
        let place = tempfile::tempdir().unwrap();
        let store = place.path().join("killed");
        disk.cut(&mut Random(1), recorded.root, &store);
        let found = Recorded::open(&store, &context);
        let acknowledged = Recorded::last(&recorded.acknowledged, at);
        assert!(
            (acknowledged..=acknowledged + 1).contains(&found),
            "{context}: {found} of {acknowledged}"
        );
        kills += 1;
    }
    eprintln!("{kills} kills, {exchanges} rewrites, {} half turns", recorded.acknowledged.len());
}

#[test]
fn a_power_cut_at_any_failpoint_of_a_rewrite_loses_no_synced_change() {
    let _exclusive = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
    let seeds = std::env::var("JAILFS_JOURNAL_SEEDS").map_or(3, |text| text.parse().unwrap());
    let mut after = 0;
    for seed in 1..=seeds {
        let dir = tempfile::tempdir().unwrap();
        let recorded = record(dir.path());
        let mut random = Random(seed);
        let len = recorded.changes.len();
        let exchanges: Vec<usize> =
            (recorded.begun..len).filter(|at| recorded.is_exchange(*at)).collect();
        failpoint::set_boot(Some(([2; 16], jailfs::internals::sys::clock::now())));
        for cut in 0..CUTS {
            // Every second one is near an exchange.
            let at = match exchanges.get(random.below(exchanges.len() as u64) as usize) {
                Some(at) if cut % 2 == 0 => {
                    (at + random.below(14) as usize).saturating_sub(5).min(len)
                }
                _ => recorded.begun + random.below((len - recorded.begun) as u64 + 1) as usize,
            };
            let context = format!("seed {seed}, cut {cut}, after {at} of {len} changes");
            let place = tempfile::tempdir().unwrap();
            let store = place.path().join("cut");
            recorded.disk(at).cut(&mut random, recorded.root, &store);
            let found = Recorded::open(&store, &context);
            let synced = Recorded::last(&recorded.synced, at);
            let acknowledged = Recorded::last(&recorded.acknowledged, at);
            assert!(
                (synced..=acknowledged + 1).contains(&found),
                "{context}: {synced}, {found}, {acknowledged}"
            );
            after += usize::from(exchanges.iter().any(|exchange| *exchange < at));
        }
        failpoint::set_boot(None);
    }
    assert!(after > CUTS, "only {after} cuts were behind an exchange");
}

fn journal_len(live: &Live) -> u64 {
    let layers = std::fs::read_dir(live.store.join("layers")).unwrap().map(Result::unwrap);
    layers.map(|layer| layer.path().join("journal").metadata().unwrap().len()).max().unwrap()
}

/// Small overwrites of one file, and renames of one file with long names, without a checkpoint. The
/// original report had 300,000 and 150,000 of them.
#[test]
fn a_mount_without_checkpoints_keeps_its_journal_short() {
    let scale: u32 = std::env::var("JAILFS_JOURNAL_SCALE").map_or(1, |text| text.parse().unwrap());
    let mut live = Live::with_limit("mkdir d", &[], Duration::from_secs(300 * u64::from(scale)));
    let mut puppet = live.puppet("");
    puppet.run("import os, random");
    puppet.run("r = random.Random(5)");
    puppet.run("f = os.open('big', os.O_RDWR | os.O_CREAT); os.truncate(f, 1 << 20)");
    puppet.run("os.pwrite(f, b'x' * (1 << 20), 0)");
    puppet.run("names = ['a' * 250, 'b' * 250]; open(names[0], 'w').write('renamed')");
    let bound = 16 << 20;
    let mut most = 0;
    for _ in 0..scale {
        for _ in 0..12 {
            puppet.run("for n in range(6000): os.pwrite(f, b'%d' % n, r.randrange(1 << 20 - 8))");
            puppet.run("for n in range(3000): os.rename(names[n % 2], names[(n + 1) % 2])");
            most = most.max(journal_len(&live));
        }
    }
    puppet.run("os.pwrite(f, b'the end', 0); os.fsync(f)");
    drop(puppet);
    assert!(most <= bound, "{most} bytes");
    let digest = live.sh("md5sum big && ls");
    live.kill_and_mount();
    assert_eq!(live.sh("md5sum big && ls"), digest);
    let written = u64::from(scale) * 12 * (6000 * 65 + 3000 * 600);
    eprintln!("{most} bytes at most, of {written}, and {} at last", journal_len(&live));
    assert!(written > bound);
    live.umount();
    let checked = Sandbox::check_store(&live.store, true).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
}
