//! Replies: what the kernel gets.

use std::io::IoSlice;
use std::sync::Arc;

use nix::errno::Errno;

use super::device::Device;
use crate::fs::{Attr, Entry};
use crate::types::{FileKind, Ino, PERM_BITS, Timestamp};

/// `sizeof(struct fuse_out_header)`.
const HEADER: usize = 16;
/// `sizeof(struct fuse_entry_out)`.
const ENTRY: usize = 128;
/// `sizeof(struct fuse_open_out)`.
const OPENED: usize = 16;

/// A lifetime without an end for the kernel's caches, in seconds: a century, which overflows none
/// of its clocks.
pub(in crate::fuse) const FOREVER: u64 = 100 * 366 * 24 * 3600;

/// The preferred size of reads and writes that `stat` reports, in bytes.
const BLOCK_SIZE: u32 = 4096;

/// How long the kernel may cache a name and the attributes of its node, in seconds.
#[derive(Clone, Copy, Debug)]
pub(in crate::fuse) struct Lifetimes {
    pub(in crate::fuse) name: u64,
    pub(in crate::fuse) attributes: u64,
}

impl Lifetimes {
    pub(in crate::fuse) const FOREVER: Lifetimes = Lifetimes { name: FOREVER, attributes: FOREVER };
}

/// The fields of statvfs(3).
#[derive(Clone, Copy, Debug)]
pub(in crate::fuse) struct Statfs {
    pub(in crate::fuse) blocks: u64,
    pub(in crate::fuse) free: u64,
    pub(in crate::fuse) available: u64,
    pub(in crate::fuse) files: u64,
    pub(in crate::fuse) files_free: u64,
    pub(in crate::fuse) block_size: u32,
    pub(in crate::fuse) name_max: u32,
}

/// The reply to one request. If it is dropped without an answer, the answer is EIO.
pub(in crate::fuse) struct Reply {
    device: Arc<Device>,
    unique: u64,
    is_sent: bool,
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.is_sent {
            log::error!("request {} gets no answer but an I/O error", self.unique);
            self.write(Errno::EIO as i32, &[]);
        }
    }
}

impl Reply {
    pub(in crate::fuse) fn to(unique: u64, device: &Arc<Device>) -> Reply {
        Reply { device: Arc::clone(device), unique, is_sent: false }
    }

    /// Sends a reply. Returns whether the kernel took it.
    fn write(&mut self, errno: i32, body: &[u8]) -> bool {
        self.is_sent = true;
        let mut head = [0; HEADER];
        let len = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
        let fields = [&len.to_ne_bytes()[..], &(-errno).to_ne_bytes(), &self.unique.to_ne_bytes()];
        head.iter_mut().zip(fields.concat()).for_each(|(to, from)| *to = from);
        let sent = self.device.write(&[IoSlice::new(&head), IoSlice::new(body)]);
        match sent {
            Ok(()) => {}
            // The session was aborted meanwhile.
            Err(Errno::ENOENT | Errno::ENODEV | Errno::ENOTCONN) => {
                log::debug!("no process waits for the answer to request {}", self.unique);
            }
            Err(errno) => log::error!("answer request {}: {errno}", self.unique),
        }
        sent.is_ok()
    }

    /// The request failed.
    pub(in crate::fuse) fn error(mut self, errno: Errno) {
        self.write(errno as i32, &[]);
    }

    /// The request was carried out, and there is nothing to say.
    pub(in crate::fuse) fn ok(self) {
        self.data(&[]);
    }

    /// The request needs no answer (FORGET).
    pub(in crate::fuse) fn none(mut self) {
        self.is_sent = true;
    }

    /// Answers READ, READLINK and others that ask for bytes.
    pub(in crate::fuse) fn data(mut self, bytes: &[u8]) {
        self.write(0, bytes);
    }

    /// Answers LOOKUP, MKNOD, MKDIR, SYMLINK and LINK.
    pub(in crate::fuse) fn entry(self, entry: &Entry, lifetimes: Lifetimes) {
        self.data(Body::with(ENTRY).entry(entry, lifetimes).bytes());
    }

    /// Answers TMPFILE, which creates a node and opens it.
    pub(in crate::fuse) fn created(self, entry: &Entry, lifetimes: Lifetimes, flags: u32) {
        let mut body = Body::with(ENTRY + OPENED);
        self.data(body.entry(entry, lifetimes).opened(flags).bytes());
    }

