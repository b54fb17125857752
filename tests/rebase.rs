//! An apply rebases the head onto the new base while programs write. No write is lost, the head
//! ends on the new base, and a kill or an error at any moment keeps acknowledged changes.
//!
//! At each change of the store after the base was written, the test writes through the filesystem.
//! From then on it copies the store after each change: that is what a kill would leave.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "power/disk.rs"]
mod disk;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use disk::{Disk, Random};
use jailfs::error::Error;
use jailfs::internals::fs::{Caller, Fs, Invalidations, Kernel, RenameMode};
use jailfs::internals::sys::failpoint::{self, Change};
use jailfs::sandbox::{Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId};

const ME: Caller = Caller { uid: 0, gid: 0 };
/// How long the test waits for its write. The filesystem may be busy with the change at which it is
/// made; then it is acknowledged later.
const BUSY: Duration = Duration::from_millis(100);

/// An apply tolerates a failed write of the ledger or of the edit history. So many applies in a row
/// that succeed mean that no write is left to fail.
const TOLERATED: u32 = 12;
/// The changes of all stores of a process go to one listener.
static LISTENER: Mutex<()> = Mutex::new(());

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn find(fs: &Fs, path: &str) -> Option<NodeId> {
    path.split('/')
        .try_fold(NodeId::ROOT, |dir, part| fs.lookup(dir, &name(part)).ok().map(|e| e.id))
}

fn put(fs: &Fs, file: &str, bytes: &[u8]) {
    let id = find(fs, file)
        .unwrap_or_else(|| fs.mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME).unwrap().id);
    fs.write(id, 0, bytes, false).unwrap();
}

