//! Serves a store: its mounted heads, and its control socket.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::head::ServedHead;
use super::heads::Heads;
use super::plan::{Choice, MountChoice, MountPlan};
use crate::control::{Answer, Answered, Call, Greeting, Listener, Message, Peer, Server};
use crate::error::{Error, Kind, Result};
use crate::fuse::Handed;
use crate::sandbox::{Reply, Request, Sandbox};
use crate::store::io::codec;
use crate::sys;

/// Refuses requests before they reach the sandbox.
pub type Gate = fn(&Request) -> Result<()>;

/// The rights of the clients of a control socket.
#[derive(Clone)]
pub enum Access {
    /// Everything.
    Full,
    /// All that this gate admits, except to mount a head. A command inside means this head only.
    OfRun {
        /// The gate.
        gate: Gate,
        /// The head.
        head: String,
        /// The forks that the command has made. It may drop these only.
        forked: MadeForks,
    },
}

/// The names of forks.
pub type MadeForks = Arc<Mutex<Vec<String>>>;

impl Access {
    /// The head to which a client is pinned.
    fn pin(&self, peer: Peer) -> Option<&str> {
        match self {
            Access::OfRun { head, .. } if peer.is_inside => Some(head),
            Access::OfRun { .. } | Access::Full => None,
        }
    }
}

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

    /// Serves the store of `sandbox` without a mount. Mounts are added by [`Serving::add`].
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

    /// Serves `sandbox`, another head of the same store, in a mount that was made for it in another
    /// mount namespace, as [`Serving::adopt`] does. Its clients use `listener`.
    ///
    /// # Errors
    /// The mount cannot be served.
    pub fn add(
        &self,
        sandbox: Arc<Sandbox>,
        (listener, access): (Listener, Access),
        handed: Handed,
        mount_point: &Path,
        choice: &Choice,
    ) -> Result<ServedApart> {
        let head = sandbox.head_name().to_owned();
        let is_mounted =
            self.heads.mount(&head, || ServedHead::adopt(sandbox, handed, mount_point, choice))?;
        if !is_mounted {
            let attempt = format!("mount head '{head}'");
            return Err(Error::new(Kind::Failed, attempt, "the store is being closed"));
        }
        let mut served = ServedApart { heads: Arc::clone(&self.heads), name: head, server: None };
        served.server = Some(self.serve_clients(listener, access)?);
        Ok(served)
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
        self.servers.push(self.serve_clients(listener, access)?);
        Ok(())
    }

    fn serve_clients(&self, listener: Listener, access: Access) -> Result<Server> {
        let door = Door { heads: Arc::clone(&self.heads), access };
        listener.serve(Greeting::of_this_process(), move |call, peer| door.answer(call, peer))
    }

    /// The mounted heads.
    pub(super) fn heads(&self) -> &Arc<Heads> {
        &self.heads
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

/// A head that is served beside others. Dropping it ends its mount, and then its control socket.
pub struct ServedApart {
    heads: Arc<Heads>,
    name: String,
    server: Option<Server>,
}

impl Drop for ServedApart {
    fn drop(&mut self) {
        self.heads.end_one(&self.name);
        self.server.take().map(Server::stop).unwrap_or_default();
    }
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

/// Answers the clients of one control socket.
struct Door {
    heads: Arc<Heads>,
    access: Access,
}

impl Door {
    fn answer(&self, call: Call, peer: Peer) -> Result<Answered> {
        let head = self.meant(call.head, peer)?;
        self.check(&head, &call.message, peer)?;
        match call.message {
            Message::Mounts => Ok(Answer::Mounts(self.heads.list(head)).into()),
            Message::Mount(plan) => self.mount(&head, &plan).map(Answered::from),
            Message::Request(Request::Unmount) => self.unmount(&head),
            Message::Request(request) => {
                Ok(Answer::Reply(Box::new(self.handle(&head, request, peer)?)).into())
            }
        }
    }

    /// The head that a client means.
    ///
    /// # Errors
    /// `InUse`: a command of `run` names another head than its own.
    fn meant(&self, named: Option<String>, peer: Peer) -> Result<String> {
        let Some(own) = self.access.pin(peer) else {
            let default = || match &self.access {
                Access::OfRun { head, .. } => head.clone(),
                Access::Full => self.heads.default_head(),
            };
            return Ok(named.unwrap_or_else(default));
        };
        match named {
            Some(named) if named != own => Err(Error::new(
                Kind::InUse,
                format!("use head '{named}'"),
                format!("a command of 'jailfs run' has its own head, '{own}', only"),
            )
            .hint(format!("read it as '{named}@', or use it when the command has ended"))),
            _ => Ok(own.to_owned()),
        }
    }

    /// Refuses a message that the clients of this socket may not send.
    fn check(&self, head: &str, message: &Message, peer: Peer) -> Result<()> {
        let Access::OfRun { gate, forked, .. } = &self.access else { return Ok(()) };
        match message {
            Message::Mounts => Ok(()),
            Message::Mount(_) => match self.heads.mounted().first() {
                Some(mounted) => Err(mounted.in_use(head)),
                None if self.heads.is_kept_open() => {
                    let attempt = format!("mount head '{head}'");
                    Err(Error::new(Kind::InUse, attempt, "'jailfs run' holds this sandbox"))
                }
                None => Ok(()),
            },
            // The command may drop what it has made.
            Message::Request(Request::DropFork { name })
                if peer.is_inside
                    && (forked.lock().contains(name) || self.heads.has_made(head, name)) =>
            {
                Ok(())
            }
            Message::Request(request) => gate(request),
        }
    }

    /// Mounts a head on behalf of a client.
    fn mount(&self, head: &str, plan: &[u8]) -> Result<Answer> {
        let plan: MountPlan = codec::decode(plan)
            .map_err(|error| Error::new(Kind::Usage, "read the plan of a mount", error))?;
        let choice = match plan.options {
            MountChoice::Chosen(choice) => *choice,
            MountChoice::AsHead(like) => {
                self.heads.get(&like).map(|head| head.choice().clone()).unwrap_or_default()
            }
        };
        self.check_volatile(head, &choice)?;
        let Some(sandbox) = self.heads.sandbox(head)? else { return Ok(Answer::Ending) };
        let is_mounted =
            self.heads.mount(head, || ServedHead::mount(sandbox, &plan.mount_point, &choice))?;
        Ok(if is_mounted { Answer::Mounted } else { Answer::Ending })
    }

    /// Whether fsync reaches the disk is the same for all heads of a store.
    fn check_volatile(&self, head: &str, choice: &Choice) -> Result<()> {
        let mounted = self.heads.mounted();
        let Some(other) = mounted.iter().find(|one| one.choice().volatile != choice.volatile)
        else {
            return Ok(());
        };
        let how = if choice.volatile { "without" } else { "with" };
        Err(Error::new(
            Kind::Usage,
            format!("mount head '{head}'"),
            format!("head '{}' of the same store is mounted {how} 'volatile'", other.name()),
        )
        .hint(format!("mount it {how} 'volatile' too")))
    }

    fn unmount(&self, head: &str) -> Result<Answered> {
        let mounted = self.heads.get(head).ok_or_else(|| {
            Error::new(Kind::NoStore, format!("unmount head '{head}'"), "it is not mounted")
        })?;
        mounted.unmount()?;
        let closes_at = Some(Arc::clone(mounted.waiting()));
        Ok(Answered { answer: Answer::Reply(Box::new(Reply::Done)), closes_at })
    }

    fn handle(&self, head: &str, request: Request, peer: Peer) -> Result<Reply> {
        let dropped = match &request {
            Request::DropFork { name } => Some(name.clone()),
            _ => None,
        };
        let reply = self.heads.handle(head, request)?;
        let Access::OfRun { forked, .. } = &self.access else { return Ok(reply) };
        match (&reply, dropped) {
            (Reply::Forked(forks), _) if peer.is_inside => {
                forked.lock().extend(forks.iter().map(|fork| fork.name.clone()));
            }
            (_, Some(name)) => forked.lock().retain(|forked| *forked != name),
            _ => {}
        }
        Ok(reply)
    }
}
