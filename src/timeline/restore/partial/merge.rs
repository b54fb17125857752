//! Merges some paths of another state into the present tree.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::{Found, State};
use crate::sys::clock;
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};
use crate::timeline::restore::base_paths::BasePaths;
use crate::timeline::restore::copies::Copies;
use crate::timeline::restore::epochs::EpochDiff;
use crate::tree::{Body, Dentry, Edit, Hides, Meta, Misfit, Node};
use crate::types::{FileKind, Ino, Name, TreePath};

/// Returns inode numbers that no node has.
pub(super) type FreshNumbers<'a> = &'a mut dyn FnMut() -> FsResult<Ino>;

/// Computes the edits that make `now` equal to `then` at the paths, and the state after them.
///
/// # Errors
/// ENOTDIR if a directory that leads to a path is something else now. ESTALE if `copies` lacks
/// content or `base_paths` lacks an inode, because the tree changed since they were made.
pub(super) fn merge(
    now: &State,
    then: &State,
    paths: &[TreePath],
    (copies, base_paths): (&Copies, &BasePaths),
    fresh: FreshNumbers<'_>,
) -> FsResult<(Vec<Edit>, State)> {
    let paths_of = |state: &State, wanted: &HashSet<Ino>| base_paths.paths_of(state, wanted);
    let changes = diff::changes_by(now, then, paths, &paths_of)?;
    let epochs = EpochDiff::between(now, then);
    base_paths.paths_of(now, &epochs.without_known_path(now, then, &changes))?;
    let mut merge = Merge {
        now,
        then,
        paths,
        copies,
        base_paths,
        epochs,
        state: now.clone(),
        edits: Vec::new(),
        placed: HashMap::new(),
        joined: HashSet::new(),
        changed_dirs: BTreeMap::new(),
    };
    for change in changes.iter().rev() {
        if matches!(change.what, What::Deleted | What::Type) {
            merge.remove(change)?;
        }
    }
    for change in &changes {
        merge.restore(change, fresh)?;
    }
    merge.finish_dirs(&changes)?;
    Ok((merge.edits, merge.state))
}

/// A merge of some paths of the state `then` into the state `now`.
pub(super) struct Merge<'a> {
    pub(super) now: &'a State,
    pub(super) then: &'a State,
    paths: &'a [TreePath],
    copies: &'a Copies,
    pub(super) base_paths: &'a BasePaths,
    pub(super) epochs: EpochDiff,
    /// The present state with the edits so far.
    pub(super) state: State,
    edits: Vec<Edit>,
    /// The inode number that the restored names of each file get.
    pub(super) placed: HashMap<Ino, Ino>,
    /// Files that become hard links of a name outside of the paths, and keep its content.
    pub(super) joined: HashSet<Ino>,
    /// Directories in which names changed, and by how much their number of subdirectories changed.
    pub(super) changed_dirs: BTreeMap<TreePath, i32>,
}

