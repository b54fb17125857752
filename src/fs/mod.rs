//! POSIX operations on the merged tree. Nothing here has heard of FUSE: the doors translate, and nearly all tests run
//! without a mount.
//!
//! Every operation is the same few steps: find the node, cover what will change (a copy-up of metadata only), write
//! content bytes to the pool, commit a list of edits. `Core::commit` appends the list to the journal as one frame and
//! applies it to the tree, in this order, so that what was acknowledged is on record. Copy-ups are committed on their
//! own: they change nothing that can be seen.
//!
//! One lock guards the state of a head. It is never held across a call into the kernel's notifications, a reply or a
//! sync; reads of content take it only to find out where the bytes are.

mod edits;
mod journal;
mod kernel;
pub mod merged;
mod ops;
mod snapdir;
mod space;
mod switch;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::base::DirLookup;
use crate::error::{Error, FsError, FsResult, Result};
use crate::fs::edits::EditHistory;
use crate::fs::kernel::nodes::{NodeTable, Place};
use crate::fs::merged::lower::{Lower, LowerNode};
use crate::fs::merged::state::{SCRATCH, extents_in};
use crate::jail::{ClimbGuard, Jail};
use crate::store::Store;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::content::pool::PoolWriter;
use crate::store::edits_log::Content;
use crate::store::io::fsync_probe::Unsynced;
use crate::store::layer::{JournalExchange, Upper};
use crate::store::record::{Dentry, Edit, Hides, Meta, Node, Record, Source};
use crate::sys::clock;
use crate::tree::{Misfit, Tree};
use crate::types::{ByteRange, Epoch, FileKind, Ino, LayerId, Name, NodeId, TreePath};

pub use edits::{
    Clock, EditInfo, EditsSavepoint, Histories as EditHistories, QUIET, Step, StepError, Stepped,
    Tended,
};
pub use journal::{JournalNotice, NextLook, OpenJournal, SMALL_JOURNAL};
pub use merged::attr::Attr;
pub use merged::data_ranges::DataRanges;
pub use merged::extent_reader::SeekTo;
pub use merged::lower::Extents;
pub use merged::read_plan::ReadPlan;
pub use merged::state::{Found, State};
pub use ops::attrs::{SetAttr, SetTime, SetXattr};
pub use ops::namespace::RenameMode;
pub use ops::readdir::{DirEntry, HandOut};
pub use ops::symlink::{LinkReply, Move, Refusal, Refused};
pub use snapdir::{Archive, Origin, SnapdirView, Text};
pub use space::enospc::{MOST_TRIES, Need};
pub use space::quota::{Limits, Space};
pub use switch::{Changed, Invalidations, Rebased, Rebasing, Switched};

/// The largest file, in bytes: what ext4 with 4 KiB blocks allows, so that offsets never overflow.
pub const MAX_FILE_SIZE: u64 = (1 << 44) - 4096;

/// What a lookup found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The id that the kernel asks with from now on.
    pub id: NodeId,
    /// What `stat` shows.
    pub attr: Attr,
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

/// A node as an operation finds it.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// In the tree.
    Upper(Ino),
    /// In the base only.
    Base(Ino, TreePath, LowerNode),
    /// Gone, and still held: its record is in the orphans under this key.
    Orphan(Ino),
}

/// What the head refers to in pools.
pub struct LiveSet {
    /// What is shown.
    pub state: State,
    /// What is gone and still held.
    pub orphans: Tree,
    /// The oldest epoch of the base in which content of that lies.
    pub orphans_from: Option<Epoch>,
    /// What versions refer to.
    pub versions: Vec<Arc<Content>>,
    /// The layer that is written to.
    pub upper: LayerId,
    /// Addresses of its pool that were given out and may still be written.
    pub reserved: Vec<ByteRange>,
    /// Where the addresses begin that were not given out.
    pub end: u64,
}

