//! Resource limits of a daemon (getrlimit(2)): raises them, and restores them for commands.
//!
//! * **Open files**: files of the base and layers are kept open. The soft limit is low for programs
//!   that use select(2), so a daemon takes the hard one.
//! * **File size**: a write beyond it ends the process with SIGXFSZ, whatever shell mounted.
//!
//! A command that the daemon starts gets the original limits.

use std::fmt;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

/// How many open files a daemon needs: 128 of the base, 128 pools, 64 connections, and layers.
const OPEN_FILES: u64 = 512;

/// Soft and hard limit.
type Limit = (u64, u64);

/// The original limits of open files and of file size.
static BEFORE: OnceLock<(Limit, Limit)> = OnceLock::new();

/// A limit that is too low and that this process may not raise.
#[derive(Debug)]
pub enum TooLow {
    /// The hard limit of open files.
    OpenFiles(u64),
    /// The hard limit of file size, in bytes.
    FileSize(u64),
    /// The limits cannot be read.
    Unknown(io::Error),
}

impl fmt::Display for TooLow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TooLow::OpenFiles(most) => {
                write!(f, "this shell allows {most} open files (ulimit -n), and {OPEN_FILES} are needed")
            }
            TooLow::FileSize(most) => {
                write!(
                    f,
                    "this shell allows files of {most} bytes (ulimit -f), and a store needs larger ones"
                )
            }
            TooLow::Unknown(error) => write!(f, "its resource limits cannot be read: {error}"),
        }
    }
}

/// Raises the limits of this process to what a daemon needs (setrlimit(2)). May be called again.
///
/// # Errors
/// The limit that is too low.
pub fn raise() -> Result<(), TooLow> {
    let read = |resource| getrlimit(resource).map_err(|errno| TooLow::Unknown(errno.into()));
    let (files, size) = (read(Resource::RLIMIT_NOFILE)?, read(Resource::RLIMIT_FSIZE)?);
    // Before anything else: every command started from now on needs the original limits.
    BEFORE.get_or_init(|| (files, size));
    let wanted = files.1.max(OPEN_FILES);
    if files.0 < wanted && setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_err() {
        return Err(TooLow::OpenFiles(files.1));
    }
    let is_limited = size.0 != RLIM_INFINITY;
    if is_limited && setrlimit(Resource::RLIMIT_FSIZE, RLIM_INFINITY, RLIM_INFINITY).is_err() {
        return Err(TooLow::FileSize(size.1));
    }
    Ok(())
}

/// Makes a command start with the original limits.
pub fn with_limits_as_before(command: &mut Command) -> &mut Command {
    let lower = || {
        let Some((files, size)) = BEFORE.get() else { return Ok(()) };
        setrlimit(Resource::RLIMIT_NOFILE, files.0, files.1)?;
        setrlimit(Resource::RLIMIT_FSIZE, size.0, size.1)?;
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec and makes two setrlimit(2) calls, which take
    // no lock and allocate nothing. The values were set before the fork. signal-safety(7) demands
    // no more.
    unsafe { command.pre_exec(lower) }
}
