//! A base that answers slowly delays only the requests that need it.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::ffi::OsStr;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use common::Bench;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEntry, ReplyXattr, Request,
};
use jailfs::internals::store::record::LayerKind;
use jailfs::types::Epoch;

const ROOT: INodeNo = INodeNo(1);
const SLOW: INodeNo = INodeNo(2);
const FAST: INodeNo = INodeNo(3);
const DIR: INodeNo = INodeNo(4);
const LINK: INodeNo = INodeNo(5);
/// The base remembers nothing for longer than this.
const LIFETIME: Duration = Duration::ZERO;
const CONTENT: &[u8] = b"content";

/// A request to the base, which one test answers late.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Late {
    Lookup(INodeNo),
    Read(INodeNo),
    Readdir(INodeNo),
    Readlink(INodeNo),
    Listxattr(INodeNo),
}

/// Sends a reply.
type Answer = Box<dyn FnOnce() + Send>;

/// The kind of request whose next one is answered late, and who gets the answer.
type NextLate = Arc<Mutex<Option<(Late, Sender<Answer>)>>>;

/// A filesystem with `fast`, `dir/slow` and `dir/link`. It answers the next request of one kind
/// when the test says so.
struct Slow {
    next: NextLate,
}

impl Slow {
    fn answer(&self, request: Late, answer: impl FnOnce() + Send + 'static) {
        let waiting = self.next.lock().unwrap().take_if(|(late, _)| *late == request);
        match waiting {
            Some((_, waiting)) => waiting.send(Box::new(answer)).unwrap(),
            None => answer(),
        }
    }
}

fn attr(ino: INodeNo) -> FileAttr {
    let is_dir = ino == ROOT || ino == DIR;
    let kind = match ino {
        ROOT | DIR => FileType::Directory,
        LINK => FileType::Symlink,
        _ => FileType::RegularFile,
    };
    FileAttr {
        ino,
        size: CONTENT.len() as u64,
        blocks: 1,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
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
        let found = match name.to_str() {
            Some("dir") if parent == ROOT => DIR,
            Some("fast") if parent == ROOT => FAST,
            Some("slow") if parent == DIR => SLOW,
            Some("link") if parent == DIR => LINK,
            _ => return reply.error(Errno::ENOENT),
        };
        self.answer(Late::Lookup(found), move || {
            reply.entry(&LIFETIME, &attr(found), Generation(0));
        });
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&LIFETIME, &attr(ino));
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        self.answer(Late::Readlink(ino), move || reply.data(b"../fast"));
    }

    fn listxattr(&self, _request: &Request, ino: INodeNo, _size: u32, reply: ReplyXattr) {
        self.answer(Late::Listxattr(ino), move || reply.size(0));
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        _size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.answer(Late::Read(ino), move || {
            reply.data(CONTENT.get(usize::try_from(offset).unwrap()..).unwrap_or_default());
        });
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.answer(Late::Readdir(ino), move || {
            let all = match ino {
                ROOT => [(DIR, "dir"), (FAST, "fast")],
                _ => [(SLOW, "slow"), (LINK, "link")],
            };
            for (cookie, (ino, name)) in (1..).zip(all) {
                if cookie > offset && reply.add(ino, cookie, attr(ino).kind, name) {
                    break;
                }
            }
            reply.ok();
        });
    }
}

/// A slow base, a mount over it, and the request that is answered late next.
fn over_slow_base() -> (BackgroundSession, Bench, NextLate) {
    let next = NextLate::default();
    let slow = Slow { next: Arc::clone(&next) };
    let mut session = None;
    let bench = Bench::over(|base: &Path| {
        common::take_away_if_hanging(base);
        session = Some(fuser::spawn_mount(slow, base, &Config::default()).unwrap());
    });
    (session.unwrap(), bench, next)
}

/// Answers the next request of this kind late. Returns where its answer waits.
fn answer_late(next: &NextLate, late: Late) -> Receiver<Answer> {
    let (sender, waiting) = channel();
    *next.lock().unwrap() = Some((late, sender));
    waiting
}

fn late_answer(waiting: &Receiver<Answer>) -> Answer {
    waiting.recv_timeout(Duration::from_secs(30)).unwrap()
}

