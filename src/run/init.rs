//! The process inside: builds the walls, starts the command, and waits for it.
//!
//! It is this program again, started by the process outside, with one thread. With namespaces it
//! creates them, mounts the sandbox, and forks. The child is the first process of the pid
//! namespace: when it ends, the kernel kills all others in it. Without namespaces this process is
//! the subreaper of the command's orphans and kills them itself.
//!
//! It prints nothing. It sends errors to the process outside, which reports them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpgid};

use super::exit::{CANNOT_EXECUTE, End, FAILED, NOT_FOUND};
use super::namespace::{self, EntryOrder};
use super::net::{self, Net};
use super::protocol::{Channel, Event, Order};
use super::spec::Spec;
use super::streams;
use super::view;
use super::walls::{self, ViewWall, Walls};
use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse;
use crate::fuse::Handed;
use crate::sys;

/// Runs the process that the hidden verb starts, and returns its exit status. `socket` is the
/// descriptor number of the connection to the process outside. The process must have one thread.
pub fn become_command(socket: RawFd, words: &[OsString]) -> u8 {
    let Ok(socket) = sys::process::inherited(socket) else { return FAILED };
    let channel = Channel::new(socket);
    match build_and_run(&channel, words) {
        Ok(()) => 0,
        Err(stop) => {
            let (error, code) = match stop {
                Stop::Failed(error) => (error, FAILED),
                Stop::NoCommand(error, code) => (error, code),
                Stop::Refused(error) => {
                    // If the send fails, the process outside is gone and needs no answer.
                    drop(channel.send(&Event::Refused(error)));
                    return FAILED;
                }
                Stop::Disconnected => return FAILED,
            };
            drop(channel.send(&Event::Failed(error, code)));
            code
        }
    }
}

