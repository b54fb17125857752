//! The parts of becoming a daemon, and random numbers.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout};

/// Makes the process the leader of a session of its own, away from the terminal (setsid(2)).
///
/// # Errors
/// EPERM if it leads a process group already.
pub fn new_session() -> io::Result<()> {
    nix::unistd::setsid()?;
    Ok(())
}

/// Connects standard input, output and error to `/dev/null` (dup2(2)).
///
/// # Errors
/// Those of open(2) and dup2(2).
pub fn silence_stdio() -> io::Result<()> {
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}

/// A number that differs from call to call and from process to process; for names of temporary files, not for
/// secrets.
pub fn unlikely_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    #[test]
    fn unlikely_numbers_differ() {
        let numbers: std::collections::HashSet<u64> = (0..1000).map(|_| super::unlikely_number()).collect();
        assert_eq!(numbers.len(), 1000);
    }
}
