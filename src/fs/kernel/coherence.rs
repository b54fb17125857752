//! Keeps the kernel's caches coherent with base files that have not been copied up.
//!
//! The kernel caches the attributes, pages and names of base files without a time limit. If such a
//! file changes in the base, new bytes must not be read into what is left of the old pages, nor be
//! cut at the old size, and a program must not write at an offset that it chose by the old content.
//!
//! Always true:
//! * The node table has the attributes that the kernel caches of each held file that only the base
//!   has ([`CachedAttrs`]).
//! * A read or write that finds other attributes fails with EIO and is noted for `status`. So does
//!   every later one until the kernel's caches of the file are invalidated and the kernel has asked
//!   for it again.
//! * A switch to another state leaves the page cache of the files that it keeps valid, so their
//!   cached attributes stay. For a file that a switch gives back to the base, they are those of the
//!   record or those that an apply left.
//! * A name that a switch gave to another node cannot be renamed until its dentry is invalidated.
//! * While a directory is copied up, it is not advertised to the kernel at another path of the
//!   base. Otherwise the kernel's next lookup of its path in the tree would move the dentry there.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::{FsError, FsResult};
use crate::fs::kernel::cached_attrs::{CachedAttrs, Change};
use crate::fs::kernel::nodes::{NodeState, NodeTable};
use crate::fs::merged::answers;
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Core, Fs, Target};
use crate::tree::Body;
use crate::types::{Ino, Name, NodeId, TreePath};

/// The number of names that [`Fs::names_were_invalidated`] removes under one lock.
const NAMES_PER_LOCK: usize = 256;

/// The text in `status` for a file that changed while the kernel cached it.
const CHANGED: &str = "changed in the base while the kernel cached it; that read or change failed";

/// The component of [`Core`] that knows which of the kernel's caches are stale. It holds nothing
/// without a kernel.
#[derive(Default)]
pub(in crate::fs) struct Coherence {
    has_kernel: bool,
    /// Whether the kernel trusts its own size and times of every file that it holds
    /// (`-o writeback`).
    writeback: bool,
    /// The dentries of nodes that the base no longer has at that path. A lookup adds to them with a
    /// shared reference.
    stale_dentries: Mutex<BTreeSet<(NodeId, Name)>>,
    /// The nodes whose caches are to be invalidated.
    stale_nodes: BTreeMap<NodeId, Invalidation>,
    /// Whether there is a stale dentry or node. Nearly every request only has to know that there is
    /// none, and reads this without the core lock.
    has_stale: Arc<AtomicBool>,
    /// Nodes that were invalidated and that the kernel has not asked for since. A read that began
    /// before the invalidation can still bring old pages.
    unasked: BTreeSet<NodeId>,
    switched_names: SwitchedNames,
    /// Names by which the kernel knows a file and the tree does not: further hard links of the
    /// base.
    aliases: HashMap<Ino, BTreeSet<(Ino, Name)>>,
    /// The directories that are being copied up, and their paths in the base.
    copied_up: Vec<(Ino, TreePath)>,
}

/// Names that stand for another node since a switch, until their dentries are invalidated. Each
/// switch has a set of its own, so that a large one is noted at once.
#[derive(Default)]
struct SwitchedNames(Vec<BTreeSet<(NodeId, Name)>>);

impl SwitchedNames {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(&mut self, names: BTreeSet<(NodeId, Name)>) {
        if !names.is_empty() {
            self.0.push(names);
        }
    }

    fn contains(&self, name: &(NodeId, Name)) -> bool {
        self.0.iter().any(|names| names.contains(name))
    }

    fn remove(&mut self, name: &(NodeId, Name)) {
        self.0.retain_mut(|names| {
            names.remove(name);
            !names.is_empty()
        });
    }
}

/// An invalidation of a node that has not ended.
#[derive(Clone, Copy)]
struct Invalidation {
    /// Whether a thread has begun it.
    has_begun: bool,
    /// Whether reads and writes fail until it ends.
    refuses: bool,
}