pub(crate) struct Core {
    pub(crate) state: State,
    pub(crate) upper: Upper,
    pub(crate) table: NodeTable,
    /// Records and extents of nodes that are gone and still held, each under its id as its number.
    orphans: Tree,
    /// The epoch of the base to which the extents of each orphan refer: the head may go on over another.
    orphan_epochs: HashMap<Ino, Epoch>,
    scratch: Option<PoolWriter>,
    listings: HashMap<NodeId, ops::readdir::Listing>,
    /// The directories through which each link that the kernel holds was handed out.
    advertised_in: HashMap<NodeId, BTreeSet<NodeId>>,
    /// Where the kernel may be walking the text of a link.
    climb_guard: ClimbGuard<NodeId, NodeId>,
    /// The directory, or the two, that moved last, while the kernel may still see them where they were.
    moves_in_flight: Vec<Move>,
    /// Counts such moves.
    moves: u64,
    /// Names under which the kernel was given a file that the tree does not know by that name: further links of the base.
    aliases: HashMap<Ino, BTreeSet<(Ino, Name)>>,
    refused: VecDeque<Refusal>,
    refused_count: u64,
    quota: space::quota::Quota,
    journal: journal::JournalWatch,
    pending: kernel::coherence::PendingInvalidations,
    /// Names that a switch gave to something else and of which the kernel is not told yet.
    names_to_invalidate: BTreeSet<(NodeId, Name)>,
    /// What edits replaced, if that is kept.
    edits: Option<EditHistory>,
    /// A name in the root that is not the tree's: the past is shown there.
    snapdir_name: Option<Name>,
}

/// Makes room on a full disk; gives the number of bytes, or none if that cannot be now. Called without any lock.
pub type Reclaimer = dyn Fn() -> Option<u64> + Send + Sync;

/// What must be done before the next sync or seal succeeds.
#[derive(Default)]
struct Unfinished {
    /// Layers whose seal failed.
    layers: Vec<Upper>,
    /// The last exchange of the journal, if it is not synced.
    exchange: Option<JournalExchange>,
}

/// A head of a store, as a filesystem.
pub struct Fs {
    store: Arc<Store>,
    core: Mutex<Core>,
    /// Counts what was asked of it.
    requests: AtomicU64,
    jail: Mutex<Arc<Jail>>,
    /// Held while a layer is being synced or sealed, so that one sync serves all who wait.
    sync_gate: Mutex<Unfinished>,
    /// Held for reading by whoever looks at states, and for writing while space is given back.
    guards: RwLock<()>,
    /// Whether something was removed or replaced since space was last given back.
    has_garbage: AtomicBool,
    snapdir: snapdir::Snapdir,
    reclaimer: Mutex<Option<Arc<Reclaimer>>>,
}

impl Fs {
    /// The filesystem of a head: `tree` over `lower`, writing to `upper`.
    pub fn new(store: Arc<Store>, tree: Tree, lower: Lower, upper: Upper, jail: Jail) -> Fs {
        let core = Core {
            journal: journal::JournalWatch::of(&upper),
            state: State { tree, lower: Arc::new(lower) },
            upper,
            table: NodeTable::new(),
            orphans: Tree::new(),
            orphan_epochs: HashMap::new(),
            scratch: None,
            listings: HashMap::new(),
            advertised_in: HashMap::new(),
            climb_guard: ClimbGuard::default(),
            moves_in_flight: Vec::new(),
            moves: 0,
            aliases: HashMap::new(),
            refused: VecDeque::new(),
            refused_count: 0,
            quota: space::quota::Quota::default(),
            pending: kernel::coherence::PendingInvalidations::default(),
            names_to_invalidate: BTreeSet::new(),
            edits: None,
            snapdir_name: None,
        };
        Fs {
            store,
            core: Mutex::new(core),
            requests: AtomicU64::new(0),
            jail: Mutex::new(Arc::new(jail)),
            sync_gate: Mutex::default(),
            guards: RwLock::new(()),
            has_garbage: AtomicBool::new(true),
            snapdir: snapdir::Snapdir::default(),
            reclaimer: Mutex::default(),
        }
    }

