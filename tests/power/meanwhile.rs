//! Power cuts while everything runs at once: programs write and sync, beside checkpoints, restores,
//! undos, gc, housekeeping and applies, each in a thread of its own.
//!
//! Each thread has its own files, so the possible results are known: at least what was promised
//! before the cut, and never a content that did not exist.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use jailfs::internals::fs::{Caller, RenameMode};
use jailfs::sandbox::{Consent, Rev};
use jailfs::types::{Name, NodeId, TreePath};

use super::*;

const SEED: u64 = 11;
/// One in so many changes of the store is followed by a power cut.
const ONE_IN: u64 = 48;
const MOST_CUTS: usize = 40;
const ROUNDS: u64 = 8;
const LINES: u64 = 60;
const WRITERS: usize = 2;

/// A promise, from one moment on.
#[derive(Debug)]
enum Promise {
    /// So many lines of a writer's file.
    Lines(usize, u64),
    /// A checkpoint, with at least so many lines of each writer.
    Checkpoint(String, Vec<u64>),
    /// The base has at least what was applied in this round.
    Applied(u64),
}

/// The promises, each with its number of changes of the store.
#[derive(Default)]
struct Promises {
    made: Mutex<Vec<(usize, Promise)>>,
    /// The promised number of lines of each writer.
    lines: [AtomicU64; WRITERS],
}

impl Promises {
    fn make(&self, promise: Promise) {
        if let Promise::Lines(writer, lines) = promise {
            self.lines[writer].store(lines, Ordering::SeqCst);
        }
        let after = CHANGES.load(Ordering::SeqCst);
        self.made.lock().unwrap().push((after, promise));
    }

    fn lines_now(&self) -> Vec<u64> {
        self.lines.iter().map(|lines| lines.load(Ordering::SeqCst)).collect()
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn path(text: &str) -> TreePath {
    TreePath::parse(text.as_bytes()).unwrap()
}

/// Replaces a file's content atomically, as editors do.
fn replace(sandbox: &Sandbox, dir: &str, file: &str, text: &str) {
    let fs = sandbox.fs();
    let dir = fs.lookup(NodeId::ROOT, &name(dir)).unwrap().id;
    let staged = name(&format!("{file}.new"));
    let made = fs.mknod(dir, &staged, 0o100_644, 0, 0, Caller { uid: 0, gid: 0 }).unwrap().id;
    fs.write(made, 0, text.as_bytes(), false).unwrap();
    fs.rename(dir, &staged, dir, &name(file), RenameMode::Replace, 1).unwrap();
}

fn read(sandbox: &Sandbox, file: &str) -> String {
    let parts = file.split('/').map(name);
    let id = parts.fold(NodeId::ROOT, |dir, part| sandbox.fs().lookup(dir, &part).unwrap().id);
    let bytes = sandbox.fs().read(id, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    String::from_utf8(bytes).unwrap()
}

fn checkpoint(sandbox: &Sandbox, name: &str) {
    let request = Request::Checkpoint { name: Some(name.to_owned()), message: String::new() };
    sandbox.handle(request).unwrap();
}

fn restore(sandbox: &Sandbox, to: &str, paths: Vec<TreePath>) {
    let request =
        Request::Restore { to: Rev::parse(to), paths, dry_run: false, detach_mounts: false };
    sandbox.handle(request).unwrap();
}

/// Long enough that duplicate content is found.
fn text(round: u64) -> String {
    let line = format!("round {round}, {}\n", "of the same length ".repeat(20));
    line.repeat(30)
}

fn lines_of(count: u64) -> String {
    (0..count).map(|line| format!("line {line}\n")).collect()
}

/// Appends lines and syncs now and then.
fn write(sandbox: &Sandbox, promises: &Promises, writer: usize) {
    let fs = sandbox.fs();
    let dir = fs.lookup(NodeId::ROOT, &name("written")).unwrap().id;
    let file = fs.lookup(dir, &name(&format!("w{writer}"))).unwrap().id;
    for line in 0..LINES {
        let at = lines_of(line).len() as u64;
        fs.write(file, at, format!("line {line}\n").as_bytes(), false).unwrap();
        if line % 3 == 2 {
            fs.sync().unwrap();
            promises.make(Promise::Lines(writer, line + 1));
        }
    }
}

/// Everything at once.
fn everything(sandbox: &Sandbox, promises: &Promises) {
    let rounds = |round: &dyn Fn(u64)| (1..=ROUNDS).for_each(round);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            scope.spawn(move || write(sandbox, promises, writer));
        }
        scope.spawn(|| {
            rounds(&|round| {
                let lines = promises.lines_now();
                let name = format!("made{round}");
                checkpoint(sandbox, &name);
                promises.make(Promise::Checkpoint(name, lines));
            });
        });
        scope.spawn(|| {
            rounds(&|round| {
                restore(sandbox, ["one", "two"][round as usize % 2], vec![path("restored")])
            });
        });
        scope.spawn(|| {
            rounds(&|round| {
                replace(sandbox, "undone", "f", &text(round));
                sandbox.handle(Request::Undo { path: path("undone/f"), steps: 1 }).unwrap();
            });
        });
        scope.spawn(|| {
            rounds(&|round| {
                replace(sandbox, "applied", "f", &text(round));
                replace(sandbox, "applied", "g", &text(round));
                let paths = vec![path("applied")];
                let request =
                    Request::Apply { paths, dry_run: false, undo: false, consent: Consent::ALL };
                let Reply::Applied(applied) = sandbox.handle(request).unwrap() else {
                    panic!("no apply")
                };
                assert_eq!(applied.conflicts, []);
                promises.make(Promise::Applied(round));
            });
        });
        scope.spawn(|| {
            rounds(&|_| {
                let request =
                    Request::Gc { operations: 2, keep: None, max_store: None, dry_run: false };
                sandbox.handle(request).unwrap();
            });
        });
        scope.spawn(|| rounds(&|_| sandbox.compact().unwrap()));
    });
}

