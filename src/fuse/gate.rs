//! Ends service: once the gate of a mount is closed, no request changes anything any more.

use std::sync::OnceLock;

use nix::errno::Errno;
use parking_lot::{RwLock, RwLockReadGuard};

use crate::fuse::wake::Waker;

/// The error of requests after the gate has closed; the kernel returns the same without a server.
pub(super) const GATE_CLOSED: Errno = Errno::ENOTCONN;

/// Whether requests are still served. When [`Gate::close`] returns, no request is in progress and
/// none will start. So no process can change the tree through a mount that has ended.
#[derive(Default)]
pub(super) struct Gate {
    is_closed: RwLock<bool>,
    waker: OnceLock<Waker>,
}
impl Gate {
    /// Admits a request for as long as the returned guard lives; `None` if the gate is closed. For
    /// the thread that takes the requests.
    pub(super) fn enter(&self) -> Option<RwLockReadGuard<'_, bool>> {
        if let Some(waker) = self.waker.get() {
            waker.note_request();
        }
        self.reenter()
    }

    /// Admits a request that continues in a worker. If no worker thread exists, the job runs inside
    /// the request that admitted it. A plain `read` would then wait for a writer that waits for
    /// that request, so the lock is taken recursively.
    pub(super) fn reenter(&self) -> Option<RwLockReadGuard<'_, bool>> {
        Some(self.is_closed.read_recursive()).filter(|is_closed| !**is_closed)
    }

    /// Tells each admitted request to `waker`.
    pub(super) fn set_waker(&self, waker: Waker) {
        // It is set once, before the first request.
        let _is_set = self.waker.set(waker);
    }

    /// Waits for the requests in progress, then closes the gate.
    pub(super) fn close(&self) {
        *self.is_closed.write() = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_waits_for_admitted_requests_and_is_final() {
        let gate = Gate::default();
        let admitted = gate.enter().unwrap();
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| gate.close());
            std::thread::sleep(std::time::Duration::from_millis(30));
            assert!(!closing.is_finished(), "a request is in progress");
            // The admitted request can still be continued.
            drop(gate.reenter().unwrap());
            drop(admitted);
        });
        assert!(gate.enter().is_none());
    }
}
