//! Which addresses of the pool of the upper layer are not written again, because something else refers to them, too: a version, or
//! what an undo brought back.

use std::collections::BTreeMap;

use crate::tree::{Source, Tree};
use crate::types::{ByteRange, LayerId};

/// Ranges of the pool of one layer. Of another layer nothing is frozen: it is sealed, or no version refers to it yet.
pub(super) struct PinnedRanges {
    layer: LayerId,
    /// Start and end; they neither overlap nor touch.
    ranges: BTreeMap<u64, u64>,
}

impl Default for PinnedRanges {
    fn default() -> PinnedRanges {
        PinnedRanges { layer: LayerId(0), ranges: BTreeMap::new() }
    }
}

impl PinnedRanges {
    /// Says that something refers to bytes from now on, if they are in the pool of `upper`.
    pub(super) fn add(&mut self, upper: LayerId, source: Source, len: u64) {
        let Source::Pool { layer, offset } = source else { return };
        if layer != upper || len == 0 {
            return;
        }
        if self.layer != upper {
            *self = PinnedRanges { layer: upper, ranges: BTreeMap::new() };
        }
        let ByteRange { mut start, mut end } = ByteRange::at(offset, len);
        while let Some((first, last)) = self
            .ranges
            .range(..=end)
            .next_back()
            .map(|(first, last)| (*first, *last))
            .filter(|r| r.1 >= start)
        {
            self.ranges.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        self.ranges.insert(start, end);
    }

    /// The first frozen range in a part of the pool of a layer; none if it may be written.
    pub(super) fn first(&self, layer: LayerId, part: ByteRange) -> Option<ByteRange> {
        if layer != self.layer || self.ranges.is_empty() {
            return None;
        }
        let before =
            self.ranges.range(..=part.start).next_back().filter(|(_, end)| **end > part.start);
        let first = before.or_else(|| self.ranges.range(part.start..part.end).next());
        let (start, end) =
            first.map(|(start, end)| (*start.max(&part.start), *end.min(&part.end)))?;
        (start < end).then_some(ByteRange { start, end })
    }
}

/// The ranges of the pool of a layer to which a tree refers more than once.
pub(super) fn shared(tree: &Tree, layer: LayerId) -> Vec<ByteRange> {
    let in_pool = tree.all_extents().filter_map(|(_, extent)| match extent.source {
        Source::Pool { layer: of, offset } if of == layer => {
            Some(ByteRange::at(offset, extent.len))
        }
        _ => None,
    });
    let mut ranges: Vec<ByteRange> = in_pool.collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut end = 0;
    ranges.retain_mut(|range| {
        let once = end.max(range.end);
        range.end = range.end.min(end);
        end = once;
        !range.is_empty()
    });
    ranges.shrink_to_fit();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_version_refers_to_is_frozen_and_nothing_else() {
        let mut frozen = PinnedRanges::default();
        let upper = LayerId(3);
        let mut model = [false; 64];
        for (offset, len) in [(10, 5), (20, 5), (15, 5), (40, 1), (8, 3), (41, 2), (60, 4), (12, 2)]
        {
            frozen.add(upper, Source::Pool { layer: upper, offset }, len);
            model[offset as usize..(offset + len) as usize].fill(true);
            for start in 0..64u64 {
                for end in start..64 {
                    let first = (start..end).find(|at| model[*at as usize]);
                    let found = frozen.first(upper, ByteRange { start, end });
                    assert_eq!(found.map(|r| r.start), first, "{start}..{end}");
                    if let Some(found) = found {
                        let last =
                            (found.start..end).find(|at| !model[*at as usize]).unwrap_or(end);
                        assert_eq!(found.end, last);
                    }
                }
            }
        }
        assert!(frozen.first(LayerId(2), ByteRange::at(0, 64)).is_none());
        frozen.add(upper, Source::Base { offset: 0 }, 64);
        frozen.add(LayerId(2), Source::Pool { layer: LayerId(1), offset: 0 }, 64);
        assert!(frozen.first(upper, ByteRange::at(0, 8)).is_none());
        frozen.add(LayerId(4), Source::Pool { layer: LayerId(4), offset: 0 }, 8);
        assert!(
            frozen.first(upper, ByteRange::at(0, 64)).is_none(),
            "a new layer begins with nothing"
        );
    }
}
