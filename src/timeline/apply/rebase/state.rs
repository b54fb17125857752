//! Computes what a state is over another epoch of the base.
//!
//! An apply wrote a sealed state into the base. So the base shows all of that state in its new
//! epoch without any tree, and an empty tree is the rebased form of the sealed state. From there,
//! [`RebasedState::advance`] follows the writes of programs: it copies up each changed node over
//! the new base, and gives it the record, the names and the content that it has now. The cost is
//! what was written since the seal, not what was applied.
//!
//! Always true of the two states:
//! * Every name stands for the same inode number in both.
//! * Every node has the same bytes and the same record in both, change and access times aside.
//!
//! If keeping this needs a scan of the whole base, `advance` fails with [`FsError::Stale`].

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{FsError, FsResult};
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::tree::{Body, Dentry, Edit, Hides, Misfit, Node, Source, Tree, TreeDiff};
use crate::types::{ByteRange, FileKind, Fingerprint, Ino, Name, TreePath};

/// A state, and the same tree over another epoch of the base.
pub(super) struct RebasedState {
    /// The state as programs see it.
    original: State,
    /// The same tree over the other epoch.
    pub(super) onto: State,
}

impl RebasedState {
    /// Takes two states that show the same tree over two epochs.
    pub(super) fn new(original: State, onto: State) -> RebasedState {
        RebasedState { original, onto }
    }

    /// Advances to `now`, a later state of the original epoch, unless it differs in more than
    /// `most` nodes, contents and names. Returns whether it advanced.
    ///
    /// # Errors
    /// [`FsError::Stale`] if it cannot be told what the later state is over the other epoch;
    /// [`FsError::Drift`] if another program changed the base; those of reading the base. Then
    /// nothing has changed.
    pub(super) fn advance(&mut self, now: &State, most: usize) -> FsResult<bool> {
        let diff = self.original.tree.diff(&now.tree);
        if diff.nodes.len() + diff.contents.len() + diff.names.len() > most {
            return Ok(false);
        }
        let mut step =
            Step { was: &self.original, now, onto: self.onto.clone(), copied_up: BTreeSet::new() };
        let paths = step.earlier_paths(&diff)?;
        for (ino, path) in &paths {
            step.copy_up(*ino, path)?;
        }
        let mut changed = step.copied_up.clone();
        changed.extend(diff.nodes.iter().chain(&diff.contents));
        for ino in &changed {
            step.put_node(*ino, paths.get(ino))?;
        }
        for (dir, name) in &diff.names {
            step.put_name(*dir, name)?;
        }
        // Some directories were copied up only for a node in them that is elsewhere now.
        for ino in changed {
            if now.tree.node(ino).is_none() && step.onto.tree.node(ino).is_some() {
                step.edit(&Edit::Remove { ino })?;
            }
        }
        *self = RebasedState { onto: step.onto, original: now.clone() };
        Ok(true)
    }
}

/// One advance from the state `was` to the state `now`.
struct Step<'a> {
    was: &'a State,
    now: &'a State,
    /// The rebased state, while the edits are applied to it.
    onto: State,
    /// Nodes that the step copied up in the rebased state.
    copied_up: BTreeSet<Ino>,
}

