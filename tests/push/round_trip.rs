//! A pushed state is pulled elsewhere, equal in everything.

use std::io::Write;
use std::path::Path;

use super::cutter::Cutter;
use super::harness::{Live, assert_same};
use super::partner::{Partner, Tls};
use super::{Machine, has_spool};

/// A base with all kinds of nodes, names and attributes.
const BASE: &str = r#"
    mkdir -p dir/sub gone/deep "sp ace"
    echo one > dir/file; echo two > dir/sub/two; echo gone > gone/deep/file
    ln dir/file dir/again; ln dir/file twin
    ln -s ../dir/file dir/sub/link; ln -s /etc/passwd out
    mkfifo pipe; mknod null c 1 3; mknod disk b 7 200
    python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
    printf 'bytes' > "$(printf 'n\377\n')"
    truncate -s 3M holes; printf end | dd of=holes bs=1M seek=2 conv=notrunc status=none
    head -c 1500000 /dev/urandom > big; truncate -s 40M huge; echo far >> huge
    setfattr -n user.a -v value dir; setfattr -n trusted.t -v 0x000102ff dir/sub
    setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 big
    setfacl -m u:1234:r-x,m::rwx dir; setfacl -d -m g:77:rw- dir/sub
    chown 1234:4321 dir/sub/two; chmod 1777 "sp ace"; chown 3000000:5 big; chmod 4751 big
    touch -d '1961-02-03 04:05:06.789012345 UTC' dir/file; touch -d @-0.5 pipe
    touch -h -d '2001-01-01 UTC' out
"#;

/// Changes of all kinds in a mount over [`BASE`].
const CHANGES: &str = r#"
    echo more >> dir/sub/two; rm -r gone; mv "sp ace" moved; ln big big-twin
    rm out; mkdir out; echo in > out/in; chmod 600 holes; setfattr -x user.a dir
    printf middle | dd of=holes bs=1M seek=1 conv=notrunc status=none
    mkdir fresh; touch -d @7.25 fresh
"#;

/// Another base, with some of the same names.
const OTHER: &str =
    "mkdir dir twin; echo here > dir/file; echo x > null; ln dir/file kept; echo y > y";

/// Everything that stat, getfattr and cmp can tell, the
/// time of the last change of the node included.
/// The time of access is left out: reading changes it.
const ALL: &str = r#"
    find . -print0 | sort -z | xargs -0 stat --printf '%n %f %u %g %h %s %t:%T %.9Y %.9Z\n' |
        awk '{ if (substr($2, 1, 1) == "4") { $5 = "-"; $6 = "-" } print }'
    find . -type f -print0 | sort -z | xargs -0 sha256sum
    find . -type l -print0 | sort -z | xargs -0 readlink
    find . -print0 | sort -z | xargs -0 getfattr -h -d -m - -e hex 2>/dev/null
    find . ! -type d -links +1 -printf '%p %i\n' | sort |
        awk '{ if (!($2 in first)) first[$2] = $1; print $1, first[$2] }'
"#;

pub fn all(live: &Live) -> Vec<String> {
    live.sh(ALL).lines().map(str::to_owned).collect()
}

