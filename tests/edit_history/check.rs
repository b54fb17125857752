//! `check` also checks the edit history. Its faults are warnings.

use std::fs as host;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;

use jailfs::internals::store::content::checksums::ChecksumsRecord;
use jailfs::internals::store::edits_log::{Content, EditsLogRecord};
use jailfs::internals::store::io::log;
use jailfs::internals::store::io::log::Log;
use jailfs::internals::tree::Source;
use jailfs::sandbox::Checked;
use jailfs::sandbox::Sandbox;
use jailfs::types::{Epoch, LayerId};

use crate::place::Place;

/// Some entries, among them those of a removed file and of a base file.
fn worked() -> Place {
    let place = Place::new(&[("a", "zero"), ("b", "base")]);
    let work = place.open();
    for text in ["one", "two", "three"] {
        work.put("a", text);
    }
    work.mkdir("d");
    work.put("d/c", &"gone".repeat(3000));
    work.rm("d/c");
    work.put("b", "new");
    place
}

fn check(place: &Place, read_data: bool) -> Checked {
    let checked = Sandbox::check_store(&place.store, read_data).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new(), "the store itself is sound");
    checked
}

#[test]
fn a_sound_history_gives_no_warning() {
    let place = worked();
    let checked = check(&place, true);
    assert_eq!((checked.warnings, checked.edits), (Vec::new(), 5));
    // A record that a kill cut off is no damage; nor are the effects of gc, an apply and a
    // rewritten log.
    let log = place.store.join("history/main");
    let whole = host::read(&log).unwrap();
    host::write(&log, &whole[..whole.len() - 3]).unwrap();
    assert_eq!(check(&place, true).warnings, Vec::<String>::new());
    host::write(&log, whole).unwrap();
    let work = place.open();
    work.checkpoint("x");
    work.apply();
    work.rest();
    work.put("a", "four");
    work.gc(0);
    work.sandbox.compact().unwrap();
    drop(work);
    let checked = check(&place, true);
    assert_eq!(checked.warnings, Vec::<String>::new());
    assert!(checked.edits >= 5);
    // Nor is a log that was never started.
    host::remove_dir_all(place.store.join("history")).unwrap();
    assert_eq!((check(&place, true).warnings.len(), check(&place, true).edits), (0, 0));
}

#[test]
fn check_names_file_and_offset_of_a_fault_in_the_history_and_the_store_is_sound() {
    let place = worked();
    let log = place.store.join("history/main");
    let whole = host::read(&log).unwrap();
    let ends: Vec<u64> = log::read::<EditsLogRecord>(&whole, "t")
        .unwrap()
        .records
        .iter()
        .map(|(_, end)| *end)
        .collect();
    // A flipped bit in every frame but the last.
    for (number, end) in ends[..ends.len() - 1].iter().enumerate() {
        let begin = if number == 0 { 0 } else { ends[number - 1] };
        let mut bad = whole.clone();
        bad[*end as usize - 1] ^= 4;
        host::write(&log, bad).unwrap();
        let warnings = check(&place, false).warnings;
        assert_eq!(warnings.len(), 1);
        let wanted =
            format!("history/main at offset {begin}: bad frame with good frames behind it");
        assert!(warnings[0].contains(&wanted), "{wanted}: {warnings:?}");
    }
    // A whole frame with an unknown record.
    let payload = [99u8];
    let (len, seq) = (1u32.to_le_bytes(), (ends.len() as u64).to_le_bytes());
    let crc = crc32c::crc32c(&[&len[..], &seq, &payload].concat()).to_le_bytes();
    host::write(&log, [&whole[..], &len, &crc, &seq, &payload].concat()).unwrap();
    let warnings = check(&place, false).warnings;
    let wanted = format!("history/main at offset {}: not a record of this format", whole.len());
    assert!(warnings.len() == 1 && warnings[0].contains(&wanted), "{warnings:?}");
    // Not a file at all.
    host::remove_file(&log).unwrap();
    host::create_dir(&log).unwrap();
    let warnings = check(&place, false).warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("history/main"), "{warnings:?}");
    // And each of them opens.
    host::remove_dir(&log).unwrap();
    host::write(&log, &whole[5..]).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_jailfs"))
        .args(["check", "--store"])
        .arg(&place.store)
        .output();
    let output = output.unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "a warning is no damage: {said}");
    assert!(
        said.starts_with("warning: read ") && said.contains("history/main at offset 0"),
        "{said}"
    );
    let json = Command::new(env!("CARGO_BIN_EXE_jailfs"))
        .args(["check", "--json", "--store"])
        .arg(&place.store)
        .output()
        .unwrap();
    let lines: Vec<serde_json::Value> = String::from_utf8(json.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!((&lines[0]["type"], &lines[1]["type"]), (&"warning".into(), &"checked".into()));
    assert_eq!((&lines[1]["warnings"], &lines[1]["problems"]), (&1.into(), &0.into()));
    let work = place.open();
    assert_eq!(work.get("a"), "three");
    assert!(work.history("a").is_empty());
}

