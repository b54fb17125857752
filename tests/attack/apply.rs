//! The writes of `apply`, while the base and the agent race.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jailfs::internals::fs::Caller;
use jailfs::sandbox::{Reply, Request};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use crate::common::Stop;

const ME: Caller = Caller { uid: 0, gid: 0 };
const TIME: Duration = Duration::from_secs(2);
/// How much longer the test waits until one apply has succeeded.
const PATIENCE: Duration = Duration::from_secs(40);

/// Everything that is visible outside.
fn look(dir: &Path) -> BTreeMap<PathBuf, String> {
    let all = crate::common::snapshot(dir);
    all.into_iter()
        .map(|seen| (seen.path, format!("{:?} {:?}", &seen.stat[..9], seen.bytes)))
        .collect()
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A base with a directory `d`, and beside it a link `l` to a directory outside that looks the
/// same.
struct Ground {
    _dir: tempfile::TempDir,
    base: PathBuf,
    store: PathBuf,
    outside: PathBuf,
}

impl Ground {
    fn new() -> Ground {
        let dir = tempfile::tempdir().unwrap();
        let [base, store, outside] = ["base", "store", "outside"].map(|name| dir.path().join(name));
        for dir in [base.join("d"), outside.clone()] {
            fs::create_dir_all(dir.join("sub")).unwrap();
            for file in ["f", "gone", "sub/g"] {
                fs::write(dir.join(file), "old").unwrap();
            }
        }
        symlink("../outside", base.join("l")).unwrap();
        Ground { _dir: dir, base, store, outside }
    }

    /// Exchanges the directory and the link, and back, until it is stopped: at full speed, with
    /// pauses, so that some applies succeed.
    fn swap(&self, stop: &Stop, swaps: &AtomicU64) {
        let [d, l] = ["d", "l"].map(|name| self.base.join(name));
        let begun = Instant::now();
        while !stop.is_said() {
            if !(begun.elapsed().as_millis() / 50).is_multiple_of(3) {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            for _ in 0..2 {
                let done = renameat2(AT_FDCWD, &d, AT_FDCWD, &l, RenameFlags::RENAME_EXCHANGE);
                swaps.fetch_add(u64::from(done.is_ok()), Ordering::Relaxed);
            }
            // An apply that saw both names in between may have found one of them missing.
            if l.symlink_metadata().is_err() {
                let _there_or_not = symlink("../outside", &l);
            }
        }
    }

    /// A node that an apply found changed stays a conflict for ever, so continue with another
    /// store.
    fn begin_anew(&self, round: u64) {
        // A rollback that is still due is done now.
        drop(self.open());
        fs::rename(&self.store, self.store.with_file_name(format!("store-{round}"))).unwrap();
    }

    fn open(&self) -> std::sync::Arc<Sandbox> {
        let end = Instant::now() + PATIENCE;
        loop {
            // A half-done apply is rolled back when the store opens, and an exchange may make that
            // fail as well.
            match Sandbox::create_or_open(&self.base, &self.store, &StoreOptions::default()) {
                Ok(sandbox) => return sandbox,
                Err(error) => {
                    assert!(error.kind != jailfs::error::Kind::Damage, "{error}");
                    assert!(Instant::now() < end, "it cannot be opened: {error}");
                }
            }
        }
    }
}

/// One round of an agent's work: changes, creates and removes files below `d`, as far as it exists
/// at the time.
fn work(sandbox: &Sandbox, round: u64) -> bool {
    let fs = sandbox.fs();
    let Ok(dir) = fs.lookup(NodeId::ROOT, &name("d")) else { return false };
    let text = format!("new {round}");
    for file in ["f", "made"] {
        let found = fs
            .lookup(dir.id, &name(file))
            .or_else(|_| fs.mknod(dir.id, &name(file), 0o100_644, 0, 0, ME));
        if let Ok(entry) = found {
            let _done = fs.write(entry.id, 0, text.as_bytes(), false);
        }
    }
    let _done = fs.unlink(dir.id, &name("gone"));
    let _done = fs.mkdir(dir.id, &name(&format!("n{}", round % 4)), 0o755, 0, ME);
    true
}

#[test]
fn apply_never_writes_through_a_link_while_base_and_agent_race() {
    let ground = Ground::new();
    let before = look(&ground.outside);
    let stop = Stop::default();
    let [swaps, applied, refused] = [0; 3].map(AtomicU64::new);
    std::thread::scope(|scope| {
        let _at_the_end = stop.at_the_end();
        scope.spawn(|| ground.swap(&stop, &swaps));
        let end = Instant::now() + TIME;
        let mut round = 0;
        let nothing_yet = || {
            let none = |count: &AtomicU64| count.load(Ordering::Relaxed) == 0;
            (none(&applied) || none(&refused)) && Instant::now() < end + PATIENCE
        };
        while Instant::now() < end || nothing_yet() {
            let sandbox = ground.open();
            let before_this = applied.load(Ordering::Relaxed);
            std::thread::scope(|inner| {
                let agent = inner.spawn(|| {
                    let mut round = 0;
                    while work(&sandbox, round) && round < 50 {
                        round += 1;
                    }
                });
                for _ in 0..5 {
                    round += 1;
                    work(&sandbox, round);
                    match sandbox.handle(Request::Apply {
                        paths: vec![],
                        dry_run: false,
                        undo: false,
                        consent: Default::default(),
                    }) {
                        Ok(Reply::Applied(reply)) if reply.conflicts.is_empty() => {
                            applied.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(_) | Err(_) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                agent.join().unwrap();
            });
            drop(sandbox);
            if applied.load(Ordering::Relaxed) == before_this {
                ground.begin_anew(round);
            }
            assert_eq!(look(&ground.outside), before);
        }
    });
    assert_eq!(look(&ground.outside), before);
    let [swaps, applied, refused] = [swaps, applied, refused].map(AtomicU64::into_inner);
    eprintln!("{swaps} swaps, {applied} applies, {refused} refused");
    assert!(swaps > 100 && applied > 0 && refused > 0, "{swaps} {applied} {refused}");
}

/// This shows that the race is real: a program that writes by path gets out at once.
#[test]
fn a_copy_by_path_is_led_out_of_the_base_in_the_same_race() {
    let ground = Ground::new();
    let before = look(&ground.outside);
    let (stop, swaps) = (Stop::default(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _at_the_end = stop.at_the_end();
        scope.spawn(|| ground.swap(&stop, &swaps));
        let end = Instant::now() + Duration::from_secs(20);
        while look(&ground.outside) == before {
            assert!(Instant::now() < end, "no attempt got out");
            let _written = fs::write(ground.base.join("d/f"), "new");
        }
    });
}

/// A backup made of hard links, or a package store whose files were linked into the base.
#[test]
fn an_apply_does_not_change_hard_links_outside_of_the_base() {
    let ground = Ground::new();
    for (name, outside) in [("one", "kept-one"), ("two", "kept-two")] {
        fs::write(ground.base.join(name), "old").unwrap();
        fs::hard_link(ground.base.join(name), ground.outside.join(outside)).unwrap();
    }
    fs::hard_link(ground.base.join("d/f"), ground.base.join("d/pair")).unwrap();
    let sandbox = ground.open();
    for (dir, file) in
        [(NodeId::ROOT, "one"), (sandbox.fs().lookup(NodeId::ROOT, &name("d")).unwrap().id, "f")]
    {
        let file = sandbox.fs().lookup(dir, &name(file)).unwrap();
        sandbox.fs().write(file.id, 0, b"new", false).unwrap();
    }
    sandbox
        .handle(Request::Apply {
            paths: vec![],
            dry_run: false,
            undo: false,
            consent: Default::default(),
        })
        .unwrap();
    let read = |path: PathBuf| fs::read_to_string(path).unwrap();
    assert_eq!(
        (read(ground.base.join("one")), read(ground.outside.join("kept-one"))),
        ("new".into(), "old".into())
    );
    assert_eq!(
        (read(ground.base.join("two")), read(ground.outside.join("kept-two"))),
        ("old".into(), "old".into())
    );
    assert_eq!(read(ground.base.join("d/pair")), "new", "links within the base stay links");
    let number = |path: PathBuf| fs::metadata(path).unwrap().ino();
    assert_eq!(
        number(ground.base.join("two")),
        number(ground.outside.join("kept-two")),
        "the apply did not touch it"
    );
    sandbox
        .handle(Request::Apply {
            paths: vec![],
            dry_run: false,
            undo: true,
            consent: Default::default(),
        })
        .unwrap();
    assert_eq!(
        (read(ground.base.join("one")), read(ground.base.join("d/pair"))),
        ("old".into(), "old".into())
    );
}