#[test]
fn a_pushed_state_is_pulled_elsewhere_equal_in_every_attribute() {
    let dir = tempfile::tempdir().unwrap();
    let tls = Tls::make(dir.path());
    let registry = Partner::start(Some(("me", "secret-7")), Some(&tls));
    let reference = format!("{}/team/repo:green", registry.address);
    let auth = dir.path().join("auth.json");
    // base64 of me:secret-7
    let login =
        format!(r#"{{"auths": {{"{}": {{"auth": "bWU6c2VjcmV0LTc="}}}}}}"#, registry.address);
    std::fs::write(&auth, login).unwrap();
    let machine = || {
        let mut machine = Machine::new();
        machine.variables.push(("REGISTRY_AUTH_FILE", auth.display().to_string()));
        machine.variables.push(("SSL_CERT_FILE", tls.authority.display().to_string()));
        machine
    };
    let here = Live::new(BASE);
    let sender = machine();
    here.sh(CHANGES);
    here.jailfs(&["checkpoint", "green", "-m", "tests pass"]);
    let pushed = sender.json(&here, &["push", &reference, "green"]);
    let wanted = all(&here);

    let there = Live::new(OTHER);
    let receiver = machine();
    let before = there.snapshot();
    let said = receiver.run(&there, &["pull", &reference]);
    assert_same(&wanted, &all(&there), "the pulled state");
    let log = there.json(&["op", "log"]);
    assert_eq!(
        (&log[0]["verb"], &log[0]["description"]),
        (&"pull".into(), &reference.as_str().into())
    );
    let pulled = receiver.json(&there, &["pull", &reference]);
    assert_eq!(pulled["tree"], pushed["tree"]);
    assert_eq!((&pulled["name"], &pulled["message"]), (&"green".into(), &"tests pass".into()));
    assert!(!has_spool(receiver.cache.path()));
    // The same state, pushed by the other machine, has the same tree, and needs no blob.
    let again = format!("{}/team/repo:again", registry.address);
    let repeated = receiver.json(&there, &["push", &again]);
    assert_eq!((&repeated["tree"], &repeated["blobs"]), (&pushed["tree"], &0.into()));
    there.jailfs(&["check", "--read-data"]);
    // A pull of the present state changes nothing; the first pull can be undone.
    let same = receiver.run(&there, &["pull", &reference]);
    assert_same(&wanted, &all(&there), "the state, pulled twice");
    assert!(same.contains("undo: jailfs op restore"), "{same}");
    let undo = said.lines().find_map(|line| line.strip_prefix("undo: jailfs ")).unwrap();
    there.jailfs(&undo.split(' ').collect::<Vec<_>>());
    assert_same(&before, &there.snapshot(), "the tree after the undo");
    // Without the login, or without the authority, nothing is said.
    let mut stranger = Machine::new();
    stranger.variables.push(("SSL_CERT_FILE", tls.authority.display().to_string()));
    stranger.fail(&there, &["pull", &reference], 1, "login");
    Machine::new().fail(&there, &["pull", &reference], 1, "certificate");
}

#[test]
fn a_second_push_of_a_state_sends_no_blob() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:one", registry.address);
    let live = Live::new("head -c 3000000 /dev/urandom > a; echo b > b");
    let machine = Machine::new();
    let push = |tag: &str| {
        let reference = format!("{}/repo:{tag}", registry.address);
        machine.json(&live, &["push", &reference, "--plain-http"])
    };
    let first = push("one");
    assert!(first["blobs"].as_u64() >= Some(2), "{first}");
    let second = push("one");
    assert_eq!((&second["blobs"], &second["was_there"]), (&0.into(), &true.into()));
    assert_eq!(second["digest"], first["digest"]);
    assert_eq!(push("two")["blobs"], 0);
    // A machine without a cache finds the packs by the tag.
    let other = Machine::new();
    let third = other.json(&live, &["push", &reference, "--plain-http"]);
    assert_eq!((&third["blobs"], &third["digest"]), (&0.into(), &first["digest"]));
    live.sh("echo c > c");
    let more = push("one");
    assert_eq!(more["parent"], first["tree"]);
    assert!(more["bytes"].as_u64() < Some(10_000), "{more}");
    let parent = format!("{}/repo:two", registry.address);
    let named = ["push", &parent, "--parent", &reference, "--plain-http"];
    assert_eq!(other.json(&live, &named)["blobs"], 0);
}

#[test]
fn a_byte_in_front_of_a_large_file_moves_at_most_256_kib() {
    let registry = Partner::start(None, None);
    let cutter = Cutter::start(&registry.address);
    let reference = format!("{}/repo:x", cutter.address);
    let size = std::env::var("JAILFS_PUSH_MIB").map_or(24, |text| text.parse().unwrap());
    let here = Live::new(&format!("head -c {size}M /dev/urandom > large; touch small"));
    let there = Live::new("echo other > other");
    let (sender, receiver) = (Machine::new(), Machine::new());
    sender.run(&here, &["push", &reference, "--plain-http"]);
    receiver.run(&there, &["pull", &reference, "--plain-http"]);
    let first = cutter.take_bytes();
    assert!(first > (2 * size) << 20, "{first} bytes of random content");
    here.sh("{ printf x; cat large; } > new; mv new large");
    sender.run(&here, &["push", &reference, "--plain-http"]);
    let pushed = cutter.take_bytes();
    receiver.run(&there, &["pull", &reference, "--plain-http"]);
    let pulled = cutter.take_bytes();
    eprintln!("{size} MiB: {pushed} bytes to push, {pulled} to pull");
    assert!(pushed <= 256 << 10, "{pushed} bytes to push");
    assert!(pulled <= 256 << 10, "{pulled} bytes to pull");
    let cmp = |a: &Path, b: &Path| {
        std::process::Command::new("cmp").args([a.join("large"), b.join("large")]).status().unwrap()
    };
    assert!(cmp(&here.mnt, &there.mnt).success());
}