fn get(fs: &Fs, path: &str) -> Option<String> {
    let bytes = fs.read(find(fs, path)?, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    Some(String::from_utf8(bytes).unwrap())
}

/// A base with something of each kind, and a tree that differs from it.
fn prepare(dir: &Path) -> Arc<Sandbox> {
    prepare_with(dir, true)
}

fn prepare_with(dir: &Path, volatile: bool) -> Arc<Sandbox> {
    let base = dir.join("base");
    std::fs::create_dir_all(base.join("dir/below")).unwrap();
    std::fs::create_dir(base.join("left")).unwrap();
    for file in ["old", "gone", "dir/kept", "dir/below/deep", "left/inside"] {
        std::fs::write(base.join(file), "of the base").unwrap();
    }
    let options = StoreOptions { volatile, ..StoreOptions::default() };
    let sandbox = Sandbox::create_or_open(&base, &dir.join("store"), &options).unwrap();
    put(sandbox.fs(), "old", b"OF THE");
    put(sandbox.fs(), "new", b"new");
    sandbox
}

/// The writes of programs meanwhile.
fn meanwhile(fs: &Fs) {
    put(fs, "late", b"acknowledged");
    put(fs, "new", b"NEW");
    fs.unlink(NodeId::ROOT, &name("gone")).unwrap();
    fs.rename(NodeId::ROOT, &name("dir"), NodeId::ROOT, &name("moved"), RenameMode::Replace, 0)
        .unwrap();
    fs.write(find(fs, "moved/kept").unwrap(), 0, b"IN", false).unwrap();
    // The tree then has no name that tells where the file was in the base.
    let left = find(fs, "left").unwrap();
    fs.rename(left, &name("inside"), NodeId::ROOT, &name("outside"), RenameMode::Replace, 0)
        .unwrap();
    fs.rmdir(NodeId::ROOT, &name("left")).unwrap();
}

/// Everything visible after that.
fn check(fs: &Fs, when: &str) {
    let wanted = [
        ("old", Some("OF THE base")),
        ("new", Some("NEW")),
        ("late", Some("acknowledged")),
        ("gone", None),
        ("dir", None),
        ("moved/kept", Some("IN the base")),
        ("moved/below/deep", Some("of the base")),
        ("outside", Some("of the base")),
        ("left", None),
    ];
    for (path, text) in wanted {
        assert_eq!(get(fs, path).as_deref(), text, "{when}: {path}");
    }
    fs.state().tree.verify().unwrap_or_else(|why| panic!("{when}: {why}"));
}

/// The changes that an apply made to the store.
struct Applied {
    result: Result<Reply, Error>,
    /// Layers that were created.
    layers: usize,
    /// Changes since the last of them was created: the one on the new base.
    since: usize,
}

/// Applies, and calls `at` with the number of each change of the store since so many layers were
/// created.
fn apply(sandbox: &Sandbox, layers: usize, at: impl Fn(usize) + Send + Sync + 'static) -> Applied {
    thread_local! {
        /// Writes meanwhile change the store, too.
        static IS_OF_APPLY: Cell<bool> = const { Cell::new(false) };
    }
    let (made, since) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (made_now, since_now) = (Arc::clone(&made), Arc::clone(&since));
    failpoint::set_recorder(Some(Box::new(move |change| {
        if !IS_OF_APPLY.replace(false) {
            return;
        }
        let is_layer = matches!(&change, Change::Mkdir { name, .. } if name.starts_with("000"));
        made_now.fetch_add(usize::from(is_layer), Ordering::SeqCst);
        if made_now.load(Ordering::SeqCst) >= layers {
            at(since_now.fetch_add(1, Ordering::SeqCst));
        }
        IS_OF_APPLY.set(true);
    })));
    IS_OF_APPLY.set(true);
    let result = sandbox.handle(Request::Apply {
        paths: Vec::new(),
        dry_run: false,
        undo: false,
        consent: jailfs::sandbox::Consent::ALL,
    });
    IS_OF_APPLY.set(false);
    failpoint::set_recorder(None);
    Applied { result, layers: made.load(Ordering::SeqCst), since: since.load(Ordering::SeqCst) }
}

/// The number of layers that an apply creates.
fn layers_of_an_apply() -> usize {
    let dir = tempfile::tempdir().unwrap();
    let applied = apply(&prepare(dir.path()), usize::MAX, |_| ());
    applied.result.unwrap();
    applied.layers
}

/// Writes meanwhile, in a thread of its own. Returns the channel on which the acknowledgement
/// arrives.
fn write_meanwhile(fs: &Arc<Fs>, more_files: usize) -> mpsc::Receiver<()> {
    let (fs, (done, acknowledged)) = (Arc::clone(fs), mpsc::channel());
    std::thread::spawn(move || {
        meanwhile(&fs);
        (0..more_files).for_each(|n| put(&fs, &format!("more{n}"), b"more"));
        // The receiver may open the store again.
        drop(fs);
        done.send(()).unwrap();
    });
    acknowledged
}

/// A write that is in flight, if there is one, and whether it was acknowledged.
#[derive(Default)]
struct Meanwhile {
    begun: Option<mpsc::Receiver<()>>,
    is_done: bool,
}

impl Meanwhile {
    fn wait(&mut self, longest: Duration) -> bool {
        self.is_done =
            self.is_done || self.begun.as_ref().is_some_and(|b| b.recv_timeout(longest).is_ok());
        self.is_done
    }
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(done.success());
}

#[test]
fn writes_while_an_apply_rebases_the_head_survive_a_kill() {
    let _exclusive = LISTENER.lock();
    let layers = layers_of_an_apply();
    let (mut kills, mut rebased, mut moments, mut moment) = (0, 0, 1, 0);
    while moment < moments {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = prepare(dir.path());
        let (left, state): (Arc<Mutex<Vec<PathBuf>>>, Arc<Mutex<Meanwhile>>) = Default::default();
        let (into, written) = (Arc::clone(&left), Arc::clone(&state));
        let (fs, place) = (Arc::clone(sandbox.fs()), dir.path().to_owned());
        let applied = apply(&sandbox, layers, move |at| {
            let mut written = written.lock().unwrap();
            if at == moment {
                written.begun = Some(write_meanwhile(&fs, 0));
            }
            let longest = if at == moment { BUSY } else { Duration::ZERO };
            if at >= moment && written.wait(longest) {
                let to = place.join(format!("killed{at}"));
                copy(&place.join("store"), &to);
                into.lock().unwrap().push(to);
            }
        });
        let when = format!("written at moment {moment} of {}", applied.since);
        let done = applied.result.unwrap_or_else(|error| panic!("{when}: {error}"));
        let Reply::Applied(done) = done else { panic!("{when}: {done:?}") };
        assert!(done.conflicts.is_empty(), "{when}: {:?}", done.conflicts);
        moments = applied.since;
        assert!(state.lock().unwrap().wait(10 * BUSY), "{when}: it is not acknowledged");
        check(sandbox.fs(), &when);
        assert_eq!(
            sandbox.fs().state().lower.epoch(),
            done.epoch,
            "{when}: the head is over the old base"
        );
        rebased += 1;
        for store in left.lock().unwrap().iter() {
            let when = format!("{when}, {}", store.display());
            let opened = Sandbox::open(store).unwrap();
            check(opened.fs(), &when);
            drop(opened);
            assert_eq!(std::fs::read(dir.path().join("base/new")).unwrap(), b"new", "{when}");
            let checked = Sandbox::check_store(store, true).unwrap();
            assert!(checked.problems.is_empty(), "{when}: {:?}", checked.problems);
            kills += 1;
        }
        moment += 1;
    }
    assert!(moments > 5 && kills > moments, "only {moments} moments");
    eprintln!("{kills} kills at {moments} moments, rebased {rebased} times");
}

/// A kernel that records the names that are invalidated.
#[derive(Default)]
struct Invalidated(Mutex<BTreeSet<(NodeId, Name)>>);

impl Kernel for Invalidated {
    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    fn invalidate(&self, what: &Invalidations) -> Result<(), Error> {
        self.0.lock().unwrap().extend(what.names.iter().cloned());
        Ok(())
    }
}

/// The tree need not know all hard links of a base file; the kernel does.
#[test]
fn a_restore_after_an_apply_invalidates_all_hard_links_of_a_file() {
    let _exclusive = LISTENER.lock();
    let layers = layers_of_an_apply();
    for are_removed in [&[][..], &["further"], &["further", "new"], &["link", "new"]] {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = prepare(dir.path());
        let (invalidated, fs) = (Arc::new(Invalidated::default()), Arc::clone(sandbox.fs()));
        sandbox.attach(Arc::clone(&invalidated) as Arc<dyn Kernel>);
        let file = find(&fs, "new").unwrap();
        for link in ["link", "further"] {
            assert_eq!(fs.link(file, NodeId::ROOT, &name(link)).unwrap().id, file);
        }
        sandbox
            .handle(Request::Checkpoint { name: Some("start".to_owned()), message: String::new() })
            .unwrap();
        put(&fs, "new", b"written before");
        let writer = Arc::clone(&fs);
        let applied = apply(&sandbox, layers, move |at| {
            if at == 0 {
                writer.write(file, 0, b"WRITTEN", false).unwrap();
                are_removed
                    .iter()
                    .for_each(|link| writer.unlink(NodeId::ROOT, &name(link)).unwrap());
            }
        });
        let Reply::Applied(done) = applied.result.unwrap() else { panic!("not an apply") };
        assert_eq!(fs.state().lower.epoch(), done.epoch);
        invalidated.0.lock().unwrap().clear();
        let restore = Request::Restore {
            detach_mounts: false,
            to: Rev::parse("start"),
            paths: Vec::new(),
            dry_run: false,
        };
        sandbox.handle(restore).unwrap();
        let names =
            BTreeSet::from(["new", "link", "further"].map(|link| (NodeId::ROOT, name(link))));
        let cached = invalidated.0.lock().unwrap().clone();
        assert!(names.is_subset(&cached), "without {are_removed:?}: {cached:?}");
        assert_eq!(get(&fs, "further").as_deref(), Some("new"));
    }
}

/// A directory that the base has where an apply put it, and the tree has elsewhere by now, is one
/// directory, not two.
#[test]
fn content_moved_out_of_a_removed_directory_can_be_changed_after_an_apply() {
    let _exclusive = LISTENER.lock();
    let layers = layers_of_an_apply();
    let dir = tempfile::tempdir().unwrap();
    let sandbox = prepare(dir.path());
    let fs = Arc::clone(sandbox.fs());
    let outer = fs.mkdir(NodeId::ROOT, &name("outer"), 0o755, 0, ME).unwrap();
    let inner = fs.mkdir(outer.id, &name("inner"), 0o755, 0, ME).unwrap();
    let file = fs.mknod(inner.id, &name("file"), 0o100_644, 0, 0, ME).unwrap();
    let writer = Arc::clone(&fs);
    let applied = apply(&sandbox, layers, move |at| {
        if at == 0 {
            let (root, moved) = (NodeId::ROOT, name("moved"));
            let kept = name("inner");
            writer.rename(outer.id, &kept, root, &moved, RenameMode::Replace, 0).unwrap();
            writer.rmdir(root, &name("outer")).unwrap();
        }
    });
    let Reply::Applied(done) = applied.result.unwrap() else { panic!("not an apply") };
    assert_eq!(fs.state().lower.epoch(), done.epoch);
    fs.write(file.id, 0, b"written", false).unwrap();
    assert_eq!(get(&fs, "moved/file").as_deref(), Some("written"));
    let numbers = [inner.id, file.id].map(|id| fs.getattr(id).unwrap().ino);
    assert_eq!(numbers, [inner.attr.ino, file.attr.ino]);
}

/// Changes of the base by other programs between the apply and the rebase are conflicts of the next
/// apply.
#[test]
fn changes_of_the_base_before_the_rebase_are_conflicts_of_the_next_apply() {
    let _exclusive = LISTENER.lock();
    let layers = layers_of_an_apply();
    for theirs in ["gone", "late", "dir/kept"] {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = prepare(dir.path());
        let (fs, file) = (Arc::clone(sandbox.fs()), dir.path().join("base").join(theirs));
        let applied = apply(&sandbox, layers, move |at| {
            if at == 0 {
                let kept = find(&fs, "dir/kept").unwrap();
                fs.write(kept, 0, b"IN", false).unwrap();
                fs.unlink(NodeId::ROOT, &name("gone")).unwrap();
                put(&fs, "late", b"acknowledged");
                // For as long as the first apply took, and longer.
                std::thread::sleep(Duration::from_millis(20));
                std::fs::write(&file, "OF THE BASE").unwrap();
            }
        });
        let Reply::Applied(done) = applied.result.unwrap() else { panic!("not an apply") };
        assert!(done.conflicts.is_empty(), "{theirs}: {:?}", done.conflicts);
        let again = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: jailfs::sandbox::Consent::ALL,
        };
        let Reply::Applied(done) = sandbox.handle(again).unwrap() else { panic!("not an apply") };
        let conflicts: Vec<String> =
            done.conflicts.iter().map(|(path, _)| path.to_string()).collect();
        assert_eq!(conflicts, [theirs]);
        assert_eq!(std::fs::read(dir.path().join("base").join(theirs)).unwrap(), b"OF THE BASE");
    }
}

