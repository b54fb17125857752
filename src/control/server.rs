//! The server of the control socket.
//!
//! One thread accepts, and one thread serves each connection. Clients are not trusted: a frame must
//! be complete within a time limit and below a size limit. A message that does not decode gets an
//! error, and ends its connection. A peer can waste only its own connection, and there are at most
//! [`MAX_CONNECTIONS`] of them.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use parking_lot::{Condvar, Mutex};

use super::frame::{
    self, FrameError, Greeting, MAX_GREETING, MAX_PIECE, MAX_REPLY, MAX_REQUEST, Until,
};
use super::message::{Answer, Call, Message};
use super::waiting::Waiting;
use super::{SOCKET, StoreDir, numbered_socket};
use crate::error::{Attempt, Error, Kind, Result};
use crate::store::io::codec;
use crate::sys;
use crate::sys::proc::{Confines, comes_from};

/// The address space of a thread that answers, in bytes. A restore and a diff recurse as deep as
/// the tree; only the used part becomes memory.
const STACK: usize = 256 << 20;
/// The maximum number of connections. A client holds one as long as it runs.
pub(super) const MAX_CONNECTIONS: usize = 64;
/// How many of them a command of `run` can hold. The others are for its caller.
const MAX_INSIDE: usize = 48;
/// How long a request may take to arrive after its first byte.
const REQUEST_LIMIT: Duration = Duration::from_secs(30);
/// How long a connection may be idle. A client may wait for a person, for example in a pager,
/// before its next request.
const IDLE_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// How often an idle connection checks whether the server ends, in milliseconds.
const IDLE_POLL: u16 = 1000;
/// How long the end waits for requests in progress.
const END_LIMIT: Duration = Duration::from_secs(30);
/// How long a peer may take to ask when no thread can be started for it.
const NO_THREAD_LIMIT: Duration = Duration::from_secs(1);
/// How long a peer may block a write of a reply.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// Begins the conversation of a connection.
type Begin = Box<dyn Fn() -> Box<dyn Conversation> + Send + Sync>;

/// Answers the calls of one connection. Dropped at its end.
pub trait Conversation: Send {
    /// Answers a call.
    ///
    /// # Errors
    /// They are the answer.
    fn answer(&mut self, call: Call, peer: Peer) -> Result<Answered>;

    /// Whether its end would end something else, so that it may be idle without a time limit.
    fn is_held(&self) -> bool {
        false
    }
}

impl<F: FnMut(Call, Peer) -> Result<Answered> + Send> Conversation for F {
    fn answer(&mut self, call: Call, peer: Peer) -> Result<Answered> {
        self(call, peer)
    }
}

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The process that connected.
    pub pid: u32,
    /// Whether it is a command of the `run` that the socket is for.
    pub is_inside: bool,
}

/// A successful answer to a call.
pub struct Answered {
    /// The answer for the client.
    pub answer: Answer,
    /// If set, the connection serves no more calls, and closes at this end.
    pub closes_at: Option<Arc<Waiting>>,
}

impl From<Answer> for Answered {
    fn from(answer: Answer) -> Answered {
        Answered { answer, closes_at: None }
    }
}

/// A socket that queues connections but does not serve them yet.
pub struct Listener {
    dir: StoreDir,
    socket: UnixListener,
    name: SocketName,
    request_limit: Duration,
    /// The process whose descendants are commands of `run`.
    owner: u32,
}

/// The name of the socket in the store's directory. Dropping it unlinks the name.
struct SocketName {
    dir: Arc<std::fs::File>,
    name: String,
}

impl Drop for SocketName {
    fn drop(&mut self) {
        if let Err(error) = unlinkat(&*self.dir, self.name.as_str(), UnlinkatFlags::NoRemoveDir) {
            log::debug!("remove the control socket: {error}");
        }
    }
}

