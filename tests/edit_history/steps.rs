//! Undo and redo.

use jailfs::error::Kind;
use jailfs::internals::sys::failpoint;
use jailfs::internals::tree::Source;
use jailfs::sandbox::EditKind::Undo;
use jailfs::sandbox::{Bounds, Sandbox};
use jailfs::types::NodeId;

use crate::place::Place;

#[test]
fn undo_walks_back_and_redo_forward_until_a_new_edit() {
    let place = Place::new(&[("a", "zero")]);
    let work = place.open();
    for text in ["one", "two", "three"] {
        work.put("a", text);
    }
    assert_eq!(work.undo("a", 1).unwrap().number, Some(3));
    assert_eq!(work.get("a"), "two");
    work.undo("a", 2).unwrap();
    assert_eq!(work.get("a"), "zero");
    let none = work.undo("a", 1).unwrap_err();
    assert_eq!((none.kind, work.get("a").as_str()), (Kind::NoStore, "zero"));
    work.redo("a", 1).unwrap();
    assert_eq!(work.get("a"), "one");
    let shown: Vec<u32> =
        work.history("a").iter().filter(|v| v.is_current).map(|v| v.number).collect();
    assert_eq!(shown, [2]);
    assert_eq!(work.redo("a", 2).unwrap().number, None);
    assert_eq!(
        (work.get("a").as_str(), work.texts("a").len()),
        ("three", 3),
        "as if nothing had been undone"
    );
    assert_eq!(work.redo("a", 1).unwrap_err().kind, Kind::NoStore);
    // A new edit after an undo: nothing is lost, and there is nothing to redo.
    work.undo("a", 3).unwrap();
    work.put("a", "four");
    assert_eq!(work.redo("a", 1).unwrap_err().kind, Kind::NoStore);
    assert_eq!(work.texts("a"), ["zero", "one", "two", "three", "zero"]);
    work.undo("a", 1).unwrap();
    assert_eq!(work.get("a"), "zero");
    work.undo("a", 1).unwrap();
    assert_eq!(work.get("a"), "three", "the undo itself is undone");
    assert!(work.history("a").iter().any(|edit| edit.kind == Undo));
    // Also after a remount.
    drop(work);
    let work = place.open();
    work.redo("a", 2).unwrap();
    assert_eq!(work.get("a"), "four");
    assert!(work.undo("a", 9).unwrap_err().reason.contains("only 5"));
}

#[test]
fn an_undo_of_a_removal_restores_the_directories_above() {
    let place = Place::new(&[("d/e/f", "base"), ("d/g", "g")]);
    let work = place.open();
    work.put("d/e/n", "new");
    for file in ["d/e/f", "d/e/n", "d/g"] {
        work.rm(file);
    }
    work.rmdir("d/e");
    work.rmdir("d");
    work.undo("d/e/n", 1).unwrap();
    work.undo("d/e/f", 1).unwrap();
    assert_eq!((work.get("d/e/n"), work.get("d/e/f")), ("new".to_owned(), "base".to_owned()));
    assert!(!work.exists("d/g"), "nothing else comes back");
    // Redo removes it again.
    assert_eq!(work.redo("d/e/f", 1).unwrap().new_size, None);
    assert!(!work.exists("d/e/f"));
    work.undo("d/e/f", 1).unwrap();
    work.put("d/e/f", "edited");
    assert_eq!(work.texts("d/e/f"), ["base"], "a missing file is no edit");
    work.sandbox.compact().unwrap();
    drop(work);
    let work = place.open();
    assert_eq!((work.get("d/e/f"), work.get("d/e/n")), ("edited".to_owned(), "new".to_owned()));
    let checked = jailfs::sandbox::Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
}

#[test]
fn an_undo_reports_what_is_in_its_way() {
    let place = Place::new(&[("a/b", "text"), ("c", "c")]);
    let work = place.open();
    assert_eq!(work.undo("nothing", 1).unwrap_err().kind, Kind::NoStore);
    assert_eq!(work.undo("c", 1).unwrap_err().kind, Kind::NoStore);
    work.rm("c");
    work.mkdir("c");
    assert!(work.undo("c", 1).unwrap_err().reason.contains("not a regular file"));
    work.rm("a/b");
    work.rmdir("a");
    work.put("a", "a file now");
    assert!(work.undo("a/b", 1).unwrap_err().reason.contains("not a directory"));
    assert_eq!(work.get("a"), "a file now");
}

