//! Sparse files: work on content costs what the data costs, however long the holes are.
//!
//! The holes are terabytes long, so work that walks them would not end in time. Where that is not
//! enough, the test counts the bytes that the thread reads.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::panic,
    clippy::indexing_slicing,
    unsafe_code,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking"
)]

use std::fs::{self as host, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jailfs::internals::fs::{Caller, DataRanges, SeekTo};
use jailfs::internals::sys::file::{data_in, punch_hole};
use jailfs::sandbox::{Changes, Consent, Detail, Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{ByteRange, Name, NodeId, TreePath};

mod common;
use common::Bench;

const ME: Caller = Caller { uid: 0, gid: 0 };
const TIB: u64 = 1 << 40;
/// Almost the largest file of ext4.
const HUGE: u64 = 15 * TIB;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A base, its store, and the sandbox of both.
struct Place {
    dir: tempfile::TempDir,
    sandbox: Option<Arc<Sandbox>>,
    done: Arc<AtomicBool>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
    }
}

impl Place {
    /// A sandbox over a base that `fill` creates.
    fn over(fill: impl FnOnce(&Path)) -> Place {
        let done = Arc::new(AtomicBool::new(false));
        common::watch(Arc::clone(&done));
        let mut place = Place { dir: tempfile::tempdir().unwrap(), sandbox: None, done };
        host::create_dir(place.base("")).unwrap();
        fill(&place.base(""));
        place.reopen();
        place
    }

    fn reopen(&mut self) {
        self.sandbox = None;
        let (base, store) = (self.base(""), self.dir.path().join("store"));
        self.sandbox =
            Some(Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap());
    }

    fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().unwrap()
    }

    fn base(&self, path: &str) -> PathBuf {
        self.dir.path().join("base").join(path)
    }

    fn find(&self, path: &str) -> NodeId {
        path.split('/').filter(|part| !part.is_empty()).fold(NodeId::ROOT, |dir, part| {
            self.sandbox().fs().lookup(dir, &Name::new(part.as_bytes()).unwrap()).unwrap().id
        })
    }

    fn make(&self, name: &str) -> NodeId {
        let name = Name::new(name.as_bytes()).unwrap();
        self.sandbox().fs().mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, ME).unwrap().id
    }

    fn write(&self, path: &str, at: u64, bytes: &[u8]) {
        self.sandbox().fs().write(self.find(path), at, bytes, false).unwrap();
    }

    fn truncate(&self, path: &str, size: u64) {
        self.sandbox().fs().truncate(self.find(path), size, false).unwrap();
    }

    fn read(&self, path: &str, at: u64, len: u64) -> Vec<u8> {
        let plan = self.sandbox().fs().read(self.find(path), at, len).unwrap();
        plan.read(false).unwrap().unwrap()
    }

    fn size(&self, path: &str) -> u64 {
        self.sandbox().fs().getattr(self.find(path)).unwrap().size
    }

    fn ask(&self, request: Request) -> Reply {
        self.sandbox().handle(request).unwrap()
    }

    fn checkpoint(&self, name: &str) {
        self.ask(Request::Checkpoint { name: Some(name.to_owned()), message: String::new() });
    }

    fn restore(&self, to: &str, paths: &[&str]) {
        let paths = paths.iter().map(|path| tree_path(path)).collect();
        self.ask(Request::Restore {
            to: Rev::parse(to),
            paths,
            dry_run: false,
            detach_mounts: false,
        });
    }

    /// The differences between two states, one line each.
    fn diff(&self, from: &str, to: &str, detail: Detail) -> Vec<String> {
        let paths = Vec::new();
        match self.ask(Request::Diff { from: Rev::parse(from), to: Rev::parse(to), paths, detail })
        {
            Reply::Diff(changes) => lines_of(&changes),
            other => panic!("{other:?}"),
        }
    }

    fn apply(&self, undo: bool) {
        let request =
            Request::Apply { paths: Vec::new(), dry_run: false, undo, consent: Consent::ALL };
        match self.ask(request) {
            Reply::Applied(done) => assert!(done.conflicts.is_empty(), "{:?}", done.conflicts),
            other => panic!("{other:?}"),
        }
    }

    /// The store passes the full consistency check.
    fn check(&self) {
        match self.ask(Request::Check { read_data: true }) {
            Reply::Checked(checked) => {
                assert!(checked.problems.is_empty(), "{:#?}", checked.problems)
            }
            other => panic!("{other:?}"),
        }
    }
}

