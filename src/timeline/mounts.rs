//! Mounts of others inside the mount, such as a tmpfs on a directory of the tree.
//!
//! The kernel detaches such a mount silently when the directory under it is removed or becomes another
//! one, and with the last user of a tmpfs its files are gone. So an operation that replaces the tree
//! looks for mounts that it would detach before it changes anything.

use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::State;
use crate::timeline::Timeline;
use crate::types::{FileKind, TreePath};

/// What to do with a mount whose directory does not stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mounts {
    /// Change nothing, and name it.
    #[default]
    Refuse,
    /// Let the kernel detach it, and name it.
    Detach,
}

impl Timeline {
    /// The mounts inside that going from one state to the other detaches; with paths, only those at and
    /// below them.
    ///
    /// # Errors
    /// `InUse`: there are some, and they are to be refused. Those of reading the mounts or the base.
    pub fn detached_mounts(
        &self,
        (from, to): (&State, &State),
        paths: &[TreePath],
        mounts: Mounts,
    ) -> Result<Vec<TreePath>> {
        let attempt = || "look for mounts that would be detached";
        let mut detached = Vec::new();
        for point in self.kernel().mounts_inside()? {
            let is_meant = paths.is_empty() || paths.iter().any(|path| point.starts_with(path));
            if is_meant && !stays(from, to, &point).attempt(attempt)? {
                detached.push(point);
            }
        }
        detached.sort();
        let Some(first) = detached.first().filter(|_| mounts == Mounts::Refuse) else {
            return Ok(detached);
        };
        let why = format!("something is mounted on '{first}', which does not stay as it is");
        Err(Error::new(Kind::InUse, "replace the tree", why)
            .hint("unmount it first, or let it be detached with --detach-mounts"))
    }
}

/// Whether a path is the same node in both states, and each directory above it: then the kernel keeps
/// what is mounted on it. A file that a file is mounted on must also have the same content.
fn stays(from: &State, to: &State, point: &TreePath) -> FsResult<bool> {
    for path in point.upwards() {
        let (old, new) = (from.resolve(&path)?, to.resolve(&path)?);
        let kinds = (from.kind(&old), to.kind(&new));
        if old.ino() != new.ino() || kinds.0 != kinds.1 {
            return Ok(false);
        }
        if kinds.1 != Some(FileKind::Dir) && !super::diff::same_content(from, &old, to, &new)? {
            return Ok(false);
        }
    }
    Ok(true)
}
