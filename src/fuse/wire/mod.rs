//! The protocol of `/dev/fuse`: requests and replies as bytes (include/uapi/linux/fuse.h).
//!
//! fuser begins the session (INIT) and sends notifications. From then on this module reads the
//! requests and writes the replies. So the server can say all that the protocol can: a node whose
//! id differs from its inode number, a name without a node, a time before 1970.
//!
//! Numbers are in the byte order of the machine.

mod device;
mod reply;
mod request;

pub(super) use device::Device;
pub(super) use reply::{FOREVER, Lifetimes, Names, Reply, Statfs};
pub(super) use request::{Layout, Malformed, Operation, Request, RequestBuffer};