    /// Answers LOOKUP: there is no such name, and the kernel may remember that.
    pub(in crate::fuse) fn no_entry(self) {
        self.data(Body::with(ENTRY).u64(0).u64(0).u64(FOREVER).zeros(ENTRY - 24).bytes());
    }

    /// Answers GETATTR and SETATTR.
    pub(in crate::fuse) fn attr(self, attr: &Attr, lifetime: u64) {
        self.data(Body::with(104).u64(lifetime).u64(0).attr(attr).bytes());
    }

    /// Answers OPEN and OPENDIR.
    pub(in crate::fuse) fn opened(self, flags: u32) {
        self.data(Body::with(OPENED).opened(flags).bytes());
    }

    /// Answers WRITE and COPY_FILE_RANGE.
    pub(in crate::fuse) fn written(self, len: u32) {
        self.number(len);
    }

    /// Answers GETXATTR and LISTXATTR that ask for the size alone.
    pub(in crate::fuse) fn size(self, len: u32) {
        self.number(len);
    }

    fn number(self, number: u32) {
        self.data(Body::with(8).u32(number).u32(0).bytes());
    }

    /// Answers LSEEK.
    pub(in crate::fuse) fn offset(self, offset: i64) {
        self.data(&offset.to_ne_bytes());
    }

    /// Answers STATFS.
    pub(in crate::fuse) fn statfs(self, s: Statfs) {
        let mut body = Body::with(80);
        body.u64(s.blocks).u64(s.free).u64(s.available).u64(s.files).u64(s.files_free);
        body.u32(s.block_size).u32(s.name_max).u32(s.block_size).zeros(28);
        self.data(body.bytes());
    }

    /// Answers READDIR and READDIRPLUS. Returns whether the kernel took the names.
    pub(in crate::fuse) fn names(mut self, names: &Names) -> bool {
        self.write(0, names.body.bytes())
    }
}

/// The names of a part of a directory, in the form of READDIR or READDIRPLUS.
pub(in crate::fuse) struct Names {
    body: Body,
    room: usize,
    is_plus: bool,
}

impl Names {
    /// For a reply of at most `room` bytes, with a node for each name if `is_plus`.
    pub(in crate::fuse) fn new(room: u32, is_plus: bool) -> Names {
        let room = room as usize;
        Names { body: Body::with(room.min(4096)), room, is_plus }
    }

    pub(in crate::fuse) fn is_empty(&self) -> bool {
        self.body.0.is_empty()
    }

    /// Whether another name fits.
    pub(in crate::fuse) fn has_room(&self, name: &[u8]) -> bool {
        let entry = if self.is_plus { ENTRY } else { 0 };
        self.body.0.len() + entry + (24 + name.len()).next_multiple_of(8) <= self.room
    }

    /// Adds a name without a node.
    pub(in crate::fuse) fn add(&mut self, ino: Ino, cookie: u64, kind: FileKind, name: &[u8]) {
        if self.is_plus {
            self.body.zeros(ENTRY);
        }
        self.body.name((ino, cookie, kind), name);
    }

    /// Adds a name with its node, in the form of READDIRPLUS.
    pub(in crate::fuse) fn add_node(&mut self, entry: &Entry, cookie: u64, name: &[u8]) {
        self.body.entry(entry, Lifetimes::FOREVER);
        self.body.name((entry.attr.ino, cookie, entry.attr.kind), name);
    }
}

/// A body that is being written.
struct Body(Vec<u8>);

