//! Owner, mode, times and extended attributes of a node of the base: reading them all, and making them exactly so.

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

use super::stat::BaseStat;
use super::write::{write_error, write_failure};

/// What a node of the base is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes<'a> {
    /// Permission bits; type bits are ignored, and all of it for a symlink.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Last read.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// All extended attributes: those that [`super::Base::xattrs`] shows and that are not here are removed, except the
    /// labels of security modules, which are the host's to give.
    pub xattrs: &'a [(Vec<u8>, Vec<u8>)],
    /// Whether it may stay ours, without setuid and setgid, where we may not give it its owner.
    pub or_ours: bool,
}

/// setuid and setgid.
const PRIVILEGES: u32 = 0o6000;
const CAPABILITY: &[u8] = b"security.capability";

/// Whether an attribute belongs to the file, rather than to the workings of its filesystem.
pub(super) fn is_shown(name: &[u8]) -> bool {
    [&b"user."[..], b"trusted.", b"security.", b"system.posix_acl_"]
        .iter()
        .any(|space| name.starts_with(space))
}

/// Whether an attribute is the label of a security module: given by the host's policy, perhaps not ours to set.
fn is_label(name: &[u8]) -> bool {
    name.starts_with(b"security.") && name != CAPABILITY
}

/// All attributes that are shown, sorted by name.
pub(super) fn read_xattrs(object: &OwnedFd) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut all = Vec::new();
    for name in xattr::list(object)?.into_iter().filter(|name| is_shown(name)) {
        match xattr::get(object, &name) {
            Ok(value) => all.push((name, value)),
            // Removed meanwhile, or listed but not for us.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::EOPNOTSUPP)) => {}
            Err(error) => return Err(error),
        }
    }
    all.sort_unstable();
    Ok(all)
}

/// Gives the object, which may be an `O_PATH` descriptor of anything, the attributes.
///
/// The order matters: chown clears setuid, setgid and the capability; an ACL changes the mode; everything but the
/// times changes no times that we set, so they come last. What is so already is not set: that would
/// fail on a read-only filesystem, and for a node of another owner.
pub(super) fn make_so(object: &OwnedFd, wanted: &Attributes<'_>) -> FsResult<()> {
    let now = BaseStat::of(object)?;
    let mut mode = wanted.mode & PERM_BITS;
    let has_owner = (now.uid, now.gid) == (wanted.uid, wanted.gid);
    if !has_owner {
        let (uid, gid) = (Uid::from_raw(wanted.uid), Gid::from_raw(wanted.gid));
        // Only what differs: a user may change the group of a file and still not "change" its owner elsewhere.
        let uid = (now.uid != wanted.uid).then_some(uid);
        let gid = (now.gid != wanted.gid).then_some(gid);
        match fchownat(object, "", uid, gid, AtFlags::AT_EMPTY_PATH) {
            Err(Errno::EPERM) if wanted.or_ours => mode &= !PRIVILEGES,
            given => given.map_err(write_error)?,
        }
    }
    let is_link = now.kind == FileKind::Symlink;
    let differences =
        Differences::between(&read_xattrs(object).map_err(write_failure)?, wanted.xattrs);
    // Setting an attribute of a file takes the permission to write it, which its owner may not have in the end.
    let for_now = if differences.is_empty() { mode } else { mode | 0o200 };
    let has_mode = has_owner && differences.is_empty() && now.mode & PERM_BITS == mode;
    if !is_link && !has_mode {
        change_mode(object, for_now)?;
    }
    differences.resolve(object)?;
    if !is_link && for_now != mode {
        change_mode(object, mode)?;
    }
    if has_owner && (now.atime, now.mtime) == (wanted.atime, wanted.mtime) {
        return Ok(());
    }
    // A path of our own, to the very object of the descriptor; utimensat(2) takes AT_EMPTY_PATH since Linux 5.8 only.
    let (atime, mtime) = (time_spec(wanted.atime), time_spec(wanted.mtime));
    utimensat(AT_FDCWD, path_to(object).as_str(), &atime, &mtime, UtimensatFlags::FollowSymlink)
        .map_err(write_error)
}

/// chmod(2) by the magic link: fchmod(2) refuses `O_PATH` descriptors, and fchmodat2(2) is of Linux 6.6.
pub(super) fn change_mode(object: &OwnedFd, mode: u32) -> FsResult<()> {
    let mode = Mode::from_bits_truncate(mode);
    fchmodat(AT_FDCWD, path_to(object).as_str(), mode, FchmodatFlags::FollowSymlink)
        .map_err(write_error)
}

/// A path of our own to the very object of a descriptor.
pub(super) fn path_to(object: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", object.as_raw_fd())
}

fn time_spec(time: Timestamp) -> TimeSpec {
    // Above 999,999,999 are the signs for "now" and "leave" (utimensat(2)).
    TimeSpec::new(time.secs, i64::from(time.nanos.min(999_999_999)))
}

struct Differences<'a> {
    remove: Vec<Vec<u8>>,
    set: Vec<&'a (Vec<u8>, Vec<u8>)>,
}

impl<'a> Differences<'a> {
    fn between(have: &[(Vec<u8>, Vec<u8>)], want: &'a [(Vec<u8>, Vec<u8>)]) -> Differences<'a> {
        let wanted = |name: &[u8]| want.iter().any(|(want, _)| want == name);
        Differences {
            remove: have
                .iter()
                .map(|(name, _)| name)
                .filter(|name| !wanted(name) && !is_label(name))
                .cloned()
                .collect(),
            set: want.iter().filter(|attribute| !have.contains(attribute)).collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.remove.is_empty() && self.set.is_empty()
    }

    fn resolve(&self, object: &OwnedFd) -> FsResult<()> {
        for name in &self.remove {
            match xattr::remove(object, name) {
                Err(error) if error.raw_os_error() == Some(Errno::ENODATA as i32) => {}
                other => other.map_err(write_failure)?,
            }
        }
        for (name, value) in &self.set {
            match xattr::set(object, name, value) {
                // The policy of the host has given its own label, and does not let us give another.
                Err(_) if is_label(name) => {}
                other => other.map_err(write_failure)?,
            }
        }
        Ok(())
    }
}
