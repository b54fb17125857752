//! Which ranges of pools something refers to, and so which can be given back.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::store::pool::{block_ceil, block_floor};
use crate::store::record::Source;
use crate::store::versions::Content;
use crate::types::{ByteRange, LayerId};

/// Ranges of pools to which something refers, in whole blocks: blocks are given back whole.
#[derive(Default)]
pub struct Used {
    pools: BTreeMap<LayerId, Vec<ByteRange>>,
}

impl Used {
    /// Something refers to `len` bytes of a source.
    pub fn add(&mut self, source: Source, len: u64) {
        if let Source::Pool { layer, offset } = source {
            self.add_range(layer, ByteRange::at(offset, len));
        }
    }

    /// Versions refer to their content.
    pub fn add_versions(&mut self, versions: &[Arc<Content>]) {
        for (range, source) in versions.iter().flat_map(|content| &content.extents) {
            self.add(*source, range.len());
        }
    }

    /// Something refers to a range of the pool of a layer.
    pub fn add_range(&mut self, layer: LayerId, range: ByteRange) {
        let range = ByteRange { start: block_floor(range.start), end: block_ceil(range.end) };
        self.pools.entry(layer).or_default().push(range);
    }

    /// Whether something refers to the pool of a layer.
    pub fn is_used(&self, layer: LayerId) -> bool {
        self.pools.get(&layer).is_some_and(|used| !used.is_empty())
    }

    /// What of `data`, whose ranges are in order, nothing refers to.
    pub fn unused(&mut self, layer: LayerId, data: &[ByteRange]) -> Vec<ByteRange> {
        let used = self.pools.entry(layer).or_default();
        used.sort_unstable_by_key(|range| range.start);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_referred_to_is_unused_and_nothing_else() {
        let range = |start: u64, end: u64| ByteRange { start: start * 4096, end: end * 4096 };
        let mut refs = Used::default();
        for (start, len) in [(5 * 4096 + 7, 1), (9 * 4096, 3 * 4096), (1, 2 * 4096), (9 * 4096, 1)] {
            refs.add(Source::Pool { layer: LayerId(1), offset: start }, len);
        }
        let data = [range(0, 4), range(5, 7), range(8, 20)];
        let unused = refs.unused(LayerId(1), &data);
        assert_eq!(unused, [range(3, 4), range(6, 7), range(8, 9), range(12, 20)]);
        assert_eq!(
            refs.unused(LayerId(2), &data),
            data,
            "a pool that nothing refers to is unused as a whole"
        );
    }
}
