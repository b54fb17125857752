//! The consistency check of a store, and the repair of what can be rebuilt.
//!
//! A check changes nothing, and the store need not be open. [`Problem`] is the list of invariants:
//! each variant is one of them, and how it was broken. [`Warning`] is the same for the edit
//! history. A fault there does not make the store unsound.

mod edits;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use crate::error::{Error, Result};
use crate::store::content::live_ranges::LiveRanges;
use crate::store::content::remap::{PoolRange, Remap, Run};
use crate::store::fsck_read::{Inspect, Verified};
use crate::store::io::log;
use crate::store::layer::{INDEX, LayerContents, POOL, SUMS};
use crate::store::record::{LayerKind, PreImage, Record};
use crate::timeline::Common;
use crate::timeline::tree_cache::replay;
use crate::tree::{Extent, Source, Tree};
use crate::types::{ByteRange, Ino, LayerId};

/// A broken invariant of a store. The comment of each variant states the invariant.
#[derive(Debug)]
pub enum Problem {
    /// Every frame of every file is whole, has the right checksum and number, and holds a record of
    /// this format.
    Record(Error),
    /// The parent of a layer is older than it, exists and was not collected.
    Parent(LayerId, LayerId),
    /// A parent of another layer, or a checkpoint, is sealed.
    Unsealed(LayerId),
    /// Every edit fits the tree to which it is applied.
    Edit(Error),
    /// A tree keeps the rules of [`Tree::verify`].
    Tree(LayerId, String),
    /// Every extent lies within a pool that exists.
    Extent(LayerId, Ino, Source, u64),
    /// A remap leads to bytes that exist and that are not remapped themselves.
    Map(LayerId, Run),
    /// An index equals the tree that the journals below it give.
    Index(LayerId),
    /// Content is as it was when its layer was sealed.
    Content(String, u64),
    /// The layer that a head's record names exists.
    Head(String, LayerId),
    /// The layer of an operation is sealed, or gc removed it.
    Operation(u64, LayerId),
    /// A held layer exists.
    Hold(LayerId),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Record(error) | Problem::Edit(error) => write!(f, "{error}"),
            Problem::Parent(layer, parent) => {
                write!(f, "the parent of layer {layer} is layer {parent}, which does not exist")
            }
            Problem::Unsealed(layer) => write!(f, "layer {layer} has lost its seal"),
            Problem::Tree(layer, why) => write!(f, "the tree of layer {layer}: {why}"),
            Problem::Extent(layer, ino, source, len) => {
                write!(
                    f,
                    "file {} in layer {layer} refers to {len} bytes at {source:?}, which do not \
                     exist",
                    ino.0
                )
            }
            Problem::Map(layer, run) => write!(
                f,
                "the remap of layer {layer} leads from {} to {} bytes at {} of the pool of layer \
                 {}, which do not exist",
                run.start,
                run.end - run.start,
                run.offset,
                run.layer
            ),
            Problem::Index(layer) => {
                write!(f, "the index of layer {layer} differs from its journals")
            }
            Problem::Content(file, offset) => {
                write!(f, "{file} at offset {offset}: content fails its checksum")
            }
            Problem::Head(name, layer) => {
                write!(f, "head '{name}' is on layer {layer}, which does not exist")
            }
            Problem::Operation(op, layer) => {
                write!(f, "operation {op} leads to layer {layer}, which has lost its seal")
            }
            Problem::Hold(layer) => write!(f, "layer {layer} is held and does not exist"),
        }
    }
}

pub use edits::Warning;

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// The invariants that are broken.
    pub problems: Vec<Problem>,
    /// The faults in the edit history.
    pub warnings: Vec<Warning>,
    /// The number of entries in the edit history.
    pub edits: u64,
    /// The number of layers.
    pub layers: u64,
    /// The number of records in journals.
    pub records: u64,
    /// The number of extents.
    pub extents: u64,
    /// Bytes of content that were read and verified.
    pub bytes_read: u64,
    /// Bytes of content that have no checksums yet.
    pub bytes_without_sum: u64,
}

/// Checks the store at `path`; with `read_data` also reads all content that something refers to and
/// verifies its checksums.
///
/// # Errors
/// There is no store, or it has another format.
pub fn check(path: &Path, read_data: bool) -> Result<Report> {
    check_opened(Inspect::open(path)?, read_data)
}

