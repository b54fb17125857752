//! The only code that writes to the terminal.
//!
//! Results go to standard output, everything else to standard error. A reader that closes the pipe
//! (`jailfs log | head`) is not an error.

use std::io::{self, BufWriter, IsTerminal, Stdout, Write};

use super::format;
use crate::error::{Attempt, Error, Result};
use crate::sandbox::Changes;

/// Standard output, buffered. Call [`Out::finish`] at the end.
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

    /// Writes `text` and a newline. Escapes characters that act on a terminal.
    pub(super) fn line(&mut self, text: &str) {
        self.bytes(format::harmless(text.as_bytes()).as_bytes());
        self.bytes(b"\n");
    }

    /// Writes a patch: unchanged for a program, but escaped on a terminal, because the file content
    /// in it could act on the terminal.
    pub(super) fn patch(&mut self, patch: &[u8]) {
        if self.is_terminal {
            self.bytes(format::harmless(patch).as_bytes())
        } else {
            self.bytes(patch)
        }
    }

    /// Writes the patches of changes. Before the patch of a path that would act outside the sandbox
    /// it writes a warning line, which `git apply` and `patch` skip.
    ///
    /// # Errors
    /// The list of changes cannot be read.
    pub(super) fn patches(&mut self, changes: &Changes) -> Result<()> {
        for change in changes {
            let change = change?;
            if change.danger.is_some() {
                self.line(&format!("jailfs: {}{}", change.path, format::danger(&change)));
            }
            if let Some(patch) = &change.patch {
                self.patch(patch);
            }
        }
        Ok(())
    }

    /// Writes bytes unchanged.
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
    /// A write failed, except because the reader has closed the pipe.
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

/// Prints a message for people.
pub(super) fn note(text: &str) {
    to_stderr(&format!("jailfs: {text}\n"));
}

/// Prints a line of a list to standard error.
pub(super) fn detail(text: &str) {
    to_stderr(&format!("{text}\n"));
}

/// Asks a question; the answer is typed after it.
pub(super) fn question(text: &str) {
    to_stderr(&format!("jailfs: {text} "));
}

/// Shows a line of progress in the place of the last one, if standard error is a terminal. An empty
/// text removes it.
#[cfg(feature = "registry")]
pub(super) fn progress(text: &str) {
    if io::stderr().is_terminal() {
        let line = format!("\r\x1b[K{}", format::harmless(text.as_bytes()));
        drop(io::stderr().lock().write_all(line.as_bytes()));
    }
}

/// Prints an error and its hint.
pub(super) fn error(error: &Error) {
    let mut text = format!("jailfs: error: {error}\n");
    if let Some(hint) = &error.hint {
        text.push_str("hint: ");
        text.push_str(hint);
        text.push('\n');
    }
    to_stderr(&text);
}

/// Writes to standard error with escapes: names, messages and errors may come from the command.
fn to_stderr(text: &str) {
    let text = format::harmless(text.as_bytes());
    // A failure to write to standard error cannot be reported anywhere.
    drop(io::stderr().lock().write_all(text.as_bytes()));
}
