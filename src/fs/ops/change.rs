//! A change of the content of a file, with its times and privilege bits.

use std::sync::Arc;

use crate::base::require_file;
use crate::error::{FsError, FsResult};
use crate::fs::edits::Touch;
use crate::fs::ops::privileges::{PrivilegeBits, clear_capabilities};
use crate::fs::ops::writable::Writable;
use crate::fs::writing::Writing;
use crate::fs::{Core, Target};
use crate::store::Store;
use crate::sys::clock;
use crate::tree::{Edit, Meta};

/// A change that has begun.
pub(super) struct Change {
    pub(super) file: Writable,
    /// The attributes after it.
    meta: Meta,
}

impl Writing<'_> {
    /// Changes the content of a file by the edits that `stage` returns, and its times and privilege
    /// bits with it.
    pub(super) fn change_file(
        &mut self,
        store: &Arc<Store>,
        target: Target,
        privileges: PrivilegeBits<'_>,
        touch: Touch,
        stage: impl FnOnce(&mut Writing<'_>, &Arc<Store>, Writable) -> FsResult<Vec<Edit>>,
    ) -> FsResult<()> {
        let change = self.plan_change(target, privileges, touch)?;
        let edits = stage(self, store, change.file)?;
        self.commit_change(change, edits)
    }

    /// Begins a change: makes the file writable, and says which attributes it gets.
    ///
    /// # Errors
    /// EISDIR or EINVAL for a node without content; EIO if nothing can be recorded any more; those
    /// of the base.
    pub(super) fn plan_change(
        &mut self,
        target: Target,
        privileges: PrivilegeBits<'_>,
        touch: Touch,
    ) -> FsResult<Change> {
        let file = self.writable_content(target)?;
        self.begin_change(file, touch)?;
        let mut meta = self.meta_after_change(file, touch, privileges)?;
        privileges.clear_bare_setgid(&mut meta);
        Ok(Change { file, meta })
    }

    /// Records a change with the edits that it makes to the content.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn commit_change(
        &mut self,
        Change { file, meta }: Change,
        mut edits: Vec<Edit>,
    ) -> FsResult<()> {
        let node = self.tree_of(file).node(file.key).ok_or(FsError::NotFound)?;
        edits.extend(clear_capabilities(file.key, node));
        edits.push(Edit::Meta { ino: file.key, meta });
        self.commit_to(file, edits)
    }
}

impl Core {
    /// Checks that the content of a node may change, and keeps what the edit history needs of it.
    pub(super) fn begin_change(&mut self, file: Writable, touch: Touch) -> FsResult<()> {
        let node = self.tree_of(file).node(file.key).ok_or(FsError::Invalid)?;
        require_file(node.kind())?;
        // The caller could not read what it replaces.
        if self.hides_node(node) {
            return Err(FsError::AccessDenied);
        }
        if !self.is_in_scratch(file) {
            self.upper.check()?;
        }
        // Bytes that are overwritten in place are visible before there is a record of them. So the
        // layer must be writable, and the edit history must have its copy.
        if !file.is_orphan {
            self.before_change(file.key, touch)?;
        }
        Ok(())
    }

    /// The attributes of a file after its content changed: times and privilege bits.
    pub(super) fn meta_after_change(
        &self,
        file: Writable,
        touch: Touch,
        privileges: PrivilegeBits<'_>,
    ) -> FsResult<Meta> {
        let tree = self.tree_of(file);
        let mut meta = tree.node(file.key).ok_or(FsError::NotFound)?.meta;
        meta.ctime = clock::now();
        // With a writeback cache the kernel keeps mtime itself and sends its changes. It does not
        // change mtime when truncate(2) sets the same size, nor for a second change within one tick
        // of its clock. So mtime must stay here too.
        let is_of_kernel = [Touch::WriteBack, Touch::Resize(tree.size(file.key))].contains(&touch);
        if !(self.coherence.is_writeback() && is_of_kernel) {
            meta.mtime = meta.ctime;
        }
        privileges.clear(&mut meta);
        Ok(meta)
    }
}
