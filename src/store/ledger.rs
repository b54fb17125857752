//! The ledger says what the other files of a store must have at least: the file `ledger`.
//!
//! A log that was cut at the end of a record, an older copy of a file and a missing file all look whole. The ledger tells
//! them apart, because it counts from outside what each of them had.
//!
//! Always true:
//! * A record is appended after the thing that it speaks of is on the disk. It is not synced, so a power cut can take it. Then
//!   the ledger proves less than it could, and never more than is true.
//! * Before a file is made to say less, the ledger says so, and that is synced. If it cannot be synced, the ledger goes.
//! * The ledger is evidence and nothing else. The store begins a new one where it is missing or damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::io::log::Log;
use crate::store::layer::LayerInfo;
use crate::store::record::{Header, LayerKind, Seal};
use crate::types::LayerId;

/// Name of the file.
pub(super) const LEDGER: &str = "ledger";
/// The name under which the number of the newest pack is kept.
pub(super) const PACKS: &str = "packs";
/// A ledger with more records than this is written anew at the next start.
const MANY: u64 = 4096;

/// A record of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LedgerRecord {
    /// These layers were sealed.
    Sealed(Vec<LayerId>),
    /// These layers are about to be removed.
    Gone(Vec<LayerId>),
    /// `heads.log` has so many records, with those that were given up.
    Operations(u64),
    /// `identities` has so many records.
    Numbers(u64),
    /// A file of one frame was published, and its frame has this number; or a pack, under the name `packs`.
    Published(String, u64),
    /// The journal of a sealed layer was rewritten and says less.
    Lowered(LayerId, Lowered),
}

/// What a rewritten journal says of its layer. Each only ever becomes less: an older copy of the journal says more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lowered {
    /// The layer below is this one, or an older one, or none.
    pub parent: Option<LayerId>,
    /// It is no checkpoint.
    pub automatic: bool,
    /// Its records went into the layers above.
    pub collected: bool,
}

impl Lowered {
    /// What the journal of a layer says.
    pub(super) fn of(header: &Header, seal: &Seal) -> Lowered {
        let collected = header.kind == LayerKind::Collected;
        Lowered { parent: header.parent, automatic: seal.automatic, collected }
    }

    /// Whether this can be what came of the other, or of something less.
    fn is_within(&self, noted: &Lowered) -> bool {
        self.parent <= noted.parent
            && self.automatic >= noted.automatic
            && self.collected >= noted.collected
    }
}

