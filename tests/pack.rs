//! Packs of older layers: a checkpoint costs its content, and only the space shows it.

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

    /// Bytes of layers and packs on disk, with their directories.
    fn layers_and_packs(&self) -> u64 {
        on_disk(&self.store.join("layers")) + on_disk(&self.store.join("packs"))
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
    let taken = place.layers_and_packs();
    assert!(taken < differs + 120 * KIB, "{taken} bytes for {differs}");
    assert!(place.count("layers") < 6 && place.count("packs") < 4);
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
    // When little of the gathered content is still needed, it is gathered again.
    (0..160).filter(|n| n % 8 > 0).for_each(|n| work.remove(&file(n)));
    work.checkpoint("few");
    work.gc(1);
    work.0.compact().unwrap();
    work.gc(1);
    assert!(place.layers_and_packs() < 300 * KIB, "{}", place.layers_and_packs());
    (0..160)
        .filter(|n| n % 8 == 0)
        .for_each(|n| assert!(work.get(&file(n)) == bytes(n, 5000), "{n}"));
    drop(work);
    place.check();
}

#[test]
fn readers_read_the_same_while_content_is_gathered() {
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
fn a_packed_layer_whose_records_grow_large_gets_a_directory_again() {
    let place = Place::new();
    let work = place.open();
    (0..6000).for_each(|n| work.0.fs().forget(work.id(&format!("a file with a name {n}")), 1));
    work.put("f", &bytes(1, 10_000));
    work.checkpoint("many");
    work.put("g", &bytes(2, 10_000));
    work.checkpoint("small");
    work.put("h", &bytes(3, 10_000));
    work.0.compact().unwrap();
    let before = place.count("layers");
    // The smaller one now has the records of both.
    work.0.handle(Request::Drop { rev: Rev::Name("many".to_owned()) }).unwrap();
    work.gc(5);
    place.check();
    assert!(
        place.count("layers") > before - 1,
        "{} directories, {before} before",
        place.count("layers")
    );
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
    work.0.compact().unwrap();
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
fn gathered_text_takes_less_space_and_reads_the_same() {
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
        own > whole as u64 && place.layers_and_packs() < whole as u64 / 3,
        "{}",
        place.layers_and_packs()
    );
    drop(work);
    let work = place.open();
    let fs = work.0.fs();
    for n in 0..40u64 {
        let wanted = text(n, 300 + n * 37);
        assert!(work.get(&file(n)) == wanted, "{n}");
        // From the middle of a cell, across its end, and where the host has holes between cells.
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
    // Content that equals deflated content is found.
    work.put("again", &text(9, 300 + 9 * 37));
    work.checkpoint("again");
    let before = on_disk(&place.store.join("layers"));
    work.0.compact().unwrap();
    assert!(work.get("again") == text(9, 300 + 9 * 37));
    assert!(on_disk(&place.store.join("layers")) < before, "it is stored twice");
    drop(work);
    place.check();
}

#[test]
fn partly_needed_gathered_content_is_gathered_again_once() {
    let place = Place::new();
    let work = place.open();
    // Noise, text, and writes over the middle of both.
    let contents = [bytes(2, 160_000), text(1, 3000)];
    for (file, content) in ["noise", "text"].iter().zip(&contents) {
        work.put(file, content);
        work.checkpoint(file);
    }
    work.0.compact().unwrap();
    let layers = place.store.join("layers");
    let pools = || {
        let dirs = layers.read_dir().unwrap().map(|layer| layer.unwrap().path().join("pool"));
        let mut pools: Vec<PathBuf> = dirs.filter(|pool| pool.exists()).collect();
        pools.sort();
        pools
    };
    assert_eq!(pools().len(), 2, "the gathered content and the open layer");
    let mut wanted = contents.clone();
    for (at, file) in ["noise", "text"].iter().enumerate() {
        let id = work.id(file);
        work.0.fs().write(id, 8192, &bytes(4, 120_000), false).unwrap();
        wanted[at][8192..128_192].copy_from_slice(&bytes(4, 120_000));
        work.checkpoint(&format!("{file} again"));
    }
    for round in 0..3 {
        let before = pools();
        work.gc(1);
        work.0.compact().unwrap();
        assert_eq!(pools().len(), 2, "round {round}");
        assert!(round == 0 || pools() == before, "round {round}: it is written anew");
        for (file, wanted) in ["noise", "text"].iter().zip(&wanted) {
            assert!(work.get(file) == *wanted, "round {round}: {file}");
        }
        place.check();
    }
}

#[test]
fn a_flipped_bit_of_deflated_content_is_reported_and_costs_only_its_cell() {
    let place = Place::new();
    let work = place.open();
    for n in 0..4 {
        work.put(&format!("f{n}"), &text(n, 2000));
        work.checkpoint(&format!("c{n}"));
    }
    work.0.compact().unwrap();
    let pools = std::fs::read_dir(place.store.join("layers"))
        .unwrap()
        .map(|layer| layer.unwrap().path().join("pool"));
    let pool = pools.max_by_key(|pool| pool.metadata().map_or(0, |about| about.len())).unwrap();
    drop(work);
    let file = std::fs::File::options().read(true).write(true).open(&pool).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, (64 << 10) + 77).unwrap();
    file.write_all_at(&[byte[0] ^ 8], (64 << 10) + 77).unwrap();
    let problems = Sandbox::check_store(&place.store, true).unwrap().problems;
    assert!(problems.len() == 1 && problems[0].contains("pool at offset 65536"), "{problems:?}");
    let work = place.open();
    let mut failed = 0;
    for n in 0..4u64 {
        let (id, wanted) = (work.id(&format!("f{n}")), text(n, 2000));
        for (at, part) in wanted.chunks(8192).enumerate() {
            match work.0.fs().read(id, at as u64 * 8192, 8192).unwrap().read(false) {
                Ok(read) => assert!(read.unwrap() == part, "f{n}, part {at}"),
                Err(_) => failed += part.len(),
            }
        }
        work.0.fs().forget(id, 1);
    }
    assert!((48 << 10..80 << 10).contains(&failed), "{failed} bytes cannot be read");
    // It stays where it is, and nothing that is correct is lost with it.
    work.put("more", &text(99, 100));
    work.checkpoint("more");
    work.0.compact().unwrap();
    work.gc(50);
    assert!(
        work.0.fs().read(work.id("f0"), 0, 8192).unwrap().read(false).unwrap().unwrap()
            == text(0, 2000)[..8192]
    );
}

/// An entry of the history needs the whole cell that it is in, even if other content needs the
/// start of the cell.
#[test]
fn a_flipped_bit_of_deflated_content_is_reported_for_the_entry_deep_in_its_cell() {
    let place = Place::new();
    let work = place.open();
    work.0.fs().set_edit_bounds(Bounds::default());
    work.put("f", &text(1, 1100));
    work.put("g", &text(2, 120));
    work.put("g", &text(3, 120));
    work.checkpoint("c0");
    for n in 1..4 {
        work.put(&format!("f{n}"), &text(n + 10, 2000));
        work.checkpoint(&format!("c{n}"));
    }
    work.0.compact().unwrap();
    drop(work);
    let clean = Sandbox::check_store(&place.store, true).unwrap();
    assert_eq!((clean.problems, clean.warnings), (Vec::new(), Vec::new()));
    let pools = std::fs::read_dir(place.store.join("layers"))
        .unwrap()
        .map(|layer| layer.unwrap().path().join("pool"));
    let pool = pools.max_by_key(|pool| pool.metadata().map_or(0, |about| about.len())).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&pool).unwrap();
    let mut reported = Vec::new();
    for cell in (0..file.metadata().unwrap().len()).step_by(64 << 10) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, cell + 77).unwrap();
        file.write_all_at(&[byte[0] ^ 8], cell + 77).unwrap();
        let checked = Sandbox::check_store(&place.store, true).unwrap();
        assert!(!checked.problems.is_empty(), "cell at {cell}");
        let wanted = format!("pool at offset {cell}: content fails its checksum");
        let of =
            |warning: &String| warning.contains(&wanted) && warning.contains("version 1 of 'g'");
        reported.extend(checked.warnings.iter().any(of).then_some(cell));
        assert!(checked.warnings.iter().all(of), "{:?}", checked.warnings);
        file.write_all_at(&byte, cell + 77).unwrap();
    }
    assert_eq!(reported.len(), 1, "{reported:?}");
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
        drop(work);
        let dirs = std::fs::read_dir(place.store.join("layers")).unwrap();
        let mut dirs: Vec<PathBuf> = dirs.map(|layer| layer.unwrap().path()).collect();
        dirs.sort();
        let (first, last) = (dirs.first().unwrap(), dirs.last().unwrap());
        // The upper layer is in no pack.
        let open = dirs.iter().find(|dir| dir.join("journal").exists()).unwrap();
        assert!(first != last && open != last);
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
        let packs = std::fs::read_dir(place.store.join("packs")).unwrap();
        let pack = packs.map(|pack| pack.unwrap().path()).next().unwrap();
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
        assert_eq!(reports("its end is missing"), is_pack_damaged, "{:?}", checked.problems);
        assert!(!reports("No such file"), "{:?}", checked.problems);
    }
}

#[test]
fn a_mount_packs_older_layers_in_the_background() {
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
            "{} directories, {} packs",
            count("layers"),
            count("packs")
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
fn layers_whose_end_was_punched_after_their_checksums_are_packed() {
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
    while count("packs") == 0 {
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
            .contains("content of layer")
    );
}
