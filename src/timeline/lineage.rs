//! The sealed layers that the present state and its nodes came from.

use crate::error::Result;
use crate::store::layer::LayerInfo;
use crate::store::record::{LayerKind, Record};
use crate::timeline::{Common, Timeline};
use crate::tree::{Edit, Tree};
use crate::types::{Ino, LayerId};

impl Timeline {
    /// The layer right below the upper layer. It is sealed, unless its seal is being written or
    /// failed.
    pub fn parent(&self) -> Option<LayerId> {
        self.store.layer(self.fs.upper_layer()).and_then(|l| l.header.parent)
    }

    /// The newest sealed layer below the upper layer. A seal that is not complete, or failed,
    /// leaves an unsealed layer above it.
    pub(super) fn newest_seal(&self) -> Option<LayerId> {
        let mut at = self.parent();
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            if info.seal.is_some() {
                return at;
            }
            at = info.header.parent;
        }
        None
    }

    /// The layers below the upper layer, newest first. All are sealed, but for those whose seal is
    /// being written or failed.
    pub fn ancestry(&self) -> Vec<LayerInfo> {
        self.down_from(self.parent())
    }

    /// The sealed states that the present one came from, newest first. Each apply that rebased the
    /// head onto the new base starts a new stack of layers. The lineage continues there with the
    /// stack before that apply.
    pub fn lineage(&self) -> Vec<LayerInfo> {
        self.store.lineage_from(self.fs.upper_layer())
    }
}

impl Common {
    /// The sealed states that a sealed layer came from, itself included, newest first.
    pub fn lineage_to(&self, layer: LayerId) -> Vec<LayerInfo> {
        self.store.lineage_from(layer)
    }

    pub(super) fn down_from(&self, mut at: Option<LayerId>) -> Vec<LayerInfo> {
        let mut line = Vec::new();
        while let Some(info) = at.and_then(|id| self.store.layer(id)) {
            at = info.header.parent;
            line.push(info);
        }
        line
    }

    /// All sealed states, oldest first.
    pub fn sealed(&self) -> Vec<LayerInfo> {
        self.store.layers_where(LayerInfo::is_sealed_state)
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
