//! Answering READDIRPLUS: the names of a directory, some of them with their nodes.
//!
//! The kernel asks so whenever it reads a directory. What comes with a node needs no LOOKUP; a name may come alone, as entry of node
//! 0. fuser cannot say that, nor give a node another id than its number, so the answer is written by us:
//!
//! ```text
//! fuse_out_header = len u32 | error i32 (0) | unique u64
//! each name       = fuse_entry_out (128) | ino u64 | cookie u64 | length of the name u32 | kind u32 | the name, padded to 8
//! fuse_entry_out  = id u64 | generation u64 | seconds that the name is valid u64 | that the attributes are u64 |
//!                   nanoseconds of both 2 * u32 | fuse_attr (88)
//! fuse_attr       = ino, size, blocks, atime, mtime, ctime: u64 | nanoseconds of the three 3 * u32 |
//!                   mode, nlink, uid, gid, rdev, blksize, flags: u32
//! ```
//!
//! (include/uapi/linux/fuse.h, in the byte order of the machine.) Always true:
//! * a node that was handed out is in an answer that the kernel took, or is taken back: the kernel counts what it links, and lets go
//!   itself of what it cannot link (`parse_dirplusfile` in fs/fuse/readdir.c);
//! * only nodes come that the kernel does not hold, so nothing that it has read of them can be outdated;
//! * one answer looks at the base for a moment only. It is short then, and the kernel asks on.
//!
//! fuser has a reply of its own for each request, and a way to let go of one without sending it there is not. So it sends an error
//! behind our answer, which the kernel refuses (ENOENT: nobody waits for it), and writes that into the log, as an error;
//! [`is_expected`] tells such a line from others. Whoever uses the library with a log of his own asks it, or leaves `fuser::reply` out.

use std::cell::Cell;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use fuser::{Errno, Generation, INodeNo, ReplyDirectoryPlus};

use crate::fs::{Attr, DirEntry, Entry, Fs};
use crate::fuse::answer::Asked;
use crate::fuse::kernel::Channel;
use crate::fuse::translate::{BLOCK_SIZE, FOREVER, encode_device, no_entry};
use crate::types::{FileKind, NodeId, PERM_BITS, Timestamp};

/// For how long one answer looks at nodes.
const LONGEST_LOOK: Duration = Duration::from_millis(2);
/// Nodes between two looks at the clock, each of which costs as much as a tenth of looking at a node.
const NODES_AT_ONCE: usize = 4;
/// `sizeof(struct fuse_out_header)`.
const HEADER: usize = 16;
/// `sizeof(struct fuse_attr)`.
const ATTR: usize = 88;

/// A READDIRPLUS that is to be answered.
pub(super) struct Plus {
    pub(super) unique: u64,
    /// Says how much the kernel has room for; it is not what is sent.
    pub(super) reply: ReplyDirectoryPlus,
    /// Whether files come with their names, too.
    pub(super) with_files: bool,
}

impl Plus {
    /// Answers with the names of a directory from behind a cookie on. Says whether that could be done.
    pub(super) fn answer(self, asked: &Asked<'_>, fs: &Fs, channel: &Channel, behind: u64) -> bool {
        let Plus { unique, mut reply, with_files } = self;
        let mut message = Message::new(unique);
        let mut handed = Vec::new();
        let (mut begun, mut looked): (Option<Instant>, usize) = (None, 0);
        let result = fs.readdir_plus(NodeId(asked.node), behind, |entry, hand_out| {
            // Whoever lists a directory goes into those that are in it, or looks at none of them.
            let wanted = with_files || entry.kind == FileKind::Dir;
            let is_late = wanted
                && looked.is_multiple_of(NODES_AT_ONCE)
                && begun.get_or_insert_with(Instant::now).elapsed() > LONGEST_LOOK;
            if is_late || !has_room(&mut reply, &entry) {
                return false;
            }
            looked += usize::from(wanted);
            let node = if wanted { hand_out() } else { None };
            handed.extend(node.map(|node| node.id));
            message.add(&entry, node.as_ref());
            true
        });
        match result {
            Err(error) if message.is_empty() => {
                reply.error(asked.refuse(&error));
                return false;
            }
            // What was found is given; the error comes again when the kernel goes on behind it.
            Ok(()) | Err(_) => {}
        }
        // That there is no more fuser can say as well as we.
        if message.is_empty() {
            reply.ok();
            return true;
        }
        if let Err(error) = channel.answer(&message.finish()) {
            log::debug!("answer a listing of node {}: {error}", asked.node);
            handed.into_iter().for_each(|id| fs.forget(id, 1));
        }
        // Nobody waits for this, unless our answer was not taken.
        OVERDUE.set(true);
        reply.error(Errno::EIO);
        OVERDUE.set(false);
        true
    }
}

