//! The heads and the holds: small files that name layers.
//!
//! Always true:
//! * A head is published after its layer and everything below it is synced. So only the layer on
//!   top of a head, and layers above it, can have lost records in a power cut.
//! * A fork is published after the layer with which it begins is sealed.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::archived::ArchivedLayers;
use crate::store::io::dir::StoreDir;
use crate::store::io::writer::{FailedSyncs, Writer};
use crate::store::io::{log, record_file};
use crate::store::layer::{LayerInfo, Trust};
use crate::store::ledger::{self, LedgerRecord};
use crate::store::record::{ForkPoint, HeadRecord, HoldsRecord, MergePoint, RaceRecord};
use crate::types::{LayerId, TreePath};

/// The directory of the heads.
pub(super) const HEADS: &str = "heads";
/// The file of the holds.
pub(super) const HOLDS: &str = "holds";
/// The file that names the heads of races.
const RACE: &str = "race";

/// The names of the heads.
///
/// # Errors
/// As readdir(3).
pub(super) fn names(heads: &StoreDir) -> Result<Vec<String>> {
    heads.list(|name| is_record(name).then(|| name.to_owned()))
}

/// Whether a file of this name is the record of a head. A name from a request can be any text; one
/// with a slash would lead to another file.
fn is_record(name: &str) -> bool {
    !name.starts_with('.') && !name.ends_with(".new") && !name.contains('/')
}

/// Reads the record of a head, and the number of its frame; `None` if there is no such head.
///
/// # Errors
/// As open(2) and read(2), and damage.
pub(super) fn read(heads: &StoreDir, name: &str) -> Result<Option<(HeadRecord, u64)>> {
    if !is_record(name) {
        return Ok(None);
    }
    record_file::read_numbered(heads, name)
}

/// The records of all heads, or the damage of each.
///
/// # Errors
/// As readdir(3).
pub(super) fn read_all(heads: &StoreDir) -> Result<HeadRecords> {
    let missing = |name: &str| Error::damage(format!("read {}", heads.show(name)), "it is missing");
    let read = |name: String| {
        let found = read(heads, &name).and_then(|found| found.ok_or_else(|| missing(&name)));
        (name, found.map(|(record, _)| record))
    };
    Ok(names(heads)?.into_iter().map(read).collect())
}

/// The heads, each with its record or the damage of it.
pub(super) type HeadRecords = BTreeMap<String, Result<HeadRecord>>;

/// The layers on top of the heads. A head that cannot be read is left out; opening it reports the
/// damage.
pub(super) fn tops(heads: &HeadRecords) -> BTreeSet<LayerId> {
    heads.values().flatten().map(|head| head.layer).collect()
}

/// The layers that the records of heads name as sealed.
pub(super) fn sealed(heads: &HeadRecords) -> BTreeSet<LayerId> {
    heads.values().flatten().flat_map(HeadRecord::named).collect()
}

/// Reads the facts that decide how far the journals of a store are valid.
///
/// # Errors
/// As readdir(3), and if `/proc` cannot be read.
pub(super) fn read_trust(dir: &StoreDir) -> Result<Trust> {
    let writer = Writer::of(dir)?;
    let failed = Mutex::new(FailedSyncs::of(dir, writer)?.read());
    let heads = read_all(&dir.make_dir(HEADS)?)?;
    // A fork that was not used yet has written nothing.
    let used = heads.values().flatten().filter(|head| !head.is_unused());
    let tops: BTreeSet<LayerId> = used.map(|head| head.layer).collect();
    let torn_from = tops.first().copied().unwrap_or(LayerId(0));
    Ok(Trust { writer, failed, torn_from, tops, sealed: sealed(&heads) })
}

/// Reads the holds of a store.
///
/// # Errors
/// Damage.
pub(super) fn read_holds(dir: &StoreDir) -> Result<BTreeSet<LayerId>> {
    let record = record_file::read::<HoldsRecord>(dir, HOLDS)?;
    Ok(record.map_or_else(BTreeSet::new, |record| record.layers))
}

