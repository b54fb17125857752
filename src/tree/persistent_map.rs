//! An ordered map that is cheap to clone: a B+tree whose nodes are shared between clones.
//!
//! A clone copies one pointer. A change copies the nodes on the way from the root to one leaf, if
//! another map shares them. [`PersistentMap::diff`] skips shared nodes, so its cost is in
//! proportion to the difference. A node is one allocation with space for only a few more entries.
//! Appending at the end leaves full nodes behind, because most entries of a tree are created in key
//! order.
//!
//! Always true, and checked by the tests:
//! * keys ascend;
//! * all leaves have the same depth, and no leaf is empty except in an empty map;
//! * the separator of a node is greater than all keys of the nodes before it, and not greater than
//!   its own first key.

use std::cmp::Ordering;
use std::slice;
use std::sync::Arc;

/// The most entries of a node. Small in unit tests, so that few entries make a deep tree.
const CAPACITY: usize = if cfg!(test) { 6 } else { 32 };
/// A node with fewer entries is joined with a neighbour, if one node holds both.
const MIN_FILL: usize = CAPACITY / 3;
/// By how many entries the capacity of a node grows.
const GROWTH: usize = 4;

/// A map from `K` to `V`, ordered by `K`.
pub struct PersistentMap<K, V> {
    root: Arc<Node<K, V>>,
    len: usize,
}

#[derive(Clone)]
enum Node<K, V> {
    Leaf(Vec<(K, V)>),
    /// Child nodes, each with a separator that is not greater than any of its keys.
    Branch(Vec<(K, Arc<Node<K, V>>)>),
}

/// The outcome of inserting an entry into a node.
enum Inserted<K, V> {
    Replaced(V),
    Added,
    /// Added after a split: the new node on the right, with its separator.
    Split(K, Arc<Node<K, V>>),
}

impl<K, V> Clone for PersistentMap<K, V> {
    fn clone(&self) -> PersistentMap<K, V> {
        PersistentMap { root: Arc::clone(&self.root), len: self.len }
    }
}

impl<K, V> Default for PersistentMap<K, V> {
    fn default() -> PersistentMap<K, V> {
        PersistentMap { root: Arc::new(Node::Leaf(Vec::new())), len: 0 }
    }
}

impl<K, V> PersistentMap<K, V> {
    /// Whether the map has no entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// All entries, in order.
    pub fn iter(&self) -> Iter<'_, K, V> {
        self.at_or_after_by(|_| Ordering::Greater)
    }

    /// The value of the key for which `order` is [`Ordering::Equal`]. `order` compares a key with
    /// the wanted one.
    pub fn get_by(&self, order: impl Fn(&K) -> Ordering) -> Option<&V> {
        let leaf = self.leaf_by(&order).0;
        let at = leaf.binary_search_by(|(key, _)| order(key)).ok()?;
        leaf.get(at).map(|(_, value)| value)
    }

    /// The entries from the first whose key is not [`Ordering::Less`].
    pub fn at_or_after_by(&self, order: impl Fn(&K) -> Ordering) -> Iter<'_, K, V> {
        let (leaf, behind) = self.leaf_by(&order);
        let from = leaf.partition_point(|(key, _)| order(key) == Ordering::Less);
        Iter { map: self, entries: leaf.get(from..).unwrap_or_default().iter(), behind }
    }

    /// The leaf that holds a key if any does, and the separator of the node after that leaf.
    fn leaf_by(&self, order: &impl Fn(&K) -> Ordering) -> (&[(K, V)], Option<&K>) {
        let (mut node, mut behind) = (&*self.root, None);
        loop {
            match node {
                Node::Leaf(entries) => return (entries, behind),
                Node::Branch(nodes) => {
                    let at = child_by(nodes, order);
                    behind = nodes.get(at + 1).map(|(key, _)| key).or(behind);
                    let Some((_, next)) = nodes.get(at) else { return (&[], behind) };
                    node = next;
                }
            }
        }
    }
}

impl<K: Ord, V> PersistentMap<K, V> {
    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.get_by(|at| at.cmp(key))
    }

    /// Whether the key is in the map.
    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// The entries whose key is not less than `key`.
    pub fn at_or_after(&self, key: &K) -> Iter<'_, K, V> {
        self.at_or_after_by(|at| at.cmp(key))
    }

    /// The last entry whose key is not greater than `key`.
    pub fn at_or_before(&self, key: &K) -> Option<&(K, V)> {
        let (mut node, mut before) = (&*self.root, None);
        loop {
            match node {
                Node::Leaf(entries) => {
                    let end = entries.partition_point(|(at, _)| at <= key);
                    let found = end.checked_sub(1).and_then(|last| entries.get(last));
                    return found.or_else(|| before.and_then(Node::last));
                }
                Node::Branch(nodes) => {
                    let at = child_by(nodes, &|at: &K| at.cmp(key));
                    let left = at.checked_sub(1).and_then(|left| nodes.get(left));
                    before = left.map(|(_, node)| &**node).or(before);
                    node = &nodes.get(at)?.1;
                }
            }
        }
    }
}

