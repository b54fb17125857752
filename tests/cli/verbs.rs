//! The commands checkpoint, log, status, diff, restore, discard and op; how a command finds its
//! sandbox; names that are not UTF-8; JSON.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::place::{JAILFS, Place, parse, said, word};

/// A mounted tree with a checkpoint `green` and changes of every kind since.
fn worked() -> Place {
    let place = Place::new();
    place.write("base/mode", "x\n");
    place.write("base/old-name", "a file that will have another name\n");
    place.write("base/kind", "a file that will be a directory\n");
    place.mount();
    place.ok("mnt", "checkpoint green -m all-good");
    work(&place);
    place
}

fn work(place: &Place) {
    place.write("mnt/a", "one\ntwo\n");
    fs::remove_file(place.at("mnt/del")).unwrap();
    fs::create_dir(place.at("mnt/n")).unwrap();
    place.write("mnt/n/f", "new\n");
    fs::set_permissions(place.at("mnt/mode"), PermissionsExt::from_mode(0o755)).unwrap();
    fs::rename(place.at("mnt/old-name"), place.at("mnt/new-name")).unwrap();
    fs::remove_file(place.at("mnt/kind")).unwrap();
    fs::create_dir(place.at("mnt/kind")).unwrap();
}

const WORK: &str = "M\ta\nD\tdel\nT\tkind/\nm\tmode\nA\tn/\nA\tn/f\nR\told-name\tnew-name\n";

