//! Answers READDIRPLUS: the names of a directory, some of them with their nodes.
//!
//! The kernel sends READDIRPLUS for every listing. A name that comes with its node needs no LOOKUP;
//! a bare name is an entry of node 0. fuser can express neither a bare name nor a node id that
//! differs from the inode number, so the reply is encoded here:
//!
//! ```text
//! fuse_out_header = len u32 | error i32 (0) | unique u64
//! each name       = fuse_entry_out (128) | ino u64 | cookie u64 | name length u32 | kind u32
//!                   | the name, padded to 8
//! fuse_entry_out  = id u64 | generation u64 | lifetime of the name u64 | of the attributes u64
//!                   | nanoseconds of both 2 * u32 | fuse_attr (88)
//! fuse_attr       = ino, size, blocks, atime, mtime, ctime: u64 | nanoseconds of the three 3 * u32
//!                   | mode, nlink, uid, gid, rdev, blksize, flags: u32
//! ```
//!
//! (include/uapi/linux/fuse.h, in the byte order of the machine.) Always true:
//! * A node that was handed out is in a reply that the kernel accepted, or is forgotten again. The
//!   kernel counts the nodes that it links, and sends FORGET for those that it cannot link
//!   (`parse_dirplusfile` in fs/fuse/readdir.c).
//! * A node is sent only if the kernel does not hold it, so it cannot overwrite newer attributes.
//! * One reply spends a bounded time on the base. It is short then, and the kernel asks for more.
//! * Unless no name is left, a reply has at least one: an empty reply says that the directory ends,
//!   and the kernel keeps that.
//!
//! fuser insists on a reply of its own to each request. So it sends an error after the real reply,
//! the kernel refuses that (ENOENT: no process waits), and fuser logs the refusal as an error.
//! [`is_expected`] recognises such log lines. A user of the library with a log of its own should
//! filter by it, or leave out the target `fuser::reply`.

use std::cell::Cell;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use fuser::{Errno, Generation, INodeNo, ReplyDirectoryPlus};

use crate::fs::{Attr, DirEntry, Entry, Fs};
use crate::fuse::notify::Channel;
use crate::fuse::reply::Call;
use crate::fuse::translate::{BLOCK_SIZE, FOREVER, encode_device, no_entry};
use crate::types::{FileKind, NodeId, PERM_BITS, Timestamp};

/// How long one reply may look up nodes.
const LOOKUP_LIMIT: Duration = Duration::from_millis(2);
/// Nodes per look at the clock, which costs a tenth of looking up a node.
const NODES_PER_CLOCK_READ: usize = 4;

/// The nodes that one reply looked up, and since when.
#[derive(Default)]
struct Lookups {
    begun: Option<Instant>,
    count: usize,
}

impl Lookups {
    /// Whether the reply may look up one more node. The first is always allowed, however long this
    /// thread did not run since it began.
    fn has_time(&mut self, clock: impl FnOnce() -> Instant) -> bool {
        let Some(begun) = self.begun else {
            self.begun = Some(clock());
            return true;
        };
        !self.count.is_multiple_of(NODES_PER_CLOCK_READ)
            || clock().duration_since(begun) <= LOOKUP_LIMIT
    }
}
/// `sizeof(struct fuse_out_header)`.
const HEADER: usize = 16;
/// `sizeof(struct fuse_attr)`.
const ATTR: usize = 88;

/// A READDIRPLUS request.
pub(super) struct Readdirplus {
    pub(super) unique: u64,
    /// Knows how much room the kernel has. It does not carry the names that are sent.
    pub(super) reply: ReplyDirectoryPlus,
    /// Whether files come with their nodes. Directories always do.
    pub(super) with_files: bool,
}

