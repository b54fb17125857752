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
use crate::sys::proc::Privileges;

/// CAP_FSETID of capabilities(7).
const CAP_FSETID: u64 = 1 << 4;

/// The caller of a request, as the kernel reports it.
pub(super) struct Requester {
    uid: u32,
    gid: u32,
    pid: u32,
    /// The kernel has said that the caller lacks CAP_FSETID.
    lacks_fsetid: bool,
    /// The filesystem asked for a right that the caller lacks.
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

    /// Whether the caller has CAP_FSETID. If `/proc` does not tell, only root has it.
    fn is_capable(&self, caller: Option<&Privileges>) -> bool {
        let known = caller.and_then(|caller| caller.capabilities);
        known.map_or(self.uid == 0, |capabilities| capabilities & CAP_FSETID != 0)
    }

    fn note(&self, has_right: bool) -> bool {
        self.was_denied.set(self.was_denied.get() || !has_right);
        has_right
    }
}

impl CallerRights for Requester {
    fn has_fsetid(&self) -> bool {
        let found = || self.is_capable(sys::proc::privileges(self.pid).as_ref());
        self.note(!self.lacks_fsetid && found())
    }

    fn may_keep_setgid(&self, group: u32) -> bool {
        let found = || {
            let caller = sys::proc::privileges(self.pid);
            let is_member = caller.as_ref().is_some_and(|known| known.groups.contains(&group));
            is_member || self.is_capable(caller.as_ref())
        };
        self.note(self.gid == group || found())
    }
}