/// Each failpoint of the store fails once after the moment of the write.
#[test]
fn an_error_during_the_rebase_loses_nothing() {
    let _exclusive = LISTENER.lock();
    let layers = layers_of_an_apply();
    let mut failures = 0;
    for what in ["store.write", "store.rename", "store.sync-dir", "store.sync", "store.open"] {
        let mut done = 0;
        for at in 1.. {
            assert!(at < 200, "{what}: the operation never ends");
            let dir = tempfile::tempdir().unwrap();
            let sandbox = prepare(dir.path());
            let fs = Arc::clone(sandbox.fs());
            let rules = format!("fail:{what}:{at}:EIO");
            let applied = failpoint::with(&rules, || {
                apply(&sandbox, layers, move |at| {
                    if at == 0 {
                        write_meanwhile(&fs, 0).recv_timeout(10 * BUSY).unwrap();
                    }
                })
            });
            if applied.since == 0 {
                // It failed before that.
                applied.result.unwrap_err();
                continue;
            }
            check(sandbox.fs(), &rules);
            drop(sandbox);
            let opened = Sandbox::open(&dir.path().join("store")).unwrap();
            check(opened.fs(), &rules);
            drop(opened);
            let checked = Sandbox::check_store(&dir.path().join("store"), true).unwrap();
            assert!(checked.problems.is_empty(), "{rules}: {:?}", checked.problems);
            match applied.result {
                Ok(_) => done += 1,
                Err(_) => (failures, done) = (failures + 1, 0),
            }
            if done == TOLERATED {
                break;
            }
        }
    }
    assert!(failures > 5, "only {failures} failures");
}

