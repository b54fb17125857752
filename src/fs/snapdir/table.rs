//! The nodes of the snapshot directory that the kernel holds.
//!
//! A node of a checkpoint has an id that is a hash of the checkpoint and the inode number there. So
//! it is the same each time, and programs that walk a tree recognize hard links and directories,
//! also after the kernel sent FORGET. If two held nodes have the same hash, the second gets the
//! next free id. The file before an edit has an id from the path, the number and the time of the
//! edit. If an edit was dropped and a new one has its path and number, that is another node.
//!
//! The tree of another head changes, and the kernel keeps pages and listings until a node is gone.
//! So a file there has a new id after each change, and a directory if its mtime would not show that
//! it changed. An id is **retired** when the kernel may have bytes of a later version under it.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::fs::Attr;
use crate::types::{FileKind, Ino, LayerId, Name, NodeId, Timestamp, TreePath};

/// The first id of nodes of checkpoints, after the fixed ids.
const FIRST: u64 = (1 << 52) + 16;
/// The first id of texts and aliases, which are numbered consecutively.
const TEXTS: u64 = (1 << 52) + (1 << 51);
/// How many of the last ids no hash gives, so that a collision at the end finds a free one.
const SPARE: u64 = 1 << 20;

/// A node of the snapshot directory.
#[derive(Clone, Debug)]
pub(super) enum Item {
    /// `.jailfs`.
    Top,
    /// `.jailfs/checkpoints`.
    Checkpoints,
    /// A text, generated when it was looked up.
    Text(Arc<[u8]>, Timestamp),
    /// A symbolic link from the number of a checkpoint to its name.
    Alias(Arc<[u8]>, Timestamp),
    /// A node of a checkpoint.
    Node(CheckpointNode),
    /// The directory of a path with an edit history, or with histories below it.
    History(TreePath),
    /// A file before an edit.
    Edit(EditRef),
    /// `.jailfs/forks`.
    Forks,
    /// A node of another head.
    Fork(ForkNode),
}

impl Item {
    fn key(&self) -> Key {
        match self {
            Item::Top | Item::Checkpoints | Item::Forks | Item::Text(..) | Item::Alias(..) => {
                Key::None
            }
            Item::Fork(node) => Key::Fork(node.head.clone(), node.ino, node.version()),
            Item::Node(node) => Key::Node(node.layer, node.ino),
            Item::History(path) => Key::History(path.clone()),
            Item::Edit(edit) => Key::Edit(edit.clone()),
        }
    }
}

/// The identity of a node.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    /// Nothing but its id.
    None,
    Node(LayerId, Ino),
    History(TreePath),
    Edit(EditRef),
    Fork(OtherHead, Ino, Option<Stamp>),
}

/// A head that is not the one of the mount. A later head of the same name is another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OtherHead {
    /// Its name.
    pub name: Name,
    /// The first layer that it could write.
    pub since: LayerId,
}

/// Tells whether a node of another head has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stamp {
    pub(super) mtime: Timestamp,
    pub(super) ctime: Timestamp,
    pub(super) size: u64,
}

impl Stamp {
    pub(super) fn of(attr: &Attr) -> Stamp {
        Stamp { mtime: attr.meta.mtime, ctime: attr.meta.ctime, size: attr.size }
    }
}

/// A node of another head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ForkNode {
    pub(super) head: OtherHead,
    /// Its inode number there.
    pub(super) ino: Ino,
    pub(super) kind: FileKind,
    /// Its path in the base, if it was not copied up.
    pub(super) base: Option<TreePath>,
    /// When it was last looked up.
    pub(super) stamp: Stamp,
}

impl ForkNode {
    /// Of a file, the version that the node stands for.
    fn version(&self) -> Option<Stamp> {
        (self.kind == FileKind::File).then_some(self.stamp)
    }

    /// Its id, without collisions.
    pub(super) fn first_id(&self) -> NodeId {
        fork_id(&self.head, self.ino, self.version())
    }
}

/// The id of a node of another head, without collisions.
pub(super) fn fork_id(head: &OtherHead, ino: Ino, version: Option<Stamp>) -> NodeId {
    let all = NodeId::OF_HISTORY.0 - NodeId::OF_FORKS.0 - SPARE;
    NodeId(NodeId::OF_FORKS.0 + hash_of((head, ino, version)) % all)
}

/// A listing that the kernel may have cached, of a directory of another head.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Listing {
    /// The mtime of the directory that the kernel knew.
    under: Timestamp,
    /// The directory when it was listed; `None` if it changed meanwhile.
    of: Option<Stamp>,
}

/// An edit of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct EditRef {
    /// The path.
    pub(super) path: TreePath,
    /// The serial of the edit, which is not reused while the head is open.
    pub(super) serial: u64,
}

/// A node of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CheckpointNode {
    /// The checkpoint.
    pub(super) layer: LayerId,
    /// Its inode number there.
    pub(super) ino: Ino,
    /// Its path in the base, if it was not copied up.
    pub(super) base: Option<TreePath>,
}

