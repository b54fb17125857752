//! What shows through where the tree says nothing: the base as it was in one epoch.
//!
//! An apply changes the base. States from before it must not change, so every apply recorded, for each path of the base
//! that it touched, what was there before (its pre-image). A lookup for a state of epoch `e` asks the pre-images of the
//! later epochs first, earliest first, and only then the base. The number of a node is decided here, too.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::base::{Base, BaseEntry, BaseStat, DirLookup};
use crate::error::{FsError, FsResult, Result};
use crate::fs::merged::extent_reader::Piece;
use crate::store::io::lru_cache::LruCache;
use crate::store::record::{Body, LayerKind, Meta, Node, Origin, PreNode, Record, Source};
use crate::store::{ReadGuard, Store};
use crate::sys;
use crate::types::{ByteRange, Epoch, FileKind, Fingerprint, Ino, Name, Timestamp, TreePath};

/// Open files of the base that are kept for the next read.
const OPEN_FILES: usize = 128;
/// Runs of data of one file of the base that are told apart from its holes.
const MOST_RUNS: usize = 1000;
/// Problems that are kept for `status`.
const PROBLEMS: usize = 100;

/// What one apply found in the base.
#[derive(Default)]
pub struct PreImages {
    nodes: HashMap<TreePath, Option<Arc<PreNode>>>,
    names: HashMap<TreePath, BTreeSet<Name>>,
    left: HashMap<TreePath, Option<Fingerprint>>,
    /// Files with several links, by their number on the host: they may be met under a name that was not touched.
    linked: HashMap<u64, Arc<PreNode>>,
    /// Times that the filesystem of the base could not hold, and what it made of them.
    rounded: HashMap<Timestamp, Timestamp>,
    is_collected: bool,
}

impl PreImages {
    /// The numbers of the nodes that were there.
    pub fn inos(&self) -> impl Iterator<Item = Ino> {
        self.nodes.values().flatten().map(|node| node.ino)
    }

    /// Adds what was at a path; none if nothing was.
    pub fn insert(&mut self, path: &TreePath, node: Option<Arc<PreNode>>) {
        if let Some((dir, name)) = path.split() {
            self.names.entry(dir).or_default().insert(name);
        }
        if let Some(node) =
            node.as_ref().filter(|n| n.node.meta.nlink > 1 && n.node.kind() != FileKind::Dir)
        {
            self.linked.insert(node.host, Arc::clone(node));
        }
        self.nodes.insert(path.clone(), node);
    }

    /// What is left of the pre-images that gc gave back.
    pub fn collected() -> PreImages {
        PreImages { is_collected: true, ..PreImages::default() }
    }

    /// Whether gc gave them back: nobody can see the base as it was before this apply.
    pub fn is_collected(&self) -> bool {
        self.is_collected
    }

    /// Says what the apply left at a path, or what [`rounded`] says.
    pub fn set_left(&mut self, path: TreePath, print: Option<Fingerprint>) {
        match print {
            Some(Fingerprint { ino: 0, size: u64::MAX, mtime, ctime, .. }) => {
                self.rounded.insert(mtime, ctime);
            }
            print => drop(self.left.insert(path, print)),
        }
    }

    /// Where the bytes are that the apply replaced.
    pub fn extents(&self) -> impl Iterator<Item = (ByteRange, Source)> {
        self.nodes.values().flatten().flat_map(|node| node.extents.iter().copied())
    }

    /// The paths that the apply touched.
    pub fn paths(&self) -> impl Iterator<Item = &TreePath> {
        self.nodes.keys()
    }
}

/// All applies of a store: entry `e` holds what the apply that began epoch `e + 1` found. Of those whose layers gc removed, nothing
/// is left but their place.
pub type PreHistory = Vec<Arc<PreImages>>;

/// The names of a directory, with the number and, where the host tells, the kind of each.
pub type Names = BTreeMap<Name, (Ino, Option<FileKind>)>;