impl Body {
    fn with(len: usize) -> Body {
        Body(Vec::with_capacity(len))
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn u64(&mut self, number: u64) -> &mut Body {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    fn u32(&mut self, number: u32) -> &mut Body {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    fn zeros(&mut self, count: usize) -> &mut Body {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// `struct fuse_entry_out`.
    fn entry(&mut self, Entry { id, attr }: &Entry, lifetimes: Lifetimes) -> &mut Body {
        self.u64(id.0).u64(0).u64(lifetimes.name).u64(lifetimes.attributes).u64(0).attr(attr)
    }

    /// `struct fuse_open_out`. The handle is always 0.
    fn opened(&mut self, flags: u32) -> &mut Body {
        self.u64(0).u32(flags).u32(0)
    }

    /// `struct fuse_attr`.
    fn attr(&mut self, Attr { ino, kind, meta, size, blocks }: &Attr) -> &mut Body {
        self.u64(ino.0).u64(*size).u64(*blocks);
        self.u64(seconds(meta.atime)).u64(seconds(meta.mtime)).u64(seconds(meta.ctime));
        self.u32(meta.atime.nanos).u32(meta.mtime.nanos).u32(meta.ctime.nanos);
        self.u32(kind.type_bits() | (meta.mode & PERM_BITS));
        self.u32(meta.nlink).u32(meta.uid).u32(meta.gid);
        self.u32(encode_device(meta.rdev)).u32(BLOCK_SIZE).u32(0)
    }

    /// `struct fuse_dirent`, padded.
    fn name(&mut self, (ino, cookie, kind): (Ino, u64, FileKind), name: &[u8]) {
        let len = u32::try_from(name.len()).unwrap_or(u32::MAX);
        self.u64(ino.0).u64(cookie).u32(len).u32(kind.type_bits() >> 12);
        self.0.extend_from_slice(name);
        self.zeros(name.len().next_multiple_of(8) - name.len());
    }
}

/// Signed seconds in the bits of an unsigned number, as the protocol sends them.
fn seconds(time: Timestamp) -> u64 {
    time.secs.cast_unsigned()
}

/// Encodes `st_rdev` as the kernel takes it (`new_decode_dev`: 12 bits of major, 20 of minor).
/// Larger numbers are truncated, as the kernel does.
fn encode_device(device: u64) -> u32 {
    let major = nix::sys::stat::major(device) & 0xfff;
    let minor = nix::sys::stat::minor(device) & 0xf_ffff;
    u32::try_from((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Meta;
    use crate::types::NodeId;

    fn attr() -> Attr {
        let time = |secs, nanos| Timestamp { secs, nanos };
        let meta = Meta {
            mode: 0o7751,
            uid: 1,
            gid: 2,
            nlink: 3,
            rdev: nix::sys::stat::makedev(8, 256),
            atime: time(-1, 4),
            mtime: time(5, 6),
            ctime: time(7, 8),
        };
        Attr { ino: Ino(9), kind: FileKind::Block, meta, size: 10, blocks: 11 }
    }

    /// The fields of an encoded `struct fuse_attr`: eight bytes each, then four bytes each.
    fn fields(bytes: &[u8], wide: usize) -> Vec<u64> {
        let (first, rest) = bytes.split_at(wide * 8);
        let first = first.chunks(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap()));
        let rest = rest.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap()).into());
        first.chain(rest).collect()
    }

    #[test]
    fn attributes_are_encoded_field_by_field() {
        let mut body = Body::with(0);
        body.attr(&attr());
        let mode = u64::from(FileKind::Block.type_bits() | 0o7751);
        let device = 0x0010_0800;
        let wanted =
            [9, 10, 11, u64::MAX, 5, 7, 4, 6, 8, mode, 3, 1, 2, device, u64::from(BLOCK_SIZE), 0];
        assert_eq!(fields(body.bytes(), 6), wanted);
        assert_eq!(body.bytes().len(), 88);
    }

    #[test]
    fn a_node_may_have_another_id_than_its_inode_number() {
        let mut body = Body::with(0);
        let lifetimes = Lifetimes { name: 5, attributes: 6 };
        body.entry(&Entry { id: NodeId(77), attr: attr() }, lifetimes);
        assert_eq!(fields(&body.bytes()[..48], 6), [77, 0, 5, 6, 0, 9]);
        assert_eq!(body.bytes().len(), ENTRY);
    }

    #[test]
    fn names_fill_their_room_and_no_more() {
        for is_plus in [false, true] {
            let mut names = Names::new(400, is_plus);
            let mut count = 0;
            while names.has_room(b"seven77") {
                names.add(Ino(5), 6, FileKind::Dir, b"seven77");
                count += 1;
            }
            let len = if is_plus { ENTRY + 32 } else { 32 };
            assert_eq!((count, names.body.bytes().len()), (400 / len, 400 / len * len));
            let first = &names.body.bytes()[len - 32..][..32];
            assert_eq!(fields(&first[..24], 2), [5, 6, 7, 4]);
            assert_eq!(&first[24..], b"seven77\0");
        }
    }

    #[test]
    fn device_numbers_keep_their_parts() {
        for (major, minor) in [(1, 3), (0, 0), (8, 255), (259, 256), (4095, 1_048_575)] {
            let device = encode_device(nix::sys::stat::makedev(major, minor));
            assert_eq!(u64::from((device & 0xfff00) >> 8), major);
            assert_eq!(u64::from((device & 0xff) | ((device >> 12) & 0xfff00)), minor);
        }
    }
}
