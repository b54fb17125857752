//! Operations on names: lookup, create, link, unlink. Rename has a file of its own.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::ops::acl;
use crate::fs::ops::privileges::SETGID;
use crate::fs::ops::slot::{LINK_MAX, Slot, whiteout};
use crate::fs::writing::Writing;
use crate::fs::{Caller, Entry, Found, Fs, Need, Target};
use crate::store::Store;
use crate::store::edits_log::How;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Meta, Node};
use crate::types::{FileKind, Name, NodeId, TYPE_BITS};

/// The longest text of a symlink, in bytes.
const SYMLINK_MAX: usize = 4095;

/// A node that is about to be created. `mode` has the type bits.
#[derive(Clone)]
pub(super) struct NewNode {
    pub(super) mode: u32,
    pub(super) rdev: u64,
    pub(super) body: Body,
    pub(super) umask: u32,
}

impl Fs {
    /// Looks a name up in a directory, and counts one more lookup of its node.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR; those of the base.
    pub fn lookup(&self, dir: NodeId, name: &Name) -> FsResult<Entry> {
        if let Some(entry) = self.lookup_snapdir(dir, name)? {
            return Ok(entry);
        }
        self.with_name((dir, name), |core| {
            core.coherence.name_looked_up(dir, name);
            let slot = core.slot(dir, name)?;
            core.look_up(dir, slot.dir, name, slot.found)
        })
    }

    /// Creates a file, fifo, socket or device (mknod(2)). A `mode` without type bits makes a file.
    ///
    /// # Errors
    /// EEXIST, ENOENT for a directory that is gone; those of the store.
    pub fn mknod(
        &self,
        dir: NodeId,
        name: &Name,
        mode: u32,
        rdev: u64,
        umask: u32,
        caller: Caller,
    ) -> FsResult<Entry> {
        let mode = if mode & TYPE_BITS == 0 { mode | FileKind::File.type_bits() } else { mode };
        let body = match FileKind::from_mode(mode) {
            Some(FileKind::File) => Body::File { size: 0, origin: None },
            Some(FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block) => {
                Body::Special
            }
            Some(FileKind::Dir | FileKind::Symlink) | None => return Err(FsError::Invalid),
        };
        self.create(dir, name, &NewNode { mode, rdev, body, umask }, caller)
    }

    /// Creates a directory. In the snapshot directory's `checkpoints` this makes a checkpoint; then
    /// it must be called from a thread that serves no request.
    ///
    /// # Errors
    /// As [`Fs::mknod`].
    pub fn mkdir(
        &self,
        dir: NodeId,
        name: &Name,
        mode: u32,
        umask: u32,
        caller: Caller,
    ) -> FsResult<Entry> {
        if dir == NodeId::CHECKPOINTS {
            return self.make_checkpoint(name);
        }
        if dir == NodeId::FORKS {
            return self.make_fork(name);
        }
        let mode = (mode & !TYPE_BITS) | FileKind::Dir.type_bits();
        let new = NewNode { mode, rdev: 0, body: Body::Dir { base: None }, umask };
        self.create(dir, name, &new, caller)
    }

    /// Creates a symlink. Any text is allowed: [`Fs::readlink`] judges it when it is followed.
    ///
    /// # Errors
    /// As [`Fs::mknod`]; ENOENT for an empty text, ENAMETOOLONG for one of more than 4095 bytes.
    pub fn symlink(
        &self,
        dir: NodeId,
        name: &Name,
        target: &[u8],
        caller: Caller,
    ) -> FsResult<Entry> {
        if target.is_empty() {
            return Err(FsError::NotFound);
        }
        if target.len() > SYMLINK_MAX {
            return Err(FsError::NameTooLong);
        }
        let body = Body::Symlink { target: target.to_vec() };
        let mode = FileKind::Symlink.type_bits() | 0o777;
        self.create(dir, name, &NewNode { mode, rdev: 0, body, umask: 0 }, caller)
    }

    fn create(&self, dir: NodeId, name: &Name, new: &NewNode, caller: Caller) -> FsResult<Entry> {
        self.with_room(Need::More, || {
            self.change_name((dir, name), |core| {
                let slot = core.slot(dir, name)?;
                core.create(&self.store, &slot, new, caller)
            })
        })
    }

    /// Creates a hard link to a node (link(2)).
    ///
    /// # Errors
    /// EPERM for a directory, ENOENT for a node that is gone, EEXIST, EMLINK; those of the store.
    pub fn link(&self, id: NodeId, dir: NodeId, name: &Name) -> FsResult<Entry> {
        self.with_room(Need::More, || {
            self.change_node_and_name(id, (dir, name), |core| core.link(id, dir, name))
        })
    }

    /// Removes a name of a node that is not a directory (unlink(2)).
    ///
    /// # Errors
    /// ENOENT, EISDIR; those of the store.
    pub fn unlink(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        self.with_room(Need::Less, || self.change_name((dir, name), |core| core.unlink(dir, name)))
    }