impl Coherence {
    /// Whether the kernel trusts its own size and times of files.
    pub(in crate::fs) fn is_writeback(&self) -> bool {
        self.writeback
    }

    /// Whether there is a stale dentry or node, for a reader without the core lock.
    pub(in crate::fs) fn stale_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_stale)
    }

    /// Sets the flag after stale nodes or dentries were removed.
    fn update_stale_flag(&mut self) {
        let has_stale = !self.stale_nodes.is_empty() || !self.stale_dentries.get_mut().is_empty();
        self.has_stale.store(has_stale, Ordering::Release);
    }

    /// Marks a node as stale after a change in the base.
    fn mark_stale(&mut self, id: NodeId, change: Change) {
        let refuses = match change {
            Change::Nothing => return,
            Change::Attributes => false,
            Change::Content => true,
        };
        self.has_stale.store(true, Ordering::Release);
        let known =
            self.stale_nodes.entry(id).or_insert(Invalidation { has_begun: false, refuses });
        if refuses && !known.refuses {
            // The kernel may read old pages again while the invalidation under way ends.
            *known = Invalidation { has_begun: false, refuses };
        }
    }

    fn refuses(&self, id: NodeId) -> bool {
        self.unasked.contains(&id) || self.stale_nodes.get(&id).is_some_and(|known| known.refuses)
    }

    /// The kernel asks for a node that nothing outside the daemon can change.
    pub(in crate::fs) fn note_asked(&mut self, id: NodeId) {
        self.unasked.remove(&id);
    }

    /// The kernel no longer holds a node, so it caches nothing of it.
    pub(in crate::fs) fn forget(&mut self, id: NodeId) {
        self.unasked.remove(&id);
        if self.stale_nodes.remove(&id).is_some() {
            self.update_stale_flag();
        }
    }

    /// Notes the names that a switch gave to another node.
    pub(in crate::fs) fn note_switched_names(&mut self, names: BTreeSet<(NodeId, Name)>) {
        if self.has_kernel {
            self.switched_names.add(names);
        }
    }

    /// Refuses to rename what a name stands for since a switch while the kernel may cache the node
    /// before. The kernel would move that dentry to the new name, where nothing invalidates it.
    ///
    /// # Errors
    /// ESTALE: the kernel looks the name up and tries again.
    pub(in crate::fs) fn check_name_is_current(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        let is_stale =
            !self.switched_names.is_empty() && self.switched_names.contains(&(dir, name.clone()));
        if is_stale { Err(FsError::Stale) } else { Ok(()) }
    }

    /// The kernel looks a name up, so its dentry is current again.
    pub(in crate::fs) fn name_looked_up(&mut self, dir: NodeId, name: &Name) {
        if !self.switched_names.is_empty() {
            self.switched_names.remove(&(dir, name.clone()));
        }
    }

    /// Remembers names by which the kernel knows a file and the tree does not.
    pub(in crate::fs) fn add_aliases(
        &mut self,
        ino: Ino,
        names: impl IntoIterator<Item = (Ino, Name)>,
    ) {
        self.aliases.entry(ino).or_default().extend(names);
    }

    /// The names by which the kernel knows a file and the tree does not, as (directory, name).
    pub(in crate::fs) fn aliases(&self, ino: Ino) -> impl Iterator<Item = &(Ino, Name)> {
        self.aliases.get(&ino).into_iter().flatten()
    }

    /// The kernel no longer holds a file, so it knows it by no name.
    pub(in crate::fs) fn forget_aliases(&mut self, ino: Ino) {
        self.aliases.remove(&ino);
    }

    /// Notes directories that are being copied up, with their paths in the base. Until
    /// [`Coherence::end_copy_up`], no lookup may find one at another path of the base.
    pub(in crate::fs) fn begin_copy_up(&mut self, dirs: Vec<(Ino, TreePath)>) {
        self.copied_up = dirs;
    }

    /// Ends the copy-up, if one is under way.
    pub(in crate::fs) fn end_copy_up(&mut self) {
        self.copied_up.clear();
    }

    /// Refuses a directory that was found at one path of the base and is being copied up from
    /// another one: it was moved in between.
    ///
    /// # Errors
    /// [`FsError::MustWait`], until the copy-up has ended.
    pub(in crate::fs) fn check_copy_up(&self, ino: Ino, path: &TreePath) -> FsResult<()> {
        let is_elsewhere =
            |(dir, from): &(Ino, TreePath)| *dir == ino && from != path && self.has_kernel;
        if self.copied_up.iter().any(is_elsewhere) { Err(answers::must_wait()) } else { Ok(()) }
    }

    /// Notes the attributes of a node that a switch left to the base.
    pub(in crate::fs) fn note_left_to_base(
        &self,
        nodes: &mut NodeTable,
        id: NodeId,
        attrs: CachedAttrs,
    ) {
        if self.has_kernel {
            nodes.set_cached_attrs(id, Some(attrs));
        }
    }

    /// Notes the attributes of a base node that the next reply tells the kernel.
    pub(in crate::fs) fn note_advertised(
        &mut self,
        nodes: &mut NodeTable,
        id: NodeId,
        node: &LowerNode,
    ) {
        if !self.has_kernel {
            return;
        }
        let Some(now) = CachedAttrs::of(node).filter(|_| nodes.get(id).is_some()) else { return };
        self.unasked.remove(&id);
        match nodes.cached_attrs(id) {
            None => nodes.set_cached_attrs(id, Some(now)),
            Some(cached) => {
                let change = cached.change_to(now);
                // The kernel keeps its pages until they are invalidated.
                self.mark_stale(id, change);
                if change == Change::Attributes {
                    nodes.set_cached_attrs(id, Some(now));
                }
            }
        }
    }

    /// Notes that a base node gets a record, made of `node` as it is now: a copy-up, or what its
    /// holders keep of it. Pages that the kernel read of another content must not stay beside it.
    pub(in crate::fs) fn note_recorded(
        &mut self,
        nodes: &mut NodeTable,
        id: NodeId,
        node: &LowerNode,
    ) {
        if let (Some(cached), Some(now)) = (nodes.cached_attrs(id), CachedAttrs::of(node)) {
            self.mark_stale(id, cached.change_to(now));
        }
        nodes.set_cached_attrs(id, None);
    }
}

