//! The process outside: starts the command, supervises it, and ends all of its processes.
//!
//! The command and its descendants stay in the process group and on the terminal of this process,
//! as if a shell had started them. So signals of the terminal reach them without us; signals from
//! other processes are forwarded. When the command stops, this process stops too, so that a shell
//! sees its job stop, and both continue together. A command with a time limit cannot stop the clock
//! that way: the kernel continues this process when the time is over ([`Started::wait`]).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigEvent, SigSet, SigevNotify, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::sys::wait::waitpid;
use nix::time::ClockId;
use nix::unistd::Pid;

use super::attended::{Asker, Attended};
use super::exit::End;
use super::namespace;
use super::net::{Net, Proxy, Report};
use super::protocol::{Channel, Event, Order};
use super::spec::Spec;
use super::streams::{Given, Relays, Streams};
use super::terminal::{self, Terminal};
use super::walls::Walls;
use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::Handed;
use crate::sys::limits::with_limits_as_before;
use crate::sys::process::with_descriptors;
use crate::sys::socket::message_pair;

/// The hidden verb by which this program becomes the process inside.
pub const EXEC_VERB: &str = "__exec";

/// A process that is stopped after its time was over is continued within this time.
const CONTINUE_AGAIN: Duration = Duration::from_millis(500);

/// A command with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The name, searched in PATH if it has no `/`, then the arguments.
    pub words: Vec<OsString>,
    /// The environment.
    pub env: Vec<(OsString, OsString)>,
}

/// The end of a wait.
#[derive(Debug)]
pub enum Waited {
    /// The command has ended. Its descendants may still live.
    Ended(End),
    /// The command was not started. The number is the code to exit with.
    NotStarted(Error, u8),
    /// The time is over and the command still runs.
    TimeIsOver,
    /// The caller has asked for an end through a [`Stopper`](super::Stopper), and the command still
    /// runs. This is said once.
    IsAsked,
}

/// Why a command was not started.
#[derive(Debug)]
pub enum NotStarted {
    /// The host does not allow namespaces. The command may start without them.
    Refused(Error),
    /// Another failure.
    Failed(Error),
}

impl From<Error> for NotStarted {
    fn from(error: Error) -> NotStarted {
        NotStarted::Failed(error)
    }
}

/// Blocks the signals that [`Started::wait`] handles, and those by which a terminal stops a
/// background process. Call it before any thread starts.
///
/// # Errors
/// sigprocmask(2) fails; it is not known to.
pub fn block_signals() -> Result<()> {
    blocked().thread_block().map_err(io::Error::from).attempt(|| "block signals")
}

/// Undoes [`block_signals`]. Discards the signals that came meanwhile: they were for the command.
///
/// # Errors
/// signalfd(2) or sigprocmask(2) fails.
pub fn unblock_signals() -> Result<()> {
    let attempt = || "unblock signals";
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let pending =
        SignalFd::with_flags(&blocked(), flags).map_err(io::Error::from).attempt(attempt)?;
    while pending.read_signal().map_err(io::Error::from).attempt(attempt)?.is_some() {}
    blocked().thread_unblock().map_err(io::Error::from).attempt(attempt)
}

/// The signals that are forwarded to the command.
fn forwarded_signals() -> SigSet {
    use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    SigSet::from_iter([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2])
}

fn blocked() -> SigSet {
    use Signal::{SIGTSTP, SIGTTIN, SIGTTOU};
    let mut set = forwarded_signals();
    set.extend([SIGTSTP, SIGTTIN, SIGTTOU]);
    set
}

impl Program {
    /// The words in one line, for people.
    pub fn line(&self) -> String {
        let words: Vec<_> = self.words.iter().map(|word| word.display().to_string()).collect();
        words.join(" ")
    }

