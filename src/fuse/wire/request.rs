//! Requests: what the kernel sends.

use super::device::Device;
use crate::fs::{SetAttr, SetTime};
use crate::types::{NodeId, Timestamp};

/// `sizeof(struct fuse_in_header)`.
const HEADER: usize = 40;
/// The kernel asks for room for the largest WRITE and its head.
const HEAD_ROOM: usize = 4096;
/// The opcode of the only request whose form depends on INIT.
const SETXATTR: u32 = 21;

/// The part that all requests have.
#[derive(Clone, Copy, Debug)]
pub(in crate::fuse) struct Request {
    /// Identifies the request in its reply.
    pub(in crate::fuse) unique: u64,
    pub(in crate::fuse) node: NodeId,
    /// The process that asks; 0 for the kernel itself.
    pub(in crate::fuse) uid: u32,
    pub(in crate::fuse) gid: u32,
    pub(in crate::fuse) pid: u32,
    opcode: u32,
}

/// Which fields SETXATTR has, as INIT agreed.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::fuse) struct Layout {
    /// It has a second field of flags (FUSE_SETXATTR_EXT).
    pub(in crate::fuse) has_long_setxattr: bool,
}

/// A message that is not as the protocol says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fuse) struct Malformed;

type Parsed<T> = Result<T, Malformed>;

/// Room for one request.
pub(in crate::fuse) struct RequestBuffer(Vec<u8>);

impl RequestBuffer {
    /// For requests with at most `most` bytes of data.
    pub(in crate::fuse) fn new(most: u32) -> RequestBuffer {
        RequestBuffer(vec![0; most as usize + HEAD_ROOM])
    }

    /// Waits for the next request. Returns it with its body; `None` when the session has ended.
    ///
    /// # Errors
    /// As read(2), and EPROTO for a message without a head.
    pub(in crate::fuse) fn receive(
        &mut self,
        device: &Device,
    ) -> nix::Result<Option<(Request, &[u8])>> {
        let Some(len) = device.read(&mut self.0)? else { return Ok(None) };
        let message = self.0.get(..len).unwrap_or_default();
        Request::parse(message).map(Some).map_err(|Malformed| nix::errno::Errno::EPROTO)
    }
}

impl Request {
    /// Splits a message into its head and its body.
    fn parse(message: &[u8]) -> Parsed<(Request, &[u8])> {
        let (head, body) = message.split_at_checked(HEADER).ok_or(Malformed)?;
        let mut head = Fields(head);
        let len = head.u32()?;
        let (opcode, unique, node) = (head.u32()?, head.u64()?, NodeId(head.u64()?));
        let (uid, gid, pid) = (head.u32()?, head.u32()?, head.u32()?);
        let body = body.get(..(len as usize).checked_sub(HEADER).ok_or(Malformed)?);
        Ok((Request { unique, node, uid, gid, pid, opcode }, body.ok_or(Malformed)?))
    }
}

/// Flags of FUSE_SETATTR.
#[derive(Clone, Copy)]
struct SetattrFlags(u32);

impl SetattrFlags {
    const MODE: u32 = 1 << 0;
    const UID: u32 = 1 << 1;
    const GID: u32 = 1 << 2;
    const SIZE: u32 = 1 << 3;
    const ATIME: u32 = 1 << 4;
    const MTIME: u32 = 1 << 5;
    const ATIME_NOW: u32 = 1 << 7;
    const MTIME_NOW: u32 = 1 << 8;

    fn has(self, flag: u32) -> bool {
        self.0 & flag != 0
    }

    fn time(self, (now, given): (u32, u32), time: Timestamp) -> Option<SetTime> {
        match () {
            () if self.has(now) => Some(SetTime::Now),
            () if self.has(given) => Some(SetTime::To(time)),
            () => None,
        }
    }
}

