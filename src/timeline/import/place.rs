//! Puts a node at a name of the tree. A node that is there already stays as far as it is the same.

use std::sync::Arc;

use super::bad;
use super::builder::{Builder, Dir};
use super::content::{Content, Old};
use crate::error::{Error, FsError, FsResult, Result};
use crate::fs::Found;
use crate::tree::{Body, Edit, Meta, Node, Source, Xattrs};
use crate::types::{FileKind, Ino, Name};

/// The most hard links of a file.
const MAX_LINKS: u32 = 65_000;
/// The largest value of an extended attribute, and all of a file together, in bytes.
const MAX_XATTR: usize = 64 << 10;
const MAX_XATTRS: usize = 1 << 20;
/// The longest name of an extended attribute, in bytes.
const MAX_XATTR_NAME: usize = 255;

/// The attributes that a node gets.
pub(super) struct Wanted<'a> {
    /// The path of the entry, for errors.
    pub(super) path: &'a [u8],
    /// The mode with its type, the owner, the times and the device. The link count is not used.
    pub(super) meta: Meta,
    pub(super) xattrs: Xattrs,
    /// Whether the times of access and change are part of the entry.
    pub(super) has_all_times: bool,
}

impl Wanted<'_> {
    /// Whether a node has these attributes.
    fn are_those_of(&self, node: &Node) -> bool {
        let there = node.meta;
        let mut same = Meta { nlink: there.nlink, ..self.meta };
        if !self.has_all_times {
            (same.atime, same.ctime) = (there.atime, there.ctime);
        }
        there == same && node.xattrs == self.xattrs
    }

    fn node(&self, nlink: u32, body: Body) -> Node {
        Node { meta: Meta { nlink, ..self.meta }, xattrs: self.xattrs.clone(), body }
    }
}

/// An entry at its place.
pub(super) struct Placed<'a> {
    pub(super) wanted: Wanted<'a>,
    pub(super) dir: Dir,
    pub(super) name: Name,
    /// The node that stands there now.
    pub(super) found: Found,
}

/// The error of an operation for an entry.
pub(super) fn of_fs(path: &[u8], error: FsError) -> Error {
    let shown = crate::types::quoted(path);
    let attempt: Result<()> =
        crate::error::Attempt::attempt(Err(error), || format!("import entry '{shown}'"));
    match attempt {
        Err(error) => error,
        Ok(()) => bad(path, "unknown"),
    }
}

/// The extended attributes that a tree can have. Those of other systems are left out.
pub(super) fn xattrs<'x>(
    builder: &mut Builder<'_>,
    path: &[u8],
    kind: FileKind,
    all: impl Iterator<Item = (&'x Vec<u8>, &'x Vec<u8>)>,
) -> Result<Xattrs> {
    let mut kept = std::collections::BTreeMap::new();
    let mut size = 0;
    let takes_user = matches!(kind, FileKind::File | FileKind::Dir);
    for (name, value) in all {
        size += name.len() + value.len();
        if name.len() > MAX_XATTR_NAME || value.len() > MAX_XATTR || size > MAX_XATTRS {
            return Err(bad(path, "its extended attributes are too large"));
        }
        if name.contains(&0) {
            return Err(bad(path, "the name of an extended attribute has a NUL"));
        }
        let is_acl = matches!(&name[..], b"system.posix_acl_access" | b"system.posix_acl_default");
        let has_prefix = |prefix: &[u8]| name.len() > prefix.len() && name.starts_with(prefix);
        if is_acl && !is_acl_value(value) {
            return Err(bad(path, "its access control list is malformed"));
        }
        let is_known = (is_acl && kind != FileKind::Fifo)
            || (has_prefix(b"user.") && takes_user)
            || has_prefix(b"trusted.")
            || has_prefix(b"security.");
        if is_known {
            kept.insert(name.clone(), value.clone());
        } else {
            builder.left_out += 1;
        }
    }
    Ok((!kept.is_empty()).then(|| Arc::new(kept)))
}

/// Whether a value has the form of an access control list: a version and entries of 8 bytes.
fn is_acl_value(value: &[u8]) -> bool {
    value.strip_prefix(&2u32.to_le_bytes()).is_some_and(|rest| rest.len().is_multiple_of(8))
}

