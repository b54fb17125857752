//! The sealed states that a layer came from.

use crate::store::Store;
use crate::store::layer::LayerInfo;
use crate::store::record::{Header, LayerKind};
use crate::types::LayerId;

impl Store {
    /// The sealed states that a layer came from, newest first. A sealed layer is the first of them.
    ///
    /// Each apply that rebased the head onto the new base starts a new stack of layers. The lineage
    /// continues there with the stack before that apply.
    pub fn lineage_from(&self, top: LayerId) -> Vec<LayerInfo> {
        let mut at = match self.layer(top) {
            Some(info) if info.seal.is_none() => self.came_from(&info),
            _ => Some(top),
        };
        let mut line = Vec::new();
        while let Some(info) = at.and_then(|id| self.layer(id)) {
            at = self.came_from(&info);
            line.push(info);
        }
        line
    }

    /// The sealed layer that a layer of a head continues: the one below it, or the one before the
    /// apply that rebased the head.
    pub fn came_from(&self, info: &LayerInfo) -> Option<LayerId> {
        let Header { layer, parent, kind, .. } = &*info.header;
        let LayerKind::Rebased(before) = kind else { return *parent };
        let before = self.layer(*before).filter(|before| before.header.layer < *layer)?;
        match before.seal {
            Some(_) => Some(before.header.layer).filter(|_| before.header.kind.is_of_head()),
            None => self.came_from(&before),
        }
    }
}
