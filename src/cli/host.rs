//! Queries about mounts of the host, and unmounting.

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;

use crate::error::{Attempt, Error, Kind, Result};
use crate::sys;

/// The virtual attributes in which every file of a mount names its store and its head.
const STORE_ATTRIBUTE: &[u8] = b"user.jailfs.store";
const HEAD_ATTRIBUTE: &[u8] = b"user.jailfs.head";
/// The filesystem type of our mounts in /proc/self/mountinfo.
pub(super) const FS_TYPE: &[u8] = b"fuse.jailfs";
/// The time limit for the daemons of other mounts. One of them may be stopped.
const PATIENCE: Duration = Duration::from_secs(2);

/// The content of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The store's directory.
    pub(super) store: PathBuf,
    /// The head; `None` in a mount by a jailfs without heads.
    pub(super) head: Option<String>,
}

/// The mount in which a directory lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Within {
    /// In a mount of a store.
    Mount(Place),
    /// In a mount with a dead daemon, at this mount point.
    DeadMount(PathBuf),
    /// In no jailfs mount.
    Host,
}

/// The resolved absolute path of a user's argument. It must exist.
///
/// # Errors
/// The path does not exist, or its daemon is dead.
pub(super) fn resolve(path: &Path) -> Result<PathBuf> {
    sys::path::resolve(path).attempt(|| format!("find '{}'", path.display()))
}

/// Finds the mount in which `dir` lies.
///
/// # Errors
/// `dir` does not exist, or its attributes cannot be read.
pub(super) fn within(dir: &Path) -> Result<Within> {
    let attempt = || format!("read the attributes of '{}'", dir.display());
    match place(dir) {
        Ok(place) => Ok(Within::Mount(place)),
        Err(error) => match errno(&error) {
            Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS => Ok(Within::Host),
            Errno::ENOTCONN | Errno::ECONNABORTED => {
                Ok(mount_around(&absolute(dir)?)?.map_or(Within::Host, Within::DeadMount))
            }
            Errno::EPERM => Err(Error::io(attempt(), &error)
                .hint("the mount belongs to another user: run jailfs as that user")),
            _ => Err(Error::io(attempt(), &error)),
        },
    }
}

/// The content of the mount in which a directory lies. ENODATA if it is not a mount of ours: on
/// other filesystems any user can set the attributes.
///
/// # Errors
/// EPERM if the mount belongs neither to this user nor to root, because its owner could name any
/// store. Other errors of the calls.
fn place(dir: &Path) -> io::Result<Place> {
    let flags = (OFlag::O_PATH | OFlag::O_DIRECTORY).bits();
    let dir = OpenOptions::new().read(true).custom_flags(flags).open(dir)?;
    let store = sys::xattr::get(&dir, STORE_ATTRIBUTE)?;
    let id = sys::file::mount_id(&dir).ok_or(Errno::ENODATA)?;
    let mount = sys::mountinfo::read()?.into_iter().find(|mount| mount.id == id);
    let Some(mount) = mount.filter(|mount| mount.fs_type == FS_TYPE) else {
        return Err(Errno::ENODATA.into());
    };
    let us = nix::unistd::geteuid().as_raw();
    if !owner(&mount).is_some_and(|owner| owner == us || owner == 0) {
        return Err(Errno::EPERM.into());
    }
    let head = match sys::xattr::get(&dir, HEAD_ATTRIBUTE) {
        Ok(name) => Some(String::from_utf8(name).map_err(|_| Errno::EILSEQ)?),
        Err(error) if errno(&error) == Errno::ENODATA => None,
        Err(error) => return Err(error),
    };
    Ok(Place { store: OsString::from_vec(store).into(), head })
}

