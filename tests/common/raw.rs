//! Sends hand-made requests: the server gets one end of a socket pair instead of `/dev/fuse`, and
//! the test plays the kernel at the other end.
//!
//! A socket of type SOCK_SEQPACKET keeps messages apart as the device does. So a test can send
//! messages that no kernel sends, and sees the bytes of each answer. The opcodes and layouts are
//! those of `fuse(4)` and `linux/fuse.h`. Only the constants that tests use are defined here.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, send, setsockopt, shutdown,
    socketpair, sockopt,
};
use nix::sys::stat::Mode;

use jailfs::internals::fs::Fs;
use jailfs::internals::fuse::{Handed, MountOptions, Mounted, adopt};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// A buffer size for the largest message.
const ROOM: usize = 4 << 20;

pub const LOOKUP: u32 = 1;
pub const FORGET: u32 = 2;
pub const GETATTR: u32 = 3;
pub const SETATTR: u32 = 4;
pub const READLINK: u32 = 5;
pub const SYMLINK: u32 = 6;
pub const MKNOD: u32 = 8;
pub const MKDIR: u32 = 9;
pub const UNLINK: u32 = 10;
pub const RMDIR: u32 = 11;
pub const RENAME: u32 = 12;
pub const LINK: u32 = 13;
pub const OPEN: u32 = 14;
pub const READ: u32 = 15;
pub const WRITE: u32 = 16;
pub const STATFS: u32 = 17;
pub const RELEASE: u32 = 18;
pub const FSYNC: u32 = 20;
pub const SETXATTR: u32 = 21;
pub const GETXATTR: u32 = 22;
pub const LISTXATTR: u32 = 23;
pub const REMOVEXATTR: u32 = 24;
pub const FLUSH: u32 = 25;
pub const INIT: u32 = 26;
pub const OPENDIR: u32 = 27;
pub const READDIR: u32 = 28;
pub const RELEASEDIR: u32 = 29;
pub const FSYNCDIR: u32 = 30;
pub const ACCESS: u32 = 34;
pub const CREATE: u32 = 35;
pub const INTERRUPT: u32 = 36;
pub const DESTROY: u32 = 38;
pub const IOCTL: u32 = 39;
pub const BATCH_FORGET: u32 = 42;
pub const FALLOCATE: u32 = 43;
pub const READDIRPLUS: u32 = 44;
pub const RENAME2: u32 = 45;
pub const LSEEK: u32 = 46;
pub const COPY_FILE_RANGE: u32 = 47;
pub const TMPFILE: u32 = 51;

/// The node of the root.
pub const ROOT: u64 = 1;

/// The arguments of a request, assembled field by field.
#[derive(Clone, Default)]
pub struct Body(pub Vec<u8>);

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes:", self.0.len())?;
        self.0.iter().take(200).try_for_each(|byte| write!(f, " {byte:02x}"))
    }
}

impl Body {
    pub fn new() -> Body {
        Body::default()
    }

    pub fn u32(mut self, value: u32) -> Body {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Body {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    /// Appends bytes.
    pub fn bytes(mut self, bytes: &[u8]) -> Body {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends a string with its terminating zero byte.
    pub fn name(self, name: &[u8]) -> Body {
        self.bytes(name).bytes(b"\0")
    }
}

/// The caller, as the header of a request names it.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub unique: u64,
    /// 0 or the errno.
    pub errno: i32,
    pub body: Vec<u8>,
}

impl Answer {
    /// The result as a system call would return it.
    pub fn result(self) -> Result<Vec<u8>, Errno> {
        if self.errno == 0 { Ok(self.body) } else { Err(Errno::from_raw(self.errno)) }
    }
}

/// The offset of an attribute in the answers that have one (`struct fuse_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawAttr {
    pub ino: u64,
    pub size: u64,
    pub blocks: u64,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds and nanoseconds: atime, mtime, ctime.
    pub times: [(u64, u32); 3],
    pub rdev: u32,
    pub blksize: u32,
}

/// A name in an answer to READDIRPLUS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawListed {
    pub name: Vec<u8>,
    pub cookie: u64,
    pub ino: u64,
    /// The file type, as in `d_type`.
    pub kind: u32,
    /// `None` if the name came without attributes.
    pub entry: Option<RawEntry>,
}

/// The answer to LOOKUP and the requests like it (`struct fuse_entry_out`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawEntry {
    pub node: u64,
    pub attr: RawAttr,
}

