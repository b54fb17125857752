//! A state of the whole filesystem: the tree over the base in one epoch.
//!
//! A state is a value that never changes. Checkpoints, restores and diffs work on states, whether
//! or not a kernel has one of them mounted.

use std::fs::File;
use std::sync::Arc;

use crate::base::{BaseStat, DirLookup, require_file};
use crate::error::{FsError, FsResult};
use crate::fs::merged::attr::Attr;
use crate::fs::merged::extent_reader::{FoundExtents, HostExtent, Storage};
use crate::fs::merged::lower::{Extents, Lower, LowerNode, Names};
use crate::fs::merged::read_plan::ReadPlan;
use crate::tree::{Body, Dentry, Edit, Hides, Node, Source, Tree};
use crate::types::{ByteRange, FileKind, Ino, LayerId, Name, TreePath};

/// The layer id that stands for the scratch file of orphans.
pub(in crate::fs) const SCRATCH: LayerId = LayerId(0);

/// A directory of the merged tree: its inode number, and the base path that it merges with.
pub type Dir = (Ino, Option<TreePath>);

/// The tree over the base.
#[derive(Clone)]
pub struct State {
    /// Everything that differs from the base.
    pub tree: Tree,
    /// The base.
    pub lower: Arc<Lower>,
}

/// The result of looking up a name.
#[derive(Clone, Debug)]
pub enum Found {
    /// A node of the tree, and the base node that its name hides.
    Upper(Ino, Hides),
    /// A node of the base that was not copied up, with its path in the base.
    Base(Ino, TreePath, LowerNode),
    /// No node; a whiteout says which base node it hides.
    Nothing(Hides),
}

impl Found {
    /// The inode number of the node, if there is one.
    pub fn ino(&self) -> Option<Ino> {
        match self {
            Found::Upper(ino, _) | Found::Base(ino, ..) => Some(*ino),
            Found::Nothing(_) => None,
        }
    }

    /// The base node that the name hides if it gets another node, or none.
    pub(in crate::fs) fn hides(&self) -> Hides {
        match self {
            Found::Upper(_, hides) | Found::Nothing(hides) => hides.clone(),
            Found::Base(ino, _, node) => Some(node.fingerprint(*ino)),
        }
    }
}

/// Resolves many paths of a state. It keeps the directory of the last path, so the paths of one
/// directory cost one lookup each if they follow each other. Nothing may change meanwhile.
pub struct PathWalk<'a> {
    state: &'a State,
    last: Option<(TreePath, Option<OpenedDir>)>,
}

/// A directory of a state, and the base directory that it merges with, opened for lookups.
type OpenedDir = (Dir, Option<DirLookup>);

impl PathWalk<'_> {
    /// As [`State::resolve`].
    ///
    /// # Errors
    /// As [`State::resolve`].
    pub fn resolve(&mut self, path: &TreePath) -> FsResult<Found> {
        let Some((dir, name)) = path.split() else { return self.state.resolve(path) };
        if self.last.as_ref().is_none_or(|(last, _)| *last != dir) {
            let found = self.state.as_dir(&self.state.resolve(&dir)?);
            let opened = found.map(|(ino, lower)| {
                let opened = lower.as_ref().map(|lower| self.state.lower.base().lookup_in(lower));
                ((ino, lower), opened)
            });
            self.last = Some((dir, opened));
        }
        match &self.last {
            Some((_, Some(((ino, lower), opened)))) => {
                self.state.find_in(*ino, lower.as_ref(), &name, opened.as_ref())
            }
            _ => Ok(Found::Nothing(None)),
        }
    }
}

/// Names and directories.
impl State {
    /// The base path that a directory of the tree merges with; `None` for one of the tree alone.
    ///
    /// # Errors
    /// ENOTDIR, or ENOENT for a node that is not in the tree.
    pub fn lower_path(&self, dir: Ino) -> FsResult<Option<TreePath>> {
        match self.tree.node(dir).map(|node| &node.body) {
            Some(Body::Dir { base }) => Ok(base.clone()),
            Some(_) => Err(FsError::NotADirectory),
            None => Err(FsError::NotFound),
        }
    }

    /// Looks a name up in a directory that merges with `lower`.
    ///
    /// # Errors
    /// Those of the base.
    pub fn find(&self, dir: Ino, lower: Option<&TreePath>, name: &Name) -> FsResult<Found> {
        self.find_by(dir, lower, name, |path| self.lower.lookup(path))
    }

