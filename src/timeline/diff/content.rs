//! Compares the content and the attributes of two nodes.

use crate::error::{FsError, FsResult};
use crate::fs::merged::fingerprint;
use crate::fs::{DataRanges, Found, State};
use crate::tree::{Body, Node, Source};
use crate::types::ByteRange;

/// Whether two nodes of the same kind have the same content: the bytes of a file, the target of a
/// symlink, the number of a device.
///
/// # Errors
/// Those of reading the base.
pub fn same_content(
    old_state: &State,
    old: &Found,
    new_state: &State,
    new: &Found,
) -> FsResult<bool> {
    if let Some(same) = same_record(old_state, old, new_state, new)? {
        return Ok(same);
    }
    // A comparison must not reveal the content of a hidden file.
    if old_state.is_hidden(old) || new_state.is_hidden(new) {
        return Ok(false);
    }
    let size = new_state.attr(new).map_or(0, |attr| attr.size);
    match same_bytes(old_state, old, new_state, new, size) {
        // Bytes that are gone or that we may not read count as different. An error here would hide
        // all other differences.
        Err(FsError::Drift(_) | FsError::AccessDenied) => Ok(false),
        same => same,
    }
}

/// The same by the records alone; none if only the bytes can tell.
pub(super) fn same_record(
    old_state: &State,
    old: &Found,
    new_state: &State,
    new: &Found,
) -> FsResult<Option<bool>> {
    let (a, a_extents) = old_state.record(old)?;
    let (b, b_extents) = new_state.record(new)?;
    Ok(match (&a.body, &b.body) {
        (Body::File { size: x, origin: from_x }, Body::File { size: y, origin: from_y }) => {
            if x != y {
                return Ok(Some(false));
            }
            let in_base = a_extents.iter().any(|(_, s)| matches!(s, Source::Base { .. }));
            // The device number is not compared: it can change at each boot.
            let same_origin = match (from_x, from_y) {
                (Some(x), Some(y)) => {
                    x.path == y.path
                        && (fingerprint::matches(&x.print, &y.print)
                            || fingerprint::matches(&y.print, &x.print))
                }
                (x, y) => x.is_none() && y.is_none(),
            };
            (a_extents == b_extents && (!in_base || same_origin)).then_some(true)
        }
        (Body::Special, Body::Special) => Some(a.meta.rdev == b.meta.rdev),
        (x, y) => Some(x == y),
    })
}

fn same_bytes(
    old_state: &State,
    old: &Found,
    new_state: &State,
    new: &Found,
    size: u64,
) -> FsResult<bool> {
    let whole = ByteRange { start: 0, end: size };
    for range in DataRanges::unlike((old_state, old), (new_state, new), whole) {
        let range = range?;
        if old_state.read_range(old, range)? != new_state.read_range(new, range)? {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(super) fn same_attributes(a: &Node, b: &Node) -> bool {
    a.meta.mode == b.meta.mode
        && a.meta.uid == b.meta.uid
        && a.meta.gid == b.meta.gid
        && a.xattrs == b.xattrs
}
