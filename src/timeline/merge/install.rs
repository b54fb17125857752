//! The edits that turn the tree of our head into the merged one.
//!
//! * Content of the other head refers to the pools of its sealed layers. No byte is copied, but
//!   those of a base file that an apply changed since the heads parted: the reference would mean
//!   other bytes in our head.
//! * A name of the base that must not show gets a whiteout, as after any removal.
//! * A directory that only the other head has is opaque, and each node in it has a record.

use std::collections::{BTreeMap, BTreeSet};

use super::content::{hidden, record_of_theirs, write};
use super::nodes::{Content, MergedNode};
use super::three::{Head, Side, Three};
use super::view::Slot;
use crate::error::{FsError, FsResult};
use crate::fs::{Extents, Found, State};
use crate::store::content::pool::PoolWriter;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Meta, Misfit, Node};
use crate::types::{FileKind, Ino};

/// A name with the nodes that our head and the merged tree have there.
pub(super) type NameChange = (Slot, Option<Ino>, Option<Ino>);

/// A merge that is turned into edits.
struct Install<'a> {
    three: &'a Three<'a>,
    /// Our head with the edits so far.
    state: State,
    edits: Vec<Edit>,
    /// By how much the number of names of each node grows.
    links: BTreeMap<Ino, i64>,
    /// By how much the number of subdirectories of each directory grows.
    subdirs: BTreeMap<Ino, i64>,
}

/// Computes the edits. Merged bytes are written to `pool`.
///
/// # Errors
/// Those of reading the base and of writing the pool.
pub(super) fn edits(
    three: &Three<'_>,
    names: &[NameChange],
    nodes: &[MergedNode],
    pool: &mut PoolWriter,
) -> FsResult<Vec<Edit>> {
    let ours = three.head(Side::Ours);
    let mut install = Install {
        three,
        state: ours.state().clone(),
        edits: Vec::new(),
        links: BTreeMap::new(),
        subdirs: BTreeMap::new(),
    };
    install.count(names)?;
    let lost = install.lost()?;
    install.copy_up_all(names, nodes, &lost)?;
    for (slot, _, _) in
        names.iter().filter(|(slot, was, _)| was.is_some() && !lost.contains(&slot.0))
    {
        install.detach(slot)?;
    }
    install.put_new(names, &lost, pool)?;
    for ((dir, name), _, is) in names.iter().filter(|(slot, ..)| !lost.contains(&slot.0)) {
        if let Some(ino) = is {
            install.attach(&(*dir, name.clone()), *ino)?;
        }
    }
    for node in nodes.iter().filter(|node| !lost.contains(&node.ino)) {
        install.put_merged(node, pool)?;
    }
    install.fix_counts(&lost)?;
    install.touch_dirs(names, &lost)?;
    for ino in lost {
        let ino = ours.real(ino);
        if install.state.tree.node(ino).is_some() {
            install.edit(Edit::Remove { ino })?;
        }
    }
    Ok(install.edits)
}

