//! The parts that the heads of an open store share, and the list of open heads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{RwLock, RwLockWriteGuard};

use crate::base::Base;
use crate::error::{Error, Kind, Result};
use crate::fs::merged::pre_images::PreHistory;
use crate::fs::{Fs, HeadTree, Invalidations, State};
use crate::store::layer::LayerInfo;
use crate::store::{Store, Unsettled};
use crate::sys::lock::{Rank, RankedGuard, RankedMutex};
use crate::timeline::apply::protected::Protected;
use crate::timeline::apply::unfinished::{RecoveredApplies, UnfinishedRollback};
use crate::timeline::base_identity::BaseIdentity;
use crate::timeline::dormant::Dormant;
use crate::timeline::{Timeline, TreeCache, apply, base_identity, dedup, epoch_of, reopen};
use crate::tree::Tree;
use crate::types::{Epoch, LayerId, NodeId, Timestamp};

/// How long [`Common::exclusive_soon`] waits. Not longer, because a reader may wait for its caller.
const SOON: Duration = Duration::from_millis(300);
/// How long [`Common::open_head`] waits for a head that is being closed, and how often it looks.
const CLOSING_LIMIT: Duration = Duration::from_secs(1);
const CLOSING_POLL: Duration = Duration::from_millis(2);

/// The parts that all heads of an open store share.
pub struct Common {
    pub(super) store: Arc<Store>,
    pub(super) base: Arc<Base>,
    pub(super) trees: RankedMutex<TreeCache>,
    /// The heads that are open.
    pub(super) heads: RankedMutex<BTreeMap<String, OpenHead>>,
    /// Whether the base is the one that the store was made for; `None` once that is recorded.
    base_is: RankedMutex<Option<BaseIdentity>>,
    /// Set while the daemon shuts down: long background work ends and is not started again.
    pub(super) stopping: AtomicBool,
    /// The pre-images of each apply so far.
    pub(super) applies: RankedMutex<PreHistory>,
    /// A rollback that could not end. No other apply runs before it has.
    pub(super) unfinished: RankedMutex<Option<UnfinishedRollback>>,
    /// Whether opening the store rolled back an apply. Then that apply was the last one, and the
    /// next `apply --undo` has nothing left to do.
    pub(super) was_rolled_back: AtomicBool,
    /// Held for one operation at a time.
    pub(super) operation: RankedMutex<()>,
    /// When a head was last made or dropped, since the store was opened.
    pub(super) heads_changed: RankedMutex<Timestamp>,
    /// The content that closed heads refer to.
    pub(super) dormant: RankedMutex<Dormant>,
    /// Held while sealed layers are rewritten.
    pub(super) compacting: RankedMutex<()>,
    /// The chunk table of deduplication, held by one thread at a time.
    pub(super) dedup: RankedMutex<Option<dedup::Dedup>>,
    /// The oldest state that had no seal when the store was opened.
    pub(super) unsealed_at_open: Option<LayerId>,
    /// Layers that were already searched for equal content.
    pub(super) deduplicated: RankedMutex<BTreeSet<LayerId>>,
    /// Layers that keep their directories until a layer with this number exists.
    pub(super) kept_out_of_archive: RankedMutex<BTreeMap<LayerId, LayerId>>,
    pub(super) dedup_is_on: AtomicBool,
    /// Paths that an apply writes only with consent.
    protected: RwLock<Protected>,
}

/// An open head in the table of all.
pub(super) struct OpenHead {
    timeline: Weak<Timeline>,
    /// The filesystem can outlive the timeline, and still be written to.
    fs: Weak<Fs>,
}

impl Common {
    /// The parts that the heads of a store will share. An interrupted apply is rolled back first,
    /// as far as possible; see [`Common::unfinished_rollback`].
    ///
    /// # Errors
    /// Damage, another base than the store was made for, or a failure of the store or the base.
    pub fn open(store: Arc<Store>, base: Arc<Base>) -> Result<Arc<Common>> {
        let base_is = base_identity::identify(&store, &base);
        if base_is == BaseIdentity::Other && !apply::rollback::interrupted(&store)?.is_empty() {
            base_identity::refuse_other(&store, &base)?;
        }
        reopen::seal_all_reported(&store);
        let mut unsealed = store.unsettled(Unsettled::Unsealed);
        unsealed.retain(|info| info.header.kind.is_of_head());
        let RecoveredApplies { applies, unfinished, was_rolled_back } =
            apply::unfinished::recover(&store, &base)?;
        Ok(Arc::new(Common {
            trees: RankedMutex::new(Rank::Trees, TreeCache::new(Arc::clone(&store))),
            heads: RankedMutex::new(Rank::OpenHeads, BTreeMap::new()),
            base_is: RankedMutex::new(Rank::BaseIdentity, Some(base_is)),
            store,
            base,
            stopping: AtomicBool::new(false),
            applies: RankedMutex::new(Rank::Applies, applies),
            unfinished: RankedMutex::new(Rank::UnfinishedRollback, unfinished),
            was_rolled_back: AtomicBool::new(was_rolled_back),
            operation: RankedMutex::new(Rank::Operation, ()),
            heads_changed: RankedMutex::new(Rank::HeadsChanged, Timestamp::default()),
            dormant: RankedMutex::new(Rank::ClosedHeads, Dormant::default()),
            compacting: RankedMutex::new(Rank::Compaction, ()),
            dedup: RankedMutex::new(Rank::KnownContent, None),
            unsealed_at_open: unsealed.first().map(|info| info.header.layer),
            deduplicated: RankedMutex::new(Rank::Deduplicated, BTreeSet::new()),
            kept_out_of_archive: RankedMutex::new(Rank::KeptOutOfArchive, BTreeMap::new()),
            dedup_is_on: AtomicBool::new(true),
            protected: RwLock::default(),
        }))
    }