#[test]
fn the_holder_of_a_file_keeps_its_content_across_an_undo() {
    let place = Place::new(&[("a", "one")]);
    let work = place.open();
    let ino = work.sandbox.fs().getattr(work.id("a")).unwrap().ino;
    work.put("a", "two");
    let held = work.id("a");
    work.undo("a", 1).unwrap();
    let fs = work.sandbox.fs();
    let read = |id: NodeId| fs.read(id, 0, 100).unwrap().read(false).unwrap().unwrap();
    assert_eq!((read(held), work.get("a").as_str()), (b"two".to_vec(), "one"));
    fs.write(held, 0, b"mine", false).unwrap();
    assert_eq!((read(held), work.get("a").as_str()), (b"mine".to_vec(), "one"));
    let now = fs.getattr(work.id("a")).unwrap();
    assert!(now.ino == ino && work.id("a") != held, "the same number, another id");
    assert_eq!(fs.getattr(held).unwrap().meta.nlink, 0);
    // Attributes stay those of the present file; only the content is restored.
    assert_eq!(now.meta.mode, 0o100_644);
}

#[test]
fn a_restore_is_an_edit_of_each_file_that_it_changes() {
    let place = Place::new(&[("a", "base"), ("same", "same")]);
    let work = place.open();
    work.put("a", "one");
    work.put("gone", "gone");
    work.checkpoint("c");
    work.put("a", "two");
    work.put("new", "new");
    work.rm("gone");
    work.restore("c");
    assert_eq!(
        (work.get("a"), work.get("gone"), work.exists("new")),
        ("one".into(), "gone".into(), false)
    );
    assert!(work.history("same").is_empty());
    work.undo("a", 1).unwrap();
    assert_eq!(work.get("a"), "two", "the content before the restore");
    work.undo("a", 1).unwrap();
    assert_eq!(work.get("a"), "one", "the content before the edit before that");
    work.undo("new", 1).unwrap();
    assert_eq!(work.get("new"), "new", "the file that the restore removed comes back");
    // A restore back and forth, and an undo in between.
    work.restore("c");
    work.undo("a", 1).unwrap();
    assert_eq!(work.get("a"), "base", "the restore did not change it, so it is no edit");
    work.restore("c");
    work.undo("a", 1).unwrap();
    assert_eq!(work.get("a"), "base", "it was undone to this before the restore");
    drop(work);
    assert_eq!(place.open().texts("a")[..3], ["base", "one", "two"]);
}

#[test]
fn the_history_is_the_same_after_an_apply() {
    let place = Place::new(&[("a", "zero"), ("big", &"0123456789abcdef".repeat(4096))]);
    let work = place.open();
    work.put("a", "one");
    work.write("big", 20_000, b"changed");
    work.apply();
    assert_eq!(std::fs::read(place.base.join("a")).unwrap(), b"one");
    work.rest();
    work.put("a", "two");
    assert_eq!(work.texts("a"), ["zero", "one"]);
    work.undo("a", 2).unwrap();
    assert_eq!(work.get("a"), "zero", "although the base has another");
    work.undo("big", 1).unwrap();
    assert_eq!(work.get("big"), "0123456789abcdef".repeat(4096));
    work.sandbox.compact().unwrap();
    work.redo("big", 1).unwrap();
    assert_eq!(&work.get("big")[20_000..20_007], "changed");
    let checked = jailfs::sandbox::Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
    // When gc frees pre-images, entries that need them are dropped, and no others.
    work.rest();
    work.put("a", "three");
    work.checkpoint("c");
    work.gc(0);
    let left = work.texts("a");
    assert!(left.contains(&"two".to_owned()), "{left:?}");
}

