//! Collects the ranges of pools that are still referenced, and computes which ranges are unused.
//!
//! References name addresses. [`crate::store::Store::locate`] translates them through the remaps
//! into ranges of pools. Space is punched by ranges of pools, never by addresses.

use std::collections::BTreeMap;

use crate::store::content::pool::in_blocks;
use crate::tree::Source;
use crate::types::{ByteRange, LayerId};

/// Ranges of pools that are referenced.
#[derive(Default)]
pub struct LiveRanges {
    pools: BTreeMap<LayerId, Vec<ByteRange>>,
}

impl LiveRanges {
    /// Adds `len` bytes of a source. Sources outside the store count for nothing.
    pub fn add(&mut self, source: Source, len: u64) {
        if let Source::Pool { layer, offset } = source {
            self.add_range(layer, ByteRange::at(offset, len));
        }
    }

    /// Adds extents: each refers to a range of its source.
    pub fn add_extents<'e>(&mut self, extents: impl Iterator<Item = &'e (ByteRange, Source)>) {
        for (range, source) in extents {
            self.add(*source, range.len());
        }
    }

    /// Adds a range of the pool of a layer.
    pub fn add_range(&mut self, layer: LayerId, range: ByteRange) {
        self.pools.entry(layer).or_default().push(range);
    }

    /// The ranges by layer, in the order in which they were added.
    pub(in crate::store) fn by_layer(&self) -> &BTreeMap<LayerId, Vec<ByteRange>> {
        &self.pools
    }

    /// The live ranges of one layer, sorted and merged.
    pub fn of(&self, layer: LayerId) -> Vec<ByteRange> {
        let mut ranges = self.pools.get(&layer).cloned().unwrap_or_default();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, before| {
            let joins = next.start <= before.end;
            before.end = if joins { before.end.max(next.end) } else { before.end };
            joins
        });
        ranges
    }

    /// Whether any range of the pool of a layer is live.
    pub fn is_used(&self, layer: LayerId) -> bool {
        self.pools.get(&layer).is_some_and(|live| !live.is_empty())
    }

    /// The parts of `data` that are not live. `data` is sorted and does not overlap. A live byte
    /// keeps its whole block, because only whole blocks are punched.
    pub fn unused(&self, layer: LayerId, data: &[ByteRange]) -> Vec<ByteRange> {
        let live: Vec<ByteRange> = self.of(layer).into_iter().map(in_blocks).collect();
        let mut unused = Vec::new();
        let mut live = live.iter().peekable();
        for range in data {
            let mut at = range.start;
            while let Some(next) = live.peek() {
                if next.start > at && at < range.end {
                    unused.push(ByteRange { start: at, end: next.start.min(range.end) });
                }
                at = at.max(next.end);
                if next.end > range.end {
                    break;
                }
                live.next();
            }
            if at < range.end {
                unused.push(ByteRange { start: at, end: range.end });
            }
        }
        unused.retain(|range| !range.is_empty());
        unused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_blocks_without_a_live_byte_are_unused() {
        let range = |start: u64, end: u64| ByteRange { start: start * 4096, end: end * 4096 };
        let mut live = LiveRanges::default();
        for (start, len) in [(5 * 4096 + 7, 1), (9 * 4096, 3 * 4096), (1, 2 * 4096), (9 * 4096, 1)]
        {
            live.add(Source::Pool { layer: LayerId(1), offset: start }, len);
        }
        let data = [range(0, 4), range(5, 7), range(8, 20)];
        let unused = live.unused(LayerId(1), &data);
        assert_eq!(unused, [range(3, 4), range(6, 7), range(8, 9), range(12, 20)]);
        assert_eq!(
            live.unused(LayerId(2), &data),
            data,
            "a pool without live ranges is unused as a whole"
        );
    }
}
