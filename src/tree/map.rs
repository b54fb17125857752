//! An ordered map that is cheap to clone: a B+tree whose parts are shared between clones.
//!
//! A clone copies one pointer; a change copies the parts from the root to one leaf, those that something else holds as
//! well; [`Map::diff`] passes over what both maps share, so it costs what differs. A part is one allocation that is no
//! larger than what is in it, and what is put in behind all that is there leaves full parts behind: most of what a tree
//! holds is made in the order of its numbers.
//!
//! Always true, and checked by its tests: keys ascend; all leaves are equally deep, and none is empty but that of an
//! empty map; the key beside a part is behind all keys of the parts before it, and not behind the first of its own.

use std::cmp::Ordering;
use std::slice;
use std::sync::Arc;

/// Most entries of a part. Small in unit tests, so that few entries make a deep tree.
const MOST: usize = if cfg!(test) { 6 } else { 32 };
/// A part with fewer is joined with a neighbour, if both together leave room.
const FEW: usize = MOST / 3;
/// By how many entries the room of a part grows.
const STEP: usize = 4;

/// A map from `K` to `V`, in the order of `K`.
pub struct Map<K, V> {
    root: Arc<Part<K, V>>,
    len: usize,
}

#[derive(Clone)]
enum Part<K, V> {
    Leaf(Vec<(K, V)>),
    /// Parts, each with a key that is not behind any of its keys.
    Branch(Vec<(K, Arc<Part<K, V>>)>),
}

/// What became of an entry that was put into a part.
enum Put<K, V> {
    Replaced(V),
    Added,
    /// Added, and the part had no room: what is now in a part behind it.
    Split(K, Arc<Part<K, V>>),
}

impl<K, V> Clone for Map<K, V> {
    fn clone(&self) -> Map<K, V> {
        Map { root: Arc::clone(&self.root), len: self.len }
    }
}

impl<K, V> Default for Map<K, V> {
    fn default() -> Map<K, V> {
        Map { root: Arc::new(Part::Leaf(Vec::new())), len: 0 }
    }
}

impl<K, V> Map<K, V> {
    /// Whether there is nothing in it.
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

    /// The value of the key that is [`Ordering::Equal`]; `order` says how a key stands to what is looked for.
    pub fn get_by(&self, order: impl Fn(&K) -> Ordering) -> Option<&V> {
        let leaf = self.leaf_by(&order).0;
        let at = leaf.binary_search_by(|(key, _)| order(key)).ok()?;
        leaf.get(at).map(|(_, value)| value)
    }

    /// The entries from the first on that is not [`Ordering::Less`].
    pub fn at_or_after_by(&self, order: impl Fn(&K) -> Ordering) -> Iter<'_, K, V> {
        let (leaf, behind) = self.leaf_by(&order);
        let from = leaf.partition_point(|(key, _)| order(key) == Ordering::Less);
        Iter { map: self, entries: leaf.get(from..).unwrap_or_default().iter(), behind }
    }

    /// The leaf in which a key is, if it is anywhere, and the key beside the part that follows it.
    fn leaf_by(&self, order: &impl Fn(&K) -> Ordering) -> (&[(K, V)], Option<&K>) {
        let (mut part, mut behind) = (&*self.root, None);
        loop {
            match part {
                Part::Leaf(entries) => return (entries, behind),
                Part::Branch(parts) => {
                    let at = child_by(parts, order);
                    behind = parts.get(at + 1).map(|(key, _)| key).or(behind);
                    let Some((_, next)) = parts.get(at) else { return (&[], behind) };
                    part = next;
                }
            }
        }
    }
}

impl<K: Ord, V> Map<K, V> {
    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.get_by(|at| at.cmp(key))
    }

    /// Whether there is such a key.
    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// The entries whose key is not before `key`.
    pub fn at_or_after(&self, key: &K) -> Iter<'_, K, V> {
        self.at_or_after_by(|at| at.cmp(key))
    }

    /// The last entry whose key is not behind `key`.
    pub fn at_or_before(&self, key: &K) -> Option<&(K, V)> {
        let (mut part, mut before) = (&*self.root, None);
        loop {
            match part {
                Part::Leaf(entries) => {
                    let end = entries.partition_point(|(at, _)| at <= key);
                    let found = end.checked_sub(1).and_then(|last| entries.get(last));
                    return found.or_else(|| before.and_then(Part::last));
                }
                Part::Branch(parts) => {
                    let at = child_by(parts, &|at: &K| at.cmp(key));
                    let left = at.checked_sub(1).and_then(|left| parts.get(left));
                    before = left.map(|(_, part)| &**part).or(before);
                    part = &parts.get(at)?.1;
                }
            }
        }
    }
}

