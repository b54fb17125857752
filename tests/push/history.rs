//! Checkpoints that come along, and states that rely on the base.

use super::Machine;
use super::cutter::Cutter;
use super::harness::{Live, assert_same};
use super::partner::Partner;
use super::round_trip::all;

/// The name, message and time of each checkpoint, newest first.
fn log(live: &Live) -> Vec<(String, String, String)> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or("-").to_owned();
    let one = |line: serde_json::Value| {
        (text(&line["name"]), text(&line["message"]), text(&line["time"]))
    };
    live.json(&["log"]).into_iter().map(one).collect()
}

#[test]
fn checkpoints_come_along_with_names_messages_times_and_parents() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let here =
        Live::new("mkdir d; head -c 300000 /dev/urandom > d/big; echo a > a; ln a b; ln -s a s");
    let there = Live::new("echo other > other");
    for step in 1..=4 {
        here.sh(&format!(
            "echo {step} >> a; mkdir s{step}; touch s{step}/f; mv d d{step}; mv d{step} d"
        ));
        here.jailfs(&["checkpoint", &format!("c{step}"), "-m", &format!("step {step}\u{1b}")]);
    }
    here.sh("rm b; echo last > last");
    let machine = Machine::new();
    let push = ["push", &reference, "--plain-http", "--history", "3"];
    let pushed = machine.json(&here, &push);
    assert_eq!(pushed["checkpoints"], 3);
    let receiver = Machine::new();
    let pull = ["pull", &reference, "--plain-http"];
    let said = receiver.run(&there, &pull);
    assert!(said.contains("3 checkpoints came along"), "{said}");
    let three = log(&here)[..3].to_vec();
    assert_eq!(log(&there), three);
    assert_same(&all(&here), &all(&there), "the pulled state");
    for name in ["c4", "c3", "c2"] {
        here.restore(name);
        there.restore(name);
        assert_same(&all(&here), &all(&there), name);
    }
    // Each is the parent of the next one.
    let lines = there.json(&["log"]);
    assert_eq!((&lines[0]["parent"], &lines[1]["parent"]), (&lines[1]["id"], &lines[2]["id"]));
    // A checkpoint that is there is not made again, and a new one continues it.
    here.jailfs(&["checkpoint", "c5"]);
    machine.json(&here, &["push", &reference, "c5", "--plain-http", "--history", "9"]);
    receiver.run(&there, &pull);
    receiver.run(&there, &pull);
    let names: Vec<String> = log(&there).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["c5", "c4", "c3", "c2"]);
    let fresh = Live::new("echo x > x");
    fresh.checkpoint("c5");
    Machine::new().run(&fresh, &["pull", &reference, "--plain-http", "--history", "1"]);
    let names: Vec<String> = log(&fresh).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["-", "c5"], "the name is taken");
    Machine::new().run(&fresh, &["pull", &reference, "--plain-http", "--history", "0"]);
    assert_eq!(log(&fresh).len(), 2);
    there.jailfs(&["check", "--read-data"]);
    // A new head has the names of the states that it began with, and no others.
    let other = Live::new("echo x > x");
    other.checkpoint("c5");
    other.sh("echo y > y");
    other.checkpoint("c2");
    other.restore("c5");
    Machine::new().run(&other, &[&pull[..], &["--into", "try"]].concat());
    let made = other.json(&["--head", "try", "log"]).into_iter().filter(|one| one["head"] == "try");
    let named = made.filter_map(|one| one["name"].as_str().map(str::to_owned));
    assert_eq!(named.collect::<Vec<_>>(), ["c2", "c1"], "the name c5 is taken");
    assert_eq!(other.jailfs(&["show", "c2:y"]), "y\n");
    assert_eq!(other.jailfs(&["--head", "try", "show", "c2:a"]), here.jailfs(&["show", "c2:a"]));
    other.jailfs(&["check", "--read-data"]);
}

#[test]
fn a_long_history_costs_at_most_twenty_requests_more() {
    let registry = Partner::start(None, None);
    let cutter = Cutter::start(&registry.address);
    let count = std::env::var("JAILFS_PUSH_HISTORY").map_or(60, |text| text.parse().unwrap());
    let live = Live::new("echo a > a");
    for step in 0..count {
        live.sh(&format!("echo {step} > a; mkdir .jailfs/checkpoints/c{step}"));
    }
    let requests = |tag: &str, history: &str| {
        let reference = format!("{}/repo-{tag}:x", cutter.address);
        cutter.take_requests();
        let words = ["push", &reference, "--plain-http", "--history", history];
        let pushed = Machine::new().json(&live, &words);
        (cutter.take_requests(), pushed["checkpoints"].as_u64().unwrap())
    };
    let (one, _) = requests("one", "0");
    let (all, pushed) = requests("all", "100000");
    eprintln!("{one} requests for a state, {all} with {pushed} checkpoints");
    assert_eq!(pushed, count);
    assert!(all <= one + 20, "{one} and {all} requests");
}

#[test]
fn a_thin_state_needs_the_same_base_files_and_no_others() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let base = "mkdir d; ln -s d s; yes base | head -c 2000000 > d/large; seq 9 > d/kept; \
                seq 99 > moved; truncate -s 1M holes; touch empty; \
                touch -d @5 d/large d/kept moved holes d .";
    let here = Live::new(base);
    here.sh("mv moved d/there; chmod 600 d/kept; echo new > new; echo more >> holes; ln d/large l");
    let thin = ["push", &reference, "--plain-http", "--thin"];
    let pushed = Machine::new().json(&here, &thin);
    assert_eq!(pushed["thin"], true);
    assert!(pushed["bytes"].as_u64() < Some(20_000), "{pushed}");
    let there = Live::new(base);
    let pull = ["pull", &reference, "--plain-http"];
    Machine::new().run(&there, &pull);
    assert_same(&all(&here), &all(&there), "the thin state");
    // Another base is refused by the names of its files.
    let changes = "rm moved; echo x > d/large; seq 2 10 > d/kept; echo y > y";
    let other = Live::new(&format!("{base}; {changes}"));
    let before = other.snapshot();
    for part in ["'moved' is missing", "'d/large' has another size"] {
        Machine::new().fail(&other, &pull, 3, part);
    }
    assert_same(&before, &other.snapshot(), "the tree after the refusal");
    let changed = Live::new(&format!("{base}; sed -i s/99/98/ moved"));
    Machine::new().fail(&changed, &pull, 3, "'moved' has other content");
}
