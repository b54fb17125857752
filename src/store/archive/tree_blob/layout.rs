//! The entries of a tree stream, and their bytes.

use std::collections::BTreeMap;

use crate::store::archive::bytes::{self, Input};
use crate::store::archive::{ChunkRef, Digest, Flaw, MAX_CHUNK};
use crate::types::{FileKind, Name, PERM_BITS, Timestamp, TreePath};

/// The first bytes of a stream.
pub(super) const MAGIC: &[u8; 16] = b"jailfs-tree   1\n";
/// The longest text of a symbolic link (`PATH_MAX` without its end).
pub(super) const MAX_TARGET: usize = 4095;
/// The longest path of a file in the base that a thin description relies on.
pub(super) const MAX_BASE_PATH: usize = 64 << 10;
/// The longest name of an extended attribute (`XATTR_NAME_MAX`).
const MAX_XATTR_NAME: usize = 255;
/// The longest value of an extended attribute (`XATTR_SIZE_MAX`).
const MAX_XATTR_VALUE: usize = 64 << 10;
/// The most bytes of all extended attributes of a node.
const MAX_XATTRS: usize = 16 << 20;

const END: u8 = 0;
const DIR: u8 = 1;
const FILE: u8 = 2;
const SYMLINK: u8 = 3;
const FIFO: u8 = 4;
const SOCKET: u8 = 5;
const CHAR: u8 = 6;
const BLOCK: u8 = 7;
const LINK: u8 = 8;
const BASE_FILE: u8 = 9;

/// The attributes of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// The bits that chmod(2) sets.
    pub perms: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of content or attributes.
    pub ctime: Timestamp,
    /// Last access.
    pub atime: Timestamp,
    /// Extended attributes, ACLs among them.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// A part of the content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// So many zeros.
    Hole(u64),
    /// A chunk.
    Chunk(ChunkRef),
}

impl Piece {
    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        match self {
            Piece::Hole(len) => *len,
            Piece::Chunk(chunk) => u64::from(chunk.len),
        }
    }

    /// Whether the piece has no bytes, which no valid one is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An element of a tree stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A directory begins. Only the root has no name.
    Dir {
        /// The name.
        name: Option<Name>,
        /// Its attributes.
        attributes: Attributes,
    },
    /// The directory that began last ends.
    End,
    /// A file. Its pieces follow.
    File {
        /// The name.
        name: Name,
        /// Its attributes.
        attributes: Attributes,
        /// Bytes.
        size: u64,
    },
    /// The next piece of the file.
    Piece(Piece),
    /// A file whose content is that of a file of the base, which a thin description relies on.
    BaseFile {
        /// The name.
        name: Name,
        /// Its attributes.
        attributes: Attributes,
        /// Bytes.
        size: u64,
        /// The path of the file in the base.
        path: TreePath,
        /// The digest of the content ([`ContentDigest`]).
        digest: Digest,
    },
    /// A symbolic link.
    Symlink {
        /// The name.
        name: Name,
        /// Its attributes.
        attributes: Attributes,
        /// Its text.
        target: Vec<u8>,
    },
    /// A fifo, a socket or a device.
    Special {
        /// The name.
        name: Name,
        /// Its attributes.
        attributes: Attributes,
        /// The kind.
        kind: FileKind,
        /// The number of a device, as in `st_rdev`; 0 otherwise.
        rdev: u64,
    },
    /// Another name of a node that an earlier entry has.
    Link {
        /// The name.
        name: Name,
        /// The number of that entry; the root has number 0.
        of: u64,
    },
}

impl Event {
    /// The name of an entry. The root has none.
    pub fn name(&self) -> Option<&Name> {
        match self {
            Event::Dir { name, .. } => name.as_ref(),
            Event::File { name, .. }
            | Event::Symlink { name, .. }
            | Event::Special { name, .. }
            | Event::BaseFile { name, .. }
            | Event::Link { name, .. } => Some(name),
            Event::End | Event::Piece(_) => None,
        }
    }

    /// The attributes of an entry, if it has its own.
    pub fn attributes(&self) -> Option<&Attributes> {
        match self {
            Event::Dir { attributes, .. }
            | Event::File { attributes, .. }
            | Event::Symlink { attributes, .. }
            | Event::BaseFile { attributes, .. }
            | Event::Special { attributes, .. } => Some(attributes),
            Event::Link { .. } | Event::End | Event::Piece(_) => None,
        }
    }

    fn tag(&self) -> Option<u8> {
        Some(match self {
            Event::End => END,
            Event::Dir { .. } => DIR,
            Event::File { .. } => FILE,
            Event::Symlink { .. } => SYMLINK,
            Event::Link { .. } => LINK,
            Event::BaseFile { .. } => BASE_FILE,
            Event::Special { kind: FileKind::Fifo, .. } => FIFO,
            Event::Special { kind: FileKind::Socket, .. } => SOCKET,
            Event::Special { kind: FileKind::Char, .. } => CHAR,
            Event::Special { kind: FileKind::Block, .. } => BLOCK,
            Event::Special { .. } | Event::Piece(_) => return None,
        })
    }

