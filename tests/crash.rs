//! Kills the program before each disk write of a verb, and makes each such write fail. Afterwards
//! the state is the one before or the one after, complete, and every other checkpoint is unchanged.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking, and prints its figures"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;
#[path = "crash/heads.rs"]
mod heads;
#[path = "common/host.rs"]
mod host;
#[path = "common/states.rs"]
mod states;

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use harness::{Live, shell};
use host::host;
use jailfs::sandbox::Sandbox;
use states::{check, states};

const BASE: &str = "
    mkdir -p src/deep docs; for n in 1 2 3 4 5 6; do seq $n 400 > src/f$n; done
    echo readme > README; ln README docs/also; ln -s ../README docs/link; seq 9000 > big
    setfattr -n user.x -v y src/f1
";

/// The state before a verb, and the states that it may lead to.
const WORK: [&str; 4] = [
    "echo changed >> src/f1; rm src/f2; echo new > src/new",
    "mv docs manual; echo x >> README; truncate -s 100 big; mkdir -p a/b/c; echo deep > a/b/c/d",
    "rm -rf a; mv manual docs; seq 5000 | dd of=big bs=1 seek=50 conv=notrunc status=none; \
     chmod 600 src/f3",
    "echo unsealed > src/unsealed; rm src/f4; mv src/f5 src/moved; ln src/moved src/linked; \
     touch -d 2001-01-01 src/f6",
];

/// Tries only one in so many failing calls, and every other kill. `JAILFS_CRASH_STRIDE=1` tries
/// all.
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
        .env("JAILFS_FAILPOINTS", steps)
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

/// Runs a verb once for each of its failpoints, killed or failed there.
fn at_every_step(words: &[&str]) {
    at_every_step_of(&prepared(), words);
}

fn at_every_step_of(live: &Live, words: &[&str]) {
    let copied = live.outside().join("copy");
    let before = states(&live.store);
    copy(&live.store, &copied);
    let whole = jailfs(&copied, words, "");
    assert!(whole.status.success(), "{whole:?}");
    let after = states(&copied);
    let mut steps = u32::MAX;
    for action in ["kill:any:#", "fail:any:#:EIO", "fail:any:#+:ENOSPC"] {
        let stride = if action.starts_with("kill") { stride().min(2) } else { stride() };
        for step in (1..=steps).step_by(stride) {
            let rule = action.replace('#', &step.to_string());
            copy(&live.store, &copied);
            let output = jailfs(&copied, words, &rule);
            let when = format!("{words:?} with {rule}");
            // The store is sound before recovery, and after it.
            check(&copied, &when);
            let found = states(&copied);
            check(&copied, &format!("{when}, opened"));
            assert!(
                found["@"] == before["@"] || found["@"] == after["@"],
                "{when}: the tree is neither the old nor the new one"
            );
            for (id, state) in found.iter().filter(|(id, _)| *id != "@") {
                let was = before.get(id).or(after.get(id));
                assert!(
                    was.is_some_and(|was| was == state),
                    "{when}: checkpoint {id} has other content"
                );
            }
            for id in before.keys().filter(|id| after.contains_key(*id)) {
                assert!(found.contains_key(id), "{when}: checkpoint {id} is gone");
            }
            if output.status.success() {
                assert!(found == after, "{when}: it reports success, and did nothing");
            }
            if words.first() == Some(&"gc") && action.starts_with("kill") {
                let again = jailfs(&copied, words, "");
                assert!(again.status.success(), "{when}: a gc after it fails: {again:?}");
                assert_eq!(states(&copied), after, "{when}, and gc again");
            }
            if output.status.success() && action.starts_with("kill") {
                // It ran to its end: there are no more failpoints.
                steps = step;
                break;
            }
            assert!(step < 400, "{when}: the operation never ends");
        }
    }
    eprintln!(
        "{words:?}: {steps} steps, one in {} with SIGKILL, one in {} with EIO and a full disk",
        stride().min(2),
        stride()
    );
}