/// Rewrites the log with every entry changed.
fn rewritten(place: &Place, change: impl Fn(&mut Content)) -> Vec<u64> {
    let path = place.store.join("history/main");
    let bytes = host::read(&path).unwrap();
    let records = log::read::<EditsLogRecord>(&bytes, "t").unwrap().records;
    host::remove_file(&path).unwrap();
    let file = host::File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    let mut log = Log::append_to(Arc::new(file), "t".to_owned(), 0, 0).unwrap();
    let mut starts = Vec::new();
    for (mut record, _) in records {
        starts.push(log.len());
        if let EditsLogRecord::Kept(kept) = &mut record {
            for content in kept.iter_mut().filter_map(|(_, edit)| edit.content.as_mut()) {
                change(Arc::make_mut(content));
            }
        }
        log.append(&record).unwrap();
    }
    starts
}

#[test]
fn check_names_the_entry_whose_content_does_not_exist() {
    type Change = fn(&mut Content);
    let changes: &[(Change, &str)] = &[
        (
            |content| content.extents.iter_mut().for_each(|(_, source)| far(source)),
            "of the pool of layer 1, which do not exist",
        ),
        (
            |content| content.extents.iter_mut().for_each(|(_, source)| gone(source)),
            "of the pool of layer 77, which do not exist",
        ),
        (|content| content.epoch = Epoch(3), "refers to base epoch 3, which does not exist"),
        (|content| content.extents = content.extents.repeat(2), "that are not in order"),
    ];
    for (change, wanted) in changes {
        let place = worked();
        let starts = rewritten(&place, change);
        let warnings = check(&place, true).warnings;
        assert!(
            !warnings.is_empty() && warnings.iter().all(|warning| warning.contains(wanted)),
            "{wanted}: {warnings:?}"
        );
        let of_c = warnings.iter().find(|warning| warning.contains("version 1 of 'd/c'")).unwrap();
        let named = starts
            .iter()
            .filter(|start| of_c.contains(&format!("history/main at offset {start}:")))
            .count();
        assert_eq!(named, 1, "{of_c}");
        // A mount reads no wrong bytes.
        let work = place.open();
        assert_eq!(work.get("a"), "three");
    }
}

fn far(source: &mut Source) {
    if let Source::Pool { offset, .. } = source {
        *offset += 999_999_990_000;
    }
}

fn gone(source: &mut Source) {
    if let Source::Pool { layer, .. } = source {
        *layer = LayerId(77);
    }
}

#[test]
fn check_reads_content_that_only_the_history_needs() {
    let place = worked();
    let work = place.open();
    work.checkpoint("x");
    // The layer gets checksums, and cannot be archived.
    let blocked = place.store.join("archive/root.new");
    host::create_dir_all(&blocked).unwrap();
    work.sandbox.compact().unwrap_err();
    host::remove_dir(&blocked).unwrap();
    let content = work.edit("d/c", 1);
    drop(work);
    assert!(check(&place, true).warnings.is_empty());
    let pool = place.store.join("layers/00000001/pool");
    let bytes = host::read(&pool).unwrap();
    let at = bytes.windows(content.len()).position(|window| window == content.as_bytes()).unwrap();
    host::File::options()
        .write(true)
        .open(&pool)
        .unwrap()
        .write_all_at(b"X", at as u64 + 5000)
        .unwrap();
    assert!(check(&place, false).warnings.is_empty());
    let warnings = check(&place, true).warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let block = (at + 5000) / 4096 * 4096;
    let wanted = format!("layers/00000001/pool at offset {block}: content fails its checksum");
    assert!(
        warnings[0].contains(&wanted) && warnings[0].contains("history/main at offset "),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("version 1 of 'd/c'"), "{warnings:?}");
}

#[test]
fn content_without_a_checksum_is_not_counted_as_read() {
    let place = worked();
    let work = place.open();
    work.put("big", &"0123456789abcdef".repeat(2560));
    work.checkpoint("x");
    drop(work);
    let before = check(&place, true);
    assert!(before.bytes_read == 0 && before.bytes_without_sum >= 40_960);
    // Of the first block only.
    let layer = place.store.join("layers/00000001");
    let block = host::read(layer.join("pool")).unwrap()[..4096].to_vec();
    let path = layer.join("sums");
    let file = host::File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    let mut log = Log::append_to(Arc::new(file), "t".to_owned(), 0, 0).unwrap();
    log.append(&ChecksumsRecord::Blocks { first: 0, sums: vec![crc32c::crc32c(&block)] }).unwrap();
    log.append(&ChecksumsRecord::End).unwrap();
    let after = check(&place, true);
    assert!(after.bytes_read <= 4096, "{} bytes", after.bytes_read);
    assert_eq!(after.bytes_read + after.bytes_without_sum, before.bytes_without_sum);
}
