//! Bounds of the edit history: how much it keeps, what it drops first, and that the space is freed.

use std::sync::atomic::{AtomicBool, Ordering};

use jailfs::internals::fs::{Need, Tended};
use jailfs::internals::sys::failpoint::{self, Failpoint};
use jailfs::sandbox::Bounds;
use jailfs::sandbox::{Request, Rev};

use crate::place::{Place, Work};

/// Random bytes without zeros.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % 255) as u8 + 1
    };
    (0..len).map(|_| next()).collect()
}

fn rewrite(work: &Work, path: &str, bytes: &[u8]) {
    work.truncate(path, 0);
    for (at, part) in bytes.chunks(128 << 10).enumerate() {
        work.write(path, (at * (128 << 10)) as u64, part);
    }
}

#[test]
fn the_last_ten_edits_of_a_file_are_kept() {
    let place = Place::new(&[]);
    let work = place.open();
    for n in 0..15 {
        work.put("a", &format!("text {n}"));
    }
    let numbers: Vec<u32> = work.history("a").iter().map(|edit| edit.number).collect();
    assert_eq!(
        numbers,
        (5..=14).rev().collect::<Vec<u32>>(),
        "the newest, and numbers stay what they are"
    );
    assert_eq!(work.texts("a")[0], "text 4");
    // An undo does not drop the oldest.
    work.undo("a", 10).unwrap();
    assert_eq!(work.get("a"), "text 4");
    drop(work);
    let work = place.open();
    assert_eq!(work.history("a").len(), 11);
    work.redo("a", 10).unwrap();
    assert_eq!((work.get("a").as_str(), work.history("a").len()), ("text 14", 10));
    work.sandbox.fs().set_edit_bounds(Bounds { edits: 3, ..Bounds::default() });
    work.put("a", "text 15");
    assert_eq!(work.texts("a"), ["text 12", "text 13", "text 14"]);
}

#[test]
fn the_edit_history_stores_equal_content_once_also_during_an_undo() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("a");
    let text = noise(1, 400_000);
    let edited = |n: u8| {
        let mut bytes = text.clone();
        bytes[usize::from(n) * 20_000] = n + 1;
        bytes
    };
    for n in 0..12 {
        work.rest();
        rewrite(&work, "a", &edited(n));
    }
    assert!(place.pools() > 4 << 20, "each is a whole copy");
    work.undo("a", 4).unwrap();
    assert_eq!(work.sandbox.fs().maintain_edits(true, &|| false), Tended::Done);
    // One copy, its differences, and the entry that the undo added.
    let bytes = place.pools();
    assert!(bytes < 5 << 18, "{bytes}");
    // The position of the undo is known in both directions, also after a remount.
    assert_eq!(work.bytes("a"), edited(7));
    work.undo("a", 3).unwrap();
    assert_eq!(work.bytes("a"), edited(4));
    work.sandbox.fs().maintain_edits(true, &|| false);
    drop(work);
    let work = place.open();
    for (steps, n) in [(1, 5), (2, 7), (3, 10)] {
        work.redo("a", steps).unwrap();
        assert_eq!(work.bytes("a"), edited(n));
        work.sandbox.fs().maintain_edits(true, &|| false);
    }
    assert_eq!(work.redo("a", 1).unwrap().number, None);
    assert_eq!(work.bytes("a"), edited(11));
    // The content that the undo restored is compared again when the file is edited.
    work.undo("a", 6).unwrap();
    work.sandbox.fs().maintain_edits(true, &|| false);
    work.rest();
    work.write("a", 5, b"an edit");
    work.sandbox.fs().maintain_edits(true, &|| false);
    work.sandbox.compact().unwrap();
    let bytes = place.pools();
    assert!(bytes < 5 << 18, "{bytes}");
    let checked = jailfs::sandbox::Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
}

#[test]
fn with_the_history_off_nothing_is_kept_and_nothing_is_written() {
    let place = Place::new(&[("a", "one")]);
    let work = place.open();
    work.sandbox.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    work.put("a", "two");
    work.rm("a");
    assert!(work.history("a").is_empty() && work.undo("a", 1).is_err());
    drop(work);
    // It also stays off for commands without a mount.
    let work = place.open();
    work.put("b", "1");
    work.put("b", "2");
    assert!(work.history("b").is_empty());
    // Bytes are overwritten in place again.
    work.sandbox.fs().set_edit_bounds(Bounds::default());
    work.put("b", "3");
    assert_eq!(work.texts("b"), ["2"]);
    work.sandbox.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    assert!(work.history("b").is_empty(), "switching the history off drops all edits");
}

