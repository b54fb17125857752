//! Clears setuid and setgid bits when a file changes, as the kernel demands.
//!
//! The kernel decides by the caller's rights, and sends the decision of WRITE as a flag. For other
//! requests the server reads the caller's rights from /proc. The caller is blocked in the call that
//! is being served, so they cannot change meanwhile. That costs time and happens only if the file
//! has such a bit.
//!
//! Every change clears file capabilities, even one by root; `fs` does that.

use crate::fs::{CallerRights, Fs};
use crate::fuse::wire::Request;
use crate::sys;
use crate::types::NodeId;

const SETGID: u32 = 0o2000;
/// CAP_FSETID of capabilities(7).
const CAP_FSETID: u64 = 1 << 4;

/// The caller of a request, as the kernel reports it.
#[derive(Clone, Copy)]
pub(super) struct Requester {
    uid: u32,
    gid: u32,
    pid: u32,
}

impl Requester {
    /// The caller of this request.
    pub(super) fn of(request: &Request) -> Requester {
        Requester { uid: request.uid, gid: request.gid, pid: request.pid }
    }

    /// The same caller, if the kernel has said that it lacks CAP_FSETID.
    pub(super) fn without_fsetid(self) -> WithoutFsetid {
        WithoutFsetid(self)
    }

    /// Whether an ACL that the caller sets clears setgid, as the caller's chmod(2) would.
    pub(super) fn clears_setgid(self, fs: &Fs, id: NodeId) -> bool {
        fs.getattr(id)
            .is_ok_and(|attr| attr.meta.mode & SETGID != 0 && !self.may_keep_setgid(attr.meta.gid))
    }
}

impl CallerRights for Requester {
    fn has_fsetid(&self) -> bool {
        match sys::proc::privileges(self.pid) {
            Some(caller) => caller.capabilities & CAP_FSETID != 0,
            None => self.uid == 0,
        }
    }

    fn may_keep_setgid(&self, group: u32) -> bool {
        self.gid == group
            || match sys::proc::privileges(self.pid) {
                Some(caller) => {
                    caller.capabilities & CAP_FSETID != 0 || caller.groups.contains(&group)
                }
                None => self.uid == 0,
            }
    }
}

/// A caller of which the kernel has said that it lacks CAP_FSETID.
pub(super) struct WithoutFsetid(Requester);

impl CallerRights for WithoutFsetid {
    fn has_fsetid(&self) -> bool {
        false
    }

    fn may_keep_setgid(&self, group: u32) -> bool {
        self.0.may_keep_setgid(group)
    }
}
