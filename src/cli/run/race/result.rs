//! The results of the attempts, and which of them wins.

use std::time::Duration;

use super::options::Pick;
use crate::cli::format::Tally;
use crate::cli::run::outcome::Outcome;
use crate::error::Error;
use crate::run::End;
use crate::types::LayerId;

/// A finished attempt.
pub(super) struct Finished {
    /// Its number, from 1.
    pub(super) number: u32,
    /// Its head.
    pub(super) head: String,
    pub(super) how: How,
    /// How long the command ran, with all tries.
    pub(super) time: Duration,
    /// The sealed tree at the end of the command.
    pub(super) state: Option<LayerId>,
    /// How that differs from the start.
    pub(super) changes: Option<Tally>,
    /// The number that the command of `--pick` printed.
    pub(super) score: Option<f64>,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum How {
    /// So did its command.
    Ran(Outcome),
    /// It was not needed any more before it started.
    NotRun,
    /// jailfs failed.
    Failed(Error),
}

impl How {
    /// The word for the last state of an attempt.
    pub(super) fn word(&self) -> &'static str {
        match self {
            How::Ran(Outcome::Ended(End::Exited(_))) => "exited",
            How::Ran(Outcome::Ended(End::Killed(_))) => "killed",
            How::Ran(Outcome::TimedOut) => "timeout",
            How::Ran(Outcome::Stopped) => "stopped",
            How::Ran(Outcome::NotStarted(_)) => "not_started",
            How::NotRun => "not_run",
            How::Failed(_) => "failed",
        }
    }

    /// For the table.
    pub(super) fn text(&self) -> String {
        match self {
            How::Ran(Outcome::Ended(End::Exited(code))) => format!("exit {code}"),
            How::Ran(Outcome::Ended(End::Killed(signal))) => format!("signal {signal}"),
            How::Ran(Outcome::TimedOut) => "timeout".to_owned(),
            How::Ran(Outcome::Stopped) => "ended".to_owned(),
            How::Ran(Outcome::NotStarted(code)) => format!("exit {code}"),
            How::NotRun => "not run".to_owned(),
            How::Failed(_) => "failed".to_owned(),
        }
    }

    /// The exit code of the command, if it has one.
    pub(super) fn exit_code(&self) -> Option<u8> {
        match self {
            How::Ran(Outcome::Ended(End::Exited(code)) | Outcome::NotStarted(code)) => Some(*code),
            _ => None,
        }
    }

    /// The signal that ended the command.
    pub(super) fn signal(&self) -> Option<u8> {
        match self {
            How::Ran(Outcome::Ended(End::Killed(signal))) => Some(*signal),
            _ => None,
        }
    }

    pub(super) fn is_success(&self) -> bool {
        *self == How::Ran(Outcome::SUCCESS)
    }
}

/// The number that a scoring command printed on its last line.
pub(super) fn score_of(output: &[u8]) -> Option<f64> {
    let last = output.trim_ascii_end().rsplit(|byte| *byte == b'\n').next()?;
    std::str::from_utf8(last.trim_ascii())
        .ok()?
        .parse()
        .ok()
        .filter(|score: &f64| score.is_finite())
}

/// Whether an attempt has left a state.
pub(super) fn can_win(one: &Finished) -> bool {
    one.state.is_some()
}

/// The winner without a question, by its place among the finished attempts. They are in the order
/// in which they ended.
pub(super) fn winner(pick: &Pick, finished: &[Finished]) -> Option<usize> {
    match pick {
        Pick::Ask | Pick::Keep => None,
        Pick::First => finished.iter().position(|one| can_win(one) && one.how.is_success()),
        Pick::Score(_) => {
            let scored = finished.iter().enumerate().filter(|(_, one)| can_win(one));
            let scored = scored.filter_map(|(at, one)| Some((at, one.score?, one.number)));
            let best =
                scored.max_by(|(_, a, one), (_, b, other)| a.total_cmp(b).then(other.cmp(one)));
            best.map(|(at, ..)| at)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(number: u32, code: u8, score: Option<f64>) -> Finished {
        Finished {
            number,
            head: format!("run-1-{number}"),
            how: How::Ran(Outcome::Ended(End::Exited(code))),
            time: Duration::ZERO,
            state: Some(LayerId(number)),
            changes: None,
            score,
        }
    }

    #[test]
    fn a_score_is_the_number_on_the_last_line() {
        for (output, score) in [
            ("7\n", Some(7.0)),
            ("running\n 12.5 \n", Some(12.5)),
            ("-3", Some(-3.0)),
            ("1e3\n\n", Some(1000.0)),
            ("7\nnot a number\n", None),
            ("", None),
            ("nan\n", None),
            ("inf\n", None),
        ] {
            assert_eq!(score_of(output.as_bytes()), score, "{output:?}");
        }
        assert_eq!((score_of(b"\xff\n7\n"), score_of(b"7\n\xff")), (Some(7.0), None));
    }

    #[test]
    fn the_first_success_or_the_highest_number_wins() {
        let all = [finished(3, 1, Some(5.0)), finished(2, 0, Some(5.0)), finished(1, 0, Some(2.0))];
        let number = |pick: &Pick| winner(pick, &all).map(|at| all[at].number);
        assert_eq!(number(&Pick::First), Some(2));
        assert_eq!(number(&Pick::Score("x".into())), Some(2), "of equals the lowest number wins");
        assert_eq!((number(&Pick::Ask), number(&Pick::Keep)), (None, None));
    }

    #[test]
    fn an_attempt_without_a_number_or_a_state_cannot_win() {
        let mut unsealed = finished(1, 0, Some(9.0));
        unsealed.state = None;
        let all = [unsealed, finished(2, 1, None), finished(3, 1, Some(-1.0))];
        assert_eq!(winner(&Pick::Score("x".into()), &all), Some(2));
        assert_eq!(winner(&Pick::First, &all), None);
    }
}
