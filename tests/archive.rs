//! Older layers move into the archive: a checkpoint costs its content, and only the space shows it.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::Live;
use jailfs::internals::fs::{Caller, SeekTo};
use jailfs::sandbox::{Bounds, Sandbox, StoreOptions};
use jailfs::sandbox::{Reply, Request, Rev};
use jailfs::types::{Name, NodeId};

const ME: Caller = Caller { uid: 0, gid: 0 };
const KIB: u64 = 1 << 10;
/// Without syncs the work is the same, and much quicker.
const QUICK: StoreOptions = StoreOptions { volatile: true, other_base: false };

struct Place {
    dir: tempfile::TempDir,
    store: PathBuf,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("base")).unwrap();
        let store = dir.path().join("store");
        Place { dir, store }
    }

    /// Without an edit history, so that only states need space.
    fn open(&self) -> Work {
        let sandbox =
            Sandbox::create_or_open(&self.dir.path().join("base"), &self.store, &QUICK).unwrap();
        sandbox.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
        Work(sandbox)
    }

    /// Bytes of layers and archive on disk, with their directories.
    fn layers_and_archive(&self) -> u64 {
        on_disk(&self.store.join("layers")) + on_disk(&self.store.join("archive"))
    }

    /// The files of the archive, the largest first.
    fn archive(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.store.join("archive")).unwrap();
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        let len = |path: &PathBuf| path.metadata().unwrap().len();
        files.sort_by_key(|path| (std::cmp::Reverse(len(path)), path.clone()));
        files
    }

    fn count(&self, dir: &str) -> usize {
        std::fs::read_dir(self.store.join(dir)).map_or(0, Iterator::count)
    }

    #[track_caller]
    fn check(&self) {
        let checked = Sandbox::check_store(&self.store, true).unwrap();
        assert!(checked.problems.is_empty(), "{:#?}", checked.problems);
    }
}

fn on_disk(path: &Path) -> u64 {
    let own = std::fs::symlink_metadata(path).map_or(0, |about| about.blocks() * 512);
    let below =
        std::fs::read_dir(path).into_iter().flatten().map(|entry| on_disk(&entry.unwrap().path()));
    own + below.sum::<u64>()
}

struct Work(Arc<Sandbox>);

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// This many unique bytes: noise for even seeds, digits, which can be deflated, for odd ones.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let noise = noise(seed, len);
    if seed.is_multiple_of(2) { noise } else { noise.iter().map(|byte| b'0' + byte % 10).collect() }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| next()).collect();
    bytes.truncate(len);
    bytes
}

impl Work {
    fn id(&self, file: &str) -> NodeId {
        let fs = self.0.fs();
        let entry = fs.lookup(NodeId::ROOT, &name(file));
        entry.or_else(|_| fs.mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME)).unwrap().id
    }

    fn put(&self, file: &str, content: &[u8]) {
        let id = self.id(file);
        self.0.fs().truncate(id, 0, false).unwrap();
        self.0.fs().write(id, 0, content, false).unwrap();
        self.0.fs().forget(id, 1);
    }

    fn get(&self, file: &str) -> Vec<u8> {
        let id = self.id(file);
        let bytes = self.0.fs().read(id, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
        self.0.fs().forget(id, 1);
        bytes
    }

    fn remove(&self, file: &str) {
        self.0.fs().unlink(NodeId::ROOT, &name(file)).unwrap();
    }

    fn checkpoint(&self, label: &str) {
        self.0
            .handle(Request::Checkpoint { name: Some(label.to_owned()), message: String::new() })
            .unwrap();
    }

    fn restore(&self, label: &str) {
        let to = Rev::Name(label.to_owned());
        self.0
            .handle(Request::Restore {
                detach_mounts: false,
                to,
                paths: Vec::new(),
                dry_run: false,
            })
            .unwrap();
    }

    fn gc(&self, keep: u64) {
        let request =
            Request::Gc { operations: 0, keep: Some(keep), max_store: None, dry_run: false };
        let Reply::Collected(_) = self.0.handle(request).unwrap() else { panic!("not a gc") };
    }
}

