//! The program is ended by SIGKILL before each change of the disk that a verb makes, and each such change is made to fail: what
//! is found afterwards is the state before or the state after, whole, and every other checkpoint is what it was.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failure is what a test is for, and the figures are worth a line"
)]

#[expect(dead_code, reason = "other tests need more of it")]
#[path = "common/live.rs"]
mod harness;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use harness::{Live, shell};
use jailfs::sandbox::Sandbox;
use jailfs::sandbox::verbs::{Change, Detail, Reply, Request, Rev};

const BASE: &str = "
    mkdir -p src/deep docs; for n in 1 2 3 4 5 6; do seq $n 400 > src/f$n; done
    echo readme > README; ln README docs/also; ln -s ../README docs/link; seq 9000 > big
    setfattr -n user.x -v y src/f1
";

/// What was done before the verb, and what a verb can lead to.
const WORK: [&str; 4] = [
    "echo changed >> src/f1; rm src/f2; echo new > src/new",
    "mv docs manual; echo x >> README; truncate -s 100 big; mkdir -p a/b/c; echo deep > a/b/c/d",
    "rm -rf a; mv manual docs; seq 5000 | dd of=big bs=1 seek=50 conv=notrunc status=none; chmod 600 src/f3",
    "echo unsealed > src/unsealed; rm src/f4; mv src/f5 src/moved; ln src/moved src/linked; touch -d 2001-01-01 src/f6",
];

/// Of the steps at which a call fails, every so many is tried; `JAILFS_CRASH_STRIDE=1` tries all.
fn stride() -> usize {
    std::env::var("JAILFS_CRASH_STRIDE").map_or(4, |stride| stride.parse().unwrap())
}

fn prepared() -> Live {
    let mut live = Live::with_limit(BASE, &[], Duration::from_secs(400));
    for (at, script) in WORK.iter().enumerate() {
        live.sh(script);
        if at < 3 {
            live.checkpoint(&format!("c{at}"));
        }
    }
    live.umount();
    live
}

fn jailfs(store: &Path, words: &[&str], steps: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
    command
        .arg("--store")
        .arg(store)
        .args(words)
        .env("JAILFS_STEPS", steps)
        .current_dir("/")
        .output()
        .unwrap()
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("rm").arg("-rf").arg(to).status().unwrap();
    assert!(done.success());
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success());
}

/// Everything that can be asked of a store: the tree as it is and every checkpoint, each against the base, with content.
fn states(store: &Path) -> BTreeMap<String, Vec<Change>> {
    let sandbox = Sandbox::open(store).unwrap();
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!("not a log") };
    let checkpoints = log.into_iter().filter(|c| !c.automatic).map(|c| Rev::Id(c.id));
    let diff = |to: Rev| {
        let request =
            Request::Diff { from: Rev::Base, to: to.clone(), paths: Vec::new(), detail: Detail::Patch };
        match sandbox.handle(request).unwrap() {
            Reply::Diff(changes) => (to.to_string(), changes),
            other => panic!("{other:?}"),
        }
    };
    checkpoints.chain([Rev::Now]).map(diff).collect()
}

#[track_caller]
fn check(store: &Path, when: &str) {
    let checked = Sandbox::check_store(store, true).unwrap();
    assert!(checked.problems.is_empty(), "{when}: {:#?}", checked.problems);
}

/// Runs a verb once for each of its steps, each time ended or failed there.
fn at_every_step(words: &[&str]) {
    let live = prepared();
    let copied = live.outside().join("copy");
    let before = states(&live.store);
    copy(&live.store, &copied);
    let whole = jailfs(&copied, words, "");
    assert!(whole.status.success(), "{whole:?}");
    let after = states(&copied);
    let mut steps = u32::MAX;
    for action in ["kill:any:#", "fail:any:#:EIO", "fail:any:#+:ENOSPC"] {
        let stride = if action.starts_with("kill") { 1 } else { stride() };
        for step in (1..=steps).step_by(stride) {
            let rule = action.replace('#', &step.to_string());
            copy(&live.store, &copied);
            let output = jailfs(&copied, words, &rule);
            let when = format!("{words:?} with {rule}");
            // What is there is sound before anybody mends it, and after.
            check(&copied, &when);
            let found = states(&copied);
            check(&copied, &format!("{when}, opened"));
            assert!(found["@"] == before["@"] || found["@"] == after["@"], "{when}: the tree is neither");
            for (id, state) in found.iter().filter(|(id, _)| *id != "@") {
                let was = before.get(id).or(after.get(id));
                assert!(was.is_some_and(|was| was == state), "{when}: checkpoint {id} is another");
            }
            for id in before.keys().filter(|id| after.contains_key(*id)) {
                assert!(found.contains_key(id), "{when}: checkpoint {id} is gone");
            }
            if output.status.success() {
                assert!(found == after, "{when}: it says that it is done, and is not");
            }
            if output.status.success() && action.starts_with("kill") {
                // It came to its end: there are no more steps.
                steps = step;
                break;
            }
            assert!(step < 400, "{when}: there is no end to it");
        }
    }
    eprintln!("{words:?}: {steps} steps, each with SIGKILL, one in {} with EIO and a full disk", stride());
}

