//! Takes the requests of a session and serves them, in one thread or several.

use std::io;
use std::sync::Arc;
use std::thread::Builder;

use crate::fuse::init::MAX_REQUEST;
use crate::fuse::server::Server;
use crate::fuse::turns::Turns;
use crate::fuse::wire::{Device, Reply, RequestBuffer};

/// The threads that serve unless the user asks for another number. One of them serves while it
/// keeps up; each of the others can take over from one that waits for a disk.
pub(super) const THREADS: u8 = 4;

/// The threads of a session, and what they share.
pub(super) struct Session {
    device: Arc<Device>,
    server: Server,
    turns: Turns,
}

/// Ends the turns of all threads when one ends, also by a panic.
struct EndTurns<'a>(&'a Turns);

impl Drop for EndTurns<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Session {
    pub(super) fn new(device: Arc<Device>, server: Server) -> Session {
        Session { device, server, turns: Turns::default() }
    }

    /// Serves until the session has ended, in this thread and `threads - 1` more.
    ///
    /// # Errors
    /// As read(2) of the device, and if a thread cannot be started or panics.
    pub(super) fn run(self, threads: u8) -> io::Result<()> {
        let served = std::thread::scope(|scope| {
            let more: Vec<_> = (1..threads)
                .map(|number| {
                    let name = format!("jailfs-serve-{number}");
                    Builder::new().name(name).spawn_scoped(scope, || self.serve()).inspect_err(
                        |error| {
                            log::warn!("cannot start a serving thread: {error}");
                        },
                    )
                })
                .collect();
            let mut served = self.serve();
            for thread in more {
                let result = match thread.map(std::thread::ScopedJoinHandle::join) {
                    Ok(Ok(result)) => result,
                    Ok(Err(_)) => Err(io::Error::other("a serving thread panicked")),
                    Err(error) => Err(error),
                };
                served = served.and(result);
            }
            served
        });
        self.server.finish();
        served
    }

    /// Serves in this thread.
    fn serve(&self) -> io::Result<()> {
        let _end = EndTurns(&self.turns);
        let mut buffer = RequestBuffer::new(MAX_REQUEST);
        while self.turns.take() {
            let Some((request, body)) = buffer.receive(&self.device)? else { return Ok(()) };
            self.turns.give();
            let reply = Reply::to(request.unique, &self.device);
            if self.server.dispatch(&request, body, reply) {
                return Ok(());
            }
        }
        Ok(())
    }
}