#[test]
fn a_checkpoint_costs_its_content() {
    let place = Place::new();
    let work = place.open();
    let mut content = Vec::new();
    let mut all = BTreeMap::new();
    let mut differs = 0;
    for step in 0..120u64 {
        let end = content.len() as u64;
        content.extend(bytes(step, 3000));
        let at = (step as usize * 7919) % content.len();
        content[at] ^= 1;
        // The blocks with a new byte.
        differs += (end + 3000).next_multiple_of(4 * KIB) - end / (4 * KIB) * (4 * KIB);
        differs += if (at as u64) < end / (4 * KIB) * (4 * KIB) { 4 * KIB } else { 0 };
        work.put("f", &content);
        work.checkpoint(&format!("c{step}"));
        all.insert(format!("c{step}"), content.clone());
        if step % 40 == 39 {
            work.0.compact().unwrap();
        }
    }
    // With a directory of its own, each layer would take 16 KiB more.
    let taken = place.layers_and_archive();
    assert!(taken < differs + 120 * KIB, "{taken} bytes for {differs}");
    assert!(place.count("layers") < 6 && place.count("archive") < 8);
    drop(work);
    for _ in 0..2 {
        let work = place.open();
        for (label, content) in all.iter().step_by(17) {
            work.restore(label);
            assert!(work.get("f") == *content, "{label}");
        }
        drop(work);
        place.check();
    }
}

#[test]
fn dropped_layers_that_are_still_read_do_not_accumulate() {
    let place = Place::new();
    let work = place.open();
    let file = |n: u64| format!("f{n}");
    for round in 0..4u64 {
        for step in 0..40 {
            let n = round * 40 + step;
            work.put(&file(n), &bytes(n, 5000));
            work.put("passing", &bytes(n + 1000, 9000));
            work.checkpoint(&format!("c{n}"));
        }
        work.gc(3);
        work.0.compact().unwrap();
        work.gc(3);
        assert!(place.count("layers") < 8, "{} directories", place.count("layers"));
        place.check();
    }
    drop(work);
    let work = place.open();
    for n in 0..160 {
        assert!(work.get(&file(n)) == bytes(n, 5000), "{n}");
    }
    // When little of a pack is still needed, it is written anew.
    (0..160).filter(|n| n % 8 > 0).for_each(|n| work.remove(&file(n)));
    work.checkpoint("few");
    work.gc(1);
    work.0.compact().unwrap();
    work.gc(1);
    assert!(place.layers_and_archive() < 300 * KIB, "{}", place.layers_and_archive());
    (0..160)
        .filter(|n| n % 8 == 0)
        .for_each(|n| assert!(work.get(&file(n)) == bytes(n, 5000), "{n}"));
    drop(work);
    place.check();
}

#[test]
fn readers_read_the_same_while_layers_are_archived() {
    let place = Place::new();
    let work = place.open();
    let over = AtomicBool::new(false);
    let put = |n: u64| {
        work.put(&format!("f{}", n % 24), &[bytes(n % 24, 30_000), bytes(n, 3000)].concat())
    };
    (0..24).for_each(put);
    std::thread::scope(|scope| {
        for reader in 0..2u64 {
            let (work, over) = (&work, &over);
            scope.spawn(move || {
                let mut n = reader;
                while !over.load(Ordering::Relaxed) {
                    n = (n + 5) % 24;
                    let read = work.get(&format!("f{n}"));
                    // Its writer truncates it first.
                    assert!(read.len() < 30_000 || read[..30_000] == bytes(n, 30_000), "file {n}");
                }
            });
        }
        let end = Ended(&over);
        for round in 0..12u64 {
            for step in 0..6 {
                put(24 + round * 6 + step);
                work.checkpoint(&format!("c{round}-{step}"));
            }
            work.0.compact().unwrap();
            work.gc(5);
        }
        drop(end);
    });
    drop(work);
    place.check();
}

