//! The pre-images: the base nodes that each apply found before it changed them.
//!
//! An apply changes the base, but states from before it must not change. So every apply records,
//! for each base path that it touches, the node that was there (the pre-image).
//!
//! Always true:
//! * Entry `e` of a [`PreHistory`] belongs to the apply that ended epoch `e` and began epoch
//!   `e + 1`.
//! * Pre-images that garbage collection removed keep their entry, marked as collected.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::error::Result;
use crate::fs::merged::fingerprint;
use crate::store::Store;
use crate::store::record::{LayerKind, PreNode, Record};
use crate::tree::Source;
use crate::types::{ByteRange, Epoch, FileKind, Fingerprint, Ino, Name, Timestamp, TreePath};

/// All applies of a store, oldest first.
pub type PreHistory = Vec<Arc<PreImages>>;

/// The index in a [`PreHistory`] of the apply that began an epoch.
pub fn index_in_history(began: Epoch) -> usize {
    usize::try_from(began.0).unwrap_or(usize::MAX).saturating_sub(1)
}

/// The nodes that one apply found in the base, and the fingerprints that it left there.
#[derive(Default)]
pub struct PreImages {
    pub(super) nodes: HashMap<TreePath, Option<Arc<PreNode>>>,
    pub(super) names: HashMap<TreePath, BTreeSet<Name>>,
    pub(super) left: HashMap<TreePath, Option<Fingerprint>>,
    /// Files with several links, by their inode number on the host: a lookup may meet such a file
    /// under a name that the apply did not touch.
    pub(super) linked: HashMap<u64, Arc<PreNode>>,
    /// For each time that the base's filesystem could not hold, the time that it stored instead.
    pub(super) rounded: HashMap<Timestamp, Timestamp>,
    is_collected: bool,
}

impl PreImages {
    /// The inode numbers of the nodes that were there.
    pub fn inos(&self) -> impl Iterator<Item = Ino> {
        self.nodes.values().flatten().map(|node| node.ino)
    }

    /// Adds the node that was at a path; `None` if the path did not exist.
    pub fn insert(&mut self, path: &TreePath, node: Option<Arc<PreNode>>) {
        if let Some((dir, name)) = path.split() {
            self.names.entry(dir).or_default().insert(name);
        }
        let has_links =
            |pre: &&Arc<PreNode>| pre.node.meta.nlink > 1 && pre.node.kind() != FileKind::Dir;
        if let Some(node) = node.as_ref().filter(has_links) {
            self.linked.insert(node.host, Arc::clone(node));
        }
        self.nodes.insert(path.clone(), node);
    }

    /// The entry of an apply whose pre-images garbage collection removed.
    pub fn collected() -> PreImages {
        PreImages { is_collected: true, ..PreImages::default() }
    }

    /// Whether garbage collection removed the pre-images. Then the base as it was before this apply
    /// cannot be shown any more.
    pub fn is_collected(&self) -> bool {
        self.is_collected
    }

    /// Records the fingerprint that the apply left at a path, or a [`fingerprint::rounded`] time.
    pub fn set_left(&mut self, path: TreePath, print: Option<Fingerprint>) {
        match print.as_ref().and_then(fingerprint::as_rounded) {
            Some((wanted, kept)) => drop(self.rounded.insert(wanted, kept)),
            None => drop(self.left.insert(path, print)),
        }
    }

    /// Where the bytes that the apply replaced are stored.
    pub fn extents(&self) -> impl Iterator<Item = (ByteRange, Source)> {
        self.nodes.values().flatten().flat_map(|node| node.extents.iter().copied())
    }

    /// The paths that the apply touched.
    pub fn paths(&self) -> impl Iterator<Item = &TreePath> {
        self.nodes.keys()
    }
}

/// Reads the pre-images of a store.
///
/// # Errors
/// Damage of a layer.
pub fn read_history(store: &Store) -> Result<PreHistory> {
    let mut history = PreHistory::new();
    let collected = Arc::new(PreImages::collected());
    let layers = store.catalog();
    // A layer without a seal belongs to an apply that was interrupted: timeline/apply/unfinished.rs
    // handles it.
    for info in layers.iter().filter(|l| l.header.kind == LayerKind::PreImage && l.seal.is_some()) {
        let mut images = PreImages::default();
        for record in store.read_layer(info.header.layer)?.records() {
            match record? {
                Record::PreImage(image) => images.insert(&image.path, image.node.map(Arc::new)),
                Record::Left(left) => images.set_left(left.path, left.print),
                Record::Compact => images.is_collected = true,
                Record::Header(_)
                | Record::Opened { .. }
                | Record::Edits(_)
                | Record::Synced
                | Record::SyncedTo(_)
                | Record::Seal(_)
                | Record::Abandoned
                | Record::SyncFailed(_)
                | Record::Redo(_)
                | Record::Sealing(_) => {}
            }
        }
        history.resize(index_in_history(info.header.epoch), Arc::clone(&collected));
        history.push(Arc::new(images));
    }
    Ok(history)
}