    /// Appends the bytes of the event.
    pub(super) fn put(&self, out: &mut Vec<u8>) -> Result<(), Flaw> {
        if let Event::Piece(piece) = self {
            put_piece(out, piece);
            return Ok(());
        }
        out.push(self.tag().ok_or_else(|| Flaw::new("not a kind of special file"))?);
        if *self != Event::End {
            bytes::put_bytes(out, self.name().map_or(&[], Name::as_bytes));
        }
        if let Some(attributes) = self.attributes() {
            attributes.check()?;
            attributes.put(out);
        }
        match self {
            Event::File { size, .. } => bytes::put_number(out, *size),
            Event::Symlink { target, .. } => bytes::put_bytes(out, target),
            Event::Special { kind: FileKind::Char | FileKind::Block, rdev, .. } => {
                bytes::put_number(out, *rdev);
            }
            Event::Special { rdev, .. } if *rdev != 0 => {
                return Err(Flaw::new("a device number of a node that is no device"));
            }
            Event::Link { of, .. } => bytes::put_number(out, *of),
            Event::BaseFile { size, path, digest, .. } => {
                bytes::put_number(out, *size);
                bytes::put_bytes(out, path.as_bytes());
                out.extend_from_slice(&digest.0);
            }
            Event::Special { .. } | Event::Dir { .. } | Event::End | Event::Piece(_) => {}
        }
        Ok(())
    }

    /// Takes an entry, or the end of a directory.
    pub(super) fn take(input: &mut dyn Input) -> Result<Event, Flaw> {
        let tag = input.byte()?;
        if tag == END {
            return Ok(Event::End);
        }
        let name = take_name(input)?;
        if tag == DIR {
            return Ok(Event::Dir { name, attributes: Attributes::take(input)? });
        }
        let name = name.ok_or_else(|| Flaw::new("an entry without a name"))?;
        if tag == LINK {
            return Ok(Event::Link { name, of: bytes::number(input)? });
        }
        if tag == BASE_FILE {
            let (attributes, size) = (Attributes::take(input)?, bytes::number(input)?);
            let path = take_base_path(input)?;
            return Ok(Event::BaseFile {
                name,
                attributes,
                size,
                path,
                digest: bytes::digest(input)?,
            });
        }
        let kind = match tag {
            FILE => FileKind::File,
            SYMLINK => FileKind::Symlink,
            FIFO => FileKind::Fifo,
            SOCKET => FileKind::Socket,
            CHAR => FileKind::Char,
            BLOCK => FileKind::Block,
            _ => return Err(Flaw::new(format!("an entry of the unknown kind {tag}"))),
        };
        let attributes = Attributes::take(input)?;
        Ok(match kind {
            FileKind::File => Event::File { name, attributes, size: bytes::number(input)? },
            FileKind::Symlink => {
                let target = bytes::bytes(input, MAX_TARGET, "the length of a link's text")?;
                Event::Symlink { name, attributes, target }
            }
            FileKind::Char | FileKind::Block => {
                Event::Special { name, attributes, kind, rdev: bytes::number(input)? }
            }
            FileKind::Fifo | FileKind::Socket | FileKind::Dir => {
                Event::Special { name, attributes, kind, rdev: 0 }
            }
        })
    }
}

/// Takes the path of a file in the base.
fn take_base_path(input: &mut dyn Input) -> Result<TreePath, Flaw> {
    let path = bytes::bytes(input, MAX_BASE_PATH, "the length of a path in the base")?;
    let is_path = |found: &TreePath| !found.is_root() && found.as_bytes() == path;
    let parsed = TreePath::parse(&path).ok().filter(is_path);
    parsed.ok_or_else(|| Flaw::new(format!("'{}' is not a path in the base", path.escape_ascii())))
}

/// The digest of the content of a file that stands in no pack: of its pieces, as the stream would
/// have them. So a hole of terabytes costs nothing, and where the host has holes does not matter.
#[derive(Default)]
pub struct ContentDigest {
    hasher: blake3::Hasher,
}

impl ContentDigest {
    /// Adds the next piece.
    pub fn add(&mut self, piece: &Piece) {
        let mut bytes = Vec::with_capacity(48);
        put_piece(&mut bytes, piece);
        self.hasher.update(&bytes);
    }

    /// The digest of all pieces.
    pub fn finish(&self) -> Digest {
        Digest(*self.hasher.finalize().as_bytes())
    }
}

