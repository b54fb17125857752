//! The heads and the holds: small files that name layers.
//!
//! Always true: a head is published after its layer and everything below it is synced. So only the
//! layer on top of a head, and layers above it, can have lost records in a power cut.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::error::Result;
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::record_file;
use crate::store::io::writer::{FailedSyncs, Writer};
use crate::store::layer::Trust;
use crate::store::ledger::{self, LedgerRecord};
use crate::store::pack::Packs;
use crate::store::record::{HeadRecord, HoldsRecord};
use crate::types::LayerId;

/// The directory of the heads.
pub(super) const HEADS: &str = "heads";
/// The file of the holds.
pub(super) const HOLDS: &str = "holds";

/// The names of the heads.
///
/// # Errors
/// As readdir(3).
pub(super) fn names(heads: &StoreDir) -> Result<Vec<String>> {
    heads.list(|name| (!name.starts_with('.') && !name.ends_with(".new")).then(|| name.to_owned()))
}

/// The layers on top of the heads. A head that cannot be read is left out; opening it reports the
/// damage.
///
/// # Errors
/// As readdir(3).
pub(super) fn tops(heads: &StoreDir) -> Result<BTreeSet<LayerId>> {
    let names = names(heads)?;
    let records =
        names.iter().filter_map(|name| record_file::read::<HeadRecord>(heads, name).ok().flatten());
    Ok(records.map(|head| head.layer).collect())
}

/// Reads the facts that decide how far the journals of a store are valid.
///
/// # Errors
/// As readdir(3), and if `/proc` cannot be read.
pub(super) fn read_trust(dir: &StoreDir) -> Result<Trust> {
    let writer = Writer::of(dir)?;
    let failed = Mutex::new(FailedSyncs::of(dir, writer)?.read());
    let torn_from = tops(&dir.make_dir(HEADS)?)?.first().copied().unwrap_or(LayerId(0));
    Ok(Trust { writer, failed, torn_from })
}

/// Reads the holds of a store.
///
/// # Errors
/// Damage.
pub(super) fn read_holds(dir: &StoreDir) -> Result<BTreeSet<LayerId>> {
    let record = record_file::read::<HoldsRecord>(dir, HOLDS)?;
    Ok(record.map_or_else(BTreeSet::new, |record| record.layers))
}

/// The numbers of the heads, the holds and the newest pack, for the ledger. A file that cannot be
/// read counts as current; opening it reports the damage.
///
/// # Errors
/// As readdir(3).
pub(super) fn published(
    dir: &StoreDir,
    heads: &StoreDir,
    packs: &Packs,
) -> Result<BTreeMap<String, u64>> {
    let mut numbers = BTreeMap::new();
    for name in names(heads)? {
        if let Some(number) = number_of(record_file::read_numbered::<HeadRecord>(heads, &name)) {
            numbers.insert(head_file(&name), number);
        }
    }
    if let Some(number) = number_of(record_file::read_numbered::<HoldsRecord>(dir, HOLDS)) {
        numbers.insert(HOLDS.to_owned(), number);
    }
    numbers.extend(packs.newest().map(|number| (ledger::PACKS.to_owned(), u64::from(number))));
    Ok(numbers)
}

fn number_of<T>(found: Result<Option<(T, u64)>>) -> Option<u64> {
    found.map_or(Some(u64::MAX), |found| found.map(|(_, number)| number))
}

/// The path of the file of a head in the store.
fn head_file(name: &str) -> String {
    format!("{HEADS}/{name}")
}

impl Store {
    /// The layer on top of a head; `None` if there is no such head.
    ///
    /// # Errors
    /// Damage.
    pub fn head(&self, name: &str) -> Result<Option<HeadRecord>> {
        record_file::read(&self.heads, name)
    }

    /// The names of the heads.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn head_names(&self) -> Result<Vec<String>> {
        names(&self.heads)
    }

    /// Puts a layer on top of a head.
    ///
    /// # Errors
    /// As [`StoreDir::publish`]; the head is then unchanged.
    pub fn set_head(&self, name: &str, head: &HeadRecord) -> Result<()> {
        let file = head_file(name);
        let number = self.next_number_of(&file);
        record_file::publish(&self.heads, name, head, number, self.durable)?;
        self.note_in_ledger(&LedgerRecord::Published(file, number));
        Ok(())
    }

    /// The oldest layer on top of a head.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn oldest_top(&self) -> Result<Option<LayerId>> {
        Ok(tops(&self.heads)?.first().copied())
    }

    /// The layers that neither drop nor gc removes.
    pub fn holds(&self) -> BTreeSet<LayerId> {
        self.holds.lock().clone()
    }

    /// Replaces the layers that neither drop nor gc removes.
    ///
    /// # Errors
    /// As [`StoreDir::publish`]; the holds are then unchanged.
    pub fn set_holds(&self, layers: &BTreeSet<LayerId>) -> Result<()> {
        let record = HoldsRecord { layers: layers.clone() };
        let number = self.next_number_of(HOLDS);
        record_file::publish(&self.dir, HOLDS, &record, number, self.durable)?;
        self.note_in_ledger(&LedgerRecord::Published(HOLDS.to_owned(), number));
        *self.holds.lock() = record.layers;
        Ok(())
    }
}