    /// The store that it writes to.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Says by which rules links are judged from now on.
    pub fn set_jail(&self, jail: Jail) {
        *self.jail.lock() = Arc::new(jail);
    }

    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.core.lock()
    }

    /// A number that changes when anything is asked of it: for whoever wants to stay behind others.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The tree as it is now and the base below it. Whoever reads content by it while others change the tree holds
    /// [`Fs::read_guard`] from before, or may find content that was given back.
    pub fn state(&self) -> State {
        self.core().state.clone()
    }

    /// As long as it lives, no state loses its content: nothing is given back.
    pub fn read_guard(&self) -> RwLockReadGuard<'_, ()> {
        self.guards.read()
    }

    /// Waits until nobody looks at states, and keeps others from it: for whoever gives space back.
    pub fn exclusive(&self) -> RwLockWriteGuard<'_, ()> {
        self.guards.write()
    }

    /// The same, if nobody looks at states right now.
    pub fn try_exclusive(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.guards.try_write()
    }

    /// The same, if nobody does in a moment. No longer: who looks may wait for whoever asks.
    pub fn exclusive_soon(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.guards.try_write_for(std::time::Duration::from_millis(300))
    }

    /// Says who can make more room on a full disk than the upper layer has to give; it gives the number of bytes.
    pub fn set_reclaimer(&self, reclaimer: Arc<Reclaimer>) {
        *self.reclaimer.lock() = Some(reclaimer);
    }

    /// What the head refers to, at one moment.
    pub fn live_set(&self) -> LiveSet {
        let core = self.core();
        let (reserved, end) = core.upper.pool.reserved();
        LiveSet {
            state: core.state.clone(),
            orphans: core.orphans.clone(),
            orphans_from: core.orphans_from(),
            versions: core.edits.iter().flat_map(EditHistory::contents).collect(),
            upper: core.upper.layer(),
            reserved,
            end,
        }
    }

    /// The layer that is written to.
    pub fn upper_layer(&self) -> LayerId {
        self.core().upper.layer()
    }

    /// Whether anything was changed since that layer was begun.
    pub fn upper_is_changed(&self) -> bool {
        self.core().upper.is_changed()
    }

    /// Number of nodes that the kernel holds, the root included.
    pub fn held_nodes(&self) -> usize {
        self.core().table.count()
    }

    /// What went wrong with the base so far.
    pub fn base_problems(&self) -> Vec<(TreePath, String)> {
        let lower = Arc::clone(&self.core().lower);
        lower.problems()
    }

    /// Takes back `count` of what was handed out for a node.
    pub fn forget(&self, id: NodeId, count: u64) {
        if id.is_in_snapdir() {
            return self.snapdir_forget(id, count);
        }
        let mut core = self.core();
        if let Some(held) = core.table.forget(id, count) {
            core.listings.remove(&id);
            core.advertised_in.remove(&id);
            core.climb_guard.forget_link(id);
            core.climb_guard.forget_dir(id);
            core.pending.drop_node(id);
            match held.place {
                Place::Orphan => {
                    self.note_garbage();
                    core.release_orphan(Ino(id.0));
                }
                Place::Live { .. } => {
                    if core.table.id_of(held.ino).is_none() {
                        core.aliases.remove(&held.ino);
                    }
                }
            }
        }
    }

    /// Makes everything acknowledged so far survive a power cut. Many callers share one sync.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync(&self) -> FsResult<()> {
        if !self.store.durable() {
            return Ok(());
        }
        // Whoever waits here finds the work done by the one before, or does it for all that came meanwhile.
        let mut gate = self.sync_gate.lock();
        self.seal_unfinished(&mut gate)?;
        let (work, mark) = {
            let mut core = self.core();
            let mark = core.edits.as_ref().map(EditHistory::log_mark);
            let Some(work) = core.upper.begin_sync() else {
                if !core.upper.is_failed() {
                    core.note_edits_synced(mark);
                }
                return Ok(());
            };
            (work, mark)
        };
        if work.in_doubt {
            self.sync_step(|| work.sync_journal())?;
            self.core().upper.mark_synced(&work);
        }
        self.sync_step(|| work.sync_pool())?;
        self.sync_identities()?;
        // There may be no room for this record, and then the reserve is for it.
        let recorded = self.core().upper.pool_synced(&work);
        match recorded {
            Err(error) if error.is_full() && self.store.release_reserve() => {
                let again = self.core().upper.pool_synced(&work);
                self.store.keep_reserve();
                again?;
            }
            recorded => recorded?,
        }
        self.sync_step(|| work.sync_journal())?;
        let mut core = self.core();
        core.upper.journal_synced(&work);
        core.note_edits_synced(mark);
        Ok(())
    }

    /// Takes no changes any more. What was acknowledged stays.
    pub fn stop(&self) {
        self.core().upper.stop();
    }

    /// Whether a sync failed since the head was opened.
    pub fn sync_has_failed(&self) -> bool {
        self.core().upper.is_failed()
    }

    fn sync_identities(&self) -> Result<()> {
        let mut identities = self.store.identities().lock();
        let mut synced = identities.sync();
        if synced.as_ref().is_err_and(Error::is_full) && self.store.release_reserve() {
            synced = identities.sync();
            self.store.keep_reserve();
        }
        let is_broken = identities.is_broken();
        drop(identities);
        if is_broken {
            self.core().sync_failed();
        }
        synced
    }

    /// Syncs something. If there is no room for that, the reserve is for it; and if that is too little, nothing is lost, and a later
    /// sync tries again. After any other failure none does: the host may have lost what it was about, and would answer that all is
    /// well. So from then on nothing can be changed.
    fn sync_step(&self, sync: impl Fn() -> std::result::Result<(), Unsynced>) -> FsResult<()> {
        let mut synced = sync();
        if matches!(synced, Err(Unsynced::Full(_))) && self.store.release_reserve() {
            synced = sync();
            self.store.keep_reserve();
        }
        if matches!(synced, Err(Unsynced::Lost(_))) {
            self.core().sync_failed();
        }
        Ok(synced.map_err(Unsynced::into_error)?)
    }
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