fn check_opened(mut store: Inspect, read_data: bool) -> Result<Report> {
    let damaged = store.damage_of_archive().into_iter().map(Problem::Record).collect();
    let mut checker = Checker {
        store,
        report: Report { problems: damaged, ..Report::default() },
        layers: BTreeMap::new(),
        unread: BTreeSet::new(),
        redo_ends: BTreeMap::new(),
        refs: BTreeMap::new(),
        maps: BTreeMap::new(),
    };
    if let Err(error) = checker.store.check_volatile() {
        checker.report.problems.push(Problem::Record(error));
    }
    checker.read_layers()?;
    checker.check_maps();
    checker.check_trees();
    checker.check_names();
    if read_data {
        checker.check_content();
    }
    checker.check_versions(read_data);
    Ok(checker.report)
}

impl Common {
    /// Checks the open store, while no operation and no compaction runs.
    ///
    /// # Errors
    /// As [`check`].
    pub fn check(&self, read_data: bool) -> Result<Report> {
        let _operation = self.lock_operation();
        let _compacting = self.compacting.lock();
        // Programs write during the check.
        let ends = self.open_heads().iter().map(|head| head.fs().journal_end()).collect();
        check_opened(Inspect::open(self.store.dir().path())?.up_to(ends), read_data)
    }
}

/// The result of a repair.
#[derive(Debug, Default)]
pub struct Repaired {
    /// The files that were removed, because they can be rebuilt.
    pub done: Vec<String>,
    /// The files that stay: unreadable but perhaps whole, or not removable.
    pub left: Vec<String>,
}

/// Removes damaged files that can be rebuilt: indexes and checksums. A file that cannot be examined
/// or removed stays, and the rest is repaired nevertheless.
///
/// # Errors
/// The store is in use, or its layers cannot be listed.
pub fn repair(path: &Path) -> Result<Repaired> {
    let inspect = Inspect::open(path)?;
    let _lock = inspect.lock()?;
    let mut repaired = Repaired::default();
    for layer in inspect.layers()? {
        let index =
            inspect.index(layer).map(|found| found.is_none_or(|index| index.info.seal.is_some()));
        let what = format!("the index of layer {layer}");
        repaired.take(&inspect, (layer, INDEX), &what, index, "it is optional");
        let what = format!("the checksums of layer {layer}");
        let sums = inspect.sums(layer).map(|_| true);
        repaired.take(&inspect, (layer, SUMS), &what, sums, "the next mount writes them again");
    }
    Ok(repaired)
}

impl Repaired {
    /// Removes a file of a layer if it is damaged.
    fn take(
        &mut self,
        store: &Inspect,
        (layer, name): (LayerId, &str),
        what: &str,
        is_whole: Result<bool>,
        then: &str,
    ) {
        match is_whole {
            Ok(true) => return,
            Err(error) if !log::is_damage(&error) => {
                return self.left.push(format!("{what} stays as it is: {error}"));
            }
            Ok(false) | Err(_) => {}
        }
        match store.remove(layer, name) {
            Ok(()) => self.done.push(format!("removed {what}, which could not be read; {then}")),
            Err(error) => self.left.push(format!("{what} could not be removed: {error}")),
        }
    }
}

struct Checker {
    store: Inspect,
    report: Report,
    layers: BTreeMap<LayerId, LayerContents>,
    /// Layers that cannot be read.
    unread: BTreeSet<LayerId>,
    /// Where the bytes end that a pool may lack and its journal has.
    redo_ends: BTreeMap<LayerId, u64>,
    /// The ranges of each pool, by place on disk, that something refers to.
    refs: BTreeMap<LayerId, Vec<ByteRange>>,
    maps: BTreeMap<LayerId, Remap>,
}

impl Checker {
    fn problem(&mut self, problem: Problem) {
        self.report.problems.push(problem);
    }

    fn read_layers(&mut self) -> Result<()> {
        for layer in self.store.layers()? {
            self.report.layers += 1;
            let read = self.store.layer(layer);
            match read.and_then(|contents| Ok((contents.redo_end()?, contents))) {
                Ok((redo_end, contents)) => {
                    self.report.records += contents.count() as u64 + 1;
                    self.redo_ends.insert(layer, redo_end);
                    self.layers.insert(layer, contents);
                }
                // Its creation was interrupted; nothing refers to it.
                Err(_) if self.store.is_incomplete(layer).unwrap_or(false) => {}
                Err(error) => {
                    self.unread.insert(layer);
                    self.problem(Problem::Record(error));
                }
            }
        }
        Ok(())
    }