/// Why the process inside ends before the command has ended.
enum Stop {
    Failed(Error),
    /// The host does not allow namespaces.
    Refused(Error),
    /// The command could not be started. The number is the exit status that says so.
    NoCommand(Error, u8),
    /// The process outside is gone, or has closed the connection.
    Disconnected,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

type Outcome<T> = std::result::Result<T, Stop>;

/// Follows the protocol: builds the walls, runs the command, and waits for its end.
fn build_and_run(channel: &Channel, words: &[OsString]) -> Outcome<()> {
    // Signals of the terminal reach this process too, but are meant for the command.
    let blocked = SigSet::all();
    blocked.thread_block().map_err(io::Error::from).attempt(|| "block signals")?;
    let Order::Prepare(spec) = receive(channel)? else { return Err(unexpected()) };
    if spec.own_session {
        sys::process::new_session().attempt(|| "start a session of its own")?;
    }
    let view = if spec.elsewhere.is_some() {
        if spec.net.is_own() {
            let why = "without namespaces the command would have the network of the host";
            return Err(Error::new(Kind::Failed, "limit the network of the command", why).into());
        }
        prctl::set_child_subreaper(true)
            .map_err(io::Error::from)
            .attempt(|| "become the subreaper of the command")?;
        None
    } else {
        match enter_view(channel, &spec)? {
            Some(view) => Some(view),
            // The child continues.
            None => return Ok(()),
        }
    };
    let Order::Served = receive(channel)? else { return Err(unexpected()) };
    let (walls, listener) = build_walls(&spec, view)?;
    channel.send_with(&Event::Ready(walls), listener.as_slice())?;
    // From here on only the process outside accepts connections on it.
    drop(listener);
    let Order::Run = receive(channel)? else { return Err(unexpected()) };
    let end = Init::start(channel, words)?.wait();
    if spec.elsewhere.is_some() {
        end_children(&[]);
    }
    end.map_err(Stop::from)
}

fn receive(channel: &Channel) -> Outcome<Order> {
    channel.receive()?.map(|(order, _)| order).ok_or(Stop::Disconnected)
}

fn unexpected() -> Stop {
    Stop::Failed(Error::new(
        Kind::Failed,
        "start the command",
        "the process outside sent an unexpected message",
    ))
}

/// A view that the first process of its pid namespace has entered.
struct Entered {
    inside: Vec<std::path::PathBuf>,
}

/// Creates the namespaces, the view and the mount, and forks. Returns None in the parent, which
/// stays outside the pid namespace.
fn enter_view(channel: &Channel, spec: &Spec) -> Outcome<Option<Entered>> {
    let map = || -> Result<()> {
        channel.send(&Event::Map)?;
        match channel.receive()? {
            Some((Order::Mapped, _)) => Ok(()),
            _ => Err(Error::new(
                Kind::Failed,
                "map the ids of the user namespace",
                "the process outside did not confirm it",
            )),
        }
    };
    let order = namespace::begin(spec.net.is_own(), map).map_err(Stop::Refused)?;
    // The device must be opened in this user namespace, and before the view covers `/dev`.
    let device = fuse::open_device()?;
    let plan = view::make(spec).map_err(refusal)?;
    // If the view is made first, the mount belongs to the user namespace outside, and every user of
    // the inner one may enter it.
    let all_users = order == EntryOrder::ViewFirst;
    let Handed { device, root, dev, .. } =
        fuse::hand_out(device, Path::new(&spec.base), all_users).map_err(refusal)?;
    channel.send_with(&Event::Mounted { dev, all_users }, &[device, root])?;
    namespace::complete(order, spec.net.is_own(), map).map_err(Stop::Refused)?;
    let name = namespace::name()?.into_os_string();
    match sys::process::fork_alone().attempt(|| "start the first process of the pid namespace")? {
        Some(child) => {
            channel.send(&Event::Started(child.as_raw(), name))?;
            Ok(None)
        }
        None => Ok(Some(Entered { inside: plan.inside })),
    }
}

/// Tells a host that does not allow these namespaces from any other failure.
fn refusal(error: Error) -> Stop {
    match error.errno.map(Errno::from_raw) {
        Some(Errno::EPERM | Errno::EACCES) => Stop::Refused(error),
        _ => Stop::Failed(error),
    }
}

/// Builds the walls that need a served sandbox. With a list of hosts, returns the listening socket
/// of the proxy.
fn build_walls(spec: &Spec, view: Option<Entered>) -> Result<(Walls, Option<OwnedFd>)> {
    let mut walls = Walls::default();
    let mut listener = None;
    let dir = match (&view, &spec.elsewhere) {
        (None, Some((mount, _))) => mount,
        _ => &spec.base,
    };
    if let Some(Entered { inside }) = &view {
        if spec.net.is_own() {
            sys::view::bring_loopback_up().attempt(|| "bring up the loopback interface")?;
        }
        if let Net::Allow(_) = spec.net {
            listener = Some(net::listen()?);
        }
        let own_proc = view::mount_proc()?;
        view::hide_inside(inside)?;
        streams::reopen_devices().attempt(|| "open the terminal and the devices of the view")?;
        walls.view = Some(ViewWall { own_proc, own_net: spec.net.is_own() });
    }
    std::env::set_current_dir(dir).attempt(|| format!("enter '{}'", Path::new(dir).display()))?;
    walls.landlock = walls::impose(spec, view.is_some())?;
    Ok((walls, listener))
}

/// The parent of the command and of every orphan.
struct Init<'a> {
    channel: &'a Channel,
    /// None when the command has ended, because its pid may be reused.
    command: Option<Pid>,
    ended: SignalFd,
}