    /// Records the base when the first head is opened, which shows `tree`.
    ///
    /// # Errors
    /// The base is another directory than before, and the caller did not allow that.
    pub(super) fn begin_store(&self, head: &str, tree: &Tree, epoch: Epoch) -> Result<()> {
        let mut base_is = self.base_is.lock();
        let Some(recognised) = *base_is else { return Ok(()) };
        let Common { store, base, .. } = self;
        let trees = &mut self.trees.lock();
        let mut shown = vec![(tree.clone(), epoch)];
        if recognised == BaseIdentity::Other {
            for (name, record) in store.head_records()?.iter().filter(|(name, _)| *name != head) {
                shown.push(reopen::peek(store, trees, name, record.layer)?);
            }
            if shown.iter().any(|(tree, _)| !tree.is_empty()) {
                base_identity::refuse_other(store, base)?;
            }
        }
        let applies = self.applies.lock().clone();
        base_identity::record_base((store, base), recognised, trees, &shown, &applies)?;
        *base_is = None;
        Ok(())
    }

    /// Adds a head to the table of those that are open.
    pub(super) fn note_open(&self, timeline: &Arc<Timeline>) {
        self.forget_dormant(&timeline.head);
        let mut heads = self.heads.lock();
        heads.retain(|_, head| head.fs.strong_count() > 0);
        let fs = Arc::downgrade(&timeline.fs);
        let head = OpenHead { timeline: Arc::downgrade(timeline), fs };
        heads.insert(timeline.head.clone(), head);
        drop(heads);
        // Once more: a tree that was read before the head was in the table.
        self.forget_dormant(&timeline.head);
    }

    /// The filesystem of a head, if it is open.
    pub(super) fn filesystem_of(&self, name: &str) -> Option<Arc<Fs>> {
        self.heads.lock().get(name).and_then(|head| head.fs.upgrade())
    }

    /// When a head was last made or dropped, since the store was opened.
    pub fn heads_changed(&self) -> Timestamp {
        *self.heads_changed.lock()
    }

    /// The heads that are open.
    pub(super) fn open_heads(&self) -> Vec<Arc<Timeline>> {
        self.heads.lock().values().filter_map(|head| head.timeline.upgrade()).collect()
    }

    /// The filesystems of the heads that are open.
    pub(super) fn open_filesystems(&self) -> Vec<Arc<Fs>> {
        self.heads.lock().values().filter_map(|head| head.fs.upgrade()).collect()
    }

    /// A number that changes with every request to any head.
    pub fn requests(&self) -> u64 {
        self.open_heads().iter().fold(0, |sum, head| sum.wrapping_add(head.fs.requests()))
    }

    /// Keeps all requests of all heads from reading states, if none does right now.
    pub fn try_exclusive(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.store.states().try_write()
    }

    /// As [`Common::try_exclusive`], if no request reads a state within 300 ms.
    pub fn exclusive_soon(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.store.states().try_write_for(SOON)
    }

    /// Refuses an epoch of the base that cannot be read any more.
    pub(super) fn check_epoch(&self, epoch: Epoch) -> Result<()> {
        if epoch >= self.oldest_epoch() {
            return Ok(());
        }
        let why = "gc removed the pre-images of a later apply";
        Err(Error::new(Kind::NoStore, format!("go back to epoch {} of the base", epoch.0), why))
    }

    /// Invalidates the kernel's listings of the checkpoints, in the mounts of all heads.
    pub fn checkpoint_names_changed(&self) {
        let listing = [NodeId::CHECKPOINTS];
        let what = Invalidations { listings: listing.into(), ..Invalidations::default() };
        for head in self.open_heads() {
            if let Err(error) = head.kernel().invalidate(&what) {
                log::warn!("the listing of the checkpoints in the mount may be old: {error}");
            }
        }
    }