/// The place of an apply in the history, by the epoch that it began.
pub fn place_in_history(began: Epoch) -> usize {
    usize::try_from(began.0).unwrap_or(usize::MAX).saturating_sub(1)
}

/// Reads the pre-images of a store.
///
/// # Errors
/// Damage.
pub fn read_history(store: &Store) -> Result<PreHistory> {
    let mut history = PreHistory::new();
    let removed = Arc::new(PreImages::collected());
    let layers = store.catalog();
    // A layer without a seal belongs to an apply that did not come to its end:
    // history/unfinished.rs.
    for info in layers.iter().filter(|l| l.header.kind == LayerKind::PreImage && l.seal.is_some()) {
        let mut images = PreImages::default();
        for record in store.read_layer(info.header.layer)?.records() {
            let record = record?;
            images.is_collected |= record == Record::Compact;
            match record {
                Record::PreImage(image) => images.insert(&image.path, image.node.map(Arc::new)),
                Record::Left(left) => images.set_left(left.path, left.print),
                Record::Header(_) | Record::Opened { .. } | Record::Edits(_) => {}
                Record::Synced
                | Record::SyncedTo(_)
                | Record::Seal(_)
                | Record::Abandoned
                | Record::Compact
                | Record::SyncFailed(_)
                | Record::Cells(_) => {}
            }
        }
        history.resize(place_in_history(info.header.epoch), Arc::clone(&removed));
        history.push(Arc::new(images));
    }
    Ok(history)
}

/// A node below the tree.
#[derive(Clone, Debug)]
pub enum LowerNode {
    /// In the base.
    Base(Box<BaseStat>),
    /// In the pre-image of the apply that ended epoch `.1`.
    Pre(Arc<PreNode>, Epoch),
}

impl LowerNode {
    /// What an apply expects to find of the node. A pre-image is not in the base any more: its print fits nothing there.
    pub fn print(&self, ino: Ino) -> Arc<Fingerprint> {
        Arc::new(match self {
            LowerNode::Base(stat) => stat.fingerprint(),
            LowerNode::Pre(pre, _) => Fingerprint {
                dev: 0,
                ino: ino.0,
                size: pre.node.size(),
                mtime: pre.node.meta.mtime,
                ctime: pre.node.meta.ctime,
            },
        })
    }
}

/// The base as it was in one epoch.
pub struct Lower {
    base: Arc<Base>,
    store: Arc<Store>,
    epoch: Epoch,
    history: PreHistory,
    /// All that is made of one has one for all its epochs: an open file is held against the print that is wanted.
    files: Arc<Mutex<LruCache<TreePath>>>,
    problems: Mutex<BTreeMap<TreePath, String>>,
}

impl Lower {
    /// The base in `epoch`, given all applies.
    pub fn new(base: Arc<Base>, store: Arc<Store>, epoch: Epoch, history: PreHistory) -> Lower {
        let files = Arc::new(Mutex::new(LruCache::new(OPEN_FILES)));
        Lower { base, store, epoch, history, files, problems: Mutex::default() }
    }

    /// The same base in another epoch.
    pub fn in_epoch(&self, epoch: Epoch) -> Lower {
        let lower = Lower::new(
            Arc::clone(&self.base),
            Arc::clone(&self.store),
            epoch,
            self.history.clone(),
        );
        Lower { files: Arc::clone(&self.files), ..lower }
    }

    /// Which epoch it shows.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The store that keeps the pre-images.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The base itself.
    pub fn base(&self) -> &Arc<Base> {
        &self.base
    }

    /// Whether what is at a path of the base is told to nobody ([`Base::hide`]). Names and attributes of it are known to whoever
    /// compares states; the doors keep them, and nothing gets by its content.
    pub fn hides(&self, path: &TreePath) -> bool {
        self.base.hides(path)
    }

    /// Whether anything of the base is hidden.
    pub fn hides_any(&self) -> bool {
        self.base.hides_any()
    }

