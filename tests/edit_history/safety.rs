//! The edit history is a convenience: whatever happens to it, no edit fails, nothing else is lost,
//! and it never returns wrong bytes.

use std::fs as host;

use jailfs::internals::fs::Tended;
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{Sandbox, StoreOptions};

use crate::place::{Place, Work};

fn worked(place: &Place) -> Work {
    let work = place.open();
    for text in ["one", "two", "three"] {
        work.put("a", text);
    }
    work.mkdir("d");
    work.put("d/b", "b");
    work.rm("d/b");
    work
}

const KNOWN: [&str; 3] = ["zero", "one", "two"];

#[test]
fn an_unreadable_history_is_set_aside_and_a_new_one_begins() {
    let place = Place::new(&[("a", "zero")]);
    let log = place.store.join("history/main");
    drop(worked(&place));
    let whole = host::read(&log).unwrap();
    let mut aside = 0;
    for at in (0..whole.len()).step_by(7) {
        let mut bad = whole.clone();
        bad[at] ^= 1 << (at % 8);
        host::write(&log, &bad).unwrap();
        let _gone = host::remove_file(place.store.join("history/main.bad"));
        let work = place.open();
        let texts = work.texts("a");
        assert!(
            KNOWN.iter().zip(&texts).all(|(known, text)| known == text),
            "byte {at}: {texts:?}"
        );
        work.put("c", "works");
        work.put("c", "on");
        assert_eq!((work.get("a").as_str(), work.texts("c")), ("three", vec!["works".to_owned()]));
        work.rm("c");
        if log.with_extension("bad").exists() || place.store.join("history/main.bad").exists() {
            aside += 1;
            assert!(texts.is_empty());
        }
    }
    assert!(aside > 10, "{aside}");
    // A directory in its place, and no permission to remove it.
    host::remove_file(&log).unwrap();
    host::create_dir(&log).unwrap();
    host::write(log.join("x"), "").unwrap();
    let work = place.open();
    work.put("a", "four");
    assert_eq!(work.get("a"), "four");
}

#[test]
fn a_truncated_history_returns_its_oldest_entries() {
    let place = Place::new(&[("a", "zero")]);
    let log = place.store.join("history/main");
    drop(worked(&place));
    let whole = host::read(&log).unwrap();
    for cut in (0..whole.len()).rev().step_by(5) {
        host::write(&log, &whole[..cut]).unwrap();
        let work = place.open();
        let texts = work.texts("a");
        assert!(
            KNOWN.iter().zip(&texts).all(|(known, text)| known == text),
            "cut at {cut}: {texts:?}"
        );
        assert_eq!(work.get("a"), "three");
    }
}

#[test]
fn a_newer_history_is_set_aside() {
    let place = Place::new(&[("a", "zero")]);
    drop(worked(&place));
    let log = place.store.join("history/main");
    // A whole frame with an unknown record: its tag is 99.
    let payload = [99u8];
    let len = 1u32.to_le_bytes();
    let seq = 0u64.to_le_bytes();
    let crc = crc32c::crc32c(&[&len[..], &seq, &payload].concat()).to_le_bytes();
    host::write(&log, [&len[..], &crc, &seq, &payload].concat()).unwrap();
    let work = place.open();
    assert!(work.history("a").is_empty());
    work.put("a", "four");
    assert_eq!(work.texts("a"), ["three"]);
    drop(work);
    assert_eq!(place.open().texts("a"), ["three"]);
    assert!(place.store.join("history/main.bad").exists());
}

#[test]
fn no_edit_fails_because_its_history_cannot_be_recorded() {
    for errno in ["EIO", "ENOSPC"] {
        let place = Place::new(&[("a", "zero")]);
        let work = worked(&place);
        // An edit writes the history first.
        let rule = format!("fail:store.write:1:{errno}");
        failpoint::with(&rule, || {
            work.truncate("a", 0);
            work.write("a", 0, b"four");
        });
        assert_eq!(work.get("a"), "four");
        assert_eq!(work.texts("a"), ["zero", "one", "two", "three"], "the edit is in memory");
        work.put("a", "five");
        work.rm("a");
        work.undo("a", 2).unwrap();
        assert_eq!(work.get("a"), "four");
        // When it can be written again, it is, completely.
        assert_eq!(work.sandbox.fs().maintain_edits(true, &|| false), Tended::Done);
        let texts = work.texts("a");
        drop(work);
        let work = place.open();
        assert_eq!((work.texts("a"), work.get("a").as_str()), (texts, "four"), "{errno}");
    }
}

