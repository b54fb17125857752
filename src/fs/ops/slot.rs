//! A name in a directory, as an operation on names finds it.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::lower::LowerNode;
use crate::fs::writing::Writing;
use crate::fs::{Core, Extents, Found, Target};
use crate::sys::clock;
use crate::tree::{Dentry, Edit, Node};
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

/// The most links of a file or directory, as on ext4.
pub(super) const LINK_MAX: u32 = 65_000;

/// A name in a live directory, and the node that it has.
pub(super) struct Slot {
    /// The directory, as the kernel knows it.
    pub(super) parent: NodeId,
    /// The directory's inode number.
    pub(super) dir: Ino,
    /// The base path that the directory merges with.
    pub(super) lower: Option<TreePath>,
    /// The directory, if only the base has it.
    dir_node: Option<LowerNode>,
    pub(super) name: Name,
    pub(super) found: Found,
}

/// A node that becomes an orphan.
pub(super) struct Orphan {
    id: NodeId,
    ino: Ino,
    record: (Arc<Node>, Extents),
    target: Target,
}

impl Slot {
    /// The directory, as the edit history takes it.
    pub(super) fn dir(&self) -> (Ino, Option<&TreePath>) {
        (self.dir, self.lower.as_ref())
    }
}

impl Core {
    /// Looks a name up in a directory.
    ///
    /// # Errors
    /// EROFS for the name of the snapshot directory; ENOENT for a directory that is gone; ENOTDIR;
    /// EACCES for a hidden directory; those of the base.
    pub(super) fn slot(&self, parent: NodeId, name: &Name) -> FsResult<Slot> {
        if parent == NodeId::ROOT && self.snapdir_name.as_ref() == Some(name) {
            return Err(FsError::ReadOnly);
        }
        let (dir, lower, dir_node) = self.live_dir(parent)?;
        self.check_dir(lower.as_ref())?;
        let found = self.find(dir, lower.as_ref(), name)?;
        Ok(Slot { parent, dir, lower, dir_node, name: name.clone(), found })
    }

    /// The path of a slot.
    pub(super) fn slot_path(&self, slot: &Slot) -> FsResult<TreePath> {
        Ok(self.dir_path(slot.dir, slot.lower.as_ref())?.join(&slot.name))
    }

    /// The type of the node in a slot.
    ///
    /// # Errors
    /// ENOENT if there is none.
    pub(super) fn kind_in(&self, slot: &Slot) -> FsResult<FileKind> {
        self.kind(&slot.found).ok_or(FsError::NotFound)
    }

    /// Refuses a directory that has names.
    ///
    /// # Errors
    /// ENOTEMPTY; EACCES for a hidden directory, as for one that the caller may not read.
    pub(super) fn check_empty(&self, found: &Found) -> FsResult<()> {
        if self.is_hidden(found) {
            return Err(FsError::AccessDenied);
        }
        let names = match found {
            Found::Upper(ino, _) => self.merged_names(*ino, self.lower_path(*ino)?.as_ref())?,
            Found::Base(ino, path, _) => self.merged_names(*ino, Some(path))?,
            Found::Nothing(_) => return Err(FsError::NotFound),
        };
        if names.is_empty() { Ok(()) } else { Err(FsError::NotEmpty) }
    }

    /// The edit of a directory in which a name was added or removed; `links` is the change of its
    /// number of subdirectories.
    pub(in crate::fs) fn touch_dir(&self, dir: Ino, links: i32) -> FsResult<Edit> {
        let mut meta = self.meta(dir)?;
        meta.mtime = clock::now();
        meta.ctime = meta.mtime;
        // A filesystem that does not count subdirectories shows 1 for every directory.
        if meta.nlink >= 2 {
            meta.nlink = meta.nlink.saturating_add_signed(links).max(2);
        }
        // As on ext4: from here on it is not counted any more.
        if meta.nlink > LINK_MAX {
            meta.nlink = 1;
        }
        Ok(Edit::Meta { ino: dir, meta })
    }

