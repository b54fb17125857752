//! The nodes of the past that the kernel holds.
//!
//! A node of a checkpoint has a number that is made of the checkpoint and of its own number, always the same one: programs
//! that walk a tree find hard links and directories again by it, also if the kernel has let go of the node meanwhile. It is a
//! hash; where two nodes that are held at once meet in one number, the second gets the next free one. So it is with the
//! versions of files: theirs is made of the path, the number and the time of the version, and a version that got the path and the
//! number of one that was given up is another node.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::types::{Ino, LayerId, NodeId, Timestamp, TreePath};

/// The numbers of nodes of checkpoints begin here, behind the fixed ones.
const FIRST: u64 = (1 << 52) + 16;
/// Those of texts begin here, one after the other.
const TEXTS: u64 = (1 << 52) + (1 << 51);
/// Numbers that no hash gives stand at the end, for those that meet in the last one.
const SPARE: u64 = 1 << 20;

/// A node of the past.
#[derive(Clone, Debug)]
pub(super) enum What {
    /// `.jailfs`.
    Top,
    /// `.jailfs/checkpoints`.
    Checkpoints,
    /// A file whose text was made when it was looked up.
    Text(Arc<[u8]>, Timestamp),
    /// A link from one name of a checkpoint to another.
    Alias(Arc<[u8]>, Timestamp),
    /// A node of a checkpoint.
    Node(Node),
    /// The directory of a path that has versions, or below which something has some.
    Path(TreePath),
    /// A version of a file.
    Version(Version),
}

impl What {
    fn key(&self) -> Key {
        match self {
            What::Top | What::Checkpoints | What::Text(..) | What::Alias(..) => Key::None,
            What::Node(node) => Key::Node(node.layer, node.ino),
            What::Path(path) => Key::Path(path.clone()),
            What::Version(version) => Key::Version(version.clone()),
        }
    }
}

/// By what a node is found again.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    /// By nothing but its id.
    None,
    Node(LayerId, Ino),
    Path(TreePath),
    Version(Version),
}

/// A version of a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Version {
    /// Whose version.
    pub(super) path: TreePath,
    /// Which one: no other has it while the head is open.
    pub(super) serial: u64,
}

/// A node of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// Which checkpoint.
    pub(super) layer: LayerId,
    /// Its number there.
    pub(super) ino: Ino,
    /// Its path in the base, if it is not in the tree.
    pub(super) base: Option<TreePath>,
}

struct Held {
    what: What,
    nlookup: u64,
}

/// All nodes of the past that the kernel holds.
#[derive(Default)]
pub(super) struct Table {
    held: HashMap<NodeId, Held>,
    /// Only of nodes whose number was another's.
    displaced: HashMap<Key, NodeId>,
    texts: u64,
}

