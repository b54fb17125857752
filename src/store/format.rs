//! The identity of a store: the files `format` and `base`.
//!
//! The number in `format` says how everything else is to be read. A change that an older jailfs
//! would misread raises it. An older jailfs then refuses the store.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::store::Store;
use crate::store::identities;
use crate::store::io::dir::StoreDir;
use crate::store::io::record_file;
use crate::types::BaseMark;

/// The file that makes a directory a store.
const FORMAT_FILE: &str = "format";
/// The file that names the base.
const BASE: &str = "base";
/// The one format there is.
const FORMAT: u32 = 1;

/// The base of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseRecord {
    /// Its absolute path.
    pub path: Vec<u8>,
}

/// Whether there is a store at `path`.
pub fn exists(path: &Path) -> bool {
    path.join(FORMAT_FILE).is_file()
}

/// The base of the store at `path`.
///
/// # Errors
/// `NoStore` if there is none; if its format is unknown; damage.
pub fn base_of(path: &Path) -> Result<BaseRecord> {
    let dir = StoreDir::open(path)
        .map_err(|e| e.kind(Kind::NoStore).hint("'jailfs mount BASE MNT' makes a store"))?;
    check_format(&dir)?;
    read_base(&dir)
}

/// The mark by which the store at `path` recognises its base, if it has one. Another process may be
/// writing to the store.
///
/// # Errors
/// As [`base_of`].
pub fn mark_of(path: &Path) -> Result<Option<BaseMark>> {
    let dir = StoreDir::open(path)?;
    check_format(&dir)?;
    identities::read_mark(&dir)
}

/// The content of the file `format`.
fn format_text() -> String {
    format!("jailfs-store {FORMAT}\n")
}

/// Writes the file `format`.
///
/// # Errors
/// As [`StoreDir::publish`].
pub(super) fn publish_format(dir: &StoreDir, durable: bool) -> Result<()> {
    dir.publish(FORMAT_FILE, format_text().as_bytes(), durable)
}

/// Checks that this program can read the store.
///
/// # Errors
/// `NoStore` if the directory is no store; if the format is unknown; damage.
pub(super) fn check_format(dir: &StoreDir) -> Result<()> {
    let attempt = || format!("open store '{}'", dir.path().display());
    let Some(text) = dir.read(FORMAT_FILE)? else {
        return Err(Error::new(Kind::NoStore, attempt(), "this directory is not a jailfs store"));
    };
    if text == format_text().as_bytes() {
        return Ok(());
    }
    let number = text
        .strip_prefix(b"jailfs-store ")
        .and_then(|rest| std::str::from_utf8(rest).ok()?.trim().parse::<u64>().ok());
    Err(match number {
        Some(number) if number > u64::from(FORMAT) => Error::new(
            Kind::Failed,
            attempt(),
            format!("the store has format {number}, this jailfs knows format {FORMAT}"),
        )
        .hint("use the newer jailfs that wrote it"),
        _ => Error::damage(attempt(), "the file 'format' does not name a format"),
    })
}

/// Reads the file `base`.
///
/// # Errors
/// Damage; also if the file is missing.
pub(super) fn read_base(dir: &StoreDir) -> Result<BaseRecord> {
    let missing = || Error::damage(format!("read {}", dir.show(BASE)), "the file is missing");
    record_file::read(dir, BASE)?.ok_or_else(missing)
}

/// Writes the file `base`.
///
/// # Errors
/// As [`StoreDir::publish`].
pub(super) fn publish_base(dir: &StoreDir, base: &BaseRecord, durable: bool) -> Result<()> {
    record_file::publish(dir, BASE, base, 0, durable)
}

impl Store {
    /// The base of the store.
    pub fn base(&self) -> &BaseRecord {
        &self.base
    }

    /// Records that the base is at another path from now on.
    ///
    /// # Errors
    /// As [`StoreDir::publish`]; the path then stays.
    pub fn set_base(&mut self, path: &[u8]) -> Result<()> {
        let base = BaseRecord { path: path.to_owned() };
        publish_base(&self.dir, &base, self.durable)?;
        self.base = base;
        Ok(())
    }
}
