//! Conflicts: paths that both heads changed in ways that exclude each other.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::fields::FieldDiff;
use super::three::{Side, Three};
use crate::error::FsResult;
use crate::types::{FileKind, Ino, TreePath};

/// A path at which neither head wins by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// The path in our head; in the other one if ours does not have it.
    pub path: TreePath,
    /// The change of our head.
    pub ours: Did,
    /// The change of the other head.
    pub theirs: Did,
}

/// The change of a head at a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Did {
    /// It added a node.
    Added(FileKind),
    /// It removed the node.
    Removed,
    /// It renamed the node to this path.
    RenamedTo(TreePath),
    /// It renamed another node to this path.
    RenamedFrom(TreePath),
    /// It put a node of this kind in the place of another one.
    Replaced(FileKind),
    /// It changed the node.
    Changed(FieldDiff),
    /// It changed names in the directory.
    ChangedInside,
}

impl fmt::Display for Did {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Did::Added(kind) => write!(f, "added a {}", word(*kind)),
            Did::Removed => f.write_str("removed"),
            Did::RenamedTo(path) => write!(f, "renamed to {path}"),
            Did::RenamedFrom(path) => write!(f, "renamed from {path}"),
            Did::Replaced(kind) => write!(f, "replaced by a {}", word(*kind)),
            Did::ChangedInside => f.write_str("changed inside"),
            Did::Changed(diff) => {
                let xattrs = diff.xattrs.iter().map(|name| String::from_utf8_lossy(name));
                let parts = [(diff.content, "content"), (diff.mode, "mode"), (diff.owner, "owner")];
                let named = parts.iter().filter(|(is, _)| *is).map(|(_, name)| (*name).into());
                let all: Vec<_> = named.chain(xattrs).collect();
                write!(f, "changed {}", all.join(", "))
            }
        }
    }
}

fn word(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Dir => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
        FileKind::Char | FileKind::Block => "device",
    }
}

/// The change of a head to the name of `path`, which had `was` and has `is` there.
pub(super) fn at_name(
    three: &Three<'_>,
    side: Side,
    (was, is): (Option<Ino>, Option<Ino>),
) -> FsResult<Did> {
    let head = three.head(side);
    Ok(match (was, is) {
        (_, Some(ino)) if was != is && three.is_old(ino)? => {
            let from = three.base.paths_of(ino)?.into_iter().next();
            Did::RenamedFrom(from.unwrap_or_default())
        }
        (None, Some(ino)) => Did::Added(head.kind(ino)?.unwrap_or(FileKind::File)),
        (Some(was), Some(ino)) if was != ino => {
            Did::Replaced(head.kind(ino)?.unwrap_or(FileKind::File))
        }
        (Some(ino), Some(_)) => of_node(three, side, ino)?,
        (Some(ino), None) => match head_paths(three, side, ino)?.into_iter().next() {
            Some(to) => Did::RenamedTo(to),
            None => Did::Removed,
        },
        (None, None) => Did::Removed,
    })
}

/// The change of a head to a node that it still has.
pub(super) fn of_node(three: &Three<'_>, side: Side, ino: Ino) -> FsResult<Did> {
    let diff = three.diff(side, ino)?;
    Ok(if diff.is_edit() { Did::Changed(FieldDiff::clone(&diff)) } else { Did::ChangedInside })
}

fn head_paths(three: &Three<'_>, side: Side, ino: Ino) -> FsResult<Vec<TreePath>> {
    let head = three.head(side);
    if head.node(ino)?.ino().is_none() {
        return Ok(Vec::new());
    }
    head.paths_of(ino)
}
