//! Applies that cannot be done write nothing. Rollbacks that cannot end yet block only the next
//! apply.

use std::fs;

use crate::place::{Place, parse};

/// The parts of a base that are compared.
const LOOK: &str = "
    find . -mindepth 1 -path ./filler -prune -o -path ./lost+found -prune -o \
        -printf '%p %y %m %U:%G %s %T@ %l\\n' | sort
    find . -path ./filler -prune -o -type f -exec sha256sum {} + | sort";

const FILL: &str = "mkdir -p src/deep docs/gone/deep; echo x > docs/gone/deep/x
    for n in 1 2 3 4 5 6; do seq $n 400 > src/f$n; seq $n 300 > docs/f$n; done
    ln -s ../src docs/link; chmod 750 docs; setfattr -n user.x -v y src/f1
    touch -d 2001-01-01 src/f2 src docs";

/// Changes of every kind, in two directories.
const WORK: &str = "for n in 1 2 3; do seq $n 2000 > src/f$n; seq $n 1000 > docs/f$n; done; \
     rm -r src/f4 docs/f4 docs/gone
    rm src/f6; mkdir src/f6; echo x > src/f6/in
    echo new > src/deep/new; mkdir docs/made; echo inside > docs/made/inside; chmod 600 src/f5";

fn look(place: &Place) -> String {
    place.sh("base", LOOK).out
}

fn sh(place: &Place, dir: &str, script: &str) {
    let said = place.sh(dir, script);
    assert_eq!(said.code, 0, "{script}: {said:?}");
}

/// A place whose base is a mount of its own: a bind mount, or a filesystem in an image.
fn place_on(image: Option<(&str, &str)>) -> Place {
    let place = Place::new();
    match image {
        None => sh(&place, "", "mount --bind base base"),
        Some((size, mkfs)) => {
            sh(
                &place,
                "",
                &format!("truncate -s {size} image; {mkfs} image; mount -o loop image base"),
            );
        }
    }
    place
}

const EXT4: (&str, &str) = ("24M", "mkfs.ext4 -q -F");
const BTRFS: (&str, &str) = ("144M", "mkfs.btrfs -q -f");

/// Fills the base, and makes two checkpoints: 'start', and 'mine' after the work.
fn prepare(place: &Place, fill: &str, work: &str) {
    sh(place, "base", fill);
    place.mount();
    place.ok("mnt", "checkpoint start");
    sh(place, "mnt", work);
    place.ok("mnt", "checkpoint mine");
    place.umount();
}

/// An apply is refused, says why, and leaves the base as it is; afterwards everything goes on.
fn is_refused(place: &Place, before: &str, why: &str) {
    let output = place.fails("base", "apply", 1);
    assert!(output.contains(why) && output.contains("nothing is written"), "{output}");
    assert_eq!(look(place), before);
    assert!(!place.ok("base", "status").contains("not rolled back"));
    place.mount();
    place.ok("mnt", "restore start");
    place.ok("mnt", "restore mine");
    assert!(place.fails("mnt", "apply", 1).contains(why));
    place.umount();
    assert_eq!(look(place), before);
}

#[test]
fn an_apply_to_a_read_only_base_writes_nothing() {
    let place = place_on(None);
    prepare(&place, FILL, WORK);
    let before = look(&place);
    sh(&place, "", "mount -o remount,ro,bind base");
    is_refused(&place, &before, "the base is read-only");
    sh(&place, "", "mount -o remount,rw,bind base");
    place.ok("base", "apply");
    assert_eq!(place.ok("base", "diff base"), "");
}

#[test]
fn an_apply_without_enough_space_writes_nothing() {
    for image in [EXT4, BTRFS] {
        let place = place_on(Some(image));
        let fill = "mkdir src; for n in $(seq 400); do head -c 20000 /dev/zero | tr '\\0' b > \
            src/f$n; done";
        let work = "for n in $(seq 400); do head -c 20000 /dev/zero | tr '\\0' m > src/f$n; done
            for n in $(seq 100); do head -c 100000 /dev/zero | tr '\\0' m > src/g$n; done";
        prepare(&place, fill, work);
        // The free space is smaller than the new files.
        sh(
            &place,
            "base",
            "sync -f .; free=$(stat -f -c '%a*%S' .); : > filler
            head -c $(($free - 6000000)) /dev/urandom > filler; sync -f .",
        );
        let before = look(&place);
        is_refused(&place, &before, "the filesystem of the base has room for");
        sh(&place, "base", "rm filler; sync -f .");
        place.ok("base", "apply");
        assert_eq!(place.ok("base", "diff base"), "");
    }
}

