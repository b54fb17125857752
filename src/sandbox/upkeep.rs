//! What keeps a store small and quick: holds, drops, gc, and the thread that tidies up behind the operations.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::Result;
use crate::fs::{Fs, Tended};
use crate::sandbox::Sandbox;
use crate::sandbox::collector;
use crate::sandbox::collector::{Collector, Terms};
use crate::sandbox::{Checked, Checkpoint, Collected, Info, LayerSpace, Protected, Rev};
use crate::store::record::LayerKind;
use crate::sys;
use crate::timeline::gc::Keep;
use crate::timeline::{Due, Effort, Policy, Savepoint, Timeline, fsck};

impl Sandbox {
    /// Gives a checkpoint up.
    pub(super) fn drop_checkpoint(&self, rev: &Rev) -> Result<Checkpoint> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
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
        self.timeline.shorten_journal(Effort::Everything)?;
        self.timeline.tidy(Effort::Everything)?;
        self.timeline.dedup(&|| true)?;
        self.timeline.pack(Effort::Everything, &|| true)
    }

    /// Says whether content that is there already is stored once, from now on; it is unless this says no.
    pub fn set_dedup(&self, on: bool) {
        self.timeline.set_dedup(on);
    }

    /// Says which paths an apply writes only with consent, from now on; at first the built-in ones.
    pub fn set_protected(&self, list: Protected) {
        self.timeline.set_protected(list);
    }

    /// Holds the store against everything that must be true of it. Nothing is rewritten meanwhile.
    pub(super) fn check(&self, read_data: bool) -> Result<Checked> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        self.timeline.check(read_data).map(checked)
    }

    /// Checks a store that need not be sound enough to be opened.
    ///
    /// # Errors
    /// When there is no store at `path`, or it is of another format.
    pub fn check_store(path: &Path, read_data: bool) -> Result<Checked> {
        fsck::check(path, read_data).map(checked)
    }

    /// Checks a store that nobody has open, and mends what can be mended without losing anything: an index and checksums that
    /// are damaged are made anew from the journals and the content. What could not be mended is told with the problems.
    ///
    /// # Errors
    /// As [`Sandbox::check_store`], and what the store answers. [`Kind::InUse`]: somebody has it open.
    ///
    /// [`Kind::InUse`]: crate::error::Kind::InUse
    pub fn repair_store(path: &Path, read_data: bool) -> Result<Checked> {
        let repaired = fsck::repair(path)?;
        let mut checked = Sandbox::check_store(path, read_data)?;
        // Each once.
        checked
            .problems
            .retain(|problem| !repaired.left.iter().any(|left| left.ends_with(problem)));
        checked.problems.extend(repaired.left);
        Ok(Checked { repaired: repaired.done, ..checked })
    }

    /// What the store takes.
    pub(super) fn info(&self) -> Result<Info> {
        let store = self.timeline.store();
        let mut layers = Vec::new();
        for info in store.catalog() {
            let layer = info.header.layer;
            let Some((home, shared)) = store.content_space(layer)? else { continue };
            // Its content is that of others, to whose maps it is somewhere else.
            let logical = if info.header.kind == LayerKind::Gathered { 0 } else { home + shared };
            layers.push(LayerSpace {
                layer,
                name: info.seal.as_ref().and_then(|seal| seal.name.clone()),
                open: info.seal.is_none(),
                logical,
                stored: store.layer_usage(layer),
                shared,
            });
        }
        Ok(Info { layers, store_bytes: store.disk_usage(), to_do: self.timeline.dedup_is_to_do() })
    }

    /// Says what goes without being asked for each time while it is mounted; none: nothing. `limit` is what it may store in
    /// all, in bytes.
    pub fn set_policy(&self, policy: Option<Policy>, limit: Option<u64>) {
        let mut terms = self.terms.lock();
        (terms.policy, terms.limit) = (policy, limit);
    }

    /// All states that there are now stay, until [`Sandbox::spare_nothing`].
    pub fn spare_all_states(&self) {
        self.terms.lock().spared =
            self.timeline.sealed().iter().map(|info| info.header.layer).collect();
    }

    /// Remembers what there is now besides the tree, for [`Sandbox::rewind_to`].
    pub fn moment(&self) -> Savepoint {
        self.timeline.moment()
    }

    /// Forgets the checkpoints, holds, operations and versions of files that there are since a moment. The tree must have been taken
    /// back to a state from before it.
    ///
    /// # Errors
    /// What the store answers; something of it may still be there then.
    pub fn rewind_to(&self, moment: &Savepoint) -> Result<()> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        self.timeline.rewind_to(moment)
    }

    /// What stayed because of [`Sandbox::spare_all_states`] may go; and goes, if that pays. Gives the checkpoints that went.
    ///
    /// # Errors
    /// What the store answers.
    pub fn spare_nothing(&self) -> Result<Vec<Checkpoint>> {
        let terms = {
            let mut terms = self.terms.lock();
            terms.spared.clear();
            terms.clone()
        };
        let Some(policy) = terms.policy else { return Ok(Vec::new()) };
        if self.timeline.is_due(&policy, &terms.spared, false) == Due::Not {
            return Ok(Vec::new());
        }
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        let parent = self.timeline.parent();
        let collected = self.timeline.collect_by(&policy, &terms.spared, &|| true)?;
        Ok(collected.dropped.iter().filter_map(|info| super::checkpoint_of(info, parent)).collect())
    }

    /// Gives space back. Nobody else looks at states meanwhile; programs in the mount go on.
    pub(super) fn gc(&self, keep: &Keep, dry_run: bool) -> Result<Collected> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        let parent = self.timeline.parent();
        let collected = self.timeline.gc(keep, dry_run)?;
        Ok(Collected {
            dropped: collected
                .dropped
                .iter()
                .filter_map(|info| super::checkpoint_of(info, parent))
                .collect(),
            layers: collected.layers,
            bytes: collected.bytes,
            store_bytes: self.timeline.store().disk_usage(),
        })
    }
}