    /// Starts the command behind the walls that `spec` describes, up to the point where it waits
    /// for [`Started::run`]. With namespaces, also returns the mount over the base, which no
    /// process serves yet. The caller has called [`block_signals`]. `joins` is called with the new
    /// process before that has any child. One of several needs namespaces.
    ///
    /// # Errors
    /// The command cannot be started, or not behind all of these walls.
    pub fn start(
        &self,
        mut spec: Spec,
        attended: Attended,
        joins: impl FnOnce(Pid) -> Result<()>,
    ) -> std::result::Result<(Started, Option<Handed>), NotStarted> {
        let attempt = || format!("start '{}'", self.line());
        // As subreaper this process inherits the first process of the pid namespace when its parent
        // ends, and, without namespaces, every orphan of the command.
        prctl::set_child_subreaper(true).map_err(io::Error::from).attempt(attempt)?;
        let (ours, theirs) = message_pair().map_err(io::Error::from).attempt(attempt)?;
        let in_view = spec.elsewhere.is_none();
        spec.own_session = matches!(attended, Attended::OneOfSeveral(_));
        let mut ties = Ties::of(attended, in_view).attempt(attempt)?;
        let given = std::mem::take(&mut ties.streams.given);
        let first = self.spawn(theirs, given).attempt(attempt)?;
        let relays = ties.streams.relay().attempt(attempt)?;
        let mut started = Started {
            runs: false,
            interrupted: false,
            channel: Some(Channel::new(ours)),
            processes: vec![first],
            spared: ties.spared,
            namespace: PathBuf::new(),
            asker: ties.asker,
            alarm: None,
            terminal: ties.terminal,
            relays,
            net: spec.net.clone(),
            proxy: None,
        };
        joins(first)?;
        started.send(&Order::Prepare(Box::new(spec)))?;
        let handed = if in_view { Some(started.enter_view()?) } else { None };
        Ok((started, handed))
    }

    /// Starts this program again with the other end of the connection, and with pipes in place of
    /// the host's files.
    fn spawn(&self, theirs: OwnedFd, mut given: Vec<Given>) -> io::Result<Pid> {
        // Only this child inherits it, whatever other threads start meanwhile.
        let number = theirs.as_raw_fd();
        given.push((theirs, number));
        let mut command = Command::new("/proc/self/exe");
        let child = with_descriptors(with_limits_as_before(&mut command), given)
            .arg0("jailfs")
            .args([EXEC_VERB, "--cage", &number.to_string(), "--"])
            .args(&self.words)
            .env_clear()
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .spawn()?;
        Ok(Pid::from_raw(child.id().cast_signed()))
    }
}

/// The ties of a command to this process.
struct Ties {
    streams: Streams,
    asker: Asker,
    terminal: Option<Terminal>,
    spared: Option<Vec<Pid>>,
}

impl Ties {
    fn of(attended: Attended, in_view: bool) -> io::Result<Ties> {
        if let Attended::OneOfSeveral(apart) = attended {
            let (given, stop) = apart.given()?;
            let (streams, asker) = (Streams::of_pipes(given), Asker::Caller(stop));
            return Ok(Ties { streams, asker, terminal: None, spared: None });
        }
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Ties {
            spared: Some(super::init::children()),
            streams: Streams::prepare(in_view)?,
            asker: Asker::Signals(SignalFd::with_flags(&forwarded_signals(), flags)?),
            terminal: Terminal::of_this_process(),
        })
    }
}

/// A command that waits for its tree, or runs. Dropping it kills all of its processes.
#[derive(Debug)]
pub struct Started {
    /// None once the command is to end.
    channel: Option<Channel>,
    /// Processes of the command that this process has to reap.
    processes: Vec<Pid>,
    /// Children that this process already had when it was still another program, before exec.
    /// `None` for one of several, whose processes are all in its pid namespace.
    spared: Option<Vec<Pid>>,
    namespace: PathBuf,
    asker: Asker,
    /// The timer that continues this process when the time is over.
    alarm: Option<Timer>,
    terminal: Option<Terminal>,
    relays: Relays,
    /// The network of the command.
    net: Net,
    /// The proxy, if the network is a list of hosts.
    proxy: Option<Proxy>,
    /// The process inside has started the command.
    runs: bool,
    /// A signal has asked this process or the command to end.
    interrupted: bool,
}

