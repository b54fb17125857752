//! One command in a sandbox of its own: the walls around it, and its life as a child.
//!
//! The whole life is in one process: it enters a private mount namespace, opens the sandbox, mounts it over the base
//! and serves it from threads, and starts the command as a child. So nothing outside sees the mount, and when the
//! process dies by whatever means, the mount is gone with the namespace; what was written is in the store.
//!
//! Order matters: the namespace is entered before any thread is started (unshare(2) of a user namespace is refused
//! to a process with threads, and that of a mount namespace would hold for one thread only), and the signals are
//! blocked before any thread is started (each inherits the mask).

mod child;
mod namespace;

pub use child::{EXEC_VERB, End, Program, block_signals, exec, let_signals_through};
pub use namespace::Namespace;

use crate::error::Result;

/// The walls around the command.
///
/// What stands now: a private mount namespace, in which the sandbox lies over the base at the base's own path. That
/// shows the command a tree in which it can do no harm; it does not keep it from paths outside that tree.
///
/// The further walls of `jailfs run` belong here and nowhere else, in the order in which a process must put them up:
/// user, mount and pid namespaces with the rest of the host read-only or hidden ([`Namespace`], in this process, before
/// the sandbox is opened); then, in the child between its start and the exec of the command ([`exec`]),
/// no_new_privs and Landlock as the second wall, which is the only one where namespaces are forbidden.
#[derive(Debug)]
pub struct Confinement {
    /// The namespace that this process and the command are in.
    pub namespace: Namespace,
}

impl Confinement {
    /// Puts up the walls around this process. It must have one thread.
    ///
    /// # Errors
    /// `CannotMount`: namespaces are not allowed here.
    pub fn enter() -> Result<Confinement> {
        Ok(Confinement { namespace: Namespace::enter()? })
    }
}
