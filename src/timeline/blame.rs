//! Which layer last changed a node.

use crate::error::Result;
use crate::store::record::{Edit, LayerKind, Record};
use crate::timeline::Timeline;
use crate::tree::Tree;
use crate::types::{Ino, LayerId};

impl Timeline {
    /// The tree of a sealed layer.
    ///
    /// # Errors
    /// Damage, or a layer that does not exist.
    pub fn tree_of(&self, layer: LayerId) -> Result<Tree> {
        self.roots.lock().load(layer)
    }

    /// The layer at or below `from` whose records speak of a node; none if no layer's do. Reads the journals, the newest first.
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
            if self.store.read_layer(layer)?.has(|record| speaks_of(record, ino))? {
                return Ok(Some(layer));
            }
            at = info.header.parent;
        }
        Ok(None)
    }
}

fn speaks_of(record: &Record, node: Ino) -> bool {
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
