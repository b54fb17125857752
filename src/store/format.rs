//! The identity of a store: the files `format` and `base`.
//!
//! | format | has besides the one before |
//! |---|---|
//! | 1 | |
//! | 2 | packs |
//! | 3 | deflated content (cells) |
//! | 4 | several heads: forks and merges |
//!
//! A store gets a higher format when it is about to use what came with it. An older jailfs then
//! refuses the store: it would report layers in packs as lost, return deflated bytes as content,
//! and free what only another head needs.

use std::path::Path;
use std::sync::atomic::Ordering;

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
/// The format of a store without packs.
pub(super) const FORMAT: u32 = 1;
/// The format of a store with packs.
pub(super) const FORMAT_WITH_PACKS: u32 = 2;
/// The format of a store with deflated content.
pub(super) const FORMAT_WITH_CELLS: u32 = 3;
/// The format of a store with several heads.
pub(super) const FORMAT_WITH_FORKS: u32 = 4;
/// The newest format.
const NEWEST: u32 = FORMAT_WITH_FORKS;

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
fn format_text(format: u32) -> String {
    format!("jailfs-store {format}\n")
}

/// Writes the file `format`.
///
/// # Errors
/// As [`StoreDir::publish`].
pub(super) fn publish_format(dir: &StoreDir, format: u32, durable: bool) -> Result<()> {
    dir.publish(FORMAT_FILE, format_text(format).as_bytes(), durable)
}

/// The format of a store.
///
/// # Errors
/// `NoStore` if the directory is no store; if the format is unknown; damage.
pub(super) fn check_format(dir: &StoreDir) -> Result<u32> {
    let attempt = || format!("open store '{}'", dir.path().display());
    let Some(text) = dir.read(FORMAT_FILE)? else {
        return Err(Error::new(Kind::NoStore, attempt(), "this directory is not a jailfs store"));
    };
    if let Some(known) = (FORMAT..=NEWEST).find(|known| text == format_text(*known).as_bytes()) {
        return Ok(known);
    }
    let number = text
        .strip_prefix(b"jailfs-store ")
        .and_then(|rest| std::str::from_utf8(rest).ok()?.trim().parse::<u64>().ok());
    Err(match number {
        Some(number) if number > u64::from(NEWEST) => Error::new(
            Kind::Failed,
            attempt(),
            format!("the store has format {number}, this jailfs knows formats 1 to {NEWEST}"),
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

    /// Raises the format of the store to at least `format`. Call it before the store gets anything
    /// that came with that format.
    ///
    /// # Errors
    /// As [`StoreDir::publish`].
    pub(in crate::store) fn require_format(&self, format: u32) -> Result<()> {
        if self.format.load(Ordering::Relaxed) < format {
            // Synced even in a volatile store: after a power cut, the format must tell why the
            // store is not trusted.
            publish_format(&self.dir, format, true)?;
            self.format.store(format, Ordering::Relaxed);
        }
        Ok(())
    }
}
