//! Operations on attributes, extended ones included.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::ops::acl;
use crate::fs::ops::data::{CAPABILITY, kill_privileges};
use crate::fs::{Attr, Fs, Need, Target};
use crate::sys::clock;
use crate::tree::{Edit, Xattrs};
use crate::types::{FileKind, NodeId, PERM_BITS, TYPE_BITS, Timestamp};

/// Largest value of an extended attribute, in bytes (`XATTR_SIZE_MAX`).
const XATTR_SIZE_MAX: usize = 65_536;
/// Longest name of an extended attribute, in bytes (`XATTR_NAME_MAX`).
const XATTR_NAME_MAX: usize = 255;
/// Largest list of names, in bytes (`XATTR_LIST_MAX`).
const XATTR_LIST_MAX: usize = 65_536;

const SETGID: u32 = 0o2000;
const GROUP_EXEC: u32 = 0o010;

/// A time to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the operation.
    Now,
    /// This time.
    To(Timestamp),
}

/// Attributes to be set; none stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Bytes of a file.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the content.
    pub mtime: Option<SetTime>,
    /// Whether the caller lacks CAP_FSETID, so that a change of size or owner drops setuid and setgid.
    pub kill: bool,
}

/// How an extended attribute is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetXattr {
    /// It must be new: XATTR_CREATE of setxattr(2).
    pub create: bool,
    /// It must be there: XATTR_REPLACE.
    pub replace: bool,
    /// With an access ACL, setgid goes: its caller is not in the file's group and lacks CAP_FSETID.
    pub takes_setgid: bool,
}

impl SetTime {
    fn resolve(self, now: Timestamp) -> Timestamp {
        match self {
            SetTime::Now => now,
            SetTime::To(time) => time,
        }
    }
}

impl Fs {
    /// What `stat` shows of a node.
    ///
    /// # Errors
    /// ENOENT for an id that was never given out, or what the base answers.
    pub fn getattr(&self, id: NodeId) -> FsResult<Attr> {
        if id.is_in_snapdir() {
            return self.past_getattr(id);
        }
        let listed = u32::from(self.listed_past(id).is_some());
        let mut core = self.core();
        let target = core.target(id)?;
        core.note_getattr(id, &target);
        let mut attr = core.attr_of(id, &target)?;
        if attr.meta.nlink >= 2 {
            attr.meta.nlink += listed;
        }
        Ok(attr)
    }

    /// Sets attributes. Whether the caller may is the kernel's decision.
    ///
    /// # Errors
    /// As [`Fs::truncate`] for a size, else what the store answers.
    pub fn setattr(&self, id: NodeId, set: SetAttr) -> FsResult<Attr> {
        self.with_room(Need::Less, || self.try_setattr(id, set))
    }

    fn try_setattr(&self, id: NodeId, set: SetAttr) -> FsResult<Attr> {
        if let Some(size) = set.size {
            self.truncate(id, size, set.kill)?;
        }
        let mut core = self.core();
        let rest = SetAttr { size: None, kill: false, ..set };
        if rest != SetAttr::default() {
            core.need_record(&self.store)?;
            let subject = core.subject(id)?;
            let node = core.tree_of(subject).node(subject.key).cloned().ok_or(FsError::NotFound)?;
            let mut meta = node.meta;
            let mut edits = Vec::new();
            if set.uid.is_some() || set.gid.is_some() {
                meta.uid = set.uid.unwrap_or(meta.uid);
                meta.gid = set.gid.unwrap_or(meta.gid);
                // The kernel sends the bits to clear as a mode, or leaves them to us: never to a directory.
                if set.kill || set.mode.is_none() {
                    kill_privileges(&mut meta);
                }
                if node.xattrs.as_ref().is_some_and(|x| x.contains_key(CAPABILITY)) {
                    edits.push(Edit::Xattr {
                        ino: subject.key,
                        name: CAPABILITY.to_vec(),
                        value: None,
                    });
                }
            }
            if let Some(mode) = set.mode {
                meta.mode = (meta.mode & TYPE_BITS) | (mode & PERM_BITS);
                if let Some(value) = acl::after_chmod(&node.xattrs, meta.mode)? {
                    edits.push(Edit::Xattr {
                        ino: subject.key,
                        name: acl::ACCESS.to_vec(),
                        value: Some(value),
                    });
                }
            }
            let now = clock::now();
            meta.atime = set.atime.map_or(meta.atime, |t| t.resolve(now));
            meta.mtime = set.mtime.map_or(meta.mtime, |t| t.resolve(now));
            meta.ctime = now;
            edits.push(Edit::Meta { ino: subject.key, meta });
            core.commit_to(subject, edits)?;
        }
        let target = core.target(id)?;
        core.attr_of(id, &target)
    }

