//! Space that fallocate(2) allocates: it is counted, a write into it needs no room, and it reads as
//! zeros wherever the content goes.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use harness::Live;
use jailfs::error::FsError;
use jailfs::internals::fs::{Caller, Limits};
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{Consent, Reply, Request, Rev, Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId, Timestamp, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };
const MIB: u64 = 1 << 20;
const KEEP_SIZE: i32 = 1;
const ZERO_RANGE: i32 = 16;
/// The filesystem of a store may take some blocks for its own lists.
const LISTS: u64 = 128 << 10;

struct Place {
    dir: tempfile::TempDir,
    sandbox: Option<Arc<Sandbox>>,
    /// The edit clock.
    seconds: Arc<AtomicI64>,
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("base")).unwrap();
        std::fs::write(dir.path().join("base/old"), [7; 10_000]).unwrap();
        let mut place = Place { dir, sandbox: None, seconds: Arc::default() };
        place.reopen();
        place
    }

    fn reopen(&mut self) {
        self.sandbox = None;
        let at = |name: &str| self.dir.path().join(name);
        let options = StoreOptions::default();
        let sandbox = Sandbox::create_or_open(&at("base"), &at("store"), &options).unwrap();
        let clock = Arc::clone(&self.seconds);
        let now = move || Timestamp { secs: clock.load(Ordering::SeqCst), nanos: 0 };
        sandbox.fs().set_edit_clock(Box::new(now));
        self.sandbox = Some(sandbox);
    }

    /// The next change of a file is another edit.
    fn wait(&self) {
        self.seconds.fetch_add(10, Ordering::SeqCst);
    }

    fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().unwrap()
    }

    fn file(&self, file: &str) -> NodeId {
        let fs = self.sandbox().fs();
        match fs.lookup(NodeId::ROOT, &name(file)) {
            Ok(entry) => entry.id,
            Err(_) => fs.mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME).unwrap().id,
        }
    }

    fn allocate(&self, file: &str, at: u64, len: u64) {
        self.sandbox().fs().fallocate(self.file(file), 0, at, len, false).unwrap();
    }

    fn write(&self, id: NodeId, at: u64, len: u64) {
        for at in (at..at + len).step_by(MIB as usize) {
            self.sandbox().fs().write(id, at, &[8; MIB as usize], false).unwrap();
        }
    }

    /// Removes a file that no process has open.
    fn remove(&self, file: &str) {
        let id = self.file(file);
        self.sandbox().fs().unlink(NodeId::ROOT, &name(file)).unwrap();
        self.sandbox().fs().forget(id, u64::MAX);
    }

    /// The only value of all bytes of a range.
    fn byte_of(&self, file: &str, at: u64, len: u64) -> u8 {
        let plan = self.sandbox().fs().read(self.file(file), at, len).unwrap();
        let bytes = plan.read(false).unwrap().unwrap();
        assert_eq!(bytes.len() as u64, len);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "more than one value");
        bytes[0]
    }

    /// Size, and bytes of blocks.
    fn size(&self, id: NodeId) -> (u64, u64) {
        let attr = self.sandbox().fs().getattr(id).unwrap();
        (attr.size, attr.blocks * 512)
    }

    /// Bytes that the pools take on disk.
    fn taken(&self) -> u64 {
        let layers = std::fs::read_dir(self.dir.path().join("store/layers")).unwrap();
        let pools = layers.map(|layer| layer.unwrap().path().join("pool"));
        pools.map(|pool| std::fs::metadata(pool).map_or(0, |about| about.blocks() * 512)).sum()
    }

    fn ask(&self, request: Request) -> Reply {
        self.sandbox().handle(request).unwrap()
    }

    fn checkpoint(&self, name: &str) {
        self.ask(Request::Checkpoint { name: Some(name.to_owned()), message: String::new() });
    }

    fn gc(&self) -> u64 {
        let request = Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false };
        match self.ask(request) {
            Reply::Collected(collected) => collected.bytes,
            other => panic!("{other:?}"),
        }
    }

    fn check(&self) {
        match self.ask(Request::Check { read_data: true }) {
            Reply::Checked(checked) => assert!(checked.problems.is_empty(), "{checked:#?}"),
            other => panic!("{other:?}"),
        }
    }
}

