//! The side of the command: puts the walls up, starts it, and waits for it.
//!
//! This is the program again, started by the process outside, with one thread. With namespaces it makes them, mounts the
//! sandbox, and forks: the child is the first process of the pid namespace, and when that one ends the kernel ends all
//! others in it. Without namespaces it is the parent that orphans come back to, and ends them itself.
//!
//! Nothing here is printed: what goes wrong is told to the process outside.

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

use super::child::{CANNOT_EXECUTE, End, NOT_FOUND};
use super::namespace::{self, Way};
use super::net::{self, Net};
use super::streams;
use super::talk::{Line, News, Order, Spec};
use super::view;
use super::walls::{self, ViewWall, Walls};
use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::{self, Handed};
use crate::sys;

/// The status when jailfs failed and not the command.
const FAILED: u8 = 125;

/// The life of the process that the hidden verb starts; what it returns is the status to exit with. `socket` is the
/// number of the connection to the process outside. The process must have one thread.
pub fn become_command(socket: RawFd, words: &[OsString]) -> u8 {
    let Ok(socket) = sys::process::inherited(socket) else { return FAILED };
    let line = Line::new(socket);
    match live(&line, words) {
        Ok(()) => 0,
        Err(stop) => {
            let (error, code) = match stop {
                Stop::Failed(error) => (error, FAILED),
                Stop::NoCommand(error, code) => (error, code),
                Stop::Refused(error) => {
                    // If nobody hears it, nobody needs it.
                    drop(line.say(&News::Refused(error)));
                    return FAILED;
                }
                Stop::Alone => return FAILED,
            };
            drop(line.say(&News::Failed(error, code)));
            code
        }
    }
}

/// Why it did not come to the end of a command.
enum Stop {
    Failed(Error),
    /// Namespaces are not to be had here.
    Refused(Error),
    /// The command could not be started; the status that says so.
    NoCommand(Error, u8),
    /// The process outside is gone, or has called it off.
    Alone,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

type Step<T> = std::result::Result<T, Stop>;

fn live(line: &Line, words: &[OsString]) -> Step<()> {
    // A terminal sends its signals to this process too; they are for the command.
    let blocked = SigSet::all();
    blocked.thread_block().map_err(io::Error::from).attempt(|| "block signals")?;
    let Order::Prepare(spec) = hear(line)? else { return Err(out_of_turn()) };
    let view = if spec.elsewhere.is_some() {
        if spec.net.is_own() {
            let why = "without namespaces the command would have the network of the host";
            return Err(Error::new(Kind::Failed, "limit the network of the command", why).into());
        }
        prctl::set_child_subreaper(true)
            .map_err(io::Error::from)
            .attempt(|| "become the parent of orphans")?;
        None
    } else {
        match enter_view(line, &spec)? {
            Some(view) => Some(view),
            // The child goes on.
            None => return Ok(()),
        }
    };
    let Order::Served = hear(line)? else { return Err(out_of_turn()) };
    let (walls, listener) = put_up(&spec, view)?;
    line.say_with(&News::Ready(walls), listener.as_slice())?;
    // From here on only the process outside accepts on it.
    drop(listener);
    let Order::Run = hear(line)? else { return Err(out_of_turn()) };
    let end = Init::start(line, words)?.wait();
    if spec.elsewhere.is_some() {
        end_children(&[]);
    }
    end.map_err(Stop::from)
}

fn hear(line: &Line) -> Step<Order> {
    line.hear()?.map(|(order, _)| order).ok_or(Stop::Alone)
}

fn out_of_turn() -> Stop {
    Stop::Failed(Error::new(Kind::Failed, "start the command", "the process outside spoke out of turn"))
}

/// A view that was entered by the first process of its pid namespace.
struct Entered {
    inside: Vec<std::path::PathBuf>,
}

/// Makes the namespaces, the view and the mount, and forks. None in the process that stays outside the pid namespace.
fn enter_view(line: &Line, spec: &Spec) -> Step<Option<Entered>> {
    let map = || -> Result<()> {
        line.say(&News::Map)?;
        match line.hear()? {
            Some((Order::Mapped, _)) => Ok(()),
            _ => Err(Error::new(Kind::Failed, "map the numbers of the user namespace", "it was not done")),
        }
    };
    let way = namespace::begin(spec.net.is_own(), map).map_err(Stop::Refused)?;
    // In this user namespace, and before the view covers it.
    let device = fuse::open_device()?;
    let plan = view::make(spec).map_err(refusal)?;
    // Before the user namespace where there is a choice: then every user in it may enter.
    let all_users = way == Way::ViewFirst;
    let Handed { device, root, dev, .. } =
        fuse::hand_out(device, Path::new(&spec.base), all_users).map_err(refusal)?;
    line.say_with(&News::Mounted { dev, all_users }, &[device, root])?;
    namespace::complete(way, spec.net.is_own(), map).map_err(Stop::Refused)?;
    let name = namespace::name()?.into_os_string();
    match sys::process::fork_alone().attempt(|| "start the first process of the pid namespace")? {
        Some(child) => {
            line.say(&News::Started(child.as_raw(), name))?;
            Ok(None)
        }
        None => Ok(Some(Entered { inside: plan.inside })),
    }
}

/// Whether an error says that the host does not let these namespaces do what they are for.
fn refusal(error: Error) -> Stop {
    match error.errno.map(Errno::from_raw) {
        Some(Errno::EPERM | Errno::EACCES) => Stop::Refused(error),
        _ => Stop::Failed(error),
    }
}

/// Puts up what is left when the sandbox is served. With a list of hosts, the listening socket of the proxy is returned.
fn put_up(spec: &Spec, view: Option<Entered>) -> Result<(Walls, Option<OwnedFd>)> {
    let mut walls = Walls::default();
    let mut listener = None;
    let dir = match (&view, &spec.elsewhere) {
        (None, Some((mount, _))) => mount,
        _ => &spec.base,
    };
    if let Some(Entered { inside }) = &view {
        if spec.net.is_own() {
            sys::view::bring_loopback_up().attempt(|| "switch on the loopback")?;
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
    walls.landlock = walls::take_on(spec, view.is_some())?;
    Ok((walls, listener))
}

/// The process that the command, and every orphan, has as its parent.
struct Init<'a> {
    line: &'a Line,
    /// None when it has ended: then its number can be another's.
    command: Option<Pid>,
    ended: SignalFd,
}

impl Init<'_> {
    fn start<'a>(line: &'a Line, words: &[OsString]) -> Step<Init<'a>> {
        let attempt = || "wait for the command";
        let children = SigSet::from_iter([Signal::SIGCHLD]);
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let ended = SignalFd::with_flags(&children, flags).map_err(io::Error::from).attempt(attempt)?;
        let init = Init { line, command: Some(spawn(words)?), ended };
        line.say(&News::Runs)?;
        Ok(init)
    }

    /// Waits for the end of the command and tells it; then for the end of the connection. Orphans are reaped meanwhile.
    fn wait(&mut self) -> Result<()> {
        let attempt = || "wait for the command";
        loop {
            let mut ready = [
                PollFd::new(self.ended.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.line.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut ready, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(Error::io(attempt(), &error.into())),
            }
            let [children, orders] = ready.map(|fd| fd.any().unwrap_or(false));
            if children {
                while self.ended.read_signal().map_err(io::Error::from).attempt(attempt)?.is_some() {}
                self.reap()?;
            }
            if orders {
                match self.line.hear()? {
                    Some((Order::Signal(number), _)) => self.signal(number),
                    Some((Order::Continue, _)) => self.go_on(),
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
                    self.line.say(&News::Stopped(signal as i32))?;
                    continue;
                }
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(error) => return Err(Error::io("wait for the command", &error.into())),
            };
            self.command = None;
            self.line.say(&News::Ended(end))?;
        }
    }

    fn signal(&self, number: i32) {
        if let (Some(command), Ok(signal)) = (self.command, Signal::try_from(number))
            && let Err(error) = kill(command, signal)
        {
            log::debug!("hand {signal} to the command: {error}");
        }
    }

    /// The shell outside lets its job go on, which reaches the command only if it is in the same process group.
    fn go_on(&self) {
        let Some(command) = self.command else { return };
        let group = getpgid(Some(command)).unwrap_or(command);
        for target in [Pid::from_raw(-group.as_raw()), command] {
            if target.as_raw() != 0
                && let Err(error) = kill(target, Signal::SIGCONT)
            {
                log::debug!("let the command go on: {error}");
            }
        }
    }
}