    /// Lets what is at a path of the base be seen.
    ///
    /// # Errors
    /// EACCES for what is hidden.
    pub fn check_not_hidden(&self, path: &TreePath) -> FsResult<()> {
        if self.hides(path) { Err(FsError::AccessDenied) } else { Ok(()) }
    }

    /// All applies so far.
    pub fn history(&self) -> &PreHistory {
        &self.history
    }

    /// The earliest later apply that touched `path`, and what it found.
    fn pre(&self, path: &TreePath, after: Epoch) -> Option<(Option<&Arc<PreNode>>, Epoch)> {
        let later = self.history.iter().enumerate().skip(after.0 as usize);
        later.into_iter().find_map(|(at, images)| {
            let node = images.nodes.get(path)?;
            Some((node.as_ref(), Epoch(u32::try_from(at).unwrap_or(u32::MAX) + 1)))
        })
    }

    /// What the last apply after this epoch that touched `path` left there; none if none touched it.
    pub fn left_since(&self, path: &TreePath) -> Option<Option<Fingerprint>> {
        self.left_after(self.epoch, path)
    }

    /// The same, after some other epoch.
    pub fn left_after(&self, epoch: Epoch, path: &TreePath) -> Option<Option<Fingerprint>> {
        let later = self.history.iter().skip(epoch.0 as usize).rev();
        later.into_iter().find_map(|images| images.left.get(path).copied())
    }

    /// Whether the filesystem of the base cannot hold the time `wanted`, and made `kept` of it when an
    /// apply set it.
    pub fn is_rounded(&self, wanted: Timestamp, kept: Timestamp) -> bool {
        self.history.iter().any(|images| images.rounded.get(&wanted) == Some(&kept))
    }

    /// Whether the last apply touched `path` and did not come to its end: nothing is known of what
    /// stands there in the base.
    pub fn is_half_applied(&self, path: &TreePath) -> bool {
        let last = self.history.last();
        last.is_some_and(|images| {
            images.nodes.contains_key(path) && !images.left.contains_key(path)
        })
    }

    /// The paths that applies after this epoch touched.
    pub fn touched_since(&self) -> BTreeSet<TreePath> {
        self.history.iter().skip(self.epoch.0 as usize).flat_map(|i| i.paths().cloned()).collect()
    }

    /// The same for a file with several links that was touched under another name.
    fn pre_linked(&self, host: u64, after: Epoch) -> Option<(&Arc<PreNode>, Epoch)> {
        let later = self.history.iter().enumerate().skip(after.0 as usize);
        later.into_iter().find_map(|(at, images)| {
            Some((images.linked.get(&host)?, Epoch(u32::try_from(at).unwrap_or(u32::MAX) + 1)))
        })
    }

    /// What is at `path`, and its number.
    ///
    /// # Errors
    /// What the host answers; a path that leads nowhere is none.
    pub fn lookup(&self, path: &TreePath) -> FsResult<Option<(Ino, LowerNode)>> {
        self.lookup_by(path, || self.base.stat(path))
    }

    /// The same for a directory that is looked at with names of it.
    ///
    /// # Errors
    /// As [`Lower::lookup`].
    pub fn lookup_dir(&self, near: &DirLookup<'_>) -> FsResult<Option<(Ino, LowerNode)>> {
        self.lookup_by(near.path(), || near.stat_dir())
    }

    /// The same for a name of such a directory. `path` is where it is.
    ///
    /// # Errors
    /// As [`Lower::lookup`].
    pub fn lookup_near(
        &self,
        near: &DirLookup<'_>,
        (path, name): (&TreePath, &Name),
    ) -> FsResult<Option<(Ino, LowerNode)>> {
        self.lookup_by(path, || near.stat(name))
    }