impl<K: Ord + Clone, V: Clone> PersistentMap<K, V> {
    /// A mutable reference to the value of a key.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        // Without the check, a missing key would copy shared nodes for nothing.
        self.contains_key(key).then_some(())?;
        let mut node = Arc::make_mut(&mut self.root);
        loop {
            match node {
                Node::Leaf(entries) => {
                    let at = entries.binary_search_by(|(at, _)| at.cmp(key)).ok()?;
                    return entries.get_mut(at).map(|(_, value)| value);
                }
                Node::Branch(nodes) => {
                    let at = child_by(nodes, &|at: &K| at.cmp(key));
                    node = Arc::make_mut(&mut nodes.get_mut(at)?.1);
                }
            }
        }
    }

    /// Calls `change` with each entry, in order.
    pub fn change_all(&mut self, mut change: impl FnMut(&K, &mut V)) {
        Arc::make_mut(&mut self.root).change_all(&mut change);
    }

    /// Inserts an entry. Returns the key's previous value.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match Arc::make_mut(&mut self.root).insert(key, value, true) {
            Inserted::Replaced(before) => return Some(before),
            Inserted::Added => {}
            Inserted::Split(key, right) => {
                // No key is less than the first separator, so any key will do for it.
                let left = std::mem::replace(&mut self.root, Arc::clone(&right));
                let first = left.first().unwrap_or(&key).clone();
                self.root = Arc::new(Node::Branch(vec![(first, left), (key, right)]));
            }
        }
        self.len += 1;
        None
    }

    /// Removes an entry. Returns its value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        self.contains_key(key).then_some(())?;
        let value = Arc::make_mut(&mut self.root).remove(key)?;
        self.len -= 1;
        while let Node::Branch(nodes) = &*self.root {
            match nodes.as_slice() {
                [] => self.root = PersistentMap::default().root,
                [(_, only)] => self.root = Arc::clone(only),
                _ => break,
            }
        }
        Some(value)
    }
}

impl<K: Ord, V: PartialEq> PersistentMap<K, V> {
    /// The keys that only one of the two maps has, or whose values differ, in order. Shared nodes
    /// are skipped.
    pub fn diff<'m>(&'m self, other: &'m PersistentMap<K, V>) -> impl Iterator<Item = &'m K> {
        let is_same = Arc::ptr_eq(&self.root, &other.root);
        let walk = |map: &'m PersistentMap<K, V>| {
            if is_same { Cursor(Vec::new()) } else { Cursor::through(&map.root) }
        };
        Diff { old: walk(self), new: walk(other) }
    }
}

impl<K: Ord, V: PartialEq> PartialEq for PersistentMap<K, V> {
    fn eq(&self, other: &PersistentMap<K, V>) -> bool {
        self.diff(other).next().is_none()
    }
}

/// The index of the child that holds a key, if any does.
fn child_by<K, P>(nodes: &[(K, P)], order: &impl Fn(&K) -> Ordering) -> usize {
    nodes.partition_point(|(key, _)| order(key) != Ordering::Greater).saturating_sub(1)
}

impl<K, V> Node<K, V> {
    fn len(&self) -> usize {
        match self {
            Node::Leaf(entries) => entries.len(),
            Node::Branch(nodes) => nodes.len(),
        }
    }

    /// The separator of its first entry or child.
    fn first(&self) -> Option<&K> {
        match self {
            Node::Leaf(entries) => entries.first().map(|(key, _)| key),
            Node::Branch(nodes) => nodes.first().map(|(key, _)| key),
        }
    }

    /// The last entry below this node.
    fn last(&self) -> Option<&(K, V)> {
        match self {
            Node::Leaf(entries) => entries.last(),
            Node::Branch(nodes) => nodes.last().and_then(|(_, node)| node.last()),
        }
    }

    /// How many levels of branches are above its leaves.
    fn height(&self) -> usize {
        match self {
            Node::Leaf(_) => 0,
            Node::Branch(nodes) => 1 + nodes.first().map_or(0, |(_, node)| node.height()),
        }
    }
}

impl<K: Ord + Clone, V: Clone> Node<K, V> {
    fn change_all(&mut self, change: &mut impl FnMut(&K, &mut V)) {
        match self {
            Node::Leaf(entries) => entries.iter_mut().for_each(|(key, value)| change(key, value)),
            Node::Branch(nodes) => {
                nodes.iter_mut().for_each(|(_, node)| Arc::make_mut(node).change_all(change));
            }
        }
    }

