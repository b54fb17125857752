//! The terminal that this process and the command share.
//!
//! A command that does job control, a shell for one, makes itself or its jobs the terminal's foreground. When it has stopped or
//! ended, the terminal is to be ours again, as it was, or our questions could not be answered. But never when somebody else
//! has it: a job in the background leaves the shell its terminal.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::signal::killpg;
use nix::sys::termios::{FlowArg, SetArg, Termios, tcflow, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The controlling terminal of this process, and its modes before the command. SIGTTOU must be blocked.
#[derive(Debug)]
pub(super) struct Terminal {
    device: File,
    modes: Termios,
}

/// The path of the terminal among the standard streams of this process.
pub(super) fn path() -> Option<PathBuf> {
    let standard =
        [(0, io::stdin().is_terminal()), (1, io::stdout().is_terminal()), (2, io::stderr().is_terminal())];
    let (number, _) = standard.into_iter().find(|(_, is)| *is)?;
    std::fs::read_link(format!("/proc/self/fd/{number}")).ok().filter(|path| path.is_absolute())
}

/// Lets what is written to the terminal appear again, if a command has held it back (tcflow(3)), or whoever writes there would
/// wait for ever. What a person holds back by a key stays so: the kernel tells the two apart.
pub(super) fn let_output_through() {
    let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
    for stream in [input.as_fd(), output.as_fd(), error.as_fd()] {
        match tcflow(stream, FlowArg::TCOON) {
            // No terminal, and nothing at all: then nothing is held back either.
            Ok(()) | Err(Errno::ENOTTY | Errno::EBADF) => {}
            Err(error) => log::debug!("let the output of the terminal through: {error}"),
        }
    }
}

impl Terminal {
    /// The terminal, if there is one.
    pub(super) fn of_this_process() -> Option<Terminal> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
        let modes = tcgetattr(&device).ok()?;
        Some(Terminal { device, modes })
    }

    /// Makes our group the foreground, if that is a group of the command, or none any more; which one it was.
    pub(super) fn take_back(&self, is_of_command: impl Fn(Pid) -> bool) -> Option<Pid> {
        let front = tcgetpgrp(&self.device).ok()?;
        let is_gone = || killpg(front, None) == Err(Errno::ESRCH);
        if front == getpgrp() || !(is_of_command(front) || is_gone()) {
            return None;
        }
        self.give_to(getpgrp());
        Some(front)
    }

    /// Makes a group the foreground, if we are it.
    pub(super) fn give_back(&self, group: Pid) {
        if self.is_ours() {
            self.give_to(group);
        }
    }

    fn is_ours(&self) -> bool {
        tcgetpgrp(&self.device).is_ok_and(|front| front == getpgrp())
    }

    fn give_to(&self, group: Pid) {
        if let Err(error) = tcsetpgrp(&self.device, group) {
            log::debug!("give the terminal to group {group}: {error}");
        }
    }

    /// Makes it what it was when the command was started, if it is ours.
    pub(super) fn restore(&self) {
        if self.is_ours()
            && let Err(error) = tcsetattr(&self.device, SetArg::TCSADRAIN, &self.modes)
        {
            log::debug!("restore the modes of the terminal: {error}");
        }
    }
}