fn tree_path(path: &str) -> TreePath {
    TreePath::parse(path.as_bytes()).unwrap()
}

fn lines_of(changes: &Changes) -> Vec<String> {
    changes.iter().map(|change| change.unwrap()).map(|change| format!("{}", change.path)).collect()
}

/// A sparse file of this size with these bytes at these offsets.
fn sparse(path: &Path, size: u64, data: &[(u64, &[u8])]) {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    file.set_len(size).unwrap();
    for (at, bytes) in data {
        file.write_all_at(bytes, *at).unwrap();
    }
}

fn bytes_at(path: &Path, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    File::open(path).unwrap().read_exact_at(&mut bytes, at).unwrap();
    bytes
}

/// Bytes of a file on disk.
fn taken(path: &Path) -> u64 {
    host::metadata(path).unwrap().blocks() * 512
}

/// The bytes that `work` reads from files, in this thread.
fn bytes_read(work: impl FnOnce()) -> u64 {
    let so_far = || {
        let io = host::read_to_string("/proc/thread-self/io").unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    let before = so_far();
    work();
    so_far() - before
}

/// copy_file_range(2).
fn copy_file_range(from: &File, mut at: u64, to: &File, mut into: u64, len: usize) -> u64 {
    // SAFETY: the call reads and writes the two offsets, which are borrowed mutably, and no other
    // memory.
    let copied = unsafe {
        let (at, into) = ((&raw mut at).cast(), (&raw mut into).cast());
        libc::copy_file_range(from.as_raw_fd(), at, to.as_raw_fd(), into, len, 0)
    };
    u64::try_from(copied).unwrap_or_else(|_| panic!("{}", std::io::Error::last_os_error()))
}

/// Compares the data ranges of `path` in the live tree with its bytes, and the ranges that differ
/// from `before` with the differing bytes.
fn check_ranges(place: &Place, path: &str, before: &jailfs::internals::fs::State) {
    let now = place.sandbox().fs().state();
    let path = tree_path(path);
    let (old, new) = (before.resolve(&path).unwrap(), now.resolve(&path).unwrap());
    let (was, is) = (before.read_all(&old).unwrap(), now.read_all(&new).unwrap());
    let mut data = vec![false; is.len()];
    let mut last = 0;
    for range in now.data(&new) {
        let range = range.unwrap();
        assert!(range.start >= last && !range.is_empty(), "{range:?} behind {last}");
        assert_eq!(range.start / MIB, (range.end - 1) / MIB, "{range:?} can be read at once");
        last = range.end;
        data[range.start as usize..range.end as usize].fill(true);
    }
    let hidden = is.iter().zip(&data).position(|(byte, is_data)| *byte != 0 && !is_data);
    assert_eq!(hidden, None, "a hole of zeros");
    let whole = ByteRange { start: 0, end: was.len().max(is.len()) as u64 };
    let mut differs = vec![false; whole.end as usize];
    for range in DataRanges::unlike((before, &old), (&now, &new), whole) {
        let range = range.unwrap();
        differs[range.start as usize..range.end as usize].fill(true);
    }
    let byte = |bytes: &[u8], at: usize| bytes.get(at).copied().unwrap_or(0);
    let missed = (0..differs.len()).find(|at| byte(&was, *at) != byte(&is, *at) && !differs[*at]);
    assert_eq!(missed, None, "unreported ranges are equal");
}

#[test]
fn data_between_holes_is_found_wherever_it_is() {
    let place = Place::over(|base| {
        // Data and holes alternate in blocks of the host; the last block is cut.
        let bytes = vec![7; 4 * KIB as usize];
        let runs: Vec<(u64, &[u8])> = (0..100).map(|n| (n * 24 * KIB, &bytes[..])).collect();
        sparse(&base.join("f"), 3 * MIB, &runs);
        sparse(&base.join("f"), 3 * MIB + 5, &[(3 * MIB + 4, b"e")]);
    });
    let before = place.sandbox().fs().state();
    let path = tree_path("f");
    let found: u64 = {
        let found = before.resolve(&path).unwrap();
        before.data(&found).map(|range| range.unwrap().len()).sum()
    };
    let file = File::open(place.base("f")).unwrap();
    let on_host = data_in(&file, ByteRange { start: 0, end: u64::MAX }).unwrap();
    assert_eq!(found, on_host.iter().map(ByteRange::len).sum::<u64>(), "only data, and all of it");
    assert!(found < MIB, "the host keeps holes here: {found}");
    check_ranges(&place, "f", &before);
    place.write("f", 3 * MIB - 1, b"odd");
    check_ranges(&place, "f", &before);
    place.write("f", 1_000_001, &[1; 70_000]);
    check_ranges(&place, "f", &before);
    let id = place.find("f");
    place.sandbox().fs().fallocate(id, 3, 20 * KIB + 1, 100 * KIB, false).unwrap();
    check_ranges(&place, "f", &before);
    place.truncate("f", MIB + 1);
    check_ranges(&place, "f", &before);
    place.truncate("f", 5 * MIB);
    place.write("f", 5 * MIB - 1, b"z");
    check_ranges(&place, "f", &before);
    place.checkpoint("c");
    check_ranges(&place, "f", &before);
}

#[test]
fn a_huge_sparse_base_file_costs_what_its_data_costs() {
    let odd = 7 * TIB + 12_345;
    let mut place = Place::over(|base| {
        for name in ["f", "g"] {
            sparse(&base.join(name), HUGE, &[(0, b"start"), (odd, b"odd"), (HUGE - 3, b"end")]);
        }
    });
    place.checkpoint("c1");
    for name in ["f", "g"] {
        place.write(name, 14 * TIB + 1, b"new");
    }
    place.checkpoint("c2");
    let read = bytes_read(|| {
        assert_eq!(place.diff("base", "@", Detail::NameStatus), ["f", "g"]);
        assert_eq!(place.diff("c1", "c2", Detail::Stat), ["f", "g"]);
        assert_eq!(place.diff("c2", "@", Detail::NameStatus), Vec::<String>::new());
        place.diff("c1", "@", Detail::Patch);
    });
    assert!(read < 4 * MIB, "{read} bytes are read to compare");
    // The same bytes, rewritten: only reading can show that, and the holes are not read.
    place.write("f", odd, b"odd");
    place.write("f", 14 * TIB + 1, &[0; 3]);
    assert_eq!(
        place.diff("base", "@", Detail::NameStatus),
        ["f", "g"],
        "f has another time, g another content"
    );
    place.write("f", 14 * TIB + 1, b"new");

    let read = bytes_read(|| place.apply(false));
    assert!(read < 16 * MIB, "{read} bytes are read to apply");
    let applied = place.base("f");
    assert_eq!(host::metadata(&applied).unwrap().len(), HUGE);
    assert!(taken(&applied) <= 64 * KIB, "{} bytes are taken", taken(&applied));
    assert_eq!(bytes_at(&applied, 14 * TIB, 5), b"\0new\0");
    assert_eq!(bytes_at(&applied, odd - 1, 5), b"\0odd\0");
    assert_eq!(bytes_at(&applied, 0, 6), b"start\0");
    assert_eq!(bytes_at(&applied, HUGE - 4, 4), b"\0end");

    // One path is restored across an apply, so the bytes of the older base are copied.
    place.restore("c1", &["f"]);
    assert_eq!(place.read("f", 14 * TIB, 5), [0; 5]);
    assert_eq!(place.read("f", odd, 4), b"odd\0");
    assert_eq!(place.read("f", HUGE - 3, 10), b"end");
    place.restore("c2", &[]);
    assert_eq!(place.read("f", 14 * TIB, 5), b"\0new\0");
    place.apply(true);
    assert_eq!(bytes_at(&applied, 14 * TIB, 5), [0; 5]);
    assert_eq!(bytes_at(&applied, odd, 4), b"odd\0");
    assert!(taken(&applied) <= 64 * KIB, "{} bytes are taken after the undo", taken(&applied));
    place.ask(Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false });
    place.check();
    place.reopen();
    place.restore("c1", &[]);
    assert_eq!(place.read("g", HUGE - 3, 10), b"end");
    place.check();
}