/// The 32-bit number at an offset of an answer.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(
        bytes.get(at..at + 4).expect("the answer is long enough").try_into().expect("4 bytes"),
    )
}

/// The 64-bit number at an offset of an answer.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(
        bytes.get(at..at + 8).expect("the answer is long enough").try_into().expect("8 bytes"),
    )
}

fn attr_at(bytes: &[u8], at: usize) -> RawAttr {
    RawAttr {
        ino: u64_at(bytes, at),
        size: u64_at(bytes, at + 8),
        blocks: u64_at(bytes, at + 16),
        mode: u32_at(bytes, at + 60),
        nlink: u32_at(bytes, at + 64),
        uid: u32_at(bytes, at + 68),
        gid: u32_at(bytes, at + 72),
        times: [0, 1, 2].map(|n| (u64_at(bytes, at + 24 + 8 * n), u32_at(bytes, at + 48 + 4 * n))),
        rdev: u32_at(bytes, at + 76),
        blksize: u32_at(bytes, at + 80),
    }
}

/// The number of each notification: it answers no request.
pub const NOTIFICATION: u64 = 0;

/// A server, and the kernel's end of the connection.
pub struct Raw {
    dir: tempfile::TempDir,
    line: OwnedFd,
    mounted: Option<Mounted>,
    pub fs: Arc<Fs>,
    pub who: Caller,
    next: u64,
    done: Arc<AtomicBool>,
}

impl Raw {
    /// A server over an empty base.
    pub fn new() -> Raw {
        Raw::over(|_| ())
    }

    /// A server over a base that `fill` creates, after the first message of the kernel.
    pub fn over(fill: impl FnOnce(&Path)) -> Raw {
        Raw::with(fill, 0, &MountOptions::default())
    }

    /// As [`Raw::over`], with options. The server takes `dev` for the `st_dev` of its mount.
    pub fn with(fill: impl FnOnce(&Path), dev: u64, options: &MountOptions) -> Raw {
        let dir = tempfile::tempdir().expect("a directory for the test");
        let (base, store, mnt) = super::places(dir.path());
        std::fs::create_dir(&base).expect("make the base");
        std::fs::create_dir(&mnt).expect("make the file that stands for the mount point");
        fill(&base);
        let fs = super::open_new(&base, &store, &mnt);
        let (line, device) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .expect("a socket pair");
        for end in [&line, &device] {
            setsockopt(end, sockopt::SndBufForce, &ROOM)
                .expect("room for large messages; needs root");
        }
        let who = Caller { uid: 0, gid: 0, pid: std::process::id() };
        let mut raw = Raw {
            dir,
            line,
            mounted: None,
            fs: Arc::clone(&fs),
            who,
            next: 1,
            done: Arc::default(),
        };
        super::watch(Arc::clone(&raw.done));
        // The server answers INIT before `adopt` returns, so the request must be sent before.
        let init = raw.send(INIT, 0, &init_body());
        let root = open(&mnt, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
            .expect("open the mount point");
        let handed = Handed { device, root, dev, all_users: true };
        raw.mounted = Some(adopt(fs, handed, &mnt, &store, options).expect("begin to serve"));
        let answer = raw.receive(PATIENCE).expect("an answer to INIT");
        assert_eq!((answer.unique, answer.errno), (init, 0));
        raw
    }

    /// A path in the base.
    pub fn base(&self, path: &str) -> PathBuf {
        super::places(self.dir.path()).0.join(path)
    }

    /// Sends a request. Returns its number.
    pub fn send(&mut self, opcode: u32, node: u64, body: &Body) -> u64 {
        let unique = self.next;
        // The kernel's request numbers are even; an odd one marks an interrupt.
        self.next += 2;
        let len = u32::try_from(40 + body.0.len()).expect("a length");
        let Caller { uid, gid, pid } = self.who;
        let header = Body::new()
            .u32(len)
            .u32(opcode)
            .u64(unique)
            .u64(node)
            .u32(uid)
            .u32(gid)
            .u32(pid)
            .u32(0);
        self.send_bytes(&header.bytes(&body.0).0);
        unique
    }

    /// Sends a message unchanged.
    pub fn send_bytes(&self, message: &[u8]) {
        let sent = send(self.line.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL)
            .expect("the server listens");
        assert_eq!(sent, message.len());
    }

    /// The next answer that is not a notification, or `None` after a timeout.
    pub fn answer(&self, patience: Duration) -> Option<Answer> {
        loop {
            let answer = self.receive(patience)?;
            if answer.unique != NOTIFICATION {
                return Some(answer);
            }
        }
    }

    /// The next message of the server, or `None` after a timeout.
    pub fn receive(&self, patience: Duration) -> Option<Answer> {
        use std::os::fd::AsFd;
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(self.line.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut ready, timeout) {
                Ok(0) => return None,
                Ok(_) => break,
                Err(error) => assert_eq!(error, Errno::EINTR, "poll"),
            }
        }
        let mut bytes = vec![0; ROOM];
        let len = recv(self.line.as_raw_fd(), &mut bytes, MsgFlags::empty()).ok()?;
        bytes.truncate(len);
        if bytes.is_empty() {
            // The server closed its end.
            return None;
        }
        assert_eq!(u32_at(&bytes, 0) as usize, len, "an answer says how long it is");
        let errno =
            -i32::from_ne_bytes(bytes.get(4..8).expect("a header").try_into().expect("4 bytes"));
        Some(Answer { unique: u64_at(&bytes, 8), errno, body: bytes.split_off(16) })
    }

