//! Which ranges of pools something refers to, and so which can be given back.
//!
//! What refers to content says at which address of which layer it is; [`LiveRanges::places`] says where on disk that is, by the maps of
//! the layers. Space is given back by places.

use std::collections::BTreeMap;

use crate::store::content::cells::Cells;
use crate::store::content::pool::{block_ceil, block_floor};
use crate::store::record::Source;
use crate::types::{ByteRange, LayerId};

/// Ranges of pools to which something refers.
#[derive(Default)]
pub struct LiveRanges {
    pools: BTreeMap<LayerId, Vec<ByteRange>>,
}

impl LiveRanges {
    /// Something refers to `len` bytes of a source.
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

    /// The ranges by layer, as they were added.
    pub(in crate::store) fn pools(&self) -> &BTreeMap<LayerId, Vec<ByteRange>> {
        &self.pools
    }

    /// Something refers to a range of the pool of a layer.
    pub fn add_range(&mut self, layer: LayerId, range: ByteRange) {
        self.pools.entry(layer).or_default().push(range);
    }

    /// What of a layer something refers to: in order, none overlapping another.
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

    /// Whether something refers to the pool of a layer.
    pub fn is_used(&self, layer: LayerId) -> bool {
        self.pools.get(&layer).is_some_and(|used| !used.is_empty())
    }

    /// What of `data`, whose ranges are in order, nothing refers to; in whole blocks, because blocks are given back whole, and what is deflated in
    /// whole cells.
    pub fn unused(
        &self,
        layer: LayerId,
        data: &[ByteRange],
        cells: Option<&Cells>,
    ) -> Vec<ByteRange> {
        let whole = |range| cells.map_or(range, |cells| cells.whole(range));
        let used: Vec<ByteRange> = self.of(layer).into_iter().map(whole).map(in_blocks).collect();
        let mut unused = Vec::new();
        let mut used = used.iter().peekable();
        for range in data {
            let mut at = range.start;
            while let Some(next) = used.peek() {
                if next.start > at && at < range.end {
                    unused.push(ByteRange { start: at, end: next.start.min(range.end) });
                }
                at = at.max(next.end);
                if next.end > range.end {
                    break;
                }
                used.next();
            }
            if at < range.end {
                unused.push(ByteRange { start: at, end: range.end });
            }
        }
        unused.retain(|range| !range.is_empty());
        unused
    }
}

/// The blocks in which a range has a byte.
pub(in crate::store) fn in_blocks(range: ByteRange) -> ByteRange {
    ByteRange { start: block_floor(range.start), end: block_ceil(range.end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_referred_to_is_unused_and_nothing_else() {
        let range = |start: u64, end: u64| ByteRange { start: start * 4096, end: end * 4096 };
        let mut refs = LiveRanges::default();
        for (start, len) in [(5 * 4096 + 7, 1), (9 * 4096, 3 * 4096), (1, 2 * 4096), (9 * 4096, 1)]
        {
            refs.add(Source::Pool { layer: LayerId(1), offset: start }, len);
        }
        let data = [range(0, 4), range(5, 7), range(8, 20)];
        let unused = refs.unused(LayerId(1), &data, None);
        assert_eq!(unused, [range(3, 4), range(6, 7), range(8, 9), range(12, 20)]);
        assert_eq!(
            refs.unused(LayerId(2), &data, None),
            data,
            "a pool that nothing refers to is unused as a whole"
        );
    }
}