impl Listener {
    /// Takes the name of the socket in the store's directory. The caller holds the lock of the
    /// store, so an existing socket is of a dead daemon.
    ///
    /// # Errors
    /// The directory cannot be opened or written.
    pub fn bind(store: &Path) -> Result<Listener> {
        let listener = Listener::bind_as(store, SOCKET)?;
        remove_left_over(store);
        Ok(listener)
    }

    /// As [`Listener::bind`], for one socket of several: with a number in its name.
    ///
    /// # Errors
    /// The directory cannot be opened or written.
    pub fn bind_numbered(store: &Path, number: u32) -> Result<Listener> {
        Listener::bind_as(store, &numbered_socket(number))
    }

    fn bind_as(store: &Path, name: &str) -> Result<Listener> {
        let attempt = || format!("listen on '{}'", store.join(name).display());
        let dir = StoreDir::open(store)?;
        match unlinkat(&dir.0, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(nix::Error::ENOENT) => {}
            Err(error) => return Err(Error::io(attempt(), &error.into())),
        }
        let socket = UnixListener::bind(dir.socket(name)).attempt(attempt)?;
        let name = SocketName {
            dir: Arc::new(dir.0.try_clone().attempt(attempt)?),
            name: name.to_owned(),
        };
        // Until here the directory (0700) keeps other users out. The mode of the socket is a second
        // protection.
        fchmodat(
            &dir.0,
            name.name.as_str(),
            Mode::from_bits_truncate(0o600),
            FchmodatFlags::FollowSymlink,
        )
        .map_err(io::Error::from)
        .attempt(attempt)?;
        let owner = std::process::id();
        Ok(Listener { dir, socket, name, request_limit: REQUEST_LIMIT, owner })
    }

    /// The name of the socket in the store's directory.
    pub fn name(&self) -> &str {
        &self.name.name
    }

    /// As it is, for the commands of a `run` in another process.
    #[must_use]
    pub fn owned_by(self, owner: u32) -> Listener {
        Listener { owner, ..self }
    }

    /// Starts to serve connections. `begin` and the conversation run in the thread of the
    /// connection.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn serve<B>(self, greeting: Greeting, begin: B) -> Result<Server>
    where
        B: Fn() -> Box<dyn Conversation> + Send + Sync + 'static,
    {
        let shared = Arc::new(Shared {
            greeting: greeting.encode(),
            begin: Box::new(begin),
            owner: self.owner,
            uid: geteuid().as_raw(),
            connections: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            lists_inside: Mutex::new(()),
            ending: AtomicBool::new(false),
            in_progress: Mutex::new(0),
            idle: Condvar::new(),
            request_limit: self.request_limit,
        });
        let (socket, for_thread) = (self.socket, Arc::clone(&shared));
        let accepting = thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || accept(&socket, &for_thread))
            .attempt(|| "start the thread of the control socket")?;
        let path = self.dir.socket(&self.name.name);
        let (dir, name) = (self.dir, Some(self.name));
        Ok(Server { shared, _dir: dir, path, name, accepting: Some(accepting) })
    }
}

/// Removes the numbered sockets of a dead process. A failure does no harm.
fn remove_left_over(store: &Path) {
    for entry in std::fs::read_dir(store).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(SOCKET)?.strip_prefix('-'));
        if number.is_some_and(|number| number.parse::<u32>().is_ok())
            && let Err(error) = std::fs::remove_file(entry.path())
        {
            log::debug!("remove a control socket: {error}");
        }
    }
}

/// A served control socket. Dropping it closes the socket and unlinks its name.
pub struct Server {
    shared: Arc<Shared>,
    /// Keeps `path` valid.
    _dir: StoreDir,
    path: PathBuf,
    name: Option<SocketName>,
    accepting: Option<JoinHandle<()>>,
}

