//! The time of the host.

use nix::time::{ClockId, clock_gettime};

use crate::types::Timestamp;

/// The time now, by CLOCK_REALTIME (clock_gettime(2)). A clock that cannot be read, which Linux rules out, is 1970.
pub fn now() -> Timestamp {
    clock_gettime(ClockId::CLOCK_REALTIME)
        .map(|time| Timestamp {
            secs: time.tv_sec() + shift(),
            nanos: u32::try_from(time.tv_nsec()).unwrap_or(0),
        })
        .unwrap_or_default()
}

/// By how many seconds a test wants the clock to be wrong.
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

/// Makes the clock of this thread wrong by so many seconds.
#[cfg(feature = "crash-points")]
pub fn set_shift(seconds: i64) {
    SHIFT.set(seconds);
}

/// When the machine was booted, by the same clock as it goes now.
pub fn booted() -> Timestamp {
    #[cfg(feature = "crash-points")]
    if let Some((_, at)) = crate::sys::step::boot() {
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
