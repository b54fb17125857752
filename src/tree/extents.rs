//! The content of files as extents: runs of bytes in a pool or in the base. Gaps read as zeros.

use serde::{Deserialize, Serialize};

use super::{Misfit, Tree};
use crate::tree::node::Body;
use crate::types::{ByteRange, Ino, LayerId};

/// Where bytes of a file are stored. The journal encodes this: the enum grows only at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// In the pool of a layer.
    Pool {
        /// The layer.
        layer: LayerId,
        /// The logical address of the first byte.
        offset: u64,
    },
    /// In the base file that is the node's origin.
    Base {
        /// The offset of the first byte in that file.
        offset: u64,
    },
}

impl Source {
    /// Whether the bytes are in the base.
    pub fn is_base(self) -> bool {
        matches!(self, Source::Base { .. })
    }

    /// The source of the bytes `by` bytes further on.
    #[must_use]
    pub fn advanced(self, by: u64) -> Source {
        match self {
            Source::Pool { layer, offset } => Source::Pool { layer, offset: offset + by },
            Source::Base { offset } => Source::Base { offset: offset + by },
        }
    }
}

/// A run of bytes of a file that are adjacent in their source. The tree's map of extents holds the
/// offset in the file as its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// Where the first byte is stored.
    pub source: Source,
}

/// A piece of a file: a run of bytes or a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The bytes of the file.
    pub range: ByteRange,
    /// Where the first byte is stored; `None` for a hole.
    pub source: Option<Source>,
}