/// Signals its end, also by a panic.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn an_archived_layer_whose_records_grow_large_stays_in_the_archive() {
    let place = Place::new();
    let work = place.open();
    (0..6000).for_each(|n| work.0.fs().forget(work.id(&format!("a file with a name {n}")), 1));
    work.put("f", &bytes(1, 10_000));
    work.checkpoint("many");
    work.put("g", &bytes(2, 10_000));
    work.checkpoint("small");
    work.put("h", &bytes(3, 10_000));
    work.0.compact().unwrap();
    assert!(place.store.join("layers/00000001/journal").exists(), "its records are large");
    assert!(!place.store.join("layers/00000002/journal").exists());
    // The smaller one now has the records of both.
    work.0.handle(Request::Drop { rev: Rev::Name("many".to_owned()) }).unwrap();
    work.gc(5);
    place.check();
    assert!(!place.store.join("layers/00000002/journal").exists());
    for _ in 0..2 {
        work.restore("small");
        assert!(work.get("f") == bytes(1, 10_000) && work.get("g") == bytes(2, 10_000));
        work.0.compact().unwrap();
        place.check();
    }
    drop(work);
    let work = place.open();
    work.restore("small");
    assert!(
        work.get("f") == bytes(1, 10_000) && work.0.fs().names(NodeId::ROOT).unwrap().len() == 6002
    );
}

#[test]
fn a_flipped_bit_is_not_copied_to_a_place_where_it_would_pass_as_correct() {
    let place = Place::new();
    let work = place.open();
    for n in 0..4 {
        work.put(&format!("f{n}"), &bytes(n, 9000));
        work.checkpoint(&format!("c{n}"));
    }
    work.0.set_dedup(false);
    // The layers get checksums, and cannot be archived.
    let blocked = place.store.join("archive/root.new");
    std::fs::create_dir_all(&blocked).unwrap();
    work.0.compact().unwrap_err();
    std::fs::remove_dir(&blocked).unwrap();
    drop(work);
    let pool = std::fs::File::options()
        .write(true)
        .open(place.store.join("layers/00000002/pool"))
        .unwrap();
    pool.write_all_at(&[!bytes(1, 9000)[100]], 100).unwrap();
    let work = place.open();
    work.0.compact().unwrap();
    let problems = Sandbox::check_store(&place.store, true).unwrap().problems;
    assert!(
        problems.len() == 1 && problems[0].contains("layers/00000002/pool at offset 0"),
        "{problems:?}"
    );
    for n in [0, 2, 3] {
        assert!(work.get(&format!("f{n}")) == bytes(n, 9000), "{n}");
    }
    let read = work.0.fs().read(work.id("f1"), 0, 100).unwrap().read(false);
    assert!(!matches!(read, Ok(Some(_))), "a flipped bit is served");
}

/// So many different lines of text that compress well.
fn text(seed: u64, lines: u64) -> Vec<u8> {
    let line =
        |n: u64| format!("let value_{n:06} = compute_the_value_of({seed}, {});\n", n * 7919 % 1009);
    (0..lines).flat_map(|n| line(n).into_bytes()).collect()
}

#[test]
fn archived_text_takes_less_space_and_reads_the_same() {
    let place = Place::new();
    let work = place.open();
    let file = |n: u64| format!("f{n}");
    for n in 0..40u64 {
        work.put(&file(n), &text(n, 300 + n * 37));
        work.checkpoint(&format!("c{n}"));
    }
    let whole: usize = (0..40).map(|n| text(n, 300 + n * 37).len()).sum();
    let own = on_disk(&place.store.join("layers"));
    work.0.compact().unwrap();
    assert!(
        own > whole as u64 && place.layers_and_archive() < whole as u64 / 3,
        "{}",
        place.layers_and_archive()
    );
    drop(work);
    let work = place.open();
    let fs = work.0.fs();
    for n in 0..40u64 {
        let wanted = text(n, 300 + n * 37);
        assert!(work.get(&file(n)) == wanted, "{n}");
        // From the middle of a chunk, across its end, and at the end.
        let id = work.id(&file(n));
        for (at, len) in [(1, 1), (wanted.len() / 2, 5000), (wanted.len() - 1, 4096)] {
            let read = fs.read(id, at as u64, len).unwrap().read(false).unwrap().unwrap();
            assert!(read == wanted[at..wanted.len().min(at + len as usize)], "{n} at {at}");
        }
        assert_eq!(fs.seek(id, 100, SeekTo::Data).unwrap(), 100);
        assert_eq!(fs.seek(id, 100, SeekTo::Hole).unwrap(), wanted.len() as u64);
        fs.forget(id, 1);
    }
    // One of its blocks is filled from the base.
    let id = work.id("f7");
    fs.write(id, 6001, b"!", false).unwrap();
    let mut wanted = text(7, 300 + 7 * 37);
    wanted[6001] = b'!';
    assert!(work.get("f7") == wanted);
    // Content that equals archived content is found.
    let noise = bytes(2, 300_000);
    let store_as = |file: &str| {
        work.put(file, &noise);
        work.checkpoint(file);
        work.0.compact().unwrap();
        on_disk(&place.store.join("archive"))
    };
    let once = store_as("noise");
    let twice = store_as("again");
    assert!(work.get("again") == noise && work.get("noise") == noise);
    assert!(twice < once + 100_000, "it is stored twice: {once} and {twice} bytes");
    drop(work);
    place.check();
}

