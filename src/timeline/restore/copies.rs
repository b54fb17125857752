//! Copies content that only an earlier epoch of the base has, before a restore locks the tree.

use std::collections::HashMap;

use crate::error::{FsError, FsResult};
use crate::fs::{Extents, Found, State};
use crate::store::content::pool::PoolWriter;
use crate::timeline::diff;
use crate::timeline::restore::epochs::EpochDiff;
use crate::tree::Source;
use crate::types::TreePath;

/// Extents of copied content, by path.
#[derive(Default)]
pub(super) struct Copies(HashMap<TreePath, Extents>);

impl Copies {
    /// Copies into `pool` the content that a restore of `paths` from `then` cannot refer to.
    ///
    /// # Errors
    /// Those of reading the base and of writing the store.
    pub(super) fn make(
        now: &State,
        then: &State,
        paths: &[TreePath],
        pool: &mut PoolWriter,
    ) -> FsResult<Copies> {
        let mut copies = Copies::default();
        if now.lower.epoch() == then.lower.epoch() {
            return Ok(copies);
        }
        let epochs = EpochDiff::between(now, then);
        for change in diff::changes_at(now, then, paths)? {
            if let Some(size) = epochs.needs_copy(then, &change.new)? {
                let extents = copy_content(then, &change.new, size, pool)?;
                copies.0.insert(change.path, extents);
            }
        }
        Ok(copies)
    }

    /// The copied content of a path.
    ///
    /// # Errors
    /// [`FsError::Stale`] if the content was not copied.
    pub(super) fn at(&self, path: &TreePath) -> FsResult<Extents> {
        self.0.get(path).cloned().ok_or(FsError::Stale)
    }
}

/// Copies the data of a file of `size` bytes into `pool`. Holes stay holes.
///
/// # Errors
/// Those of reading the base and of writing the store.
pub(in crate::timeline) fn copy_content(
    state: &State,
    found: &Found,
    size: u64,
    pool: &mut PoolWriter,
) -> FsResult<Extents> {
    let ino = found.ino().ok_or(FsError::NotFound)?;
    let mut extents = Extents::new();
    for range in state.data(found) {
        let range = range?;
        let bytes = state.read_range(found, range)?;
        if bytes.len() as u64 != range.len() {
            return Err(FsError::Damage("a file is shorter than its record says"));
        }
        if bytes.iter().any(|byte| *byte != 0) {
            let offset = pool.allocate(ino, range, range.end == size);
            pool.write(offset, &bytes)?;
            extents.push((range, Source::Pool { layer: pool.layer(), offset }));
        }
    }
    Ok(extents)
}
