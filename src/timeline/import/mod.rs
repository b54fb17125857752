//! Makes a state of archives, and shows it in a head.
//!
//! * Names are resolved in the tree alone, and no link is followed. So an archive reaches nothing
//!   outside of the store.
//! * The archives are received into a layer that nothing refers to yet. A failure, also one that
//!   the sender reports at the end, removes that layer, and nothing has changed.
//! * The new state is written as its difference to the present one. A node that an archive has as
//!   it is stays by reference: an import of an equal tree stores nothing.
//! * A sealed import is a state like any other. It is shown by the code of a restore, and undone
//!   by `op restore`.
//! * Memory is bounded by [`Limits`]. Content passes in pieces.

mod builder;
mod content;
mod edits;
mod entry;
mod place;
mod purge;
mod state;
mod states;

use std::io::Read;

use builder::Builder;

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{PathEdits, State};
use crate::store::layer::Upper;
use crate::store::record::{LayerKind, OpVerb, Record};
use crate::sys::memory;
use crate::tar;
use crate::timeline::checkpoint::seal_unused;
use crate::timeline::mounts::Mounts;
use crate::timeline::restore::{ChangeSink, RestoreOutcome};
use crate::timeline::{Target, Timeline, verb_text};
use crate::tree::Edit;
use crate::types::LayerId;

/// Bounds of an import.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes of names and attributes of all entries; each entry counts 256 more.
    pub metadata: u64,
    /// The most bytes of content that are stored.
    pub content: u64,
    /// Whether device nodes are made.
    pub devices: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { metadata: 1 << 30, content: u64::MAX, devices: true }
    }
}

/// The archives of an import.
pub trait Archives {
    /// Begins the next archive; false after the last one. The archives lie on each other, lowest
    /// first.
    ///
    /// # Errors
    /// Those of the sender.
    fn next(&mut self) -> Result<bool>;

    /// The bytes of the archive.
    fn bytes(&mut self) -> &mut dyn Read;

    /// Reads what follows the end mark of the archive.
    ///
    /// # Errors
    /// Those of the sender.
    fn finish(&mut self) -> Result<()>;
}

/// The form of the bytes of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Tar archives.
    Tar,
    /// Descriptions of states, with the bytes of their chunks in them.
    State,
}

impl Form {
    /// The operation that such an import is.
    pub fn verb(self) -> OpVerb {
        match self {
            Form::Tar => OpVerb::Import,
            Form::State => OpVerb::Pull,
        }
    }
}

/// The state that an import begins with.
#[derive(Clone, Copy, Debug)]
pub struct Onto {
    /// The state that the archives are compared with, and lie on if they have only changes.
    pub state: Target,
    /// Whether the archives have only changes to that state.
    pub only_changes: bool,
    /// Whether names of whiteouts have a meaning.
    pub has_whiteouts: bool,
}

/// A state that was received and sealed.
#[derive(Clone, Debug)]
pub struct Received {
    /// The state.
    pub target: Target,
    /// The layers that were made, oldest first.
    layers: Vec<LayerId>,
    /// The number of checkpoints that came along.
    pub checkpoints: u64,
    /// The edit histories that came along.
    pub edits: Option<Vec<PathEdits>>,
    /// The names of those that have none here, because another checkpoint has the name.
    pub unnamed: Vec<String>,
    /// The number of entries.
    pub entries: u64,
    /// Attributes of other systems, which were left out.
    pub left_out: u64,
}

impl Timeline {
    /// Seals the present state, for an import to lie on it.
    ///
    /// # Errors
    /// A failure of the store.
    pub fn seal_for_import(&self, form: Form, name: &str) -> Result<Target> {
        let _operation = self.lock_operation();
        self.flush()?;
        Ok(self.seal_present(&format!("{} {name}", verb_text(form.verb())))?.0)
    }

    /// Receives archives into a sealed state that no head shows yet.
    ///
    /// # Errors
    /// An archive is malformed or exceeds the limits; those of the sender, the store and the base.
    /// Then there is no such state.
    pub fn receive(
        &self,
        archives: &mut dyn Archives,
        onto: Onto,
        limits: Limits,
        name: &str,
    ) -> Result<Received> {
        let state = self.state_of(onto.state)?;
        let Target { layer: below, epoch } = onto.state;
        let mut layer =
            self.store().create_layer(below, self.head(), epoch, LayerKind::Branches)?;
        let id = layer.layer();
        match self.receive_into(&mut layer, state, archives, (onto, limits), name) {
            Ok((entries, left_out)) => {
                let target = Target { layer: Some(id), epoch };
                let (layers, unnamed) = (vec![id], Vec::new());
                let (checkpoints, edits) = (0, None);
                Ok(Received { target, layers, checkpoints, edits, unnamed, entries, left_out })
            }
            Err(error) => Err(self.withdraw_received(layer, error)),
        }
    }

