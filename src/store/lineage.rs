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

    /// The layer that a layer of a head continues: the one below it, or the last one before the
    /// apply that rebased the head.
    pub fn came_from(&self, info: &LayerInfo) -> Option<LayerId> {
        let Header { layer, parent, kind, head, .. } = &info.header;
        let LayerKind::Rebased(before) = kind else { return *parent };
        if parent.is_some() {
            return *parent;
        }
        let before = match self.layer(*before).filter(|info| info.header.kind.is_of_head()) {
            Some(info) if info.seal.is_none() => info.header.parent,
            Some(info) => Some(info.header.layer),
            // gc removed it: continue with the last layer that the head sealed before the apply,
            // or with the one that it was forked from.
            None => self.sealed_before(*layer, head).or_else(|| {
                let records = self.head_records().unwrap_or_default();
                Some(records.get(head)?.forked_from.as_ref()?.layer)
            }),
        };
        before.filter(|before| before < layer)
    }

    /// The last sealed state that a head made before a layer.
    fn sealed_before(&self, layer: LayerId, head: &str) -> Option<LayerId> {
        let all = self.catalog();
        let mut older = all.iter().rev().filter(|info| info.header.layer < layer);
        let found = older.find(|info| info.seal.is_some() && self.is_of(info, head));
        found.map(|info| info.header.layer)
    }
}
