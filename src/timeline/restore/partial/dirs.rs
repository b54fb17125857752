//! Restores directories, and sets the attributes of those in which names changed.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::merge::{FreshNumbers, Merge};
use crate::error::{FsError, FsResult};
use crate::fs::Found;
use crate::sys::clock;
use crate::timeline::diff::PathChange;
use crate::tree::{Body, Dentry, Edit, Node};
use crate::types::{Ino, TreePath};

impl Merge<'_> {
    /// Makes a directory, if there is none. The nodes in it have their own changes.
    pub(super) fn restore_dir(
        &mut self,
        change: &PathChange,
        fresh: FreshNumbers<'_>,
    ) -> FsResult<()> {
        let shown = self.state.resolve(&change.path)?;
        if shown.ino().is_some() {
            self.changed_dirs.entry(change.path.clone()).or_default();
            return Ok(());
        }
        let wanted = change.new.ino().ok_or(FsError::NotFound)?;
        let (dir, lower, name) = self.dir_of(&change.path)?;
        let is_free = self.state.tree.node(wanted).is_none()
            && self.paths_outside(&change.new, wanted)?.is_empty();
        let ino = if is_free { wanted } else { fresh()? };
        self.touch(&change.path, 1);
        let mut node = Node::clone(&self.then.record(&change.new)?.0);
        let merges_base = match &node.body {
            Body::Dir { base: Some(path) } => is_free && self.epochs.is_same(path),
            _ => true,
        };
        let leads_to_path = !self.is_inside(&change.path);
        if !merges_base || leads_to_path {
            node.body = Body::Dir { base: None };
        }
        // Its subdirectories are counted when they are restored. A filesystem that does not count
        // them shows 1.
        if leads_to_path && node.meta.nlink > 2 {
            node.meta.nlink = 2;
        }
        let hides = self.hidden(dir, lower.as_ref(), &name)?;
        let shows_base = matches!(&node.body, Body::Dir { base: Some(_) });
        self.edit(Edit::Put { ino, node: Box::new(node) })?;
        self.edit(Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, hides }) })?;
        self.changed_dirs.entry(change.path.clone()).or_default();
        if shows_base { self.hide_others(ino, wanted) } else { Ok(()) }
    }

    /// Hides what the base shows in a restored directory and the other state does not: names that
    /// were deleted there, that a later apply added, or whose node is elsewhere now. Some of these
    /// names get a node by their own changes.
    fn hide_others(&mut self, dir: Ino, wanted: Ino) -> FsResult<()> {
        let Some(lower) = self.state.lower_path(dir)? else { return Ok(()) };
        for (name, (ino, _)) in self.state.lower.list(&lower)? {
            let found = self.then.find(wanted, Some(&lower), &name)?;
            let links = self.then.attr(&found).map_or(0, |attr| attr.meta.nlink);
            if found.ino() == Some(ino)
                && self.is_visible_unhidden(&found, Some(&lower), &name, links)
            {
                continue;
            }
            let hides = match self.then.tree.dentry(wanted, &name) {
                // The fingerprint stays the one of the deletion. A change of the base since then is
                // a conflict of the next apply.
                Some(Dentry::Whiteout(print)) if self.epochs.is_same_epoch => {
                    Some(Arc::clone(print))
                }
                _ => self.hidden(dir, Some(&lower), &name)?,
            };
            self.edit(Edit::Dentry { dir, name, to: hides.map(Dentry::Whiteout) })?;
        }
        Ok(())
    }

    /// Sets the attributes of directories. Those at and below the paths get the attributes of the
    /// other state. Those above them get new times, as after any change of names.
    pub(super) fn finish_dirs(&mut self, changes: &[PathChange]) -> FsResult<()> {
        let listed = changes.iter().filter(|change| self.is_inside(&change.path));
        let mut dirs: BTreeSet<TreePath> = listed.map(|change| change.path.clone()).collect();
        dirs.extend(self.changed_dirs.keys().cloned());
        for path in dirs {
            let found = self.state.resolve(&path)?;
            if self.state.as_dir(&found).is_none() {
                continue;
            }
            if let Found::Base(_, base, _) = &found {
                let base = base.clone();
                self.copy_up(&base)?;
            }
            let ino = found.ino().ok_or(FsError::NotFound)?;
            let node = self.state.tree.node(ino).cloned().ok_or(FsError::NotFound)?;
            let mut node = Node::clone(&node);
            if self.is_inside(&path) {
                let known = self.then.resolve(&path)?;
                let (then, _) = self.then.record(&known)?;
                node = Node { body: node.body, ..Node::clone(&then) };
            } else {
                node.meta.mtime = clock::now();
                node.meta.ctime = node.meta.mtime;
                let subdirs = self.changed_dirs.get(&path).copied().unwrap_or(0);
                if node.meta.nlink >= 2 {
                    node.meta.nlink = node.meta.nlink.saturating_add_signed(subdirs).max(2);
                }
            }
            if self.state.tree.node(ino).is_none_or(|now| **now != node) {
                self.edit(Edit::Put { ino, node: Box::new(node) })?;
            }
        }
        Ok(())
    }
}
