//! The side of the process outside: starts the command, serves its wishes, and knows when all of it is gone.
//!
//! The command and everything that it starts stay in the process group and on the terminal of this process, as if a shell had
//! started them: the terminal's own signals reach them without us. What another process sends to us we hand on. So that a
//! shell sees its job stop when the command stops, we stop too; and go on with it. A command whose time is limited cannot stop
//! the clock with us: the kernel lets us go on when the time is over ([`Started::wait`]).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigEvent, SigSet, SigevNotify, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::sys::wait::waitpid;
use nix::time::ClockId;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::namespace;
use super::net::{Net, Proxy, Tell};
use super::streams::{Given, Relays, Streams};
use super::talk::{Line, News, Order, Spec};
use super::terminal::{self, Terminal};
use super::walls::Walls;
use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::Handed;
use crate::sys::limits::with_limits_as_before;
use crate::sys::mount::message_pair;
use crate::sys::process::with_descriptors;

/// The hidden verb by which the program becomes the command.
pub const EXEC_VERB: &str = "__exec";

/// The status when the command was found but cannot be executed.
pub const CANNOT_EXECUTE: u8 = 126;
/// The status when the command was not found.
pub const NOT_FOUND: u8 = 127;
/// Who is stopped after its time was over goes on within this time.
const WAKE_AGAIN: Duration = Duration::from_millis(500);

/// A command with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name, looked for in PATH if it has no `/`, then its arguments.
    pub words: Vec<OsString>,
    /// Its environment.
    pub env: Vec<(OsString, OsString)>,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// What ended a wait.
#[derive(Debug)]
pub enum Waited {
    /// The command has ended; what it started may still live.
    Ended(End),
    /// It did not come to a command; the code to exit with.
    NotStarted(Error, u8),
    /// The time is over and it runs.
    TimeIsOver,
}

/// Why a command was not started.
#[derive(Debug)]
pub enum NotStarted {
    /// Namespaces are not to be had here; without them it may work.
    Refused(Error),
    /// Something else is wrong.
    Failed(Error),
}

impl From<Error> for NotStarted {
    fn from(error: Error) -> NotStarted {
        NotStarted::Failed(error)
    }
}

/// Blocks the signals that [`Started::wait`] waits for, and those by which a terminal stops whoever is in the background.
/// Call it before any thread is started.
///
/// # Errors
/// The host refuses, which sigprocmask(2) does not know.
pub fn block_signals() -> Result<()> {
    blocked().thread_block().map_err(io::Error::from).attempt(|| "block signals")
}

/// Undoes [`block_signals`], after throwing away what came meanwhile: it was meant for the command.
///
/// # Errors
/// The host refuses.
pub fn let_signals_through() -> Result<()> {
    let attempt = || "let signals through";
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let pending = SignalFd::with_flags(&blocked(), flags).map_err(io::Error::from).attempt(attempt)?;
    while pending.read_signal().map_err(io::Error::from).attempt(attempt)?.is_some() {}
    blocked().thread_unblock().map_err(io::Error::from).attempt(attempt)
}

/// The signals that are handed on.
fn handed_on() -> SigSet {
    use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    SigSet::from_iter([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2])
}

fn blocked() -> SigSet {
    use Signal::{SIGTSTP, SIGTTIN, SIGTTOU};
    let mut set = handed_on();
    set.extend([SIGTSTP, SIGTTIN, SIGTTOU]);
    set
}

impl Program {
    /// The words as a person would read them, in one line.
    pub fn line(&self) -> String {
        let words: Vec<_> = self.words.iter().map(|word| word.display().to_string()).collect();
        words.join(" ")
    }