    /// Sends a request and waits for its answer.
    #[track_caller]
    pub fn ask(&mut self, opcode: u32, node: u64, body: Body) -> Result<Vec<u8>, Errno> {
        let unique = self.send(opcode, node, &body);
        let answer = self.answer(PATIENCE).expect("an answer");
        assert_eq!(answer.unique, unique, "one answer to each request, and to {opcode}");
        answer.result()
    }

    fn entry(result: Result<Vec<u8>, Errno>) -> Result<RawEntry, Errno> {
        let body = result?;
        let node = u64_at(&body, 0);
        // Node 0 is a negative dentry: the name does not exist, and the kernel may cache that.
        if node == 0 { Err(Errno::ENOENT) } else { Ok(RawEntry { node, attr: attr_at(&body, 40) }) }
    }

    pub fn lookup(&mut self, dir: u64, name: &[u8]) -> Result<RawEntry, Errno> {
        Raw::entry(self.ask(LOOKUP, dir, Body::new().name(name)))
    }

    pub fn getattr(&mut self, node: u64) -> Result<RawAttr, Errno> {
        Ok(attr_at(&self.ask(GETATTR, node, Body::new().u32(0).u32(0).u64(0))?, 16))
    }

    pub fn mkdir(&mut self, dir: u64, name: &[u8]) -> Result<RawEntry, Errno> {
        Raw::entry(self.ask(MKDIR, dir, Body::new().u32(0o755).u32(0).name(name)))
    }

    pub fn mknod(&mut self, dir: u64, name: &[u8], mode: u32) -> Result<RawEntry, Errno> {
        Raw::entry(self.ask(MKNOD, dir, Body::new().u32(mode).u32(0).u32(0).u32(0).name(name)))
    }

    pub fn link(&mut self, node: u64, dir: u64, name: &[u8]) -> Result<RawEntry, Errno> {
        Raw::entry(self.ask(LINK, dir, Body::new().u64(node).name(name)))
    }

    pub fn write(&mut self, node: u64, offset: u64, bytes: &[u8]) -> Result<u32, Errno> {
        let len = u32::try_from(bytes.len()).expect("a length");
        let body = Body::new().u64(0).u64(offset).u32(len).u32(0).u64(0).u32(0).u32(0).bytes(bytes);
        Ok(u32_at(&self.ask(WRITE, node, body)?, 0))
    }

    pub fn read(&mut self, node: u64, offset: u64, len: u32) -> Result<Vec<u8>, Errno> {
        self.ask(READ, node, Body::new().u64(0).u64(offset).u32(len).u32(0).u64(0).u32(0).u32(0))
    }

