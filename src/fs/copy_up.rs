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
    /// As [`State::copy_up_edits`](crate::fs::State::copy_up_edits), and those of the store.
    pub(super) fn copy_up_base(
        &mut self,
        ino: Ino,
        path: &TreePath,
        node: &LowerNode,
    ) -> FsResult<Ino> {
        let edits = self.copy_up_edits(ino, path, node)?;
        let has_dir = edits.iter().any(
            |edit| matches!(edit, Edit::Put { node, .. } if matches!(node.body, Body::Dir { .. })),
        );
        if has_dir {
            // Between the record and the tree a lookup could find the directory at another path of
            // the base. At the next lookup of its path in the tree, the kernel would move its
            // dentry.
            self.keeping_core(|core| core.commit_copy_up(edits))?;
        } else {
            self.commit_copy_up(edits)?;
        }
        let core = &mut **self;
        if let Some(id) = core.held.id_of(ino) {
            core.coherence.note_recorded(&mut core.held, id, node);
        }
        Ok(ino)
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
