//! The log of a daemon, a file in the store.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::dup2_stderr;

use crate::error::{Attempt, Result};

/// The name of the log in the store's directory.
pub(super) const LOG: &str = "daemon.log";
/// A log longer than this, in bytes, is truncated to nothing.
const LIMIT: u64 = 8 << 20;

/// Truncates the log of a daemon to nothing if it is longer than [`LIMIT`]: a command in the
/// sandbox can cause log lines.
pub fn limit_log() {
    let log = io::stderr();
    let is_too_long = nix::sys::stat::fstat(&log).is_ok_and(|stat| {
        let is_file = stat.st_mode & nix::libc::S_IFMT == nix::libc::S_IFREG;
        is_file && u64::try_from(stat.st_size).is_ok_and(|len| len > LIMIT)
    });
    // The file is open for appending, so the next line becomes its first.
    if is_too_long && nix::unistd::ftruncate(&log, 0).is_ok() {
        log::warn!("the log was longer than {LIMIT} bytes and was emptied");
    }
}

/// Redirects standard error, and with it the log, to the file in the store.
pub(super) fn log_into(store: &Path) -> Result<()> {
    let path = store.join(LOG);
    let attempt = || format!("open '{}'", path.display());
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(&path)
        .attempt(attempt)?;
    dup2_stderr(file.as_fd()).map_err(io::Error::from).attempt(|| "redirect the standard error")?;
    limit_log();
    Ok(())
}

/// Makes a panic of any thread log itself and end the process with status 101.
pub fn exit_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        log::error!("{info}\n{}", std::backtrace::Backtrace::force_capture());
        std::process::exit(101);
    }));
}
