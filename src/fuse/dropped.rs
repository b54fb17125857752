//! Making the kernel forget what programs wrote into mappings of the past.
//!
//! Such a write is dropped, and the kernel still has it in its pages. To forget a page it waits until nobody has it locked, and
//! who has may be waiting for a READ that we have not answered. Always true:
//! * it is done in threads of its own: in the pool that answers reads of the past it would wait for what stands behind it;
//! * a node is forgotten by one thread at a time, and waits in the queue once, however many pages of it are written;
//! * what comes while a node is being forgotten makes it be forgotten once more: the page may have been passed already.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::fuse::kernel::Channel;
use crate::fuse::workers::Workers;
use crate::types::NodeId;

/// Of so many nodes it is remembered that somebody was told.
const MOST_TOLD: usize = 4096;

/// How far a node is that is to be forgotten.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Queued,
    UnderWay,
    /// Under way, and to be done once more.
    Again,
}

/// The nodes that the kernel is to forget.
#[derive(Default)]
struct Nodes {
    queue: VecDeque<NodeId>,
    standing: HashMap<NodeId, Standing>,
    told: HashSet<NodeId>,
}

/// The writes that were dropped.
#[derive(Default)]
pub(super) struct Dropped {
    nodes: Arc<Mutex<Nodes>>,
    workers: Workers,
}

impl Dropped {
    /// Makes the kernel forget a node, soon.
    pub(super) fn forget(&self, id: NodeId, channel: &Arc<Channel>) {
        let channel = Arc::clone(channel);
        self.forget_by(id, move |id| channel.forget_content(id));
    }

    fn forget_by(&self, id: NodeId, forget: impl Fn(NodeId) + Send + 'static) {
        if !self.nodes.lock().ask(id) {
            return;
        }
        let nodes = Arc::clone(&self.nodes);
        self.workers.run(move || {
            // In its own statement: the lock is not held while the kernel is told.
            while let Some(id) = next(&nodes) {
                forget(id);
                nodes.lock().done(id);
            }
        });
    }

    /// Whether nobody was told yet that something is dropped that was written to a node.
    pub(super) fn is_news(&self, id: NodeId) -> bool {
        let mut nodes = self.nodes.lock();
        if nodes.told.len() >= MOST_TOLD {
            nodes.told.clear();
        }
        nodes.told.insert(id)
    }

    /// Ends the threads.
    pub(super) fn finish(&self) {
        self.workers.finish();
    }
}

fn next(nodes: &Mutex<Nodes>) -> Option<NodeId> {
    let mut nodes = nodes.lock();
    let id = nodes.queue.pop_front()?;
    nodes.standing.insert(id, Standing::UnderWay);
    Some(id)
}

impl Nodes {
    /// Puts a node into the queue, unless it is in it. Whether somebody is to be found who does it.
    fn ask(&mut self, id: NodeId) -> bool {
        match self.standing.get_mut(&id) {
            None => {
                self.standing.insert(id, Standing::Queued);
                self.queue.push_back(id);
                true
            }
            Some(Standing::Queued) => false,
            Some(standing) => {
                *standing = Standing::Again;
                false
            }
        }
    }

    fn done(&mut self, id: NodeId) {
        // Behind the others, who are not to wait for one that somebody writes on and on.
        if self.standing.remove(&id) == Some(Standing::Again) {
            self.ask(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_node_that_cannot_be_forgotten_yet_holds_up_no_other_however_often_it_is_written() {
        let dropped = Dropped::default();
        let (said, heard) = mpsc::channel();
        let (release, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let ask = |id: u64| {
            let (said, wait) = (said.clone(), Arc::clone(&wait));
            dropped.forget_by(NodeId(id), move |id| {
                said.send(id.0).unwrap();
                if id == NodeId(1) {
                    wait.lock().recv().unwrap();
                }
            });
        };
        ask(1);
        assert_eq!(heard.recv().unwrap(), 1, "it is under way, and waits");
        (0..1000).for_each(|_| ask(1));
        ask(2);
        assert_eq!(heard.recv().unwrap(), 2, "nobody stands behind it");
        release.send(()).unwrap();
        assert_eq!(heard.recv().unwrap(), 1, "once more, because its pages were passed already");
        release.send(()).unwrap();
        dropped.finish();
        assert_eq!(heard.try_recv(), Err(mpsc::TryRecvError::Empty), "and not once for each write");
        assert!(dropped.nodes.lock().standing.is_empty());
    }

    #[test]
    fn it_is_told_once_of_each_node() {
        let dropped = Dropped::default();
        assert_eq!([1, 1, 2, 1].map(|id| dropped.is_news(NodeId(id))), [true, false, true, false]);
    }
}
