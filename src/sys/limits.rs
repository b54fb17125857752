//! Resource limits of a daemon (getrlimit(2)): raises them, and restores them for commands.
//!
//! * **Open files**: files of the base and layers are kept open. The soft limit is low for programs
//!   that use select(2), so a daemon takes the hard one.
//! * **File size**: a write beyond it ends the process with SIGXFSZ, whatever shell mounted.
//! * **Memory** (address space and data): each thread takes some for its stack, and an allocation
//!   beyond the limit ends the process.
//! * **Processes** of this user: each thread is one.
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

/// Bytes of memory that a daemon needs. Most is address space for the stack of a connection.
const MEMORY: u64 = 512 << 20;

/// Soft and hard limit.
type Limit = (u64, u64);

/// The limits that are raised.
const RAISED: [Resource; 5] = [
    Resource::RLIMIT_NOFILE,
    Resource::RLIMIT_FSIZE,
    Resource::RLIMIT_AS,
    Resource::RLIMIT_DATA,
    Resource::RLIMIT_NPROC,
];

/// The limits before they were raised, in the order of `RAISED`.
static BEFORE: OnceLock<[Limit; RAISED.len()]> = OnceLock::new();

/// A limit that is too low and that this process may not raise.
#[derive(Debug)]
pub enum TooLow {
    /// The hard limit of open files.
    OpenFiles(u64),
    /// The hard limit of file size, in bytes.
    FileSize(u64),
    /// The hard limit of address space, in bytes.
    AddressSpace(u64),
    /// The hard limit of data, in bytes.
    Data(u64),
    /// The limits cannot be read.
    Unknown(io::Error),
}

impl fmt::Display for TooLow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TooLow::OpenFiles(most) => {
                write!(
                    f,
                    "this shell allows {most} open files (ulimit -n), and {OPEN_FILES} are needed"
                )
            }
            TooLow::FileSize(most) => {
                write!(
                    f,
                    "this shell allows files of {most} bytes (ulimit -f), and a store needs larger \
                     ones"
                )
            }
            TooLow::AddressSpace(most) => {
                write!(
                    f,
                    "this shell allows {most} bytes of address space (ulimit -v), and {MEMORY} are \
                     needed"
                )
            }
            TooLow::Data(most) => {
                write!(
                    f,
                    "this shell allows {most} bytes of data (ulimit -d), and {MEMORY} are needed"
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
    let mut now = [(0, 0); RAISED.len()];
    for (limit, resource) in now.iter_mut().zip(RAISED) {
        *limit = getrlimit(resource).map_err(|errno| TooLow::Unknown(errno.into()))?;
    }
    // First of all: a command that is started from now on must get them.
    BEFORE.get_or_init(|| now);
    for ((soft, hard), resource) in now.into_iter().zip(RAISED) {
        match resource {
            Resource::RLIMIT_NOFILE => {
                let wanted = hard.max(OPEN_FILES);
                if soft < wanted && setrlimit(resource, wanted, wanted).is_err() {
                    return Err(TooLow::OpenFiles(hard));
                }
            }
            _ if soft == RLIM_INFINITY
                || setrlimit(resource, RLIM_INFINITY, RLIM_INFINITY).is_ok() => {}
            Resource::RLIMIT_FSIZE => return Err(TooLow::FileSize(hard)),
            Resource::RLIMIT_AS if hard < MEMORY => return Err(TooLow::AddressSpace(hard)),
            Resource::RLIMIT_DATA if hard < MEMORY => return Err(TooLow::Data(hard)),
            // How many threads there may be depends on what else this user runs. The start of each
            // tells.
            _ => setrlimit(resource, hard, hard).map_err(|errno| TooLow::Unknown(errno.into()))?,
        }
    }
    Ok(())
}

/// Makes a command start with the original limits.
pub fn with_limits_as_before(command: &mut Command) -> &mut Command {
    let lower = || {
        let Some(before) = BEFORE.get() else { return Ok(()) };
        for ((soft, hard), resource) in before.iter().zip(RAISED) {
            setrlimit(resource, *soft, *hard)?;
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec and makes system calls, setrlimit(2), that
    // take no lock and allocate nothing; the values were set before the fork (signal-safety(7) asks
    // for no more).
    unsafe { command.pre_exec(lower) }
}
