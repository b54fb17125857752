//! `jailfs run`: what the command sees, how it ends, and what happens to its changes.

use std::fs;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::place::{JAILFS, Place, said, signal, until};

#[test]
fn a_command_sees_the_repository_at_its_own_path_and_cannot_change_it() {
    let place = Place::new();
    place.sh("base", "git init -q .");
    let before = place.sh("base", "find . -printf '%p %i %m %s %T@ %C@\\n' | sort").out;
    let said = place.run(
        "--keep",
        "pwd; git rev-parse --show-toplevel; echo $JAILFS_ROOT; cat a; echo two >> a; rm del; \
         git add -A; grep -c . /proc/self/mountinfo >/dev/null",
    );
    let base = place.at("base").display().to_string();
    assert_eq!((said.code, said.out), (0, format!("{base}\n{base}\n{base}\none\n")));
    assert!(said.err.contains("M\ta\n") && said.err.contains("D\tdel\n"), "{}", said.err);
    assert!(
        said.err.contains("jailfs: kept; 'jailfs diff base', 'jailfs apply' and 'jailfs discard'"),
        "{}",
        said.err
    );
    assert_eq!(place.sh("base", "find . -printf '%p %i %m %s %T@ %C@\\n' | sort").out, before);
    assert!(!place.is_mounted("base"));
    // Kept changes are visible in the next run, and can be applied.
    let next = place.run("--keep", "cat a; ls");
    assert_eq!((next.code, next.out.as_str()), (0, "one\ntwo\na\nsub\n"));
    assert!(next.err.contains("jailfs: kept from before, and in the sandbox: "), "{}", next.err);
    assert!(place.ok("base", "apply").contains("D\tdel\n"));
    assert_eq!((place.read("base/a").as_str(), place.exists("base/del")), ("one\ntwo\n", false));
}

#[test]
fn the_caller_decides_about_the_changes() {
    let place = Place::new();
    let applied = place.run("--apply", "echo two >> a; rm del");
    assert_eq!(applied.code, 0, "{applied:?}");
    assert!(
        applied.err.ends_with(
            "jailfs: applied: 1 modified, 1 deleted\njailfs: undo: jailfs apply --undo\n"
        ),
        "{applied:?}"
    );
    assert_eq!((place.read("base/a").as_str(), place.exists("base/del")), ("one\ntwo\n", false));
    let discarded = place.run("--discard", "echo three >> a; mkdir n");
    assert!(discarded.err.contains("jailfs: discarded: 1 added, 1 modified\n"), "{discarded:?}");
    assert_eq!(place.ok("base", "diff base"), "");
    let failed = place.run("--apply", "echo three >> a; false");
    assert_eq!(failed.code, 1);
    assert!(
        failed.err.contains("the command has failed: its changes are kept and not applied"),
        "{failed:?}"
    );
    assert_eq!(place.ok("base", "diff base"), "M\ta\n");
    // Discarding the changes of this command keeps those of an earlier one.
    let discarded = place
        .run("--discard", "$JAILFS checkpoint inside; echo >> sub/b; $JAILFS checkpoint; rm a");
    assert!(discarded.err.contains("jailfs: discarded: 1 modified, 1 deleted\n"), "{discarded:?}");
    assert_eq!(place.ok("base", "diff base"), "M\ta\n");
    // Without a terminal, keeping is the default.
    let plain = place.run("", "echo four >> a");
    assert!(plain.err.contains("jailfs: kept; "), "{plain:?}");
    assert_eq!(place.read("base/a"), "one\ntwo\n");
    let nothing = Place::new().run("", "true");
    assert_eq!((nothing.code, nothing.err.lines().count()), (0, 2), "{nothing:?}");
    assert!(nothing.err.ends_with("jailfs: the command has changed nothing\n"), "{nothing:?}");
}

#[test]
fn a_conflict_of_an_apply_is_a_failure_of_jailfs() {
    let place = Place::new();
    let script = "echo mine >> a; touch ../out/go; while [ ! -e ../out/went ]; do sleep 0.01; done";
    place.make_out();
    let said = std::thread::scope(|scope| {
        let running = scope.spawn(|| place.run("--apply --bind-rw ../out", script));
        until("the command has written", || place.exists("out/go"));
        place.write("base/a", "theirs, and longer\n");
        place.write("out/went", "");
        running.join().unwrap()
    });
    assert_eq!(said.code, 125, "{said:?}");
    assert!(
        said.err.contains("conflict\ta\t") && said.err.contains("jailfs: error: apply: "),
        "{said:?}"
    );
    assert_eq!(place.read("base/a"), "theirs, and longer\n");
}