fn round_of(text: &str) -> u64 {
    let round = text.strip_prefix("round ").and_then(|rest| rest.split(',').next()?.parse().ok());
    let round = round.unwrap_or_else(|| panic!("this was never written: {:.40}", text));
    assert_eq!(text, self::text(round), "this was never written");
    round
}

/// The number of lines, if there is nothing else.
fn lines_in(sandbox: &Sandbox, writer: usize, context: &str) -> u64 {
    let found = read(sandbox, &format!("written/w{writer}"));
    let count = found.lines().count() as u64;
    assert_eq!(found, lines_of(count), "{context}: writer {writer}");
    count
}

/// Opens the result of a power cut and compares it with the promises.
fn judge(left: &Left, base: &Path, promises: &[(usize, Promise)]) {
    let context = &left.context;
    let sandbox = Sandbox::open(&left.store).unwrap_or_else(|error| panic!("{context}: {error}"));
    let made = promises.iter().filter(|(after, _)| *after <= left.at).map(|(_, promise)| promise);
    let (mut lines, mut applied, mut names) = ([0; WRITERS], 0, BTreeSet::new());
    for promise in made {
        match promise {
            Promise::Lines(writer, count) => lines[*writer] = lines[*writer].max(*count),
            Promise::Checkpoint(name, _) => drop(names.insert(name.clone())),
            Promise::Applied(round) => applied = *round,
        }
    }
    for (writer, promised) in lines.iter().enumerate() {
        let found = lines_in(&sandbox, writer, context);
        assert!(
            found >= *promised,
            "{context}: writer {writer}: {found} lines, {promised} were synced"
        );
    }
    let restored = (read(&sandbox, "restored/f"), read(&sandbox, "restored/g"));
    assert!(
        restored.0 == restored.1 && round_of(&restored.0) < 2,
        "{context}: a restore was done halfway"
    );
    round_of(&read(&sandbox, "undone/f"));
    round_of(&read(&sandbox, "applied/f"));
    let in_base =
        |file: &str| round_of(&std::fs::read_to_string(base.join("applied").join(file)).unwrap());
    let round = in_base("f");
    assert_eq!(round, in_base("g"), "{context}: an apply was done halfway");
    assert!(round >= applied, "{context}: the base has round {round}, {applied} was applied");
    let staged = shell(base, "find . -name '.jailfs-*'");
    assert_eq!(staged, "", "{context}: staged files are left");
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!("not a log") };
    let found: BTreeSet<String> =
        log.into_iter().filter_map(|checkpoint| checkpoint.name).collect();
    assert!(names.is_subset(&found), "{context}: checkpoints are gone: {names:?} {found:?}");
    for (_, promise) in promises {
        let Promise::Checkpoint(name, promised) = promise else { continue };
        if found.contains(name) {
            restore(&sandbox, name, Vec::new());
            for (writer, promised) in promised.iter().enumerate() {
                let found = lines_in(&sandbox, writer, context);
                assert!(
                    found >= *promised,
                    "{context}: checkpoint {name}, writer {writer}: {found} lines"
                );
            }
        }
    }
    replace(&sandbox, "written", "probe", &text(1));
    checkpoint(&sandbox, "probe");
    drop(sandbox);
    check(&left.store, context);
}

