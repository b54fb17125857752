//! Frames and the greeting.
//!
//! The peer is not trusted. Memory is allocated only for bytes that have arrived, and a length
//! above the limit of its direction ends the connection.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};

/// The version of the protocol. It changes with every change of a request, reply or frame.
const VERSION: u32 = 11;
/// The maximum length of a request, in bytes: more than a command line can hold (128 KiB per
/// argument, 2 MiB in all).
pub(super) const MAX_REQUEST: u32 = 4 << 20;
/// The maximum length of a reply without its list of changes, in bytes.
pub(super) const MAX_REPLY: u32 = 256 << 20;
/// The maximum length of a piece of a list of changes, in bytes. The pieces follow the reply, and
/// an empty one ends them.
pub(super) const MAX_PIECE: u32 = 1 << 20;
/// The maximum length of a greeting. Those of older versions end with a path.
pub(super) const MAX_GREETING: u32 = 8 << 10;

const MAGIC: &[u8; 8] = b"jailfsct";

/// The first message of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The version that the daemon speaks.
    pub version: u32,
    /// The daemon's process.
    pub pid: u32,
}

impl Greeting {
    /// The greeting of this process.
    pub fn of_this_process() -> Greeting {
        Greeting { version: VERSION, pid: std::process::id() }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.version.to_le_bytes());
        bytes.extend_from_slice(&self.pid.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Greeting> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (version, rest) = rest.split_first_chunk::<4>()?;
        // Another version may add something.
        let (pid, _) = rest.split_first_chunk::<4>()?;
        Some(Greeting { version: u32::from_le_bytes(*version), pid: u32::from_le_bytes(*pid) })
    }

    /// Checks that the daemon speaks the version of this program.
    pub(super) fn check(&self) -> Result<()> {
        if self.version == VERSION {
            return Ok(());
        }
        Err(Error::new(
            Kind::Failed,
            format!("connect to the daemon (process {})", self.pid),
            format!(
                "it speaks version {} of the control protocol, this command version {VERSION}",
                self.version
            ),
        )
        .hint("use the jailfs that mounted it, or unmount and mount again with this one"))
    }
}

/// Why no frame was read.
#[derive(Debug)]
pub(super) enum FrameError {
    /// The peer closed the connection before the first byte of a frame.
    Closed,
    /// The length is above the limit.
    TooLong(u32),
    /// Reading failed, timed out, or ended in the middle of a frame.
    Io(io::Error),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> FrameError {
        FrameError::Io(error)
    }
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FrameError::Closed => f.write_str("the connection was closed"),
            FrameError::TooLong(len) => write!(f, "a message of {len} bytes is too long"),
            FrameError::Io(error) if error.kind() == io::ErrorKind::WouldBlock => {
                f.write_str("timed out")
            }
            FrameError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("the connection was closed in the middle of a message")
            }
            FrameError::Io(error) => write!(f, "{error}"),
        }
    }
}

/// Reads one frame of at most `max` bytes.
pub(super) fn read(from: &mut impl Read, max: u32) -> std::result::Result<Vec<u8>, FrameError> {
    let mut head = [0u8; 4];
    let mut have = 0;
    while let Some(rest) = head.get_mut(have..).filter(|rest| !rest.is_empty()) {
        match from.read(rest) {
            Ok(0) if have == 0 => return Err(FrameError::Closed),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(n) => have += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    let len = u32::from_le_bytes(head);
    if len > max {
        return Err(FrameError::TooLong(len));
    }
    let mut payload = Vec::new();
    let got = from.take(u64::from(len)).read_to_end(&mut payload)?;
    if got as u64 == u64::from(len) {
        Ok(payload)
    } else {
        Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())
    }
}

/// Writes one frame.
///
/// # Errors
/// `InvalidInput` for a payload above `max`, before any byte is written. Otherwise the error of the
/// stream.
pub(super) fn write(to: &mut impl Write, payload: &[u8], max: u32) -> io::Result<()> {
    let len = u32::try_from(payload.len()).ok().filter(|len| *len <= max);
    let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    to.write_all(&len.to_le_bytes())?;
    to.write_all(payload)?;
    to.flush()
}

/// A stream whose reads share one deadline, so that a peer cannot hold a thread by sending single
/// bytes.
pub(super) struct Until<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl<'a> Until<'a> {
    pub(super) fn new(stream: &'a UnixStream, limit: Duration) -> Until<'a> {
        Until { stream, end: Instant::now() + limit }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let mut wire = Vec::new();
        write(&mut wire, b"hello", 5).unwrap();
        write(&mut wire, b"", 5).unwrap();
        let mut from = &wire[..];
        assert_eq!(read(&mut from, 5).unwrap(), b"hello");
        assert_eq!(read(&mut from, 5).unwrap(), b"");
        assert!(matches!(read(&mut from, 5), Err(FrameError::Closed)));
        assert_eq!(write(&mut wire, b"hello!", 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_cut_or_oversized_frame_is_an_error() {
        assert!(matches!(read(&mut &[5, 0, 0][..], 9), Err(FrameError::Io(_))));
        assert!(matches!(read(&mut &[5, 0, 0, 0, b'x'][..], 9), Err(FrameError::Io(_))));
        assert!(matches!(
            read(&mut &[255, 255, 255, 255, 0][..], 9),
            Err(FrameError::TooLong(u32::MAX))
        ));
    }

    #[test]
    fn the_greeting_has_a_fixed_layout() {
        let greeting = Greeting { version: 99, pid: 0x0102 };
        let bytes = greeting.encode();
        assert_eq!(bytes, b"jailfsct\x63\0\0\0\x02\x01\0\0");
        assert_eq!(Greeting::decode(&bytes), Some(greeting.clone()));
        assert_eq!(Greeting::decode(&[&bytes[..], b"/m\xff"].concat()), Some(greeting.clone()));
        for cut in 0..16 {
            assert_eq!(Greeting::decode(&bytes[..cut]), None);
        }
        assert!(greeting.check().unwrap_err().reason.contains("version 99"));
        assert!(Greeting::of_this_process().check().is_ok());
    }
}
