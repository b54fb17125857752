//! The ledger records what the other files of a store must have at least: the file `ledger`.
//!
//! A log that was cut at the end of a record, an older copy of a file and a missing file all look
//! whole. The ledger finds them, because it counts from outside what each file had.
//!
//! Always true:
//! * A record is appended after its subject is on disk. It is not synced, so a power cut can take
//!   it. Then the ledger proves less than it could, and never more than is true.
//! * Before a file gets less, the ledger records that, synced. If it cannot be synced, the ledger
//!   is removed.
//! * The ledger is evidence and nothing else. A start begins a new one if it is missing or damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::record::{Header, LayerKind, Seal};
use crate::types::LayerId;

/// The file of the ledger.
pub(super) const LEDGER: &str = "ledger";
/// The name under which [`LedgerRecord::Published`] has the number of the root of the archive.
pub(super) const ARCHIVE_ROOT: &str = "archive/root";
/// Why a file of one frame has less than the ledger says.
const OLDER: &str = "the file is missing, or an older copy";
/// A start compacts a ledger with more records than this.
const MANY: u64 = 4096;

/// A record of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LedgerRecord {
    /// These layers are sealed.
    Sealed(Vec<LayerId>),
    /// These layers are about to be removed.
    Gone(Vec<LayerId>),
    /// The number of records in `heads.log`, with those that were trimmed.
    Operations(u64),
    /// The number of records in `identities`.
    Numbers(u64),
    /// A file of one frame was published, and its frame has this number. The number 0 says that the
    /// file is about to be removed.
    Published(String, u64),
    /// The journal of a sealed layer was rewritten, and claims less.
    Lowered(LayerId, Lowered),
}

/// The claims of a rewritten journal about its layer. Each rewrite claims the same or less, so an
/// older copy of the journal claims more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lowered {
    /// The parent is this layer, an older one, or none.
    pub parent: Option<LayerId>,
    /// The layer is no checkpoint.
    pub automatic: bool,
    /// The records of the layer moved into the layers above.
    pub collected: bool,
}

impl Lowered {
    /// The claims of the journal of a layer.
    pub(super) fn of(header: &Header, seal: &Seal) -> Lowered {
        let collected = header.kind == LayerKind::Collected;
        Lowered { parent: header.parent, automatic: seal.automatic, collected }
    }

    /// Whether a journal that claims this can be the noted one, or a later rewrite of it.
    fn is_within(&self, noted: &Lowered) -> bool {
        self.parent <= noted.parent
            && self.automatic >= noted.automatic
            && self.collected >= noted.collected
    }
}

/// The outcome of all records of a ledger; or the same facts about a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    pub sealed: BTreeSet<LayerId>,
    pub lowered: BTreeMap<LayerId, Lowered>,
    pub operations: u64,
    pub numbers: u64,
    pub published: BTreeMap<String, u64>,
}

impl Known {
    fn note(&mut self, record: &LedgerRecord) {
        match record {
            LedgerRecord::Sealed(layers) => self.sealed.extend(layers),
            LedgerRecord::Gone(layers) => {
                self.sealed.retain(|layer| !layers.contains(layer));
                self.lowered.retain(|layer, _| !layers.contains(layer));
            }
            LedgerRecord::Lowered(layer, to) => drop(self.lowered.insert(*layer, *to)),
            LedgerRecord::Operations(count) => self.operations = *count,
            LedgerRecord::Numbers(count) => self.numbers = *count,
            LedgerRecord::Published(name, number) => {
                self.published.insert(name.clone(), *number);
            }
        }
    }

    /// The shortest list of records with the same meaning.
    fn records(&self) -> Vec<LedgerRecord> {
        let mut records = vec![
            LedgerRecord::Sealed(self.sealed.iter().copied().collect()),
            LedgerRecord::Operations(self.operations),
            LedgerRecord::Numbers(self.numbers),
        ];
        let published = self.published.iter();
        records
            .extend(published.map(|(name, number)| LedgerRecord::Published(name.clone(), *number)));
        records.extend(self.lowered.iter().map(|(layer, to)| LedgerRecord::Lowered(*layer, *to)));
        records
    }

    /// The error for a root of the archive that is missing or older than the known one. Without
    /// this check its layers would be reported as lost, one by one.
    pub fn older_archive(&self, number: u64, show: &dyn Fn(&str) -> String) -> Option<Error> {
        let is_older = self.published.get(ARCHIVE_ROOT).is_some_and(|known| number < *known);
        is_older.then(|| lost(show, ARCHIVE_ROOT, OLDER))
    }