#[test]
fn partly_needed_content_is_written_anew_once() {
    let place = Place::new();
    let work = place.open();
    // Noise, text, and writes over the middle of both.
    let contents = [bytes(2, 400_000), text(1, 8000)];
    for (file, content) in ["noise", "text"].iter().zip(&contents) {
        work.put(file, content);
        work.checkpoint(file);
    }
    work.0.compact().unwrap();
    let before = on_disk(&place.store.join("archive"));
    assert!(before > 400_000);
    let mut wanted = contents.clone();
    for (at, file) in ["noise", "text"].iter().enumerate() {
        let id = work.id(file);
        work.0.fs().write(id, 8192, &bytes(4, 350_000), false).unwrap();
        wanted[at][8192..358_192].copy_from_slice(&bytes(4, 350_000));
        work.checkpoint(&format!("{file} again"));
    }
    let mut files = Vec::new();
    for round in 0..3 {
        work.gc(1);
        work.0.compact().unwrap();
        let now: Vec<(PathBuf, Vec<u8>)> = place
            .archive()
            .into_iter()
            .map(|path| (path.clone(), std::fs::read(&path).unwrap()))
            .collect();
        assert!(round == 0 || now == files, "round {round}: it is written anew");
        files = now;
        // The new content is there once, and of the old one only the ends.
        let bytes = on_disk(&place.store.join("archive"));
        assert!(bytes < 350_000 + 150_000, "round {round}: {bytes} bytes");
        for (file, wanted) in ["noise", "text"].iter().zip(&wanted) {
            assert!(work.get(file) == *wanted, "round {round}: {file}");
        }
        place.check();
    }
}

#[test]
fn much_content_moves_when_no_tree_needs_it() {
    let place = Place::new();
    let work = place.open();
    let (old, new) = (bytes(2, 40 << 20), bytes(4, 3 << 20));
    work.put("f", &old);
    work.checkpoint("old");
    work.0.compact().unwrap();
    let pool = place.store.join("layers/00000001/pool");
    assert!(pool.exists(), "the tree needs its content");
    work.put("f", &new);
    work.checkpoint("new");
    work.put("f", b"other");
    let from = Some(Rev::Name("new".to_owned()));
    work.0.handle(Request::Fork { names: vec!["fork".to_owned()], from }).unwrap();
    work.0.compact().unwrap();
    assert!(!pool.exists(), "no tree needs its content");
    assert!(place.store.join("layers/00000002/pool").exists(), "the tree of the fork needs it");
    drop(work);
    place.check();
    let work = place.open();
    let started = Instant::now();
    work.restore("old");
    assert!(work.get("f") == old);
    eprintln!("read {} MiB of archived content in {:?}", old.len() >> 20, started.elapsed());
    work.restore("new");
    assert!(work.get("f") == new);
}

/// Flips a bit of a file, and back.
struct Flipped(std::fs::File, u64);

impl Flipped {
    fn at(path: &Path, at: u64) -> Flipped {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let flipped = Flipped(file, at);
        flipped.flip();
        flipped
    }

