//! A node that is about to change: in the tree, or among the orphans.

use crate::error::{FsError, FsResult};
use crate::fs::merged::answers;
use crate::fs::merged::state::SCRATCH;
use crate::fs::writing::Writing;
use crate::fs::{Core, Target};
use crate::tree::{Edit, Tree};
use crate::types::{Ino, LayerId};

/// The tree that holds a node's record, and the node's number there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Writable {
    pub(super) key: Ino,
    pub(super) is_orphan: bool,
}

impl Writable {
    /// The node, as operations that only read take it.
    pub(super) fn target(self) -> Target {
        if self.is_orphan { Target::Orphan(self.key) } else { Target::Upper(self.key) }
    }
}

impl Writing<'_> {
    /// Makes a node writable: copies it up if only the base has it.
    ///
    /// # Errors
    /// As [`Writing::copy_up_base`].
    pub(super) fn writable(&mut self, target: Target) -> FsResult<Writable> {
        match target {
            Target::Orphan(key) => Ok(Writable { key, is_orphan: true }),
            target => Ok(Writable { key: self.copy_up_target(target)?, is_orphan: false }),
        }
    }

    /// As [`Writing::writable`], for the content of an open file.
    ///
    /// # Errors
    /// As [`Writing::copy_up_without_walk`].
    pub(super) fn writable_content(&mut self, target: Target) -> FsResult<Writable> {
        match target {
            Target::Base(ino, path, node) => {
                let key = self.copy_up_without_walk(ino, &path, &node)?;
                Ok(Writable { key, is_orphan: false })
            }
            target => self.writable(target),
        }
    }

    /// Copies up a node that was resolved, unless the tree has it. Returns its number.
    ///
    /// # Errors
    /// ENOENT for an orphan; as [`Writing::copy_up_base`].
    pub(super) fn copy_up_target(&mut self, target: Target) -> FsResult<Ino> {
        match target {
            Target::Upper(ino) => Ok(ino),
            Target::Base(ino, path, node) => self.copy_up_base(ino, &path, &node),
            Target::Orphan(_) => Err(FsError::NotFound),
        }
    }

    /// Applies edits to a node. Those of a live node are recorded; those of an orphan concern only
    /// the processes that have it open, and are not.
    ///
    /// # Errors
    /// As [`Writing::commit`]; damage if the edits do not fit the node.
    pub(super) fn commit_to(&mut self, node: Writable, edits: Vec<Edit>) -> FsResult<()> {
        if !node.is_orphan {
            return self.commit(edits);
        }
        answers::check_complete()?;
        if let Some(leftover) = self.held.orphans_mut().apply(node.key, &edits)? {
            self.released(|| leftover.free());
            self.quota.measure_soon();
        }
        answers::note_committed();
        Ok(())
    }
}

impl Core {
    /// The tree that holds a node's record.
    pub(super) fn tree_of(&self, node: Writable) -> &Tree {
        if node.is_orphan { self.held.orphans().tree() } else { &self.tree }
    }

    /// The layer to which the content of a node is written.
    pub(super) fn layer_of(&self, node: Writable) -> LayerId {
        if self.is_in_scratch(node) { SCRATCH } else { self.upper.layer() }
    }

    /// Whether the content of a node is written to the scratch file of the orphans.
    pub(super) fn is_in_scratch(&self, node: Writable) -> bool {
        node.is_orphan && !self.held.orphans().is_unnamed(node.key)
    }
}
