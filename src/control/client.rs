//! The client of the control socket.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;

use super::frame::{
    self, FrameError, Greeting, MAX_GREETING, MAX_PIECE, MAX_REPLY, MAX_REQUEST, Until,
};
use super::message::{Answer, Call, Descriptors, Message, Mounts, RaceOrder};
use super::{SOCKET, StoreDir};
use crate::error::{Error, Kind, Result};
use crate::sandbox::{Reply, Request};
use crate::store::io::codec;
use crate::sys;

/// How long a daemon may take to greet. The thread that greets does nothing else.
const GREETING_LIMIT: Duration = Duration::from_secs(10);

/// A connection to the daemon of a store.
pub struct Client {
    stream: UnixStream,
    greeting: Greeting,
    /// The head that the calls mean.
    head: Option<String>,
}

/// How often a daemon may die while a client waits for its greeting.
const TRIES: usize = 8;

/// Connects to the daemon of `store`. `None` if there is no daemon or no such store.
///
/// # Errors
/// The daemon refuses this user, does not answer, or speaks another version.
pub fn connect(store: &Path) -> Result<Option<Client>> {
    for _ in 0..TRIES {
        match connect_once(store) {
            // The daemon died before it greeted this client, or in the middle of that. Now there is
            // none, or another one.
            Err(error) if error.errno == Some(nix::libc::ECONNRESET) => {}
            other => return other,
        }
    }
    connect_once(store)
}

fn connect_once(store: &Path) -> Result<Option<Client>> {
    let attempt = || format!("connect to the daemon of store '{}'", store.display());
    let dir = match StoreDir::open(store) {
        Ok(dir) => dir,
        Err(error) if error.errno == Some(nix::libc::ENOENT) => return Ok(None),
        Err(error) => return Err(error),
    };
    let stream = match UnixStream::connect(dir.socket(SOCKET)) {
        Ok(stream) => stream,
        Err(e)
            if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(Error::io(attempt(), &error)),
    };
    check_peer(&stream).map_err(|why| Error::new(Kind::Failed, attempt(), why))?;
    let greeting = match frame::read(&mut Until::new(&stream, GREETING_LIMIT), MAX_GREETING) {
        Ok(bytes) => Greeting::decode(&bytes).ok_or_else(|| {
            Error::new(
                Kind::Failed,
                attempt(),
                format!("the process that listens on '{SOCKET}' is not a jailfs daemon"),
            )
        })?,
        // The daemon is ending, has too many connections, or refuses this process.
        Err(FrameError::Closed) => {
            return Err(Error::new(Kind::Failed, attempt(), "it closed the connection at once")
                .hint(
                    "it serves only the user who mounted it and root, and no process in another \
             sandbox or container",
                ));
        }
        Err(error) => {
            let errno = match &error {
                // The daemon died in the middle of its greeting, so `connect` tries again.
                FrameError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    Some(nix::libc::ECONNRESET)
                }
                FrameError::Io(error) => error.raw_os_error(),
                FrameError::Closed | FrameError::TooLong(_) => None,
            };
            return Err(Error { errno, ..Error::new(Kind::Failed, attempt(), error.to_string()) });
        }
    };
    greeting.check()?;
    Ok(Some(Client { stream, greeting, head: None }))
}

/// Whether a call failed because the daemon closed the connection, as it does when it ends.
pub fn is_lost(error: &Error) -> bool {
    matches!(error.errno, Some(nix::libc::EPIPE | nix::libc::ECONNRESET))
}

/// Checks that the listening process runs as this user or as root. A process of another user could
/// answer anything.
fn check_peer(stream: &UnixStream) -> std::result::Result<(), String> {
    let peer = getsockopt(stream, PeerCredentials).map_err(|error| error.to_string())?;
    if is_trusted(peer.uid(), geteuid().as_raw()) {
        return Ok(());
    }
    Err(format!(
        "process {} listens there as user {}: run jailfs as that user",
        peer.pid(),
        peer.uid()
    ))
}

fn is_trusted(peer: u32, own: u32) -> bool {
    peer == own || peer == 0
}

impl Client {
    /// The daemon's greeting.
    pub fn greeting(&self) -> &Greeting {
        &self.greeting
    }

    /// Makes the next calls mean this head. `None`, the default, lets the daemon choose.
    pub fn set_head(&mut self, head: Option<String>) {
        self.head = head;
    }

    /// Sends a request to the sandbox of the head, and waits for the reply without a time limit.
    ///
    /// # Errors
    /// The daemon's own error, or a failure of the connection.
    pub fn call(&mut self, request: &Request) -> Result<Reply> {
        let mut reply = match self.ask(Message::Request(request.clone()))? {
            Answer::Reply(reply) => *reply,
            _ => return Err(self.lost("the answer does not belong to the request")),
        };
        if let Some(changes) = reply.changes() {
            // The whole list at once: the daemon must not wait for a person who reads it in a
            // pager.
            changes.receive(&std::env::temp_dir(), || {
                frame::read(&mut &self.stream, MAX_PIECE)
                    .map_err(|error| self.lost(&error.to_string()))
            })?;
        }
        Ok(reply)
    }