struct Held {
    what: Item,
    nlookup: u64,
    /// The node gets another id at its next lookup.
    is_retired: bool,
    listing: Option<Listing>,
}

impl Held {
    fn new(what: Item) -> Held {
        Held { what, nlookup: 1, is_retired: false, listing: None }
    }

    /// Whether the kernel may go on to use this node for `what`, which has the same key.
    fn is_valid_for(&self, what: &Item) -> bool {
        let Item::Fork(node) = what else { return true };
        // The kernel recognises an old listing by the mtime of the directory alone.
        let is_old =
            |listing: Listing| listing.under == node.stamp.mtime && listing.of != Some(node.stamp);
        !self.is_retired && !self.listing.is_some_and(is_old)
    }
}

/// All nodes of the snapshot directory that the kernel holds.
#[derive(Default)]
pub(super) struct Table {
    held: HashMap<NodeId, Held>,
    /// The ids of nodes that did not get their hash, because another node held it.
    displaced: HashMap<Key, NodeId>,
    texts: u64,
}

/// The id of a node of a checkpoint, without collisions.
pub(super) fn node_id(layer: LayerId, ino: Ino) -> NodeId {
    // The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a permutation of 64 bits.
    let mut mixed = ino.0 ^ u64::from(layer.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    NodeId(FIRST + mixed % (TEXTS - FIRST))
}

fn hash_of(of: impl Hash) -> u64 {
    // The default hasher has constant keys, so the ids are the same in the next mount.
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

fn hashed_id(of: impl Hash) -> NodeId {
    let all = (1 << 53) - NodeId::OF_HISTORY.0 - SPARE;
    NodeId(NodeId::OF_HISTORY.0 + hash_of(of) % all)
}

/// The id of the directory of a path, without collisions.
pub(super) fn history_id(path: &TreePath) -> NodeId {
    if path.is_root() { NodeId::HISTORY } else { hashed_id(path.as_bytes()) }
}

/// The id of the file before an edit, without collisions.
pub(super) fn edit_id(path: &TreePath, number: u32, time: Timestamp) -> NodeId {
    hashed_id((path.as_bytes(), number, time))
}

impl Table {
    /// The node with this id; `None` if the kernel does not hold it.
    pub(super) fn get(&self, id: NodeId) -> Option<Item> {
        match id {
            NodeId::SNAPDIR => Some(Item::Top),
            NodeId::CHECKPOINTS => Some(Item::Checkpoints),
            NodeId::FORKS => Some(Item::Forks),
            NodeId::HISTORY => Some(Item::History(TreePath::root())),
            _ => self.held.get(&id).map(|held| held.what.clone()),
        }
    }

    /// Advertises a node of a checkpoint: counts one lookup and returns its id.
    pub(super) fn hold(&mut self, node: CheckpointNode) -> NodeId {
        self.hold_at(node_id(node.layer, node.ino), Item::Node(node))
    }

    /// Advertises a node whose id is `first` if no other node holds that.
    pub(super) fn hold_at(&mut self, first: NodeId, what: Item) -> NodeId {
        let key = what.key();
        let mut id = self.displaced.get(&key).copied().unwrap_or(first);
        while let Some(held) = self.held.get_mut(&id) {
            if held.what.key() == key && held.is_valid_for(&what) {
                held.nlookup += 1;
                held.what = what;
                return id;
            }
            id = NodeId(id.0 + 1);
        }
        if id != first {
            self.displaced.insert(key, id);
        }
        self.held.insert(id, Held::new(what));
        id
    }

    /// Advertises a node of another head.
    pub(super) fn hold_fork(&mut self, node: ForkNode) -> NodeId {
        self.hold_at(node.first_id(), Item::Fork(node))
    }

    /// Gives a node another id at its next lookup.
    pub(super) fn retire(&mut self, id: NodeId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.is_retired = true;
        }
    }

    /// Notes the attributes of a directory of another head that the kernel is told.
    pub(super) fn note_told(&mut self, id: NodeId, stamp: Stamp) {
        if let Some(Held { what: Item::Fork(node), .. }) = self.held.get_mut(&id) {
            node.stamp = stamp;
        }
    }

    /// Notes that a part of a directory of another head is listed. `is_begin` says that it is the
    /// first part.
    pub(super) fn note_listed(&mut self, id: NodeId, stamp: Stamp, is_begin: bool) {
        let Some(held) = self.held.get_mut(&id) else { return };
        let Item::Fork(node) = &held.what else { return };
        let under = node.stamp.mtime;
        let is_same = match held.listing {
            Some(known) if known.under == under => known.of == Some(stamp),
            Some(_) | None => is_begin,
        };
        held.listing = Some(Listing { under, of: is_same.then_some(stamp) });
    }

    /// Advertises a text or an alias. A held one with equal content keeps its id.
    pub(super) fn hold_made(&mut self, what: Item) -> NodeId {
        let same = |held: &Held| match (&held.what, &what) {
            (Item::Text(a, _), Item::Text(b, _)) | (Item::Alias(a, _), Item::Alias(b, _)) => a == b,
            _ => false,
        };
        let known =
            self.held.iter_mut().filter(|(id, _)| id.0 >= TEXTS).find(|(_, held)| same(held));
        if let Some((id, held)) = known {
            held.nlookup += 1;
            return *id;
        }
        let id = NodeId(TEXTS + self.texts);
        self.texts += 1;
        self.held.insert(id, Held::new(what));
        id
    }

    /// Subtracts `count` lookups (FORGET).
    pub(super) fn forget(&mut self, id: NodeId, count: u64) {
        let Some(held) = self.held.get_mut(&id) else { return };
        held.nlookup = held.nlookup.saturating_sub(count);
        if held.nlookup > 0 {
            return;
        }
        if let Some(held) = self.held.remove(&id) {
            let key = held.what.key();
            if self.displaced.get(&key) == Some(&id) {
                self.displaced.remove(&key);
            }
        }
    }

    /// The checkpoints of held nodes.
    pub(super) fn layers(&self) -> BTreeSet<LayerId> {
        let layer = |held: &Held| match &held.what {
            Item::Node(node) => Some(node.layer),
            Item::Top | Item::Checkpoints | Item::Text(..) | Item::Alias(..) => None,
            Item::History(_) | Item::Edit(_) | Item::Forks | Item::Fork(_) => None,
        };
        self.held.values().filter_map(layer).collect()
    }

    /// The held nodes of a checkpoint.
    pub(super) fn of_layer(&self, layer: LayerId) -> Vec<(NodeId, CheckpointNode)> {
        let of_layer = |(id, held): (&NodeId, &Held)| match &held.what {
            Item::Node(node) if node.layer == layer => Some((*id, node.clone())),
            _ => None,
        };
        self.held.iter().filter_map(of_layer).collect()
    }

    /// The number of held nodes.
    pub(super) fn count(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(layer: u32, ino: u64) -> CheckpointNode {
        CheckpointNode { layer: LayerId(layer), ino: Ino(ino), base: None }
    }

    #[test]
    fn a_node_has_the_same_id_each_time_and_another_in_each_checkpoint() {
        let mut table = Table::default();
        let id = table.hold(node(1, 9));
        assert_eq!(table.hold(node(1, 9)), id);
        assert!(
            id.is_in_snapdir() && table.hold(node(2, 9)) != id && table.hold(node(1, 10)) != id
        );
        table.forget(id, 1);
        assert!(table.get(id).is_some());
        table.forget(id, 1);
        assert!(table.get(id).is_none());
        assert_eq!(table.hold(node(1, 9)), id);
    }

    #[test]
    fn two_held_nodes_never_share_an_id() {
        let mut table = Table::default();
        let first = node_id(LayerId(1), Ino(9));
        // Another node has the hash of this one.
        table.held.insert(first, Held::new(Item::Node(node(7, 7))));
        let second = table.hold(node(1, 9));
        assert_ne!(first, second);
        table.forget(first, 1);
        assert_eq!(table.hold(node(1, 9)), second, "a held node keeps its id");
        table.forget(second, 2);
        assert_eq!(table.hold(node(1, 9)), first);
    }

    #[test]
    fn an_edit_is_another_node_than_a_dropped_one_with_its_path_and_number() {
        let mut table = Table::default();
        let path = TreePath::parse(b"a").unwrap();
        let edit = |serial| Item::Edit(EditRef { path: path.clone(), serial });
        let first = edit_id(&path, 1, Timestamp::default());
        let one = table.hold_at(first, edit(7));
        let other = table.hold_at(first, edit(8));
        assert!(one == first && other != one && one.is_in_history() && other.is_in_history());
        assert_eq!((table.hold_at(first, edit(7)), table.hold_at(first, edit(8))), (one, other));
        assert!(!node_id(LayerId(3), Ino(4)).is_in_history() && NodeId::HISTORY.is_in_snapdir());
        assert!(history_id(&path).is_in_history() && history_id(&path) != first);
        table.forget(one, 2);
        table.forget(other, 2);
        assert_eq!((table.count(), table.displaced.len()), (0, 0));
    }

    #[test]
    fn equal_texts_are_one_node_while_it_is_held() {
        let mut table = Table::default();
        let text = |text: &[u8]| Item::Text(text.into(), Timestamp::default());
        let id = table.hold_made(text(b"a"));
        assert_eq!(table.hold_made(text(b"a")), id);
        assert_ne!(table.hold_made(text(b"b")), id);
        table.forget(id, 2);
        assert!(table.get(id).is_none());
        assert_ne!(
            table.hold_made(text(b"a")),
            id,
            "an id is not reused, because the kernel may have cached its pages"
        );
    }
}
