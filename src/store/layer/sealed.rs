//! What becomes of a layer after its seal: its journal is rewritten as what came of it, its whole tree is written down as
//! an index, its records go into the layers above, and at last it goes.
//!
//! ```text
//! layers/00000007/journal    Header, Compact, Edits ..., Seal: what leads from the parent's tree to this one
//! layers/00000007/index      the same with a header without a parent: what leads from the empty tree to this one
//! ```
//!
//! The journal of a layer that is in a pack is rewritten in a new pack, see [`crate::store::pack::packing`].
//!
//! Always true: each file is published whole by rename, so a reader finds the old one or the new one, and both say the
//! same of the tree. An index is only a shorter way to a tree: one that is not whole is passed over, and `check` tells it.

use std::sync::Arc;

use crate::error::{Attempt, Error, Result};
use crate::store::Store;
use crate::store::content::pool::block_ceil;
use crate::store::io::disk;
use crate::store::io::log::{Log, frame};
use crate::store::layer;
use crate::store::layer::{INDEX, JOURNAL, LayerContents, LayerInfo, MAP, POOL, SUMS};
use crate::store::ledger::{LedgerRecord, Lowered};
use crate::store::record::{Header, Record, Seal};
use crate::tree::Edit;
use crate::types::{ByteRange, LayerId};

/// Edits in one frame of a rewritten journal: few enough to be read one after the other, enough to make frames cheap.
const EDITS: usize = 1024;

impl Store {
    /// Rewrites the journal of a sealed layer as `edits`, under a header that may name another parent, and with a seal
    /// that may say something else.
    ///
    /// # Errors
    /// As the calls it is made of; the journal then stays as it was.
    pub fn rewrite_layer(
        &self,
        header: Header,
        seal: Seal,
        edits: impl Iterator<Item = Edit>,
    ) -> Result<()> {
        let mut rewriting = self.journal_rewriter();
        rewriting.rewrite(header, seal, edits)?;
        rewriting.finish()
    }

    pub(in crate::store) fn rewrite_journal(
        &self,
        header: &Header,
        seal: &Seal,
        edits: impl Iterator<Item = Edit>,
    ) -> Result<()> {
        let layer = header.layer;
        self.publish_records(JOURNAL, header, seal, edits)
            .map_err(|e| e.during(format!("rewrite layer {layer}")))?;
        let info = layer::read_info(&self.layers, layer, &self.trust)?;
        let before = self.state.lock().catalog.insert(layer, info);
        let said = before.and_then(|info| Some(Lowered::of(&info.header, info.seal.as_ref()?)));
        let says = Lowered::of(header, seal);
        if said != Some(says) {
            self.note_in_ledger(&LedgerRecord::Lowered(layer, says));
        }
        Ok(())
    }

    /// Writes down the whole tree of a sealed layer: the edits that lead to it from the empty tree.
    ///
    /// # Errors
    /// As the calls it is made of; there is no index then, or the one that was there.
    pub fn write_index(&self, layer: LayerId, edits: impl Iterator<Item = Edit>) -> Result<()> {
        let attempt = || format!("write the index of layer {layer}");
        let Some(LayerInfo { header, seal: Some(seal), .. }) = self.layer(layer) else {
            return Err(Error::damage(attempt(), "the layer is not sealed"));
        };
        // Of a layer that is in a pack there may be no directory.
        self.layers.dir.make_dir(&layer::dir_name(layer))?;
        self.publish_records(INDEX, &Header { parent: None, ..header }, &seal, edits)
            .map_err(|e| e.during(attempt()))?;
        let index = self.layers.dir_of(layer)?.size(INDEX)?;
        if let Some(info) = self.state.lock().catalog.get_mut(&layer) {
            info.index = index;
        }
        Ok(())
    }

    fn publish_records(
        &self,
        name: &str,
        header: &Header,
        seal: &Seal,
        edits: impl Iterator<Item = Edit>,
    ) -> Result<()> {
        let dir = self.layers.dir_of(header.layer)?;
        let temp = format!("{name}.new");
        dir.remove(&temp)?;
        let file = Arc::new(dir.file(&temp, true)?);
        let mut log = Log::append_to(Arc::clone(&file), dir.show(&temp), 0, 0)?;
        for record in compact_records(header, seal, edits) {
            log.append(&record)?;
        }
        if self.durable {
            log.sync()?;
        }
        disk::rename(&dir, &temp, name).attempt(|| format!("publish {}", dir.show(name)))?;
        if self.durable { dir.sync() } else { Ok(()) }
    }

    /// The whole tree of a layer, if it was written down; none also if that cannot be read, and then the log says so.
    pub fn read_index(&self, layer: LayerId) -> Option<LayerContents> {
        self.layer(layer).and_then(|info| info.index)?;
        match layer::read_file(&self.layers, layer, INDEX, &self.trust) {
            Ok(contents) if contents.info.seal.is_some() => Some(contents),
            Ok(_) => {
                log::warn!(
                    "the index of layer {layer} is not whole; its tree is rebuilt from the layers below"
                );
                None
            }
            Err(error) => {
                log::warn!("{error}; the tree is rebuilt from the layers below");
                None
            }
        }
    }

