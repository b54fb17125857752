//! A head of a store with its filesystem, and the operations on its states: seal, restore, compare,
//! apply, collect.
//!
//! Always true:
//! * the head's record names a layer from which the present state can be rebuilt, or one that this
//!   head continued;
//! * a checkpoint exists if and only if its layer ends with a durable seal;
//! * before an operation replaces the state, the state before it is sealed, so every operation can
//!   be undone; what programs write meanwhile is sealed right after it.
//!
//! One operation runs at a time. Programs in the mount go on meanwhile: they wait for microseconds
//! at most, while the upper layer or the state is exchanged.

pub mod apply;
mod base_identity;
mod checkpoint;
mod compact;
mod dedup;
pub mod diff;
mod edits;
pub mod fsck;
pub mod gc;
mod journal;
mod lineage;
#[cfg_attr(not(test), expect(dead_code, reason = "the verb is not there yet"))]
pub mod merge;
pub mod mounts;
mod pack;
mod reopen;
pub mod restore;
mod rewind;
mod tree_cache;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::base::Base;
use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::PreHistory;
use crate::fs::{Fs, Invalidations, Kernel, State};
use crate::jail::Jail;
use crate::store::Store;
use crate::store::layer::Upper;
use crate::store::record::{HeadRecord, LayerKind, OpRecord, OpVerb};
use crate::sys::clock;
use crate::tree::Tree;
use crate::types::{Epoch, LayerId, NodeId};

use apply::unfinished::{RecoveredApplies, UnfinishedRollback};
use base_identity::BaseIdentity;
pub use compact::Effort;
pub use gc::policy::{Due, Policy};
pub use rewind::Savepoint;
pub use tree_cache::TreeCache;

/// The kernel of a head that is not mounted: it has no caches and no dirty pages.
struct NoKernel;

impl Kernel for NoKernel {
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn invalidate(&self, _: &crate::fs::Invalidations) -> Result<()> {
        Ok(())
    }
}

/// A head of a store, and its filesystem.
pub struct Timeline {
    store: Arc<Store>,
    base: Arc<Base>,
    fs: Arc<Fs>,
    head: String,
    kernel: Mutex<Arc<dyn Kernel>>,
    trees: Mutex<TreeCache>,
    /// Set while the daemon shuts down: long background work ends and is not started again.
    stopping: AtomicBool,
    /// The pre-images of each apply so far.
    applies: Mutex<PreHistory>,
    /// A rollback that could not end. No other apply runs before it has.
    unfinished: Mutex<Option<UnfinishedRollback>>,
    /// Whether opening the store rolled back an apply. Then that apply was the last one, and the
    /// next `apply --undo` has nothing left to do.
    was_rolled_back: AtomicBool,
    /// Held for one operation at a time.
    operation: Mutex<()>,
    /// Held while sealed layers are rewritten.
    compacting: Mutex<()>,
    /// The chunk table of deduplication, held by one thread at a time.
    dedup: Mutex<Option<dedup::Dedup>>,
    /// Layers that were already searched for equal content.
    deduplicated: Mutex<BTreeSet<LayerId>>,
    too_large_to_pack: Mutex<BTreeSet<LayerId>>,
    /// Whether gathered content may have become sparse since it was last looked at.
    may_be_sparse: AtomicBool,
    dedup_is_on: AtomicBool,
    /// Paths that an apply writes only with consent.
    protected: RwLock<apply::protected::Protected>,
}

/// A state that an operation can lead to: a sealed layer, or the base in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The sealed layer; `None` is the base itself.
    pub layer: Option<LayerId>,
    /// The epoch of the base below it.
    pub epoch: Epoch,
}

