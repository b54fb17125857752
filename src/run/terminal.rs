//! The terminal that this process and the command share.
//!
//! A command that does job control, a shell for one, makes itself or its jobs the terminal's foreground. When it has stopped or
//! ended, the terminal is to be ours again, as it was, or our questions could not be answered.

use std::fs::{File, OpenOptions};

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// A terminal in whose foreground we were when the command was started.
#[derive(Debug)]
pub(super) struct Terminal {
    device: File,
    modes: Termios,
}

impl Terminal {
    /// The controlling terminal of this process, if it is in its foreground.
    pub(super) fn of_this_process() -> Option<Terminal> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
        let modes = tcgetattr(&device).ok()?;
        (tcgetpgrp(&device).ok()? == getpgrp()).then_some(Terminal { device, modes })
    }

    /// Makes our group the foreground; which group was, if another. SIGTTOU must be blocked.
    pub(super) fn take_back(&self) -> Option<Pid> {
        let front = tcgetpgrp(&self.device).ok()?;
        if front == getpgrp() {
            return None;
        }
        self.give_to(getpgrp());
        Some(front)
    }

    /// Makes a group the foreground, if we are it.
    pub(super) fn give_to(&self, group: Pid) {
        let is_ours = tcgetpgrp(&self.device).is_ok_and(|front| front == getpgrp());
        if (is_ours || group == getpgrp())
            && let Err(error) = tcsetpgrp(&self.device, group)
        {
            log::debug!("give the terminal to group {group}: {error}");
        }
    }

    /// Makes it what it was when the command was started.
    pub(super) fn restore(&self) {
        self.take_back();
        if let Err(error) = tcsetattr(&self.device, SetArg::TCSADRAIN, &self.modes) {
            log::debug!("restore the modes of the terminal: {error}");
        }
    }
}
