//! Waits until the kernel has taken a move of a directory in.
//!
//! We answer RENAME, and then the kernel moves its own names. In between it still walks the old tree, and a link must
//! not be served that stays inside only in the new one. That the kernel is through is seen by a lock: it holds the
//! directory into which it moves from before it asks us until it has moved its names, and FUSE_NOTIFY_INVAL_ENTRY takes
//! that lock. So we tell it that the new name is to be asked for again, which takes nothing from who stands there, and when it has
//! answered, the move is over. It knows that name all the time: as that of nothing, or of what is replaced, and then of what was
//! moved; for one that it does not know it takes no lock from Linux 6.19 on. Before Linux 6.2 it can only be told to forget a
//! name, and is told so of one that nobody has.
//!
//! Such a wait must not be in the thread that answers: the lock may be held by somebody who waits for an answer.

use crate::error::{FsError, FsResult};
use crate::fs::{Fs, LinkAnswer, Move};
use crate::fuse::kernel::Channel;
use crate::types::NodeId;

/// How many moves are waited for before the caller is told to walk again.
const TRIES: usize = 64;

/// The text of a link, when the moves that matter to it are over.
pub(super) fn read_settled(
    fs: &Fs,
    channel: &Channel,
    id: NodeId,
    pid: u32,
    first: Move,
) -> FsResult<Vec<u8>> {
    let mut which = first;
    for _ in 0..TRIES {
        channel.wait_for_move(which.into, &which.name);
        fs.settled(&which);
        match fs.readlink(id, pid)? {
            LinkAnswer::Text(text) => return Ok(text),
            LinkAnswer::Wait(next) => which = next,
        }
    }
    Err(FsError::Stale)
}