fn sorted(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn a_command_finds_its_sandbox_from_everywhere_inside() {
    let place = worked();
    let store = place.json("mnt", "status")[0]["store"].as_str().unwrap().to_owned();
    let everywhere = |what: &str| {
        for (dir, words) in [
            ("mnt", String::new()),
            ("mnt/n", String::new()),
            ("", "-C mnt".to_owned()),
            ("", "-C base".to_owned()),
            ("base/sub", String::new()),
            ("home", format!("--store {store}")),
        ] {
            if dir == "mnt/n" && what == "unmounted" {
                continue;
            }
            let said = place.say(dir, &format!("{words} diff"));
            if what == "unmounted" && (dir == "mnt" || words == "-C mnt") {
                assert_eq!(said.code, 10, "{dir} {words}: {said:?}");
            } else {
                assert_eq!(
                    (said.code, sorted(&said.out)),
                    (0, sorted(WORK)),
                    "{what}, {dir} {words}: {said:?}"
                );
            }
        }
    };
    everywhere("mounted");
    // Paths are relative to the working directory.
    assert_eq!(place.ok("mnt/n", "diff f"), "A\tn/f\n");
    assert_eq!(place.ok("mnt/n", "diff ../a"), "M\ta\n");
    assert_eq!(place.ok("base/sub", "diff ../a"), "M\ta\n");
    assert_eq!(place.ok("home", &format!("--store {store} diff -- n")), "A\tn/\nA\tn/f\n");
    place.umount();
    everywhere("unmounted");
    // Without a daemon, a command changes the store by itself.
    assert_eq!(place.ok("base", "checkpoint red"), "checkpoint 2 'red'\n");
    assert!(place.ok("base", "restore green").starts_with("restored checkpoint 1 'green': "));
    place.mount();
    assert_eq!(place.read("mnt/a"), "one\n");
    assert!(place.exists("mnt/del") && !place.exists("mnt/n"));
}

#[test]
fn diff_shows_every_kind_of_change() {
    let place = worked();
    assert_eq!(sorted(&place.ok("mnt", "diff")), sorted(WORK));
    assert_eq!(place.ok("mnt", "diff --name-status green @"), place.ok("mnt", "diff @-1"));
    assert_eq!(place.ok("mnt", "diff base 1"), "");
    assert_eq!(place.ok("mnt", "diff green a"), "M\ta\n");
    let stat = place.ok("mnt", "diff --stat");
    assert!(stat.contains("     1 +\n") && stat.contains("     1 -\n"), "{stat}");
    assert!(stat.contains(" old-name => new-name |"), "{stat}");
    assert!(
        stat.lines().any(|line| line.starts_with(" mode ") && line.ends_with("attributes only")),
        "{stat}"
    );
    assert!(stat.lines().all(|line| line == line.trim_end()), "{stat:?}");
    let last = stat.lines().last().unwrap();
    assert!(
        last.contains(
            "1 modified, 1 renamed, 1 of another type, 1 with other attributes only, 1 deleted"
        ),
        "{last}"
    );
    // In reverse, added files are deleted.
    let back = place.ok("mnt", "diff @ green");
    assert!(back.contains("A\tdel\n") && back.contains("D\tn/f\n"), "{back}");
}

#[test]
fn a_restore_and_an_undo_are_exact() {
    let place = worked();
    let dry = place.ok("mnt", "restore green --dry-run");
    assert!(dry.starts_with("would restore checkpoint 1 'green': "), "{dry}");
    assert!(dry.contains("D\tn/f\n") && dry.contains("A\tdel\n"), "{dry}");
    assert_eq!(sorted(&place.ok("mnt", "diff")), sorted(WORK), "a dry run changes nothing");
    for line in ["restore green nowhere", "restore green nowhere --dry-run"] {
        assert!(
            place.fails("mnt", line, 10).contains("neither the checkpoint nor the tree has it")
        );
    }
    let output = place.ok("mnt", "restore green");
    assert!(output.contains("D\tn/\nD\tn/f\n"), "{output}");
    assert_eq!(place.ok("mnt", "diff"), "");
    let undo = output.lines().last().unwrap().strip_prefix("undo: jailfs ").unwrap();
    place.ok("mnt", undo);
    assert_eq!(sorted(&place.ok("mnt", "diff")), sorted(WORK));
    assert_eq!(place.read("mnt/new-name"), "a file that will have another name\n");
    let log = place.ok("mnt", "op log");
    let verbs: Vec<&str> = log.lines().filter_map(|line| line.get(28..40)).map(str::trim).collect();
    assert_eq!(verbs, ["op restore", "restore", "seal", "checkpoint", "create"], "{log}");
    // Discard goes to the base, past all checkpoints, and can be undone as well.
    let output = place.ok("mnt", "discard");
    assert!(
        output.starts_with("restored base: ") && output.contains("\nundo: jailfs op restore "),
        "{output}"
    );
    assert_eq!(place.ok("mnt", "diff"), "");
    place.ok("mnt", output.lines().last().unwrap().strip_prefix("undo: jailfs ").unwrap());
    assert_eq!(sorted(&place.ok("mnt", "diff")), sorted(WORK));
    // Automatic seals are only in the full log.
    assert_eq!(place.ok("mnt", "log").lines().count(), 1);
    let all = place.ok("mnt", "log --all");
    assert!(all.lines().count() > 1, "{all}");
    // All the way back, also across a remount.
    place.umount();
    place.mount();
    assert_eq!(sorted(&place.ok("mnt", "diff")), sorted(WORK));
    place.ok("mnt", "restore base");
    assert_eq!(place.ok("mnt", "diff base"), "");
    assert_eq!(place.read("mnt/del"), "del\n");
}

#[test]
fn log_and_status_count_correctly() {
    let place = Place::new();
    place.mount();
    let status = place.ok("mnt", "status");
    assert!(
        status
            .contains("checkpoint  none\nchanged     0 paths since the base\napplied     never\n"),
        "{status}"
    );
    place.write("mnt/new", "x");
    assert!(place.ok("mnt", "status").contains("changed     1 path since the base\n"));
    assert_eq!(place.ok("mnt", "checkpoint"), "checkpoint 1\n");
    assert_eq!(
        place.call("mnt", ["checkpoint", "two", "-m", "the second\none"]).out,
        "checkpoint 2 'two'\n"
    );
    let log = place.ok("mnt", "log");
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(
        lines[0].starts_with("*    2  two  20") && lines[0].ends_with("Z  the second\\none"),
        "{log}"
    );
    assert!(lines[1].starts_with("     1 "), "{log}");
    std::os::unix::fs::symlink("/etc/passwd", place.at("mnt/out")).unwrap();
    let refused = fs::read(place.at("mnt/out")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(nix::libc::EXDEV));
    let status = place.ok("mnt", "status");
    assert!(status.contains("checkpoint  2 'two', 20"), "{status}");
    assert!(status.contains("changed     1 path since the checkpoint\n"), "{status}");
    assert!(
        status.contains(
            "what leads out was refused once, the last:\n  out -> /etc/passwd, by process "
        ),
        "{status}"
    );
    let json = place.json("mnt", "status");
    assert_eq!(
        (json[0]["changed"].as_u64(), json[0]["refused_links"].as_u64()),
        (Some(1), Some(1))
    );
    assert_eq!(
        (&json[1]["path"], &json[1]["target"]),
        (&Value::from("out"), &Value::from("/etc/passwd"))
    );
}

/// Asserts that an object has exactly these fields, besides its type.
fn has(object: &Value, kind: &str, fields: &str) {
    assert_eq!(object["type"], kind, "{object}");
    let mut names: Vec<&str> = object
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .filter(|name| *name != "type")
        .collect();
    let mut wanted: Vec<&str> = fields.split_whitespace().collect();
    names.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(names, wanted, "{object}");
}

const CHECKPOINT: &str = "id name message time secs nanos parent epoch head automatic current";
const STATUS: &str = "base store mount head pid checkpoint checkpoint_name changed to_apply epoch \
    store_bytes kernel_nodes refused_links sync_failed rollback_unfinished";
const RESTORED: &str = "to before undo dry_run changes";
const APPLIED: &str = "epoch dry_run undo changes conflicts refused not_kept";
const OPERATION: &str = "op time secs nanos head verb description tree epoch";

fn changes(objects: &[Value]) -> Vec<&Value> {
    objects.iter().filter(|object| object["type"] == "change").collect()
}

#[test]
fn every_reading_command_has_json_output() {
    let place = worked();
    has(&place.json("mnt", "checkpoint red -m x")[0], "checkpoint", CHECKPOINT);
    for object in place.json("mnt", "log").iter().chain(&place.json("mnt", "log --all")) {
        has(object, "checkpoint", CHECKPOINT);
    }
    let log = place.json("mnt", "log");
    assert_eq!(
        (&log[0]["name"], &log[0]["parent"], &log[0]["current"]),
        (&"red".into(), &1.into(), &true.into())
    );
    let status = place.json("mnt", "status");
    has(&status[0], "status", STATUS);
    assert_eq!(status[0]["base"], place.at("base").to_str().unwrap());
    assert_eq!(status[0]["mount"], place.at("mnt").to_str().unwrap());
    assert_eq!(
        (&status[0]["checkpoint"], &status[0]["checkpoint_name"]),
        (&2.into(), &"red".into())
    );
    for detail in ["", " --stat", " -p"] {
        let lines = place.json("mnt", &format!("diff green{detail}"));
        assert_eq!(lines.len(), WORK.lines().count());
        for object in &lines {
            // A patch cannot express an empty directory.
            let has_patch = detail == " -p" && object["path"] != "n";
            let patch = if has_patch { "patch" } else { "" };
            let fields =
                "status path old_path file ino old_size new_size lines_added lines_removed binary";
            has(object, "change", &format!("{fields} {patch}"));
        }
        let a = lines.iter().find(|object| object["path"] == "a").unwrap();
        let added = if detail.is_empty() { Value::Null } else { 1.into() };
        assert_eq!(
            (&a["status"], &a["lines_added"], &a["old_size"]),
            (&"M".into(), &added, &4.into())
        );
        let renamed = lines.iter().find(|object| object["status"] == "R").unwrap();
        assert_eq!(renamed["old_path"], "old-name");
    }
    let restored = place.json("mnt", "restore green --dry-run");
    has(restored.last().unwrap(), "restored", RESTORED);
    assert_eq!(restored.last().unwrap()["dry_run"], true);
    let restored = place.json("mnt", "restore green");
    let last = restored.last().unwrap();
    assert_eq!(last["changes"].as_u64().unwrap() as usize, changes(&restored).len());
    let undo = last["undo"].as_u64().unwrap();
    let undone = place.json("mnt", &format!("op restore {undo}"));
    has(undone.last().unwrap(), "restored", RESTORED);
    place.write("mnt/scratch", "x");
    let discarded = place.json("mnt", "discard");
    has(discarded.last().unwrap(), "restored", RESTORED);
    place.json("mnt", &format!("op restore {}", discarded.last().unwrap()["undo"]));
    std::fs::remove_file(place.at("mnt/scratch")).unwrap();
    for object in place.json("mnt", "op log") {
        has(&object, "operation", OPERATION);
    }
    let plan = place.json("mnt", "apply --dry-run");
    has(plan.last().unwrap(), "applied", APPLIED);
    // In the base, a rename appears as a new file and a deletion.
    assert_eq!(changes(&plan).len(), WORK.lines().count() + 1);
    let applied = place.json("mnt", "apply");
    assert_eq!(
        (&applied.last().unwrap()["epoch"], &applied.last().unwrap()["dry_run"]),
        (&1.into(), &false.into())
    );
    let undone = place.json("mnt", "apply --undo");
    assert_eq!(undone.last().unwrap()["undo"], true);
}

#[test]
fn names_that_are_not_utf8_pass_through_every_command() {
    let place = Place::new();
    let names: [&[u8]; 6] = [b"new\nline", b"\xff\xfe", b"@", b"-p", b"back\\slash", b" spaces  "];
    for name in names {
        place.write(std::path::Path::new("base").join(word(name)), "old\n");
    }
    place.mount();
    place.ok("mnt", "checkpoint start");
    for name in names {
        place.write(std::path::Path::new("mnt").join(word(name)), "new\n");
    }
    let diff = place.ok("mnt", "diff");
    for shown in [
        "M\tnew\\nline\n",
        "M\t\\xff\\xfe\n",
        "M\t@\n",
        "M\t-p\n",
        "M\tback\\\\slash\n",
        "M\t spaces  \n",
    ] {
        assert!(diff.contains(shown), "{shown:?} in {diff}");
    }
    for name in names {
        let only = place.call("mnt", [&b"diff"[..], b"--json", b"--", name].map(word));
        let lines = parse(&only.out);
        assert_eq!((only.code, lines.len()), (0, 1), "{only:?}");
        let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        match std::str::from_utf8(name) {
            Ok(text) => {
                assert!(lines[0]["path"] == text && lines[0].get("path_hex").is_none(), "{lines:?}")
            }
            Err(_) => assert_eq!(lines[0]["path_hex"], hex),
        }
    }
    // The file '@' is written './@'; '@' alone is the state.
    assert_eq!(place.ok("mnt", "diff start @"), diff);
    assert_eq!(place.ok("mnt", "diff ./@"), "M\t@\n");
    // Two at a time, then all.
    let two = [&b"apply"[..], b"--", b"-p", b"\xff\xfe"].map(word);
    let applied = place.call("mnt", two);
    assert_eq!(
        (applied.code, applied.out.lines().next()),
        (0, Some("applied: 2 modified")),
        "{applied:?}"
    );
    let of = |name: &[u8]| fs::read(place.at("base").join(word(name))).unwrap();
    assert_eq!(
        (of(b"-p"), of(b"\xff\xfe"), of(b"@")),
        (b"new\n".to_vec(), b"new\n".to_vec(), b"old\n".to_vec())
    );
    place.ok("mnt", "apply");
    assert!(names.iter().all(|name| of(name) == b"new\n"));
    place.ok("mnt", "restore start");
    for name in names {
        assert_eq!(fs::read(place.at("mnt").join(word(name))).unwrap(), b"old\n");
    }
}

/// In many parts, and with a checkpoint between two of them.
#[test]
fn show_reads_all_parts_from_one_checkpoint() {
    let place = Place::new();
    place.mount();
    place.sh("mnt", "yes A | head -c 20000000 > big");
    place.ok("mnt", "checkpoint");
    place.sh("mnt", "yes B | head -c 20000000 > big");
    let shown = "$JAILFS show @-1:big | { head -c 2; $JAILFS checkpoint > /dev/null; cat; \
        } | sort | uniq -c | tr -s ' '";
    assert_eq!(place.sh("mnt", shown).out, "10000000 A\n");
    assert_eq!(place.sh("mnt", "$JAILFS show @-1:big | head -c 2").out, "B\n");
    // The present tree can change, and then show reports it.
    let now = "$JAILFS show @:big | { head -c 2; echo more >> big; cat; } | tail -c 2";
    let said = place.sh("mnt", now);
    assert!(said.err.contains("it was changed while it was read"), "{said:?}");
}

/// A number with a sign is a name.
#[test]
fn a_checkpoint_can_be_called_plus_one() {
    let place = Place::new();
    place.mount();
    for text in ["1", "2", "3"] {
        place.write("mnt/a", text);
        place.ok("mnt", if text == "3" { "checkpoint +1" } else { "checkpoint" });
    }
    place.ok("mnt", "restore 1");
    place.ok("mnt", "restore +1");
    assert_eq!(
        (place.read("mnt/a"), place.read("mnt/.jailfs/checkpoints/+1/a")),
        ("3".into(), "3".into())
    );
    place.fails("mnt", "restore @-+1", 10);
    place.ok("mnt", "drop +1");
    assert!(place.ok("mnt", "log").contains("1 "), "{}", place.ok("mnt", "log"));
}

#[test]
fn a_usage_error_has_its_own_exit_code_and_a_hint() {
    let place = Place::new();
    place.mount();
    place.ok("mnt", "checkpoint green");
    place.write("mnt/7", "a file called as a checkpoint could be");
    place.ok("mnt", "checkpoint both");
    place.write("mnt/both", "and one called as one is");
    for (line, code, words) in [
        ("restore nope", 10, "hint: 'jailfs log' lists them"),
        ("restore 99", 10, "find checkpoint '99': there is no such checkpoint"),
        ("restore @-9", 10, "there is no such checkpoint"),
        ("restore @", 2, "'@' is the tree as it is now"),
        ("op restore 99", 10, "hint: 'jailfs op log' lists them"),
        ("checkpoint green", 1, "hint: choose another name, or none"),
        ("checkpoint 7", 2, "hint: a name is not a number"),
        ("checkpoint base", 2, "hint: "),
        ("checkpoint @x", 2, "hint: "),
        ("diff nonsense", 2, "it is neither a checkpoint nor a path"),
        ("diff both", 2, "it is a state and a path"),
        ("diff -- ../x", 13, "it is not below"),
        ("apply -- /etc/passwd", 13, "it is not below"),
        ("apply --undo", 10, "nothing was applied yet"),
        ("--store /nowhere log", 10, "find '/nowhere'"),
        ("-C /nowhere log", 1, "find '/nowhere'"),
        ("diff -p --stat", 2, "Usage: "),
        ("frobnicate", 2, "Usage: "),
        ("", 2, "Usage: "),
    ] {
        let said = place.say("mnt", line);
        assert_eq!(said.code, code, "jailfs {line}: {said:?}");
        assert!(said.err.contains(words), "jailfs {line}: {}", said.err);
        assert_eq!(said.out, "", "jailfs {line}");
    }
    assert_eq!(place.ok("mnt", "diff ./both"), "A\tboth\n");
    let said = place.say("home", "log");
    assert_eq!((said.code, said.err.contains("hint: go into a mount")), (10, true), "{said:?}");
}

#[test]
fn help_and_version_succeed_and_a_closed_pipe_is_no_error() {
    let place = worked();
    let help = place.ok("", "--help");
    for verb in [
        "mount",
        "umount",
        "run",
        "checkpoint",
        "log",
        "status",
        "diff",
        "restore",
        "apply",
        "discard",
        "op",
    ] {
        assert!(help.lines().any(|line| line.trim_start().starts_with(verb)), "{verb} in {help}");
        let of_verb = place.ok("", &format!("{verb} --help"));
        assert!(of_verb.contains("Usage: jailfs"), "{of_verb}");
    }
    assert!(!help.contains("__"), "hidden verbs are not shown: {help}");
    assert_eq!(place.ok("", "--version"), format!("jailfs {}\n", env!("CARGO_PKG_VERSION")));
    let piped =
        place.sh("mnt", "$JAILFS diff -p | head -n 1; $JAILFS log >/dev/full || echo code $?");
    assert!(
        piped.out.ends_with("code 1\n") && piped.err.contains("No space left on device"),
        "{piped:?}"
    );
}

#[test]
fn the_environment_variable_of_a_run_is_the_last_way_to_find_the_sandbox() {
    let place = worked();
    let store = place.json("mnt", "status")[0]["store"].as_str().unwrap().to_owned();
    let mut command = place.command("home", JAILFS);
    let said_at_home = said(command.env("JAILFS_SANDBOX", &store).arg("log"));
    assert_eq!(said_at_home.code, 0, "{said_at_home:?}");
    let mut command = place.command("home", JAILFS);
    let elsewhere = said(command.env("JAILFS_SANDBOX", &store).args(["-C", "/", "log"]));
    assert_eq!(elsewhere.code, 10, "{elsewhere:?}");
}

/// The blocks of commands below "Examples" in docs/CLI.md, as scripts.
fn examples() -> Vec<String> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/CLI.md")).unwrap();
    let (_, examples) = text.split_once("\n## Examples\n").unwrap();
    let (examples, _) = examples.split_once("\n## ").unwrap();
    let mut scripts = vec![String::new()];
    for line in examples.lines() {
        match (line.strip_prefix("    "), scripts.last_mut()) {
            (Some(command), Some(script)) => *script += &format!("{command}\n"),
            (None, Some(script)) if !script.is_empty() && !line.is_empty() => {
                scripts.push(String::new())
            }
            _ => {}
        }
    }
    scripts
}

