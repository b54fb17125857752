//! The edit history of single files, which comes along if both sides ask for it.

use super::Machine;
use super::harness::{Live, assert_same};
use super::partner::Partner;
use super::round_trip::all;

/// A base whose files are edited.
const BASE: &str = "mkdir d e; seq 3000 > text; echo base > kept; echo x > d/gone; echo m > moved; \
                    head -c 3000000 /dev/urandom > big; echo s0 > steps; chmod 640 text; \
                    setfattr -n user.a -v one text; ln -s d s; \
                    truncate -s 2M holes; echo end >> holes";

/// Edits of all kinds. Each redirection empties the file, so it is an edit of its own.
const EDITS: &str = r#"
    for n in 1 2 3; do seq $n 4000 > text; done; chmod 600 text; echo four > text
    printf one | dd of=big conv=notrunc bs=1 seek=1000000 status=none; sleep 1.1
    printf two | dd of=big conv=notrunc bs=1 seek=2000000 status=none
    printf hole | dd of=holes conv=notrunc bs=1 seek=1000000 status=none
    rm d/gone; echo m1 > moved; mv moved e/there; echo m2 > e/there
    for n in 1 2 3 4; do echo s$n > steps; done
    echo new > fresh; sleep 1.1; echo newer > fresh
    echo t > temporary; sleep 1.1; mv temporary kept
    mv e f
"#;

const PATHS: [&str; 8] = ["text", "big", "holes", "d/gone", "moved", "f/there", "steps", "fresh"];

/// The output of `jailfs history` for the paths.
fn histories(live: &Live, words: &[&str]) -> Vec<String> {
    let of = |path: &&str| {
        let lines = live.json(&[words, &["history", path]].concat());
        assert!(!lines.is_empty(), "{path}");
        lines.into_iter().map(|line| line.to_string())
    };
    PATHS.iter().flat_map(of).collect()
}

/// The versions in `.jailfs/history`, with all attributes but those that a mount makes up.
fn versions(live: &Live) -> Vec<String> {
    let script = r#"
        cd .jailfs/history
        find . -type f -print0 | sort -z | xargs -0 stat --printf '%n %f %u %g %h %s %.9Y\n'
        find . -type f -print0 | sort -z | xargs -0 sha256sum
        find . -type f -print0 | sort -z | xargs -0 getfattr -h -d -m - -e hex 2>/dev/null
    "#;
    live.sh(script).lines().map(str::to_owned).collect()
}