/// The number of a node of a checkpoint.
pub(super) fn number(layer: LayerId, ino: Ino) -> NodeId {
    // The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a permutation of 64 bits, of which 51 are taken.
    let mut mixed = ino.0 ^ u64::from(layer.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    NodeId(FIRST + mixed % (TEXTS - FIRST))
}

fn number_of_history(of: impl Hash) -> NodeId {
    // Always the same keys: the numbers stay what they are when it is mounted again.
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    let all = (1 << 53) - NodeId::OF_HISTORY.0 - SPARE;
    NodeId(NodeId::OF_HISTORY.0 + hasher.finish() % all)
}

/// The number of the directory of a path.
pub(super) fn number_of_path(path: &TreePath) -> NodeId {
    if path.is_root() { NodeId::HISTORY } else { number_of_history(path.as_bytes()) }
}

/// The number of a version of a path.
pub(super) fn number_of_version(path: &TreePath, number: u32, time: Timestamp) -> NodeId {
    number_of_history((path.as_bytes(), number, time))
}

impl Table {
    /// What is behind an id; none for one that was never given out.
    pub(super) fn get(&self, id: NodeId) -> Option<What> {
        match id {
            NodeId::SNAPDIR => Some(What::Top),
            NodeId::CHECKPOINTS => Some(What::Checkpoints),
            NodeId::HISTORY => Some(What::Path(TreePath::root())),
            _ => self.held.get(&id).map(|held| held.what.clone()),
        }
    }

    /// Hands a node of a checkpoint out once more.
    pub(super) fn hold(&mut self, node: Node) -> NodeId {
        self.hold_at(number(node.layer, node.ino), What::Node(node))
    }

    /// Hands a node out once more whose number should be `first`.
    pub(super) fn hold_at(&mut self, first: NodeId, what: What) -> NodeId {
        let key = what.key();
        let mut id = self.displaced.get(&key).copied().unwrap_or(first);
        while let Some(held) = self.held.get_mut(&id) {
            if held.what.key() == key {
                held.nlookup += 1;
                held.what = what;
                return id;
            }
            id = NodeId(id.0 + 1);
        }
        if id != first {
            self.displaced.insert(key, id);
        }
        self.held.insert(id, Held { what, nlookup: 1 });
        id
    }

    /// Hands out a text or a link that is made for this lookup; the number of the last one if it says the same.
    pub(super) fn hold_made(&mut self, what: What) -> NodeId {
        let same = |held: &Held| match (&held.what, &what) {
            (What::Text(a, _), What::Text(b, _)) | (What::Alias(a, _), What::Alias(b, _)) => a == b,
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
        self.held.insert(id, Held { what, nlookup: 1 });
        id
    }

    /// Takes back `count` of what was handed out.
    pub(super) fn forget(&mut self, id: NodeId, count: u64) {
        let Some(held) = self.held.get_mut(&id) else { return };
        held.nlookup = held.nlookup.saturating_sub(count);
        if held.nlookup > 0 {
            return;
        }
        if let Some(held) = self.held.remove(&id) {
            self.displaced.remove(&held.what.key());
        }
    }

    /// The checkpoints of which some are held.
    pub(super) fn layers(&self) -> BTreeSet<LayerId> {
        let layer = |held: &Held| match &held.what {
            What::Node(node) => Some(node.layer),
            What::Top | What::Checkpoints | What::Text(..) | What::Alias(..) => None,
            What::Path(_) | What::Version(_) => None,
        };
        self.held.values().filter_map(layer).collect()
    }

    /// Those of a checkpoint that are held.
    pub(super) fn of_layer(&self, layer: LayerId) -> Vec<(NodeId, Node)> {
        let of_layer = |(id, held): (&NodeId, &Held)| match &held.what {
            What::Node(node) if node.layer == layer => Some((*id, node.clone())),
            _ => None,
        };
        self.held.iter().filter_map(of_layer).collect()
    }

    /// How many are held.
    pub(super) fn count(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(layer: u32, ino: u64) -> Node {
        Node { layer: LayerId(layer), ino: Ino(ino), base: None }
    }

    #[test]
    fn a_node_has_the_same_number_each_time_and_another_in_each_checkpoint() {
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
    fn two_nodes_never_share_a_number_while_they_are_held() {
        let mut table = Table::default();
        let first = number(LayerId(1), Ino(9));
        // Another node stands where this one should.
        table.held.insert(first, Held { what: What::Node(node(7, 7)), nlookup: 1 });
        let second = table.hold(node(1, 9));
        assert_ne!(first, second);
        table.forget(first, 1);
        assert_eq!(table.hold(node(1, 9)), second, "it keeps the number that it was given");
        table.forget(second, 2);
        assert_eq!(table.hold(node(1, 9)), first);
    }

    #[test]
    fn a_version_is_another_node_than_one_that_had_its_path_and_number() {
        let mut table = Table::default();
        let path = TreePath::parse(b"a").unwrap();
        let version = |serial| What::Version(Version { path: path.clone(), serial });
        let first = number_of_version(&path, 1, Timestamp::default());
        let one = table.hold_at(first, version(7));
        let other = table.hold_at(first, version(8));
        assert!(one == first && other != one && one.is_in_history() && other.is_in_history());
        assert_eq!(
            (table.hold_at(first, version(7)), table.hold_at(first, version(8))),
            (one, other)
        );
        assert!(!number(LayerId(3), Ino(4)).is_in_history() && NodeId::HISTORY.is_in_snapdir());
        assert!(number_of_path(&path).is_in_history() && number_of_path(&path) != first);
        table.forget(one, 2);
        table.forget(other, 2);
        assert_eq!((table.count(), table.displaced.len()), (0, 0));
    }

    #[test]
    fn a_text_is_one_node_as_long_as_it_says_the_same() {
        let mut table = Table::default();
        let text = |text: &[u8]| What::Text(text.into(), Timestamp::default());
        let id = table.hold_made(text(b"a"));
        assert_eq!(table.hold_made(text(b"a")), id);
        assert_ne!(table.hold_made(text(b"b")), id);
        table.forget(id, 2);
        assert!(table.get(id).is_none());
        assert_ne!(
            table.hold_made(text(b"a")),
            id,
            "what the kernel remembers of a number stays true"
        );
    }
}