#[test]
fn a_tool_that_rewrites_a_file_for_each_small_change_costs_only_the_differences() {
    let place = Place::new(&[]);
    let work = place.open();
    let mut bytes = noise(1, 1 << 20);
    work.make("a");
    rewrite(&work, "a", &bytes);
    let mut texts = Vec::new();
    for n in 0..40u64 {
        work.rest();
        texts.push(bytes.clone());
        // A change in the middle, one that moves all that follows, and a growing end.
        let at = 200_000 + (n as usize * 17_000);
        bytes[at..at + 10].copy_from_slice(&noise(n + 100, 10));
        if n % 3 == 0 {
            bytes.splice(at + 5000..at + 5000, noise(n + 200, 7));
        }
        bytes.extend(noise(n + 300, 500));
        rewrite(&work, "a", &bytes);
    }
    work.rest();
    assert_eq!(work.sandbox.fs().maintain_edits(false, &|| false), Tended::Done);
    let stored = place.pools();
    assert!(stored < (1 << 20) + (1 << 20) / 2, "{stored} bytes for a file of {}", bytes.len());
    let edits = work.history("a");
    assert_eq!(edits.len(), 10);
    for (edit, text) in edits.iter().rev().zip(&texts[30..]) {
        let (state, found) =
            work.sandbox.fs().before_edit(&crate::place::path("a"), edit.number).unwrap();
        assert!(state.read_all(&found).unwrap() == *text, "edit {}", edit.number);
    }
    assert!(work.bytes("a") == bytes);
    // Shared content is still there when the file goes on, is undone and sealed, and after a
    // remount.
    work.write("a", 300_000, b"in place");
    work.undo("a", 5).unwrap();
    assert!(work.bytes("a") == texts[36]);
    work.checkpoint("c");
    work.sandbox.compact().unwrap();
    work.gc(0);
    drop(work);
    let work = place.open();
    assert!(work.bytes("a") == texts[36]);
    work.redo("a", 1).unwrap();
    assert!(work.bytes("a") == texts[37]);
    let checked = jailfs::sandbox::Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
}

#[test]
fn build_output_does_not_displace_the_history_of_sources() {
    let place = Place::new(&[]);
    let work = place.open();
    work.sandbox.fs().set_edit_bounds(Bounds { bytes: 4 << 20, ..Bounds::default() });
    work.mkdir("src");
    work.mkdir("target");
    work.make("src/main.rs");
    for n in 0..50 {
        work.make(&format!("target/o{n}"));
    }
    for round in 0..12u64 {
        work.put("src/main.rs", &format!("{round} {}", "source ".repeat(3000)));
        for n in 0..50u64 {
            rewrite(&work, &format!("target/o{n}"), &noise(round * 50 + n, 20_000));
        }
        work.rest();
        work.sandbox.fs().maintain_edits(false, &|| false);
    }
    assert_eq!(work.history("src/main.rs").len(), 10, "the sources keep all");
    let left: usize = (0..50).map(|n| work.history(&format!("target/o{n}")).len()).sum();
    assert!(left > 50 && left < 250, "{left} edits of built files");
    assert!(place.pools() < (4 << 20) + 2_000_000 + 500_000, "{}", place.pools());
}

#[test]
fn the_space_of_dropped_entries_is_freed() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("a");
    for n in 0..3 {
        rewrite(&work, "a", &noise(n, 2 << 20));
    }
    work.checkpoint("c");
    rewrite(&work, "a", b"small");
    work.sandbox.compact().unwrap();
    assert!(place.pools() > 6 << 20, "edits from before the seal stay");
    work.sandbox.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    work.gc(0);
    let left = place.pools();
    assert!(left < (2 << 20) + 100_000, "{left}: the checkpoint has one of them");
}

/// Writes a temporary file and renames it. It leaves 4 MiB under the temporary name, which nothing
/// but the history refers to.
fn download(work: &Work, path: &str) {
    let part = format!("{path}.part");
    work.make(&part);
    work.write(&part, 0, &noise(7, 4 << 20));
    work.mv(&part, path);
    // Under its present name the file has one small entry.
    work.put(path, "small");
    work.put(path, "too");
}

