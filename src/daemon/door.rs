//! The door of a control socket: which requests its clients may make, and to which head.

use std::sync::Arc;

use parking_lot::Mutex;

use super::gate::gate;
use super::head::ServedHead;
use super::heads::Heads;
use super::plan::{Choice, MountChoice, MountPlan};
use crate::control::{
    Answer, Answered, Call, Conversation, Greeting, Listener, Message, Peer, Server,
};
use crate::error::{Error, Kind, Result};
use crate::sandbox::{Reply, Request};
use crate::store::io::codec;

/// The rights of the clients of a control socket.
#[derive(Clone)]
pub enum Access {
    /// Everything.
    Full,
    /// Those of a command of `run`: all that [`gate`] admits, except to mount a head or to run a
    /// race. A command inside means this head only.
    OfRun {
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

/// Serves the commands of `run` at a control socket of their own.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn serve_commands(
    heads: &Arc<Heads>,
    listener: Listener,
    access: Access,
) -> Result<Server> {
    let door = Arc::new(Door::new(heads, access));
    let begin = move || -> Box<dyn Conversation> {
        let door = Arc::clone(&door);
        Box::new(move |call: Call, peer| {
            let head = door.meant(call.head, peer)?;
            door.check(&head, &call.message, peer)?;
            door.answer(head, call.message, peer)
        })
    };
    listener.serve(Greeting::of_this_process(), begin)
}

/// A head that is served beside others. Dropping it ends its mount, and then its control socket.
pub(super) struct ServedApart {
    heads: Arc<Heads>,
    name: String,
    server: Option<Server>,
}

impl ServedApart {
    /// The mounted head `name`.
    pub(super) fn of(heads: &Arc<Heads>, name: &str) -> ServedApart {
        ServedApart { heads: Arc::clone(heads), name: name.to_owned(), server: None }
    }

    /// Ends this server after the mount.
    pub(super) fn serve_clients(&mut self, server: Server) {
        self.server = Some(server);
    }
}

impl Drop for ServedApart {
    fn drop(&mut self) {
        self.heads.end_one(&self.name);
        self.server.take().map(Server::stop).unwrap_or_default();
    }
}

/// Answers the clients of one control socket.
pub(super) struct Door {
    heads: Arc<Heads>,
    access: Access,
}

impl Door {
    /// The door of the heads of a store, for clients with these rights.
    pub(super) fn new(heads: &Arc<Heads>, access: Access) -> Door {
        Door { heads: Arc::clone(heads), access }
    }

    /// Answers a call that its sender may make.
    ///
    /// # Errors
    /// They are the answer.
    pub(super) fn answer(&self, head: String, message: Message, peer: Peer) -> Result<Answered> {
        match message {
            Message::Mounts => {
                let can_race = matches!(self.access, Access::Full);
                Ok(Answer::Mounts(self.heads.list(head, can_race)).into())
            }
            Message::Mount(plan) => self.mount(&head, &plan).map(Answered::from),
            Message::Request(Request::Unmount) => self.unmount(&head),
            Message::Request(request) => {
                Ok(Answer::Reply(Box::new(self.handle(&head, request, peer)?)).into())
            }
            Message::Race(_) => {
                Err(Error::new(Kind::Usage, "run a race", "the connection has none"))
            }
        }
    }

    /// The head that a client means.
    ///
    /// # Errors
    /// `InUse`: a command of `run` names another head than its own.
    pub(super) fn meant(&self, named: Option<String>, peer: Peer) -> Result<String> {
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
    ///
    /// # Errors
    /// `InUse`.
    pub(super) fn check(&self, head: &str, message: &Message, peer: Peer) -> Result<()> {
        let Access::OfRun { forked, .. } = &self.access else { return Ok(()) };
        match message {
            Message::Mounts => Ok(()),
            Message::Race(_) => {
                let why = "'jailfs run' holds this sandbox";
                Err(Error::new(Kind::InUse, "run attempts side by side", why)
                    .hint("run the command without 'jailfs run'"))
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::RaceOrder;

    #[test]
    fn a_command_cannot_run_a_race() {
        let heads = Arc::new(Heads::new(None));
        let access = Access::OfRun { head: "run-1-1".to_owned(), forked: MadeForks::default() };
        let door = |access| Door::new(&heads, access);
        for order in [RaceOrder::Begin(2), RaceOrder::Prepare, RaceOrder::End, RaceOrder::Finish] {
            let message = Message::Race(order);
            for is_inside in [true, false] {
                let peer = Peer { pid: 1, is_inside };
                let refused = door(access.clone()).check("run-1-1", &message, peer);
                assert_eq!(refused.unwrap_err().kind, Kind::InUse, "{message:?}");
                assert_eq!(door(Access::Full).check("main", &message, peer), Ok(()));
            }
        }
    }
}
