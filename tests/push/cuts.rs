//! The command ends at each of its requests in turn.

use std::time::{Duration, Instant};

use super::Machine;
use super::cutter::Cutter;
use super::harness::{Live, assert_same};
use super::partner::Partner;

/// Runs a command behind a wall at a request, and kills it there. False: it did not get there, and
/// succeeded.
fn run_to_wall(
    machine: &Machine,
    live: &Live,
    cutter: &Cutter,
    (number, is_answer): (u64, bool),
    words: &[&str],
) -> bool {
    cutter.wall_at(number, is_answer);
    let mut command = machine.command(live, words);
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < end, "request {number} does not come");
        if let Some(status) = child.try_wait().unwrap() {
            assert!(!cutter.remove_wall(), "the command ended behind the wall: {status}");
            assert!(status.success(), "{status}");
            return false;
        }
        if cutter.is_at_wall() {
            // The registry may still be working on a request whose answer is dropped.
            std::thread::sleep(Duration::from_millis(60));
            child.kill().unwrap();
            child.wait().unwrap();
            cutter.remove_wall();
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_push_that_ends_at_any_request_leaves_the_old_or_the_new_tag() {
    let registry = Partner::start(None, None);
    let cutter = Cutter::start(&registry.address);
    let reference = format!("{}/repo:x", cutter.address);
    let live = Live::new("head -c 400000 /dev/urandom > a; echo b > b");
    let machine = Machine::new();
    let push = ["push", &reference, "--plain-http"];
    let ls = ["ls", &reference, "--plain-http"];
    machine.run(&live, &push);
    let mut old = machine.json(&live, &ls)["tree"].clone();
    let mut cuts = 0;
    for is_answer in [false, true] {
        for number in 1.. {
            live.sh("head -c 100000 /dev/urandom > a");
            if !run_to_wall(&machine, &live, &cutter, (number, is_answer), &push) {
                break;
            }
            cuts += 1;
            let after_cut = machine.json(&live, &ls)["tree"].clone();
            // A retry by the same machine sends the rest.
            let done = machine.json(&live, &push);
            assert!(after_cut == old || after_cut == done["tree"], "request {number}");
            old = machine.json(&live, &ls)["tree"].clone();
            assert_eq!(old, done["tree"]);
        }
        old = machine.json(&live, &ls)["tree"].clone();
    }
    assert!(cuts >= 12, "{cuts} cuts");
}

#[test]
fn a_pull_that_ends_at_any_request_changes_nothing_and_goes_on() {
    let registry = Partner::start(None, None);
    let cutter = Cutter::start(&registry.address);
    let reference = format!("{}/repo:x", cutter.address);
    let here = Live::new("head -c 20000000 /dev/urandom > a; echo b > b; mkdir d; ln b d/c");
    let there = Live::new("echo other > other; echo a > a");
    Machine::new().run(&here, &["push", &reference, "--plain-http"]);
    there.checkpoint("before");
    let before = there.snapshot();
    let pull = ["pull", &reference, "--plain-http"];
    for is_answer in [false, true] {
        cutter.take_bytes();
        let machine = Machine::new();
        let mut number = 1;
        while run_to_wall(&machine, &there, &cutter, (number, is_answer), &pull) {
            assert_same(&before, &there.snapshot(), "the tree after a cut");
            number += 1;
        }
        assert!(number > 5, "{number} requests");
        // A pull does not fetch again the chunks that the one before it has fetched.
        let bytes = cutter.take_bytes();
        assert!(is_answer || bytes < 21_000_000, "{bytes} bytes");
        there.restore("before");
        assert_same(&before, &there.snapshot(), "the tree after the restore");
    }
}
