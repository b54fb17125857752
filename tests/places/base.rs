//! A base in another place, or another base in its place.

use std::path::Path;
use std::process::{Command, Output};

use crate::harness::{Live, shell};
use crate::{refused, said, text};

const BASE: &str = "mkdir d; seq 9000 > d/big; echo one > one; seq 5000 > part";

fn worked() -> Live {
    let mut live = Live::new(BASE);
    live.applied = true;
    live.sh("echo x >> part; mv d e");
    live.checkpoint("first");
    live.sh("echo unsealed > unsealed");
    live.umount();
    live
}

#[test]
fn a_moved_base_is_accepted_where_the_user_names_it() {
    let live = worked();
    let place = live.outside().to_owned();
    shell(&place, "mv base moved");
    let output = refused(&place, &["--store", "store", "status"], 1);
    assert!(
        output.contains("if it was moved") && output.contains("jailfs mount --store"),
        "{output}"
    );
    said(&place, &["mount", "moved", "mnt", "--store", "store"]);
    assert_eq!(
        shell(&live.mnt, "tail -n1 part; cat unsealed; tail -n1 e/big"),
        "x\nunsealed\n9000\n"
    );
    assert!(said(&live.mnt, &["status"]).contains(text(&place.join("moved"))));
    said(&live.mnt, &["apply"]);
    said(&place, &["umount", "mnt"]);
    assert_eq!(shell(&place.join("moved"), "tail -n1 part; ls"), "x\ne\none\npart\nunsealed\n");
    // From now on the store knows the new place.
    said(&place, &["--store", "store", "log"]);
}

/// The same with `XDG_STATE_HOME` set.
fn at_home(home: &Path, dir: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
    command.args(words).env("XDG_STATE_HOME", home).current_dir(dir).output().unwrap()
}

