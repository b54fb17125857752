//! The background threads of a mounted sandbox: compaction, deduplication, and garbage collection.
//!
//! * They keep the store small and quick to open. Without them the sandbox works the same.
//! * Compaction runs after each operation and wakes the other two, so that they work on compact
//!   layers.
//! * Dropping the [`Housekeeper`] ends the threads and waits for them. The next mount does
//!   the work that they did not finish.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::fs::Tended;
use crate::sandbox::collector::{CollectionTerms, Collector, CollectorHandle};
use crate::sandbox::worker::{Signals, Work, Worker};
use crate::sys;
use crate::timeline::{Effort, Timeline};

/// The nice value of the deduplication thread, which computes most. It gets about a tenth of the
/// CPU time of a program with the default value.
const NICE: i32 = 10;

/// The threads.
pub(super) struct Housekeeper {
    timeline: Arc<Timeline>,
    // Dropped first, because it wakes the others.
    compaction: Worker,
    dedup: Worker,
    collector: Collector,
}

impl Housekeeper {
    /// Starts the threads. They first do what the last mount left.
    pub(super) fn start(
        timeline: &Arc<Timeline>,
        terms: Arc<Mutex<CollectionTerms>>,
    ) -> std::io::Result<Housekeeper> {
        let of_thread = Arc::clone(timeline);
        let dedup = Worker::start("dedup", move |signals| dedup_loop(&of_thread, signals))?;
        // An earlier housekeeper may have stopped compaction when it ended.
        timeline.begin_compacting();
        let collector = Collector::start(timeline, terms)?;
        let compaction = {
            let (timeline, dedup) = (Arc::clone(timeline), Arc::clone(&dedup.signals));
            let collector = Arc::clone(collector.handle());
            Worker::start("housekeeper", move |signals| {
                compaction_loop(&timeline, signals, &dedup, &collector);
            })?
        };
        compaction.signals.wake();
        Ok(Housekeeper { timeline: Arc::clone(timeline), compaction, dedup, collector })
    }

    /// Reports that an operation may have left work.
    pub(super) fn wake(&self) {
        self.compaction.signals.wake();
    }

    /// The collector, to ask for space on a full disk.
    pub(super) fn collector(&self) -> Arc<CollectorHandle> {
        Arc::clone(self.collector.handle())
    }
}

impl Drop for Housekeeper {
    fn drop(&mut self) {
        self.timeline.stop_compacting();
        self.dedup.signals.end();
        self.collector.handle().end();
    }
}

/// Compacts journals and edit histories, then wakes the other threads.
fn compaction_loop(
    timeline: &Timeline,
    signals: &Arc<Signals>,
    dedup: &Signals,
    collector: &CollectorHandle,
) {
    let fs = timeline.fs();
    let notified = Arc::clone(signals);
    fs.set_edit_notice(Some(Box::new(move || notified.notice_edit())));
    let notified = Arc::clone(signals);
    fs.set_journal_notice(Some(Box::new(move || notified.notice_journal())));
    while let Some(Work { operation, journal }) = signals.wait() {
        if (operation || journal)
            && let Err(error) = timeline.shorten_journal(Effort::WhereItPays)
        {
            log::warn!("compact the journal of the upper layer: {error}");
        }
        if operation && let Err(error) = timeline.compact(Effort::WhereItPays) {
            log::warn!("compact the sealed layers: {error}");
        }
        if operation {
            dedup.wake();
            collector.wake();
        }
        if timeline.maintain_edit_history(false) == Tended::Later {
            signals.look_at_edits_later();
        }
    }
    fs.set_edit_notice(None);
    fs.set_journal_notice(None);
}

/// Stores equal content once and packs small layers, slowly while the mount is in use.
fn dedup_loop(timeline: &Timeline, signals: &Signals) {
    if let Err(error) = sys::process::set_nice(NICE) {
        log::debug!("lower the priority of the deduplication thread: {error}");
    }
    let go = || signals.rest(timeline.fs());
    while signals.wait().is_some() {
        if let Err(error) = timeline.dedup(&go) {
            log::warn!("deduplicate content: {error}");
        }
        if let Err(error) = timeline.pack(Effort::WhereItPays, &go) {
            log::warn!("pack older layers: {error}");
        }
        // This work, and the compaction before it, loaded old states into memory.
        if sys::memory::trim() {
            log::debug!("returned freed memory to the system");
        }
    }
}
