//! Counts the requests that wait for a flush of this mount: mkdir(2) in the snapshot directory.
//!
//! The kernel counts them as pending, so a flush that waits for an idle connection would wait for
//! itself. Always true: a request is counted only while it is pending in the kernel.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// The requests so far.
#[derive(Debug, Default)]
pub(super) struct FlushWaiters {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// One request, for as long as it is not answered.
pub(super) struct FlushWaiter(Arc<FlushWaiters>);

impl FlushWaiters {
    /// Counts a request. The returned guard must be dropped before the reply is sent.
    pub(super) fn begin(waiters: &Arc<FlushWaiters>) -> FlushWaiter {
        waiters.begun.fetch_add(1, SeqCst);
        FlushWaiter(Arc::clone(waiters))
    }

    /// Whether no other request is pending in the kernel. `pending` reads how many are.
    ///
    /// # Errors
    /// Those of `pending`.
    pub(super) fn are_alone(&self, pending: impl FnOnce() -> io::Result<u64>) -> io::Result<bool> {
        let ended = self.ended.load(SeqCst);
        let waiting = self.begun.load(SeqCst).saturating_sub(ended);
        // Another request may have come in the place of one that was answered meanwhile.
        Ok(pending()? <= waiting && self.ended.load(SeqCst) == ended)
    }
}

impl Drop for FlushWaiter {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_waits_for_the_flush_is_not_waited_for() {
        let waiters = Arc::new(FlushWaiters::default());
        assert!(waiters.are_alone(|| Ok(0)).unwrap());
        assert!(!waiters.are_alone(|| Ok(1)).unwrap());
        let (one, other) = (FlushWaiters::begin(&waiters), FlushWaiters::begin(&waiters));
        assert!(waiters.are_alone(|| Ok(2)).unwrap() && !waiters.are_alone(|| Ok(3)).unwrap());
        // One is answered while the number is read: the second may be any request.
        let answered = waiters.are_alone(|| {
            drop(one);
            Ok(2)
        });
        assert!(!answered.unwrap());
        assert!(waiters.are_alone(|| Ok(1)).unwrap() && !waiters.are_alone(|| Ok(2)).unwrap());
        drop(other);
        assert!(!waiters.are_alone(|| Ok(1)).unwrap());
        assert!(waiters.are_alone(|| Err(io::ErrorKind::NotFound.into())).is_err());
    }
}
