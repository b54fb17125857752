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
pub mod archive;
mod base_identity;
mod checkpoint;
mod compact;
mod dedup;
pub mod diff;
mod dormant;
mod edits;
pub mod export;
pub mod forks;
pub mod fsck;
pub mod gc;
pub mod heads;
pub mod import;
mod journal;
mod lineage;
pub mod merge;
mod merge_base;
pub mod mounts;
mod reopen;
pub mod restore;
mod rewind;
mod tree_cache;

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::base::Base;
use crate::error::{Attempt, Result};
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::PreHistory;
use crate::fs::{Fs, Kernel, State};
use crate::jail::Jail;
use crate::store::Store;
use crate::store::layer::Upper;
use crate::store::record::{LayerKind, OpRecord, OpVerb};
use crate::sys::clock;
use crate::tree::Tree;
use crate::types::{Epoch, LayerId};

use apply::unfinished::UnfinishedRollback;
pub use compact::Effort;
pub use gc::policy::{Due, Policy};
pub use heads::Common;
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

/// A head of a store, and its filesystem. Derefs to what it shares with the other heads.
pub struct Timeline {
    common: Arc<Common>,
    fs: Arc<Fs>,
    head: String,
    kernel: Mutex<Arc<dyn Kernel>>,
}

impl Deref for Timeline {
    type Target = Common;
    fn deref(&self) -> &Common {
        &self.common
    }
}

/// A state that an operation can lead to: a sealed layer, or the base in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The sealed layer; `None` is the base itself.
    pub layer: Option<LayerId>,
    /// The epoch of the base below it.
    pub epoch: Epoch,
}

impl Drop for Timeline {
    fn drop(&mut self) {
        self.store.close_pool(self.fs.upper_layer());
    }
}

impl Timeline {
    /// Opens a head of an open store. If it is open already, returns that one. If the store has no
    /// head at all, creates it on the base.
    ///
    /// # Errors
    /// [`NoStore`](crate::error::Kind::NoStore) if there is no such head,
    /// [`Usage`](crate::error::Kind::Usage) if none can have this name,
    /// [`InUse`](crate::error::Kind::InUse) if its filesystem is still being
    /// closed, damage, or a failure of the store.
    pub fn open(common: &Arc<Common>, head: &str, jail: Jail) -> Result<Arc<Timeline>> {
        // An operation changes which layers are on top of the heads.
        let _operation = common.operation.lock();
        if let Some(open) = common.open_head(head)? {
            return Ok(open);
        }
        let Common { store, base, .. } = &**common;
        let is_first = store.head_names().is_empty();
        if is_first {
            forks::check_head_name(head)?;
        }
        let (upper, tree, epoch) = match store.head(head)? {
            None if is_first => create_head(store, base, head, common.base_epoch())?,
            None => return Err(heads::no_head("open", head)),
            Some(record) => reopen::reopen(store, &mut common.trees.lock(), head, record.layer)?,
        };
        common.begin_store(head, &tree, epoch)?;
        reopen::seal_strays(store, &mut common.trees.lock(), head, upper.layer())?;
        let lower = common.lower(epoch, &common.applies.lock());
        let fs = Arc::new(Fs::new(Arc::clone(store), tree, lower, upper, jail));
        fs.open_edits(head);
        fs.forget_edits_before(common.oldest_epoch());
        if store.was_volatile() {
            // The journal has no marks that say what was synced, so sync everything.
            fs.sync().attempt(|| "sync what was written with --volatile")?;
        }
        let timeline = Arc::new(Timeline {
            common: Arc::clone(common),
            fs,
            head: head.to_owned(),
            kernel: Mutex::new(Arc::new(NoKernel)),
        });
        common.note_open(&timeline);
        Ok(timeline)
    }

    /// The parts that the heads of the store share.
    pub fn common(&self) -> &Arc<Common> {
        &self.common
    }

    /// The name of the head.
    pub fn head(&self) -> &str {
        &self.head
    }

    /// The filesystem.
    pub fn fs(&self) -> &Arc<Fs> {
        &self.fs
    }

    /// Sets the kernel that has the head mounted; `None` after an unmount.
    pub fn set_kernel(&self, kernel: Option<Arc<dyn Kernel>>) {
        *self.kernel.lock() = kernel.unwrap_or_else(|| Arc::new(NoKernel));
    }

    fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::clone(&self.kernel.lock())
    }

    /// Flushes the dirty pages of shared mappings, so that the state is what programs see.
    ///
    /// # Errors
    /// A file could not be flushed.
    pub fn flush(&self) -> Result<()> {
        self.kernel().flush()
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
        self.check_epoch(target.epoch)?;
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
}

/// Creates a head with an empty tree over the base, and logs that.
fn create_head(
    store: &Arc<Store>,
    base: &Base,
    head: &str,
    epoch: Epoch,
) -> Result<(Upper, Tree, Epoch)> {
    let upper = store.create_layer(None, head, epoch, LayerKind::Continues)?;
    store.set_head(head, upper.layer())?;
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
        OpVerb::Fork => "fork",
        OpVerb::DropFork => "drop fork",
        OpVerb::Merge => "merge",
        OpVerb::Import => "import",
        OpVerb::Pull => "pull",
    }
}
