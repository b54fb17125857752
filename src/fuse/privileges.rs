//! What a change takes from a file that lets programs act for others: setuid, setgid.
//!
//! The kernel decides by who asks, and says what it decided in flags of which fuser shows only that of WRITE
//! (FATTR_KILL_SUIDGID, FUSE_OPEN_KILL_SUIDGID and FUSE_SETXATTR_ACL_KILL_SGID are hidden, or in messages that it cannot
//! parse). So the caller is looked at, in /proc: it is blocked in the call that we serve. Asking costs something, so only where there is
//! a bit to take. File capabilities go with every change, whoever asks; `fs` sees to that.

use fuser::Request;

use crate::fs::Fs;
use crate::fuse::answer::Asked;
use crate::sys;
use crate::types::NodeId;

/// setuid and setgid.
const PRIVILEGE_BITS: u32 = 0o6000;
const SETGID: u32 = 0o2000;
/// CAP_FSETID of capabilities(7).
const CAP_FSETID: u64 = 1 << 4;

/// Who asks.
#[derive(Clone, Copy)]
pub(super) struct By {
    uid: u32,
    gid: u32,
    pid: u32,
}

impl By {
    /// Who sent this request.
    pub(super) fn of(request: &Request) -> By {
        By { uid: request.uid(), gid: request.gid(), pid: request.pid() }
    }

    /// Whether a change of content or owner takes setuid and setgid: the caller lacks CAP_FSETID.
    pub(super) fn kills_privileges(self, fs: &Fs, id: NodeId) -> bool {
        let has_bits = fs.getattr(id).is_ok_and(|attr| attr.meta.mode & PRIVILEGE_BITS != 0);
        has_bits
            && match sys::proc::privileges(self.pid) {
                Some(caller) => caller.capabilities & CAP_FSETID == 0,
                None => self.uid != 0,
            }
    }

    /// Whether an ACL that the caller sets takes setgid, as its chmod(2) would.
    pub(super) fn takes_setgid(self, fs: &Fs, id: NodeId) -> bool {
        fs.getattr(id).is_ok_and(|attr| attr.meta.mode & SETGID != 0 && !self.may_keep_setgid(attr.meta.gid))
    }

    /// After a change that takes privileges: takes what only the caller's groups decide about. Whether it did.
    pub(super) fn leave(self, fs: &Fs, asked: &Asked<'_>, id: NodeId) -> bool {
        let taken = fs.take_bare_setgid(id, |group| self.may_keep_setgid(group));
        taken.unwrap_or_else(|error| {
            // The change itself is done and acknowledged; the errno would say that it is not.
            asked.refuse(&error);
            false
        })
    }

    /// Whether the caller is in this group, or has CAP_FSETID.
    fn may_keep_setgid(self, group: u32) -> bool {
        self.gid == group
            || match sys::proc::privileges(self.pid) {
                Some(caller) => caller.capabilities & CAP_FSETID != 0 || caller.groups.contains(&group),
                None => self.uid == 0,
            }
    }
}
