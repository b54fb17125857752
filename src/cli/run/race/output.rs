//! Carries what the attempts write: line by line to the screen, or into memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use nix::fcntl::OFlag;
use nix::unistd::pipe2;

use super::screen::Screen;
use crate::error::{Attempt, Result};

/// The longest line that is printed as one, in bytes.
const LINE: usize = 64 << 10;
/// How much of the end of an output is kept in memory, in bytes.
const KEPT: usize = 64 << 10;

/// Where the output of a command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    /// To the screen.
    Screen,
    /// Its end stays in memory.
    Memory,
}

/// A thread that reads one output to its end.
pub(super) struct Reader(JoinHandle<Vec<u8>>);

impl Reader {
    /// Starts to read what attempt `number` writes into the returned pipe.
    ///
    /// # Errors
    /// Those of pipe(2), and of starting a thread.
    pub(super) fn start(screen: &Arc<Screen>, number: u32, to: To) -> Result<(Reader, OwnedFd)> {
        let attempt = || "read the output of an attempt";
        let (read_end, write_end) =
            pipe2(OFlag::O_CLOEXEC).map_err(io::Error::from).attempt(attempt)?;
        let screen = Arc::clone(screen);
        let read = move || match to {
            To::Screen => {
                lines(File::from(read_end), |line| screen.output(number, line));
                Vec::new()
            }
            To::Memory => end_of(File::from(read_end)),
        };
        let thread = Builder::new().name("output".to_owned()).spawn(read).attempt(attempt)?;
        Ok((Reader(thread), write_end))
    }

    /// Waits for the end of the output, and returns what is kept of it. No process has the pipe
    /// open any more.
    pub(super) fn finish(self) -> Vec<u8> {
        self.0.join().unwrap_or_default()
    }
}

/// Passes on each line without its newline. A line that is too long is passed on in pieces.
fn lines(from: impl Read, mut pass: impl FnMut(&[u8])) {
    let mut rest = Vec::new();
    chunks(from, |chunk| {
        rest.extend_from_slice(chunk);
        let mut start = 0;
        while let Some(piece) = rest.get(start..) {
            let newline = piece.iter().position(|byte| *byte == b'\n');
            let (len, skipped) = match newline {
                Some(at) if at <= LINE => (at, at + 1),
                Some(_) | None if piece.len() > LINE => (LINE, LINE),
                Some(_) | None => break,
            };
            pass(piece.get(..len).unwrap_or_default());
            start += skipped;
        }
        rest.drain(..start);
    });
    if !rest.is_empty() {
        pass(&rest);
    }
}

/// The last bytes.
fn end_of(from: impl Read) -> Vec<u8> {
    let mut kept = Vec::new();
    chunks(from, |chunk| {
        kept.extend_from_slice(chunk);
        let extra = kept.len().saturating_sub(KEPT);
        kept.drain(..extra);
    });
    kept
}

fn chunks(mut from: impl Read, mut pass: impl FnMut(&[u8])) {
    let mut buffer = vec![0; LINE];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(len) => pass(buffer.get(..len).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log::warn!("read the output of an attempt: {error}");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_passed_on_by_lines_and_long_ones_in_pieces() {
        let split = |text: &[u8]| {
            let mut found = Vec::new();
            lines(text, |line| found.push(line.to_vec()));
            found
        };
        assert_eq!(split(b""), Vec::<Vec<u8>>::new());
        assert_eq!(split(b"a\n\nb"), [&b"a"[..], b"", b"b"]);
        let long = [vec![b'x'; 2 * LINE + 5], b"\ny\n".to_vec()].concat();
        let found = split(&long);
        assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [LINE, LINE, 5, 1]);
    }

    #[test]
    fn only_the_end_of_an_output_is_kept() {
        let long = [vec![b'x'; 3 * KEPT], b"\n7\n".to_vec()].concat();
        let kept = end_of(&long[..]);
        assert!(kept.len() == KEPT && kept.ends_with(b"x\n7\n"));
    }
}