impl Core {
    /// Notes that the kernel asked for the attributes of a node.
    pub(in crate::fs) fn note_getattr(&mut self, id: NodeId, target: &Target) {
        match target {
            Target::Base(_, _, node) => self.coherence.note_advertised(&mut self.held, id, node),
            Target::Upper(_) | Target::Orphan(_) => self.coherence.note_asked(id),
        }
    }

    /// The error for a node that the base no longer has at the path where the kernel sees it:
    /// ESTALE, and the kernel walks the path again.
    ///
    /// # Errors
    /// [`FsError::MustWait`].
    pub(in crate::fs) fn replaced(&self, path: &TreePath) -> FsResult<FsError> {
        if !self.coherence.has_kernel {
            return Ok(self.lower.drift(path));
        }
        let mut at = path.clone();
        while let Some((above, name)) = at.split() {
            if let Some(dir) = self.dir_seen_at(&above)? {
                self.coherence.stale_dentries.lock().insert((dir, name));
                self.coherence.has_stale.store(true, Ordering::Release);
                break;
            }
            // That directory was replaced itself.
            at = above;
        }
        Ok(FsError::Stale)
    }

    /// Makes a base directory an orphan if it was moved in the base and is now looked up at its new
    /// path. Otherwise the kernel would move its dentry there, with all dentries below it. As in a
    /// switch, no live dentry moves, and a process that stands in the directory gets ENOENT.
    ///
    /// # Errors
    /// [`FsError::MustWait`].
    pub(in crate::fs) fn cut_off_if_moved(&mut self, ino: Ino, path: &TreePath) -> FsResult<()> {
        let id = self.held.id_of(ino).filter(|_| self.tree.node(ino).is_none());
        let Some(id) = id.filter(|_| self.coherence.has_kernel) else { return Ok(()) };
        let Some(was) = self.held.base_path(id).filter(|was| *was != path).cloned() else {
            return Ok(());
        };
        let stale = self.replaced(&was)?;
        log::info!("directory '{was}' was moved in the base: {stale}");
        self.links.cut_off(&self.held, &BTreeSet::from([id]));
        self.held.make_orphan_without_record(id);
        Ok(())
    }

