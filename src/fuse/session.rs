//! Takes the requests of a session and serves them, in one thread or several.
//!
//! A session begins with one thread. A thread that takes a request and leaves no other one idle
//! starts another, up to a limit. So a session has one thread more than were ever busy at the same
//! time, and the idle ones sleep. `turns.rs` decides which of them take requests.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::{Builder, Scope};

use parking_lot::Mutex;

use crate::fuse::init::MAX_REQUEST;
use crate::fuse::server::Server;
use crate::fuse::turns::Turns;
use crate::fuse::wire::{Device, Reply, RequestBuffer};
use crate::sys::fusectl::Connection;

/// The most threads that serve unless the user asks for another number. The readers (`turns.rs`),
/// one by default, serve while they keep up. Each of the others can take over from one that waits
/// for a disk.
pub(super) const THREADS: u8 = 16;

/// The threads of a session, and what they share.
pub(super) struct Session {
    device: Arc<Device>,
    server: Server,
    turns: Turns,
    /// The number of threads that were started, and the most there may be.
    started: AtomicU8,
    most: u8,
    /// Why a thread ended early.
    failed: Mutex<io::Result<()>>,
    /// The connection, if this process may abort it.
    connection: Option<Arc<Connection>>,
}

/// Ends the turns of all threads when one ends, also by a panic.
struct EndTurns<'a> {
    session: &'a Session,
    /// The session has ended, and not just this thread.
    is_at_end: bool,
}

impl Drop for EndTurns<'_> {
    fn drop(&mut self) {
        self.session.turns.end();
        if !self.is_at_end {
            self.session.abort();
        }
    }
}

impl Session {
    /// A session of at most `most` threads, of which at most `parallel` take requests at a time.
    /// `connection` is the one of the device.
    pub(super) fn new(
        (device, connection): (Arc<Device>, Option<Arc<Connection>>),
        server: Server,
        (most, parallel): (u8, u8),
    ) -> Session {
        let turns = Turns::new(parallel.min(most));
        let (started, failed) = (AtomicU8::new(1), Mutex::new(Ok(())));
        Session { device, server, turns, started, most, failed, connection }
    }

    /// Ends the session because one of its threads has failed. Otherwise the others would end only
    /// once each has got another request.
    fn abort(&self) {
        let aborted = match &self.connection {
            Some(connection) => connection.abort(),
            None => Err(io::Error::other("no access to the connection's control files")),
        };
        match aborted {
            // It has ended already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                log::warn!("a serving thread failed, and others may wait for a request: {error}");
            }
            Ok(()) => {}
        }
    }

    /// Serves until the session has ended, in this thread and in those that it starts.
    ///
    /// # Errors
    /// As read(2) of the device, and if a thread panics.
    pub(super) fn run(self) -> io::Result<()> {
        let served = std::thread::scope(|scope| self.serve(scope, false));
        self.server.finish();
        served.and(self.failed.into_inner())
    }

    /// Starts one more thread, unless there are as many as there may be.
    fn start<'s>(&'s self, scope: &'s Scope<'s, '_>) {
        let next = |started: u8| (started < self.most).then_some(started + 1);
        let Ok(number) = self.started.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
        else {
            return;
        };
        let serve = move || {
            let served = catch_unwind(AssertUnwindSafe(|| self.serve(scope, true)));
            let served =
                served.unwrap_or_else(|_| Err(io::Error::other("a serving thread panicked")));
            if served.is_err() {
                *self.failed.lock() = served;
            }
        };
        let thread = Builder::new().name(format!("jailfs-serve-{number}"));
        if let Err(error) = thread.spawn_scoped(scope, serve) {
            log::warn!("cannot start a serving thread: {error}");
            self.started.fetch_sub(1, Ordering::Relaxed);
            self.turns.refused();
        }
    }

    /// Serves in this thread; `is_new` if another one has started it.
    fn serve<'s>(&'s self, scope: &'s Scope<'s, '_>, mut is_new: bool) -> io::Result<()> {
        let mut end = EndTurns { session: self, is_at_end: false };
        let mut buffer = RequestBuffer::new(MAX_REQUEST);
        while let Some(turn) = self.turns.take(std::mem::take(&mut is_new)) {
            if turn.starts_another {
                self.start(scope);
            }
            let Some((request, body)) = buffer.receive(&self.device)? else { break };
            self.turns.give();
            let reply = Reply::to(request.unique, &self.device);
            if self.server.dispatch(&request, body, reply) {
                break;
            }
        }
        end.is_at_end = true;
        Ok(())
    }
}
