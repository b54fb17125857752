//! Changes the records of a sealed layer: rewrites its journal, and writes or removes its index.
//!
//! Always true: each file is published whole by rename, so a reader finds the old one or the new
//! one. The index is only a faster way to the tree: one that is not whole is ignored, and `check`
//! reports it.
//!
//! The journal of a layer in the archive is rewritten there
//! ([`placement::archiving`](crate::store::placement::archiving)).

use std::sync::Arc;

use crate::error::{Attempt, Error, Result};
use crate::store::Store;
use crate::store::io::disk;
use crate::store::io::log::Log;
use crate::store::layer;
use crate::store::layer::compact::compact_records;
use crate::store::layer::journal;
use crate::store::layer::{INDEX, JOURNAL, LayerContents, LayerInfo};
use crate::store::ledger::{LedgerRecord, Lowered};
use crate::store::record::{Header, Seal};
use crate::tree::Edit;
use crate::types::LayerId;

impl Store {
    /// Rewrites the journal of a sealed layer as `edits`. The header may name another parent, and
    /// the seal may differ.
    ///
    /// # Errors
    /// As open(2), pwrite(2), fdatasync(2) and rename(2), and damage of the archive. The
    /// journal is then
    /// unchanged.
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
        let (info, _) = journal::read_info(&self.layers, layer, &self.trust)?;
        let before = self.state.lock().catalog.insert(layer, info);
        let said = before.and_then(|info| Some(Lowered::of(&info.header, info.seal.as_ref()?)));
        let says = Lowered::of(header, seal);
        if said != Some(says) {
            self.note_in_ledger(&LedgerRecord::Lowered(layer, says));
        }
        self.note_free();
        Ok(())
    }

    /// Writes the index of a sealed layer: the edits that lead from the empty tree to its tree.
    ///
    /// # Errors
    /// As mkdir(2), open(2), pwrite(2), fdatasync(2) and rename(2). The old index then stays, if
    /// there was one.
    pub fn write_index(&self, layer: LayerId, edits: impl Iterator<Item = Edit>) -> Result<()> {
        let attempt = || format!("write the index of layer {layer}");
        let Some(LayerInfo { header, seal: Some(seal), .. }) = self.layer(layer) else {
            return Err(Error::damage(attempt(), "the layer is not sealed"));
        };
        // A layer in the archive may have no directory.
        self.layers.dir.make_dir(&layer::dir_name(layer))?;
        let header = Header { parent: None, ..Header::clone(&header) };
        self.publish_records(INDEX, &header, &seal, edits).map_err(|e| e.during(attempt()))?;
        let index = self.layers.dir_of(layer)?.size(INDEX)?;
        self.state.lock().catalog.update(layer, |info| info.index = index);
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
        let mut log = Log::append_to(file, dir.show(&temp), 0, 0)?;
        for record in compact_records(header, seal, edits) {
            log.append(&record)?;
        }
        if self.durable {
            log.sync()?;
        }
        disk::rename(&dir, &temp, name).attempt(|| format!("publish {}", dir.show(name)))?;
        if self.durable { dir.sync() } else { Ok(()) }
    }

    /// The length of the journal of a layer that is not in the archive; `None` if there is none.
    ///
    /// # Errors
    /// As fstatat(2).
    pub fn journal_len(&self, layer: LayerId) -> Result<Option<u64>> {
        if self.layers.dir.size(&layer::dir_name(layer))?.is_none() {
            return Ok(None);
        }
        self.layers.dir_of(layer)?.size(JOURNAL)
    }

    /// Reads the index of a layer. `None` if there is none, or it cannot be used; the log then says
    /// why.
    pub fn read_index(&self, layer: LayerId) -> Option<LayerContents> {
        self.layer(layer).and_then(|info| info.index)?;
        match journal::read_index(&self.layers, layer, &self.trust) {
            Ok(contents) if contents.info.seal.is_some() => Some(contents),
            Ok(_) => {
                log::warn!(
                    "the index of layer {layer} is not whole; \
                     its tree is rebuilt from the layers below"
                );
                None
            }
            Err(error) => {
                log::warn!("{error}; the tree is rebuilt from the layers below");
                None
            }
        }
    }

    /// Removes the index of a layer, if it has one.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn remove_index(&self, layer: LayerId) -> Result<()> {
        let Some(info) = self.layer(layer).filter(|info| info.index.is_some()) else {
            return Ok(());
        };
        self.layers.dir_of(layer)?.remove(INDEX)?;
        self.state.lock().catalog.update(layer, |info| info.index = None);
        self.note_free();
        // A layer in the archive has nothing else in its directory.
        if info.archived.is_some() { self.layers.clear(layer) } else { Ok(()) }
    }
}
