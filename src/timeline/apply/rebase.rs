//! The same tree over two epochs of the base.
//!
//! An apply wrote a sealed state into the base, so the base as it is now shows all of that state without any tree: the two
//! are twins. What programs wrote since the seal is carried over by [`Twin::follow`]: the nodes at which the tree was changed are
//! covered anew over the present base, and get the records, names and content that they have. The cost is what was written
//! since, not what was applied.
//!
//! Always true of a twin: every name stands for the same number in both states, with the same record but for times of change
//! and access, and with the same bytes. Where that cannot be kept without reading the whole base, following fails with
//! [`FsError::Stale`], and the tree stays where it is.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{FsError, FsResult};
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::tree::{Body, Dentry, Edit, Hides, Misfit, Node, Source, Tree, TreeDiff};
use crate::types::{ByteRange, FileKind, Fingerprint, Ino, Name, TreePath};

/// A state, and the same tree over another epoch of the base.
pub(in crate::timeline) struct Twin {
    /// The state as programs see it.
    pub here: State,
    /// The same over the other epoch.
    pub there: State,
}

impl Twin {
    /// Goes on to a later state of the same epoch, which came of ours by what programs wrote, unless it differs in more than
    /// `most` nodes, contents and names. Says whether it did.
    ///
    /// # Errors
    /// [`FsError::Stale`] if the later state has no twin that can be told; [`FsError::Drift`] if somebody else changed the base;
    /// else what the host answers. Then nothing has changed.
    pub(in crate::timeline) fn follow(&mut self, now: &State, most: usize) -> FsResult<bool> {
        let diff = self.here.tree.diff(&now.tree);
        if diff.nodes.len() + diff.contents.len() + diff.names.len() > most {
            return Ok(false);
        }
        let mut carry =
            Carry { was: &self.here, now, there: self.there.clone(), copied_up: BTreeSet::new() };
        let places = carry.places(&diff)?;
        for (ino, place) in &places {
            carry.copy_up(*ino, place)?;
        }
        let mut changed = carry.copied_up.clone();
        changed.extend(diff.nodes.iter().chain(&diff.contents));
        for ino in &changed {
            carry.put(*ino, places.get(ino))?;
        }
        for (dir, name) in &diff.names {
            carry.name(*dir, name)?;
        }
        // What was covered only because something stood in it that stands elsewhere now.
        for ino in changed {
            if now.tree.node(ino).is_none() && carry.there.tree.node(ino).is_some() {
                carry.edit(&Edit::Remove { ino })?;
            }
        }
        *self = Twin { there: carry.there, here: now.clone() };
        Ok(true)
    }
}

struct Carry<'a> {
    was: &'a State,
    now: &'a State,
    there: State,
    /// What had to be covered over there.
    copied_up: BTreeSet<Ino>,
}

