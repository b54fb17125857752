//! The command as a child process.
//!
//! It is started through this program again (`__exec --cage ... -- CMD...`), which puts up its walls, lets the signals
//! through and becomes the command. That step tells "not found" from every failure of our own: its status is 127 or 126
//! then, as in env(1).
//!
//! ```text
//! child -> parent   Result<Report, Error>, with the session and the root of the mount (SCM_RIGHTS)
//! parent -> child   one byte: it is served. The end of the connection instead: it is not
//! ```
//! While the command runs, this process must outlive it: it does not die of the SIGINT and SIGQUIT that a terminal
//! sends to both, and hands SIGTERM and SIGHUP on.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{MsgFlags, recv};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::{Confinement, Namespace};
use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::{self, Handed};
use crate::store::codec;
use crate::sys::mount::{message_pair, receive, send};

/// The hidden verb by which the program becomes the command.
pub const EXEC_VERB: &str = "__exec";

/// The status when the command was found but cannot be executed.
pub const CANNOT_EXECUTE: u8 = 126;
/// The status when the command was not found.
pub const NOT_FOUND: u8 = 127;

/// The longest report of a child, in bytes.
const MAX_REPORT: usize = 64 << 10;

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

/// Blocks the signals that [`Started::wait`] waits for. Call it before any thread is started.
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

    /// Starts it in a mount namespace of its own, with a mount over `dir` that nobody serves yet; it runs from
    /// [`Started::go`] on, in `dir`, with `env` added to the environment. [`block_signals`] comes first.
    ///
    /// # Errors
    /// The child cannot be started, or cannot mount.
    pub fn start(&self, dir: &Path, env: &[(&str, &OsStr)]) -> Result<(Started, Handed)> {
        let attempt = || format!("start '{}'", self.line());
        let (ours, theirs) = message_pair().map_err(io::Error::from).attempt(attempt)?;
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).map_err(io::Error::from).attempt(attempt)?;
        let child = Command::new("/proc/self/exe")
            .arg(EXEC_VERB)
            .arg("--cage")
            .arg(theirs.as_raw_fd().to_string())
            .arg("--over")
            .arg(dir)
            .arg("--")
            .args(&self.words)
            .envs(env.iter().copied())
            .spawn()
            .attempt(attempt)?;
        drop(theirs);
        let mut started = Started { child, socket: ours, namespace: PathBuf::new() };
        match started.report()? {
            (Ok(report), [Some(device), Some(root)]) => {
                started.namespace = OsString::from_vec(report.namespace).into();
                Ok((started, Handed { device, root, dev: report.dev, all_users: report.all_users }))
            }
            (Ok(_), _) => Err(Error::new(Kind::Failed, attempt(), "it has not handed over its mount")),
            (Err(error), _) => Err(error),
        }
    }
}

/// What the child tells of the mount that it has made.
#[derive(Serialize, Deserialize)]
struct Report {
    dev: u64,
    all_users: bool,
    /// What `/proc/PID/ns/mnt` of every process inside says.
    namespace: Vec<u8>,
}

/// A command that waits for its tree, or runs. If it is dropped while it waits, it ends.
#[derive(Debug)]
pub struct Started {
    child: Child,
    socket: OwnedFd,
    namespace: PathBuf,
}

impl Started {
    fn report(&mut self) -> Result<(Result<Report>, [Option<OwnedFd>; 2])> {
        let attempt = || "wait for the mount of the command";
        let mut bytes = vec![0; MAX_REPORT];
        let (len, descriptors) =
            receive(&self.socket, &mut bytes).map_err(io::Error::from).attempt(attempt)?;
        if len == 0 {
            let status = self.child.wait().attempt(attempt)?;
            return Err(Error::new(Kind::Failed, attempt(), format!("the process ended ({status})")));
        }
        let report = codec::decode(bytes.get(..len).unwrap_or_default());
        let mut descriptors = descriptors.into_iter();
        let report = report.map_err(|error| Error::new(Kind::Failed, attempt(), error))?;
        Ok((report, [descriptors.next(), descriptors.next()]))
    }

    /// Lets the command run: its tree is served from now on.
    ///
    /// # Errors
    /// It has ended meanwhile.
    pub fn go(&self) -> Result<()> {
        send(self.socket.as_raw_fd(), b"!", &[]).map_err(io::Error::from).attempt(|| "start the command")
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn wait(&mut self) -> Result<End> {
        wait(&mut self.child)
    }

    /// The mount namespace of the command and of what it has started, as `/proc/PID/ns/mnt` names it.
    pub fn namespace(&self) -> &Path {
        &self.namespace
    }
}

/// What the child is told on its command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cage {
    /// The number of the socket to the parent.
    pub socket: RawFd,
    /// The base; absolute.
    pub over: PathBuf,
}

impl Cage {
    /// Puts up the walls, mounts, and returns when the parent serves the mount; `false` if it will not, which it tells
    /// itself.
    fn enter(&self) -> Result<bool> {
        let made = self.make();
        let (report, descriptors) = match made {
            Ok((report, Handed { device, root, .. })) => (Ok(report), vec![device, root]),
            Err(error) => (Err(error), Vec::new()),
        };
        let failed = report.is_err();
        let attempt = || "hand over the mount";
        let bytes = codec::encode(&report).map_err(|error| Error::new(Kind::Failed, attempt(), error))?;
        send(self.socket, &bytes, &descriptors).map_err(io::Error::from).attempt(attempt)?;
        drop(descriptors);
        if failed {
            return Ok(false);
        }
        let mut go = [0];
        let served =
            recv(self.socket, &mut go, MsgFlags::empty()).map_err(io::Error::from).attempt(attempt)?;
        if served == 0 {
            return Ok(false);
        }
        nix::unistd::close(self.socket).map_err(io::Error::from).attempt(attempt)?;
        std::env::set_current_dir(&self.over).attempt(|| format!("enter '{}'", self.over.display()))?;
        Ok(true)
    }

    fn make(&self) -> Result<(Report, Handed)> {
        let walls = Confinement::enter()?;
        let all_users = walls.namespace == Namespace::Mount;
        let handed = fuse::hand_out(&self.over, all_users)?;
        let namespace = std::fs::read_link("/proc/self/ns/mnt").attempt(|| "name the mount namespace")?;
        let namespace = namespace.into_os_string().into_vec();
        Ok((Report { dev: handed.dev, all_users, namespace }, handed))
    }
}

fn wait(child: &mut Child) -> Result<End> {
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

/// Goes into the cage and becomes the command: what the hidden verb does. Returns only if that fails, with the status
/// to exit with and the error, unless the parent tells it. The process must have one thread.
pub fn become_command(cage: &Cage, words: &[OsString]) -> (Option<Error>, u8) {
    match cage.enter() {
        Ok(true) => {
            let (error, code) = exec(words);
            (Some(error), code)
        }
        Ok(false) => (None, 125),
        Err(error) => (Some(error), 125),
    }
}

fn exec(words: &[OsString]) -> (Error, u8) {
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