#[test]
fn an_apply_to_append_only_or_immutable_files_writes_nothing() {
    let place = place_on(Some(EXT4));
    prepare(&place, FILL, WORK);
    for (flag, why) in [("a", "it is append-only"), ("i", "it is immutable")] {
        sh(&place, "base", &format!("chattr +{flag} docs"));
        is_refused(&place, &look(&place), &format!("'docs' cannot be written: {why}"));
        sh(&place, "base", &format!("chattr -{flag} docs"));
    }
    place.ok("base", "apply");
    assert_eq!(place.ok("base", "diff base"), "");
    // Files that had the flag before the sandbox began: one to be replaced, one to be removed, one
    // to get another mode.
    for (file, flag, why) in
        [("f1", "i", "immutable"), ("f4", "a", "append-only"), ("f5", "i", "immutable")]
    {
        let place = place_on(Some(EXT4));
        prepare(&place, &format!("{FILL}; chattr +{flag} src/{file}"), WORK);
        is_refused(&place, &look(&place), &format!("'src/{file}' cannot be written: it is {why}"));
        sh(&place, "base", &format!("chattr -{flag} src/{file}"));
    }
}

/// Interrupts an apply in the middle.
fn cut_off(place: &Place, step: &str) -> String {
    let before = look(place);
    sh(place, "base", &format!("! JAILFS_FAILPOINTS=kill:{step} $JAILFS apply"));
    assert_ne!(look(place), before, "the apply was cut off before it wrote anything");
    before
}

/// While a rollback cannot end, everything but an apply works, and shows the base as it was before.
/// `path` is not rolled back yet, `was` is its former content.
fn everything_works(place: &Place, (path, why): (&str, &str), was: &str) {
    let status = place.ok("base", "status");
    assert!(status.contains("the base is not rolled back yet"), "{status}");
    assert!(status.contains(&format!("  {path}: {why}")), "{status}");
    assert!(!status.contains("problems with the base"), "{status}");
    let lines = place.json("base", "status");
    assert_eq!(lines[0]["rollback_unfinished"], true);
    let is_named =
        |line: &&serde_json::Value| line["type"] == "not_rolled_back" && line["path"] == path;
    assert!(lines.iter().any(|line| is_named(&line)), "{lines:?}");
    let log = place.ok("base", "log");
    assert!(log.contains("start") && log.contains("mine"), "{log}");
    assert!(place.ok("base", "diff base").contains(&format!("M\t{path}\n")));
    assert_eq!(place.ok("base", &format!("show base:{path}")), was);
    assert_eq!(place.ok("base", &format!("show start:{path}")), was);
    let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
    place.ok("", "mount -o ro base mnt");
    assert_ne!(place.read(format!("mnt/{path}")), was);
    place.umount();
    place.mount();
    place.ok("mnt", "restore start");
    assert_eq!(place.read(format!("mnt/{path}")), was);
    assert_eq!(place.ok("mnt", "diff base"), "");
    place.ok("mnt", "restore mine");
    place.ok("mnt", "discard");
    assert_eq!(place.read(format!("mnt/{path}")), was);
    place.write(format!("mnt/{dir}/later"), "later\n");
    place.ok("mnt", "checkpoint later");
    place.ok("mnt", "restore mine");
    place.ok("mnt", "gc");
    let output = place.fails("mnt", "apply", 3);
    assert!(output.contains("is not rolled back yet") && output.contains(path), "{output}");
    let output = place.fails("mnt", "apply --undo", 3);
    assert!(output.contains(path), "{output}");
    place.ok("mnt", "check --read-data");
    place.umount();
    place.ok("base", "check --read-data");
    place.ok("base", "gc --operations 0");
    assert_eq!(place.ok("base", &format!("show start:{path}")), was);
}

/// The rollback has ended: the base is as before, and the next apply and its undo work.
fn has_ended(place: &Place, before: &str) {
    assert_eq!(look(place), before);
    assert!(!place.ok("base", "status").contains("not rolled back"));
    assert_eq!(place.json("base", "status")[0]["rollback_unfinished"], false);
    place.ok("base", "check --read-data");
    place.ok("base", "restore mine");
    place.ok("base", "apply");
    assert_eq!(place.ok("base", "diff base"), "");
    place.ok("base", "apply --undo");
    assert_eq!(look(place), before);
}

