//! Operations on attributes and extended attributes.

use crate::error::{FsError, FsResult};
use crate::fs::edits::Touch;
use crate::fs::ops::acl;
use crate::fs::ops::privileges::{PrivilegeBits, SETGID, clear_capabilities, clear_privileges};
use crate::fs::ops::writable::Writable;
use crate::fs::writing::Writing;
use crate::fs::{Attr, Fs, Need, Target};
use crate::sys::clock;
use crate::tree::{Edit, Meta, Node, Xattrs};
use crate::types::{FileKind, NodeId, PERM_BITS, TYPE_BITS, Timestamp};

/// The largest value of an extended attribute, in bytes (`XATTR_SIZE_MAX`).
const XATTR_SIZE_MAX: usize = 65_536;
/// The longest name of an extended attribute, in bytes (`XATTR_NAME_MAX`).
const XATTR_NAME_MAX: usize = 255;
/// The largest list of names, in bytes (`XATTR_LIST_MAX`).
const XATTR_LIST_MAX: usize = 65_536;

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the operation.
    Now,
    /// This time.
    To(Timestamp),
}

impl SetTime {
    fn resolve(self, now: Timestamp) -> Timestamp {
        match self {
            SetTime::Now => now,
            SetTime::To(time) => time,
        }
    }
}

/// Attributes to set. `None` leaves an attribute as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size of a file, in bytes.
    pub size: Option<u64>,
    /// Time of the last access.
    pub atime: Option<SetTime>,
    /// Time of the last change of the content.
    pub mtime: Option<SetTime>,
}

impl SetAttr {
    /// Whether the change concerns setuid, setgid and file capabilities.
    pub fn changes_privileges(&self) -> bool {
        self.size.is_some() || self.changes_owner()
    }

    fn changes_owner(&self) -> bool {
        self.uid.is_some() || self.gid.is_some()
    }
}

/// How an extended attribute is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetXattr {
    /// Fails if the attribute exists: XATTR_CREATE of setxattr(2).
    pub create: bool,
    /// Fails if the attribute does not exist: XATTR_REPLACE.
    pub replace: bool,
    /// Setting an access ACL clears setgid, because the caller is not in the file's group and lacks
    /// CAP_FSETID.
    pub takes_setgid: bool,
}

impl Fs {
    /// The attributes that `stat` reports for a node.
    ///
    /// # Errors
    /// ENOENT for an unknown id; those of the base.
    pub fn getattr(&self, id: NodeId) -> FsResult<Attr> {
        if id.is_in_snapdir() {
            return self.snapdir_getattr(id);
        }
        let listed = u32::from(self.snapdir_entry(id).is_some());
        let mut attr = self.with_node(id, |core| {
            let target = core.target(id)?;
            core.note_getattr(id, &target);
            core.attr_of(id, &target)
        })?;
        // The snapshot directory, if listed, is one more subdirectory of the root.
        if attr.meta.nlink >= 2 {
            attr.meta.nlink += listed;
        }
        Ok(attr)
    }