#[test]
fn content_left_behind_by_a_rename_counts_and_is_dropped_first() {
    const MOST: u64 = 1 << 20;
    let keep_one = |bytes| Bounds { edits: 1, bytes };
    let place = Place::new(&[]);
    let work = place.open();
    let fs = work.sandbox.fs();
    let tend = || fs.maintain_edits(true, &|| false);
    // It is kept for a few seconds.
    fs.set_edit_bounds(keep_one(64 << 20));
    download(&work, "waits");
    assert_eq!(tend(), Tended::Later);
    assert!(place.pools() > 4 << 20);
    (0..6).for_each(|_| work.rest());
    assert_eq!(tend(), Tended::Done);
    assert!(place.pools() < MOST, "the file got no new name: {}", place.pools());
    // For less time if there is too much.
    fs.set_edit_bounds(keep_one(MOST));
    download(&work, "large");
    tend();
    assert!(place.pools() < MOST, "it is beyond the budget: {}", place.pools());
    // And not at all if the disk is full, or nothing is to be kept.
    fs.set_edit_bounds(keep_one(64 << 20));
    download(&work, "full");
    while place.pools() > MOST {
        assert!(fs.make_room(Need::More), "the disk is full: {}", place.pools());
    }
    for path in ["waits", "large", "full"] {
        assert_eq!(work.texts(path), ["small"], "no edit of '{path}' was dropped");
    }
    download(&work, "off");
    fs.set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    tend();
    assert!(place.pools() < MOST, "nothing is to be kept: {}", place.pools());
}

#[test]
fn content_left_behind_by_a_rename_is_not_garbage_while_the_file_has_it() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("x.part");
    work.write("x.part", 0, &noise(7, 4 << 20));
    work.mv("x.part", "x");
    (0..6).for_each(|_| work.rest());
    assert_eq!(work.sandbox.fs().maintain_edits(false, &|| false), Tended::Done);
    assert!(work.bytes("x") == noise(7, 4 << 20));
}

#[test]
fn an_edit_gives_one_notice_when_it_begins() {
    let place = Place::new(&[("a", "one")]);
    let work = place.open();
    let noticed = std::sync::Arc::new(AtomicBool::new(false));
    let notice = std::sync::Arc::clone(&noticed);
    work.sandbox.fs().set_edit_notice(Some(Box::new(move || notice.store(true, Ordering::SeqCst))));
    work.write("a", 0, b"x");
    assert!(noticed.swap(false, Ordering::SeqCst));
    work.write("a", 1, b"y");
    assert!(!noticed.load(Ordering::SeqCst), "and not with every write");
}

/// A checkpoint whose seal failed lies between the last seal and the tree. Only that layer has the
/// content that an undo restored.
#[test]
fn content_that_an_undo_restored_survives_a_failed_seal_on_a_full_disk() {
    let first = noise(1, 1 << 20);
    let mut failed = 0;
    for write in 1.. {
        let place = Place::new(&[]);
        let work = place.open();
        let fs = work.sandbox.fs();
        work.make("a");
        rewrite(&work, "a", &first);
        work.rest();
        rewrite(&work, "a", &noise(2, 1 << 20));
        work.checkpoint("c");
        work.undo("a", 1).unwrap();
        fs.set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
        let request = Request::Checkpoint { name: None, message: String::new() };
        let outcome = failpoint::with(&format!("fail:store.write:{write}+:ENOSPC"), || {
            let outcome = work.sandbox.handle(request);
            // An operation on the full disk asks for space.
            for _ in 0..3 {
                fs.make_room(Need::More);
            }
            outcome
        });
        assert!(work.bytes("a") == first, "write {write} failed: {outcome:?}");
        drop(work);
        assert!(
            place.open().bytes("a") == first,
            "write {write} failed, the next start: {outcome:?}"
        );
        if outcome.is_ok() {
            break;
        }
        failed += 1;
    }
    assert!(failed > 1);
}

/// The number of reads from the store and the base that the maintenance makes.
fn reads(work: &Work) -> usize {
    let (tended, calls) = failpoint::trace(|| work.sandbox.fs().maintain_edits(true, &|| false));
    assert_eq!(tended, Tended::Done);
    calls.iter().filter(|(call, _)| matches!(call, Failpoint::StoreRead)).count()
}

/// Files whose edits share nearly all bytes, none, are undone, are renamed, or have no file before.
fn edit_some_files(work: &Work) {
    let text = noise(1, 400_000);
    work.mkdir("dir");
    for path in ["a", "other", "undone", "dir/moved", "gone"] {
        work.make(path);
    }
    for n in 0..4 {
        work.rest();
        let mut bytes = text.clone();
        bytes[usize::from(n) * 20_000] = n + 1;
        for path in ["a", "undone", "dir/moved"] {
            rewrite(work, path, &bytes);
        }
        rewrite(work, "other", &noise(u64::from(n) + 2, 50_000));
        work.put("gone", &"text".repeat(usize::from(n) + 1));
    }
    work.undo("undone", 2).unwrap();
    work.rm("gone");
    work.undo("gone", 1).unwrap();
    work.undo("gone", 1).unwrap();
}