impl Readdirplus {
    /// Answers with the names after the cookie `behind`. Returns false if it failed before the
    /// first name.
    pub(super) fn answer(self, call: &Call<'_>, fs: &Fs, channel: &Channel, behind: u64) -> bool {
        let Readdirplus { unique, mut reply, with_files } = self;
        let mut message = Message::new(unique);
        let mut handed = Vec::new();
        let mut lookups = Lookups::default();
        let result = fs.readdir_plus(NodeId(call.node), behind, |entry, hand_out| {
            // A program that lists a tree enters every directory, so these always come with a node.
            let wanted = with_files || entry.kind == FileKind::Dir;
            let is_late = wanted && !lookups.has_time(Instant::now);
            if is_late || !has_room(&mut reply, &entry) {
                return false;
            }
            lookups.count += usize::from(wanted);
            let node = if wanted { hand_out() } else { None };
            handed.extend(node.map(|node| node.id));
            message.add(&entry, node.as_ref());
            true
        });
        match result {
            Err(error) if message.is_empty() => {
                reply.error(call.refuse(&error));
                return false;
            }
            // Send the names found so far. The error recurs when the kernel asks for the rest.
            Ok(()) | Err(_) => {}
        }
        // fuser can express an empty reply: the end of the directory.
        if message.is_empty() {
            reply.ok();
            return true;
        }
        if let Err(error) = channel.send_reply(&message.finish()) {
            log::debug!("answer a listing of node {}: {error}", call.node);
            handed.into_iter().for_each(|id| fs.forget(id, 1));
        }
        // The kernel refuses this reply, unless it did not accept the first one.
        IN_DUPLICATE_REPLY.set(true);
        reply.error(Errno::EIO);
        IN_DUPLICATE_REPLY.set(false);
        true
    }
}

/// Whether the kernel's buffer has room for a name. fuser's encoding has the same size.
fn has_room(reply: &mut ReplyDirectoryPlus, entry: &DirEntry) -> bool {
    let name = std::ffi::OsStr::from_bytes(&entry.name);
    !reply.add(INodeNo(0), entry.cookie, name, &Duration::ZERO, &no_entry(), Generation(0))
}

thread_local! {
    /// Whether this thread lets fuser answer a request that is already answered.
    static IN_DUPLICATE_REPLY: Cell<bool> = const { Cell::new(false) };
}

/// Whether a log record is the harmless error that follows each directory listing: fuser fails to
/// answer a request that is already answered. Must be called by the thread that logs.
pub fn is_expected(record: &log::Record<'_>) -> bool {
    IN_DUPLICATE_REPLY.get() && record.target() == "fuser::reply"
}

/// A reply in its encoded form.
struct Message(Vec<u8>);

impl Message {
    fn new(unique: u64) -> Message {
        let mut message = Message(Vec::with_capacity(4096));
        // `finish` sets the length.
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

    /// Adds a name, with its node if given.
    fn add(&mut self, entry: &DirEntry, node: Option<&Entry>) {
        match node {
            Some(Entry { id, attr }) => {
                let forever = FOREVER.as_secs();
                self.u64(id.0).u64(0).u64(forever).u64(forever).u32(0).u32(0).attr(attr);
            }
            None => self.zeros(HEADER + 24 + ATTR),
        }
        let (ino, kind) =
            node.map_or((entry.ino, entry.kind), |node| (node.attr.ino, node.attr.kind));
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
        self.u32(kind.type_bits() | (meta.mode & PERM_BITS))
            .u32(meta.nlink)
            .u32(meta.uid)
            .u32(meta.gid);
        self.u32(encode_device(meta.rdev)).u32(BLOCK_SIZE).u32(0);
    }
}

/// Signed seconds in the bits of an unsigned number, as the protocol sends them.
fn seconds(time: Timestamp) -> u64 {
    u64::from_ne_bytes(time.secs.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_time_for_its_first_node_also_on_a_machine_that_stalls() {
        let start = Instant::now();
        let stalls = std::cell::Cell::new(0);
        let clock = || {
            stalls.set(stalls.get() + 1);
            start + LOOKUP_LIMIT * 10 * stalls.get()
        };
        let mut lookups = Lookups::default();
        // Without a name, the kernel takes the directory for empty.
        assert!(lookups.has_time(clock));
        let taken = (1..100).take_while(|count| {
            lookups.count = *count;
            lookups.has_time(clock)
        });
        assert_eq!(taken.count() + 1, NODES_PER_CLOCK_READ, "then it ends at the next look");
    }

    #[test]
    fn only_fusers_error_about_a_duplicate_reply_is_expected() {
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
        IN_DUPLICATE_REPLY.set(true);
        assert!(says("fuser::reply") && !says("fuser::session") && !says("jailfs::fuse"));
        assert!(
            !std::thread::scope(|scope| scope.spawn(|| says("fuser::reply")).join().unwrap()),
            "another thread"
        );
        IN_DUPLICATE_REPLY.set(false);
    }
}
