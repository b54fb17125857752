//! Tests of layers on disk: writing, syncing, sealing, and reading after a crash.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::errno::Errno;
use parking_lot::Mutex;

use crate::error::{Kind, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::io::writer::{FailedSyncs, Writer};
use crate::store::layer::files::Layers;
use crate::store::layer::journal::{LayerContents, Trust, read, read_bytes};
use crate::store::layer::redo::UnsyncedBytes;
use crate::store::layer::upper::{SyncWork, Upper};
use crate::store::layer::{JOURNAL, LayerInfo, POOL};
use crate::store::record::{Header, LayerKind, Record, Seal};
use crate::sys::{clock, failpoint};
use crate::tree::{Edit, Source};
use crate::types::{ByteRange, Epoch, Ino, LayerId, Timestamp};

/// Writers under two boots.
const ONE: Writer = Writer::new([1; 16], 1);
const TWO: Writer = Writer::new([2; 16], 1);

fn trust(writer: Writer, torn_from: LayerId) -> Trust {
    let tops = [torn_from].into();
    Trust { writer, failed: Mutex::default(), torn_from, tops, sealed: BTreeSet::new() }
}

fn notes(layers: &Layers) -> FailedSyncs {
    FailedSyncs::of(&layers.dir, ONE).unwrap()
}

fn map() -> Record {
    let to = Some(Source::Pool { layer: LayerId(1), offset: 0 });
    Record::Edits(vec![Edit::Map { ino: Ino(9), range: ByteRange::at(0, 1), to }])
}

fn resize() -> Record {
    Record::Edits(vec![Edit::Resize { ino: Ino(9), size: 0 }])
}

fn xattr(value: Vec<u8>) -> Record {
    let name = b"user.a".to_vec();
    Record::Edits(vec![Edit::Xattr { ino: Ino(9), name, value: Some(value) }])
}

/// Appends the mark for a synced pool.
fn mark_synced(upper: &mut Upper, work: &mut SyncWork) -> Result<()> {
    let mut frame = upper.begin_mark(work)?;
    frame.write();
    upper.end_mark(work, frame)?;
    write_ahead(upper);
    Ok(())
}

/// Appends a mark with the unsynced bytes of the pool. Returns whether that could be done.
fn append_redo(upper: &mut Upper, work: &mut SyncWork) -> bool {
    let redo = upper.begin_redo(work).and_then(UnsyncedBytes::read);
    let Some(mut frame) = redo.and_then(|redo| upper.begin_redo_mark(&redo)) else { return false };
    frame.write();
    let is_done = upper.end_redo(work, frame);
    write_ahead(upper);
    is_done
}

fn write_ahead(upper: &mut Upper) {
    if let Some(mut zeros) = upper.begin_write_ahead() {
        zeros.write();
        upper.end_write_ahead(zeros);
    }
}

fn seal(message: String) -> Seal {
    Seal { name: None, message, time: clock::now(), automatic: false }
}

fn layers(store: &Path) -> Layers {
    let store = StoreDir::open(store).unwrap();
    store.make_dir("layers").unwrap();
    Layers::open(&store, false, &mut |_| ()).unwrap()
}

/// A layer that is written under the first boot.
fn begin(layers: &Layers) -> Upper {
    begin_layer(layers, LayerId(1))
}

fn begin_layer(layers: &Layers, layer: LayerId) -> Upper {
    begin_above(layers, layer, None)
}

fn begin_above(layers: &Layers, layer: LayerId, parent: Option<LayerId>) -> Upper {
    let header = Header {
        layer,
        parent,
        head: "main".into(),
        epoch: Epoch(0),
        kind: LayerKind::Continues,
        time: Timestamp::default(),
    };
    Upper::create(&layers.dir, header, &notes(layers), true).unwrap()
}

fn records(contents: &LayerContents) -> Vec<Record> {
    contents.records().collect::<Result<_>>().unwrap()
}

/// Overwrites 8 bytes of the journal of a layer with zeros, as a lost page would.
fn tear_journal(layers: &Layers, layer: LayerId, at: u64) {
    let journal = layers.dir_of(layer).unwrap().file(JOURNAL, false).unwrap();
    journal.write_all_at(&[0; 8], at).unwrap();
}

/// A restore that a power cut interrupts leaves a layer below the head that was never sealed.
#[test]
fn below_the_head_a_power_cut_can_tear_only_a_layer_that_was_never_sealed() {
    for is_sealed in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        upper.record(&resize()).unwrap();
        let torn_at = upper.journal_len();
        upper.record(&resize()).unwrap();
        upper.record(&resize()).unwrap();
        if is_sealed {
            upper.seal(seal(String::new()), &|| false).unwrap();
        }
        tear_journal(&layers, LayerId(1), torn_at);
        let found = read(&layers, LayerId(1), &trust(TWO, LayerId(2)));
        match is_sealed {
            true => assert_eq!(found.err().map(|e| e.kind), Some(Kind::Damage)),
            false => {
                assert_eq!(records(&found.unwrap()), [Record::Opened { writer: ONE }, resize()])
            }
        }
    }
}

