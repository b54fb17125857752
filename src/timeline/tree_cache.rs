//! Rebuilding trees from layers: the tree of a layer is the tree of the one below with its own records applied.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::store::Store;
use crate::store::layer::{LayerContents, LayerInfo, Upper};
use crate::store::record::{HeadRecord, Header, LayerKind, Record, Seal};
use crate::sys::{clock, memory};
use crate::tree::{Misfit, Tree};
use crate::types::{Epoch, LayerId};

/// Trees of sealed layers that are kept in memory.
const KEPT: usize = 32;
/// Nodes of kept trees, about; what a tree shares with the one that it came from counts once.
const KEPT_NODES: usize = 250_000;
/// Trees that are kept however large they are, those that were used last: a restore goes from one to the other.
const LEAST_KEPT: usize = 2;
/// Bytes of a journal that stand for one node that a tree does not share with the one below: few, so that too many are counted
/// rather than too few.
const BYTES_A_NODE: u64 = 64;
/// The message of the seal of what was written during a restore that was cut off.
pub(super) const CUT_OFF: &str = "during a restore that was cut off";

/// The trees of sealed layers, rebuilt as they are asked for.
pub struct TreeCache {
    store: Arc<Store>,
    kept: BTreeMap<LayerId, Kept>,
    uses: u64,
    /// Nodes that are kept at most, about.
    most: usize,
}

struct Kept {
    tree: Tree,
    /// When it was used last.
    used: u64,
    /// Nodes that it did not share, when it came, with the tree that it was derived from.
    own: usize,
}

impl TreeCache {
    /// Nothing is kept yet.
    pub fn new(store: Arc<Store>) -> TreeCache {
        TreeCache { store, kept: BTreeMap::new(), uses: 0, most: KEPT_NODES }
    }

    /// Keeps the tree of a layer, which the head shows or showed; those that were not used for long may go.
    pub fn keep(&mut self, layer: LayerId, tree: Tree) {
        let info = self.store.layer(layer);
        let parent = info.as_ref().and_then(|info| info.header.parent);
        let is_derived = parent.is_some_and(|parent| self.kept.contains_key(&parent));
        let own = if is_derived { changed_by(info.as_ref(), &tree) } else { tree.len() };
        self.insert(layer, tree, own);
    }

