//! Streams of requests that carry an archive: pipes between a command and the sandbox.
//!
//! * An export writes one tar archive to the pipe. It is complete if the reply says so.
//! * A description is in frames: one for each chunk, the end of an archive, the tree blob.
//! * An import reads frames, because the sender knows only at the end whether all digests are
//!   right: `length u32 little-endian | bytes`. Length 0 ends an archive, and `COMMIT` ends the
//!   import. A pipe that ends before that is an import that failed.
//! * Only pipes are taken. A file could lie in our own mount, and wait for us.
//! * A pipe is never waited for longer than `STALLED`, and not after the sandbox is asked to
//!   close.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::archive::{Chunk, ChunkSink};
use crate::timeline::import::Archives;

/// The length that stands for the end of an import.
const COMMIT: u32 = u32::MAX;
/// The longest frame, in bytes.
const MAX_FRAME: usize = 256 << 10;
/// Bytes that a pipe holds: the most that an ordinary user may ask for.
const PIPE: i32 = 1 << 20;
/// How long the other end of a pipe may do nothing.
const STALLED: Duration = Duration::from_secs(600);
/// How often a wait looks whether it should end, in milliseconds.
const POLL: u16 = 500;

/// A pipe that travels beside a request. It is taken once.
#[derive(Clone, Default)]
pub struct Stream(Arc<Mutex<Option<File>>>);

impl Stream {
    /// A stream over one end of a pipe, which gets a larger buffer if the kernel allows it.
    pub fn new(end: impl Into<OwnedFd>) -> Stream {
        let end = end.into();
        if let Err(error) = fcntl(&end, FcntlArg::F_SETPIPE_SZ(PIPE)) {
            log::debug!("enlarge a pipe: {error}");
        }
        Stream(Arc::new(Mutex::new(Some(File::from(end)))))
    }

    /// Puts in the pipe that came with the request.
    pub(crate) fn set(&self, end: OwnedFd) {
        *self.0.lock() = Some(File::from(end));
    }

    /// Takes the pipe out, to hand it to another process.
    pub(crate) fn take(&self) -> Option<OwnedFd> {
        self.0.lock().take().map(OwnedFd::from)
    }

    fn pipe(&self, attempt: &str) -> Result<File> {
        let pipe = self.0.lock().take();
        let is_pipe = |file: &File| file.metadata().is_ok_and(|m| m.file_type().is_fifo());
        let pipe = pipe.filter(is_pipe);
        let pipe = pipe.ok_or_else(|| Error::new(Kind::Failed, attempt, "there is no pipe"))?;
        let flags = fcntl(&pipe, FcntlArg::F_GETFL).map_err(io::Error::from);
        let flags = OFlag::from_bits_retain(flags.attempt(|| attempt)?) | OFlag::O_NONBLOCK;
        fcntl(&pipe, FcntlArg::F_SETFL(flags)).map_err(io::Error::from).attempt(|| attempt)?;
        Ok(pipe)
    }

    /// The end to write an archive to.
    pub(super) fn sink<'a>(&self, go: &'a dyn Fn() -> bool) -> Result<impl Write + use<'a>> {
        let pipe = Pipe { file: self.pipe("write the archive")?, go };
        Ok(io::BufWriter::with_capacity(MAX_FRAME, pipe))
    }

    /// The end to read archives from.
    pub(super) fn frames<'a>(
        &self,
        go: &'a dyn Fn() -> bool,
    ) -> Result<Frames<impl Read + use<'a>>> {
        let pipe = Pipe { file: self.pipe("read the archive")?, go };
        Ok(Frames::new(io::BufReader::with_capacity(MAX_FRAME, pipe)))
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stream")
    }
}

/// Requests are compared without their streams.
impl PartialEq for Stream {
    fn eq(&self, _: &Stream) -> bool {
        true
    }
}

impl Eq for Stream {}

/// A pipe that is not waited for endlessly.
struct Pipe<'a> {
    file: File,
    go: &'a dyn Fn() -> bool,
}

impl Pipe<'_> {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let begun = Instant::now();
        while (self.go)() {
            let mut ready = [PollFd::new(self.file.as_fd(), flags)];
            match poll(&mut ready, PollTimeout::from(POLL)) {
                Ok(0) if begun.elapsed() > STALLED => {
                    return Err(io::Error::other("the other end of the pipe does nothing"));
                }
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other("the sandbox is being closed"))
    }

    fn again<T>(
        &mut self,
        flags: PollFlags,
        mut step: impl FnMut(&mut File) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match step(&mut self.file) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(flags)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}

impl Read for Pipe<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.again(PollFlags::POLLIN, |file| file.read(buffer))
    }
}