    /// As [`State::find`], through the opened base directory if there is one.
    ///
    /// # Errors
    /// As [`State::find`].
    pub fn find_in(
        &self,
        dir: Ino,
        lower: Option<&TreePath>,
        name: &Name,
        opened: Option<&DirLookup>,
    ) -> FsResult<Found> {
        match opened {
            Some(opened) => {
                self.find_by(dir, lower, name, |path| self.lower.lookup_in(opened, (path, name)))
            }
            None => self.find(dir, lower, name),
        }
    }

    /// As [`State::find`], by `lookup` where the base must be asked.
    ///
    /// # Errors
    /// As [`State::find`].
    fn find_by(
        &self,
        dir: Ino,
        lower: Option<&TreePath>,
        name: &Name,
        lookup: impl FnOnce(&TreePath) -> FsResult<Option<(Ino, LowerNode)>>,
    ) -> FsResult<Found> {
        match self.tree.dentry(dir, name) {
            Some(Dentry::Child { ino, hides }) => return Ok(Found::Upper(*ino, hides.clone())),
            Some(Dentry::Whiteout(print)) => return Ok(Found::Nothing(Some(Arc::clone(print)))),
            None => {}
        }
        let Some(path) = lower.map(|dir| dir.join(name)) else { return Ok(Found::Nothing(None)) };
        match lookup(&path)? {
            Some((ino, node)) if self.tree.node(ino).is_some() => match &node {
                // The base changed, and the host gave this node the inode number of a node that was
                // copied up before.
                LowerNode::Base(stat) if !self.may_be_link_of(ino, stat) => {
                    let ino = self.lower.renumber(stat, ino)?;
                    Ok(Found::Base(ino, path, node))
                }
                // The file was copied up through another of its hard links.
                LowerNode::Base(_) | LowerNode::Pre(..) => {
                    Ok(Found::Upper(ino, Some(node.fingerprint(ino))))
                }
            },
            Some((ino, node)) => Ok(Found::Base(ino, path, node)),
            None => Ok(Found::Nothing(None)),
        }
    }

    /// Whether a base node, found by a name that the tree does not have, can be a hard link of the
    /// copied-up node with the same number.
    fn may_be_link_of(&self, ino: Ino, stat: &BaseStat) -> bool {
        let copied_up = self.tree.node(ino);
        stat.kind != FileKind::Dir
            && stat.nlink > 1
            && copied_up.is_some_and(|node| node.kind() == stat.kind)
    }

    /// The node at a path. Symlinks are not followed.
    ///
    /// # Errors
    /// Those of the base.
    pub fn resolve(&self, path: &TreePath) -> FsResult<Found> {
        let (mut at, mut lower) = self.root();
        let mut found = if self.tree.node(Ino::ROOT).is_some() {
            Found::Upper(Ino::ROOT, None)
        } else {
            match self.lower.lookup(&TreePath::root())? {
                Some((ino, node)) => Found::Base(ino, TreePath::root(), node),
                None => return Err(self.lower.drift(&TreePath::root())),
            }
        };
        let mut names = path.names().peekable();
        while let Some(name) = names.next() {
            found = self.find(at, lower.as_ref(), &name)?;
            if names.peek().is_some() {
                match self.as_dir(&found) {
                    Some(dir) => (at, lower) = dir,
                    None => return Ok(Found::Nothing(None)),
                }
            }
        }
        Ok(found)
    }