/// The disk of the store has space, and that of the temporary files has none.
#[test]
fn publishing_a_file_needs_no_space_for_temporary_files() {
    let live = prepared();
    for words in [
        &["checkpoint", "green"][..],
        &["hold", "c0"],
        &["restore", "c1"],
        &["gc", "--operations", "0"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let command = command.arg("--store").arg(&live.store).args(words).current_dir("/");
        let output = command.env("TMPDIR", live.outside().join("nowhere")).output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
    }
    check(&live.store, "without temporary files");
}

#[test]
fn an_interrupted_checkpoint_exists_or_not() {
    at_every_step(&["checkpoint", "green"]);
}

/// The failures are those before the report, and the late ones, which the command reports too.
#[test]
fn a_checkpoint_that_is_reported_before_its_sync_and_fails_exists_or_not() {
    at_every_step(&["checkpoint", "--no-sync", "green"]);
}

#[test]
fn a_checkpoint_that_is_reported_before_its_sync_survives_every_kill() {
    let (live, words) = (prepared(), ["checkpoint", "--no-sync", "green"]);
    let (copied, killed) = (live.outside().join("copy"), live.outside().join("killed"));
    copy(&live.store, &copied);
    assert!(jailfs(&copied, &words, "").status.success());
    let (before, after) = (states(&live.store), states(&copied));
    let (mut step, mut reported) = (0, 0);
    loop {
        step += 1;
        assert!(step < 400, "the operation never ends");
        let when = format!("kill:any:{step}");
        copy(&live.store, &copied);
        let output = jailfs(&copied, &words, &when);
        if output.stdout.starts_with(b"checkpoint ") && reported == 0 {
            copy(&copied, &killed);
        }
        check(&copied, &when);
        let found = states(&copied);
        check(&copied, &format!("{when}, opened"));
        assert_eq!(found["@"], after["@"], "{when}");
        assert!(before.keys().all(|id| found.contains_key(id)), "{when}: checkpoints are lost");
        if output.stdout.starts_with(b"checkpoint ") {
            assert!(found == after, "{when}: it was reported");
            let log = jailfs(&copied, &["log"], "");
            assert!(String::from_utf8_lossy(&log.stdout).contains("green"), "{when}: its name");
            reported += 1;
        }
        if output.status.success() {
            break;
        }
    }
    eprintln!("{step} steps, {reported} of them after the report was printed");
    // The start after such a kill is killed, too.
    let is_whole = |step: &u32| {
        let when = format!("kill:any:{step} of the next start");
        copy(&killed, &copied);
        let output = jailfs(&copied, &["log"], &format!("kill:any:{step}"));
        check(&copied, &when);
        assert!(states(&copied) == after, "{when}");
        output.status.success()
    };
    let steps = (1..400).find(is_whole).expect("the start ends");
    assert!(steps > 5, "the start completes the checkpoint");
}

#[test]
fn an_interrupted_restore_was_done_or_not() {
    at_every_step(&["restore", "c1"]);
}

#[test]
fn an_interrupted_restore_of_paths_was_done_or_not() {
    at_every_step(&["restore", "c1", "src", "big"]);
}

#[test]
fn an_interrupted_discard_was_done_or_not() {
    at_every_step(&["discard"]);
}

#[test]
fn an_interrupted_op_restore_was_done_or_not() {
    at_every_step(&["op", "restore", "2"]);
}

#[test]
fn an_interrupted_undo_was_done_or_not() {
    at_every_step(&["undo", "src/f1"]);
}

#[test]
fn an_interrupted_undo_of_a_deletion_was_done_or_not() {
    at_every_step(&["undo", "src/f4"]);
}

#[test]
fn an_interrupted_drop_was_done_or_not() {
    at_every_step(&["drop", "c1"]);
}

#[test]
fn an_interrupted_hold_was_done_or_not() {
    at_every_step(&["hold", "c1"]);
}

#[test]
fn an_interrupted_gc_loses_nothing() {
    at_every_step(&["gc", "--operations", "0"]);
}

#[test]
fn an_interrupted_gc_that_drops_checkpoints_loses_no_other() {
    at_every_step(&["gc", "--operations", "0", "--keep", "1"]);
}

/// The same store, with its layers in the archive.
fn archived() -> Live {
    let live = prepared();
    let sandbox = Sandbox::open(&live.store).unwrap();
    sandbox.compact().unwrap();
    drop(sandbox);
    assert!(live.store.join("archive/root").exists());
    live
}

#[test]
fn an_interrupted_drop_of_an_archived_checkpoint_was_done_or_not() {
    at_every_step_of(&archived(), &["drop", "c1"]);
}

#[test]
fn an_interrupted_gc_over_the_archive_loses_nothing() {
    at_every_step_of(&archived(), &["gc", "--operations", "0", "--keep", "1"]);
}

/// A store with files of every kind.
fn store_of_all_kinds() -> Live {
    let mut live = prepared();
    live.mount();
    live.jailfs(&["hold", "c1"]);
    live.checkpoint("all");
    live.umount();
    let sandbox = Sandbox::open(&live.store).unwrap();
    sandbox.compact().unwrap();
    drop(sandbox);
    live
}

/// Truncates each of the store's files at some byte. The lost part is reported, or was written last
/// and is gone, or is not readable by any request.
#[test]
fn a_truncated_file_is_reported_or_has_an_earlier_end() {
    let mut live = store_of_all_kinds();
    live.mount();
    live.sh("echo 1 > last; echo 2 >> last; mkdir d; mv last d/; rm -r d; echo 3 > src/f3; \
        chmod 700 src/f6");
    live.umount();
    let before = states(&live.store);
    copy(&live.store, &live.outside().join("whole"));
    let files = shell(&live.store, "find . -type f -size +0 | cut -c3- | sort");
    let top = shell(&live.store, "ls layers/*/journal | tail -n1");
    let top = top.trim();
    let every: usize =
        std::env::var("JAILFS_CUT_STRIDE").map_or(211, |stride| stride.parse().unwrap());
    let (mut cuts, mut reported) = (0, 0);
    let mut seen = std::collections::BTreeSet::new();
    for file in files.lines() {
        let path = live.store.join(file);
        let whole = std::fs::read(&path).unwrap();
        // All bytes of content are alike, and `chunks` is a table of hints.
        let is_content = file.ends_with("pool") || file == "reserve";
        let every = match every {
            1 if is_content || file == "chunks" => 1.max(whole.len() / 200),
            1 => 1,
            _ => every.max(whole.len() / if is_content { 3 } else { 12 }),
        };
        for at in (cuts % 5..whole.len()).step_by(every) {
            std::fs::write(&path, &whole[..at]).unwrap();
            let when = format!("{file} cut at byte {at} of {}", whole.len());
            let checked = Sandbox::check_store(&live.store, true);
            let problems = checked.as_ref().map_or(1, |checked| checked.problems.len());
            match jailfs::sandbox::Sandbox::open(&live.store) {
                Err(error) => {
                    assert!(
                        problems > 0,
                        "{when}: the store cannot be opened, and the check finds nothing: {error}"
                    );
                    let named = error.to_string().contains(file.rsplit('/').next().unwrap());
                    assert!(named, "{when}: the error does not name the file: {error}");
                }
                Ok(sandbox) => {
                    drop(sandbox);
                    let found = std::panic::catch_unwind(|| states(&live.store));
                    match found {
                        Err(_) => assert!(
                            problems > 0,
                            "{when}: a state cannot be read, and the check finds nothing"
                        ),
                        Ok(found) if found == before || problems > 0 => {}
                        // The upper layer's journal: the state some records ago.
                        Ok(found) if file == top => {
                            let same = found
                                .iter()
                                .all(|(id, state)| id == "@" || before.get(id) == Some(state));
                            assert!(same, "{when}: a checkpoint has other content");
                            seen.insert(format!("{:?}", found["@"]));
                        }
                        // The last operations are lost, and no state changes.
                        Ok(found) => {
                            assert!(
                                file == "identities" || file == "heads.log",
                                "{when}: the check does not report it"
                            );
                            assert_eq!(found, before, "{when}");
                        }
                    }
                }
            }
            (cuts, reported) = (cuts + 1, reported + usize::from(problems > 0));
            // Opening the store may have changed more than this file.
            std::fs::write(&path, &whole).unwrap();
            copy(&live.outside().join("whole"), &live.store);
        }
    }
    assert!(cuts > 50 && reported > cuts / 3, "{reported} of {cuts} were reported");
    eprintln!("{cuts} cuts, {reported} reported, {} states before the last", seen.len());
}

/// A sealed layer whose journal was truncated must not pass for an earlier state. The store is
/// refused, and the error names the journal and the checkpoints that do not need it.
#[test]
fn a_truncated_sealed_journal_is_refused_by_name() {
    let mut live = Live::with_limit(BASE, &["-o", "gc=off"], Duration::from_secs(400));
    for at in 0..6 {
        live.sh(&format!("mkdir dir{at}; seq {at} 99 > dir{at}/f; echo {at} >> README"));
        live.checkpoint(&format!("c{at}"));
        if at == 3 {
            live.jailfs(&["restore", "c1"]);
        }
    }
    live.umount();
    let whole = live.outside().join("whole");
    copy(&live.store, &whole);
    let journals = shell(&live.store, "ls layers/*/journal | sed '$d'");
    assert_eq!(journals.lines().count(), 6, "{journals}");
    for journal in journals.lines() {
        let path = live.store.join(journal);
        let bytes = std::fs::read(&path).unwrap();
        let layer: u32 = journal.split('/').nth(1).unwrap().parse().unwrap();
        for at in (0..bytes.len()).step_by(7) {
            std::fs::write(&path, &bytes[..at]).unwrap();
            let Err(error) = Sandbox::open(&live.store) else {
                panic!("{journal} cut at {at} was opened")
            };
            let message = format!("{error} {}", error.hint.as_deref().unwrap_or_default());
            assert!(message.contains(journal), "{journal} cut at {at}: {message}");
            copy(&whole, &live.store);
        }
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let error = Sandbox::open(&live.store).err().unwrap();
        assert!(error.to_string().contains(&format!("layer {layer}")), "{error}");
        let hint = error.hint.as_deref().unwrap_or_default();
        assert_eq!(
            layer == 1,
            hint.contains("every checkpoint needs this layer"),
            "{error}: {hint}"
        );
        let last = journals.lines().last() == Some(journal);
        assert_eq!(
            last,
            hint.ends_with("do not need this layer: 1, 2, 3, 4, 6"),
            "{error}: {hint}"
        );
        copy(&whole, &live.store);
    }
    assert_eq!(states(&live.store).len(), 7);
}

/// Flips one bit in each of the store's files: it is reported, or no request returns anything else
/// than before. `JAILFS_FLIP_STRIDE=1` flips every bit of every record, and so many of content.
#[test]
fn a_flipped_bit_is_reported_or_harmless() {
    let live = store_of_all_kinds();
    let before = states(&live.store);
    let files = shell(
        &live.store,
        "find layers archive heads heads.log identities base format -type f -size +0",
    );
    let every: usize =
        std::env::var("JAILFS_FLIP_STRIDE").map_or(131, |stride| stride.parse().unwrap());
    let (mut flips, mut reported, mut at) = (0, 0, 0);
    for file in files.lines().map(|file| live.store.join(file)) {
        let whole = std::fs::read(&file).unwrap();
        // All bytes of content are alike.
        let (every, all_bits) = match every {
            1 if file.ends_with("pool") => (1.max(whole.len() / 200), false),
            _ => (every, every == 1),
        };
        while at < whole.len() {
            // A hole of a pool is not needed.
            let block = whole.get(at / 4096 * 4096..).unwrap_or_default().iter().take(4096);
            if file.ends_with("pool") && block.copied().all(|byte| byte == 0) {
                at += every;
                continue;
            }
            for bit in if all_bits { 0..8 } else { at % 8..at % 8 + 1 } {
                let mut bad = whole.clone();
                bad[at] ^= 1 << bit;
                std::fs::write(&file, &bad).unwrap();
                let when = format!("bit {bit} of byte {at} of {}", file.display());
                let checked = Sandbox::check_store(&live.store, true);
                let problems = checked.as_ref().map_or(1, |checked| checked.problems.len());
                match std::panic::catch_unwind(|| states(&live.store)) {
                    Ok(found) => assert!(
                        found == before || problems > 0,
                        "{when}: the check does not report it, and the states differ"
                    ),
                    Err(_) => {
                        assert!(
                            problems > 0,
                            "{when}: the store cannot be opened, and the check finds nothing"
                        )
                    }
                }
                (flips, reported) = (flips + 1, reported + usize::from(problems > 0));
                // Opening the store may have changed it: it cuts a torn tail off.
                std::fs::write(&file, &whole).unwrap();
            }
            at += every;
        }
        at -= whole.len();
    }
    assert!(flips > 100 && reported * 10 > flips * 8, "{reported} of {flips} were reported");
    eprintln!("{flips} bits flipped, {reported} reported, the others changed nothing");
}

/// Interrupts a verb that writes the base at every failpoint. The next start rolls it back, and it
/// runs again, up to the next failpoint. If it was done nevertheless, the test goes on with another
/// base.
fn write_the_base_at_every_step(
    words: &[&str],
    actions: &[(&str, usize)],
    begin: impl Fn(&Live),
    is_done: impl Fn(&Live) -> bool,
) {
    let fresh = || {
        let mut live = prepared();
        live.applied = true;
        begin(&live);
        let (before, tree) = (host(&live.base), states(&live.store));
        (live, before, tree)
    };
    let mut steps = usize::MAX;
    for (action, stride) in actions {
        let (mut live, mut before, mut tree) = fresh();
        let (mut step, mut done) = (0, 0);
        while step < steps {
            step += stride;
            let rule = action.replace('#', &step.to_string());
            let output = jailfs(&live.store, words, &rule);
            check(&live.store, &rule);
            let opened = jailfs(&live.store, &["status"], "");
            assert!(opened.status.success(), "{rule}: {opened:?}");
            let message = String::from_utf8_lossy(&opened.stderr);
            assert!(
                !message.contains("another program"),
                "{rule}: no other program was there: {message}"
            );
            check(&live.store, &format!("{rule}, opened"));
            let left = shell(&live.base, "find . -name '.jailfs-*'");
            assert_eq!(left, "", "{rule}: staged files are left");
            let kept = states(&live.store);
            assert!(tree.keys().all(|id| kept.contains_key(id)), "{rule}: checkpoints are lost");
            if host(&live.base) != before {
                assert!(is_done(&live), "{rule}: half of the apply is visible");
                done += 1;
                if output.status.success() && action.starts_with("kill") {
                    // It ran to its end: there are no more failpoints.
                    steps = step;
                    break;
                }
                (live, before, tree) = fresh();
                continue;
            }
            assert!(!output.status.success(), "{rule}: it reports success, and did nothing");
            assert!(kept.keys().eq(tree.keys()), "{rule}: there is another checkpoint");
            assert_eq!(
                kept["@"].len(),
                tree["@"].len(),
                "{rule}: the tree is neither the old nor the new one"
            );
            assert!(step < 400, "{rule}: the operation never ends");
        }
        eprintln!("{words:?}: {action}: {step} steps, in {done} of them it was done all the same");
    }
}

#[test]
fn an_interrupted_apply_is_rolled_back_or_done() {
    // Done: the base equals the tree, whatever the epoch below the tree.
    let rarely = if stride() == 1 { 1 } else { 4 * stride() };
    let actions = [("kill:any:#", 1), ("fail:any:#:EIO", rarely)];
    write_the_base_at_every_step(
        &["apply"],
        &actions,
        |_| (),
        |live| states(&live.store)["@"].is_empty(),
    );
}

#[test]
fn an_interrupted_undo_of_an_apply_is_rolled_back_or_done() {
    let begin = |live: &Live| {
        let first = host(&live.base);
        std::fs::write(live.outside().join("first"), first).unwrap();
        let done = jailfs(&live.store, &["apply"], "");
        assert!(done.status.success(), "{done:?}");
    };
    let is_done = |live: &Live| {
        std::fs::read_to_string(live.outside().join("first")).unwrap() == host(&live.base)
    };
    let actions = [("kill:any:#", stride())];
    write_the_base_at_every_step(&["apply", "--undo"], &actions, begin, is_done);
}

/// A rollback does not revert changes that other programs made to the base after an apply was
/// interrupted.
#[test]
fn changes_of_others_since_an_interrupted_apply_are_left_alone() {
    let every = 5 * stride();
    // One step is within the rewrite of README, which has two names and is written in place.
    let mut step = 3;
    loop {
        let mut live = prepared();
        live.applied = true;
        let output = jailfs(&live.store, &["apply"], &format!("kill:any:{step}"));
        if output.status.success() {
            break;
        }
        // One change of each kind: written, new, removed, renamed, attributes only; and a new file
        // beside it.
        shell(
            &live.base,
            "for f in README big src/f1 src/f3 src/f6 src/new src/moved src/unsealed; \
             do if [ -e $f ]; then echo hand >> $f; fi; done
             echo hand > src/hand; echo hand > new-dir; mkdir -p docs; echo hand > docs/hand",
        );
        let list = "find . -type f ! -name '.jailfs-*' | sort | xargs grep -l hand | xargs md5sum";
        let made = shell(&live.base, list);
        let opened = jailfs(&live.store, &["status"], "");
        assert!(opened.status.success(), "step {step}: {opened:?}");
        check(&live.store, &format!("step {step}"));
        assert_eq!(made, shell(&live.base, list), "step {step}: {opened:?}");
        // If the apply had begun, it says so.
        let message = String::from_utf8_lossy(&opened.stderr);
        if message.contains("was rolled back") {
            assert!(
                message.contains("changed by another program") && message.contains("README"),
                "{message}"
            );
        }
        // It is a conflict for the next apply; unless the tree lies on the applied state, and then
        // it is a change of the base.
        let differs = jailfs(&live.store, &["diff", "base", "@"], "");
        let is_done = differs.status.success() && differs.stdout.is_empty();
        assert!(!is_done || !message.contains("was rolled back"), "step {step}: {message}");
        let again = jailfs(&live.store, &["apply"], "");
        assert_eq!(
            again.status.code(),
            Some(if is_done { 0 } else { 3 }),
            "step {step}: {again:?}"
        );
        assert_eq!(made, shell(&live.base, list), "step {step}");
        step += every;
    }
    assert!(step > 3 + every);
}