#[test]
fn content_of_an_entry_is_not_freed_before_its_removal_is_on_disk() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("a");
    for n in 0..3u8 {
        work.truncate("a", 0);
        work.write("a", 0, &vec![b'a' + n; 1 << 20]);
    }
    // The log can be neither written nor removed from here on: entries are dropped in memory only.
    failpoint::with(
        "fail:store.write:1+:EIO,fail:store.remove:1+:EIO,fail:store.open:1+:EIO",
        || {
            work.sandbox.fs().set_edit_bounds(jailfs::sandbox::Bounds { edits: 0, bytes: 0 });
            work.sandbox.fs().maintain_edits(true, &|| false);
        },
    );
    drop(work);
    let work = place.open();
    let texts = work.texts("a");
    assert_eq!(texts.len(), 2);
    assert!(texts.iter().zip(["a", "b"]).all(|(text, byte)| *text == byte.repeat(1 << 20)));
}

#[test]
fn bytes_of_an_entry_that_may_be_on_disk_are_not_overwritten_after_a_remount() {
    let place = Place::new(&[]);
    let log = place.store.join("history/main");
    let work = place.open();
    let text = "a".repeat(3 * 4096);
    work.put("a", &text);
    work.rest();
    work.write("a", 0, b"x");
    work.sandbox.fs().sync().unwrap();
    assert_eq!(work.texts("a"), [text.as_str()]);
    let before = host::read(&log).unwrap();
    // The entry is dropped, and shares bytes with the file.
    work.sandbox.fs().set_edit_bounds(jailfs::sandbox::Bounds { edits: 0, bytes: 0 });
    drop(work);
    // The next mount cannot sync the log, so a power cut could lose its end.
    let open = |n: u32| {
        // A full disk loses nothing, and the next mount tries the same again.
        let rule = format!("fail:store.sync:{n}:ENOSPC");
        failpoint::with(&rule, || {
            Sandbox::create_or_open(&place.base, &place.store, &StoreOptions::default())
        })
    };
    // Without any other sync the store does not open.
    let work = place.around((1..10).find_map(|n| open(n).ok()).unwrap());
    work.write("a", 5000, b"y");
    work.sandbox.fs().sync().unwrap();
    assert_eq!(work.bytes("a")[5000], b'y');
    drop(work);
    host::write(&log, before).unwrap();
    assert_eq!(place.open().texts("a"), [text]);
}

#[test]
fn the_log_is_rewritten_only_when_much_of_it_is_obsolete() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new(&[]);
    let work = place.open();
    let log = place.store.join("history/main");
    work.make("f0");
    // Many extents, so that an entry is long.
    for n in 0..3900 {
        work.write("f0", n * 8192, b"x");
    }
    for _ in 0..10 {
        work.rest();
        work.write("f0", 0, b"y");
    }
    for n in 1..20 {
        work.mv(&format!("f{}", n - 1), &format!("f{n}"));
    }
    // A log that could not be written is rewritten, with all entries of all names.
    work.rest();
    failpoint::with("fail:store.write:1:EIO", || work.write("f19", 0, b"z"));
    let tend = || {
        work.sandbox.fs().maintain_edits(false, &|| false);
        host::metadata(&log).unwrap().ino()
    };
    let whole = tend();
    assert!(
        host::metadata(&log).unwrap().len() > 5 << 20,
        "{}",
        host::metadata(&log).unwrap().len()
    );
    for _ in 0..3 {
        work.rest();
        work.write("f19", 0, b"z");
        assert_eq!(tend(), whole, "all of the content is in use");
    }
}

#[test]
fn a_full_disk_drops_history_before_an_operation_fails() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("a");
    for n in 0..6u8 {
        work.truncate("a", 0);
        work.write("a", 0, &vec![b'a' + n; 1 << 20]);
    }
    assert_eq!(work.history("a").len(), 5);
    let before = place.pools();
    // The write fails once because the disk is full.
    let made = work.id("a");
    failpoint::with("fail:store.write:1:ENOSPC", || {
        work.sandbox.fs().write(made, 1 << 20, b"more", false).unwrap();
    });
    let left = work.history("a").len();
    assert!(left < 5, "{left} edits are left");
    assert!(place.pools() < before - (1 << 20), "{} of {before}", place.pools());
    assert_eq!(work.bytes("a").len(), (1 << 20) + 4);
    for text in work.texts("a") {
        assert!(text.bytes().all(|byte| byte == text.as_bytes()[0]) && text.len() == 1 << 20);
    }
}