#[test]
fn an_entry_is_compared_with_the_file_as_a_patch() {
    let place = Place::new(&[("a", "1\n2\n3\n")]);
    let work = place.open();
    work.put("a", "1\ntwo\n3\n");
    let patch = work.patch("a", 1);
    assert!(patch.contains("-2\n+two\n") && patch.contains("--- a/a\n+++ b/a\n"), "{patch}");
    work.undo("a", 1).unwrap();
    assert_eq!(work.patch("a", 1), "");
}

/// An undo across an apply writes the content again, for the entry and for the file. Then its
/// record fails.
#[test]
fn content_that_a_failed_undo_wrote_for_the_history_stays() {
    let mut failed = 0;
    for step in 1..=8 {
        let place = Place::new(&[("a", &"zero".repeat(5000))]);
        let work = place.open();
        work.checkpoint("start");
        work.put("a", "one");
        work.apply();
        work.rest();
        let undone = failpoint::with(&format!("fail:store.write:{step}:EIO"), || work.undo("a", 1));
        failed += usize::from(undone.is_err());
        // The layer that was created for the head is left behind.
        work.restore("start");
        work.rest();
        work.sandbox.compact().unwrap();
        assert!(work.texts("a").contains(&"zero".repeat(5000)), "step {step}");
        work.gc(0);
        drop(work);
        drop(place.open());
        let checked = Sandbox::check_store(&place.store, true).unwrap();
        assert_eq!((checked.problems, checked.warnings), (Vec::new(), Vec::new()), "step {step}");
    }
    assert!(failed > 0);
}

/// The layer with that content has no record, and the history no longer refers to it: only a tree
/// does.
#[test]
fn content_of_a_failed_undo_stays_once_it_is_restored_and_its_entry_is_dropped() {
    let old = "zero".repeat(5000);
    let mut kept = 0;
    for (step, is_sealed) in (1..=8).flat_map(|step| [(step, false), (step, true)]) {
        let place = Place::new(&[("a", &old)]);
        let work = place.open();
        work.checkpoint("start");
        work.put("a", "one");
        work.apply();
        work.rest();
        let undone = failpoint::with(&format!("fail:store.write:{step}:EIO"), || work.undo("a", 1));
        let before = work.sandbox.fs().upper_layer();
        work.restore("start");
        work.put("a", "two");
        work.rest();
        while work.undo("a", 1).is_ok() {}
        assert!(work.get("a") == old, "step {step}");
        let refers = work.sandbox.fs().state().tree.all_extents().any(
            |(_, extent)| matches!(extent.source, Source::Pool { layer, .. } if layer == before),
        );
        kept += usize::from(undone.is_err() && refers);
        if is_sealed {
            work.checkpoint("brought back");
            work.put("a", "three");
        }
        work.sandbox.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
        work.sandbox.compact().unwrap();
        work.gc(0);
        drop(work);
        let work = place.open();
        if is_sealed {
            work.restore("brought back");
        }
        assert!(work.get("a") == old, "step {step}");
        drop(work);
        let checked = Sandbox::check_store(&place.store, true).unwrap();
        assert_eq!((checked.problems, checked.warnings), (Vec::new(), Vec::new()), "step {step}");
    }
    assert!(kept > 0, "no undo failed after it had written the content");
}

/// Files that an undo made from the same bytes stay separate, also when no entry links them any
/// more.
#[test]
fn restored_content_is_not_changed_through_another_file_once_its_entry_is_dropped() {
    let (old, new) = ("0123456789abcdef".repeat(1000), "written");
    for (written, other) in [("a", "b"), ("b", "a")] {
        let place = Place::new(&[]);
        let work = place.open();
        work.put("a", &old);
        work.rest();
        work.mv("a", "b");
        work.undo("a", 1).unwrap();
        drop(work);
        for round in 0..3 {
            let work = place.open();
            work.sandbox.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
            if round > 0 {
                work.write(written, 4096 * round, new.as_bytes());
            }
            assert!(work.get(other) == old, "{other}, round {round}");
        }
        let mut wanted = old.clone();
        for round in 1..3 {
            wanted.replace_range(4096 * round..4096 * round + new.len(), new);
        }
        let work = place.open();
        assert!(work.get(written) == wanted, "{written}");
    }
}