/// The bytes that this thread has written to files.
fn written_by_this_thread() -> u64 {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap().parse().unwrap()
}

fn is_about(bytes: u64, wanted: u64) -> bool {
    bytes.abs_diff(wanted) <= LISTS
}

#[test]
fn allocated_space_is_counted_and_written_in_place() {
    let place = Place::new();
    let file = place.file("f");
    place.write(file, 4 * MIB, MIB);
    let before = place.taken();
    place.allocate("f", 5000, 16 * MIB - 5000 + 100);
    assert_eq!(place.size(file), (16 * MIB + 100, 16 * MIB));
    assert!(is_about(place.taken() - before, 15 * MIB), "{}", place.taken() - before);
    assert_eq!(place.byte_of("f", 0, 4 * MIB), 0);
    assert_eq!((place.byte_of("f", 4 * MIB, MIB), place.byte_of("f", 5 * MIB, MIB)), (8, 0));
    let before = place.taken();
    // Content that is kept as an edit goes to fresh addresses. Zeros are not kept.
    for at in [8, 12, 13] {
        place.wait();
        place.write(file, at * MIB, MIB);
    }
    assert_eq!((place.byte_of("f", 12 * MIB, 2 * MIB), place.byte_of("f", 14 * MIB, MIB)), (8, 0));
    // Nothing is allocated twice, and not beyond the end.
    place.allocate("f", 0, 16 * MIB);
    let fs = place.sandbox().fs();
    fs.fallocate(file, KEEP_SIZE, 16 * MIB, 4 * MIB, false).unwrap();
    assert!(is_about(place.taken(), before), "{} {before}", place.taken());
    assert_eq!(place.size(file), (16 * MIB + 100, 16 * MIB + 4096));
    place.check();
}

#[test]
fn an_allocation_that_has_no_room_changes_nothing() {
    let place = Place::new();
    let file = place.file("f");
    place.write(file, 0, MIB);
    let (size, before) = (place.size(file), place.taken());
    let fs = place.sandbox().fs();
    for (mode, at) in [(0, 0), (0, 100), (KEEP_SIZE, 0), (0, 1 << 42)] {
        // More than the disk has.
        let done = fs.fallocate(file, mode, at, 1 << 43, false);
        assert!(matches!(done, Err(FsError::NoSpace)), "{done:?}");
        assert_eq!((place.size(file), place.taken()), (size, before));
    }
    assert_eq!((place.byte_of("f", 0, MIB), place.gc()), (8, 0));
    // More than the sandbox may store.
    fs.set_limits(Limits { bytes: Some(before + 8 * MIB), files: None });
    let done = fs.fallocate(file, 0, MIB, 9 * MIB, false);
    assert!(matches!(done, Err(FsError::NoSpace)), "{done:?}");
    assert_eq!((place.size(file), place.taken()), (size, before));
    place.allocate("f", MIB, 4 * MIB);
    // The rest is taken by other content, and the allocated range can still be written.
    let other = place.file("other");
    let mut at = 0;
    while fs.write(other, at, &[9; 4096], false).is_ok() {
        at += 4096;
    }
    assert!(at > MIB && at < 4 * MIB, "{at}");
    place.wait();
    place.write(file, MIB, 4 * MIB);
    assert_eq!(place.byte_of("f", 0, 5 * MIB), 8);
}