#[test]
fn a_copy_on_a_full_disk_does_not_deadlock() {
    let place = Place::new(&[("from", &"x".repeat(3 << 20))]);
    let work = place.open();
    work.make("a");
    for n in 0..4u8 {
        work.truncate("a", 0);
        work.write("a", 0, &vec![b'a' + n; 1 << 20]);
    }
    let (from, to) = (work.id("from"), work.make("to"));
    let copied = failpoint::with("fail:store.write:1:ENOSPC", || {
        work.sandbox.fs().copy_range(from, 0, to, 0, 3 << 20, false)
    });
    assert_eq!(copied, Ok(3 << 20));
    assert!(work.bytes("to").iter().all(|byte| *byte == b'x'));
}

#[test]
fn an_error_that_no_space_can_prevent_costs_no_history() {
    let place = Place::new(&[]);
    let work = worked(&place);
    let texts = work.texts("a");
    // More attribute names than a list of them can hold.
    let (fs, file) = (work.sandbox.fs(), work.id("a"));
    let how =
        jailfs::internals::fs::SetXattr { create: false, replace: false, takes_setgid: false };
    let refused = (0..300)
        .find_map(|n| fs.setxattr(file, format!("user.{n:0240}").as_bytes(), b"v", how).err());
    assert_eq!(refused, Some(jailfs::error::FsError::LimitReached));
    // And a full disk while a reader looks at states, as an undo does: it is then unknown what else
    // can be freed.
    let looking = fs.read_guard();
    let full = failpoint::with("fail:store.write:1:ENOSPC", || fs.write(file, 0, b"more", false));
    drop(looking);
    assert!(full.is_err(), "no room could be made now");
    assert_eq!(work.texts("a"), texts);
    failpoint::with("fail:store.write:2:ENOSPC", || work.undo("a", 1)).unwrap();
    assert_eq!(work.get("a"), "two");
    assert!(work.texts("a").contains(&"three".to_owned()), "{:?}", work.texts("a"));
}

/// Every step of an edit, an undo, a compaction and a mount; each run ends at one step.
#[test]
fn a_history_interrupted_at_any_step_returns_no_wrong_bytes() {
    let place = Place::new(&[("a", "zero")]);
    drop(worked(&place));
    let copy = place.store.with_extension("copy");
    let mut finished = false;
    for n in 1..400 {
        if copy.exists() {
            host::remove_dir_all(&copy).unwrap();
        }
        let done = std::process::Command::new("cp")
            .arg("-a")
            .arg(&place.store)
            .arg(&copy)
            .status()
            .unwrap();
        assert!(done.success());
        // From this step on nothing reaches the disk, as if the process had ended there.
        let rule = format!("fail:any:{n}+:EIO");
        finished = failpoint::with(&rule, || {
            let Ok(sandbox) = Sandbox::create_or_open(&place.base, &copy, &StoreOptions::default())
            else {
                return false;
            };
            let work = place.around(sandbox);
            let root = jailfs::types::NodeId::ROOT;
            let Ok(entry) = work.sandbox.fs().lookup(root, &crate::place::name("a")) else {
                return false;
            };
            let edited = work.sandbox.fs().truncate(entry.id, 0, false).is_ok()
                && work.sandbox.fs().write(entry.id, 0, b"four", false).is_ok()
                && work.undo("a", 2).is_ok()
                && work.undo("d/b", 1).is_ok();
            work.sandbox.fs().maintain_edits(true, &|| false);
            edited && work.sandbox.compact().is_ok() && work.sandbox.fs().sync().is_ok()
        });
        let work = place.around(
            Sandbox::create_or_open(&place.base, &copy, &StoreOptions::default())
                .unwrap_or_else(|error| panic!("step {n}: {error}")),
        );
        let possible = ["zero", "one", "two", "three", "four", ""];
        for text in work.texts("a") {
            assert!(possible.contains(&text.as_str()), "step {n}: {text:?}");
        }
        // Nothing was synced before. If a sync failed, only the base is certain.
        assert!(
            ["zero", "three", "four", "two", ""].contains(&work.get("a").as_str()),
            "step {n}: {}",
            work.get("a")
        );
        if work.exists("d") && work.exists("d/b") {
            assert_eq!(work.get("d/b"), "b");
        }
        work.put("a", "goes on");
        assert_eq!(work.get("a"), "goes on");
        drop(work);
        let checked = Sandbox::check_store(&copy, true).unwrap();
        assert!(checked.problems.is_empty(), "step {n}: {:#?}", checked.problems);
        if finished {
            break;
        }
    }
    assert!(finished, "the operation never ends");
}
