//! The only place that writes to the terminal.
//!
//! What was asked for goes to the standard output, everything about it to the standard error. A reader that stops
//! reading (`jailfs log | head`) is no error.

use std::io::{self, BufWriter, IsTerminal, Stdout, Write};

use super::show;
use crate::error::{Attempt, Error, Result};

/// The standard output, buffered. Call [`Out::finish`] at the end.
pub(super) struct Out {
    to: BufWriter<Stdout>,
    is_terminal: bool,
    failed: Option<io::Error>,
}

impl Out {
    pub(super) fn new() -> Out {
        let to = io::stdout();
        Out { is_terminal: to.is_terminal(), to: BufWriter::new(to), failed: None }
    }

    /// Writes `text` and the end of the line. What acts on a terminal is escaped.
    pub(super) fn line(&mut self, text: &str) {
        self.bytes(show::harmless(text.as_bytes()).as_bytes());
        self.bytes(b"\n");
    }

    /// Writes a patch: as it is for a program, but on a terminal so that what stands in the files cannot act on that.
    pub(super) fn patch(&mut self, patch: &[u8]) {
        if self.is_terminal { self.bytes(show::harmless(patch).as_bytes()) } else { self.bytes(patch) }
    }

    /// Writes bytes as they are.
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        if self.failed.is_none()
            && let Err(error) = self.to.write_all(bytes)
        {
            self.failed = Some(error);
        }
    }

    /// Flushes.
    ///
    /// # Errors
    /// Something could not be written, for another reason than that nobody reads.
    pub(super) fn finish(mut self) -> Result<()> {
        let result = match self.failed.take() {
            Some(error) => Err(error),
            None => self.to.flush(),
        };
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result.attempt(|| "write the output"),
        }
    }
}

/// Tells the person something beside the output.
pub(super) fn note(text: &str) {
    to_stderr(&format!("jailfs: {text}\n"));
}

/// Writes a line of a list beside the output.
pub(super) fn detail(text: &str) {
    to_stderr(&format!("{text}\n"));
}

/// Asks on the terminal; the answer stands behind the question.
pub(super) fn question(text: &str) {
    to_stderr(&format!("jailfs: {text} "));
}

/// Says what went wrong.
pub(super) fn error(error: &Error) {
    let mut text = format!("jailfs: error: {error}\n");
    if let Some(hint) = &error.hint {
        text.push_str("hint: ");
        text.push_str(hint);
        text.push('\n');
    }
    to_stderr(&text);
}

/// Writes text in which what acts on a terminal is escaped: names, messages and errors come from the command, too.
fn to_stderr(text: &str) {
    let text = show::harmless(text.as_bytes());
    // Nobody is left to tell that the standard error cannot be written.
    drop(io::stderr().lock().write_all(text.as_bytes()));
}