/// The rebase writes one record, and a journal accepts no record that is too long.
#[test]
fn a_rebase_that_exceeds_one_record_leaves_the_head_on_the_old_base() {
    let _exclusive = LISTENER.lock();
    let layers = layers_of_an_apply();
    let (mut stayed, mut rebased) = (0, 0);
    for at in 1.. {
        assert!(at < 200, "the operation never ends");
        let dir = tempfile::tempdir().unwrap();
        let sandbox = prepare(dir.path());
        let fs = Arc::clone(sandbox.fs());
        let rules = format!("fail:store.write:{at}:EFBIG");
        let applied = failpoint::with(&rules, || {
            apply(&sandbox, layers, move |at| {
                if at == 0 {
                    write_meanwhile(&fs, 0).recv_timeout(10 * BUSY).unwrap();
                }
            })
        });
        let Ok(Reply::Applied(done)) = applied.result else { continue };
        check(sandbox.fs(), &rules);
        if sandbox.fs().state().lower.epoch() == done.epoch {
            rebased += 1;
            if rebased == TOLERATED {
                break;
            }
            continue;
        }
        (stayed, rebased) = (stayed + 1, 0);
        drop(sandbox);
        check(Sandbox::open(&dir.path().join("store")).unwrap().fs(), &rules);
    }
    assert_eq!(stayed, 1, "the record of the new tree, and nothing else");
}