    /// The oldest epoch whose pre-images are all there.
    pub(super) fn oldest_epoch(&self) -> Epoch {
        let applies = self.applies.lock();
        let first = applies.iter().rposition(|images| images.is_collected()).map_or(0, |at| at + 1);
        Epoch(u32::try_from(first).unwrap_or(u32::MAX))
    }

    /// The head of this name, if it is open. Waits for one that is being closed: a request of
    /// another mount may be reading its tree.
    ///
    /// # Errors
    /// [`Kind::InUse`] if its filesystem is still in use long after the head was closed.
    pub(super) fn open_head(&self, name: &str) -> Result<Option<Arc<Timeline>>> {
        let until = Instant::now() + CLOSING_LIMIT;
        loop {
            {
                let heads = self.heads.lock();
                let Some(head) = heads.get(name) else { return Ok(None) };
                if let Some(open) = head.timeline.upgrade() {
                    return Ok(Some(open));
                }
                if head.fs.strong_count() == 0 {
                    return Ok(None);
                }
            }
            if Instant::now() >= until {
                let attempt = format!("open head '{name}'");
                let error = Error::new(Kind::InUse, attempt, "it is being closed");
                return Err(error.hint("try again"));
            }
            thread::sleep(CLOSING_POLL);
        }
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The base.
    pub fn base(&self) -> &Arc<Base> {
        &self.base
    }

    /// Waits for the operation that is running, and keeps others out.
    pub(super) fn lock_operation(&self) -> RankedGuard<'_, ()> {
        self.operation.lock()
    }

    /// The present epoch of the base. While a rollback is unfinished, it is the epoch before that
    /// apply.
    pub fn base_epoch(&self) -> Epoch {
        epoch_of(&self.applies.lock(), self.unfinished.lock().as_ref())
    }

    /// Runs a step that an operation needs to finish. If the disk is full, the step is tried once
    /// more with the space of the reserve.
    pub(super) fn with_reserve<T>(&self, step: impl FnMut() -> Result<T>) -> Result<T> {
        self.store.with_reserve(step)
    }

    /// Sets the paths that an apply writes only with consent.
    pub fn set_protected(&self, list: Protected) {
        *self.protected.write() = list;
    }

    /// The paths that an apply writes only with consent.
    pub fn protected(&self) -> Protected {
        self.protected.read().clone()
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

/// The error for a head that does not exist.
pub(super) fn no_head(verb: &str, name: &str) -> Error {
    Error::new(Kind::NoStore, format!("{verb} head '{name}'"), "there is no such head")
        .hint("'jailfs forks' lists them")
}

impl Common {
    /// The tree of a head as it is now. Of an open head, dirty pages are flushed first. A head that
    /// is not open is read from the store and stays closed.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if there is no such head, damage, or a failure of the flush.
    pub fn state_of_head(&self, name: &str) -> Result<State> {
        if let Some(open) = self.open_head(name)? {
            open.flush()?;
            return Ok(open.fs.state());
        }
        let Some(record) = self.store.head(name)? else { return Err(no_head("find", name)) };
        let (tree, epoch) = reopen::peek(&self.store, &mut self.trees.lock(), name, record.layer)?;
        let lower = self.lower(epoch, &self.applies.lock());
        Ok(State { tree, lower: Arc::new(lower) })
    }

    /// The tree of a head as it is now, for a reader that is served while the head changes. `since`
    /// is the first layer that the head could write. Of an open head, bytes that are only in dirty
    /// pages are missing.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if there is no such head, or damage.
    pub fn tree_of_head(&self, name: &str, since: LayerId) -> Result<HeadTree> {
        if let Some(fs) = self.filesystem_of(name) {
            return Ok(HeadTree::Open(fs));
        }
        if let Some((tree, epoch)) = self.dormant.lock().tree(name, since) {
            return Ok(HeadTree::Closed(tree, epoch));
        }
        let record = self.store.head(name)?.filter(|record| record.since() == since);
        let record = record.ok_or_else(|| no_head("read", name))?;
        let (tree, epoch) = reopen::peek(&self.store, &mut self.trees.lock(), name, record.layer)?;
        let mut dormant = self.dormant.lock();
        // A head is in the table of open heads before its tree is forgotten here. So a tree that
        // was read while it was opened is not kept.
        if let Some(fs) = self.filesystem_of(name) {
            return Ok(HeadTree::Open(fs));
        }
        dormant.keep_tree(name, since, tree.clone(), epoch);
        Ok(HeadTree::Closed(tree, epoch))
    }

    /// The sealed states that the tree of a head came from, newest first.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if there is no such head, or damage.
    pub fn lineage_of(&self, name: &str) -> Result<Vec<LayerInfo>> {
        if let Some(open) = self.open_head(name)? {
            return Ok(open.lineage());
        }
        let Some(record) = self.store.head(name)? else { return Err(no_head("find", name)) };
        Ok(self.store.lineage_from(reopen::top_of(&self.store, name, record.layer)?))
    }
}