impl Started {
    fn send(&self, order: &Order) -> Result<()> {
        match &self.channel {
            Some(channel) => channel.send(order),
            None => Ok(()),
        }
    }

    fn receive(&self) -> std::result::Result<(Event, Vec<OwnedFd>), NotStarted> {
        let died = || Error::new(Kind::Failed, "start the command", "the process inside has ended");
        let Some(channel) = &self.channel else { return Err(died().into()) };
        match channel.receive()? {
            Some((Event::Refused(error), _)) => Err(NotStarted::Refused(error)),
            Some((Event::Failed(error, _), _)) => Err(error.into()),
            Some(other) => Ok(other),
            None => Err(died().into()),
        }
    }

    /// Answers the process inside until the first process of the pid namespace runs.
    fn enter_view(&mut self) -> std::result::Result<Handed, NotStarted> {
        let mut handed = None;
        loop {
            match self.receive()? {
                (Event::Map, _) => {
                    let [first, ..] = *self.processes else { return Err(unexpected().into()) };
                    namespace::map(first).map_err(NotStarted::Refused)?;
                    self.send(&Order::Mapped)?;
                }
                (Event::Mounted { dev, all_users }, descriptors) => {
                    let mut descriptors = descriptors.into_iter();
                    let (Some(device), Some(root)) = (descriptors.next(), descriptors.next())
                    else {
                        return Err(unexpected().into());
                    };
                    handed = Some(Handed { device, root, dev, all_users });
                }
                (Event::Started(pid, namespace), _) => {
                    self.processes.push(Pid::from_raw(pid));
                    self.namespace = namespace.into();
                    return handed.ok_or_else(|| unexpected().into());
                }
                _ => return Err(unexpected().into()),
            }
        }
    }

    /// Says that the tree is served, and returns the walls that stand. With a list of hosts this
    /// also starts the proxy, which reports each refusal through `report`.
    ///
    /// # Errors
    /// A wall could not be built, or the proxy could not be started.
    pub fn served(&mut self, report: Report) -> Result<Walls> {
        self.send(&Order::Served)?;
        let (walls, descriptors) = match self.receive() {
            Ok((Event::Ready(walls), descriptors)) => (walls, descriptors),
            Ok(_) => return Err(unexpected()),
            Err(NotStarted::Refused(error) | NotStarted::Failed(error)) => return Err(error),
        };
        if let Net::Allow(list) = &self.net {
            let listener = descriptors.into_iter().next().ok_or_else(unexpected)?;
            self.proxy = Some(Proxy::start(listener, list.clone(), report)?);
        }
        Ok(walls)
    }

    /// Starts the command. If a signal to end came before, it does not, and returns the end that
    /// this signal stands for.
    ///
    /// # Errors
    /// The process inside has ended.
    pub fn run(&mut self) -> Result<Option<End>> {
        let attempt = || "wait for signals";
        let signal = match &self.asker {
            Asker::Signals(signals) => {
                let read = signals.read_signal().map_err(io::Error::from).attempt(attempt)?;
                read.map(|info| info.ssi_signo)
            }
            Asker::Caller(stop) => stop.is_asked().then_some(Signal::SIGTERM as u32),
            Asker::HasAsked => None,
        };
        if let Some(signal) = signal {
            self.interrupted = true;
            return Ok(Some(End::Killed(u8::try_from(signal).unwrap_or(0))));
        }
        self.send(&Order::Run)?;
        Ok(None)
    }

