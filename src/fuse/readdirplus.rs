//! Answers READDIRPLUS: the names of a directory, some of them with their nodes.
//!
//! The kernel sends READDIRPLUS for every listing. A name that comes with its node needs no LOOKUP;
//! a bare name is an entry of node 0. Always true:
//!
//! * A node that was handed out is in a reply that the kernel accepted, or is forgotten again. The
//!   kernel counts the nodes that it links, and sends FORGET for those that it cannot link
//!   (`parse_dirplusfile` in fs/fuse/readdir.c).
//! * A node is sent only if the kernel does not hold it, so it cannot overwrite newer attributes.
//! * One reply spends a bounded time on the base. It is short then, and the kernel asks for more.
//! * Unless no name is left, a reply has at least one: an empty reply says that the directory ends,
//!   and the kernel keeps that.

use std::time::{Duration, Instant};

use crate::fs::{DirEntry, Fs, HandOut, NameSink};
use crate::fuse::reply::Call;
use crate::fuse::wire::{Names, Reply};
use crate::types::{FileKind, NodeId};

/// How long one reply may look up nodes.
const LOOKUP_LIMIT: Duration = Duration::from_millis(2);
/// Nodes per look at the clock, which costs a tenth of looking up a node.
const NODES_PER_CLOCK_READ: usize = 4;

/// The nodes that one reply looked up, and since when.
#[derive(Default)]
struct Lookups {
    begun: Option<Instant>,
    count: usize,
}

impl Lookups {
    /// Whether the reply may look up one more node. The first is always allowed, however long this
    /// thread did not run since it began.
    fn has_time(&mut self, clock: impl FnOnce() -> Instant) -> bool {
        let Some(begun) = self.begun else {
            self.begun = Some(clock());
            return true;
        };
        !self.count.is_multiple_of(NODES_PER_CLOCK_READ)
            || clock().duration_since(begun) <= LOOKUP_LIMIT
    }
}

/// A reply that is being filled.
struct ReplyPlus {
    names: Names,
    /// Whether files come with their nodes. Directories always do: a program that lists a tree
    /// enters every directory.
    with_files: bool,
    lookups: Lookups,
    /// The nodes that were handed out.
    handed: Vec<NodeId>,
}

impl NameSink for ReplyPlus {
    fn wants_node(&self, kind: FileKind) -> bool {
        self.with_files || kind == FileKind::Dir
    }

    fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    fn has_time(&mut self) -> bool {
        let has_time = self.lookups.has_time(Instant::now);
        self.lookups.count += 1;
        has_time
    }

    fn take(&mut self, entry: DirEntry, hand_out: &mut HandOut<'_>) -> bool {
        if !self.names.has_room(&entry.name) {
            return false;
        }
        match if self.wants_node(entry.kind) { hand_out() } else { None } {
            Some(node) => {
                self.handed.push(node.id);
                self.names.add_node(&node, entry.cookie, &entry.name);
            }
            None => self.names.add(entry.ino, entry.cookie, entry.kind, &entry.name),
        }
        true
    }
}

impl Call<'_> {
    /// Answers READDIRPLUS with the names after the cookie `behind`, in at most `room` bytes. Files
    /// come with their nodes if `with_files`. Returns false if it failed before the first name.
    pub(super) fn reply_readdirplus(
        &self,
        fs: &Fs,
        (behind, with_files): (u64, bool),
        room: u32,
        reply: Reply,
    ) -> bool {
        let names = Names::new(room, true);
        let (lookups, handed) = (Lookups::default(), Vec::new());
        let mut filled = ReplyPlus { names, with_files, lookups, handed };
        let result = fs.readdir_plus(self.node, behind, &mut filled);
        match result {
            Err(error) if filled.names.is_empty() => {
                reply.error(self.refuse(&error));
                return false;
            }
            // Send the names found so far. The error recurs when the kernel asks for the rest.
            Ok(()) | Err(_) => {}
        }
        if !reply.names(&filled.names) {
            filled.handed.into_iter().for_each(|id| fs.forget(id, 1));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_time_for_its_first_node_also_on_a_machine_that_stalls() {
        let start = Instant::now();
        let stalls = std::cell::Cell::new(0);
        let clock = || {
            stalls.set(stalls.get() + 1);
            start + LOOKUP_LIMIT * 10 * stalls.get()
        };
        let mut lookups = Lookups::default();
        // Without a name, the kernel takes the directory for empty.
        assert!(lookups.has_time(clock));
        let taken = (1..100).take_while(|count| {
            lookups.count = *count;
            lookups.has_time(clock)
        });
        assert_eq!(taken.count() + 1, NODES_PER_CLOCK_READ, "then it ends at the next look");
    }
}
