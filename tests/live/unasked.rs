//! Garbage collection in the background: while programs work, before the disk is full, and across a
//! kill. It frees nothing that is needed, named or in use.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::{Live, assert_same, shell, snapshot};
use crate::shared::looked_through;

const MIB: u64 = 1 << 20;

/// Bytes of a store on disk, as the host counts them.
fn on_disk(store: &Path) -> u64 {
    let output = Command::new("du").args(["-s", "--block-size=1"]).arg(store).output().unwrap();
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap().parse().unwrap()
}

/// Waits for a condition.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn names(live: &Live) -> Vec<String> {
    live.json(&["log"]).iter().map(|c| c["name"].as_str().unwrap().to_owned()).collect()
}

/// Makes checkpoints, each with this many MiB of its own. Returns the tree at each.
fn make(live: &Live, names: &[&str], mib: u64) -> Vec<Vec<String>> {
    let one = |name: &&str| {
        live.sh(&format!("head -c {} /dev/urandom > large; echo {name} > which", mib * MIB));
        live.checkpoint(name);
        live.snapshot()
    };
    names.iter().map(one).collect()
}

#[track_caller]
fn is_sound(live: &Live) {
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
}

#[test]
fn checkpoints_beyond_the_limit_are_dropped_unless_they_are_held_or_in_use() {
    let live = Live::with_options("echo base > base", &["-o", "keep=2,operations=0,history=0"]);
    let was = make(&live, &["a"], 3);
    live.jailfs(&["hold", "a"]);
    make(&live, &["b"], 3);
    // One process has its working directory in it, another only passed through.
    let mut reader = live.puppet(".jailfs/checkpoints/b");
    reader.run("f = open('large', 'rb'); first = f.read(4096)");
    let was = [was, make(&live, &["c", "d", "e", "f"], 3)].concat();
    live.sh("ls -lR .jailfs/checkpoints > /dev/null");
    until("the space of c and d came back", || on_disk(&live.store) < 18 * MIB);
    assert_eq!(names(&live), ["f", "e", "b", "a"]);
    reader.gives(
        "len(first + f.read()), open('which').read(), len(os.listdir('.'))",
        "(3145728, 'b\\n', 3)",
    );
    live.restore("b");
    live.restore("e");
    assert_same(&was[3], &live.snapshot(), "checkpoint e");
    live.restore("a");
    assert_same(&was[0], &live.snapshot(), "the checkpoint that is held");
    assert_eq!(live.sh("ls .jailfs/checkpoints"), "a\nb\ne\nf\n", "the kernel knows, too");
    reader.run("f.close(); os.chdir('/')");
    reader.end();
    // Any request wakes the collector.
    names(&live);
    until("that of b came back, too", || on_disk(&live.store) < 15 * MIB);
    assert_eq!(names(&live), ["f", "e", "a"]);
    is_sound(&live);
}

#[test]
fn by_default_only_unreferenced_states_are_freed() {
    let live = Live::with_options("echo base > base", &["-o", "operations=6,history=0"]);
    live.checkpoint("start");
    let was = live.snapshot();
    make(&live, &["dropped", "kept"], 2);
    live.jailfs(&["drop", "dropped"]);
    // Each leaves a state that was sealed before it.
    for round in 0..45 {
        live.sh(&format!("head -c {MIB} /dev/urandom > large; echo {round} > round"));
        live.restore("start");
    }
    until("most of the 47 MiB came back", || on_disk(&live.store) < 30 * MIB);
    assert_eq!(names(&live), ["kept", "start"]);
    assert_same(&was, &live.snapshot(), "the start");
    // The states of the last operations are kept as always.
    let seal =
        live.json(&["op", "log"]).iter().find(|op| op["verb"] == "seal").unwrap()["op"].to_string();
    live.jailfs(&["op", "restore", &seal]);
    assert_eq!(live.read("round"), "44\n");
    live.restore("kept");
    assert_eq!(live.read("which"), "kept\n");
    is_sound(&live);
}

#[test]
fn a_store_stays_within_its_budget_while_programs_write() {
    let mut live = Live::with_options(
        "echo base > base",
        &["-o", "max-store=24M,operations=0,history=0,dedup=off"],
    );
    for n in 0..12 {
        make(&live, &[&format!("c{n}")], 4);
    }
    until("it is within its budget", || {
        live.json(&["status"])[0]["store_bytes"].as_u64().unwrap() <= 24 * MIB
    });
    let left = names(&live);
    assert!(left.first().is_some_and(|name| name == "c11") && left.len() < 7, "{left:?}");
    // No request from here on: the writes alone must wake the collector.
    live.sh("head -c 14000000 /dev/urandom > more");
    let reserve = 4 * MIB;
    until("it is again", || on_disk(&live.store) <= 24 * MIB + reserve);
    assert_eq!(live.read("which"), "c11\n");
    // More than the budget: the checkpoint below the tree stays, and programs are not refused.
    live.sh("head -c 30000000 /dev/urandom > more");
    until("all that may go is gone", || names(&live) == ["c11"]);
    is_sound(&live);
    live.kill_and_mount();
    live.jailfs(&["restore", "@-1"]);
    assert!(!live.exists("more") && live.read("which") == "c11\n");
}

