//! Records every write and flush of a disk, and replays what a power cut may leave.
//!
//! The store is on an ext4 on a loop device whose file is served by this test (FUSE, in memory).
//! The test replays the record up to each flush, adds a random subset of the later writes in any
//! order, and opens the store on the result. Every promise from before the flush must hold. So the
//! test trusts nothing between jailfs and the disk, not even the filesystem.
//!
//! `JAILFS_FLUSHES=N` checks N flushes.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking, and prints its figures"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "model/rng.rs"]
mod rng;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyWrite, Request, WriteFlags,
};

use harness::{Live, shell, text};
use rng::Rng;

/// The number of flushes that take about twenty seconds in a debug build.
const FLUSHES: usize = 8;
const SIZE: usize = 48 << 20;
const FILE: INodeNo = INodeNo(2);
const NAME: &str = "disk";

/// The requests to the disk.
#[derive(Clone)]
enum Event {
    Write {
        offset: usize,
        bytes: Vec<u8>,
    },
    /// All earlier writes are on the disk.
    Flush,
}

#[derive(Default)]
struct Recorded {
    image: Vec<u8>,
    events: Vec<Event>,
}

/// A filesystem with one file.
struct Disk(Arc<Mutex<Recorded>>);

fn attributes(ino: INodeNo) -> FileAttr {
    let (kind, size) =
        if ino == FILE { (FileType::RegularFile, SIZE as u64) } else { (FileType::Directory, 0) };
    FileAttr {
        ino,
        size,
        blocks: size / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Disk {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.as_bytes() == NAME.as_bytes() {
            true => reply.entry(&Duration::MAX, &attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::MAX, &attributes(ino));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let recorded = self.0.lock().unwrap();
        let start = (offset as usize).min(SIZE);
        reply.data(&recorded.image[start..(start + size as usize).min(SIZE)]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut recorded = self.0.lock().unwrap();
        let offset = offset as usize;
        recorded.image[offset..offset + data.len()].copy_from_slice(data);
        recorded.events.push(Event::Write { offset, bytes: data.to_vec() });
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.0.lock().unwrap().events.push(Event::Flush);
        reply.ok();
    }
}

/// Mounts that are unmounted at the end in any case, the last one first.
struct Mounts(Vec<PathBuf>);

impl Drop for Mounts {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            drop(Command::new("umount").arg("-l").arg(path).output());
        }
    }
}

/// A promise, from some event on.
struct Promise {
    events: usize,
    what: Promised,
}

enum Promised {
    /// A file has this content.
    File(String, Vec<u8>),
    /// A checkpoint exists, and this file in it has this content.
    Checkpoint(String, String, Vec<u8>),
}

/// Works in the mount, and returns each promise with its time.
fn work(live: &Live, recorded: &Mutex<Recorded>) -> Vec<Promise> {
    let mut promises = Vec::new();
    let mut promise =
        |what| promises.push(Promise { events: recorded.lock().unwrap().events.len(), what });
    for round in 0..12_u32 {
        let content = format!("round {round} ").repeat(700).into_bytes();
        // Unsynced: in place, appended, and removed again.
        live.sh(&format!(
            "echo {round} >> log; head -c 30000 /dev/urandom > scratch; seq 3000 > over; \
             mv over under; ln -f log also
             dd if=/dev/urandom of=base bs=1k seek={round} count=3 conv=notrunc status=none
             rm -f scratch"
        ));
        let name = format!("kept{round}");
        std::fs::write(live.mnt.join(&name), &content).unwrap();
        live.sh(&format!("sync {name}"));
        promise(Promised::File(name.clone(), content.clone()));
        if round % 3 == 1 {
            let checkpoint = format!("c{round}");
            live.checkpoint(&checkpoint);
            promise(Promised::Checkpoint(checkpoint, name, content));
        }
        if round == 7 {
            // No promise changes meanwhile.
            live.checkpoint("now");
            live.sh("rm under; echo gone > log; mkdir new");
            live.restore("now");
        }
        if round == 9 {
            live.jailfs(&["gc", "--operations", "2"]);
        }
    }
    promises
}

/// The disk after a power cut behind `flush`: all earlier writes, and some of those before the next
/// flush.
fn after_cut(begin: &[u8], events: &[Event], flush: usize, some: Option<&mut Rng>) -> Vec<u8> {
    let mut image = begin.to_vec();
    let mut write = |event: &Event| {
        if let Event::Write { offset, bytes } = event {
            image[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    };
    events[..flush].iter().for_each(&mut write);
    if let Some(rng) = some {
        let behind =
            events[flush + 1..].iter().take_while(|event| matches!(event, Event::Write { .. }));
        behind.filter(|_| rng.one_in(2)).for_each(write);
    }
    image
}

/// Opens the store on a disk, and compares it with the promises.
fn look(live: &Live, image: &[u8], promises: &[&Promise], when: &str) {
    let outside = live.outside();
    std::fs::write(outside.join("cut.img"), image).unwrap();
    shell(outside, "mount -o loop cut.img cut");
    let _mounts = Mounts(vec![outside.join("cut"), outside.join("seen")]);
    let jailfs = env!("CARGO_BIN_EXE_jailfs");
    shell(outside, &format!("{jailfs} mount base seen --store cut/store"));
    let seen = outside.join("seen");
    let listed = shell(&seen, &format!("{jailfs} log"));
    let read = |path: String| std::fs::read(seen.join(path));
    for promise in promises {
        match &promise.what {
            Promised::File(path, content) => {
                assert!(read(path.clone()).is_ok_and(|found| found == *content), "{when}: {path}");
            }
            Promised::Checkpoint(name, path, content) => {
                assert!(
                    listed.contains(name.as_str()),
                    "{when}: checkpoint {name} is lost: {listed}"
                );
                let found = read(format!(".jailfs/checkpoints/{name}/{path}"));
                assert!(
                    found.is_ok_and(|found| found == *content),
                    "{when}: {path} of checkpoint {name}"
                );
            }
        }
    }
    shell(outside, &format!("{jailfs} umount seen"));
    let mut check = Command::new(jailfs);
    let check = check
        .args(["check", "--read-data", "--store"])
        .arg(outside.join("cut/store"))
        .output()
        .unwrap();
    assert!(check.status.success(), "{when}: {}", text(&check));
    shell(outside, "for n in $(seq 100); do umount cut && break; sleep 0.1; done");
}

fn shared_disk(dir: &Path) -> (fuser::BackgroundSession, Arc<Mutex<Recorded>>) {
    let made = dir.join("made.img");
    shell(
        dir,
        &format!("truncate -s {SIZE} made.img; mkfs.ext4 -q -J size=4 made.img; mkdir served"),
    );
    let image = std::fs::read(&made).unwrap();
    let recorded = Arc::new(Mutex::new(Recorded { image, events: Vec::new() }));
    let session =
        fuser::spawn_mount(Disk(Arc::clone(&recorded)), dir.join("served"), &Config::default())
            .unwrap();
    (session, recorded)
}

#[test]
fn a_promise_before_a_flush_survives_every_order_of_the_later_writes() {
    let flushes = std::env::var("JAILFS_FLUSHES").map_or(FLUSHES, |text| text.parse().unwrap());
    let disk_dir = tempfile::tempdir().unwrap();
    let (session, recorded) = shared_disk(disk_dir.path());
    let begin = recorded.lock().unwrap().image.clone();
    let served = disk_dir.path().join("served").join(NAME);
    let script = format!(
        "mkdir ../disk ../cut ../seen; mount -o loop {} ../disk; mkdir -m 700 ../disk/store; \
         ln -s disk/store ../store
         seq 9000 > base",
        served.display()
    );
    let mut live = Live::with_limit(&script, &[], Duration::from_secs(100 + 6 * flushes as u64));
    let mounts = Mounts(vec![live.outside().join("disk")]);
    let promises = work(&live, &recorded);
    live.umount();
    let events = recorded.lock().unwrap().events.clone();
    let all: Vec<usize> =
        (0..events.len()).filter(|at| matches!(events[*at], Event::Flush)).collect();
    eprintln!("{} writes and {} flushes", events.len() - all.len(), all.len());
    assert!(all.len() > 2 * promises.len(), "each promise is flushed");
    let mut rng = Rng::new(20);
    // Evenly spread, and the last one.
    let chosen =
        (1..=flushes.min(all.len())).map(|n| all[n * all.len() / flushes.min(all.len()) - 1]);
    for flush in chosen {
        // An operation that was acknowledged before the flush request was on the disk then.
        let held: Vec<&Promise> =
            promises.iter().filter(|promise| promise.events <= flush + 1).collect();
        for with_some in [false, true] {
            let image = after_cut(&begin, &events, flush, with_some.then_some(&mut rng));
            look(&live, &image, &held, &format!("flush {flush} of {}, {with_some}", events.len()));
        }
    }
    shell(Path::new("/"), &format!("umount {}", live.outside().join("disk").display()));
    drop(mounts);
    drop(live);
    drop(session);
}
