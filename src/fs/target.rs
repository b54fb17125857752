//! Resolves the node behind a [`NodeId`], and reads its record, attributes and extents wherever
//! they are: in the tree, in the base or among the orphans.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::kernel::nodes::NodeState;
use crate::fs::merged::lower::{Extents, Lower, LowerNode};
use crate::fs::merged::state::{Found, extents_in};
use crate::fs::{Attr, Core, Entry};
use crate::tree::{Meta, Node};
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

/// A node as an operation finds it.
#[derive(Clone, Debug)]
pub(super) enum Target {
    /// In the tree.
    Upper(Ino),
    /// Only in the base.
    Base(Ino, TreePath, LowerNode),
    /// An orphan; its record is among the orphans under this number.
    Orphan(Ino),
}

impl Core {
    /// The node behind an id.
    ///
    /// # Errors
    /// ENOENT for an id that the kernel does not hold; EROFS for one of the snapshot directory;
    /// those of the base, and ESTALE if the base has another node in its place.
    pub(super) fn target(&self, id: NodeId) -> FsResult<Target> {
        // An operation that looks for a node of the snapshot directory here is about to change it.
        if id.is_in_snapdir() {
            return Err(FsError::ReadOnly);
        }
        let held = self.held.get(id).ok_or(FsError::NotFound)?;
        match &held.state {
            NodeState::Orphan => Ok(Target::Orphan(Ino(id.0))),
            NodeState::Live { .. } if self.tree.node(held.ino).is_some() => {
                Ok(Target::Upper(held.ino))
            }
            NodeState::Live { base: Some(path) } => match self.lower.lookup(path)? {
                Some((ino, node)) if ino == held.ino => Ok(Target::Base(ino, path.clone(), node)),
                _ if held.retired => Err(FsError::NotFound),
                _ => Err(self.replaced(path)?),
            },
            NodeState::Live { base: None } if held.retired => Err(FsError::NotFound),
            NodeState::Live { base: None } => {
                Err(FsError::Damage("a held node is neither in the tree nor in the base"))
            }
        }
    }

    /// The path in the base of a held node that only the base has.
    pub(super) fn place_in_base(&self, id: NodeId) -> Option<&TreePath> {
        let held = self.held.get(id)?;
        if self.tree.node(held.ino).is_some() { None } else { self.held.base_path(id) }
    }

    /// The directory behind an id: its number, the base path that it merges with, and the base node
    /// if only the base has it.
    ///
    /// # Errors
    /// As [`Core::target`]; ENOENT for an orphan, ENOTDIR for another node.
    pub(super) fn live_dir(
        &self,
        id: NodeId,
    ) -> FsResult<(Ino, Option<TreePath>, Option<LowerNode>)> {
        match self.target(id)? {
            Target::Upper(ino) => Ok((ino, self.lower_path(ino)?, None)),
            Target::Base(ino, path, node) => match node.kind() {
                FileKind::Dir => Ok((ino, Some(path), Some(node))),
                _ => Err(FsError::NotADirectory),
            },
            Target::Orphan(_) => Err(FsError::NotFound),
        }
    }

    /// The record of a node.
    pub(super) fn record_of(&self, target: &Target) -> FsResult<Arc<Node>> {
        match target {
            Target::Upper(ino) => self.tree.node(*ino).cloned().ok_or(FsError::NotFound),
            Target::Orphan(key) => {
                self.held.orphans().tree().node(*key).cloned().ok_or(FsError::NotFound)
            }
            Target::Base(_, path, node) => Ok(Arc::new(self.lower.record(path, node)?.0)),
        }
    }

    /// The attributes of a node that `stat` shows.
    pub(super) fn attr_of(&self, id: NodeId, target: &Target) -> FsResult<Attr> {
        let attr = match target {
            Target::Upper(ino) => Attr::in_tree(&self.tree, *ino, *ino),
            Target::Orphan(key) => {
                let ino = self.held.get(id).map_or(*key, |held| held.ino);
                Attr::in_tree(self.held.orphans().tree(), *key, ino)
            }
            Target::Base(ino, _, node) => Some(node.attr(*ino)),
        };
        attr.ok_or(FsError::NotFound)
    }

    /// The record and the extents of a node.
    pub(super) fn record_and_extents(&self, target: &Target) -> FsResult<(Arc<Node>, Extents)> {
        match target {
            Target::Base(_, path, node) => {
                let (record, extents) = self.lower.record(path, node)?;
                Ok((Arc::new(record), extents))
            }
            Target::Orphan(key) => {
                let extents = extents_in(self.held.orphans().tree(), *key);
                Ok((self.record_of(target)?, extents))
            }
            Target::Upper(ino) => Ok((self.record_of(target)?, extents_in(&self.tree, *ino))),
        }
    }

    /// The attributes in the record of a node of the tree.
    pub(super) fn meta(&self, ino: Ino) -> FsResult<Meta> {
        self.tree.node(ino).map(|node| node.meta).ok_or(FsError::NotFound)
    }

    /// The base in the epoch to which an orphan's extents refer.
    pub(super) fn lower_of_orphan(&self, key: Ino) -> Arc<Lower> {
        match self.held.orphans().epoch_of(key) {
            Some(epoch) if epoch != self.lower.epoch() => Arc::new(self.lower.in_epoch(epoch)),
            Some(_) | None => Arc::clone(&self.lower),
        }
    }

    /// Hands out the node that a lookup has found under a name of the directory `parent`, whose
    /// number is `dir`.
    ///
    /// # Errors
    /// [`FsError::MustWait`].
    pub(super) fn look_up(
        &mut self,
        parent: NodeId,
        dir: Ino,
        name: &Name,
        found: Found,
    ) -> FsResult<Entry> {
        if found.ino().is_some() {
            self.held.check_open()?;
        }
        self.note_alias(dir, name, &found);
        self.hand_out(parent, found)
    }

    /// Counts a lookup of the node that was found under a name in `dir`, and advertises it to the
    /// kernel.
    pub(super) fn hand_out(&mut self, dir: NodeId, found: Found) -> FsResult<Entry> {
        let attr = self.attr(&found).ok_or(FsError::NotFound)?;
        if let (Found::Base(ino, path, _), FileKind::Dir) = (&found, attr.kind) {
            self.coherence.check_copy_up(*ino, path)?;
            self.cut_off_if_moved(*ino, path)?;
        }
        let (base, node) = match found {
            Found::Base(_, path, node) => (Some(path), Some(node)),
            Found::Upper(..) | Found::Nothing(_) => (None, None),
        };
        let entry = Entry { id: self.held.hold(attr.ino, base), attr };
        match node {
            Some(node) => self.coherence.note_advertised(&mut self.held, entry.id, &node),
            None => self.coherence.note_asked(entry.id),
        }
        self.note_advertised_in(dir, attr.ino, attr.kind);
        Ok(entry)
    }
}