    /// Takes a setgid bit that goes with no right to execute from a file that was changed. Who is in the file's group may
    /// leave it there (`may_leave`, asked only then, with the group), as the kernel's `setattr_should_drop_sgid` has it.
    /// Whether it was taken.
    ///
    /// # Errors
    /// What the store answers.
    pub fn take_bare_setgid(
        &self,
        id: NodeId,
        may_leave: impl FnOnce(u32) -> bool,
    ) -> FsResult<bool> {
        let attr = self.getattr(id)?;
        let is_bare = |mode: u32| mode & (SETGID | GROUP_EXEC) == SETGID;
        if attr.kind != FileKind::File || !is_bare(attr.meta.mode) || may_leave(attr.meta.gid) {
            return Ok(false);
        }
        let mut core = self.core();
        let subject = core.subject(id)?;
        let mut meta =
            core.tree_of(subject).node(subject.key).map(|n| n.meta).ok_or(FsError::NotFound)?;
        if !is_bare(meta.mode) {
            return Ok(false);
        }
        meta.mode &= !SETGID;
        meta.ctime = clock::now();
        core.commit_to(subject, vec![Edit::Meta { ino: subject.key, meta }])?;
        Ok(true)
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// ENODATA, or what the base answers.
    pub fn getxattr(&self, id: NodeId, name: &[u8]) -> FsResult<Vec<u8>> {
        check_space(name)?;
        let xattrs = self.xattrs(id)?;
        xattrs.as_ref().and_then(|x| x.get(name).cloned()).ok_or(FsError::NoAttribute)
    }

    /// The names of the extended attributes, each followed by a zero byte.
    ///
    /// # Errors
    /// What the base answers.
    pub fn listxattr(&self, id: NodeId) -> FsResult<Vec<u8>> {
        let xattrs = self.xattrs(id)?;
        let names = xattrs.iter().flat_map(|x| x.keys());
        Ok(names.flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    fn xattrs(&self, id: NodeId) -> FsResult<Xattrs> {
        if id.is_in_snapdir() {
            return self.past_xattrs(id);
        }
        let core = self.core();
        match core.target(id)? {
            Target::Base(_, path, node) => {
                let lower = Arc::clone(&core.lower);
                // Only attributes are asked of the base here, and nobody can change those under us.
                drop(core);
                lower.xattrs(&path, &node)
            }
            target => Ok(core.record_of(&target)?.xattrs.clone()),
        }
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// EEXIST, ENODATA, E2BIG, ERANGE, ENOSPC, or what the store answers.
    pub fn setxattr(&self, id: NodeId, name: &[u8], value: &[u8], how: SetXattr) -> FsResult<()> {
        self.with_room(Need::More, || self.try_setxattr(id, name, value, how))
    }

    fn try_setxattr(&self, id: NodeId, name: &[u8], value: &[u8], how: SetXattr) -> FsResult<()> {
        if name.is_empty() || name.len() > XATTR_NAME_MAX {
            return Err(FsError::Range);
        }
        if value.len() > XATTR_SIZE_MAX {
            return Err(FsError::TooLarge);
        }
        check_space(name)?;
        let mut core = self.core();
        core.need_bytes(&self.store, value.len() as u64)?;
        let subject = core.subject(id)?;
        let node = core.tree_of(subject).node(subject.key).cloned().ok_or(FsError::NotFound)?;
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
        let mut meta = node.meta;
        let mut stored = Some(value.to_vec());
        if name == acl::ACCESS {
            let (mode, acl) = acl::on_set(value, meta.mode)?;
            meta.mode = if how.takes_setgid { mode & !SETGID } else { mode };
            stored = acl;
        }
        if name == acl::DEFAULT && node.kind() != FileKind::Dir {
            return Err(FsError::AccessDenied);
        }
        meta.ctime = clock::now();
        let edits = vec![
            Edit::Xattr { ino: subject.key, name: name.to_vec(), value: stored },
            Edit::Meta { ino: subject.key, meta },
        ];
        core.commit_to(subject, edits)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// ENODATA, or what the store answers.
    pub fn removexattr(&self, id: NodeId, name: &[u8]) -> FsResult<()> {
        self.with_room(Need::Less, || self.try_removexattr(id, name))
    }

    fn try_removexattr(&self, id: NodeId, name: &[u8]) -> FsResult<()> {
        check_space(name)?;
        let mut core = self.core();
        let subject = core.subject(id)?;
        let node = core.tree_of(subject).node(subject.key).cloned().ok_or(FsError::NotFound)?;
        if !node.xattrs.as_ref().is_some_and(|x| x.contains_key(name)) {
            // Every file has an ACL, if only the one that its mode is: there is nothing to be missed.
            return if acl::is_acl(name) { Ok(()) } else { Err(FsError::NoAttribute) };
        }
        let mut meta = node.meta;
        meta.ctime = clock::now();
        let edits = vec![
            Edit::Xattr { ino: subject.key, name: name.to_vec(), value: None },
            Edit::Meta { ino: subject.key, meta },
        ];
        core.commit_to(subject, edits)
    }
}
/// Holds the name of an extended attribute against the spaces that ext4 knows (xattr(7)). Of others no base could take an attribute home: the
/// host's filesystems know them by meaning.
fn check_space(name: &[u8]) -> FsResult<()> {
    if acl::is_acl(name) {
        return Ok(());
    }
    let mut spaces = [&b"user."[..], b"trusted.", b"security."].into_iter();
    match spaces.find_map(|space| name.strip_prefix(space)) {
        None => Err(FsError::Unsupported),
        Some([]) => Err(FsError::Invalid),
        Some(_) => Ok(()),
    }
}
