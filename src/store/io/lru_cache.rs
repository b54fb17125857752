//! A cache of the values that were used most recently, for open files and data about them.
//!
//! * It holds at most as many values as its limit, because a process may only have so many open
//!   files (RLIMIT_NOFILE, often 1,024).
//! * A user of a value holds its own reference. So a file stays open while it is used, also after
//!   it has left the cache.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::sync::Arc;

/// The values that were used most recently, by key.
#[derive(Debug)]
pub struct LruCache<K, V = File> {
    values: HashMap<K, (Arc<V>, u64)>,
    limit: usize,
    clock: u64,
}

impl<K: Clone + Eq + Hash, V> LruCache<K, V> {
    /// An empty cache that holds at most `limit` values.
    pub fn new(limit: usize) -> LruCache<K, V> {
        LruCache { values: HashMap::new(), limit, clock: 0 }
    }

    /// The value of `key`, if it is cached.
    pub fn get<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<Arc<V>>
    where
        K: Borrow<Q>,
    {
        self.clock += 1;
        let (value, used) = self.values.get_mut(key)?;
        *used = self.clock;
        Some(Arc::clone(value))
    }

    /// All cached values.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.values.values().map(|(value, _)| &**value)
    }

    /// Removes all values.
    pub fn clear(&mut self) {
        self.values.clear();
    }

    /// Removes the value of `key`.
    pub fn remove(&mut self, key: &K) {
        self.values.remove(key);
    }

    /// Adds a value. If the cache is full, removes the one that was not used for longest.
    pub fn insert(&mut self, key: K, value: Arc<V>) {
        self.clock += 1;
        self.values.insert(key, (value, self.clock));
        if self.values.len() > self.limit {
            let oldest =
                self.values.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.values.remove(&key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_that_was_not_used_for_longest_leaves_a_full_cache() {
        let mut cache = LruCache::new(2);
        let file = Arc::new(tempfile::tempfile().unwrap());
        cache.insert(1, Arc::clone(&file));
        cache.insert(2, Arc::clone(&file));
        assert!(cache.get(&1).is_some());
        cache.insert(3, Arc::clone(&file));
        assert_eq!([1, 2, 3].map(|key| cache.get(&key).is_some()), [true, false, true]);
        assert_eq!(Arc::strong_count(&file), 3);
    }
}