/// An old fork that is still written to does not make newer layers of other heads less certain: a
/// layer was synced to its end if a head was published above it. Layer 1 is on top of the old fork.
#[test]
fn a_power_cut_tears_no_layer_below_any_head_however_old_another_head_is() {
    let (fork, torn, above, top) = (LayerId(1), LayerId(2), LayerId(3), LayerId(4));
    // The parent of the layer above, the tops of heads, the layers that heads name as sealed, and
    // whether the torn layer is damaged.
    let below = Some(torn);
    type Case<'a> = (Option<LayerId>, &'a [LayerId], &'a [LayerId], bool);
    let cases: [Case<'_>; 8] = [
        (below, &[fork], &[], false),
        (below, &[fork, torn], &[], false),
        (below, &[fork, above], &[], true),
        (below, &[fork, top], &[], true),
        (below, &[fork], &[torn], true),
        (below, &[fork], &[above], true),
        // Another ancestry.
        (None, &[fork, above], &[], false),
        (None, &[fork, top], &[above], false),
    ];
    for (parent, tops, sealed, is_damaged) in cases {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        begin_layer(&layers, fork);
        let mut upper = begin_layer(&layers, torn);
        upper.record(&resize()).unwrap();
        let torn_at = upper.journal_len();
        upper.record(&resize()).unwrap();
        upper.record(&resize()).unwrap();
        upper.seal(seal(String::new()), &|| false).unwrap();
        begin_above(&layers, above, parent);
        begin_above(&layers, top, Some(above));
        tear_journal(&layers, torn, torn_at);
        let (tops, sealed) = (tops.iter().copied().collect(), sealed.iter().copied().collect());
        let found = read(&layers, torn, &Trust { tops, sealed, ..trust(TWO, fork) });
        let case = format!("above {parent:?}, damaged: {is_damaged}");
        match is_damaged {
            true => assert_eq!(found.err().map(|e| e.kind), Some(Kind::Damage), "{case}"),
            false => {
                let kept = [Record::Opened { writer: ONE }, resize()];
                assert_eq!(records(&found.unwrap()), kept, "{case}");
            }
        }
    }
}

#[test]
fn a_sync_of_one_layer_proves_nothing_about_another() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let (mut before, mut after) = (begin(&layers), begin_layer(&layers, LayerId(2)));
    for _ in 0..5 {
        before.record(&map()).unwrap();
    }
    let mut work = before.begin_sync().unwrap();
    after.record(&map()).unwrap();
    assert!(mark_synced(&mut after, &mut work).is_err());
    after.journal_synced(&work);
    assert!(after.begin_sync().is_some(), "it has a record that is not synced");
}

/// The mark of the sync stands behind a record that refers to pool bytes. The first power cut takes
/// that record, and the mark with it.
#[test]
fn synced_records_survive_a_second_power_cut() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.record(&map()).unwrap();
    let mut work = upper.begin_sync().unwrap();
    upper.record(&map()).unwrap();
    mark_synced(&mut upper, &mut work).unwrap();
    upper.journal_synced(&work);
    upper.record(&map()).unwrap();
    drop(upper);
    for boot in 2..5 {
        let contents =
            read(&layers, LayerId(1), &trust(Writer::new([boot; 16], 1), LayerId(0))).unwrap();
        let kept = records(&contents).into_iter().filter(|record| *record == map()).count();
        assert!(kept >= 1, "boot {boot}: the synced record is lost");
        Upper::reopen(&layers.dir, &contents, &notes(&layers), true).unwrap();
    }
}