#[test]
fn on_a_base_that_became_read_only_a_rollback_blocks_only_the_next_apply() {
    // The user asks for it, or the next mount or any other command finishes it.
    for finish in ["undo", "undo in the mount", "mount", "status"] {
        let place = place_on(None);
        prepare(&place, FILL, WORK);
        let was = place.read("base/docs/f1");
        let before = cut_off(&place, "base.rename:6");
        sh(&place, "", "mount -o remount,ro,bind base");
        if finish == "undo" {
            everything_works(&place, ("docs/f1", "the base is read-only"), &was);
        }
        place.mount();
        sh(&place, "", "mount -o remount,rw,bind base");
        if finish == "undo in the mount" {
            let plan = place.ok("mnt", "apply --undo --dry-run");
            assert!(plan.contains("M\tdocs/f1\n"), "{plan}");
            let done = place.ok("mnt", "apply --undo");
            assert!(done.starts_with("undid the last apply: "), "{done}");
            assert_eq!(look(&place), before);
            place.ok("mnt", "restore start");
            assert_eq!(place.ok("mnt", "diff base"), "");
        }
        place.umount();
        match finish {
            "undo" | "status" => drop(place.ok("base", "status")),
            "mount" => {
                place.mount();
                place.umount();
            }
            _ => {}
        }
        has_ended(&place, &before);
    }
}

#[test]
fn a_rollback_skips_paths_that_cannot_be_restored() {
    let place = place_on(Some(EXT4));
    prepare(&place, FILL, WORK);
    let was = place.read("base/docs/f1");
    let docs = "find docs -printf '%p %s %T@\\n' | sort";
    let (docs_before, src_before) =
        (place.sh("base", docs).out, place.sh("base", &docs.replace("docs", "src")).out);
    let before = cut_off(&place, "base.sync:1");
    assert_ne!(place.sh("base", docs).out, docs_before);
    sh(&place, "base", "chattr +a docs");
    let status = place.ok("base", "status");
    for path in ["docs/f1", "docs/f2", "docs/f3", "docs/made"] {
        assert!(
            status.contains(&format!("  {path}: it is append-only (chattr +a)\n")),
            "{path}: {status}"
        );
    }
    assert!(!status.contains("  src"), "{status}");
    assert_eq!(place.sh("base", &docs.replace("docs", "src")).out, src_before);
    everything_works(&place, ("docs/f1", "it is append-only (chattr +a)"), &was);
    sh(&place, "base", "chattr -a docs");
    place.ok("base", "status");
    has_ended(&place, &before);
}

#[test]
fn a_rollback_on_a_full_disk_ends_when_there_is_space() {
    for image in [EXT4, BTRFS] {
        let place = place_on(Some(image));
        // Each is larger than the space that the filler leaves.
        let fill = "mkdir src; for n in 1 2 3 4 5 6; do seq 100000 > src/f$n; done";
        prepare(&place, fill, "for n in 1 2 3 4 5 6; do echo mine > src/f$n; done");
        let was = place.read("base/src/f1");
        let before = cut_off(&place, "base.rename:4");
        // Freed space may become available late.
        let more = "head -c 200M /dev/urandom >> filler 2> /dev/null || :; sync -f .";
        sh(&place, "base", &format!("for n in 1 2 3; do {more}; done"));
        everything_works(&place, ("src/f1", "No space left on device"), &was);
        fs::remove_file(place.at("base/filler")).expect("remove a file");
        sh(&place, "base", "sync -f .");
        place.ok("base", "status");
        has_ended(&place, &before);
    }
}

/// The base fails permanently after half of an apply, in the process that applies.
#[test]
fn an_apply_whose_rollback_fails_says_so_and_is_rolled_back_on_request() {
    let place = place_on(None);
    prepare(&place, FILL, WORK);
    let before = look(&place);
    let said = place.sh("base", "JAILFS_FAILPOINTS=fail:base.rename:4+:EIO $JAILFS apply --json");
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.err.contains("the base could not be rolled back: '"), "{said:?}");
    assert!(said.err.contains("'jailfs apply --undo'"), "{said:?}");
    assert!(parse(&said.out).is_empty());
    assert_ne!(look(&place), before);
    // Opening the store tries it again, and then there is nothing left to roll back.
    let done = place.ok("base", "apply --undo");
    assert!(done.contains("the base is rolled back to what it was before it"), "{done}");
    has_ended(&place, &before);
}
