//! Remembers the files of which the kernel may keep dirty pages back.
//!
//! While the kernel waits for the reply to a writeback or a truncation of a file, it sends no other
//! page of the file. It goes on only when the thread that waits for the reply runs again. No
//! request is pending then, so a flush cannot see such pages by counting requests. It syncs these
//! files one by one instead.
//!
//! The thread of a truncation has run again once it sends its next request. A writeback has threads
//! of the kernel, of which that is not known. So its file counts for as long as such a thread may
//! take to run again.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fuse::counters::Op;
use crate::types::NodeId;

/// For how long a file counts as recent: long enough for the waiting thread to run again.
pub(super) const RECENT: Duration = Duration::from_secs(1);
/// From this number of entries on, those that are not recent any more are removed.
const PRUNE_THRESHOLD: usize = 1024;
/// The number that the kernel gives to a thread of another PID namespace.
const UNKNOWN_THREAD: u32 = 0;

/// The files of recent writebacks and truncations.
#[derive(Default)]
pub(super) struct RecentWriteback {
    files: Mutex<Files>,
    /// Whether `files.truncated` can have entries. Most requests look no further.
    has_truncated: AtomicBool,
}

#[derive(Default)]
struct Files {
    /// Each file with the time of its last writeback, or truncation by an unknown thread.
    written: HashMap<NodeId, Instant>,
    /// The last truncation of each thread, if the thread has sent no request since.
    truncated: HashMap<u32, (NodeId, Instant)>,
}

impl RecentWriteback {
    /// Notes a writeback. Must be called before the server replies to it.
    pub(super) fn note_writeback(&self, id: NodeId) {
        let now = Instant::now();
        let mut files = self.files.lock();
        if is_to_prune(files.written.len()) {
            files.written.retain(|_, noted| is_recent(*noted, now));
        }
        files.written.insert(id, now);
    }

    /// Notes a truncation by a thread. Must be called before the server replies to it.
    pub(super) fn note_truncation(&self, id: NodeId, thread: u32) {
        if thread == UNKNOWN_THREAD {
            return self.note_writeback(id);
        }
        let now = Instant::now();
        let mut files = self.files.lock();
        if is_to_prune(files.truncated.len()) {
            files.truncated.retain(|_, (_, noted)| is_recent(*noted, now));
        }
        files.truncated.insert(thread, (id, now));
        self.has_truncated.store(true, Relaxed);
    }

    /// Notes that a thread sent a request. So whatever it waited for before is complete.
    pub(super) fn thread_sent(&self, thread: u32, op: Op) {
        // Read-ahead and asynchronous direct I/O send these later than the thread asked for them.
        if !self.has_truncated.load(Relaxed) || matches!(op, Op::Read | Op::Write) {
            return;
        }
        let mut files = self.files.lock();
        files.truncated.remove(&thread);
        self.has_truncated.store(!files.truncated.is_empty(), Relaxed);
    }

    /// The files of which the kernel may keep pages back.
    pub(super) fn recent(&self) -> BTreeSet<NodeId> {
        let now = Instant::now();
        let mut files = self.files.lock();
        files.written.retain(|_, noted| is_recent(*noted, now));
        files.truncated.retain(|_, (_, noted)| is_recent(*noted, now));
        let truncated = files.truncated.values().map(|(id, _)| *id);
        files.written.keys().copied().chain(truncated).collect()
    }
}

fn is_recent(noted: Instant, now: Instant) -> bool {
    now.duration_since(noted) < RECENT
}

fn is_to_prune(entries: usize) -> bool {
    entries >= PRUNE_THRESHOLD && entries.is_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: NodeId = NodeId(7);
    const OTHER: NodeId = NodeId(8);

    fn recent(files: &RecentWriteback) -> Vec<NodeId> {
        files.recent().into_iter().collect()
    }

    #[test]
    fn a_truncation_counts_until_its_thread_sends_another_request() {
        let files = RecentWriteback::default();
        files.note_truncation(FILE, 41);
        files.thread_sent(42, Op::Getattr);
        assert_eq!(recent(&files), [FILE]);
        files.thread_sent(41, Op::Getattr);
        assert!(recent(&files).is_empty());
    }

    #[test]
    fn a_thread_has_one_truncation_and_others_keep_theirs() {
        let files = RecentWriteback::default();
        files.note_truncation(FILE, 41);
        files.note_truncation(FILE, 42);
        files.note_truncation(OTHER, 41);
        assert_eq!(recent(&files), [FILE, OTHER]);
        files.thread_sent(42, Op::Lookup);
        assert_eq!(recent(&files), [OTHER]);
    }

    #[test]
    fn a_request_that_the_kernel_can_send_later_does_not_tell_that_its_thread_ran() {
        let files = RecentWriteback::default();
        files.note_truncation(FILE, 41);
        files.thread_sent(41, Op::Read);
        files.thread_sent(41, Op::Write);
        assert_eq!(recent(&files), [FILE]);
    }

    #[test]
    fn a_writeback_and_a_truncation_by_an_unknown_thread_count_for_a_while() {
        let files = RecentWriteback::default();
        files.note_writeback(FILE);
        files.note_truncation(OTHER, UNKNOWN_THREAD);
        files.thread_sent(UNKNOWN_THREAD, Op::Getattr);
        assert_eq!(recent(&files), [FILE, OTHER]);
    }

    #[test]
    fn nothing_counts_for_longer_than_a_waiting_thread_may_take() {
        let files = RecentWriteback::default();
        files.note_writeback(FILE);
        files.note_truncation(OTHER, 41);
        let long_ago = Instant::now().checked_sub(RECENT).unwrap();
        files.files.lock().written.insert(FILE, long_ago);
        files.files.lock().truncated.insert(41, (OTHER, long_ago));
        assert!(recent(&files).is_empty());
    }
}