    /// The error for a journal that claims what it claimed before it was rewritten. An open layer
    /// has no seal and claims nothing.
    pub fn is_older(
        &self,
        header: &Header,
        seal: Option<&Seal>,
        show: &dyn Fn(&str) -> String,
    ) -> Option<Error> {
        let noted = self.lowered.get(&header.layer)?;
        let is_older = seal.is_some_and(|seal| !Lowered::of(header, seal).is_within(noted));
        let why = "it is an older copy, from before the journal was rewritten";
        is_older.then(|| lost(show, &journal(header.layer), why))
    }

    /// Errors for everything that is missing in a store that has `found`. `show` gives the path of
    /// a file.
    pub fn missing(&self, found: &Known, show: &dyn Fn(&str) -> String) -> Vec<Error> {
        let mut errors = Vec::new();
        for (name, number) in &self.published {
            let found = found.published.get(name);
            if *number > 0 && found.is_none_or(|found| found < number) {
                errors.push(lost(show, name, OLDER));
            }
        }
        let gone = self.sealed.difference(&found.sealed);
        errors.extend(gone.map(|layer| {
            let why = "its seal is missing, here and in the archive, although the layer was sealed";
            lost(show, &journal(*layer), why)
        }));
        for (name, had, has) in [
            ("heads.log", self.operations, found.operations),
            ("identities", self.numbers, found.numbers),
        ] {
            if has < had {
                errors.push(lost(show, name, format!("it has {has} records, and had {had}")));
            }
        }
        errors
    }
}

fn journal(layer: LayerId) -> String {
    format!("layers/{:08}/journal", layer.0)
}

fn lost(show: &dyn Fn(&str) -> String, name: &str, why: impl Into<String>) -> Error {
    Error::damage(format!("read {}", show(name)), why).hint(
        "only if the file 'ledger' is an older copy itself: remove it, the store begins a new one",
    )
}

/// The ledger as it was found on disk.
pub(super) struct Found {
    pub known: Known,
    /// Where the records end.
    end: u64,
    /// The number of records.
    count: u64,
}

/// Reads the ledger of a store; `None` if it is missing or damaged.
///
/// # Errors
/// As open(2) and read(2).
pub(super) fn read(dir: &StoreDir) -> Result<Option<Found>> {
    let Some(bytes) = dir.read(LEDGER)? else { return Ok(None) };
    let what = dir.show(LEDGER);
    let contents = match log::read::<LedgerRecord>(&bytes, &what) {
        Ok(contents) => contents,
        Err(error) => {
            // A power cut can cause that, because most records are not synced.
            ::log::info!("{error}; a new ledger begins");
            return Ok(None);
        }
    };
    let mut known = Known::default();
    contents.records.iter().for_each(|(record, _)| known.note(record));
    let count = contents.records.len() as u64;
    Ok((count > 0).then_some(Found { known, end: contents.end, count }))
}

/// The ledger of an open store.
#[derive(Default)]
pub(super) struct Ledger {
    /// `None` after it could not be written.
    log: Option<Log<LedgerRecord>>,
    /// The outcome of its records.
    known: Known,
    /// The number of the last frame of each file that is published whole.
    last: BTreeMap<String, u64>,
}

impl Store {
    /// Begins to keep the ledger. `read` is the ledger on disk, `found` is what the store has.
    ///
    /// Of `found`, only the seals below the heads certainly survive a power cut: the last process
    /// may have been killed before it synced the rest.
    pub(super) fn keep_ledger(&self, read: Option<Found>, found: Known) {
        let below_head: BTreeSet<LayerId> =
            found.sealed.range(..self.trust.torn_from).copied().collect();
        let place = read.as_ref().map(|read| (read.end, read.count));
        let mut known = read.map(|read| read.known).unwrap_or_default();
        let log = match place {
            Some((end, count)) if count <= MANY => self
                .dir
                .file(LEDGER, false)
                .and_then(|file| Log::append_to(Arc::new(file), self.dir.show(LEDGER), end, count)),
            _ => {
                known.sealed.extend(&below_head);
                self.publish_log(LEDGER, 0, known.records().iter())
            }
        };
        let log =
            log.inspect_err(|error| ::log::warn!("{error}; missing files may not be noticed"));
        *self.ledger.lock() = Ledger { log: log.ok(), known, last: found.published };
        self.note_sealed(below_head.into_iter().collect());
    }

    /// Records what is on disk, without a sync.
    pub(super) fn note_in_ledger(&self, record: &LedgerRecord) {
        let mut ledger = self.ledger.lock();
        ledger.known.note(record);
        if let Some(log) = &mut ledger.log
            && let Err(error) = log.append(record)
        {
            ::log::warn!("{error}; missing files may not be noticed");
            ledger.log = None;
        }
    }

