//! Reopening a head: finds its upper layer, and finishes the seals that a crash interrupted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::Result;
use crate::store::Store;
use crate::store::layer::{LayerContents, LayerInfo, Upper};
use crate::store::record::{Header, LayerKind, OpRecord, OpVerb, Seal};
use crate::sys::{clock, memory};
use crate::timeline::checkpoint::{automatic, description, seal_unused};
use crate::timeline::tree_cache::{TreeCache, replay};
use crate::tree::Tree;
use crate::types::{Epoch, LayerId};

/// The seal message of changes that a restore replaced but could not seal before a crash.
const DURING_RESTORE: &str = "during an interrupted restore";

/// Finds the upper layer of a head, rebuilds its tree and reopens it for writing. `recorded` is the
/// layer that the head's record names.
pub(super) fn reopen(
    store: &Arc<Store>,
    trees: &mut TreeCache,
    head: &str,
    recorded: LayerId,
) -> Result<(Upper, Tree, Epoch)> {
    let mut top = last_written(store, head, recorded)?;
    let mut contents = store.read_layer(top)?;
    while let Some(above) = store.continued(head, top) {
        if contents.info.seal.is_none() {
            seal_interrupted(store, &contents)?;
            if contents.is_cut {
                // The layers above build on records that are lost. A new layer takes their place.
                contents = store.read_layer(top)?;
                break;
            }
        } else {
            // The crash may have come between the seal and its sync.
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
        (true, _) => trees.load(top)?,
        (false, below) => {
            let mut tree = below.map_or_else(|| Ok(Tree::new()), |below| trees.load(below))?;
            replay(&mut tree, &contents, top)?;
            tree
        }
    };
    if upper.layer() != recorded {
        store.set_head(head, upper.layer())?;
    }
    // The whole journal was in memory.
    drop(contents);
    memory::trim();
    Ok((upper, tree, epoch))
}

/// The layer on top of a head that is not open, as [`reopen`] finds it. Writes nothing.
pub(super) fn top_of(store: &Store, head: &str, recorded: LayerId) -> Result<LayerId> {
    let mut top = last_written(store, head, recorded)?;
    while let Some(above) = store.continued(head, top) {
        let contents = store.read_layer(top)?;
        if contents.info.seal.is_none() && contents.is_cut {
            break;
        }
        top = above;
    }
    Ok(top)
}

/// The tree of a head that is not open, as [`reopen`] finds it, and its epoch. Writes nothing.
pub(super) fn peek(
    store: &Store,
    trees: &mut TreeCache,
    head: &str,
    recorded: LayerId,
) -> Result<(Tree, Epoch)> {
    let mut unsealed = Vec::new();
    let mut at = Some(top_of(store, head, recorded)?);
    let mut epoch = None;
    let mut tree = loop {
        let Some(layer) = at else { break Tree::new() };
        let contents = store.read_layer(layer)?;
        epoch.get_or_insert(contents.info.header.epoch);
        if contents.info.seal.is_some() {
            break trees.load(layer)?;
        }
        at = contents.info.header.parent;
        unsealed.push((layer, contents));
    };
    for (layer, contents) in unsealed.iter().rev() {
        replay(&mut tree, contents, *layer)?;
    }
    Ok((tree, epoch.unwrap_or(Epoch(0))))
}

/// The layer that the head wrote to last.
///
/// An apply publishes the layer on the new base first and switches to it afterwards. Changes up to
/// the switch are in the old layer, and the switch copies them to the new one. If only the old
/// layer has changes, the switch never happened, or a power cut lost the new layer's record before
/// it was synced. Then the old layer is the last written.
fn last_written(store: &Store, head: &str, recorded: LayerId) -> Result<LayerId> {
    let Some(info) = store.layer(recorded) else { return Ok(recorded) };
    let LayerKind::Rebased(before) = info.header.kind else { return Ok(recorded) };
    // A seal proves that the switch happened.
    if info.seal.is_some() {
        return Ok(recorded);
    }
    let is_state = |l: &LayerInfo| store.is_of(l, head);
    if !store.layer(before).is_some_and(|l| is_state(&l)) || is_changed(store, recorded)? {
        return Ok(recorded);
    }
    Ok(if is_changed(store, before)? { before } else { recorded })
}

fn is_changed(store: &Store, layer: LayerId) -> Result<bool> {
    Ok(store.read_layer(layer)?.is_changed)
}

/// Seals layers that a restore replaced but could not seal before a crash, and logs them. The head
/// was on another layer already, and programs were still answered from the old one. Only the log
/// leads to these layers.
pub(super) fn seal_strays(
    store: &Arc<Store>,
    trees: &mut TreeCache,
    head: &str,
    upper: LayerId,
) -> Result<()> {
    let catalog = store.catalog();
    let parents: BTreeSet<LayerId> = catalog.iter().filter_map(|l| l.header.parent).collect();
    let is_stray = |l: &&LayerInfo| {
        let layer = l.header.layer;
        store.is_of(l, head) && l.seal.is_none() && layer != upper && !parents.contains(&layer)
    };
    let mut sealed = Vec::new();
    for info in catalog.iter().filter(is_stray) {
        let (layer, parent) = (info.header.layer, info.header.parent);
        let contents = store.read_layer(layer)?;
        let below = match parent
            .map(|parent| store.layer(parent).filter(|l| l.seal.is_some()).ok_or(parent))
        {
            // A power cut lost the layer below.
            Some(Err(_)) => continue,
            Some(Ok(below)) => trees.load(below.header.layer),
            None => Ok(Tree::new()),
        };
        if !contents.is_changed
            || below.and_then(|mut tree| replay(&mut tree, &contents, layer)).is_err()
        {
            continue;
        }
        seal_unused(store, &mut store.reopen_layer(&contents)?, DURING_RESTORE)?;
        sealed.push((layer, info.header.epoch));
    }
    for (layer, epoch) in sealed {
        store.append_op(OpRecord {
            head: head.to_owned(),
            time: clock::now(),
            verb: OpVerb::Seal,
            description: DURING_RESTORE.to_owned(),
            tree: Some(layer),
            epoch,
        })?;
    }
    Ok(())
}

/// Seals a layer that another one continues already: a crash came in between. Unsealed, its bytes
/// would never be synced, although those of the layers above are.
fn seal_interrupted(store: &Store, contents: &LayerContents) -> Result<()> {
    match contents.reported_seal()? {
        Some(seal) => seal_reported(store, contents, seal),
        None => {
            let seal = automatic("interrupted".to_owned());
            store.seal_layer(&mut store.reopen_layer(contents)?, seal)
        }
    }
}

/// Writes the seals of all heads that were reported and that a crash interrupted. A head that is
/// not opened would keep its own until then, and lose it with the head. Damage of one head is no
/// reason not to open another.
pub(super) fn seal_all_reported(store: &Store) {
    let heads = store.head_records().unwrap_or_else(|error| {
        log::warn!("{error}");
        BTreeMap::new()
    });
    let is_interrupted = |head: &str, top: LayerId| {
        let is_unsealed = store.layer(top).is_some_and(|layer| layer.seal.is_none());
        is_unsealed && store.continued(head, top).is_some()
    };
    for (head, record) in heads.iter().filter(|(head, record)| is_interrupted(head, record.layer)) {
        let sealed = store.read_layer(record.layer).and_then(|contents| {
            let seal = contents.reported_seal()?;
            seal.map_or(Ok(()), |seal| seal_reported(store, &contents, seal))
        });
        if let Err(error) = sealed {
            log::warn!("the last checkpoint of head '{head}' is not complete: {error}");
        }
    }
}

/// Writes a seal that was reported, and logs the checkpoint.
fn seal_reported(store: &Store, contents: &LayerContents, seal: Seal) -> Result<()> {
    let Header { layer, head, epoch, .. } = &*contents.info.header;
    let description = description(*layer, seal.name.as_deref());
    store.seal_layer(&mut store.reopen_layer(contents)?, seal)?;
    store.append_op(OpRecord {
        head: head.clone(),
        time: clock::now(),
        verb: OpVerb::Checkpoint,
        description,
        tree: Some(*layer),
        epoch: *epoch,
    })?;
    Ok(())
}