    /// Starts it behind the walls that `spec` describes; it runs from [`Started::run`] on. With namespaces it comes with a mount
    /// over the base that nobody serves yet. [`block_signals`] comes first. `joins` is given the process before it has started
    /// anything.
    ///
    /// # Errors
    /// It cannot be started, or not behind all of these walls.
    pub fn start(
        &self,
        spec: Spec,
        joins: impl FnOnce(Pid) -> Result<()>,
    ) -> std::result::Result<(Started, Option<Handed>), NotStarted> {
        let attempt = || format!("start '{}'", self.line());
        // What is started is left to us by the process in between, and what escapes from it without namespaces too.
        prctl::set_child_subreaper(true).map_err(io::Error::from).attempt(attempt)?;
        let (ours, theirs) = message_pair().map_err(io::Error::from).attempt(attempt)?;
        let spared = super::inside::children();
        let (base, in_view) = (PathBuf::from(&spec.base), spec.elsewhere.is_none());
        let mut streams = Streams::prepare(in_view).attempt(attempt)?;
        let given = std::mem::take(&mut streams.given);
        let first = self.spawn(theirs, given).attempt(attempt)?;
        let relays = streams.relay().attempt(attempt)?;
        let signals = SignalFd::with_flags(&handed_on(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC);
        let mut started = Started {
            runs: false,
            interrupted: false,
            line: Some(Line::new(ours)),
            processes: vec![first],
            spared,
            namespace: PathBuf::new(),
            base,
            signals: signals.map_err(io::Error::from).attempt(attempt)?,
            alarm: None,
            terminal: Terminal::of_this_process(),
            relays,
            net: spec.net.clone(),
            proxy: None,
        };
        joins(first)?;
        started.say(&Order::Prepare(Box::new(spec)))?;
        let handed = if in_view { Some(started.enter_view()?) } else { None };
        Ok((started, handed))
    }

    /// Starts this program again, with their end of the connection, and with pipes in the place of the host's files.
    fn spawn(&self, theirs: OwnedFd, given: Vec<Given>) -> io::Result<Pid> {
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = Command::new("/proc/self/exe");
        let child = with_descriptors(with_limits_as_before(&mut command), given)
            .arg0("jailfs")
            .args([EXEC_VERB, "--cage", &theirs.as_raw_fd().to_string(), "--"])
            .args(&self.words)
            .env_clear()
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .spawn()?;
        Ok(Pid::from_raw(child.id().cast_signed()))
    }
}

/// A command that waits for its tree, or runs. Dropping it ends it with all that it has started.
#[derive(Debug)]
pub struct Started {
    /// None when it is to end.
    line: Option<Line>,
    /// What we started, and what was left to us, until it is reaped.
    processes: Vec<Pid>,
    /// Children that this process had before: of the program that it was in, before it was jailfs.
    spared: Vec<Pid>,
    namespace: PathBuf,
    base: PathBuf,
    signals: SignalFd,
    /// What lets this process go on when the time is over.
    alarm: Option<Timer>,
    terminal: Option<Terminal>,
    relays: Relays,
    /// Which network the command has.
    net: Net,
    /// With a list of hosts, what admits them.
    proxy: Option<Proxy>,
    /// The command has been started.
    runs: bool,
    /// Somebody has asked for an end.
    interrupted: bool,
}

impl Started {
    fn say(&self, order: &Order) -> Result<()> {
        match &self.line {
            Some(line) => line.say(order),
            None => Ok(()),
        }
    }

    fn hear(&self) -> std::result::Result<(News, Vec<OwnedFd>), NotStarted> {
        let died = || Error::new(Kind::Failed, "start the command", "the process that starts it has ended");
        let Some(line) = &self.line else { return Err(died().into()) };
        match line.hear()? {
            Some((News::Refused(error), _)) => Err(NotStarted::Refused(error)),
            Some((News::Failed(error, _), _)) => Err(error.into()),
            Some(other) => Ok(other),
            None => Err(died().into()),
        }
    }

    /// Follows the way into the view, up to its first process.
    fn enter_view(&mut self) -> std::result::Result<Handed, NotStarted> {
        let mut handed = None;
        loop {
            match self.hear()? {
                (News::Map, _) => {
                    let [first, ..] = *self.processes else { return Err(out_of_turn().into()) };
                    namespace::map(first).map_err(NotStarted::Refused)?;
                    self.say(&Order::Mapped)?;
                }
                (News::Mounted { dev, all_users }, descriptors) => {
                    let mut descriptors = descriptors.into_iter();
                    let (Some(device), Some(root)) = (descriptors.next(), descriptors.next()) else {
                        return Err(out_of_turn().into());
                    };
                    handed = Some(Handed { device, root, dev, all_users });
                }
                (News::Started(pid, namespace), _) => {
                    self.processes.push(Pid::from_raw(pid));
                    self.namespace = namespace.into();
                    return handed.ok_or_else(|| out_of_turn().into());
                }
                _ => return Err(out_of_turn().into()),
            }
        }
    }

    /// Says that the tree is served; which walls stand. With a list of hosts the proxy works from here on, and `tell`s the
    /// person what it refuses.
    ///
    /// # Errors
    /// They could not be put up, or the proxy not be started.
    pub fn served(&mut self, tell: Tell) -> Result<Walls> {
        self.say(&Order::Served)?;
        let (walls, descriptors) = match self.hear() {
            Ok((News::Ready(walls), descriptors)) => (walls, descriptors),
            Ok(_) => return Err(out_of_turn()),
            Err(NotStarted::Refused(error) | NotStarted::Failed(error)) => return Err(error),
        };
        if let Net::Allow(list) = &self.net {
            let listener = descriptors.into_iter().next().ok_or_else(out_of_turn)?;
            self.proxy = Some(Proxy::start(listener, list.clone(), tell)?);
        }
        Ok(walls)
    }