impl<K: Ord + Clone, V: Clone> Map<K, V> {
    /// The value of a key, to be changed.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        // What is not there is nothing to copy parts for.
        self.contains_key(key).then_some(())?;
        let mut part = Arc::make_mut(&mut self.root);
        loop {
            match part {
                Part::Leaf(entries) => {
                    let at = entries.binary_search_by(|(at, _)| at.cmp(key)).ok()?;
                    return entries.get_mut(at).map(|(_, value)| value);
                }
                Part::Branch(parts) => {
                    let at = child_by(parts, &|at: &K| at.cmp(key));
                    part = Arc::make_mut(&mut parts.get_mut(at)?.1);
                }
            }
        }
    }

    /// Puts an entry in; the value that the key had.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match Arc::make_mut(&mut self.root).insert(key, value, true) {
            Put::Replaced(before) => return Some(before),
            Put::Added => {}
            Put::Split(key, right) => {
                // Nothing is before the first part, so whatever key is there stands beside it.
                let left = std::mem::replace(&mut self.root, Arc::clone(&right));
                let first = left.first().unwrap_or(&key).clone();
                self.root = Arc::new(Part::Branch(vec![(first, left), (key, right)]));
            }
        }
        self.len += 1;
        None
    }

    /// Takes an entry out; its value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        self.contains_key(key).then_some(())?;
        let value = Arc::make_mut(&mut self.root).remove(key)?;
        self.len -= 1;
        while let Part::Branch(parts) = &*self.root {
            match parts.as_slice() {
                [] => self.root = Map::default().root,
                [(_, only)] => self.root = Arc::clone(only),
                _ => break,
            }
        }
        Some(value)
    }
}

impl<K: Ord, V: PartialEq> Map<K, V> {
    /// The keys that only one of two maps has, or to which they have different values, in order. What both share is
    /// passed over.
    pub fn diff<'m>(&'m self, other: &'m Map<K, V>) -> impl Iterator<Item = &'m K> {
        let is_same = Arc::ptr_eq(&self.root, &other.root);
        let walk = |map: &'m Map<K, V>| if is_same { Walk(Vec::new()) } else { Walk::through(&map.root) };
        Diff { old: walk(self), new: walk(other) }
    }
}

impl<K: Ord, V: PartialEq> PartialEq for Map<K, V> {
    fn eq(&self, other: &Map<K, V>) -> bool {
        self.diff(other).next().is_none()
    }
}

/// Which of several parts has a key, if any has.
fn child_by<K, P>(parts: &[(K, P)], order: &impl Fn(&K) -> Ordering) -> usize {
    parts.partition_point(|(key, _)| order(key) != Ordering::Greater).saturating_sub(1)
}

impl<K, V> Part<K, V> {
    fn len(&self) -> usize {
        match self {
            Part::Leaf(entries) => entries.len(),
            Part::Branch(parts) => parts.len(),
        }
    }

    /// The key beside its first entry or part.
    fn first(&self) -> Option<&K> {
        match self {
            Part::Leaf(entries) => entries.first().map(|(key, _)| key),
            Part::Branch(parts) => parts.first().map(|(key, _)| key),
        }
    }

    /// The last entry of all that is in it.
    fn last(&self) -> Option<&(K, V)> {
        match self {
            Part::Leaf(entries) => entries.last(),
            Part::Branch(parts) => parts.last().and_then(|(_, part)| part.last()),
        }
    }

    /// How many branches are above its leaves.
    fn height(&self) -> usize {
        match self {
            Part::Leaf(_) => 0,
            Part::Branch(parts) => 1 + parts.first().map_or(0, |(_, part)| part.height()),
        }
    }
}

impl<K: Ord + Clone, V: Clone> Part<K, V> {
    /// Puts an entry in. `is_last` says that nothing is behind this part.
    fn insert(&mut self, key: K, value: V, is_last: bool) -> Put<K, V> {
        match self {
            Part::Leaf(entries) => {
                let at = entries.partition_point(|(at, _)| *at < key);
                match entries.get_mut(at) {
                    Some((there, held)) if *there == key => Put::Replaced(std::mem::replace(held, value)),
                    _ => put(entries, at, (key, value), is_last, Part::Leaf),
                }
            }
            Part::Branch(parts) => {
                let at = child_by(parts, &|at: &K| at.cmp(&key));
                let is_last = is_last && at + 1 == parts.len();
                let Some((beside, part)) = parts.get_mut(at) else {
                    parts.push((key.clone(), Arc::new(Part::Leaf(vec![(key, value)]))));
                    return Put::Added;
                };
                if key < *beside {
                    beside.clone_from(&key);
                }
                match Arc::make_mut(part).insert(key, value, is_last) {
                    Put::Split(key, right) => put(parts, at + 1, (key, right), is_last, Part::Branch),
                    done => done,
                }
            }
        }
    }