impl Core {
    /// Records an operation and then shows it.
    pub(crate) fn commit(&mut self, edits: Vec<Edit>) -> FsResult<()> {
        if edits.is_empty() {
            return Ok(());
        }
        // A record that does not fit would make the layer unreadable for ever: better this one operation fails.
        self.tree.validate(&edits).map_err(|Misfit(what)| FsError::Damage(what))?;
        let record = Record::Edits(edits);
        let before = self.upper.journal_len();
        self.upper.record(&record)?;
        self.took(self.upper.journal_len().saturating_sub(before));
        let Record::Edits(edits) = record else { return Ok(()) };
        for edit in &edits {
            self.tree.apply(edit).map_err(|Misfit(what)| FsError::Damage(what))?;
        }
        self.watch_journal();
        Ok(())
    }

    /// Says that something could not be synced: nothing can be changed any more, and what was not synced is not believed again.
    fn sync_failed(&mut self) {
        self.upper.sync_failed();
        if let Some(versions) = &mut self.edits {
            versions.note_sync_failed();
        }
    }

    /// The same, because the exchange of the journal could not be synced.
    fn exchange_failed(&mut self) {
        self.sync_failed();
        self.upper.exchange_failed();
    }

    /// Says that everything was synced that was written before a mark was taken in the log of versions.
    fn note_edits_synced(&mut self, mark: Option<edits::LogMark>) {
        if let (Some(mark), Some(versions)) = (mark, &mut self.edits) {
            versions.note_synced(mark);
        }
    }

    /// The node behind an id.
    pub(crate) fn target(&self, id: NodeId) -> FsResult<Target> {
        self.target_near(id, None)
    }

    /// Where in the base a held node is that the tree does not have.
    pub(crate) fn place_in_base(&self, id: NodeId) -> Option<&TreePath> {
        let held = self.table.get(id)?;
        match &held.place {
            Place::Live { base } if self.tree.node(held.ino).is_none() => base.as_ref(),
            Place::Live { .. } | Place::Orphan => None,
        }
    }

