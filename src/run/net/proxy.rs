//! The proxy: accepts the connections of the command, and serves them.
//!
//! * It connects to an origin only after the list has admitted it ([`outward::open`]).
//! * The command is bounded. Each connection has a thread, at most [`Limits::connections`] of them.
//!   The head of a request is bounded in length and time, and the number of printed refusals is
//!   bounded.
//! * When the command has ended, no thread waits for it or for an origin. A thread may still wait
//!   for the resolver and ends after that; [`Proxy::finish`] does not wait for it.

use std::collections::HashSet;
use std::fmt::{self, Display};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::poll::PollFlags;
use nix::unistd::pipe2;
use parking_lot::{Condvar, Mutex};

use super::allow::{AllowList, Target};
use super::body::Body;
use super::http::{self, Request};
use super::outward::{self, Denied, HostResolver, Resolver};
use super::relay::relay;
use super::socks::{self, Answer};
use super::stream::{Client, Until, is_not_ready};
use crate::error::{Attempt, Result};

/// The stack size of a thread. Modules of the resolver need this much.
const STACK: usize = 512 << 10;
/// The time that the end of a run waits for the threads.
const PATIENCE: Duration = Duration::from_secs(1);
/// The pause after a failed accept(2), for example when descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);
/// The maximum length of a printed name, in bytes.
const LONGEST_NAME: usize = 300;

/// Prints one line for people, given without a newline. Several threads call it.
pub type Report = Arc<dyn Fn(&str) + Send + Sync>;

/// Limits on what a command can use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Concurrent connections.
    pub(super) connections: usize,
    /// Time to send a request, and time to send the proxy's own response.
    pub(super) request: Duration,
    /// Time to reach the origin.
    pub(super) connect: Duration,
    /// The number of different refusals that are printed.
    pub(super) printed: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 256,
            request: Duration::from_secs(10),
            connect: Duration::from_secs(30),
            printed: 50,
        }
    }
}

/// A running proxy. Dropping it stops it.
pub(crate) struct Proxy {
    /// None when the proxy is to stop.
    run: Option<OwnedFd>,
    shared: Arc<Shared>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("list", &self.shared.list).finish_non_exhaustive()
    }
}

struct Shared {
    list: AllowList,
    limits: Limits,
    resolver: Box<dyn Resolver>,
    report: Report,
    /// Its other end is closed when the command has ended.
    stop: OwnedFd,
    tally: Mutex<Tally>,
    /// The number of live threads.
    live: Mutex<usize>,
    ended: Condvar,
}

#[derive(Default)]
struct Tally {
    admitted: u64,
    refused: u64,
    /// Hosts and ports whose refusal was printed.
    names: HashSet<String>,
    /// Whether it was printed that there are too many connections.
    is_full_reported: bool,
}

impl Proxy {
    /// Starts to accept on `listener`.
    ///
    /// # Errors
    /// Those of pipe(2), fcntl(2), and of starting a thread.
    pub(crate) fn start(listener: OwnedFd, list: AllowList, report: Report) -> Result<Proxy> {
        Proxy::with(listener.into(), list, report, Box::new(HostResolver), Limits::default())
            .attempt(|| "start the proxy of the command")
    }

    pub(super) fn with(
        listener: TcpListener,
        list: AllowList,
        report: Report,
        resolver: Box<dyn Resolver>,
        limits: Limits,
    ) -> io::Result<Proxy> {
        let (stop, run) = pipe2(OFlag::O_CLOEXEC)?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            list,
            limits,
            resolver,
            report,
            stop,
            tally: Mutex::default(),
            live: Mutex::new(0),
            ended: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        shared.spawn(move || accepting.accept(&listener))?;
        Ok(Proxy { run: Some(run), shared })
    }

