//! A file that holds one record, published whole: `base`, `holds`, `volatile` and the heads.
//!
//! The file is a log of one frame. The number of the frame can grow with each publication, so that
//! an older copy of the file can be told from the current one.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::log;

/// Reads the record of a file; `None` if there is no such file.
///
/// # Errors
/// As open(2) and read(2), and damage.
pub(in crate::store) fn read<T: DeserializeOwned>(dir: &StoreDir, name: &str) -> Result<Option<T>> {
    Ok(read_numbered(dir, name)?.map(|(record, _)| record))
}

/// As [`read`], with the number of the frame.
///
/// # Errors
/// As [`read`].
pub(in crate::store) fn read_numbered<T: DeserializeOwned>(
    dir: &StoreDir,
    name: &str,
) -> Result<Option<(T, u64)>> {
    let Some(bytes) = dir.read(name)? else { return Ok(None) };
    let damage = |why| Error::damage(format!("read {}", dir.show(name)), why);
    let (contents, number) = log::read_numbered::<T>(&bytes, &dir.show(name))?;
    let (record, _) =
        contents.records.into_iter().next().ok_or_else(|| damage("no whole record"))?;
    if contents.torn > 0 {
        return Err(damage("there are bytes behind its record"));
    }
    Ok(Some((record, number)))
}

/// Publishes a record as a file, in a frame with this number.
///
/// # Errors
/// As [`StoreDir::publish`]; the file is then unchanged.
pub(in crate::store) fn publish<T: Serialize>(
    dir: &StoreDir,
    name: &str,
    record: &T,
    number: u64,
    durable: bool,
) -> Result<()> {
    let frame =
        log::frame(record, number).map_err(|error| error.during(format!("write {name}")))?;
    dir.publish(name, &frame, durable)
}