    /// Takes an entry out. A branch may be left with one part, or with none.
    fn remove(&mut self, key: &K) -> Option<V> {
        match self {
            Part::Leaf(entries) => {
                let at = entries.binary_search_by(|(at, _)| at.cmp(key)).ok()?;
                let (_, value) = entries.remove(at);
                if entries.capacity() > entries.len() + 2 * STEP {
                    entries.shrink_to(entries.len() + STEP);
                }
                Some(value)
            }
            Part::Branch(parts) => {
                let at = child_by(parts, &|at: &K| at.cmp(key));
                let part = Arc::make_mut(&mut parts.get_mut(at)?.1);
                let value = part.remove(key)?;
                if part.len() == 0 {
                    parts.remove(at);
                } else if part.len() < FEW {
                    join(parts, at);
                }
                Some(value)
            }
        }
    }
}

/// Puts an item where it belongs among those of a part, which is split if there is no room.
fn put<K: Clone, V, T>(
    items: &mut Vec<(K, T)>,
    at: usize,
    item: (K, T),
    is_last: bool,
    part: impl Fn(Vec<(K, T)>) -> Part<K, V>,
) -> Put<K, V> {
    let put_in = |items: &mut Vec<(K, T)>, at, item| {
        if items.len() == items.capacity() {
            items.reserve_exact(STEP.min(MOST - items.len()));
        }
        items.insert(at, item);
    };
    if items.len() < MOST {
        put_in(items, at, item);
        return Put::Added;
    }
    // What is made in order leaves full parts behind.
    let keep = if is_last && at == items.len() { at } else { MOST / 2 };
    let mut right = items.split_off(keep);
    items.shrink_to_fit();
    match at.checked_sub(keep) {
        Some(at) => put_in(&mut right, at, item),
        None => put_in(items, at, item),
    }
    match right.first().map(|(key, _)| key.clone()) {
        Some(first) => Put::Split(first, Arc::new(part(right))),
        None => Put::Added,
    }
}

/// Joins a part with one beside it, if both together leave room.
fn join<K: Ord + Clone, V: Clone>(parts: &mut Vec<(K, Arc<Part<K, V>>)>, at: usize) {
    let first = at.checked_sub(1).unwrap_or(at);
    let joined = (first..=at).find(|left| match parts.get_mut(*left..=left + 1) {
        Some([(_, left), (_, right)]) if left.len() + right.len() <= MOST - FEW => {
            match (Arc::make_mut(left), &**right) {
                (Part::Leaf(entries), Part::Leaf(more)) => append(entries, more),
                (Part::Branch(parts), Part::Branch(more)) => append(parts, more),
                // Never so: all leaves are equally deep.
                (Part::Leaf(_), Part::Branch(_)) | (Part::Branch(_), Part::Leaf(_)) => return false,
            }
            true
        }
        _ => false,
    });
    if let Some(left) = joined {
        parts.remove(left + 1);
    }
}

fn append<T: Clone>(to: &mut Vec<T>, more: &[T]) {
    to.reserve_exact(more.len());
    to.extend_from_slice(more);
}

/// Entries of a map from one on, in order.
pub struct Iter<'m, K, V> {
    map: &'m Map<K, V>,
    entries: slice::Iter<'m, (K, V)>,
    /// Where to go on behind them: nothing is kept of the way here, so nothing is allocated.
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

impl<'m, K: Ord, V> IntoIterator for &'m Map<K, V> {
    type Item = (&'m K, &'m V);
    type IntoIter = Iter<'m, K, V>;

    fn into_iter(self) -> Iter<'m, K, V> {
        self.iter()
    }
}

/// What of a map is still ahead, the nearest last.
struct Walk<'m, K, V>(Vec<Ahead<'m, K, V>>);

enum Ahead<'m, K, V> {
    Entries(&'m [(K, V)]),
    /// Parts, and how many branches are above the leaves of each.
    Parts(&'m [(K, Arc<Part<K, V>>)], usize),
}

/// What comes next of a map.
enum Next<'m, K, V> {
    Entry(&'m K, &'m V),
    Part(&'m K, &'m Arc<Part<K, V>>, usize),
}