#[test]
fn the_exit_code_is_that_of_the_command() {
    let place = Place::new();
    assert_eq!(place.run("", "exit 7").code, 7);
    assert_eq!(place.run("", "kill -9 $$").code, 137);
    assert_eq!(place.run("", "kill -TERM $$").code, 143);
    let missing = place.say("base", "run /no/such/command");
    assert_eq!(
        (missing.code, missing.err.contains("run '/no/such/command': No such file")),
        (127, true),
        "{missing:?}"
    );
    let cannot = place.say("base", "run /etc/passwd");
    assert_eq!(
        (cannot.code, cannot.err.contains("run '/etc/passwd': Permission denied")),
        (126, true),
        "{cannot:?}"
    );
    assert_eq!(place.say("base", "run").code, 2);
    let nested = place.run("", "$JAILFS run true");
    assert_eq!(
        (nested.code, nested.err.contains("it lies in the sandbox of")),
        (125, true),
        "{nested:?}"
    );
    place.mount();
    let mounted = place.run("", "true");
    assert_eq!(
        (mounted.code, mounted.err.contains("its sandbox is mounted at")),
        (125, true),
        "{mounted:?}"
    );
    assert_eq!(place.say("", "-C missing run true").code, 125);
    // -C, and a store of its own.
    let mut command = place.command("", JAILFS);
    let said = said(command.args([
        "-C",
        "base",
        "--store",
        "../home/own",
        "run",
        "--",
        "sh",
        "-c",
        "pwd; pwd -P; echo -- \"$@\"",
        "x",
        "-C",
        "--keep",
    ]));
    let base = place.at("base").display().to_string();
    assert_eq!(
        (said.code, said.out),
        (0, format!("{base}\n{base}\n-- -C --keep\n")),
        "{}",
        said.err
    );
}

#[test]
fn a_command_can_restore_but_not_apply_or_unmount() {
    let place = Place::new();
    let said = place.run(
        "--keep",
        r#"
        echo good >> a; $JAILFS checkpoint good >/dev/null || exit 20
        rm -rf sub; $JAILFS restore good >/dev/null || exit 21
        cat sub/b >/dev/null || exit 22
        $JAILFS diff base; $JAILFS apply --dry-run | head -n 1
        $JAILFS apply; echo apply $?
        $JAILFS apply --undo; echo undo $?
        $JAILFS umount . ; echo umount $?
        cd /; $JAILFS log | wc -l; $JAILFS -C "$JAILFS_ROOT" status | sed -n 's/^base *//p'
        "#,
    );
    let base = place.at("base").display().to_string();
    assert_eq!(
        said.out,
        format!("M\ta\nwould apply: 1 modified\napply 11\nundo 11\numount 11\n1\n{base}\n"),
        "{}",
        said.err
    );
    assert!(said.err.contains("'jailfs run' holds this sandbox\nhint: "), "{}", said.err);
    assert_eq!(place.read("base/a"), "one\n");
    assert_eq!(place.ok("base", "log").lines().count(), 1);
}

#[test]
fn remaining_processes_are_ended_before_the_changes_are_listed() {
    let place = Place::new();
    place.make_out();
    // It holds an open file and a working directory, has left its session, and writes as fast as it
    // can.
    let stays = "setsid sh -c 'trap \"\" TERM HUP INT; exec 3>>log; i=0; while :; do i=$((i+1)); \
        echo $i >&3; echo $i > n$((i % 50)); echo $i > ../out/alive; \
        done' & until [ -e ../out/alive ]; do sleep 0.01; done";
    let said = place.run("--apply --bind-rw ../out", stays);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(
        said.err.contains("jailfs: processes remain in the sandbox and are ended: "),
        "{said:?}"
    );
    // When 'run' has ended, so has every process: none can change files afterwards.
    fs::remove_file(place.at("out/alive")).unwrap();
    // The apply used one state: tree and base are equal, now and later.
    assert_eq!(place.ok("base", "diff base"), "");
    assert!(place.exists("base/log") && !place.exists("out/alive"));
}