    /// The names in one answer to READDIR, each with its cookie.
    pub fn readdir(
        &mut self,
        node: u64,
        after: u64,
        room: u32,
    ) -> Result<Vec<(u64, Vec<u8>)>, Errno> {
        let body = Body::new().u64(0).u64(after).u32(room).u32(0).u64(0).u32(0).u32(0);
        let bytes = self.ask(READDIR, node, body)?;
        let mut found = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let len = u32_at(&bytes, at + 16) as usize;
            let name = bytes.get(at + 24..at + 24 + len).expect("a name in an answer").to_vec();
            found.push((u64_at(&bytes, at + 8), name));
            at += (24 + len).next_multiple_of(8);
        }
        Ok(found)
    }

    /// The names in one answer to READDIRPLUS.
    pub fn readdirplus(
        &mut self,
        node: u64,
        after: u64,
        room: u32,
    ) -> Result<Vec<RawListed>, Errno> {
        let body = Body::new().u64(0).u64(after).u32(room).u32(0).u64(0).u32(0).u32(0);
        let bytes = self.ask(READDIRPLUS, node, body)?;
        assert!(bytes.len() <= room as usize, "{} bytes for {room}", bytes.len());
        let mut found = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let len = u32_at(&bytes, at + 144) as usize;
            let node = u64_at(&bytes, at);
            found.push(RawListed {
                name: bytes.get(at + 152..at + 152 + len).expect("a name in an answer").to_vec(),
                cookie: u64_at(&bytes, at + 136),
                ino: u64_at(&bytes, at + 128),
                kind: u32_at(&bytes, at + 148),
                entry: (node != 0).then(|| RawEntry { node, attr: attr_at(&bytes, at + 40) }),
            });
            at += (152 + len).next_multiple_of(8);
        }
        assert_eq!(at, bytes.len(), "whole names");
        Ok(found)
    }

    /// Sends FORGET for nodes from lookups; it has no answer.
    pub fn forget(&mut self, node: u64, count: u64) {
        self.send(FORGET, node, &Body::new().u64(count));
    }

    /// Takes no more answers.
    pub fn refuse_answers(&self) {
        shutdown(self.line.as_raw_fd(), Shutdown::Read).expect("close our end");
    }

    /// The number of requests of one kind that the server got.
    pub fn mounted_count(&self, operation: &str) -> u64 {
        let counts = self.mounted.as_ref().expect("is served").counters().snapshot();
        counts.into_iter().find(|(name, _)| *name == operation).expect("an operation").1
    }

    /// Asserts that the server works: creates, writes, reads, lists and removes a file.
    #[track_caller]
    pub fn still_serves(&mut self) {
        let name = format!("still-{}", self.next);
        let file = self.mknod(ROOT, name.as_bytes(), 0o100_644).expect("a new file");
        assert_eq!(self.write(file.node, 3, b"here").expect("write"), 4);
        assert_eq!(self.read(file.node, 0, 100).expect("read"), b"\0\0\0here");
        let listed = self.readdir(ROOT, 0, 1 << 16).expect("list");
        assert!(listed.iter().any(|(_, listed)| listed == name.as_bytes()));
        self.ask(UNLINK, ROOT, Body::new().name(name.as_bytes())).expect("remove");
        self.forget(file.node, 1);
        self.settle();
    }

    /// Waits until requests without an answer were processed.
    pub fn settle(&mut self) {
        self.getattr(ROOT).expect("the root is there");
    }

    /// Ends the session as an unmount does. Returns the server's result.
    pub fn end(&mut self) -> jailfs::error::Result<()> {
        let Some(mounted) = self.mounted.take() else { return Ok(()) };
        let body = Body::new();
        let unique = self.send(DESTROY, 0, &body);
        let answer = self.receive(PATIENCE).expect("an answer to DESTROY");
        assert_eq!(answer.unique, unique);
        // The kernel then ends the connection. Another thread may already wait for a request.
        shutdown(self.line.as_raw_fd(), Shutdown::Write).expect("close our end");
        mounted.wait()
    }

    /// The result of a session that the server ended by itself.
    pub fn wait(&mut self) -> jailfs::error::Result<()> {
        self.mounted.take().expect("is served until it was waited for").wait()
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Closing our end ends the session in any state.
        let _closed = shutdown(self.line.as_raw_fd(), Shutdown::Both);
        if let Some(mounted) = self.mounted.take() {
            drop(mounted.wait());
        }
        self.done.store(true, Ordering::SeqCst);
    }
}

/// The INIT request of Linux 6.18 (`struct fuse_init_in`, protocol 7.45), with all the flags that
/// it offers.
fn init_body() -> Body {
    let flags = !(1_u64 << 31);
    let (low, high) = (flags as u32, (flags >> 32) as u32);
    let mut body = Body::new().u32(7).u32(45).u32(1 << 17).u32(low).u32(high);
    for _ in 0..11 {
        body = body.u32(0);
    }
    body
}
