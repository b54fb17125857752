//! Open files, and what is known of them, that are kept for the next use.
//!
//! Always true: no more are kept than the limit says, whatever the number of layers or of files of a base; a process may
//! hold only so many (RLIMIT_NOFILE, often 1,024). Whoever uses a file holds it open for as long as it needs it.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::sync::Arc;

/// Open files by what they are known as, the recently used ones.
#[derive(Debug)]
pub struct LruCache<K, V = File> {
    files: HashMap<K, (Arc<V>, u64)>,
    limit: usize,
    clock: u64,
}

impl<K: Clone + Eq + Hash, V> LruCache<K, V> {
    /// Keeps at most `limit` files.
    pub fn new(limit: usize) -> LruCache<K, V> {
        LruCache { files: HashMap::new(), limit, clock: 0 }
    }

    /// The file known as `key`, if it is kept.
    pub fn get<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<Arc<V>>
    where
        K: Borrow<Q>,
    {
        self.clock += 1;
        let (file, used) = self.files.get_mut(key)?;
        *used = self.clock;
        Some(Arc::clone(file))
    }

    /// What is kept.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.files.values().map(|(file, _)| &**file)
    }

    /// Keeps nothing of what is kept now.
    pub fn clear(&mut self) {
        self.files.clear();
    }

    /// Keeps a file no longer.
    pub fn remove(&mut self, key: &K) {
        self.files.remove(key);
    }

    /// Keeps a file; the one that was not used for longest may go.
    pub fn insert(&mut self, key: K, file: Arc<V>) {
        self.clock += 1;
        self.files.insert(key, (file, self.clock));
        if self.files.len() > self.limit {
            let oldest =
                self.files.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.files.remove(&key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_is_kept_and_no_more_than_the_limit() {
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