#[test]
fn a_huge_file_of_the_sandbox_costs_what_its_data_costs() {
    let place = Place::over(|base| host::write(base.join("a"), "a").unwrap());
    let id = place.make("f");
    place.checkpoint("empty");
    place.truncate("f", HUGE);
    place.write("f", 14 * TIB + 5, b"data");
    place.checkpoint("c1");
    // A truncation to nothing begins an edit at once.
    let write_anew = |size: u64, bytes: &[u8]| {
        place.truncate("f", 0);
        place.truncate("f", size);
        place.write("f", 14 * TIB + 5, bytes);
    };
    write_anew(HUGE, b"more");
    let path = tree_path("f");
    assert_eq!(place.diff("c1", "@", Detail::Patch), ["f"]);
    assert_eq!(place.diff("empty", "c1", Detail::Stat), ["f"]);
    assert_eq!(place.sandbox().fs().seek(id, 1, SeekTo::Data).unwrap(), 14 * TIB);
    place.ask(Request::Undo { path: path.clone(), steps: 1 });
    assert_eq!(place.read("f", 14 * TIB + 5, 4), b"data");
    place.ask(Request::Redo { path, steps: 1 });
    assert_eq!(place.read("f", 14 * TIB + 5, 4), b"more");
    // It becomes shorter, so older entries are compared from the end.
    write_anew(14 * TIB + 100 * MIB, b"more");
    write_anew(HUGE - 1, b"most");
    place.sandbox().fs().maintain_edits(true, &|| false);
    place.restore("c1", &[]);
    assert_eq!(place.size("f"), HUGE);
    place.apply(false);
    let applied = place.base("f");
    assert_eq!(bytes_at(&applied, 14 * TIB + 4, 6), b"\0data\0");
    assert!(taken(&applied) <= 16 * KIB, "{} bytes are taken", taken(&applied));
    place.write("f", 3 * TIB, b"later");
    place.ask(Request::Discard { detach_mounts: false });
    assert_eq!(place.read("f", 3 * TIB, 5), [0; 5]);
    place.apply(true);
    assert!(!applied.exists());
    place.ask(Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false });
    place.check();
}