#[test]
fn the_examples_of_the_manual_work() {
    let scripts = examples();
    assert_eq!(scripts.len(), 2, "{scripts:?}");
    for script in scripts {
        let place = Place::new();
        fs::rename(place.at("base"), place.at("repo")).unwrap();
        fs::create_dir(place.at("bin")).unwrap();
        fs::copy(JAILFS, place.at("bin/jailfs")).unwrap();
        // In the base, because a command of 'run' sees nothing else below /tmp.
        place.write("repo/make", "#!/bin/sh\n[ $# = 0 ] || cd $2\necho made > made\n");
        fs::set_permissions(place.at("repo/make"), PermissionsExt::from_mode(0o755)).unwrap();
        let done = place.sh("", &format!("PATH=$PWD/bin:$PWD/repo:$PATH\n{script}"));
        assert_eq!(done.code, 0, "{script}{done:?}");
        assert_eq!(place.read("repo/made"), "made\n", "{script}{done:?}");
    }
}

/// The kernel silently detaches a mount whose directory is removed. So such an operation is
/// refused, or reports the mount.
#[test]
fn a_mount_inside_is_never_detached_silently() {
    let place = Place::new();
    place.write(
        "script",
        r#"
        trap 'umount -l mnt/later mnt/sub mnt/file 2>/dev/null || true; $JAILFS umount -l mnt' EXIT
        $JAILFS mount base mnt; $JAILFS -C mnt checkpoint c1; mkdir mnt/later; echo new > mnt/file
        mount -t tmpfs t mnt/later; echo kept > mnt/later/data; mount -t tmpfs t mnt/sub
        echo kept > mnt/sub/data
        mount --bind base/a mnt/file; rm mnt/a
        for line in 'restore c1' discard 'op restore 1' 'restore c1 later' 'restore base .' \
            'undo file'; do
            code=0; $JAILFS -C mnt $line 2> err || code=$?
            [ $code = 11 ]; grep -q "something is mounted on" err
        done
        [ "$(cat mnt/later/data mnt/sub/data)" = "$(printf 'kept\nkept')" ]; [ ! -e mnt/a ]
        # A mount on a node that does not move does not matter.
        $JAILFS -C mnt restore c1 a; [ "$(cat mnt/a)" = one ]; [ -e mnt/later/data ]
        $JAILFS -C mnt restore c1 --dry-run | grep -q 'in the way: a mount at later'
        $JAILFS -C mnt restore c1 --detach-mounts --json | grep -q '"detached":\["file","later"\]'
        [ ! -e mnt/later ]; [ ! -e mnt/file ]; [ "$(cat mnt/sub/data)" = kept ]
        [ -z "$(grep mnt/later /proc/self/mounts)" ]
        "#,
    );
    let said =
        crate::place::said(place.command("", "unshare").args(["-m", "sh", "-eux", "script"]));
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}
