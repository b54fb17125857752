//! Reading a store without having it open: nothing is written, nothing is locked, and what is damaged is told piece by piece.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use crate::error::{Attempt, Error, Result};
use crate::store::content::cells::Cells;
use crate::store::content::checksums;
use crate::store::content::checksums::Checksums;
use crate::store::content::remap::Remap;
use crate::store::edits_log;
use crate::store::edits_log::Recorded;
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::layer;
use crate::store::layer::files::Layers;
use crate::store::layer::{INDEX, LayerContents, LayerInfo, POOL, Trust};
use crate::store::ledger;
use crate::store::ledger::Known;
use crate::store::record::{HeadRecord, HoldsRecord, IdentityRecord, OpRecord};
use crate::store::volatile;
use crate::store::{
    BaseRecord, HEADS_LOG, HOLDS, IDENTITIES, check_format, head_names, placement, published,
    read_base, read_one, read_trust,
};
use crate::types::{ByteRange, LayerId};

/// The files of a store.
pub struct Inspect {
    dir: StoreDir,
    layers: Layers,
    trust: Trust,
    /// What the ledger says. It is read first: what is done meanwhile only adds to the files that are read later.
    ledger: Option<Known>,
    /// The base that it is for.
    pub base: BaseRecord,
}

impl Inspect {
    /// Looks at the store at `path`.
    ///
    /// # Errors
    /// When there is no store, it is of another format, or does not say what it is for.
    pub fn open(path: &Path) -> Result<Inspect> {
        let dir = StoreDir::open(path)?;
        check_format(&dir)?;
        let ledger = ledger::read(&dir)?.map(|(known, ..)| known);
        let trust = read_trust(&dir)?;
        let layers = Layers::open(&dir, &mut |_| ())?;
        Ok(Inspect { base: read_base(&dir)?, layers, ledger, dir, trust })
    }

    /// Says why nothing is known of what is in it, if so.
    ///
    /// # Errors
    /// It was written without syncs, and the machine was started anew since; or the file that says so is damaged.
    pub fn is_known(&self) -> Result<()> {
        volatile::check(&self.dir, self.trust.writer).map(drop)
    }

    /// The numbers of the layers, oldest first.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn layers(&self) -> Result<Vec<LayerId>> {
        let mut ids = self.layers.directories()?;
        ids.extend(self.layers.packs.layers());
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// What is damaged of the packs, with file and offset; once.
    pub fn damaged_packs(&mut self) -> Vec<Error> {
        std::mem::take(self.layers.packs.damaged())
    }

