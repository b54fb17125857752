//! A cache of the trees of sealed layers. The tree of a layer is the tree of the layer below with
//! the layer's own records applied.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::store::Store;
use crate::store::layer::{LayerContents, LayerInfo};
use crate::store::record::{LayerKind, Record};
use crate::tree::{Misfit, Tree};
use crate::types::LayerId;

/// Trees in the cache, at most.
const MAX_TREES: usize = 32;
/// Nodes in the cache, about, at most. Nodes that a tree shares with the one it was derived from
/// count once.
const MAX_NODES: usize = 250_000;
/// Trees that stay however large they are, the most recently used: a restore goes from one to the
/// other.
const MIN_TREES: usize = 2;
/// The estimated bytes of journal for each node that a tree does not share with the one below. The
/// estimate is low, so that nodes are overcounted rather than undercounted.
const BYTES_PER_NODE: u64 = 64;

/// The trees of sealed layers, rebuilt on demand; the least recently used are dropped.
pub struct TreeCache {
    store: Arc<Store>,
    entries: BTreeMap<LayerId, Entry>,
    /// Counts the uses of all entries.
    uses: u64,
    max_nodes: usize,
}

struct Entry {
    tree: Tree,
    /// The value of [`TreeCache::uses`] at its last use.
    last_use: u64,
    /// Nodes that it did not share, when it was inserted, with the tree that it was derived from.
    own_nodes: usize,
}

impl TreeCache {
    /// An empty cache.
    pub fn new(store: Arc<Store>) -> TreeCache {
        TreeCache { store, entries: BTreeMap::new(), uses: 0, max_nodes: MAX_NODES }
    }

    /// Inserts the tree of a layer that was just sealed. May drop others.
    pub fn keep(&mut self, layer: LayerId, tree: Tree) {
        let info = self.store.layer(layer);
        let parent = info.as_ref().and_then(|info| info.header.parent);
        let is_derived = parent.is_some_and(|parent| self.entries.contains_key(&parent));
        let own = if is_derived { changed_by(info.as_ref(), &tree) } else { tree.len() };
        self.insert(layer, tree, own);
    }

    fn insert(&mut self, layer: LayerId, tree: Tree, own_nodes: usize) {
        self.uses += 1;
        self.entries.insert(layer, Entry { tree, last_use: self.uses, own_nodes });
        while self.entries.len() > MIN_TREES
            && (self.entries.len() > MAX_TREES || self.nodes() > self.max_nodes)
        {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use);
            let oldest = oldest.map(|(layer, _)| *layer);
            oldest.and_then(|layer| self.entries.remove(&layer));
        }
    }

    fn nodes(&self) -> usize {
        self.entries.values().map(|entry| entry.own_nodes).sum()
    }

    /// Drops the tree of a layer.
    pub fn forget(&mut self, layer: LayerId) {
        self.entries.remove(&layer);
    }

    /// The tree of a sealed layer.
    ///
    /// # Errors
    /// Damage, or a layer that does not exist.
    pub fn load(&mut self, layer: LayerId) -> Result<Tree> {
        let mut above = Vec::new();
        let mut at = Some(layer);
        let mut tree = Tree::new();
        while let Some(id) = at {
            if let Some(entry) = self.entries.get_mut(&id) {
                self.uses += 1;
                entry.last_use = self.uses;
                tree = entry.tree.clone();
                break;
            }
            let info = self.store.layer(id).ok_or_else(|| {
                Error::new(Kind::NoStore, format!("load layer {id}"), "there is no such layer")
            })?;
            if info.header.kind == LayerKind::Collected {
                return Err(Error::new(
                    Kind::NoStore,
                    format!("load layer {id}"),
                    "gc collected it",
                ));
            }
            above.push(id);
            at = info.header.parent;
            if at.is_some_and(|parent| parent >= id) {
                return Err(Error::damage(
                    format!("load layer {id}"),
                    "its parent is not older than itself",
                ));
            }
        }
        // An index holds the whole tree of its layer, so nothing below it is replayed.
        let indexed =
            above.iter().position(|id| self.store.layer(*id).is_some_and(|l| l.index.is_some()));
        if let Some(at) = indexed
            && let Some(id) = above.get(at).copied()
            && let Some(contents) = self.store.read_index(id)
        {
            tree = Tree::new();
            replay(&mut tree, &contents, id)?;
            self.insert(id, tree.clone(), tree.len());
            above.truncate(at);
        }
        for id in above.into_iter().rev() {
            let contents = self.store.read_layer(id)?;
            replay(&mut tree, &contents, id)?;
            if contents.info.seal.is_some() {
                let own = changed_by(Some(&contents.info), &tree);
                self.insert(id, tree.clone(), own);
            }
        }
        Ok(tree)
    }
}

