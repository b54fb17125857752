//! A store and a base that may not be where they were.
//!
//! A store names its base by path, and knows it by a mark: so a base that was moved is found again by whoever names it, and
//! another directory at the same path is not taken for it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::base::Base;
use crate::error::{Error, Kind, Result};
use crate::sandbox::StoreOptions;
use crate::store;

/// Whether the base of a store is not at the path that the store knows, but is the same directory or may be another.
///
/// # Errors
/// [`Kind::Failed`] if the store belongs to another base, else what reading it answers.
pub(super) fn is_elsewhere(path: &Path, base: &Base, options: &StoreOptions) -> Result<bool> {
    let known = store::base_of(path)?;
    if known.path == base.path() {
        return Ok(false);
    }
    if options.other_base || is_base_of(path, base)? {
        return Ok(true);
    }
    let was = Path::new(OsStr::from_bytes(&known.path)).display();
    Err(Error::new(Kind::Failed, format!("open store '{}'", path.display()), format!("it belongs to the base '{was}'"))
        .hint(
            "name another store with --store; if this base is a copy of that one, or took its place, 'jailfs mount --other-base' \
             shows the changes over it",
        ))
}

/// Whether the store at `path` was made for this very directory, wherever that was then.
///
/// # Errors
/// What reading the store answers.
pub fn is_base_of(path: &Path, base: &Base) -> Result<bool> {
    let mark = base.mark();
    Ok(mark.is_some() && store::mark_of(path)? == mark)
}

/// Adds to the error of a base that is not there what a person can do.
pub(super) fn explain_missing(error: Error, store: &Path) -> Error {
    if error.errno != Some(libc::ENOENT) && error.errno != Some(libc::ENOTDIR) {
        return error;
    }
    error.hint(format!(
        "put it back, or mount the disk that it is on; if it was moved, 'jailfs mount --store {} DIR MNT' goes on with it there",
        store.display()
    ))
}
