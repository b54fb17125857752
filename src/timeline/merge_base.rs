//! Finds the merge base of two heads.
//!
//! Always true:
//! * A state comes from the states below it. The state that a merge led to comes from both heads.
//! * The states that a state comes from have lower numbers.
//!
//! The record of a head has all its merges, not only the last ones: after a restore, an earlier
//! merge can be the last one again.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Result;
use crate::store::record::MergePoint;
use crate::timeline::{Common, Target, Timeline};
use crate::types::LayerId;

/// The states of all heads, and where each came from.
struct Ancestry {
    /// The state that each one continues.
    below: BTreeMap<LayerId, LayerId>,
    /// Merged states, by the states that the merges led to.
    merges: BTreeMap<LayerId, BTreeSet<LayerId>>,
}

/// A merge: the state that it led to, and the merged one.
type Edge = (LayerId, LayerId);

impl Ancestry {
    /// Adds a state and those that it continues to `line`, as far as they are not in it, and the
    /// merges that led to them to `edges`.
    fn follow(&self, from: LayerId, line: &mut BTreeSet<LayerId>, edges: &mut BTreeSet<Edge>) {
        let mut at = Some(from);
        while let Some(layer) = at.filter(|layer| line.insert(*layer)) {
            let merged = self.merges.get(&layer).into_iter().flatten();
            edges.extend(merged.map(|merged| (layer, *merged)));
            at = self.below.get(&layer).copied();
        }
    }

    /// The states from which a state came, itself included, and the merges without which some of
    /// them would be missing.
    fn origins(&self, from: LayerId) -> (BTreeSet<LayerId>, Vec<Edge>) {
        let (mut origins, mut edges, mut used) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        self.follow(from, &mut origins, &mut edges);
        // The newest first: it often covers older ones.
        while let Some((into, merged)) = edges.pop_last() {
            if !origins.contains(&merged) {
                self.follow(merged, &mut origins, &mut edges);
                used.push((into, merged));
            }
        }
        (origins, used)
    }

    /// The newest state with a merge that a state continues, or that state itself.
    fn last_merge(&self, from: LayerId) -> Option<LayerId> {
        let mut at = Some(from);
        while let Some(layer) = at.filter(|layer| !self.merges.contains_key(layer)) {
            at = self.below.get(&layer).copied();
        }
        at
    }
}

impl Timeline {
    /// Whether the head came from a sealed state, by its lineage or by merges.
    ///
    /// # Errors
    /// Damage.
    pub(super) fn comes_from(&self, layer: LayerId) -> Result<bool> {
        Ok(self.origins(self.head(), &self.merge_history(|_, _| true)?)?.contains(&layer))
    }
}

impl Common {
    /// The merge base of two heads: a sealed state from which both came, and from which no other
    /// such state came. If there are several, the one that was sealed last. `None` if the heads
    /// have no state in common.
    ///
    /// # Errors
    /// [`Kind::NoStore`](crate::error::Kind::NoStore) if there is no such head, or damage.
    pub fn common_seal(&self, a: &str, b: &str) -> Result<Option<Target>> {
        let ancestry = self.merge_history(|_, _| true)?;
        let (of_a, of_b) = (self.origins(a, &ancestry)?, self.origins(b, &ancestry)?);
        let (mut best, mut older) = (Vec::new(), BTreeSet::new());
        for layer in of_a.intersection(&of_b).collect::<Vec<_>>().into_iter().rev() {
            let sealed = self.store.layer(*layer).filter(|info| info.seal.is_some());
            if let Some(info) = sealed.filter(|_| !older.contains(layer)) {
                older.extend(ancestry.origins(*layer).0);
                best.push(info);
            }
        }
        let newest = best.into_iter().max_by_key(|info| info.seal.as_ref().map(|seal| seal.time));
        Ok(newest.map(|info| Target { layer: Some(info.header.layer), epoch: info.header.epoch }))
    }

    /// The sealed states from which a head came.
    fn origins(&self, head: &str, ancestry: &Ancestry) -> Result<BTreeSet<LayerId>> {
        let last = self.lineage_of(head)?.first().map(|info| info.header.layer);
        Ok(last.map(|layer| ancestry.origins(layer).0).unwrap_or_default())
    }

    /// The ancestry of all heads, with the merges for which `counts` says so, given the name of the
    /// other head.
    fn merge_history(&self, counts: impl Fn(&str, &MergePoint) -> bool) -> Result<Ancestry> {
        let mut ancestry = Ancestry { below: BTreeMap::new(), merges: BTreeMap::new() };
        for record in self.store.head_records()?.into_values() {
            for (_, merge) in record.merged.iter().filter(|(other, merge)| counts(other, merge)) {
                ancestry.merges.entry(merge.into).or_default().insert(merge.layer);
            }
        }
        for info in self.store.catalog().iter().filter(|info| info.header.kind.is_of_head()) {
            let below = self.store.came_from(info).map(|below| (info.header.layer, below));
            ancestry.below.extend(below);
        }
        Ok(ancestry)
    }

    /// The states that gc keeps so that the heads, and the states in `needed`, have the same merge
    /// bases as before. A merge of a head that was dropped does not count, unless the merged state
    /// is needed.
    ///
    /// # Errors
    /// Damage.
    pub(super) fn merged_states(&self, needed: &BTreeSet<LayerId>) -> Result<BTreeSet<LayerId>> {
        let heads = self.store.head_records()?;
        if heads.values().all(|head| head.merged.is_empty()) {
            return Ok(BTreeSet::new());
        }
        let ancestry = self.merge_history(|other, merge| {
            let is_current = heads.get(other).is_some_and(|head| head.since() == merge.since);
            is_current || needed.contains(&merge.layer)
        })?;
        let states = self.tops().into_iter().chain(needed.iter().copied());
        let merges: BTreeSet<LayerId> =
            states.filter_map(|layer| ancestry.last_merge(layer)).collect();
        let used = merges.into_iter().flat_map(|into| ancestry.origins(into).1);
        Ok(used.flat_map(|(into, merged)| [into, merged]).collect())
    }
}
