//! POSIX operations on the merged tree, without FUSE: `fuse` translates, and nearly all tests run
//! without a mount.
//!
//! Every operation takes the same steps: resolve the node, copy up what changes (only metadata),
//! write content to the pool of the upper layer, commit a list of edits.
//!
//! Always true:
//! * A commit appends the edits to the journal as one frame, and then applies them to the tree. So
//!   a completed operation is on record.
//! * A copy-up is committed on its own. It changes nothing that a program can see.
//! * One lock, the core lock, guards the state of a head. It is never held across a reply, an
//!   invalidation of the kernel's caches, or a sync. No request asks the base under it ([`asked`]).
//!   A read takes it only to find out where the bytes are. A head makes one change at a time, under
//!   the lock of changes, and releases the core lock while it writes to the store ([`writing`]).
//!
//! [`Core`] consists of components with their own methods and invariants; its own methods join
//! several of them.

mod asked;
mod copy_up;
mod edits;
mod journal;
mod kernel;
mod links;
pub mod merged;
mod ops;
mod snapdir;
mod space;
mod switch;
mod sync;
mod target;
mod upper;
mod writing;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::Result;
use crate::fs::edits::EditHistory;
use crate::fs::kernel::coherence::Coherence;
use crate::fs::kernel::held::HeldNodes;
use crate::fs::links::Links;
use crate::fs::merged::lower::Lower;
use crate::fs::space::quota::Quota;
use crate::fs::space::reclaim::Reclaim;
use crate::fs::sync::SyncGate;
use crate::fs::target::Target;
use crate::fs::upper::UpperLayer;

use crate::jail::Jail;
use crate::store::Store;
use crate::store::edits_log::Content;
use crate::store::layer::Upper;
use crate::sys::lock::{Rank, RankedGuard, RankedMutex};
use crate::tree::Tree;
use crate::types::{ByteRange, Epoch, LayerId, Name, NodeId, TreePath};

pub use edits::{
    EditInfo, EditsSavepoint, Histories as EditHistories, MAX_EXTENTS, PathEdits, Step, StepError,
    Stepped, Tended,
};
pub use journal::OpenJournal;
pub use links::{LinkReply, Move, Refusal, Refused};
pub use merged::attr::Attr;
pub use merged::data_ranges::DataRanges;
pub use merged::extent_reader::SeekTo;
pub use merged::lower::Extents;
pub use merged::read_plan::ReadPlan;
pub use merged::state::{Found, State};
pub use ops::attrs::{SetAttr, SetTime, SetXattr};
pub use ops::privileges::{CallerRights, PrivilegeBits};
pub use ops::readdir::{DirEntry, HandOut, NameSink};
pub use ops::rename::RenameMode;
pub use snapdir::{Archive, Fence, HeadTree, OtherHead, OtherHeads, SnapdirView, Text};
pub use space::enospc::{MOST_TRIES, Need};
pub use space::quota::Limits;
pub use space::reclaim::Reclaimer;
pub use switch::rebase::{Rebased, Rebasing};
pub use switch::seal::Changed;
pub use switch::seal::Report;
pub use switch::{Invalidations, Switched};
pub use upper::{NextCheck, SMALL_JOURNAL};

/// The largest file, in bytes: what ext4 with 4 KiB blocks allows, so that offsets never overflow.
pub const MAX_FILE_SIZE: u64 = (1 << 44) - 4096;

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The id by which the kernel asks from now on.
    pub id: NodeId,
    /// The attributes that `stat` shows.
    pub attr: Attr,
}

/// The process that asks.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

/// Everything that refers to content of the head at one moment.
pub struct LiveSet {
    /// The present state.
    pub state: State,
    /// The records of the orphans.
    pub orphans: Tree,
    /// The oldest epoch of the base that has content of an orphan.
    pub orphans_from: Option<Epoch>,
    /// The content of the edit history.
    pub edits: Vec<Arc<Content>>,
    /// The upper layer.
    pub upper: LayerId,
    /// Addresses of its pool that were allocated and may still be written.
    pub reserved: Vec<ByteRange>,
    /// The first address that was not allocated.
    pub end: u64,
}

/// The state of a head, and what follows from it. The fields are its components. Derefs to the
/// state.
struct Core {
    /// The number of times that the lock was taken.
    turn: u64,
    state: State,
    upper: UpperLayer,
    held: HeldNodes,
    links: Links,
    coherence: Coherence,
    /// The edit history, if the head keeps one.
    edits: Option<EditHistory>,
    quota: Quota,
    /// The name of the snapshot directory in the root, which the tree cannot use.
    snapdir_name: Option<Name>,
}

