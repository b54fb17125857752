//! A set of ranges.

use std::collections::BTreeMap;

use crate::types::ByteRange;

/// Ranges that neither overlap nor touch: the end of each by its start.
#[derive(Debug, Default)]
pub struct RangeSet {
    ends: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Whether no range is in the set.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Adds a range.
    pub fn add(&mut self, mut range: ByteRange) {
        if range.is_empty() {
            return;
        }
        while let Some(last) = self.last_before(range.end).filter(|last| last.end >= range.start) {
            self.ends.remove(&last.start);
            range = ByteRange { start: range.start.min(last.start), end: range.end.max(last.end) };
        }
        self.ends.insert(range.start, range.end);
    }

    /// Removes a range.
    pub fn remove(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        while let Some(last) = self.last_before(range.end - 1).filter(|l| l.end > range.start) {
            self.ends.remove(&last.start);
            if last.start < range.start {
                self.ends.insert(last.start, range.start);
            }
            if last.end > range.end {
                self.ends.insert(range.end, last.end);
            }
        }
    }

    /// The parts of a range that are not in the set, in order.
    pub fn missing_in(&self, range: ByteRange) -> Vec<ByteRange> {
        let (mut missing, mut at) = (Vec::new(), range.start);
        let before = self.last_before(range.start).map_or(range.start, |before| before.start);
        for (&start, &end) in self.ends.range(before..range.end.max(before)) {
            if start > at {
                missing.push(ByteRange { start: at, end: start });
            }
            at = at.max(end);
        }
        if at < range.end {
            missing.push(ByteRange { start: at, end: range.end });
        }
        missing
    }

    /// The last range that begins at `at` or before.
    fn last_before(&self, at: u64) -> Option<ByteRange> {
        let (&start, &end) = self.ends.range(..=at).next_back()?;
        Some(ByteRange { start, end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_exactly_the_bytes_that_were_added_and_not_removed() {
        const BYTES: u64 = 40;
        let (mut set, mut model) = (RangeSet::default(), [false; BYTES as usize]);
        let mut random = 7u64;
        for step in 0..5000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let start = (random >> 33) % BYTES;
            let range = ByteRange { start, end: start + (random >> 45) % (BYTES - start + 1) };
            let is_added = (random >> 60) & 1 == 0;
            if is_added {
                set.add(range)
            } else {
                set.remove(range)
            }
            model[range.start as usize..range.end as usize].fill(is_added);
            for from in 0..BYTES {
                let missing = set.missing_in(ByteRange { start: from, end: BYTES });
                let has = |at: u64| !missing.iter().any(|m| m.start <= at && at < m.end);
                let same = (from..BYTES).all(|at| has(at) == model[at as usize]);
                assert!(same, "step {step}, from {from}: {set:?}");
            }
            let touch = |pair: &[(&u64, &u64)]| pair[0].1 >= pair[1].0;
            let ranges: Vec<(&u64, &u64)> = set.ends.iter().collect();
            assert!(!ranges.windows(2).any(touch), "step {step}: {set:?}");
            assert_eq!(set.is_empty(), !model.contains(&true));
        }
    }
}