#[test]
fn a_store_in_its_default_place_moves_with_its_base() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let stores = || shell(&home.join("jailfs"), "ls");
    let ok = |at: &str, words: &[&str]| {
        let output = at_home(&home, &dir.path().join(at), words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    shell(dir.path(), "mkdir home app; echo one > app/one");
    ok("app", &["run", "--keep", "--", "sh", "-c", "echo two >> one"]);
    ok("app", &["checkpoint", "mine"]);
    let first = stores();
    shell(dir.path(), "mv app app2");
    assert!(ok("app2", &["log"]).contains("mine"), "a command finds it");
    assert!(ok("app2", &["diff", "@-1"]).is_empty());
    let second = stores();
    assert!(first != second && second.lines().count() == 1, "{first} {second}");
    shell(dir.path(), "mkdir sub; mv app2 sub/app3");
    ok("sub/app3", &["run", "--apply", "--", "sh", "-c", "cat one; echo three >> one"]);
    assert_eq!(shell(dir.path(), "cat sub/app3/one"), "one\ntwo\nthree\n", "and so does a run");
    assert_eq!(stores().lines().count(), 1);
    // A copy is another base, with a store of its own.
    shell(dir.path(), "cp -a sub/app3 copy");
    ok("copy", &["run", "--keep", "--", "true"]);
    assert_eq!(stores().lines().count(), 2);
    assert!(!ok("copy", &["log"]).contains("mine") && ok("sub/app3", &["log"]).contains("mine"));
}

#[test]
fn another_directory_at_the_path_of_the_base_is_refused() {
    let mut live = worked();
    let place = live.outside().to_owned();
    shell(&place, "mv base former; cp -a former base; echo other > base/other; rm base/one");
    for words in [
        &["--store", "store", "status"][..],
        &["--store", "store", "apply"],
        &["mount", "base", "mnt", "--store", "store"],
    ] {
        let output = refused(&place, words, 3);
        assert!(output.contains("the store holds the changes of another directory"), "{output}");
        assert!(
            output.contains("put that one back") && output.contains("--other-base"),
            "{output}"
        );
    }
    assert_eq!(shell(&place, "cat base/other; tail -n1 base/part"), "other\n5000\n");
    // The changes can be shown over it. Files that were copied up in full are there; ranges that
    // stayed in the former base are not.
    said(&place, &["mount", "base", "mnt", "--other-base", "--store", "store"]);
    assert_eq!(
        shell(&live.mnt, "cat unsealed; cat other; tail -n1 e/big; ls"),
        "unsealed\nother\n9000\ne\nother\npart\nunsealed\n"
    );
    assert!(std::fs::read(live.mnt.join("part")).is_err(), "its beginning is that of another file");
    let status = said(&live.mnt, &["status"]);
    assert!(status.contains("part"), "{status}");
    let output = refused(&live.mnt, &["apply"], 3);
    assert!(output.contains("part") || status.contains("part"), "{output}");
    said(&place, &["umount", "mnt"]);
    // After one such mount it is the base.
    live.mount();
    live.umount();
    // And the former base is not any more.
    shell(&place, "mv base copy; mv former base");
    refused(&place, &["mount", "base", "mnt", "--store", "store"], 3);
}

/// In a copy every node has another inode number. Directories that were copied up are found by
/// path, also if they were moved.
#[test]
fn over_a_copy_of_the_base_all_states_stay_and_work_goes_on() {
    const LIST: &str =
        "find . -printf '%p %y %n\n' | sort; cat d/* d/deep/* f/* f/g/* h* 2>/dev/null || true";
    let mut live = Live::new(
        "mkdir -p d/deep e/g; echo a > d/a; echo b > d/deep/b; echo c > e/c; echo g > e/g/g; \
         for n in 1 2 3 4 5; do echo $n > d/deep/$n; done; echo h > h1; ln h1 h2",
    );
    live.applied = true;
    live.sh("echo x > d/x; mv e f; echo y > f/y; echo whole > h1");
    live.checkpoint("first");
    let first = live.sh(LIST);
    live.sh("rm d/x d/a; echo z > d/deep/z; echo whole > f/g/g");
    live.checkpoint("second");
    let second = live.sh(LIST);
    live.umount();
    let place = live.outside().to_owned();
    // Created in another order, so that inode numbers are exchanged, too.
    shell(&place, "mv base former; mkdir -p base/e/g base/d/deep; cp -a former/. base");
    said(&place, &["mount", "base", "mnt", "--other-base", "--store", "store"]);
    assert_eq!(shell(&live.mnt, LIST), second);
    for (name, list) in [("first", &first), ("second", &second), ("first", &first)] {
        said(&live.mnt, &["restore", name]);
        assert_eq!(shell(&live.mnt, LIST), *list, "{name}");
    }
    let work = "echo more >> d/a; echo new > d/deep/new; echo more >> d/deep/b; rm f/c; \
        mv f/g d/g; echo more >> d/g/g; cat d/a d/deep/b d/g/g; ls d/deep f";
    let done = shell(&live.mnt, work);
    assert_eq!(done, "a\nmore\nb\nmore\ng\nmore\nd/deep:\n1\n2\n3\n4\n5\nb\nnew\n\nf:\ny\n");
    said(&live.mnt, &["restore", "second"]);
    assert_eq!(shell(&live.mnt, LIST), second);
    assert_eq!(
        shell(&live.mnt, "echo more >> h2; cat h1 h2"),
        "whole\nmore\n".repeat(2),
        "they are one file"
    );
    said(&place, &["umount", "mnt"]);
    assert_eq!(said(&place, &["--store", "store", "check"]).lines().count(), 1);
    shell(&place, "diff -r former base");
}

/// The pre-image of an apply keeps a removed file with its number. A file of the copy may have the
/// same number.
#[test]
fn over_a_copy_of_the_base_pre_images_do_not_mix_with_its_files() {
    const LIST: &str = "find . -printf '%p %y %n\n' | sort; cat a* d/*";
    let mut live = Live::new(
        "mkdir d; for n in 1 2 3 4 5 6 7 8; do echo a$n > a$n; echo d$n > d/d$n; done; ln a1 a9",
    );
    live.applied = true;
    live.sh("echo new > d/new");
    live.checkpoint("first");
    let first = live.sh(LIST);
    live.sh("rm a1 a3 a5; rm d/d2; mv d/d4 d/moved");
    live.jailfs(&["apply"]);
    let applied = live.sh(LIST);
    live.sh("echo more > d/more");
    live.checkpoint("second");
    live.umount();
    let place = live.outside().to_owned();
    // Free inode numbers are used again.
    shell(
        &place,
        "rm -rf mnt2; mkdir copy; cp -a base/. copy; rm -r base; mkdir base; \
         tac=$(ls copy | sort -r); for n in $tac; do cp -a copy/$n base; done",
    );
    said(&place, &["mount", "base", "mnt", "--other-base", "--store", "store"]);
    for _ in 0..2 {
        said(&live.mnt, &["restore", "first"]);
        assert_eq!(shell(&live.mnt, LIST), first);
        said(&live.mnt, &["restore", "second"]);
        assert_eq!(shell(&live.mnt, "rm d/more; touch -r d/new d; true").len(), 0);
        assert_eq!(shell(&live.mnt, LIST), applied);
    }
    said(&place, &["umount", "mnt"]);
    assert_eq!(said(&place, &["--store", "store", "check"]).lines().count(), 1);
}

#[test]
fn a_store_without_changes_accepts_the_base_that_it_finds() {
    let mut live = Live::new(BASE);
    live.applied = true;
    live.sh("echo x > new");
    live.jailfs(&["discard"]);
    live.umount();
    shell(live.outside(), "mv base former; mkdir base; echo fresh > base/fresh");
    live.mount();
    assert_eq!(live.sh("ls; cat fresh"), "fresh\nfresh\n");
}

#[test]
fn a_store_refuses_another_base() {
    let live = worked();
    shell(live.outside(), "mkdir another");
    let output = refused(live.outside(), &["mount", "another", "mnt", "--store", "store"], 1);
    assert!(
        output.contains("it belongs to the base") && output.contains(text(&live.base)),
        "{output}"
    );
    assert!(output.contains("hint: ") && output.contains("--other-base"), "{output}");
}