    /// Waits until the command ends, or until `until`, and forwards signals meanwhile. After
    /// `until` nothing keeps this process stopped: neither a stopped command nor a stop signal from
    /// another process.
    ///
    /// # Errors
    /// The wait fails, or the process inside was killed.
    pub fn wait(&mut self, until: Option<Instant>) -> Result<Waited> {
        if let (Some(until), Asker::Signals(_)) = (until, &self.asker) {
            self.continue_at(until)
                .map_err(io::Error::from)
                .attempt(|| "set a timer for the time limit")?;
        }
        loop {
            let Some(timeout) = timeout(until) else { return Ok(Waited::TimeIsOver) };
            let [event, is_asked] = self.poll(timeout)?;
            if is_asked {
                self.forward_signals()?;
                if let Asker::Caller(_) = self.asker {
                    (self.asker, self.interrupted) = (Asker::HasAsked, true);
                    return Ok(Waited::IsAsked);
                }
            }
            if !event {
                continue;
            }
            match self.channel.as_ref().map_or(Ok(None), Channel::receive)? {
                Some((Event::Ended(end), _)) => return Ok(Waited::Ended(end)),
                Some((Event::Failed(error, code), _)) => {
                    return Ok(Waited::NotStarted(error, code));
                }
                Some((Event::Stopped(signal), _)) => self.stop_with_command(signal)?,
                Some((Event::Running, _)) => self.runs = true,
                Some(_) => return Err(unexpected()),
                None => {
                    let died =
                        "the first process of the sandbox was killed, and all others with it";
                    return Err(Error::new(Kind::Failed, "wait for the command", died));
                }
            }
        }
    }

    /// Sets a timer that sends SIGCONT from `until` on. The kernel continues a stopped process when
    /// SIGCONT is sent, and timers run on while a process is stopped.
    fn continue_at(&mut self, until: Instant) -> nix::Result<()> {
        // A timer set to zero is disarmed.
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let event =
            SigEvent::new(SigevNotify::SigevSignal { signal: Signal::SIGCONT, si_value: 0 });
        let mut alarm = Timer::new(ClockId::CLOCK_MONOTONIC, event)?;
        let when = Expiration::IntervalDelayed(left.into(), CONTINUE_AGAIN.into());
        alarm.set(when, TimerSetTimeFlags::empty())?;
        self.alarm = Some(alarm);
        Ok(())
    }

    /// Whether there is an event, and whether the command is asked to end.
    fn poll(&self, timeout: PollTimeout) -> Result<[bool; 2]> {
        let fds = [self.channel.as_ref().map(AsFd::as_fd), self.asker.descriptor()];
        let polled = fds.iter().flatten().map(|fd| PollFd::new(*fd, PollFlags::POLLIN));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        match poll(&mut polled, timeout) {
            Ok(_) => {
                let mut ready = polled.iter().map(|fd| fd.any().unwrap_or(false));
                Ok(fds.map(|fd| fd.is_some() && ready.next().unwrap_or(false)))
            }
            Err(Errno::EINTR) => Ok([false; 2]),
            Err(error) => Err(Error::io("wait for the command", &error.into())),
        }
    }

    /// Forwards signals from other processes. Signals of the terminal come from the kernel, which
    /// also sends them to the command if it already runs. If it does not, they are forwarded and
    /// wait in the connection.
    fn forward_signals(&mut self) -> Result<()> {
        let attempt = || "wait for signals";
        let Asker::Signals(signals) = &self.asker else { return Ok(()) };
        while let Some(info) = signals.read_signal().map_err(io::Error::from).attempt(attempt)? {
            let Ok(number) = i32::try_from(info.ssi_signo) else { continue };
            self.interrupted |= ![libc::SIGUSR1, libc::SIGUSR2].contains(&number);
            if info.ssi_code <= 0 || !self.runs {
                self.send(&Order::Signal(number))?;
            }
        }
        Ok(())
    }

    /// Whether a signal has asked the command or this process to end. Then the command is not run
    /// again.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Asks the command to end: sends SIGTERM.
    ///
    /// # Errors
    /// The process inside has ended.
    pub fn terminate(&self) -> Result<()> {
        self.send(&Order::Signal(Signal::SIGTERM as i32))?;
        // A stopped process does not handle SIGTERM.
        self.send(&Order::Continue)
    }

