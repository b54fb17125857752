//! Files without a name (O_TMPFILE of open(2)), and the link that gives them one (linkat(2)).
//!
//! Such a file is an orphan: it is in no checkpoint, and is gone when its last holder closes it.
//! The link makes it live under the id that the kernel has.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::state::extents_in;
use crate::fs::ops::namespace::{NewNode, new_node};
use crate::fs::ops::slot::Slot;
use crate::fs::writing::Writing;
use crate::fs::{Caller, Entry, Found, Fs, Need, Target};
use crate::store::Store;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Node};
use crate::types::{FileKind, Fingerprint, Ino, NodeId, TYPE_BITS};

impl Fs {
    /// Creates a regular file without a name. `dir` decides on its group and ACL.
    ///
    /// # Errors
    /// ENOENT for a directory that is gone, ENOTDIR; those of the base and of the store.
    pub fn tmpfile(&self, dir: NodeId, mode: u32, umask: u32, caller: Caller) -> FsResult<Entry> {
        let mode = (mode & !TYPE_BITS) | FileKind::File.type_bits();
        let body = Body::File { size: 0, origin: None };
        let new = NewNode { mode, rdev: 0, body, umask };
        self.with_room(Need::More, || {
            self.change_node(dir, |core| {
                let above = core.target(dir)?;
                if matches!(above, Target::Orphan(_)) {
                    return Err(FsError::NotFound);
                }
                let above = core.record_of(&above)?;
                core.create_unnamed(&self.store, &above, &new, caller)
            })
        })
    }
}

impl Writing<'_> {
    fn create_unnamed(
        &mut self,
        store: &Store,
        above: &Node,
        new: &NewNode,
        caller: Caller,
    ) -> FsResult<Entry> {
        let Body::Dir { base } = &above.body else { return Err(FsError::NotADirectory) };
        self.check_dir(base.as_ref())?;
        self.need_node()?;
        let mut node = new_node(above, new, caller)?;
        node.meta.nlink = 0;
        let ino = self.released(|| store.identities().lock().fresh())?;
        let epoch = self.lower.epoch();
        let id = self.held.add_unnamed(ino, node, epoch)?;
        Ok(Entry { id, attr: self.attr_of(id, &Target::Orphan(ino))? })
    }

    /// Gives an orphan that never had a name the name of a slot, which hides a base node with the
    /// fingerprint `hides`.
    ///
    /// # Errors
    /// ENOENT for another orphan; those of the store.
    pub(super) fn link_unnamed(
        &mut self,
        (id, ino): (NodeId, Ino),
        slot: &Slot,
        hides: Option<Arc<Fingerprint>>,
    ) -> FsResult<Entry> {
        if !self.held.orphans().is_unnamed(ino) {
            return Err(FsError::NotFound);
        }
        let mut node = Node::clone(&*self.record_of(&Target::Orphan(ino))?);
        node.meta.nlink = 1;
        node.meta.ctime = clock::now();
        self.copy_up_parent(slot)?;
        let content = extents_in(self.held.orphans().tree(), ino).into_iter();
        let mut edits = vec![Edit::Put { ino, node: Box::new(node) }];
        edits.extend(content.map(|(range, source)| Edit::Map { ino, range, to: Some(source) }));
        let to = Some(Dentry::Child { ino, hides: hides.clone() });
        edits.push(Edit::Dentry { dir: slot.dir, name: slot.name.clone(), to });
        edits.push(self.touch_dir(slot.dir, 0)?);
        self.commit(edits)?;
        let leftover = self.held.unnamed_was_linked(id);
        self.file_made(ino, slot.dir(), &slot.name);
        let entry = self.hand_out(slot.parent, Found::Upper(ino, hides));
        if let Some(leftover) = leftover {
            self.released(|| leftover.free());
        }
        entry
    }
}
