//! Enters the namespaces of the command.
//!
//! There are two orders:
//! * **As root of the machine** (or with CAP_SYS_ADMIN) the view is made first, with all rights.
//!   Then the process enters a user namespace that maps every id to itself. Owners keep their ids
//!   and root is root over files. But root has no power over the machine, its network and the
//!   mounts of the view, because these belong to the outer namespace. Without a user namespace such
//!   a root would own the host's files, so where user namespaces are not allowed, `run` refuses.
//! * **As any other user** the user namespace comes first, and the rights that it gives make the
//!   mounts. An ordinary user has only the own uid and gid in it, mapped to themselves, so the
//!   command sees the ids it is used to. All others show as 65534. Root of a container may map all
//!   ids.
//!
//! In both orders the process then enters a **root of its own** (pivot_root(2)): a copy of the
//! mounts below the root directory in which it was started. No mount of the host remains above it,
//! so a process cannot climb out, and one that was in a chroot no longer is.
//!
//! The process outside writes the id maps, because it may have more rights.

use std::fs;
use std::io;
use std::path::PathBuf;

use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Pid, getegid, geteuid};

use crate::error::{Attempt, Error, Kind, Result};
use crate::sys::{capabilities, own_root};

/// The order in which the namespaces are entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryOrder {
    /// The mount namespace first, the user namespace after the view is made.
    ViewFirst,
    /// The user namespace with all others, then the view.
    UserFirst,
}

/// Enters the first namespaces, in which the view is made. `map` has the process outside write the
/// id maps.
///
/// # Errors
/// `CannotMount`: the host does not allow it.
pub(super) fn begin(own_net: bool, map: impl FnOnce() -> Result<()>) -> Result<EntryOrder> {
    let may_mount = capabilities::effective().is_ok_and(|have| have & capabilities::SYS_ADMIN != 0);
    let order = match may_mount.then(|| unshare(CloneFlags::CLONE_NEWNS)) {
        Some(Ok(())) => EntryOrder::ViewFirst,
        Some(Err(nix::Error::EPERM)) | None => {
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | others(own_net))
                .map_err(|error| refused("make the namespaces of the command", error))?;
            map()?;
            EntryOrder::UserFirst
        }
        Some(Err(error)) => return Err(refused("make a mount namespace", error)),
    };
    enter_own_root().map_err(|error| {
        let errno = nix::Error::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
        refused("give the command a root directory of its own", errno)
    })?;
    Ok(order)
}

/// Makes a copy of the mounts at and below the root directory the root of this mount namespace.
fn enter_own_root() -> io::Result<()> {
    let tree = own_root::copy_of_root()?;
    own_root::leave_chroot()?;
    make_private()?;
    own_root::enter(tree)?;
    // The copy still shared mount events with the host.
    make_private()
}

/// Stops mount events from and to the host.
fn make_private() -> io::Result<()> {
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    Ok(mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?)
}

/// Enters the remaining namespaces after the view is made.
///
/// # Errors
/// The host does not allow it.
pub(super) fn complete(
    order: EntryOrder,
    own_net: bool,
    map: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if order == EntryOrder::UserFirst {
        return Ok(());
    }
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | others(own_net))
        .map_err(|error| refused("make the namespaces of the command", error))?;
    map()
}

fn others(own_net: bool) -> CloneFlags {
    let mut flags = CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    flags.set(CloneFlags::CLONE_NEWNET, own_net);
    flags
}

/// Maps the ids of the user namespace of `process`: all ids of this namespace, or the own uid and
/// gid alone where no more is allowed.
///
/// # Errors
/// Those of writing the maps (user_namespaces(7)).
pub(super) fn map(process: Pid) -> Result<()> {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let write = |name: &str, text: &str| fs::write(format!("/proc/{process}/{name}"), text);
    let all = |name: &str| Ok(identity(&fs::read_to_string(format!("/proc/self/{name}"))?));
    let mapped = all("uid_map").and_then(|map| write("uid_map", &map));
    match mapped {
        Ok(()) => all("gid_map").and_then(|map| write("gid_map", &map)),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            // The order matters: the kernel refuses gid_map to an unprivileged process until
            // setgroups is denied.
            write("setgroups", "deny")
                .and_then(|()| write("uid_map", &format!("{uid} {uid} 1")))
                .and_then(|()| write("gid_map", &format!("{gid} {gid} 1")))
        }
        Err(error) => Err(error),
    }
    .attempt(|| "map the ids of the user namespace")
    .map_err(|error| error.kind(Kind::CannotMount))
}

/// Maps each id that `map` knows to itself. A line is: first id inside, first id outside, count.
fn identity(map: &str) -> String {
    let lines = map.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (first, count) = (fields.next()?, fields.nth(1)?);
        Some(format!("{first} {first} {count}\n"))
    });
    lines.collect()
}

/// The error for namespaces that the host does not allow.
pub(super) fn refused(attempt: &str, error: nix::Error) -> Error {
    let hint = match error {
        nix::Error::EPERM | nix::Error::EACCES | nix::Error::ENOSPC | nix::Error::EUSERS => {
            "user namespaces are switched off here (kernel.unprivileged_userns_clone, \
             kernel.apparmor_restrict_unprivileged_userns, user.max_user_namespaces, or the \
             seccomp profile of a container); docs/CONTAINERS.md says what each needs"
        }
        nix::Error::EINVAL => "a process with several threads cannot enter a user namespace",
        _ => return Error::io(attempt, &io::Error::from(error)).kind(Kind::CannotMount),
    };
    Error::io(attempt, &io::Error::from(error)).kind(Kind::CannotMount).hint(hint)
}

/// The mount namespace of this process and its children, as `/proc/PID/ns/mnt` names it.
pub(super) fn name() -> Result<PathBuf> {
    fs::read_link("/proc/self/ns/mnt").attempt(|| "read the name of the mount namespace")
}

/// For tests: a mount namespace for this thread alone.
#[cfg(test)]
pub(super) fn private_mounts_of_this_thread() {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .unwrap();
    // A thread that shares its current directory with others cannot change its root.
    unshare(CloneFlags::CLONE_FS).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_a_hint() {
        let error = refused("unshare", nix::Error::EPERM);
        assert_eq!(error.kind, Kind::CannotMount);
        assert!(error.hint.unwrap().contains("CONTAINERS.md"));
        assert!(refused("unshare", nix::Error::EIO).hint.is_none());
    }

    #[test]
    fn every_id_is_mapped_to_itself() {
        assert_eq!(identity("         0          0 4294967295\n"), "0 0 4294967295\n");
        assert_eq!(identity("0 1000 1\n1 100000 65536\n"), "0 0 1\n1 1 65536\n");
        assert_eq!(identity("\nx\n"), "");
    }
}
