//! Says why the host would refuse a change of the base, before the change is tried.
//!
//! * It only reads.
//! * If it finds no obstacle, the host can still refuse, and what the host allows can change.

use std::fmt;

use nix::fcntl::AtFlags;
use nix::sys::statvfs::FsFlags;
use nix::unistd::{AccessFlags, faccessat, geteuid};

use crate::error::FsResult;
use crate::sys;
use crate::types::{FileKind, TreePath};

use super::attributes::proc_path;
use super::stat::BaseStat;
use super::{Base, Found, mark};

/// In a directory with this bit, only the owner of a node or of the directory may remove or rename
/// the node (inode(7)).
const STICKY: u32 = 0o1000;

/// Why the host would refuse a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The filesystem or the mount of the base is read-only.
    ReadOnly,
    /// `chattr +i`.
    Immutable,
    /// `chattr +a`.
    AppendOnly,
    /// The node belongs to this user, and only its owner may do this.
    OwnedBy(u32),
    /// This process may not write to the directory.
    NotWritable,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::ReadOnly => f.write_str("the base is read-only"),
            Obstacle::Immutable => f.write_str("it is immutable (chattr +i)"),
            Obstacle::AppendOnly => f.write_str("it is append-only (chattr +a)"),
            Obstacle::OwnedBy(uid) => write!(f, "it belongs to user {uid}"),
            Obstacle::NotWritable => f.write_str("its directory may not be written"),
        }
    }
}

impl Base {
    /// Why nothing in the base can be changed.
    ///
    /// # Errors
    /// As statvfs(3).
    pub fn obstacle(&self) -> FsResult<Option<Obstacle>> {
        let is_read_only = self.statvfs()?.flags().contains(FsFlags::ST_RDONLY);
        Ok(is_read_only.then_some(Obstacle::ReadOnly))
    }

    /// Why no name in the directory `path` can be added, replaced or removed. `None` also if there
    /// is no directory at `path`.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn obstacle_in(&self, path: &TreePath) -> FsResult<Option<Obstacle>> {
        let Found::Here(dir) = self.find(path)? else { return Ok(None) };
        let stat = BaseStat::of(&dir)?;
        if stat.kind != FileKind::Dir {
            return Ok(None);
        }
        if let Some(obstacle) = flags(&dir) {
            return Ok(Some(obstacle));
        }
        // The owner can give itself permission.
        if stat.uid == geteuid().as_raw() {
            return Ok(None);
        }
        let writes = AccessFlags::W_OK | AccessFlags::X_OK;
        let may =
            faccessat(nix::fcntl::AT_FDCWD, proc_path(&dir).as_str(), writes, AtFlags::AT_EACCESS);
        Ok((may == Err(nix::errno::Errno::EACCES)).then_some(Obstacle::NotWritable))
    }

    /// Why the node at `path` can be neither replaced nor removed, apart from obstacles in its
    /// directory.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn obstacle_to_remove(&self, path: &TreePath) -> FsResult<Option<Obstacle>> {
        let Found::Here(node) = self.find(path)? else { return Ok(None) };
        if let Some(obstacle) = flags(&node) {
            return Ok(Some(obstacle));
        }
        let Some((dir, _)) = path.split() else { return Ok(None) };
        let (dir, stat) = (self.stat(&dir)?, BaseStat::of(&node)?);
        let is_kept =
            dir.mode & STICKY != 0 && is_of_another_user(&dir) && is_of_another_user(&stat);
        Ok(is_kept.then_some(Obstacle::OwnedBy(stat.uid)))
    }

    /// Why the attributes of the node at `path` cannot be changed.
    ///
    /// # Errors
    /// As [`Base::stat`].
    pub fn obstacle_to_set(&self, path: &TreePath) -> FsResult<Option<Obstacle>> {
        let Found::Here(node) = self.find(path)? else { return Ok(None) };
        let stat = BaseStat::of(&node)?;
        Ok(flags(&node)
            .or_else(|| is_of_another_user(&stat).then_some(Obstacle::OwnedBy(stat.uid))))
    }

    /// Whether the blocks of a removed file can be reused at once.
    pub fn frees_at_once(&self) -> bool {
        mark::frees_at_once(&self.plain.fd)
    }
}

fn flags(node: &std::os::fd::OwnedFd) -> Option<Obstacle> {
    let (is_immutable, is_append_only) = sys::file::is_immutable_or_append_only(node);
    is_immutable.then_some(Obstacle::Immutable).or(is_append_only.then_some(Obstacle::AppendOnly))
}

/// Whether a node belongs to another user, which is an obstacle unless this process is root.
fn is_of_another_user(stat: &BaseStat) -> bool {
    let me = geteuid();
    !me.is_root() && stat.uid != me.as_raw()
}
