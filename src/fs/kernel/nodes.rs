//! The node table: every node that the kernel holds, by [`NodeId`].
//!
//! Always true:
//! * A held node is *live*, which means that the tree or the base has it, or an *orphan*: removed
//!   or replaced, or without a name yet, and still held.
//! * An id belongs to one node as long as the kernel holds it. No other node ever gets it in that
//!   time.
//! * The root is always held.
//!
//! An id equals the node's number at first. A restore makes the holders of the old content orphans,
//! and these keep the id. The number then gets a new id, from a range that no number is in.

use std::collections::{BTreeSet, HashMap};

use crate::error::FsResult;
use crate::fs::kernel::cached_attrs::CachedAttrs;
use crate::fs::merged::answers;
use crate::types::{Ino, NodeId, TreePath};

/// A node that the kernel holds.
#[derive(Clone, Debug)]
pub struct Held {
    /// Its number.
    pub ino: Ino,
    /// How many lookups the kernel has not taken back by FORGET.
    pub nlookup: u64,
    /// Whether it is live, and where.
    pub state: NodeState,
    /// For a directory, the directory in which the kernel sees it or saw it last; none for the
    /// root.
    pub within: Option<NodeId>,
    /// The next lookup of its number returns another id. This happens only to symlinks: see
    /// [`crate::fs::ops::symlink`].
    pub retired: bool,
    /// The attributes that the kernel caches, of a node that only the base has: see
    /// [`crate::fs::kernel::coherence`].
    cached: Option<CachedAttrs>,
}

impl Held {
    /// A live node after its first lookup.
    fn new(ino: Ino, base: Option<TreePath>) -> Held {
        Held {
            ino,
            nlookup: 1,
            state: NodeState::Live { base },
            within: None,
            retired: false,
            cached: None,
        }
    }

    /// Its path in the base, if it is live and the path is known.
    fn base(&self) -> Option<&TreePath> {
        match &self.state {
            NodeState::Live { base } => base.as_ref(),
            NodeState::Orphan => None,
        }
    }

    /// Whether the node is in the tree or in the base.
    pub fn is_live(&self) -> bool {
        self.state != NodeState::Orphan
    }
}

/// Whether a held node is live, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// In the tree, or in the base at this path without a copy-up.
    Live {
        /// Its path in the base; none if no base has it, and then the tree must.
        base: Option<TreePath>,
    },
    /// Neither in the tree nor in the base. Its record is stored under its id.
    Orphan,
}

/// All nodes that the kernel holds.
#[derive(Default)]
pub struct NodeTable {
    held: HashMap<NodeId, Held>,
    /// The ids of numbers that are held under another id than the number itself.
    renumbered: HashMap<Ino, NodeId>,
    /// The retired ids, by number.
    retired: BTreeSet<(Ino, NodeId)>,
    next: u64,
    /// The ids that changed since [`NodeTable::watch`]; none if no switch watches.
    changed: Option<BTreeSet<NodeId>>,
    /// A switch takes its last look at the nodes, so lookups that find a node wait.
    is_closed: bool,
}

impl NodeTable {
    /// The table of a new mount, which holds the root alone.
    pub fn new() -> NodeTable {
        let mut table = NodeTable { next: NodeId::RENUMBERED.0, ..NodeTable::default() };
        table.held.insert(NodeId::ROOT, Held::new(Ino::ROOT, Some(TreePath::root())));
        table
    }

    /// Begins to note the ids of nodes that are held, forgotten or made orphans, or that get
    /// another base path or alias. A switch looks at these again.
    pub(in crate::fs) fn watch(&mut self) {
        self.changed = Some(BTreeSet::new());
    }

