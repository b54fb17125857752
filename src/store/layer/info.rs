//! The catalog entry of a layer.

use std::sync::Arc;

use crate::store::record::{Header, Seal};

/// A journal of fewer bytes is not worth rewriting.
const SMALL_JOURNAL: u64 = 16 << 10;

/// The catalog entry of a layer: what its files say, kept in memory. A clone shares the header and
/// the seal, because lists of checkpoints clone many entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerInfo {
    /// The first record of its journal.
    pub header: Arc<Header>,
    /// The last record of its journal, if the layer is sealed.
    pub seal: Option<Arc<Seal>>,
    /// Whether its journal holds only the shortest list of edits.
    pub compact: bool,
    /// Whether the content in its pool has checksums.
    pub summed: bool,
    /// Whether content of its pool is stored elsewhere, as its remap says.
    pub mapped: bool,
    /// Bytes of its journal.
    pub bytes: u64,
    /// Bytes of its index, if it has one.
    pub index: Option<u64>,
    /// The end of its addresses, if it is in the archive and has no files but an index.
    pub archived: Option<u64>,
}

/// The files that a layer has besides its journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::store) struct Sidecars {
    /// Whether the content in its pool has checksums, or it has no content.
    pub summed: bool,
    /// Whether it has a remap.
    pub mapped: bool,
    /// Bytes of its index, if it has one.
    pub index: Option<u64>,
    /// The end of its addresses, if it is in the archive.
    pub archived: Option<u64>,
}

impl LayerInfo {
    pub(in crate::store) fn new(
        header: Header,
        seal: Option<Seal>,
        compact: bool,
        bytes: u64,
        sidecars: Sidecars,
    ) -> LayerInfo {
        let Sidecars { summed, mapped, index, archived } = sidecars;
        let (header, seal) = (Arc::new(header), seal.map(Arc::new));
        LayerInfo { header, seal, compact, summed, mapped, bytes, index, archived }
    }

    /// Whether its journal is worth rewriting as the shortest list of edits.
    pub(in crate::store) fn has_long_journal(&self) -> bool {
        !self.compact && self.bytes > SMALL_JOURNAL
    }

    /// Whether it is a sealed state of a head.
    pub fn is_sealed_state(&self) -> bool {
        self.seal.is_some() && self.header.kind.is_of_head()
    }

    /// The seal of a checkpoint that is listed: of all but automatic ones.
    pub fn listed_seal(&self) -> Option<&Seal> {
        self.seal.as_deref().filter(|seal| self.is_sealed_state() && !seal.automatic)
    }
}
