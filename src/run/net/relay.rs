//! Copies between a client and an origin until both have ended, or either fails.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::PollFlags;

use super::body::Body;
use super::stream::{CHUNK, Client, Until, is_not_ready};

/// How long a connection may be silent after one side has ended.
const HALF_CLOSED: Duration = Duration::from_secs(120);

/// One direction: bytes that were read and not yet written.
struct Half {
    bytes: Vec<u8>,
    /// The start of the unwritten part of `bytes`.
    from: usize,
    /// The reading side has ended.
    is_over: bool,
    /// The end was passed on to the writing side.
    is_passed_on: bool,
}

impl Half {
    fn new(bytes: Vec<u8>) -> Half {
        Half { bytes, from: 0, is_over: false, is_passed_on: false }
    }

    fn is_empty(&self) -> bool {
        self.from >= self.bytes.len()
    }

    /// Writes as many bytes as the socket takes.
    fn write(&mut self, to: &mut TcpStream) -> io::Result<()> {
        while !self.is_empty() {
            match to.write(self.bytes.get(self.from..).unwrap_or_default()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => self.from += len,
                Err(error) if is_not_ready(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.bytes.clear();
        self.from = 0;
        Ok(())
    }

    /// Reads available bytes into the empty buffer. Returns whether there were any, or the end.
    fn read(&mut self, from: &mut TcpStream) -> io::Result<bool> {
        self.bytes.resize(CHUNK, 0);
        self.from = 0;
        let result = from.read(&mut self.bytes);
        self.bytes.truncate(*result.as_ref().unwrap_or(&0));
        match result {
            Ok(0) => self.is_over = true,
            Ok(_) => {}
            Err(error) if is_not_ready(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Passes the end on to the other side when everything is written.
    fn end(&mut self, to: &TcpStream) {
        if self.is_over && self.is_empty() && !self.is_passed_on {
            self.is_passed_on = true;
            if let Err(error) = to.shutdown(Shutdown::Write) {
                log::debug!("end a direction of a connection: {error}");
            }
        }
    }
}

/// Copies both ways. `head` goes to the origin first. Of the client's bytes only its `body`
/// follows.
///
/// # Errors
/// A failure of either side, a malformed body, or the end of the command.
pub(super) fn relay(
    client: &mut Client,
    mut origin: TcpStream,
    head: Vec<u8>,
    mut body: Body,
    stop: BorrowedFd<'_>,
) -> io::Result<()> {
    origin.set_nonblocking(true)?;
    let read = std::mem::take(&mut client.read);
    let client = &mut client.stream;
    let taken = take(&mut body, &read)?;
    let mut request = Half::new([head.as_slice(), read.get(..taken).unwrap_or_default()].concat());
    // A client that sends more than its body before the answer still gets the answer, but its
    // further bytes are not read.
    let mut ignores_client = taken < read.len();
    let mut answer = Half::new(Vec::new());
    let mut is_answered = false;
    let is_tunnel = body == Body::Open;
    loop {
        request.write(&mut origin)?;
        answer.write(client)?;
        // The length tells the origin where a body ends. Some origins take an end of the connection
        // for a client that has left.
        if is_tunnel {
            request.end(&origin);
        }
        answer.end(client);
        let both_over =
            request.is_over && answer.is_over && request.is_empty() && answer.is_empty();
        let is_cut_off = !is_tunnel && request.is_over && !body.is_over();
        if both_over || is_cut_off || (!is_tunnel && answer.is_passed_on) {
            return Ok(());
        }
        let time = (request.is_over || ignores_client || answer.is_over).then_some(HALF_CLOSED);
        let until = Until { stop, time: None };
        let until = time.map_or(until, |time| until.at_most(time));
        let (client_events, origin_events) = (
            interest(request.is_empty() && !request.is_over && !ignores_client, !answer.is_empty()),
            interest(answer.is_empty() && !answer.is_over, !request.is_empty()),
        );
        let wanted = [(client.as_fd(), client_events), (origin.as_fd(), origin_events)];
        // A descriptor without wanted events would wake the thread at every hang-up.
        let wanted: Vec<_> = wanted.into_iter().filter(|(_, events)| !events.is_empty()).collect();
        until.wait(&wanted)?;
        if client_events.contains(PollFlags::POLLIN) && request.read(client)? && !request.is_over {
            let taken = take(&mut body, &request.bytes)?;
            if taken < request.bytes.len() {
                if is_answered {
                    // The client reuses a connection that was to be closed. It will open a new one.
                    return Ok(());
                }
                ignores_client = true;
                request.bytes.truncate(taken);
            }
        }
        if origin_events.contains(PollFlags::POLLIN) && answer.read(&mut origin)? {
            is_answered = true;
        }
    }
}

fn take(body: &mut Body, bytes: &[u8]) -> io::Result<usize> {
    body.take(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the chunks are malformed"))
}

fn interest(reads: bool, writes: bool) -> PollFlags {
    let mut events = PollFlags::empty();
    events.set(PollFlags::POLLIN, reads);
    events.set(PollFlags::POLLOUT, writes);
    events
}
