//! A cache of the most recently used values, such as open files.
//!
//! Always true: the cache holds at most `limit` values. So the store does not reach RLIMIT_NOFILE
//! (often 1,024), whatever the number of layers. A value that is removed from the cache lives on
//! until its last user drops it.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::sync::Arc;

/// The most recently used values by key.
#[derive(Debug)]
pub struct LruCache<K, V = File> {
    values: HashMap<K, (Arc<V>, u64)>,
    limit: usize,
    clock: u64,
}

impl<K: Clone + Eq + Hash, V> LruCache<K, V> {
    /// A cache of at most `limit` values.
    pub fn new(limit: usize) -> LruCache<K, V> {
        LruCache { values: HashMap::new(), limit, clock: 0 }
    }

    /// The value for `key`, if the cache has it.
    pub fn get<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<Arc<V>>
    where
        K: Borrow<Q>,
    {
        self.clock += 1;
        let (value, used) = self.values.get_mut(key)?;
        *used = self.clock;
        Some(Arc::clone(value))
    }

    /// All values.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.values.values().map(|(value, _)| &**value)
    }

    /// Removes all values.
    pub fn clear(&mut self) {
        self.values.clear();
    }

    /// Removes the value for `key`.
    pub fn remove(&mut self, key: &K) {
        self.values.remove(key);
    }

    /// Inserts a value. If the cache is full, the least recently used one is removed.
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
    fn the_most_recently_used_entries_are_kept_up_to_the_limit() {
        let mut recent = LruCache::new(2);
        let file = Arc::new(tempfile::tempfile().unwrap());
        recent.insert(1, Arc::clone(&file));
        recent.insert(2, Arc::clone(&file));
        assert!(recent.get(&1).is_some());
        recent.insert(3, Arc::clone(&file));
        assert_eq!([1, 2, 3].map(|key| recent.get(&key).is_some()), [true, false, true]);
        assert_eq!(Arc::strong_count(&file), 3);
    }
}