    /// The same as [`Core::target`]; `near` is what is at its place in the base, if that is looked at with names of it.
    fn target_near(&self, id: NodeId, near: Option<&DirLookup<'_>>) -> FsResult<Target> {
        // Whatever looks for a node of the past among the live ones is about to change it.
        if id.is_in_snapdir() {
            return Err(FsError::ReadOnly);
        }
        let held = self.table.get(id).ok_or(FsError::NotFound)?;
        match &held.place {
            Place::Orphan => Ok(Target::Orphan(Ino(id.0))),
            Place::Live { .. } if self.tree.node(held.ino).is_some() => Ok(Target::Upper(held.ino)),
            Place::Live { base: Some(path) } => match self.seen_at(path, near)? {
                Some((ino, node)) if ino == held.ino => Ok(Target::Base(ino, path.clone(), node)),
                _ if held.retired => Err(FsError::NotFound),
                _ => Err(self.replaced(path)),
            },
            Place::Live { base: None } if held.retired => Err(FsError::NotFound),
            Place::Live { base: None } => {
                Err(FsError::Damage("a held node is neither in the tree nor in the base"))
            }
        }
    }

    fn seen_at(
        &self,
        path: &TreePath,
        near: Option<&DirLookup<'_>>,
    ) -> FsResult<Option<(Ino, LowerNode)>> {
        match near.filter(|near| near.path() == path) {
            Some(near) => self.lower.lookup_dir(near),
            None => self.lower.lookup(path),
        }
    }

    /// The directory behind an id, what it covers of the base, and of one that only the base has, what was seen there; ENOENT for one
    /// that is gone. `near` as in [`Core::target_near`].
    pub(crate) fn live_dir(
        &self,
        id: NodeId,
        near: Option<&DirLookup<'_>>,
    ) -> FsResult<(Ino, Option<TreePath>, Option<LowerNode>)> {
        match self.target_near(id, near)? {
            Target::Upper(ino) => Ok((ino, self.lower_path(ino)?, None)),
            Target::Base(ino, path, node) => match node.kind() {
                FileKind::Dir => Ok((ino, Some(path), Some(node))),
                _ => Err(FsError::NotADirectory),
            },
            Target::Orphan(_) => Err(FsError::NotFound),
        }
    }

    /// Covers a live node, so that it can change.
    pub(crate) fn copy_up(&mut self, id: NodeId) -> FsResult<Ino> {
        match self.target(id)? {
            Target::Upper(ino) => Ok(ino),
            Target::Base(ino, path, node) => self.copy_up_base(ino, &path, &node),
            Target::Orphan(_) => Err(FsError::NotFound),
        }
    }

    /// Covers a live directory.
    pub(crate) fn copy_up_dir(&mut self, id: NodeId) -> FsResult<(Ino, Option<TreePath>)> {
        let ino = self.copy_up(id)?;
        Ok((ino, self.lower_path(ino)?))
    }