#[test]
fn a_journal_records_that_its_sync_failed() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.record(&resize()).unwrap();
    // The first sync is of the pool, the second of the journal.
    let synced = failpoint::with("fail:store.sync:2:EIO", || upper.sync());
    assert!(synced.is_err() && upper.is_failed() && upper.check().is_err());
    let found = read(&layers, LayerId(1), &trust(ONE, LayerId(0))).unwrap();
    let valid = records(&found);
    assert_eq!(valid, [Record::Opened { writer: ONE }], "unsynced records are invalid");
}

#[test]
fn a_note_outside_the_store_replaces_a_failed_sync_that_the_journal_cannot_record() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.record(&resize()).unwrap();
    upper.sync().unwrap();
    upper.record(&resize()).unwrap();
    // The disk takes the mark of the sync, and nothing more.
    let failing = "fail:store.sync:1+:EIO,fail:store.write:1+:EIO";
    assert!(failpoint::with(failing, || upper.sync()).is_err());
    let count_with = |failed| {
        let trust = Trust { failed: Mutex::new(failed), ..trust(ONE, LayerId(0)) };
        records(&read(&layers, LayerId(1), &trust).unwrap()).len()
    };
    assert_eq!(count_with(BTreeMap::new()), 4, "the journal alone looks whole");
    assert_eq!(
        count_with(notes(&layers).read()),
        3,
        "opened, the first change, the mark behind it"
    );
    notes(&layers).forget_all();
}

/// A program writes a frame with the record `SyncFailed` into an attribute, and a power cut tears
/// the record that holds it.
#[test]
fn bytes_that_a_program_wrote_never_read_as_records() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    let forged = log::frame(&Record::SyncFailed(1), 3).unwrap();
    let refused =
        upper.record(&xattr([b"before".to_vec(), forged.clone(), b"behind".to_vec()].concat()));
    assert_eq!(refused.err().and_then(|error| error.errno), Some(Errno::EINVAL as i32));
    upper.record(&xattr(forged.split_last().unwrap().1.to_vec())).unwrap();
    upper.record(&xattr(vec![0; 1000])).unwrap();
    // A reader ignores a frame with a number that the journal cannot have reached.
    upper.record(&xattr(log::frame(&Record::SyncFailed(1), 1 << 40).unwrap())).unwrap();
    let torn_at = upper.journal_len();
    upper.record(&xattr(log::frame(&Record::SyncFailed(1), 1 << 40).unwrap())).unwrap();
    tear_journal(&layers, LayerId(1), torn_at);
    let found = read(&layers, LayerId(1), &trust(TWO, LayerId(0))).unwrap();
    assert!(found.unsynced.is_empty());
}

/// The user chooses the name and the message of a checkpoint. A power cut tears the seal, which is
/// the last record.
#[test]
fn a_checkpoint_message_never_reads_as_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.record(&resize()).unwrap();
    // A message is UTF-8, so the checksum of the forged frame has to be UTF-8 as well.
    let forged = (1..1000).find_map(|n| {
        let frame = log::frame(&Record::SyncFailed(1), n).unwrap();
        String::from_utf8([b"before".to_vec(), frame, b"behind".to_vec()].concat()).ok()
    });
    let refused = upper.seal(seal(forged.unwrap()), &|| false);
    assert_eq!(refused.err().and_then(|error| error.errno), Some(Errno::EINVAL as i32));
    upper.seal(seal("another message".to_owned()), &|| false).unwrap();
    let info: LayerInfo = read(&layers, LayerId(1), &trust(TWO, LayerId(0))).unwrap().info;
    assert!(info.seal.is_some());
}

