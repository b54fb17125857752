//! The compact form of a journal: the shortest list of edits with the same outcome.
//!
//! ```text
//! layers/00000007/journal    Header, Compact, Edits ..., Seal: from the parent's tree to this one
//! layers/00000007/index      the same without a parent: from the empty tree to this one
//! ```

use crate::error::Result;
use crate::store::io::log::frame;
use crate::store::record::{Header, Record, Seal};
use crate::tree::Edit;

/// Edits in one record of a compact journal. More would make a reader hold more in memory; fewer
/// would make the frames take more space.
const EDITS: usize = 1024;

/// The records of a compact journal, or of an index.
pub(in crate::store) fn compact_records(
    header: &Header,
    seal: &Seal,
    edits: impl Iterator<Item = Edit>,
) -> impl Iterator<Item = Record> {
    let begin = [Record::Header(header.clone()), Record::Compact];
    begin.into_iter().chain(edits_in_records(edits)).chain([Record::Seal(seal.clone())])
}

/// Groups edits into records.
pub(super) fn edits_in_records(
    mut edits: impl Iterator<Item = Edit>,
) -> impl Iterator<Item = Record> {
    std::iter::from_fn(move || {
        let some: Vec<Edit> = edits.by_ref().take(EDITS).collect();
        if some.is_empty() { None } else { Some(Record::Edits(some)) }
    })
}

/// The length of a compact journal of these edits, in bytes and in edits. The header and the seal
/// do not count.
///
/// # Errors
/// As [`frame`].
pub fn compact_len(edits: impl Iterator<Item = Edit>) -> Result<(u64, u64)> {
    let (mut bytes, mut count) = (0, 0);
    for record in edits_in_records(edits) {
        bytes += frame(&record, 0)?.len() as u64;
        count += match &record {
            Record::Edits(edits) => edits.len() as u64,
            _ => 0,
        };
    }
    Ok((bytes, count))
}
