//! The base as it was in one epoch: what shows through where the tree has nothing.
//!
//! An apply begins a new epoch of the base. A lookup in epoch `e` asks the pre-images of the later
//! applies first, earliest first, and then the base itself ([`crate::fs::merged::pre_images`]).
//! The lower also assigns each node its inode number.

mod data;
mod files;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::base::{Base, BaseEntry, BaseStat, DirLookup};
use crate::error::{FsError, FsResult};
use crate::fs::merged::answers::{self, Question};
use crate::fs::merged::attr::{Attr, blocks};
use crate::fs::merged::base_problems::BaseProblems;
use crate::fs::merged::lower::files::BaseFiles;
use crate::fs::merged::pre_images::{PreHistory, PreImages};
use crate::store::record::PreNode;
use crate::store::{ReadGuard, Store};
use crate::tree::{Body, Meta, Origin, Xattrs};
use crate::types::{Epoch, FileKind, Fingerprint, Ino, Name, Timestamp, TreePath};

pub use data::Extents;

#[cfg(test)]
std::thread_local! {
    /// The number of base nodes that this thread looked up.
    pub(in crate::fs) static LOOKUPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// The names of a directory, with the inode number of each and, where the host reports it, the
/// type.
pub type Names = BTreeMap<Name, (Ino, Option<FileKind>)>;

/// A node below the tree.
#[derive(Clone, Debug)]
pub enum LowerNode {
    /// In the base.
    Base(Box<BaseStat>),
    /// In the pre-image of the apply that ended this epoch.
    Pre(Arc<PreNode>, Epoch),
}

impl LowerNode {
    /// The type of the node.
    pub fn kind(&self) -> FileKind {
        match self {
            LowerNode::Base(stat) => stat.kind,
            LowerNode::Pre(pre, _) => pre.node.kind(),
        }
    }

    /// The number of hard links.
    pub(in crate::fs) fn nlink(&self) -> u32 {
        match self {
            LowerNode::Base(stat) => stat.nlink,
            LowerNode::Pre(pre, _) => pre.node.meta.nlink,
        }
    }

    /// The attributes that `stat` reports for the node.
    pub(in crate::fs) fn attr(&self, ino: Ino) -> Attr {
        match self {
            LowerNode::Base(stat) => {
                Attr::of_lower(ino, stat.kind, meta_of(stat), stat.size, stat.blocks)
            }
            LowerNode::Pre(pre, _) => {
                let blocks = pre.extents.iter().map(|(range, _)| blocks(range.len())).sum();
                let (node, kind) = (&pre.node, pre.node.kind());
                Attr::of_lower(ino, kind, node.meta, node.size(), blocks)
            }
        }
    }

    /// The fingerprint that an apply expects to find. That of a pre-image matches nothing in the
    /// base, because the apply has replaced the node.
    pub fn fingerprint(&self, ino: Ino) -> Arc<Fingerprint> {
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

/// The attributes of a base node, as a record stores them.
fn meta_of(stat: &BaseStat) -> Meta {
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

/// The base as it was in one epoch.
pub struct Lower {
    base: Arc<Base>,
    store: Arc<Store>,
    epoch: Epoch,
    history: PreHistory,
    /// Shared by all epochs of a base.
    files: BaseFiles,
    problems: BaseProblems,
}

impl Lower {
    /// The base in `epoch`, given all applies so far.
    pub fn new(base: Arc<Base>, store: Arc<Store>, epoch: Epoch, history: PreHistory) -> Lower {
        let files = BaseFiles::of(Arc::clone(&base));
        Lower { base, store, epoch, history, files, problems: BaseProblems::default() }
    }

    /// The same base in another epoch.
    pub fn in_epoch(&self, epoch: Epoch) -> Lower {
        let lower = Lower::new(
            Arc::clone(&self.base),
            Arc::clone(&self.store),
            epoch,
            self.history.clone(),
        );
        Lower { files: self.files.clone(), ..lower }
    }

    /// The epoch that it shows.
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

    /// Begins a read: while the guard lives, no bytes are freed that are found after this call.
    pub(crate) fn reading(&self) -> ReadGuard {
        self.store.reading()
    }

    /// Whether [`Base::hide`] hides the content of a path from the sandbox. Its name and attributes
    /// are still visible to comparisons of states; `sandbox` filters those.
    pub fn hides(&self, path: &TreePath) -> bool {
        self.base.hides(path)
    }

    /// Whether any path of the base is hidden.
    pub fn hides_any(&self) -> bool {
        self.base.hides_any()
    }

    /// Refuses access to a hidden path.
    ///
    /// # Errors
    /// EACCES.
    pub fn check_not_hidden(&self, path: &TreePath) -> FsResult<()> {
        if self.hides(path) { Err(FsError::AccessDenied) } else { Ok(()) }
    }
}

/// The changes that applies made since this epoch.
impl Lower {
    /// All applies so far.
    pub fn history(&self) -> &PreHistory {
        &self.history
    }

    /// The pre-image of the earliest apply after an epoch that touched `path`, with the epoch that
    /// this apply began. The inner `None` says that the path did not exist.
    fn pre_image(&self, path: &TreePath, after: Epoch) -> Option<(Option<&Arc<PreNode>>, Epoch)> {
        let mut later = self.history.iter().enumerate().skip(after.0 as usize);
        later.find_map(|(index, images)| {
            Some((images.nodes.get(path)?.as_ref(), epoch_begun_by(index)))
        })
    }

    /// The same for a file with several links that was touched under another name.
    fn pre_image_of_link(&self, host: u64, after: Epoch) -> Option<(&Arc<PreNode>, Epoch)> {
        let mut later = self.history.iter().enumerate().skip(after.0 as usize);
        later.find_map(|(index, images)| Some((images.linked.get(&host)?, epoch_begun_by(index))))
    }

    /// The fingerprint that the last apply after this epoch left at `path`. The outer `None` says
    /// that no apply touched the path, the inner one that the apply left nothing there.
    pub fn left_since(&self, path: &TreePath) -> Option<Option<Fingerprint>> {
        self.left_after(self.epoch, path)
    }

    /// As [`Lower::left_since`], after another epoch.
    pub fn left_after(&self, epoch: Epoch, path: &TreePath) -> Option<Option<Fingerprint>> {
        let mut latest_first = self.history.iter().skip(epoch.0 as usize).rev();
        latest_first.find_map(|images| images.left.get(path).copied())
    }

    /// Whether an apply set the time `wanted` and the filesystem of the base stored `kept` instead.
    pub fn is_rounded(&self, wanted: Timestamp, kept: Timestamp) -> bool {
        self.history.iter().any(|images| images.rounded.get(&wanted) == Some(&kept))
    }

    /// Whether the last apply touched `path` and was interrupted, so that the base may have
    /// anything there.
    pub fn is_half_applied(&self, path: &TreePath) -> bool {
        self.history.last().is_some_and(|images| {
            images.nodes.contains_key(path) && !images.left.contains_key(path)
        })
    }

    /// The paths that applies touched after this epoch.
    pub fn touched_since(&self) -> BTreeSet<TreePath> {
        self.history.iter().skip(self.epoch.0 as usize).flat_map(|i| i.paths().cloned()).collect()
    }

    /// The paths that applies touched after this epoch and before the other one. None if the other
    /// one is earlier.
    pub fn touched_until(&self, other: Epoch) -> BTreeSet<TreePath> {
        self.applies_between(self.epoch, other).flat_map(|i| i.paths().cloned()).collect()
    }

    /// Whether a reference to a base file means the same bytes in another epoch, because no apply
    /// between the two touched the file.
    pub fn is_same_in(&self, other: Epoch, origin: &Origin) -> bool {
        let (from, to) = (self.epoch.min(other), self.epoch.max(other));
        let is_touched = |images: &PreImages| {
            let is_linked = images.linked.contains_key(&origin.print.ino);
            is_linked || images.nodes.contains_key(&origin.path)
        };
        !self.applies_between(from, to).any(is_touched)
    }

    fn applies_between(&self, from: Epoch, to: Epoch) -> impl Iterator<Item = &PreImages> {
        let count = to.0.saturating_sub(from.0) as usize;
        self.history.iter().skip(from.0 as usize).take(count).map(|images| &**images)
    }
}

/// The epoch that the apply at an index of the history began.
fn epoch_begun_by(index: usize) -> Epoch {
    Epoch(u32::try_from(index).unwrap_or(u32::MAX) + 1)
}

/// Nodes and names.
impl Lower {
    /// The node at `path` with its inode number; `None` if there is none.
    ///
    /// # Errors
    /// Those of the host.
    pub fn lookup(&self, path: &TreePath) -> FsResult<Option<(Ino, LowerNode)>> {
        self.lookup_by(path, || {
            let (base, asked) = (Arc::clone(&self.base), path.clone());
            answers::answer(Question::Stat(path.clone()), move || {
                #[cfg(test)]
                LOOKUPS.set(LOOKUPS.get() + 1);
                base.stat(&asked)
            })
        })
    }

    /// The node at `name` in an opened directory; `path` is the path of the name. A served
    /// operation gets its answers by the path.
    ///
    /// # Errors
    /// As [`Lower::lookup`].
    pub fn lookup_in(
        &self,
        opened: &DirLookup,
        (path, name): (&TreePath, &Name),
    ) -> FsResult<Option<(Ino, LowerNode)>> {
        if answers::is_serving() {
            return self.lookup(path);
        }
        self.lookup_by(path, || opened.stat(name))
    }

    /// As [`Lower::lookup`]; `stat` is what the base has at `path`.
    fn lookup_by(
        &self,
        path: &TreePath,
        stat: impl FnOnce() -> FsResult<BaseStat>,
    ) -> FsResult<Option<(Ino, LowerNode)>> {
        if let Some((node, epoch)) = self.pre_image(path, self.epoch) {
            return Ok(node.map(|pre| (pre.ino, LowerNode::Pre(Arc::clone(pre), epoch))));
        }
        match stat() {
            Ok(stat) => {
                let ino = self.number_of(stat.dev, stat.ino)?;
                let pre = self.pre_image_of_link(stat.ino, self.epoch);
                if let Some((pre, epoch)) = pre.filter(|(pre, _)| pre.ino == ino) {
                    return Ok(Some((ino, LowerNode::Pre(Arc::clone(pre), epoch))));
                }
                Ok(Some((ino, LowerNode::Base(Box::new(stat)))))
            }
            Err(FsError::NotFound | FsError::NotADirectory) => Ok(None),
            Err(error) => Err(self.noted(path, error)),
        }
    }

    /// The number of a base node. If it must be recorded first, it is a question, because the disk
    /// may be slow.
    fn number_of(&self, dev: u64, host: u64) -> FsResult<Ino> {
        if let Some(ino) = self.store.known_number(dev, host) {
            return Ok(ino);
        }
        let store = Arc::clone(&self.store);
        answers::answer(Question::Number(dev, host), move || Ok(store.number_of(dev, host)?))
    }

    /// Gives a base node another inode number than `taken`, which a node of the tree has. It is a
    /// question, because the disk may be slow.
    ///
    /// # Errors
    /// Those of the store.
    pub fn renumber(&self, stat: &BaseStat, taken: Ino) -> FsResult<Ino> {
        let (store, dev, host) = (Arc::clone(&self.store), stat.dev, stat.ino);
        answers::answer(Question::OtherNumber(dev, host, taken), move || {
            Ok(store.identities().lock().other_than(taken, dev, host)?)
        })
    }

    /// The names of a directory.
    ///
    /// # Errors
    /// Those of the host.
    pub fn list(&self, path: &TreePath) -> FsResult<Names> {
        self.list_by(path, move |base, path| base.list(path))
    }

    /// The names of a directory that a lookup has just found as `seen`.
    ///
    /// # Errors
    /// As [`Lower::list`].
    pub fn list_seen(&self, path: &TreePath, seen: &LowerNode) -> FsResult<Names> {
        match seen {
            LowerNode::Base(stat) => {
                let stat = stat.clone();
                self.list_by(path, move |base, path| base.list_with_stat(path, &stat))
            }
            LowerNode::Pre(..) => self.list(path),
        }
    }

    fn list_by(
        &self,
        path: &TreePath,
        list: impl FnOnce(&Base, &TreePath) -> FsResult<Vec<BaseEntry>> + 'static,
    ) -> FsResult<Names> {
        let pre = self.pre_image(path, self.epoch).map(|(node, _)| node);
        let is_dir = |pre: &Arc<PreNode>| matches!(pre.node.body, Body::Dir { .. });
        let mut names = match pre {
            None => self.names_in_base(path, list, false)?,
            Some(Some(node)) if is_dir(node) => self.names_in_base(path, list, true)?,
            Some(_) => Names::new(),
        };
        for images in self.history.iter().skip(self.epoch.0 as usize).rev() {
            for name in images.names.get(path).into_iter().flatten() {
                match images.nodes.get(&path.join(name)) {
                    Some(Some(pre)) => {
                        names.insert(name.clone(), (pre.ino, Some(pre.node.kind())));
                    }
                    _ => drop(names.remove(name)),
                }
            }
        }
        Ok(names)
    }

    /// The names that a directory of the base has now.
    fn names_in_base(
        &self,
        path: &TreePath,
        list: impl FnOnce(&Base, &TreePath) -> FsResult<Vec<BaseEntry>> + 'static,
        has_pre_image: bool,
    ) -> FsResult<Names> {
        let (base, store, asked) = (Arc::clone(&self.base), Arc::clone(&self.store), path.clone());
        let listed = answers::answer(Question::Names(path.clone()), move || {
            let numbered = |entry: BaseEntry| {
                Ok((entry.name, (store.number_of(entry.dev, entry.ino)?, entry.kind)))
            };
            let names: FsResult<Names> = list(&base, &asked)?.into_iter().map(numbered).collect();
            names.map(Arc::new)
        });
        match listed {
            Ok(names) => Ok(Names::clone(&names)),
            Err(FsError::NotFound | FsError::NotADirectory) => {
                // An apply that removed the directory kept its names as pre-images.
                if !has_pre_image {
                    self.note(
                        path,
                        "the directory was removed from the base; \
                         files in it that were not copied up are lost",
                    );
                }
                Ok(Names::new())
            }
            Err(error) => Err(self.noted(path, error)),
        }
    }

    /// All paths of the wanted nodes. The base has no reverse index, so this scans it, unless
    /// nothing is wanted.
    ///
    /// # Errors
    /// Those of the host.
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

    /// The text of a symlink.
    ///
    /// # Errors
    /// EINVAL for another node, and those of the host.
    pub fn readlink(&self, path: &TreePath, node: &LowerNode) -> FsResult<Vec<u8>> {
        match node {
            LowerNode::Base(stat) => {
                let (base, asked, stat) = (Arc::clone(&self.base), path.clone(), stat.clone());
                let ask = move || base.readlink_with_stat(&asked, &stat);
                answers::answer(Question::Text(path.clone()), ask)
            }
            LowerNode::Pre(pre, _) => match &pre.node.body {
                Body::Symlink { target } => Ok(target.clone()),
                _ => Err(FsError::Invalid),
            },
        }
    }

    /// The extended attributes of a node.
    ///
    /// # Errors
    /// Those of the host.
    pub fn xattrs(&self, path: &TreePath, node: &LowerNode) -> FsResult<Xattrs> {
        match node {
            LowerNode::Base(stat) => {
                let (base, asked, stat) = (Arc::clone(&self.base), path.clone(), stat.clone());
                answers::answer(Question::Xattrs(path.clone()), move || {
                    let all: BTreeMap<_, _> =
                        base.xattrs_with_stat(&asked, &stat)?.into_iter().collect();
                    Ok((!all.is_empty()).then(|| Arc::new(all)))
                })
            }
            LowerNode::Pre(pre, _) => Ok(pre.node.xattrs.clone()),
        }
    }
}

/// Drift and other problems of the base.
impl Lower {
    /// Whether a base file still has the expected fingerprint. On a filesystem without stable inode
    /// numbers ([`Base::has_stable_inodes`]) the number is not compared.
    pub fn is_as(&self, expected: &Fingerprint, found: &Fingerprint) -> bool {
        self.files.is_as(expected, found)
    }

    /// Records that the base changed behind the sandbox, and returns the error that reports it.
    pub fn drift(&self, path: &TreePath) -> FsError {
        self.problems.drift(path)
    }

    /// Records a problem for `status`.
    pub(in crate::fs) fn note(&self, path: &TreePath, problem: &str) {
        self.problems.note(path, problem);
    }

    /// Records an error, unless it is one of the store or none at all, and returns it.
    fn noted(&self, path: &TreePath, error: FsError) -> FsError {
        if !matches!(error, FsError::MustWait | FsError::Store(_)) {
            self.problems.note_error(path, &error);
        }
        error
    }

    /// The problems of the base so far.
    pub fn problems(&self) -> Vec<(TreePath, String)> {
        self.problems.list()
    }

    /// The record of the base's problems, for reads that outlive a lock.
    pub(in crate::fs) fn problem_log(&self) -> &BaseProblems {
        &self.problems
    }
}