#[test]
fn records_of_an_earlier_process_are_synced_before_the_next_process_writes() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.record(&resize()).unwrap();
    let length = upper.journal_len();
    drop(upper);
    let trust = trust(ONE, LayerId(1));
    let contents = || read(&layers, LayerId(1), &trust).unwrap();
    let reopen = || Upper::reopen(&layers.dir, &contents(), &notes(&layers), true);
    assert!(failpoint::with("fail:store.sync:1:ENOSPC", reopen).is_err());
    let size = layers.dir_of(LayerId(1)).unwrap().size(JOURNAL).unwrap();
    assert_eq!(size, Some(length), "nothing is lost, and nothing was written");
    // After EIO the kernel reports success to the next sync, although it dropped the pages.
    assert!(failpoint::with("fail:store.sync:1:EIO", reopen).is_err());
    let opened = || Record::Opened { writer: ONE };
    assert_eq!(records(&contents()), [opened()], "unsynced records are invalid");
    drop(reopen().unwrap());
    assert_eq!(records(&contents()), [opened(), opened()]);
}

#[test]
fn a_synced_record_is_valid_even_if_others_were_appended_during_the_sync() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.record(&map()).unwrap();
    let mut work = upper.begin_sync().unwrap();
    upper.record(&map()).unwrap();
    mark_synced(&mut upper, &mut work).unwrap();
    upper.journal_synced(&work);
    let after_cut = records(&read(&layers, LayerId(1), &trust(TWO, LayerId(0))).unwrap());
    assert_eq!(
        after_cut,
        [Record::Opened { writer: ONE }, map()],
        "the synced record, and not the next"
    );
    upper.record(&map()).unwrap();
    let mut rest = upper.begin_sync().unwrap();
    mark_synced(&mut upper, &mut rest).unwrap();
    upper.journal_synced(&rest);
    assert!(upper.begin_sync().is_none(), "a sync right after a sync has nothing to do");
}

/// One block can hold recorded bytes and those of such a write. A sealed block must not change.
#[test]
fn no_write_to_fresh_addresses_changes_a_sealed_pool() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.sync().unwrap();
    let [before, after] =
        [0, 3].map(|at| upper.pool.allocate_fresh(Ino(9), ByteRange::at(at, 3), true));
    before.write(&[b"new"]).unwrap();
    let time = Timestamp::default();
    let seal = Seal { name: None, message: String::new(), time, automatic: true };
    upper.seal(seal, &|| false).unwrap();
    assert!(after.write(&[b"late"]).is_err());
    assert_eq!(pool(&layers), b"new");
}

/// Overwrites bytes of the pool and syncs the layer with the journal alone.
fn redo(upper: &mut Upper, at: u64, bytes: &[u8]) {
    upper.pool.write(at, bytes).unwrap();
    upper.record(&map()).unwrap();
    let mut work = upper.begin_sync().unwrap();
    assert!(append_redo(upper, &mut work));
    work.sync_journal().unwrap();
    upper.journal_synced(&work);
    assert!(upper.begin_sync().is_none(), "everything is synced");
}

/// The whole pool of layer 1.
fn pool(layers: &Layers) -> Vec<u8> {
    layers.dir_of(LayerId(1)).unwrap().read(POOL).unwrap().unwrap()
}

fn set_pool(layers: &Layers, bytes: &[u8]) {
    let pool = layers.dir_of(LayerId(1)).unwrap().file(POOL, false).unwrap();
    pool.set_len(0).unwrap();
    pool.write_all_at(bytes, 0).unwrap();
}

fn maps(contents: &LayerContents) -> usize {
    records(contents).into_iter().filter(|record| *record == map()).count()
}