    fn lookup_by(
        &self,
        path: &TreePath,
        stat: impl FnOnce() -> FsResult<BaseStat>,
    ) -> FsResult<Option<(Ino, LowerNode)>> {
        if let Some((node, epoch)) = self.pre(path, self.epoch) {
            return Ok(node.map(|n| (n.ino, LowerNode::Pre(Arc::clone(n), epoch))));
        }
        match stat() {
            Ok(stat) => {
                let ino = self.store.identities().lock().of(stat.dev, stat.ino)?;
                if let Some((pre, epoch)) =
                    self.pre_linked(stat.ino, self.epoch).filter(|(pre, _)| pre.ino == ino)
                {
                    return Ok(Some((ino, LowerNode::Pre(Arc::clone(pre), epoch))));
                }
                Ok(Some((ino, LowerNode::Base(Box::new(stat)))))
            }
            Err(FsError::NotFound | FsError::NotADirectory) => Ok(None),
            Err(error) => {
                self.problem(path, &error);
                Err(error)
            }
        }
    }

    /// Gives a node of the base a number of our own, because another node of the tree has the one it had.
    ///
    /// # Errors
    /// What the store answers.
    pub fn renumber(&self, stat: &BaseStat) -> FsResult<Ino> {
        Ok(self.store.identities().lock().renumber(stat.dev, stat.ino)?)
    }

    /// The names of a directory with the number and, where the host tells, the kind of each.
    ///
    /// # Errors
    /// What the host answers.
    pub fn list(&self, path: &TreePath) -> FsResult<Names> {
        self.list_by(path, || self.base.list(path))
    }

    /// The same for what was `seen` there just now.
    ///
    /// # Errors
    /// As [`Lower::list`].
    pub fn list_seen(&self, path: &TreePath, seen: &LowerNode) -> FsResult<Names> {
        match seen {
            LowerNode::Base(stat) => self.list_by(path, || self.base.list_seen(path, stat)),
            LowerNode::Pre(..) => self.list(path),
        }
    }

    fn list_by(
        &self,
        path: &TreePath,
        list: impl FnOnce() -> FsResult<Vec<BaseEntry>>,
    ) -> FsResult<Names> {
        let mut names = BTreeMap::new();
        let in_base = match self.pre(path, self.epoch) {
            Some((Some(node), _)) => matches!(node.node.body, Body::Dir { .. }),
            Some((None, _)) => false,
            None => true,
        };
        if in_base {
            let entries = match list() {
                Ok(entries) => entries,
                // An apply removed it, and kept what was in it.
                Err(FsError::NotFound | FsError::NotADirectory)
                    if self.pre(path, self.epoch).is_some() =>
                {
                    Vec::new()
                }
                Err(FsError::NotFound | FsError::NotADirectory) => {
                    self.note(
                        path,
                        "the directory is gone from the base, with what the tree does not cover of it",
                    );
                    Vec::new()
                }
                Err(error) => {
                    self.problem(path, &error);
                    return Err(error);
                }
            };
            let mut identities = self.store.identities().lock();
            for entry in entries {
                names.insert(entry.name, (identities.of(entry.dev, entry.ino)?, entry.kind));
            }
        }
        for images in self.history.iter().skip(self.epoch.0 as usize).rev() {
            for name in images.names.get(path).into_iter().flatten() {
                match images.nodes.get(&path.join(name)) {
                    Some(Some(node)) => {
                        names.insert(name.clone(), (node.ino, Some(node.node.kind())));
                    }
                    _ => drop(names.remove(name)),
                }
            }
        }
        Ok(names)
    }

    /// All paths at which some nodes stand. Nothing but the base itself can tell the hard links
    /// of a file, so it is read whole, unless there is nothing to look for.
    ///
    /// # Errors
    /// What the host answers.
    pub fn names_of(&self, wanted: &HashSet<Ino>) -> FsResult<BTreeMap<TreePath, Ino>> {
        let mut paths = BTreeMap::new();
        let mut dirs = if wanted.is_empty() { Vec::new() } else { vec![TreePath::root()] };
        while let Some(dir) = dirs.pop() {
            for (name, (ino, kind)) in self.list(&dir)? {
                if wanted.contains(&ino) {
                    paths.insert(dir.join(&name), ino);
                }
                if kind == Some(FileKind::Dir) {
                    dirs.push(dir.join(&name));
                }
            }
        }
        Ok(paths)
    }