/// The state shared by the threads.
struct Shared {
    greeting: Vec<u8>,
    begin: Begin,
    /// The process whose descendants are commands of `run`.
    owner: u32,
    uid: u32,
    connections: AtomicUsize,
    /// The number of connections of commands of our own `run`.
    inside: AtomicUsize,
    /// Held while a list of changes is made for a command of our own `run` and sent to it.
    lists_inside: Mutex<()>,
    ending: AtomicBool,
    /// The number of requests in progress.
    in_progress: Mutex<usize>,
    /// Notified when `in_progress` becomes 0.
    idle: Condvar,
    request_limit: Duration,
}

impl Server {
    /// Accepts no more connections, and waits for the requests in progress. Call it after the store
    /// has been closed, and before the [`Waiting`] clients are told of the end.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        // The thread blocks in accept(2). A connection wakes it.
        let woken = UnixStream::connect(&self.path).is_ok();
        if let Some(thread) = self.accepting.take().filter(|_| woken)
            && thread.join().is_err()
        {
            log::error!("the thread of the control socket has panicked");
        }
        self.name = None;
        // One of them may be the unmount that ended the daemon, which must still get its reply.
        let mut in_progress = self.shared.in_progress.lock();
        if self
            .shared
            .idle
            .wait_while_for(&mut in_progress, |in_progress| *in_progress > 0, END_LIMIT)
            .timed_out()
        {
            log::warn!("{} control requests are cut off", *in_progress);
        }
    }
}

fn accept(socket: &UnixListener, shared: &Arc<Shared>) {
    loop {
        let accepted = socket.accept();
        if shared.ending.load(Ordering::SeqCst) {
            return;
        }
        match accepted {
            Ok((stream, _)) => start(stream, shared),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                // Descriptors or memory have run out. The connection stays in the queue, so pause
                // instead of spinning.
                log::warn!("accept on the control socket: {error}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn start(stream: UnixStream, shared: &Arc<Shared>) {
    let peer = match admit(&stream, shared) {
        Ok(peer) => peer,
        Err(reason) => {
            log::warn!("refused a connection to the control socket: {reason}");
            return;
        }
    };
    let guard = Connection::new(shared, peer.is_inside);
    let thread = thread::Builder::new().name("control-peer".to_owned()).stack_size(STACK);
    let kept = stream.try_clone();
    let spawned = thread.spawn(move || {
        let shared = Arc::clone(&guard.shared);
        converse(stream, &shared, peer);
        drop(guard);
    });
    if let Err(error) = spawned {
        log::warn!("start a thread for a connection: {error}");
        let told =
            kept.map_err(FrameError::Io).and_then(|stream| say_no_thread(&stream, shared, &error));
        if let Err(error) = told {
            log::debug!("answer a control request: {error}");
        }
    }
}

/// Answers the first request of a connection for which there is no thread. Until then no other
/// connection is taken, so the peer has little time.
fn say_no_thread(
    stream: &UnixStream,
    shared: &Shared,
    why: &io::Error,
) -> std::result::Result<(), FrameError> {
    stream.set_write_timeout(Some(NO_THREAD_LIMIT))?;
    frame::write(&mut &*stream, &shared.greeting, MAX_GREETING)?;
    frame::read(&mut Until::new(stream, NO_THREAD_LIMIT), MAX_REQUEST)?;
    let error = Error::io("start a thread of the daemon", why);
    let error = error.hint("it may start no more threads: see 'ulimit -u' and 'ulimit -v'");
    Ok(answer(stream, &mut Err(error))?)
}

/// Counts a live connection.
struct Connection {
    shared: Arc<Shared>,
    is_inside: bool,
}

impl Connection {
    fn new(shared: &Arc<Shared>, is_inside: bool) -> Connection {
        shared.connections.fetch_add(1, Ordering::SeqCst);
        shared.inside.fetch_add(usize::from(is_inside), Ordering::SeqCst);
        Connection { shared: Arc::clone(shared), is_inside }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.connections.fetch_sub(1, Ordering::SeqCst);
        self.shared.inside.fetch_sub(usize::from(self.is_inside), Ordering::SeqCst);
    }
}

/// Counts a request from its arrival until its reply.
struct Busy<'a>(&'a Shared);

impl Busy<'_> {
    fn new(shared: &Shared) -> Busy<'_> {
        *shared.in_progress.lock() += 1;
        Busy(shared)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut in_progress = self.0.in_progress.lock();
        *in_progress = in_progress.saturating_sub(1);
        if *in_progress == 0 {
            self.0.idle.notify_all();
        }
    }
}