fn checked(report: fsck::Report) -> Checked {
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

/// How far the thread that looks for equal content stands back behind others: a tenth of what they get.
const NICE: i32 = 10;
/// How long it rests after each piece of its work while somebody asks for something.
const REST: Duration = Duration::from_millis(20);

/// The threads that tidy up: one that keeps the ways short and the versions of files small, and behind it one that looks for content that is there already and one
/// that gives back what nothing needs. They end, and are waited for, when this is dropped.
pub(super) struct Housekeeper {
    timeline: Arc<Timeline>,
    // Dropped first: it wakes the others.
    compacting: Worker,
    dedup: Worker,
    collector: Collector,
}

impl Housekeeper {
    /// Starts them, with what there is to do at a start.
    pub(super) fn start(
        timeline: &Arc<Timeline>,
        terms: Arc<Mutex<Terms>>,
    ) -> std::io::Result<Housekeeper> {
        let of_thread = Arc::clone(timeline);
        let dedup = Worker::start("dedup", move |shared| {
            if let Err(error) = sys::process::set_nice(NICE) {
                log::debug!("looking for equal content goes before others: {error}");
            }
            while shared.wait().is_some() {
                if let Err(error) = of_thread.dedup(&|| shared.rest(of_thread.fs())) {
                    log::warn!("content that is there already is kept twice: {error}");
                }
                if let Err(error) =
                    of_thread.pack(Effort::WhereItPays, &|| shared.rest(of_thread.fs()))
                {
                    log::warn!(
                        "older layers are not put together, and work on as they are: {error}"
                    );
                }
                // Old states were read for all this, and by whoever woke us.
                if sys::memory::trim() {
                    log::debug!("memory that was freed went back to the system");
                }
            }
        })?;
        // An attempt of a run before this one may have ended it.
        timeline.begin_compacting();
        let collector = Collector::start(timeline, terms)?;
        let (of_thread, behind) = (Arc::clone(timeline), Arc::clone(&dedup.shared));
        let collecting = Arc::clone(collector.shared());
        let compacting = Worker::start("housekeeper", move |shared| {
            let noticed = Arc::clone(shared);
            of_thread.fs().set_edit_notice(Some(Box::new(move || noticed.notice_edit())));
            let noticed = Arc::clone(shared);
            of_thread.fs().set_journal_notice(Some(Box::new(move || noticed.notice_journal())));
            while let Some(Work { is_work, journal }) = shared.wait() {
                if (is_work || journal)
                    && let Err(error) = of_thread.shorten_journal(Effort::WhereItPays)
                {
                    log::warn!("a mount takes longer than it need: {error}");
                }
                if is_work && let Err(error) = of_thread.tidy(Effort::WhereItPays) {
                    log::warn!("the store could not be tidied, and works on as it is: {error}");
                }
                if is_work {
                    behind.wake();
                    collecting.wake();
                }
                if of_thread.tend_versions(false) == Tended::Later {
                    shared.state.lock().edits = true;
                }
            }
            of_thread.fs().set_edit_notice(None);
            of_thread.fs().set_journal_notice(None);
        })?;
        compacting.shared.wake();
        Ok(Housekeeper { timeline: Arc::clone(timeline), compacting, dedup, collector })
    }

    /// Says that there may be something to do.
    pub(super) fn wake(&self) {
        self.compacting.shared.wake();
    }

    /// Who can be asked for room.
    pub(super) fn collector(&self) -> Arc<collector::Shared> {
        Arc::clone(self.collector.shared())
    }
}

impl Drop for Housekeeper {
    fn drop(&mut self) {
        self.timeline.stop_compacting();
        self.dedup.shared.end();
        self.collector.shared().end();
    }
}

/// A thread that works when it is told to.
struct Worker {
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
    /// The journal of the upper layer got long.
    journal: bool,
    end: bool,
    /// What had been asked for when it rested last.
    asked: u64,
}

/// The work besides the versions of files.
struct Work {
    /// Whether an operation left something to do.
    is_work: bool,
    /// Whether the journal of the upper layer got long.
    journal: bool,
}

/// How long it is waited before it is looked after versions again.
const MOMENT: Duration = Duration::from_millis(1100);

impl Worker {
    fn start(
        name: &str,
        body: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> std::io::Result<Worker> {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&of_thread))?;
        Ok(Worker { shared, thread: Some(thread) })
    }
}