impl<'m, K, V> Walk<'m, K, V> {
    fn through(root: &'m Part<K, V>) -> Walk<'m, K, V> {
        let mut walk = Walk(Vec::new());
        walk.enter(root, root.height());
        walk
    }

    fn enter(&mut self, part: &'m Part<K, V>, height: usize) {
        self.0.push(match part {
            Part::Leaf(entries) => Ahead::Entries(entries),
            Part::Branch(parts) => Ahead::Parts(parts, height.saturating_sub(1)),
        });
    }

    fn peek(&mut self) -> Option<Next<'m, K, V>> {
        loop {
            match self.0.last()? {
                Ahead::Entries([(key, value), ..]) => return Some(Next::Entry(key, value)),
                Ahead::Parts([(key, part), ..], height) => return Some(Next::Part(key, part, *height)),
                Ahead::Entries([]) | Ahead::Parts([], _) => drop(self.0.pop()),
            }
        }
    }

    /// Goes past what comes next, as a whole.
    fn pass(&mut self) {
        match self.0.last_mut() {
            Some(Ahead::Entries(entries)) => *entries = entries.get(1..).unwrap_or_default(),
            Some(Ahead::Parts(parts, _)) => *parts = parts.get(1..).unwrap_or_default(),
            None => {}
        }
    }

    /// Goes into the part that comes next.
    fn open(&mut self, part: &'m Part<K, V>, height: usize) {
        self.pass();
        self.enter(part, height);
    }
}

struct Diff<'m, K, V> {
    old: Walk<'m, K, V>,
    new: Walk<'m, K, V>,
}

impl<'m, K: Ord, V: PartialEq> Iterator for Diff<'m, K, V> {
    type Item = &'m K;

