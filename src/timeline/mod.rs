//! What happens to states over time: sealing, going back, comparing, applying.
//!
//! A [`Timeline`] is a head of a store with its filesystem. One operation runs at a time; programs in the mount go on
//! meanwhile and wait microseconds at most, when the upper layer or the state is exchanged.
//!
//! Always true:
//! * the head's record names a layer from which the present state can be rebuilt, or one that this head continued;
//! * a checkpoint exists if and only if its layer ends with a durable seal;
//! * before an operation replaces the state, the state before it was sealed, so every operation can be undone; what was
//!   written while it did so is sealed right after it.

pub mod apply;
mod base_identity;
mod blame;
mod compact;
mod dedup;
pub mod diff;
mod edits;
pub mod fsck;
pub mod gc;
mod journal;
pub mod mounts;
mod pack;
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
use crate::store::layer::{LayerInfo, Upper};
use crate::store::record::{HeadRecord, Header, LayerKind, OpRecord, OpVerb, Seal};
use crate::sys::clock;
use crate::types::{Epoch, LayerId, Name, NodeId};

use apply::unfinished::{RecoveredApplies, UnfinishedRollback};
use base_identity::BaseIdentity;
pub use compact::Effort;
pub use gc::policy::{Due, Policy};
pub use rewind::Savepoint;
pub use tree_cache::TreeCache;

/// A head without a mount: nothing is held, nothing is dirty.
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
    roots: Mutex<TreeCache>,
    /// Whether it comes to its end, so that nothing long is begun any more.
    stopping: AtomicBool,
    /// What each apply so far found in the base.
    applies: Mutex<PreHistory>,
    /// The rollback that no other apply may come before.
    unfinished: Mutex<Option<UnfinishedRollback>>,
    /// Whether an apply was rolled back when the store was opened: it was the last, and the next
    /// undo is meant for it.
    was_rolled_back: AtomicBool,
    /// One operation at a time.
    turn: Mutex<()>,
    /// Sealed layers are rewritten by one thread at a time.
    compacting: Mutex<()>,
    /// What is known for storing content once; one thread at a time.
    dedup: Mutex<Option<dedup::Dedup>>,
    /// Layers in which equal content was looked for.
    looked_through: Mutex<BTreeSet<LayerId>>,
    /// Layers that take too much for a pack.
    not_for_packs: Mutex<BTreeSet<LayerId>>,
    /// Whether more of what was deflated may be given up than when that was looked at.
    may_be_sparse: AtomicBool,
    dedup_is_on: AtomicBool,
    /// Paths that an apply writes only with consent.
    protected: RwLock<apply::protected::Protected>,
}

/// Which state an operation leads to: a sealed layer, or the base in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The sealed layer; none is the base itself.
    pub layer: Option<LayerId>,
    /// The epoch of the base below it.
    pub epoch: Epoch,
}

