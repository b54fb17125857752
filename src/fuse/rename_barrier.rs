//! Waits until the kernel has completed a rename of a directory.
//!
//! The server answers RENAME, and then the kernel moves its own dentries. In between, a path walk
//! still follows the old tree, and must not be given the text of a link that stays inside the mount
//! only in the new tree.
//!
//! The barrier is a lock of the kernel. The kernel holds the lock of the target directory from
//! before it sends RENAME until it has moved its dentries, and FUSE_NOTIFY_INVAL_ENTRY takes the
//! same lock. So the server expires the dentry of the new name; when that returns, the rename is
//! complete. Expiring it changes nothing for processes that use it.
//!
//! * The kernel always has that dentry: a negative one, the replaced one, or the moved one. From
//!   Linux 6.19 on it takes no lock for an unknown name.
//! * Before Linux 6.2 a dentry can only be invalidated. The server then invalidates a name that no
//!   file can have.
//! * The wait must not run in the thread that answers requests. The lock's holder may be waiting
//!   for a reply.

use crate::error::{FsError, FsResult};
use crate::fs::{Fs, LinkReply, Move};
use crate::fuse::notify::Channel;
use crate::types::NodeId;

/// How many renames to wait for before the caller must walk its path again.
const MAX_RENAMES: usize = 64;

/// The text of a link, once all renames that affect it are complete.
pub(super) fn readlink(
    fs: &Fs,
    channel: &Channel,
    id: NodeId,
    pid: u32,
    first: Move,
) -> FsResult<Vec<u8>> {
    let mut rename = first;
    for _ in 0..MAX_RENAMES {
        channel.wait_for_rename(rename.into, &rename.name);
        fs.move_finished(&rename);
        match fs.readlink(id, pid)? {
            LinkReply::Text(text) => return Ok(text),
            LinkReply::Wait(next) => rename = next,
        }
    }
    Err(FsError::Stale)
}
