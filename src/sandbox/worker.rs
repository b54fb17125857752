//! A background thread that sleeps until it has work, and stands back while programs use the mount.
//!
//! * Dropping a [`Worker`] ends its thread and waits for it.
//! * No lock is held while the body works.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long a worker rests after each part of its work while other requests arrive.
const REST: Duration = Duration::from_millis(20);
/// How long after a notice the edit histories are looked at. Files are usually edited several times
/// in a row.
const EDIT_DELAY: Duration = Duration::from_millis(1100);

/// A running thread.
pub(super) struct Worker {
    pub(super) signals: Arc<Signals>,
    thread: Option<JoinHandle<()>>,
}

/// Wakes and ends a thread.
#[derive(Default)]
pub(super) struct Signals {
    state: Mutex<Pending>,
    changed: Condvar,
}

#[derive(Default)]
struct Pending {
    /// An operation may have left work.
    work: bool,
    /// Files are edited, so their histories need care after [`EDIT_DELAY`].
    edits: bool,
    /// The journal of the upper layer became long.
    journal: bool,
    end: bool,
    /// The request count at the last rest.
    requests: u64,
}

/// The work to do besides the edit histories.
pub(super) struct Work {
    /// An operation may have left work.
    pub(super) operation: bool,
    /// The journal of the upper layer became long.
    pub(super) journal: bool,
}

impl Worker {
    /// Starts a thread. The body returns when [`Signals::wait`] returns `None`.
    pub(super) fn start(
        name: &str,
        body: impl FnOnce(&Arc<Signals>) + Send + 'static,
    ) -> std::io::Result<Worker> {
        let signals = Arc::new(Signals::default());
        let of_thread = Arc::clone(&signals);
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&of_thread))?;
        Ok(Worker { signals, thread: Some(thread) })
    }
}

impl Signals {
    /// Reports that an operation may have left work.
    pub(super) fn wake(&self) {
        self.state.lock().work = true;
        self.changed.notify_one();
    }

    /// Ends the thread after its current part of the work.
    pub(super) fn end(&self) {
        self.state.lock().end = true;
        self.changed.notify_one();
    }

    /// Whether the thread is to end.
    pub(super) fn is_ending(&self) -> bool {
        self.state.lock().end
    }

    /// Waits for work. Returns `None` at the end. The edit histories are always due.
    pub(super) fn wait(&self) -> Option<Work> {
        let mut state = self.state.lock();
        while !state.work && !state.end && !state.edits && !state.journal {
            self.changed.wait(&mut state);
        }
        let until = Instant::now() + EDIT_DELAY;
        while state.edits && !state.work && !state.end && !state.journal {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.edits = false;
        let operation = std::mem::take(&mut state.work);
        let journal = std::mem::take(&mut state.journal);
        (!state.end).then_some(Work { operation, journal })
    }

    /// Reports that an edit begins. Notifies the thread only for the first one, because each edit
    /// calls this.
    pub(super) fn notice_edit(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.edits, true) {
            self.changed.notify_one();
        }
    }

    /// Asks for another look at the edit histories after [`EDIT_DELAY`]. Called by the thread
    /// itself, which needs no notice.
    pub(super) fn look_at_edits_later(&self) {
        self.state.lock().edits = true;
    }

    /// Reports that the journal of the upper layer became long.
    pub(super) fn notice_journal(&self) {
        self.state.lock().journal = true;
        self.changed.notify_one();
    }

    /// Rests for [`REST`] if requests arrived since the last call. `requests` is their number.
    /// Returns false at the end.
    pub(super) fn rest(&self, requests: u64) -> bool {
        let mut state = self.state.lock();
        if !state.end && state.requests != requests {
            self.changed.wait_while_for(&mut state, |state| !state.end, REST);
        }
        state.requests = requests;
        !state.end
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.signals.end();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("a background thread of the store panicked");
        }
    }
}
