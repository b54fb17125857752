//! Ends service: once the gate of a mount is closed, no request changes anything any more.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use parking_lot::{RwLock, RwLockReadGuard};

use crate::fuse::wake::Waker;

/// The error of requests after the gate has closed; the kernel returns the same without a server.
pub(super) const GATE_CLOSED: Errno = Errno::ENOTCONN;

/// How long requests that overlap are admitted while the gate closes.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether requests are still served. When [`Gate::close`] returns, no request is in progress and
/// none will start. So no process can change the tree through a mount that has ended.
#[derive(Default)]
pub(super) struct Gate {
    is_closed: RwLock<bool>,
    /// No new request is admitted.
    is_closing: AtomicBool,
    waker: OnceLock<Waker>,
}

impl Gate {
    /// Admits a request for as long as the returned guard lives; `None` if the gate is closed. For
    /// a thread that takes requests.
    pub(super) fn enter(&self) -> Option<RwLockReadGuard<'_, bool>> {
        if let Some(waker) = self.waker.get() {
            waker.note_request();
        }
        if self.is_closing.load(Ordering::Acquire) {
            return None;
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
        // A request in progress may wait for one that comes after it, so these are admitted too.
        // Several threads can serve requests that overlap all the time, so not for ever.
        let closed = self.is_closed.try_write_for(PATIENCE);
        let mut closed = closed.unwrap_or_else(|| {
            self.is_closing.store(true, Ordering::Release);
            self.is_closed.write()
        });
        *closed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

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

    #[test]
    fn the_gate_closes_although_requests_overlap_all_the_time() {
        let (gate, begun) = (Gate::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some(_admitted) = gate.enter() {
                        // It ends when two others have begun, or when none can begin any more.
                        let number = begun.fetch_add(1, Ordering::SeqCst);
                        while begun.load(Ordering::SeqCst) < number + 3
                            && !gate.is_closing.load(Ordering::SeqCst)
                        {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            while begun.load(Ordering::SeqCst) <= 3 {
                std::thread::yield_now();
            }
            gate.close();
        });
        assert!(begun.into_inner() > 3 && gate.enter().is_none());
    }
}
