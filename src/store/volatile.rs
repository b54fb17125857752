//! Whether what a store says to be synced was.
//!
//! Whoever opens a store without syncs (`--volatile`) leaves the file `volatile`, synced, before anything else is written. From then
//! on a `Synced` or a `Seal` in any file proves nothing.
//!
//! Always true: all is there under the boot, and in the mount, that the file names. The first process that opens the store with
//! syncs has all of it synced, and removes the file. Under another boot, or in another mount, the store is refused.

use serde::{Deserialize, Serialize};

use crate::error::{Attempt, Error, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::writer::Writer;
use crate::store::{framed, read_one};

/// The name of the file.
pub const VOLATILE: &str = "volatile";

/// What is in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolatileRecord {
    /// By which writer it was written without syncs.
    pub writer: Writer,
}

/// Says why nothing is known of what the store has, if so: another writer wrote it without syncs.
///
/// # Errors
/// That; or damage.
pub(super) fn check(dir: &StoreDir, writer: Writer) -> Result<Option<VolatileRecord>> {
    let record = read_one::<VolatileRecord>(dir, VOLATILE)?;
    if record.as_ref().is_none_or(|record| record.writer == writer) {
        return Ok(record);
    }
    let attempt = format!("open store '{}'", dir.path().display());
    let why = "it was written with --volatile, and the machine was started or its filesystem mounted since: any of it may be lost or old";
    Err(Error::damage(attempt, why).hint(format!(
        "begin a new store; if the machine was shut down, or the filesystem unmounted, in order, nothing is lost: remove '{}'",
        dir.show(VOLATILE)
    )))
}

/// Begins to write a store, with syncs or without. Gives whether it was written without and is synced now.
///
/// # Errors
/// As [`check`], and those of the calls that it is made of.
pub(super) fn begin(dir: &StoreDir, writer: Writer, durable: bool) -> Result<bool> {
    let found = check(dir, writer)?;
    match (found, durable) {
        (None, true) | (Some(_), false) => Ok(false),
        // Synced in any case: without it the marks that follow would be believed.
        (None, false) => {
            dir.publish(VOLATILE, &framed(&VolatileRecord { writer }, VOLATILE)?, true)?;
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