#[test]
fn the_edit_history_comes_along_and_each_undo_is_exact() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let here = Live::new(BASE);
    here.sh(EDITS);
    here.jailfs(&["undo", "steps", "-n", "2"]);
    let (wanted, files) = (histories(&here, &[]), versions(&here));
    assert!(
        wanted.len() >= 15 && files.len() >= 30,
        "{}, {}: {wanted:#?}",
        wanted.len(),
        files.len()
    );
    let sender = Machine::new();
    let plain = format!("{}/repo:plain", registry.address);
    let before = sender.json(&here, &["push", &plain, "--plain-http"]);
    let push = ["push", &reference, "--edits", "--history", "9", "--plain-http"];
    let pushed = sender.json(&here, &push);
    assert!(pushed["edits"].as_u64() >= Some(wanted.len() as u64), "{pushed}");
    let again = sender.json(&here, &push);
    assert_eq!((&again["blobs"], &again["was_there"]), (&0.into(), &true.into()));
    assert_eq!(again["digest"], pushed["digest"]);
    // The option changes neither the state nor a push without it.
    let after = sender.json(&here, &["push", &plain, "--plain-http"]);
    assert_eq!((&before["tree"], &before["edits"]), (&pushed["tree"], &0.into()));
    assert_eq!((&after["tree"], &after["edits"]), (&pushed["tree"], &0.into()));

    let mut there =
        Live::new("mkdir d f; seq 9 > text; echo other > steps; seq 5 > f/there; echo k > only");
    there.sh("echo local > text; echo local > only");
    let pull = ["pull", &reference, "--edits", "--plain-http"];
    let receiver = Machine::new();
    let pulled = receiver.json(&there, &pull);
    assert_eq!(pulled["edits"], pushed["edits"]);
    assert_same(&all(&here), &all(&there), "the pulled state");
    assert_same(&wanted, &histories(&there, &[]), "the pulled history");
    let own = |lines: Vec<String>| -> Vec<String> {
        lines.into_iter().filter(|line| !line.contains("./only/")).collect()
    };
    assert_same(&files, &own(versions(&there)), "the pulled versions");
    there.jailfs(&["check", "--read-data"]);
    there.jailfs(&["gc"]);
    there.remount();
    receiver.run(&there, &pull);
    there.kill_and_mount();
    assert_same(&wanted, &histories(&there, &[]), "the history after a mount");
    assert_same(&files, &own(versions(&there)), "the versions after a mount");
    assert!(there.jailfs(&["history", "only"]).contains("before"), "another history stays");
    // Each undo gives the same file on both sides, and so does each redo.
    there.jailfs(&["redo", "steps"]);
    here.jailfs(&["redo", "steps"]);
    assert_eq!((there.read("steps"), here.read("steps")), ("s3\n".into(), "s3\n".into()));
    for path in PATHS {
        let content = format!("stat -c '%a %s' {path}; sha256sum {path}");
        let mut steps = 0;
        loop {
            let (one, other) =
                (here.try_jailfs(&["undo", path]), there.try_jailfs(&["undo", path]));
            assert_eq!(one.status.code(), other.status.code(), "undo {path}");
            if !one.status.success() {
                break;
            }
            steps += 1;
            let script = format!("test ! -e {path} || {{ {content}; }}");
            assert_eq!(here.sh(&script), there.sh(&script), "undo {steps} of {path}");
        }
        assert!(steps > 0, "{path}");
        if path != "moved" {
            let both = [&here, &there].map(|live| {
                live.jailfs(&["redo", path, "-n", &steps.to_string()]);
                live.sh(&format!("cat {path} 2>/dev/null | sha256sum"))
            });
            assert_eq!(both[0], both[1], "redo of {path}");
        }
    }
    there.jailfs(&["check", "--read-data"]);
}

#[test]
fn a_pulled_edit_history_goes_to_a_new_head_and_keeps_its_limits() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let here = Live::new(BASE);
    here.sh(EDITS);
    let sender = Machine::new();
    sender.run(&here, &["push", &reference, "--edits", "--plain-http"]);
    let wanted = histories(&here, &[]);
    let there = Live::with_options("echo x > text", &["-o", "history=2"]);
    let pull = ["pull", &reference, "--edits", "--plain-http"];
    let into = [&pull[..], &["--into", "fresh"]].concat();
    let said = Machine::new().run(&there, &into);
    assert!(said.contains("edits came along"), "{said}");
    assert_same(&wanted, &histories(&there, &["--head", "fresh"]), "the history of the new head");
    there.jailfs(&["check", "--read-data"]);
    // Only the newest two fit here.
    Machine::new().run(&there, &pull);
    let newest: Vec<String> = PATHS
        .iter()
        .flat_map(|path| here.json(&["history", path]).into_iter().take(2))
        .map(|line| line.to_string())
        .collect();
    assert_same(&newest, &histories(&there, &[]), "the newest edits");
    // Without the option, on either side, the history stays as it is.
    let other = Live::new("echo x > text");
    other.sh("echo y > text");
    Machine::new().run(&other, &["pull", &reference, "--plain-http"]);
    let said = other.jailfs(&["history", "text"]);
    assert!(said.lines().count() == 2 && said.contains("before a restore"), "{said}");
    sender.run(&here, &["push", &reference, "--plain-http"]);
    Machine::new().fail(&other, &pull, 10, "it was pushed without --edits");
    here.checkpoint("green");
    sender.fail(
        &here,
        &["push", &reference, "green", "--edits", "--plain-http"],
        2,
        "as it is now",
    );
}