#[test]
fn a_call_that_fails_in_the_middle_changes_nothing_and_leaves_no_blocks() {
    let place = Place::new();
    let file = place.file("f");
    // Three holes.
    place.write(file, 2 * MIB, MIB);
    place.write(file, 4 * MIB, MIB);
    let (size, before) = (place.size(file), place.taken());
    let fs = place.sandbox().fs();
    for rules in [
        "fail:store.allocate:1+:ENOSPC",
        "fail:store.allocate:3+:ENOSPC",
        "fail:store.allocate:2+:EIO",
        // The record of the change.
        "fail:store.write:1+:ENOSPC",
    ] {
        let done = failpoint::with(rules, || fs.fallocate(file, 0, 0, 8 * MIB, false));
        assert!(done.is_err(), "{rules}");
        assert_eq!(place.size(file), size, "{rules}");
        assert!(is_about(place.taken(), before), "{rules}: {} {before}", place.taken());
    }
    // A filesystem that cannot allocate.
    for rules in ["fail:store.allocate:1+:EOPNOTSUPP", "fail:store.allocate:2+:EOPNOTSUPP"] {
        failpoint::with(rules, || fs.fallocate(file, 0, 0, 8 * MIB, false)).unwrap();
        assert_eq!(place.size(file), (8 * MIB, size.1), "{rules}");
        assert!(is_about(place.taken(), before), "{rules}: {} {before}", place.taken());
        fs.truncate(file, size.0, false).unwrap();
    }
    place.allocate("f", 0, 8 * MIB);
    assert_eq!(place.size(file), (8 * MIB, 8 * MIB));
    assert_eq!((place.byte_of("f", 0, 2 * MIB), place.byte_of("f", 2 * MIB, MIB)), (0, 8));
    place.check();
}

#[test]
fn a_sync_writes_no_zeros_of_an_allocation() {
    let mut place = Place::new();
    place.allocate("small", 0, 100);
    place.sandbox().fs().sync().unwrap();
    let before = written_by_this_thread();
    place.allocate("f", 0, 256 * MIB);
    place.sandbox().fs().sync().unwrap();
    let written = written_by_this_thread() - before;
    assert!(written < MIB, "{written}");
    place.reopen();
    assert_eq!((place.byte_of("small", 0, 100), place.byte_of("f", 255 * MIB, MIB)), (0, 0));
    place.check();
}

#[test]
fn removed_allocations_are_freed_also_after_the_store_was_opened_again() {
    let mut place = Place::new();
    let before = place.taken();
    for is_reopened in [false, true] {
        place.allocate("f", 0, 16 * MIB);
        place.allocate("kept", 0, MIB);
        // An edit of it does not keep its zeros.
        place.wait();
        place.write(place.file("f"), 0, MIB);
        if is_reopened {
            place.reopen();
        }
        place.wait();
        place.remove("f");
        let id = place.file("kept");
        let freed = place.gc();
        let taken = place.taken() - before;
        assert!(is_about(taken, 2 * MIB), "{taken}: the edit has the bytes that were written");
        assert!(is_about(freed, 15 * MIB), "{freed}");
        assert_eq!(place.gc(), 0);
        let edits = jailfs::sandbox::Bounds { edits: 0, ..Default::default() };
        let bounds = jailfs::sandbox::Bounds::default();
        place.sandbox().fs().set_edit_bounds(edits);
        place.sandbox().fs().set_edit_bounds(bounds);
        place.gc();
        assert!(is_about(place.taken() - before, MIB));
        // The other allocation is still written in place.
        place.wait();
        place.write(id, 0, MIB);
        assert!(is_about(place.taken() - before, MIB), "{}", place.taken() - before);
        place.remove("kept");
        place.sandbox().fs().set_edit_bounds(edits);
        place.sandbox().fs().set_edit_bounds(bounds);
        place.gc();
        assert!(is_about(place.taken(), before), "{} {before}", place.taken());
    }
    place.check();
}