impl Shared {
    fn wake(&self) {
        self.state.lock().work = true;
        self.changed.notify_one();
    }

    fn end(&self) {
        self.state.lock().end = true;
        self.changed.notify_one();
    }

    /// Waits for work, or for edits of files whose versions are to be looked after; none at the end.
    fn wait(&self) -> Option<Work> {
        let mut state = self.state.lock();
        while !state.work && !state.end && !state.edits && !state.journal {
            self.changed.wait(&mut state);
        }
        // Whoever edits edits more.
        let until = Instant::now() + MOMENT;
        while state.edits && !state.work && !state.end && !state.journal {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.edits = false;
        let is_work = std::mem::take(&mut state.work);
        let journal = std::mem::take(&mut state.journal);
        (!state.end).then_some(Work { is_work, journal })
    }

    /// An edit begins. Wakes the thread only if it sleeps for good.
    fn notice_edit(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.edits, true) {
            self.changed.notify_one();
        }
    }

    /// The journal of the upper layer got long.
    fn notice_journal(&self) {
        self.state.lock().journal = true;
        self.changed.notify_one();
    }

    /// Rests if anything was asked for since the last time; false at the end.
    fn rest(&self, fs: &Fs) -> bool {
        let mut state = self.state.lock();
        if !state.end && state.asked != fs.requests() {
            self.changed.wait_while_for(&mut state, |state| !state.end, REST);
        }
        state.asked = fs.requests();
        !state.end
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.end();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("a thread that tidies up panicked");
        }
    }
}