impl Install<'_> {
    fn ours(&self) -> &Head<'_> {
        self.three.head(Side::Ours)
    }

    fn edit(&mut self, edit: Edit) -> FsResult<()> {
        self.state.tree.apply(&edit).map_err(|Misfit(what)| FsError::Damage(what))?;
        self.edits.push(edit);
        Ok(())
    }

    fn kind(&self, ino: Ino) -> FsResult<Option<FileKind>> {
        match self.ours().kind(ino)? {
            Some(kind) => Ok(Some(kind)),
            None => self.three.head(Side::Theirs).kind(ino),
        }
    }

    /// Counts the names that nodes lose and get.
    fn count(&mut self, names: &[NameChange]) -> FsResult<()> {
        for ((dir, _), was, is) in names {
            for (ino, by) in [(was, -1), (is, 1)] {
                let Some(ino) = ino else { continue };
                *self.links.entry(*ino).or_default() += by;
                if self.kind(*ino)? == Some(FileKind::Dir) {
                    *self.subdirs.entry(*dir).or_default() += by;
                }
            }
        }
        Ok(())
    }

    /// The nodes of our head that lose their last name.
    fn lost(&self) -> FsResult<BTreeSet<Ino>> {
        let mut lost = BTreeSet::new();
        for (ino, by) in &self.links {
            let ours = self.ours();
            let Some(attr) = ours.state().attr(&ours.node(*ino)?) else { continue };
            let links = if attr.kind == FileKind::Dir { 1 } else { attr.meta.nlink };
            if i64::from(links) + by <= 0 {
                lost.insert(*ino);
            }
        }
        Ok(lost)
    }

    /// Copies up all nodes of the base that get another record or other names, before their names
    /// change.
    fn copy_up_all(
        &mut self,
        names: &[NameChange],
        nodes: &[MergedNode],
        lost: &BTreeSet<Ino>,
    ) -> FsResult<()> {
        let dirs = names.iter().map(|((dir, _), ..)| *dir);
        let moved = names.iter().flat_map(|(_, was, is)| was.iter().chain(is).copied());
        let edited = nodes.iter().map(|node| node.ino);
        let all: BTreeSet<Ino> = dirs.chain(moved).chain(edited).collect();
        for ino in all.difference(lost) {
            if let Found::Base(_, path, _) = self.ours().node(*ino)?
                && self.state.tree.node(*ino).is_none()
            {
                let (found, node) =
                    self.state.lower.lookup(&path)?.ok_or_else(|| self.state.lower.drift(&path))?;
                for edit in self.state.copy_up_edits(found, &path, &node)? {
                    self.edit(edit)?;
                }
            }
        }
        Ok(())
    }

    fn detach(&mut self, slot: &Slot) -> FsResult<()> {
        let dir = self.ours().real(slot.0);
        let to = hidden(&self.state, dir, &slot.1)?.map(Dentry::Whiteout);
        self.edit(Edit::Dentry { dir, name: slot.1.clone(), to })
    }

    fn attach(&mut self, slot: &Slot, ino: Ino) -> FsResult<()> {
        let (dir, ino) = (self.number(slot.0)?, self.number(ino)?);
        let hides = hidden(&self.state, dir, &slot.1)?;
        let to = Some(Dentry::Child { ino, hides });
        self.edit(Edit::Dentry { dir, name: slot.1.clone(), to })
    }

    /// The inode number of a node in the merged tree: the one of our head, if that has the node.
    fn number(&self, ino: Ino) -> FsResult<Ino> {
        let [ours, theirs] = Side::BOTH.map(|side| self.three.head(side));
        Ok(if ours.node(ino)?.ino().is_some() { ours.real(ino) } else { theirs.real(ino) })
    }

    /// Puts the nodes that only the other head has.
    fn put_new(
        &mut self,
        names: &[NameChange],
        lost: &BTreeSet<Ino>,
        pool: &mut PoolWriter,
    ) -> FsResult<()> {
        let mut put = BTreeSet::new();
        for ((dir, _), _, is) in names {
            let Some(ino) = is else { continue };
            if self.ours().node(*ino)?.ino().is_some() || lost.contains(dir) || !put.insert(*ino) {
                continue;
            }
            let (mut node, extents) = self.record_of_theirs(*ino, pool)?;
            let subdirs = self.subdirs.get(ino).copied().unwrap_or(0);
            match &mut node.body {
                Body::Dir { base } => {
                    *base = None;
                    node.meta.nlink = u32::try_from(2 + subdirs).unwrap_or(2);
                }
                _ => {
                    let links = self.links.get(ino).copied().unwrap_or(1);
                    node.meta.nlink = u32::try_from(links).unwrap_or(1);
                }
            }
            let ino = self.number(*ino)?;
            self.edit(Edit::Put { ino, node: Box::new(node) })?;
            self.map(ino, extents)?;
        }
        Ok(())
    }

    /// The record of a node of the other head, and where its bytes are, in a form that means the
    /// same in our head.
    fn record_of_theirs(&self, ino: Ino, pool: &mut PoolWriter) -> FsResult<(Node, Extents)> {
        let theirs = self.three.head(Side::Theirs);
        let found = theirs.node(ino)?;
        record_of_theirs((theirs.state(), &found), self.state.lower.epoch(), pool)
    }

    fn map(&mut self, ino: Ino, extents: Extents) -> FsResult<()> {
        extents
            .into_iter()
            .try_for_each(|(range, source)| self.edit(Edit::Map { ino, range, to: Some(source) }))
    }

    /// Gives a node of our head its merged record and content.
    fn put_merged(&mut self, merged: &MergedNode, pool: &mut PoolWriter) -> FsResult<()> {
        let ino = self.ours().real(merged.ino);
        let Some(node) = self.state.tree.node(ino).cloned() else { return Ok(()) };
        let meta = Meta { nlink: node.meta.nlink, ..merged.meta };
        let (body, extents, rdev) = match &merged.content {
            Content::Ours => (node.body.clone(), None, node.meta.rdev),
            Content::Theirs => {
                let (record, extents) = self.record_of_theirs(merged.ino, pool)?;
                let body = match record.body {
                    Body::Dir { .. } => node.body.clone(),
                    other => other,
                };
                (body, Some(extents), record.meta.rdev)
            }
            Content::Bytes(bytes) => {
                let body = Body::File { size: bytes.len() as u64, origin: None };
                (body, Some(write(ino, bytes, pool)?), node.meta.rdev)
            }
        };
        let put = Node { meta: Meta { rdev, ..meta }, xattrs: merged.xattrs.clone(), body };
        let is_file = matches!(node.body, Body::File { .. });
        let extents = extents.filter(|_| is_file);
        if put == *node && extents.is_none() {
            return Ok(());
        }
        if extents.is_some() {
            self.edit(Edit::Resize { ino, size: 0 })?;
        }
        self.edit(Edit::Put { ino, node: Box::new(put) })?;
        self.map(ino, extents.unwrap_or_default())
    }

    /// Sets the link counts of the nodes that our head has and keeps.
    fn fix_counts(&mut self, lost: &BTreeSet<Ino>) -> FsResult<()> {
        let of_files = self.links.clone();
        let of_dirs = self.subdirs.clone();
        for (ino, by) in of_files.into_iter().chain(of_dirs).filter(|(_, by)| *by != 0) {
            let ours = self.ours();
            let Some(attr) = ours.state().attr(&ours.node(ino)?) else { continue };
            let is_dir = attr.kind == FileKind::Dir;
            // A directory has one name; its links are its subdirectories.
            let counts = if is_dir { self.subdirs.get(&ino) } else { self.links.get(&ino) };
            let real = ours.real(ino);
            if counts != Some(&by) || lost.contains(&ino) || (is_dir && attr.meta.nlink < 2) {
                continue;
            }
            let links = i64::from(attr.meta.nlink) + by;
            let nlink = u32::try_from(links).unwrap_or(1).max(if is_dir { 2 } else { 1 });
            let node = self.state.tree.node(real).ok_or(FsError::NotFound)?;
            let meta = Meta { nlink, ..node.meta };
            if meta != node.meta {
                self.edit(Edit::Meta { ino: real, meta })?;
            }
        }
        Ok(())
    }

    /// Gives new times to the directories of our head in which names changed, if the other head
    /// does not have later ones.
    fn touch_dirs(&mut self, names: &[NameChange], lost: &BTreeSet<Ino>) -> FsResult<()> {
        let dirs: BTreeSet<Ino> = names.iter().map(|((dir, _), ..)| *dir).collect();
        for dir in dirs.difference(lost) {
            let ours = self.ours();
            let Some(was) = ours.state().attr(&ours.node(*dir)?) else { continue };
            let ino = ours.real(*dir);
            let node = self.state.tree.node(ino).ok_or(FsError::NotFound)?;
            if node.meta.mtime == was.meta.mtime {
                let now = clock::now();
                let meta = Meta { mtime: now, ctime: now, ..node.meta };
                self.edit(Edit::Meta { ino, meta })?;
            }
        }
        Ok(())
    }
}
