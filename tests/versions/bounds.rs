//! How much is kept, what goes first, and that its space comes back.

use std::sync::atomic::{AtomicBool, Ordering};

use jailfs::fs::{Need, Tended};
use jailfs::sandbox::Bounds;
use jailfs::sandbox::Request;
use jailfs::sys::failpoint;

use crate::place::{Place, Work};

/// Bytes that are nowhere else, and no zeros.
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
fn ten_versions_of_a_file_are_kept() {
    let place = Place::new(&[]);
    let work = place.open();
    for n in 0..15 {
        work.put("a", &format!("text {n}"));
    }
    let numbers: Vec<u32> = work.history("a").iter().map(|version| version.number).collect();
    assert_eq!(
        numbers,
        (5..=14).rev().collect::<Vec<u32>>(),
        "the newest, and numbers stay what they are"
    );
    assert_eq!(work.texts("a")[0], "text 4");
    // An undo does not cost the oldest.
    work.undo("a", 10).unwrap();
    assert_eq!(work.get("a"), "text 4");
    drop(work);
    let work = place.open();
    assert_eq!(work.history("a").len(), 11);
    work.redo("a", 10).unwrap();
    assert_eq!((work.get("a").as_str(), work.history("a").len()), ("text 14", 10));
    work.sandbox.fs().set_history(Bounds { versions: 3, ..Bounds::default() });
    work.put("a", "text 15");
    assert_eq!(work.texts("a"), ["text 12", "text 13", "text 14"]);
}

#[test]
fn versions_are_stored_once_also_in_the_middle_of_an_undo() {
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
    assert_eq!(work.sandbox.fs().tend_versions(true, &|| false), Tended::Done);
    // One copy, what differs of it, and the version that the undo put there.
    let bytes = place.pools();
    assert!(bytes < 5 << 18, "{bytes}");
    // It is still known where the undo stands, in both directions, also after a start.
    assert_eq!(work.bytes("a"), edited(7));
    work.undo("a", 3).unwrap();
    assert_eq!(work.bytes("a"), edited(4));
    work.sandbox.fs().tend_versions(true, &|| false);
    drop(work);
    let work = place.open();
    for (steps, n) in [(1, 5), (2, 7), (3, 10)] {
        work.redo("a", steps).unwrap();
        assert_eq!(work.bytes("a"), edited(n));
        work.sandbox.fs().tend_versions(true, &|| false);
    }
    assert_eq!(work.redo("a", 1).unwrap().number, None);
    assert_eq!(work.bytes("a"), edited(11));
    // What the undo put there is compared again when the file is edited.
    work.undo("a", 6).unwrap();
    work.sandbox.fs().tend_versions(true, &|| false);
    work.rest();
    work.write("a", 5, b"an edit");
    work.sandbox.fs().tend_versions(true, &|| false);
    work.sandbox.compact().unwrap();
    let bytes = place.pools();
    assert!(bytes < 5 << 18, "{bytes}");
    let checked = jailfs::sandbox::Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
}

#[test]
fn without_a_history_nothing_is_kept_and_nothing_written() {
    let place = Place::new(&[("a", "one")]);
    let work = place.open();
    work.sandbox.fs().set_history(Bounds { versions: 0, ..Bounds::default() });
    work.put("a", "two");
    work.rm("a");
    assert!(work.history("a").is_empty() && work.undo("a", 1).is_err());
    drop(work);
    // What was switched off stays off for whoever asks without a mount.
    let work = place.open();
    work.put("b", "1");
    work.put("b", "2");
    assert!(work.history("b").is_empty());
    // Bytes are written in place again.
    work.sandbox.fs().set_history(Bounds::default());
    work.put("b", "3");
    assert_eq!(work.texts("b"), ["2"]);
    work.sandbox.fs().set_history(Bounds { versions: 0, ..Bounds::default() });
    assert!(work.history("b").is_empty(), "switching it off gives up what there is");
}

#[test]
fn a_tool_that_rewrites_a_file_for_each_small_change_costs_what_really_changed() {
    let place = Place::new(&[]);
    let work = place.open();
    let mut bytes = noise(1, 1 << 20);
    work.make("a");
    rewrite(&work, "a", &bytes);
    let mut texts = Vec::new();
    for n in 0..40u64 {
        work.rest();
        texts.push(bytes.clone());
        // A change in the middle, one that moves all behind it, and an end that grows.
        let at = 200_000 + (n as usize * 17_000);
        bytes[at..at + 10].copy_from_slice(&noise(n + 100, 10));
        if n % 3 == 0 {
            bytes.splice(at + 5000..at + 5000, noise(n + 200, 7));
        }
        bytes.extend(noise(n + 300, 500));
        rewrite(&work, "a", &bytes);
    }
    work.rest();
    assert_eq!(work.sandbox.fs().tend_versions(false, &|| false), Tended::Done);
    let stored = place.pools();
    assert!(stored < (1 << 20) + (1 << 20) / 2, "{stored} bytes for a file of {}", bytes.len());
    let versions = work.history("a");
    assert_eq!(versions.len(), 10);
    for (version, text) in versions.iter().rev().zip(&texts[30..]) {
        let (state, found) =
            work.sandbox.fs().version(&crate::place::path("a"), version.number).unwrap();
        assert!(state.read_all(&found).unwrap() == *text, "version {}", version.number);
    }
    assert!(work.bytes("a") == bytes);
    // What was stored once is still there when the file goes on, is undone and sealed, and after a start.
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
fn what_a_build_writes_does_not_push_out_the_sources() {
    let place = Place::new(&[]);
    let work = place.open();
    work.sandbox.fs().set_history(Bounds { bytes: 4 << 20, ..Bounds::default() });
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
        work.sandbox.fs().tend_versions(false, &|| false);
    }
    assert_eq!(work.history("src/main.rs").len(), 10, "the sources keep all");
    let left: usize = (0..50).map(|n| work.history(&format!("target/o{n}")).len()).sum();
    assert!(left > 50 && left < 250, "{left} versions of what was built");
    assert!(place.pools() < (4 << 20) + 2_000_000 + 500_000, "{}", place.pools());
}