    /// Removes an empty directory (rmdir(2)).
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, ENOTEMPTY; EPERM for a checkpoint or a fork; those of the store.
    pub fn rmdir(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        // Not EROFS, because mkdir works there. `jailfs drop` removes a checkpoint, and
        // `jailfs fork --drop` a fork.
        if dir == NodeId::CHECKPOINTS || dir == NodeId::FORKS {
            return Err(FsError::NotPermitted);
        }
        self.with_room(Need::Less, || self.change_name((dir, name), |core| core.rmdir(dir, name)))
    }
}

impl Writing<'_> {
    fn link(&mut self, id: NodeId, parent: NodeId, name: &Name) -> FsResult<Entry> {
        let slot = self.slot(parent, name)?;
        let Found::Nothing(hides) = &slot.found else { return Err(FsError::Exists) };
        let target = self.target(id)?;
        if self.attr_of(id, &target)?.kind == FileKind::Dir {
            return Err(FsError::NotPermitted);
        }
        if let Target::Orphan(key) = target {
            return self.link_unnamed((id, key), &slot, hides.clone());
        }
        let ino = self.copy_up_target(target)?;
        self.copy_up_parent(&slot)?;
        let mut meta = self.meta(ino)?;
        if meta.nlink >= LINK_MAX {
            return Err(FsError::TooManyLinks);
        }
        meta.nlink += 1;
        meta.ctime = clock::now();
        let dir = slot.dir;
        let to = Some(Dentry::Child { ino, hides: hides.clone() });
        let edits = vec![
            Edit::Meta { ino, meta },
            Edit::Dentry { dir, name: name.clone(), to },
            self.touch_dir(dir, 0)?,
        ];
        self.commit(edits)?;
        self.hand_out(parent, Found::Upper(ino, hides.clone()))
    }

    fn unlink(&mut self, dir: NodeId, name: &Name) -> FsResult<()> {
        let slot = self.slot(dir, name)?;
        if self.kind_in(&slot)? == FileKind::Dir {
            return Err(FsError::IsADirectory);
        }
        self.copy_up_parent(&slot)?;
        let mut edits = self.stage_loss_of_name(slot.dir, name, &slot.found)?;
        edits.push(whiteout(slot.dir, name.clone(), &slot.found));
        edits.push(self.touch_dir(slot.dir, 0)?);
        let orphan = self.orphan_of(&edits, &slot.found)?;
        self.before_loss(slot.dir(), name, &slot.found, How::Removed)?;
        self.commit_with_orphan(edits, orphan).map(drop)
    }

    fn rmdir(&mut self, dir: NodeId, name: &Name) -> FsResult<()> {
        let slot = self.slot(dir, name)?;
        if self.kind_in(&slot)? != FileKind::Dir {
            return Err(FsError::NotADirectory);
        }
        self.check_empty(&slot.found)?;
        self.copy_up_parent(&slot)?;
        let mut edits = vec![whiteout(slot.dir, name.clone(), &slot.found)];
        edits.extend(self.stage_loss_of_name(slot.dir, name, &slot.found)?);
        edits.push(self.touch_dir(slot.dir, -1)?);
        let orphan = self.orphan_of(&edits, &slot.found)?;
        if let Some(removed) = self.commit_with_orphan(edits, orphan)? {
            self.links.dir_removed(removed, dir);
        }
        Ok(())
    }

    fn create(
        &mut self,
        store: &Arc<Store>,
        slot: &Slot,
        new: &NewNode,
        caller: Caller,
    ) -> FsResult<Entry> {
        let Found::Nothing(hides) = &slot.found else { return Err(FsError::Exists) };
        self.need_node()?;
        self.copy_up_parent(slot)?;
        let (dir, name) = (slot.dir, &slot.name);
        let node = new_node(self.tree.node(dir).ok_or(FsError::NotFound)?, new, caller)?;
        let kind = node.kind();
        let ino = self.released(|| store.identities().lock().fresh())?;
        let to = Some(Dentry::Child { ino, hides: hides.clone() });
        let edits = vec![
            Edit::Put { ino, node: Box::new(node) },
            Edit::Dentry { dir, name: name.clone(), to },
            self.touch_dir(dir, i32::from(kind == FileKind::Dir))?,
        ];
        self.commit(edits)?;
        if kind == FileKind::File {
            self.file_made(ino, slot.dir(), name);
        }
        self.hand_out(slot.parent, Found::Upper(ino, hides.clone()))
    }
}

/// The record of a new node in a directory, which passes on its default ACL and, with setgid, its
/// group.
pub(super) fn new_node(above: &Node, new: &NewNode, caller: Caller) -> FsResult<Node> {
    let is_dir = matches!(new.body, Body::Dir { .. });
    let (mut mode, xattrs) = match new.body {
        Body::Symlink { .. } => (new.mode, None),
        _ => acl::inherit(&above.xattrs, new.mode, new.umask, is_dir)?,
    };
    let mut gid = caller.gid;
    if above.meta.mode & SETGID != 0 {
        gid = above.meta.gid;
        if is_dir {
            mode |= SETGID;
        }
    }
    let now = clock::now();
    let meta = Meta {
        mode,
        uid: caller.uid,
        gid,
        nlink: if is_dir { 2 } else { 1 },
        rdev: new.rdev,
        atime: now,
        mtime: now,
        ctime: now,
    };
    Ok(Node { meta, xattrs, body: new.body.clone() })
}