fn spawn(words: &[OsString]) -> Step<Pid> {
    let Some((name, arguments)) = words.split_first() else {
        return Err(Stop::NoCommand(Error::new(Kind::Usage, "run", "no command is given"), FAILED));
    };
    match sys::process::spawn_with_signals(Command::new(name).args(arguments)) {
        Ok(child) => Ok(Pid::from_raw(child.id().cast_signed())),
        Err(error) => {
            let code = code_of(&error);
            Err(Stop::NoCommand(Error::io(format!("run '{}'", OsStr::new(name).display()), &error), code))
        }
    }
}

fn code_of(error: &io::Error) -> u8 {
    match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
        Errno::ENOENT | Errno::ENOTDIR => NOT_FOUND,
        _ => CANNOT_EXECUTE,
    }
}

/// Ends every process that came from this one, but for the children in `spared` and theirs: those below a process that is ended
/// become our own children, because we are their subreaper.
pub(super) fn end_children(spared: &[Pid]) {
    loop {
        let ended: Vec<Pid> = children().into_iter().filter(|child| !spared.contains(child)).collect();
        if ended.is_empty() {
            return;
        }
        for child in ended {
            if let Err(error) = kill(child, Signal::SIGKILL) {
                log::debug!("end process {child}: {error}");
            }
            while waitpid(child, None) == Err(Errno::EINTR) {}
        }
    }
}

/// The children of this process. They are not reaped yet, so their numbers are theirs.
pub(super) fn children() -> Vec<Pid> {
    let own = std::process::id();
    let listed = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter(|pid| parent_of(*pid) == Some(own)).map(Pid::from_raw).collect()
}

/// The fourth field of proc_pid_stat(5), counted behind the name, which can have any bytes.
fn parent_of(pid: i32) -> Option<u32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let behind = stat.rsplitn(2, |byte| *byte == b')').next()?;
    std::str::from_utf8(behind).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_cannot_start_is_told_apart() {
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
    fn parents_are_known() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(parent_of(own), Some(std::os::unix::process::parent_id()));
        assert_eq!(parent_of(i32::MAX), None);
    }
}
