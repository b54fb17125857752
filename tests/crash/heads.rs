//! Kills a fork, a drop, a merge, and the end of a race, before each disk write. Afterwards each
//! head is as before or as after, and works.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use jailfs::internals::fs::Caller;
use jailfs::sandbox::{Change, Reply, Request, Rev, Sandbox};
use jailfs::types::{Name, NodeId, TreePath};

use crate::harness::{Live, text};
use crate::states::{check, states};
use crate::{copy, jailfs, prepared, stride};

type States = BTreeMap<String, Vec<Change>>;

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn dir_of(sandbox: &Sandbox, path: &str) -> (NodeId, Name) {
    let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
    let dirs = dir.split('/').filter(|part| !part.is_empty()).map(name);
    let find = |dir, part: Name| sandbox.fs().lookup(dir, &part).unwrap().id;
    (dirs.fold(NodeId::ROOT, find), name(last))
}

fn put(sandbox: &Sandbox, path: &str, text: &str) {
    let ((dir, last), fs) = (dir_of(sandbox, path), sandbox.fs());
    let me = Caller { uid: 0, gid: 0 };
    let made = || fs.mknod(dir, &last, 0o100_644, 0, 0, me).unwrap();
    let file = fs.lookup(dir, &last).unwrap_or_else(|_| made()).id;
    fs.truncate(file, 0, false).unwrap();
    fs.write(file, 0, text.as_bytes(), false).unwrap();
}

/// A store with three heads. `try` has a checkpoint, a file of `main` that it has changed, and
/// changes that are not sealed; `idle` was never used. All heads differ.
fn forked() -> Live {
    let live = prepared();
    let sandbox = Sandbox::open(&live.store).unwrap();
    let names = vec!["try".to_owned(), "idle".to_owned()];
    sandbox.handle(Request::Fork { names, from: None }).unwrap();
    let other = sandbox.head("try").unwrap();
    put(&other, "src/deep/made", "by try\n");
    let made = Request::Checkpoint { name: Some("tried".to_owned()), message: String::new() };
    other.handle(made).unwrap();
    put(&other, "big", &"changed by try\n".repeat(2000));
    put(&other, "docs/new", "by try\n");
    put(&sandbox, "src/f3", "changed by main\n");
    put(&sandbox, "src/late", "by main\n");
    live
}

/// Each head can be written to, and makes a checkpoint that can be read.
#[track_caller]
fn heads_work(store: &Path, when: &str) {
    let sandbox = Sandbox::open(store).unwrap();
    let Reply::Forks(heads) = sandbox.handle(Request::Forks).unwrap() else { panic!("no list") };
    for head in heads.iter().map(|head| &head.name) {
        let open = sandbox.head(head).unwrap_or_else(|error| panic!("{when}: {error}"));
        put(&open, "probe", head);
        let made = Request::Checkpoint { name: None, message: head.clone() };
        let made = open.handle(made);
        assert!(made.is_ok(), "{when}: head {head}: {made:?}");
    }
    drop(sandbox);
    let sandbox = Sandbox::open(store).unwrap();
    for head in heads.into_iter().map(|head| head.name) {
        let rev = Rev::Head { head: head.clone(), back: 1 };
        let path = TreePath::parse(b"probe").unwrap();
        match sandbox.handle(Request::Show { rev, path, offset: 0 }) {
            Ok(Reply::Shown(shown)) => assert_eq!(shown.bytes, head.as_bytes(), "{when}"),
            other => panic!("{when}: head {head} has lost a file: {other:?}"),
        }
    }
    drop(sandbox);
    check(store, &format!("{when}, used"));
    let collected = jailfs(store, &["gc"], "");
    assert!(collected.status.success(), "{when}: {}", text(&collected));
    check(store, &format!("{when}, collected"));
    let listed = |dir: &str| -> Vec<_> {
        std::fs::read_dir(store.join(dir))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect()
    };
    let known = listed("heads");
    let histories = listed("history");
    assert!(histories.iter().all(|file| known.contains(file)), "{when}: {histories:?}");
}

/// The states that a verb may leave: that before, that after, and if it makes several heads, the
/// first ones of them.
fn possible(before: &States, after: &States) -> Vec<States> {
    let mut all = vec![before.clone()];
    for (new, state) in after.iter().filter(|(id, _)| !before.contains_key(*id)) {
        let mut more = all.last().unwrap().clone();
        more.insert(new.clone(), state.clone());
        all.push(more);
    }
    all.push(after.clone());
    all
}

/// Kills a verb before each of its disk writes.
fn killed_at_every_step(live: &Live, words: &[&str]) {
    let copied = live.outside().join("copy");
    let before = states(&live.store);
    copy(&live.store, &copied);
    let whole = jailfs(&copied, words, "");
    assert!(whole.status.success(), "{words:?}: {}", text(&whole));
    let after = states(&copied);
    assert_ne!(before, after, "{words:?}");
    let possible = possible(&before, &after);
    let mut seen = vec![0; possible.len()];
    for step in (1..).step_by(stride()) {
        copy(&live.store, &copied);
        let output = jailfs(&copied, words, &format!("kill:any:{step}"));
        let when = format!("{words:?} killed at {step}");
        check(&copied, &when);
        let found = states(&copied);
        let Some(at) = possible.iter().position(|state| *state == found) else {
            let differs = |id: &&String| before.get(*id) != found.get(*id);
            let differs: Vec<_> = before.keys().chain(found.keys()).filter(differs).collect();
            panic!("{when}: the state is neither the old nor the new one: {differs:?} differ");
        };
        seen[at] += 1;
        heads_work(&copied, &when);
        if output.status.success() {
            assert_eq!(found, after, "{when}: it reports success");
            break;
        }
        assert!(step < 400, "{when}: the operation never ends");
    }
    eprintln!("{words:?}: the states before, between and after were left {seen:?} times");
    assert!(seen.iter().sum::<usize>() * stride() > 20, "{words:?}: {seen:?}");
}

