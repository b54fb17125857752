//! Remembers the files that the kernel wrote back or truncated within the last second.
//!
//! The kernel may keep further dirty pages of such a file back until the thread that waits for the
//! reply runs again. No request is pending then, so a flush cannot see them by counting requests.
//! It syncs these files one by one instead.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::types::NodeId;

/// For how long a file counts as recent: long enough for the waiting thread to run again.
pub(super) const RECENT: Duration = Duration::from_secs(1);
/// From this number of files on, those that are not recent any more are removed.
const PRUNE_THRESHOLD: usize = 1024;

/// The files, each with the time of its last writeback or truncation.
#[derive(Default)]
pub(super) struct RecentWriteback(Mutex<HashMap<NodeId, Instant>>);

impl RecentWriteback {
    /// Notes a writeback or truncation. Must be called before the server replies to it.
    pub(super) fn note(&self, id: NodeId) {
        let now = Instant::now();
        let mut files = self.0.lock();
        if files.len() >= PRUNE_THRESHOLD && files.len().is_power_of_two() {
            files.retain(|_, noted| now.duration_since(*noted) < RECENT);
        }
        files.insert(id, now);
    }

    /// The files that were noted within the last second.
    pub(super) fn recent(&self) -> Vec<NodeId> {
        let now = Instant::now();
        let mut files = self.0.lock();
        files.retain(|_, noted| now.duration_since(*noted) < RECENT);
        files.keys().copied().collect()
    }
}
