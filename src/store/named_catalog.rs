//! The catalog: all layers of a store, and which of them have which name.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use crate::store::checkpoint_names::name_of;
use crate::store::layer::LayerInfo;
use crate::types::LayerId;

/// The layers by number.
type Layers = BTreeMap<LayerId, LayerInfo>;

/// The catalog. Always true: `named` has the layers of each name, and no others.
#[derive(Default)]
pub(in crate::store) struct Catalog {
    layers: Layers,
    named: BTreeMap<String, BTreeSet<LayerId>>,
}

impl Deref for Catalog {
    type Target = Layers;

    fn deref(&self) -> &Layers {
        &self.layers
    }
}

impl From<Layers> for Catalog {
    fn from(layers: Layers) -> Catalog {
        let mut catalog = Catalog::default();
        layers.into_iter().for_each(|(layer, info)| drop(catalog.insert(layer, info)));
        catalog
    }
}

impl Catalog {
    /// Adds a layer. Returns the entry that it replaces.
    pub(in crate::store) fn insert(
        &mut self,
        layer: LayerId,
        info: LayerInfo,
    ) -> Option<LayerInfo> {
        let before = self.remove(layer);
        if let Some(name) = name_of(&info) {
            self.named.entry(name.to_owned()).or_default().insert(layer);
        }
        self.layers.insert(layer, info);
        before
    }

    /// Removes a layer. Returns its entry.
    pub(in crate::store) fn remove(&mut self, layer: LayerId) -> Option<LayerInfo> {
        let info = self.layers.remove(&layer)?;
        if let Some(name) = name_of(&info)
            && let Some(layers) = self.named.get_mut(name)
        {
            layers.remove(&layer);
            if layers.is_empty() {
                self.named.remove(name);
            }
        }
        Some(info)
    }

    /// Changes the entry of a layer, if there is one.
    pub(in crate::store) fn update(&mut self, layer: LayerId, change: impl FnOnce(&mut LayerInfo)) {
        if let Some(mut info) = self.remove(layer) {
            change(&mut info);
            self.insert(layer, info);
        }
    }

    /// The layers that have a name, oldest first.
    pub(in crate::store) fn named(&self, name: &str) -> impl Iterator<Item = &LayerInfo> {
        let layers = self.named.get(name).into_iter().flatten();
        layers.filter_map(|layer| self.layers.get(layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::layer::info::Sidecars;
    use crate::store::record::{Header, LayerKind, Seal};
    use crate::types::{Epoch, Timestamp};

    fn info(layer: u32, name: Option<&str>) -> LayerInfo {
        let (layer, head, time) = (LayerId(layer), "main".to_owned(), Timestamp::default());
        let kind = LayerKind::Continues;
        let header = Header { layer, parent: None, head, epoch: Epoch(0), kind, time };
        let name = name.map(str::to_owned);
        let seal = Seal { name, message: String::new(), time, automatic: false };
        LayerInfo::new(header, Some(seal), false, 0, Sidecars::default())
    }

    fn with(catalog: &Catalog, name: &str) -> Vec<u32> {
        catalog.named(name).map(|info| info.header.layer.0).collect()
    }

    #[test]
    fn names_follow_every_change_of_an_entry() {
        let all = [info(2, Some("a")), info(1, Some("a")), info(3, None), info(4, Some("b"))];
        let layers: Layers = all.into_iter().map(|info| (info.header.layer, info)).collect();
        let mut catalog = Catalog::from(layers);
        assert_eq!((with(&catalog, "a"), with(&catalog, "b")), (vec![1, 2], vec![4]));
        catalog.update(LayerId(2), |changed| changed.seal = info(2, Some("b")).seal);
        assert_eq!((with(&catalog, "a"), with(&catalog, "b")), (vec![1], vec![2, 4]));
        catalog.insert(LayerId(1), info(1, None));
        catalog.remove(LayerId(4));
        catalog.update(LayerId(9), |_| unreachable!("there is no such layer"));
        assert_eq!((with(&catalog, "a"), with(&catalog, "b")), (vec![], vec![2]));
        assert_eq!((catalog.len(), catalog.named.len()), (3, 1));
    }
}
