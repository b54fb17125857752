//! Puts one entry of an archive into the tree.

use std::io::Read;

use nix::sys::stat::makedev;

use super::builder::Builder;
use super::content::{self, Old};
use super::place::{self, Placed, Wanted, of_fs};
use super::{bad, purge};
use crate::error::{FsError, FsResult, Result};
use crate::fs::Found;
use crate::tar::{Entry, Kind, Reader};
use crate::timeline::export::WHITEOUT;
use crate::tree::{Body, Meta};
use crate::types::{BadName, FileKind, Ino, Name, TreePath};

/// The rest of the name of a whiteout that hides all of a directory.
const OPAQUE: &[u8] = b".wh..opq";
/// The longest target of a symbolic link, in bytes.
const MAX_TARGET: usize = 4095;
/// The largest numbers of a device.
const MAX_MAJOR: u32 = (1 << 12) - 1;
const MAX_MINOR: u32 = (1 << 20) - 1;

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
    let during = |error: FsError| of_fs(&entry.path, error);
    let dir = match builder.dir_at(&above).map_err(during)? {
        Ok(dir) => dir,
        Err(other) => {
            return Err(bad(&entry.path, format!("'{other}' above it is not a directory")));
        }
    };
    let found = builder.find(&dir, &name).map_err(during)?;
    let wanted = wanted(builder, entry)?;
    let mut placed = Placed { wanted, dir, name, found };
    match &entry.kind {
        Kind::File { size, .. } => file(builder, &placed, (entry, *size), reader),
        Kind::Dir => place::directory(builder, &placed).map(drop).map_err(during),
        Kind::Link { target } => link(builder, &placed, &path, target),
        Kind::Symlink { target } => {
            if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
                return Err(bad(&entry.path, "its target is not one that a link can have"));
            }
            let body = Body::Symlink { target: target.clone() };
            let put = place::special(builder, &mut placed, FileKind::Symlink, body);
            put.map(drop).map_err(during)
        }
        Kind::Fifo | Kind::Char { .. } | Kind::Block { .. } => {
            let kind = kind(&entry.kind);
            let put = place::special(builder, &mut placed, kind, Body::Special);
            put.map(drop).map_err(during)
        }
    }
}

/// The kind of the node of an entry. A link is of no kind of its own; it counts as a file.
fn kind(kind: &Kind) -> FileKind {
    match kind {
        Kind::File { .. } | Kind::Link { .. } => FileKind::File,
        Kind::Dir => FileKind::Dir,
        Kind::Symlink { .. } => FileKind::Symlink,
        Kind::Fifo => FileKind::Fifo,
        Kind::Char { .. } => FileKind::Char,
        Kind::Block { .. } => FileKind::Block,
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

/// The attributes that an entry describes. An archive has neither the access nor the change time.
fn wanted<'e>(builder: &mut Builder<'_>, entry: &'e Entry) -> Result<Wanted<'e>> {
    let rdev = match entry.kind {
        Kind::Char { major, minor } | Kind::Block { major, minor } => {
            device(builder, &entry.path, (major, minor))?
        }
        _ => 0,
    };
    let kind = kind(&entry.kind);
    let xattrs = place::xattrs(builder, &entry.path, kind, entry.xattrs.iter())?;
    let meta = Meta {
        mode: kind.type_bits() | (entry.mode & crate::types::PERM_BITS),
        uid: entry.uid,
        gid: entry.gid,
        nlink: 1,
        rdev,
        atime: entry.mtime,
        mtime: entry.mtime,
        ctime: builder.now(),
    };
    Ok(Wanted { path: &entry.path, meta, xattrs, has_all_times: false })
}

fn root(builder: &mut Builder<'_>, entry: &Entry) -> Result<()> {
    let during = |error: FsError| of_fs(&entry.path, error);
    if entry.kind != Kind::Dir {
        return Err(bad(&entry.path, "the root is a directory"));
    }
    let wanted = wanted(builder, entry)?;
    let found = builder.state.resolve(&TreePath::root()).map_err(during)?;
    place::set_directory(builder, &wanted, &found).map(drop).map_err(during)
}

fn file<R: Read>(
    builder: &mut Builder<'_>,
    at: &Placed<'_>,
    (entry, size): (&Entry, u64),
    reader: &mut Reader<R>,
) -> Result<()> {
    let during = |error: FsError| of_fs(&entry.path, error);
    let reused = place::reusable(builder, &at.found, FileKind::File).map_err(during)?;
    let old = Old::of(&builder.state, &at.found).map_err(during)?;
    let ino = match &reused {
        Some((ino, _)) => *ino,
        None => builder.fresh()?,
    };
    let content = content::receive(builder, ino, old.as_ref(), entry, reader)?;
    place::file(builder, at, (ino, reused.is_some()), old, (size, content)).map_err(during)
}

/// The number of a device.
fn device(builder: &Builder<'_>, path: &[u8], (major, minor): (u32, u32)) -> Result<u64> {
    if !builder.limits.devices {
        return Err(bad(path, "only root makes device nodes"));
    }
    if major > MAX_MAJOR || minor > MAX_MINOR {
        return Err(bad(path, format!("there is no device {major}:{minor}")));
    }
    Ok(makedev(u64::from(major), u64::from(minor)))
}

/// Gives a file that an archive has another name.
fn link(builder: &mut Builder<'_>, at: &Placed<'_>, path: &TreePath, target: &[u8]) -> Result<()> {
    let during = |error: FsError| of_fs(at.wanted.path, error);
    let shown = crate::types::quoted(target);
    let refuse = |why: String| Err(bad(at.wanted.path, why));
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
    if !place::count_link(builder, ino).map_err(during)? {
        return Err(place::too_many_links(at.wanted.path, &shown));
    }
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
    let during = |error: FsError| of_fs(&entry.path, error);
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
