//! The attributes of a base file by which its cached pages stay valid.

use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::tree::Body;
use crate::types::{FileKind, Timestamp, TreePath};

/// The attributes of a base file that change when its content does: its size and modification time.
/// A program can set the latter back, so the change time counts as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedAttrs {
    size: u64,
    mtime: Timestamp,
    ctime: Timestamp,
    /// Link count, mode, owner and group: they also change the change time.
    others: [u32; 4],
}

/// How a base file changed since the kernel cached its attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Not at all.
    Nothing,
    /// Only in attributes that explain the new change time. A clone that makes hard links to the
    /// files of the base is no reason to refuse a read.
    Attributes,
    /// In its content.
    Content,
}

impl CachedAttrs {
    /// The attributes of a regular file of the base; none for another node. A pre-image is in the
    /// store, so nothing can change it.
    pub(super) fn of(node: &LowerNode) -> Option<CachedAttrs> {
        match node {
            LowerNode::Base(stat) if stat.kind == FileKind::File => {
                let others = [stat.nlink, stat.mode, stat.uid, stat.gid];
                let (size, mtime, ctime) = (stat.size, stat.mtime, stat.ctime);
                Some(CachedAttrs { size, mtime, ctime, others })
            }
            LowerNode::Base(_) | LowerNode::Pre(..) => None,
        }
    }

    /// How the file changed if it has the attributes `now`.
    pub(super) fn change_to(self, now: CachedAttrs) -> Change {
        if self == now {
            Change::Nothing
        } else if (self.size, self.mtime) == (now.size, now.mtime) && self.others != now.others {
            Change::Attributes
        } else {
            Change::Content
        }
    }

    /// Whether `offset` is the end of the file.
    pub(super) fn ends_at(self, offset: u64) -> bool {
        self.size == offset
    }

    /// The attributes that the kernel caches of a file that a switch leaves to the base at `path`,
    /// where the base has `node` now. The kernel keeps the pages that it read of `old`, so the
    /// present attributes of `node` do not count: the file may have changed since. None if what the
    /// kernel caches is known already.
    pub(in crate::fs) fn after_switch(
        (before, old): (&State, &Found),
        after: &State,
        (path, node): (&TreePath, &LowerNode),
    ) -> Option<CachedAttrs> {
        let now = CachedAttrs::of(node)?;
        let origin = match old {
            Found::Base(_, _, LowerNode::Base(_)) => return None,
            Found::Upper(ino, _) => match before.tree.node(*ino).map(|node| &node.body) {
                Some(Body::File { origin: Some(origin), .. }) => Some(origin.print),
                Some(_) | None => None,
            },
            Found::Base(_, _, LowerNode::Pre(..)) | Found::Nothing(_) => None,
        };
        // An apply since the copy-up may have put the file there.
        let applied = after.lower.left_after(before.lower.epoch(), path).flatten();
        let print = applied.or(origin).filter(|print| print.ctime != ANY_TIMES);
        Some(print.map_or(now, |print| CachedAttrs {
            size: print.size,
            mtime: print.mtime,
            ctime: print.ctime,
            ..now
        }))
    }
}
