//! Invalidates pages that hold discarded writes: a program wrote through a mapping of the snapshot
//! directory.
//!
//! The server discards such a write, but the kernel still has the page. To invalidate it, the
//! kernel waits for the page lock, and the lock's holder may wait for a READ that the server has
//! not answered. Always true:
//! * Invalidations run in threads of their own. In the pool for snapshot reads, the reads that they
//!   wait for could be queued behind them.
//! * One thread at a time invalidates a node, and a node is in the queue at most once, however many
//!   of its pages are written.
//! * A write that arrives during an invalidation queues the node again, because the kernel may have
//!   passed that page already.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::fuse::notify::Channel;
use crate::fuse::workers::Workers;
use crate::types::NodeId;

/// For how many nodes it is remembered that a warning was logged.
const MAX_LOGGED: usize = 4096;

/// The progress of a node's invalidation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Queued,
    Running,
    /// Running, and to be run once more.
    RunningAgain,
}

/// The nodes whose pages are to be invalidated.
#[derive(Default)]
struct Nodes {
    queue: VecDeque<NodeId>,
    progress: HashMap<NodeId, Progress>,
    logged: HashSet<NodeId>,
}

/// Tracks the nodes that received discarded writes.
#[derive(Default)]
pub(super) struct DiscardedWrites {
    nodes: Arc<Mutex<Nodes>>,
    workers: Workers,
}

impl DiscardedWrites {
    /// Invalidates a node's pages in the background.
    pub(super) fn invalidate(&self, id: NodeId, channel: &Arc<Channel>) {
        let channel = Arc::clone(channel);
        self.invalidate_with(id, move |id| channel.invalidate_pages(id));
    }

    fn invalidate_with(&self, id: NodeId, invalidate: impl Fn(NodeId) + Send + 'static) {
        if !self.nodes.lock().enqueue(id) {
            return;
        }
        let nodes = Arc::clone(&self.nodes);
        self.workers.run(move || {
            // `next` releases the lock before the notification is sent.
            while let Some(id) = next(&nodes) {
                invalidate(id);
                nodes.lock().done(id);
            }
        });
    }

    /// Whether this is the first discarded write to a node. May return true again much later.
    pub(super) fn is_first(&self, id: NodeId) -> bool {
        let mut nodes = self.nodes.lock();
        if nodes.logged.len() >= MAX_LOGGED {
            nodes.logged.clear();
        }
        nodes.logged.insert(id)
    }

    /// Ends the threads.
    pub(super) fn finish(&self) {
        self.workers.finish();
    }
}

fn next(nodes: &Mutex<Nodes>) -> Option<NodeId> {
    let mut nodes = nodes.lock();
    let id = nodes.queue.pop_front()?;
    nodes.progress.insert(id, Progress::Running);
    Some(id)
}

impl Nodes {
    /// Queues a node unless it is queued. Returns whether a worker must be started for it.
    fn enqueue(&mut self, id: NodeId) -> bool {
        match self.progress.get_mut(&id) {
            None => {
                self.progress.insert(id, Progress::Queued);
                self.queue.push_back(id);
                true
            }
            Some(Progress::Queued) => false,
            Some(progress) => {
                *progress = Progress::RunningAgain;
                false
            }
        }
    }

    fn done(&mut self, id: NodeId) {
        // At the end of the queue: a node that is written all the time must not delay others.
        if self.progress.remove(&id) == Some(Progress::RunningAgain) {
            self.enqueue(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_blocked_invalidation_delays_no_other_node_and_is_queued_once() {
        let discarded = DiscardedWrites::default();
        let (said, heard) = mpsc::channel();
        let (release, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let ask = |id: u64| {
            let (said, wait) = (said.clone(), Arc::clone(&wait));
            discarded.invalidate_with(NodeId(id), move |id| {
                said.send(id.0).unwrap();
                if id == NodeId(1) {
                    wait.lock().recv().unwrap();
                }
            });
        };
        ask(1);
        assert_eq!(heard.recv().unwrap(), 1, "it runs, and waits");
        (0..1000).for_each(|_| ask(1));
        ask(2);
        assert_eq!(heard.recv().unwrap(), 2, "the other node does not wait");
        release.send(()).unwrap();
        assert_eq!(heard.recv().unwrap(), 1, "once more: its pages may have been passed");
        release.send(()).unwrap();
        discarded.finish();
        assert_eq!(heard.try_recv(), Err(mpsc::TryRecvError::Empty), "not once for each write");
        assert!(discarded.nodes.lock().progress.is_empty());
    }

    #[test]
    fn the_first_write_to_each_node_is_reported_once() {
        let discarded = DiscardedWrites::default();
        assert_eq!(
            [1, 1, 2, 1].map(|id| discarded.is_first(NodeId(id))),
            [true, false, true, false]
        );
    }
}
