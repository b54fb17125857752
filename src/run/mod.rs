//! Runs one command in a sandbox of its own: builds the walls around it and supervises it.
//!
//! Two processes take part:
//!
//! * The process **outside** holds the store and serves the tree. It stays in the namespaces in
//!   which it was started.
//! * The process **inside** is this program again. It creates the namespaces and the view, and
//!   mounts the sandbox over the path of the base there. It sends the FUSE session to the process
//!   outside, becomes the first process of the pid namespace, restricts itself, and starts the
//!   command.
//!
//! This has four consequences:
//!
//! * No process outside sees the mount. The mount ends with the last process inside. If the process
//!   outside dies, all processes inside die too, and the store has what they wrote.
//! * The process outside sees the base itself while the command runs, and it sees every file with
//!   its true owner. The user namespace of an ordinary user knows one user and one group. If the
//!   tree were served from inside, the files of all other owners would be recorded as files of user
//!   65534.
//! * Each mapped id is mapped to itself, so the two sides need no translation. The kernel shows
//!   unmapped ids as 65534 and refuses to change their files (EACCES, EOVERFLOW).
//! * The view is the jail, so symlinks in it keep their text. An absolute one leads to a path of
//!   the view.
//!
//! The **first wall** is the view (`layout`, `view`, `namespace`): the command cannot name what it
//! must not see or write. The **second wall** (`walls`, `filter`) is what every process inside has
//! imposed on itself: no capabilities over the machine, no new privileges, a filter on system
//! calls, Landlock. If a wall cannot be built, `run` refuses the command, unless the caller accepts
//! less ([`Accept`]). Without namespaces the sandbox is mounted at a directory of its own.
//!
//! Two orders matter. The process inside has one thread, because a process with several cannot
//! enter a user namespace and cannot be forked safely. Signals are blocked before any thread
//! starts, because each thread inherits the mask.

mod attended;
mod cgroup;
mod child;
mod exit;
mod filter;
mod init;
mod layout;
mod namespace;
mod net;
mod protocol;
pub mod secrets;
mod spec;
mod streams;
mod terminal;
mod view;
mod walls;

pub use attended::{Apart, Attended, Interrupts, Stop, Stopper};
pub use cgroup::{Group, Share};
pub use child::{EXEC_VERB, NotStarted, Program, Started, Waited, block_signals, unblock_signals};
pub use exit::End;
pub use filter::Allow;
pub use init::become_command;
pub use layout::{hidden, hidden_inside};
pub use net::Net;
pub use spec::{Accept, Spec};
pub use streams::keep_descriptors;
pub use view::README;
pub use walls::{Walls, keeps_variable, readme};
