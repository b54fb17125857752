//! Blocks: the archived layers that are stored and compressed together.

use serde::{Deserialize, Serialize};

use crate::store::archive::ChunkRef;
use crate::types::{ByteRange, LayerId};

/// A layer in the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchivedLayer {
    /// The number of the layer.
    pub layer: LayerId,
    /// The end of its addresses.
    pub end: u64,
    /// The bytes of its journal file.
    pub journal: Vec<u8>,
    /// The bytes of its remap file.
    pub map: Option<Vec<u8>>,
    /// The content of its pool.
    pub content: StoredContent,
}

/// Where the content of a pool is in the archive. Addresses in no range are zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredContent {
    /// The addresses, in order: how many come after the range before, and how many there are.
    pub ranges: Vec<(u64, u64)>,
    /// The bytes of all ranges, one after the other.
    pub chunks: Vec<ChunkRef>,
}

impl StoredContent {
    /// Content at these addresses, which are in order.
    pub fn new(addresses: &[ByteRange], chunks: Vec<ChunkRef>) -> StoredContent {
        let (mut ranges, mut end) = (Vec::<(u64, u64)>::new(), 0);
        for range in addresses {
            match ranges.last_mut() {
                Some((_, len)) if end == range.start => *len += range.len(),
                _ => ranges.push((range.start - end, range.len())),
            }
            end = range.end;
        }
        StoredContent { ranges, chunks }
    }
}

impl ArchivedLayer {
    /// Approximate size in bytes.
    pub fn weight(&self) -> usize {
        let content = &self.content;
        let map = self.map.as_ref().map_or(0, Vec::len);
        self.journal.len() + map + size_of_val(&*content.ranges) + size_of_val(&*content.chunks)
    }
}

/// Layers by column, so that similar bytes lie side by side and compress well. Each column has one
/// entry per layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// The numbers of the layers.
    pub layers: Vec<LayerId>,
    /// The ends of their addresses.
    pub ends: Vec<u64>,
    /// The bytes of the journals.
    pub journals: Vec<Vec<u8>>,
    /// The bytes of the remaps.
    pub maps: Vec<Option<Vec<u8>>>,
    /// The content of the pools.
    pub contents: Vec<StoredContent>,
}

impl Block {
    pub(super) fn push(&mut self, layer: ArchivedLayer) {
        self.layers.push(layer.layer);
        self.ends.push(layer.end);
        self.journals.push(layer.journal);
        self.maps.push(layer.map);
        self.contents.push(layer.content);
    }

    /// The layer at an index. `None` if a column is too short.
    pub(super) fn get(&self, index: usize) -> Option<ArchivedLayer> {
        Some(ArchivedLayer {
            layer: *self.layers.get(index)?,
            end: *self.ends.get(index)?,
            journal: self.journals.get(index)?.clone(),
            map: self.maps.get(index)?.clone(),
            content: self.contents.get(index)?.clone(),
        })
    }
}
