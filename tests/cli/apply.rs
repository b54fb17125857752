//! Writes to the base: apply, its plan and its undo; and patches, which other programs must
//! understand.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::place::{Place, said};

#[test]
fn nothing_reaches_the_base_before_apply_and_everything_does_then() {
    let place = Place::new();
    let before = place.sh("base", "find . -printf '%p %i %m %s %T@ %C@\\n' | sort").out;
    place.mount();
    place.write("mnt/a", "one\ntwo\n");
    fs::remove_file(place.at("mnt/del")).unwrap();
    fs::create_dir_all(place.at("mnt/n/empty")).unwrap();
    place.write("mnt/n/f", "new\n");
    let plan = place.ok("mnt", "apply --dry-run");
    assert!(plan.starts_with("would apply: 3 added, 1 modified, 1 deleted\n"), "{plan}");
    for line in ["M\ta\n", "D\tdel\n", "A\tn/\n", "A\tn/empty/\n", "A\tn/f\n"] {
        assert!(plan.contains(line), "{line:?} in {plan}");
    }
    assert_eq!(place.sh("base", "find . -printf '%p %i %m %s %T@ %C@\\n' | sort").out, before);
    // One path, then the rest, with all deletions listed.
    assert_eq!(place.ok("mnt", "apply a"), "applied: 1 modified\nundo: jailfs apply --undo\n");
    assert_eq!((place.read("base/a").as_str(), place.exists("base/del")), ("one\ntwo\n", true));
    assert_eq!(
        place.ok("mnt", "apply"),
        "applied: 3 added, 1 deleted\nD\tdel\nundo: jailfs apply --undo\n"
    );
    assert!(place.exists("base/n/empty") && !place.exists("base/del"));
    assert_eq!(place.ok("mnt", "diff base"), "");
    assert_eq!(place.ok("mnt", "apply"), "applied: nothing changed\n");
    assert!(place.ok("mnt", "status").contains("applied     2 times\n"));
    let plan = place.ok("mnt", "apply --undo --dry-run");
    assert!(plan.starts_with("would undo the last apply: "), "{plan}");
    assert!(!place.exists("base/del"));
    let undone = place.ok("mnt", "apply --undo");
    assert!(undone.starts_with("undid the last apply: 1 added, 3 deleted\n"), "{undone}");
    assert_eq!((place.read("base/del").as_str(), place.exists("base/n")), ("del\n", false));
}

#[test]
fn an_apply_is_undone_once() {
    let place = Place::new();
    place.mount();
    let apply = |text: &str| {
        place.write("mnt/a", text);
        place.ok("mnt", "apply");
    };
    ["one", "two"].iter().for_each(|text| apply(text));
    // An undo is no apply, so the next one does not write the changes again.
    let is_undone = || {
        for line in ["apply --undo", "apply --undo --dry-run"] {
            let said = place.fails("mnt", line, 10);
            assert!(said.contains("the last apply is undone already"), "{said}");
        }
        assert_eq!(place.read("base/a"), "one");
    };
    place.ok("mnt", "apply --undo");
    is_undone();
    place.ok("mnt", "gc --operations 0 --keep 0");
    is_undone();
    // The tree has the last text, and an apply writes it again.
    place.ok("mnt", "apply");
    assert_eq!(place.read("base/a"), "two");
    place.ok("mnt", "gc --operations 0 --keep 0");
    place.ok("mnt", "apply --undo");
    is_undone();
    place.ok("mnt", "check");
}

/// 'status' counts from the present base, and a discard goes back to it, whatever the epoch below
/// the tree.
#[test]
fn a_discard_goes_back_to_the_base_that_status_counts_from() {
    let place = Place::new();
    place.mount();
    place.write("mnt/a", "mine\n");
    place.write("mnt/new", "new\n");
    place.ok("mnt", "apply a");
    place.ok("mnt", "discard");
    assert_eq!((place.read("mnt/a").as_str(), place.exists("mnt/new")), ("mine\n", false));
    assert_eq!(
        (place.ok("mnt", "diff base"), place.ok("mnt", "apply")),
        (String::new(), "applied: nothing changed\n".into())
    );
    place.umount();
    // So does the rollback of a command.
    let place = Place::new();
    place.run("--keep", "echo mine > a; echo new > new");
    place.ok("base", "apply a");
    let said = place.run("--discard", "cat a; echo x > z");
    assert!(said.out.starts_with("mine\n"), "{said:?}");
    assert_eq!(place.ok("base", "apply --dry-run").lines().next(), Some("would apply: 1 added"));
    place.mount();
    place.write("mnt/a", "other\n");
    place.ok("mnt", "apply");
    place.ok("mnt", "apply --undo");
    assert!(
        place.ok("mnt", "status").contains("changed     2 paths"),
        "{}",
        place.ok("mnt", "status")
    );
    place.ok("mnt", "discard");
    assert!(
        place.ok("mnt", "status").contains("changed     0 paths"),
        "{}",
        place.ok("mnt", "status")
    );
    assert_eq!(place.read("mnt/a"), "mine\n");
}

