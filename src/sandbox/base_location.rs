//! Finds out whether a store and a base belong together, also after one of them was moved.
//!
//! A store records the path and a mark (inode number and creation time) of its base. The mark
//! recognizes a base that was moved, and a different directory that is now at the recorded path.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::base::Base;
use crate::error::{Error, Kind, Result};
use crate::sandbox::StoreOptions;
use crate::store;

/// Whether `base` is at another path than the one that the store records, and may be used with it.
///
/// # Errors
/// [`Kind::Failed`] if the store belongs to another base, or the store cannot be read.
pub(super) fn has_moved(path: &Path, base: &Base, options: &StoreOptions) -> Result<bool> {
    let known = store::base_of(path)?;
    if known.path == base.path() {
        return Ok(false);
    }
    if options.other_base || is_base_of(path, base)? {
        return Ok(true);
    }
    let was = Path::new(OsStr::from_bytes(&known.path)).display();
    let attempt = format!("open store '{}'", path.display());
    Err(Error::new(Kind::Failed, attempt, format!("it belongs to the base '{was}'")).hint(
        "name another store with --store; if this base is a copy of that one, or took its place, \
         'jailfs mount --other-base' shows the changes over it",
    ))
}

/// Whether the store at `path` was created for this very directory, whatever its path was then.
/// False if the filesystem of the base does not keep its inode numbers.
///
/// # Errors
/// The store cannot be read.
pub(crate) fn is_base_of(path: &Path, base: &Base) -> Result<bool> {
    let mark = base.mark();
    Ok(mark.is_some() && store::mark_of(path)? == mark)
}

/// Adds a hint to the error of a base that does not exist.
pub(super) fn explain_missing(error: Error, store: &Path) -> Error {
    if error.errno != Some(libc::ENOENT) && error.errno != Some(libc::ENOTDIR) {
        return error;
    }
    error.hint(format!(
        "put it back, or mount the disk that it is on; if it was moved, \
         'jailfs mount --store {} DIR MNT' goes on with it there",
        store.display()
    ))
}