/// The node that stands there now, if an entry of this kind can go into it. A file with further
/// hard links is another one for the archive, which says on its own which names are one file.
pub(super) fn reusable(
    builder: &Builder<'_>,
    found: &Found,
    kind: FileKind,
) -> FsResult<Option<(Ino, Arc<Node>)>> {
    let Some(ino) = found.ino() else { return Ok(None) };
    if builder.state.kind(found) != Some(kind) {
        return Ok(None);
    }
    let node = builder.state.node(found)?;
    Ok((kind == FileKind::Dir || node.meta.nlink == 1).then_some((ino, node)))
}

/// Gives a directory that is there the attributes of an entry.
pub(super) fn set_directory(
    builder: &mut Builder<'_>,
    wanted: &Wanted<'_>,
    found: &Found,
) -> FsResult<Ino> {
    let node = builder.state.node(found)?;
    let ino = found.ino().ok_or(FsError::NotFound)?;
    builder.see(ino);
    if wanted.are_those_of(&node) {
        return Ok(ino);
    }
    builder.copy_up(found)?;
    let node = wanted.node(node.meta.nlink, node.body.clone());
    builder.edit(&Edit::Put { ino, node: Box::new(node) })?;
    Ok(ino)
}

/// Puts a directory.
pub(super) fn directory(builder: &mut Builder<'_>, at: &Placed<'_>) -> FsResult<Ino> {
    if builder.state.as_dir(&at.found).is_some() {
        return set_directory(builder, &at.wanted, &at.found);
    }
    let node = at.wanted.node(2, Body::Dir { base: None });
    let ino = builder.put_new(&at.dir, &at.name, node)?;
    builder.see(ino);
    Ok(ino)
}

/// Puts a file whose content was received for `ino`.
pub(super) fn file(
    builder: &mut Builder<'_>,
    at: &Placed<'_>,
    (ino, is_reused): (Ino, bool),
    old: Option<Old>,
    (size, content): (u64, Content),
) -> FsResult<()> {
    let is_same = is_reused && content.is_same;
    if let Some(old) = old.as_ref().filter(|_| is_same)
        && at.wanted.are_those_of(&old.node)
    {
        builder.see(ino);
        return Ok(());
    }
    let origin = match old.as_ref().map(|old| &old.node.body) {
        Some(Body::File { origin, .. }) => origin.clone(),
        _ => None,
    };
    let has_base = |source: &Source| source.is_base();
    let origin = origin.filter(|_| content.extents.iter().any(|(_, source)| has_base(source)));
    let node = at.wanted.node(1, Body::File { size, origin });
    if is_reused {
        builder.copy_up(&at.found)?;
        builder.edit(&Edit::Resize { ino, size: 0 })?;
    } else {
        builder.detach(&at.dir, &at.name)?;
    }
    builder.edit(&Edit::Put { ino, node: Box::new(node) })?;
    for (range, source) in content.extents {
        builder.edit(&Edit::Map { ino, range, to: Some(source) })?;
    }
    if !is_reused {
        builder.attach(&at.dir, &at.name, ino)?;
    }
    builder.see(ino);
    Ok(())
}

/// Puts a link, pipe, socket or device.
pub(super) fn special(
    builder: &mut Builder<'_>,
    at: &mut Placed<'_>,
    kind: FileKind,
    body: Body,
) -> FsResult<Ino> {
    if kind == FileKind::Symlink {
        // No program can change the mode of a link, and the kernel ignores it.
        at.wanted.meta.mode = kind.type_bits() | 0o777;
    }
    let Some((ino, node)) = reusable(builder, &at.found, kind)? else {
        let ino = builder.put_new(&at.dir, &at.name, at.wanted.node(1, body))?;
        builder.see(ino);
        return Ok(ino);
    };
    builder.see(ino);
    if node.body == body && at.wanted.are_those_of(&node) {
        return Ok(ino);
    }
    builder.copy_up(&at.found)?;
    builder.edit(&Edit::Put { ino, node: Box::new(at.wanted.node(1, body)) })?;
    Ok(ino)
}

/// Counts a further name of a file, whose record is in the tree. False: it has too many.
pub(super) fn count_link(builder: &mut Builder<'_>, ino: Ino) -> FsResult<bool> {
    let meta = builder.state.tree.node(ino).map(|node| node.meta);
    let Some(meta) = meta.filter(|meta| meta.nlink < MAX_LINKS) else { return Ok(false) };
    builder.edit(&Edit::Meta { ino, meta: Meta { nlink: meta.nlink + 1, ..meta } })?;
    Ok(true)
}

/// The error of a file that has too many names.
pub(super) fn too_many_links(path: &[u8], of: &str) -> Error {
    bad(path, format!("'{of}' has {MAX_LINKS} links already"))
}