impl Timeline {
    /// Opens a head, or begins it on the base. An apply that did not come to its end is rolled back
    /// first, as far as that can be; see [`Timeline::unfinished_rollback`].
    ///
    /// # Errors
    /// Damage, or what the store and the base answer.
    pub fn open(store: Arc<Store>, base: Arc<Base>, head: &str, jail: Jail) -> Result<Timeline> {
        let base_is = base_identity::recognise(&store, &base);
        if base_is == BaseIdentity::Other && !apply::rollback::interrupted(&store)?.is_empty() {
            base_identity::refuse_other(&store, &base)?;
        }
        let RecoveredApplies { applies, unfinished, was_rolled_back } =
            apply::unfinished::recover(&store, &base)?;
        let epoch_now = epoch_of(&applies, unfinished.as_ref());
        let mut roots = TreeCache::new(Arc::clone(&store));
        let (upper, tree, epoch) = match store.head(head)? {
            None => {
                let epoch = epoch_now;
                let upper = store.create_layer(None, head, epoch, LayerKind::Continues)?;
                store.set_head(head, &HeadRecord { layer: upper.layer() })?;
                let description = String::from_utf8_lossy(base.path()).into_owned();
                let op = OpRecord {
                    head: head.to_owned(),
                    time: clock::now(),
                    verb: OpVerb::Create,
                    description,
                    tree: None,
                    epoch,
                };
                store.append_op(op)?;
                (upper, crate::tree::Tree::new(), epoch)
            }
            Some(record) => tree_cache::reopen(&store, &mut roots, head, record.layer)?,
        };
        if base_is == BaseIdentity::Other && !tree.is_empty() {
            base_identity::refuse_other(&store, &base)?;
        }
        for (layer, epoch) in tree_cache::seal_strays(&store, &mut roots, head, upper.layer())? {
            store.append_op(OpRecord {
                head: head.to_owned(),
                time: clock::now(),
                verb: OpVerb::Seal,
                description: tree_cache::CUT_OFF.to_owned(),
                tree: Some(layer),
                epoch,
            })?;
        }
        base_identity::remember((&store, &base), base_is, &mut roots, (&tree, epoch), &applies)?;
        let lower = Lower::new(Arc::clone(&base), Arc::clone(&store), epoch, applies.clone());
        let fs = Arc::new(Fs::new(Arc::clone(&store), tree, lower, upper, jail));
        fs.open_history(head);
        if store.was_volatile() {
            // So that it is known to be: there are no marks.
            fs.sync().attempt(|| "sync what was written with --volatile")?;
        }
        Ok(Timeline {
            store,
            base,
            fs,
            head: head.to_owned(),
            kernel: Mutex::new(Arc::new(NoKernel)),
            roots: Mutex::new(roots),
            stopping: AtomicBool::new(false),
            applies: Mutex::new(applies),
            unfinished: Mutex::new(unfinished),
            was_rolled_back: AtomicBool::new(was_rolled_back),
            turn: Mutex::new(()),
            compacting: Mutex::new(()),
            dedup: Mutex::new(None),
            looked_through: Mutex::default(),
            not_for_packs: Mutex::default(),
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

    /// Says that a kernel looks at the head from now on; none takes it away.
    pub fn set_kernel(&self, kernel: Option<Arc<dyn Kernel>>) {
        *self.kernel.lock() = kernel.unwrap_or_else(|| Arc::new(NoKernel));
    }

    fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::clone(&self.kernel.lock())
    }

    /// Waits for the operation before.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// Brings home what programs wrote through shared mappings, so that the state is as they see it.
    ///
    /// # Errors
    /// When some file could not be flushed.
    pub fn flush(&self) -> Result<()> {
        self.kernel().flush()
    }

    /// Makes the kernel forget which checkpoints there are.
    pub fn checkpoint_names_changed(&self) {
        let listing = [NodeId::CHECKPOINTS];
        let what = Invalidations { listings: listing.into(), ..Invalidations::default() };
        if let Err(error) = self.kernel().invalidate(&what) {
            log::warn!("the listing of the checkpoints in the mount may be old: {error}");
        }
    }

    /// The epoch of the base as it is now; before an apply that is to be rolled back.
    pub fn base_epoch(&self) -> Epoch {
        epoch_of(&self.applies.lock(), self.unfinished.lock().as_ref())
    }

    /// The sealed layer right below the one that is written to.
    pub fn parent(&self) -> Option<LayerId> {
        self.store.layer(self.fs.upper_layer()).and_then(|l| l.header.parent)
    }

    /// The state that a target names.
    ///
    /// # Errors
    /// Damage, or a layer that does not exist.
    pub fn state_of(&self, target: Target) -> Result<State> {
        let since = usize::try_from(target.epoch.0).unwrap_or(usize::MAX);
        if self.applies.lock().iter().skip(since).any(|images| images.is_collected()) {
            let why = "what the base was before the applies since was collected by gc";
            return Err(Error::new(
                Kind::NoStore,
                format!("go back to epoch {} of the base", target.epoch.0),
                why,
            ));
        }
        let tree = match target.layer {
            Some(layer) => self.roots.lock().load(layer)?,
            None => crate::tree::Tree::new(),
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

    /// The base as it is now, without any tree.
    ///
    /// # Errors
    /// As [`Timeline::state_of`].
    pub fn base_state(&self) -> Result<State> {
        self.state_of(Target { layer: None, epoch: self.base_epoch() })
    }

    /// The sealed layers below the one that is written to, newest first.
    pub fn ancestry(&self) -> Vec<LayerInfo> {
        self.down_from(self.parent())
    }

    /// The sealed states that the present one came of, newest first: those below it, and those before each apply that put the head
    /// on the base.
    pub fn lineage(&self) -> Vec<LayerInfo> {
        let mut line = self.ancestry();
        let mut bottom = line.last().cloned().or_else(|| self.store.layer(self.fs.upper_layer()));
        while let Some(LayerInfo {
            header: Header { layer, kind: LayerKind::Lands(before), .. },
            ..
        }) = bottom
        {
            let newest =
                |all: Vec<LayerInfo>| all.into_iter().rfind(|info| info.header.layer < layer);
            let before = match self.store.layer(before).filter(|info| info.header.kind.is_of_head())
            {
                Some(info) if info.seal.is_none() => info.header.parent,
                Some(info) => Some(info.header.layer),
                // gc took it: what was sealed last before the apply, that is.
                None => newest(self.sealed()).map(|info| info.header.layer),
            };
            let earlier = self.down_from(before.filter(|before| *before < layer));
            bottom = earlier.last().cloned();
            line.extend(earlier);
        }
        line
    }

    fn down_from(&self, mut at: Option<LayerId>) -> Vec<LayerInfo> {
        let mut line = Vec::new();
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            at = info.header.parent;
            line.push(info);
        }
        line
    }

    /// All sealed states, oldest first.
    pub fn sealed(&self) -> Vec<LayerInfo> {
        let mut all = self.store.catalog();
        all.retain(|l| l.seal.is_some() && l.header.kind.is_of_head());
        all
    }

    /// Seals the state as it is now and makes it a checkpoint.
    ///
    /// # Errors
    /// A name that is taken or not a name, or what the store answers.
    pub fn checkpoint(&self, name: Option<String>, message: String) -> Result<LayerId> {
        let _turn = self.turn();
        if let Some(name) = &name {
            self.check_name(name)?;
        }
        self.flush()?;
        let told = name.as_ref().map(|name| format!(" '{name}'")).unwrap_or_default();
        let seal = Seal { name, message, time: clock::now(), automatic: false };
        let layer = self.fs.upper_layer();
        let is_made =
            || self.store.layer(layer).is_some_and(|info| info.seal.as_ref() == Some(&seal));
        let description = format!("{layer}{told}");
        let made = |error: Error| error.after(format!("checkpoint {description} was made"));
        self.seal(seal.clone()).map_err(|error| if is_made() { made(error) } else { error })?;
        let to = Target { layer: Some(layer), epoch: self.epoch() };
        self.log(OpVerb::Checkpoint, description.clone(), to).map_err(made)?;
        Ok(layer)
    }

    fn check_name(&self, name: &str) -> Result<()> {
        let attempt = || format!("checkpoint '{name}'");
        let special =
            name.starts_with('@') || name == "base" || name.bytes().all(|b| b.is_ascii_digit());
        if special || Name::new(name.as_bytes()).is_err() {
            return Err(Error::new(Kind::Usage, attempt(), "not a name for a checkpoint").hint(
                "a name is not a number, not 'base', does not begin with '@' and has no '/'",
            ));
        }
        let taken =
            |l: &LayerInfo| l.seal.as_ref().is_some_and(|s| s.name.as_deref() == Some(name));
        match self.sealed().into_iter().find(taken) {
            Some(other) => Err(Error::new(
                Kind::Failed,
                attempt(),
                format!("checkpoint {} has this name", other.header.layer),
            )
            .hint("choose another name, or none")),
            None => Ok(()),
        }
    }

    fn epoch(&self) -> Epoch {
        self.fs.state().lower.epoch()
    }

    /// Seals the upper layer under one that continues it.
    fn seal(&self, seal: Seal) -> Result<LayerId> {
        let during = |e: Error| e.during("seal the tree");
        let below = self.fs.upper_layer();
        let next = self
            .store
            .create_layer(Some(below), &self.head, self.epoch(), LayerKind::Continues)
            .map_err(during)?;
        let above = next.layer();
        let (layer, state) = self.fs.seal(next, seal).map_err(during)?;
        self.roots.lock().keep(layer, state.tree);
        let record = HeadRecord { layer: above };
        self.with_reserve(|| self.store.set_head(&self.head, &record)).map_err(during)?;
        Ok(layer)
    }

    fn log(&self, verb: OpVerb, description: String, to: Target) -> Result<u64> {
        let (head, time) = (self.head.clone(), clock::now());
        let op = OpRecord { head, time, verb, description, tree: to.layer, epoch: to.epoch };
        self.with_reserve(|| self.store.append_op(op.clone()))
    }

    /// Takes a step of an operation that is done but for its end, and is not begun anew for that: on a full disk the reserve is for
    /// it.
    fn with_reserve<T>(&self, mut step: impl FnMut() -> Result<T>) -> Result<T> {
        match step() {
            Err(error) if error.is_full() && self.store.release_reserve() => {
                let again = step();
                self.store.keep_reserve();
                again
            }
            taken => taken,
        }
    }

    /// Makes sure that the present state is sealed. Gives the sealed state, and the layer if it was sealed for this.
    fn seal_present(&self, why: &str) -> Result<(Target, Option<LayerId>)> {
        let epoch = self.epoch();
        if !self.fs.upper_is_changed() {
            return Ok((Target { layer: self.parent(), epoch }, None));
        }
        let seal = Seal {
            name: None,
            message: format!("before {why}"),
            time: clock::now(),
            automatic: true,
        };
        let layer = self.seal(seal)?;
        let sealed = Target { layer: Some(layer), epoch };
        self.log(OpVerb::Seal, format!("before {why}"), sealed)?;
        Ok((sealed, Some(layer)))
    }

    /// Says which paths an apply writes only with consent, from now on.
    pub fn set_protected(&self, list: apply::protected::Protected) {
        *self.protected.write() = list;
    }

    /// The paths that an apply writes only with consent.
    pub fn protected(&self) -> apply::protected::Protected {
        self.protected.read().clone()
    }

    /// Logs that writes which arrived until the switch to another state are sealed in `layer`, and
    /// caches their tree.
    fn log_late_seal(&self, layer: LayerId, state: &State, message: String) -> Result<()> {
        self.roots.lock().keep(layer, state.tree.clone());
        let rest = Target { layer: Some(layer), epoch: state.lower.epoch() };
        self.log(OpVerb::Seal, message, rest).map(drop)
    }
}

/// The epoch of the base after some applies, of which the last may be one that is to be rolled
/// back.
fn epoch_of(applies: &PreHistory, unfinished: Option<&UnfinishedRollback>) -> Epoch {
    let all = || Epoch(u32::try_from(applies.len()).unwrap_or(u32::MAX));
    unfinished.map_or_else(all, UnfinishedRollback::before)
}

/// Seals a layer that nobody writes to any more. It is synced first: the seal says that all before it was, a power cut may leave the
/// seal and tear what is synced with it, and the head's record names another layer already.
fn close(store: &Store, layer: &mut Upper, message: &str) -> Result<()> {
    store.identities().lock().sync()?;
    layer.sync()?;
    let seal =
        Seal { name: None, message: message.to_owned(), time: clock::now(), automatic: true };
    store.seal_layer(layer, seal)
}

/// What an operation is called.
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