impl Carry<'_> {
    fn edit(&mut self, edit: &Edit) -> FsResult<()> {
        self.there.tree.apply(edit).map_err(|Misfit(what)| FsError::Damage(what))
    }

    /// Where the nodes that there are now, and at which something differs, were before; those that are new were nowhere.
    fn places(&self, diff: &TreeDiff) -> FsResult<BTreeMap<Ino, TreePath>> {
        let mut places = BTreeMap::new();
        let mut place = |ino: Ino, path: TreePath| {
            if self.now.tree.node(ino).is_some() {
                places.entry(ino).or_insert(path);
            }
        };
        for ino in diff.nodes.iter().chain(&diff.contents) {
            let both = self.was.tree.node(*ino).is_some() && self.now.tree.node(*ino).is_some();
            if both {
                // A file of which the tree has no name is known by other links in the base alone.
                place(*ino, self.was.tree.path(*ino).ok_or(FsError::Stale)?);
            }
        }
        for (dir, name) in &diff.names {
            // A directory that was not covered is at the path of the base that it covers now; one without such a path is new.
            let lower = match self.was.tree.node(*dir) {
                Some(_) => self.was.lower_path(*dir)?,
                None => match self.now.tree.node(*dir).map(|node| &node.body) {
                    Some(Body::Dir { base: Some(path) }) => Some(path.clone()),
                    _ => continue,
                },
            };
            let path = self.was.dir_path(*dir, lower.as_ref())?;
            if let Some(ino) = self.was.find(*dir, lower.as_ref(), name)?.ino() {
                place(ino, path.join(name));
            }
            place(*dir, path);
        }
        Ok(places)
    }

    /// Covers a node over there, where it is as it was here.
    fn copy_up(&mut self, ino: Ino, place: &TreePath) -> FsResult<()> {
        match self.there.resolve(place)? {
            Found::Upper(found, _) if found == ino => Ok(()),
            Found::Base(found, path, node) if found == ino => {
                let origin = match self.was.tree.node(ino).map(|node| &node.body) {
                    Some(Body::File { origin: Some(origin), .. }) if origin.path == path => {
                        Some(origin.print)
                    }
                    _ => None,
                };
                self.check_left(&path, Some(&node), || {
                    Some(origin.unwrap_or_else(|| *node.fingerprint(ino)))
                })?;
                for edit in self.there.copy_up_edits(ino, &path, &node)? {
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

    /// Gives a node over there the record and the content that it has now.
    fn put(&mut self, ino: Ino, place: Option<&TreePath>) -> FsResult<()> {
        let Some(node) = self.now.tree.node(ino) else { return Ok(()) };
        let mut node = Node::clone(node);
        let over_there = self.there.tree.node(ino).map(|node| node.body.clone());
        match (&mut node.body, over_there) {
            (Body::File { origin, .. }, over_there @ (None | Some(Body::File { .. }))) => {
                let (before, now) = match over_there {
                    Some(Body::File { size, origin }) => (size, origin),
                    _ => (0, None),
                };
                *origin = now;
                return self.put_file(ino, node, place, before);
            }
            (Body::Dir { base }, Some(Body::Dir { base: now })) => *base = now,
            (Body::Dir { base: None }, None) => {}
            (Body::Symlink { .. }, Some(Body::Symlink { .. }) | None) => {}
            (Body::Special, Some(Body::Special) | None) => {}
            _ => return Err(FsError::Stale),
        }
        self.edit(&Edit::Put { ino, node: Box::new(node) })
    }

    /// The same for a file of `size` bytes over there. What was not written since is where it was before, and has another place there,
    /// which it keeps; what was written is in a pool, and a pool is the same in all epochs.
    fn put_file(
        &mut self,
        ino: Ino,
        node: Node,
        place: Option<&TreePath>,
        size: u64,
    ) -> FsResult<()> {
        let mut was = Tree::new();
        if let Some(place) = place {
            let (node, extents) = self.was.record(&self.was.resolve(place)?)?;
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
            // Behind the end that it had.
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

    /// Holds what stands at a path of the base against what the applies since left there, or else against what is `known` to have been there:
    /// what somebody else did to it is a conflict of the next apply, and must not pass for what the tree has seen.
    fn check_left(
        &self,
        path: &TreePath,
        found: Option<&LowerNode>,
        known: impl FnOnce() -> Option<Fingerprint>,
    ) -> FsResult<()> {
        let left = self.there.lower.left_after(self.was.lower.epoch(), path);
        let is_same = match (left.unwrap_or_else(known), found) {
            (None, None) => true,
            (Some(expected), Some(LowerNode::Base(stat))) => {
                let found = stat.fingerprint();
                let same_dir = stat.kind == FileKind::Dir && expected.ino == found.ino;
                same_dir || self.there.lower.is_as(&expected, &found)
            }
            // Over the newest epoch nothing is seen through pre-images.
            _ => false,
        };
        if is_same { Ok(()) } else { Err(FsError::Drift(path.clone())) }
    }

    /// Lets a name over there stand for what it stands for now.
    fn name(&mut self, dir: Ino, name: &Name) -> FsResult<()> {
        if self.now.tree.node(dir).is_none() {
            return Ok(());
        }
        let path = self.there.lower_path(dir)?.map(|dir| dir.join(name));
        let dentry = self.now.tree.dentry(dir, name);
        let mut hides: Hides = None;
        if let Some(path) = path {
            let found = self.there.lower.lookup(&path)?;
            let is_same_path =
                self.now.lower_path(dir)?.map(|dir| dir.join(name)).as_ref() == Some(&path);
            let hidden = || match dentry {
                Some(Dentry::Child { hides, .. }) if is_same_path => hides.as_deref().copied(),
                Some(Dentry::Whiteout(print)) if is_same_path => Some(**print),
                // Nobody has seen anything there.
                _ => None,
            };
            self.check_left(&path, found.as_ref().map(|(_, node)| node), hidden)?;
            hides = found.map(|(ino, node)| node.fingerprint(ino));
        }
        let to = match dentry {
            Some(Dentry::Child { ino, .. }) => Some(Dentry::Child { ino: *ino, hides }),
            Some(Dentry::Whiteout(_)) => hides.map(Dentry::Whiteout),
            None => {
                let lower = self.now.lower_path(dir)?;
                // Nothing that a program does lets the base show through again.
                if self.now.find(dir, lower.as_ref(), name)?.ino().is_some() {
                    return Err(FsError::Stale);
                }
                hides.map(Dentry::Whiteout)
            }
        };
        self.edit(&Edit::Dentry { dir, name: name.clone(), to })
    }
}