#[test]
fn a_budget_drops_exactly_the_checkpoints_that_the_dry_run_named() {
    let live = Live::with_options("echo base > base", &["-o", "gc=off,history=0,dedup=off"]);
    for n in 0..8 {
        make(&live, &[&format!("c{n}")], 2);
    }
    let asked = ["gc", "--max-store", "11M", "--operations", "0"];
    let dropped = |words: &[&str]| -> (Vec<String>, u64) {
        let lines = live.json(words);
        let (summary, dropped) = lines.split_last().unwrap();
        let names = dropped.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect();
        (names, summary["layers"].as_u64().unwrap())
    };
    let said = dropped(&[&asked[..], &["--dry-run"]].concat());
    assert!((2..6).contains(&said.0.len()) && said.1 < 12, "{said:?}");
    let (done, _) = dropped(&asked);
    assert_eq!((done, names(&live).len()), (said.0.clone(), 8 - said.0.len()));
    // Content that moves into the archive is on disk twice for a moment.
    until("it is within its budget", || on_disk(&live.store) < (11 + 4) * MIB);
    is_sound(&live);
}

/// The small disk of a store; unmounted after the mount.
struct Disk(std::path::PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        let done = Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(
            done.is_ok_and(|status| status.success()) || std::thread::panicking(),
            "umount the disk"
        );
    }
}

#[test]
fn a_full_disk_frees_unneeded_states_before_writes_keep_failing() {
    for (options, is_given_back) in [("gc=off", false), ("gc=on", true)] {
        let words: &[&str] = match is_given_back {
            true => &["-o", "gc=on,operations=1,history=0"],
            false => &["-o", "gc=off,operations=1,history=0"],
        };
        let disk = "mkdir -m 700 ../store; mount -t tmpfs -o size=32m,mode=700 small ../store";
        let live = Live::with_options(&format!("echo base > base\n{disk}"), words);
        let _disk = Disk(live.store.clone());
        live.checkpoint("start");
        for _ in 0..3 {
            live.sh("head -c 7000000 /dev/urandom > large");
            live.restore("start");
        }
        // 21 MB that are not needed, and 32 that are.
        let mut writer = live.puppet("");
        writer.run("import errno, time");
        let write = "
f = open('new', 'wb', buffering=0)
begin, refused = time.monotonic(), 0
while f.tell() < 20_000_000 and refused < 20:
    try:
        f.write(b'x' * 500_000)
    except OSError as e:
        assert e.errno == errno.ENOSPC, e
        refused += 1
";
        writer.run(write);
        let done = writer.run("f.tell() >= 20_000_000");
        assert_eq!(
            done == "True",
            is_given_back,
            "{options}: refused {} times",
            writer.run("refused")
        );
        writer.end();
        live.restore("start");
        is_sound(&live);
    }
}

#[test]
fn a_daemon_that_is_killed_during_a_collection_loses_nothing() {
    let mut live =
        Live::with_limit("seq 3000 > base", &["-o", "gc=off,history=0"], Duration::from_secs(200));
    let mut was = make(&live, &["a", "b", "c", "d", "e"], 1);
    live.jailfs(&["hold", "b"]);
    for _ in 0..3 {
        live.sh("head -c 1000000 /dev/urandom > large");
        live.restore("d");
    }
    live.sh("seq 100 > unsealed");
    was.push(live.snapshot());
    // Deduplication removes files, too, and would count as steps of the collection.
    looked_through(&live);
    live.umount();
    let whole = live.outside().join("whole");
    let mut left = BTreeSet::new();
    for steps in ["store.remove:1", "store.remove:30", "store.rename:1", "store.rename:6"] {
        shell(live.outside(), "[ -e whole ] || cp -a store whole; rm -rf store; cp -a whole store");
        live.options = vec!["-o", "keep=2,operations=0,history=0"];
        live.steps = format!("kill:{steps}");
        // In the background, without a request.
        live.mount_until_killed();
        live.options = vec!["-o", "gc=off,history=0"];
        live.steps = String::new();
        live.mount();
        is_sound(&live);
        assert_same(&was[5], &live.snapshot(), steps);
        let names = names(&live);
        left.insert(names.len());
        for name in ["b", "d", "e"] {
            assert!(names.iter().any(|one| one == name), "{steps}: {names:?}");
        }
        for name in &names {
            let found = snapshot(&live.mnt.join(".jailfs/checkpoints").join(name), false);
            assert_eq!(found.len(), was[0].len(), "{steps}: checkpoint {name}");
        }
        live.restore("b");
        assert_same(&was[1], &live.snapshot(), steps);
        live.umount();
    }
    assert!(whole.exists() && left.contains(&3), "processes were killed after the drop: {left:?}");
}