    /// Stops this process as the command was stopped, so that a shell sees it, and continues with
    /// it. Without a terminal no shell would continue it, so it goes on waiting.
    fn stop_with_command(&self, signal: i32) -> Result<()> {
        let attempt = || "stop with the command";
        let Some(terminal) = &self.terminal else { return Ok(()) };
        let signal = Signal::try_from(signal).unwrap_or(Signal::SIGSTOP);
        let inner = terminal.take_foreground(|group| self.is_inside(group));
        let alone = SigSet::from_iter([signal]);
        // Here, or below when the signal is unblocked, this process stops with all its threads
        // until another process continues it.
        kill(Pid::this(), signal).map_err(io::Error::from).attempt(attempt)?;
        if signal != Signal::SIGSTOP {
            alone.thread_unblock().map_err(io::Error::from).attempt(attempt)?;
            alone.thread_block().map_err(io::Error::from).attempt(attempt)?;
        }
        if let Some(group) = inner {
            terminal.return_foreground(group);
        }
        self.send(&Order::Continue)
    }

    fn is_inside(&self, process: Pid) -> bool {
        let theirs = std::fs::read_link(format!("/proc/{process}/ns/mnt"));
        theirs.is_ok_and(|theirs| theirs == self.namespace)
    }

    /// The processes that the command has left behind, as `number (name)`. Waits a short time for
    /// those that are just ending.
    pub fn remaining(&self) -> Vec<String> {
        for _ in 0..10 {
            if self.inside().is_empty() {
                return Vec::new();
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.inside()
    }

    /// The processes in the mount namespace of the command, except the first. Empty without
    /// namespaces: these processes cannot be told from others that use the mount.
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

    /// Kills what is left of the command. Returns when none of its processes lives and its output
    /// is in the caller's files. The tree must still be served: a process that waits for an answer
    /// dies only when it gets one. Returns the failures of copying between the command and the
    /// caller's files.
    pub fn end(mut self) -> Vec<Error> {
        let relays = std::mem::take(&mut self.relays);
        drop(self);
        relays.finish()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The kernel kills a whole pid namespace with its first process, and lets that be reaped
        // when the others are gone. The first process also ends at the end of the connection, but
        // not while the command has it stopped.
        self.channel = None;
        for pid in &self.processes {
            if let Err(error) = kill(*pid, Signal::SIGKILL) {
                log::debug!("end process {pid}: {error}");
            }
            while waitpid(*pid, None) == Err(Errno::EINTR) {}
        }
        if let Some(spared) = &self.spared {
            if self.namespace.as_os_str().is_empty() {
                super::init::end_children(spared);
            }
            terminal::resume_output();
        }
        // The proxy reports its count when no process of the command lives, so that the count is
        // complete, and after the terminal accepts output again.
        self.proxy = None;
        if let Some(terminal) = &self.terminal {
            terminal.take_foreground(|_| false);
            terminal.restore();
        }
    }
}

/// The time that poll(2) may wait. None if the time is over.
fn timeout(until: Option<Instant>) -> Option<PollTimeout> {
    let Some(until) = until else { return Some(PollTimeout::NONE) };
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return None;
    }
    // Rounded up, so that poll never returns just before the end of the time.
    let millis = left.as_millis().saturating_add(1);
    Some(PollTimeout::from(u16::try_from(millis).unwrap_or(u16::MAX)))
}

fn unexpected() -> Error {
    Error::new(Kind::Failed, "start the command", "the process inside sent an unexpected message")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_wait_ends_at_its_deadline() {
        assert_eq!(timeout(None), Some(PollTimeout::NONE));
        assert_eq!(timeout(Some(Instant::now())), None);
        let soon = timeout(Some(Instant::now() + Duration::from_millis(5))).unwrap();
        assert!(soon > PollTimeout::ZERO);
        assert!(timeout(Some(Instant::now() + Duration::from_secs(1 << 20))).is_some());
    }
}