impl Write for Pipe<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.again(PollFlags::POLLOUT, |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the archives of an import.
pub struct FrameWriter<W: Write> {
    to: W,
}

impl<W: Write> FrameWriter<W> {
    /// Writes to a pipe.
    pub fn new(to: W) -> FrameWriter<W> {
        FrameWriter { to }
    }

    /// Writes bytes of the current archive.
    ///
    /// # Errors
    /// Those of writing.
    pub fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        for chunk in bytes.chunks(MAX_FRAME) {
            let len = u32::try_from(chunk.len()).unwrap_or(0);
            self.to.write_all(&len.to_le_bytes())?;
            self.to.write_all(chunk)?;
        }
        Ok(())
    }

    /// Ends an archive.
    ///
    /// # Errors
    /// Those of writing.
    pub fn end_archive(&mut self) -> io::Result<()> {
        self.to.write_all(&0u32.to_le_bytes())
    }

    /// Ends the import: everything was sent and is right.
    ///
    /// # Errors
    /// Those of writing.
    pub fn commit(mut self) -> io::Result<()> {
        self.to.write_all(&COMMIT.to_le_bytes())?;
        self.to.flush()
    }
}

/// Sends each chunk of a description as one frame.
impl<W: Write> ChunkSink for FrameWriter<W> {
    fn put(&mut self, chunk: Chunk<'_>) -> Result<()> {
        self.bytes(chunk.bytes()).attempt(|| "write the state")
    }
}

/// A part of what [`FrameWriter`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A frame with bytes.
    Bytes,
    /// The end of an archive.
    End,
    /// The end of everything.
    Commit,
}

/// Reads frames one by one.
pub struct FrameReader<R> {
    from: R,
}

impl<R: Read> FrameReader<R> {
    /// Reads from a pipe.
    pub fn new(from: R) -> FrameReader<R> {
        FrameReader { from }
    }

    /// Reads the next part. `bytes` becomes those of the frame.
    ///
    /// # Errors
    /// The sender stopped early, or a frame is too long.
    pub fn next(&mut self, bytes: &mut Vec<u8>) -> io::Result<Part> {
        bytes.clear();
        let mut len = [0; 4];
        self.from.read_exact(&mut len).map_err(ended_early)?;
        match u32::from_le_bytes(len) {
            0 => Ok(Part::End),
            COMMIT => Ok(Part::Commit),
            len => {
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                if len > MAX_FRAME {
                    return Err(io::Error::other("a frame is too long"));
                }
                bytes.resize(len, 0);
                self.from.read_exact(bytes).map_err(ended_early)?;
                Ok(Part::Bytes)
            }
        }
    }
}

fn ended_early(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::other("the sender stopped before the end"),
        _ => error,
    }
}

/// Reads the archives of an import.
pub(super) struct Frames<R> {
    from: R,
    /// Bytes of the current frame that were not read.
    left: usize,
    state: Position,
}

/// Where in the frames the reader is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    Between,
    Inside,
    Committed,
}

impl<R: Read> Frames<R> {
    fn new(from: R) -> Frames<R> {
        Frames { from, left: 0, state: Position::Between }
    }

    /// Begins the next frame. False at the end of an archive.
    fn frame(&mut self) -> io::Result<bool> {
        let mut len = [0; 4];
        self.from.read_exact(&mut len).map_err(ended_early)?;
        match u32::from_le_bytes(len) {
            0 => {
                self.state = Position::Between;
                Ok(false)
            }
            COMMIT => {
                self.state = Position::Committed;
                Ok(false)
            }
            len => {
                self.left = usize::try_from(len).unwrap_or(usize::MAX);
                self.state = Position::Inside;
                match self.left > MAX_FRAME {
                    true => Err(io::Error::other("a frame is too long")),
                    false => Ok(true),
                }
            }
        }
    }
}

impl<R: Read> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.state != Position::Inside || buffer.is_empty() {
            return Ok(0);
        }
        if self.left == 0 && !self.frame()? {
            return Ok(0);
        }
        let most = self.left.min(buffer.len());
        let got = self.from.read(buffer.get_mut(..most).unwrap_or_default())?;
        if got == 0 {
            return Err(io::Error::other("the sender stopped before the end"));
        }
        self.left -= got;
        Ok(got)
    }
}

impl<R: Read> Archives for Frames<R> {
    fn next(&mut self) -> Result<bool> {
        if self.state == Position::Committed {
            return Ok(false);
        }
        // An archive without bytes is no archive, which its reader says.
        self.frame().attempt(|| "receive the archive")?;
        Ok(self.state != Position::Committed)
    }

    fn bytes(&mut self) -> &mut dyn Read {
        self
    }

    fn finish(&mut self) -> Result<()> {
        io::copy(self, &mut io::sink()).map(drop).attempt(|| "receive the archive")?;
        match self.state {
            Position::Committed => {
                Err(Error::new(Kind::Failed, "receive the archive", "an archive has no end"))
            }
            Position::Between | Position::Inside => Ok(()),
        }
    }
}