/// The user who mounted a FUSE filesystem.
fn owner(mount: &sys::mountinfo::Entry) -> Option<u32> {
    let mut options = mount.super_options.split(|byte| *byte == b',');
    let digits = options.find_map(|option| option.strip_prefix(b"user_id="))?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The error for a mount whose daemon is dead.
pub(super) fn dead_mount(attempt: &str, point: &Path) -> Error {
    let point = point.display();
    let reason = format!("the daemon of the mount '{point}' is dead");
    Error::new(Kind::Failed, attempt, reason).hint(format!(
        "'jailfs umount {point}' detaches it; 'jailfs mount BASE {point}' replaces it without loss"
    ))
}

/// The mount point of the jailfs mount around the absolute `path`. Reads the list of mounts, so a
/// dead mount is found too.
///
/// # Errors
/// The list of mounts cannot be read.
pub(super) fn mount_around(path: &Path) -> Result<Option<PathBuf>> {
    Ok(innermost(path)?.map(|mount| OsString::from_vec(mount.mount_point).into()))
}

fn innermost(path: &Path) -> Result<Option<sys::mountinfo::Entry>> {
    let mounts = sys::mountinfo::read().attempt(|| "read the list of mounts")?;
    // Of mounts at the same point the last one is on top.
    let around =
        mounts.into_iter().filter(|mount| path.starts_with(OsStr::from_bytes(&mount.mount_point)));
    let innermost = around.max_by_key(|mount| mount.mount_point.len());
    Ok(innermost.filter(|mount| mount.fs_type == FS_TYPE))
}

/// The path of a directory inside the tree of its jailfs mount. None if it lies in no jailfs mount.
///
/// # Errors
/// The list of mounts cannot be read.
pub(super) fn seen_at(dir: &Path) -> Result<Option<PathBuf>> {
    let dir = absolute(dir)?;
    let Some(mount) = innermost(&dir)? else { return Ok(None) };
    let root = Path::new(OsStr::from_bytes(&mount.root));
    let below = dir.strip_prefix(OsStr::from_bytes(&mount.mount_point)).unwrap_or(Path::new(""));
    Ok(Some(root.strip_prefix("/").unwrap_or(root).join(below)))
}

/// The stores of all live jailfs mounts that are visible here and that this user may query.
pub(super) fn mounted_stores() -> Vec<PathBuf> {
    let mounts = sys::mountinfo::read().unwrap_or_default();
    let ours = mounts.into_iter().filter(|mount| mount.fs_type == FS_TYPE);
    let (sender, receiver) = mpsc::channel();
    let mut queried = 0;
    for mount in ours {
        let sender = sender.clone();
        let query = move || {
            let point = PathBuf::from(OsString::from_vec(mount.mount_point));
            // The receiver is gone if the answer came too late.
            drop(sender.send(place(&point)));
        };
        queried +=
            usize::from(thread::Builder::new().name("query".to_owned()).spawn(query).is_ok());
    }
    drop(sender);
    let until = Instant::now() + PATIENCE;
    let mut stores = Vec::new();
    while queried > 0 {
        let Ok(place) = receiver.recv_timeout(until.saturating_duration_since(Instant::now()))
        else {
            log::warn!("{queried} jailfs mounts do not answer: their stores are not hidden");
            break;
        };
        queried -= 1;
        stores.extend(place.ok().map(|place| place.store));
    }
    stores
}

/// Whether `path` lies in a mount with a dead daemon. Uses statfs(2), which the kernel never
/// answers from a cache; it may cache the attributes of the root for ever.
pub(super) fn is_dead(path: &Path) -> bool {
    matches!(nix::sys::statfs::statfs(path), Err(Errno::ENOTCONN | Errno::ECONNABORTED))
}

/// The absolute path of a mount point. A dead mount point cannot be resolved itself, so its parent
/// is.
///
/// # Errors
/// The path does not exist.
pub(super) fn resolve_mount_point(path: &Path) -> Result<PathBuf> {
    if !is_dead(path) {
        return resolve(path);
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if parent.as_os_str().is_empty() => {
            Ok(resolve(Path::new("."))?.join(name))
        }
        (Some(parent), Some(name)) => Ok(resolve(parent)?.join(name)),
        _ => absolute(path),
    }
}

/// Unmounts the mount at `point`.
///
/// # Errors
/// `InUse`: a process uses the mount, and `lazy` is false.
pub(super) fn unmount(point: &Path, lazy: bool) -> Result<()> {
    let attempt = || format!("unmount '{}'", point.display());
    sys::mount::unmount(point, lazy).map_err(|error| {
        let busy = error.kind() == io::ErrorKind::ResourceBusy;
        let error = Error::io(attempt(), &error);
        if busy { busy_mount(error.kind(Kind::InUse), point) } else { error }
    })
}

/// Adds a hint to the error of a busy mount, unless it has one.
pub(super) fn busy_mount(error: Error, point: &Path) -> Error {
    if error.hint.is_some() {
        return error;
    }
    let point = point.display();
    error.hint(format!(
        "leave it with every shell and program ('fuser -vm {point}' lists them), or use --lazy"
    ))
}

/// Makes `path` absolute by its text alone.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).attempt(|| format!("find '{}'", path.display()))
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_directory_is_in_no_mount() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(within(dir.path()), Ok(Within::Host));
        assert_eq!(mount_around(dir.path()), Ok(None));
        assert!(!is_dead(dir.path()) && !is_dead(&dir.path().join("missing")));
        assert!(within(&dir.path().join("missing")).is_err());
    }
}