    fn check_maps(&mut self) {
        for layer in self.layers.keys().copied().collect::<Vec<_>>() {
            match self.store.remap(layer) {
                Ok(None) => {}
                Ok(Some(map)) => drop(self.maps.insert(layer, map)),
                Err(error) => self.problem(Problem::Record(error)),
            }
        }
        let end_of = |layer: &LayerId| Some((*layer, self.pool_end(*layer)?));
        let ends: BTreeMap<LayerId, u64> = self.layers.keys().filter_map(end_of).collect();
        let mut wrong = Vec::new();
        for (layer, map) in &self.maps {
            for run in map.runs() {
                let home = run.target();
                let is_there = ends.get(&run.layer).is_some_and(|end| home.end <= *end);
                let is_home = self.maps.get(&run.layer).is_none_or(|map| {
                    let places = map.locate(run.layer, home);
                    let [place] = places.as_slice() else { return false };
                    place.layer == run.layer && place.offset == home.start
                });
                if !is_there || !is_home {
                    wrong.push(Problem::Map(*layer, *run));
                }
            }
        }
        self.report.problems.append(&mut wrong);
    }

    /// Rebuilds every tree from the one below it and verifies it.
    fn check_trees(&mut self) {
        let mut trees: BTreeMap<LayerId, Tree> = BTreeMap::new();
        let has_child: BTreeSet<LayerId> =
            self.layers.values().filter_map(|l| l.info.header.parent).collect();
        let tops: BTreeSet<LayerId> = self
            .store
            .heads()
            .into_iter()
            .flatten()
            .filter_map(|(_, head)| head.ok().flatten())
            .map(|h| h.layer)
            .collect();
        for layer in self.layers.keys().copied().collect::<Vec<_>>() {
            let Some(contents) = self.layers.get(&layer) else { continue };
            let header = contents.info.header.clone();
            if header.kind == LayerKind::PreImage {
                self.check_images(layer);
                continue;
            }
            if header.kind == LayerKind::Collected {
                continue;
            }
            let below = match header.parent.map(|parent| (parent, trees.get(&parent))) {
                None => Tree::new(),
                Some((_, Some(tree))) => tree.clone(),
                Some((parent, None)) => {
                    self.problem(Problem::Parent(layer, parent));
                    continue;
                }
            };
            let mut tree = below.clone();
            if let Err(error) = replay(&mut tree, contents, layer) {
                self.problem(Problem::Edit(error));
                continue;
            }
            // The upper layer is sealed after the next layer was created. A crash in between leaves
            // two unsealed layers.
            let is_open = contents.info.seal.is_none();
            if is_open && has_child.contains(&layer) && !tops.contains(&layer) {
                self.problem(Problem::Unsealed(layer));
            }
            if let Err(why) = tree.verify() {
                self.problem(Problem::Tree(layer, why));
            }
            let changed: Vec<(Ino, Extent)> = below
                .diff(&tree)
                .contents
                .into_iter()
                .flat_map(|ino| {
                    tree.extents(ino).map(move |(_, extent)| (ino, extent)).collect::<Vec<_>>()
                })
                .collect();
            for (ino, extent) in changed {
                self.check_extent(layer, ino, extent.source, extent.len);
            }
            self.check_index(layer, &tree);
            trees.insert(layer, tree);
        }
    }

    fn check_extent(&mut self, layer: LayerId, ino: Ino, source: Source, len: u64) {
        self.report.extents += 1;
        let Source::Pool { layer: pool, offset } = source else { return };
        let range = ByteRange::at(offset, len);
        match self.pool_end(pool) {
            Some(end) if range.end <= end => {
                for place in self.places_of(pool, range) {
                    let range = ByteRange::at(place.offset, place.len);
                    self.refs.entry(place.layer).or_default().push(range);
                }
            }
            _ => self.problem(Problem::Extent(layer, ino, source, len)),
        }
    }

    /// The end of the addresses of a layer; `None` if it has no pool. After a power cut the next
    /// start makes the pool as long as the journal says.
    fn pool_end(&self, layer: LayerId) -> Option<u64> {
        let (_, end) = self.store.pool(layer).ok()?;
        Some(end.max(self.redo_ends.get(&layer).copied().unwrap_or(0)))
    }

