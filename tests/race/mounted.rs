//! Races of a sandbox that is mounted: its daemon serves the attempts.

use std::io::{Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use jailfs::internals::control::{self, Answer, Client, Descriptors, RaceOrder};
use jailfs::internals::daemon::{AttemptPlan, Choice};
use jailfs::internals::sys;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::place::{JAILFS, Place, lives, signal, until};
use crate::{heads, race};

/// `jailfs run OPTIONS -- sh -c SCRIPT` in the mount.
fn run_in_mount(place: &Place, options: &str, script: &str) -> crate::place::Said {
    let options = std::iter::once("run").chain(options.split_whitespace());
    place.call("mnt", options.chain(["--", "sh", "-c", script]))
}

/// The same, in the background and without timeout(1), so that a signal reaches jailfs itself.
fn start_in_mount(place: &Place, options: &str, script: &str) -> Child {
    let mut command = Command::new(JAILFS);
    place.environment(&mut command);
    command.current_dir(place.at("mnt")).stdin(Stdio::null());
    command.arg("run").args(options.split_whitespace()).args(["--", "sh", "-c", script]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start a race")
}

#[test]
fn a_winner_appears_in_place_in_a_mount_that_is_in_use() {
    let place = Place::new();
    place.mount();
    place.write("mnt/kept", "not in a checkpoint\n");
    let mut open = std::fs::File::options();
    let mut open = open.read(true).write(true).open(place.at("mnt/kept")).expect("open a file");
    let mut shell = place.command("mnt/sub", "sh");
    shell.args(["-c", "read go; cat new ../n; pwd"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = shell.spawn().expect("start a shell");
    let script = "cat kept; pwd; echo $JAILFS_ATTEMPT > n; echo new > sub/new; rm del
        [ $JAILFS_ATTEMPT = 2 ] || { sleep 0.5; exit 1; }";
    let said = run_in_mount(&place, "--forks 3 --jobs 3 --keep", script);
    assert_eq!(said.code, 0, "{said:?}");
    let (attempts, last) = race(&said);
    assert_eq!((attempts.len(), &last["winner"]), (3, &2.into()), "{said:?}");
    assert!(said.err.contains("[2] not in a checkpoint\n"), "{said:?}");
    let tree = format!("[2] {}\n", place.at("mnt").display());
    assert!(said.err.contains(&tree), "{said:?}");
    // The shell goes on where it stands, and the open file is the same.
    shell.stdin.take().expect("a pipe").write_all(b"go\n").expect("wake the shell");
    let output = shell.wait_with_output().expect("it ends");
    let expected = format!("new\n2\n{}\n", place.at("mnt/sub").display());
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    open.seek(SeekFrom::End(0)).expect("seek");
    open.write_all(b"more\n").expect("write");
    assert_eq!(place.read("mnt/kept"), "not in a checkpoint\nmore\n");
    assert!(!place.exists("mnt/del") && place.exists("base/del"));
    assert_eq!(heads(&place), ["main"]);
    place.ok("mnt", &format!("op restore {}", last["undo"]));
    assert!(place.exists("mnt/del") && !place.exists("mnt/n"));
    drop(open);
    place.umount();
    assert!(!place.ok("base", "check --read-data").is_empty());
}

#[test]
fn forks_of_a_mounted_sandbox_can_be_kept_and_each_try_begins_anew() {
    let place = Place::new();
    place.mount();
    place.make_out();
    let script = "[ ! -e n ] || exit 9; echo $JAILFS_ATTEMPT.$JAILFS_TRY > n; $JAILFS checkpoint
        [ $JAILFS_TRY = 2 ]";
    // Also from the base, which is beside the mount.
    let options = "--forks 2 --jobs 1 --attempts 2 --pick keep --keep-forks";
    let said = place.run(options, script);
    assert_eq!(said.code, 0, "{said:?}");
    let (attempts, last) = race(&said);
    assert!(attempts.iter().all(|one| one["exit"] == 0), "{said:?}");
    let kept: Vec<String> = serde_json::from_value(last["kept"].clone()).expect("names");
    assert_eq!(kept.len(), 2, "{said:?}");
    assert_eq!(place.ok("mnt", &format!("show {}@:n", kept[1])), "2.2\n");
    let forks = place.json("mnt", "forks");
    assert!(forks.iter().all(|one| one["abandoned"] == false), "{forks:?}");
    let score = "run --forks 3 --keep --pick".split(' ').chain(["cat n", "--", "sh", "-c"]);
    let said = place.call("mnt", score.chain(["echo $JAILFS_ATTEMPT > n"]));
    let (_, last) = race(&said);
    assert_eq!((&last["winner"], place.read("mnt/n").as_str()), (&3.into(), "3\n"), "{said:?}");
    assert_eq!(heads(&place).len(), 3);
    place.fails("mnt", "run --forks 2 --keep-checkpoints 3 true", 125);
}

#[test]
fn changes_in_the_mount_during_a_race_are_told_and_can_be_brought_back() {
    let place = Place::new();
    place.mount();
    place.make_out();
    let script = "echo x > n; touch ../out/ready; until [ -e ../out/go ]; do sleep 0.02; done";
    let mut command = place.command("mnt", JAILFS);
    command.args([
        "run",
        "--forks",
        "1",
        "--keep",
        "--bind-rw",
        "../out",
        "--",
        "sh",
        "-c",
        script,
    ]);
    let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a race");
    until("the attempt runs", || place.exists("out/ready"));
    place.write("mnt/meanwhile", "mine\n");
    place.write("out/go", "");
    let output = running.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains("changed while the race ran"), "{text}");
    assert!(place.exists("mnt/n") && !place.exists("mnt/meanwhile"));
    let undo = text.split("op restore ").nth(1).and_then(|rest| rest.split_whitespace().next());
    place.ok("mnt", &format!("op restore {}", undo.expect("an operation")));
    assert_eq!(place.read("mnt/meanwhile"), "mine\n");
}

#[test]
fn an_attempt_of_a_mounted_sandbox_reaches_nothing_but_its_own_head() {
    let place = Place::new();
    place.mount();
    place.ok("mnt", "fork other");
    let mnt = place.at("mnt").display().to_string();
    let script = format!(
        "ls -A {mnt} 2>/dev/null; ls {mnt}/.jailfs/forks 2>/dev/null; ls -A \"$JAILFS_SANDBOX\"
        $JAILFS --head main checkpoint 2>/dev/null && echo 'uses main'
        $JAILFS --head other checkpoint 2>/dev/null && echo 'uses other'
        $JAILFS fork --drop other 2>/dev/null && echo 'drops other'
        $JAILFS apply 2>/dev/null && echo applies
        $JAILFS umount . 2>/dev/null && echo unmounts
        $JAILFS run --forks 2 --keep -- true >/dev/null 2>&1 && echo races
        ls .jailfs/forks; $JAILFS status > /dev/null && echo 'has a status'; exit 1"
    );
    // The mount is withheld even from a caller who shows it to the command.
    let said = place.run(&format!("--forks 1 --bind-ro {mnt}"), &script);
    assert_eq!(said.code, 1, "{said:?}");
    let lines: Vec<&str> = said.err.lines().filter(|line| line.starts_with("[1] ")).collect();
    assert_eq!(lines, ["[1] control", "[1] has a status"], "{said:?}");
    assert_eq!(heads(&place), ["main", "other"]);
}

/// The processes whose command line begins with these bytes.
fn processes(line: &[u8]) -> Vec<i32> {
    let listed = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = listed.filter_map(|one| one.file_name().to_str()?.parse().ok());
    let is_it = |pid: &i32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default().starts_with(line)
    };
    pids.filter(is_it).collect()
}

/// Drops the forks of races that were killed, as soon as their mounts have ended.
fn drop_abandoned(place: &Place) {
    until("all forks are abandoned, and none is mounted", || {
        let forks = place.json("mnt", "forks");
        let is_left = |one: &Value| one["abandoned"] == true && one["mount"].is_null();
        forks.iter().all(|one| one["name"] == "main" || is_left(one))
    });
    // The daemon may only now make the forks of a client that has died already.
    until("all forks are dropped", || {
        place.say("mnt", "fork --drop --abandoned").code == 0 && heads(place) == ["main"]
    });
}

#[test]
fn a_client_that_is_killed_at_any_time_leaves_no_mount_behind() {
    let place = Place::new();
    place.mount();
    place.write("mnt/mine", "mine\n");
    let script =
        "echo > n; $JAILFS fork side$JAILFS_ATTEMPT >/dev/null; exec sleep 67.$JAILFS_ATTEMPT";
    for milliseconds in [20, 60, 120, 200, 300, 500, 900] {
        let mut running = start_in_mount(&place, "--forks 3 --jobs 2", script);
        std::thread::sleep(Duration::from_millis(milliseconds));
        signal(i32::try_from(running.id()).unwrap(), Signal::SIGKILL);
        running.wait().expect("it ends");
        until("its commands end", || processes(b"sleep\x0067.").is_empty());
        drop_abandoned(&place);
    }
    assert_eq!(place.read("mnt/mine"), "mine\n");
    let said = run_in_mount(&place, "--forks 2 --keep", "echo > m");
    assert_eq!((said.code, place.exists("mnt/m")), (0, true), "{said:?}");
    place.umount();
    assert!(!place.ok("base", "check --read-data").is_empty());
    let left = std::fs::read_dir(place.at("home/.local/state/jailfs")).expect("stores").flatten();
    let sockets = left.flat_map(|store| std::fs::read_dir(store.path()).into_iter().flatten());
    let mut names = sockets.flatten().map(|entry| entry.file_name());
    assert!(!names.any(|name| name.as_encoded_bytes().starts_with(b"control")));
}

#[test]
fn a_daemon_that_is_killed_during_a_race_loses_nothing() {
    let place = Place::new();
    place.mount();
    place.write("mnt/mine", "mine\n");
    let script = "echo > n; exec sleep 68.$JAILFS_ATTEMPT";
    let mut running = start_in_mount(&place, "--forks 2 --jobs 2", script);
    until("both commands run", || processes(b"sleep\x0068.").len() == 2);
    let sleepers = processes(b"sleep\x0068.");
    signal(place.daemon(), Signal::SIGKILL);
    running.wait().expect("it ends by itself");
    until("no command lives", || !sleepers.iter().any(|pid| lives(*pid)));
    place.ok("", "mount base mnt");
    assert_eq!(place.read("mnt/mine"), "mine\n");
    let forks = place.json("mnt", "forks");
    assert_eq!(forks.iter().filter(|one| one["abandoned"] == true).count(), 2, "{forks:?}");
    place.ok("mnt", "fork --drop --abandoned");
    assert_eq!(heads(&place), ["main"]);
    place.umount();
    assert!(!place.ok("base", "check --read-data").is_empty());
}

/// Aborts the connection of the mount in which a process works, as an administrator would.
fn abort_mount_of(pid: i32) {
    let work_dir = std::fs::metadata(format!("/proc/{pid}/cwd")).expect("its directory");
    let connection = nix::sys::stat::minor(work_dir.dev());
    // The list of connections is mounted for this command alone.
    let list = "/sys/fs/fuse/connections";
    let list_it = format!("mountpoint -q {list} || mount -t fusectl none {list}");
    let abort = format!("{list_it}; echo 1 > {list}/{connection}/abort");
    let aborted = Command::new("unshare").args(["--mount", "sh", "-c", &abort]).status();
    assert!(aborted.expect("unshare").success());
}

/// The command does half of its work, loses its tree, and ends as if nothing had happened.
#[test]
fn an_attempt_whose_mount_was_aborted_does_not_win() {
    let script = "[ $JAILFS_ATTEMPT = 2 ] && { echo whole > n
            while [ ! -e ../out/aborted ]; do sleep 0.02; done; sleep 1; exit 0; }
        echo half > n; sleep 72.5 & while echo > c; do sleep 0.02; done 2> /dev/null; exit 0";
    for is_mounted in [false, true] {
        let place = Place::new();
        place.make_out();
        let at = if is_mounted { "mnt" } else { "base" };
        if is_mounted {
            place.mount();
        }
        let said = std::thread::scope(|scope| {
            let options = "run --keep --forks 2 --jobs 2 --bind-rw ../out -- sh -c".split(' ');
            let racing = scope.spawn(|| place.call(at, options.chain([script])));
            let sleeper = || processes(b"sleep\x0072.5").first().copied();
            until("the first command works", || sleeper().is_some());
            abort_mount_of(sleeper().expect("it sleeps"));
            place.write("out/aborted", "");
            racing.join().expect("it ends")
        });
        let (attempts, last) = race(&said);
        assert_eq!((said.code, &last["winner"]), (0, &2.into()), "{said:?}");
        assert_eq!(attempts.len(), 2, "{said:?}");
        assert!(said.err.contains("its mount was aborted or unmounted"), "{said:?}");
        assert_eq!(place.ok(at, "show @:n"), "whole\n");
    }
}

/// As above, for a command that runs alone.
#[test]
fn changes_of_a_command_whose_mount_was_aborted_are_not_applied() {
    let place = Place::new();
    let script =
        "echo half > n; sleep 73.5 & while echo > c; do sleep 0.02; done 2> /dev/null; exit 0";
    let said = std::thread::scope(|scope| {
        let running =
            scope.spawn(|| place.call("base", ["run", "--apply", "--", "sh", "-c", script]));
        let sleeper = || processes(b"sleep\x0073.5").first().copied();
        until("the command works", || sleeper().is_some());
        abort_mount_of(sleeper().expect("it sleeps"));
        running.join().expect("it ends")
    });
    assert_eq!(said.code, 125, "{said:?}");
    assert!(said.err.contains("its mount was aborted or unmounted"), "{said:?}");
    assert!(!place.exists("base/n"), "{said:?}");
    assert_eq!(place.ok("base", "show @:n"), "half\n");
}

#[test]
fn a_daemon_that_a_signal_ends_during_a_race_loses_nothing() {
    for asked in [Signal::SIGTERM, Signal::SIGINT] {
        let place = Place::new();
        place.mount();
        place.write("mnt/mine", "mine\n");
        let script = "echo $JAILFS_ATTEMPT > n; sync n; exec sleep 69.$JAILFS_ATTEMPT";
        let mut running = start_in_mount(&place, "--forks 3 --jobs 2 --keep-forks", script);
        until("both commands run", || processes(b"sleep\x0069.").len() == 2);
        let (sleepers, daemon) = (processes(b"sleep\x0069."), place.daemon());
        signal(daemon, asked);
        let status = running.wait().expect("it ends by itself");
        assert!(status.code().is_some_and(|code| code != 0), "{asked}: {status}");
        until("no command lives", || !sleepers.iter().any(|pid| lives(*pid)));
        until("the daemon ends", || !lives(daemon));
        assert!(!place.is_mounted("mnt"), "{asked}");
        place.ok("", "mount base mnt");
        assert_eq!(place.read("mnt/mine"), "mine\n");
        let forks = place.json("mnt", "forks");

        let left: Vec<&str> = forks
            .iter()
            .filter(|one| one["abandoned"] == true)
            .map(|one| one["name"].as_str().expect("a name"))
            .collect();
        assert_eq!(left.len(), 3, "{forks:?}");
        let tries = left.iter().map(|head| place.say("mnt", &format!("show {head}@:n")).out);
        assert_eq!(tries.collect::<Vec<_>>(), ["1\n", "2\n", ""]);
        place.ok("mnt", "fork --drop --abandoned");
        assert_eq!(heads(&place), ["main"]);
        place.umount();
        assert!(!place.ok("base", "check --read-data").is_empty());
    }
}

#[test]
fn an_interrupt_of_a_race_in_a_mount_drops_its_forks_only() {
    for asked in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let place = Place::new();
        place.mount();
        place.write("mnt/mine", "mine\n");
        place.ok("mnt", "fork other");
        let script = "trap '' INT TERM HUP; echo > n; echo > mine; $JAILFS checkpoint made
            $JAILFS fork side$JAILFS_ATTEMPT; exec sleep 70.$JAILFS_ATTEMPT";
        let mut running = start_in_mount(&place, "--forks 3 --jobs 2 --keep-forks", script);
        until("both commands run", || processes(b"sleep\x0070.").len() == 2);
        let sleepers = processes(b"sleep\x0070.");
        place.write("mnt/late", "late\n");
        signal(i32::try_from(running.id()).unwrap(), asked);
        let status = running.wait().expect("it ends");
        let code = status.code().or(status.signal().map(|number| 128 + number));
        assert_eq!(code, Some(128 + asked as i32), "{asked}: {status}");
        assert!(!sleepers.iter().any(|pid| lives(*pid)), "{asked}: a command lives");
        assert_eq!(heads(&place), ["main", "other"], "{asked}");
        let log = place.json("mnt", "log");
        assert!(log.iter().all(|one| one["name"] != "made"), "{asked}: {log:?}");
        assert_eq!(place.read("mnt/mine") + &place.read("mnt/late"), "mine\nlate\n");
        assert!(!place.exists("mnt/n"), "{asked}");
        place.umount();
        assert!(!place.ok("base", "check --read-data").is_empty());
    }
}