#[test]
fn a_checkpoint_ends_an_allocation_and_its_zeros_are_read_everywhere() {
    let mut place = Place::new();
    let (file, before) = (place.file("f"), place.taken());
    place.allocate("f", 0, 16 * MIB);
    place.write(file, 2 * MIB, MIB);
    place.allocate("old", 10_000, MIB);
    place.checkpoint("one");
    place.sandbox().compact().unwrap();
    assert!(place.taken() - before < 2 * MIB, "{}", place.taken() - before);
    let holds = |place: &Place| {
        let file = place.file("f");
        assert_eq!(place.size(file), (16 * MIB, 16 * MIB));
        assert_eq!((place.byte_of("f", 0, 2 * MIB), place.byte_of("f", 2 * MIB, MIB)), (0, 8));
        assert_eq!(place.byte_of("f", 3 * MIB, 13 * MIB), 0);
        assert_eq!((place.byte_of("old", 0, 10_000), place.byte_of("old", 10_000, MIB)), (7, 0));
        place.check();
    };
    holds(&place);
    place.write(file, 0, 4 * MIB);
    let restore = Request::Restore {
        to: Rev::parse("one"),
        paths: Vec::new(),
        dry_run: false,
        detach_mounts: false,
    };
    place.ask(restore);
    holds(&place);
    place.gc();
    place.reopen();
    holds(&place);
    let apply =
        Request::Apply { paths: Vec::new(), dry_run: false, undo: false, consent: Consent::ALL };
    place.allocate("new", 0, MIB);
    place.ask(apply);
    let base = |file: &str| std::fs::read(place.dir.path().join("base").join(file)).unwrap();
    assert!(base("new") == vec![0; MIB as usize]);
    assert!(base("f")[2 * MIB as usize..][..MIB as usize] == vec![8; MIB as usize]);
    assert!(base("old")[10_000..] == vec![0; MIB as usize]);
    assert_eq!(place.byte_of("new", 0, MIB), 0);
    place.check();
}

#[test]
fn an_allocation_can_be_undone() {
    let place = Place::new();
    let file = place.file("f");
    place.write(file, 0, MIB);
    place.wait();
    place.allocate("f", 0, 4 * MIB);
    place.wait();
    place.write(file, MIB, MIB);
    let undo = || {
        let path = TreePath::parse(b"f").unwrap();
        place.ask(Request::Undo { path, steps: 1 });
        place.size(place.file("f")).0
    };
    assert_eq!((undo(), place.byte_of("f", MIB, 3 * MIB)), (4 * MIB, 0));
    assert_eq!((undo(), place.byte_of("f", 0, MIB)), (MIB, 8));
    place.check();
}

#[test]
fn files_without_a_name_have_their_allocations_until_their_last_close() {
    let place = Place::new();
    let fs = place.sandbox().fs();
    let before = place.taken();
    let file = place.file("f");
    fs.unlink(NodeId::ROOT, &name("f")).unwrap();
    let unnamed = fs.tmpfile(NodeId::ROOT, 0o600, 0, ME).unwrap().id;
    for id in [file, unnamed] {
        fs.fallocate(id, 0, 0, 8 * MIB, false).unwrap();
        assert_eq!(place.size(id), (8 * MIB, 8 * MIB));
        place.write(id, 0, MIB);
        let bytes = fs.read(id, MIB, MIB).unwrap().read(false).unwrap().unwrap();
        assert!(bytes == vec![0; MIB as usize]);
    }
    // The scratch file of removed files has no name.
    assert!(is_about(place.taken() - before, 8 * MIB), "{}", place.taken() - before);
    fs.forget(unnamed, 1);
    fs.forget(file, 1);
    place.gc();
    assert!(is_about(place.taken(), before), "{} {before}", place.taken());
}

#[test]
fn copies_and_zeroed_ranges_allocate_nothing() {
    let place = Place::new();
    let fs = place.sandbox().fs();
    let (from, to) = (place.file("from"), place.file("to"));
    fs.truncate(from, 1 << 40, false).unwrap();
    place.allocate("to", 0, 4 * MIB);
    let before = place.taken();
    assert_eq!(fs.copy_range(from, 0, to, 4 * MIB, 1 << 40, false).unwrap(), 1 << 40);
    fs.fallocate(to, ZERO_RANGE, MIB, 2 * MIB, false).unwrap();
    assert_eq!(place.size(to), ((1 << 40) + 4 * MIB, 2 * MIB));
    assert!(place.taken() <= before);
}

/// The small disk of a store; unmounted after the mount.
struct Disk(PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.0).output());
    }
}

const PROGRAM: &str = "
import errno
def code(call, *args):
    try:
        call(*args)
    except OSError as e:
        return errno.errorcode[e.errno]
def blocks(path):
    return os.stat(path).st_blocks
