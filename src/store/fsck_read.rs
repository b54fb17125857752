//! Reads a store for a consistency check, without opening it: nothing is written, nothing is
//! locked, and damage is reported file by file.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use crate::error::{Attempt, Error, Result};
use crate::store::content::checksums;
use crate::store::content::checksums::Checksums;
use crate::store::content::pool::BLOCK;
use crate::store::content::remap::Remap;
use crate::store::edits_log;
use crate::store::edits_log::{Recorded, Replay};
use crate::store::format::{check_format, read_base};
use crate::store::heads;
use crate::store::heads::HEADS;
use crate::store::identities::IDENTITIES;
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::layer::files::Layers;
use crate::store::layer::{JournalEnd, LayerContents, LayerInfo, POOL, Trust, journal};
use crate::store::ledger;
use crate::store::ledger::Known;
use crate::store::lock::take_lock;
use crate::store::op_log;
use crate::store::placement;
use crate::store::record::{HeadRecord, IdentityRecord, OpRecord};
use crate::store::volatile;
use crate::types::{ByteRange, LayerId};

/// The outcome of [`Inspect::verify`].
pub struct Verified {
    /// The blocks and pieces of chunks that are not what they were.
    pub damaged: Vec<ByteRange>,
    /// The bytes that have no checksum.
    pub without_sum: u64,
}

/// A store that is being checked.
pub struct Inspect {
    dir: StoreDir,
    layers: Layers,
    trust: Trust,
    /// The ledger. It is read first: what another process does meanwhile only adds to the files
    /// that are read later.
    ledger: Option<Known>,
    /// Where to end in the journals that heads write to.
    ends: Vec<JournalEnd>,
}

impl Inspect {
    /// Begins to read the store at `path`.
    ///
    /// # Errors
    /// `NoStore` if there is none; if its format is unknown; damage of the file `base`.
    pub fn open(path: &Path) -> Result<Inspect> {
        let dir = StoreDir::open(path)?;
        check_format(&dir)?;
        let ledger = ledger::read(&dir)?.map(|found| found.known);
        let trust = heads::read_trust(&dir)?;
        let layers = Layers::open(&dir, false, &mut |_| ())?;
        read_base(&dir)?;
        Ok(Inspect { layers, ledger, dir, trust, ends: Vec::new() })
    }

    /// Reads the journals that heads write to only up to these ends.
    #[must_use]
    pub fn up_to(self, ends: Vec<JournalEnd>) -> Inspect {
        Inspect { ends, ..self }
    }

    /// Fails if a power cut may have taken any part of the store.
    ///
    /// # Errors
    /// Damage: another writer wrote the store without syncs, or the file that says so is damaged.
    pub fn check_volatile(&self) -> Result<()> {
        volatile::check(&self.dir, self.trust.writer).map(drop)
    }

    /// The numbers of the layers, oldest first.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn layers(&self) -> Result<Vec<LayerId>> {
        let mut ids = self.layers.directories()?;
        ids.extend(self.layers.archived.layers());
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// Takes the errors of a damaged archive, with file and offset.
    pub fn damage_of_archive(&mut self) -> Vec<Error> {
        std::mem::take(self.layers.archived.damaged())
    }

