//! How attempts end: at their time limit, after several tries, and by a signal.

use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::place::{JAILFS, Place, lives, signal, until};
use crate::{heads, pick, race};

#[test]
fn a_time_limit_holds_for_each_attempt() {
    let place = Place::new();
    let start = Instant::now();
    let script = "echo $JAILFS_ATTEMPT > n; [ $JAILFS_ATTEMPT = 2 ] && exit 0
        trap '' TERM; while :; do sleep 0.05; done";
    // One after the other: the first one uses up its time, and then the second one wins.
    let said = place.run("--forks 2 --jobs 1 --timeout 0.5 --keep", script);
    assert_eq!(said.code, 0, "{said:?}");
    let (attempts, last) = race(&said);
    assert_eq!((&attempts[0]["result"], &last["winner"]), (&"timeout".into(), &2.into()));
    assert!(start.elapsed() < Duration::from_secs(15), "{said:?}");
    assert_eq!(place.ok("base", "show @:n"), "2\n");
}

#[test]
fn each_try_of_an_attempt_begins_with_the_same_state() {
    let place = Place::new();
    place.make_out();
    let script = "[ ! -e n ] && [ ! -e /tmp/left ] || exit 9
        echo > n; echo > /tmp/left; exec >/dev/null
        $JAILFS checkpoint; $JAILFS fork side$JAILFS_ATTEMPT
        echo $JAILFS_ATTEMPT.$JAILFS_TRY >> ../out/tries; [ $JAILFS_TRY = 3 ]";
    let said = place.run("--forks 2 --attempts 3 --jobs 1 --keep --bind-rw ../out", script);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(place.read("out/tries"), "1.1\n1.2\n1.3\n", "{said:?}");
    assert!(said.err.contains("attempt 1: try 2 of 3 failed (1), and was rolled back"), "{said:?}");
    let (attempts, _) = race(&said);
    assert_eq!(attempts[1]["result"], "not_run", "{said:?}");
}

#[test]
fn an_interrupt_ends_all_attempts_and_drops_their_forks() {
    let place = Place::new();
    place.make_out();
    let script = "echo > n; echo $$ > ../out/$JAILFS_ATTEMPT; trap '' INT; sleep 60";
    let mut command = place.command("base", JAILFS);
    command.args([
        "run",
        "--forks",
        "3",
        "--jobs",
        "2",
        "--keep-forks",
        "--bind-rw",
        "../out",
        "--",
    ]);
    command.args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = command.spawn().expect("start a race");
    until("two attempts run", || place.exists("out/1") && place.exists("out/2"));
    // The child is timeout(1), which passes the signal on.
    signal(i32::try_from(running.id()).unwrap(), Signal::SIGTERM);
    let output = running.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("interrupted: all attempts are ended"), "{text}");
    assert!(!place.exists("out/3"), "the third one has not started");
    assert_eq!(
        (heads(&place), place.ok("base", "diff base")),
        (vec!["main".to_owned()], String::new())
    );
}

#[test]
fn a_killed_race_ends_its_commands_and_leaves_a_sound_store() {
    let place = Place::new();
    place.make_out();
    let script = "echo > n; exec sleep 61.$JAILFS_ATTEMPT";
    let mut command = std::process::Command::new(JAILFS);
    place.environment(&mut command);
    command.current_dir(place.at("base")).stdin(Stdio::null());
    command.args(["run", "--forks", "2", "--jobs", "2", "--", "sh", "-c", script]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = command.spawn().expect("start a race");
    let named = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(b"sleep\x0061.")
    };
    let mut sleepers = Vec::new();
    until("both commands run", || {
        let listed = std::fs::read_dir("/proc").expect("/proc").flatten();
        let pids = listed.filter_map(|one| one.file_name().to_str()?.parse().ok());
        sleepers = pids.filter(named).collect::<Vec<i32>>();
        sleepers.len() == 2
    });
    signal(i32::try_from(running.id()).unwrap(), Signal::SIGKILL);
    running.wait().expect("it ends");
    until("no command lives", || !sleepers.iter().any(|pid| lives(*pid)));
    assert_eq!(place.ok("base", "diff base"), "");
    assert_eq!(heads(&place).len(), 3);
    // They are listed as what they are, until they are dropped.
    let left = |line: &str| line.ends_with("left by a race that was killed");
    assert_eq!(place.ok("base", "forks").lines().filter(|line| left(line)).count(), 2);
    let said = pick(&place, "--forks 2", "keep", "$JAILFS forks > f; exit 1");
    assert!(said.err.contains("2 forks are left by a race that was killed"), "{said:?}");
    let forks = place.json("base", "forks");
    let kept: Vec<&str> = forks
        .iter()
        .filter(|one| one["abandoned"] == false && one["name"] != "main")
        .map(|one| one["name"].as_str().expect("a name"))
        .collect();
    assert_eq!(kept.len(), 2, "the kept forks of a race that ended: {forks:?}");
    let listed = place.ok("base", &format!("show {}@:f", kept[0]));
    assert_eq!(listed.lines().filter(|line| left(line)).count(), 2, "{listed}");
    place.ok("base", &format!("fork --drop {} {}", kept[0], kept[1]));
    place.ok("base", "fork --drop --abandoned");
    assert_eq!(heads(&place), ["main"]);
    place.ok("base", "fork --drop --abandoned");
    assert!(!place.ok("base", "check --read-data").is_empty());
    // The next race is not disturbed.
    let said = place.run("--forks 2 --keep", "echo > m");
    assert_eq!(said.code, 0, "{said:?}");
}