    fn next(&mut self) -> Option<&'m K> {
        use Next::{Entry, Part};
        let (old, new) = (&mut self.old, &mut self.new);
        loop {
            match (old.peek(), new.peek()) {
                (None, None) => return None,
                (Some(Part(_, a, _)), Some(Part(_, b, _))) if Arc::ptr_eq(a, b) => {
                    old.pass();
                    new.pass();
                }
                (Some(Part(a_key, a, a_height)), Some(Part(b_key, b, b_height))) => {
                    // The higher one first, so that what is shared meets its like; of equal ones what begins first.
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
                // An entry before a part is in nothing of it.
                (Some(Entry(a, _)), Some(Part(b, ..))) if a < b => {
                    old.pass();
                    return Some(a);
                }
                (Some(Part(a, ..)), Some(Entry(b, _))) if b < a => {
                    new.pass();
                    return Some(b);
                }
                (Some(Part(_, a, height)), _) => old.open(a, height),
                (_, Some(Part(_, b, height))) => new.open(b, height),
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
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl<K: Ord, V> Map<K, V> {
        /// Holds the map against what is always true of it.
        fn verify(&self) -> Result<(), String> {
            let mut keys = self.iter().map(|(key, _)| key);
            let Some(mut before) = keys.next() else { return Ok(()) };
            for key in keys {
                if before >= key {
                    return Err("keys do not ascend".to_owned());
                }
                before = key;
            }
            if self.iter().count() != self.len {
                return Err(format!("{} entries, of which {} are found", self.len, self.iter().count()));
            }
            self.root.verify(self.root.height(), None, None)
        }
    }

    impl<K: Ord, V> Part<K, V> {
        /// `from` and `to` are the keys beside this part and the next.
        fn verify(&self, height: usize, from: Option<&K>, to: Option<&K>) -> Result<(), String> {
            let is_within = |key: &K| from.is_none_or(|from| from <= key) && to.is_none_or(|to| key < to);
            match self {
                _ if self.len() == 0 || self.len() > MOST => Err(format!("a part of {}", self.len())),
                Part::Leaf(_) if height != 0 => Err("leaves are not equally deep".to_owned()),
                Part::Leaf(entries) if entries.iter().all(|(key, _)| is_within(key)) => Ok(()),
                Part::Leaf(_) => Err("a key is not in the part where it is looked for".to_owned()),
                Part::Branch(parts) => parts.iter().enumerate().try_for_each(|(at, (key, part))| {
                    let next = parts.get(at + 1).map(|(key, _)| key).or(to);
                    part.verify(height.saturating_sub(1), Some(key), next)
                }),
            }
        }
    }

    /// A map and what it should be; steps in runs, so that parts fill, empty and are joined.
    #[derive(Clone, Default)]
    struct Both {
        map: Map<u16, u8>,
        model: BTreeMap<u16, u8>,
    }

    impl Both {
        fn step(&mut self, (what, key, run, value): (u8, u16, u16, u8)) {
            for key in key..key + run {
                let (done, expected) = match what {
                    0..3 => (self.map.insert(key, value), self.model.insert(key, value)),
                    3 => {
                        let key = key + run - 1 - (key % run.max(1));
                        (self.map.insert(key, value), self.model.insert(key, value))
                    }
                    4 => {
                        let change = |held: &mut u8| std::mem::replace(held, value);
                        (self.map.get_mut(&key).map(change), self.model.get_mut(&key).map(change))
                    }
                    _ => (self.map.remove(&key), self.model.remove(&key)),
                };
                assert_eq!(done, expected);
            }
        }

        fn check(&self) {
            self.map.verify().unwrap();
            assert!(self.map.iter().eq(&self.model));
            assert_eq!(self.map.len(), self.model.len());
            for key in 0..420 {
                assert_eq!(self.map.get(&key), self.model.get(&key));
                let before = self.model.range(..=key).next_back();
                assert_eq!(self.map.at_or_before(&key).map(|(key, value)| (key, value)), before);
                let behind = self.model.range(key..).take(9);
                assert!(self.map.at_or_after(&key).take(9).eq(behind));
            }
        }

        fn check_diff(&self, other: &Both) {
            let keys: std::collections::BTreeSet<_> = self.model.keys().chain(other.model.keys()).collect();
            let differs = |key: &&u16| self.model.get(key) != other.model.get(key);
            assert!(self.map.diff(&other.map).eq(keys.into_iter().filter(differs)));
            assert_eq!(self.map == other.map, self.model == other.model);
        }
    }

    fn steps(most: usize) -> impl Strategy<Value = Vec<(u8, u16, u16, u8)>> {
        proptest::collection::vec((0u8..8, 0u16..360, 0u16..60, 0u8..3), 0..most)
    }

    proptest! {
        #[test]
        fn a_map_is_what_a_map_of_the_standard_library_is(first in steps(30), then in steps(20), aside in steps(20)) {
            let mut was = Both::default();
            first.into_iter().for_each(|step| was.step(step));
            was.check();
            let (mut one, mut other) = (was.clone(), was.clone());
            then.into_iter().for_each(|step| one.step(step));
            aside.into_iter().for_each(|step| other.step(step));
            for state in [&was, &one, &other] {
                state.check();
            }
            for (from, to) in [(&was, &one), (&one, &was), (&one, &other), (&Both::default(), &one), (&one, &one)] {
                from.check_diff(to);
            }
        }
    }

    #[test]
    fn what_is_made_in_order_fills_its_parts() {
        let mut map = Map::default();
        for key in 0..1_000 {
            map.insert(key, ());
        }
        let mut leaves = 0;
        let mut from = Some(0);
        while let Some(key) = from {
            let (leaf, behind) = map.leaf_by(&|at: &i32| at.cmp(&key));
            assert!(leaf.len() == MOST || behind.is_none(), "{} of {MOST} in a leaf", leaf.len());
            (leaves, from) = (leaves + 1, behind.copied());
        }
        assert_eq!(leaves, 1_000usize.div_ceil(MOST));
    }

    /// A value that counts how often it is compared.
    struct Counted<'c>(&'c std::cell::Cell<usize>);

    impl Clone for Counted<'_> {
        fn clone(&self) -> Self {
            Counted(self.0)
        }
    }

    impl PartialEq for Counted<'_> {
        fn eq(&self, _: &Self) -> bool {
            self.0.set(self.0.get() + 1);
            true
        }
    }

    #[test]
    fn a_diff_costs_what_differs() {
        let compared = std::cell::Cell::new(0);
        let mut map: Map<u32, Counted<'_>> = Map::default();
        for key in 0..10_000 {
            map.insert(key * 2, Counted(&compared));
        }
        let was = map.clone();
        let same: Vec<&u32> = was.diff(&map).collect();
        assert_eq!((same.len(), compared.get()), (0, 0), "a clone is not looked at");
        map.remove(&4_000);
        map.insert(4_001, Counted(&compared));
        // Long enough to split parts at every height.
        for key in 0..200 {
            map.insert(10_001 + 2 * key, Counted(&compared));
        }
        assert_eq!(was.diff(&map).count(), 202);
        let touched = (200 + 4 * MOST) * 2;
        assert!(compared.get() <= touched, "{} values compared for 202 that differ", compared.get());
    }
}