def fill(path, step):
    f = open(path, 'ab', buffering=0)
    try:
        while True:
            f.write(b'f' * step)
    except OSError as e:
        assert e.errno == errno.ENOSPC, e
    f.close()
f = os.open('f', os.O_RDWR | os.O_CREAT)
";

/// As xfstests generic/213 and generic/568, on a disk that is filled after the allocation.
fn fill_and_write(disk: &str) {
    let script = format!("mkdir -m 700 ../store; {disk}; chmod 700 ../store; echo base > base");
    let live = Live::with_limit(&script, &[], Duration::from_secs(200));
    let _disk = Disk(live.store.clone());
    let mut puppet = live.puppet("");
    puppet.run(PROGRAM);
    // Each block that a range touches is allocated.
    puppet.run("os.posix_fallocate(f, 256, 4096)");
    puppet.gives("blocks('f'), os.fstat(f).st_size", "(16, 4352)");
    // More than is free.
    puppet.gives("code(os.posix_fallocate, f, 0, 1 << 30)", "'ENOSPC'");
    puppet.gives("code(os.posix_fallocate, f, 0, 1 << 42)", "'ENOSPC'");
    puppet.gives("blocks('f'), os.fstat(f).st_size", "(16, 4352)");
    puppet.run("os.pwrite(f, b'kept', 0); os.posix_fallocate(f, 0, 8_000_100)");
    puppet.gives("blocks('f') >= 8_000_100 // 512, os.fstat(f).st_size", "(True, 8000100)");
    puppet.run("fill('large', 100_000); fill('large', 4096); fill('large', 512)");
    puppet.run("fill('large', 4096); fill('large', 512)");
    // The edit history would keep what a write replaces from now on.
    puppet.run("import time; time.sleep(1.5)");
    puppet.run("for at in range(0, 8_000_000, 4000): os.pwrite(f, b'w' * 4000, at)");
    puppet.run("os.fsync(f)");
    puppet.gives("os.pread(f, 9_000_000, 0) == b'w' * 8_000_000 + bytes(100)", "True");
    puppet.end();
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
}

fn image(size: &str, kind: &str) -> String {
    format!("truncate -s {size} ../image; mkfs.{kind} -q ../image; mount -o loop ../image ../store")
}

#[test]
fn an_allocated_range_can_be_written_on_a_full_disk() {
    fill_and_write("mount -t tmpfs -o size=24m,mode=700 small ../store");
    fill_and_write(&image("48M", "ext4"));
    fill_and_write(&image("400M", "xfs"));
}

#[test]
fn an_allocated_range_can_be_written_on_a_full_btrfs() {
    fill_and_write(&image("256M", "btrfs"));
}

/// A host with blocks of 1 KiB tells holes within the blocks of a pool.
#[test]
fn small_blocks_of_a_disk_hide_no_bytes_beside_allocated_ones() {
    let disk = "truncate -s 96M ../image; mkfs.ext4 -q -b 1024 ../image; \
                mount -o loop ../image ../store";
    let script = format!("mkdir -m 700 ../store; {disk}; chmod 700 ../store; echo base > base");
    let live = Live::with_limit(&script, &[], Duration::from_secs(100));
    let _disk = Disk(live.store.clone());
    let mut puppet = live.puppet("");
    puppet.run(PROGRAM);
    puppet.run("os.posix_fallocate(f, 0, 1 << 20); os.pwrite(f, b'x' * 100, 6000)");
    puppet.run("os.fsync(f); g = os.open('g', os.O_RDWR | os.O_CREAT)");
    puppet.run("os.posix_fallocate(g, 0, 4 << 20); os.pwrite(g, b'y' * 100, 9000)");
    live.jailfs(&["checkpoint", "one"]);
    // Frees what the first checkpoint needs and the present state does not.
    puppet.run("os.unlink('g'); os.close(g)");
    live.jailfs(&["checkpoint", "two"]);
    live.jailfs(&["drop", "one"]);
    live.jailfs(&["gc"]);
    let read = "os.pread(f, 1 << 20, 0) == bytes(6000) + b'x' * 100 + bytes((1 << 20) - 6100)";
    puppet.gives(read, "True");
    puppet.end();
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
}