#[test]
fn a_checkpoint_that_is_cut_off_at_any_step_is_there_or_not() {
    at_every_step(&["checkpoint", "green"]);
}

#[test]
fn a_restore_that_is_cut_off_at_any_step_was_done_or_not() {
    at_every_step(&["restore", "c1"]);
}

#[test]
fn a_discard_that_is_cut_off_at_any_step_was_done_or_not() {
    at_every_step(&["discard"]);
}

#[test]
fn going_back_to_an_operation_cut_off_at_any_step_was_done_or_not() {
    at_every_step(&["op", "restore", "2"]);
}

#[test]
fn a_drop_that_is_cut_off_at_any_step_was_done_or_not() {
    at_every_step(&["drop", "c1"]);
}

#[test]
fn a_hold_that_is_cut_off_at_any_step_was_done_or_not() {
    at_every_step(&["hold", "c1"]);
}

#[test]
fn a_gc_that_is_cut_off_at_any_step_loses_nothing() {
    at_every_step(&["gc", "--operations", "0"]);
}

#[test]
fn a_gc_that_gives_up_checkpoints_and_is_cut_off_at_any_step_loses_no_other() {
    at_every_step(&["gc", "--operations", "0", "--keep", "1"]);
}

/// Each of the store's files with one bit flipped: it is told, or it changes nothing that can be asked for.
#[test]
fn a_flipped_bit_is_told_or_harmless() {
    let mut live = prepared();
    live.mount();
    live.checkpoint("all");
    live.umount();
    let sandbox = Sandbox::open(&live.store).unwrap();
    sandbox.tidy().unwrap();
    drop(sandbox);
    let before = states(&live.store);
    let files = shell(&live.store, "find layers heads heads.log identities base format -type f -size +0");
    let every: usize = std::env::var("JAILFS_FLIP_STRIDE").map_or(331, |stride| stride.parse().unwrap());
    let (mut flips, mut told, mut at) = (0, 0, 0);
    for file in files.lines().map(|file| live.store.join(file)) {
        let whole = std::fs::read(&file).unwrap();
        while at < whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 1 << (at % 8);
            std::fs::write(&file, &bad).unwrap();
            let when = format!("bit {} of byte {at} of {}", at % 8, file.display());
            let checked = Sandbox::check_store(&live.store, true);
            let problems = checked.as_ref().map_or(1, |checked| checked.problems.len());
            match std::panic::catch_unwind(|| states(&live.store)) {
                Ok(found) => assert!(
                    found == before || problems > 0,
                    "{when}: it is not told, and the states are others"
                ),
                Err(_) => assert!(problems > 0, "{when}: it cannot be opened, and the check finds nothing"),
            }
            (flips, told) = (flips + 1, told + usize::from(problems > 0));
            at += every;
            // What was opened may have been changed: a torn tail is cut off.
            std::fs::write(&file, &whole).unwrap();
        }
        at -= whole.len();
    }
    assert!(flips > 100 && told * 10 > flips * 8, "{told} of {flips} were told");
    eprintln!("{flips} bits flipped, {told} told, the others changed nothing");
}

/// What the base shows of a tree, without what no apply can give back: the numbers and change times of the host.
fn host(base: &Path) -> String {
    shell(
        base,
        "find . -printf '%p %y %m %U %G %T@ %s %l\\n' | grep -v '^\\. ' | sort; find . -type f | sort | xargs md5sum; getfattr -R -d . 2>/dev/null",
    )
}

/// An apply is ended at every step. The next start takes it back, and then it is done again, one step further.
#[test]
fn an_apply_that_is_cut_off_at_any_step_is_taken_back_or_done() {
    for action in ["kill:any:#", "fail:any:#:EIO"] {
        let mut live = prepared();
        live.applied = true;
        let before = host(&live.base);
        let tree = states(&live.store);
        let mut step = 0;
        loop {
            step += if action.starts_with("kill") { 1 } else { stride() };
            let rule = action.replace('#', &step.to_string());
            let output = jailfs(&live.store, &["apply"], &rule);
            check(&live.store, &rule);
            let opened = jailfs(&live.store, &["status"], "");
            assert!(opened.status.success(), "{rule}: {opened:?}");
            check(&live.store, &format!("{rule}, opened"));
            let left = shell(&live.base, "find . -name '.jailfs-*'");
            assert_eq!(left, "", "{rule}: staged files are left");
            let now = host(&live.base);
            if now != before {
                // Done: what the tree is now is what the base has.
                assert_eq!(states(&live.store)["@"], [], "{rule}: half an apply");
                assert!(output.status.success() || step > 10, "{rule}");
                break;
            }
            assert!(!output.status.success(), "{rule}: it says that it is done, and is not");
            let kept = states(&live.store);
            assert!(kept.keys().eq(tree.keys()), "{rule}: checkpoints are lost");
            assert_eq!(kept["@"].len(), tree["@"].len(), "{rule}: the tree is another");
            assert!(step < 400, "{rule}: there is no end to it");
        }
        eprintln!("apply: {action}: {step} steps");
    }
}