    /// Inserts an entry. `is_last` if this node is the last of its level.
    fn insert(&mut self, key: K, value: V, is_last: bool) -> Inserted<K, V> {
        match self {
            Node::Leaf(entries) => {
                let at = entries.partition_point(|(at, _)| *at < key);
                match entries.get_mut(at) {
                    Some((there, held)) if *there == key => {
                        Inserted::Replaced(std::mem::replace(held, value))
                    }
                    _ => insert_item(entries, at, (key, value), is_last, Node::Leaf),
                }
            }
            Node::Branch(nodes) => {
                let at = child_by(nodes, &|at: &K| at.cmp(&key));
                let is_last = is_last && at + 1 == nodes.len();
                let Some((separator, node)) = nodes.get_mut(at) else {
                    nodes.push((key.clone(), Arc::new(Node::Leaf(vec![(key, value)]))));
                    return Inserted::Added;
                };
                if key < *separator {
                    separator.clone_from(&key);
                }
                match Arc::make_mut(node).insert(key, value, is_last) {
                    Inserted::Split(key, right) => {
                        insert_item(nodes, at + 1, (key, right), is_last, Node::Branch)
                    }
                    done => done,
                }
            }
        }
    }

    /// Removes an entry. A branch may be left with one child, or with none.
    fn remove(&mut self, key: &K) -> Option<V> {
        match self {
            Node::Leaf(entries) => {
                let at = entries.binary_search_by(|(at, _)| at.cmp(key)).ok()?;
                let (_, value) = entries.remove(at);
                if entries.capacity() > entries.len() + 2 * GROWTH {
                    entries.shrink_to(entries.len() + GROWTH);
                }
                Some(value)
            }
            Node::Branch(nodes) => {
                let at = child_by(nodes, &|at: &K| at.cmp(key));
                let node = Arc::make_mut(&mut nodes.get_mut(at)?.1);
                let value = node.remove(key)?;
                if node.len() == 0 {
                    nodes.remove(at);
                } else if node.len() < MIN_FILL {
                    join(nodes, at);
                }
                Some(value)
            }
        }
    }
}

/// Inserts an item into a node at `at`, and splits the node if it is full.
fn insert_item<K: Clone, V, T>(
    items: &mut Vec<(K, T)>,
    at: usize,
    item: (K, T),
    is_last: bool,
    node: impl Fn(Vec<(K, T)>) -> Node<K, V>,
) -> Inserted<K, V> {
    let insert_at = |items: &mut Vec<(K, T)>, at, item| {
        if items.len() == items.capacity() {
            items.reserve_exact(GROWTH.min(CAPACITY - items.len()));
        }
        items.insert(at, item);
    };
    if items.len() < CAPACITY {
        insert_at(items, at, item);
        return Inserted::Added;
    }
    // Appending in key order leaves full nodes behind.
    let keep = if is_last && at == items.len() { at } else { CAPACITY / 2 };
    let mut right = items.split_off(keep);
    items.shrink_to_fit();
    match at.checked_sub(keep) {
        Some(at) => insert_at(&mut right, at, item),
        None => insert_at(items, at, item),
    }
    match right.first().map(|(key, _)| key.clone()) {
        Some(first) => Inserted::Split(first, Arc::new(node(right))),
        None => Inserted::Added,
    }
}

/// Joins a node with a neighbour, if one node holds both.
fn join<K: Ord + Clone, V: Clone>(nodes: &mut Vec<(K, Arc<Node<K, V>>)>, at: usize) {
    let first = at.checked_sub(1).unwrap_or(at);
    let joined = (first..=at).find(|left| match nodes.get_mut(*left..=left + 1) {
        Some([(_, left), (_, right)]) if left.len() + right.len() <= CAPACITY - MIN_FILL => {
            match (Arc::make_mut(left), &**right) {
                (Node::Leaf(entries), Node::Leaf(more)) => append(entries, more),
                (Node::Branch(nodes), Node::Branch(more)) => append(nodes, more),
                // Impossible: all leaves have the same depth.
                (Node::Leaf(_), Node::Branch(_)) | (Node::Branch(_), Node::Leaf(_)) => {
                    return false;
                }
            }
            true
        }
        _ => false,
    });
    if let Some(left) = joined {
        nodes.remove(left + 1);
    }
}

fn append<T: Clone>(to: &mut Vec<T>, more: &[T]) {
    to.reserve_exact(more.len());
    to.extend_from_slice(more);
}

/// Iterates over entries in key order.
pub struct Iter<'m, K, V> {
    map: &'m PersistentMap<K, V>,
    entries: slice::Iter<'m, (K, V)>,
    /// Where the next leaf begins. The path to it is not stored, so iterating allocates nothing.
    behind: Option<&'m K>,
}

impl<'m, K: Ord, V> Iterator for Iter<'m, K, V> {
    type Item = (&'m K, &'m V);