    /// Takes the index of a layer away.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn remove_index(&self, layer: LayerId) -> Result<()> {
        let Some(info) = self.layer(layer).filter(|info| info.index.is_some()) else {
            return Ok(());
        };
        self.layers.dir_of(layer)?.remove(INDEX)?;
        if let Some(info) = self.state.lock().catalog.get_mut(&layer) {
            info.index = None;
        }
        // Nothing else was in its directory.
        if info.hole.is_some() { self.layers.clear(layer, true) } else { Ok(()) }
    }

    /// Removes a layer with its pool, to which nothing refers.
    ///
    /// # Errors
    /// As the calls it is made of; what is left is removed the next time.
    pub fn remove_layer(&self, layer: LayerId) -> Result<()> {
        self.remove_layers(&[layer])
    }

    /// Removes layers with their pools, to which nothing refers.
    ///
    /// # Errors
    /// As [`Store::remove_layer`].
    pub fn remove_layers(&self, layers: &[LayerId]) -> Result<()> {
        self.note_gone(layers)?;
        self.remove_from_packs(layers)?;
        layers.iter().try_for_each(|layer| self.remove_directory(*layer))
    }

    pub(in crate::store) fn remove_directory(&self, layer: LayerId) -> Result<()> {
        let name = layer::dir_name(layer);
        let is_there = self.layers.dir.size(&name)?.is_some();
        if is_there {
            let dir = self.layers.dir_of(layer)?;
            // The journal first: a directory without one is that of no layer, and is removed the next time.
            for file in
                [JOURNAL, POOL, INDEX, SUMS, MAP, "journal.new", "index.new", "sums.new", "map.new"]
            {
                dir.remove(file)?;
            }
        }
        {
            let mut state = self.state.lock();
            state.catalog.remove(&layer);
            state.contents.remove(&layer);
        }
        let what = || format!("remove {}", self.layers.dir.show(&name));
        if is_there { disk::remove_dir(&self.layers.dir, &name).attempt(what) } else { Ok(()) }
    }

    /// Removes a layer that came to nothing, before anything referred to it: no start finds it any more, not even after a power cut.
    ///
    /// # Errors
    /// As the calls it is made of; a start may then find it.
    pub fn withdraw_layer(&self, layer: LayerId) -> Result<()> {
        let dir = self.layers.dir_of(layer)?;
        // The journal first: without it the rest is what is left of a layer whose making was cut off.
        dir.remove(JOURNAL)?;
        if self.durable {
            dir.sync()?;
        }
        if let Err(error) = self.remove_layer(layer) {
            self.state.lock().catalog.remove(&layer);
            log::warn!("{error}; gc removes it");
        }
        Ok(())
    }

    /// Removes the directories of layers whose making was cut off before they had a header, or whose removal was. The number of the newest layer stays
    /// used by that one, so no number is given out twice.
    ///
    /// # Errors
    /// As the calls it is made of; what is left is removed the next time.
    pub fn remove_newborn(&self) -> Result<()> {
        let known: std::collections::BTreeSet<LayerId> =
            self.state.lock().catalog.keys().copied().collect();
        let newest = known.last().copied().unwrap_or(LayerId(0));
        for layer in self
            .layers
            .directories()?
            .into_iter()
            .filter(|layer| *layer < newest && !known.contains(layer))
        {
            self.remove_layer(layer)?;
        }
        Ok(())
    }

    /// Gives back ranges of the pool of a layer, to which nothing refers and nothing will.
    ///
    /// # Errors
    /// As fallocate(2); a filesystem that cannot is no error, and gives nothing back.
    pub fn punch_pool(&self, layer: LayerId, ranges: &[ByteRange]) -> Result<()> {
        let Some(pool) = self.pool(layer)? else { return Ok(()) };
        let is_sealed = self.layer(layer).is_some_and(|info| info.seal.is_some());
        for range in ranges {
            // Of the last block of a file the host makes zeros, and keeps it, unless all of it is to go.
            let end = if is_sealed { block_ceil(range.end) } else { range.end };
            match disk::punch(&pool, ByteRange { end, ..*range }) {
                Err(error)
                    if error.raw_os_error() == Some(nix::errno::Errno::EOPNOTSUPP as i32) =>
                {
                    return Ok(());
                }
                other => {
                    other.attempt(|| format!("give back space of the pool of layer {layer}"))?
                }
            }
        }
        Ok(())
    }

    /// The ranges of the pool of a layer that take space on disk, in whole blocks of the host.
    ///
    /// # Errors
    /// As lseek(2).
    pub fn pool_data(&self, layer: LayerId) -> Result<Vec<ByteRange>> {
        let Some(pool) = self.pool(layer)? else { return Ok(Vec::new()) };
        crate::sys::file::data_in(&*pool, ByteRange { start: 0, end: u64::MAX })
            .attempt(|| format!("read the pool of layer {layer}"))
    }
}

/// The records of a journal, or an index, that says only what came of it.
pub(in crate::store) fn compact_records(
    header: &Header,
    seal: &Seal,
    edits: impl Iterator<Item = Edit>,
) -> impl Iterator<Item = Record> {
    let begin = [Record::Header(header.clone()), Record::Compact];
    begin.into_iter().chain(edits_in_records(edits)).chain([Record::Seal(seal.clone())])
}

/// Edits as records, many in each.
pub(in crate::store) fn edits_in_records(
    mut edits: impl Iterator<Item = Edit>,
) -> impl Iterator<Item = Record> {
    std::iter::from_fn(move || {
        let some: Vec<Edit> = edits.by_ref().take(EDITS).collect();
        if some.is_empty() { None } else { Some(Record::Edits(some)) }
    })
}

/// How long a journal would be that consists of these edits: bytes, and their number.
///
/// # Errors
/// As [`log::frame`].
pub fn compact_len(edits: impl Iterator<Item = Edit>) -> Result<(u64, u64)> {
    let (mut bytes, mut count) = (0, 0);
    for record in edits_in_records(edits) {
        bytes += frame(&record, 0)?.len() as u64;
        count += match &record {
            Record::Edits(edits) => edits.len() as u64,
            _ => 0,
        };
    }
    Ok((bytes, count))
}