#[test]
fn a_killed_fork_exists_or_not() {
    killed_at_every_step(&forked(), &["fork", "new"]);
}

#[test]
fn a_killed_fork_of_many_leaves_the_first_ones() {
    killed_at_every_step(&forked(), &["fork", "new", "-n", "3", "--from", "try@"]);
}

#[test]
fn a_killed_drop_of_a_head_was_done_or_not() {
    let live = forked();
    killed_at_every_step(&live, &["fork", "--drop", "try"]);
    killed_at_every_step(&live, &["fork", "--drop", "idle"]);
}

#[test]
fn a_killed_merge_was_done_or_not() {
    let live = forked();
    killed_at_every_step(&live, &["merge", "try"]);
    // The other way round, into a head that was never used.
    killed_at_every_step(&live, &["--head", "idle", "merge", "try"]);
}

/// Runs a race of two attempts, of which the second one wins. `steps` count from then on.
fn race(live: &Live, store: &Path, steps: &str) -> Output {
    let script = "echo $JAILFS_ATTEMPT > n; echo more >> src/f1; rm -f src/f3
        touch -d 2001-01-01 n src src/f1 .; [ $JAILFS_ATTEMPT = 2 ]";
    let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
    command.args(["run", "--forks", "2", "--jobs", "1", "--keep", "-C"]).arg(&live.base);
    command.arg("--store").arg(store).args(["--", "sh", "-ec", script]).current_dir("/");
    command.env("JAILFS_FAILPOINTS", format!("begin:run.pick,{steps}")).output().unwrap()
}

/// From the moment at which the winner is known, the caller's head is as before or as the winner.
/// The forks of the race are whole or gone.
#[test]
fn a_killed_pick_of_a_winner_was_done_or_not() {
    let live = forked();
    let copied = live.outside().join("copy");
    let run = |steps: &str| {
        copy(&live.store, &copied);
        let output = race(&live, &copied, steps);
        check(&copied, steps);
        (output, states(&copied))
    };
    let (output, before) = run("kill:any:1");
    assert!(!output.status.success(), "{}", text(&output));
    let (output, after) = run("");
    assert!(output.status.success(), "{}", text(&output));
    let attempts = |states: &States| states.keys().filter(|id| id.starts_with("run-")).count();
    assert_eq!((attempts(&before), attempts(&after)), (2, 0));
    assert_ne!(before["@"], after["@"]);
    let (mut steps, mut done, mut kept) = (0, 0, [0; 3]);
    for step in (1..).step_by(if stride() == 1 { 1 } else { 4 * stride() }) {
        let (output, found) = run(&format!("kill:any:{step}"));
        let when = format!("a race killed at {step} after its end");
        assert!(found["@"] == before["@"] || found["@"] == after["@"], "{when}: a mixture");
        for (id, state) in found.iter().filter(|(id, _)| *id != "@") {
            let was = before.get(id).or(after.get(id));
            assert_eq!(was, Some(state), "{when}: {id} has other content");
        }
        for id in before.keys().filter(|id| after.contains_key(*id)) {
            assert!(found.contains_key(id), "{when}: {id} is gone");
        }
        let is_done = found["@"] == after["@"];
        // The winner's fork stays until the caller's head has its state.
        assert!(is_done || attempts(&found) == 2, "{when}: {:?}", found.keys());
        (steps, done) = (steps + 1, done + usize::from(is_done));
        kept[attempts(&found)] += 1;
        heads_work(&copied, &when);
        if output.status.success() {
            assert_eq!(found, after, "{when}: it reports success");
            break;
        }
        assert!(step < 600, "{when}: the race never ends");
    }
    eprintln!("{steps} kills of a pick, {done} of them done; forks were left {kept:?} times");
    assert!(done > 0 && done < steps, "{done} of {steps}");
}

#[test]
fn a_checkpoint_that_is_reported_early_and_killed_is_there_in_a_dormant_head() {
    let live = forked();
    let copied = live.outside().join("copy");
    let words = ["--head", "try", "checkpoint", "--no-sync", "green"];
    let mut reported = 0;
    for step in 1..400 {
        let when = format!("kill:any:{step}");
        copy(&live.store, &copied);
        let output = jailfs(&copied, &words, &when);
        let is_reported = output.stdout.starts_with(b"checkpoint ");
        let log = || text(&jailfs(&copied, &["log"], ""));
        if is_reported {
            reported += 1;
            assert!(log().contains("green"), "{when}: another head does not see it");
            let dropped = jailfs(&copied, &["fork", "--drop", "try"], "");
            assert!(dropped.status.success(), "{when}: {dropped:?}");
            assert!(log().contains("green"), "{when}: it went with its head");
        }
        check(&copied, &when);
        if output.status.success() {
            break;
        }
    }
    assert!(reported > 0, "the last run was not killed");
}