impl Deref for Core {
    type Target = State;
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Core {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// A head of a store, as a filesystem.
pub struct Fs {
    store: Arc<Store>,
    /// The lock of changes.
    changes: RankedMutex<()>,
    core: RankedMutex<Core>,
    /// The number of times that the core lock was taken.
    requests: AtomicU64,
    /// The number of times that the store was measured for the limits of the head.
    measurements: AtomicU64,
    /// Whether the kernel caches something that is stale: see [`Coherence`].
    has_stale: Arc<AtomicBool>,
    jail: Mutex<Arc<Jail>>,
    sync_gate: RankedMutex<SyncGate>,
    reclaim: Reclaim,
    snapdir: snapdir::Snapdir,
}

impl Fs {
    /// The filesystem of a head: `tree` over `lower`, writing to `upper`.
    pub fn new(store: Arc<Store>, tree: Tree, lower: Lower, upper: Upper, jail: Jail) -> Fs {
        let coherence = Coherence::default();
        let has_stale = coherence.stale_flag();
        let core = Core {
            turn: 0,
            state: State { tree, lower: Arc::new(lower) },
            upper: UpperLayer::new(upper),
            held: HeldNodes::new(),
            links: Links::default(),
            coherence,
            edits: None,
            quota: Quota::default(),
            snapdir_name: None,
        };
        Fs {
            store,
            changes: RankedMutex::new(Rank::Writing, ()),
            core: RankedMutex::new(Rank::Core, core),
            requests: AtomicU64::new(0),
            measurements: AtomicU64::new(0),
            has_stale,
            jail: Mutex::new(Arc::new(jail)),
            sync_gate: RankedMutex::new(Rank::SyncGate, SyncGate::default()),
            reclaim: Reclaim::new(),
            snapdir: snapdir::Snapdir::default(),
        }
    }

    /// The store that the head writes to.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Sets the rules by which links are judged from now on.
    pub fn set_jail(&self, jail: Jail) {
        *self.jail.lock() = Arc::new(jail);
    }

    /// Takes the core lock. A caller that changes the tree, a log, or bytes in place takes
    /// [`Fs::writing`] instead.
    fn core(&self) -> RankedGuard<'_, Core> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut core = self.core.lock();
        core.turn += 1;
        core
    }

    /// A number that changes with every request, so that background work can wait for a pause.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The present state. A caller that reads content by it while programs change the tree takes
    /// [`Fs::read_guard`] before, or the content may be punched.
    pub fn state(&self) -> State {
        self.core().state.clone()
    }

    /// Everything that refers to content at this moment.
    pub fn live_set(&self) -> LiveSet {
        let (live, orphans, edits) = {
            let core = self.writing();
            let orphans = core.held.orphans().records().clone();
            let (reserved, end) = core.upper.pool.reserved();
            let live = LiveSet {
                state: core.state.clone(),
                orphans: orphans.tree().clone(),
                orphans_from: None,
                edits: Vec::new(),
                upper: core.upper.layer(),
                reserved,
                end,
            };
            (live, orphans, core.edits.as_ref().map(EditHistory::contents_later))
        };
        // There can be many, and no request is to wait for them.
        let edits = edits.map(|collect| collect()).unwrap_or_default();
        LiveSet { edits, orphans_from: orphans.oldest_epoch(), ..live }
    }

    /// The upper layer, to which all changes go.
    pub fn upper_layer(&self) -> LayerId {
        self.core().upper.layer()
    }

    /// Whether anything was changed since the upper layer was begun.
    pub fn upper_is_changed(&self) -> bool {
        self.core().upper.is_changed()
    }

    /// The problems with the base so far, by path.
    pub fn base_problems(&self) -> Vec<(TreePath, String)> {
        let lower = Arc::clone(&self.core().lower);
        lower.problems()
    }

    /// Takes back `count` lookups of a node: the FORGET of the kernel.
    pub fn forget(&self, id: NodeId, count: u64) {
        if id.is_in_snapdir() {
            return self.snapdir_forget(id, count);
        }
        let mut core = self.core();
        let Some(forgotten) = core.held.forget(id, count) else { return };
        core.links.forget(id);
        core.coherence.forget(id);
        if forgotten.node.is_live() {
            if core.held.ids_of(forgotten.node.ino).next().is_none() {
                core.coherence.forget_aliases(forgotten.node.ino);
            }
            return;
        }
        let free = self.reclaim.begin_free();
        drop(core);
        if let Some(leftover) = forgotten.leftover {
            leftover.free();
            self.core().quota.measure_soon();
        }
        drop(free);
    }
}

/// The kernel side of a head: what happens there around a change of state. A head without a mount
/// has none.
pub trait Kernel: Send + Sync {
    /// Flushes the kernel's dirty pages, which processes wrote through shared mappings. Returns
    /// when every such byte has been written through [`Fs::write`]. The caller serves no request
    /// and holds no lock.
    ///
    /// # Errors
    /// When a file could not be flushed.
    fn flush(&self) -> Result<()>;

    /// Invalidates what the kernel caches of what a switch changed. The caller serves no request
    /// and holds no lock.
    ///
    /// # Errors
    /// When the kernel refuses; its caches may then be stale.
    fn invalidate(&self, what: &Invalidations) -> Result<()>;

    /// The paths of the tree at which other filesystems are mounted.
    ///
    /// # Errors
    /// When the mounts cannot be read.
    fn mounts_inside(&self) -> Result<Vec<TreePath>> {
        Ok(Vec::new())
    }

    /// Whether the FUSE connection is up. False as soon as it is aborted, with `umount -f` or in
    /// `/sys/fs/fuse`.
    fn is_connected(&self) -> bool {
        true
    }
}
