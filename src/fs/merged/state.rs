//! A state of the whole filesystem: the tree, and the base below it in one epoch. A value: a checkpoint, a restore and a
//! diff are about states, with or without a kernel that looks at one of them.

use std::sync::Arc;

use crate::base::{BaseStat, DirLookup};
use crate::error::{FsError, FsResult};
use crate::fs::merged::extent_reader::{Piece, Stored};
use crate::fs::merged::lower;
use crate::fs::merged::lower::{Lower, LowerNode, Names};
use crate::fs::{Attr, Extents, lower_kind};
use crate::store::record::{Body, Dentry, Edit, Hides, Node, Source};
use crate::tree::Tree;
use crate::types::{ByteRange, FileKind, Ino, Name, TreePath};

/// The tree over the base.
#[derive(Clone)]
pub struct State {
    /// What differs from the base.
    pub tree: Tree,
    /// The base.
    pub lower: Arc<Lower>,
}

/// What a name stands for.
#[derive(Clone, Debug)]
pub enum Found {
    /// A node of the tree, and what of the base its name hides.
    Upper(Ino, Hides),
    /// A node of the base that is not covered.
    Base(Ino, TreePath, LowerNode),
    /// Nothing; of the base it hides what a whiteout stands for.
    Nothing(Hides),
}

impl Found {
    /// The number of the node, if there is one.
    pub fn ino(&self) -> Option<Ino> {
        match self {
            Found::Upper(ino, _) | Found::Base(ino, ..) => Some(*ino),
            Found::Nothing(_) => None,
        }
    }
}

impl State {
    /// What a directory of the tree covers of the base.
    pub fn lower_path(&self, dir: Ino) -> FsResult<Option<TreePath>> {
        match self.tree.node(dir).map(|n| &n.body) {
            Some(Body::Dir { base }) => Ok(base.clone()),
            Some(_) => Err(FsError::NotADirectory),
            None => Err(FsError::NotFound),
        }
    }

    /// What `name` stands for in a directory.
    pub fn find(&self, dir: Ino, lower: Option<&TreePath>, name: &Name) -> FsResult<Found> {
        self.find_by(dir, lower, name, |path| self.lower.lookup(path))
    }

    /// The same; `near` is the directory of the base, if it was looked at for this.
    pub fn find_near(
        &self,
        dir: Ino,
        lower: Option<&TreePath>,
        name: &Name,
        near: Option<&DirLookup<'_>>,
    ) -> FsResult<Found> {
        match near {
            Some(near) => {
                self.find_by(dir, lower, name, |path| self.lower.lookup_near(near, (path, name)))
            }
            None => self.find(dir, lower, name),
        }
    }

