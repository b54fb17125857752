//! Finds sealed layers whose journal has lost its end.
//!
//! A sealed journal that was cut short looks like the journal of a layer that is still written to:
//! the store would silently show an older state. So opening a store checks each layer that was
//! certainly sealed:
//!
//! * the parent of a sealed layer, and the parent of a layer on top of a head: a head is published
//!   after its parent is sealed;
//! * a layer that the log of operations or a hold names;
//! * a layer with files that only sealed layers have: checksums, a remap or an index.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::store::layer::info::LayerInfo;
use crate::types::LayerId;

/// The evidence that layers were sealed.
pub(in crate::store) struct Evidence<'a> {
    /// The layers on top of a head.
    pub tops: &'a BTreeSet<LayerId>,
    /// The layers that operations, holds and the ledger name.
    pub named: BTreeSet<LayerId>,
}

impl Evidence<'_> {
    /// Checks that no layer has lost its seal. `show` gives the path of a journal.
    ///
    /// # Errors
    /// Damage of the first such journal, with the checkpoints that do not need the layer as a hint.
    pub(in crate::store) fn check(
        &self,
        catalog: &BTreeMap<LayerId, LayerInfo>,
        show: impl Fn(LayerId) -> String,
    ) -> Result<()> {
        let must_be_sealed = self.sealed_once(catalog);
        let lost =
            |info: &&LayerInfo| info.seal.is_none() && must_be_sealed.contains(&info.header.layer);
        let Some(first) = catalog.values().find(lost) else { return Ok(()) };
        let layer = first.header.layer;
        let attempt = format!("read {} at offset {}", show(layer), first.bytes);
        let error = Error::damage(
            attempt,
            format!("the journal of sealed layer {layer} ends before its seal"),
        );
        Err(error.hint(match checkpoints_without(layer, catalog) {
            none if none.is_empty() => {
                "'jailfs check' lists all damage; every checkpoint needs this layer".to_owned()
            }
            whole => format!(
                "'jailfs check' lists all damage; these checkpoints do not need this layer: {whole}"
            ),
        }))
    }

    /// The layers that were sealed at some time.
    fn sealed_once(&self, catalog: &BTreeMap<LayerId, LayerInfo>) -> BTreeSet<LayerId> {
        let mut layers = self.named.clone();
        for info in catalog.values().filter(|info| info.header.kind.is_of_head()) {
            if info.seal.is_some() || self.tops.contains(&info.header.layer) {
                layers.extend(info.header.parent);
            }
            if info.summed || info.mapped || info.index.is_some() || info.archived.is_some() {
                layers.insert(info.header.layer);
            }
        }
        layers
    }
}

/// The checkpoints whose states do not include layer `lost`, as a list for people.
fn checkpoints_without(lost: LayerId, catalog: &BTreeMap<LayerId, LayerInfo>) -> String {
    let includes_lost = |mut layer: LayerId| {
        while layer != lost {
            match catalog.get(&layer).and_then(|info| info.header.parent) {
                Some(parent) if parent < layer => layer = parent,
                _ => return false,
            }
        }
        true
    };
    let is_checkpoint = |info: &&LayerInfo| info.seal.as_ref().is_some_and(|seal| !seal.automatic);
    let checkpoints = catalog.values().filter(is_checkpoint).map(|info| info.header.layer);
    let whole: Vec<String> =
        checkpoints.filter(|layer| !includes_lost(*layer)).map(|layer| layer.to_string()).collect();
    whole.join(", ")
}
