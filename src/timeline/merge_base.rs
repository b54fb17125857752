//! Finds the merge base of two heads.
//!
//! Always true:
//! * A state comes from the states below it. The state that a merge led to comes from both heads.
//! * The states that a state comes from have lower numbers.
//!
//! A merge is a fact about two states, so it counts whichever head has it in its record. The
//! records have all merges, not only the last ones: after a restore, an earlier merge can be the
//! last one again. If gc collects a merged state, its newest remaining ancestors replace it in the
//! record.

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

impl Ancestry {
    /// Adds a state and those that it continues to `line`, as far as they are not in it, and the
    /// merges that led to them to `merges`.
    fn follow(
        &self,
        from: LayerId,
        line: &mut BTreeSet<LayerId>,
        merges: &mut BTreeSet<MergePoint>,
    ) {
        let mut at = Some(from);
        while let Some(into) = at.filter(|layer| line.insert(*layer)) {
            let merged = self.merges.get(&into).into_iter().flatten();
            merges.extend(merged.map(|layer| MergePoint { into, layer: *layer }));
            at = self.below.get(&into).copied();
        }
    }

    /// The states from which a state came, itself included, and the merges without which some of
    /// them would be missing.
    fn origins(&self, from: LayerId) -> (BTreeSet<LayerId>, Vec<MergePoint>) {
        let (mut origins, mut merges, mut used) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        self.follow(from, &mut origins, &mut merges);
        // The newest first: it often covers older ones.
        while let Some(merge) = merges.pop_last() {
            if !origins.contains(&merge.layer) {
                self.follow(merge.layer, &mut origins, &mut merges);
                used.push(merge);
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

    /// The newest ancestors of a merged state that remain, according to `remains`, without those
    /// that the state after the merge continues anyway.
    fn remaining_ancestors(
        &self,
        merge: MergePoint,
        remains: impl Fn(&LayerId) -> bool,
    ) -> Vec<LayerId> {
        let mut continued = BTreeSet::new();
        self.follow(merge.into, &mut continued, &mut BTreeSet::new());
        let origins = self.origins(merge.layer).0;
        let mut newest = self.newest(origins.into_iter().filter(remains));
        newest.retain(|layer| !continued.contains(layer));
        newest
    }

    /// The states at which the lines of these states part.
    fn junctions(&self, states: impl Iterator<Item = LayerId>) -> BTreeSet<LayerId> {
        let (mut seen, mut continued, mut junctions) =
            (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for state in states {
            let mut at = Some(state);
            while let Some(layer) = at.filter(|layer| seen.insert(*layer)) {
                at = self.below.get(&layer).copied();
                junctions.extend(at.filter(|below| !continued.insert(*below)));
            }
        }
        junctions
    }

    /// For each of these states the newest state with a merge that it continues, or that state
    /// itself.
    fn last_merges(&self, states: &[LayerId]) -> BTreeSet<LayerId> {
        let (mut seen, mut last) = (BTreeSet::new(), BTreeSet::new());
        for state in states {
            let mut at = Some(*state);
            while let Some(layer) = at.filter(|layer| seen.insert(*layer)) {
                if self.merges.contains_key(&layer) {
                    last.insert(layer);
                    break;
                }
                at = self.below.get(&layer).copied();
            }
        }
        last
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
    pub(super) fn merge_bases(&self, needed: &BTreeSet<LayerId>) -> Result<BTreeSet<LayerId>> {
        let ancestry = self.merge_history()?;
        let states: Vec<LayerId> = self.tops().into_iter().chain(needed.iter().copied()).collect();
        let mut lines = BTreeSet::new();
        states.iter().for_each(|state| ancestry.follow(*state, &mut lines, &mut BTreeSet::new()));
        let last = ancestry.last_merges(&states);
        let used: BTreeSet<MergePoint> =
            last.into_iter().flat_map(|into| ancestry.origins(into).1).collect();
        // No head continues these states any more. One that came by several merges can be a merge
        // base of the heads that made them.
        let mut times: BTreeMap<LayerId, usize> = BTreeMap::new();
        for merge in used.iter().filter(|merge| !lines.contains(&merge.layer)) {
            let origins = ancestry.origins(merge.layer).0;
            origins.difference(&lines).for_each(|layer| *times.entry(*layer).or_default() += 1);
        }
        let remains =
            |layer: &LayerId| lines.contains(layer) || times.get(layer).is_some_and(|n| *n > 1);
        let mut kept = BTreeSet::new();
        for merge in used {
            let states = match remains(&merge.layer) {
                true => vec![merge.layer],
                false => ancestry.remaining_ancestors(merge, remains),
            };
            if !states.is_empty() {
                kept.insert(merge.into);
                kept.extend(states);
            }
        }
        kept.extend(ancestry.junctions(states.iter().chain(&kept.clone()).copied()));
        Ok(kept)
    }

    /// Before gc collects the sealed states that are not in `needed`: replaces those of them that
    /// were merged by their newest remaining ancestors.
    ///
    /// # Errors
    /// Damage, or a failure of the store.
    pub(super) fn replace_merged(&self, needed: &BTreeSet<LayerId>) -> Result<()> {
        let ancestry = self.merge_history()?;
        for (name, record) in self.store.head_records()? {
            let mut merged = BTreeSet::new();
            for merge in record.merged.iter().filter(|merge| needed.contains(&merge.into)) {
                if needed.contains(&merge.layer) {
                    merged.insert(*merge);
                    continue;
                }
                let remaining =
                    ancestry.remaining_ancestors(*merge, |layer| needed.contains(layer));
                merged.extend(remaining.into_iter().map(|layer| MergePoint { layer, ..*merge }));
            }
            if merged != record.merged {
                self.with_reserve(|| self.store.set_merged(&name, merged.clone()))?;
            }
        }
        Ok(())
    }
}
