//! The sealed layers that the present state and its nodes came from.

use crate::error::Result;
use crate::store::layer::LayerInfo;
use crate::store::record::{Header, LayerKind, Record};
use crate::timeline::{Common, Timeline};
use crate::tree::{Edit, Tree};
use crate::types::{Ino, LayerId};

impl Timeline {
    /// The sealed layer right below the upper layer.
    pub fn parent(&self) -> Option<LayerId> {
        self.store.layer(self.fs.upper_layer()).and_then(|l| l.header.parent)
    }

    /// The sealed layers below the upper layer, newest first.
    pub fn ancestry(&self) -> Vec<LayerInfo> {
        self.down_from(self.parent())
    }

    /// The sealed states that the present one came from, newest first. Each apply that rebased the
    /// head onto the new base starts a new stack of layers. The lineage continues there with the
    /// stack before that apply.
    pub fn lineage(&self) -> Vec<LayerInfo> {
        self.lineage_from(self.fs.upper_layer())
    }
}

impl Common {
    /// As [`Timeline::lineage`], for a head with this layer on top.
    pub(super) fn lineage_from(&self, top: LayerId) -> Vec<LayerInfo> {
        let mut at = match self.store.layer(top) {
            Some(info) if info.seal.is_none() => self.came_from(&info),
            _ => Some(top),
        };
        let mut line = Vec::new();
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            at = self.came_from(&info);
            line.push(info);
        }
        line
    }

    /// The layer that a layer of a head continues: the one below it, or the last one before the
    /// apply that rebased the head.
    pub(super) fn came_from(&self, info: &LayerInfo) -> Option<LayerId> {
        let Header { layer, parent, kind, head, .. } = &info.header;
        let LayerKind::Rebased(before) = kind else { return *parent };
        if parent.is_some() {
            return *parent;
        }
        let newest = |all: Vec<LayerInfo>| all.into_iter().rfind(|info| info.header.layer < *layer);
        let before = match self.store.layer(*before).filter(|info| info.header.kind.is_of_head()) {
            Some(info) if info.seal.is_none() => info.header.parent,
            Some(info) => Some(info.header.layer),
            // gc removed it: continue with the last layer that the head sealed before the apply,
            // or with the one that it was forked from.
            None => newest(self.sealed_by(head)).map(|info| info.header.layer).or_else(|| {
                let records = self.store.head_records().unwrap_or_default();
                Some(records.get(head)?.forked_from.as_ref()?.layer)
            }),
        };
        before.filter(|before| before < layer)
    }

    /// The sealed states that a sealed layer came from, itself included, newest first.
    pub fn lineage_to(&self, layer: LayerId) -> Vec<LayerInfo> {
        self.lineage_from(layer)
    }

    pub(super) fn down_from(&self, mut at: Option<LayerId>) -> Vec<LayerInfo> {
        let mut line = Vec::new();
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            at = info.header.parent;
            line.push(info);
        }
        line
    }

    /// The sealed states that a head made, oldest first.
    fn sealed_by(&self, head: &str) -> Vec<LayerInfo> {
        let mut all = self.sealed();
        all.retain(|info| self.store.is_of(info, head));
        all
    }

    /// All sealed states, oldest first.
    pub fn sealed(&self) -> Vec<LayerInfo> {
        let mut all = self.store.catalog();
        all.retain(|l| l.seal.is_some() && l.header.kind.is_of_head());
        all
    }

    /// The tree of a sealed layer.
    ///
    /// # Errors
    /// Damage, or a layer that does not exist.
    pub fn tree_of(&self, layer: LayerId) -> Result<Tree> {
        self.trees.lock().load(layer)
    }

    /// The newest layer at or below `from` with a record about `ino`; `None` if there is none.
    /// Reads the journals from the newest to the oldest.
    ///
    /// # Errors
    /// As [`Timeline::tree_of`].
    pub fn last_change(&self, ino: Ino, from: Option<LayerId>) -> Result<Option<LayerId>> {
        let mut at = from;
        while let Some(info) = at.and_then(|layer| self.store.layer(layer)) {
            let layer = info.header.layer;
            if info.header.kind == LayerKind::Collected {
                break;
            }
            if self.store.read_layer(layer)?.has(|record| changes_node(record, ino))? {
                return Ok(Some(layer));
            }
            at = info.header.parent;
        }
        Ok(None)
    }
}

fn changes_node(record: &Record, node: Ino) -> bool {
    let Record::Edits(edits) = record else { return false };
    edits.iter().any(|edit| match edit {
        Edit::Put { ino, .. }
        | Edit::Meta { ino, .. }
        | Edit::Xattr { ino, .. }
        | Edit::Resize { ino, .. }
        | Edit::Map { ino, .. }
        | Edit::Remove { ino } => *ino == node,
        Edit::Dentry { .. } => false,
    })
}
