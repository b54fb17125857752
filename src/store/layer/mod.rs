//! A layer on disk: the journal and the pool in `layers/00000007`.
//!
//! Always true:
//! * A journal begins with a header. Once the layer is sealed, it ends with a seal. Each record in
//!   between is one operation, or says how far the layer is synced.
//! * A record refers only to pool bytes that were written before it. So the whole journal is valid
//!   after a `kill -9`. After a power cut it is valid as far as it was synced; [`journal`] finds
//!   out how far that is, and [`redo`] restores pool bytes of which only the journal was synced.
//! * A layer reads the same whether its journal, checksums and remap are files of its own or part
//!   of a pack ([`files`]).

pub mod compact;
pub(in crate::store) mod files;
pub(in crate::store) mod info;
pub(in crate::store) mod journal;
pub(in crate::store) mod lost_seals;
pub(in crate::store) mod redo;
mod rewrite;
#[cfg(test)]
mod tests;
mod upper;

use crate::types::LayerId;

pub use info::LayerInfo;
pub use journal::{LayerContents, Trust};
pub use rewrite::{JournalEnd, JournalExchange};
pub use upper::{SyncWork, Upper};

/// Name of the journal in the directory of a layer.
pub const JOURNAL: &str = "journal";
/// Name of a journal that is being rewritten, until it is published.
const NEW_JOURNAL: &str = "journal.new";
/// Name of the index in the directory of a layer.
pub const INDEX: &str = "index";
/// Name of the checksums in the directory of a layer.
pub const SUMS: &str = "sums";
/// Name of the remap in the directory of a layer.
pub const MAP: &str = "map";
/// Name of the pool in the directory of a layer.
pub const POOL: &str = "pool";

/// The directory name of a layer.
pub fn dir_name(layer: LayerId) -> String {
    format!("{:08}", layer.0)
}
