//! How a command ends, and the exit statuses that stand for a command that was not started.

use serde::{Deserialize, Serialize};

/// The exit status if jailfs failed and not the command.
pub(super) const FAILED: u8 = 125;
/// The exit status if the command was found but cannot be executed.
pub(super) const CANNOT_EXECUTE: u8 = 126;
/// The exit status if the command was not found.
pub(super) const NOT_FOUND: u8 = 127;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// With this status.
    Exited(u8),
    /// By this signal.
    Killed(u8),
}

impl End {
    /// The exit code: the command's own, or 128 plus the signal.
    pub fn code(self) -> u8 {
        match self {
            End::Exited(code) => code,
            End::Killed(signal) => signal.saturating_add(128),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_command_exits_with_128_plus_its_signal() {
        assert_eq!(
            (End::Exited(3).code(), End::Killed(9).code(), End::Exited(0).code()),
            (3, 137, 0)
        );
    }
}
