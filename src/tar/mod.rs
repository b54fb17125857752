//! The tar format, for export and import: ustar headers with pax records.
//!
//! * The writer is reproducible: the same entries give the same bytes. No field has the time, the
//!   user or the machine of the export.
//! * The reader trusts nothing. It holds one header and one block of records at a time, each of a
//!   bounded size, and never allocates by a size that an archive states. An error names the entry.
//! * Names are bytes. A record whose value is not UTF-8 is announced by `hdrcharset=BINARY`.
//!
//! Times are pax `mtime` records where a header cannot hold them: with a fraction, before 1970, or
//! after 2242. Extended attributes, access control lists and capabilities are `SCHILY.xattr.`
//! records with the raw value of the kernel, as Go's tools and GNU tar write them. Files with holes
//! are `GNU.sparse` 1.0; versions 0.0, 0.1 and the old GNU header are read as well.
//!
//! The crate `tar` reads no pax sparse files and bounds neither records nor long names.

mod header;
mod pax;
mod read;
mod sparse;
#[cfg(test)]
mod tests;
mod write;

use std::collections::BTreeMap;

use crate::types::{ByteRange, Timestamp};

pub use read::Reader;
pub use write::Writer;

/// The size of a block: archives consist of these.
pub(in crate::tar) const BLOCK: usize = 512;
/// The largest size of the records of one entry, in bytes.
pub(in crate::tar) const MAX_RECORDS: u64 = 8 << 20;
/// The most data ranges of one file with holes.
pub const MAX_RANGES: usize = (1 << 20) + 1;

/// The type of an entry, with what only this type has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File {
        /// Its size in bytes, holes included.
        size: u64,
        /// The ranges that the archive has bytes for, in order; the others are holes. `None` for
        /// the whole file.
        data: Option<Vec<ByteRange>>,
    },
    /// Another name of an earlier entry.
    Link {
        /// The path of that entry.
        target: Vec<u8>,
    },
    /// A symbolic link.
    Symlink {
        /// The stored text.
        target: Vec<u8>,
    },
    /// A directory.
    Dir,
    /// A named pipe.
    Fifo,
    /// A character device.
    Char {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// One entry without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The path as the archive has it. It is not checked.
    pub path: Vec<u8>,
    /// The type.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Extended attributes by name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Entry {
    /// The number of bytes that the archive has for the entry.
    pub fn stored(&self) -> u64 {
        match &self.kind {
            Kind::File { data: Some(data), .. } => data.iter().map(ByteRange::len).sum(),
            Kind::File { size, data: None } => *size,
            Kind::Link { .. }
            | Kind::Symlink { .. }
            | Kind::Dir
            | Kind::Fifo
            | Kind::Char { .. }
            | Kind::Block { .. } => 0,
        }
    }
}