    /// The ids that changed since the last call.
    pub(in crate::fs) fn take_changed(&mut self) -> BTreeSet<NodeId> {
        self.changed.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Makes lookups that find a node wait until [`NodeTable::end_watch`].
    pub(in crate::fs) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Ends what [`NodeTable::watch`] and [`NodeTable::close`] began.
    pub(in crate::fs) fn end_watch(&mut self) {
        (self.changed, self.is_closed) = (None, false);
    }

    /// Refuses to hold what a lookup has found while the table is closed.
    ///
    /// # Errors
    /// [`MustWait`](crate::error::FsError::MustWait), until the switch has ended.
    pub(in crate::fs) fn check_open(&self) -> FsResult<()> {
        if self.is_closed { Err(answers::must_wait()) } else { Ok(()) }
    }

    fn note_changed(&mut self, id: NodeId) {
        if let Some(changed) = &mut self.changed {
            changed.insert(id);
        }
    }

    /// Notes that a file got an alias: another name by which the kernel knows it, and which the
    /// tree does not have.
    pub(in crate::fs) fn note_alias(&mut self, ino: Ino) {
        if self.changed.is_some() {
            let ids: Vec<NodeId> = self.ids_of(ino).collect();
            ids.into_iter().for_each(|id| self.note_changed(id));
        }
    }

    /// The held node with this id.
    pub fn get(&self, id: NodeId) -> Option<&Held> {
        self.held.get(&id)
    }

    /// The attributes of a held node that the kernel caches.
    pub(in crate::fs) fn cached_attrs(&self, id: NodeId) -> Option<CachedAttrs> {
        self.held.get(&id)?.cached
    }

    /// Sets the attributes that the kernel caches of a held node; none if they no longer count.
    pub(in crate::fs) fn set_cached_attrs(&mut self, id: NodeId, cached: Option<CachedAttrs>) {
        if let Some(held) = self.held.get_mut(&id) {
            held.cached = cached;
        }
    }

    /// The id that the next lookup of a live node returns, if the kernel holds it.
    pub fn id_of(&self, ino: Ino) -> Option<NodeId> {
        let id = self.renumbered.get(&ino).copied().unwrap_or(NodeId(ino.0));
        let current = |h: &&Held| h.is_live() && h.ino == ino && !h.retired;
        self.held.get(&id).filter(current).map(|_| id)
    }

    /// All ids under which the kernel holds a live node, the retired ones included.
    pub fn ids_of(&self, ino: Ino) -> impl Iterator<Item = NodeId> {
        let retired =
            self.retired.range((ino, NodeId(0))..=(ino, NodeId(u64::MAX))).map(|(_, id)| *id);
        let is_live = |id: &NodeId| self.held.get(id).is_some_and(Held::is_live);
        self.id_of(ino).into_iter().chain(retired.filter(is_live))
    }

    /// Counts one more lookup of a live node. Returns its id.
    pub fn hold(&mut self, ino: Ino, base: Option<TreePath>) -> NodeId {
        if let Some(id) = self.id_of(ino) {
            if let Some(held) = self.held.get_mut(&id) {
                held.nlookup += 1;
                if base.is_some() && base.as_ref() != held.base() {
                    held.state = NodeState::Live { base };
                    self.note_changed(id);
                }
            }
            return id;
        }
        let id = self.unused_id(ino);
        self.held.insert(id, Held::new(ino, base));
        self.note_changed(id);
        id
    }

    /// An id for `ino` that no held node has.
    fn unused_id(&mut self, ino: Ino) -> NodeId {
        if !self.held.contains_key(&NodeId(ino.0)) {
            self.renumbered.remove(&ino);
            return NodeId(ino.0);
        }
        let id = NodeId(self.next);
        self.next += 1;
        self.renumbered.insert(ino, id);
        id
    }

    /// Takes back `count` lookups. Returns the node if that were all.
    pub(super) fn forget(&mut self, id: NodeId, count: u64) -> Option<Held> {
        let held = self.held.get_mut(&id)?;
        held.nlookup = held.nlookup.saturating_sub(count);
        if held.nlookup > 0 || id == NodeId::ROOT {
            return None;
        }
        let held = self.held.remove(&id)?;
        self.note_changed(id);
        if held.retired {
            self.retired.remove(&(held.ino, id));
        }
        self.free_number(held.ino, id);
        Some(held)
    }

    /// Makes a live node an orphan. The next lookup of its number returns another id.
    pub(super) fn orphan(&mut self, id: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.state = NodeState::Orphan;
            let ino = held.ino;
            self.free_number(ino, id);
            self.note_changed(id);
        }
    }