#[test]
fn a_history_entry_of_a_huge_base_file_survives_an_apply() {
    let place = Place::over(|base| sparse(&base.join("f"), HUGE, &[(9 * TIB, b"old")]));
    place.write("f", TIB, b"one");
    place.apply(false);
    let read = bytes_read(|| drop(place.ask(Request::Undo { path: tree_path("f"), steps: 1 })));
    assert!(read < 4 * MIB, "{read} bytes are read");
    assert_eq!(place.read("f", TIB, 3), [0; 3]);
    assert_eq!(place.read("f", 9 * TIB, 4), b"old\0");
    place.check();
}

#[test]
fn an_apply_writes_the_holes_of_the_tree() {
    let place = Place::over(|base| {
        let bytes = vec![7; 64 * KIB as usize];
        let runs: Vec<(u64, &[u8])> = (0..40).map(|n| (n * 256 * KIB, &bytes[..])).collect();
        sparse(&base.join("f"), 16 * MIB, &runs);
        sparse(&base.join("shrunk"), 8 * MIB, &[(0, &bytes), (4 * MIB, &bytes)]);
        host::write(base.join("dense"), vec![3; MIB as usize]).unwrap();
        host::hard_link(base.join("f"), base.join("link")).unwrap();
    });
    let (before, held) = (taken(&place.base("f")), host::read(place.base("f")).unwrap());
    place.write("f", 5 * MIB + 77, b"odd");
    place.write("f", 16 * MIB - 1, b"!");
    place.truncate("shrunk", 4 * MIB + 10);
    place.truncate("shrunk", 32 * MIB);
    let id = place.find("dense");
    place.sandbox().fs().fallocate(id, 3, 256 * KIB, 512 * KIB, false).unwrap();
    let wanted = ["f", "shrunk", "dense"].map(|name| place.read(name, 0, u64::MAX));
    place.apply(false);
    let is = ["f", "shrunk", "dense"].map(|name| host::read(place.base(name)).unwrap());
    assert!(is == wanted, "every byte");
    assert!(
        wanted[1][4 * MIB as usize + 10..].iter().all(|byte| *byte == 0),
        "the cut range reads as zeros"
    );
    let taken_by = |name| taken(&place.base(name));
    assert!(taken_by("f") <= before + 16 * KIB, "{} bytes, {before} before", taken_by("f"));
    assert!(taken_by("shrunk") <= 96 * KIB, "{} bytes", taken_by("shrunk"));
    assert!(taken_by("dense") <= 528 * KIB, "{} bytes", taken_by("dense"));
    let number = |name| host::metadata(place.base(name)).unwrap().ino();
    assert_eq!(number("f"), number("link"), "it is written anew in place, and stays one file");
    place.apply(true);
    assert!(host::read(place.base("f")).unwrap() == held, "every byte is rolled back");
    // ext4 may need a block for the list of extents.
    assert!(taken_by("f") <= before + 8 * KIB, "{} bytes, {before} before", taken_by("f"));
}