#[test]
fn an_unmount_during_a_race_leaves_the_race_its_store() {
    let place = Place::new();
    place.mount();
    place.make_out();
    let script = "echo $JAILFS_ATTEMPT > n; touch ../out/$JAILFS_ATTEMPT
        until [ -e ../out/go ]; do sleep 0.02; done; [ $JAILFS_ATTEMPT = 2 ]";
    let mut command = place.command("base", JAILFS);
    let words = "run --forks 2 --jobs 1 --keep --bind-rw ../out -- sh -c".split(' ');
    command.args(words).arg(script).stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = command.spawn().expect("a race");
    until("the first attempt runs", || place.exists("out/1"));
    place.umount();
    place.write("out/go", "");
    let output = running.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    // A command that meets a daemon on its way out fails and says so.
    let ended = || control::connect(&store_of(&place)).is_ok_and(|client| client.is_none());
    until("the daemon has ended", ended);
    assert_eq!((place.ok("base", "show @:n").as_str(), heads(&place).len()), ("2\n", 1), "{text}");
}

/// The store of the mount.
fn store_of(place: &Place) -> PathBuf {
    let stores = std::fs::read_dir(place.at("home/.local/state/jailfs")).expect("stores");
    stores.flatten().next().expect("a store").path()
}

/// A client of the daemon of the mount.
fn client(place: &Place) -> Client {
    control::connect(&store_of(place)).expect("connect").expect("a daemon")
}

