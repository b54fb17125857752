//! Finds the merge base of two heads.
//!
//! Always true:
//! * A state comes from the states below it. The state that a merge led to comes from both heads.
//! * The states that a state comes from have lower numbers.
//!
//! The merges of all heads count together: a record of a head has those of the head and of dropped
//! ones. It has all of them, not only the last ones: after a restore, an earlier merge can be the
//! last one again. When gc takes a merged state, the newest states that are left of those that it
//! came from stand for it.

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

    /// Of these states, those from which no other of them came.
    fn newest(&self, states: impl DoubleEndedIterator<Item = LayerId>) -> Vec<LayerId> {
        let (mut newest, mut older) = (Vec::new(), BTreeSet::new());
        for layer in states.rev() {
            if !older.contains(&layer) {
                older.extend(self.origins(layer).0);
                newest.push(layer);
            }
        }
        newest
    }

    /// The newest states from which `merged` came, among those for which `is_kept` says so. They
    /// are what a merge of it brought to `into`, if the other states are gone.
    fn brought(
        &self,
        (into, merged): Edge,
        is_kept: impl Fn(&LayerId) -> bool,
    ) -> impl Iterator<Item = LayerId> {
        let (origins, mut own) = (self.origins(merged).0, BTreeSet::new());
        self.follow(into, &mut own, &mut BTreeSet::new());
        let newest = self.newest(origins.into_iter().filter(is_kept));
        newest.into_iter().filter(move |layer| !own.contains(layer))
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
        Ok(self.origins(self.head(), &self.merge_history()?)?.contains(&layer))
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
        let ancestry = self.merge_history()?;
        let (of_a, of_b) = (self.origins(a, &ancestry)?, self.origins(b, &ancestry)?);
        let sealed = |layer: &LayerId| self.store.layer(*layer).filter(|info| info.seal.is_some());
        let is_common = |layer: &LayerId| of_b.contains(layer) && sealed(layer).is_some();
        let best = ancestry.newest(of_a.into_iter().filter(is_common));
        let newest = best
            .iter()
            .filter_map(sealed)
            .max_by_key(|info| info.seal.as_ref().map(|seal| seal.time));
        Ok(newest.map(|info| Target { layer: Some(info.header.layer), epoch: info.header.epoch }))
    }

    /// The sealed states from which a head came.
    fn origins(&self, head: &str, ancestry: &Ancestry) -> Result<BTreeSet<LayerId>> {
        let last = self.lineage_of(head)?.first().map(|info| info.header.layer);
        Ok(last.map(|layer| ancestry.origins(layer).0).unwrap_or_default())
    }

    /// The ancestry of all heads.
    fn merge_history(&self) -> Result<Ancestry> {
        let mut ancestry = Ancestry { below: BTreeMap::new(), merges: BTreeMap::new() };
        for merge in self.store.head_records()?.into_values().flat_map(|record| record.merged) {
            ancestry.merges.entry(merge.into).or_default().insert(merge.layer);
        }
        for info in self.store.catalog().iter().filter(|info| info.header.kind.is_of_head()) {
            let below = self.store.came_from(info).map(|below| (info.header.layer, below));
            ancestry.below.extend(below);
        }
        Ok(ancestry)
    }

    /// The states that gc keeps so that the heads, and the states in `needed`, have the same merge
    /// bases as before.
    ///
    /// # Errors
    /// Damage.
    pub(super) fn merged_states(&self, needed: &BTreeSet<LayerId>) -> Result<BTreeSet<LayerId>> {
        let ancestry = self.merge_history()?;
        if ancestry.merges.is_empty() {
            return Ok(BTreeSet::new());
        }
        let states: Vec<LayerId> = self.tops().into_iter().chain(needed.iter().copied()).collect();
        let (mut lines, mut merges) = (BTreeSet::new(), BTreeSet::new());
        for state in states {
            ancestry.follow(state, &mut lines, &mut BTreeSet::new());
            merges.extend(ancestry.last_merge(state));
        }
        let used: BTreeSet<Edge> =
            merges.into_iter().flat_map(|into| ancestry.origins(into).1).collect();
        let mut times: BTreeMap<LayerId, usize> = BTreeMap::new();
        used.iter().for_each(|(_, merged)| *times.entry(*merged).or_default() += 1);
        let mut kept = BTreeSet::new();
        for edge in used {
            // A state of a dropped head can still be common to several heads that have merged it.
            let is_kept =
                |layer: &LayerId| lines.contains(layer) || times.get(layer).is_some_and(|n| *n > 1);
            let brought: Vec<LayerId> = ancestry.brought(edge, is_kept).collect();
            if !brought.is_empty() {
                kept.insert(edge.0);
                kept.extend(brought);
            }
        }
        Ok(kept)
    }

    /// Before gc takes the sealed states that are not in `needed`: has the records of merges name
    /// those that stand for them.
    ///
    /// # Errors
    /// Damage, or a failure of the store.
    pub(super) fn replace_merged(&self, needed: &BTreeSet<LayerId>) -> Result<()> {
        let ancestry = self.merge_history()?;
        let is_kept = |layer: &LayerId| needed.contains(layer);
        for (name, record) in self.store.head_records()? {
            let mut merged = Vec::new();
            for MergePoint { layer, into } in &record.merged {
                let brought = ancestry.brought((*into, *layer), is_kept);
                let points = brought.map(|layer| MergePoint { layer, into: *into });
                merged.extend(points.filter(|point| is_kept(&point.into)));
            }
            if merged != record.merged {
                self.store.set_merged(&name, merged)?;
            }
        }
        Ok(())
    }
}