/// Decides whether a connection is accepted.
fn admit(stream: &UnixStream, shared: &Shared) -> std::result::Result<Peer, String> {
    let peer = getsockopt(stream, PeerCredentials).map_err(|error| error.to_string())?;
    if !is_served(peer.uid(), shared.uid) {
        return Err(format!("process {} runs as user {}", peer.pid(), peer.uid()));
    }
    // Hold a pidfd during the check (Linux 6.5), so that the pid is not reused meanwhile.
    let held = getsockopt(stream, PeerPidfd);
    let pid = u32::try_from(peer.pid()).unwrap_or(0);
    let is_inside = check_confinement(pid, shared.owner)?;
    if held.is_ok_and(|process| has_ended(&process)) {
        return Err(format!("process {} has ended", peer.pid()));
    }
    if shared.connections.load(Ordering::SeqCst) >= MAX_CONNECTIONS {
        return Err(format!("it has {MAX_CONNECTIONS} connections, which is the limit"));
    }
    if is_inside && shared.inside.load(Ordering::SeqCst) >= MAX_INSIDE {
        return Err(format!("the command has {MAX_INSIDE} connections, which is the limit"));
    }
    Ok(Peer { pid, is_inside })
}

/// The daemon serves its own user and root only.
fn is_served(peer: u32, daemon: u32) -> bool {
    peer == daemon || peer == 0
}

/// Refuses a process that is more confined than this one, unless it descends from `owner`: it is a
/// command of another `run`, or in a container, and the daemon would act for it outside. The
/// descendants of the owner are commands of the `run` that the socket is for, whose requests pass a
/// gate.
///
/// Returns whether the process is a descendant.
fn check_confinement(pid: u32, owner: u32) -> std::result::Result<bool, String> {
    if comes_from(pid, owner) {
        return Ok(pid != owner);
    }
    let (Some(theirs), Some(ours)) = (Confines::of(pid), Confines::of(std::process::id())) else {
        return Err(format!("the confinement of process {pid} cannot be read"));
    };
    if theirs.depth > ours.depth || theirs.filters > ours.filters {
        return Err(format!("process {pid} is confined to another sandbox or container"));
    }
    Ok(false)
}

/// Whether the process of a pidfd has ended. The pidfd is readable then (pidfd_open(2)).
fn has_ended(process: &OwnedFd) -> bool {
    let mut ready = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    !matches!(poll(&mut ready, PollTimeout::ZERO), Ok(0))
}

/// Serves one connection until its end.
fn converse(stream: UnixStream, shared: &Shared, peer: Peer) {
    if let Err(error) = stream.set_write_timeout(Some(WRITE_LIMIT)) {
        log::warn!("control connection: {error}");
        return;
    }
    if frame::write(&mut &stream, &shared.greeting, MAX_GREETING).is_err() {
        return;
    }
    let mut conversation = (shared.begin)();
    answer_all(&stream, shared, peer, &mut *conversation);
    // A race of this connection ends before the server does.
    let _busy = Busy::new(shared);
    drop(conversation);
}

