//! Asks the user which attempt wins.

use std::io::{self, BufRead};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::termios::{FlushArg, tcflush};

use super::result::Finished;
use crate::cli::out;
use crate::error::{Attempt, Error, Result};
use crate::run::Interrupts;

/// The user's answer.
pub(super) enum Answer {
    /// The attempt at this place of the list, or none.
    Winner(Option<usize>),
    /// A signal came instead.
    Interrupted(Signal),
}

/// Asks until there is a valid answer. The end of the input means none.
pub(super) fn ask(finished: &[Finished], interrupts: &Interrupts) -> Result<Answer> {
    if !finished.iter().any(|one| one.state.is_some()) {
        return Ok(Answer::Winner(None));
    }
    let mut answer = String::new();
    loop {
        // Input from before was not meant for the question.
        if let Err(error) = tcflush(io::stdin(), FlushArg::TCIFLUSH) {
            log::debug!("discard typed input: {error}");
        }
        out::question("continue from which attempt? its number, or [n]one");
        if let Some(signal) = wait_for_line(interrupts)? {
            return Ok(Answer::Interrupted(signal));
        }
        answer.clear();
        if io::stdin().lock().read_line(&mut answer).attempt(|| "read the answer")? == 0 {
            return Ok(Answer::Winner(None));
        }
        let answer = answer.trim();
        if matches!(answer, "n" | "none") {
            return Ok(Answer::Winner(None));
        }
        let number = answer.parse::<u32>().ok();
        let named = finished.iter().position(|one| Some(one.number) == number);
        match named {
            Some(at) if finished.get(at).is_some_and(|one| one.state.is_some()) => {
                return Ok(Answer::Winner(Some(at)));
            }
            Some(_) => out::note("that attempt has no result"),
            None => {}
        }
    }
}

/// Waits for a line of the terminal, or a signal.
fn wait_for_line(interrupts: &Interrupts) -> Result<Option<Signal>> {
    loop {
        let stdin = io::stdin();
        let mut ready = [
            PollFd::new(stdin.as_fd(), PollFlags::POLLIN),
            PollFd::new(interrupts.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut ready, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(Error::io("wait for the answer", &error.into())),
        }
        if let Some(signal) = interrupts.next()? {
            return Ok(Some(signal));
        }
        if ready.first().is_some_and(|fd| fd.any().unwrap_or(true)) {
            return Ok(None);
        }
    }
}
