//! Copies nodes of the base up into the tree, so that they can change.
//!
//! A copy-up takes the record of the node, its name, and the same of the directories above it.
//! Content stays in the base: the file gets extents that refer to its origin.

use crate::error::{FsError, FsResult};
use crate::fs::Found;
use crate::fs::merged::lower::LowerNode;
use crate::fs::writing::Writing;
use crate::tree::{Body, Dentry, Edit, Hides};
use crate::types::{Ino, Name, TreePath};

impl Writing<'_> {
    /// Copies up a node that was found at a path of the base, and the directories above it.
    ///
    /// # Errors
    /// As [`State::copy_up_edits`](crate::fs::State::copy_up_edits) and
    /// [`Core::check_not_seen_elsewhere`](crate::fs::Core::check_not_seen_elsewhere), and those of
    /// the store.
    pub(super) fn copy_up_base(
        &mut self,
        ino: Ino,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<Ino> {
        let edits = self.copy_up_edits(ino, path, node)?;
        let dirs = dirs(&edits);
        self.check_not_seen_elsewhere(&dirs)?;
        self.coherence.begin_copy_up(dirs);
        let committed = self.commit_copy_up(edits);
        self.coherence.end_copy_up();
        committed?;
        let core = &mut **self;
        if let Some(id) = core.held.id_of(ino) {
            core.coherence.note_recorded(&mut core.held, id, node);
        }
        Ok(ino)
    }

    /// As [`Writing::copy_up_base`], for a change of an open file or by a command. The kernel does
    /// not walk to the node again after it, so ESTALE would not help.
    ///
    /// # Errors
    /// As [`Writing::copy_up_base`]; [`FsError::Drift`] if the node is no longer at its path.
    pub(super) fn copy_up_without_walk(
        &mut self,
        ino: Ino,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<Ino> {
        match self.copy_up_base(ino, path, node) {
            Err(FsError::Stale | FsError::NotFound | FsError::NotADirectory) => {
                Err(self.drifted(path))
            }
            result => result,
        }
    }

    /// Copies up the node that was found under a name, so that both are in the tree. Returns its
    /// number, and the base node that the name hides.
    ///
    /// # Errors
    /// ENOENT for nothing; those of [`Writing::copy_up_base`].
    pub(super) fn copy_up_found(
        &mut self,
        dir: Ino,
        name: &Name,
        found: &Found,
    ) -> FsResult<(Ino, Hides)> {
        match found {
            Found::Upper(ino, hides) => {
                if self.tree.dentry(dir, name).is_none() {
                    let to = Some(Dentry::Child { ino: *ino, hides: hides.clone() });
                    self.commit_copy_up(vec![Edit::Dentry { dir, name: name.clone(), to }])?;
                }
                Ok((*ino, hides.clone()))
            }
            Found::Base(ino, path, node) => {
                Ok((self.copy_up_base(*ino, path, node)?, Some(node.fingerprint(*ino))))
            }
            Found::Nothing(_) => Err(FsError::NotFound),
        }
    }
}

/// The directories that get a record, and their paths in the base.
fn dirs(edits: &[Edit]) -> Vec<(Ino, TreePath)> {
    let dir = |edit: &Edit| match edit {
        Edit::Put { ino, node } => match &node.body {
            Body::Dir { base: Some(path) } => Some((*ino, path.clone())),
            _ => None,
        },
        _ => None,
    };
    edits.iter().filter_map(dir).collect()
}