    /// The same, where `lookup` says what is at a path of the base.
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
                // Somebody changed the base, and the host gave the number of a covered node to this one.
                LowerNode::Base(stat) if !self.may_be_link_of(ino, stat) => {
                    let ino = self.lower.renumber(stat)?;
                    Ok(Found::Base(ino, path, node))
                }
                // Another link of the same file was covered before.
                LowerNode::Base(_) | LowerNode::Pre(..) => {
                    Ok(Found::Upper(ino, Some(node.print(ino))))
                }
            },
            Some((ino, node)) => Ok(Found::Base(ino, path, node)),
            None => Ok(Found::Nothing(None)),
        }
    }

    /// Whether a node of the base under a name that is not in the tree can be the covered node with its number.
    fn may_be_link_of(&self, ino: Ino, stat: &BaseStat) -> bool {
        let copied_up = self.tree.node(ino);
        stat.kind != FileKind::Dir
            && stat.nlink > 1
            && copied_up.is_some_and(|node| node.kind() == stat.kind)
    }

    /// The path of a directory in the merged tree.
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

    /// The edits that cover a node which was found at a path of the base, and the directories above it; none if it is covered.
    ///
    /// # Errors
    /// [`FsError::Drift`] if somebody changed the base on the way there, also to a link and back: nothing stands in a node that is no
    /// directory, or covers another one, and no name of the tree is taken away. Else what the host answers.
    pub fn copy_up_edits(
        &self,
        ino: Ino,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<Vec<Edit>> {
        // From the node up to what is covered already: base directories nest deeper than a stack.
        let (mut ino, mut path, mut node) = (ino, path.clone(), node.clone());
        let mut chain = Vec::new();
        while self.tree.node(ino).is_none() {
            let above = path.split();
            chain.push((ino, path, node, above.as_ref().map(|(_, name)| name.clone())));
            let Some((dir, name)) = above else { break };
            (ino, node) = self.lower.lookup(&dir)?.ok_or_else(|| self.lower.drift(&dir))?;
            let is_there = match self.tree.node(ino).map(|copied_up| &copied_up.body) {
                None => lower_kind(&node) == FileKind::Dir,
                Some(Body::Dir { base }) => {
                    base.as_ref() == Some(&dir) && self.tree.dentry(ino, &name).is_none()
                }
                Some(_) => false,
            };
            if !is_there {
                return Err(self.lower.drift(&dir));
            }
            path = dir;
        }
        let mut edits = Vec::with_capacity(3 * chain.len());
        let mut dir = ino;
        for (ino, path, node, name) in chain.into_iter().rev() {
            let (record, extents) = self.lower.record(&path, &node)?;
            edits.push(Edit::Put { ino, node: Box::new(record) });
            edits.extend(extents.into_iter().map(|(range, to)| Edit::Map {
                ino,
                range,
                to: Some(to),
            }));
            if let Some(name) = name {
                let to = Some(Dentry::Child { ino, hides: Some(node.print(ino)) });
                edits.push(Edit::Dentry { dir, name, to });
            }
            dir = ino;
        }
        Ok(edits)
    }

    /// Names of a directory of the merged tree: all that is seen, sorted.
    ///
    /// # Errors
    /// What the base answers.
    pub fn merged_names(&self, dir: Ino, lower: Option<&TreePath>) -> FsResult<Names> {
        Ok(self.merged_over(dir, lower.map(|path| self.lower.list(path)).transpose()?))
    }

    /// The same of a directory of which the names in the base are known.
    pub fn merged_over(&self, dir: Ino, in_base: Option<Names>) -> Names {
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

    /// The directory above a live directory; none above the root.
    pub fn parent_of(
        &self,
        dir: Ino,
        lower: Option<&TreePath>,
    ) -> FsResult<Option<(Ino, Option<TreePath>)>> {
        if dir == Ino::ROOT {
            return Ok(None);
        }
        if self.tree.node(dir).is_some() {
            let (up, _) = self.tree.parent(dir).ok_or(FsError::NotFound)?;
            return Ok(Some((up, self.lower_path(up)?)));
        }
        let (above, _) = lower.and_then(TreePath::split).ok_or(FsError::NotFound)?;
        let (ino, _) = self.lower.lookup(&above)?.ok_or(FsError::NotFound)?;
        Ok(Some((ino, Some(above))))
    }

    /// How many names lead from the root to a live directory.
    pub fn depth_of(&self, dir: Ino, lower: Option<&TreePath>) -> FsResult<usize> {
        let mut depth = 0;
        let mut at = (dir, lower.cloned());
        while let Some(up) = self.parent_of(at.0, at.1.as_ref())? {
            depth += 1;
            at = up;
        }
        Ok(depth)
    }

    /// Lets a directory that covers this of the base be looked into.
    ///
    /// # Errors
    /// EACCES for what is hidden ([`Lower::hides`]).
    pub fn check_dir(&self, lower: Option<&TreePath>) -> FsResult<()> {
        lower.map_or(Ok(()), |path| self.lower.check_not_hidden(path))
    }

    /// Whether the content of what was found is hidden, or was written over what is.
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

    /// Whether what was found stands in a directory that is hidden, so that not even its name is told.
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
            above.extend(self.tree.links(dir).map(|(up, _)| up));
        }
        false
    }

    /// What a path stands for, for somebody who may not look into what is hidden; links are not followed.
    ///
    /// # Errors
    /// EACCES for what is in a hidden directory, or what the base answers.
    pub fn resolve_told(&self, path: &TreePath) -> FsResult<Found> {
        let mut above = path.split();
        while let Some((dir, _)) = above {
            if self.is_hidden(&self.resolve(&dir)?) {
                return Err(FsError::AccessDenied);
            }
            above = dir.split();
        }
        self.resolve(path)
    }

    /// What a path stands for; links are not followed.
    ///
    /// # Errors
    /// What the base answers.
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

    /// The root directory and what it covers.
    pub fn root(&self) -> (Ino, Option<TreePath>) {
        let lower = match self.tree.node(Ino::ROOT).map(|n| &n.body) {
            Some(Body::Dir { base }) => base.clone(),
            _ => Some(TreePath::root()),
        };
        (Ino::ROOT, lower)
    }

    /// The directory that was found and what it covers; none for anything else.
    pub fn as_dir(&self, found: &Found) -> Option<(Ino, Option<TreePath>)> {
        match found {
            Found::Upper(ino, _) => Some((*ino, self.lower_path(*ino).ok()?)),
            Found::Base(ino, path, node) => {
                (lower_kind(node) == FileKind::Dir).then(|| (*ino, Some(path.clone())))
            }
            Found::Nothing(_) => None,
        }
    }

    /// What kind of node was found; none for nothing.
    pub fn kind(&self, found: &Found) -> Option<FileKind> {
        match found {
            Found::Upper(ino, _) => self.tree.node(*ino).map(|node| node.kind()),
            Found::Base(_, _, node) => Some(lower_kind(node)),
            Found::Nothing(_) => None,
        }
    }

    /// The same, and the size.
    pub fn kind_and_size(&self, found: &Found) -> Option<(FileKind, u64)> {
        match found {
            Found::Upper(ino, _) => self.tree.node(*ino).map(|node| (node.kind(), node.size())),
            Found::Base(ino, _, node) => Some((lower_kind(node), lower_attr(*ino, node).size)),
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

    /// What `stat` shows of a node of the tree or the base; none for nothing.
    pub fn attr(&self, found: &Found) -> Option<Attr> {
        match found {
            Found::Upper(ino, _) => attr_in(&self.tree, *ino, *ino),
            Found::Base(ino, _, node) => Some(lower_attr(*ino, node)),
            Found::Nothing(_) => None,
        }
    }

    /// The record of a node, and where its bytes are.
    ///
    /// # Errors
    /// ENOENT for nothing, or what the base answers.
    pub fn record(&self, found: &Found) -> FsResult<(Arc<Node>, Extents)> {
        match found {
            Found::Upper(ino, _) => {
                let node = self.tree.node(*ino).cloned().ok_or(FsError::NotFound)?;
                let extents = self
                    .tree
                    .extents(*ino)
                    .map(|(s, e)| (ByteRange::at(s, e.len), e.source))
                    .collect();
                Ok((node, extents))
            }
            Found::Base(_, path, node) => {
                self.lower.record(path, node).map(|(node, extents)| (Arc::new(node), extents))
            }
            Found::Nothing(_) => Err(FsError::NotFound),
        }
    }

    /// Where the bytes of a range of a file are, cut at its size. Take a [`crate::store::ReadGuard`] before.
    ///
    /// # Errors
    /// EISDIR, EINVAL for what has no content, or what the base answers.
    pub fn plan(&self, found: &Found, range: ByteRange) -> FsResult<Vec<Piece>> {
        match found {
            Found::Upper(ino, _) => self.plan_in(&self.tree, *ino, range, None),
            Found::Base(_, path, node) => self.plan_lower(path, node, range),
            Found::Nothing(_) => Err(FsError::NotFound),
        }
    }

    /// The same for a node of the base.
    pub(crate) fn plan_lower(
        &self,
        path: &TreePath,
        node: &LowerNode,
        range: ByteRange,
    ) -> FsResult<Vec<Piece>> {
        check_file(lower_kind(node))?;
        self.lower.check_not_hidden(path)?;
        match node {
            LowerNode::Base(stat) => {
                let range = crate::tree::within(range, stat.size);
                if range.is_empty() {
                    return Ok(Vec::new());
                }
                let file = self.lower.open(path, stat)?;
                let piece = Piece::of_base(range.len(), file, range.start, path);
                Ok(vec![piece.looked_at(&stat.fingerprint())])
            }
            LowerNode::Pre(pre, epoch) => {
                self.lower.locate_pre(pre, crate::tree::within(range, pre.node.size()), *epoch)
            }
        }
    }

    /// The same for a file of `tree`; `scratch` is the file that stands for layer 0.
    pub(crate) fn plan_in(
        &self,
        tree: &Tree,
        ino: Ino,
        range: ByteRange,
        scratch: Option<&Arc<std::fs::File>>,
    ) -> FsResult<Vec<Piece>> {
        let node = tree.node(ino).ok_or(FsError::NotFound)?;
        check_file(node.kind())?;
        let Body::File { origin, .. } = &node.body else { return Err(FsError::Invalid) };
        // Also what was written into a hidden file before it was hidden: blocks of it are filled from below.
        origin.as_ref().map_or(Ok(()), |origin| self.lower.check_not_hidden(&origin.path))?;
        let mut pieces = Vec::new();
        for segment in tree.segments(ino, range) {
            let len = segment.range.len();
            match segment.source {
                None => pieces.push(Piece::zeros(len)),
                Some(Source::Pool { layer, offset }) => match scratch {
                    Some(scratch) if layer == crate::fs::SCRATCH => {
                        pieces.push(Piece::new(len, Stored::File(Arc::clone(scratch), offset)));
                    }
                    _ => pieces.extend(Piece::of_pool(len, self.lower.store(), layer, offset)?),
                },
                Some(Source::Base { offset }) => {
                    let origin = origin
                        .as_ref()
                        .ok_or(FsError::Damage("content in the base without an origin"))?;
                    pieces.extend(self.lower.locate(origin, ByteRange::at(offset, len))?);
                }
            }
        }
        Ok(pieces)
    }

    /// The whole content of a file.
    ///
    /// # Errors
    /// As [`State::plan`] and what the host answers.
    pub fn read_all(&self, found: &Found) -> FsResult<Vec<u8>> {
        self.read_range(found, ByteRange { start: 0, end: u64::MAX })
    }

    /// A range of the content of a file, cut at its size.
    ///
    /// # Errors
    /// As [`State::read_all`].
    pub fn read_range(&self, found: &Found, range: ByteRange) -> FsResult<Vec<u8>> {
        let reading = self.lower.reading();
        let pieces = self.plan(found, range)?;
        let plan = crate::fs::ReadPlan::new(pieces, Arc::clone(&self.lower), reading);
        Ok(plan.read(false)?.unwrap_or_default())
    }
}

fn check_file(kind: FileKind) -> FsResult<()> {
    match kind {
        FileKind::File => Ok(()),
        FileKind::Dir => Err(FsError::IsADirectory),
        FileKind::Symlink
        | FileKind::Fifo
        | FileKind::Socket
        | FileKind::Char
        | FileKind::Block => Err(FsError::Invalid),
    }
}

/// What `stat` shows of the node `key` of a tree; `ino` is the number to show.
pub(crate) fn attr_in(tree: &Tree, key: Ino, ino: Ino) -> Option<Attr> {
    let node = tree.node(key)?;
    let blocks = match node.body {
        Body::File { .. } => tree.extents(key).map(|(_, e)| e.len.div_ceil(4096) * 8).sum(),
        Body::Dir { .. } => 8,
        Body::Symlink { .. } | Body::Special => 0,
    };
    Some(Attr { ino, kind: node.kind(), meta: node.meta, size: node.size(), blocks })
}

/// What `stat` shows of a node of the base.
pub(crate) fn lower_attr(ino: Ino, node: &LowerNode) -> Attr {
    let kind = lower_kind(node);
    let (meta, size, blocks) = match node {
        LowerNode::Base(stat) => (lower::meta_of(stat), stat.size, stat.blocks),
        LowerNode::Pre(pre, _) => {
            let blocks = pre.extents.iter().map(|(r, _)| r.len().div_ceil(4096) * 8).sum();
            (pre.node.meta, pre.node.size(), blocks)
        }
    };
    // The size of a directory says nothing about it and differs between filesystems: all of ours are alike.
    if kind == FileKind::Dir {
        return Attr { ino, kind, meta, size: 4096, blocks: 8 };
    }
    Attr { ino, kind, meta, size, blocks }
}