    /// Prepares to resolve many paths.
    pub fn resolve_many(&self) -> PathWalk<'_> {
        PathWalk { state: self, last: None }
    }

    /// The root directory.
    pub fn root(&self) -> Dir {
        let lower = match self.tree.node(Ino::ROOT).map(|node| &node.body) {
            Some(Body::Dir { base }) => base.clone(),
            _ => Some(TreePath::root()),
        };
        (Ino::ROOT, lower)
    }

    /// The directory that was found; `None` for any other node.
    pub fn as_dir(&self, found: &Found) -> Option<Dir> {
        match found {
            Found::Upper(ino, _) => Some((*ino, self.lower_path(*ino).ok()?)),
            Found::Base(ino, path, node) => {
                (node.kind() == FileKind::Dir).then(|| (*ino, Some(path.clone())))
            }
            Found::Nothing(_) => None,
        }
    }

    /// The parent of a live directory; `None` for the root.
    ///
    /// # Errors
    /// ENOENT for a directory that is not in this state; those of the base.
    pub fn parent_of(&self, dir: Ino, lower: Option<&TreePath>) -> FsResult<Option<Dir>> {
        if dir == Ino::ROOT {
            return Ok(None);
        }
        if self.tree.node(dir).is_some() {
            let (parent, _) = self.tree.parent(dir).ok_or(FsError::NotFound)?;
            return Ok(Some((parent, self.lower_path(parent)?)));
        }
        let (above, _) = lower.and_then(TreePath::split).ok_or(FsError::NotFound)?;
        let (ino, _) = self.lower.lookup(&above)?.ok_or(FsError::NotFound)?;
        Ok(Some((ino, Some(above))))
    }

    /// The number of path components between the root and a live directory.
    ///
    /// # Errors
    /// As [`State::parent_of`].
    pub fn depth_of(&self, dir: Ino, lower: Option<&TreePath>) -> FsResult<usize> {
        let mut depth = 0;
        let mut at = (dir, lower.cloned());
        while let Some(parent) = self.parent_of(at.0, at.1.as_ref())? {
            depth += 1;
            at = parent;
        }
        Ok(depth)
    }

    /// The path of a directory in the merged tree.
    ///
    /// # Errors
    /// ENOENT for a directory that is not in this state; those of the base.
    pub fn dir_path(&self, dir: Ino, lower: Option<&TreePath>) -> FsResult<TreePath> {
        let (mut dir, mut lower, mut names) = (dir, lower.cloned(), Vec::new());
        let above = loop {
            if self.tree.node(dir).is_some() {
                break self.tree.path(dir).ok_or(FsError::NotFound)?;
            }
            let Some((above, name)) = lower.as_ref().and_then(TreePath::split) else {
                break TreePath::root();
            };
            (dir, _) = self.lower.lookup(&above)?.ok_or(FsError::NotFound)?;
            lower = Some(above);
            names.push(name);
        };
        Ok(names.iter().rev().fold(above, |path, name| path.join(name)))
    }

    /// The names that a directory shows, sorted.
    ///
    /// # Errors
    /// Those of the base.
    pub fn merged_names(&self, dir: Ino, lower: Option<&TreePath>) -> FsResult<Names> {
        Ok(self.merge_names(dir, lower.map(|path| self.lower.list(path)).transpose()?))
    }

    /// Merges the names of a directory in the tree with those that it has in the base.
    pub fn merge_names(&self, dir: Ino, in_base: Option<Names>) -> Names {
        let mut names = in_base.unwrap_or_default();
        for (name, dentry) in self.tree.dentries(dir) {
            match dentry {
                Dentry::Whiteout(_) => drop(names.remove(name)),
                Dentry::Child { ino, .. } => {
                    names.insert(name.clone(), (*ino, self.tree.node(*ino).map(|n| n.kind())));
                }
            }
        }
        names
    }

    /// The edits that copy up a base node and all directories above it; empty if the tree has the
    /// node already.
    ///
    /// # Errors
    /// [`FsError::Drift`] if the base changed above the node, even if it changed back since. So a
    /// copy-up never puts a name into a node that is not a directory or that merges with another
    /// base path, and never replaces a name of the tree. Otherwise those of the host.
    pub fn copy_up_edits(
        &self,
        ino: Ino,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<Vec<Edit>> {
        // Collect the nodes up to the first directory in the tree. Not by recursion: base
        // directories nest deeper than the stack.
        let (mut ino, mut path, mut node) = (ino, path.clone(), node.clone());
        let mut missing = Vec::new();
        while self.tree.node(ino).is_none() {
            let split = path.split();
            // Asked for at once with the lookup that follows.
            let record = self.lower.record(&path, &node);
            let name = split.as_ref().map(|(_, name)| name.clone());
            missing.push((ino, node, name, record));
            let Some((dir, name)) = split else { break };
            (ino, node) = self.lower.lookup(&dir)?.ok_or_else(|| self.lower.drift(&dir))?;
            let can_hold_name = match self.tree.node(ino).map(|copied_up| &copied_up.body) {
                None => node.kind() == FileKind::Dir,
                Some(Body::Dir { base }) => {
                    base.as_ref() == Some(&dir) && self.tree.dentry(ino, &name).is_none()
                }
                Some(_) => false,
            };
            if !can_hold_name {
                return Err(self.lower.drift(&dir));
            }
            path = dir;
        }
        let mut edits = Vec::with_capacity(3 * missing.len());
        let mut dir = ino;
        for (ino, node, name, record) in missing.into_iter().rev() {
            let (record, extents) = record?;
            edits.push(Edit::Put { ino, node: Box::new(record) });
            edits.extend(extents.into_iter().map(|(range, to)| Edit::Map {
                ino,
                range,
                to: Some(to),
            }));
            if let Some(name) = name {
                let to = Some(Dentry::Child { ino, hides: Some(node.fingerprint(ino)) });
                edits.push(Edit::Dentry { dir, name, to });
            }
            dir = ino;
        }
        Ok(edits)
    }
}