    fn next(&mut self) -> Option<(&'m K, &'m V)> {
        loop {
            if let Some((key, value)) = self.entries.next() {
                return Some((key, value));
            }
            let behind = self.behind?;
            let (leaf, next) = self.map.leaf_by(&|at: &K| at.cmp(behind));
            (self.entries, self.behind) = (leaf.iter(), next);
        }
    }
}

impl<'m, K: Ord, V> IntoIterator for &'m PersistentMap<K, V> {
    type Item = (&'m K, &'m V);
    type IntoIter = Iter<'m, K, V>;

    fn into_iter(self) -> Iter<'m, K, V> {
        self.iter()
    }
}

/// The rest of a map during a walk, the nearest part last.
struct Cursor<'m, K, V>(Vec<Ahead<'m, K, V>>);

enum Ahead<'m, K, V> {
    Entries(&'m [(K, V)]),
    /// Child nodes, and the height of each.
    Nodes(&'m [(K, Arc<Node<K, V>>)], usize),
}

/// The next item of a walk.
enum Next<'m, K, V> {
    Entry(&'m K, &'m V),
    Node(&'m K, &'m Arc<Node<K, V>>, usize),
}

impl<'m, K, V> Cursor<'m, K, V> {
    fn through(root: &'m Node<K, V>) -> Cursor<'m, K, V> {
        let mut walk = Cursor(Vec::new());
        walk.enter(root, root.height());
        walk
    }

    fn enter(&mut self, node: &'m Node<K, V>, height: usize) {
        self.0.push(match node {
            Node::Leaf(entries) => Ahead::Entries(entries),
            Node::Branch(nodes) => Ahead::Nodes(nodes, height.saturating_sub(1)),
        });
    }

    fn peek(&mut self) -> Option<Next<'m, K, V>> {
        loop {
            match self.0.last()? {
                Ahead::Entries([(key, value), ..]) => return Some(Next::Entry(key, value)),
                Ahead::Nodes([(key, node), ..], height) => {
                    return Some(Next::Node(key, node, *height));
                }
                Ahead::Entries([]) | Ahead::Nodes([], _) => drop(self.0.pop()),
            }
        }
    }

    /// Skips the next item as a whole.
    fn pass(&mut self) {
        match self.0.last_mut() {
            Some(Ahead::Entries(entries)) => *entries = entries.get(1..).unwrap_or_default(),
            Some(Ahead::Nodes(nodes, _)) => *nodes = nodes.get(1..).unwrap_or_default(),
            None => {}
        }
    }

    /// Descends into the next node.
    fn open(&mut self, node: &'m Node<K, V>, height: usize) {
        self.pass();
        self.enter(node, height);
    }
}

struct Diff<'m, K, V> {
    old: Cursor<'m, K, V>,
    new: Cursor<'m, K, V>,
}

impl<'m, K: Ord, V: PartialEq> Iterator for Diff<'m, K, V> {
    type Item = &'m K;

    fn next(&mut self) -> Option<&'m K> {
        use Next::{Entry, Node};
        let (old, new) = (&mut self.old, &mut self.new);
        loop {
            match (old.peek(), new.peek()) {
                (None, None) => return None,
                (Some(Node(_, a, _)), Some(Node(_, b, _))) if Arc::ptr_eq(a, b) => {
                    old.pass();
                    new.pass();
                }
                (Some(Node(a_key, a, a_height)), Some(Node(b_key, b, b_height))) => {
                    // Descend into the higher node, so that shared nodes meet. Of equally high
                    // nodes, descend into the one that begins first.
                    let first = a_height.cmp(&b_height).reverse().then_with(|| a_key.cmp(b_key));
                    if first.is_le() {
                        old.open(a, a_height);
                    }
                    if first.is_ge() {
                        new.open(b, b_height);
                    }
                }
                (Some(Entry(a, a_value)), Some(Entry(b, b_value))) => {
                    let order = a.cmp(b);
                    if order.is_le() {
                        old.pass();
                    }
                    if order.is_ge() {
                        new.pass();
                    }
                    if order.is_ne() || a_value != b_value {
                        return Some(a.min(b));
                    }
                }
                // An entry less than a separator is not in that node.
                (Some(Entry(a, _)), Some(Node(b, ..))) if a < b => {
                    old.pass();
                    return Some(a);
                }
                (Some(Node(a, ..)), Some(Entry(b, _))) if b < a => {
                    new.pass();
                    return Some(b);
                }
                (Some(Node(_, a, height)), _) => old.open(a, height),
                (_, Some(Node(_, b, height))) => new.open(b, height),
                (Some(Entry(a, _)), None) => {
                    old.pass();
                    return Some(a);
                }
                (None, Some(Entry(b, _))) => {
                    new.pass();
                    return Some(b);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