fn take_name(input: &mut dyn Input) -> Result<Option<Name>, Flaw> {
    let name = bytes::bytes(input, crate::types::NAME_MAX, "the length of a name")?;
    match Name::new(&name) {
        Ok(name) => Ok(Some(name)),
        Err(_) if name.is_empty() => Ok(None),
        Err(_) => Err(Flaw::new(format!("'{}' is not a name", name.escape_ascii()))),
    }
}

fn put_piece(out: &mut Vec<u8>, piece: &Piece) {
    match piece {
        // The rules limit a file to 2^63 - 1 bytes.
        Piece::Hole(len) => bytes::put_number(out, len << 1),
        Piece::Chunk(chunk) => {
            bytes::put_number(out, u64::from(chunk.len) << 1 | 1);
            out.extend_from_slice(&chunk.digest.0);
        }
    }
}

/// Takes a piece of a file.
pub(super) fn take_piece(input: &mut dyn Input) -> Result<Piece, Flaw> {
    let number = bytes::number(input)?;
    let len = number >> 1;
    if number & 1 == 0 {
        return Ok(Piece::Hole(len));
    }
    let is_valid = |len: &u32| (1..=MAX_CHUNK).contains(&(*len as usize));
    let len = u32::try_from(len).ok().filter(is_valid);
    let len = len.ok_or_else(|| Flaw::new("a chunk of no or too many bytes"))?;
    Ok(Piece::Chunk(ChunkRef { digest: bytes::digest(input)?, len }))
}

impl Attributes {
    fn put(&self, out: &mut Vec<u8>) {
        for number in [self.perms, self.uid, self.gid] {
            bytes::put_number(out, u64::from(number));
        }
        for time in [self.mtime, self.ctime, self.atime] {
            bytes::put_signed(out, time.secs);
            bytes::put_number(out, u64::from(time.nanos));
        }
        bytes::put_number(out, self.xattrs.len() as u64);
        for (name, value) in &self.xattrs {
            bytes::put_bytes(out, name);
            bytes::put_bytes(out, value);
        }
    }

    fn take(input: &mut dyn Input) -> Result<Attributes, Flaw> {
        let number = |input: &mut dyn Input, most: u32, what: &str| {
            bytes::at_most(input, u64::from(most), what).map(|number| number as u32)
        };
        let perms = number(input, PERM_BITS, "the mode")?;
        let uid = number(input, u32::MAX, "the owner")?;
        let gid = number(input, u32::MAX, "the group")?;
        let [mtime, ctime, atime] = [take_time(input)?, take_time(input)?, take_time(input)?];
        let xattrs = take_xattrs(input)?;
        Ok(Attributes { perms, uid, gid, mtime, ctime, atime, xattrs })
    }

    /// Checks what [`Attributes::take`] checks.
    fn check(&self) -> Result<(), Flaw> {
        let is_time = |time: &Timestamp| time.nanos < 1_000_000_000;
        if self.perms > PERM_BITS || ![self.mtime, self.ctime, self.atime].iter().all(is_time) {
            return Err(Flaw::new("a mode or a time out of range"));
        }
        let mut total = 0;
        self.xattrs.iter().try_for_each(|(name, value)| check_xattr(name, value, &mut total))
    }
}

fn take_time(input: &mut dyn Input) -> Result<Timestamp, Flaw> {
    let secs = bytes::signed(input)?;
    let nanos = bytes::at_most(input, 999_999_999, "the nanoseconds of a time")? as u32;
    Ok(Timestamp { secs, nanos })
}

fn check_xattr(name: &[u8], value: &[u8], total: &mut usize) -> Result<(), Flaw> {
    *total += name.len() + value.len();
    let is_name = !name.is_empty() && name.len() <= MAX_XATTR_NAME && !name.contains(&0);
    if !is_name || value.len() > MAX_XATTR_VALUE || *total > MAX_XATTRS {
        return Err(Flaw::new("an extended attribute without a valid name, or too long"));
    }
    Ok(())
}

fn take_xattrs(input: &mut dyn Input) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Flaw> {
    let count = bytes::at_most(input, MAX_XATTRS as u64 / 2, "the number of attributes")?;
    let (mut xattrs, mut total) = (BTreeMap::<Vec<u8>, Vec<u8>>::new(), 0);
    for _ in 0..count {
        let name = bytes::bytes(input, MAX_XATTR_NAME, "the length of an attribute's name")?;
        let value = bytes::bytes(input, MAX_XATTR_VALUE, "the length of an attribute")?;
        check_xattr(&name, &value, &mut total)?;
        if xattrs.last_key_value().is_some_and(|(last, _)| *last >= name) {
            return Err(Flaw::new("extended attributes that do not ascend"));
        }
        xattrs.insert(name, value);
    }
    Ok(xattrs)
}