    /// Refuses directories of which the kernel sees one at another path of the base, to which it
    /// was moved after the base was asked. One that was moved back is cut off from that path.
    ///
    /// # Errors
    /// ESTALE, and for an operation on a path the kernel walks the path again.
    /// [`FsError::MustWait`].
    pub(in crate::fs) fn check_not_seen_elsewhere(
        &mut self,
        dirs: &[(Ino, TreePath)],
    ) -> FsResult<()> {
        for (ino, path) in dirs {
            let seen = self.held.id_of(*ino).and_then(|id| self.held.base_path(id));
            let Some(seen) = seen.filter(|seen| self.coherence.has_kernel && *seen != path) else {
                continue;
            };
            if self.lower.lookup(seen)?.is_some_and(|(found, _)| found == *ino) {
                return Err(self.replaced(path)?);
            }
            self.cut_off_if_moved(*ino, path)?;
        }
        Ok(())
    }

    /// Refuses to move a directory that the kernel does not see in `parent`. Another process moved
    /// it in the base since the kernel looked it up, so the kernel would move another node.
    ///
    /// # Errors
    /// ESTALE, and the kernel walks the path again.
    pub(in crate::fs) fn check_is_seen_in(&self, parent: NodeId, dir: Ino) -> FsResult<()> {
        let held = self.held.id_of(dir).and_then(|id| self.held.get(id));
        let is_seen = held.is_some_and(|held| held.within == Some(parent));
        if is_seen || !self.coherence.has_kernel { Ok(()) } else { Err(FsError::Stale) }
    }

    /// The directory that the kernel sees at a path of the base, if the base still has it there.
    fn dir_seen_at(&self, path: &TreePath) -> FsResult<Option<NodeId>> {
        let Some((ino, _)) = answers::known(self.lower.lookup(path))?.flatten() else {
            return Ok(None);
        };
        let Some(id) = self.held.id_of(ino) else { return Ok(None) };
        let seen = match self.tree.node(ino).map(|node| &node.body) {
            Some(Body::Dir { base }) => base.as_ref(),
            Some(_) => None,
            None => self.held.base_path(id),
        };
        Ok((seen == Some(path)).then_some(id))
    }

    /// The node behind an open file, whose content is about to be read or changed. The kernel does
    /// not walk to it again, so ESTALE would not help.
    ///
    /// # Errors
    /// As [`Core::target`] and [`Core::check_coherent`]; [`FsError::Drift`] if the base has another
    /// node in its place.
    pub(in crate::fs) fn content_target(&mut self, id: NodeId) -> FsResult<Target> {
        let target = match (self.target(id), self.held.get(id).map(|held| &held.state)) {
            (Err(FsError::Stale), Some(NodeState::Live { base: Some(path) })) => {
                return Err(self.drifted(path));
            }
            (target, _) => target?,
        };
        self.check_coherent(id, &target)?;
        Ok(target)
    }