    /// Covers a node that was found at a path of the base, and the directories above it.
    ///
    /// # Errors
    /// As [`State::copy_up_edits`], or what the store answers.
    pub(crate) fn copy_up_base(
        &mut self,
        ino: Ino,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<Ino> {
        let edits = self.copy_up_edits(ino, path, node)?;
        self.commit(edits)?;
        if let Some(id) = self.table.id_of(ino) {
            self.note_recorded(id, node);
        }
        Ok(ino)
    }

    /// Covers what a name stands for, so that the node and the name are in the tree.
    pub(crate) fn copy_up_found(
        &mut self,
        dir: Ino,
        name: &Name,
        found: &Found,
    ) -> FsResult<(Ino, Hides)> {
        match found {
            Found::Upper(ino, hides) => {
                if self.tree.dentry(dir, name).is_none() {
                    let to = Some(Dentry::Child { ino: *ino, hides: hides.clone() });
                    self.commit(vec![Edit::Dentry { dir, name: name.clone(), to }])?;
                }
                Ok((*ino, hides.clone()))
            }
            Found::Base(ino, path, node) => {
                Ok((self.copy_up_base(*ino, path, node)?, Some(node.fingerprint(*ino))))
            }
            Found::Nothing(_) => Err(FsError::NotFound),
        }
    }

    /// The record of a node, wherever it is.
    pub(crate) fn record_of(&self, target: &Target) -> FsResult<Arc<Node>> {
        match target {
            Target::Upper(ino) => self.tree.node(*ino).cloned().ok_or(FsError::NotFound),
            Target::Orphan(key) => self.orphans.node(*key).cloned().ok_or(FsError::NotFound),
            Target::Base(_, path, node) => Ok(Arc::new(self.lower.record(path, node)?.0)),
        }
    }

    /// What `stat` shows of a node.
    pub(crate) fn attr_of(&self, id: NodeId, target: &Target) -> FsResult<Attr> {
        let attr = match target {
            Target::Upper(ino) => Attr::in_tree(&self.tree, *ino, *ino),
            Target::Orphan(key) => {
                Attr::in_tree(&self.orphans, *key, self.table.get(id).map_or(*key, |h| h.ino))
            }
            Target::Base(ino, _, node) => Some(node.attr(*ino)),
        };
        attr.ok_or(FsError::NotFound)
    }

    /// Hands out what a name in a directory stands for.
    pub(crate) fn hand_out(&mut self, dir: NodeId, found: Found) -> FsResult<Entry> {
        let attr = self.attr(&found).ok_or(FsError::NotFound)?;
        if let (Found::Base(ino, path, _), FileKind::Dir) = (&found, attr.kind) {
            self.cut_off_if_moved(*ino, path);
        }
        let (base, node) = match found {
            Found::Base(_, path, node) => (Some(path), Some(node)),
            Found::Upper(..) | Found::Nothing(_) => (None, None),
        };
        let entry = Entry { id: self.table.hold(attr.ino, base), attr };
        match node {
            Some(node) => self.note_advertised(entry.id, &node),
            None => self.pending.let_go(entry.id),
        }
        self.note_advertised_in(dir, attr.ino, attr.kind);
        Ok(entry)
    }

    /// The attributes of a covered node, to be changed and committed.
    pub(crate) fn meta(&self, ino: Ino) -> FsResult<Meta> {
        self.tree.node(ino).map(|n| n.meta).ok_or(FsError::NotFound)
    }

    /// The edit for a directory in which a name came or went; `links` is by how many subdirectories it changed.
    pub(crate) fn touch_dir(&self, dir: Ino, links: i32) -> FsResult<Edit> {
        let mut meta = self.meta(dir)?;
        meta.mtime = clock::now();
        meta.ctime = meta.mtime;
        // A filesystem that does not count subdirectories shows 1 for every directory; it stays so.
        if meta.nlink >= 2 {
            meta.nlink = meta.nlink.saturating_add_signed(links).max(2);
        }
        // As on ext4: from here on it is not counted any more.
        if meta.nlink > ops::namespace::LINK_MAX {
            meta.nlink = 1;
        }
        Ok(Edit::Meta { ino: dir, meta })
    }

    /// Where the bytes of a file are, as the records say.
    pub(crate) fn target_extents(&self, target: &Target) -> FsResult<Extents> {
        match target {
            Target::Upper(ino) => Ok(extents_in(&self.tree, *ino)),
            Target::Orphan(key) => Ok(extents_in(&self.orphans, *key)),
            Target::Base(_, path, node) => Ok(self.lower.record(path, node)?.1),
        }
    }

    /// What is left of a node for those who hold it: its record, and where its bytes are.
    pub(crate) fn what_is_left(&self, target: &Target) -> FsResult<(Arc<Node>, Extents)> {
        match target {
            Target::Base(_, path, node) => {
                let (record, extents) = self.lower.record(path, node)?;
                Ok((Arc::new(record), extents))
            }
            Target::Upper(_) | Target::Orphan(_) => {
                Ok((self.record_of(target)?, self.target_extents(target)?))
            }
        }
    }

    /// Makes the node behind an id an orphan: what is left of it, in a state of `epoch`, stays for those who hold it.
    pub(crate) fn make_orphan(
        &mut self,
        id: NodeId,
        (mut node, extents): (Arc<Node>, Extents),
        epoch: Epoch,
        change: impl FnOnce(&mut Meta),
    ) -> FsResult<()> {
        let key = Ino(id.0);
        change(&mut Arc::make_mut(&mut node).meta);
        self.orphans.put_whole(key, node, extents).map_err(|Misfit(what)| FsError::Damage(what))?;
        self.orphan_epochs.insert(key, epoch);
        self.table.orphan(id);
        self.listings.remove(&id);
        Ok(())
    }

    /// The oldest epoch of the base to which orphans refer.
    fn orphans_from(&self) -> Option<Epoch> {
        let in_base =
            |key: &Ino| self.orphans.extents(*key).any(|(_, extent)| extent.source.is_base());
        self.orphan_epochs.iter().filter(|(key, _)| in_base(key)).map(|(_, epoch)| *epoch).min()
    }

    /// Lets go of an orphan that nobody holds any more, with what was written to it since it is one. Nobody reads that: whoever
    /// does holds the node.
    fn release_orphan(&mut self, key: Ino) {
        self.orphan_epochs.remove(&key);
        let written = self.scratch_of(key).of(SCRATCH);
        if self.orphans.node(key).is_some()
            && self.orphans.apply(&Edit::Remove { ino: key }).is_err()
        {
            log::error!("orphan {} could not be released", key.0);
            return;
        }
        // Most are gone without having been written to: then nothing has changed for who looks for room.
        if !written.is_empty() {
            self.quota.look_soon();
        }
        if self.orphan_epochs.is_empty() {
            self.scratch = None;
        } else if let Some(scratch) = &mut self.scratch {
            scratch.close_window(key);
            self.give_back_scratch(written);
        }
    }

    /// What of the scratch file an orphan uses.
    fn scratch_of(&self, key: Ino) -> LiveRanges {
        let mut used = LiveRanges::default();
        for (_, extent) in self.orphans.extents(key) {
            if matches!(extent.source, Source::Pool { layer: SCRATCH, .. }) {
                used.add(extent.source, extent.len);
            }
        }
        used
    }

    /// Gives ranges of the scratch file back. Who reads there at this moment reads what is given up.
    fn give_back_scratch(&mut self, ranges: Vec<ByteRange>) {
        let Some(scratch) = self.scratch.as_mut().filter(|_| !ranges.is_empty()) else { return };
        self.quota.look_soon();
        if let Err(error) = ranges.into_iter().try_for_each(|range| scratch.reclaim(range)) {
            log::warn!("space of a file that is gone is not given back yet: {error}");
        }
    }

    /// The base as an orphan knew it.
    pub(crate) fn lower_of_orphan(&self, key: Ino) -> Arc<Lower> {
        match self.orphan_epochs.get(&key) {
            Some(epoch) if *epoch != self.lower.epoch() => Arc::new(self.lower.in_epoch(*epoch)),
            Some(_) | None => Arc::clone(&self.lower),
        }
    }

    /// Where orphans write.
    pub(crate) fn scratch(&mut self, store: &Store) -> Result<&mut PoolWriter> {
        if self.scratch.is_none() {
            let file: Arc<File> = Arc::new(store.tmp().scratch()?);
            let pool = PoolWriter::new(SCRATCH, file)
                .map_err(|e| Error::io("create a scratch file", &e))?;
            self.scratch = Some(pool);
        }
        self.scratch.as_mut().ok_or_else(|| Error::damage("create a scratch file", "it is gone"))
    }
}

/// The kernel side of a head: what must happen there around a change of state. A head without a mount has none.
pub trait Kernel: Send + Sync {
    /// Brings home what the kernel holds dirty, that is what processes wrote through shared mappings. Returns when every
    /// such byte has been written through [`Fs::write`]. Called from a thread that serves no request, without locks.
    ///
    /// # Errors
    /// When some file could not be flushed.
    fn flush(&self) -> Result<()>;

    /// Makes the kernel forget what a switch changed. Called from a thread that serves no request, without locks.
    ///
    /// # Errors
    /// When the kernel could not be told; what it holds may then be stale.
    fn invalidate(&self, what: &Invalidations) -> Result<()>;

    /// The paths of the tree at which something else is mounted.
    ///
    /// # Errors
    /// When the mounts cannot be read.
    fn mounts_inside(&self) -> Result<Vec<TreePath>> {
        Ok(Vec::new())
    }
}
