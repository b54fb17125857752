//! The catalog: all layers of a store, and which of them have which name or need which work.
//!
//! A store can have many thousands of layers, and most of them are settled: nothing is to be done
//! for them any more. The background work after each checkpoint looks only at the others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use crate::store::checkpoint_names::name_of;
use crate::store::layer::LayerInfo;
use crate::types::{LayerId, Timestamp};

/// The layers by number.
type Layers = BTreeMap<LayerId, LayerInfo>;

/// Layers that are not settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// They have no seal: upper layers, and those that an operation left behind.
    Unsealed,
    /// They are sealed, and their pools have no checksums yet.
    Unsummed,
    /// They are sealed states, and rewriting their journals pays.
    LongJournal,
}

impl Unsettled {
    const ALL: [Unsettled; 3] = [Unsettled::Unsealed, Unsettled::Unsummed, Unsettled::LongJournal];

    fn has(self, info: &LayerInfo) -> bool {
        match self {
            Unsettled::Unsealed => info.seal.is_none(),
            Unsettled::Unsummed => info.seal.is_some() && !info.summed,
            Unsettled::LongJournal => info.is_sealed_state() && info.has_long_journal(),
        }
    }
}

/// The catalog. Always true: each set has the layers that its field names, and no others.
#[derive(Default)]
pub(in crate::store) struct Catalog {
    layers: Layers,
    named: BTreeMap<String, BTreeSet<LayerId>>,
    unsettled: [BTreeSet<LayerId>; Unsettled::ALL.len()],
    /// The listed checkpoints, by the times of their seals.
    listed: BTreeSet<(Timestamp, LayerId)>,
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
        for (which, layers) in Unsettled::ALL.iter().zip(&mut self.unsettled) {
            if which.has(&info) {
                layers.insert(layer);
            }
        }
        if let Some(seal) = info.listed_seal() {
            self.listed.insert((seal.time, layer));
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
        for layers in &mut self.unsettled {
            layers.remove(&layer);
        }
        if let Some(seal) = info.listed_seal() {
            self.listed.remove(&(seal.time, layer));
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
        self.those(self.named.get(name).into_iter().flatten())
    }

    /// The layers that are not settled in this way, oldest first.
    pub(in crate::store) fn unsettled(&self, which: Unsettled) -> impl Iterator<Item = &LayerInfo> {
        let sets = Unsettled::ALL.iter().zip(&self.unsettled);
        self.those(sets.filter(move |(of, _)| **of == which).flat_map(|(_, layers)| layers))
    }

    /// The number of listed checkpoints, and the time of the last seal among them.
    pub(in crate::store) fn listed(&self) -> (usize, Option<Timestamp>) {
        (self.listed.len(), self.listed.last().map(|(time, _)| *time))
    }

    fn those<'c>(
        &'c self,
        layers: impl Iterator<Item = &'c LayerId>,
    ) -> impl Iterator<Item = &'c LayerInfo> {
        layers.filter_map(|layer| self.layers.get(layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

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

    fn of_work(catalog: &Catalog) -> [Vec<u32>; 3] {
        Unsettled::ALL
            .map(|which| catalog.unsettled(which).map(|info| info.header.layer.0).collect())
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

    #[test]
    fn a_layer_is_unsettled_until_its_last_work_is_done() {
        let mut catalog = Catalog::default();
        catalog.insert(LayerId(1), LayerInfo { seal: None, ..info(1, None) });
        catalog.insert(LayerId(2), LayerInfo { bytes: 1 << 20, ..info(2, None) });
        assert_eq!(of_work(&catalog), [vec![1], vec![2], vec![2]]);
        catalog.update(LayerId(2), |changed| changed.compact = true);
        catalog.update(LayerId(1), |changed| changed.seal = info(1, None).seal);
        assert_eq!(of_work(&catalog), [vec![], vec![1, 2], vec![]]);
        catalog.update(LayerId(1), |changed| changed.summed = true);
        catalog.remove(LayerId(2));
        assert!(of_work(&catalog).iter().all(Vec::is_empty));
    }

    #[test]
    fn listed_checkpoints_are_counted_with_the_time_of_the_last_seal() {
        let sealed_at = |layer, secs, automatic| {
            let mut info = info(layer, None);
            let time = Timestamp { secs, nanos: 0 };
            let seal = Seal { time, automatic, ..Seal::clone(info.seal.as_deref().unwrap()) };
            info.seal = Some(Arc::new(seal));
            info
        };
        let mut catalog = Catalog::default();
        assert_eq!(catalog.listed(), (0, None));
        let all = [sealed_at(1, 50, false), sealed_at(2, 40, false), sealed_at(3, 60, true)];
        for info in all {
            catalog.insert(info.header.layer, info);
        }
        catalog.insert(LayerId(4), LayerInfo { seal: None, ..info(4, None) });
        assert_eq!(catalog.listed(), (2, Some(Timestamp { secs: 50, nanos: 0 })));
        catalog.remove(LayerId(1));
        assert_eq!(catalog.listed(), (1, Some(Timestamp { secs: 40, nanos: 0 })));
        catalog.update(LayerId(2), |changed| changed.seal = sealed_at(2, 40, true).seal);
        assert_eq!(catalog.listed(), (0, None));
    }
}