#[test]
fn a_changed_base_is_a_conflict_and_nothing_is_written() {
    let place = Place::new();
    place.mount();
    place.write("mnt/a", "mine\n");
    place.write("mnt/sub/b", "mine too\n");
    place.write("base/a", "theirs, and longer\n");
    for line in ["apply --dry-run", "apply"] {
        let said = place.say("mnt", line);
        assert_eq!(said.code, 3, "{said:?}");
        assert!(said.err.contains("conflict\ta\t"), "{said:?}");
        assert!(
            said.err.contains("the base has changed meanwhile at 1 path; nothing is written"),
            "{said:?}"
        );
        assert!(said.err.contains("\nhint: "), "{said:?}");
    }
    assert_eq!(
        (place.read("base/a").as_str(), place.read("base/sub/b").as_str()),
        ("theirs, and longer\n", "x\ny\nz\n")
    );
    let said = place.say("mnt", "apply --json");
    let lines = crate::place::parse(&said.out);
    let conflicts: Vec<_> = lines.iter().filter(|line| line["type"] == "conflict").collect();
    assert_eq!((said.code, conflicts.len(), &conflicts[0]["path"]), (3, 1, &"a".into()));
    assert_eq!(lines.last().unwrap()["conflicts"], 1);
    // The other paths can be applied.
    place.ok("mnt", "apply sub");
    assert_eq!(place.read("base/sub/b"), "mine too\n");
}

/// Changes of every kind that a patch can express.
fn patched(place: &Place) {
    let sh = place.sh(
        "mnt",
        r#"
        printf 'one\ntwo\n' > a
        rm del
        echo new > added; mkdir -p deep/er; echo deep > deep/er/file; : > empty-new; rm empty-old
        chmod 755 script; printf 'changed\n' >> both; chmod 755 both
        printf 'no newline' > ends; printf 'now one\n' > endless
        mv moved moved-here; mv edited edited-here; echo more >> edited-here
        sed -i 's/^5$/five/;s/^95$/ninety-five/' long
        ln -sf other link; ln -s target new-link
        printf 'tab\there' > 'with space'
        "#,
    );
    assert_eq!(sh.code, 0, "{sh:?}");
}

fn patchable() -> Place {
    let place = Place::new();
    let sh = place.sh(
        "base",
        r#"
        : > empty-old; echo '#!/bin/sh' > script; echo both > both
        printf 'had one\n' > ends; printf 'had none' > endless
        seq 1 20 > moved; seq 1 30 > edited; seq 1 100 > long
        ln -s first link; echo x > 'with space'
        chmod 644 script both
        "#,
    );
    assert_eq!(sh.code, 0, "{sh:?}");
    place.sh("", "cp -a base copy; cp -a base copy2");
    place
}

/// The content of a tree: names, file modes, bytes and link texts.
fn content(place: &Place, dir: &str) -> String {
    let listed = place.sh(
        dir,
        "find . -name .git -prune -o -type f -printf '%p %m ' -exec sh -c 'cksum < \"$1\"' _ \
         {} \\; -o -type l -printf '%p -> %l\\n' | sort",
    );
    assert_eq!(listed.code, 0, "{listed:?}");
    listed.out
}

#[test]
fn git_makes_the_same_tree_from_a_patch() {
    let place = patchable();
    place.mount();
    patched(&place);
    let patch = place.ok("mnt", "diff -p");
    place.write("patch", &patch);
    let applied = place.sh("copy", "git init -q . && git apply --whitespace=nowarn ../patch");
    assert_eq!((applied.code, applied.err.as_str()), (0, ""), "{patch}");
    assert_eq!(content(&place, "copy"), content(&place, "mnt"), "{patch}");
    // And reversed.
    let back = place.ok("mnt", "diff @ base -p");
    place.write("back", &back);
    let applied = place.sh("copy", "git apply --whitespace=nowarn ../back");
    assert_eq!((applied.code, applied.err.as_str()), (0, ""), "{back}");
    assert_eq!(content(&place, "copy"), content(&place, "base"), "{back}");
}