    /// Makes an orphan live again under its id. No other node may have its number.
    pub(super) fn revive(&mut self, id: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.state = NodeState::Live { base: None };
        }
    }

    /// Keeps a live node under its id, and makes the next lookup of its number return another id.
    pub fn retire(&mut self, id: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.retired = true;
            let ino = held.ino;
            self.retired.insert((ino, id));
            self.free_number(ino, id);
        }
    }

    /// `id` is no longer the id that a lookup of `ino` returns.
    fn free_number(&mut self, ino: Ino, id: NodeId) {
        if self.renumbered.get(&ino) == Some(&id) {
            self.renumbered.remove(&ino);
        }
    }

    /// Sets the directory in which the kernel sees a directory.
    pub fn set_within(&mut self, id: NodeId, above: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.within = Some(above);
        }
    }

    /// A held directory and those above it, as the kernel sees them. The last one is the root,
    /// unless the kernel sent FORGET for the next one and so for all that stood below it.
    pub fn ancestors(&self, dir: NodeId) -> impl Iterator<Item = (NodeId, &Held)> {
        let mut next = Some(dir);
        std::iter::from_fn(move || {
            let id = next?;
            let held = self.held.get(&id)?;
            next = held.within;
            Some((id, held))
        })
    }

    /// How many levels below the root the kernel sees a directory.
    pub fn depth(&self, dir: NodeId) -> Option<usize> {
        self.levels_below(dir, NodeId::ROOT)
    }

    /// How many levels below `top` the kernel sees a directory; none if it is elsewhere.
    pub fn levels_below(&self, dir: NodeId, top: NodeId) -> Option<usize> {
        self.ancestors(dir).position(|(id, _)| id == top)
    }

    /// The path of a live node in the base, if it is known.
    pub fn base_path(&self, id: NodeId) -> Option<&TreePath> {
        self.get(id)?.base()
    }

    /// Sets the path of a live node in the base.
    pub fn set_base_path(&mut self, id: NodeId, base: Option<TreePath>) {
        if let Some(held) = self.held.get_mut(&id)
            && held.is_live()
        {
            held.state = NodeState::Live { base };
            self.note_changed(id);
        }
    }

    /// All held nodes.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Held)> {
        self.held.iter().map(|(id, held)| (*id, held))
    }

    /// The number of held nodes, the root included.
    pub fn count(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orphan_never_shares_its_id_with_the_file_that_came_back() {
        let mut table = NodeTable::new();
        let first = table.hold(Ino(9), None);
        assert_eq!(first, NodeId(9));
        table.orphan(first);
        assert_eq!(table.id_of(Ino(9)), None);
        let second = table.hold(Ino(9), None);
        assert_ne!(second, first);
        assert_eq!(table.id_of(Ino(9)), Some(second));
        table.orphan(second);
        let third = table.hold(Ino(9), None);
        assert!(third != first && third != second);
        assert!(table.forget(first, 1).is_some());
        assert_eq!(
            table.id_of(Ino(9)),
            Some(third),
            "forgetting the orphan does not touch the live node"
        );
        assert!(table.forget(third, 1).is_some());
        assert_eq!(table.count(), 2, "the root and the second orphan");
    }

    #[test]
    fn a_retired_id_stays_live_and_no_lookup_returns_it_again() {
        let mut table = NodeTable::new();
        let first = table.hold(Ino(9), None);
        table.retire(first);
        assert_eq!(table.id_of(Ino(9)), None);
        let second = table.hold(Ino(9), None);
        assert!(second != first && table.get(first).is_some_and(|held| held.is_live()));
        table.retire(second);
        let third = table.hold(Ino(9), None);
        assert!(third != first && third != second);
        let mut ids: Vec<NodeId> = table.ids_of(Ino(9)).collect();
        ids.sort_unstable();
        assert_eq!(ids, [first, second, third], "each of them is the file");
        table.orphan(second);
        assert_eq!(
            table.ids_of(Ino(9)).collect::<Vec<_>>(),
            [third, first],
            "but an orphan is not"
        );
        assert!(table.forget(second, 1).is_some() && table.forget(first, 1).is_some());
        assert_eq!(table.ids_of(Ino(9)).collect::<Vec<_>>(), [third]);
        assert_eq!(table.id_of(Ino(9)), Some(third));
    }

    #[test]
    fn the_kernel_takes_lookups_back_by_count() {
        let mut table = NodeTable::new();
        let id = table.hold(Ino(9), None);
        table.hold(Ino(9), None);
        assert!(table.forget(id, 1).is_none());
        assert!(table.forget(id, 1).is_some());
        assert!(table.forget(id, 1).is_none(), "a forget too many is ignored");
        assert!(table.forget(NodeId::ROOT, 100).is_none() && table.get(NodeId::ROOT).is_some());
    }
}
