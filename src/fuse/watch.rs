//! Staying awake: after a request was answered, the thread that takes the requests looks for the next one for a while before it
//! sleeps in read(2). Waking a thread costs more than most requests, above all in a virtual machine, where the CPU sleeps too.
//!
//! Always true:
//! * without requests nothing is looked for, so an idle mount costs nothing;
//! * whoever waits for the CPU gets it, and then it is not looked for a while: looking would only take time from others;
//! * where it mostly ended in vain it is not done for a while, which gets longer each time.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU32};
use std::time::{Duration, Instant};

use crate::fuse::kernel::Channel;

/// Who was kept from looking for so long was so by others who want the CPU.
const CROWDED: Duration = Duration::from_micros(10);
/// After how many requests it is tried again after that, at first and at most.
const PAUSE: (u32, u32) = (64, 16_384);
/// What it is worth at most: one that was in vain takes as much as this many that were not.
const WORTH: (i32, i32) = (8, 2);

/// How it went so far. Only the thread that takes the requests changes it.
pub(super) struct Watch {
    channel: Arc<Channel>,
    limit: Duration,
    /// Requests after which it does not look.
    pause: AtomicU32,
    /// How many that are the next time.
    next_pause: AtomicU32,
    /// How often it found a request lately, against how often not.
    worth: AtomicI32,
}

/// Looks for the next request when it is dropped.
pub(super) struct Watching<'a>(&'a Watch);

impl Watch {
    /// It looks for so long at most.
    pub(super) fn new(channel: Arc<Channel>, limit: Duration) -> Watch {
        Watch {
            channel,
            limit,
            pause: AtomicU32::new(0),
            next_pause: AtomicU32::new(PAUSE.0),
            worth: AtomicI32::new(WORTH.0),
        }
    }

    /// What follows a request.
    pub(super) fn after_this(&self) -> Option<Watching<'_>> {
        if self.limit.is_zero() {
            return None;
        }
        let pause = self.pause.load(Relaxed);
        if pause > 0 {
            self.pause.store(pause - 1, Relaxed);
            return None;
        }
        Some(Watching(self))
    }

    fn look(&self) {
        let begun = Instant::now();
        let mut last = begun;
        while !self.channel.is_asked() {
            std::thread::yield_now();
            let now = Instant::now();
            if now.duration_since(last) > CROWDED {
                return self.rest();
            }
            if now.duration_since(begun) > self.limit {
                return self.was_in_vain();
            }
            last = now;
        }
        self.has_paid();
    }

    fn has_paid(&self) {
        self.worth.store((self.worth.load(Relaxed) + 1).min(WORTH.0), Relaxed);
        let less = self.next_pause.load(Relaxed) - self.next_pause.load(Relaxed) / 64;
        self.next_pause.store(less.max(PAUSE.0), Relaxed);
    }

    fn was_in_vain(&self) {
        let worth = self.worth.load(Relaxed) - WORTH.1;
        self.worth.store(worth.max(0), Relaxed);
        if worth < 0 {
            self.rest();
        }
    }

    fn rest(&self) {
        let pause = self.next_pause.load(Relaxed);
        self.pause.store(pause, Relaxed);
        self.next_pause.store((pause * 2).min(PAUSE.1), Relaxed);
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.0.look();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests pass until it is looked again.
    fn pause(watch: &Watch) -> u32 {
        (0..).find(|_| watch.after_this().map(std::mem::forget).is_some()).unwrap()
    }

    #[test]
    fn where_looking_is_in_vain_it_is_given_up_for_longer_and_longer() {
        let watch = Watch::new(Arc::default(), Duration::from_micros(1));
        let in_vain = || (0..=WORTH.0 / WORTH.1).for_each(|_| watch.was_in_vain());
        assert_eq!(pause(&watch), 0);
        in_vain();
        assert_eq!(pause(&watch), PAUSE.0);
        for more in 1..20 {
            watch.was_in_vain();
            assert_eq!(pause(&watch), (PAUSE.0 << more.min(10)).min(PAUSE.1));
        }
        // What pays again is done again, and what is in vain now and then costs nothing.
        (0..10_000).for_each(|_| watch.has_paid());
        watch.was_in_vain();
        assert_eq!(pause(&watch), 0);
        in_vain();
        assert!(pause(&watch) <= 2 * PAUSE.0);
    }

    #[test]
    fn nothing_is_looked_for_where_nobody_wants_it() {
        let watch = Watch::new(Arc::default(), Duration::ZERO);
        assert!(watch.after_this().is_none());
    }
}