/// Power cuts come again and again, also between the restored pool and the record that says so.
#[test]
fn pool_bytes_of_which_only_the_journal_was_synced_survive_power_cuts() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    redo(&mut upper, 0, b"the first bytes");
    redo(&mut upper, 4, b"second");
    redo(&mut upper, 50, b"far away");
    upper.pool.write(0, b"unsynced").unwrap();
    upper.record(&map()).unwrap();
    drop(upper);
    let mut expected = vec![0; 58];
    expected[..15].copy_from_slice(b"the secondbytes");
    expected[50..].copy_from_slice(b"far away");
    for (boot, lost) in (2..).zip([&b""[..], b"unsynced", b"unsyncedbytes"]) {
        set_pool(&layers, lost);
        let trust = trust(Writer::new([boot; 16], 1), LayerId(1));
        let found = read(&layers, LayerId(1), &trust).unwrap();
        assert!(found.has_redo() && found.redo_end().unwrap() == 58);
        let file = layers.dir_of(LayerId(1)).unwrap().file(POOL, false).unwrap();
        found.redo(&file, POOL, true).unwrap();
        assert_eq!(pool(&layers), expected, "boot {boot}");
    }
    set_pool(&layers, b"");
    let cut = read(&layers, LayerId(1), &trust(TWO, LayerId(1))).unwrap();
    assert_eq!(maps(&cut), 3);
    let mut upper = Upper::reopen(&layers.dir, &cut, &notes(&layers), true).unwrap();
    assert_eq!(pool(&layers), expected);
    // The pool is synced now, so its bytes count and not those of the records.
    upper.pool.write(0, b"THE").unwrap();
    drop(upper);
    let three = Writer::new([3; 16], 1);
    let again = read(&layers, LayerId(1), &trust(three, LayerId(1))).unwrap();
    assert!(!again.has_redo() && maps(&again) == 3);
}

#[test]
fn a_sync_of_the_pool_makes_earlier_copies_in_the_journal_obsolete() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    redo(&mut upper, 0, b"older");
    upper.pool.write(0, b"newer").unwrap();
    upper.record(&map()).unwrap();
    let mut work = upper.begin_sync().unwrap();
    work.sync_pool().unwrap();
    mark_synced(&mut upper, &mut work).unwrap();
    work.sync_journal().unwrap();
    upper.journal_synced(&work);
    let cut = || read(&layers, LayerId(1), &trust(TWO, LayerId(1))).unwrap();
    assert!(!cut().has_redo());
    redo(&mut upper, 100, b"other");
    cut().redo(upper.pool.file(), POOL, true).unwrap();
    assert_eq!(pool(&layers)[..5], *b"newer");
    upper.pool.write(0, b"third").unwrap();
    upper.sync().unwrap();
    assert!(!cut().has_redo());
}

/// It would become valid with the next mark, and give older bytes to what was written since.
#[test]
fn a_copy_in_the_journal_that_was_not_synced_is_cut_off() {
    for is_torn in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let layers = layers(dir.path());
        let mut upper = begin(&layers);
        redo(&mut upper, 0, b"synced");
        let torn_at = upper.journal_len();
        upper.pool.write(0, b"failed").unwrap();
        upper.record(&map()).unwrap();
        let mut work = upper.begin_sync().unwrap();
        assert!(append_redo(&mut upper, &mut work));
        let writer = if is_torn {
            tear_journal(&layers, LayerId(1), torn_at);
            TWO
        } else {
            upper.sync_failed();
            ONE
        };
        drop(upper);
        let found = read(&layers, LayerId(1), &trust(writer, LayerId(1))).unwrap();
        assert_eq!(maps(&found), 1, "torn: {is_torn}");
        drop(Upper::reopen(&layers.dir, &found, &notes(&layers), true).unwrap());
        assert_eq!(pool(&layers), b"synced", "torn: {is_torn}");
        let left = read(&layers, LayerId(1), &trust(ONE, LayerId(1))).unwrap();
        let copies = records(&left).into_iter().filter(|r| matches!(r, Record::Redo(_))).count();
        assert_eq!(copies, 1, "torn: {is_torn}");
    }
}

#[test]
fn after_a_kill_the_pool_has_newer_bytes_than_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    redo(&mut upper, 0, b"older");
    upper.pool.write(0, b"newer").unwrap();
    drop(upper);
    let found = read(&layers, LayerId(1), &trust(ONE, LayerId(1))).unwrap();
    assert!(!found.has_redo());
    let mut upper = Upper::reopen(&layers.dir, &found, &notes(&layers), true).unwrap();
    assert_eq!(pool(&layers), b"newer");
    // The process before may have written anywhere.
    upper.record(&map()).unwrap();
    let mut work = upper.begin_sync().unwrap();
    assert!(!append_redo(&mut upper, &mut work), "the pool must be synced");
    work.sync_pool().unwrap();
    mark_synced(&mut upper, &mut work).unwrap();
    work.sync_journal().unwrap();
    upper.journal_synced(&work);
    redo(&mut upper, 0, b"third");
}