/// The operation that a request asks for. A name is without its NUL.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::fuse) enum Operation<'a> {
    Lookup {
        name: &'a [u8],
    },
    Forget {
        nlookup: u64,
    },
    /// Nodes and their numbers of lookups.
    BatchForget {
        nodes: Vec<(NodeId, u64)>,
    },
    Getattr,
    Setattr {
        set: SetAttr,
    },
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        name: &'a [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: &'a [u8],
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    /// `flags` as in renameat2(2).
    Rename {
        name: &'a [u8],
        to: NodeId,
        new_name: &'a [u8],
        flags: u32,
    },
    /// Another name, in the request's node, for `node`.
    Link {
        node: NodeId,
        name: &'a [u8],
    },
    /// `flags` as in open(2).
    Open {
        flags: u32,
    },
    Read {
        offset: u64,
        size: u32,
    },
    /// `write_flags` of the protocol; `flags` as in open(2).
    Write {
        offset: u64,
        data: &'a [u8],
        write_flags: u32,
        flags: u32,
    },
    Statfs,
    Release,
    Fsync,
    /// `flags` as in setxattr(2). If the attribute is an access ACL, `takes_setgid` tells whether
    /// it clears setgid, because the caller is not in the group.
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
        takes_setgid: bool,
    },
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    Flush,
    Init,
    Opendir,
    Readdir {
        offset: u64,
        size: u32,
    },
    Releasedir,
    Fsyncdir,
    Locks,
    Access,
    Create,
    Interrupt,
    Bmap,
    Destroy,
    Ioctl,
    Poll,
    /// `mode` as in fallocate(2).
    Fallocate {
        offset: u64,
        len: u64,
        mode: u32,
    },
    Readdirplus {
        offset: u64,
        size: u32,
    },
    /// `whence` as in lseek(2).
    Lseek {
        offset: i64,
        whence: u32,
    },
    CopyFileRange {
        offset: u64,
        to: NodeId,
        to_offset: u64,
        len: u64,
        flags: u64,
    },
    /// A file without a name, in the request's node.
    Tmpfile {
        mode: u32,
        umask: u32,
    },
    /// One that this server does not know.
    Unknown,
}

