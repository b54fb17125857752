//! Tests of the map against the standard library's ordered map.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

impl<K: Ord, V> PersistentMap<K, V> {
    /// Checks the invariants of the map.
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
            return Err(format!("{} entries, but {} are found", self.len, self.iter().count()));
        }
        self.root.verify(self.root.height(), None, None)
    }
}

impl<K: Ord, V> Node<K, V> {
    /// `from` and `to` are the separators of this node and the next.
    fn verify(&self, height: usize, from: Option<&K>, to: Option<&K>) -> Result<(), String> {
        let is_within =
            |key: &K| from.is_none_or(|from| from <= key) && to.is_none_or(|to| key < to);
        match self {
            _ if self.len() == 0 || self.len() > CAPACITY => {
                Err(format!("a node of {}", self.len()))
            }
            Node::Leaf(_) if height != 0 => Err("leaves are not equally deep".to_owned()),
            Node::Leaf(entries) if entries.iter().all(|(key, _)| is_within(key)) => Ok(()),
            Node::Leaf(_) => Err("a key is not in the node that should hold it".to_owned()),
            Node::Branch(nodes) => nodes.iter().enumerate().try_for_each(|(at, (key, node))| {
                let next = nodes.get(at + 1).map(|(key, _)| key).or(to);
                node.verify(height.saturating_sub(1), Some(key), next)
            }),
        }
    }
}

/// A map and its model. Steps change runs of keys, so that nodes fill, empty and join.
#[derive(Clone, Default)]
struct WithModel {
    map: PersistentMap<u16, u8>,
    model: BTreeMap<u16, u8>,
}

impl WithModel {
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

    fn check_diff(&self, other: &WithModel) {
        let keys: std::collections::BTreeSet<_> =
            self.model.keys().chain(other.model.keys()).collect();
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
    fn the_map_equals_the_standard_librarys_ordered_map(
        first in steps(30),
        then in steps(20),
        aside in steps(20),
    ) {
        let mut was = WithModel::default();
        first.into_iter().for_each(|step| was.step(step));
        was.check();
        let (mut one, mut other) = (was.clone(), was.clone());
        then.into_iter().for_each(|step| one.step(step));
        aside.into_iter().for_each(|step| other.step(step));
        for state in [&was, &one, &other] {
            state.check();
        }
        let empty = WithModel::default();
        let pairs = [(&was, &one), (&one, &was), (&one, &other), (&empty, &one), (&one, &one)];
        for (from, to) in pairs {
            from.check_diff(to);
        }
    }
}

#[test]
fn appending_in_order_fills_the_nodes() {
    let mut map = PersistentMap::default();
    for key in 0..1_000 {
        map.insert(key, ());
    }
    let mut leaves = 0;
    let mut from = Some(0);
    while let Some(key) = from {
        let (leaf, behind) = map.leaf_by(&|at: &i32| at.cmp(&key));
        assert!(
            leaf.len() == CAPACITY || behind.is_none(),
            "{} of {CAPACITY} in a leaf",
            leaf.len()
        );
        (leaves, from) = (leaves + 1, behind.copied());
    }
    assert_eq!(leaves, 1_000usize.div_ceil(CAPACITY));
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
fn the_cost_of_a_diff_is_in_proportion_to_the_difference() {
    let compared = std::cell::Cell::new(0);
    let mut map: PersistentMap<u32, Counted<'_>> = PersistentMap::default();
    for key in 0..10_000 {
        map.insert(key * 2, Counted(&compared));
    }
    let was = map.clone();
    let same: Vec<&u32> = was.diff(&map).collect();
    assert_eq!((same.len(), compared.get()), (0, 0), "a clone is skipped");
    map.remove(&4_000);
    map.insert(4_001, Counted(&compared));
    // Enough to split nodes at every level.
    for key in 0..200 {
        map.insert(10_001 + 2 * key, Counted(&compared));
    }
    assert_eq!(was.diff(&map).count(), 202);
    let touched = (200 + 4 * CAPACITY) * 2;
    assert!(compared.get() <= touched, "{} values compared for 202 that differ", compared.get());
}

#[test]
fn a_change_of_all_entries_leaves_a_clone_as_it_is() {
    let mut map: PersistentMap<u16, u16> = PersistentMap::default();
    map.change_all(|_, _| panic!("there is no entry"));
    for key in 0..1000 {
        map.insert(key, key);
    }
    let clone = map.clone();
    let mut keys = Vec::new();
    map.change_all(|key, value| {
        keys.push(*key);
        *value += 1;
    });
    assert!(keys.iter().copied().eq(0..1000), "in order, each once");
    assert!(map.iter().all(|(key, value)| *value == key + 1));
    assert!(clone.iter().all(|(key, value)| value == key));
    assert_eq!(map.verify(), Ok(()));
}
