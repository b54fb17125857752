//! Puts one entry of an archive into the tree.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use nix::sys::stat::makedev;

use super::builder::{Builder, Dir};
use super::content::{self, Old};
use super::{bad, purge};
use crate::error::{Error, FsError, FsResult, Result};
use crate::fs::Found;
use crate::tar::{Entry, Kind, Reader};
use crate::timeline::export::WHITEOUT;
use crate::tree::{Body, Edit, Meta, Node, Source, Xattrs};
use crate::types::{BadName, FileKind, Ino, Name, TreePath};

/// The rest of the name of a whiteout that hides all of a directory.
const OPAQUE: &[u8] = b".wh..opq";
/// The longest target of a symbolic link, in bytes.
const MAX_TARGET: usize = 4095;
/// The largest numbers of a device.
const MAX_MAJOR: u32 = (1 << 12) - 1;
const MAX_MINOR: u32 = (1 << 20) - 1;
/// The largest value of an extended attribute, and all of a file together, in bytes.
const MAX_XATTR: usize = 64 << 10;
const MAX_XATTRS: usize = 1 << 20;
/// The longest name of an extended attribute, in bytes.
const MAX_XATTR_NAME: usize = 255;
/// The most hard links of a file.
const MAX_LINKS: u32 = 65_000;

/// An entry at its place.
struct Placed<'a> {
    entry: &'a Entry,
    dir: Dir,
    name: Name,
    /// The node that stands there now.
    found: Found,
    xattrs: Xattrs,
}

/// Puts an entry into the tree.
///
/// # Errors
/// The entry is malformed or exceeds a limit; those of the archive, the store and the base. They
/// name the entry.
pub(super) fn add<R: Read>(
    builder: &mut Builder<'_>,
    entry: &Entry,
    reader: &mut Reader<R>,
) -> Result<()> {
    let path = clean(&entry.path).map_err(|why| bad(&entry.path, why))?;
    let xattr_bytes: usize =
        entry.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
    let ranges = match &entry.kind {
        Kind::File { data: Some(data), .. } => 64 * data.len(),
        Kind::Link { target } | Kind::Symlink { target } => target.len(),
        _ => 0,
    };
    if !builder.count((entry.path.len() + xattr_bytes + ranges) as u64) {
        let most = builder.limits.metadata >> 20;
        let why = format!("the archive has more than {most} MiB of names and attributes");
        return Err(bad(&entry.path, why));
    }
    let Some((above, name)) = path.split() else { return root(builder, entry) };
    if let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT).filter(|_| builder.has_whiteouts) {
        return whiteout(builder, &above, hidden, entry);
    }
    let during = |error: FsError| of_fs(entry, error);
    let dir = match builder.dir_at(&above).map_err(during)? {
        Ok(dir) => dir,
        Err(other) => {
            return Err(bad(&entry.path, format!("'{other}' above it is not a directory")));
        }
    };
    let xattrs = xattrs(builder, entry)?;
    let found = builder.find(&dir, &name).map_err(during)?;
    let placed = Placed { entry, dir, name, found, xattrs };
    match &entry.kind {
        Kind::File { .. } => file(builder, &placed, reader),
        Kind::Dir => directory(builder, &placed).map_err(during),
        Kind::Link { target } => link(builder, &placed, &path, target),
        Kind::Symlink { target } => {
            if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
                return Err(bad(&entry.path, "its target is not one that a link can have"));
            }
            let body = Body::Symlink { target: target.clone() };
            special(builder, &placed, (FileKind::Symlink, 0), body).map_err(during)
        }
        Kind::Fifo => special(builder, &placed, (FileKind::Fifo, 0), Body::Special).map_err(during),
        Kind::Char { major, minor } => device(builder, &placed, FileKind::Char, (*major, *minor)),
        Kind::Block { major, minor } => device(builder, &placed, FileKind::Block, (*major, *minor)),
    }
}

/// The path of an entry in the tree.
fn clean(bytes: &[u8]) -> std::result::Result<TreePath, &'static str> {
    if bytes.starts_with(b"/") {
        return Err("its name is absolute");
    }
    if bytes.split(|byte| *byte == b'/').any(|part| part == b"..") {
        return Err("its name leads up by '..'");
    }
    TreePath::parse(bytes).map_err(|bad| match bad {
        BadName::TooLong => "its name is longer than 255 bytes",
        BadName::Invalid => "its name is not one that a file can have",
    })
}

fn of_fs(entry: &Entry, error: FsError) -> Error {
    let path = crate::types::quoted(&entry.path);
    let attempt: Result<()> =
        crate::error::Attempt::attempt(Err(error), || format!("import entry '{path}'"));
    match attempt {
        Err(error) => error,
        Ok(()) => bad(&entry.path, "unknown"),
    }
}

