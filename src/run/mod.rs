//! One command in a sandbox of its own: the walls around it, and its life as a child.
//!
//! Two processes take part. The **child** enters a private mount namespace, mounts the sandbox over the base there, hands
//! the session to its parent, waits until it is served, and becomes the command. The **parent** holds the store and
//! serves, and stays outside all namespaces. So
//!
//! * nothing outside sees the mount, and when the last process inside is gone, so is the mount; when the parent dies by
//!   whatever means, the mount is dead, and what was written is in the store;
//! * the parent sees the base itself, also while the command runs, and sees every file with its true owner. An ordinary
//!   user needs a user namespace to mount, in which only one user and one group have numbers: served from inside it, the
//!   files of all others would seem to belong to user 65534, and so they would be recorded;
//! * the numbers that are mapped are mapped to themselves, so the two sides need no translation. What is not mapped the
//!   kernel shows as 65534 and lets nobody change (EACCES, EOVERFLOW).
//!
//! Order matters: the namespace is entered before any thread is started (unshare(2) of a user namespace is refused
//! to a process with threads, and that of a mount namespace would hold for one thread only), and the signals are
//! blocked before any thread is started (each inherits the mask).

mod child;
mod namespace;

pub use child::{Cage, EXEC_VERB, End, Program, Started, become_command, block_signals, let_signals_through};
pub use namespace::Namespace;

use crate::error::Result;

/// The walls around the command.
///
/// What stands now: a private mount namespace, in which the sandbox lies over the base at the base's own path. That
/// shows the command a tree in which it can do no harm; it does not keep it from paths outside that tree.
///
/// The further walls of `jailfs run` belong here and nowhere else, in the order in which a process must put them up:
/// user, mount and pid namespaces with the rest of the host read-only or hidden ([`Namespace`]); then, between that and
/// the exec of the command ([`become_command`]), no_new_privs and Landlock as the second wall, which is the only one
/// where namespaces are forbidden.
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