    /// The text of a link.
    ///
    /// # Errors
    /// What the host answers.
    pub fn readlink(&self, path: &TreePath, node: &LowerNode) -> FsResult<Vec<u8>> {
        match node {
            LowerNode::Base(stat) => self.base.readlink_seen(path, stat),
            LowerNode::Pre(pre, _) => match &pre.node.body {
                Body::Symlink { target } => Ok(target.clone()),
                _ => Err(FsError::Invalid),
            },
        }
    }

    /// The extended attributes.
    ///
    /// # Errors
    /// What the host answers.
    pub fn xattrs(
        &self,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<crate::store::record::Xattrs> {
        match node {
            LowerNode::Base(stat) => {
                let all: BTreeMap<_, _> = self.base.xattrs_seen(path, stat)?.into_iter().collect();
                Ok((!all.is_empty()).then(|| Arc::new(all)))
            }
            LowerNode::Pre(pre, _) => Ok(pre.node.xattrs.clone()),
        }
    }

    /// The record that covers a node, and where its bytes are.
    ///
    /// # Errors
    /// What the host answers.
    pub fn record(
        &self,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<(Node, Vec<(ByteRange, Source)>)> {
        let xattrs = self.xattrs(path, node)?;
        match node {
            LowerNode::Pre(pre, _) => {
                let mut record = pre.node.clone();
                record.xattrs = xattrs;
                let mut extents = pre.extents.clone();
                if let Body::File { size, origin } = &mut record.body {
                    // The bytes are found again through the path; the print is that of the pre-image's own file.
                    let print = origin.as_ref().map(|o| o.print);
                    *origin = print.map(|print| Arc::new(Origin { path: path.clone(), print }));
                    if origin.is_some() && *size > 0 {
                        extents = vec![(ByteRange::at(0, *size), Source::Base { offset: 0 })];
                    }
                }
                Ok((record, extents))
            }
            LowerNode::Base(stat) => {
                let body = match stat.kind {
                    FileKind::File => {
                        let origin = Origin { path: path.clone(), print: stat.fingerprint() };
                        Body::File { size: stat.size, origin: Some(Arc::new(origin)) }
                    }
                    FileKind::Dir => Body::Dir { base: Some(path.clone()) },
                    FileKind::Symlink => {
                        Body::Symlink { target: self.base.readlink_seen(path, stat)? }
                    }
                    FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block => {
                        Body::Special
                    }
                };
                let extents = match &body {
                    Body::File { origin: Some(origin), .. } => self.data_of(origin, stat),
                    _ => Vec::new(),
                };
                Ok((Node { meta: meta_of(stat), xattrs, body }, extents))
            }
        }
    }

    /// Where a file of the base has data: only what it takes on disk counts as content of ours. A file that cannot be
    /// looked into is taken as a whole.
    fn data_of(&self, origin: &Origin, stat: &BaseStat) -> Vec<(ByteRange, Source)> {
        let whole = ByteRange::at(0, stat.size);
        let has_holes = stat.blocks.saturating_mul(512) < stat.size;
        let runs = if has_holes { self.runs_of_data(origin, stat.size).ok() } else { None };
        let runs = runs.unwrap_or_else(|| vec![whole]);
        let runs = runs.into_iter().filter(|run| !run.is_empty());
        runs.map(|run| (run, Source::Base { offset: run.start })).collect()
    }

    fn runs_of_data(&self, origin: &Origin, size: u64) -> FsResult<Vec<ByteRange>> {
        let file = self.open_covered(origin)?;
        let (mut runs, mut at) = (Vec::new(), 0);
        while let Some(start) = sys::file::seek_data(&file, at)?.filter(|start| *start < size) {
            let hole = sys::file::seek_hole(&file, start)?.unwrap_or(size).min(size);
            // The last run that is told apart goes to the end. A run has a byte, or this would not end.
            let end = if runs.len() + 1 < MOST_RUNS && hole > start { hole } else { size };
            runs.push(ByteRange { start, end });
            at = end;
        }
        Ok(runs)
    }

    /// Where the bytes of `range` of a file of this epoch's base are now. `print` is what the file must look like.
    ///
    /// # Errors
    /// [`FsError::Drift`] if the base changed behind our back, else what the host answers.
    pub fn locate(&self, origin: &Origin, range: ByteRange) -> FsResult<Vec<Piece>> {
        self.locate_in(origin, range, self.epoch)
    }

    fn locate_in(&self, origin: &Origin, range: ByteRange, epoch: Epoch) -> FsResult<Vec<Piece>> {
        self.check_not_hidden(&origin.path)?;
        match self.pre(&origin.path, epoch) {
            None => {
                if let Some((pre, epoch)) = self.pre_linked(origin.print.ino, epoch) {
                    return self.locate_pre(pre, range, epoch);
                }
                let file = self.open_covered(origin)?;
                let piece = Piece::of_base(range.len(), file, range.start, &origin.path);
                // While an apply sets its attributes, its time changes and its content does not.
                let is_set = origin.print.ctime == ANY_TIMES;
                let print = &origin.print;
                Ok(vec![if is_set { piece } else { piece.looked_at(print) }])
            }
            Some((Some(pre), epoch)) => self.locate_pre(pre, range, epoch),
            Some((None, _)) => Err(FsError::Drift(origin.path.clone())),
        }
    }

    /// Where the bytes of a pre-image are.
    ///
    /// # Errors
    /// As [`Lower::locate`].
    pub fn locate_pre(
        &self,
        pre: &PreNode,
        range: ByteRange,
        epoch: Epoch,
    ) -> FsResult<Vec<Piece>> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        // In order, so that those of a file in many pieces are not all looked at for each step of a read.
        let first = pre.extents.partition_point(|(extent, _)| extent.end <= range.start);
        let behind = pre.extents.get(first..).unwrap_or_default();
        for (extent, source) in behind.iter().take_while(|(extent, _)| extent.start < range.end) {
            if extent.start > at {
                pieces.push(Piece::zeros(extent.start - at));
                at = extent.start;
            }
            let end = extent.end.min(range.end);
            match source.advanced(at - extent.start) {
                Source::Pool { layer, offset } => {
                    pieces.extend(Piece::of_pool(end - at, &self.store, layer, offset)?);
                }
                Source::Base { offset } => {
                    let Body::File { origin: Some(origin), .. } = &pre.node.body else {
                        return Err(FsError::Damage(
                            "a pre-image refers to the base without an origin",
                        ));
                    };
                    pieces.extend(self.locate_in(
                        origin,
                        ByteRange::at(offset, end - at),
                        epoch,
                    )?);
                }
            }
            at = end;
        }
        if at < range.end {
            pieces.push(Piece::zeros(range.end - at));
        }
        Ok(pieces)
    }

    /// Opens a file of the base that the tree covers, or finds it open; holds it against the print taken when it was
    /// covered.
    ///
    /// # Errors
    /// [`FsError::Drift`], else what the host answers.
    fn open_covered(&self, origin: &Origin) -> FsResult<Arc<File>> {
        if let Some(file) = self.kept(&origin.path, &origin.print)? {
            return Ok(file);
        }
        let opened =
            self.base.stat(&origin.path).and_then(|seen| self.open_anew(&origin.path, &seen));
        let file = match opened {
            // Nothing, or no file any more.
            Err(
                FsError::NotFound
                | FsError::NotADirectory
                | FsError::IsADirectory
                | FsError::Invalid,
            ) => {
                return Err(self.drift(&origin.path));
            }
            other => other.inspect_err(|error| self.problem(&origin.path, error))?,
        };
        if self.is_as(&origin.print, &Fingerprint::of(&file)?) {
            Ok(file)
        } else {
            Err(self.drift(&origin.path))
        }
    }

    /// Opens a file of the base that was `seen` just now, or finds it open and as it was seen: an open file can have been
    /// replaced at its path, or written anew in place. What is opened is as it is now.
    ///
    /// # Errors
    /// What the host answers.
    pub fn open(&self, path: &TreePath, seen: &BaseStat) -> FsResult<Arc<File>> {
        self.check_not_hidden(path)?;
        match self.kept(path, &seen.fingerprint())? {
            Some(file) => Ok(file),
            None => self.open_anew(path, seen).inspect_err(|error| self.problem(path, error)),
        }
    }

    /// A file that is open already, and as its print says.
    fn kept(&self, path: &TreePath, print: &Fingerprint) -> FsResult<Option<Arc<File>>> {
        let Some(file) = self.files.lock().get(path) else { return Ok(None) };
        Ok(self.is_as(print, &Fingerprint::of(&file)?).then_some(file))
    }

    fn open_anew(&self, path: &TreePath, seen: &BaseStat) -> FsResult<Arc<File>> {
        let file = Arc::new(self.base.open_file_seen(path, seen)?);
        self.files.lock().insert(path.clone(), Arc::clone(&file));
        Ok(file)
    }

    /// Whether a file of the base is as its print says. Where the filesystem gives out numbers anew, they are not held against it.
    pub fn is_as(&self, expected: &Fingerprint, found: &Fingerprint) -> bool {
        let same_number = Fingerprint { ino: found.ino, ..*expected };
        fits(expected, found) || (!self.base.keeps_numbers() && fits(&same_number, found))
    }

    /// Notes that the base changed behind our back.
    pub fn drift(&self, path: &TreePath) -> FsError {
        let error = FsError::Drift(path.clone());
        self.problem(path, &error);
        error
    }

    fn problem(&self, path: &TreePath, error: &FsError) {
        self.note(path, &error.to_string());
    }

    /// Notes something for `status`.
    pub(in crate::fs) fn note(&self, path: &TreePath, what: &str) {
        let mut problems = self.problems.lock();
        if problems.len() < PROBLEMS {
            problems.insert(path.clone(), what.to_owned());
        }
    }

    /// Says that it is about to be found out where bytes are, to read them.
    pub(crate) fn reading(&self) -> ReadGuard {
        self.store.reading()
    }

    /// What went wrong with the base so far.
    pub fn problems(&self) -> Vec<(TreePath, String)> {
        self.problems.lock().iter().map(|(p, e)| (p.clone(), e.clone())).collect()
    }
}

/// The change time in the print of a file whose attributes an apply is setting: its times are not held against the print then.
pub const ANY_TIMES: Timestamp = Timestamp { secs: i64::MIN, nanos: 0 };

/// In the record of what an apply left: the filesystem of the base cannot hold the time `wanted`, and
/// made `kept` of it. No file has inode 0.
pub fn rounded(wanted: Timestamp, kept: Timestamp) -> Fingerprint {
    Fingerprint { dev: 0, ino: 0, size: u64::MAX, mtime: wanted, ctime: kept }
}

/// Whether a file is as its print says. The number of the device does not count: it may change at a reboot.
pub fn fits(expected: &Fingerprint, found: &Fingerprint) -> bool {
    let any = expected.ctime == ANY_TIMES;
    let (mtime, ctime) =
        if any { (found.mtime, found.ctime) } else { (expected.mtime, expected.ctime) };
    Fingerprint { mtime, ctime, dev: found.dev, ..*expected } == *found
}

/// The attributes of a node of the base, as a record.
pub fn meta_of(stat: &BaseStat) -> Meta {
    Meta {
        mode: stat.mode,
        uid: stat.uid,
        gid: stat.gid,
        nlink: stat.nlink,
        rdev: if matches!(stat.kind, FileKind::Char | FileKind::Block) { stat.rdev } else { 0 },
        atime: stat.atime,
        mtime: stat.mtime,
        ctime: stat.ctime,
    }
}
