//! Rebuilding trees from layers: the tree of a layer is the tree of the one below with its own records applied.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::store::Store;
use crate::store::layer::{LayerContents, Upper};
use crate::store::record::{HeadRecord, LayerKind, Record, Seal};
use crate::sys::clock;
use crate::tree::{Misfit, Tree};
use crate::types::{Epoch, LayerId};

/// Trees of sealed layers that are kept in memory. Trees share what they have in common.
const KEPT: usize = 64;

/// The trees of sealed layers, rebuilt as they are asked for.
pub struct Roots {
    store: Arc<Store>,
    kept: BTreeMap<LayerId, Tree>,
}

impl Roots {
    /// Nothing is kept yet.
    pub fn new(store: Arc<Store>) -> Roots {
        Roots { store, kept: BTreeMap::new() }
    }

    /// Keeps the tree of a layer; the oldest kept one may go.
    pub fn keep(&mut self, layer: LayerId, tree: Tree) {
        self.kept.insert(layer, tree);
        if self.kept.len() > KEPT {
            self.kept.pop_first();
        }
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
            if let Some(known) = self.kept.get(&id) {
                tree = known.clone();
                break;
            }
            let info = self.store.layer(id).ok_or_else(|| {
                Error::new(Kind::NoStore, format!("load layer {id}"), "there is no such layer")
            })?;
            if info.header.kind == LayerKind::Collected {
                return Err(Error::new(Kind::NoStore, format!("load layer {id}"), "it was collected by gc"));
            }
            above.push(id);
            at = info.header.parent;
            if at.is_some_and(|parent| parent >= id) {
                return Err(Error::damage(format!("load layer {id}"), "its parent is not older than itself"));
            }
        }
        // An index on the way is as good as all that is below it.
        let indexed = above.iter().position(|id| self.store.layer(*id).is_some_and(|l| l.index.is_some()));
        if let Some(at) = indexed
            && let Some(id) = above.get(at).copied()
            && let Some(contents) = self.store.read_index(id)
        {
            tree = Tree::new();
            replay(&mut tree, &contents, id)?;
            self.keep(id, tree.clone());
            above.truncate(at);
        }
        for id in above.into_iter().rev() {
            let contents = self.store.read_layer(id)?;
            replay(&mut tree, &contents, id)?;
            if contents.info.seal.is_some() {
                self.keep(id, tree.clone());
            }
        }
        Ok(tree)
    }
}

pub(super) fn replay(tree: &mut Tree, contents: &LayerContents, layer: LayerId) -> Result<()> {
    for (number, record) in contents.records.iter().enumerate() {
        let Record::Edits(edits) = record else { continue };
        for edit in edits {
            tree.apply(edit).map_err(|Misfit(what)| {
                Error::damage(format!("replay layer {layer}, record {}", number + 1), what)
            })?;
        }
    }
    Ok(())
}

/// Finds the layer that a head writes to, rebuilds its tree and goes on with it.
pub(super) fn reopen(
    store: &Arc<Store>,
    roots: &mut Roots,
    head: &str,
    recorded: LayerId,
) -> Result<(Upper, Tree, Epoch)> {
    let mut top = recorded;
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
    Ok((upper, tree, epoch))
}

/// Seals a layer under one that continues it: a crash came in between. Unsealed, its bytes would never be synced, although
/// those above it are.
fn seal_late(store: &Store, contents: &LayerContents) -> Result<()> {
    let message = "cut off".to_owned();
    let seal = Seal { name: None, message, time: clock::now(), automatic: true };
    store.seal_layer(&mut store.reopen_layer(contents)?, seal)
}
