//! How many files this process may hold open, and what it was allowed before.
//!
//! The soft limit is for programs that use select(2), which takes no descriptor from 1,024 on; whoever does not may raise his own
//! up to the hard limit. What he starts may be such a program and gets the limit that there was.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The soft limit before it was raised.
static BEFORE: OnceLock<u64> = OnceLock::new();

/// Raises the soft limit of open files to the hard one (setrlimit(2)).
///
/// # Errors
/// Those of getrlimit(2) and setrlimit(2).
pub fn raise_open_files() -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        // First of all: whoever starts something from now on must know it.
        BEFORE.get_or_init(|| soft);
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(())
}

/// Makes a command begin with the soft limit of before [`raise_open_files`].
pub fn with_open_files_as_before(command: &mut Command) -> &mut Command {
    let lower = || {
        let Some(before) = BEFORE.get() else { return Ok(()) };
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, (*before).min(hard), hard)?;
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec and makes two system calls, getrlimit(2) and setrlimit(2), that take no lock
    // and allocate nothing; the value was set before the fork (signal-safety(7) asks for no more).
    unsafe { command.pre_exec(lower) }
}
