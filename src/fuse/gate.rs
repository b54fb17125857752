//! The gate before the door of a mount: once it is closed, no request changes anything any more.

use std::sync::OnceLock;

use fuser::Errno;
use parking_lot::{RwLock, RwLockReadGuard};

use crate::fuse::awake::Awake;

/// What a request is answered once the gate is closed: as the kernel answers when nobody serves.
pub(super) const CUT_OFF: Errno = Errno::ENOTCONN;

/// Whether requests are still served. When [`Gate::close`] returns, no request is being served and none will be: what
/// processes still do in a mount that has ended changes nothing.
#[derive(Default)]
pub(super) struct Gate {
    is_closed: RwLock<bool>,
    awake: OnceLock<Awake>,
}

impl Gate {
    /// Lets a request in, for as long as the pass is held; none if the gate is closed. For the thread that takes the requests.
    pub(super) fn pass(&self) -> Option<RwLockReadGuard<'_, bool>> {
        if let Some(awake) = self.awake.get() {
            awake.note_request();
        }
        self.pass_again()
    }

    /// Lets a request in that goes on elsewhere. A job that no worker could take runs inside another request: so not `read`,
    /// which would wait for whoever closes the gate, who waits for that one.
    pub(super) fn pass_again(&self) -> Option<RwLockReadGuard<'_, bool>> {
        Some(self.is_closed.read_recursive()).filter(|is_closed| !**is_closed)
    }

    /// Requests that are let in keep a CPU awake from now on.
    pub(super) fn keep_awake(&self, awake: Awake) {
        // It is set once, before the first request.
        let _is_set = self.awake.set(awake);
    }

    /// Closes the gate, after the requests that are in.
    pub(super) fn close(&self) {
        *self.is_closed.write() = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_closes_after_those_who_are_in_and_for_good() {
        let gate = Gate::default();
        let pass = gate.pass().unwrap();
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| gate.close());
            std::thread::sleep(std::time::Duration::from_millis(30));
            assert!(!closing.is_finished(), "a request is in");
            // What the request itself needs is not kept out.
            drop(gate.pass_again().unwrap());
            drop(pass);
        });
        assert!(gate.pass().is_none());
    }
}
