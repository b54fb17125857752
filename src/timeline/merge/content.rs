//! The content of merged files, and what their names hide: parts of the edits that a merge makes.

use crate::error::FsResult;
use crate::fs::{Extents, Found, State};
use crate::store::content::pool::PoolWriter;
use crate::timeline::restore::copies::copy_content;
use crate::tree::{Body, Hides, Node, Source};
use crate::types::{ByteRange, Epoch, Ino, Name};

/// The record of a node of another state, and where its bytes are, as they mean the same over the
/// base of an epoch. If an apply between the two epochs touched the file, bytes of the base are
/// copied to `pool`.
///
/// # Errors
/// Those of reading the base and of writing the pool.
pub(super) fn record_of_theirs(
    (state, found): (&State, &Found),
    epoch: Epoch,
    pool: &mut PoolWriter,
) -> FsResult<(Node, Extents)> {
    let (record, mut extents) = state.record(found)?;
    let mut node = Node::clone(&record);
    if let Body::File { size, origin } = &mut node.body
        && let Some(from) = origin.as_ref()
        && !state.lower.is_same_in(epoch, from)
    {
        if extents.iter().any(|(_, source)| source.is_base()) {
            extents = copy_content(state, found, *size, pool)?;
        }
        *origin = None;
    }
    Ok((node, extents))
}

/// Writes the bytes of a file to `pool`.
///
/// # Errors
/// Those of writing the pool.
pub(super) fn write(ino: Ino, bytes: &[u8], pool: &mut PoolWriter) -> FsResult<Extents> {
    if bytes.is_empty() {
        return Ok(Extents::new());
    }
    let range = ByteRange::at(0, bytes.len() as u64);
    let offset = pool.allocate(ino, range, true);
    pool.write(offset, bytes)?;
    Ok(vec![(range, Source::Pool { layer: pool.layer(), offset })])
}

/// The file of the base that a name in a directory of the tree hides.
///
/// # Errors
/// Those of the base.
pub(super) fn hidden(state: &State, dir: Ino, name: &Name) -> FsResult<Hides> {
    let lower = state.lower_path(dir)?;
    Ok(match state.find(dir, lower.as_ref(), name)? {
        Found::Upper(_, hides) | Found::Nothing(hides) => hides,
        Found::Base(ino, _, node) => Some(node.fingerprint(ino)),
    })
}
