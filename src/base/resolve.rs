//! Opens paths beneath a directory, through no symlink and into no other mount.
//!
//! * Both methods are safe while other processes rename: paths have no `..`, so a walk only goes
//!   down, and each step was a directory of this mount at the moment it was opened.
//! * Both methods fail alike: ELOOP for a symlink on the way, ENOTDIR for another non-directory,
//!   EXDEV for a mount point.
//!
//! The first method is openat2(2), one call per path. Where the kernel lacks it, or a seccomp
//! profile answers EPERM, the path is walked name by name: each name is opened with `O_PATH |
//! O_NOFOLLOW` and checked before the next one is opened in it.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};

use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::file::mount_id;
use crate::sys::lock::{Rank, check_not_held};

/// How often a call is repeated after EAGAIN or EINTR.
const TRIES: usize = 128;
/// The longest part of a path for one call. The kernel takes 4,096 bytes with the NUL (`PATH_MAX`).
const PART: usize = 4000;

/// A directory to resolve from, and its mount, to recognise descriptors of other mounts.
pub(super) struct Root {
    pub(super) fd: OwnedFd,
    pub(super) mount: MountId,
}

/// Identifies a mount. The mount id tells two mounts of one filesystem apart, and a btrfs subvolume
/// has the id of its mount. `st_dev` fails at both, so it serves only kernels without mount ids.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MountId {
    Mount(u64),
    Device(u64),
}

impl MountId {
    fn of<Fd: AsFd>(fd: Fd) -> MountId {
        match mount_id(&fd) {
            Some(id) => MountId::Mount(id),
            // If fstat fails, a device number that no filesystem has: nothing is then in the same
            // mount.
            None => MountId::Device(fstat(fd).map_or(u64::MAX, |stat| stat.st_dev)),
        }
    }
}

impl Root {
    pub(super) fn new(fd: OwnedFd) -> Root {
        Root { mount: MountId::of(&fd), fd }
    }
}

/// Opens paths by one of the two methods, and remembers if openat2(2) does not work.
pub(super) struct Resolver {
    openat2: AtomicBool,
}

impl Resolver {
    pub(super) fn new(openat2: bool) -> Resolver {
        Resolver { openat2: AtomicBool::new(openat2) }
    }

    /// Opens `path` with `flags`. `path` is names joined by `/`, and empty for the root itself. If
    /// the last name is a symlink, it is opened as itself, and only with `O_PATH`.
    pub(super) fn open(&self, root: &Root, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
        check_not_held(Rank::Core);
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        if self.openat2.load(Ordering::Relaxed) {
            match open_beneath(root, path, flags) {
                Err(Errno::ENOSYS) => self.openat2.store(false, Ordering::Relaxed),
                // EPERM may be about O_NOATIME. If opening the root, which is open already, gives
                // it, too, it comes from seccomp.
                Err(Errno::EPERM)
                    if matches!(open_beneath(root, b"", O_PATH_DIR), Err(Errno::EPERM)) =>
                {
                    self.openat2.store(false, Ordering::Relaxed);
                }
                other => return other,
            }
        }
        walk(root, path, flags)
    }
}

const O_PATH_DIR: OFlag =
    OFlag::O_PATH.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Opens by openat2(2), in parts if the path is longer than one call takes.
fn open_beneath(root: &Root, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    let mut from: Option<OwnedFd> = None;
    let mut rest = path;
    while rest.len() > PART {
        let head = rest.get(..PART).ok_or(Errno::ENAMETOOLONG)?;
        let slash = head.iter().rposition(|&byte| byte == b'/').ok_or(Errno::ENAMETOOLONG)?;
        let (part, tail) = rest.split_at_checked(slash).ok_or(Errno::ENAMETOOLONG)?;
        let next = call_openat2(from.as_ref().unwrap_or(&root.fd), part, O_PATH_DIR)?;
        from = Some(next);
        rest = tail.get(1..).unwrap_or_default();
    }
    call_openat2(from.as_ref().unwrap_or(&root.fd), rest, flags)
}

fn call_openat2(dir: &OwnedFd, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { OsStr::new(".") } else { OsStr::from_bytes(path) };
    let how = OpenHow::new().flags(flags).resolve(
        ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_MAGICLINKS
            | ResolveFlag::RESOLVE_NO_XDEV,
    );
    // EAGAIN: a rename or mount somewhere on the system disturbed the walk; openat2(2) says to
    // retry.
    retry(|| openat2(dir, path, how))
}

/// Opens by walking name by name.
fn walk(root: &Root, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    let (parents, last) = match path.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => {
            (path.get(..slash).unwrap_or_default(), path.get(slash + 1..).unwrap_or_default())
        }
        None => (&b""[..], path),
    };
    let mut at: Option<OwnedFd> = None;
    for name in parents.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
        let next = check(root, at.as_ref().unwrap_or(&root.fd), name)?;
        require_directory(&fstat(&next)?)?;
        at = Some(next);
    }
    let dir = at.as_ref().unwrap_or(&root.fd);
    if last.is_empty() {
        return retry(|| openat(dir, ".", flags, Mode::empty()));
    }
    if flags.contains(OFlag::O_PATH) && !flags.contains(OFlag::O_DIRECTORY) {
        return check(root, dir, last);
    }
    // Check before opening: opening a mounted filesystem or a device can have side effects.
    let checked = check(root, dir, last)?;
    if is_link(&fstat(&checked)?) {
        return Err(Errno::ELOOP);
    }
    let opened = retry(|| openat(dir, OsStr::from_bytes(last), flags, Mode::empty()))?;
    if MountId::of(&opened) == root.mount { Ok(opened) } else { Err(Errno::EXDEV) }
}

/// Opens `name` with `O_PATH`, and checks that it is not in another mount.
fn check(root: &Root, dir: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    if name == b"." || name == b".." {
        return Err(Errno::EXDEV);
    }
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let object = retry(|| openat(dir, OsStr::from_bytes(name), flags, Mode::empty()))?;
    if MountId::of(&object) == root.mount { Ok(object) } else { Err(Errno::EXDEV) }
}

fn require_directory(stat: &FileStat) -> Result<(), Errno> {
    match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFDIR => Ok(()),
        SFlag::S_IFLNK => Err(Errno::ELOOP),
        _ => Err(Errno::ENOTDIR),
    }
}

fn is_link(stat: &FileStat) -> bool {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFLNK
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut call = || open_failpoint().and_then(|()| call());
    for _ in 0..TRIES {
        match call() {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            other => return other,
        }
    }
    call()
}

/// The failpoint of each call that opens or looks up a node of the base.
pub(super) fn open_failpoint() -> Result<(), Errno> {
    failpoint::hit(Failpoint::BaseOpen)
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}