impl Timeline {
    /// Opens a head, or creates it on the base. An interrupted apply is rolled back first, as far
    /// as possible; see [`Timeline::unfinished_rollback`].
    ///
    /// # Errors
    /// Damage, another base than the store was made for, or a failure of the store or the base.
    pub fn open(store: Arc<Store>, base: Arc<Base>, head: &str, jail: Jail) -> Result<Timeline> {
        let base_is = base_identity::identify(&store, &base);
        if base_is == BaseIdentity::Other && !apply::rollback::interrupted(&store)?.is_empty() {
            base_identity::refuse_other(&store, &base)?;
        }
        let RecoveredApplies { applies, unfinished, was_rolled_back } =
            apply::unfinished::recover(&store, &base)?;
        let mut trees = TreeCache::new(Arc::clone(&store));
        let (upper, tree, epoch) = match store.head(head)? {
            None => create_head(&store, &base, head, epoch_of(&applies, unfinished.as_ref()))?,
            Some(record) => reopen::reopen(&store, &mut trees, head, record.layer)?,
        };
        if base_is == BaseIdentity::Other && !tree.is_empty() {
            base_identity::refuse_other(&store, &base)?;
        }
        reopen::seal_strays(&store, &mut trees, head, upper.layer())?;
        base_identity::record_base((&store, &base), base_is, &mut trees, (&tree, epoch), &applies)?;
        let lower = Lower::new(Arc::clone(&base), Arc::clone(&store), epoch, applies.clone());
        let fs = Arc::new(Fs::new(Arc::clone(&store), tree, lower, upper, jail));
        fs.open_edits(head);
        if store.was_volatile() {
            // The journal has no marks that say what was synced, so sync everything.
            fs.sync().attempt(|| "sync what was written with --volatile")?;
        }
        Ok(Timeline {
            store,
            base,
            fs,
            head: head.to_owned(),
            kernel: Mutex::new(Arc::new(NoKernel)),
            trees: Mutex::new(trees),
            stopping: AtomicBool::new(false),
            applies: Mutex::new(applies),
            unfinished: Mutex::new(unfinished),
            was_rolled_back: AtomicBool::new(was_rolled_back),
            operation: Mutex::new(()),
            compacting: Mutex::new(()),
            dedup: Mutex::new(None),
            deduplicated: Mutex::default(),
            too_large_to_pack: Mutex::default(),
            may_be_sparse: AtomicBool::new(true),
            dedup_is_on: AtomicBool::new(true),
            protected: RwLock::default(),
        })
    }

    /// The filesystem.
    pub fn fs(&self) -> &Arc<Fs> {
        &self.fs
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The base.
    pub fn base(&self) -> &Arc<Base> {
        &self.base
    }

    /// Sets the kernel that has the head mounted; `None` after an unmount.
    pub fn set_kernel(&self, kernel: Option<Arc<dyn Kernel>>) {
        *self.kernel.lock() = kernel.unwrap_or_else(|| Arc::new(NoKernel));
    }

    fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::clone(&self.kernel.lock())
    }

