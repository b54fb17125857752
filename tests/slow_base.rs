//! A base that answers slowly delays only the requests that need it.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, UNIX_EPOCH};

use common::Bench;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEntry, Request,
};

const ROOT: INodeNo = INodeNo(1);
const SLOW: INodeNo = INodeNo(2);
const FAST: INodeNo = INodeNo(3);
const DIR: INodeNo = INodeNo(4);
/// The base remembers nothing for longer than this.
const LIFETIME: Duration = Duration::ZERO;
const CONTENT: &[u8] = b"content";

/// A filesystem with `fast` and `dir/slow`. The first lookup of the latter is answered when the
/// test says so.
struct Slow(Mutex<Option<Sender<ReplyEntry>>>);

fn attr(ino: INodeNo) -> FileAttr {
    let is_dir = ino == ROOT || ino == DIR;
    FileAttr {
        ino,
        size: CONTENT.len() as u64,
        blocks: 1,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if is_dir { FileType::Directory } else { FileType::RegularFile },
        perm: if is_dir { 0o755 } else { 0o644 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Slow {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS).unwrap();
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("dir") if parent == ROOT => reply.entry(&LIFETIME, &attr(DIR), Generation(0)),
            Some("slow") if parent == DIR => match self.0.lock().unwrap().take() {
                Some(waiting) => waiting.send(reply).unwrap(),
                None => reply.entry(&LIFETIME, &attr(SLOW), Generation(0)),
            },
            Some("fast") if parent == ROOT => reply.entry(&LIFETIME, &attr(FAST), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&LIFETIME, &attr(ino));
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        _size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(CONTENT.get(usize::try_from(offset).unwrap()..).unwrap_or_default());
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let all = match ino {
            ROOT => vec![(DIR, "dir"), (FAST, "fast")],
            _ => vec![(SLOW, "slow")],
        };
        for (cookie, (ino, name)) in (1..).zip(all) {
            if cookie > offset && reply.add(ino, cookie, attr(ino).kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

/// A slow base, a mount over it, and the lookup that waits.
fn over_slow_base() -> (BackgroundSession, Bench, Receiver<ReplyEntry>) {
    let (sender, waiting) = channel();
    let slow = Slow(Mutex::new(Some(sender)));
    let mut session = None;
    let bench = Bench::over(|base: &Path| {
        common::take_away_if_hanging(base);
        session = Some(fuser::spawn_mount(slow, base, &Config::default()).unwrap());
    });
    (session.unwrap(), bench, waiting)
}

#[test]
fn a_lookup_that_the_base_answers_late_delays_no_other_request() {
    let (_session, bench, waiting) = over_slow_base();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| std::fs::metadata(bench.at("dir/slow")).unwrap().len());
        let reply = waiting.recv().unwrap();
        // In another directory, because the kernel locks that of a lookup against changes.
        for round in 0..50 {
            let path = bench.at(&format!("new{round}"));
            std::fs::write(&path, "written").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"written");
            assert_eq!(std::fs::metadata(bench.at("fast")).unwrap().len(), 7);
            assert!(std::fs::metadata(bench.at("absent")).is_err());
            std::fs::rename(&path, bench.at("renamed")).unwrap();
        }
        assert_eq!(std::fs::read(bench.at("fast")).unwrap(), CONTENT);
        bench.fs.sync().unwrap();
        assert!(!late.is_finished());
        reply.entry(&LIFETIME, &attr(SLOW), Generation(0));
        assert_eq!(late.join().unwrap(), 7);
        assert_eq!(std::fs::read(bench.at("dir/slow")).unwrap(), CONTENT);
    });
}
