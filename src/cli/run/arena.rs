//! Where a race takes place: in the store that this process has open, or in that of a daemon.
//!
//! The daemon serves the attempts of a mounted sandbox in mounts that this process has made. It
//! ends them if the connection of this process closes before the end.

use std::path::Path;

use super::caller::Daemon;
use crate::cli::target::wrong_answer;
use crate::control::{Answer, Descriptors, RaceOrder};
use crate::daemon::{AttemptPlan, Choice, ServedRace};
use crate::error::Result;
use crate::fuse::Handed;
use crate::sandbox::{Reply, Request, Rev};
use crate::types::LayerId;

/// The forks of a race, and the process that serves them.
pub(super) struct Arena<'a> {
    names: Vec<String>,
    start: Rev,
    server: ArenaServer<'a>,
}

enum ArenaServer<'a> {
    Here(Box<ServedRace>),
    Daemon(&'a Daemon),
}

impl<'a> Arena<'a> {
    /// The race that this process serves.
    pub(super) fn here(race: ServedRace) -> Arena<'a> {
        let (names, start) = (race.names().to_vec(), race.start().clone());
        Arena { names, start, server: ArenaServer::Here(Box::new(race)) }
    }

    /// Has a daemon make the forks.
    ///
    /// # Errors
    /// Those of the daemon.
    pub(super) fn at(daemon: &'a Daemon, attempts: u32) -> Result<Arena<'a>> {
        match daemon.order(&daemon.head, RaceOrder::Begin(attempts))? {
            Answer::Race { names, start } => {
                let start = start.map_or(Rev::Base, Rev::Id);
                Ok(Arena { names, start, server: ArenaServer::Daemon(daemon) })
            }
            _ => Err(wrong_answer()),
        }
    }

    /// The heads of the attempts.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// The state that all of them begin with.
    pub(super) fn start(&self) -> &Rev {
        &self.start
    }

    /// Fails if the attempts are not served any more, because the daemon was killed or a signal
    /// ends it.
    ///
    /// # Errors
    /// Those of the daemon.
    pub(super) fn check(&self) -> Result<()> {
        match &self.server {
            ArenaServer::Here(_) => Ok(()),
            ArenaServer::Daemon(daemon) => daemon.check(),
        }
    }

    /// Handles a request in the head of an attempt.
    ///
    /// # Errors
    /// Those of the sandbox.
    pub(super) fn call(&self, head: &str, request: Request) -> Result<Reply> {
        match &self.server {
            ArenaServer::Here(race) => race.call(head, request),
            ArenaServer::Daemon(daemon) => daemon.call(head, &request),
        }
    }

    /// Makes the tree of an attempt equal to a sealed state.
    ///
    /// # Errors
    /// Those of the sandbox.
    pub(super) fn reset(&self, head: &str, to: LayerId) -> Result<()> {
        match &self.server {
            ArenaServer::Here(race) => race.reset(head, to),
            ArenaServer::Daemon(daemon) => daemon.obey(head, RaceOrder::Reset(to)),
        }
    }

    /// Makes a fork begin again with the first state. No process uses it.
    ///
    /// # Errors
    /// Those of the sandbox. The fork may be gone then.
    pub(super) fn replace(&self, head: &str) -> Result<()> {
        match &self.server {
            ArenaServer::Here(race) => race.replace(head),
            ArenaServer::Daemon(daemon) => daemon.obey(head, RaceOrder::Replace),
        }
    }

    /// Drops forks, the forks that their commands made of them, and the checkpoints of all these.
    ///
    /// # Errors
    /// The first error. The others are dropped all the same.
    pub(super) fn drop_forks(&self, heads: Vec<String>) -> Result<()> {
        match &self.server {
            ArenaServer::Here(race) => race.drop_forks(&heads),
            ArenaServer::Daemon(daemon) => daemon.obey(&daemon.head, RaceOrder::Drop(heads)),
        }
    }

    /// Ends the race. The forks that are left stay.
    ///
    /// # Errors
    /// Those of the daemon.
    pub(super) fn finish(&self) -> Result<()> {
        match &self.server {
            ArenaServer::Here(race) => {
                race.finish();
                Ok(())
            }
            ArenaServer::Daemon(daemon) => daemon.obey(&daemon.head, RaceOrder::Finish),
        }
    }
}

/// The mount of one attempt.
pub(super) struct Mounting<'a> {
    pub(super) arena: &'a Arena<'a>,
    pub(super) head: &'a str,
}

impl Mounting<'_> {
    /// Opens the head, and listens for its command. Returns the name of the socket in the store.
    ///
    /// # Errors
    /// Those of the server.
    pub(super) fn prepare(&self) -> Result<String> {
        match &self.arena.server {
            ArenaServer::Here(race) => race.prepare(self.head),
            ArenaServer::Daemon(daemon) => match daemon.order(self.head, RaceOrder::Prepare)? {
                Answer::Socket(name) => Ok(name),
                _ => Err(wrong_answer()),
            },
        }
    }

    /// Has the head served in a mount that is visible at `tree`.
    ///
    /// # Errors
    /// Those of the server.
    pub(super) fn serve(&self, handed: Handed, tree: &Path, choice: Choice) -> Result<()> {
        let daemon = match &self.arena.server {
            ArenaServer::Here(race) => return race.serve(self.head, handed, tree, choice),
            ArenaServer::Daemon(daemon) => daemon,
        };
        let Handed { device, root, dev, all_users } = handed;
        let plan = AttemptPlan { tree: tree.to_owned(), dev, all_users, choice }.encode()?;
        let descriptors = Descriptors::new(vec![device, root]);
        match daemon.order(self.head, RaceOrder::Serve { plan, descriptors })? {
            Answer::Mounted => Ok(()),
            _ => Err(wrong_answer()),
        }
    }

    /// Fails if the mount was aborted or unmounted.
    ///
    /// # Errors
    /// `Failed`, and those of the daemon.
    pub(super) fn check(&self) -> Result<()> {
        match &self.arena.server {
            ArenaServer::Here(race) => race.check_served(self.head),
            ArenaServer::Daemon(daemon) => daemon.obey(self.head, RaceOrder::Check),
        }
    }

    /// Ends the mount.
    ///
    /// # Errors
    /// Those of the daemon.
    pub(super) fn end(&self) -> Result<()> {
        match &self.arena.server {
            ArenaServer::Here(race) => {
                race.end(self.head);
                Ok(())
            }
            ArenaServer::Daemon(daemon) => daemon.obey(self.head, RaceOrder::End),
        }
    }
}