/// What the records of a ledger say together.
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

    /// The records that say the same.
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

    /// The newest pack, if it is missing because `found` is the newest that there is. Its layers look lost one by one.
    pub fn missing_pack(&self, found: Option<u32>, show: &dyn Fn(&str) -> String) -> Option<Error> {
        let number = *self.published.get(PACKS)?;
        let is_missing = found.is_none_or(|found| u64::from(found) < number);
        is_missing.then(|| lost(show, &format!("{PACKS}/{number:08}"), "the file is missing"))
    }

    /// The error for a journal that says of its layer what it said before it was rewritten.
    pub fn is_older(&self, info: &LayerInfo, show: &dyn Fn(&str) -> String) -> Option<Error> {
        let layer = info.header.layer;
        let noted = self.lowered.get(&layer)?;
        let is_older = info
            .seal
            .as_ref()
            .is_some_and(|seal| !Lowered::of(&info.header, seal).is_within(noted));
        let why = "it is an older copy: what it says was given up";
        is_older.then(|| lost(show, &format!("layers/{:08}/journal", layer.0), why))
    }

    /// What is missing of what the ledger says, if `found` is all that there is. `show` gives the path of a file.
    pub fn missing(&self, found: &Known, show: &dyn Fn(&str) -> String) -> Vec<Error> {
        let mut errors = Vec::new();
        for (name, number) in &self.published {
            let found = found.published.get(name);
            if name == PACKS {
                let newest = found.and_then(|number| u32::try_from(*number).ok());
                errors.extend(self.missing_pack(newest, show));
            } else if found.is_none_or(|found| found < number) {
                errors.push(lost(show, name, "the file is missing, or an older copy"));
            }
        }
        let gone = self.sealed.difference(&found.sealed);
        errors.extend(gone.map(|layer| {
            let name = format!("layers/{:08}/journal", layer.0);
            lost(
                show,
                &name,
                format!("layer {layer} was sealed, and neither this file nor a pack has its seal"),
            )
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

fn lost(show: &dyn Fn(&str) -> String, name: &str, why: impl Into<String>) -> Error {
    Error::damage(format!("read {}", show(name)), why).hint(
        "only if the file 'ledger' is an older copy itself: remove it, the store begins a new one",
    )
}

/// The ledger of an open store.
#[derive(Default)]
pub(super) struct Ledger {
    /// None if it cannot be written.
    log: Option<Log<LedgerRecord>>,
    /// What its records say.
    known: Known,
    /// The number of the last frame of each file that is published whole.
    last: BTreeMap<String, u64>,
}

/// Reads the ledger of a store, and gives the place where it goes on: where it ends, and with which number. None if there
/// is no ledger, or it is damaged.
///
/// # Errors
/// As open(2).
pub(super) fn read(dir: &StoreDir) -> Result<Option<(Known, u64, u64)>> {
    let Some(bytes) = dir.read(LEDGER)? else { return Ok(None) };
    let what = dir.show(LEDGER);
    let contents = match log::read::<LedgerRecord>(&bytes, &what) {
        Ok(contents) => contents,
        Err(error) => {
            // A power cut can do that: nothing syncs most of its records.
            ::log::info!("{error}; the ledger begins anew");
            return Ok(None);
        }
    };
    let mut known = Known::default();
    contents.records.iter().for_each(|(record, _)| known.note(record));
    let is_whole = !contents.records.is_empty();
    Ok(is_whole.then_some((known, contents.end, contents.records.len() as u64)))
}

impl Store {
    /// Begins to keep the ledger. `read` is what was found of it, and `found` is what there is. Of that only the seals
    /// below the head are known to survive a power cut: the process before may have been killed before it synced the rest.
    pub(super) fn keep_ledger(&self, read: Option<(Known, u64, u64)>, found: Known) {
        let below_head: BTreeSet<LayerId> =
            found.sealed.range(..self.trust.torn_from).copied().collect();
        let place = read.as_ref().map(|(_, end, count)| (*end, *count));
        let mut known = read.map(|(known, ..)| known).unwrap_or_default();
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

    /// Says in the ledger what is on the disk.
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

    /// Says in the ledger, for good, that something is about to have less.
    ///
    /// # Errors
    /// When that can neither be written nor the ledger be removed: then nothing may go.
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
        // Removing takes no room.
        ledger.log = None;
        self.dir.remove(LEDGER)?;
        if durable { self.dir.sync() } else { Ok(()) }
    }

    /// Says in the ledger, for good, that layers are about to be removed.
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

    /// Says in the ledger that layers are sealed of which it does not know it.
    pub(super) fn note_sealed(&self, mut layers: Vec<LayerId>) {
        {
            let ledger = self.ledger.lock();
            layers.retain(|layer| !ledger.known.sealed.contains(layer));
        }
        if !layers.is_empty() {
            self.note_in_ledger(&LedgerRecord::Sealed(layers));
        }
    }

    /// The number of the next frame of a file that is published whole. Each is given once.
    pub(super) fn next_number_of(&self, name: &str) -> u64 {
        let mut ledger = self.ledger.lock();
        let number = ledger.last.entry(name.to_owned()).or_insert(0);
        *number += 1;
        *number
    }

    /// Says in the ledger how many numbers of nodes are on the disk, if that can be told now.
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
            LedgerRecord::Published(PACKS.to_owned(), 5),
        ] {
            known.note(&record);
        }
        known
    }

    #[test]
    fn what_a_ledger_says_is_written_anew_in_fewer_records() {
        let mut again = Known::default();
        known().records().iter().for_each(|record| again.note(record));
        assert_eq!(again, known());
    }

    #[test]
    fn each_file_that_has_less_than_the_ledger_says_is_named() {
        let told = |found: &Known| -> Vec<String> {
            let errors = known().missing(found, &|name| format!("STORE/{name}"));
            errors.iter().map(ToString::to_string).collect()
        };
        assert_eq!(told(&known()), Vec::<String>::new());
        let one = |change: &dyn Fn(&mut Known)| {
            let mut found = known();
            change(&mut found);
            let told = told(&found);
            assert_eq!(told.len(), 1, "{told:?}");
            told.concat()
        };
        let published = |name: &'static str| {
            move |found: &mut Known| {
                found.published.remove(name);
            }
        };
        for (named, told) in [
            ("STORE/heads.log", one(&|found| found.operations = 6)),
            ("STORE/identities", one(&|found| found.numbers = 3)),
            (
                "STORE/layers/00000003/journal",
                one(&|found| found.sealed.retain(|layer| *layer != LayerId(3))),
            ),
            ("STORE/holds", one(&published("holds"))),
            ("STORE/packs/00000005", one(&published(PACKS))),
        ] {
            assert!(told.contains(named), "{told}");
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
        assert_eq!(told(&more), Vec::<String>::new(), "the ledger can be behind");
    }
}