    /// Sets attributes, in one step. The kernel has checked that the caller may.
    ///
    /// # Errors
    /// As [`Fs::truncate`] for a size; those of the store. Then nothing is changed.
    pub fn setattr<'a>(
        &self,
        id: NodeId,
        set: SetAttr,
        privileges: impl Into<PrivilegeBits<'a>>,
    ) -> FsResult<Attr> {
        let privileges = privileges.into();
        self.with_room(Need::Less, || {
            self.change_node(id, |core| core.setattr(id, set, privileges))
        })
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// ENODATA; those of the base.
    pub fn getxattr(&self, id: NodeId, name: &[u8]) -> FsResult<Vec<u8>> {
        check_namespace(name)?;
        let xattrs = self.xattrs(id)?;
        xattrs.as_ref().and_then(|x| x.get(name).cloned()).ok_or(FsError::NoAttribute)
    }

    /// The names of the extended attributes, each followed by a zero byte.
    ///
    /// # Errors
    /// Those of the base.
    pub fn listxattr(&self, id: NodeId) -> FsResult<Vec<u8>> {
        let xattrs = self.xattrs(id)?;
        let names = xattrs.iter().flat_map(|x| x.keys());
        Ok(names.flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    fn xattrs(&self, id: NodeId) -> FsResult<Xattrs> {
        if id.is_in_snapdir() {
            return self.snapdir_xattrs(id);
        }
        self.with_xattrs(id, |core| match core.target(id)? {
            Target::Base(_, path, node) => core.lower.xattrs(&path, &node),
            target => Ok(core.record_of(&target)?.xattrs.clone()),
        })
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// EEXIST, ENODATA, E2BIG, ERANGE, ENOSPC; those of the store.
    pub fn setxattr(&self, id: NodeId, name: &[u8], value: &[u8], how: SetXattr) -> FsResult<()> {
        if name.is_empty() || name.len() > XATTR_NAME_MAX {
            return Err(FsError::Range);
        }
        if value.len() > XATTR_SIZE_MAX {
            return Err(FsError::TooLarge);
        }
        check_namespace(name)?;
        self.with_room(Need::More, || {
            self.change_node(id, |core| {
                core.need_bytes(value.len() as u64)?;
                core.setxattr(id, name, value, how)
            })
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// ENODATA; those of the store.
    pub fn removexattr(&self, id: NodeId, name: &[u8]) -> FsResult<()> {
        check_namespace(name)?;
        self.with_room(Need::Less, || self.change_node(id, |core| core.removexattr(id, name)))
    }
}

impl Writing<'_> {
    fn setattr(
        &mut self,
        id: NodeId,
        set: SetAttr,
        privileges: PrivilegeBits<'_>,
    ) -> FsResult<Attr> {
        let target = self.target(id)?;
        if set.changes_privileges() {
            self.note_getattr(id, &target);
        }
        if let Some(size) = set.size {
            self.check_truncate(id, &target, size)?;
        }
        if set == SetAttr::default() {
            return self.attr_of(id, &target);
        }
        if (SetAttr { size: None, ..set }) != SetAttr::default() {
            self.need_record()?;
        }
        let node = self.writable(target)?;
        let edits = self.stage_setattr(node, set, privileges)?;
        self.commit_to(node, edits)?;
        self.attr_of(id, &node.target())
    }

    fn setxattr(&mut self, id: NodeId, name: &[u8], value: &[u8], how: SetXattr) -> FsResult<()> {
        let target = self.target(id)?;
        let changed = self.writable(target)?;
        let node = self.tree_of(changed).node(changed.key).ok_or(FsError::NotFound)?;
        check_setxattr(node, name, how)?;
        let mut meta = node.meta;
        let mut stored = Some(value.to_vec());
        if name == acl::ACCESS {
            let (mode, acl) = acl::on_set(value, meta.mode)?;
            meta.mode = if how.takes_setgid { mode & !SETGID } else { mode };
            stored = acl;
        }
        meta.ctime = clock::now();
        let edits = vec![
            Edit::Xattr { ino: changed.key, name: name.to_vec(), value: stored },
            Edit::Meta { ino: changed.key, meta },
        ];
        self.commit_to(changed, edits)
    }

    fn removexattr(&mut self, id: NodeId, name: &[u8]) -> FsResult<()> {
        let target = self.target(id)?;
        let changed = self.writable(target)?;
        let node = self.tree_of(changed).node(changed.key).ok_or(FsError::NotFound)?;
        if !node.xattrs.as_ref().is_some_and(|x| x.contains_key(name)) {
            // Every file has an ACL, if only the one that its mode stands for. So removing an ACL
            // that is not stored succeeds.
            return if acl::is_acl(name) { Ok(()) } else { Err(FsError::NoAttribute) };
        }
        let mut meta = node.meta;
        meta.ctime = clock::now();
        let edits = vec![
            Edit::Xattr { ino: changed.key, name: name.to_vec(), value: None },
            Edit::Meta { ino: changed.key, meta },
        ];
        self.commit_to(changed, edits)
    }

    /// The edits that set attributes.
    fn stage_setattr(
        &mut self,
        changed: Writable,
        set: SetAttr,
        privileges: PrivilegeBits<'_>,
    ) -> FsResult<Vec<Edit>> {
        let mut edits = Vec::new();
        let meta = match set.size {
            Some(size) => {
                let touch = Touch::Resize(size);
                self.begin_change(changed, touch)?;
                edits.push(Edit::Resize { ino: changed.key, size });
                Some(self.meta_after_change(changed, touch, privileges)?)
            }
            None => None,
        };
        let node = self.tree_of(changed).node(changed.key).ok_or(FsError::NotFound)?;
        let mut meta = meta.unwrap_or(node.meta);
        if set.changes_privileges() {
            edits.extend(clear_capabilities(changed.key, node));
        }
        // For a change of owner the kernel sends the cleared bits as a mode, or leaves them to us.
        if set.changes_owner() && set.mode.is_none() {
            clear_privileges(&mut meta);
        }
        apply_to_meta(&mut meta, set);
        if set.mode.is_some()
            && let Some(value) = acl::after_chmod(&node.xattrs, meta.mode)?
        {
            let name = acl::ACCESS.to_vec();
            edits.push(Edit::Xattr { ino: changed.key, name, value: Some(value) });
        }
        if set.changes_privileges() {
            privileges.clear_bare_setgid(&mut meta);
        }
        edits.push(Edit::Meta { ino: changed.key, meta });
        Ok(edits)
    }
}

/// Sets owner, mode and times.
fn apply_to_meta(meta: &mut Meta, set: SetAttr) {
    meta.uid = set.uid.unwrap_or(meta.uid);
    meta.gid = set.gid.unwrap_or(meta.gid);
    if let Some(mode) = set.mode {
        meta.mode = (meta.mode & TYPE_BITS) | (mode & PERM_BITS);
    }
    let now = clock::now();
    meta.atime = set.atime.map_or(meta.atime, |time| time.resolve(now));
    meta.mtime = set.mtime.map_or(meta.mtime, |time| time.resolve(now));
    meta.ctime = now;
}

/// Checks that an extended attribute may be set on a node.
fn check_setxattr(node: &Node, name: &[u8], how: SetXattr) -> FsResult<()> {
    let exists = node.xattrs.as_ref().is_some_and(|x| x.contains_key(name));
    if exists && how.create {
        return Err(FsError::Exists);
    }
    if !exists && how.replace {
        return Err(FsError::NoAttribute);
    }
    let listed: usize = node.xattrs.iter().flat_map(|x| x.keys()).map(|n| n.len() + 1).sum();
    if !exists && listed + name.len() + 1 > XATTR_LIST_MAX {
        return Err(FsError::LimitReached);
    }
    if name == acl::DEFAULT && node.kind() != FileKind::Dir {
        return Err(FsError::AccessDenied);
    }
    Ok(())
}

/// Refuses an extended attribute outside of the namespaces of ext4 (xattr(7)). Attributes of other
/// namespaces have a meaning to the filesystem that stores them, so an apply could not write them
/// to the base.
fn check_namespace(name: &[u8]) -> FsResult<()> {
    if acl::is_acl(name) {
        return Ok(());
    }
    let mut namespaces = [&b"user."[..], b"trusted.", b"security."].into_iter();
    match namespaces.find_map(|namespace| name.strip_prefix(namespace)) {
        None => Err(FsError::Unsupported),
        Some([]) => Err(FsError::Invalid),
        Some(_) => Ok(()),
    }
}