    /// The journal of a layer.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn layer(&self, layer: LayerId) -> Result<LayerContents> {
        match self.ends.iter().find(|end| end.layer == layer) {
            Some(end) => journal::read_bytes(&self.layers, layer, end.log_bytes(), &self.trust),
            None => journal::read(&self.layers, layer, &self.trust),
        }
    }

    /// Whether the process that created a layer ended before the first record was complete.
    ///
    /// # Errors
    /// As open(2).
    pub fn is_incomplete(&self, layer: LayerId) -> Result<bool> {
        journal::is_incomplete(&self.layers, layer)
    }

    /// The index of a layer, if it has one.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn index(&self, layer: LayerId) -> Result<Option<LayerContents>> {
        match self.layers.sidecars(layer)?.index {
            Some(_) => journal::read_index(&self.layers, layer, &self.trust).map(Some),
            None => Ok(None),
        }
    }

    /// The checksums of a layer, if it has any.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn sums(&self, layer: LayerId) -> Result<Option<Checksums>> {
        let sidecars = self.layers.sidecars(layer)?;
        let has_sums = sidecars.summed && sidecars.archived.is_none();
        has_sums.then(|| placement::read_checksums(&self.layers, layer)).transpose()
    }

    /// The remap of a layer, if it has one.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn remap(&self, layer: LayerId) -> Result<Option<Remap>> {
        placement::read_remap(&self.layers, layer)
    }

    /// The pool of a layer, if it is not in the archive, and the end of its addresses.
    ///
    /// # Errors
    /// As open(2), and damage of the archive.
    pub fn pool(&self, layer: LayerId) -> Result<(Option<File>, u64)> {
        if let Some(end) = self.layers.sidecars(layer)?.archived {
            return Ok((None, end));
        }
        let dir = self.layers.dir_of(layer)?;
        let file = dir.file(POOL, false)?;
        let len = file.metadata().attempt(|| format!("stat {}", dir.show(POOL)))?.len();
        Ok((Some(file), len))
    }

    /// Reads and verifies ranges of the content of a layer, which are sorted. `None` if the layer
    /// has no checksums yet.
    ///
    /// # Errors
    /// As pread(2), and damage of the archive or of the checksums.
    pub fn verify(&self, layer: LayerId, ranges: &[ByteRange]) -> Result<Option<Verified>> {
        let attempt = || format!("read {}", self.show(layer, POOL));
        if let Some(archived) = placement::archived_content(&self.layers, layer)? {
            let damaged = archived.damaged(ranges).attempt(attempt)?;
            return Ok(Some(Verified { damaged, without_sum: 0 }));
        }
        let (Some(sums), (Some(pool), _)) = (self.sums(layer)?, self.pool(layer)?) else {
            return Ok(None);
        };
        let blocks = checksums::damaged_blocks(&pool, &sums, ranges).attempt(attempt)?;
        let damaged = blocks.into_iter().map(|block| ByteRange::at(block, BLOCK)).collect();
        // A block can lack a checksum, for example after an interrupted punch of a neighbour.
        let without_sum =
            checksums::bytes_without_checksum(&pool, &sums, ranges).attempt(attempt)?;
        Ok(Some(Verified { damaged, without_sum }))
    }

    /// Locks the store until the result is dropped.
    ///
    /// # Errors
    /// `InUse`, or as open(2).
    pub fn lock(&self) -> Result<impl Drop + use<>> {
        take_lock(&self.dir)
    }

    /// Removes a file of a layer. The caller holds the lock.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn remove(&self, layer: LayerId, name: &str) -> Result<()> {
        self.layers.dir_of(layer)?.remove(name)
    }

    /// The path of a file of a layer, for messages.
    pub fn show(&self, layer: LayerId, name: &str) -> String {
        self.layers.show(layer, name)
    }

    /// The heads, each with its layer or the error of reading it.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn heads(&self) -> Result<Vec<(String, Result<Option<HeadRecord>>)>> {
        let dir = self.dir.dir(HEADS)?;
        let names = heads::names(&dir)?;
        let first = |found: Option<(HeadRecord, u64)>| found.map(|(record, _)| record);
        Ok(names
            .into_iter()
            .map(|name| (name.clone(), heads::read(&dir, &name).map(first)))
            .collect())
    }

    /// The operations, each with its number.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn ops(&self) -> Result<Vec<(u64, OpRecord)>> {
        op_log::read(&self.dir)
    }

    /// The records of the log of inode numbers.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn identities(&self) -> Result<Vec<IdentityRecord>> {
        let bytes = self.dir.read(IDENTITIES)?.unwrap_or_default();
        let contents = log::read::<IdentityRecord>(&bytes, &self.dir.show(IDENTITIES))?;
        Ok(contents.records.into_iter().map(|(record, _)| record).collect())
    }

    /// The edit histories of all heads: the path of each log, for messages, and its records or the
    /// error of reading it. Skips the logs of dropped heads.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn histories<R: Replay>(&self) -> Result<Vec<(String, Result<Recorded<R>>)>> {
        let heads = heads::names(&self.dir.dir(HEADS)?)?;
        let read = |head: &String| {
            edits_log::read(&self.dir, head, &self.trust).map(Option::unwrap_or_default)
        };
        Ok(heads.iter().map(|head| (edits_log::show(&self.dir, head), read(head))).collect())
    }

    /// Errors for everything that is missing according to the ledger. `layers` are the layers that
    /// can be read, `unread` the others.
    ///
    /// # Errors
    /// As open(2).
    pub fn missing<'l>(
        &self,
        layers: impl Iterator<Item = &'l LayerInfo> + Clone,
        unread: &BTreeSet<LayerId>,
    ) -> Result<Vec<Error>> {
        let Some(known) = &self.ledger else { return Ok(Vec::new()) };
        // A file that cannot be read counts as complete; its own check reports it.
        let operations =
            self.ops().map_or(u64::MAX, |ops| ops.last().map_or(0, |(number, _)| *number));
        let bytes = self.dir.read(IDENTITIES)?.unwrap_or_default();
        let numbers = log::read_torn::<IdentityRecord>(&bytes, IDENTITIES)
            .map_or(u64::MAX, |torn| torn.contents.records.len() as u64);
        let published = heads::published(&self.dir, &self.dir.dir(HEADS)?, &self.layers.archived)?;
        let mut sealed = unread.clone();
        sealed.extend(
            layers.clone().filter(|info| info.seal.is_some()).map(|info| info.header.layer),
        );
        let found = Known { sealed, operations, numbers, published, ..Known::default() };
        let show = |name: &str| self.dir.show(name);
        let mut missing = known.missing(&found, &show);
        missing.extend(
            layers.filter_map(|info| known.is_older(&info.header, info.seal.as_deref(), &show)),
        );
        Ok(missing)
    }

    /// The layers that neither drop nor gc removes.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn holds(&self) -> Result<BTreeSet<LayerId>> {
        heads::read_holds(&self.dir)
    }
}
