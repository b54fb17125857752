//! What the command line asks of the host: which mount a directory lies in, and how to take a mount away.

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

/// The virtual attribute by which every file of a mount names its store.
const STORE_ATTRIBUTE: &[u8] = b"user.jailfs.store";
/// The type of our mounts in /proc/self/mountinfo.
pub(super) const FS_TYPE: &[u8] = b"fuse.jailfs";
/// How long the daemons of other mounts may take to answer: one of them may have been stopped.
const PATIENCE: Duration = Duration::from_secs(2);

/// In what a directory lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Within {
    /// In a mount of this store.
    Mount {
        /// The store's directory.
        store: PathBuf,
    },
    /// In a mount at this point whose daemon is dead.
    DeadMount(PathBuf),
    /// In no jailfs mount.
    Host,
}

/// The absolute path of what a person typed, without links. It must exist.
///
/// # Errors
/// It does not exist, or its daemon is dead.
pub(super) fn resolve(path: &Path) -> Result<PathBuf> {
    sys::path::resolve(path).attempt(|| format!("find '{}'", path.display()))
}

/// Finds out what `dir` lies in.
///
/// # Errors
/// It does not exist or cannot be looked at.
pub(super) fn within(dir: &Path) -> Result<Within> {
    let attempt = || format!("look at '{}'", dir.display());
    match store_attribute(dir) {
        Ok(bytes) => Ok(Within::Mount { store: OsString::from_vec(bytes).into() }),
        Err(error) => {
            match errno(&error) {
                Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS => Ok(Within::Host),
                Errno::ENOTCONN | Errno::ECONNABORTED => {
                    Ok(mount_around(&absolute(dir)?)?.map_or(Within::Host, Within::DeadMount))
                }
                Errno::EPERM => Err(Error::io(attempt(), &error)
                    .hint("the mount belongs to another user: do it as that user")),
                _ => Err(Error::io(attempt(), &error)),
            }
        }
    }
}

/// The store of the mount that a directory lies in. ENODATA if that is none of ours: any user can set the attribute elsewhere.
///
/// # Errors
/// EPERM if the mount belongs to another user than us or root, who could name any store; and those of the calls.
fn store_attribute(dir: &Path) -> io::Result<Vec<u8>> {
    let flags = (OFlag::O_PATH | OFlag::O_DIRECTORY).bits();
    let dir = OpenOptions::new().read(true).custom_flags(flags).open(dir)?;
    let store = sys::xattr::get(&dir, STORE_ATTRIBUTE)?;
    let id = sys::file::mount_id(&dir).ok_or(Errno::ENODATA)?;
    let mount = sys::mountinfo::read()?.into_iter().find(|mount| mount.id == id);
    let Some(mount) = mount.filter(|mount| mount.fs_type == FS_TYPE) else {
        return Err(Errno::ENODATA.into());
    };
    let us = nix::unistd::geteuid().as_raw();
    if owner(&mount).is_some_and(|owner| owner == us || owner == 0) {
        Ok(store)
    } else {
        Err(Errno::EPERM.into())
    }
}

/// The user who made a FUSE mount.
fn owner(mount: &sys::mountinfo::Entry) -> Option<u32> {
    let mut options = mount.super_options.split(|byte| *byte == b',');
    let digits = options.find_map(|option| option.strip_prefix(b"user_id="))?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The error for a mount whose daemon is dead.
pub(super) fn dead_mount(attempt: &str, point: &Path) -> Error {
    let point = point.display();
    Error::new(Kind::Failed, attempt, format!("the daemon of the mount '{point}' is dead")).hint(format!(
        "'jailfs umount {point}' detaches it; 'jailfs mount BASE {point}' replaces it, with nothing lost"
    ))
}

/// The point of the jailfs mount that `path`, absolute, lies in; by the list of mounts, so that it need not be alive.
///
/// # Errors
/// The list of mounts cannot be read.
pub(super) fn mount_around(path: &Path) -> Result<Option<PathBuf>> {
    Ok(innermost(path)?.map(|mount| OsString::from_vec(mount.mount_point).into()))
}

fn innermost(path: &Path) -> Result<Option<sys::mountinfo::Entry>> {
    let mounts = sys::mountinfo::read().attempt(|| "read the list of mounts")?;
    // Among equal points the last was mounted last and lies on top.
    let around = mounts.into_iter().filter(|mount| path.starts_with(OsStr::from_bytes(&mount.mount_point)));
    let innermost = around.max_by_key(|mount| mount.mount_point.len());
    Ok(innermost.filter(|mount| mount.fs_type == FS_TYPE))
}

/// Where in the tree of the jailfs mount that it lies in a directory is; none if it lies in none.
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

/// The stores of all mounts of ours that are seen here and alive, as far as we may ask them.
pub(super) fn mounted_stores() -> Vec<PathBuf> {
    let mounts = sys::mountinfo::read().unwrap_or_default();
    let ours = mounts.into_iter().filter(|mount| mount.fs_type == FS_TYPE);
    let (tell, told) = mpsc::channel();
    let mut asked = 0;
    for mount in ours {
        let tell = tell.clone();
        let ask = move || {
            let point = PathBuf::from(OsString::from_vec(mount.mount_point));
            // Nobody listens any more where the answer came too late.
            drop(tell.send(store_attribute(&point)));
        };
        asked += usize::from(thread::Builder::new().name("ask".to_owned()).spawn(ask).is_ok());
    }
    drop(tell);
    let until = Instant::now() + PATIENCE;
    let mut stores = Vec::new();
    while asked > 0 {
        let Ok(store) = told.recv_timeout(until.saturating_duration_since(Instant::now())) else {
            log::warn!("{asked} mounts of jailfs do not answer: their stores are not hidden");
            break;
        };
        asked -= 1;
        stores.extend(store.ok().map(|store| PathBuf::from(OsString::from_vec(store))));
    }
    stores
}

/// Whether `path` is, or is in, a mount whose daemon is dead. Asked with statfs(2), which the kernel never answers by
/// itself: the attributes of the root it may remember for ever.
pub(super) fn is_dead(path: &Path) -> bool {
    matches!(nix::sys::statfs::statfs(path), Err(Errno::ENOTCONN | Errno::ECONNABORTED))
}

/// The absolute path of a mount point, which may be dead: then it cannot be resolved itself, but its parent can.
///
/// # Errors
/// It does not exist.
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

/// Unmounts what is mounted at `point`.
///
/// # Errors
/// `InUse`: a process is in it, and `lazy` was not asked for.
pub(super) fn unmount(point: &Path, lazy: bool) -> Result<()> {
    let attempt = || format!("unmount '{}'", point.display());
    sys::mount::unmount(point, lazy).map_err(|error| {
        let busy = error.kind() == io::ErrorKind::ResourceBusy;
        let error = Error::io(attempt(), &error);
        if busy { busy_mount(error.kind(Kind::InUse), point) } else { error }
    })
}

/// Adds to the error of a busy mount what a person can do, unless it says so itself.
pub(super) fn busy_mount(error: Error, point: &Path) -> Error {
    if error.hint.is_some() {
        return error;
    }
    let point = point.display();
    error.hint(format!(
        "leave it with every shell and program ('fuser -vm {point}' lists them), or use --lazy"
    ))
}

/// `path` made absolute without looking at it.
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
