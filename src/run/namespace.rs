//! The namespaces of the command.
//!
//! Two ways lead into them.
//! * **As root of the machine** (or with CAP_SYS_ADMIN): the view is made first, with all rights; then the process enters a user
//!   namespace in which every number stands for itself. So owners keep their numbers and root is root over files, but over
//!   the machine, its network and the mounts of the view it has no power: they belong to the namespace outside.
//!   Without that one root would own the host's files, so it is refused where the user namespace is.
//! * **As anybody else**: a user namespace comes first, and what is mounted is mounted with the rights that it gives. An ordinary
//!   user has only the own user and group in it, mapped to themselves, so that the command sees the ids it is used to; all
//!   others show as 65534. Root of a container may map all.
//!
//! Either way the process then enters a **root of its own** (pivot_root(2)): a copy of the mounts below the root directory
//! that it was started in. No mount of the host stays above it, so there is nothing to climb to, and a process that was
//! in a chroot is in none any more.
//!
//! The maps are written by the process outside, which may do more.

use std::fs;
use std::io;
use std::path::PathBuf;

use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Pid, getegid, geteuid};

use crate::error::{Attempt, Error, Kind, Result};
use crate::sys::{capabilities, own_root};

/// How the namespaces are entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The mount namespace first, the user namespace when the view is made.
    ViewFirst,
    /// The user namespace with all others, then the view.
    UserFirst,
}

/// Enters the first namespaces: those in which the view is made.
///
/// # Errors
/// `CannotMount`: the host does not allow it.
pub(super) fn begin(own_net: bool, map: impl FnOnce() -> Result<()>) -> Result<Way> {
    let may_mount = capabilities::effective().is_ok_and(|have| have & capabilities::SYS_ADMIN != 0);
    let way = match may_mount.then(|| unshare(CloneFlags::CLONE_NEWNS)) {
        Some(Ok(())) => Way::ViewFirst,
        Some(Err(nix::Error::EPERM)) | None => {
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | others(own_net))
                .map_err(|error| refused("make the namespaces of the command", error))?;
            map()?;
            Way::UserFirst
        }
        Some(Err(error)) => return Err(refused("make a mount namespace", error)),
    };
    enter_own_root().map_err(|error| {
        let errno = nix::Error::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
        refused("give the command a root directory of its own", errno)
    })?;
    Ok(way)
}

/// Makes a copy of all that is mounted at and below the root directory the root of this mount namespace.
fn enter_own_root() -> io::Result<()> {
    let tree = own_root::copy_of_root()?;
    own_root::leave_chroot()?;
    make_private()?;
    own_root::enter(tree)?;
    // The copy was still shared with the host where its mounts are.
    make_private()
}

/// Keeps mounts of the host from coming in and ours from going out.
fn make_private() -> io::Result<()> {
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    Ok(mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?)
}

/// Enters the others, when the view is made.
///
/// # Errors
/// The host does not allow it.
pub(super) fn complete(way: Way, own_net: bool, map: impl FnOnce() -> Result<()>) -> Result<()> {
    if way == Way::UserFirst {
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

/// Maps the numbers of the user namespace of `process`: all that there are here, or the own ones alone where no more is
/// allowed.
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
            // In this order: gid_map is refused to the unprivileged until setgroups is denied.
            write("setgroups", "deny")
                .and_then(|()| write("uid_map", &format!("{uid} {uid} 1")))
                .and_then(|()| write("gid_map", &format!("{gid} {gid} 1")))
        }
        Err(error) => Err(error),
    }
    .attempt(|| "map the numbers of the user namespace")
    .map_err(|error| error.kind(Kind::CannotMount))
}

/// A map of every number that a map knows to itself. A line is: first inside, first outside, how many.
fn identity(map: &str) -> String {
    let lines = map.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (first, count) = (fields.next()?, fields.nth(1)?);
        Some(format!("{first} {first} {count}\n"))
    });
    lines.collect()
}

/// The error for namespaces that are not to be had.
pub(super) fn refused(attempt: &str, error: nix::Error) -> Error {
    let hint = match error {
        nix::Error::EPERM | nix::Error::EACCES | nix::Error::ENOSPC | nix::Error::EUSERS => {
            "user namespaces are switched off here (kernel.unprivileged_userns_clone, \
             kernel.apparmor_restrict_unprivileged_userns, user.max_user_namespaces, or the seccomp profile of a \
             container); docs/CONTAINERS.md says what each needs"
        }
        nix::Error::EINVAL => "a process with several threads cannot enter a user namespace",
        _ => return Error::io(attempt, &io::Error::from(error)).kind(Kind::CannotMount),
    };
    Error::io(attempt, &io::Error::from(error)).kind(Kind::CannotMount).hint(hint)
}

/// What `/proc/PID/ns/mnt` of this process and its children says.
pub(super) fn name() -> Result<PathBuf> {
    fs::read_link("/proc/self/ns/mnt").attempt(|| "name the mount namespace")
}

/// For tests: a mount namespace for this thread alone.
#[cfg(test)]
pub(super) fn private_mounts_of_this_thread() {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    // A thread that shares its current directory with others could not change it.
    unshare(CloneFlags::CLONE_FS).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let error = refused("unshare", nix::Error::EPERM);
        assert_eq!(error.kind, Kind::CannotMount);
        assert!(error.hint.unwrap().contains("CONTAINERS.md"));
        assert!(refused("unshare", nix::Error::EIO).hint.is_none());
    }

    #[test]
    fn every_number_stands_for_itself() {
        assert_eq!(identity("         0          0 4294967295\n"), "0 0 4294967295\n");
        assert_eq!(identity("0 1000 1\n1 100000 65536\n"), "0 0 1\n1 1 65536\n");
        assert_eq!(identity("\nx\n"), "");
    }
}