impl Tree {
    /// The extents of a file, in order.
    pub fn extents(&self, ino: Ino) -> impl Iterator<Item = (u64, Extent)> + '_ {
        let from = self.extents.at_or_after(&(ino, 0));
        from.take_while(move |((at, _), _)| *at == ino)
            .map(|((_, start), extent)| (*start, *extent))
    }

    /// The extents of all files.
    pub fn all_extents(&self) -> impl Iterator<Item = (Ino, Extent)> + '_ {
        self.extents.iter().map(|((ino, _), extent)| (*ino, *extent))
    }

    /// The size of a file in bytes; 0 if the node is not a file of the tree.
    pub fn size(&self, ino: Ino) -> u64 {
        match self.node(ino).map(|n| &n.body) {
            Some(Body::File { size, .. }) => *size,
            _ => 0,
        }
    }

    /// The pieces of `range` of a file, in order and without gaps, cut at the file's size.
    pub fn segments(&self, ino: Ino, range: ByteRange) -> Vec<Segment> {
        let range = super::within(range, self.size(ino));
        let mut segments = Vec::new();
        let mut at = range.start;
        let first = self.extent_at(ino, range.start).map_or(range.start, |(start, _)| start);
        for ((_, start), extent) in
            self.extents.at_or_after(&(ino, first)).take_while(|(key, _)| **key < (ino, range.end))
        {
            if *start > at {
                segments
                    .push(Segment { range: ByteRange { start: at, end: *start }, source: None });
                at = *start;
            }
            let end = (start + extent.len).min(range.end);
            if end > at {
                let source = Some(extent.source.advanced(at - start));
                segments.push(Segment { range: ByteRange { start: at, end }, source });
                at = end;
            }
        }
        if at < range.end {
            segments.push(Segment { range: ByteRange { start: at, end: range.end }, source: None });
        }
        segments
    }

    /// The extent that holds a byte, with its start.
    pub fn extent_at(&self, ino: Ino, offset: u64) -> Option<(u64, Extent)> {
        let (key, extent) = self.extents.at_or_before(&(ino, offset))?;
        (key.0 == ino && key.1 + extent.len > offset).then_some((key.1, *extent))
    }

    /// The last extent that starts before `offset`, with its start.
    pub fn extent_before(&self, ino: Ino, offset: u64) -> Option<(u64, Extent)> {
        let (key, extent) = self.extents.at_or_before(&(ino, offset.checked_sub(1)?))?;
        (key.0 == ino).then_some((key.1, *extent))
    }

    /// The first byte at or after `offset` that is in an extent.
    pub fn next_data(&self, ino: Ino, offset: u64) -> Option<u64> {
        if self.extent_at(ino, offset).is_some() {
            return Some(offset);
        }
        let (key, _) = self.extents.at_or_after(&(ino, offset)).next()?;
        (key.0 == ino).then_some(key.1)
    }

    /// The first byte at or after `offset` that is in no extent.
    pub fn next_hole(&self, ino: Ino, mut offset: u64) -> u64 {
        while let Some((start, extent)) = self.extent_at(ino, offset) {
            offset = start + extent.len;
        }
        offset
    }

    pub(super) fn resize(&mut self, ino: Ino, new_size: u64) -> Result<(), Misfit> {
        let Body::File { size, .. } = &mut self.node_mut(ino)?.body else {
            return Err(Misfit::SIZE_OF_NO_FILE);
        };
        let shrinks = new_size < *size;
        *size = new_size;
        if shrinks {
            self.drop_extents(ino, new_size);
        }
        Ok(())
    }

    pub(super) fn map(
        &mut self,
        ino: Ino,
        range: ByteRange,
        to: Option<Source>,
    ) -> Result<(), Misfit> {
        let Some(Body::File { size, .. }) = self.node(ino).map(|n| &n.body) else {
            return Err(Misfit::CONTENT_OF_NO_FILE);
        };
        if range.is_empty() || range.end > *size {
            return Err(Misfit::BEYOND_THE_END);
        }
        if self.is_apart(ino, range) {
            // A replay maps most ranges once, so most of its edits need one search.
            if let Some(source) = to {
                self.extents.insert((ino, range.start), Extent { len: range.len(), source });
            }
            return Ok(());
        }
        self.punch(ino, range);
        if let Some(source) = to {
            self.insert_joined(ino, range, source);
        }
        Ok(())
    }

    /// Removes all extents at and after `from`.
    pub(super) fn drop_extents(&mut self, ino: Ino, from: u64) {
        self.punch(ino, ByteRange { start: from, end: u64::MAX });
    }

    /// Whether no extent overlaps `range` or touches it.
    fn is_apart(&self, ino: Ino, range: ByteRange) -> bool {
        match self.extents.at_or_before(&(ino, range.end)) {
            Some((key, extent)) if key.0 == ino => key.1 + extent.len < range.start,
            _ => true,
        }
    }

    /// Turns `range` into a hole.
    fn punch(&mut self, ino: Ino, range: ByteRange) {
        let rest_of = |start: u64, extent: Extent| Extent {
            len: start + extent.len - range.end,
            source: extent.source.advanced(range.end - start),
        };
        if let Some((start, extent)) = self.extent_at(ino, range.start) {
            let end = start + extent.len;
            if start < range.start {
                self.extents.insert(
                    (ino, start),
                    Extent { len: range.start - start, source: extent.source },
                );
                if end > range.end {
                    self.extents.insert((ino, range.end), rest_of(start, extent));
                    return;
                }
            }
        }
        while let Some(((found, start), extent)) =
            self.extents.at_or_after(&(ino, range.start)).next()
        {
            let (start, extent) = (*start, *extent);
            if *found != ino || start >= range.end {
                return;
            }
            self.extents.remove(&(ino, start));
            if start + extent.len > range.end {
                self.extents.insert((ino, range.end), rest_of(start, extent));
                return;
            }
        }
    }

    /// Inserts an extent into a hole, and joins it with neighbours that are adjacent in the source.
    fn insert_joined(&mut self, ino: Ino, range: ByteRange, source: Source) {
        let (mut start, mut extent) = (range.start, Extent { len: range.len(), source });
        if let Some(before) = range.start.checked_sub(1)
            && let Some((b_start, b)) = self.extent_at(ino, before)
            && b.source.advanced(b.len) == source
        {
            start = b_start;
            extent = Extent { len: b.len + extent.len, source: b.source };
        }
        if let Some(after) = self.extents.get(&(ino, range.end)).copied()
            && source.advanced(range.len()) == after.source
        {
            self.extents.remove(&(ino, range.end));
            extent.len += after.len;
        }
        self.extents.insert((ino, start), extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Edit, Meta, Node};
    use crate::types::Timestamp;
    use proptest::prelude::*;

    const FILE: Ino = Ino(42);

    fn file(size: u64) -> Tree {
        let t = Timestamp::default();
        let meta = Meta {
            mode: 0o100_644,
            uid: 0,
            gid: 0,
            nlink: 1,
            rdev: 0,
            atime: t,
            mtime: t,
            ctime: t,
        };
        let mut tree = Tree::new();
        for ino in [Ino(41), FILE, Ino(43)] {
            let node = Node { meta, xattrs: None, body: Body::File { size, origin: None } };
            tree.apply(&Edit::Put { ino, node: Box::new(node) }).unwrap();
        }
        // Neighbours in the map, which no test may change.
        for ino in [Ino(41), Ino(43)] {
            if size > 0 {
                let to = Some(Source::Base { offset: 0 });
                tree.apply(&Edit::Map { ino, range: ByteRange::at(0, size), to }).unwrap();
            }
        }
        tree
    }

    /// The model: the source of each byte.
    type Bytes = Vec<Option<Source>>;

    fn bytes_of(tree: &Tree) -> Bytes {
        let mut bytes = Vec::new();
        for segment in tree.segments(FILE, ByteRange { start: 0, end: u64::MAX }) {
            assert_eq!(segment.range.start, bytes.len() as u64, "segments leave no gap");
            for at in 0..segment.range.len() {
                bytes.push(segment.source.map(|s| s.advanced(at)));
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn extents_equal_a_model_of_single_bytes(
            steps in proptest::collection::vec((0u8..4, 0u64..60, 1u64..30, 0u64..3), 1..60)
        ) {
            let mut tree = file(64);
            let mut model: Bytes = vec![None; 64];
            for (what, start, len, pool) in steps {
                let size = model.len() as u64;
                match what {
                    0 | 1 if start < size => {
                        let end = (start + len).min(size);
                        let range = ByteRange { start, end };
                        // Adjacent sources, so that extents are joined.
                        let layer = LayerId(pool as u32 + 1);
                        let to = Some(Source::Pool { layer, offset: start });
                        tree.apply(&Edit::Map { ino: FILE, range, to }).unwrap();
                        for at in start..end {
                            model[at as usize] = to.map(|s| s.advanced(at - start));
                        }
                    }
                    2 if start < size => {
                        let end = (start + len).min(size);
                        let range = ByteRange { start, end };
                        tree.apply(&Edit::Map { ino: FILE, range, to: None }).unwrap();
                        model[start as usize..end as usize].fill(None);
                    }
                    _ => {
                        tree.apply(&Edit::Resize { ino: FILE, size: start }).unwrap();
                        model.resize(start as usize, None);
                    }
                }
                prop_assert_eq!(&bytes_of(&tree), &model);
                for at in 0..model.len() {
                    let next = |is_data: bool| {
                        (at..model.len()).find(|i| model[*i].is_some() == is_data).map(|i| i as u64)
                    };
                    prop_assert_eq!(tree.next_data(FILE, at as u64), next(true));
                    let hole = next(false).unwrap_or(model.len() as u64);
                    prop_assert_eq!(tree.next_hole(FILE, at as u64), hole);
                }
                for ino in [Ino(41), Ino(43)] {
                    prop_assert_eq!(tree.extents(ino).count(), 1, "other files are unchanged");
                }
            }
        }
    }

    #[test]
    fn sequential_writes_stay_one_extent() {
        let mut tree = file(0);
        for step in 0..100u64 {
            tree.apply(&Edit::Resize { ino: FILE, size: (step + 1) * 100 }).unwrap();
            let to = Some(Source::Pool { layer: LayerId(1), offset: 5000 + step * 100 });
            tree.apply(&Edit::Map { ino: FILE, range: ByteRange::at(step * 100, 100), to })
                .unwrap();
        }
        assert_eq!(tree.extents(FILE).count(), 1);
    }

    #[test]
    fn content_beyond_the_end_is_a_misfit() {
        let mut tree = file(10);
        let edit = Edit::Map { ino: FILE, range: ByteRange::at(5, 6), to: None };
        assert!(tree.apply(&edit).is_err());
        assert!(
            tree.apply(&Edit::Map { ino: Ino(7), range: ByteRange::at(0, 1), to: None }).is_err()
        );
    }
}