    /// Ends all connections, and reports how many were refused.
    fn finish(&mut self) {
        if self.run.take().is_none() {
            return;
        }
        let mut live = self.shared.live.lock();
        let is_left =
            self.shared.ended.wait_while_for(&mut live, |live| *live > 0, PATIENCE).timed_out();
        drop(live);
        if is_left {
            log::debug!("a thread of the proxy still resolves a name");
        }
        let tally = self.shared.tally.lock();
        let Tally { admitted, refused, names, .. } = &*tally;
        if *refused > 0 {
            let more = if names.len() < self.shared.limits.printed { "" } else { " or more" };
            (self.shared.report)(&format!(
                "network: refused in all {refused} connections to {}{more} different hosts or \
             ports; admitted {admitted}",
                names.len()
            ));
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Counts a live thread.
struct Alive(Arc<Shared>);

impl Drop for Alive {
    fn drop(&mut self) {
        *self.0.live.lock() -= 1;
        self.0.ended.notify_all();
    }
}

impl Shared {
    fn spawn(self: &Arc<Shared>, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        *self.live.lock() += 1;
        let alive = Alive(Arc::clone(self));
        let work = move || {
            work();
            drop(alive);
        };
        std::thread::Builder::new().name("net".to_owned()).stack_size(STACK).spawn(work).map(drop)
    }

    /// Accepts connections until the command has ended.
    fn accept(self: &Arc<Shared>, listener: &TcpListener) {
        loop {
            let until = Until { stop: self.stop.as_fd(), time: None };
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if is_not_ready(&error) => {
                    match until.wait(&[(listener.as_fd(), PollFlags::POLLIN)]) {
                        Ok(_) => continue,
                        Err(_) => return,
                    }
                }
                Err(error) => {
                    log::debug!("accept a connection of the command: {error}");
                    match until.at_most(PAUSE).wait(&[]) {
                        Err(error) if error.kind() == io::ErrorKind::TimedOut => continue,
                        _ => return,
                    }
                }
            };
            let Ok(client) = Client::new(stream) else { continue };
            // This thread is one of the live ones.
            if *self.live.lock() > self.limits.connections {
                self.refuse_connection(client);
                continue;
            }
            let shared = Arc::clone(self);
            if let Err(error) = self.spawn(move || shared.serve(client)) {
                log::debug!("start a thread for a connection: {error}");
            }
        }
    }

    /// Refuses a connection above the limit, without waiting.
    fn refuse_connection(&self, mut client: Client) {
        let most = self.limits.connections;
        let reason = format!("this command has {most} connections, which is the limit");
        if !std::mem::replace(&mut self.tally.lock().is_full_reported, true) {
            (self.report)(&format!("network: {reason}"));
        }
        let now = Until::within(&self.stop, Duration::from_millis(1));
        drop(client.write(&http::answer("503 Service Unavailable", &reason), now));
    }

    fn until(&self, time: Duration) -> Until<'_> {
        Until::within(&self.stop, time)
    }

    fn serve(&self, mut client: Client) {
        let until = self.until(self.limits.request);
        let served = client.read_more(until).and_then(|()| match client.read.first() {
            Some(&socks::VERSION) => self.serve_socks(&mut client, until),
            _ => self.serve_http(&mut client, until),
        });
        match served {
            Ok(()) => client.close(self.stop.as_fd()),
            Err(error) => {
                log::debug!("a connection of the command: {error}");
                client.reset();
            }
        }
    }

    fn serve_socks(&self, client: &mut Client, until: Until<'_>) -> io::Result<()> {
        let target = match socks::read_request(client, until)? {
            Some(socks::Request::Connect(target)) => target,
            Some(socks::Request::NotAHost(name, port)) => {
                self.refuse(
                    &format!("{}:{port}", name.escape_ascii()),
                    "it is not a host name or address",
                );
                return client.write(&Answer::Refused.bytes(), self.until(self.limits.request));
            }
            Some(socks::Request::Other(answer)) => return client.write(&answer.bytes(), until),
            None => return Ok(()),
        };
        let answer = match self.open(&target) {
            Ok(origin) => {
                client.write(&Answer::Connected.bytes(), self.until(self.limits.request))?;
                return relay(client, origin, Vec::new(), Body::Open, self.stop.as_fd());
            }
            Err(Denied::Refused(_)) => Answer::Refused,
            Err(Denied::Unreachable(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Answer::ConnectionRefused
            }
            Err(Denied::Unresolved(_) | Denied::Unreachable(_)) => Answer::HostUnreachable,
        };
        client.write(&answer.bytes(), self.until(self.limits.request))
    }

    fn serve_http(&self, client: &mut Client, until: Until<'_>) -> io::Result<()> {
        let head = match read_head(client, until) {
            Ok(Some(head)) => head,
            Ok(None) => {
                let reason =
                    format!("the head of the request is longer than {} bytes", http::LONGEST);
                return self.answer(client, "431 Request Header Fields Too Large", &reason);
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return self.answer(
                    client,
                    "408 Request Timeout",
                    "the request took too long to arrive",
                );
            }
            Err(error) => return Err(error),
        };
        let request = match http::parse(&head) {
            Ok(request) => request,
            Err(reason) => {
                let line =
                    head.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
                self.refuse(&format!("the request '{}'", line.escape_ascii()), reason);
                return self.answer(client, "400 Bad Request", reason);
            }
        };
        let (target, head, body) = match request {
            Request::Connect(target) => (target, Vec::new(), Body::Open),
            Request::Forward(target, head, body) => (target, head, body),
        };
        let (status, reason) = match self.open(&target) {
            Ok(origin) => {
                if body == Body::Open {
                    let established = b"HTTP/1.1 200 Connection established\r\n\r\n";
                    client.write(established, self.until(self.limits.request))?;
                }
                return relay(client, origin, head, body, self.stop.as_fd());
            }
            Err(Denied::Refused(why)) => ("403 Forbidden", format!("{target} is refused: {why}")),
            Err(Denied::Unresolved(error)) => {
                ("502 Bad Gateway", format!("{} cannot be resolved: {error}", target.host))
            }
            Err(Denied::Unreachable(error)) if error.kind() == io::ErrorKind::TimedOut => {
                ("504 Gateway Timeout", format!("{target} does not answer"))
            }
            Err(Denied::Unreachable(error)) => {
                ("502 Bad Gateway", format!("{target} cannot be reached: {error}"))
            }
        };
        self.answer(client, status, &reason)
    }

    fn answer(&self, client: &mut Client, status: &str, reason: &str) -> io::Result<()> {
        client.write(&http::answer(status, reason), self.until(self.limits.request))
    }

    /// Connects to the target if the list admits it, and counts the result.
    fn open(&self, target: &Target) -> std::result::Result<TcpStream, Denied> {
        let until = self.until(self.limits.connect);
        let opened = outward::open(&self.list, self.resolver.as_ref(), target, until);
        match &opened {
            Ok(_) => self.tally.lock().admitted += 1,
            Err(Denied::Refused(why)) => self.refuse(target, why),
            Err(Denied::Unresolved(_) | Denied::Unreachable(_)) => {}
        }
        opened
    }

    /// Counts a refusal, and reports the first one of each name.
    fn refuse(&self, what: &(impl Display + ?Sized), why: &str) {
        let mut what = what.to_string();
        if let Some((end, _)) = what.char_indices().nth(LONGEST_NAME) {
            what.truncate(end);
        }
        let mut tally = self.tally.lock();
        tally.refused += 1;
        let most = self.limits.printed;
        if tally.names.len() >= most || !tally.names.insert(what.clone()) {
            return;
        }
        let is_last = tally.names.len() == most;
        // A slow reader of standard error must not hold the lock.
        drop(tally);
        (self.report)(&format!("network: refused {what}: {why}"));
        if is_last {
            (self.report)("network: further refusals of other hosts are only counted");
        }
    }
}

/// Reads the head of a request. Bytes after it stay with the client. None if it is too long.
fn read_head(client: &mut Client, until: Until<'_>) -> io::Result<Option<Vec<u8>>> {
    let mut searched = 0;
    loop {
        if let Some(end) = http::end_of_head(&client.read, searched) {
            return Ok((end <= http::LONGEST).then(|| client.read.drain(..end).collect()));
        }
        searched = client.read.len();
        if searched >= http::LONGEST {
            return Ok(None);
        }
        client.read_more(until)?;
    }
}
