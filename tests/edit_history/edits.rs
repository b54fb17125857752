//! The limits of one edit, and the path of its entry.

use jailfs::internals::fs::RenameMode;
use jailfs::sandbox::EditKind::{Move, Remove, Replace, Truncate, Write};

use crate::place::Place;

#[test]
fn an_edit_begins_at_a_truncation_and_after_a_second_without_writes() {
    let place = Place::new(&[("a", "base")]);
    let work = place.open();
    // However often the file is written, it is one edit until a quiet second.
    work.write("a", 0, b"B");
    work.write("a", 4, b" one");
    assert_eq!(work.texts("a"), ["base"]);
    work.rest();
    work.write("a", 8, b" two");
    work.write("a", 12, b" more");
    assert_eq!(work.texts("a"), ["base", "Base one"]);
    // Emptying a file begins an edit, also in the middle of another.
    work.put("a", "three");
    work.put("a", "four");
    assert_eq!(work.texts("a"), ["base", "Base one", "Base one two more", "three"]);
    assert_eq!(work.edits("a"), [Write, Write, Truncate, Truncate]);
    // A new end in the middle of an edit is part of it: the file is overwritten, then cut.
    work.rest();
    work.write("a", 0, b"FI");
    work.truncate("a", 2);
    work.write("a", 2, b"VE");
    assert_eq!((work.texts("a").len(), work.texts("a")[4].as_str()), (5, "four"));
    assert_eq!(work.get("a"), "FIVE");
    work.rest();
    work.truncate("a", 1);
    assert_eq!(work.texts("a")[5], "FIVE");
}

#[test]
fn creating_a_file_is_no_edit() {
    let place = Place::new(&[]);
    let work = place.open();
    work.put("a", "one");
    work.write("a", 3, b" more");
    assert!(work.history("a").is_empty());
    // The empty file is an entry if it was empty for a while.
    work.make("b");
    work.rest();
    work.put("b", "text");
    assert_eq!(work.texts("b"), [""]);
    work.put("a", "two");
    assert_eq!(work.texts("a"), ["one more"]);
}

#[test]
fn a_file_that_loses_its_name_is_found_under_that_name() {
    let place = Place::new(&[("base", "of the base"), ("dir/x", "x"), ("dir/y", "y")]);
    let work = place.open();
    work.rm("base");
    assert_eq!(
        (work.texts("base"), work.edits("base")),
        (vec!["of the base".to_owned()], vec![Remove])
    );
    work.put("a", "one");
    work.rm("a");
    work.put("a", "two");
    work.rm("a");
    assert_eq!(work.texts("a"), ["one", "two"]);
    // Saving by a rename.
    for text in ["1", "2", "3"] {
        work.put("dir/x.tmp", text);
        work.mv("dir/x.tmp", "dir/x");
    }
    assert_eq!(
        (work.texts("dir/x"), work.edits("dir/x")),
        (vec!["x".into(), "1".into(), "2".into()], vec![Replace; 3])
    );
    assert!(work.history("dir/x.tmp").is_empty(), "a file written aside leaves no edit there");
    // Saving with a backup, also for a file that is being edited.
    work.put("s", "first");
    for text in ["second", "third"] {
        work.mv("s", "s~");
        work.put("s", text);
        work.rm("s~");
    }
    assert_eq!(
        (work.texts("s"), work.edits("s")),
        (vec!["first".into(), "second".into()], vec![Move, Move])
    );
    // The names of exchanged files.
    work.mv_as("dir/x", "dir/y", RenameMode::Exchange);
    assert_eq!(work.texts("dir/y"), ["y"]);
    assert_eq!(work.texts("dir/x").last().unwrap(), "3");
}

#[test]
fn the_history_follows_a_renamed_file() {
    let place = Place::new(&[("d/sub/f", "zero"), ("plain", "p0")]);
    let work = place.open();
    work.put("d/sub/f", "one");
    work.rest();
    work.mv("d/sub/f", "d/sub/g");
    assert_eq!(work.texts("d/sub/g"), ["zero"]);
    assert_eq!(work.texts("d/sub/f"), ["zero", "one"], "and its content stays under the old name");
    // Below a directory that moves, all of it.
    work.mv("d", "e");
    assert_eq!(work.texts("e/sub/g"), ["zero"]);
    assert_eq!(work.texts("e/sub/f"), ["zero", "one"]);
    assert!(work.history("d/sub/g").is_empty());
    work.put("e/sub/g", "two");
    assert_eq!(work.texts("e/sub/g"), ["zero", "one"]);
    // A name that has a history keeps it.
    work.put("plain", "p1");
    work.rest();
    work.mv("e/sub/g", "plain");
    assert_eq!(work.texts("plain"), ["p0", "p1"]);
    drop(work);
    let work = place.open();
    assert_eq!(work.texts("e/sub/f"), ["zero", "one"], "also after a start");
    assert_eq!(work.texts("plain"), ["p0", "p1"]);
    work.mkdir("other");
    work.put("other/n", "n0");
    work.put("other/n", "n1");
    work.mv_as("other", "e", RenameMode::Exchange);
    assert_eq!(
        (work.texts("e/n"), work.texts("other/sub/f")),
        (vec!["n0".into()], vec!["zero".into(), "one".into()])
    );
}

#[test]
fn later_writes_do_not_change_an_entry() {
    let place = Place::new(&[]);
    let work = place.open();
    let first: Vec<u8> = (0..40_000u32).map(|n| (n % 251) as u8).collect();
    work.make("a");
    work.write("a", 0, &first);
    work.rest();
    // In the middle of a block, across the end, after the end, and by appending.
    for (at, len) in [(100, 10), (8000, 9000), (39_990, 100), (0, 1)] {
        work.write("a", at, &vec![0xff; len]);
    }
    let fs = work.sandbox.fs();
    let read = |number| {
        let (state, found) = fs.before_edit(&crate::place::path("a"), number).unwrap();
        state.read_all(&found).unwrap()
    };
    assert_eq!(read(1), first);
    let second = work.bytes("a");
    work.rest();
    work.write("a", 40_090, b"appended");
    work.write("a", 40_091, b"PP");
    work.truncate("a", 5);
    assert_eq!((read(1), read(2)), (first, second));
    assert_eq!(work.bytes("a"), [0xff, 1, 2, 3, 4]);
}

#[test]
fn hard_links_are_edited_as_one_and_each_name_has_the_history() {
    let place = Place::new(&[("a", "one")]);
    let work = place.open();
    work.sandbox
        .fs()
        .link(work.id("a"), jailfs::types::NodeId::ROOT, &crate::place::name("b"))
        .unwrap();
    work.rest();
    work.put("b", "two");
    assert_eq!(
        (work.texts("a"), work.texts("b")),
        (vec!["one".to_owned()], vec!["one".to_owned()])
    );
    work.undo("a", 1).unwrap();
    assert_eq!((work.get("a"), work.get("b")), ("one".to_owned(), "one".to_owned()));
    work.undo("b", 1).unwrap_err();
}
