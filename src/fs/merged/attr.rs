//! The attributes that `stat` reports for a node.

use crate::tree::{Body, Meta, Tree};
use crate::types::{FileKind, Ino};

/// The attributes that stat(2) reports for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// Type.
    pub kind: FileKind,
    /// Mode, owner, number of links, device and times.
    pub meta: Meta,
    /// Size in bytes.
    pub size: u64,
    /// Space that the content takes, in units of 512 bytes.
    pub blocks: u64,
}

impl Attr {
    /// The attributes of the node `key` of `tree`, with `ino` as inode number; `None` if the tree
    /// has no such node.
    pub(in crate::fs) fn in_tree(tree: &Tree, key: Ino, ino: Ino) -> Option<Attr> {
        let node = tree.node(key)?;
        let blocks = match node.body {
            Body::File { .. } => tree.extents(key).map(|(_, extent)| blocks(extent.len)).sum(),
            Body::Dir { .. } => 8,
            Body::Symlink { .. } | Body::Special => 0,
        };
        Some(Attr { ino, kind: node.kind(), meta: node.meta, size: node.size(), blocks })
    }

    /// The attributes of a node below the tree. The size of a directory differs between
    /// filesystems and means nothing, so every directory has the size that ours have.
    pub(super) fn of_lower(ino: Ino, kind: FileKind, meta: Meta, size: u64, blocks: u64) -> Attr {
        match kind {
            FileKind::Dir => Attr { ino, kind, meta, size: 4096, blocks: 8 },
            _ => Attr { ino, kind, meta, size, blocks },
        }
    }
}

/// The units of 512 bytes in the 4 KiB blocks that `len` bytes take.
pub(super) fn blocks(len: u64) -> u64 {
    len.div_ceil(4096) * 8
}