    fn flip(&self) {
        let mut byte = [0];
        self.0.read_exact_at(&mut byte, self.1).unwrap();
        self.0.write_all_at(&[byte[0] ^ 8], self.1).unwrap();
    }
}

#[test]
fn a_flipped_bit_of_archived_content_is_reported_and_costs_only_its_frame() {
    let place = Place::new();
    let work = place.open();
    for n in 0..8 {
        work.put(&format!("f{n}"), &text(n, 2000));
        work.checkpoint(&format!("c{n}"));
    }
    work.0.compact().unwrap();
    drop(work);
    let pack = place.archive().remove(0);
    Flipped::at(&pack, pack.metadata().unwrap().len() / 3);
    let problems = Sandbox::check_store(&place.store, true).unwrap().problems;
    assert!((1..4).contains(&problems.len()), "{problems:?}");
    for problem in &problems {
        assert!(problem.contains("the pool of layer") && problem.contains("/archive"), "{problem}");
    }
    let work = place.open();
    let read = |n: u64, at: usize| {
        let id = work.id(&format!("f{n}"));
        let read = work.0.fs().read(id, at as u64, 8192).unwrap().read(false);
        work.0.fs().forget(id, 1);
        read.ok().map(Option::unwrap)
    };
    let damaged = || {
        let mut damaged = Vec::new();
        for n in 0..8 {
            for (part, wanted) in text(n, 2000).chunks(8192).enumerate() {
                match read(n, part * 8192) {
                    Some(found) => assert!(found == wanted, "f{n}, part {part}"),
                    None => damaged.push((n, part)),
                }
            }
        }
        damaged
    };
    let before = damaged();
    assert!((4..40).contains(&before.len()), "{before:?}");
    // It stays where it is, and nothing that is correct is lost with it.
    work.put("more", &text(99, 100));
    work.checkpoint("more");
    work.0.compact().unwrap();
    (0..6)
        .filter(|n| before.iter().all(|(of, _)| of != n))
        .for_each(|n| work.remove(&format!("f{n}")));
    work.checkpoint("less");
    work.gc(1);
    work.0.compact().unwrap();
    for (n, part) in [0, 1, 2, 3, 4, 5, 6, 7].into_iter().zip(std::iter::repeat(0)) {
        let is_left = work.0.fs().lookup(NodeId::ROOT, &name(&format!("f{n}"))).is_ok();
        let is_damaged = before.contains(&(n, part));
        assert!(!is_left || read(n, 0).is_none() == is_damaged, "f{n}");
    }
}

#[test]
fn a_flipped_bit_is_reported_for_the_entry_of_the_history_that_needs_it() {
    let place = Place::new();
    let work = place.open();
    work.0.fs().set_edit_bounds(Bounds::default());
    work.put("f", &text(1, 1100));
    work.put("g", &text(2, 120));
    work.put("g", &text(3, 120));
    work.checkpoint("c0");
    work.0.compact().unwrap();
    drop(work);
    let clean = Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!((clean.problems, clean.warnings), (Vec::new(), Vec::new()));
    let pack = place.archive().remove(0);
    let mut reported = 0;
    for at in (16..pack.metadata().unwrap().len()).step_by(997) {
        let flipped = Flipped::at(&pack, at);
        let checked = Sandbox::check_store(&place.store, true).unwrap();
        assert!(!checked.problems.is_empty(), "a bit of byte {at}");
        let of = |warning: &String| warning.contains("version 1 of 'g'");
        reported += usize::from(checked.warnings.iter().any(of));
        flipped.flip();
    }
    assert!(reported > 0);
}

