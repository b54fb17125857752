//! Repeats requests that failed by a cut or an overload.
//!
//! * The pause doubles with each failure, and is drawn between its half and the whole, so that
//!   clients that failed together do not come back together.
//! * A `Retry-After` of the registry is honoured, if it fits into the time that is left.
//! * The number of failures without progress, and the time of all pauses, are bounded.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use super::fault::{Class, Fault};
use super::limits::Limits;

/// The state of a repeated operation.
pub(super) struct Retry<'a> {
    limits: &'a Limits,
    failures: u32,
    paused: Duration,
}

impl<'a> Retry<'a> {
    pub(super) fn new(limits: &'a Limits) -> Retry<'a> {
        Retry { limits, failures: 0, paused: Duration::ZERO }
    }

    /// The operation moved on, so its failures count anew.
    pub(super) fn moved_on(&mut self) {
        self.failures = 0;
        self.paused = Duration::ZERO;
    }

    /// Pauses before the next attempt.
    ///
    /// # Errors
    /// `fault`, if another attempt makes no sense or is one too many.
    pub(super) fn pause(&mut self, fault: Fault) -> Result<(), Fault> {
        if !fault.may_pass() {
            return Err(fault);
        }
        self.failures += 1;
        let pause = self.next_pause(fault.class);
        let is_too_long = self.paused + pause > self.limits.pauses;
        if self.failures >= self.limits.attempts || is_too_long {
            return Err(self.give_up(fault, pause));
        }
        self.paused += pause;
        std::thread::sleep(pause);
        Ok(())
    }

    fn next_pause(&self, class: Class) -> Duration {
        let doubled = self.limits.first_pause.saturating_mul(1 << (self.failures - 1).min(20));
        let pause = spread(doubled.min(self.limits.longest_pause));
        match class {
            Class::Busy(Some(asked)) => asked.max(pause),
            _ => pause,
        }
    }

    fn give_up(&self, mut fault: Fault, pause: Duration) -> Fault {
        if self.failures > 1 {
            fault.reason = format!("{} (tried {} times)", fault.reason, self.failures);
        }
        if let Class::Busy(Some(asked)) = fault.class
            && self.paused + pause > self.limits.pauses
        {
            fault.hint = Some(format!("the registry asks to wait {} seconds", asked.as_secs()));
        }
        fault
    }
}

/// Repeats `attempt` until it succeeds.
///
/// # Errors
/// The last failure.
pub(super) fn repeated<T>(
    limits: &Limits,
    mut attempt: impl FnMut() -> Result<T, Fault>,
) -> Result<T, Fault> {
    let mut retry = Retry::new(limits);
    loop {
        match attempt() {
            Ok(found) => return Ok(found),
            Err(fault) => retry.pause(fault)?,
        }
    }
}

/// A time between the half of `pause` and the whole.
fn spread(pause: Duration) -> Duration {
    let half = pause / 2;
    let random = RandomState::new().hash_one(Instant::now());
    half + half.mul_f64((random % 1024) as f64 / 1023.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            attempts: 3,
            first_pause: Duration::from_millis(2),
            pauses: Duration::from_secs(1),
            ..Limits::default()
        }
    }

    #[test]
    fn a_cut_is_repeated_a_bounded_number_of_times() {
        let mut attempts = 0;
        let result: Result<(), Fault> = repeated(&limits(), || {
            attempts += 1;
            Err(Fault::cut("GET x", "cut"))
        });
        assert_eq!(attempts, 3);
        assert_eq!(result.unwrap_err().reason, "cut (tried 3 times)");
    }

    #[test]
    fn a_refusal_is_not_repeated() {
        let mut attempts = 0;
        let result: Result<(), Fault> = repeated(&limits(), || {
            attempts += 1;
            Err(Fault::new(Class::Status(404), "GET x", "no such blob"))
        });
        assert_eq!((attempts, result.unwrap_err().reason.as_str()), (1, "no such blob"));
    }

    #[test]
    fn the_time_that_the_registry_asks_for_is_waited_if_it_is_not_too_long() {
        let mut attempts = 0;
        let begin = Instant::now();
        let result = repeated(&limits(), || {
            attempts += 1;
            let busy = Class::Busy(Some(Duration::from_millis(50)));
            if attempts < 2 { Err(Fault::new(busy, "GET x", "busy")) } else { Ok(()) }
        });
        assert!(result.is_ok() && begin.elapsed() >= Duration::from_millis(50));

        let busy = Class::Busy(Some(Duration::from_secs(3600)));
        let result: Result<(), Fault> =
            repeated(&limits(), || Err(Fault::new(busy, "GET x", "busy")));
        let fault = result.unwrap_err();
        assert_eq!(fault.hint.as_deref(), Some("the registry asks to wait 3600 seconds"));
    }

    #[test]
    fn pauses_grow_and_are_spread() {
        let limits = Limits::default();
        let mut retry = Retry { failures: 4, ..Retry::new(&limits) };
        let pause = retry.next_pause(Class::Cut);
        assert!((800..=1600).contains(&pause.as_millis()), "{pause:?}");
        retry.failures = 60;
        assert!(retry.next_pause(Class::Cut) <= Duration::from_secs(20));
    }
}
