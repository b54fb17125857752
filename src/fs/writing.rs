//! The **lock of changes**. A change holds it from its beginning to its end, so a head makes one
//! change at a time. It takes the core lock after it.
//!
//! A change releases the core lock while it writes to a file of the store, renames or removes one,
//! allocates or punches blocks there, or compares states. So a slow disk delays no request that
//! only reads, because that takes the core lock alone.
//!
//! Always true:
//! * Only the holder of [`Writing`] appends to a log of the head, writes to its pool in place, or
//!   changes its tree.
//! * While the core lock is released, other threads can change the quota and what the kernel holds:
//!   it looks nodes up, forgets them, and follows links. So a change looks at these after its
//!   record is written. A switch to another state looks again before it is carried out. From that
//!   last look on, lookups that find a node wait. While a directory is copied up, a lookup that
//!   finds it at another path of the base waits for the change. While a directory moves into
//!   another one, a link whose text climbs waits.
//! * The log of the edit history gets the records of a change before any of its bytes are in place.

use std::ops::{Deref, DerefMut};

use crate::error::{FsError, FsResult};
use crate::fs::merged::answers;
use crate::fs::{Core, Fs};
use crate::store::edits_log::{EditsWrite, NewLog};
use crate::store::record::Record;
use crate::sys::lock::RankedGuard;
use crate::tree::{Edit, Misfit};

/// Both locks of a change that is under way. Derefs to [`Core`].
pub(in crate::fs) struct Writing<'a> {
    // First, so that it is dropped first.
    core: RankedGuard<'a, Core>,
    _changes: RankedGuard<'a, ()>,
}

impl Deref for Writing<'_> {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Writing<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // After a panic, no request may wait for a copy-up or a move that never ends.
        self.coherence.end_copy_up();
        self.links.set_moving(false);
        self.held.end_watch();
        self.write_edits();
    }
}

impl Fs {
    /// Takes the lock of changes, and then the core lock.
    pub(in crate::fs) fn writing(&self) -> Writing<'_> {
        let changes = self.changes.lock();
        Writing { core: self.core(), _changes: changes }
    }

    /// Waits until the change that is under way has ended. The caller holds no lock.
    pub(in crate::fs) fn wait_for_change(&self) {
        drop(self.changes.lock());
    }
}

impl Writing<'_> {
    /// Releases the core lock while it calls `meanwhile`.
    pub(in crate::fs) fn released<T>(&mut self, meanwhile: impl FnOnce() -> T) -> T {
        self.core.released(|| {
            #[cfg(test)]
            hook::call();
            let result = meanwhile();
            #[cfg(test)]
            hook::call();
            result
        })
    }

    /// Lets the requests that wait for the core lock have it first, in the middle of a long work
    /// that needs it.
    pub(in crate::fs) fn yield_to_waiting(&mut self) {
        self.core.yield_to_waiting();
    }

    /// Appends an operation to the journal, and then applies it to the tree.
    ///
    /// # Errors
    /// Those of the store; then nothing has changed.
    pub(in crate::fs) fn commit(&mut self, edits: Vec<Edit>) -> FsResult<()> {
        if edits.is_empty() {
            return Ok(());
        }
        self.commit_copy_up(edits)?;
        answers::note_committed();
        Ok(())
    }

    /// As [`Writing::commit`], for a copy-up: a program cannot see it, so the operation may still
    /// run again.
    pub(in crate::fs) fn commit_copy_up(&mut self, edits: Vec<Edit>) -> FsResult<()> {
        // A record that does not fit the tree would make the layer unreadable for ever.
        self.tree.validate(&edits).map_err(|Misfit(what)| FsError::Damage(what))?;
        let record = Record::Edits(edits);
        self.append(&record)?;
        let Record::Edits(edits) = record else { return Ok(()) };
        let core = &mut *self.core;
        for edit in &edits {
            core.tree.apply(edit).map_err(|Misfit(what)| FsError::Damage(what))?;
        }
        self.check_journal();
        Ok(())
    }

    /// Calls the notice if the journal has grown so long that its length is to be checked.
    pub(in crate::fs) fn check_journal(&mut self) {
        let core = &mut *self.core;
        core.upper.check_journal(&core.state.tree);
    }

    /// Appends a record to the journal of the upper layer, and counts its bytes.
    ///
    /// # Errors
    /// Those of the store; then nothing has changed.
    pub(in crate::fs) fn append(&mut self, record: &Record) -> FsResult<()> {
        answers::check_complete()?;
        self.write_edits();
        let mut frame = self.upper.begin_record(record)?;
        self.released(|| frame.write());
        let bytes = self.upper.end_record(record, frame)?;
        self.quota.add(bytes);
        Ok(())
    }

    /// Writes what the log of the edit history lacks: records, or all of the histories if the log
    /// must be rewritten.
    pub(in crate::fs) fn write_edits(&mut self) {
        if let Some(write) = self.edits.as_mut().and_then(|edits| edits.begin_write()) {
            self.finish_edits(write);
        }
    }

    /// Puts a new log of the edit history in the place of the old one, if no record was appended
    /// since it was begun. Otherwise removes it.
    pub(in crate::fs) fn publish_edits(&mut self, new: NewLog) {
        if let Some(write) = self.edits.as_mut().map(|edits| edits.begin_publish(new)) {
            self.finish_edits(write);
        }
    }

    fn finish_edits(&mut self, write: EditsWrite) {
        let written = self.released(|| write.write());
        if let Some(edits) = &mut self.edits {
            edits.end_write(written);
        }
    }
}

/// Lets a test run code in another thread whenever an operation of this thread has released the
/// core lock.
#[cfg(test)]
pub(in crate::fs) mod hook {
    use std::cell::RefCell;
    use std::thread::JoinHandle;
    use std::time::Duration;

    type Hook = Box<dyn FnMut() + Send>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// Calls `each` before and after everything for which a change releases the core lock, and
    /// after the questions that a run of an operation had no answer to, until [`clear`].
    pub(in crate::fs) fn set(each: impl FnMut() + Send + 'static) {
        HOOK.set(Some(Box::new(each)));
    }

    pub(in crate::fs) fn clear() {
        HOOK.set(None);
    }

    /// Waits for a thread that ends soon, unless it waits for the change.
    pub(in crate::fs) fn wait_a_little_for<T>(thread: &JoinHandle<T>) {
        for _ in 0..100 {
            if thread.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(in crate::fs) fn call() {
        if let Some(mut hook) = HOOK.take() {
            std::thread::scope(|scope| scope.spawn(&mut hook).join().unwrap());
            HOOK.set(Some(hook));
        }
    }
}
