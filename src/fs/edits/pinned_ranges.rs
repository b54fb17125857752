//! The ranges of the upper layer's pool that must not be overwritten, because an edit refers to
//! them, or because a file refers to them twice.

use std::collections::BTreeMap;

use crate::tree::{Source, Tree};
use crate::types::{ByteRange, LayerId};

/// Pinned ranges of one layer. Other layers need none: they are sealed, or no edit refers to them
/// yet.
pub(super) struct PinnedRanges {
    layer: LayerId,
    /// Start and end. Ranges neither overlap nor touch.
    ranges: BTreeMap<u64, u64>,
    /// Edits were dropped to make space, so some ranges may be pinned for nothing.
    is_loose: bool,
    /// The ranges of this layer stay pinned, whatever edits are dropped.
    is_fixed: bool,
    /// How many times ranges were unpinned.
    unpinned: u64,
}

impl Default for PinnedRanges {
    fn default() -> PinnedRanges {
        PinnedRanges {
            layer: LayerId(0),
            ranges: BTreeMap::new(),
            is_loose: false,
            is_fixed: false,
            unpinned: 0,
        }
    }
}

impl PinnedRanges {
    /// Pins all addresses of a layer below `end`, for as long as the layer is the upper one.
    pub(super) fn fix(&mut self, upper: LayerId, end: u64) {
        self.add(upper, Source::Pool { layer: upper, offset: 0 }, end);
        self.is_fixed = true;
    }

    /// Notes that edits were dropped to make space.
    pub(super) fn note_dropped(&mut self) {
        self.is_loose = true;
    }

    /// Whether [`PinnedRanges::keep_only`] may unpin something.
    pub(super) fn is_loose(&self) -> bool {
        self.is_loose && !self.is_fixed
    }

    /// How many times ranges were unpinned. A write may change the bytes of such a range in place.
    pub(super) fn unpinned(&self) -> u64 {
        self.unpinned
    }

    /// Unpins all but `kept`, which are ranges of the layer. Returns how many bytes were unpinned.
    pub(super) fn keep_only(&mut self, kept: impl Iterator<Item = (Source, u64)>) -> u64 {
        let bytes = |ranges: &BTreeMap<u64, u64>| -> u64 {
            ranges.iter().map(|(start, end)| end - start).sum()
        };
        let (before, layer) = (bytes(&self.ranges), self.layer);
        self.ranges.clear();
        kept.for_each(|(source, len)| self.add(layer, source, len));
        self.is_loose = false;
        self.unpinned += 1;
        before.saturating_sub(bytes(&self.ranges))
    }

    /// Pins `len` bytes at `source` if they are in the pool of `upper`.
    pub(super) fn add(&mut self, upper: LayerId, source: Source, len: u64) {
        let Source::Pool { layer, offset } = source else { return };
        if layer != upper || len == 0 {
            return;
        }
        if self.layer != upper {
            let unpinned = self.unpinned + 1;
            *self = PinnedRanges { layer: upper, unpinned, ..PinnedRanges::default() };
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

    /// The first pinned range in a part of a layer's pool; `None` if all of it may be overwritten.
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

/// The ranges of a layer's pool that a tree refers to more than once.
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
    fn exactly_the_added_ranges_of_the_upper_layer_are_pinned() {
        let mut pinned = PinnedRanges::default();
        let upper = LayerId(3);
        let mut model = [false; 64];
        for (offset, len) in [(10, 5), (20, 5), (15, 5), (40, 1), (8, 3), (41, 2), (60, 4), (12, 2)]
        {
            pinned.add(upper, Source::Pool { layer: upper, offset }, len);
            model[offset as usize..(offset + len) as usize].fill(true);
            for start in 0..64u64 {
                for end in start..64 {
                    let first = (start..end).find(|at| model[*at as usize]);
                    let found = pinned.first(upper, ByteRange { start, end });
                    assert_eq!(found.map(|r| r.start), first, "{start}..{end}");
                    if let Some(found) = found {
                        let last =
                            (found.start..end).find(|at| !model[*at as usize]).unwrap_or(end);
                        assert_eq!(found.end, last);
                    }
                }
            }
        }
        assert!(pinned.first(LayerId(2), ByteRange::at(0, 64)).is_none());
        pinned.add(upper, Source::Base { offset: 0 }, 64);
        pinned.add(LayerId(2), Source::Pool { layer: LayerId(1), offset: 0 }, 64);
        assert!(pinned.first(upper, ByteRange::at(0, 8)).is_none());
        pinned.add(LayerId(4), Source::Pool { layer: LayerId(4), offset: 0 }, 8);
        assert!(
            pinned.first(upper, ByteRange::at(0, 64)).is_none(),
            "a new layer starts without pinned ranges"
        );
    }

    #[test]
    fn ranges_of_dropped_edits_are_unpinned_unless_all_are_fixed() {
        let upper = LayerId(3);
        let at = |offset| Source::Pool { layer: upper, offset };
        let mut pinned = PinnedRanges::default();
        pinned.add(upper, at(0), 100);
        pinned.add(upper, at(200), 100);
        assert!(!pinned.is_loose(), "no edit was dropped");
        pinned.note_dropped();
        assert!(pinned.is_loose());
        let (before, kept) = (pinned.unpinned(), [(at(50), 10), (at(210), 90), (at(400), 0)]);
        assert_eq!(pinned.keep_only(kept.into_iter()), 100);
        assert!(!pinned.is_loose() && pinned.unpinned() > before);
        let first = pinned.first(upper, ByteRange::at(0, 1000));
        assert_eq!(first, Some(ByteRange::at(50, 10)));
        pinned.fix(upper, 1000);
        pinned.note_dropped();
        assert!(!pinned.is_loose());
    }
}
