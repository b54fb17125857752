//! The daemon is killed while an apply puts the head on the base that it has written, and programs write at that moment: what was
//! acknowledged is there when it is mounted again.
//!
//! At each change that an apply makes of the store after the base was written, a file is written through the filesystem, and from then
//! on the store is copied after each change: what a kill leaves.

#![expect(clippy::unwrap_used, reason = "a failure is what a test is for")]

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use jailfs::fs::{Caller, Fs};
use jailfs::sandbox::verbs::{Reply, Request};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::sys::step::{self, Change};
use jailfs::types::{Name, NodeId};

const ME: Caller = Caller { uid: 0, gid: 0 };

fn put(fs: &Fs, file: &str, bytes: &[u8]) {
    let name = Name::new(file.as_bytes()).unwrap();
    let id = match fs.lookup(NodeId::ROOT, &name) {
        Ok(entry) => entry.id,
        Err(_) => fs.mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, ME).unwrap().id,
    };
    fs.write(id, 0, bytes, false).unwrap();
}

fn get(fs: &Fs, file: &str) -> Vec<u8> {
    let id = fs.lookup(NodeId::ROOT, &Name::new(file.as_bytes()).unwrap()).unwrap().id;
    fs.read(id, 0, u64::MAX).unwrap().read(false).unwrap().unwrap()
}

fn prepare(dir: &Path) -> Arc<Sandbox> {
    let base = dir.join("base");
    std::fs::create_dir(&base).unwrap();
    std::fs::write(base.join("old"), "of the base").unwrap();
    let options = StoreOptions { volatile: true, ..StoreOptions::default() };
    let sandbox = Sandbox::create_or_open(&base, &dir.join("store"), &options).unwrap();
    put(sandbox.fs(), "old", b"OF THE");
    put(sandbox.fs(), "new", b"new");
    sandbox
}

/// Applies, and calls `at` with the number of each change of the store since the last layer was made: the one that lies on the new base.
/// Gives how many there were.
fn apply(sandbox: &Sandbox, layers: usize, at: impl Fn(usize) + Send + Sync + 'static) -> (usize, usize) {
    thread_local! {
        /// What is done meanwhile changes the store, too.
        static MEANWHILE: Cell<bool> = const { Cell::new(false) };
    }
    let (made, since) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (made_now, since_now) = (Arc::clone(&made), Arc::clone(&since));
    step::record(Some(Box::new(move |change| {
        if MEANWHILE.replace(true) {
            return;
        }
        made_now.fetch_add(usize::from(matches!(change, Change::Mkdir { .. })), Ordering::SeqCst);
        if made_now.load(Ordering::SeqCst) >= layers {
            at(since_now.fetch_add(1, Ordering::SeqCst));
        }
        MEANWHILE.set(false);
    })));
    let result = sandbox.handle(Request::Apply { paths: Vec::new(), dry_run: false, undo: false });
    step::record(None);
    assert!(matches!(&result, Ok(Reply::Applied(applied)) if applied.conflicts.is_empty()), "{result:?}");
    (made.load(Ordering::SeqCst), since.load(Ordering::SeqCst))
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(done.success());
}

#[test]
fn what_is_written_while_an_apply_puts_the_head_on_the_base_outlives_a_kill() {
    let first = tempfile::tempdir().unwrap();
    let (layers, _) = apply(&prepare(first.path()), usize::MAX, |_| ());
    let (mut kills, mut moments) = (0, 1);
    let mut moment = 0;
    while moment < moments {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = prepare(dir.path());
        let left: Arc<Mutex<Vec<PathBuf>>> = Arc::default();
        let (into, fs, place) = (Arc::clone(&left), Arc::clone(sandbox.fs()), dir.path().to_owned());
        let (_, seen) = apply(&sandbox, layers, move |at| {
            if at == moment {
                put(&fs, "late", b"acknowledged");
                put(&fs, "new", b"NEW");
            }
            if at >= moment {
                let to = place.join(format!("killed{at}"));
                copy(&place.join("store"), &to);
                into.lock().unwrap().push(to);
            }
        });
        moments = seen;
        for store in left.lock().unwrap().iter() {
            let when = format!("written at moment {moment} of {moments}, {}", store.display());
            let opened = Sandbox::open(store).unwrap();
            let late = Name::new(b"late").unwrap();
            assert!(opened.fs().lookup(NodeId::ROOT, &late).is_ok(), "{when}: it is not there");
            assert_eq!(get(opened.fs(), "late"), b"acknowledged", "{when}");
            assert_eq!(get(opened.fs(), "new"), b"NEW", "{when}");
            assert_eq!(get(opened.fs(), "old"), b"OF THE base", "{when}");
            drop(opened);
            assert_eq!(std::fs::read(dir.path().join("base/new")).unwrap(), b"new", "{when}");
            let checked = Sandbox::check_store(store, true).unwrap();
            assert!(checked.problems.is_empty(), "{when}: {:?}", checked.problems);
            kills += 1;
        }
        moment += 1;
    }
    assert!(moments > 5, "only {moments} moments");
    eprintln!("{kills} kills at {moments} moments");
}