/// Runs an operation whose request to the base is answered late, and meanwhile everything else.
fn delays_nothing_else(late: Late, operation: impl FnOnce(&Bench) + Send) {
    let (_session, bench, next) = over_slow_base();
    let waiting = answer_late(&next, late);
    std::thread::scope(|scope| {
        let operation = scope.spawn(|| operation(&bench));
        let answer = late_answer(&waiting);
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
        assert_eq!(std::fs::read_dir(bench.at(".")).unwrap().count(), 3);
        std::fs::write(bench.at("fast"), "changed").unwrap();
        bench.fs.sync().unwrap();
        assert!(!operation.is_finished());
        answer();
        operation.join().unwrap();
    });
}

#[test]
fn a_lookup_that_the_base_answers_late_delays_no_other_request() {
    delays_nothing_else(Late::Lookup(SLOW), |bench| {
        assert_eq!(std::fs::metadata(bench.at("dir/slow")).unwrap().len(), 7);
        assert_eq!(std::fs::read(bench.at("dir/slow")).unwrap(), CONTENT);
    });
}

#[test]
fn a_listing_that_the_base_answers_late_delays_no_other_request() {
    delays_nothing_else(Late::Readdir(DIR), |bench| {
        assert_eq!(std::fs::read_dir(bench.at("dir")).unwrap().count(), 2);
    });
}

#[test]
fn a_copy_up_that_the_base_answers_late_delays_no_other_request() {
    delays_nothing_else(Late::Listxattr(SLOW), |bench| {
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(bench.at("dir/slow"), mode).unwrap();
        let now = std::fs::metadata(bench.at("dir/slow")).unwrap();
        assert_eq!(now.permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read(bench.at("dir/slow")).unwrap(), CONTENT);
    });
}

#[test]
fn a_copy_up_of_a_directory_that_the_base_answers_late_delays_no_other_request() {
    delays_nothing_else(Late::Listxattr(DIR), |bench| {
        std::fs::write(bench.at("dir/new"), "new").unwrap();
        assert_eq!(std::fs::read_dir(bench.at("dir")).unwrap().count(), 3);
    });
}

#[test]
fn a_block_that_the_base_answers_late_delays_no_other_request() {
    delays_nothing_else(Late::Read(SLOW), |bench| {
        let file = std::fs::File::options().write(true).open(bench.at("dir/slow")).unwrap();
        file.write_all_at(b"XX", 2).unwrap();
        assert_eq!(std::fs::read(bench.at("dir/slow")).unwrap(), b"coXXent");
    });
}

#[test]
fn a_symlink_that_the_base_answers_late_delays_no_other_request() {
    delays_nothing_else(Late::Readlink(LINK), |bench| {
        assert_eq!(std::fs::read_link(bench.at("dir/link")).unwrap(), Path::new("../fast"));
    });
}

#[test]
fn a_removal_that_the_base_answers_late_delays_no_other_request() {
    delays_nothing_else(Late::Listxattr(SLOW), |bench| {
        let held = std::fs::File::options().read(true).open(bench.at("dir/slow")).unwrap();
        std::fs::remove_file(bench.at("dir/slow")).unwrap();
        assert!(std::fs::metadata(bench.at("dir/slow")).is_err());
        assert_eq!(held.metadata().unwrap().len(), 7);
    });
}

#[test]
fn a_restore_that_the_base_answers_late_delays_no_reader() {
    let (_session, bench, next) = over_slow_base();
    let fs = &bench.fs;
    let state = fs.state();
    std::fs::set_permissions(bench.at("dir/slow"), PermissionsExt::from_mode(0o600)).unwrap();
    let layer = fs.store().create_layer(None, "main", Epoch(0), LayerKind::Branches).unwrap();
    let waiting = answer_late(&next, Late::Lookup(SLOW));
    std::thread::scope(|scope| {
        let restore = scope.spawn(|| fs.switch(state, layer).map(|done| done.invalidations));
        let answer = late_answer(&waiting);
        for _ in 0..50 {
            assert_eq!(std::fs::read(bench.at("fast")).unwrap(), CONTENT);
            assert!(std::fs::metadata(bench.at("absent")).is_err());
            assert_eq!(std::fs::read_dir(bench.at(".")).unwrap().count(), 2);
        }
        assert!(!restore.is_finished());
        answer();
        assert!(!restore.join().unwrap().unwrap().attrs.is_empty());
    });
}
