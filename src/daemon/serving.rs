//! Serves a store: its mounted heads, and its control socket.

use std::path::Path;
use std::sync::Arc;

use super::door::{Access, Door};
use super::head::ServedHead;
use super::heads::Heads;
use super::plan::Choice;
use super::race::ServedRace;
use crate::control::{
    Answer, Answered, Call, Conversation, Greeting, Listener, Message, Peer, RaceOrder, Server,
};
use crate::error::{Error, Kind, Result};
use crate::fuse::Handed;
use crate::sandbox::{Rev, Sandbox};
use crate::sys;

/// The mounted heads of a store, and its control socket. Dropping it ends all mounts, and closes
/// the store unless the caller has it open too.
pub struct Serving {
    heads: Arc<Heads>,
    servers: Vec<Server>,
}

impl Serving {
    /// Mounts the head of `sandbox` at `mount_point`, and serves it and the store from threads of
    /// this process.
    ///
    /// # Errors
    /// The socket cannot be bound, or the mount cannot be made.
    pub fn start(
        sandbox: Arc<Sandbox>,
        mount_point: &Path,
        choice: &Choice,
        access: Access,
    ) -> Result<Serving> {
        // Bind the socket first, so that it exists when the mount is visible.
        let listener = Listener::bind(sandbox.store_path())?;
        let head = sandbox.head_name().to_owned();
        Serving::start_with(listener, access, |heads| {
            heads.mount(&head, || ServedHead::mount(sandbox, mount_point, choice))
        })
    }

    /// Serves `sandbox` from threads of this process, in a mount that was made for it in another
    /// mount namespace. There it is visible at `mount_point`. That is a view of its own with the
    /// control socket in it, so `listener` existed before.
    ///
    /// # Errors
    /// The mount cannot be served.
    pub fn adopt(
        sandbox: Arc<Sandbox>,
        listener: Listener,
        handed: Handed,
        mount_point: &Path,
        choice: &Choice,
        access: Access,
    ) -> Result<Serving> {
        let head = sandbox.head_name().to_owned();
        Serving::start_with(listener, access, |heads| {
            heads.mount(&head, || ServedHead::adopt(sandbox, handed, mount_point, choice))
        })
    }

    /// Serves the store of `sandbox` without a mount. Those of a race are added later.
    ///
    /// # Errors
    /// The socket cannot be bound or served.
    pub fn open(sandbox: Arc<Sandbox>, access: Access) -> Result<Serving> {
        raise_limits()?;
        let listener = Listener::bind(sandbox.store_path())?;
        let heads = Arc::new(Heads::new(Some(sandbox)));
        let mut serving = Serving { heads, servers: Vec::new() };
        serving.listen(listener, access)?;
        Ok(serving)
    }

    /// Makes `attempts` forks of the head of `caller`, for a race whose commands this process runs.
    ///
    /// # Errors
    /// Those of the store.
    pub fn begin_race(&self, caller: &Arc<Sandbox>, attempts: u32) -> Result<ServedRace> {
        ServedRace::begin(&self.heads, caller, attempts, std::process::id())
    }

    fn start_with(
        listener: Listener,
        access: Access,
        mount: impl FnOnce(&Arc<Heads>) -> Result<bool>,
    ) -> Result<Serving> {
        raise_limits()?;
        let mut serving = Serving { heads: Arc::new(Heads::new(None)), servers: Vec::new() };
        mount(&serving.heads)?;
        serving.listen(listener, access)?;
        Ok(serving)
    }

    /// Serves the clients of another control socket.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn listen(&mut self, listener: Listener, access: Access) -> Result<()> {
        self.servers.push(serve_clients(&self.heads, listener, access)?);
        Ok(())
    }

    /// The mounted heads.
    pub(super) fn heads(&self) -> &Arc<Heads> {
        &self.heads
    }

    /// Fails if the mount of a head was aborted or unmounted.
    ///
    /// # Errors
    /// `Failed`.
    pub fn check_served(&self, head: &str) -> Result<()> {
        self.heads.check_served(head)
    }

    /// Waits until no head is mounted.
    pub fn wait(&self) {
        self.heads.wait();
    }

    /// Ends all mounts, stops serving, and closes the store.
    pub fn close(self) {
        drop(self);
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let waiting = self.heads.end();
        // A client may hold a sandbox until it has its reply.
        self.servers.drain(..).for_each(Server::stop);
        waiting.iter().for_each(|waiting| waiting.end());
    }
}

/// Serves the clients of a control socket.
///
/// # Errors
/// The thread cannot be started.
fn serve_clients(heads: &Arc<Heads>, listener: Listener, access: Access) -> Result<Server> {
    let heads = Arc::clone(heads);
    let door = Arc::new(Door::new(&heads, access));
    let begin = move || -> Box<dyn Conversation> {
        Box::new(Visit { heads: Arc::clone(&heads), door: Arc::clone(&door), race: None })
    };
    listener.serve(Greeting::of_this_process(), begin)
}

/// Raises the resource limits of this process to the required values, before it writes to a store.
///
/// # Errors
/// `CannotMount`: a limit is too low, and this user may not raise it.
pub(super) fn raise_limits() -> Result<()> {
    sys::limits::raise().map_err(|too_low| {
        Error::new(Kind::CannotMount, "serve a sandbox", too_low.to_string())
            .hint("raise the hard limit of this user, in /etc/security/limits.conf for example")
    })
}

/// One connection of a client.
struct Visit {
    heads: Arc<Heads>,
    door: Arc<Door>,
    /// The race that the client runs. It keeps the store open until the connection ends, because
    /// the client decides about the winner's changes after the race.
    race: Option<ServedRace>,
}

impl Visit {
    /// Begins a race of a head, whose commands the client runs.
    fn begin_race(&self, head: &str, attempts: u32, peer: Peer) -> Result<ServedRace> {
        let ending = || Error::new(Kind::Failed, "begin a race", "the daemon is ending");
        let caller = self.heads.sandbox(head)?.ok_or_else(ending)?;
        ServedRace::begin(&self.heads, &caller, attempts, peer.pid)
    }
}

impl Conversation for Visit {
    fn answer(&mut self, call: Call, peer: Peer) -> Result<Answered> {
        let head = self.door.meant(call.head, peer)?;
        self.door.check(&head, &call.message, peer)?;
        if self.race.is_some() && self.heads.is_ended_by_signal() {
            // The attempts have lost their mounts. None wins, and the forks are abandoned.
            return Err(Error::new(Kind::Failed, "run a race", "a signal ends the daemon")
                .hint("the forks of the attempts stay; 'jailfs forks' lists them"));
        }
        match (call.message, &self.race) {
            (Message::Race(RaceOrder::Begin(attempts)), None) => {
                let race = self.begin_race(&head, attempts, peer)?;
                let start = match race.start() {
                    Rev::Id(start) => Some(*start),
                    _ => None,
                };
                let names = race.names().to_vec();
                self.race = Some(race);
                Ok(Answer::Race { names, start }.into())
            }
            (Message::Race(order), Some(race)) => race.order(&head, order).map(Answered::from),
            (Message::Race(_), None) => {
                Err(Error::new(Kind::Usage, "run a race", "the connection has none"))
            }
            (message, race) => {
                let answered = self.door.answer(head, message, peer);
                if let (Some(race), Ok(Answered { answer: Answer::Reply(reply), .. })) =
                    (race, &answered)
                {
                    race.note(reply);
                }
                answered
            }
        }
    }

    fn is_held(&self) -> bool {
        self.race.is_some()
    }
}
