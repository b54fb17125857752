//! Clears setuid and setgid bits when a file changes, as the kernel demands.
//!
//! The kernel decides by the rights of the caller. For WRITE, and for SETXATTR of an ACL, it sends
//! the decision as a flag. For other requests the server reads the rights from /proc. The caller is
//! blocked in the call that is being served, so they cannot change meanwhile. That costs time and
//! happens only if the file has such a bit.
//!
//! The replies to WRITE, FALLOCATE and COPY_FILE_RANGE have no attributes. So before such a reply
//! the server invalidates the mode that the kernel caches.
//!
//! Every change clears file capabilities, even one by root; `fs` does that.

use std::cell::Cell;

use crate::fs::CallerRights;
use crate::fuse::wire::Request;
use crate::sys;

/// CAP_FSETID of capabilities(7).
const CAP_FSETID: u64 = 1 << 4;

/// The caller of a request, as the kernel reports it.
pub(super) struct Requester {
    uid: u32,
    gid: u32,
    pid: u32,
    /// The kernel has said that the caller lacks CAP_FSETID.
    lacks_fsetid: bool,
    /// A right was asked for that the caller lacks.
    was_denied: Cell<bool>,
}

impl Requester {
    /// The caller of this request.
    pub(super) fn of(request: &Request) -> Requester {
        let Request { uid, gid, pid, .. } = *request;
        Requester { uid, gid, pid, lacks_fsetid: false, was_denied: Cell::new(false) }
    }

    /// The same caller, if the kernel has said that it lacks CAP_FSETID.
    pub(super) fn without_fsetid(self) -> Requester {
        Requester { lacks_fsetid: true, ..self }
    }

    /// Whether the caller was denied a right, so that its change cleared bits of the mode.
    pub(super) fn was_denied(&self) -> bool {
        self.was_denied.get()
    }

    fn note(&self, has_right: bool) -> bool {
        self.was_denied.set(self.was_denied.get() || !has_right);
        has_right
    }
}

impl CallerRights for Requester {
    fn has_fsetid(&self) -> bool {
        self.note(
            !self.lacks_fsetid
                && match sys::proc::privileges(self.pid) {
                    Some(caller) => caller.capabilities & CAP_FSETID != 0,
                    None => self.uid == 0,
                },
        )
    }

    fn may_keep_setgid(&self, group: u32) -> bool {
        self.note(
            self.gid == group
                || match sys::proc::privileges(self.pid) {
                    Some(caller) => {
                        caller.capabilities & CAP_FSETID != 0 || caller.groups.contains(&group)
                    }
                    None => self.uid == 0,
                },
        )
    }
}
