//! Finds mounts inside the mount, such as a tmpfs on a directory, that an operation would detach.
//!
//! The kernel detaches such a mount silently when its mount point is removed or becomes another
//! node, and the files of a tmpfs are then lost. So an operation that replaces the tree looks for
//! such mounts before it changes anything.

use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::State;
use crate::timeline::Timeline;
use crate::types::{FileKind, TreePath};

/// How to treat a mount whose mount point does not stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mounts {
    /// Change nothing, and fail with its path.
    #[default]
    Refuse,
    /// Let the kernel detach it, and report its path.
    Detach,
}

impl Timeline {
    /// The mounts that switching from one state to the other detaches. If `paths` is not empty,
    /// only those at and below them.
    ///
    /// # Errors
    /// [`Kind::InUse`] if there are some and [`Mounts::Refuse`] is given. Reading the mount table
    /// or the base failed.
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

/// Whether the kernel keeps a mount at `point`: the mount point and each directory above it must be
/// the same node in both states. A mount point that is a file must also have the same content.
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