impl Merge<'_> {
    pub(super) fn is_inside(&self, path: &TreePath) -> bool {
        self.paths.iter().any(|p| path.starts_with(p))
    }

    pub(super) fn edit(&mut self, edit: Edit) -> FsResult<()> {
        self.state.tree.apply(&edit).map_err(|Misfit(what)| FsError::Damage(what))?;
        self.edits.push(edit);
        Ok(())
    }

    /// Copies up a node of the base, with the directories above it.
    pub(super) fn copy_up(&mut self, path: &TreePath) -> FsResult<Ino> {
        let (ino, node) =
            self.state.lower.lookup(path)?.ok_or_else(|| self.state.lower.drift(path))?;
        for edit in self.state.copy_up_edits(ino, path, &node)? {
            self.edit(edit)?;
        }
        Ok(ino)
    }

    /// The directory that holds a path, after it is copied up; its base path; and the name in it.
    pub(super) fn dir_of(&mut self, path: &TreePath) -> FsResult<(Ino, Option<TreePath>, Name)> {
        let (above, name) = path.split().ok_or(FsError::NotPermitted)?;
        let found = self.state.resolve(&above)?;
        let (ino, lower) = self.state.as_dir(&found).ok_or(FsError::NotADirectory)?;
        if let Found::Base(_, path, _) = &found {
            self.copy_up(path)?;
        }
        Ok((ino, lower, name))
    }

    /// Notes that a name of the directory above `path` changed.
    pub(super) fn touch(&mut self, path: &TreePath, subdirs: i32) {
        if let Some((above, _)) = path.split() {
            *self.changed_dirs.entry(above).or_default() += subdirs;
        }
    }

    /// Removes what a change finds at its path, if the path is to be restored.
    fn remove(&mut self, change: &PathChange) -> FsResult<()> {
        match self.then.attr(&change.new).map(|attr| attr.kind) {
            _ if self.is_inside(&change.path) => self.remove_name(&change.path),
            // A directory that leads to a restored path must be one in the present tree as well.
            Some(FileKind::Dir) => Err(FsError::NotADirectory),
            // Only the present tree has a directory here. The nodes below it have their own
            // changes.
            _ => Ok(()),
        }
    }

    /// Removes a name, and its node if that was the last name.
    pub(super) fn remove_name(&mut self, path: &TreePath) -> FsResult<()> {
        let (dir, lower, name) = self.dir_of(path)?;
        let mut found = self.state.find(dir, lower.as_ref(), &name)?;
        let attr = self.state.attr(&found).ok_or(FsError::NotFound)?;
        let is_dir = attr.kind == FileKind::Dir;
        if let Found::Base(_, base, _) = &found
            && !is_dir
            && attr.meta.nlink > 1
        {
            // The link count of the names that stay must be right, so it has to be in the tree.
            let base = base.clone();
            self.copy_up(&base)?;
            found = self.state.find(dir, lower.as_ref(), &name)?;
        }
        let remains = match &found {
            Found::Upper(_, hides) | Found::Nothing(hides) => hides.clone(),
            Found::Base(ino, _, node) => Some(node.fingerprint(*ino)),
        };
        self.edit(Edit::Dentry { dir, name, to: remains.map(Dentry::Whiteout) })?;
        self.touch(path, -i32::from(is_dir));
        let Found::Upper(ino, _) = found else { return Ok(()) };
        if is_dir || attr.meta.nlink <= 1 {
            return self.edit(Edit::Remove { ino });
        }
        let meta = Meta { nlink: attr.meta.nlink - 1, ctime: clock::now(), ..attr.meta };
        self.edit(Edit::Meta { ino, meta })
    }

    /// Puts the node that a change has in the other state at its path.
    pub(super) fn restore(&mut self, change: &PathChange, fresh: FreshNumbers<'_>) -> FsResult<()> {
        let Some(attr) = self.then.attr(&change.new) else { return Ok(()) };
        if attr.kind == FileKind::Dir {
            return self.restore_dir(change, fresh);
        }
        if !self.is_inside(&change.path) {
            return Ok(());
        }
        let wanted = change.new.ino().ok_or(FsError::NotFound)?;
        let ino = self.node_for(change, wanted, fresh)?;
        let shown = self.state.resolve(&change.path)?;
        if shown.ino() == Some(ino) {
            return self.put_file(change, ino, None);
        }
        if shown.ino().is_some() {
            self.remove_name(&change.path)?;
        }
        let (dir, lower, name) = self.dir_of(&change.path)?;
        self.touch(&change.path, 0);
        if ino == wanted
            && !self.joined.contains(&ino)
            && self.is_visible_unhidden(&change.new, lower.as_ref(), &name, attr.meta.nlink)
        {
            return self.edit(Edit::Dentry { dir, name, to: None });
        }
        self.copy_up_shown(&change.new, ino)?;
        let hides = self.hidden(dir, lower.as_ref(), &name)?;
        let links = self.state.tree.node(ino).map_or(0, |node| node.meta.nlink);
        self.put_file(change, ino, Some(links + 1))?;
        self.edit(Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, hides }) })
    }

    /// The fingerprint of the base node that a dentry of this name hides.
    pub(super) fn hidden(
        &self,
        dir: Ino,
        lower: Option<&TreePath>,
        name: &Name,
    ) -> FsResult<Hides> {
        match self.state.tree.dentry(dir, name) {
            Some(Dentry::Child { hides, .. }) => return Ok(hides.clone()),
            Some(Dentry::Whiteout(print)) => return Ok(Some(Arc::clone(print))),
            None => {}
        }
        // Not by a lookup in the state, which would number the node anew if its own number is used.
        let Some(path) = lower.map(|dir| dir.join(name)) else { return Ok(None) };
        Ok(self.state.lower.lookup(&path)?.map(|(ino, node)| node.fingerprint(ino)))
    }

    /// Whether removing what hides a name makes exactly this node visible again. Never for a
    /// directory: the nodes below it may be elsewhere now, or an apply may have added names.
    pub(super) fn is_visible_unhidden(
        &self,
        found: &Found,
        lower: Option<&TreePath>,
        name: &Name,
        nlink: u32,
    ) -> bool {
        let Found::Base(ino, path, node) = found else { return false };
        node.kind() != FileKind::Dir
            && nlink == 1
            && lower.is_some_and(|dir| dir.join(name) == *path)
            && self.state.tree.node(*ino).is_none()
            && self.epochs.is_same(path)
    }

    /// Gives a node the record and the content that the other state has at a path. The link count
    /// is `links`, or else that of the present node.
    fn put_file(&mut self, change: &PathChange, ino: Ino, links: Option<u32>) -> FsResult<()> {
        if self.joined.contains(&ino) {
            let Some(node) = self.state.tree.node(ino) else {
                return Err(FsError::Damage("a link outside of a restore is not in the tree"));
            };
            let meta =
                Meta { nlink: links.unwrap_or(node.meta.nlink), ctime: clock::now(), ..node.meta };
            return self.edit(Edit::Meta { ino, meta });
        }
        let shown = self.state.resolve(&change.path)?;
        let nlink = match links {
            Some(links) => links,
            None => self.state.attr(&shown).map_or(1, |attr| attr.meta.nlink),
        };
        if links.is_none()
            && let Found::Base(_, path, _) = &shown
        {
            let path = path.clone();
            self.copy_up(&path)?;
        }
        let (node, extents) = self.then.record(&change.new)?;
        let mut node = Node::clone(&node);
        node.meta.nlink = nlink;
        let extents = if self.epochs.needs_copy(self.then, &change.new)?.is_some() {
            if let Body::File { origin, .. } = &mut node.body {
                *origin = None;
            }
            self.copies.at(&change.path)?
        } else {
            extents
        };
        if matches!(self.state.tree.node(ino).map(|n| &n.body), Some(Body::File { .. })) {
            self.edit(Edit::Resize { ino, size: 0 })?;
        }
        self.edit(Edit::Put { ino, node: Box::new(node) })?;
        for (range, source) in extents {
            self.edit(Edit::Map { ino, range, to: Some(source) })?;
        }
        Ok(())
    }
}