/// The extended attributes that a tree can have. Those of other systems are left out.
fn xattrs(builder: &mut Builder<'_>, entry: &Entry) -> Result<Xattrs> {
    let mut kept = BTreeMap::new();
    let mut size = 0;
    let takes_user = matches!(entry.kind, Kind::File { .. } | Kind::Dir);
    for (name, value) in &entry.xattrs {
        size += name.len() + value.len();
        if name.len() > MAX_XATTR_NAME || value.len() > MAX_XATTR || size > MAX_XATTRS {
            return Err(bad(&entry.path, "its extended attributes are too large"));
        }
        if name.contains(&0) {
            return Err(bad(&entry.path, "the name of an extended attribute has a NUL"));
        }
        let is_acl = matches!(&name[..], b"system.posix_acl_access" | b"system.posix_acl_default");
        let has_prefix = |prefix: &[u8]| name.len() > prefix.len() && name.starts_with(prefix);
        if is_acl && !is_acl_value(value) {
            return Err(bad(&entry.path, "its access control list is malformed"));
        }
        let is_known = (is_acl && entry.kind != Kind::Fifo)
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

/// The attributes that an entry describes. An archive has neither the access nor the change time.
fn meta(builder: &Builder<'_>, entry: &Entry, kind: FileKind, nlink: u32, rdev: u64) -> Meta {
    Meta {
        mode: kind.type_bits() | (entry.mode & crate::types::PERM_BITS),
        uid: entry.uid,
        gid: entry.gid,
        nlink,
        rdev,
        atime: entry.mtime,
        mtime: entry.mtime,
        ctime: builder.now(),
    }
}

/// Whether a node has the attributes of an entry.
fn has_attributes(node: &Node, meta: &Meta, xattrs: &Xattrs) -> bool {
    let same = Meta { atime: node.meta.atime, ctime: node.meta.ctime, ..*meta };
    node.meta == same && node.xattrs == *xattrs
}

/// The node that stands there now, if an entry of this kind can go into it. A file with further
/// hard links is another one for the archive, which says on its own which names are one file.
fn reusable(
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

fn root(builder: &mut Builder<'_>, entry: &Entry) -> Result<()> {
    let during = |error: FsError| of_fs(entry, error);
    if entry.kind != Kind::Dir {
        return Err(bad(&entry.path, "the root is a directory"));
    }
    let xattrs = xattrs(builder, entry)?;
    let found = builder.state.resolve(&TreePath::root()).map_err(during)?;
    set_directory(builder, entry, &found, xattrs).map_err(during)
}

/// Gives a directory that is there the attributes of an entry.
fn set_directory(
    builder: &mut Builder<'_>,
    entry: &Entry,
    found: &Found,
    xattrs: Xattrs,
) -> FsResult<()> {
    let node = builder.state.node(found)?;
    let ino = found.ino().ok_or(FsError::NotFound)?;
    let meta = meta(builder, entry, FileKind::Dir, node.meta.nlink, 0);
    builder.see(ino);
    if has_attributes(&node, &meta, &xattrs) {
        return Ok(());
    }
    builder.copy_up(found)?;
    let body = node.body.clone();
    builder.edit(&Edit::Put { ino, node: Box::new(Node { meta, xattrs, body }) })
}

fn directory(builder: &mut Builder<'_>, at: &Placed<'_>) -> FsResult<()> {
    if builder.state.as_dir(&at.found).is_some() {
        return set_directory(builder, at.entry, &at.found, at.xattrs.clone());
    }
    let meta = meta(builder, at.entry, FileKind::Dir, 2, 0);
    let body = Body::Dir { base: None };
    let node = Node { meta, xattrs: at.xattrs.clone(), body };
    let ino = builder.put_new(&at.dir, &at.name, node)?;
    builder.see(ino);
    Ok(())
}

fn file<R: Read>(builder: &mut Builder<'_>, at: &Placed<'_>, reader: &mut Reader<R>) -> Result<()> {
    let during = |error: FsError| of_fs(at.entry, error);
    let reused = reusable(builder, &at.found, FileKind::File).map_err(during)?;
    let old = Old::of(&builder.state, &at.found).map_err(during)?;
    let ino = match &reused {
        Some((ino, _)) => *ino,
        None => builder.fresh()?,
    };
    let content = content::receive(builder, ino, old.as_ref(), at.entry, reader)?;
    put_file(builder, at, (ino, reused.is_some()), old, content).map_err(during)
}

fn put_file(
    builder: &mut Builder<'_>,
    at: &Placed<'_>,
    (ino, is_reused): (Ino, bool),
    old: Option<Old>,
    content: content::Content,
) -> FsResult<()> {
    let Kind::File { size, .. } = at.entry.kind else { return Ok(()) };
    let meta = meta(builder, at.entry, FileKind::File, 1, 0);
    let is_same = is_reused && content.is_same;
    if let Some(old) = old.as_ref().filter(|_| is_same)
        && has_attributes(&old.node, &meta, &at.xattrs)
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
    let node = Node { meta, xattrs: at.xattrs.clone(), body: Body::File { size, origin } };
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

fn device(
    builder: &mut Builder<'_>,
    at: &Placed<'_>,
    kind: FileKind,
    (major, minor): (u32, u32),
) -> Result<()> {
    let path = &at.entry.path;
    if !builder.limits.devices {
        return Err(bad(path, "only root makes device nodes"));
    }
    if major > MAX_MAJOR || minor > MAX_MINOR {
        return Err(bad(path, format!("there is no device {major}:{minor}")));
    }
    let rdev = makedev(u64::from(major), u64::from(minor));
    special(builder, at, (kind, rdev), Body::Special).map_err(|error| of_fs(at.entry, error))
}

/// Puts a link, pipe or device.
fn special(
    builder: &mut Builder<'_>,
    at: &Placed<'_>,
    (kind, rdev): (FileKind, u64),
    body: Body,
) -> FsResult<()> {
    let mut meta = meta(builder, at.entry, kind, 1, rdev);
    if kind == FileKind::Symlink {
        // No program can change the mode of a link, and the kernel ignores it.
        meta.mode = kind.type_bits() | 0o777;
    }
    let Some((ino, node)) = reusable(builder, &at.found, kind)? else {
        let node = Node { meta, xattrs: at.xattrs.clone(), body };
        let ino = builder.put_new(&at.dir, &at.name, node)?;
        builder.see(ino);
        return Ok(());
    };
    builder.see(ino);
    if node.body == body && has_attributes(&node, &meta, &at.xattrs) {
        return Ok(());
    }
    builder.copy_up(&at.found)?;
    let node = Node { meta, xattrs: at.xattrs.clone(), body };
    builder.edit(&Edit::Put { ino, node: Box::new(node) })
}

/// Gives a file that an archive has another name.
fn link(builder: &mut Builder<'_>, at: &Placed<'_>, path: &TreePath, target: &[u8]) -> Result<()> {
    let during = |error: FsError| of_fs(at.entry, error);
    let shown = crate::types::quoted(target);
    let refuse = |why: String| Err(bad(&at.entry.path, why));
    let to = match clean(target) {
        Ok(to) => to,
        Err(why) => return refuse(format!("it is a hard link to '{shown}': {why}")),
    };
    let find = |builder: &Builder<'_>| -> FsResult<Option<(Ino, Found)>> {
        let found = builder.state.resolve(&to)?;
        let is_file = builder.state.kind(&found).is_some_and(|kind| kind != FileKind::Dir);
        let ino = found.ino().filter(|_| is_file);
        let ino = ino.filter(|ino| builder.takes_unseen_links || builder.is_seen(*ino));
        Ok(ino.map(|ino| (ino, found)))
    };
    let Some((ino, _)) = find(builder).map_err(during)? else {
        let why = format!("it is a hard link to '{shown}', which is no file before it");
        return refuse(why);
    };
    if to == *path || at.found.ino() == Some(ino) {
        builder.see(ino);
        return Ok(());
    }
    builder.detach(&at.dir, &at.name).map_err(during)?;
    let Some((ino, found)) = find(builder).map_err(during)? else {
        return refuse(format!("it is a hard link to '{shown}', which it replaces"));
    };
    builder.copy_up(&found).map_err(during)?;
    let meta = builder.state.tree.node(ino).map(|node| node.meta);
    let Some(meta) = meta.filter(|meta| meta.nlink < MAX_LINKS) else {
        return refuse(format!("'{shown}' has {MAX_LINKS} links already"));
    };
    let meta = Meta { nlink: meta.nlink + 1, ..meta };
    builder.edit(&Edit::Meta { ino, meta }).map_err(during)?;
    builder.attach(&at.dir, &at.name, ino).map_err(during)?;
    builder.see(ino);
    Ok(())
}

/// Removes what a whiteout hides: a name, or all names of a directory that this archive did not
/// make.
fn whiteout(
    builder: &mut Builder<'_>,
    above: &TreePath,
    hidden: &[u8],
    entry: &Entry,
) -> Result<()> {
    let during = |error: FsError| of_fs(entry, error);
    let found = builder.state.resolve(above).map_err(during)?;
    let dir = builder.state.as_dir(&found);
    if hidden == OPAQUE {
        return dir.map_or(Ok(()), |dir| purge::opaque(builder, &dir)).map_err(during);
    }
    if hidden.starts_with(WHITEOUT) {
        // Files of aufs, which mean nothing elsewhere.
        return Ok(());
    }
    let name = Name::new(hidden).map_err(|_| bad(&entry.path, "a whiteout without a name"))?;
    let Some(dir) = dir else { return Ok(()) };
    let found = builder.find(&dir, &name).map_err(during)?;
    match found.ino() {
        Some(ino) if !builder.is_of_this_archive(ino) => {
            builder.detach(&dir, &name).map_err(during)
        }
        _ => Ok(()),
    }
}