    /// The journal of a layer.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn layer(&self, layer: LayerId) -> Result<LayerContents> {
        layer::read(&self.layers, layer, &self.trust)
    }

    /// Whether the making of a layer was cut off inside its first record.
    ///
    /// # Errors
    /// As open(2).
    pub fn is_newborn(&self, layer: LayerId) -> Result<bool> {
        super::layer_is_newborn(&self.layers, layer)
    }

    /// The index of a layer, if it has one.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn index(&self, layer: LayerId) -> Result<Option<LayerContents>> {
        match self.layers.besides(layer)?.index {
            Some(_) => layer::read_file(&self.layers, layer, INDEX, &self.trust).map(Some),
            None => Ok(None),
        }
    }

    /// The checksums of a layer, if it has any.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn sums(&self, layer: LayerId) -> Result<Option<Checksums>> {
        let besides = self.layers.besides(layer)?;
        let has_sums = besides.summed && besides.hole.is_none();
        has_sums.then(|| placement::read_checksums(&self.layers, layer)).transpose()
    }

    /// What of the content of a layer is elsewhere.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn remap(&self, layer: LayerId) -> Result<Option<Remap>> {
        placement::read_remap(&self.layers, layer)
    }

    /// The pool of a layer, if any of its content is there, and where its addresses end.
    ///
    /// # Errors
    /// As open(2), and damage of a pack.
    pub fn pool(&self, layer: LayerId) -> Result<(Option<File>, u64)> {
        if let Some(end) = self.layers.besides(layer)?.hole {
            return Ok((None, end));
        }
        let dir = self.layers.dir_of(layer)?;
        let file = dir.file(POOL, false)?;
        let len = file.metadata().attempt(|| format!("stat {}", dir.show(POOL)))?.len();
        Ok((Some(file), len))
    }

    /// How the content of a layer is deflated, if it is.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn cells(&self, info: &LayerInfo) -> Result<Option<Cells>> {
        placement::read_cells(&self.layers, info)
    }

    /// The blocks in `ranges` of a pool that are not as they were written.
    ///
    /// # Errors
    /// As pread(2).
    pub fn damaged_blocks(
        &self,
        layer: LayerId,
        sums: &Checksums,
        ranges: &[ByteRange],
    ) -> Result<Vec<u64>> {
        let (Some(pool), _) = self.pool(layer)? else { return Ok(Vec::new()) };
        checksums::damaged_blocks(&pool, sums, ranges)
            .attempt(|| format!("read {}", self.show(layer, POOL)))
    }

    /// Bytes in `ranges` of a pool that are held against no checksum.
    ///
    /// # Errors
    /// As lseek(2).
    pub fn without_sum(
        &self,
        layer: LayerId,
        sums: &Checksums,
        ranges: &[ByteRange],
    ) -> Result<u64> {
        let (Some(pool), _) = self.pool(layer)? else { return Ok(0) };
        checksums::bytes_without_checksum(&pool, sums, ranges)
            .attempt(|| format!("read {}", self.show(layer, POOL)))
    }

    /// Keeps everybody else from opening the store.
    ///
    /// # Errors
    /// In use, or as open(2).
    pub fn lock(&self) -> Result<impl Drop + use<>> {
        super::take_lock(&self.dir)
    }

    /// Removes a file of a layer. Hold the lock.
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

    /// The heads and the layer on top of each.
    ///
    /// # Errors
    /// As readdir(3); each head has its own.
    pub fn heads(&self) -> Result<Vec<(String, Result<Option<HeadRecord>>)>> {
        let heads = self.dir.dir("heads")?;
        let names = head_names(&heads)?;
        Ok(names.into_iter().map(|name| (name.clone(), read_one(&heads, &name))).collect())
    }

    /// The log of heads, each record with its number.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn ops(&self) -> Result<Vec<(u64, OpRecord)>> {
        let bytes = self.dir.read(HEADS_LOG)?.unwrap_or_default();
        let (contents, given_up) =
            log::read_numbered::<OpRecord>(&bytes, &self.dir.show(HEADS_LOG))?;
        let numbered = contents.records.into_iter().enumerate();
        Ok(numbered.map(|(at, (op, _))| (given_up + at as u64 + 1, op)).collect())
    }

    /// The log of numbers.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn identities(&self) -> Result<Vec<IdentityRecord>> {
        self.records("identities")
    }

    /// The logs of what edits of single files replaced: of each the path, for messages, and what is in it.
    ///
    /// # Errors
    /// As readdir(3); each log has its own: damage, with file and offset.
    pub fn histories(&self) -> Result<Vec<(String, Result<Recorded>)>> {
        let heads = edits_log::heads(&self.dir)?;
        let read = |head: &String| {
            edits_log::read(&self.dir, head, &self.trust).map(Option::unwrap_or_default)
        };
        Ok(heads.iter().map(|head| (edits_log::show(&self.dir, head), read(head))).collect())
    }

    /// What the ledger says that there was and that is missing, if `layers` are those that can be read, and `unread` the others.
    ///
    /// # Errors
    /// As open(2).
    pub fn missing<'l>(
        &self,
        layers: impl Iterator<Item = &'l LayerInfo> + Clone,
        unread: &BTreeSet<LayerId>,
    ) -> Result<Vec<Error>> {
        let Some(known) = &self.ledger else { return Ok(Vec::new()) };
        // What cannot be read is told elsewhere.
        let operations =
            self.ops().map_or(u64::MAX, |ops| ops.last().map_or(0, |(number, _)| *number));
        let bytes = self.dir.read(IDENTITIES)?.unwrap_or_default();
        let numbers = log::read_torn::<IdentityRecord>(&bytes, IDENTITIES)
            .map_or(u64::MAX, |torn| torn.contents.records.len() as u64);
        let published = published(&self.dir, &self.dir.dir("heads")?, &self.layers.packs)?;
        let mut sealed = unread.clone();
        sealed.extend(
            layers.clone().filter(|info| info.seal.is_some()).map(|info| info.header.layer),
        );
        let found = Known { sealed, operations, numbers, published, ..Known::default() };
        let show = |name: &str| self.dir.show(name);
        let mut missing = known.missing(&found, &show);
        missing.extend(layers.filter_map(|info| known.is_older(info, &show)));
        Ok(missing)
    }

    /// What is held.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn holds(&self) -> Result<Vec<LayerId>> {
        let record = read_one::<HoldsRecord>(&self.dir, HOLDS)?;
        Ok(record.map_or_else(Vec::new, |record| record.layers.into_iter().collect()))
    }

    fn records<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Vec<T>> {
        let bytes = self.dir.read(name)?.unwrap_or_default();
        Ok(log::read::<T>(&bytes, &self.dir.show(name))?
            .records
            .into_iter()
            .map(|(record, _)| record)
            .collect())
    }
}