#[test]
fn the_daemon_survives_a_client_that_sends_wrong_descriptors() {
    let place = Place::new();
    place.mount();
    let root = || OwnedFd::from(std::fs::File::options().read(true).open("/").expect("open /"));
    let dev = sys::file::device_of(root()).expect("a device");
    let (pipe_end, other_end) = std::io::pipe().expect("a pipe");
    let file = OwnedFd::from(tempfile::tempfile().expect("a file"));
    let idle = sys::mount::open_device().expect("/dev/fuse");
    let table: [(Vec<OwnedFd>, &str); 4] = [
        (vec![], "did not come"),
        (vec![pipe_end.into(), root()], "no FUSE device"),
        (vec![file, root()], "no FUSE device"),
        (vec![idle, root()], "no mount that waits"),
    ];
    for (descriptors, why) in table {
        let mut client = client(&place);
        let Ok(Answer::Race { names, .. }) = client.race(RaceOrder::Begin(1)) else {
            panic!("no race")
        };
        client.set_head(Some(names[0].clone()));
        assert!(matches!(client.race(RaceOrder::Prepare), Ok(Answer::Socket(_))));
        let tree = place.at("mnt");
        let plan = AttemptPlan { tree, dev, all_users: false, choice: Choice::default() };
        let (plan, descriptors) = (plan.encode().unwrap(), Descriptors::new(descriptors));
        let error = client.race(RaceOrder::Serve { plan, descriptors }).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        // The connection is dropped at any moment.
    }
    drop(other_end);
    drop_abandoned(&place);
    // Orders without a race, and about heads that are not of the race.
    let mut client = client(&place);
    assert!(client.race(RaceOrder::Prepare).is_err() && client.race(RaceOrder::Finish).is_err());
    assert!(matches!(client.race(RaceOrder::Begin(2)), Ok(Answer::Race { .. })));
    client.set_head(Some("main".to_owned()));
    assert!(client.race(RaceOrder::Begin(2)).is_err());
    for order in [RaceOrder::Prepare, RaceOrder::Replace] {
        assert!(client.race(order).unwrap_err().reason.contains("no fork of this race"));
    }
    drop(client.race(RaceOrder::Drop(vec!["main".to_owned()])));
    drop(client);
    drop_abandoned(&place);
    assert_eq!(place.read("mnt/a"), "one\n", "the mount lives");
}
