//! Recognises bursts of requests: programs that wait for one reply after the other.

use std::time::{Duration, Instant};

/// How many requests in a row, each soon after the one before, are a burst.
const LENGTH: u32 = 8;

/// Counts requests that each came soon after the one before.
pub(super) struct Burst {
    last: Instant,
    requests: u32,
}

impl Burst {
    pub(super) fn new(now: Instant) -> Burst {
        Burst { last: now, requests: 0 }
    }

    /// Counts one more request. Returns whether the burst is long enough. A request is soon after
    /// another within `span`.
    pub(super) fn is_reached(&mut self, now: Instant, span: Duration) -> bool {
        let is_soon = now.duration_since(self.last) < span;
        self.last = now;
        self.requests = if is_soon { self.requests.saturating_add(1) } else { 0 };
        self.requests >= LENGTH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isolated_requests_are_no_burst() {
        let (begun, span) = (Instant::now(), Duration::from_millis(1));
        let mut burst = Burst::new(begun);
        assert!((1..100).all(|at| !burst.is_reached(begun + span * at, span)));
        let soon = begun + span * 200;
        assert!((0..LENGTH).all(|_| !burst.is_reached(soon, span)));
        assert!(burst.is_reached(soon, span));
    }
}
