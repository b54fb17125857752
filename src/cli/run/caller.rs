//! The caller's head: open in this process, or mounted by a daemon.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::cli::target::wrong_answer;
use crate::control::{Answer, Client, RaceOrder};
use crate::error::Result;
use crate::sandbox::{Reply, Request, Sandbox};

/// The head whose tree a command continues.
pub(super) enum Caller {
    /// It is open in this process, which has the lock of the store.
    Here(Arc<Sandbox>),
    /// The daemon that has the store open also serves the attempts.
    Mounted(Daemon),
}

impl Caller {
    /// Handles a request.
    ///
    /// # Errors
    /// Those of the sandbox.
    pub(super) fn call(&self, request: Request) -> Result<Reply> {
        match self {
            Caller::Here(sandbox) => sandbox.handle(request),
            Caller::Mounted(daemon) => daemon.call(&daemon.head, &request),
        }
    }

    /// The name of the head.
    pub(super) fn head(&self) -> &str {
        match self {
            Caller::Here(sandbox) => sandbox.head_name(),
            Caller::Mounted(daemon) => &daemon.head,
        }
    }
}

/// A daemon that has a store open, and one of its heads.
pub(super) struct Daemon {
    /// One call at a time. The daemon ends a race with the connection.
    client: Mutex<Client>,
    pub(super) head: String,
    pub(super) places: Places,
}

/// The directories of a mounted head.
pub(super) struct Places {
    pub(super) store: PathBuf,
    /// The base of the store.
    pub(super) base: PathBuf,
    /// Where the attempts find the tree.
    pub(super) tree: PathBuf,
    /// The mount points of all heads.
    pub(super) mount_points: Vec<PathBuf>,
}

impl Daemon {
    /// A connection to the daemon, and the places of the head.
    pub(super) fn new(client: Client, head: String, places: Places) -> Daemon {
        Daemon { client: Mutex::new(client), head, places }
    }

    /// Handles a request in a head.
    ///
    /// # Errors
    /// Those of the sandbox.
    pub(super) fn call(&self, head: &str, request: &Request) -> Result<Reply> {
        let mut client = self.client.lock();
        client.set_head(Some(head.to_owned()));
        client.call(request)
    }

    /// Fails if the daemon serves no attempts any more. Succeeds while it handles another call.
    ///
    /// # Errors
    /// Those of the daemon.
    pub(super) fn check(&self) -> Result<()> {
        let Some(mut client) = self.client.try_lock() else { return Ok(()) };
        client.set_head(Some(self.head.clone()));
        client.mounts().map(drop)
    }

    /// Gives an order that is about a head of a race.
    ///
    /// # Errors
    /// Those of the daemon.
    pub(super) fn order(&self, head: &str, order: RaceOrder) -> Result<Answer> {
        let mut client = self.client.lock();
        client.set_head(Some(head.to_owned()));
        client.race(order)
    }

    /// The same, for an order that is answered with nothing else.
    ///
    /// # Errors
    /// Those of the daemon.
    pub(super) fn obey(&self, head: &str, order: RaceOrder) -> Result<()> {
        match self.order(head, order)? {
            Answer::Reply(reply) if *reply == Reply::Done => Ok(()),
            _ => Err(wrong_answer()),
        }
    }
}
