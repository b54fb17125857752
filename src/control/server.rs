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
use std::path::Path;
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
use super::{SOCKET, StoreDir};
use crate::error::{Attempt, Error, Kind, Result};
use crate::sandbox::{Reply, Request};
use crate::store::io::codec;
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

/// Handles a request.
type Handler = Box<dyn Fn(Request) -> Result<Reply> + Send + Sync>;

/// A socket that queues connections but does not serve them yet.
pub struct Listener {
    dir: StoreDir,
    socket: UnixListener,
    name: SocketName,
    request_limit: Duration,
}

/// The name of the socket in the store's directory. Dropping it unlinks the name.
struct SocketName(Arc<std::fs::File>);

impl Drop for SocketName {
    fn drop(&mut self) {
        if let Err(error) = unlinkat(&*self.0, SOCKET, UnlinkatFlags::NoRemoveDir) {
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
        let attempt = || format!("listen on '{}'", store.join(SOCKET).display());
        let dir = StoreDir::open(store)?;
        match unlinkat(&dir.0, SOCKET, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(nix::Error::ENOENT) => {}
            Err(error) => return Err(Error::io(attempt(), &error.into())),
        }
        let socket = UnixListener::bind(dir.socket()).attempt(attempt)?;
        let name = SocketName(Arc::new(dir.0.try_clone().attempt(attempt)?));
        // Until here the directory (0700) keeps other users out. The mode of the socket is a second
        // protection.
        fchmodat(&dir.0, SOCKET, Mode::from_bits_truncate(0o600), FchmodatFlags::FollowSymlink)
            .map_err(io::Error::from)
            .attempt(attempt)?;
        Ok(Listener { dir, socket, name, request_limit: REQUEST_LIMIT })
    }

    /// Starts to serve connections. `handler` runs in the thread of each connection.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn serve<H>(self, greeting: Greeting, handler: H) -> Result<Server>
    where
        H: Fn(Request) -> Result<Reply> + Send + Sync + 'static,
    {
        let shared = Arc::new(Shared {
            greeting: greeting.encode(),
            handler: Box::new(handler),
            uid: geteuid().as_raw(),
            connections: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            lists_inside: Mutex::new(()),
            ending: AtomicBool::new(false),
            waiting: Mutex::new(Vec::new()),
            in_progress: Mutex::new(0),
            idle: Condvar::new(),
            request_limit: self.request_limit,
        });
        let (socket, for_thread) = (self.socket, Arc::clone(&shared));
        let accepting = thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || accept(&socket, &for_thread))
            .attempt(|| "start the thread of the control socket")?;
        Ok(Server { shared, dir: self.dir, name: Some(self.name), accepting: Some(accepting) })
    }
}

/// A served control socket. Dropping it closes the socket and unlinks its name.
pub struct Server {
    shared: Arc<Shared>,
    dir: StoreDir,
    name: Option<SocketName>,
    accepting: Option<JoinHandle<()>>,
}

/// The state shared by the threads.
struct Shared {
    greeting: Vec<u8>,
    handler: Handler,
    uid: u32,
    connections: AtomicUsize,
    /// The number of connections of commands of our own `run`.
    inside: AtomicUsize,
    /// Held while a list of changes is made for a command of our own `run` and sent to it.
    lists_inside: Mutex<()>,
    ending: AtomicBool,
    /// Connections of clients that wait for the end of the daemon.
    waiting: Mutex<Vec<UnixStream>>,
    /// The number of requests in progress.
    in_progress: Mutex<usize>,
    /// Notified when `in_progress` becomes 0.
    idle: Condvar,
    request_limit: Duration,
}