/// Estimates how many nodes of a layer's tree its own records changed.
fn changed_by(info: Option<&LayerInfo>, tree: &Tree) -> usize {
    let bytes = info.map_or(u64::MAX, |info| info.bytes);
    usize::try_from(bytes / BYTES_PER_NODE).unwrap_or(usize::MAX).min(tree.len())
}

/// Applies the records of a layer to a tree.
pub(super) fn replay(tree: &mut Tree, contents: &LayerContents, layer: LayerId) -> Result<()> {
    for (number, record) in contents.records().enumerate() {
        let Record::Edits(edits) = record? else { continue };
        edits.iter().try_for_each(|edit| tree.apply(edit)).map_err(|Misfit(what)| {
            Error::damage(format!("replay layer {layer}, record {}", number + 1), what)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;
    use crate::store::record::Seal;
    use crate::sys::clock;
    use crate::tree::{Body, Edit, Meta, Node};
    use crate::types::{Epoch, FileKind, Ino, Timestamp};

    fn fifo() -> Box<Node> {
        let time = Timestamp::default();
        let mode = FileKind::Fifo.type_bits();
        let meta =
            Meta { mode, uid: 0, gid: 0, nlink: 1, rdev: 0, atime: time, mtime: time, ctime: time };
        Box::new(Node { meta, xattrs: None, body: Body::Special })
    }

    /// A store of sealed layers. Each adds one file to the layer below.
    fn store(path: &std::path::Path, layers: u32) -> Arc<Store> {
        let store = Store::create(
            path,
            b"/base",
            (1, 1),
            StoreOptions { volatile: true, ..StoreOptions::default() },
        )
        .unwrap();
        let mut parent = None;
        for number in 1..=layers {
            let mut layer =
                store.create_layer(parent, "main", Epoch(0), LayerKind::Continues).unwrap();
            let edit = Edit::Put { ino: Ino(1000 + u64::from(number)), node: fifo() };
            layer.record(&Record::Edits(vec![edit])).unwrap();
            let seal =
                Seal { name: None, message: String::new(), time: clock::now(), automatic: false };
            store.seal_layer(&mut layer, seal).unwrap();
            parent = Some(layer.layer());
        }
        Arc::new(store)
    }

    /// Each layer removes everything that the layer below has, so no two trees share anything.
    #[test]
    fn trees_that_share_nothing_count_in_full() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(
            &dir.path().join("store"),
            b"/base",
            (1, 1),
            StoreOptions { volatile: true, ..StoreOptions::default() },
        )
        .unwrap();
        let (files, layers) = (50, 60);
        let mut parent = None;
        for number in 0..layers {
            let mut layer =
                store.create_layer(parent, "main", Epoch(0), LayerKind::Continues).unwrap();
            let ino = |layer: u64, file: u64| Ino(1000 * (layer + 1) + file);
            let gone = |file| Edit::Remove { ino: ino(number - 1, file) };
            let mut edits: Vec<Edit> = (0..if number == 0 { 0 } else { files }).map(gone).collect();
            edits.extend((0..files).map(|file| Edit::Put { ino: ino(number, file), node: fifo() }));
            layer.record(&Record::Edits(edits)).unwrap();
            let seal =
                Seal { name: None, message: String::new(), time: clock::now(), automatic: false };
            store.seal_layer(&mut layer, seal).unwrap();
            parent = Some(layer.layer());
        }
        let mut trees =
            TreeCache { max_nodes: 10 * files as usize, ..TreeCache::new(Arc::new(store)) };
        let top = trees.load(parent.unwrap()).unwrap();
        assert_eq!(top.len(), files as usize);
        let nodes: usize = trees.entries.values().map(|entry| entry.tree.len()).sum();
        // The limit uses an estimate from the size of the records, and these records are small.
        assert!(trees.entries.len() > 1 && nodes <= 3 * trees.max_nodes, "{nodes} nodes are kept");
    }

    #[test]
    fn the_cache_keeps_the_most_recently_used_trees_however_old_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let layers = MAX_TREES as u32 + 40;
        let mut trees = TreeCache::new(store(&dir.path().join("store"), layers));
        let top = trees.load(LayerId(layers)).unwrap();
        assert_eq!((top.len(), trees.entries.len()), (layers as usize, MAX_TREES));
        // In order from the oldest, as housekeeping does: each load replays one layer.
        for layer in 1..30 {
            assert_eq!(trees.load(LayerId(layer)).unwrap().len(), layer as usize);
            assert!(trees.entries.contains_key(&LayerId(layer)), "layer {layer}");
            assert!(trees.entries.len() <= MAX_TREES);
        }
    }
}
