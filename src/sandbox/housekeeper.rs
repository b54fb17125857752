//! The background threads of mounted sandboxes.
//!
//! * They keep the store small and quick to open. Without them the sandboxes work the same.
//! * Each mounted head has a thread for its journal and its edit history. A store has one thread
//!   each for compaction, deduplication and garbage collection, as long as any head is mounted.
//! * Compaction runs after each operation and wakes the other two, so that they work on compact
//!   layers.
//! * Dropping a [`Housekeeper`] ends the thread of its head and waits for it; dropping the last one
//!   also ends those of the store. The next mount does the work that they did not finish.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::fs::Tended;
use crate::sandbox::collector::{CollectionTerms, Collector, CollectorHandle};
use crate::sandbox::worker::{Signals, Work, Worker};
use crate::sys;
use crate::timeline::{Common, Effort, Timeline};

/// The nice value of the deduplication thread, which computes most. It gets about a tenth of the
/// CPU time of a program with the default value.
const NICE: i32 = 10;

/// The thread of a mounted head.
pub(super) struct Housekeeper {
    // Dropped first, because it wakes those of the store.
    tending: Option<Worker>,
    timeline: Arc<Timeline>,
    keeper: Option<Arc<StoreKeeper>>,
    slot: Arc<KeeperSlot>,
}

/// The threads of the store, while any head is mounted.
pub(super) type KeeperSlot = Mutex<Weak<StoreKeeper>>;

/// The threads of a store.
pub(super) struct StoreKeeper {
    common: Arc<Common>,
    // Dropped first, because it wakes the others.
    compaction: Worker,
    dedup: Worker,
    collector: Collector,
}

impl Housekeeper {
    /// Starts the threads. They first do what the last mount left.
    pub(super) fn start(
        timeline: &Arc<Timeline>,
        terms: &Arc<Mutex<CollectionTerms>>,
        slot: &Arc<KeeperSlot>,
    ) -> std::io::Result<Housekeeper> {
        let keeper = {
            let mut running = slot.lock();
            match running.upgrade() {
                Some(keeper) => keeper,
                None => {
                    let keeper = Arc::new(StoreKeeper::start(timeline.common(), terms)?);
                    *running = Arc::downgrade(&keeper);
                    keeper
                }
            }
        };
        let (of_thread, compaction) =
            (Arc::clone(timeline), Arc::clone(&keeper.compaction.signals));
        let tending = Worker::start("housekeeper", move |signals| {
            tending_loop(&of_thread, signals, &compaction);
        })?;
        keeper.collector.watch(timeline.fs());
        tending.signals.wake();
        Ok(Housekeeper {
            tending: Some(tending),
            timeline: Arc::clone(timeline),
            keeper: Some(keeper),
            slot: Arc::clone(slot),
        })
    }

    /// Reports that an operation may have left work.
    pub(super) fn wake(&self) {
        self.tending.iter().for_each(|worker| worker.signals.wake());
    }

    /// The collector, to ask for space on a full disk.
    pub(super) fn collector(&self) -> Option<Arc<CollectorHandle>> {
        self.keeper.as_ref().map(|keeper| Arc::clone(keeper.collector.handle()))
    }
}

impl Drop for Housekeeper {
    fn drop(&mut self) {
        self.timeline.fs().set_growth_notice(0, None);
        self.tending = None;
        // While the last one ends, no other head begins to use it.
        let _slot = self.slot.lock();
        self.keeper = None;
    }
}

impl StoreKeeper {
    fn start(
        common: &Arc<Common>,
        terms: &Arc<Mutex<CollectionTerms>>,
    ) -> std::io::Result<StoreKeeper> {
        let of_thread = Arc::clone(common);
        let dedup = Worker::start("dedup", move |signals| dedup_loop(&of_thread, signals))?;
        // An earlier keeper may have stopped compaction when it ended.
        common.begin_compacting();
        let collector = Collector::start(common, Arc::clone(terms))?;
        let compaction = {
            let (common, dedup) = (Arc::clone(common), Arc::clone(&dedup.signals));
            let collector = Arc::clone(collector.handle());
            Worker::start("compaction", move |signals| {
                compaction_loop(&common, signals, &dedup, &collector);
            })?
        };
        Ok(StoreKeeper { common: Arc::clone(common), compaction, dedup, collector })
    }
}

impl Drop for StoreKeeper {
    fn drop(&mut self) {
        self.common.stop_compacting();
        self.dedup.signals.end();
        self.collector.handle().end();
    }
}

/// Shortens the journal of a head and its edit history, then wakes the compaction of the store.
fn tending_loop(timeline: &Timeline, signals: &Arc<Signals>, compaction: &Signals) {
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
        if operation {
            compaction.wake();
        }
        if timeline.maintain_edit_history(false, &|| signals.is_ending()) == Tended::Later {
            signals.look_at_edits_later();
        }
    }
    fs.set_edit_notice(None);
    fs.set_journal_notice(None);
}

/// Compacts sealed layers, then wakes the other threads.
fn compaction_loop(
    common: &Common,
    signals: &Signals,
    dedup: &Signals,
    collector: &CollectorHandle,
) {
    while signals.wait().is_some() {
        if let Err(error) = common.compact(Effort::WhereItPays) {
            log::warn!("compact the sealed layers: {error}");
        }
        dedup.wake();
        collector.wake();
    }
}

/// Stores equal content once and archives cold layers, slowly while the mount is in use.
fn dedup_loop(common: &Common, signals: &Signals) {
    if let Err(error) = sys::process::set_nice(NICE) {
        log::debug!("lower the priority of the deduplication thread: {error}");
    }
    let go = || signals.rest(common.requests());
    while signals.wait().is_some() {
        if let Err(error) = common.dedup(&go) {
            log::warn!("deduplicate content: {error}");
        }
        if let Err(error) = common.archive_cold(Effort::WhereItPays, &go) {
            log::warn!("archive older layers: {error}");
        }
        // This work, and the compaction before it, loaded old states into memory.
        if sys::memory::trim() {
            log::debug!("returned freed memory to the system");
        }
    }
}
