//! Blocks: the layers that a pack stores and deflates together.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use serde::{Deserialize, Serialize};

use crate::error::{Attempt, Error, Result};
use crate::store::io::codec;
use crate::store::pack::PackRecord;
use crate::types::LayerId;

/// Layers by column, so that similar bytes lie side by side and deflate well. Each column has one
/// entry per layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// The numbers of the layers.
    pub layers: Vec<LayerId>,
    /// For layers without a pool: the end of their addresses.
    pub holes: Vec<Option<u64>>,
    /// The bytes of the journals.
    pub journals: Vec<Vec<u8>>,
    /// The bytes of the remaps.
    pub maps: Vec<Option<Vec<u8>>>,
    /// The bytes of the checksums.
    pub sums: Vec<Option<Vec<u8>>>,
}

/// A layer in a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedLayer {
    /// The number of the layer.
    pub layer: LayerId,
    /// For a layer without a pool, because it has no content of its own: the end of its addresses.
    pub hole: Option<u64>,
    /// The bytes of its journal file.
    pub journal: Vec<u8>,
    /// The bytes of its remap file.
    pub map: Option<Vec<u8>>,
    /// The bytes of its checksum file.
    pub sums: Option<Vec<u8>>,
}

impl PackedLayer {
    /// Approximate size in bytes.
    pub fn weight(&self) -> usize {
        let of = |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or(0, Vec::len);
        self.journal.len() + of(&self.map) + of(&self.sums)
    }
}

impl Block {
    pub(super) fn push(&mut self, packed: PackedLayer) {
        self.layers.push(packed.layer);
        self.holes.push(packed.hole);
        self.journals.push(packed.journal);
        self.maps.push(packed.map);
        self.sums.push(packed.sums);
    }

    /// The layer at an index. `None` if a column is too short.
    pub(super) fn packed(&self, index: usize) -> Option<PackedLayer> {
        Some(PackedLayer {
            layer: *self.layers.get(index)?,
            hole: *self.holes.get(index)?,
            journal: self.journals.get(index)?.clone(),
            map: self.maps.get(index)?.clone(),
            sums: self.sums.get(index)?.clone(),
        })
    }
}

/// The record of a block.
pub(super) fn deflate(block: &Block) -> Result<PackRecord> {
    let bad = |why: String| Error::damage("encode a record", why);
    let bytes = codec::encode(block).map_err(bad)?;
    let len = u32::try_from(bytes.len()).ok().filter(|len| *len as usize <= codec::MAX_LEN);
    let len = len.ok_or_else(|| bad("it is too long".to_owned()))?;
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    let deflated = encoder.write_all(&bytes).and_then(|()| encoder.finish());
    Ok(PackRecord::Layers { len, deflated: deflated.attempt(|| "deflate a block of layers")? })
}

/// Decodes the fields of [`PackRecord::Layers`]. The error says why that is impossible.
pub(super) fn inflate(len: u32, deflated: &[u8]) -> std::result::Result<Block, String> {
    if len as usize > codec::MAX_LEN {
        return Err("it is too long".to_owned());
    }
    let mut bytes = Vec::new();
    let mut decoder = DeflateDecoder::new(deflated).take(u64::from(len) + 1);
    decoder.read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() != len as usize {
        return Err(format!("it inflates to {} bytes instead of {len}", bytes.len()));
    }
    codec::decode(&bytes)
}