    /// The orphan that edits will make of the node of `found`: none if it stays, or if the kernel
    /// does not hold it. While the kernel removes a name, it holds the lock of the directory, so it
    /// cannot begin to hold the node. The record must be read before the edits remove the node.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn orphan_of(&self, edits: &[Edit], found: &Found) -> FsResult<Option<Orphan>> {
        let removed = match found {
            Found::Upper(ino, _) => edits
                .iter()
                .any(|edit| matches!(edit, Edit::Remove { ino: removed } if removed == ino))
                .then_some((*ino, Target::Upper(*ino))),
            Found::Base(ino, path, node) => {
                let is_last = node.kind() == FileKind::Dir || node.nlink() <= 1;
                is_last.then(|| (*ino, Target::Base(*ino, path.clone(), node.clone())))
            }
            Found::Nothing(_) => None,
        };
        let held = removed.and_then(|(ino, target)| Some((self.held.id_of(ino)?, ino, target)));
        let Some((id, ino, target)) = held else { return Ok(None) };
        Ok(Some(Orphan { id, ino, record: self.record_and_extents(&target)?, target }))
    }

    /// Remembers a name by which the kernel knows a file with several links and the tree does not.
    pub(in crate::fs) fn note_alias(&mut self, dir: Ino, name: &Name, found: &Found) {
        let (ino, links) = match found {
            Found::Upper(ino, Some(_)) if self.tree.dentry(dir, name).is_none() => (*ino, 2),
            Found::Base(ino, _, node) if node.kind() != FileKind::Dir => (*ino, node.nlink()),
            _ => return,
        };
        if links > 1 {
            self.coherence.add_aliases(ino, [(dir, name.clone())]);
            self.held.note_alias(ino);
        }
    }
}

impl Writing<'_> {
    /// Copies up the directory of a slot, so that its names can change.
    ///
    /// # Errors
    /// As [`Writing::copy_up_base`].
    pub(super) fn copy_up_parent(&mut self, slot: &Slot) -> FsResult<()> {
        // Another copy-up of the same operation may have taken it since.
        if self.tree.node(slot.dir).is_some() {
            return Ok(());
        }
        let (Some(path), Some(node)) = (&slot.lower, &slot.dir_node) else {
            return Err(FsError::NotFound);
        };
        self.copy_up_base(slot.dir, path, node).map(drop)
    }

    /// The edits for the node that loses a name. The name itself is up to the caller.
    ///
    /// # Errors
    /// As [`Writing::copy_up_found`].
    pub(super) fn stage_loss_of_name(
        &mut self,
        dir: Ino,
        name: &Name,
        found: &Found,
    ) -> FsResult<Vec<Edit>> {
        let ino = match found {
            Found::Upper(ino, _) => *ino,
            // The tree must count the other links of a base file from here on.
            Found::Base(_, _, node) if node.kind() != FileKind::Dir && node.nlink() > 1 => {
                self.copy_up_found(dir, name, found)?.0
            }
            // The whiteout is enough.
            Found::Base(..) | Found::Nothing(_) => return Ok(Vec::new()),
        };
        let node = self.tree.node(ino).ok_or(FsError::NotFound)?;
        let mut meta = node.meta;
        if node.kind() == FileKind::Dir || meta.nlink <= 1 {
            return Ok(vec![Edit::Remove { ino }]);
        }
        meta.nlink -= 1;
        meta.ctime = clock::now();
        Ok(vec![Edit::Meta { ino, meta }])
    }

    /// The edits that remove the file at a path, for an operation that the kernel did not ask for.
    ///
    /// # Errors
    /// EISDIR for the root; ENOENT; as [`Writing::copy_up_without_walk`].
    pub(in crate::fs) fn stage_unlink(
        &mut self,
        path: &TreePath,
        found: &Found,
    ) -> FsResult<Vec<Edit>> {
        let (above, name) = path.split().ok_or(FsError::IsADirectory)?;
        let dir = match self.resolve(&above)? {
            Found::Base(ino, base, node) => self.copy_up_without_walk(ino, &base, &node)?,
            Found::Upper(ino, _) => ino,
            Found::Nothing(_) => return Err(FsError::NotFound),
        };
        let mut edits = self.stage_loss_of_name(dir, &name, found)?;
        edits.push(whiteout(dir, name, found));
        edits.push(self.touch_dir(dir, 0)?);
        Ok(edits)
    }

    /// Commits edits. If the kernel has not forgotten the node that they remove meanwhile, it
    /// becomes an orphan. Returns the id of the orphan.
    ///
    /// # Errors
    /// As [`Writing::commit`].
    pub(super) fn commit_with_orphan(
        &mut self,
        edits: Vec<Edit>,
        orphan: Option<Orphan>,
    ) -> FsResult<Option<NodeId>> {
        self.commit(edits)?;
        let core = &mut **self;
        let held = orphan.filter(|orphan| core.held.id_of(orphan.ino) == Some(orphan.id));
        let Some(Orphan { id, record, target, .. }) = held else { return Ok(None) };
        if let Target::Base(_, _, node) = &target {
            core.coherence.note_recorded(&mut core.held, id, node);
        }
        core.held.make_orphan(id, record, core.state.lower.epoch(), |meta| {
            meta.nlink = 0;
            meta.ctime = clock::now();
        })?;
        Ok(Some(id))
    }
}

/// The edit that leaves a name without a node: a whiteout, if the base has a node there.
pub(super) fn whiteout(dir: Ino, name: Name, found: &Found) -> Edit {
    Edit::Dentry { dir, name, to: found.hides().map(Dentry::Whiteout) }
}