#[test]
fn a_copy_of_many_bytes_or_of_a_whole_frame_does_not_go_into_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    let forged = log::frame(&Record::SyncFailed(1), 2).unwrap();
    for bytes in [vec![7; (64 << 10) + 1], forged] {
        upper.pool.write(0, &bytes).unwrap();
        upper.record(&map()).unwrap();
        let len = upper.journal_len();
        let mut work = upper.begin_sync().unwrap();
        assert!(!append_redo(&mut upper, &mut work));
        assert_eq!(upper.journal_len(), len);
        upper.sync().unwrap();
    }
    redo(&mut upper, 0, &[7; 64 << 10]);
}

/// The second of two records can reach a reader before the first.
#[test]
fn a_journal_that_is_written_is_read_up_to_an_end() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.record(&map()).unwrap();
    let end = upper.journal_end();
    upper.record(&map()).unwrap();
    upper.record(&map()).unwrap();
    let file = layers.dir_of(LayerId(1)).unwrap().file(JOURNAL, false).unwrap();
    file.write_all_at(&[0; 8], end.bytes()).unwrap();
    let trust = trust(ONE, LayerId(1));
    let Err(error) = read(&layers, LayerId(1), &trust) else { panic!("it reads the whole file") };
    assert_eq!(error.kind, Kind::Damage, "{error}");
    let contents = read_bytes(&layers, LayerId(1), end.log_bytes(), &trust).unwrap();
    assert_eq!(maps(&contents), 1);
}

/// The copy was made before others wrote, and covers the record before it.
#[test]
fn records_during_the_sync_of_a_copy_are_not_covered() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    upper.pool.write(0, b"first").unwrap();
    upper.record(&map()).unwrap();
    let end = upper.journal_end();
    let mut work = upper.begin_sync().unwrap();
    assert!(append_redo(&mut upper, &mut work) && !upper.has_synced(&end));
    upper.pool.write(0, b"again").unwrap();
    upper.record(&map()).unwrap();
    work.sync_journal().unwrap();
    upper.journal_synced(&work);
    assert!(upper.has_synced(&end) && !upper.has_synced(&upper.journal_end()));
    let cut = read(&layers, LayerId(1), &trust(TWO, LayerId(1))).unwrap();
    assert_eq!(maps(&cut), 1);
    let mut rest = upper.begin_sync().unwrap();
    assert!(append_redo(&mut upper, &mut rest));
    work.sync_journal().unwrap();
    upper.journal_synced(&rest);
    set_pool(&layers, b"");
    let cut = read(&layers, LayerId(1), &trust(TWO, LayerId(1))).unwrap();
    cut.redo(upper.pool.file(), POOL, true).unwrap();
    assert_eq!(pool(&layers), b"again");
}

/// The bytes of the journal of layer 1 behind its last frame.
fn behind(layers: &Layers, upper: &Upper) -> Vec<u8> {
    let bytes = layers.dir_of(LayerId(1)).unwrap().read(JOURNAL).unwrap().unwrap();
    bytes[usize::try_from(upper.journal_len()).unwrap()..].to_vec()
}