    /// Removes a layer that was not sealed, after an error.
    fn withdraw_received(&self, layer: Upper, error: Error) -> Error {
        let id = layer.layer();
        drop(layer);
        if let Err(why) = self.store().withdraw_layer(id) {
            log::warn!("{why}; gc removes it");
        }
        error
    }

    fn receive_into(
        &self,
        layer: &mut Upper,
        before: State,
        archives: &mut dyn Archives,
        (onto, limits): (Onto, Limits),
        name: &str,
    ) -> Result<(u64, u64)> {
        let mut builder = Builder::new(before.clone(), self.store(), layer, limits);
        builder.takes_unseen_links = onto.only_changes;
        builder.has_whiteouts = onto.has_whiteouts;
        while archives.next()? {
            builder.begin_archive();
            let mut reader = tar::Reader::new(archives.bytes());
            while let Some(entry) = reader.next_entry()? {
                entry::add(&mut builder, &entry, &mut reader)?;
            }
            archives.finish()?;
        }
        if !onto.only_changes {
            purge::unseen(&mut builder).attempt(|| "remove what the archive does not have")?;
        }
        let (entries, left_out) = (builder.entries, builder.left_out);
        let after = builder.finish();
        write_edits(layer, before.tree.edits_to(&after.tree))?;
        let layer_id = layer.layer();
        self.with_reserve(|| seal_unused(self.store(), layer, &format!("import {name}")))?;
        self.trees.lock().keep(layer_id, after.tree);
        memory::trim();
        Ok((entries, left_out))
    }

    /// Shows a received state in this head.
    ///
    /// # Errors
    /// As [`Timeline::restore`].
    pub fn show_received(
        &self,
        received: &Received,
        (form, name): (Form, &str),
        (mounts, changes): (Mounts, ChangeSink<'_>),
    ) -> Result<RestoreOutcome> {
        self.restore(form.verb(), received.target, name.to_owned(), (mounts, changes))
    }

    /// Removes a received state that no head shows.
    pub fn drop_received(&self, received: &Received) {
        self.drop_layers(&received.layers);
    }

    /// Removes sealed layers that no head shows, each after those above it.
    fn drop_layers(&self, layers: &[LayerId]) {
        for layer in layers.iter().rev() {
            if let Err(why) = self.store().remove_unused(*layer) {
                log::warn!("{why}; gc removes it");
            }
        }
    }
}

/// How many edits one record has at most.
const BATCH: usize = 4096;
/// How many bytes of attributes and links one record has at most, about.
const BATCH_BYTES: usize = 4 << 20;

/// Appends edits to a layer in records of bounded size. Nothing refers to the layer yet, so they
/// need not be one record.
fn write_edits(layer: &mut Upper, edits: impl Iterator<Item = Edit>) -> Result<()> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    for edit in edits {
        bytes += weight(&edit);
        batch.push(edit);
        if batch.len() >= BATCH || bytes >= BATCH_BYTES {
            layer.record(&Record::Edits(std::mem::take(&mut batch)))?;
            bytes = 0;
        }
    }
    if !batch.is_empty() {
        layer.record(&Record::Edits(batch))?;
    }
    Ok(())
}

fn weight(edit: &Edit) -> usize {
    match edit {
        Edit::Put { node, .. } => {
            let sizes = node.xattrs.iter().flat_map(|xattrs| xattrs.iter());
            256 + sizes.map(|(name, value)| name.len() + value.len()).sum::<usize>()
        }
        Edit::Xattr { value, .. } => 256 + value.as_ref().map_or(0, Vec::len),
        Edit::Dentry { .. }
        | Edit::Meta { .. }
        | Edit::Resize { .. }
        | Edit::Map { .. }
        | Edit::Remove { .. } => 256,
    }
}

/// The error of an entry.
fn bad(path: &[u8], why: impl Into<String>) -> Error {
    let path = crate::types::quoted(path);
    Error::new(Kind::Failed, format!("import entry '{path}'"), why)
}