fn answer_all(
    stream: &UnixStream,
    shared: &Shared,
    peer: Peer,
    conversation: &mut dyn Conversation,
) {
    while wait_for_request(stream, shared, conversation.is_held()) {
        let bytes = match frame::read(&mut Until::new(stream, shared.request_limit), MAX_REQUEST) {
            Ok(bytes) => bytes,
            Err(FrameError::Closed) => return,
            Err(error) => return refuse(stream, &error.to_string()),
        };
        let call = match codec::decode::<Call>(&bytes) {
            Ok(call) => call,
            Err(error) => return refuse(stream, &error),
        };
        if let Err(error) = receive_descriptors(stream, &call, shared.request_limit) {
            return refuse(stream, &error.to_string());
        }
        let _busy = Busy::new(shared);
        // Only one list at a time is on disk for a command that does not read its lists.
        let _turn =
            (peer.is_inside && call.message.is_listed()).then(|| shared.lists_inside.lock());
        let (mut result, closes_at) = match conversation.answer(call, peer) {
            Ok(answered) => (Ok(answered.answer), answered.closes_at),
            Err(error) => (Err(error), None),
        };
        if let Err(error) = answer(stream, &mut result) {
            log::debug!("answer a control request: {error}");
            return;
        }
        let Some(waiting) = closes_at else { continue };
        match stream.try_clone() {
            Ok(kept) => waiting.push(kept),
            Err(error) => log::warn!("keep a connection until the end of a mount: {error}"),
        }
        return;
    }
}

/// Receives the pipe or the mount of a message that has one. They come with a byte of their own.
fn receive_descriptors(stream: &UnixStream, call: &Call, limit: Duration) -> io::Result<()> {
    let pipe = match &call.message {
        Message::Request(request) => request.stream(),
        Message::Race(_) | Message::Mounts | Message::Mount(_) => None,
    };
    let slot = call.message.descriptors();
    if pipe.is_none() && slot.is_none() {
        return Ok(());
    }
    stream.set_read_timeout(Some(limit))?;
    let (_, received) = sys::socket::receive(stream, &mut [0])?;
    if let Some(slot) = slot {
        slot.set(received);
    } else if let Some(pipe) = pipe {
        let received = received.into_iter().next();
        pipe.set(received.ok_or_else(|| io::Error::other("the request has no pipe"))?);
    }
    Ok(())
}

/// Waits for the next request. False if none will come.
fn wait_for_request(stream: &UnixStream, shared: &Shared, is_held: bool) -> bool {
    let end = Instant::now() + IDLE_LIMIT;
    while (is_held || Instant::now() < end) && !shared.ending.load(Ordering::SeqCst) {
        let mut ready = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::from(IDLE_POLL)) {
            Ok(0) | Err(nix::Error::EINTR) => {}
            // Readable data may also be the end of the connection.
            Ok(_) => return true,
            Err(error) => {
                log::debug!("wait for a control request: {error}");
                return false;
            }
        }
    }
    false
}

/// Sends a result and its list of changes. If it is too long, sends an error instead.
fn answer(stream: &UnixStream, result: &mut Result<Answer>) -> io::Result<()> {
    if let Some(bytes) =
        codec::encode(result).ok().filter(|bytes| bytes.len() <= MAX_REPLY as usize)
    {
        frame::write(&mut &*stream, &bytes, MAX_REPLY)?;
        let Ok(Answer::Reply(reply)) = result else { return Ok(()) };
        let Some(changes) = reply.changes() else { return Ok(()) };
        changes.for_each_chunk(|piece| frame::write(&mut &*stream, piece, MAX_PIECE))?;
        return frame::write(&mut &*stream, &[], MAX_PIECE);
    }
    let error: Result<Answer> =
        Err(Error::new(Kind::Failed, "send the reply", "it is too long").hint("name fewer paths"));
    let bytes = codec::encode(&error).map_err(io::Error::other)?;
    frame::write(&mut &*stream, &bytes, MAX_REPLY)
}

/// Reports a malformed message to the peer, and ends the connection.
fn refuse(stream: &UnixStream, reason: &str) {
    log::warn!("refused a control message: {reason}");
    let mut error: Result<Answer> = Err(Error::new(Kind::Failed, "read a request", reason));
    if answer(stream, &mut error).and_then(|()| stream.shutdown(Shutdown::Both)).is_err() {
        log::debug!("the peer has closed the connection");
    }
}

#[cfg(test)]
mod tests;
