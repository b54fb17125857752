//! The tree blob: one state of the whole tree, as bytes that depend on nothing else.
//!
//! The entries of a state are a long **stream**, which is cut into chunks like content. The
//! **blob** is the short list of these chunks, and its digest names the state. So a change of one
//! file changes a few chunks and the blob, however large the tree is.
//!
//! ```text
//! stream   magic | root directory
//! Dir      tag 1 | name | attributes | entries, names ascending | tag 0
//! File     tag 2 | name | attributes | size | pieces, as many as the size needs
//! Symlink  tag 3 | name | attributes | target
//! Fifo, Socket   tags 4 and 5 | name | attributes
//! Char, Block    tags 6 and 7 | name | attributes | device
//! Link     tag 8 | name | number of the entry whose node it names, too
//! BaseFile tag 9 | name | attributes | size | path in the base | digest of the content
//! piece    length * 2: a hole | length * 2 + 1, digest: a chunk
//! attributes     permission bits | uid | gid | mtime | ctime | atime | extended attributes
//! ```
//!
//! It is canonical, because:
//! * names ascend by their bytes, and so do extended attributes;
//! * numbers have one form (`bytes.rs`);
//! * a hole is a run of blocks of 4 KiB that are all zero, never what a host calls a hole;
//! * chunks are cut from the beginning of each run between holes;
//! * inode numbers, the sizes of directories and link counts are not in it.
//!
//! A reader checks all of this but the cuts, which need the content. It needs memory for the names
//! of the open directories and one bit per entry.

mod blob;
mod layout;
mod reader;
mod rules;
mod writer;

pub use blob::{MAX_BLOB, TreeBlob, load};
pub use layout::{Attributes, ContentDigest, Event, Piece};
pub use reader::TreeReader;
pub use writer::{TreeWriter, put_event, put_magic};

/// Holes are made of blocks of so many bytes.
pub const HOLE_BLOCK: u64 = 4096;