    /// The mounted heads, and the one that the calls mean.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn mounts(&mut self) -> Result<Mounts> {
        match self.ask(Message::Mounts)? {
            Answer::Mounts(mounts) => Ok(mounts),
            _ => Err(self.lost("the answer does not belong to the request")),
        }
    }

    /// Gives an order of a race, and returns the answer.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn race(&mut self, order: RaceOrder) -> Result<Answer> {
        self.ask(Message::Race(order))
    }

    /// Asks the daemon to mount the head; `plan` is for the daemon to decode. Returns whether it is
    /// mounted. If not, the daemon is ending, or has ended.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn mount(&mut self, plan: Vec<u8>) -> Result<bool> {
        match self.ask(Message::Mount(plan)) {
            Ok(Answer::Mounted) => Ok(true),
            Ok(Answer::Ending) => Ok(false),
            Ok(_) => Err(self.lost("the answer does not belong to the request")),
            Err(error) if is_lost(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends a message, and waits for the answer without a time limit.
    fn ask(&mut self, message: Message) -> Result<Answer> {
        let beside = match &message {
            Message::Request(request) => {
                request.stream().map(|stream| stream.take().into_iter().collect())
            }
            Message::Race(_) | Message::Mounts | Message::Mount(_) => None,
        };
        let beside: Option<Vec<OwnedFd>> =
            beside.or_else(|| message.descriptors().map(Descriptors::take));
        let call = Call { head: self.head.clone(), message };
        let bytes = codec::encode(&call).map_err(|error| self.lost(&error))?;
        frame::write(&mut &self.stream, &bytes, MAX_REQUEST).map_err(|error| {
            match error.kind() {
                io::ErrorKind::InvalidInput => {
                    self.lost("the request is too long: name fewer paths")
                }
                _ => Error { errno: error.raw_os_error(), ..self.lost(&error.to_string()) },
            }
        })?;
        if let Some(descriptors) = beside {
            // Our own copies must be closed: the other end of a pipe waits for the last one.
            let sent = sys::socket::send(self.stream.as_raw_fd(), &[0], &descriptors);
            sent.map_err(|error| self.lost(&error.to_string()))?;
        }
        self.stream.set_read_timeout(None).map_err(|error| self.lost(&error.to_string()))?;
        let bytes = frame::read(&mut &self.stream, MAX_REPLY).map_err(|error| {
            let errno = match &error {
                FrameError::Closed => Some(nix::libc::ECONNRESET),
                FrameError::Io(error) => error.raw_os_error(),
                FrameError::TooLong(_) => None,
            };
            Error { errno, ..self.lost(&error.to_string()) }
        })?;
        codec::decode::<Result<Answer>>(&bytes)
            .map_err(|error| self.lost(&format!("the reply is malformed: {error}")))?
    }

    /// The error of a connection that failed.
    fn lost(&self, reason: &str) -> Error {
        let attempt = format!("send a request to the daemon (process {})", self.greeting.pid);
        Error::new(Kind::Failed, attempt, reason)
            .hint("if the daemon has ended, STORE/daemon.log says why")
    }

    /// After an unmount, waits until the daemon has closed the head, or with the last one its
    /// store. `false` if it has not after `limit`.
    pub fn wait_for_end(self, limit: Duration) -> bool {
        match frame::read(&mut Until::new(&self.stream, limit), 0) {
            Err(FrameError::Io(error)) => error.kind() != io::ErrorKind::WouldBlock,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_daemon_of_this_user_or_of_root_is_trusted() {
        assert!(is_trusted(1000, 1000) && is_trusted(0, 1000) && is_trusted(0, 0));
        assert!(!is_trusted(1001, 1000) && !is_trusted(1000, 0));
    }

    #[test]
    fn a_daemon_that_dies_before_its_greeting_counts_as_none() {
        let store = tempfile::tempdir().unwrap();
        let socket = std::os::unix::net::UnixListener::bind(store.path().join(SOCKET)).unwrap();
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connect(store.path()));
            std::thread::sleep(Duration::from_millis(50));
            drop(socket);
            assert!(connecting.join().unwrap().unwrap().is_none());
        });
    }

    #[test]
    fn a_daemon_that_dies_in_the_middle_of_its_greeting_counts_as_none() {
        let store = tempfile::tempdir().unwrap();
        let socket = std::os::unix::net::UnixListener::bind(store.path().join(SOCKET)).unwrap();
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connect(store.path()));
            let (mut greeted, _) = socket.accept().unwrap();
            drop(socket);
            std::io::Write::write_all(&mut greeted, &[9, 0]).unwrap();
            drop(greeted);
            assert!(connecting.join().unwrap().unwrap().is_none());
        });
    }
}