impl Init<'_> {
    fn start<'a>(channel: &'a Channel, words: &[OsString]) -> Outcome<Init<'a>> {
        let attempt = || "wait for the command";
        let children = SigSet::from_iter([Signal::SIGCHLD]);
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let ended =
            SignalFd::with_flags(&children, flags).map_err(io::Error::from).attempt(attempt)?;
        let init = Init { channel, command: Some(spawn(words)?), ended };
        channel.send(&Event::Running)?;
        Ok(init)
    }

    /// Waits for the end of the command and reports it, then waits for the end of the connection.
    /// Reaps orphans meanwhile.
    fn wait(&mut self) -> Result<()> {
        let attempt = || "wait for the command";
        loop {
            let mut ready = [
                PollFd::new(self.ended.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.channel.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut ready, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(Error::io(attempt(), &error.into())),
            }
            let [children, orders] = ready.map(|fd| fd.any().unwrap_or(false));
            if children {
                while self.ended.read_signal().map_err(io::Error::from).attempt(attempt)?.is_some()
                {
                }
                self.reap()?;
            }
            if orders {
                match self.channel.receive()? {
                    Some((Order::Signal(number), _)) => self.signal(number),
                    Some((Order::Continue, _)) => self.continue_command(),
                    Some(_) => {}
                    None => return Ok(()),
                }
            }
        }
    }

    fn reap(&mut self) -> Result<()> {
        loop {
            let end = match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(()),
                Ok(WaitStatus::Exited(pid, code)) if Some(pid) == self.command => {
                    End::Exited(u8::try_from(code).unwrap_or(FAILED))
                }
                Ok(WaitStatus::Signaled(pid, signal, _)) if Some(pid) == self.command => {
                    End::Killed(u8::try_from(signal as i32).unwrap_or(0))
                }
                Ok(WaitStatus::Stopped(pid, signal)) if Some(pid) == self.command => {
                    self.channel.send(&Event::Stopped(signal as i32))?;
                    continue;
                }
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(error) => return Err(Error::io("wait for the command", &error.into())),
            };
            self.command = None;
            self.channel.send(&Event::Ended(end))?;
        }
    }

    fn signal(&self, number: i32) {
        if let (Some(command), Ok(signal)) = (self.command, Signal::try_from(number))
            && let Err(error) = kill(command, signal)
        {
            log::debug!("send {signal} to the command: {error}");
        }
    }

    /// Sends SIGCONT to the command and its process group. The shell outside continues its own job,
    /// which contains the command only if that is in the same process group.
    fn continue_command(&self) {
        let Some(command) = self.command else { return };
        let group = getpgid(Some(command)).unwrap_or(command);
        for target in [Pid::from_raw(-group.as_raw()), command] {
            if target.as_raw() != 0
                && let Err(error) = kill(target, Signal::SIGCONT)
            {
                log::debug!("continue the command: {error}");
            }
        }
    }
}

fn spawn(words: &[OsString]) -> Outcome<Pid> {
    let Some((name, arguments)) = words.split_first() else {
        return Err(Stop::NoCommand(Error::new(Kind::Usage, "run", "no command is given"), FAILED));
    };
    match sys::process::spawn_with_signals(Command::new(name).args(arguments)) {
        Ok(child) => Ok(Pid::from_raw(child.id().cast_signed())),
        Err(error) => {
            let code = code_of(&error);
            Err(Stop::NoCommand(
                Error::io(format!("run '{}'", OsStr::new(name).display()), &error),
                code,
            ))
        }
    }
}

fn code_of(error: &io::Error) -> u8 {
    match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
        Errno::ENOENT | Errno::ENOTDIR => NOT_FOUND,
        _ => CANNOT_EXECUTE,
    }
}

/// Kills every descendant of this process except the children in `spared` and theirs. Descendants
/// of a killed process become our children, because this process is their subreaper.
pub(super) fn end_children(spared: &[Pid]) {
    loop {
        let ended: Vec<Pid> =
            children().into_iter().filter(|child| !spared.contains(child)).collect();
        if ended.is_empty() {
            return;
        }
        for child in ended {
            if let Err(error) = kill(child, Signal::SIGKILL) {
                log::debug!("kill process {child}: {error}");
            }
            while waitpid(child, None) == Err(Errno::EINTR) {}
        }
    }
}

/// The children of this process. They are not reaped yet, so their pids are not reused.
pub(super) fn children() -> Vec<Pid> {
    let own = std::process::id();
    let listed = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter(|pid| parent_of(*pid) == Some(own)).map(Pid::from_raw).collect()
}

/// The parent of a process: the fourth field of proc_pid_stat(5). Fields are counted after the
/// name, which may contain any bytes.
fn parent_of(pid: i32) -> Option<u32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let behind = stat.rsplitn(2, |byte| *byte == b')').next()?;
    std::str::from_utf8(behind).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_command_differs_from_one_that_cannot_execute() {
        let code = |text: &str| match spawn(&[OsString::from(text)]) {
            Err(Stop::NoCommand(_, code)) => code,
            _ => 0,
        };
        assert_eq!(code("/nowhere/at/all"), NOT_FOUND);
        assert_eq!(code("no-such-command-anywhere"), NOT_FOUND);
        assert_eq!(code("/etc/passwd"), CANNOT_EXECUTE);
        assert_eq!(code("/"), CANNOT_EXECUTE);
        assert!(matches!(spawn(&[]), Err(Stop::NoCommand(_, FAILED))));
    }

    #[test]
    fn the_parent_of_a_process_is_read_from_proc() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(parent_of(own), Some(std::os::unix::process::parent_id()));
        assert_eq!(parent_of(i32::MAX), None);
    }
}