#[test]
fn a_power_cut_while_everything_runs_keeps_every_promise() {
    let _turn = TURN.lock();
    let make = "truncate -s 24M ../image; mkfs.ext4 -q -b 4096 -J size=4 ../image; \
        mount -o loop,noatime,noauto_da_alloc ../image $PWD";
    let fill = "rmdir lost+found; mkdir written restored undone applied; sync -f .";
    let mut live =
        Live::with_limit(&format!("{make}; cd $PWD; {fill}"), &[], Duration::from_secs(200));
    let mounted = Mounted(live.base.clone());
    live.applied = true;
    live.umount();
    let (base, store, image) =
        (live.base.clone(), live.store.clone(), live.outside().join("image"));
    let mut world = World { live, random: Random(SEED), boots: 0, cuts: 0 };
    world.boot();
    let sandbox = Sandbox::open(&store).unwrap();
    for (round, label) in [(0, "one"), (1, "two")] {
        for (dir, file) in [
            ("restored", "f"),
            ("restored", "g"),
            ("undone", "f"),
            ("applied", "f"),
            ("applied", "g"),
        ] {
            replace(&sandbox, dir, file, &text(round));
        }
        checkpoint(&sandbox, label);
    }
    let promises = Promises::default();
    (0..WRITERS).for_each(|writer| replace(&sandbox, "written", &format!("w{writer}"), ""));
    let apply = Request::Apply {
        paths: vec![path("applied")],
        dry_run: false,
        undo: false,
        consent: Consent::ALL,
    };
    sandbox.handle(apply).unwrap();
    drop(sandbox);
    shell(&base, "sync -f .");
    let work = || {
        let sandbox = Sandbox::open(&store).unwrap();
        everything(&sandbox, &promises);
    };
    let (_, lefts) = world.cut_while((&image, &store), ONE_IN, "everything at once", true, work);
    drop(mounted);
    let promises = promises.made.into_inner().unwrap();
    assert!(lefts.len() > 10, "there were only {} power cuts", lefts.len());
    let step = lefts.len().div_ceil(MOST_CUTS);
    for left in lefts.iter().step_by(step) {
        let _mounted = Mounted::new(&left.base, &base);
        world.boot();
        judge(left, &base, &promises);
    }
    eprintln!("{} power cuts of {} while everything ran", lefts.len().div_ceil(step), lefts.len());
    failpoint::set_boot(None);
}