    fn insert(&mut self, layer: LayerId, tree: Tree, own: usize) {
        self.uses += 1;
        self.kept.insert(layer, Kept { tree, used: self.uses, own });
        while self.kept.len() > LEAST_KEPT && (self.kept.len() > KEPT || self.nodes() > self.most) {
            let oldest =
                self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(layer, _)| *layer);
            oldest.and_then(|layer| self.kept.remove(&layer));
        }
    }

    fn nodes(&self) -> usize {
        self.kept.values().map(|kept| kept.own).sum()
    }

    /// Keeps the tree of a layer no longer.
    pub fn forget(&mut self, layer: LayerId) {
        self.kept.remove(&layer);
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
            if let Some(known) = self.kept.get_mut(&id) {
                self.uses += 1;
                known.used = self.uses;
                tree = known.tree.clone();
                break;
            }
            let info = self.store.layer(id).ok_or_else(|| {
                Error::new(Kind::NoStore, format!("load layer {id}"), "there is no such layer")
            })?;
            if info.header.kind == LayerKind::Collected {
                return Err(Error::new(
                    Kind::NoStore,
                    format!("load layer {id}"),
                    "it was collected by gc",
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
        // An index on the way is as good as all that is below it.
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

/// How many nodes of the tree of a layer its own records made, at most.
fn changed_by(info: Option<&LayerInfo>, tree: &Tree) -> usize {
    let bytes = info.map_or(u64::MAX, |info| info.bytes);
    usize::try_from(bytes / BYTES_A_NODE).unwrap_or(usize::MAX).min(tree.len())
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

/// Finds the layer that a head writes to, rebuilds its tree and goes on with it.
pub(super) fn reopen(
    store: &Arc<Store>,
    roots: &mut TreeCache,
    head: &str,
    recorded: LayerId,
) -> Result<(Upper, Tree, Epoch)> {
    let mut top = written_last(store, head, recorded)?;
    let mut contents = store.read_layer(top)?;
    while let Some(above) = store.continued(head, top) {
        if contents.info.seal.is_none() {
            seal_late(store, &contents)?;
            if contents.is_cut {
                // What lies above was written on top of what is lost. A new layer takes its place.
                contents = store.read_layer(top)?;
                break;
            }
        } else {
            // The end may have come between the seal and its sync.
            store.sync_layer(top)?;
        }
        top = above;
        contents = store.read_layer(top)?;
    }
    let epoch = contents.info.header.epoch;
    let upper = if contents.info.seal.is_some() {
        store.create_layer(Some(top), head, epoch, LayerKind::Continues)?
    } else {
        store.reopen_layer(&contents)?
    };
    let tree = match (contents.info.seal.is_some(), contents.info.header.parent) {
        (true, _) => roots.load(top)?,
        (false, below) => {
            let mut tree = below.map_or_else(|| Ok(Tree::new()), |below| roots.load(below))?;
            replay(&mut tree, &contents, top)?;
            tree
        }
    };
    if upper.layer() != recorded {
        store.set_head(head, &HeadRecord { layer: upper.layer() })?;
    }
    // Its journal was held as a whole.
    drop(contents);
    memory::trim();
    Ok((upper, tree, epoch))
}

/// The layer that a head writes to, as far as its record tells. An apply publishes the layer on the new base before that takes
/// the place of the one that is shown. What was written to the latter is in both as soon as they are exchanged; if it is in the latter alone,
/// they never were, or a power cut took the record before it was synced.
fn written_last(store: &Store, head: &str, recorded: LayerId) -> Result<LayerId> {
    let (before, is_sealed) = match store.layer(recorded) {
        Some(LayerInfo { header: Header { kind: LayerKind::Lands(before), .. }, seal, .. }) => {
            (before, seal.is_some())
        }
        _ => return Ok(recorded),
    };
    // Only one that took its place was sealed.
    if is_sealed {
        return Ok(recorded);
    }
    let is_state = |l: &LayerInfo| l.header.kind.is_of_head() && l.header.head == head;
    if !store.layer(before).is_some_and(|l| is_state(&l)) || is_changed(store, recorded)? {
        return Ok(recorded);
    }
    Ok(if is_changed(store, before)? { before } else { recorded })
}

fn is_changed(store: &Store, layer: LayerId) -> Result<bool> {
    Ok(store.read_layer(layer)?.is_changed)
}

/// Seals what was written while a restore replaced the state and was cut off before that was sealed: the head was on another
/// layer already, and programs were still answered. Gives the layers, which nothing else leads to.
pub(super) fn seal_strays(
    store: &Arc<Store>,
    roots: &mut TreeCache,
    head: &str,
    upper: LayerId,
) -> Result<Vec<(LayerId, Epoch)>> {
    let catalog = store.catalog();
    let parents: BTreeSet<LayerId> = catalog.iter().filter_map(|l| l.header.parent).collect();
    let is_stray = |l: &&LayerInfo| {
        let layer = l.header.layer;
        let is_of_head = l.header.head == head && l.header.kind != LayerKind::PreImage;
        is_of_head && l.seal.is_none() && layer != upper && !parents.contains(&layer)
    };
    let mut sealed = Vec::new();
    for info in catalog.iter().filter(is_stray) {
        let (layer, parent) = (info.header.layer, info.header.parent);
        let contents = store.read_layer(layer)?;
        let below = match parent
            .map(|parent| store.layer(parent).filter(|l| l.seal.is_some()).ok_or(parent))
        {
            // It was written on top of what a power cut took.
            Some(Err(_)) => continue,
            Some(Ok(below)) => roots.load(below.header.layer),
            None => Ok(Tree::new()),
        };
        if !contents.is_changed
            || below.and_then(|mut tree| replay(&mut tree, &contents, layer)).is_err()
        {
            continue;
        }
        super::close(store, &mut store.reopen_layer(&contents)?, CUT_OFF)?;
        sealed.push((layer, info.header.epoch));
    }
    Ok(sealed)
}

/// Seals a layer under one that continues it: a crash came in between. Unsealed, its bytes would never be synced, although
/// those above it are.
fn seal_late(store: &Store, contents: &LayerContents) -> Result<()> {
    let message = "cut off".to_owned();
    let seal = Seal { name: None, message, time: clock::now(), automatic: true };
    store.seal_layer(&mut store.reopen_layer(contents)?, seal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;
    use crate::store::record::{Body, Edit, Meta, Node};
    use crate::types::{FileKind, Ino, Timestamp};

    fn fifo() -> Box<Node> {
        let time = Timestamp::default();
        let mode = FileKind::Fifo.type_bits();
        let meta =
            Meta { mode, uid: 0, gid: 0, nlink: 1, rdev: 0, atime: time, mtime: time, ctime: time };
        Box::new(Node { meta, xattrs: None, body: Body::Special })
    }

    /// A store of sealed layers, each on the one before, with a file more in each.
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

    /// Each layer gives up all that the one before has, and no two trees share anything.
    #[test]
    fn trees_that_share_nothing_count_each_for_itself() {
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
        let mut roots = TreeCache { most: 10 * files as usize, ..TreeCache::new(Arc::new(store)) };
        let top = roots.load(parent.unwrap()).unwrap();
        assert_eq!(top.len(), files as usize);
        let nodes: usize = roots.kept.values().map(|kept| kept.tree.len()).sum();
        // By the size of their records, so only about: these are small.
        assert!(roots.kept.len() > 1 && nodes <= 3 * roots.most, "{nodes} nodes are kept");
    }

    #[test]
    fn what_was_used_last_is_kept_however_old_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let layers = KEPT as u32 + 40;
        let mut roots = TreeCache::new(store(&dir.path().join("store"), layers));
        let top = roots.load(LayerId(layers)).unwrap();
        assert_eq!((top.len(), roots.kept.len()), (layers as usize, KEPT));
        // One after the other from the oldest on, as housekeeping does: each is one step from the one before.
        for layer in 1..30 {
            assert_eq!(roots.load(LayerId(layer)).unwrap().len(), layer as usize);
            assert!(roots.kept.contains_key(&LayerId(layer)), "layer {layer}");
            assert!(roots.kept.len() <= KEPT);
        }
    }
}