    /// Lets the command run; unless somebody has sent a signal by now, which would have ended it: then how.
    ///
    /// # Errors
    /// It has ended meanwhile.
    pub fn run(&mut self) -> Result<Option<End>> {
        let attempt = || "wait for signals";
        if let Some(info) = self.signals.read_signal().map_err(io::Error::from).attempt(attempt)? {
            self.interrupted = true;
            return Ok(Some(End::Killed(u8::try_from(info.ssi_signo).unwrap_or(0))));
        }
        self.say(&Order::Run)?;
        Ok(None)
    }

    /// Waits for the end of the command, or for `until`; hands signals on meanwhile. From `until` on nothing keeps this process
    /// stopped: not the command, with which it stops, nor anybody who stops it by a signal.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn wait(&mut self, until: Option<Instant>) -> Result<Waited> {
        if let Some(until) = until {
            self.wake_at(until)
                .map_err(io::Error::from)
                .attempt(|| "set an alarm for the end of the time")?;
        }
        loop {
            let Some(timeout) = timeout(until) else { return Ok(Waited::TimeIsOver) };
            let [news, signals] = self.poll(timeout)?;
            if signals {
                self.hand_on()?;
            }
            if !news {
                continue;
            }
            match self.line.as_ref().map_or(Ok(None), Line::hear)? {
                Some((News::Ended(end), _)) => return Ok(Waited::Ended(end)),
                Some((News::Failed(error, code), _)) => return Ok(Waited::NotStarted(error, code)),
                Some((News::Stopped(signal), _)) => self.stop_with_it(signal)?,
                Some((News::Runs, _)) => self.runs = true,
                Some(_) => return Err(out_of_turn()),
                None => {
                    let died = "the first process of the sandbox was killed, and all others with it";
                    return Err(Error::new(Kind::Failed, "wait for the command", died));
                }
            }
        }
    }

    /// SIGCONT has its effect on a stopped process when it is sent, and none on another; and timers go on while a process is stopped.
    fn wake_at(&mut self, until: Instant) -> nix::Result<()> {
        // None at all would switch it off.
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let event = SigEvent::new(SigevNotify::SigevSignal { signal: Signal::SIGCONT, si_value: 0 });
        let mut alarm = Timer::new(ClockId::CLOCK_MONOTONIC, event)?;
        let when = Expiration::IntervalDelayed(left.into(), WAKE_AGAIN.into());
        alarm.set(when, TimerSetTimeFlags::empty())?;
        self.alarm = Some(alarm);
        Ok(())
    }

    /// Whether there are news, and signals.
    fn poll(&self, timeout: PollTimeout) -> Result<[bool; 2]> {
        let line = self.line.as_ref().map_or(self.signals.as_fd(), AsFd::as_fd);
        let mut ready =
            [PollFd::new(line, PollFlags::POLLIN), PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, timeout) {
            Ok(_) => Ok(ready.map(|fd| fd.any().unwrap_or(false))),
            Err(Errno::EINTR) => Ok([false; 2]),
            Err(error) => Err(Error::io("wait for the command", &error.into())),
        }
    }

    /// Hands on what other processes sent to us. What the kernel sent, for the terminal, it sent to the command too, if that ran
    /// by then; what came before waits on the line for it.
    fn hand_on(&mut self) -> Result<()> {
        let attempt = || "wait for signals";
        while let Some(info) = self.signals.read_signal().map_err(io::Error::from).attempt(attempt)? {
            let Ok(number) = i32::try_from(info.ssi_signo) else { continue };
            self.interrupted |= ![libc::SIGUSR1, libc::SIGUSR2].contains(&number);
            if info.ssi_code <= 0 || !self.runs {
                self.say(&Order::Signal(number))?;
            }
        }
        Ok(())
    }

    /// Whether a signal has asked for an end, of the command or of this process: then it is not to be run again.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Asks the command to end.
    ///
    /// # Errors
    /// It has ended meanwhile.
    pub fn terminate(&self) -> Result<()> {
        self.say(&Order::Signal(Signal::SIGTERM as i32))?;
        // One that is stopped could not.
        self.say(&Order::Continue)
    }

