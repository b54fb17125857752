//! What keeps a store small and quick: holds, drops, gc, and the thread that tidies up behind the operations.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::Result;
use crate::fs::Tended;
use crate::history::gc::Keep;
use crate::history::{Effort, Timeline, check};
use crate::sandbox::Sandbox;
use crate::sandbox::verbs::{Checked, Checkpoint, Collected, Rev};

impl Sandbox {
    /// Gives a checkpoint up.
    pub(super) fn drop_checkpoint(&self, rev: &Rev) -> Result<Checkpoint> {
        let fs = Arc::clone(self.fs());
        let _alone = fs.alone();
        let layer = self.checkpoint_named(rev)?;
        let dropped = self.checkpoint_info(layer)?;
        self.timeline.drop_checkpoint(layer)?;
        Ok(dropped)
    }

    /// Keeps a checkpoint from being dropped, or not any more.
    pub(super) fn hold(&self, rev: &Rev, held: bool) -> Result<Checkpoint> {
        let layer = self.checkpoint_named(rev)?;
        self.timeline.hold(layer, held)?;
        self.checkpoint_info(layer)
    }

    /// Rewrites what is in the store in its shortest form. A mount does that by itself where it pays; nothing that can be
    /// seen changes by it.
    ///
    /// # Errors
    /// What the store answers; nothing is lost then.
    pub fn tidy(&self) -> Result<()> {
        self.timeline.tend_versions(true);
        self.timeline.tidy(Effort::Everything)
    }

    /// Holds the store against everything that must be true of it. Nothing is rewritten meanwhile.
    pub(super) fn check(&self, read_data: bool) -> Result<Checked> {
        let fs = Arc::clone(self.fs());
        let _alone = fs.alone();
        self.timeline.check(read_data).map(checked)
    }

    /// Checks a store that need not be sound enough to be opened.
    ///
    /// # Errors
    /// When there is no store at `path`, or it is of another format.
    pub fn check_store(path: &Path, read_data: bool) -> Result<Checked> {
        check::check(path, read_data).map(checked)
    }

    /// Checks a store that nobody has open, and mends what can be mended without losing anything: an index and checksums that
    /// cannot be read are made anew from the journals and the content.
    ///
    /// # Errors
    /// As [`Sandbox::check_store`], and what the store answers. [`Kind::InUse`]: somebody has it open.
    ///
    /// [`Kind::InUse`]: crate::error::Kind::InUse
    pub fn repair_store(path: &Path, read_data: bool) -> Result<Checked> {
        let repaired = check::repair(path)?;
        Ok(Checked { repaired, ..Sandbox::check_store(path, read_data)? })
    }

    /// Gives space back. Nobody else looks at states meanwhile; programs in the mount go on.
    pub(super) fn gc(&self, keep: Keep, dry_run: bool) -> Result<Collected> {
        let fs = Arc::clone(self.fs());
        let _alone = fs.alone();
        let parent = self.timeline.parent();
        let collected = self.timeline.gc(keep, dry_run)?;
        Ok(Collected {
            dropped: collected.dropped.iter().filter_map(|info| super::checkpoint_of(info, parent)).collect(),
            layers: collected.layers,
            bytes: collected.bytes,
            store_bytes: self.timeline.store().disk_usage(),
        })
    }
}

fn checked(report: check::Report) -> Checked {
    Checked {
        problems: report.problems.iter().map(ToString::to_string).collect(),
        repaired: Vec::new(),
        layers: report.layers,
        records: report.records,
        extents: report.extents,
        bytes_read: report.bytes_read,
        bytes_without_sum: report.bytes_without_sum,
        warnings: report.warnings.iter().map(ToString::to_string).collect(),
        versions: report.versions,
    }
}

/// The thread that tidies up. It ends, and is waited for, when this is dropped.
pub(super) struct Housekeeper {
    timeline: Arc<Timeline>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Default)]
struct Wanted {
    work: bool,
    /// Files are edited: their versions are looked after in a moment.
    edits: bool,
    end: bool,
}

/// How long it is waited before it is looked after versions again.
const MOMENT: Duration = Duration::from_millis(1100);

impl Housekeeper {
    /// Starts it, with what there is to do at a start.
    pub(super) fn start(timeline: &Arc<Timeline>) -> std::io::Result<Housekeeper> {
        let shared = Arc::new(Shared::default());
        shared.state.lock().work = true;
        let (timeline, for_end) = (Arc::clone(timeline), Arc::clone(timeline));
        let (of_thread, noticed) = (Arc::clone(&shared), Arc::clone(&shared));
        timeline.fs().set_edit_notice(Some(Box::new(move || noticed.notice_edit())));
        let body = move || {
            while let Some(is_work) = of_thread.wait() {
                if is_work && let Err(error) = timeline.tidy(Effort::WhereItPays) {
                    log::warn!("the store could not be tidied, and works on as it is: {error}");
                }
                if timeline.tend_versions(false) == Tended::Later {
                    of_thread.state.lock().edits = true;
                }
            }
            timeline.fs().set_edit_notice(None);
        };
        let thread = std::thread::Builder::new().name("housekeeper".to_owned()).spawn(body)?;
        Ok(Housekeeper { timeline: for_end, shared, thread: Some(thread) })
    }

    /// Says that there may be something to do.
    pub(super) fn wake(&self) {
        self.shared.state.lock().work = true;
        self.shared.changed.notify_one();
    }
}

impl Shared {
    /// Waits for work; whether there is any besides the versions of files that were edited, and none at the end.
    fn wait(&self) -> Option<bool> {
        let mut state = self.state.lock();
        while !state.work && !state.end && !state.edits {
            self.changed.wait(&mut state);
        }
        // Whoever edits edits more.
        let until = Instant::now() + MOMENT;
        while state.edits && !state.work && !state.end {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.edits = false;
        let is_work = std::mem::take(&mut state.work);
        (!state.end).then_some(is_work)
    }

    /// An edit begins. Wakes the thread only if it sleeps for good.
    fn notice_edit(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.edits, true) {
            self.changed.notify_one();
        }
    }
}

impl Drop for Housekeeper {
    fn drop(&mut self) {
        self.timeline.stop_tidying();
        self.shared.state.lock().end = true;
        self.shared.changed.notify_one();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the housekeeper panicked");
        }
    }
}
