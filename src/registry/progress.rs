//! Reports the progress of a transfer, and ends transfers that are too slow.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::limits::Limits;

/// The time between two reports.
const INTERVAL: Duration = Duration::from_millis(100);

/// The progress of a transfer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The bytes that were moved.
    pub moved: u64,
    /// The bytes of all blobs of the transfer.
    pub total: u64,
    /// Bytes per second since the begin, repeated bytes included.
    pub rate: f64,
}

/// Counts the bytes of a transfer and reports them ten times per second. Threads share it.
pub struct Meter<'a>(Mutex<Count<'a>>);

struct Count<'a> {
    report: Option<&'a mut (dyn FnMut(Progress) + Send)>,
    moved: u64,
    total: u64,
    sent: u64,
    begin: Instant,
    last: Option<Instant>,
}

impl<'a> Meter<'a> {
    /// Reports a transfer of `total` bytes to `report`.
    pub fn new(total: u64, report: &'a mut (dyn FnMut(Progress) + Send)) -> Meter<'a> {
        Meter(Mutex::new(Count::new(total, Some(report))))
    }

    /// Reports nothing.
    pub fn silent() -> Meter<'a> {
        Meter(Mutex::new(Count::new(0, None)))
    }

    /// Counts bytes that were moved.
    pub(super) fn add(&self, bytes: u64) {
        let mut count = self.0.lock();
        count.moved = count.moved.saturating_add(bytes);
        count.sent = count.sent.saturating_add(bytes);
        if count.last.is_none_or(|last| last.elapsed() >= INTERVAL) || count.moved == count.total {
            count.tell();
        }
    }

    /// The bytes that were moved, repeated ones included.
    pub fn received(&self) -> u64 {
        self.0.lock().sent
    }

    /// Adds bytes that will be moved.
    pub fn expect(&self, bytes: u64) {
        let mut count = self.0.lock();
        count.total = count.total.saturating_add(bytes);
    }

    /// Counts bytes that need no move.
    pub fn skip(&self, bytes: u64) {
        let mut count = self.0.lock();
        count.moved = count.moved.saturating_add(bytes);
        count.tell();
    }

    /// Sets the count of a transfer to the offset `at` at which it resumes.
    pub(super) fn resume(&self, counted: u64, at: u64) {
        let mut count = self.0.lock();
        count.moved = count.moved.saturating_sub(counted).saturating_add(at);
    }
}

impl<'a> Count<'a> {
    fn new(total: u64, report: Option<&'a mut (dyn FnMut(Progress) + Send)>) -> Count<'a> {
        Count { report, moved: 0, total, sent: 0, begin: Instant::now(), last: None }
    }

    fn tell(&mut self) {
        self.last = Some(Instant::now());
        let seconds = self.begin.elapsed().as_secs_f64().max(0.001);
        let progress =
            Progress { moved: self.moved, total: self.total, rate: self.sent as f64 / seconds };
        if let Some(report) = &mut self.report {
            report(progress);
        }
    }
}

/// Ends a transfer that moves fewer bytes than the limit.
pub(super) struct Pace {
    window: Duration,
    least: u64,
    begin: Instant,
    moved: u64,
}

impl Pace {
    pub(super) fn new(limits: &Limits) -> Pace {
        let least = (limits.slowest as f64 * limits.silence.as_secs_f64()) as u64;
        Pace { window: limits.silence, least, begin: Instant::now(), moved: 0 }
    }

    /// Counts bytes. False: the transfer is too slow.
    pub(super) fn is_kept(&mut self, bytes: u64) -> bool {
        self.moved += bytes;
        if self.begin.elapsed() < self.window {
            return true;
        }
        let is_kept = self.moved >= self.least;
        (self.begin, self.moved) = (Instant::now(), 0);
        is_kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_ends_at_the_total() {
        let mut seen = Vec::new();
        let mut report = |progress: Progress| seen.push(progress.moved);
        let meter = Meter::new(30, &mut report);
        meter.add(10);
        meter.add(10);
        meter.resume(20, 10);
        meter.add(20);
        assert_eq!(seen, [10, 30]);
    }

    #[test]
    fn a_slow_drip_is_ended() {
        let limits =
            Limits { silence: Duration::from_millis(20), slowest: 1000, ..Limits::default() };
        let mut pace = Pace::new(&limits);
        assert!(pace.is_kept(5));
        std::thread::sleep(Duration::from_millis(25));
        assert!(!pace.is_kept(5));
        std::thread::sleep(Duration::from_millis(25));
        assert!(pace.is_kept(20));
    }
}
