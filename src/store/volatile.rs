//! Marks a store that is written without syncs: the file `volatile`.
//!
//! A process that opens a store with `--volatile` writes the file, synced, before anything else.
//! From then on a `Synced` or a `Seal` in any file proves nothing.
//!
//! Always true: the store is complete under the boot and in the mount that the file names. The
//! first process that opens it with syncs syncs all of it, and removes the file. Under another
//! boot, or in another mount, the store is refused.

use serde::{Deserialize, Serialize};

use crate::error::{Attempt, Error, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::writer::Writer;
use crate::store::io::{disk, record_file};

/// The name of the file.
pub const VOLATILE: &str = "volatile";

/// The content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolatileRecord {
    /// The writer that wrote the store without syncs.
    pub writer: Writer,
}

/// Refuses a store that another writer wrote without syncs. Otherwise returns the content of the
/// file, if it is there.
///
/// # Errors
/// Damage: such a store, or a damaged file.
pub(super) fn check(dir: &StoreDir, writer: Writer) -> Result<Option<VolatileRecord>> {
    let record = record_file::read::<VolatileRecord>(dir, VOLATILE)?;
    if record.as_ref().is_none_or(|record| record.writer == writer) {
        return Ok(record);
    }
    let attempt = format!("open store '{}'", dir.path().display());
    let why = "it was written with --volatile, and since then the machine was started or the \
               filesystem mounted: any of it may be lost or old";
    Err(Error::damage(attempt, why).hint(format!(
        "begin a new store; if the machine was shut down cleanly, or the filesystem unmounted, \
         nothing is lost: remove '{}'",
        dir.show(VOLATILE)
    )))
}

/// Begins to write a store, with syncs if `durable`. Returns whether the store was volatile and is
/// synced now.
///
/// # Errors
/// As [`check`], publish, syncfs(2) and unlink(2).
pub(super) fn begin(dir: &StoreDir, writer: Writer, durable: bool) -> Result<bool> {
    let found = check(dir, writer)?;
    match (found, durable) {
        (None, true) | (Some(_), false) => Ok(false),
        // Synced in any case: without the file, a later start would trust the marks that follow.
        (None, false) => {
            record_file::publish(dir, VOLATILE, &VolatileRecord { writer }, 0, true)?;
            Ok(false)
        }
        (Some(_), true) => {
            log::warn!("the store was written with --volatile: all of it is synced first");
            disk::commit(dir).attempt(|| format!("sync all of {}", dir.path().display()))?;
            dir.remove(VOLATILE)?;
            dir.sync()?;
            Ok(true)
        }
    }
}
