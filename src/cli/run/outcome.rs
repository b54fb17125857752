//! How an attempt of `jailfs run` ended, and what happens to its changes.

use crate::run::End;

/// The exit code after a timeout, as of timeout(1).
const TIMED_OUT: u8 = 124;

/// The exit code of a command that SIGTERM has ended.
const STOPPED: u8 = 143;

/// The fate of the changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Apply,
    Keep,
    Discard,
    Ask,
}

/// The result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The command has ended.
    Ended(End),
    /// The command was ended because its time was over.
    TimedOut,
    /// The command was ended because another attempt has won, or because the caller wanted it.
    Stopped,
    /// The command could not be started; the code to exit with.
    NotStarted(u8),
}

impl Outcome {
    pub(super) const SUCCESS: Outcome = Outcome::Ended(End::Exited(0));

    pub(super) fn code(self) -> u8 {
        match self {
            Outcome::Ended(end) => end.code(),
            Outcome::TimedOut => TIMED_OUT,
            Outcome::Stopped => STOPPED,
            Outcome::NotStarted(code) => code,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_has_the_exit_code_of_env_and_timeout() {
        assert_eq!(Outcome::Ended(End::Exited(3)).code(), 3);
        assert_eq!(Outcome::Ended(End::Killed(15)).code(), 143);
        assert_eq!((Outcome::TimedOut.code(), Outcome::NotStarted(127).code()), (124, 127));
    }
}