#[test]
fn patch_makes_the_same_files_from_a_patch() {
    let place = patchable();
    place.mount();
    patched(&place);
    // patch(1) does not support symlinks, and treats empty files in its own way.
    let sh = place.sh("mnt", "ln -sf first link; rm new-link");
    assert_eq!(sh.code, 0, "{sh:?}");
    place.write("patch", place.ok("mnt", "diff -p"));
    let applied = place.sh("copy2", "patch -p1 -s < ../patch; rm -f *.orig");
    assert_eq!(applied.code, 0, "{applied:?}\n{}", place.read("patch"));
    assert_eq!(content(&place, "copy2"), content(&place, "mnt"), "{}", place.read("patch"));
}

#[test]
fn a_binary_patch_is_reported_or_understood() {
    let place = Place::new();
    place.write("base/bin", b"\0\x01\x02");
    place.mount();
    place.write("mnt/bin", b"\0\x03\x04\xff");
    assert!(place.ok("mnt", "diff --stat").contains("bin | Bin 3 -> 4 bytes\n"));
    let json = place.json("mnt", "diff -p");
    assert_eq!(
        (&json[0]["binary"], &json[0]["lines_added"]),
        (&true.into(), &serde_json::Value::Null)
    );
}

#[test]
fn git_makes_the_same_binary_files_from_a_patch_and_reverts_it() {
    let place = Place::new();
    let large: Vec<u8> =
        (0..300_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    place.write("base/bin", b"\0\x01\x02");
    place.write("base/gone", [b"\0gone".as_slice(), &large].concat());
    place.write("base/mode", b"\0mode");
    place.sh("", "cp -a base copy");
    place.mount();
    place.write("mnt/bin", b"\0\x03\x04\xff");
    fs::remove_file(place.at("mnt/gone")).unwrap();
    place.write("mnt/new", &large);
    place.write("mnt/mode", b"\0more\0");
    fs::set_permissions(place.at("mnt/mode"), PermissionsExt::from_mode(0o755)).unwrap();
    place.write("mnt/was-text", "text\n");
    place.ok("mnt", "checkpoint text");
    place.write("mnt/was-text", b"\0binary now");
    // In one patch with text, over several states, and reversed.
    for (from, to) in [("base", "@"), ("base", "text"), ("text", "@")] {
        let patch = place
            .command("mnt", crate::place::JAILFS)
            .args(["diff", from, to, "-p"])
            .output()
            .unwrap();
        assert!(patch.status.success() && !patch.stdout.is_empty());
        place.write(format!("{from}-{to}"), &patch.stdout);
    }
    let apply = "git init -q . && git apply ../base-@";
    let said = place.sh("copy", apply);
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    assert_eq!(content(&place, "copy"), content(&place, "mnt"));
    for (line, wanted) in [
        ("git apply -R ../base-@", "base"),
        ("git apply ../base-text && git apply ../text-@", "mnt"),
    ] {
        let said = place.sh("copy", line);
        assert_eq!((said.code, said.err.as_str()), (0, ""), "{line}");
        assert_eq!(content(&place, "copy"), content(&place, wanted), "{line}");
    }
}

#[test]
fn modes_and_symlinks_are_applied() {
    let place = Place::new();
    fs::hard_link(place.at("base/a"), place.at("base/a2")).unwrap();
    place.mount();
    fs::set_permissions(place.at("mnt/sub/b"), PermissionsExt::from_mode(0o751)).unwrap();
    std::os::unix::fs::symlink("sub/b", place.at("mnt/l")).unwrap();
    fs::hard_link(place.at("mnt/a"), place.at("mnt/a3")).unwrap();
    place.ok("mnt", "apply");
    let stat = said(place.command("base", "stat").args(["-c", "%h %a", "a", "a2", "a3", "sub/b"]));
    assert_eq!(stat.out, "3 644\n3 644\n3 644\n1 751\n");
    assert_eq!(fs::read_link(place.at("base/l")).unwrap().to_str(), Some("sub/b"));
}
