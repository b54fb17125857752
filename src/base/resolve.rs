//! Opening a path beneath a directory, through no link and into no other mount.
//!
//! openat2(2) does it in one call. Where it is missing, or a seccomp profile answers EPERM for it, the path is walked name
//! by name, each opened with `O_PATH | O_NOFOLLOW` and looked at before the next is opened in it. Both are safe
//! against renames meanwhile: paths have no `..`, so a walk can only go down, and what it goes down through was a
//! directory of this mount at the moment it was opened. Both give the same errors: ELOOP for a symlink on the way,
//! ENOTDIR for another non-directory, EXDEV for a mount point.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};

use crate::sys::file::mount_id;

/// How often a call that was disturbed (EAGAIN, EINTR) is made again.
const TRIES: usize = 128;
/// The longest piece of a path for one call; the kernel takes 4,096 bytes with the NUL (`PATH_MAX`).
const PIECE: usize = 4000;

/// A directory to resolve from, and how to tell that a descriptor is in the same mount.
pub(super) struct Root {
    pub(super) fd: OwnedFd,
    pub(super) place: Place,
}

/// Where something is mounted. The id tells two mounts of one filesystem apart, and does not mistake a btrfs
/// subvolume for a mount as `st_dev` does; so `st_dev` is only for kernels without ids.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Mount(u64),
    Device(u64),
}

impl Place {
    fn of<Fd: AsFd>(fd: Fd) -> Place {
        match mount_id(&fd) {
            Some(id) => Place::Mount(id),
            // A device number that no filesystem has: nothing is in the same place then.
            None => Place::Device(fstat(fd).map_or(u64::MAX, |stat| stat.st_dev)),
        }
    }
}

impl Root {
    pub(super) fn new(fd: OwnedFd) -> Root {
        Root { place: Place::of(&fd), fd }
    }
}

/// Opens paths in one of the two ways, and remembers which one works.
pub(super) struct Resolver {
    openat2: AtomicBool,
}

impl Resolver {
    pub(super) fn new(openat2: bool) -> Resolver {
        Resolver { openat2: AtomicBool::new(openat2) }
    }

    /// Opens `path`, names joined by `/` or nothing for the root itself, with `flags`; a symlink as the last name is
    /// opened only with `O_PATH`, as itself.
    pub(super) fn open(&self, root: &Root, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        if self.openat2.load(Ordering::Relaxed) {
            match open_beneath(root, path, flags) {
                Err(Errno::ENOSYS) => self.openat2.store(false, Ordering::Relaxed),
                // EPERM may be about O_NOATIME; for finding the root, which is open already, it is seccomp's answer.
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

/// Opens by openat2(2), in pieces if the path is longer than one call takes.
fn open_beneath(root: &Root, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    let mut from: Option<OwnedFd> = None;
    let mut rest = path;
    while rest.len() > PIECE {
        let head = rest.get(..PIECE).ok_or(Errno::ENAMETOOLONG)?;
        let slash = head.iter().rposition(|&byte| byte == b'/').ok_or(Errno::ENAMETOOLONG)?;
        let (piece, tail) = rest.split_at_checked(slash).ok_or(Errno::ENAMETOOLONG)?;
        let next = call_openat2(from.as_ref().unwrap_or(&root.fd), piece, O_PATH_DIR)?;
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
    // EAGAIN: a rename or mount somewhere on the system disturbed the walk, "should be retried" (openat2(2)).
    again(|| openat2(dir, path, how))
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
        let next = look_at(root, at.as_ref().unwrap_or(&root.fd), name)?;
        must_be_directory(&fstat(&next)?)?;
        at = Some(next);
    }
    let dir = at.as_ref().unwrap_or(&root.fd);
    if last.is_empty() {
        return again(|| openat(dir, ".", flags, Mode::empty()));
    }
    if flags.contains(OFlag::O_PATH) && !flags.contains(OFlag::O_DIRECTORY) {
        return look_at(root, dir, last);
    }
    // Look before opening: opening what is mounted there, or a device, can do things.
    let looked = look_at(root, dir, last)?;
    if is_link(&fstat(&looked)?) {
        return Err(Errno::ELOOP);
    }
    let opened = again(|| openat(dir, OsStr::from_bytes(last), flags, Mode::empty()))?;
    if Place::of(&opened) == root.place { Ok(opened) } else { Err(Errno::EXDEV) }
}

/// Refers to `name` without opening it, and checks that it is not in another mount.
fn look_at(root: &Root, dir: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    if name == b"." || name == b".." {
        return Err(Errno::EXDEV);
    }
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let object = again(|| openat(dir, OsStr::from_bytes(name), flags, Mode::empty()))?;
    if Place::of(&object) == root.place { Ok(object) } else { Err(Errno::EXDEV) }
}

fn must_be_directory(stat: &FileStat) -> Result<(), Errno> {
    match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFDIR => Ok(()),
        SFlag::S_IFLNK => Err(Errno::ELOOP),
        _ => Err(Errno::ENOTDIR),
    }
}

fn is_link(stat: &FileStat) -> bool {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFLNK
}

fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut call = || super::may_open().and_then(|()| call());
    for _ in 0..TRIES {
        match call() {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            other => return other,
        }
    }
    call()
}