/// Power cuts after the base was written: synced changes are there, and of the others a prefix.
#[test]
fn a_power_cut_during_the_rebase_loses_no_synced_change() {
    let _exclusive = LISTENER.lock();
    let mut cuts = 0;
    for moment in 0..6 {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        std::fs::create_dir(&store).unwrap();
        let root = std::os::unix::fs::MetadataExt::ino(&store.metadata().unwrap());
        failpoint::set_boot(Some(([1; 16], jailfs::internals::sys::clock::now())));
        let all: Arc<Mutex<Vec<Change>>> = Arc::default();
        let (into, layers) = (Arc::clone(&all), Arc::new(AtomicUsize::new(0)));
        let running: Arc<Mutex<Option<Arc<Fs>>>> = Arc::default();
        let (fs_then, layers_now) = (Arc::clone(&running), Arc::clone(&layers));
        let since = AtomicUsize::new(0);
        failpoint::set_recorder(Some(Box::new(move |change| {
            let is_layer = matches!(&change, Change::Mkdir { name, .. } if name.starts_with("000"));
            into.lock().unwrap().push(change);
            let count = layers_now.fetch_add(usize::from(is_layer), Ordering::SeqCst)
                + usize::from(is_layer);
            // The upper layer, the one on its seal, the pre-images, and the one on the new base.
            if count == 4 && since.fetch_add(1, Ordering::SeqCst) == moment {
                let fs = fs_then.lock().unwrap().take();
                // So many that the journal has several pages, any of which a power cut can lose.
                fs.map(|fs| write_meanwhile(&fs, 150).recv_timeout(10 * BUSY));
            }
        })));
        let sandbox = prepare_with(dir.path(), false);
        sandbox.fs().sync().unwrap();
        *running.lock().unwrap() = Some(Arc::clone(sandbox.fs()));
        let count = || all.lock().unwrap().len();
        let apply = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: jailfs::sandbox::Consent::ALL,
        };
        let Reply::Applied(applied) = sandbox.handle(apply).unwrap() else {
            panic!("not an apply")
        };
        let rebased =
            all.lock().unwrap().iter().position(
                |change| matches!(change, Change::Mkdir { name, .. } if name == "00000004"),
            );
        let when = format!("written at moment {moment}");
        assert!(running.lock().unwrap().is_none(), "{when}: there is no such failpoint");
        while get(sandbox.fs(), "more149").is_none_or(|text| text != "more") {
            std::thread::yield_now();
        }
        assert_eq!(sandbox.fs().state().lower.epoch(), applied.epoch, "{when}");
        sandbox.fs().sync().unwrap();
        let synced = count();
        sandbox.handle(Request::Checkpoint { name: None, message: String::new() }).unwrap();
        failpoint::set_recorder(None);
        drop(sandbox);
        failpoint::set_boot(Some(([2; 16], jailfs::internals::sys::clock::now())));
        let changes = all.lock().unwrap().clone();
        let mut random = Random(moment as u64);
        // At the end, where it is sealed and synced, after each change.
        let is_tried = |at: &usize| at.is_multiple_of(16) || at + 45 > changes.len();
        for at in (rebased.unwrap() + 1..=changes.len()).filter(is_tried) {
            let mut disk = Disk::default();
            changes[..at].iter().for_each(|change| disk.apply(change));
            let copy = dir.path().join(format!("cut{at}"));
            disk.cut(&mut random, root, &copy);
            let when =
                format!("{when}, cut after {at} of {} changes, {synced} synced", changes.len());
            let opened = Sandbox::open(&copy).unwrap_or_else(|error| panic!("{when}: {error}"));
            let fs = opened.fs();
            if at >= synced {
                check(fs, &when);
            }
            assert_eq!(get(fs, "old").as_deref(), Some("OF THE base"), "{when}");
            let (new, late) = (get(fs, "new").unwrap(), get(fs, "late"));
            assert!(new == "new" || new == "NEW", "{when}: {new}");
            assert!(
                matches!(late.as_deref(), None | Some("" | "acknowledged")),
                "{when}: {late:?}"
            );
            assert!(
                new == "new" || late.as_deref() == Some("acknowledged"),
                "{when}: a later write is there"
            );
            let dir_is = find(fs, "dir").is_some();
            assert_ne!(dir_is, find(fs, "moved").is_some(), "{when}");
            assert!(
                dir_is || find(fs, "gone").is_none() && new == "NEW",
                "{when}: a later change is there"
            );
            drop(opened);
            let checked = Sandbox::check_store(&copy, true).unwrap();
            assert!(checked.problems.is_empty(), "{when}: {:?}", checked.problems);
            cuts += 1;
        }
        failpoint::set_boot(None);
    }
    eprintln!("{cuts} power cuts");
}