#[test]
fn bytes_that_both_states_share_are_not_read() {
    let size = 64 * MIB;
    let place = Place::over(|base| {
        let bytes: Vec<u8> = (0..size).map(|n| (n % 251) as u8 + 1).collect();
        host::write(base.join("f"), bytes).unwrap();
    });
    place.write("f", 40 * MIB, b"x");
    let read = bytes_read(|| assert_eq!(place.diff("base", "@", Detail::NameStatus), ["f"]));
    assert!(read < MIB, "{read} bytes are read of {size}");
    place.checkpoint("c1");
    let kept = place.read("f", 40 * MIB, 1);
    place.write("f", 40 * MIB, &kept);
    let read = bytes_read(|| drop(place.diff("c1", "@", Detail::NameStatus)));
    assert!(read < MIB, "{read} bytes are read of {size}");
}

/// Checksums show that content was lost: the holes of damage must not pass for those of the file.
#[test]
fn a_hole_that_damage_left_is_an_error_and_not_zeros() {
    let mut place = Place::over(|base| host::write(base.join("a"), "a").unwrap());
    place.make("f");
    place.write("f", 0, &[9; 64 * KIB as usize]);
    place.checkpoint("c1");
    // The layer gets checksums, and cannot be archived.
    let blocked = place.dir.path().join("store/archive/root.new");
    host::create_dir_all(&blocked).unwrap();
    place.sandbox().compact().unwrap_err();
    host::remove_dir(&blocked).unwrap();
    place.reopen();
    let pools = host::read_dir(place.dir.path().join("store/layers")).unwrap();
    for layer in pools {
        let pool = layer.unwrap().path().join("pool");
        if let Ok(pool) = OpenOptions::new().write(true).open(pool) {
            punch_hole(&pool, ByteRange::at(0, 64 * KIB)).unwrap();
        }
    }
    let request =
        Request::Apply { paths: Vec::new(), dry_run: false, undo: false, consent: Consent::ALL };
    place.sandbox().handle(request).unwrap_err();
    assert!(!place.base("f").exists(), "nothing is written in its place");
}

#[test]
fn copies_in_a_mount_keep_holes() {
    let bench =
        Bench::over(|base| sparse(&base.join("f"), HUGE, &[(3 * TIB, b"data"), (HUGE - 1, b"!")]));
    let from = File::open(bench.at("f")).unwrap();
    assert_eq!(jailfs::internals::sys::file::seek_data(&from, 1).unwrap(), Some(3 * TIB));
    assert_eq!(
        jailfs::internals::sys::file::seek_data(&from, 4 * TIB).unwrap(),
        Some(HUGE - 4 * KIB)
    );
    let to = OpenOptions::new().write(true).create_new(true).open(bench.at("to")).unwrap();
    let before = bench.pool_bytes();
    let mut done = 3 * TIB - 5;
    while done < 3 * TIB + (8 << 30) {
        done += copy_file_range(&from, done, &to, done, 1 << 30);
    }
    assert_eq!(bytes_at(&bench.at("to"), 3 * TIB - 1, 6), b"\0data\0");
    assert_eq!(host::metadata(bench.at("to")).unwrap().len(), done);
    let grown = bench.pool_bytes() - before;
    assert!(grown < MIB, "{grown} bytes are stored");
    // A hole is copied over data.
    sparse(&bench.at("dense"), 64 * KIB, &[(0, &[5; 64 * KIB as usize])]);
    let dense = OpenOptions::new().write(true).open(bench.at("dense")).unwrap();
    assert_eq!(copy_file_range(&from, 0, &dense, 4 * KIB + 1, 8192), 8192);
    let mut wanted = vec![5; 64 * KIB as usize];
    wanted[4 * KIB as usize + 1..][..8192].fill(0);
    assert!(host::read(bench.at("dense")).unwrap() == wanted);
    for how in ["auto", "always"] {
        let copy = bench.at(how);
        let status = std::process::Command::new("cp")
            .arg(format!("--sparse={how}"))
            .args([bench.at("f"), copy.clone()])
            .status();
        assert!(status.unwrap().success(), "cp --sparse={how}");
        assert_eq!(bytes_at(&copy, 3 * TIB - 1, 6), b"\0data\0");
        assert_eq!(bytes_at(&copy, HUGE - 2, 2), b"\0!");
        assert!(taken(&copy) <= 64 * KIB, "{} bytes are taken", taken(&copy));
    }
}
