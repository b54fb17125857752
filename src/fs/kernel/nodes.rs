//! The nodes that the kernel holds.
//!
//! The kernel asks by [`NodeId`] and forgets when it has counted down what LOOKUP and its kin handed out. A node is
//! live, that is in the tree or the base below it, or an orphan: gone from the tree and still held. A node's id is its
//! number, until a restore cuts the holders of the old content off: then the id becomes an orphan's, and the number
//! gets a new id, which never was another node's.

use std::collections::{BTreeSet, HashMap};

use crate::fs::kernel::coherence::Told;
use crate::types::{Ino, NodeId, TreePath};

/// A node that the kernel holds.
#[derive(Clone, Debug)]
pub struct Held {
    /// Its number.
    pub ino: Ino,
    /// How many times it was handed out and not forgotten.
    pub nlookup: u64,
    /// What it is.
    pub place: Place,
    /// Of a directory, the one in which the kernel sees it, or last saw it; none for the root.
    pub within: Option<NodeId>,
    /// Its number is handed out under another id from now on. Only links are: see `fs/jailed.rs`.
    pub retired: bool,
    /// What the kernel was told of it while only the base had it: see `fs/told.rs`.
    told: Option<Told>,
}

impl Held {
    /// A live node that was handed out once.
    fn new(ino: Ino, base: Option<TreePath>) -> Held {
        Held {
            ino,
            nlookup: 1,
            place: Place::Live { base },
            within: None,
            retired: false,
            told: None,
        }
    }
}

/// Where a held node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the tree, or in the base at this path and not covered.
    Live {
        /// Its path in the base; none if it is in no base and so must be in the tree.
        base: Option<TreePath>,
    },
    /// Gone from the tree; what is left of it is found under its id.
    Orphan,
}

/// All nodes that the kernel holds.
#[derive(Default)]
pub struct NodeTable {
    held: HashMap<NodeId, Held>,
    /// Only of numbers whose id is another number.
    renumbered: HashMap<Ino, NodeId>,
    /// The ids that are retired, by their number.
    retired: BTreeSet<(Ino, NodeId)>,
    next: u64,
}

impl NodeTable {
    /// The table of a new mount: the root is always held.
    pub fn new() -> NodeTable {
        let mut table = NodeTable { next: NodeId::RENUMBERED.0, ..NodeTable::default() };
        table.held.insert(NodeId::ROOT, Held::new(Ino::ROOT, Some(TreePath::root())));
        table
    }

    /// The held node with this id.
    pub fn get(&self, id: NodeId) -> Option<&Held> {
        self.held.get(&id)
    }

    /// What the kernel was told of a held node.
    pub(in crate::fs) fn told(&self, id: NodeId) -> Option<Told> {
        self.held.get(&id)?.told
    }

    /// Notes what the kernel was told of a held node; none if that does not count any more.
    pub(in crate::fs) fn set_advertised(&mut self, id: NodeId, told: Option<Told>) {
        if let Some(held) = self.held.get_mut(&id) {
            held.told = told;
        }
    }

    /// The id under which a live node is held; none if the kernel does not hold it.
    pub fn id_of(&self, ino: Ino) -> Option<NodeId> {
        let id = self.renumbered.get(&ino).copied().unwrap_or(NodeId(ino.0));
        let current = |h: &&Held| h.place != Place::Orphan && h.ino == ino && !h.retired;
        self.held.get(&id).filter(current).map(|_| id)
    }

    /// All ids under which a live node is held: that, and those that are retired.
    pub fn ids_of(&self, ino: Ino) -> impl Iterator<Item = NodeId> {
        let retired =
            self.retired.range((ino, NodeId(0))..=(ino, NodeId(u64::MAX))).map(|(_, id)| *id);
        let is_live =
            |id: &NodeId| self.held.get(id).is_some_and(|held| held.place != Place::Orphan);
        self.id_of(ino).into_iter().chain(retired.filter(is_live))
    }

