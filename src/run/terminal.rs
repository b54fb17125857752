//! The terminal that this process shares with the command.
//!
//! A command with job control, for example a shell, makes itself or its jobs the foreground group
//! of the terminal. When it has stopped or ended, this process takes the foreground back and
//! restores the modes, so that the user can answer its questions. It never takes the foreground
//! from another program: a background job leaves the terminal to the shell.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::signal::killpg;
use nix::sys::termios::{FlowArg, SetArg, Termios, tcflow, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The controlling terminal of this process, and its modes before the command started. SIGTTOU must
/// be blocked.
#[derive(Debug)]
pub(super) struct Terminal {
    device: File,
    modes: Termios,
}

/// The path of the terminal among the standard streams of this process.
pub(super) fn path() -> Option<PathBuf> {
    let standard = [
        (0, io::stdin().is_terminal()),
        (1, io::stdout().is_terminal()),
        (2, io::stderr().is_terminal()),
    ];
    let (number, _) = standard.into_iter().find(|(_, is)| *is)?;
    std::fs::read_link(format!("/proc/self/fd/{number}")).ok().filter(|path| path.is_absolute())
}

/// Resumes output to the terminal if a command has suspended it (tcflow(3)). Otherwise every writer
/// would block for ever. Output that a person suspends by a key stays suspended: the kernel tells
/// the two apart.
pub(super) fn resume_output() {
    let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
    for stream in [input.as_fd(), output.as_fd(), error.as_fd()] {
        match tcflow(stream, FlowArg::TCOON) {
            // Not a terminal, or a closed descriptor.
            Ok(()) | Err(Errno::ENOTTY | Errno::EBADF) => {}
            Err(error) => log::debug!("resume the output of the terminal: {error}"),
        }
    }
}

impl Terminal {
    /// The controlling terminal, if there is one.
    pub(super) fn of_this_process() -> Option<Terminal> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
        let modes = tcgetattr(&device).ok()?;
        Some(Terminal { device, modes })
    }

    /// Makes our group the foreground, if the foreground group belongs to the command or is gone.
    /// Returns the former foreground group.
    pub(super) fn take_foreground(&self, is_of_command: impl Fn(Pid) -> bool) -> Option<Pid> {
        let front = tcgetpgrp(&self.device).ok()?;
        let is_gone = || killpg(front, None) == Err(Errno::ESRCH);
        if front == getpgrp() || !(is_of_command(front) || is_gone()) {
            return None;
        }
        self.set_foreground(getpgrp());
        Some(front)
    }

    /// Makes a group the foreground, if ours is.
    pub(super) fn return_foreground(&self, group: Pid) {
        if self.is_foreground() {
            self.set_foreground(group);
        }
    }

    fn is_foreground(&self) -> bool {
        tcgetpgrp(&self.device).is_ok_and(|front| front == getpgrp())
    }

    fn set_foreground(&self, group: Pid) {
        if let Err(error) = tcsetpgrp(&self.device, group) {
            log::debug!("make group {group} the foreground of the terminal: {error}");
        }
    }

    /// Restores the modes from before the command, if our group is the foreground.
    pub(super) fn restore(&self) {
        if self.is_foreground()
            && let Err(error) = tcsetattr(&self.device, SetArg::TCSADRAIN, &self.modes)
        {
            log::debug!("restore the modes of the terminal: {error}");
        }
    }
}