#[test]
fn the_space_of_versions_that_are_given_up_comes_back() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("a");
    for n in 0..3 {
        rewrite(&work, "a", &noise(n, 2 << 20));
    }
    work.checkpoint("c");
    rewrite(&work, "a", b"small");
    work.sandbox.compact().unwrap();
    assert!(place.pools() > 6 << 20, "versions of before the seal stay");
    work.sandbox.fs().set_history(Bounds { versions: 0, ..Bounds::default() });
    work.gc(0);
    let left = place.pools();
    assert!(left < (2 << 20) + 100_000, "{left}: the checkpoint has one of them");
}

/// Writes a file aside and gives it its name: it leaves 4 MiB behind that are no version, and that nothing else refers to then.
fn download(work: &Work, path: &str) {
    let part = format!("{path}.part");
    work.make(&part);
    work.write(&part, 0, &noise(7, 4 << 20));
    work.mv(&part, path);
    // Of the name that it has now the only version is a small one.
    work.put(path, "small");
    work.put(path, "too");
}

#[test]
fn what_a_renamed_file_left_behind_counts_as_versions_do_and_goes_first() {
    const MOST: u64 = 1 << 20;
    let keep_one = |bytes| Bounds { versions: 1, bytes };
    let place = Place::new(&[]);
    let work = place.open();
    let fs = work.sandbox.fs();
    let tend = || fs.tend_versions(true, &|| false);
    // It is kept for a few seconds.
    fs.set_history(keep_one(64 << 20));
    download(&work, "waits");
    assert_eq!(tend(), Tended::Later);
    assert!(place.pools() > 4 << 20);
    (0..6).for_each(|_| work.rest());
    assert_eq!(tend(), Tended::Done);
    assert!(place.pools() < MOST, "nobody came to its name: {}", place.pools());
    // Less long if it is too much.
    fs.set_history(keep_one(MOST));
    download(&work, "large");
    tend();
    assert!(place.pools() < MOST, "it is beyond the budget: {}", place.pools());
    // And not at all when the disk is full, or when nothing is to be kept.
    fs.set_history(keep_one(64 << 20));
    download(&work, "full");
    while place.pools() > MOST {
        assert!(fs.make_room(Need::More), "the disk is full: {}", place.pools());
    }
    for path in ["waits", "large", "full"] {
        assert_eq!(work.texts(path), ["small"], "no version of '{path}' went");
    }
    download(&work, "off");
    fs.set_history(Bounds { versions: 0, ..Bounds::default() });
    tend();
    assert!(place.pools() < MOST, "nothing is to be kept: {}", place.pools());
}

#[test]
fn what_a_renamed_file_left_behind_is_no_garbage_while_the_file_has_it() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("x.part");
    work.write("x.part", 0, &noise(7, 4 << 20));
    work.mv("x.part", "x");
    (0..6).for_each(|_| work.rest());
    assert_eq!(work.sandbox.fs().tend_versions(false, &|| false), Tended::Done);
    assert!(work.bytes("x") == noise(7, 4 << 20));
}

#[test]
fn an_edit_is_noticed_once_when_it_begins() {
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

/// The layer of a checkpoint whose seal failed lies between the last seal and the tree. What an undo brought back is in that alone.
#[test]
fn what_an_undo_brought_back_stays_also_on_a_full_disk_on_which_a_seal_failed() {
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
        fs.set_history(Bounds { versions: 0, ..Bounds::default() });
        let request = Request::Checkpoint { name: None, message: String::new() };
        let told = failpoint::with(&format!("fail:store.write:{write}+:ENOSPC"), || {
            let told = work.sandbox.handle(request);
            // Whoever meets the full disk asks for room.
            for _ in 0..3 {
                fs.make_room(Need::More);
            }
            told
        });
        assert!(work.bytes("a") == first, "write {write} failed: {told:?}");
        drop(work);
        assert!(place.open().bytes("a") == first, "write {write} failed, the next start: {told:?}");
        if told.is_ok() {
            break;
        }
        failed += 1;
    }
    assert!(failed > 1);
}
