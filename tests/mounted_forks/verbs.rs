//! `fork`, `forks`, `mount --head` and `--head`, and how every verb finds its head.

use std::path::Path;

use crate::harness::{assert_same, text};
use crate::{Forked, read, seen, write};

const BASE: &str = "mkdir dir; echo 1 > dir/1; echo 2 > dir/2";

#[test]
fn every_verb_means_the_head_of_its_mount() {
    let forked = Forked::new(BASE);
    let main = forked.live.mnt.clone();
    write(main.join("dir/1"), "main\n");
    forked.run_in(&main, &["checkpoint", "green"]);
    let try_it = forked.fork("try");
    write(try_it.join("dir/2"), "tried\n");
    assert_eq!(forked.run_in(&main, &["diff"]), "M\tdir/1\n");
    assert_eq!(forked.run_in(&try_it, &["diff"]), "M\tdir/1\nM\tdir/2\n");
    assert_eq!(forked.run_in(&try_it.join("dir"), &["diff", "@-1", "./2"]), "M\tdir/2\n");
    assert_eq!(forked.run_in(&main.join("dir"), &["--head", "try", "show", "@:2"]), "tried\n");
    assert_eq!(forked.run_in(&try_it, &["--head", "main", "show", "@:dir/2"]), "2\n");
    // The states of other heads.
    forked.run_in(&try_it, &["checkpoint"]);
    write(try_it.join("dir/2"), "tried again\n");
    assert_eq!(forked.run_in(&main, &["show", "try@:dir/2"]), "tried again\n");
    assert_eq!(forked.run_in(&main, &["show", "try@-1:dir/2"]), "tried\n");
    assert_eq!(forked.run_in(&main, &["diff", "try@-1", "try@"]), "M\tdir/2\n");
    assert_eq!(forked.run_in(&main, &["diff", "try@", "@", "dir/2"]), "M\tdir/2\n");
    forked.run_in(&main, &["restore", "try@", "dir/2"]);
    assert_eq!(read(main.join("dir/2")), "tried again\n");
    forked.run_in(&try_it, &["restore", "base"]);
    forked.run_in(&try_it, &["restore", "main@"]);
    assert_same(&seen(&main), &seen(&try_it), "the other head");
    forked.run_in(&try_it, &["restore", "green"]);
    assert_eq!(forked.run_in(&main, &["diff", "green", "try@"]), "");
    forked.run_in(&main, &["undo", "dir/2"]);
    assert_eq!(read(main.join("dir/2")), "2\n");
    // A fork of a fork, of an earlier state.
    let old = forked.at("old");
    forked.run_in(&try_it, &["fork", "old", old.to_str().unwrap(), "--from", "base"]);
    assert_eq!(read(old.join("dir/1")), "1\n");
}