#[test]
fn a_repair_removes_damaged_files_and_leaves_others_whatever_else_is_wrong() {
    for is_pack_damaged in [true, false] {
        let place = Place::new();
        let work = place.open();
        for n in 0..4 {
            work.put(&format!("f{n}"), &text(n, 2000));
            work.checkpoint(&format!("c{n}"));
        }
        work.0.compact().unwrap();
        work.put("later", b"later");
        work.checkpoint("later");
        drop(work);
        let dirs = std::fs::read_dir(place.store.join("layers")).unwrap();
        let mut dirs: Vec<PathBuf> = dirs.map(|layer| layer.unwrap().path()).collect();
        dirs.sort();
        // Those of an archived layer with an index, of a sealed one, and of the open one.
        let [first, last, open] = dirs.as_slice() else { panic!("{dirs:?}") };
        // A directory in the place of a file cannot be read, and is not damage; nor is a whole
        // record of an unknown kind.
        if first.join("index").exists() {
            std::fs::remove_file(first.join("index")).unwrap();
        }
        std::fs::create_dir(first.join("index")).unwrap();
        std::fs::write(last.join("index"), "garbage").unwrap();
        let (payload, len, seq) = ([99u8], 1u32.to_le_bytes(), 0u64.to_le_bytes());
        let crc = crc32c::crc32c(&[&len[..], &seq, &payload].concat()).to_le_bytes();
        std::fs::write(open.join("sums"), [&len[..], &crc, &seq, &payload].concat()).unwrap();
        let pack = place.archive().remove(0);
        if is_pack_damaged {
            let whole = std::fs::read(&pack).unwrap();
            std::fs::write(&pack, &whole[..whole.len() - 3]).unwrap();
        }
        let checked = Sandbox::repair_store(&place.store, false).unwrap();
        assert!(
            checked.repaired.len() == 1 && checked.repaired[0].contains("index"),
            "{:?}",
            checked.repaired
        );
        assert!(
            first.join("index").exists()
                && open.join("sums").exists()
                && !last.join("index").exists()
        );
        let reports = |part: &str| checked.problems.iter().any(|problem| problem.contains(part));
        assert!(
            reports("stays as it is") && reports("not a record of this format"),
            "{:?}",
            checked.problems
        );
        assert_eq!(reports("it is not a pack"), is_pack_damaged, "{:?}", checked.problems);
        assert!(!reports("No such file"), "{:?}", checked.problems);
    }
}

#[test]
fn a_mount_archives_older_layers_in_the_background() {
    let live = Live::with_options("echo base > base", &["-o", "history=0"]);
    for n in 0..60 {
        live.sh(&format!("echo {n} > f{}; echo {n} > g", n % 30));
        live.checkpoint(&format!("c{n}"));
    }
    let count = |dir: &str| std::fs::read_dir(live.store.join(dir)).map_or(0, Iterator::count);
    let until = Instant::now() + Duration::from_secs(100);
    // Operations wake it, and it runs after them.
    while count("layers") > 45 {
        assert!(
            Instant::now() < until,
            "{} directories, {} files in the archive",
            count("layers"),
            count("archive")
        );
        live.sh("echo more >> f0");
        live.checkpoint(&format!("more{}", live.json(&["log"]).len()));
    }
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
    live.restore("c20");
    assert_eq!((live.read("f20"), live.read("g")), ("20\n".to_owned(), "20\n".to_owned()));
}

/// The host keeps the block with the end of a file, as zeros, unless the whole block is punched.
#[test]
fn layers_whose_end_was_punched_after_their_checksums_are_archived() {
    let live = Live::with_options("echo base > base", &["-o", "history=0"]);
    let count = |dir: &str| std::fs::read_dir(live.store.join(dir)).map_or(0, Iterator::count);
    let until = Instant::now() + Duration::from_secs(100);
    let mut made = 0;
    let mut step = || {
        live.sh(&format!(
            "head -c 5000 /dev/urandom > f{made}; head -c 1200003 /dev/urandom > passing"
        ));
        live.checkpoint(&format!("c{made}"));
        made += 1;
    };
    while count("archive") == 0 {
        assert!(Instant::now() < until, "{} directories", count("layers"));
        step();
    }
    let before = count("layers");
    while count("layers") > 16 {
        assert!(Instant::now() < until, "{} directories, {before} before", count("layers"));
        step();
        live.jailfs(&["gc", "--keep", "3", "--operations", "0"]);
    }
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
    assert!(
        !std::fs::read_to_string(live.store.join("daemon.log"))
            .unwrap()
            .contains("its content is not moved")
    );
}