    /// Hands a live node out once more.
    pub fn hold(&mut self, ino: Ino, base: Option<TreePath>) -> NodeId {
        if let Some(id) = self.id_of(ino) {
            if let Some(held) = self.held.get_mut(&id) {
                held.nlookup += 1;
                if base.is_some() {
                    held.place = Place::Live { base };
                }
            }
            return id;
        }
        let id = self.unused_id(ino);
        self.held.insert(id, Held::new(ino, base));
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

    /// Counts down; gives the node back when the kernel holds it no longer.
    pub fn forget(&mut self, id: NodeId, count: u64) -> Option<Held> {
        let held = self.held.get_mut(&id)?;
        held.nlookup = held.nlookup.saturating_sub(count);
        if held.nlookup > 0 || id == NodeId::ROOT {
            return None;
        }
        let held = self.held.remove(&id)?;
        if held.retired {
            self.retired.remove(&(held.ino, id));
        }
        if self.renumbered.get(&held.ino) == Some(&id) {
            self.renumbered.remove(&held.ino);
        }
        Some(held)
    }

    /// Makes a live node an orphan. Its number gets another id when it is handed out again.
    pub fn orphan(&mut self, id: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.place = Place::Orphan;
            if self.renumbered.get(&held.ino) == Some(&id) {
                self.renumbered.remove(&held.ino);
            }
        }
    }

    /// Gives the number of a live node another id when it is handed out again; this one stays what it is.
    pub fn retire(&mut self, id: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.retired = true;
            self.retired.insert((held.ino, id));
            if self.renumbered.get(&held.ino) == Some(&id) {
                self.renumbered.remove(&held.ino);
            }
        }
    }

    /// Says in which directory the kernel sees a directory.
    pub fn set_within(&mut self, id: NodeId, above: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.within = Some(above);
        }
    }

    /// A held directory and those above it, as the kernel sees them. The last one is the root, or the kernel has let go of
    /// the next one, and of everybody who stood below it.
    pub fn line(&self, dir: NodeId) -> impl Iterator<Item = (NodeId, &Held)> {
        let mut next = Some(dir);
        std::iter::from_fn(move || {
            let id = next?;
            let held = self.held.get(&id)?;
            next = held.within;
            Some((id, held))
        })
    }

    /// Says where a live node is in the base.
    pub fn set_base(&mut self, id: NodeId, base: Option<TreePath>) {
        if let Some(held) = self.held.get_mut(&id)
            && held.place != Place::Orphan
        {
            held.place = Place::Live { base };
        }
    }

    /// All held nodes.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Held)> {
        self.held.iter().map(|(id, held)| (*id, held))
    }

    /// Number of held nodes, the root included.
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
    fn a_retired_id_stays_live_and_is_not_handed_out_again() {
        let mut table = NodeTable::new();
        let first = table.hold(Ino(9), None);
        table.retire(first);
        assert_eq!(table.id_of(Ino(9)), None);
        let second = table.hold(Ino(9), None);
        assert!(
            second != first && table.get(first).is_some_and(|held| held.place != Place::Orphan)
        );
        table.retire(second);
        let third = table.hold(Ino(9), None);
        assert!(third != first && third != second);
        let mut ids: Vec<NodeId> = table.ids_of(Ino(9)).collect();
        ids.sort_unstable();
        assert_eq!(ids, [first, second, third], "all of them are the file");
        table.orphan(second);
        assert_eq!(
            table.ids_of(Ino(9)).collect::<Vec<_>>(),
            [third, first],
            "but not what is gone"
        );
        assert!(table.forget(second, 1).is_some() && table.forget(first, 1).is_some());
        assert_eq!(table.ids_of(Ino(9)).collect::<Vec<_>>(), [third]);
        assert_eq!(table.id_of(Ino(9)), Some(third));
    }

    #[test]
    fn the_kernel_counts_lookups_down() {
        let mut table = NodeTable::new();
        let id = table.hold(Ino(9), None);
        table.hold(Ino(9), None);
        assert!(table.forget(id, 1).is_none());
        assert!(table.forget(id, 1).is_some());
        assert!(table.forget(id, 1).is_none(), "a forget too many is ignored");
        assert!(table.forget(NodeId::ROOT, 100).is_none() && table.get(NodeId::ROOT).is_some());
    }
}