impl Step<'_> {
    fn edit(&mut self, edit: &Edit) -> FsResult<()> {
        self.onto.tree.apply(edit).map_err(|Misfit(what)| FsError::Damage(what))
    }

    /// The paths that the changed nodes had in the earlier state. A new node has none.
    fn earlier_paths(&self, diff: &TreeDiff) -> FsResult<BTreeMap<Ino, TreePath>> {
        let mut paths = BTreeMap::new();
        let mut note = |ino: Ino, path: TreePath| {
            if self.now.tree.node(ino).is_some() {
                paths.entry(ino).or_insert(path);
            }
        };
        for ino in diff.nodes.iter().chain(&diff.contents) {
            let both = self.was.tree.node(*ino).is_some() && self.now.tree.node(*ino).is_some();
            if both {
                // The tree may have no name of a file, if all its names are unchanged links in the
                // base.
                note(*ino, self.was.tree.path(*ino).ok_or(FsError::Stale)?);
            }
        }
        for (dir, name) in &diff.names {
            // A directory that was not in the tree is at the base path that it merges now. Without
            // such a path it is new.
            let lower = match self.was.tree.node(*dir) {
                Some(_) => self.was.lower_path(*dir)?,
                None => match self.now.tree.node(*dir).map(|node| &node.body) {
                    Some(Body::Dir { base: Some(path) }) => Some(path.clone()),
                    _ => continue,
                },
            };
            let path = self.was.dir_path(*dir, lower.as_ref())?;
            if let Some(ino) = self.was.find(*dir, lower.as_ref(), name)?.ino() {
                note(ino, path.join(name));
            }
            note(*dir, path);
        }
        for ino in diff.nodes.iter().chain(&diff.contents) {
            if !paths.contains_key(ino)
                && let Some(path) = self.path_before_copy_up(*ino)?
            {
                paths.insert(*ino, path);
            }
        }
        Ok(paths)
    }

    /// The path in the earlier state of a base node that was copied up since. If its directory was
    /// removed since as well, no name of the tree tells it.
    fn path_before_copy_up(&self, ino: Ino) -> FsResult<Option<TreePath>> {
        let is_new = self.was.tree.node(ino).is_none();
        let now = self.now.tree.node(ino).filter(|_| is_new).map(|node| &node.body);
        let in_base = match now {
            Some(Body::File { origin: Some(origin), .. }) => &origin.path,
            Some(Body::Dir { base: Some(path) }) => path,
            _ => return Ok(None),
        };
        let Some((above, name)) = in_base.split() else { return Ok(None) };
        let Some((dir, _)) = self.was.lower.lookup(&above)? else { return Ok(None) };
        let path = match self.was.dir_path(dir, Some(&above)) {
            Err(FsError::NotFound) => return Ok(None),
            dir => dir?.join(&name),
        };
        let is_there = self.was.resolve(&path)?.ino() == Some(ino);
        Ok(is_there.then_some(path))
    }

    /// Copies up a node in the rebased state, at the path that it had in the earlier state.
    fn copy_up(&mut self, ino: Ino, path: &TreePath) -> FsResult<()> {
        match self.onto.resolve(path)? {
            Found::Upper(found, _) if found == ino => Ok(()),
            Found::Base(found, path, node) if found == ino => {
                let origin = match self.was.tree.node(ino).map(|node| &node.body) {
                    Some(Body::File { origin: Some(origin), .. }) if origin.path == path => {
                        Some(origin.print)
                    }
                    _ => None,
                };
                self.check_unchanged(&path, Some(&node), || {
                    Some(origin.unwrap_or_else(|| *node.fingerprint(ino)))
                })?;
                for edit in self.onto.copy_up_edits(ino, &path, &node)? {
                    if let Edit::Put { ino, .. } = &edit {
                        self.copied_up.insert(*ino);
                    }
                    self.edit(&edit)?;
                }
                Ok(())
            }
            _ => Err(FsError::Stale),
        }
    }

    /// Gives a node of the rebased state the record and the content that it has now. `path` is
    /// where it was in the earlier state.
    fn put_node(&mut self, ino: Ino, path: Option<&TreePath>) -> FsResult<()> {
        let Some(node) = self.now.tree.node(ino) else { return Ok(()) };
        let mut node = Node::clone(node);
        let rebased = self.onto.tree.node(ino).map(|node| node.body.clone());
        match (&mut node.body, rebased) {
            (Body::File { origin, .. }, rebased @ (None | Some(Body::File { .. }))) => {
                let (before, now) = match rebased {
                    Some(Body::File { size, origin }) => (size, origin),
                    _ => (0, None),
                };
                *origin = now;
                return self.put_file(ino, node, path, before);
            }
            (Body::Dir { base }, Some(Body::Dir { base: now })) => *base = now,
            (Body::Dir { base: None }, None) => {}
            (Body::Symlink { .. }, Some(Body::Symlink { .. }) | None) => {}
            (Body::Special, Some(Body::Special) | None) => {}
            _ => return Err(FsError::Stale),
        }
        self.edit(&Edit::Put { ino, node: Box::new(node) })
    }

    /// The same for a file that has `size` bytes in the rebased state. Ranges that were not written
    /// since keep their source in the rebased state. Ranges that were written are in a pool, which
    /// is the same in all epochs.
    fn put_file(
        &mut self,
        ino: Ino,
        node: Node,
        path: Option<&TreePath>,
        size: u64,
    ) -> FsResult<()> {
        let mut was = Tree::new();
        if let Some(path) = path {
            let (node, extents) = self.was.record(&self.was.resolve(path)?)?;
            if node.size() != size {
                return Err(FsError::Stale);
            }
            was.put_whole(ino, node, extents).map_err(|Misfit(what)| FsError::Damage(what))?;
        }
        let end = node.size();
        if end < size {
            self.edit(&Edit::Resize { ino, size: end })?;
        }
        self.edit(&Edit::Put { ino, node: Box::new(node) })?;
        for now in self.now.tree.segments(ino, ByteRange::at(0, end)) {
            for was in was.segments(ino, now.range) {
                let to =
                    now.source.map(|source| source.advanced(was.range.start - now.range.start));
                if to != was.source {
                    self.map(ino, was.range, to)?;
                }
            }
            // The part behind the earlier end of the file.
            let grown = ByteRange {
                start: now.range.start.max(size.min(now.range.end)),
                end: now.range.end,
            };
            let to = now.source.map(|source| source.advanced(grown.start - now.range.start));
            if to.is_some() && !grown.is_empty() {
                self.map(ino, grown, to)?;
            }
        }
        Ok(())
    }

    fn map(&mut self, ino: Ino, range: ByteRange, to: Option<Source>) -> FsResult<()> {
        if to.is_some_and(Source::is_base) {
            return Err(FsError::Stale);
        }
        self.edit(&Edit::Map { ino, range, to })
    }

    /// Checks that a path of the base has what the applies since left there, or if none touched it,
    /// the `known` fingerprint. A change by another program is a conflict of the next apply. If it
    /// were copied up here, the tree would pass it for something that it has seen.
    ///
    /// # Errors
    /// [`FsError::Drift`] if another program changed it.
    fn check_unchanged(
        &self,
        path: &TreePath,
        found: Option<&LowerNode>,
        known: impl FnOnce() -> Option<Fingerprint>,
    ) -> FsResult<()> {
        let left = self.onto.lower.left_after(self.was.lower.epoch(), path);
        let is_same = match (left.unwrap_or_else(known), found) {
            (None, None) => true,
            (Some(expected), Some(LowerNode::Base(stat))) => {
                let found = stat.fingerprint();
                let same_dir = stat.kind == FileKind::Dir && expected.ino == found.ino;
                same_dir || self.onto.lower.is_as(&expected, &found)
            }
            // In the newest epoch nothing is read from pre-images.
            _ => false,
        };
        if is_same { Ok(()) } else { Err(FsError::Drift(path.clone())) }
    }

    /// Gives a name of the rebased state the dentry that it has now.
    fn put_name(&mut self, dir: Ino, name: &Name) -> FsResult<()> {
        if self.now.tree.node(dir).is_none() {
            return Ok(());
        }
        let path = self.onto.lower_path(dir)?.map(|dir| dir.join(name));
        let dentry = self.now.tree.dentry(dir, name);
        let mut hides: Hides = None;
        if let Some(path) = path {
            let found = self.onto.lower.lookup(&path)?;
            let is_same_path =
                self.now.lower_path(dir)?.map(|dir| dir.join(name)).as_ref() == Some(&path);
            let hidden = || match dentry {
                Some(Dentry::Child { hides, .. }) if is_same_path => hides.as_deref().copied(),
                Some(Dentry::Whiteout(print)) if is_same_path => Some(**print),
                // The tree has not looked at this base path.
                _ => None,
            };
            self.check_unchanged(&path, found.as_ref().map(|(_, node)| node), hidden)?;
            hides = found.map(|(ino, node)| node.fingerprint(ino));
        }
        let to = match dentry {
            Some(Dentry::Child { ino, .. }) => Some(Dentry::Child { ino: *ino, hides }),
            Some(Dentry::Whiteout(_)) => hides.map(Dentry::Whiteout),
            None => {
                let lower = self.now.lower_path(dir)?;
                // No operation of a program makes a base node visible again.
                if self.now.find(dir, lower.as_ref(), name)?.ino().is_some() {
                    return Err(FsError::Stale);
                }
                hides.map(Dentry::Whiteout)
            }
        };
        self.edit(&Edit::Dentry { dir, name: name.clone(), to })
    }
}