/// Starts `jailfs run OPTIONS -- sh -c SCRIPT` in the base, with `out` beside it writable.
fn start(place: &Place, options: &str, script: &str) -> std::process::Child {
    place.make_out();
    // A shell cannot trap a signal that was ignored when it started, as SIGINT is in a background
    // job of another shell.
    let mut command = Command::new("env");
    place.environment(&mut command);
    command
        .args(["--default-signal", JAILFS, "run", "--bind-rw", "../out"])
        .args(options.split_whitespace())
        .args(["--", "sh", "-c", script]);
    command
        .current_dir(place.at("base"))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn signals_reach_the_command_and_its_changes_are_kept() {
    for (sent, script, code) in [
        (
            Signal::SIGTERM,
            "trap 'echo got >> a; exit 3' TERM; touch ../out/go; while :; do sleep 0.02; done",
            3,
        ),
        (
            Signal::SIGINT,
            "trap 'echo got >> a; exit 4' INT; touch ../out/go; while :; do sleep 0.02; done",
            4,
        ),
        (
            Signal::SIGUSR1,
            "trap 'echo got >> a; exit 5' USR1; touch ../out/go; while :; do sleep 0.02; done",
            5,
        ),
        (Signal::SIGHUP, "echo before >> a; touch ../out/go; exec sleep 20", 129),
        (Signal::SIGQUIT, "ulimit -c 0; echo before >> a; touch ../out/go; exec sleep 20", 131),
    ] {
        let place = Place::new();
        let child = start(&place, "", script);
        until("the command runs", || place.exists("out/go"));
        signal(child.id().cast_signed(), sent);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{sent}: {output:?}");
        assert_eq!(place.ok("base", "diff base"), "M\ta\n", "{sent}");
    }
}

#[test]
fn a_killed_run_ends_its_command_and_keeps_acknowledged_changes() {
    let place = Place::new();
    let script =
        "echo kept >> a; echo $$ > ../out/go; while echo x > ../out/alive; do sleep 0.01; done";
    let mut child = start(&place, "", script);
    until("the command runs", || place.exists("out/alive"));
    signal(child.id().cast_signed(), Signal::SIGKILL);
    child.wait().unwrap();
    until("the command is gone", || {
        drop(fs::remove_file(place.at("out/alive")));
        std::thread::sleep(std::time::Duration::from_millis(100));
        !place.exists("out/alive")
    });
    assert!(!place.is_mounted("base"));
    assert_eq!(place.read("base/a"), "one\n");
    let next = place.run("--keep", "cat a");
    assert_eq!((next.code, next.out.as_str()), (0, "one\nkept\n"), "{next:?}");
}

#[test]
fn writes_through_a_mapping_are_in_the_diff_when_the_command_has_ended() {
    let place = Place::new();
    place.write("base/big", vec![b'.'; 10_000]);
    let script = "python3 -c \"import mmap; f=open('big','r+b'); m=mmap.mmap(f.fileno(),0); \
        m[0:5]=b'hello'\"";
    let said = place.run("--apply", script);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(fs::read(place.at("base/big")).unwrap().starts_with(b"hello....."));
}

#[test]
fn collected_writes_are_in_the_changes_when_the_command_has_ended() {
    let place = Place::new();
    // With a writeback cache the kernel reports each file as data, also a hole.
    let script = "python3 -c \"
import os
log = open('log', 'ab', buffering=0)
for number in range(2000): log.write(b'%d\\n' % number)
hole = os.open('hole', os.O_RDWR | os.O_CREAT)
os.truncate(hole, 1 << 20)
try: print(os.lseek(hole, 0, os.SEEK_DATA))
except OSError as error: print(error.errno)\"";
    let plain = place.run("--discard", script);
    assert_eq!((plain.code, plain.out.trim()), (0, "6"), "ENXIO: {}", plain.err);
    let said = place.run("--apply --writeback", script);
    assert_eq!((said.code, said.out.trim()), (0, "0"), "{}", said.err);
    let lines: String = (0..2000).map(|number| format!("{number}\n")).collect();
    assert_eq!(fs::read_to_string(place.at("base/log")).unwrap(), lines);
    assert_eq!(fs::read(place.at("base/hole")).unwrap(), vec![0; 1 << 20]);
}

#[test]
fn the_end_of_a_run_does_not_wait_for_a_comparison_whose_client_is_gone() {
    let place = Place::new();
    // Each takes many times longer than the time limit of this test.
    let script = r#"
        seq 1 300000 > 1; for n in $(seq 2 30); do shuf -n 100000 1 > $n; done
        $JAILFS checkpoint > /dev/null
        for n in $(seq 2 30); do shuf -n 100000 1 > $n; done
        for n in 1 2 3 4 5 6 7 8; do
            $JAILFS diff -p > /dev/null 2>&1 &
            until grep -q '^State:.*sleeping' /proc/$!/status; do sleep 0.01; done
        done
        echo done
    "#;
    let said = place.run("--discard", script);
    assert_eq!((said.code, said.out.as_str()), (0, "done\n"), "{}", said.err);
    assert!(said.err.contains("jailfs: discarded: 30 added\n"), "{}", said.err);
}