    /// Stops as the command was stopped, so that a shell sees it, and goes on with it. Without a terminal there is no shell that
    /// would, and whoever let this process wait for it waits on.
    fn stop_with_it(&self, signal: i32) -> Result<()> {
        let attempt = || "stop with the command";
        let Some(terminal) = &self.terminal else { return Ok(()) };
        let signal = Signal::try_from(signal).unwrap_or(Signal::SIGSTOP);
        let inner = terminal.take_back(|group| self.is_inside(group));
        let alone = SigSet::from_iter([signal]);
        // Here, or where it is no longer blocked, this process stops with all its threads until somebody lets it go on.
        kill(Pid::this(), signal).map_err(io::Error::from).attempt(attempt)?;
        if signal != Signal::SIGSTOP {
            alone.thread_unblock().map_err(io::Error::from).attempt(attempt)?;
            alone.thread_block().map_err(io::Error::from).attempt(attempt)?;
        }
        if let Some(group) = inner {
            terminal.give_back(group);
        }
        self.say(&Order::Continue)
    }

    fn is_inside(&self, process: Pid) -> bool {
        let theirs = std::fs::read_link(format!("/proc/{process}/ns/mnt"));
        theirs.is_ok_and(|theirs| theirs == self.namespace)
    }

    /// What the command has left behind, as `number (name)`. Those that are just ending are waited for.
    pub fn remaining(&self) -> Vec<String> {
        for _ in 0..10 {
            if self.inside().is_empty() {
                return Vec::new();
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.inside()
    }

    /// The processes in the mount namespace of the command, but for the first. Without namespaces, those that stand or run in the
    /// mount cannot be told from others, and are none.
    fn inside(&self) -> Vec<String> {
        if self.namespace.as_os_str().is_empty() {
            return Vec::new();
        }
        let listed = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        numbers
            .filter(|pid| !self.processes.contains(&Pid::from_raw(*pid)))
            .filter(|pid| self.is_inside(Pid::from_raw(*pid)))
            .map(|pid| {
                let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
                format!("{pid} ({})", OsStr::from_bytes(name.trim_ascii()).display())
            })
            .collect()
    }

    /// Ends whatever is left of it, and returns when no process of it lives any more and all that it wrote is in its files. The
    /// tree must still be served: a process that waits for it ends when it is answered. Returns what could not be copied
    /// between the command and the caller's files.
    pub fn end(mut self) -> Vec<Error> {
        let relays = std::mem::take(&mut self.relays);
        drop(self);
        relays.finish()
    }

    /// Where the command sees the sandbox.
    pub fn base(&self) -> &Path {
        &self.base
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The first process of a pid namespace takes all others along; the kernel lets it be reaped when they are gone. It would
        // end by itself at the end of the connection, but not if the command has stopped it.
        self.line = None;
        for pid in &self.processes {
            if let Err(error) = kill(*pid, Signal::SIGKILL) {
                log::debug!("end process {pid}: {error}");
            }
            while waitpid(*pid, None) == Err(Errno::EINTR) {}
        }
        if self.namespace.as_os_str().is_empty() {
            super::inside::end_children(&self.spared);
        }
        terminal::let_output_through();
        // When nothing of the command lives, so that the count is whole, and after what keeps the terminal from being written.
        self.proxy = None;
        if let Some(terminal) = &self.terminal {
            terminal.take_back(|_| false);
            terminal.restore();
        }
    }
}

/// How long poll(2) may wait; none if the time is over.
fn timeout(until: Option<Instant>) -> Option<PollTimeout> {
    let Some(until) = until else { return Some(PollTimeout::NONE) };
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return None;
    }
    // Rounded up, so that it never waits for nothing.
    let millis = left.as_millis().saturating_add(1);
    Some(PollTimeout::from(u16::try_from(millis).unwrap_or(u16::MAX)))
}

fn out_of_turn() -> Error {
    Error::new(Kind::Failed, "start the command", "the process inside spoke out of turn")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_signal_counts_from_128() {
        assert_eq!((End::Exited(3).code(), End::Killed(9).code(), End::Exited(0).code()), (3, 137, 0));
    }

    #[test]
    fn a_wait_ends_with_its_time() {
        assert_eq!(timeout(None), Some(PollTimeout::NONE));
        assert_eq!(timeout(Some(Instant::now())), None);
        let soon = timeout(Some(Instant::now() + Duration::from_millis(5))).unwrap();
        assert!(soon > PollTimeout::ZERO);
        assert!(timeout(Some(Instant::now() + Duration::from_secs(1 << 20))).is_some());
    }
}
