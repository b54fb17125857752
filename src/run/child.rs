//! The command as a child process.
//!
//! It is started through this program again (`__exec CMD...`), which lets the signals through and becomes the
//! command. That step is where its walls go up, and it tells "not found" from every failure of our own: its status
//! is 127 or 126 then, as in env(1).
//!
//! While the command runs, this process must outlive it: it does not die of the SIGINT and SIGQUIT that a terminal
//! sends to both, and hands SIGTERM and SIGHUP on.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;

use crate::error::{Attempt, Error, Kind, Result};

/// The hidden verb by which the program becomes the command.
pub const EXEC_VERB: &str = "__exec";

/// The status when the command was found but cannot be executed.
pub const CANNOT_EXECUTE: u8 = 126;
/// The status when the command was not found.
pub const NOT_FOUND: u8 = 127;

/// A command with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name, looked for in PATH if it has no `/`, then its arguments.
    pub words: Vec<OsString>,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this status.
    Exited(u8),
    /// By this signal.
    Killed(u8),
}

impl End {
    /// The exit code that stands for it: its own, or 128 and the signal.
    pub fn code(self) -> u8 {
        match self {
            End::Exited(code) => code,
            End::Killed(signal) => signal.saturating_add(128),
        }
    }
}

/// Blocks the signals that [`Program::run`] waits for. Call it before any thread is started.
///
/// # Errors
/// The host refuses, which sigprocmask(2) does not know.
pub fn block_signals() -> Result<()> {
    signals().thread_block().map_err(io::Error::from).attempt(|| "block signals")
}

/// Undoes [`block_signals`], after throwing away what came meanwhile: it was meant for the command.
///
/// # Errors
/// The host refuses.
pub fn let_signals_through() -> Result<()> {
    let attempt = || "let signals through";
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let pending = SignalFd::with_flags(&signals(), flags).map_err(io::Error::from).attempt(attempt)?;
    while pending.read_signal().map_err(io::Error::from).attempt(attempt)?.is_some() {}
    signals().thread_unblock().map_err(io::Error::from).attempt(attempt)
}

fn signals() -> SigSet {
    use Signal::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    SigSet::from_iter([SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM])
}

impl Program {
    /// The words as a person would read them, in one line.
    pub fn line(&self) -> String {
        let words: Vec<_> = self.words.iter().map(|word| word.display().to_string()).collect();
        words.join(" ")
    }

    /// Runs it in `dir` with `env` added to the environment, and waits for its end. [`block_signals`] comes first.
    ///
    /// # Errors
    /// The child cannot be started or waited for.
    pub fn run(&self, dir: &Path, env: &[(&str, &OsStr)]) -> Result<End> {
        let child = Command::new("/proc/self/exe")
            .arg(EXEC_VERB)
            .arg("--")
            .args(&self.words)
            .current_dir(dir)
            .envs(env.iter().copied())
            .spawn()
            .attempt(|| format!("start '{}'", self.line()))?;
        wait(child)
    }
}

fn wait(mut child: Child) -> Result<End> {
    let pid = Pid::from_raw(child.id().cast_signed());
    loop {
        // Asked before every wait: a SIGCHLD that came before this loop is no longer pending when it was taken.
        if let Some(status) = child.try_wait().attempt(|| "wait for the command")? {
            let killed = status.signal().and_then(|signal| u8::try_from(signal).ok());
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(killed.map_or(End::Exited(code.unwrap_or(125)), End::Killed));
        }
        let signal = signals().wait().map_err(io::Error::from).attempt(|| "wait for signals")?;
        // SIGINT and SIGQUIT the terminal has sent to the command too. It is not reaped yet, so the number is its own.
        if matches!(signal, Signal::SIGTERM | Signal::SIGHUP)
            && let Err(error) = kill(pid, signal)
        {
            log::warn!("hand {signal} to the command: {error}");
        }
    }
}

/// Becomes the command: what the hidden verb does. Returns only if that fails, with the status to exit with.
pub fn exec(words: &[OsString]) -> (Error, u8) {
    let Some((name, arguments)) = words.split_first() else {
        return (Error::new(Kind::Usage, "run", "no command is given"), 125);
    };
    let attempt = format!("run '{}'", name.display());
    if let Err(error) = signals().thread_unblock() {
        return (Error::io(attempt, &error.into()), 125);
    }
    let error = Command::new(name).args(arguments).exec();
    let missing =
        matches!(Errno::from_raw(error.raw_os_error().unwrap_or(0)), Errno::ENOENT | Errno::ENOTDIR);
    (Error::io(attempt, &error), if missing { NOT_FOUND } else { CANNOT_EXECUTE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_counts_from_128() {
        assert_eq!((End::Exited(3).code(), End::Killed(9).code(), End::Exited(0).code()), (3, 137, 0));
    }

    #[test]
    fn a_command_that_cannot_start_is_told_apart() {
        let words = |text: &str| vec![OsString::from(text)];
        assert_eq!(exec(&words("/nowhere/at/all")).1, NOT_FOUND);
        assert_eq!(exec(&words("no-such-command-anywhere")).1, NOT_FOUND);
        assert_eq!(exec(&words("/etc/passwd")).1, CANNOT_EXECUTE);
        assert_eq!(exec(&words("/")).1, CANNOT_EXECUTE);
        assert_eq!(exec(&[]).1, 125);
    }
}