#[test]
fn edits_that_were_compared_are_not_read_again_after_a_remount() {
    let place = Place::new(&[]);
    let work = place.open();
    edit_some_files(&work);
    assert!(reads(&work) > 0);
    work.mv("dir", "elsewhere");
    assert_eq!(reads(&work), 0, "a rename of a directory changes no content");
    drop(work);
    for _ in 0..2 {
        let work = place.open();
        assert_eq!(reads(&work), 0);
        assert_eq!(work.history("a").len(), 4);
    }
    // An edit that comes later is compared, and no other.
    let work = place.open();
    work.rest();
    rewrite(&work, "other", &noise(9, 50_000));
    let later = reads(&work);
    assert!((1..10).contains(&later), "{later}");
    // The content that an undo restored is compared when the file is edited.
    work.rest();
    work.write("undone", 5, b"an edit");
    drop(work);
    let work = place.open();
    assert!(reads(&work) > 0);
    drop(work);
    assert_eq!(reads(&place.open()), 0);
    let checked = jailfs::sandbox::Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!((checked.problems, checked.warnings), (Vec::new(), Vec::new()));
}

#[test]
fn edits_that_could_not_be_compared_are_compared_after_a_remount() {
    let (place, other) = (Place::new(&[]), Place::new(&[]));
    let (work, other) = (place.open(), other.open());
    [&work, &other].into_iter().for_each(edit_some_files);
    let all = reads(&other);
    let whole = place.pools();
    let rule = format!("fail:store.read:{}+:EIO", all / 2);
    failpoint::with(&rule, || work.sandbox.fs().maintain_edits(true, &|| false));
    drop(work);
    let work = place.open();
    assert!(reads(&work) > 0);
    drop(work);
    let work = place.open();
    assert_eq!(reads(&work), 0);
    work.sandbox.compact().unwrap();
    assert!(place.pools() < whole / 2, "{} of {whole}", place.pools());
}

#[test]
fn what_edits_share_is_not_counted_after_a_remount() {
    let place = Place::new(&[]);
    let work = place.open();
    edit_some_files(&work);
    assert!(reads(&work) > 0);
    drop(work);
    let work = place.open();
    // All whole copies would be 6 MB.
    work.sandbox.fs().set_edit_bounds(Bounds { edits: 10, bytes: 3 << 20 });
    assert_eq!(reads(&work), 0);
    assert_eq!(["a", "undone", "dir/moved"].map(|path| work.history(path).len()), [4, 5, 4]);
}

#[test]
fn after_a_rewind_only_the_files_that_it_changed_are_compared() {
    let place = Place::new(&[]);
    let work = place.open();
    edit_some_files(&work);
    assert!(reads(&work) > 0);
    work.checkpoint("before");
    let savepoint = work.sandbox.savepoint();
    work.rest();
    rewrite(&work, "other", &noise(9, 50_000));
    assert!(reads(&work) > 0);
    work.sandbox.reset_to(&Rev::Name("before".into())).unwrap();
    work.sandbox.rewind_to(&savepoint).unwrap();
    assert_eq!(work.history("other").len(), 4);
    let again = reads(&work);
    assert!(again < 10, "{again}");
    drop(work);
    assert_eq!(reads(&place.open()), 0);
}

/// Whether the maintenance rewrites the log.
fn rewrites(work: &Work) -> bool {
    let (_, calls) = failpoint::trace(|| work.sandbox.fs().maintain_edits(true, &|| false));
    calls.iter().any(|(call, _)| matches!(call, Failpoint::StoreRename))
}

#[test]
fn the_log_is_rewritten_when_most_of_it_describes_nothing_any_more() {
    let place = Place::new(&[]);
    let len = || std::fs::metadata(place.store.join("history/main")).unwrap().len();
    let work = place.open();
    let names: Vec<String> = (0..700).map(|n| format!("a-file-with-a-long-name-{n}")).collect();
    for text in ["one", "two", "three", "four", "five"] {
        names.iter().for_each(|name| work.put(name, text));
    }
    drop(work);
    let work = place.open();
    assert!(rewrites(&work));
    let whole = len();
    assert!(whole > 200_000, "{whole}");
    // It is as short as it can be, and the next processes see that.
    drop(work);
    let work = place.open();
    assert!(!rewrites(&work));
    drop(work);
    let work = place.open();
    names.iter().for_each(|name| work.put(name, "six"));
    assert!(!rewrites(&work), "it may have twice the length of what it describes");
    assert!(len() > whole);
    work.sandbox.fs().set_edit_bounds(Bounds { edits: 10, bytes: 400_000 });
    assert!(rewrites(&work), "most edits are dropped");
    assert!(len() < whole / 10, "{} of {whole}", len());
    drop(work);
    assert!(!rewrites(&place.open()));
}