    /// The places on disk of a range of addresses.
    fn places_of(&self, layer: LayerId, range: ByteRange) -> Vec<PoolRange> {
        match self.maps.get(&layer) {
            None => vec![PoolRange { layer, offset: range.start, len: range.len() }],
            Some(map) => map.locate(layer, range),
        }
    }

    fn check_images(&mut self, layer: LayerId) {
        let Some(contents) = self.layers.get(&layer) else { return };
        let mut extents: Vec<(Ino, ByteRange, Source)> = Vec::new();
        let mut unread = None;
        for record in contents.records() {
            match record {
                Ok(Record::PreImage(PreImage { node: Some(node), .. })) => {
                    extents.extend(
                        node.extents.iter().map(|(range, source)| (node.ino, *range, *source)),
                    );
                }
                Ok(_) => {}
                Err(error) => unread = Some(error),
            }
        }
        if let Some(error) = unread {
            self.problem(Problem::Record(error));
        }
        for (ino, range, source) in extents {
            self.check_extent(layer, ino, source, range.len());
        }
    }

    fn check_index(&mut self, layer: LayerId, tree: &Tree) {
        match self.store.index(layer) {
            Ok(None) => {}
            Ok(Some(contents)) => {
                let mut found = Tree::new();
                let is_whole =
                    contents.info.seal.is_some() && replay(&mut found, &contents, layer).is_ok();
                if !is_whole || !tree.diff(&found).is_empty() {
                    self.problem(Problem::Index(layer));
                }
            }
            Err(error) => self.problem(Problem::Record(error)),
        }
    }

    /// Checks everything that names layers: heads, operations, holds, the ledger and identities.
    fn check_names(&mut self) {
        match self.store.heads() {
            Ok(heads) => {
                for (name, head) in heads {
                    match head {
                        Ok(Some(head)) if self.layers.contains_key(&head.layer) => {}
                        Ok(Some(head)) => self.problem(Problem::Head(name, head.layer)),
                        Ok(None) => {}
                        Err(error) => self.problem(Problem::Record(error)),
                    }
                }
            }
            Err(error) => self.problem(Problem::Record(error)),
        }
        match self.store.ops() {
            Ok(ops) => {
                for (number, layer) in
                    ops.iter().filter_map(|(number, op)| Some((*number, op.tree?)))
                {
                    if self.layers.get(&layer).is_some_and(|l| l.info.seal.is_none()) {
                        self.problem(Problem::Operation(number, layer));
                    }
                }
            }
            Err(error) => self.problem(Problem::Record(error)),
        }
        self.check_ledger();
        if let Err(error) = self.store.identities() {
            self.problem(Problem::Record(error));
        }
        match self.store.holds() {
            Ok(holds) => {
                for layer in holds
                    .into_iter()
                    .filter(|layer| !self.layers.contains_key(layer))
                    .collect::<Vec<_>>()
                {
                    self.problem(Problem::Hold(layer));
                }
            }
            Err(error) => self.problem(Problem::Record(error)),
        }
    }

    /// Reports what the ledger knows and the store lacks. Unreadable layers were reported before.
    fn check_ledger(&mut self) {
        match self.store.missing(self.layers.values().map(|layer| &layer.info), &self.unread) {
            Ok(missing) => self.report.problems.extend(missing.into_iter().map(Problem::Record)),
            Err(error) => self.problem(Problem::Record(error)),
        }
    }

    /// Reads and verifies every block that something refers to.
    fn check_content(&mut self) {
        for (layer, ranges) in std::mem::take(&mut self.refs) {
            let bytes: u64 = ranges.iter().map(ByteRange::len).sum();
            // Read each block and each chunk once.
            let mut needed = LiveRanges::default();
            ranges.into_iter().for_each(|range| needed.add_range(layer, range));
            match self.store.verify(layer, &needed.of(layer)) {
                Ok(None) => self.report.bytes_without_sum += bytes,
                Ok(Some(Verified { damaged, without_sum })) => {
                    self.report.bytes_read += bytes.saturating_sub(without_sum);
                    self.report.bytes_without_sum += without_sum;
                    let file = self.store.show(layer, POOL);
                    for range in damaged {
                        self.problem(Problem::Content(file.clone(), range.start));
                    }
                }
                Err(error) => self.problem(Problem::Record(error)),
            }
        }
    }
}