    /// Waits for the operation that is running, and keeps others out.
    fn lock_operation(&self) -> MutexGuard<'_, ()> {
        self.operation.lock()
    }

    /// Flushes the dirty pages of shared mappings, so that the state is what programs see.
    ///
    /// # Errors
    /// A file could not be flushed.
    pub fn flush(&self) -> Result<()> {
        self.kernel().flush()
    }

    /// Invalidates the kernel's listing of the checkpoints.
    pub fn checkpoint_names_changed(&self) {
        let listing = [NodeId::CHECKPOINTS];
        let what = Invalidations { listings: listing.into(), ..Invalidations::default() };
        if let Err(error) = self.kernel().invalidate(&what) {
            log::warn!("the listing of the checkpoints in the mount may be old: {error}");
        }
    }

    /// The present epoch of the base. While a rollback is unfinished, it is the epoch before that
    /// apply.
    pub fn base_epoch(&self) -> Epoch {
        epoch_of(&self.applies.lock(), self.unfinished.lock().as_ref())
    }

    /// The epoch of the base below the present state.
    fn epoch(&self) -> Epoch {
        self.fs.state().lower.epoch()
    }

    /// Loads the state that a target names.
    ///
    /// # Errors
    /// Damage, a layer that does not exist, or an epoch whose pre-images gc removed.
    pub fn state_of(&self, target: Target) -> Result<State> {
        let since = usize::try_from(target.epoch.0).unwrap_or(usize::MAX);
        if self.applies.lock().iter().skip(since).any(|images| images.is_collected()) {
            let why = "gc removed the pre-images of a later apply";
            return Err(Error::new(
                Kind::NoStore,
                format!("go back to epoch {} of the base", target.epoch.0),
                why,
            ));
        }
        let tree = match target.layer {
            Some(layer) => self.trees.lock().load(layer)?,
            None => Tree::new(),
        };
        let current = self.fs.state().lower;
        let applies = self.applies.lock().clone();
        let lower = if current.epoch() == target.epoch && current.history().len() == applies.len() {
            current
        } else {
            Arc::new(Lower::new(
                Arc::clone(&self.base),
                Arc::clone(&self.store),
                target.epoch,
                applies,
            ))
        };
        Ok(State { tree, lower })
    }

    /// The present base, without any changes.
    ///
    /// # Errors
    /// As [`Timeline::state_of`].
    pub fn base_state(&self) -> Result<State> {
        self.state_of(Target { layer: None, epoch: self.base_epoch() })
    }

    /// Appends to the operation log. Returns the number of the operation.
    fn log_operation(&self, verb: OpVerb, description: String, to: Target) -> Result<u64> {
        let (head, time) = (self.head.clone(), clock::now());
        let op = OpRecord { head, time, verb, description, tree: to.layer, epoch: to.epoch };
        self.with_reserve(|| self.store.append_op(op.clone()))
    }

    /// Runs a step that an operation needs to finish. If the disk is full, the step is tried once
    /// more with the space of the reserve.
    fn with_reserve<T>(&self, step: impl FnMut() -> Result<T>) -> Result<T> {
        self.store.with_reserve(step)
    }

    /// Sets the paths that an apply writes only with consent.
    pub fn set_protected(&self, list: apply::protected::Protected) {
        *self.protected.write() = list;
    }

    /// The paths that an apply writes only with consent.
    pub fn protected(&self) -> apply::protected::Protected {
        self.protected.read().clone()
    }
}

/// Creates a head with an empty tree over the base, and logs that.
fn create_head(
    store: &Arc<Store>,
    base: &Base,
    head: &str,
    epoch: Epoch,
) -> Result<(Upper, Tree, Epoch)> {
    let upper = store.create_layer(None, head, epoch, LayerKind::Continues)?;
    store.set_head(head, &HeadRecord { layer: upper.layer() })?;
    store.append_op(OpRecord {
        head: head.to_owned(),
        time: clock::now(),
        verb: OpVerb::Create,
        description: String::from_utf8_lossy(base.path()).into_owned(),
        tree: None,
        epoch,
    })?;
    Ok((upper, Tree::new(), epoch))
}

/// The epoch of the base after all applies, or before the last one if that is still to be rolled
/// back.
fn epoch_of(applies: &PreHistory, unfinished: Option<&UnfinishedRollback>) -> Epoch {
    let all = || Epoch(u32::try_from(applies.len()).unwrap_or(u32::MAX));
    unfinished.map_or_else(all, UnfinishedRollback::before)
}

/// The name of an operation, as the log and the messages have it.
pub fn verb_text(verb: OpVerb) -> &'static str {
    match verb {
        OpVerb::Create => "create",
        OpVerb::Checkpoint => "checkpoint",
        OpVerb::Seal => "seal",
        OpVerb::Restore => "restore",
        OpVerb::Discard => "discard",
        OpVerb::Apply => "apply",
        OpVerb::UndoApply => "undo apply",
        OpVerb::OpRestore => "op restore",
    }
}