impl Server {
    /// Accepts no more connections, then closes those that wait for the end. Call it after the
    /// store has been closed.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        // The thread blocks in accept(2). A connection wakes it.
        let woken = UnixStream::connect(self.dir.socket()).is_ok();
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
        drop(in_progress);
        self.shared.waiting.lock().clear();
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
    let is_inside = match admit(&stream, shared) {
        Ok(is_inside) => is_inside,
        Err(reason) => {
            log::warn!("refused a connection to the control socket: {reason}");
            return;
        }
    };
    let guard = Connection::new(shared, is_inside);
    let peer = thread::Builder::new().name("control-peer".to_owned()).stack_size(STACK);
    let kept = stream.try_clone();
    let spawned = peer.spawn(move || {
        let shared = Arc::clone(&guard.shared);
        converse(stream, &shared, guard.is_inside);
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

/// Decides whether a connection is accepted. Returns whether it comes from a command of our own
/// `run`.
fn admit(stream: &UnixStream, shared: &Shared) -> std::result::Result<bool, String> {
    let peer = getsockopt(stream, PeerCredentials).map_err(|error| error.to_string())?;
    if !is_served(peer.uid(), shared.uid) {
        return Err(format!("process {} runs as user {}", peer.pid(), peer.uid()));
    }
    // Hold a pidfd during the check (Linux 6.5), so that the pid is not reused meanwhile.
    let held = getsockopt(stream, PeerPidfd);
    let is_inside = check_confinement(u32::try_from(peer.pid()).unwrap_or(0))?;
    if held.is_ok_and(|process| has_ended(&process)) {
        return Err(format!("process {} has ended", peer.pid()));
    }
    if shared.connections.load(Ordering::SeqCst) >= MAX_CONNECTIONS {
        return Err(format!("it has {MAX_CONNECTIONS} connections, which is the limit"));
    }
    if is_inside && shared.inside.load(Ordering::SeqCst) >= MAX_INSIDE {
        return Err(format!("the command has {MAX_INSIDE} connections, which is the limit"));
    }
    Ok(is_inside)
}

/// The daemon serves its own user and root only.
fn is_served(peer: u32, daemon: u32) -> bool {
    peer == daemon || peer == 0
}

/// Refuses a process that is more confined than this one, unless it descends from this one: it is a
/// command of another `run`, or in a container, and the daemon would act for it outside. The
/// descendants of this process are commands of its own `run`, whose requests pass a gate.
///
/// Returns whether the process is a descendant.
fn check_confinement(pid: u32) -> std::result::Result<bool, String> {
    let own = std::process::id();
    if comes_from(pid, own) {
        return Ok(pid != own);
    }
    let (Some(theirs), Some(ours)) = (Confines::of(pid), Confines::of(own)) else {
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
fn converse(stream: UnixStream, shared: &Shared, is_inside: bool) {
    if let Err(error) = stream.set_write_timeout(Some(WRITE_LIMIT)) {
        log::warn!("control connection: {error}");
        return;
    }
    if frame::write(&mut &stream, &shared.greeting, MAX_GREETING).is_err() {
        return;
    }
    while wait_for_request(&stream, shared) {
        let bytes = match frame::read(&mut Until::new(&stream, shared.request_limit), MAX_REQUEST) {
            Ok(bytes) => bytes,
            Err(FrameError::Closed) => return,
            Err(error) => return refuse(&stream, &error.to_string()),
        };
        let request = match codec::decode::<Request>(&bytes) {
            Ok(request) => request,
            Err(error) => return refuse(&stream, &error),
        };
        let _busy = Busy::new(shared);
        let ends = request == Request::Unmount;
        // Only one list at a time is on disk for a command that does not read its lists.
        let _turn = (is_inside && request.is_listed()).then(|| shared.lists_inside.lock());
        let mut result = (shared.handler)(request);
        let done = ends && result.is_ok();
        if let Err(error) = answer(&stream, &mut result) {
            log::debug!("answer a control request: {error}");
            return;
        }
        if done {
            shared.waiting.lock().push(stream);
            return;
        }
    }
}

/// Waits for the next request. False if none will come.
fn wait_for_request(stream: &UnixStream, shared: &Shared) -> bool {
    let end = Instant::now() + IDLE_LIMIT;
    while Instant::now() < end && !shared.ending.load(Ordering::SeqCst) {
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
fn answer(stream: &UnixStream, result: &mut Result<Reply>) -> io::Result<()> {
    if let Some(bytes) =
        codec::encode(result).ok().filter(|bytes| bytes.len() <= MAX_REPLY as usize)
    {
        frame::write(&mut &*stream, &bytes, MAX_REPLY)?;
        let Some(changes) = result.as_mut().ok().and_then(Reply::changes) else { return Ok(()) };
        changes.for_each_chunk(|piece| frame::write(&mut &*stream, piece, MAX_PIECE))?;
        return frame::write(&mut &*stream, &[], MAX_PIECE);
    }
    let error: Result<Reply> =
        Err(Error::new(Kind::Failed, "send the reply", "it is too long").hint("name fewer paths"));
    let bytes = codec::encode(&error).map_err(io::Error::other)?;
    frame::write(&mut &*stream, &bytes, MAX_REPLY)
}

/// Reports a malformed message to the peer, and ends the connection.
fn refuse(stream: &UnixStream, reason: &str) {
    log::warn!("refused a control message: {reason}");
    let mut error: Result<Reply> = Err(Error::new(Kind::Failed, "read a request", reason));
    if answer(stream, &mut error).and_then(|()| stream.shutdown(Shutdown::Both)).is_err() {
        log::debug!("the peer has closed the connection");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::super::connect;
    use super::*;
    use crate::types::TreePath;

    fn echo(request: Request) -> Result<Reply> {
        match request {
            Request::Unmount | Request::Discard { .. } => Ok(Reply::Done),
            Request::Log => Ok(Reply::Log(Vec::new())),
            other => Err(Error::new(Kind::Conflict, "test", format!("{other:?}")).hint("none")),
        }
    }

    fn serve(store: &Path) -> Server {
        Listener::bind(store).unwrap().serve(Greeting::of_this_process(b"/mnt"), echo).unwrap()
    }

    fn raw(store: &Path) -> UnixStream {
        let stream = UnixStream::connect(store.join(SOCKET)).unwrap();
        frame::read(&mut &stream, MAX_GREETING).unwrap();
        stream
    }

    #[test]
    fn replies_and_errors_reach_the_client() {
        let store = tempfile::tempdir().unwrap();
        let server = serve(store.path());
        let mut client = connect(store.path()).unwrap().unwrap();
        assert_eq!(
            (client.greeting().pid, &client.greeting().mount[..]),
            (std::process::id(), &b"/mnt"[..])
        );
        assert_eq!(client.call(&Request::Log), Ok(Reply::Log(Vec::new())));
        let paths = vec![TreePath::parse(b"a\xff").unwrap()];
        let error = client
            .call(&Request::Apply {
                paths,
                dry_run: true,
                undo: false,
                consent: Default::default(),
            })
            .unwrap_err();
        assert_eq!((error.kind, error.hint.as_deref()), (Kind::Conflict, Some("none")));
        assert_eq!(client.call(&Request::Discard { detach_mounts: false }), Ok(Reply::Done));
        server.stop();
        assert!(connect(store.path()).unwrap().is_none());
    }

    #[test]
    fn the_socket_is_private_and_a_dead_one_is_replaced() {
        let store = tempfile::tempdir().unwrap();
        assert!(connect(store.path()).unwrap().is_none());
        assert!(connect(&store.path().join("missing")).unwrap().is_none());
        // The socket of a process that died without unlinking it.
        drop(UnixListener::bind(store.path().join(SOCKET)).unwrap());
        assert!(connect(store.path()).unwrap().is_none());
        let server = serve(store.path());
        let meta = std::fs::symlink_metadata(store.path().join(SOCKET)).unwrap();
        assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
        assert_eq!(meta.uid(), geteuid().as_raw());
        assert!(connect(store.path()).unwrap().is_some());
        drop(server);
        assert!(!store.path().join(SOCKET).exists());
    }

    #[test]
    fn a_store_path_may_exceed_the_length_of_a_socket_address() {
        let top = tempfile::tempdir().unwrap();
        let store = top.path().join("d".repeat(200)).join("e".repeat(200));
        std::fs::create_dir_all(&store).unwrap();
        let server = serve(&store);
        let mut client = connect(&store).unwrap().unwrap();
        assert_eq!(client.call(&Request::Log), Ok(Reply::Log(Vec::new())));
        server.stop();
    }

    #[test]
    fn a_malformed_message_ends_its_own_connection_only() {
        let store = tempfile::tempdir().unwrap();
        let _server = serve(store.path());
        let junk: [&[u8]; 4] = [
            &[0xff; 64],                     // a length above the limit
            &[3, 0, 0, 0, 0xff, 0xff, 0xff], // no request
            &[2, 0, 0, 0, 1, 0],             // a request, and bytes left over
            &[0, 0, 0, 0],                   // an empty payload
        ];
        for bytes in junk {
            let mut stream = raw(store.path());
            stream.write_all(bytes).unwrap();
            let reply = frame::read(&mut stream, MAX_REPLY).unwrap();
            assert!(codec::decode::<Result<Reply>>(&reply).unwrap().is_err(), "{bytes:?}");
            // With unread junk in its queue the socket ends with ECONNRESET, otherwise with a
            // normal end.
            assert!(matches!(stream.read(&mut [0; 9]), Ok(0) | Err(_)), "{bytes:?}");
        }
        assert!(connect(store.path()).unwrap().unwrap().call(&Request::Log).is_ok());
    }

    #[test]
    fn a_request_must_arrive_in_time_even_byte_by_byte() {
        let store = tempfile::tempdir().unwrap();
        let mut listener = Listener::bind(store.path()).unwrap();
        listener.request_limit = Duration::from_millis(200);
        let _server = listener.serve(Greeting::of_this_process(b""), echo).unwrap();
        let mut stream = raw(store.path());
        let writer = stream.try_clone().unwrap();
        let dribble = thread::spawn(move || {
            for byte in [100u8, 0, 0, 0].into_iter().chain([0; 96]) {
                if (&writer).write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        let reply = frame::read(&mut stream, MAX_REPLY).unwrap();
        let error = codec::decode::<Result<Reply>>(&reply).unwrap().unwrap_err();
        assert_eq!(error.reason, "timed out");
        dribble.join().unwrap();
    }

    #[test]
    fn a_client_may_pause_between_requests() {
        let store = tempfile::tempdir().unwrap();
        let mut listener = Listener::bind(store.path()).unwrap();
        listener.request_limit = Duration::from_millis(50);
        let _server = listener.serve(Greeting::of_this_process(b""), echo).unwrap();
        let mut client = connect(store.path()).unwrap().unwrap();
        for _ in 0..3 {
            assert_eq!(client.call(&Request::Log), Ok(Reply::Log(Vec::new())));
            thread::sleep(Duration::from_millis(200));
        }
    }

    #[test]
    fn only_its_user_and_root_may_talk_to_a_daemon() {
        assert!(is_served(1000, 1000) && is_served(0, 1000) && is_served(0, 0));
        assert!(!is_served(1001, 1000) && !is_served(1000, 0) && !is_served(65534, 1000));
    }

    #[test]
    fn the_number_of_connections_is_limited() {
        let store = tempfile::tempdir().unwrap();
        let _server = serve(store.path());
        let held: Vec<_> =
            (0..MAX_CONNECTIONS).map(|_| connect(store.path()).unwrap().unwrap()).collect();
        assert!(connect(store.path()).is_err());
        drop(held);
        let again = (0..100).any(|_| {
            thread::sleep(Duration::from_millis(20));
            connect(store.path()).is_ok()
        });
        assert!(again);
    }

    #[test]
    fn the_client_of_an_unmount_waits_for_the_end_of_the_daemon() {
        let store = tempfile::tempdir().unwrap();
        let server = serve(store.path());
        let mut client = connect(store.path()).unwrap().unwrap();
        assert_eq!(client.call(&Request::Unmount), Ok(Reply::Done));
        let waiter = thread::spawn(move || client.wait_for_end(Duration::from_secs(20)));
        thread::sleep(Duration::from_millis(50));
        assert!(!waiter.is_finished());
        server.stop();
        assert!(waiter.join().unwrap());

        let server = serve(store.path());
        let mut client = connect(store.path()).unwrap().unwrap();
        assert_eq!(client.call(&Request::Unmount), Ok(Reply::Done));
        assert!(!client.wait_for_end(Duration::from_millis(50)));
        drop(server);
    }
}