    /// Refuses to read or change the content of a file of which the kernel caches another content.
    ///
    /// # Errors
    /// [`FsError::Drift`].
    pub(in crate::fs) fn check_coherent(&mut self, id: NodeId, target: &Target) -> FsResult<()> {
        if let Target::Base(_, _, node) = target
            && !self.coherence.unasked.contains(&id)
        {
            self.coherence.note_advertised(&mut self.held, id, node);
        }
        if !self.coherence.refuses(id) {
            return Ok(());
        }
        let path = match target {
            Target::Base(_, path, _) => Some(TreePath::clone(path)),
            Target::Upper(ino) => self.tree.path(*ino),
            Target::Orphan(_) => None,
        };
        let path = path.unwrap_or_else(TreePath::root);
        Err(self.drifted(&path))
    }

    /// The error for a base file that another process changed or moved. Notes the path for
    /// `status`.
    pub(in crate::fs) fn drifted(&self, path: &TreePath) -> FsError {
        self.lower.note(path, CHANGED);
        FsError::Drift(path.clone())
    }

    /// Refuses to append to a base file at another offset than its end, because the kernel chose
    /// the offset by an old size. It asks for the size when the file is opened or looked up again.
    ///
    /// # Errors
    /// [`FsError::Drift`].
    pub(in crate::fs) fn check_append(
        &mut self,
        id: NodeId,
        target: &Target,
        offset: u64,
    ) -> FsResult<()> {
        let Target::Base(_, path, node) = target else { return Ok(()) };
        if CachedAttrs::of(node).is_none_or(|now| now.ends_at(offset)) {
            return Ok(());
        }
        self.coherence.mark_stale(id, Change::Content);
        Err(self.drifted(path))
    }
}

impl Fs {
    /// A kernel sends requests from now on and caches the replies. With `writeback` it trusts its
    /// own size and times of files.
    pub fn attach_kernel(&self, writeback: bool) {
        let mut core = self.core();
        core.coherence.has_kernel = true;
        core.coherence.writeback = writeback;
    }

    /// The dentries of these names were invalidated. Several threads may invalidate the same names.
    pub fn names_were_invalidated(&self, names: &BTreeSet<(NodeId, Name)>) {
        let mut names = names.iter().peekable();
        while names.peek().is_some() {
            // Requests must not wait for all of them.
            let mut core = self.core();
            if core.coherence.switched_names.is_empty() {
                return;
            }
            names.by_ref().take(NAMES_PER_LOCK).for_each(|name| {
                core.coherence.switched_names.remove(name);
            });
        }
    }

    /// Takes the nodes and dentries that changes of the base made stale, each once. The caller
    /// invalidates them, and calls [`Fs::node_was_invalidated`] after each node.
    pub fn take_invalidations(&self) -> (Vec<NodeId>, BTreeSet<(NodeId, Name)>) {
        if !self.has_stale.load(Ordering::Acquire) {
            return Default::default();
        }
        let mut core = self.core();
        let names = std::mem::take(core.coherence.stale_dentries.get_mut());
        let waiting = core.coherence.stale_nodes.iter_mut().filter(|(_, known)| !known.has_begun);
        let begin = |(id, known): (&NodeId, &mut Invalidation)| {
            known.has_begun = true;
            *id
        };
        let nodes = waiting.map(begin).collect();
        core.coherence.update_stale_flag();
        (nodes, names)
    }

    /// Whether a node must be invalidated before the kernel gets a reply about it.
    pub fn needs_invalidation(&self, id: NodeId) -> bool {
        self.has_stale.load(Ordering::Acquire)
            && self.core().coherence.stale_nodes.contains_key(&id)
    }

    /// The kernel's caches of a node were invalidated.
    pub fn node_was_invalidated(&self, id: NodeId) {
        let mut guard = self.core();
        let core = &mut *guard;
        let refused = core.coherence.stale_nodes.remove(&id).is_some_and(|known| known.refuses);
        core.coherence.update_stale_flag();
        if refused && core.held.get(id).is_some() {
            core.coherence.unasked.insert(id);
            core.held.set_cached_attrs(id, None);
        }
    }
}