#[test]
fn status_and_logs_say_the_head_if_there_is_more_than_one() {
    let forked = Forked::new(BASE);
    let main = forked.live.mnt.clone();
    forked.run_in(&main, &["checkpoint", "green"]);
    assert!(!forked.run_in(&main, &["status"]).contains("head"));
    assert!(!forked.run_in(&main, &["log"]).contains("main"));
    assert!(!forked.run_in(&main, &["op", "log"]).contains("main"));
    let try_it = forked.fork("try");
    write(try_it.join("new"), "x");
    forked.run_in(&try_it, &["checkpoint", "tried"]);
    assert!(forked.run_in(&main, &["status"]).contains("\nhead        main\n"));
    let status = forked.run_in(&try_it, &["status"]);
    assert!(status.contains("\nhead        try\n"), "{status}");
    let point = format!("mount       {} ", try_it.display());
    assert!(status.contains(&point), "{status}");
    let log = forked.run_in(&main, &["log"]);
    assert!(log.contains("  try   tried  ") && log.contains("  main  green  "), "{log}");
    let ops = forked.run_in(&try_it, &["op", "log"]);
    let first = ops.lines().next().unwrap();
    assert!(first.contains("  try   ") && first.contains("checkpoint"), "{ops}");
    for (dir, name) in [(&main, "main"), (&try_it, "try")] {
        let line = forked.run_in(dir, &["status", "--json"]);
        let line: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        assert_eq!(line["head"], name);
    }
    let heads = |verb: &[&str]| -> Vec<String> {
        let said = forked.run_in(&main, &[verb, &["--json"]].concat());
        let lines = said.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.map(|line: serde_json::Value| line["head"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(heads(&["log"]), ["try", "main"]);
    assert_eq!(heads(&["op", "log"])[0], "try");
}

#[test]
fn forks_are_listed_and_dropped() {
    let forked = Forked::new(BASE);
    let main = forked.live.mnt.clone();
    let made = forked.run_in(&main, &["fork", "try"]);
    assert_eq!(made, "fork try of main\n");
    let point = forked.at("mounted");
    let made = forked.run_in(&main, &["fork", "mounted", point.to_str().unwrap()]);
    assert_eq!(made, format!("fork mounted of main at {}\n", point.display()));
    let list = forked.run_in(&point, &["forks"]);
    let lines: Vec<&str> = list.lines().collect();
    assert_eq!(lines.len(), 3, "{list}");
    assert!(
        lines[0].starts_with("  main ") && lines[0].ends_with(main.to_str().unwrap()),
        "{list}"
    );
    assert!(lines[1].starts_with("* mounted ") && lines[1].contains(" of main at "), "{list}");
    assert!(
        lines[2].starts_with("  try ") && lines[2].contains("  not mounted  of main"),
        "{list}"
    );
    let json = forked.run_in(&main, &["forks", "--json"]);
    let json: Vec<serde_json::Value> =
        json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&json[1]["name"], &json[1]["parent"]), (&"mounted".into(), &"main".into()));
    assert_eq!(json[1]["mount"].as_str(), point.to_str());
    assert!(json[0]["parent"].is_null() && json[2]["mount"].is_null());
    // A mounted one stays.
    let refused = forked.fails_in(&main, &["fork", "--drop", "mounted"], 11);
    assert!(refused.contains("mounted") && refused.contains("hint: "), "{refused}");
    assert_eq!(read(point.join("dir/1")), "1\n");
    forked.fails_in(&point, &["fork", "--drop", "main"], 11);
    forked.run_in(&main, &["fork", "--drop", "try"]);
    forked.fails_in(&main, &["fork", "--drop", "try"], 10);
    forked.umount(&point);
    forked.run_in(&main, &["fork", "--drop", "mounted"]);
    assert_eq!(forked.run_in(&main, &["forks"]).lines().count(), 1);
    // The name can be used again.
    forked.run_in(&main, &["fork", "try"]);
    forked.run_in(&main, &["check"]);
}

#[test]
fn bad_names_and_mount_points_are_refused_and_nothing_is_made() {
    let forked = Forked::new(BASE);
    let main = forked.live.mnt.clone();
    let inside = main.join("fork");
    let used = forked.fork("used");
    let unknown = forked.fails_in(&main, &["--head", "absent", "log"], 10);
    assert!(unknown.contains("absent") && unknown.contains("hint: "), "{unknown}");
    forked.fails_in(&main, &["diff", "absent@"], 10);
    let taken = forked.fails_in(&main, &["fork", "used"], 1);
    assert!(taken.contains("used"), "{taken}");
    for name in ["", "a/b", "@", "x@", "x@-1", ".", "..", "base", "3", "a\nb"] {
        let said = forked.try_in(&main, &["fork", name]);
        assert!(!said.status.success(), "{name:?}: {}", text(&said));
    }
    for (point, code) in [
        (&inside, 12),
        (&forked.live.base.join("x"), 12),
        (&forked.live.store.join("x"), 12),
        (&forked.dir.join("missing/x"), 1),
        (&main, 11),
        (&used, 11),
    ] {
        forked.fails_in(&main, &["fork", "new", point.to_str().unwrap()], code);
    }
    assert_eq!(forked.run_in(&main, &["forks"]).lines().count(), 2);
    // A head has one mount.
    let other = forked.at("other");
    std::fs::create_dir(&other).unwrap();
    let twice = forked.try_mount("used", &other);
    assert_eq!(twice.status.code(), Some(11), "{}", text(&twice));
    let said = text(&twice);
    assert!(said.contains(&format!("mounted at '{}'", used.display())), "{said}");
    assert!(said.contains("hint: "), "{said}");
    let absent = forked.try_mount("absent", &other);
    assert_eq!(absent.status.code(), Some(10), "{}", text(&absent));
    assert!(!forked.is_mounted(&other));
}

/// Without a daemon, commands take the lock of the store themselves, and `fork MNT` starts one.
#[test]
fn forks_are_made_and_used_without_a_daemon() {
    let mut forked = Forked::new(BASE);
    write(forked.live.mnt.join("dir/1"), "main\n");
    forked.live.umount();
    let store = forked.live.store.to_str().unwrap().to_owned();
    let run =
        |words: &[&str]| forked.run_in(Path::new("/"), &[&["--store", &store], words].concat());
    run(&["fork", "try"]);
    run(&["--head", "try", "checkpoint", "from-try"]);
    assert!(run(&["--head", "try", "status"]).contains("\nhead        try\n"));
    assert!(run(&["forks"]).contains("not mounted"));
    let point = forked.at("started");
    run(&["fork", "started", point.to_str().unwrap()]);
    assert_eq!(read(point.join("dir/1")), "main\n");
    // The only mounted head is meant by default.
    write(point.join("new"), "x");
    assert_eq!(run(&["diff", "try@", "@"]), "A\tnew\n");
    run(&["fork", "--drop", "try"]);
    forked.live.mount();
}

/// The options of the parent's mount hold for its forks too, unless others are given.
#[test]
fn a_fork_is_mounted_as_its_parent_is() {
    let mut forked = Forked::new(BASE);
    forked.live.umount();
    forked.live.options = vec!["-o", "noexec,snapname=.snap,fsname=parent"];
    forked.live.mount();
    let (like, own) = (forked.fork("like"), forked.at("own"));
    let main = forked.live.mnt.clone();
    forked.run_in(&main, &["fork", "own", own.to_str().unwrap(), "-o", "ro"]);
    let options = |point: &Path| {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let point = point.to_str().unwrap().to_owned();
        mounts.lines().find(|line| line.split(' ').nth(1) == Some(&point)).unwrap().to_owned()
    };
    assert!(options(&like).starts_with("parent ") && options(&like).contains("noexec"));
    assert!(like.join(".snap").exists() && !like.join(".jailfs").exists());
    assert!(options(&own).contains(" ro,") && !options(&own).contains("noexec"));
    assert!(own.join(".jailfs").exists());
    // Whether fsync reaches the disk is the same for all.
    forked.fails_in(
        &main,
        &["fork", "fast", forked.at("fast").to_str().unwrap(), "-o", "volatile"],
        2,
    );
}

#[test]
fn the_head_attribute_names_the_head() {
    let forked = Forked::new(BASE);
    let try_it = forked.fork("try");
    let get = |dir: &Path| {
        crate::sh(dir, "getfattr --only-values -n user.jailfs.head dir/1").trim().to_owned()
    };
    assert_eq!((get(&forked.live.mnt), get(&try_it)), ("main".to_owned(), "try".to_owned()));
    assert_eq!(crate::sh(&try_it, "getfattr -m - dir/1"), "", "it is not listed");
}