#[test]
fn tags_are_listed_with_time_message_and_parent() {
    let registry = Partner::start(None, None);
    let live = Live::new("echo a > a");
    let machine = Machine::new();
    let repo = format!("{}/repo", registry.address);
    assert_eq!(machine.run(&live, &["ls", &repo, "--plain-http"]), "");
    live.jailfs(&["checkpoint", "first", "-m", "one\u{1b}[2J"]);
    let first = machine.json(&live, &["push", &format!("{repo}:a"), "first", "--plain-http"]);
    live.sh("sleep 1.1; echo b > b");
    live.jailfs(&["checkpoint", "second", "-m", "two"]);
    machine.run(&live, &["push", &format!("{repo}:b"), "second", "--plain-http"]);
    let said = machine.run(&live, &["ls", &repo, "--plain-http"]);
    let lines: Vec<&str> = said.lines().collect();
    let tree = &first["tree"].as_str().unwrap()[..12];
    assert!(lines.len() == 2 && lines[0].starts_with("b  20"), "{said}");
    assert!(lines[0].contains(&format!("< {tree}  second  two")), "{said}");
    assert!(lines[1].contains(tree) && lines[1].contains("< -"), "{said}");
    assert!(!said.contains('\u{1b}'), "{said:?}");
    let one = machine.json(&live, &["ls", &format!("{repo}:a"), "--plain-http"]);
    assert_eq!((&one["tag"], &one["message"]), (&"a".into(), &"one\u{1b}[2J".into()));
    assert_eq!(one["tree"], first["tree"]);
    let (missing, digest) = (format!("{repo}:c"), format!("{repo}@sha256:{}", "0".repeat(64)));
    machine.fail(&live, &["ls", &missing, "--plain-http"], 10, "does not have it");
    machine.fail(&live, &["pull", &missing, "--plain-http"], 10, "does not have it");
    machine.fail(&live, &["pull", &digest, "--plain-http"], 10, "does not have it");
    machine.fail(&live, &["push", &digest, "--plain-http"], 2, "a digest cannot be chosen");
    machine.fail(&live, &["push", &missing, "nothing", "--plain-http"], 10, "no such checkpoint");
    machine.fail(&live, &["push", "repo:a"], 2, "it names no registry");
    let other = format!("{}/other:a", registry.address);
    let words = ["push", &missing, "--parent", &other, "--plain-http"];
    machine.fail(&live, &words, 2, "another repository");
    let words = ["push", &missing, "--parent", &missing, "--plain-http"];
    machine.fail(&live, &words, 10, "does not have it");
}

#[test]
fn a_pull_goes_to_another_head_or_a_new_one() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let live = Live::new("echo a > a");
    let machine = Machine::new();
    live.sh("echo b > b");
    let pushed = machine.json(&live, &["push", &reference, "--plain-http"]);
    live.sh("rm b; echo c > c");
    let before = live.snapshot();
    for _ in 0..2 {
        machine.run(&live, &["pull", &reference, "--into", "try", "--plain-http"]);
        let tag = format!("{}/repo:try", registry.address);
        let again = machine.json(&live, &["push", &tag, "try@", "--plain-http"]);
        assert_eq!((&again["tree"], &again["head"]), (&pushed["tree"], &"try".into()));
        assert_same(&before, &live.snapshot(), "the tree of this head");
    }
}

#[test]
fn a_command_of_run_can_neither_push_nor_pull() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base");
    std::fs::create_dir(&base).unwrap();
    std::fs::File::options()
        .create(true)
        .append(true)
        .open(base.join("a"))
        .unwrap()
        .write_all(b"a")
        .unwrap();
    let program = env!("CARGO_BIN_EXE_jailfs");
    let run = |words: &[&str]| {
        let mut command = std::process::Command::new(program);
        command.arg("-C").arg(&base).args(["run", "--discard", "--"]).args(words);
        command.env("XDG_CACHE_HOME", "/tmp");
        command.env("XDG_STATE_HOME", dir.path().join("state")).output().unwrap()
    };
    // A pull would find this.
    let live = Live::new("echo a > a");
    Machine::new().run(&live, &["push", &reference, "--plain-http"]);
    for verb in ["push", "pull"] {
        let output = run(&[program, verb, &reference, "--plain-http"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{verb}: {said}");
        assert!(said.contains("'jailfs run' holds this sandbox"), "{verb}: {said}");
    }
}

/// The most memory that a process has had, in KiB.
fn peak(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

#[test]
fn a_sparse_state_of_20_gib_is_pushed_and_pulled_in_128_mib() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let (here, there) = (Live::new("truncate -s 2G of-base"), Live::new(""));
    here.sh("truncate -s 20G a; for i in $(seq 0 99); do head -c 262144 /dev/urandom | \
         dd of=a bs=256K seek=$((i * 800)) conv=notrunc status=none; done");
    for (live, verb) in [(&here, "push"), (&there, "pull")] {
        let mut command = Machine::new().command(live, &[verb, &reference, "--plain-http"]);
        let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
        let mut most = 0;
        let status = loop {
            most = peak(child.id()).unwrap_or(0).max(most);
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        };
        assert!(status.success(), "{verb}: {status}");
        let daemon = peak(live.pid().as_raw() as u32).unwrap();
        eprintln!("{verb}: {most} KiB in the command, {daemon} KiB in the daemon");
        assert!(most > 0 && most.max(daemon) < 128 << 10, "{verb}: {most} and {daemon} KiB");
    }
    let parts = "for i in $(seq 0 99); do dd if=a bs=256K skip=$((i * 800)) count=1 status=none; \
                 done | sha256sum; stat -c %s a";
    assert_eq!(here.sh(parts), there.sh(parts));
    // The end of the test compares what is left byte by byte.
    [&here, &there].iter().for_each(|live| drop(live.sh("test -s of-base; rm a of-base")));
}