#[test]
fn a_journal_that_is_synced_often_has_zeros_behind_it_until_it_is_sealed() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    redo(&mut upper, 0, b"one");
    redo(&mut upper, 0, b"two");
    assert!(behind(&layers, &upper).is_empty());
    redo(&mut upper, 0, b"three");
    assert_eq!(behind(&layers, &upper), vec![0; 64 << 10]);
    redo(&mut upper, 0, b"four");
    let left = behind(&layers, &upper).len();
    assert!(left < 64 << 10, "the frames replace the zeros");
    for writer in [ONE, TWO] {
        let found = read(&layers, LayerId(1), &trust(writer, LayerId(1))).unwrap();
        assert_eq!(found.frames.end(), upper.journal_len());
        assert_eq!(found.synced, found.frames.count());
    }
    // Enough to use them up.
    redo(&mut upper, 0, &[7; 60 << 10]);
    redo(&mut upper, 0, &[8; 60 << 10]);
    assert!(behind(&layers, &upper).len() > 64 << 10);

    drop(upper);
    let found = read(&layers, LayerId(1), &trust(ONE, LayerId(1))).unwrap();
    let mut upper = Upper::reopen(&layers.dir, &found, &notes(&layers), true).unwrap();
    assert!(behind(&layers, &upper).is_empty());
    upper.pool.unsynced.synced();
    (0..3).for_each(|_| redo(&mut upper, 0, b"five"));
    assert!(!behind(&layers, &upper).is_empty());
    upper.seal(seal("sealed".into()), &|| false).unwrap();
    assert!(behind(&layers, &upper).is_empty());
}

#[test]
fn a_frame_that_is_still_zeros_is_the_end_of_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    (0..3).for_each(|_| redo(&mut upper, 0, b"synced"));
    let end = upper.journal_end();
    upper.record(&resize()).unwrap();
    upper.record(&xattr(vec![1; 3000])).unwrap();
    let late = upper.journal_len();
    upper.record(&resize()).unwrap();
    // The disk has a later page and lacks an earlier one.
    let path = layers.dir_of(LayerId(1)).unwrap().path().join(JOURNAL);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let lost = usize::try_from(late - end.bytes()).unwrap();
    file.write_all_at(&vec![0; lost], end.bytes()).unwrap();
    let found = read(&layers, LayerId(1), &trust(TWO, LayerId(1))).unwrap();
    assert_eq!((found.frames.end(), found.is_cut), (end.bytes(), true));
    let error = read(&layers, LayerId(1), &trust(ONE, LayerId(1))).err().unwrap();
    assert_eq!(error.kind, Kind::Damage, "a kill cannot do that");
    let mut upper = Upper::reopen(&layers.dir, &found, &notes(&layers), true).unwrap();
    assert!(behind(&layers, &upper).is_empty());
    upper.record(&resize()).unwrap();
    read(&layers, LayerId(1), &trust(ONE, LayerId(1))).unwrap();
}

#[test]
fn a_journal_goes_on_without_zeros_where_there_is_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    (0..2).for_each(|_| redo(&mut upper, 0, b"bytes"));
    // The writes to the pool, of the record and of the copy succeed; that of the zeros fails.
    failpoint::with("fail:store.write:4:ENOSPC", || redo(&mut upper, 0, b"bytes"));
    assert!(behind(&layers, &upper).is_empty());
    redo(&mut upper, 0, b"bytes");
    assert!(!behind(&layers, &upper).is_empty());
}

#[test]
fn a_failed_write_leaves_the_zeros_that_it_did_not_reach() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    (0..3).for_each(|_| redo(&mut upper, 0, b"bytes"));
    let before = behind(&layers, &upper);
    assert!(!before.is_empty());
    // A full quota can refuse to cut a file.
    let failed = failpoint::with("fail:store.write:1:EDQUOT", || upper.record(&resize()));
    assert!(failed.is_err());
    assert_eq!(behind(&layers, &upper), before);
    upper.record(&resize()).unwrap();
    redo(&mut upper, 0, b"bytes");
}

#[test]
fn a_write_that_failed_in_part_is_replaced_by_zeros_where_nothing_can_be_cut() {
    let dir = tempfile::tempdir().unwrap();
    let layers = layers(dir.path());
    let mut upper = begin(&layers);
    (0..3).for_each(|_| redo(&mut upper, 0, b"bytes"));
    let before = behind(&layers, &upper);
    let path = layers.dir_of(LayerId(1)).unwrap().path().join(JOURNAL);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(b"part", upper.journal_len()).unwrap();
    let rules = "fail:store.write:1:EDQUOT,fail:store.cut:1:EDQUOT";
    assert!(failpoint::with(rules, || upper.record(&resize())).is_err());
    assert_eq!(behind(&layers, &upper), before);
    upper.record(&resize()).unwrap();
}
