//! Clears setuid, setgid and file capabilities when a file changes, as the kernel does for its own
//! filesystems.
//!
//! * A change of content, size or owner clears file capabilities, also if root makes it.
//! * Setuid, and setgid with group execution, are cleared if the caller lacks CAP_FSETID.
//! * Setgid without group execution is cleared unless the caller is in the file's group or has
//!   CAP_FSETID (`setattr_should_drop_sgid` in the kernel).

use crate::tree::{Edit, Meta, Node};
use crate::types::{FileKind, Ino, TYPE_BITS};

const SETUID: u32 = 0o4000;
pub(super) const SETGID: u32 = 0o2000;
const GROUP_EXEC: u32 = 0o010;
/// The extended attribute that holds file capabilities (capabilities(7)).
const CAPABILITY: &[u8] = b"security.capability";

/// The rights of a caller that decide about setuid and setgid. They are asked for only when a bit
/// goes without them, and under the core lock.
pub trait CallerRights {
    /// Whether the caller has CAP_FSETID.
    fn has_fsetid(&self) -> bool;

    /// Whether the caller is in this group or has CAP_FSETID.
    fn may_keep_setgid(&self, group: u32) -> bool;
}

/// The treatment of setuid and setgid when a file changes.
#[derive(Clone, Copy)]
pub enum PrivilegeBits<'a> {
    /// Both stay.
    Keep,
    /// Setuid is cleared, and setgid with group execution.
    Clear,
    /// The rights of the caller decide.
    AsCaller(&'a dyn CallerRights),
}

/// `true` clears the bits.
impl From<bool> for PrivilegeBits<'_> {
    fn from(clear: bool) -> Self {
        if clear { PrivilegeBits::Clear } else { PrivilegeBits::Keep }
    }
}

impl PrivilegeBits<'_> {
    /// Clears setuid, and setgid with group execution, if the caller must lose them.
    pub(super) fn clear(self, meta: &mut Meta) {
        let mut cleared = *meta;
        clear_privileges(&mut cleared);
        let clears = match self {
            PrivilegeBits::Keep => false,
            PrivilegeBits::Clear => true,
            PrivilegeBits::AsCaller(rights) => cleared.mode != meta.mode && !rights.has_fsetid(),
        };
        if clears {
            *meta = cleared;
        }
    }

    /// Clears a setgid bit without group execution that the caller may not leave on a changed file.
    pub(super) fn clear_bare_setgid(self, meta: &mut Meta) {
        let PrivilegeBits::AsCaller(rights) = self else { return };
        let is_file = meta.mode & TYPE_BITS == FileKind::File.type_bits();
        let is_bare = meta.mode & (SETGID | GROUP_EXEC) == SETGID;
        if is_file && is_bare && !rights.may_keep_setgid(meta.gid) {
            meta.mode &= !SETGID;
        }
    }
}

/// Clears setuid, and setgid with group execution. A directory keeps both.
pub(super) fn clear_privileges(meta: &mut Meta) {
    if meta.mode & TYPE_BITS == FileKind::Dir.type_bits() {
        return;
    }
    meta.mode &= !SETUID;
    if meta.mode & GROUP_EXEC != 0 {
        meta.mode &= !SETGID;
    }
}

/// The edit that clears the file capabilities of a node; `None` if it has none.
pub(super) fn clear_capabilities(ino: Ino, node: &Node) -> Option<Edit> {
    let has_capabilities = node.xattrs.as_ref().is_some_and(|x| x.contains_key(CAPABILITY));
    has_capabilities.then(|| Edit::Xattr { ino, name: CAPABILITY.to_vec(), value: None })
}
