//! One command in a sandbox of its own: the walls around it, and its life as a child.
//!
//! Two processes take part. The one **outside** holds the store and serves the tree, and stays in the namespaces that it was
//! started in. The one **inside** is this program again: it makes the namespaces and the view, mounts the sandbox over the
//! base's own path there, hands the session out, becomes the first process of the pid namespace, takes on the second wall,
//! and starts the command. So
//!
//! * nothing outside sees the mount, and when the last process inside is gone, so is the mount; when the process outside
//!   dies by whatever means, so do all inside, and what was written is in the store;
//! * the process outside sees the base itself, also while the command runs, and sees every file with its true owner: an ordinary
//!   user's user namespace knows one user and one group, and served from inside it, the files of all others would seem
//!   to belong to user 65534, and so they would be recorded;
//! * the numbers that are mapped are mapped to themselves, so the two sides need no translation. What is not mapped the
//!   kernel shows as 65534 and lets nobody change (EACCES, EOVERFLOW);
//! * the view is the jail, so links in it keep their text: an absolute one leads to a path of the view.
//!
//! The **first wall** is the view (`layout`, `view`, `namespace`): what is not to be seen or written is not there. The
//! **second** (`walls`, `filter`) is what every process inside has taken on: no capabilities over the machine, no new
//! privileges, a filter on system calls, Landlock. If a wall cannot be built the command is refused, unless the caller accepts
//! less ([`Accept`]). Without namespaces the sandbox is mounted at a place of its own.
//!
//! Order matters: the inside is entered by a process with one thread (a process with several cannot enter a user namespace, nor be
//! forked), and signals are blocked before any thread is started (each inherits the mask).

mod cgroup;
mod child;
mod filter;
mod inside;
mod layout;
mod namespace;
mod net;
pub mod secrets;
mod streams;
mod talk;
mod terminal;
mod view;
mod walls;

pub use cgroup::{Group, Share};
pub use child::{EXEC_VERB, End, NotStarted, Program, Started, Waited, block_signals, let_signals_through};
pub use filter::Allow;
pub use inside::become_command;
pub use layout::{hidden, hidden_inside};
pub use net::{Net, Tell};
pub use talk::{Accept, Spec};
pub use view::README;
pub use walls::{ViewWall, Walls, keeps_variable, readme};
