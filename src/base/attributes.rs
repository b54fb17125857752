//! Reads and sets owner, mode, times and extended attributes of nodes in the base.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::AT_FDCWD;
use nix::fcntl::AtFlags;
use nix::sys::stat::{FchmodatFlags, Mode, UtimensatFlags, fchmodat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchownat};

use crate::error::FsResult;
use crate::sys::xattr;
use crate::types::{FileKind, PERM_BITS, Timestamp};

use super::errno::{write_errno, write_error};
use super::stat::BaseStat;

/// The attributes that a node of the base is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes<'a> {
    /// Permission bits. Type bits are ignored, and a symlink ignores the whole field.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Time of the last access.
    pub atime: Timestamp,
    /// Time of the last change of content.
    pub mtime: Timestamp,
    /// All extended attributes. Those that [`super::Base::xattrs`] returns and that are missing
    /// here are removed, except labels of security modules, which the policy of the host sets.
    pub xattrs: &'a [(Vec<u8>, Vec<u8>)],
    /// If this process may not change the owner: whether to keep the present owner and drop setuid
    /// and setgid, instead of failing.
    pub may_keep_owner: bool,
}

/// setuid and setgid.
const SET_ID_BITS: u32 = 0o6000;
const CAPABILITY: &[u8] = b"security.capability";

/// Whether an extended attribute belongs to the file. Others are internal to a filesystem.
pub(super) fn is_shown(name: &[u8]) -> bool {
    [&b"user."[..], b"trusted.", b"security.", b"system.posix_acl_"]
        .iter()
        .any(|space| name.starts_with(space))
}

/// Whether an extended attribute is the label of a security module. The policy of the host sets it,
/// and this process may not be allowed to.
fn is_label(name: &[u8]) -> bool {
    name.starts_with(b"security.") && name != CAPABILITY
}

/// All shown extended attributes, sorted by name.
pub(super) fn read_xattrs(object: &OwnedFd) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut all = Vec::new();
    for name in xattr::list(object)?.into_iter().filter(|name| is_shown(name)) {
        match xattr::get(object, &name) {
            Ok(value) => all.push((name, value)),
            // Removed since the list was read, or listed but not readable for this process.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::EOPNOTSUPP)) => {}
            Err(error) => return Err(error),
        }
    }
    all.sort_unstable();
    Ok(all)
}

/// Sets the attributes of an object, which may be an `O_PATH` descriptor of any kind of node.
///
/// The order is owner, mode, extended attributes, mode, times. chown clears setuid, setgid and the
/// capability, and setting an ACL changes the mode. The times come last, so that no other step
/// changes them. Values that are right already are not set: that would fail on a read-only
/// filesystem and for nodes of other users.
pub(super) fn set_attributes(object: &OwnedFd, wanted: &Attributes<'_>) -> FsResult<()> {
    let now = BaseStat::of(object)?;
    let mut mode = wanted.mode & PERM_BITS;
    let has_owner = (now.uid, now.gid) == (wanted.uid, wanted.gid);
    if !has_owner {
        // Only what differs: an unprivileged owner may change the group, but may not name an owner.
        let uid = (now.uid != wanted.uid).then_some(Uid::from_raw(wanted.uid));
        let gid = (now.gid != wanted.gid).then_some(Gid::from_raw(wanted.gid));
        match fchownat(object, "", uid, gid, AtFlags::AT_EMPTY_PATH) {
            Err(Errno::EPERM) if wanted.may_keep_owner => mode &= !SET_ID_BITS,
            changed => changed.map_err(write_errno)?,
        }
    }
    let is_link = now.kind == FileKind::Symlink;
    let present = read_xattrs(object).map_err(write_error)?;
    let differences = XattrDifferences::between(&present, wanted.xattrs);
    // Setting an attribute needs write permission, which the final mode may not give the owner.
    let mode_meanwhile = if differences.is_empty() { mode } else { mode | 0o200 };
    let has_mode = has_owner && differences.is_empty() && now.mode & PERM_BITS == mode;
    if !is_link && !has_mode {
        change_mode(object, mode_meanwhile)?;
    }
    differences.resolve(object)?;
    if !is_link && mode_meanwhile != mode {
        change_mode(object, mode)?;
    }
    if has_owner && (now.atime, now.mtime) == (wanted.atime, wanted.mtime) {
        return Ok(());
    }
    // By path, because utimensat(2) takes AT_EMPTY_PATH only since Linux 5.8.
    let (atime, mtime) = (time_spec(wanted.atime), time_spec(wanted.mtime));
    utimensat(AT_FDCWD, proc_path(object).as_str(), &atime, &mtime, UtimensatFlags::FollowSymlink)
        .map_err(write_errno)
}

/// Changes the mode of an object through its path in `/proc`: fchmod(2) refuses `O_PATH`
/// descriptors, and fchmodat2(2) needs Linux 6.6.
pub(super) fn change_mode(object: &OwnedFd, mode: u32) -> FsResult<()> {
    let mode = Mode::from_bits_truncate(mode);
    fchmodat(AT_FDCWD, proc_path(object).as_str(), mode, FchmodatFlags::FollowSymlink)
        .map_err(write_errno)
}

/// A path that leads to the object of a descriptor, whatever its names are.
pub(super) fn proc_path(object: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", object.as_raw_fd())
}

fn time_spec(time: Timestamp) -> TimeSpec {
    // utimensat(2) takes larger numbers as "now" and "omit".
    TimeSpec::new(time.secs, i64::from(time.nanos.min(999_999_999)))
}

struct XattrDifferences<'a> {
    remove: Vec<Vec<u8>>,
    set: Vec<&'a (Vec<u8>, Vec<u8>)>,
}

impl<'a> XattrDifferences<'a> {
    fn between(
        present: &[(Vec<u8>, Vec<u8>)],
        wanted: &'a [(Vec<u8>, Vec<u8>)],
    ) -> XattrDifferences<'a> {
        let is_wanted = |name: &[u8]| wanted.iter().any(|(wanted, _)| wanted == name);
        XattrDifferences {
            remove: present
                .iter()
                .map(|(name, _)| name)
                .filter(|name| !is_wanted(name) && !is_label(name))
                .cloned()
                .collect(),
            set: wanted.iter().filter(|attribute| !present.contains(attribute)).collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.remove.is_empty() && self.set.is_empty()
    }

    fn resolve(&self, object: &OwnedFd) -> FsResult<()> {
        for name in &self.remove {
            match xattr::remove(object, name) {
                Err(error) if error.raw_os_error() == Some(Errno::ENODATA as i32) => {}
                other => other.map_err(write_error)?,
            }
        }
        for (name, value) in &self.set {
            match xattr::set(object, name, value) {
                // The policy of the host has set its own label and allows no other.
                Err(_) if is_label(name) => {}
                other => other.map_err(write_error)?,
            }
        }
        Ok(())
    }
}