    /// Records, synced, that a file is about to get less.
    ///
    /// # Errors
    /// If the record cannot be synced, and the ledger cannot be removed either. Then the caller
    /// must not shorten the file.
    pub(super) fn lower_ledger(&self, record: &LedgerRecord) -> Result<()> {
        let mut ledger = self.ledger.lock();
        ledger.known.note(record);
        let durable = self.durable;
        let written = ledger.log.as_mut().is_some_and(|log| {
            let written =
                log.append(record).and_then(|()| if durable { log.sync() } else { Ok(()) });
            written.inspect_err(|error| ::log::warn!("{error}; the ledger is removed")).is_ok()
        });
        if written {
            return Ok(());
        }
        // The removal needs no space.
        ledger.log = None;
        self.dir.remove(LEDGER)?;
        if durable { self.dir.sync() } else { Ok(()) }
    }

    /// Records, synced, that layers are about to be removed.
    ///
    /// # Errors
    /// As [`Store::lower_ledger`].
    pub(super) fn note_gone(&self, layers: &[LayerId]) -> Result<()> {
        let sealed: Vec<LayerId> = {
            let ledger = self.ledger.lock();
            layers.iter().copied().filter(|layer| ledger.known.sealed.contains(layer)).collect()
        };
        if sealed.is_empty() { Ok(()) } else { self.lower_ledger(&LedgerRecord::Gone(sealed)) }
    }

    /// Records that layers are sealed, if the ledger does not have that yet.
    pub(super) fn note_sealed(&self, mut layers: Vec<LayerId>) {
        {
            let ledger = self.ledger.lock();
            layers.retain(|layer| !ledger.known.sealed.contains(layer));
        }
        if !layers.is_empty() {
            self.note_in_ledger(&LedgerRecord::Sealed(layers));
        }
    }

    /// The number for the next frame of a file that is published whole. Each is given out once.
    pub(super) fn next_number_of(&self, name: &str) -> u64 {
        let mut ledger = self.ledger.lock();
        let number = ledger.last.entry(name.to_owned()).or_insert(0);
        *number += 1;
        *number
    }

    /// Records how many inode numbers are on disk, unless another thread is using them now.
    pub(super) fn note_numbers(&self) {
        let Some(count) = self.identities.try_lock().map(|identities| identities.synced_count())
        else {
            return;
        };
        if count > self.ledger.lock().known.numbers {
            self.note_in_ledger(&LedgerRecord::Numbers(count));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Known {
        let mut known = Known::default();
        for record in [
            LedgerRecord::Sealed(vec![LayerId(1), LayerId(2), LayerId(3)]),
            LedgerRecord::Gone(vec![LayerId(2)]),
            LedgerRecord::Operations(7),
            LedgerRecord::Numbers(4),
            LedgerRecord::Published("holds".to_owned(), 2),
            LedgerRecord::Lowered(
                LayerId(3),
                Lowered { parent: None, automatic: true, collected: false },
            ),
            LedgerRecord::Published(ARCHIVE_ROOT.to_owned(), 5),
        ] {
            known.note(&record);
        }
        known
    }

    #[test]
    fn a_compacted_ledger_says_the_same() {
        let mut again = Known::default();
        known().records().iter().for_each(|record| again.note(record));
        assert_eq!(again, known());
    }

    #[test]
    fn a_file_that_has_less_than_the_ledger_says_is_named() {
        let errors = |found: &Known| -> Vec<String> {
            let missing = known().missing(found, &|name| format!("STORE/{name}"));
            missing.iter().map(ToString::to_string).collect()
        };
        assert_eq!(errors(&known()), Vec::<String>::new());
        let one = |change: &dyn Fn(&mut Known)| {
            let mut found = known();
            change(&mut found);
            let errors = errors(&found);
            assert_eq!(errors.len(), 1, "{errors:?}");
            errors.concat()
        };
        let published = |name: &'static str| {
            move |found: &mut Known| {
                found.published.remove(name);
            }
        };
        for (named, errors) in [
            ("STORE/heads.log", one(&|found| found.operations = 6)),
            ("STORE/identities", one(&|found| found.numbers = 3)),
            (
                "STORE/layers/00000003/journal",
                one(&|found| found.sealed.retain(|layer| *layer != LayerId(3))),
            ),
            ("STORE/holds", one(&published("holds"))),
            ("STORE/archive/root", one(&published(ARCHIVE_ROOT))),
        ] {
            assert!(errors.contains(named), "{errors}");
        }
        let parent = Some(LayerId(2));
        let noted = Lowered { parent, automatic: true, collected: false };
        for (to, is_within) in [
            (noted, true),
            (Lowered { parent: Some(LayerId(1)), ..noted }, true),
            (Lowered { parent: None, collected: true, ..noted }, true),
            (Lowered { parent: Some(LayerId(3)), ..noted }, false),
            (Lowered { automatic: false, ..noted }, false),
        ] {
            assert_eq!(to.is_within(&noted), is_within, "{to:?}");
        }
        let more = Known { operations: 9, numbers: 8, ..known() };
        assert_eq!(errors(&more), Vec::<String>::new(), "the ledger may have less than the store");
    }
}