/// The numbers of the heads, the holds and the root of the archive, for the ledger. A file that
/// cannot be read counts as current; opening it reports the damage.
///
/// # Errors
/// As readdir(3).
pub(super) fn published(
    dir: &StoreDir,
    heads: &StoreDir,
    archived: &ArchivedLayers,
) -> Result<BTreeMap<String, u64>> {
    let mut numbers = BTreeMap::new();
    for name in names(heads)? {
        if let Some(number) = number_of(read(heads, &name)) {
            numbers.insert(head_file(&name), number);
        }
    }
    if let Some(number) = number_of(record_file::read_numbered::<HoldsRecord>(dir, HOLDS)) {
        numbers.insert(HOLDS.to_owned(), number);
    }
    let root = Some(archived.number()).filter(|number| *number > 0);
    numbers.extend(root.map(|number| (ledger::ARCHIVE_ROOT.to_owned(), number)));
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
        Ok(read(&self.heads, name)?.map(|(record, _)| record))
    }

    /// Where each head was forked; `None` for the first head. Leaves out damaged heads.
    pub fn fork_points(&self) -> BTreeMap<String, Option<ForkPoint>> {
        let records = self.head_records.lock();
        let known = records.iter().filter_map(|(name, record)| Some((name, record.as_ref().ok()?)));
        known.map(|(name, record)| (name.clone(), record.forked_from.clone())).collect()
    }

    /// The names of the heads.
    pub fn head_names(&self) -> Vec<String> {
        self.head_records.lock().keys().cloned().collect()
    }

    /// The records of all heads.
    ///
    /// # Errors
    /// Damage of any record: what that head needs is not known then.
    pub fn head_records(&self) -> Result<BTreeMap<String, HeadRecord>> {
        let records = self.head_records.lock();
        records.iter().map(|(name, record)| Ok((name.clone(), record.clone()?))).collect()
    }

    /// Whether a layer was written by the head that has this name now, and not by an earlier one.
    pub fn is_of(&self, info: &LayerInfo, head: &str) -> bool {
        let records = self.head_records.lock();
        let Some(record) = records.get(head) else { return false };
        let since = record.as_ref().map_or(LayerId(0), |record| record.since());
        info.header.kind.is_of_head() && info.header.head == head && info.header.layer >= since
    }

    /// Puts a layer on top of a head. Makes the head if there is none of this name.
    ///
    /// # Errors
    /// As [`StoreDir::publish`]; the head is then unchanged.
    pub fn set_head(&self, name: &str, layer: LayerId) -> Result<()> {
        let known = self.head_records.lock().get(name).cloned().transpose()?;
        let record = match known {
            Some(record) => HeadRecord { layer, ..record },
            None => HeadRecord::first(layer),
        };
        self.put_head(name, &record)
    }

    /// Replaces the merges in the record of a head.
    ///
    /// # Errors
    /// As [`Store::set_head`].
    pub fn set_merged(&self, name: &str, merged: BTreeSet<MergePoint>) -> Result<()> {
        let missing = || Error::damage(format!("read head '{name}'"), "it is missing");
        let record = self.head(name)?.ok_or_else(missing)?;
        self.put_head(name, &HeadRecord { merged, ..record })
    }

    /// Records the files of a head that have conflict markers, and the paths that are copies of the
    /// other side of a conflict.
    ///
    /// # Errors
    /// As [`Store::set_head`].
    pub fn set_unresolved(
        &self,
        name: &str,
        (marked, beside): (BTreeSet<TreePath>, BTreeSet<TreePath>),
    ) -> Result<()> {
        let missing = || Error::damage(format!("read head '{name}'"), "it is missing");
        let mut record = self.head(name)?.ok_or_else(missing)?;
        (record.unresolved, record.beside) = (marked, beside);
        self.put_head(name, &record)
    }

    fn put_head(&self, name: &str, record: &HeadRecord) -> Result<()> {
        let file = head_file(name);
        let number = self.next_number_of(&file);
        record_file::publish(&self.heads, name, record, number, self.durable)?;
        self.note_head(name, number, record.clone());
        Ok(())
    }

    fn note_head(&self, name: &str, number: u64, record: HeadRecord) {
        self.note_in_ledger(&LedgerRecord::Published(head_file(name), number));
        self.head_records.lock().insert(name.to_owned(), Ok(record));
    }

    /// Makes heads that begin with sealed layers. A crash leaves the first ones of them, each
    /// whole.
    ///
    /// # Errors
    /// As [`StoreDir::publish`]; then there are none of the heads.
    pub fn add_heads(&self, heads: &[(String, HeadRecord)]) -> Result<()> {
        let numbers: Vec<u64> =
            heads.iter().map(|(name, _)| self.next_number_of(&head_file(name))).collect();
        let frames = heads.iter().zip(&numbers).map(|((name, record), number)| {
            let frame =
                log::frame(record, *number).map_err(|e| e.during(format!("write {name}")))?;
            Ok((name.as_str(), frame))
        });
        let frames = frames.collect::<Result<Vec<_>>>()?;
        if let Err(error) = self.heads.publish_all(&frames, self.durable) {
            let removed = frames.iter().try_for_each(|(name, _)| self.heads.remove(name));
            if let Err(why) = removed.and_then(|()| self.heads.sync()) {
                ::log::warn!("{why}; a head that could not be made may be there after a power cut");
            }
            return Err(error);
        }
        for ((name, record), number) in heads.iter().zip(numbers) {
            self.note_head(name, number, record.clone());
        }
        Ok(())
    }

    /// Removes the record of a head. Its layers stay until gc takes them.
    ///
    /// # Errors
    /// As unlink(2) and fsync(2). The head may then be there or not after a power cut.
    pub fn remove_head(&self, name: &str) -> Result<()> {
        self.lower_ledger(&LedgerRecord::Published(head_file(name), 0))?;
        self.heads.remove(name)?;
        self.head_records.lock().remove(name);
        if self.durable { self.heads.sync() } else { Ok(()) }
    }

    /// The heads that a race has made and not finished with. The process that runs a race has the
    /// store open, so the other ones are of races that were killed.
    pub fn race_heads(&self) -> BTreeSet<String> {
        match record_file::read::<RaceRecord>(&self.dir, RACE) {
            Ok(record) => record.unwrap_or_default().heads,
            Err(error) => {
                // A damaged record costs a remark in a list.
                ::log::warn!("{error}");
                BTreeSet::new()
            }
        }
    }

    /// Replaces the heads that a race has made and not finished with.
    ///
    /// # Errors
    /// As [`StoreDir::publish`] and unlink(2).
    pub fn set_race_heads(&self, heads: BTreeSet<String>) -> Result<()> {
        if !heads.is_empty() {
            return record_file::publish(&self.dir, RACE, &RaceRecord { heads }, 0, self.durable);
        }
        if self.dir.size(RACE)?.is_some() { self.dir.remove(RACE) } else { Ok(()) }
    }

    /// The number that the next new layer gets.
    pub fn next_layer(&self) -> LayerId {
        LayerId(self.state.lock().next_layer)
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