impl<'a> Operation<'a> {
    /// Parses the body of a request.
    ///
    /// # Errors
    /// The body is too short, or a name has no end.
    pub(in crate::fuse) fn parse(
        request: &Request,
        body: &'a [u8],
        layout: Layout,
    ) -> Parsed<Operation<'a>> {
        let (opcode, fields) = (request.opcode, &mut Fields(body));
        if opcode == SETXATTR {
            return fields.setxattr(layout);
        }
        if let Some(operation) = Operation::on_name(opcode, fields)? {
            return Ok(operation);
        }
        if let Some(operation) = Operation::on_content(opcode, fields)? {
            return Ok(operation);
        }
        Operation::other(opcode, fields)
    }

    fn on_name(opcode: u32, f: &mut Fields<'a>) -> Parsed<Option<Operation<'a>>> {
        Ok(Some(match opcode {
            1 => Operation::Lookup { name: f.name()? },
            6 => Operation::Symlink { name: f.name()?, target: f.name()? },
            8 => {
                let (mode, rdev, umask, _) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
                Operation::Mknod { name: f.name()?, mode, rdev, umask }
            }
            9 => {
                let (mode, umask) = (f.u32()?, f.u32()?);
                Operation::Mkdir { name: f.name()?, mode, umask }
            }
            10 => Operation::Unlink { name: f.name()? },
            11 => Operation::Rmdir { name: f.name()? },
            12 => {
                let to = NodeId(f.u64()?);
                Operation::Rename { name: f.name()?, to, new_name: f.name()?, flags: 0 }
            }
            13 => Operation::Link { node: NodeId(f.u64()?), name: f.name()? },
            22 => {
                let (size, _padding) = (f.u32()?, f.u32()?);
                Operation::Getxattr { name: f.name()?, size }
            }
            24 => Operation::Removexattr { name: f.name()? },
            51 => {
                let (_flags, mode, umask, _open_flags) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
                let _name = f.name()?;
                Operation::Tmpfile { mode, umask }
            }
            45 => {
                let (to, flags, _padding) = (NodeId(f.u64()?), f.u32()?, f.u32()?);
                Operation::Rename { name: f.name()?, to, new_name: f.name()?, flags }
            }
            _ => return Ok(None),
        }))
    }

    fn on_content(opcode: u32, f: &mut Fields<'a>) -> Parsed<Option<Operation<'a>>> {
        Ok(Some(match opcode {
            15 => {
                let (offset, size) = f.file_range()?;
                f.then(20, Operation::Read { offset, size })?
            }
            16 => {
                let (offset, size) = f.file_range()?;
                let (write_flags, _lock_owner) = (f.u32()?, f.u64()?);
                let (flags, _padding) = (f.u32()?, f.u32()?);
                Operation::Write { offset, data: f.bytes(size as usize)?, write_flags, flags }
            }
            28 => {
                let (offset, size) = f.range()?;
                f.then(20, Operation::Readdir { offset, size })?
            }
            43 => {
                let (_handle, offset, len) = (f.u64()?, f.offset()?, f.offset()?);
                let (mode, _padding) = (f.u32()?, f.u32()?);
                Operation::Fallocate { offset, len, mode }
            }
            44 => {
                let (offset, size) = f.range()?;
                f.then(20, Operation::Readdirplus { offset, size })?
            }
            46 => {
                let (_handle, offset) = (f.u64()?, f.u64()?.cast_signed());
                let (whence, _padding) = (f.u32()?, f.u32()?);
                Operation::Lseek { offset, whence }
            }
            47 => {
                let (_handle, offset, to) = (f.u64()?, f.offset()?, NodeId(f.u64()?));
                let (_to_handle, to_offset, len) = (f.u64()?, f.offset()?, f.u64()?);
                Operation::CopyFileRange { offset, to, to_offset, len, flags: f.u64()? }
            }
            _ => return Ok(None),
        }))
    }

    fn other(opcode: u32, f: &mut Fields<'a>) -> Parsed<Operation<'a>> {
        Ok(match opcode {
            2 => Operation::Forget { nlookup: f.u64()? },
            3 => f.then(16, Operation::Getattr)?,
            4 => Operation::Setattr { set: f.setattr()? },
            5 => Operation::Readlink,
            14 => {
                let (flags, _unused) = (f.u32()?, f.u32()?);
                Operation::Open { flags }
            }
            17 => Operation::Statfs,
            18 => f.then(24, Operation::Release)?,
            20 => f.then(16, Operation::Fsync)?,
            23 => {
                let (size, _padding) = (f.u32()?, f.u32()?);
                Operation::Listxattr { size }
            }
            25 => f.then(24, Operation::Flush)?,
            26 => Operation::Init,
            27 => f.then(8, Operation::Opendir)?,
            29 => f.then(24, Operation::Releasedir)?,
            30 => f.then(16, Operation::Fsyncdir)?,
            31..=33 => f.then(48, Operation::Locks)?,
            34 => f.then(8, Operation::Access)?,
            35 => {
                let (_head, _name) = (f.bytes(16)?, f.name()?);
                Operation::Create
            }
            36 => f.then(8, Operation::Interrupt)?,
            37 => f.then(16, Operation::Bmap)?,
            38 => Operation::Destroy,
            39 => f.then(32, Operation::Ioctl)?,
            40 => f.then(24, Operation::Poll)?,
            42 => {
                let (count, _dummy) = (f.u32()?, f.u32()?);
                let nodes = (0..count).map(|_| Ok((NodeId(f.u64()?), f.u64()?)));
                Operation::BatchForget { nodes: nodes.collect::<Parsed<_>>()? }
            }
            _ => Operation::Unknown,
        })
    }
}

/// The rest of a body.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Parsed<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// `operation`, behind `len` bytes of which the server needs nothing.
    fn then(&mut self, len: usize, operation: Operation<'a>) -> Parsed<Operation<'a>> {
        self.bytes(len).map(|_skipped| operation)
    }

    fn u32(&mut self) -> Parsed<u32> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(u32::from_ne_bytes(*bytes))
    }

    fn u64(&mut self) -> Parsed<u64> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(u64::from_ne_bytes(*bytes))
    }

    /// Bytes that end with NUL.
    fn name(&mut self) -> Parsed<&'a [u8]> {
        let len = self.0.iter().position(|byte| *byte == 0).ok_or(Malformed)?;
        let name = self.bytes(len)?;
        self.bytes(1).map(|_nul| name)
    }

    /// An offset in a file, which the kernel keeps in a signed number.
    fn offset(&mut self) -> Parsed<u64> {
        Some(self.u64()?).filter(|offset| i64::try_from(*offset).is_ok()).ok_or(Malformed)
    }

    /// As [`Fields::range`], in a file.
    fn file_range(&mut self) -> Parsed<(u64, u32)> {
        let _handle = self.u64()?;
        Ok((self.offset()?, self.u32()?))
    }

    /// The beginning of a request with a handle, an offset or cookie, and a size.
    fn range(&mut self) -> Parsed<(u64, u32)> {
        let _handle = self.u64()?;
        Ok((self.u64()?, self.u32()?))
    }

    /// `struct fuse_setxattr_in`, a name and a value.
    fn setxattr(&mut self, layout: Layout) -> Parsed<Operation<'a>> {
        const ACL_KILL_SGID: u32 = 1 << 0;
        let (size, flags) = (self.u32()?, self.u32()?);
        let (more, _padding) =
            if layout.has_long_setxattr { (self.u32()?, self.u32()?) } else { (0, 0) };
        let (name, value) = (self.name()?, self.bytes(size as usize)?);
        Ok(Operation::Setxattr { name, value, flags, takes_setgid: more & ACL_KILL_SGID != 0 })
    }

    /// `struct fuse_setattr_in`.
    fn setattr(&mut self) -> Parsed<SetAttr> {
        let (flags, _padding) = (SetattrFlags(self.u32()?), self.u32()?);
        let (_handle, size, _lock_owner) = (self.u64()?, self.u64()?, self.u64()?);
        let mut secs = || self.u64().map(u64::cast_signed);
        let (atime, mtime, _ctime) = (secs()?, secs()?, secs()?);
        // The kernel sends less than a second. More would not be a time.
        let mut nanos = || self.u32().map(|nanos| Some(nanos).filter(|n| *n < 1_000_000_000));
        let (atime_nanos, mtime_nanos, _ctime_nanos) = (nanos()?, nanos()?, nanos()?);
        let (mode, _unused, uid, gid) = (self.u32()?, self.u32()?, self.u32()?, self.u32()?);
        let _unused = self.u32()?;
        let time = |secs, nanos: Option<u32>| Timestamp { secs, nanos: nanos.unwrap_or(0) };
        let to_atime = (SetattrFlags::ATIME_NOW, SetattrFlags::ATIME);
        let to_mtime = (SetattrFlags::MTIME_NOW, SetattrFlags::MTIME);
        Ok(SetAttr {
            mode: flags.has(SetattrFlags::MODE).then_some(mode),
            uid: flags.has(SetattrFlags::UID).then_some(uid),
            gid: flags.has(SetattrFlags::GID).then_some(gid),
            size: flags.has(SetattrFlags::SIZE).then_some(size),
            atime: flags.time(to_atime, time(atime, atime_nanos)),
            mtime: flags.time(to_mtime, time(mtime, mtime_nanos)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(HEADER + body.len()).unwrap();
        let mut message = [len.to_ne_bytes(), opcode.to_ne_bytes()].concat();
        message.extend_from_slice(&7_u64.to_ne_bytes());
        message.extend_from_slice(&9_u64.to_ne_bytes());
        for field in [1000_u32, 100, 4321, 0] {
            message.extend_from_slice(&field.to_ne_bytes());
        }
        message.extend_from_slice(body);
        message
    }

    #[test]
    fn a_request_has_its_head_and_only_its_own_body() {
        let bytes = [message(1, b"name\0"), b"rest".to_vec()].concat();
        let (request, body) = Request::parse(&bytes).unwrap();
        assert_eq!((request.unique, request.node, request.pid), (7, NodeId(9), 4321));
        assert_eq!((request.uid, request.gid), (1000, 100));
        assert_eq!(body, b"name\0");
        assert_eq!(
            Operation::parse(&request, body, Layout::default()),
            Ok(Operation::Lookup { name: b"name" })
        );
        for cut in 0..bytes.len() - 4 {
            assert!(Request::parse(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn a_short_body_is_malformed_and_never_read_beyond() {
        let short = (0..60).map(|opcode| (opcode, Layout::default()));
        let long = (SETXATTR, Layout { has_long_setxattr: true });
        for (opcode, layout) in short.chain([long]) {
            let bytes = message(opcode, &[]);
            let (request, _) = Request::parse(&bytes).unwrap();
            let whole = [0xff; 200];
            let mut was_whole = false;
            for len in 0..whole.len() {
                // A name needs its end.
                let body = [&whole[..len], b"\0x\0\0"].concat();
                let parsed = Operation::parse(&request, &body, layout).is_ok();
                assert!(parsed || !was_whole, "{opcode}: longer and not whole any more");
                was_whole |= parsed && opcode != 42 && opcode != 16 && opcode != 21;
            }
        }
    }

    #[test]
    fn setxattr_tells_whether_it_takes_setgid() {
        let bytes = [&1_u32, &2, &1, &0].map(|field| field.to_ne_bytes()).concat();
        let bytes = message(SETXATTR, &[&bytes[..], b"user.a\0v"].concat());
        let (request, body) = Request::parse(&bytes).unwrap();
        let parsed = Operation::parse(&request, body, Layout { has_long_setxattr: true });
        let (name, value) = (&b"user.a"[..], &b"v"[..]);
        assert_eq!(parsed, Ok(Operation::Setxattr { name, value, flags: 2, takes_setgid: true }));
    }

    #[test]
    fn times_to_set_may_be_before_1970_and_now() {
        let mut body = (SetattrFlags::ATIME | SetattrFlags::MTIME_NOW).to_ne_bytes().to_vec();
        body.extend_from_slice(&[0; 28]);
        for secs in [-5_i64, 6, 7] {
            body.extend_from_slice(&secs.to_ne_bytes());
        }
        for field in [999_999_999_u32, 0, 0, 0o644, 0, 1, 2, 0] {
            body.extend_from_slice(&field.to_ne_bytes());
        }
        let bytes = message(4, &body);
        let (request, body) = Request::parse(&bytes).unwrap();
        let set = SetAttr {
            atime: Some(SetTime::To(Timestamp { secs: -5, nanos: 999_999_999 })),
            mtime: Some(SetTime::Now),
            ..SetAttr::default()
        };
        assert_eq!(
            Operation::parse(&request, body, Layout::default()),
            Ok(Operation::Setattr { set })
        );
    }
}