/// Whether there is room for a name, by the size of what fuser makes of it: it is as large.
fn has_room(reply: &mut ReplyDirectoryPlus, entry: &DirEntry) -> bool {
    let name = std::ffi::OsStr::from_bytes(&entry.name);
    !reply.add(INodeNo(0), entry.cookie, name, &Duration::ZERO, &no_entry(), Generation(0))
}

thread_local! {
    /// Whether this thread lets fuser answer what was answered.
    static OVERDUE: Cell<bool> = const { Cell::new(false) };
}

/// Whether a line of the log says what is always so, for each listing of a directory: an answer that we sent ourselves cannot be sent once more by fuser.
/// To be asked by the thread that logs.
pub fn is_expected(record: &log::Record<'_>) -> bool {
    OVERDUE.get() && record.target() == "fuser::reply"
}

/// An answer as it is written.
struct Message(Vec<u8>);

impl Message {
    fn new(unique: u64) -> Message {
        let mut message = Message(Vec::with_capacity(4096));
        // The length is known at the end.
        message.u32(0).u32(0).u64(unique);
        message
    }

    fn is_empty(&self) -> bool {
        self.0.len() == HEADER
    }

    fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        if let Some(first) = self.0.first_chunk_mut() {
            *first = len.to_ne_bytes();
        }
        self.0
    }

    fn u64(&mut self, number: u64) -> &mut Message {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    fn u32(&mut self, number: u32) -> &mut Message {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    /// Adds a name, with its node if there is one.
    fn add(&mut self, entry: &DirEntry, node: Option<&Entry>) {
        match node {
            Some(Entry { id, attr }) => {
                let forever = FOREVER.as_secs();
                self.u64(id.0).u64(0).u64(forever).u64(forever).u32(0).u32(0).attr(attr);
            }
            None => self.zeros(HEADER + 24 + ATTR),
        }
        let (ino, kind) = node.map_or((entry.ino, entry.kind), |node| (node.attr.ino, node.attr.kind));
        let len = u32::try_from(entry.name.len()).unwrap_or(u32::MAX);
        self.u64(ino.0).u64(entry.cookie).u32(len).u32(kind.type_bits() >> 12);
        self.0.extend_from_slice(&entry.name);
        self.zeros(entry.name.len().next_multiple_of(8) - entry.name.len());
    }

    fn zeros(&mut self, count: usize) {
        self.0.resize(self.0.len() + count, 0);
    }

    fn attr(&mut self, attr: &Attr) {
        let Attr { ino, kind, meta, size, blocks } = attr;
        self.u64(ino.0).u64(*size).u64(*blocks);
        self.u64(seconds(meta.atime)).u64(seconds(meta.mtime)).u64(seconds(meta.ctime));
        self.u32(meta.atime.nanos).u32(meta.mtime.nanos).u32(meta.ctime.nanos);
        self.u32(kind.type_bits() | (meta.mode & PERM_BITS)).u32(meta.nlink).u32(meta.uid).u32(meta.gid);
        self.u32(encode_device(meta.rdev)).u32(BLOCK_SIZE).u32(0);
    }
}

/// Seconds as they are sent: signed ones in the bits of unsigned ones.
fn seconds(time: Timestamp) -> u64 {
    u64::from_ne_bytes(time.secs.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_fuser_says_of_an_overdue_answer_is_expected() {
        let says = |target: &str| {
            is_expected(
                &log::Record::builder()
                    .target(target)
                    .level(log::Level::Error)
                    .args(format_args!(""))
                    .build(),
            )
        };
        assert!(!says("fuser::reply"));
        OVERDUE.set(true);
        assert!(says("fuser::reply") && !says("fuser::session") && !says("jailfs::fuse"));
        assert!(
            !std::thread::scope(|scope| scope.spawn(|| says("fuser::reply")).join().unwrap()),
            "another thread"
        );
        OVERDUE.set(false);
    }
}
