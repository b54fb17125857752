//! Reads the clock of the host.

use nix::time::{ClockId, clock_gettime};

use crate::types::Timestamp;

/// The time of CLOCK_REALTIME (clock_gettime(2)). 1970 if the clock cannot be read, which Linux
/// rules out.
pub fn now() -> Timestamp {
    clock_gettime(ClockId::CLOCK_REALTIME)
        .map(|time| Timestamp {
            secs: time.tv_sec() + shift(),
            nanos: u32::try_from(time.tv_nsec()).unwrap_or(0),
        })
        .unwrap_or_default()
}

/// By how many seconds a test shifts the clock.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
fn shift() -> i64 {
    0
}

#[cfg(feature = "crash-points")]
thread_local! {
    static SHIFT: std::cell::Cell<i64> = const { std::cell::Cell::new(0) };
}

#[cfg(feature = "crash-points")]
fn shift() -> i64 {
    SHIFT.get()
}

/// Shifts the clock of this thread by some seconds.
#[cfg(feature = "crash-points")]
pub fn set_shift(seconds: i64) {
    SHIFT.set(seconds);
}

/// The time of boot, by the same clock as [`now`].
pub fn booted() -> Timestamp {
    #[cfg(feature = "crash-points")]
    if let Some((_, at)) = crate::sys::failpoint::boot() {
        return at;
    }
    let since = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| time.tv_sec());
    Timestamp { secs: now().secs.saturating_sub(since), nanos: 0 }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_clock_is_after_2020_and_counts_forward() {
        let first = super::now();
        assert!(first.secs > 1_577_836_800 && first.nanos < 1_000_000_000);
        assert!(super::now() >= first);
    }
}