/// Hidden paths ([`Lower::hides`]).
impl State {
    /// Refuses to look into a directory that merges with a hidden base path.
    ///
    /// # Errors
    /// EACCES.
    pub fn check_dir(&self, lower: Option<&TreePath>) -> FsResult<()> {
        lower.map_or(Ok(()), |path| self.lower.check_not_hidden(path))
    }

    /// Whether the content of a node is hidden, or was written over hidden content.
    pub fn is_hidden(&self, found: &Found) -> bool {
        match found {
            Found::Base(_, path, _) => self.lower.hides(path),
            Found::Upper(ino, _) => self.tree.node(*ino).is_some_and(|node| self.hides_node(node)),
            Found::Nothing(_) => false,
        }
    }

    pub(crate) fn hides_node(&self, node: &Node) -> bool {
        match &node.body {
            Body::File { origin, .. } => {
                origin.as_ref().is_some_and(|origin| self.lower.hides(&origin.path))
            }
            Body::Dir { base } => base.as_ref().is_some_and(|path| self.lower.hides(path)),
            Body::Symlink { .. } | Body::Special => false,
        }
    }

    /// Whether a node is in a hidden directory, so that even its name is secret.
    pub fn is_in_hidden(&self, found: &Found) -> bool {
        if !self.lower.hides_any() {
            return false;
        }
        let mut above: Vec<Ino> = match found {
            Found::Base(_, path, _) => {
                return path.split().is_some_and(|(dir, _)| self.lower.hides(&dir));
            }
            Found::Upper(ino, _) => self.tree.links(*ino).map(|(dir, _)| dir).collect(),
            Found::Nothing(_) => return false,
        };
        while let Some(dir) = above.pop() {
            if self.tree.node(dir).is_some_and(|node| self.hides_node(node)) {
                return true;
            }
            above.extend(self.tree.links(dir).map(|(parent, _)| parent));
        }
        false
    }

    /// As [`State::resolve`], for a caller who may not look into hidden directories.
    ///
    /// # Errors
    /// EACCES for a path in a hidden directory; those of the base.
    pub fn resolve_visible(&self, path: &TreePath) -> FsResult<Found> {
        let mut above = path.split();
        while let Some((dir, _)) = above {
            if self.is_hidden(&self.resolve(&dir)?) {
                return Err(FsError::AccessDenied);
            }
            above = dir.split();
        }
        self.resolve(path)
    }
}

/// Nodes.
impl State {
    /// The type of a node; `None` for nothing.
    pub fn kind(&self, found: &Found) -> Option<FileKind> {
        match found {
            Found::Upper(ino, _) => self.tree.node(*ino).map(|node| node.kind()),
            Found::Base(_, _, node) => Some(node.kind()),
            Found::Nothing(_) => None,
        }
    }

    /// The type and the size in bytes of a node; `None` for nothing.
    pub fn kind_and_size(&self, found: &Found) -> Option<(FileKind, u64)> {
        match found {
            Found::Upper(ino, _) => self.tree.node(*ino).map(|node| (node.kind(), node.size())),
            Found::Base(ino, _, node) => Some((node.kind(), node.attr(*ino).size)),
            Found::Nothing(_) => None,
        }
    }

    /// The attributes that `stat` reports for a node; `None` for nothing.
    pub fn attr(&self, found: &Found) -> Option<Attr> {
        match found {
            Found::Upper(ino, _) => Attr::in_tree(&self.tree, *ino, *ino),
            Found::Base(ino, _, node) => Some(node.attr(*ino)),
            Found::Nothing(_) => None,
        }
    }

    /// The record of a node.
    ///
    /// # Errors
    /// As [`State::record`].
    pub fn node(&self, found: &Found) -> FsResult<Arc<Node>> {
        match found {
            Found::Upper(ino, _) => self.tree.node(*ino).cloned().ok_or(FsError::NotFound),
            Found::Base(..) | Found::Nothing(_) => self.record(found).map(|(node, _)| node),
        }
    }

    /// The record of a node, and where its bytes are.
    ///
    /// # Errors
    /// ENOENT for nothing; those of the base.
    pub fn record(&self, found: &Found) -> FsResult<(Arc<Node>, Extents)> {
        match found {
            Found::Upper(ino, _) => {
                let node = self.tree.node(*ino).cloned().ok_or(FsError::NotFound)?;
                Ok((node, extents_in(&self.tree, *ino)))
            }
            Found::Base(_, path, node) => {
                self.lower.record(path, node).map(|(node, extents)| (Arc::new(node), extents))
            }
            Found::Nothing(_) => Err(FsError::NotFound),
        }
    }
}

/// The extents of a file of a tree.
pub(in crate::fs) fn extents_in(tree: &Tree, ino: Ino) -> Extents {
    tree.extents(ino)
        .map(|(start, extent)| (ByteRange::at(start, extent.len), extent.source))
        .collect()
}

/// Content.
impl State {
    /// Where the bytes of a range of a file are, cut at its size. The caller holds a
    /// [`crate::store::ReadGuard`].
    ///
    /// # Errors
    /// EISDIR or EINVAL for a node without content; EACCES for hidden content; what the base
    /// answers.
    pub fn plan(&self, found: &Found, range: ByteRange) -> FsResult<Vec<HostExtent>> {
        match found {
            Found::Upper(ino, _) => self.plan_in(&self.tree, *ino, range, None),
            Found::Base(_, path, node) => self.lower.plan(path, node, range),
            Found::Nothing(_) => Err(FsError::NotFound),
        }
    }

    /// As [`State::plan`], for a node of `tree`; `scratch` is the file behind [`SCRATCH`].
    pub(in crate::fs) fn plan_in(
        &self,
        tree: &Tree,
        ino: Ino,
        range: ByteRange,
        scratch: Option<&Arc<File>>,
    ) -> FsResult<Vec<HostExtent>> {
        let node = tree.node(ino).ok_or(FsError::NotFound)?;
        require_file(node.kind())?;
        let Body::File { origin, .. } = &node.body else { return Err(FsError::Invalid) };
        // This also refuses a file that was written before it was hidden, because copy-up filled
        // its blocks with hidden bytes.
        origin.as_ref().map_or(Ok(()), |origin| self.lower.check_not_hidden(&origin.path))?;
        let mut found = FoundExtents::default();
        for segment in tree.segments(ino, range) {
            let len = segment.range.len();
            match segment.source {
                None => found.add(Ok([HostExtent::hole(len)])),
                Some(Source::Pool { layer, offset }) => match scratch {
                    Some(scratch) if layer == SCRATCH => {
                        let storage = Storage::File(Arc::clone(scratch), offset);
                        found.add(Ok([HostExtent::new(len, storage)]))
                    }
                    _ => found.add(HostExtent::in_pool(len, self.lower.store(), layer, offset)),
                },
                Some(Source::Base { offset }) => {
                    let origin = origin
                        .as_ref()
                        .ok_or(FsError::Damage("content in the base without an origin"))?;
                    found.add(self.lower.locate(origin, ByteRange::at(offset, len)))
                }
            }?;
        }
        found.all()
    }

    /// The whole content of a file.
    ///
    /// # Errors
    /// As [`State::plan`], and those of the host.
    pub fn read_all(&self, found: &Found) -> FsResult<Vec<u8>> {
        self.read_range(found, ByteRange { start: 0, end: u64::MAX })
    }

    /// A range of the content of a file, cut at its size.
    ///
    /// # Errors
    /// As [`State::read_all`].
    pub fn read_range(&self, found: &Found, range: ByteRange) -> FsResult<Vec<u8>> {
        let guard = self.lower.reading();
        let plan = ReadPlan::new(self.plan(found, range)?, Arc::clone(&self.lower), guard);
        Ok(plan.read(false)?.unwrap_or_default())
    }
}
