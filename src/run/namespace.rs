//! A mount namespace of our own.
//!
//! Root unshares the mount namespace. Anybody else, and root without CAP_SYS_ADMIN, first needs a user namespace, in
//! which only their own user and group are mapped: to themselves, so that the command sees the ids it is used to. All
//! other ids show as the overflow id (65534) inside, and supplementary groups cannot be dropped or changed.

use std::fs;
use std::io;
use std::path::PathBuf;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};

use crate::error::{Attempt, Error, Kind, Result};

/// Which namespaces this process has entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// A mount namespace, as root.
    Mount,
    /// A user namespace with one user, and a mount namespace that it owns.
    UserAndMount,
}

impl Namespace {
    /// Enters a private mount namespace. Nothing mounted from now on is seen outside.
    ///
    /// # Errors
    /// `CannotMount`: the host does not allow it.
    pub fn enter() -> Result<Namespace> {
        let namespace = match geteuid().is_root().then(|| unshare(CloneFlags::CLONE_NEWNS)) {
            Some(Ok(())) => Namespace::Mount,
            Some(Err(nix::Error::EPERM)) | None => enter_user_namespace()?,
            Some(Err(error)) => return Err(refused("unshare the mount namespace", error)),
        };
        // Mounts of the host must not come in and ours must not go out; where they were shared they still are.
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .map_err(|error| refused("make the mounts of the namespace private", error))?;
        Ok(namespace)
    }
}

fn enter_user_namespace() -> Result<Namespace> {
    let (uid, gid) = (geteuid(), getegid());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)
        .map_err(|error| refused("unshare the user and mount namespaces", error))?;
    // In this order: gid_map is refused to the unprivileged until setgroups is denied (user_namespaces(7)).
    write_map("setgroups", "deny")?;
    write_map("uid_map", &format!("{uid} {uid} 1"))?;
    write_map("gid_map", &format!("{gid} {gid} 1"))?;
    Ok(Namespace::UserAndMount)
}

fn write_map(name: &str, text: &str) -> Result<()> {
    let path = PathBuf::from("/proc/self").join(name);
    fs::write(&path, text)
        .attempt(|| format!("write '{}'", path.display()))
        .map_err(|error| error.kind(Kind::CannotMount))
}

fn refused(attempt: &str, error: nix::Error) -> Error {
    let hint = match error {
        nix::Error::EPERM | nix::Error::EACCES | nix::Error::ENOSPC | nix::Error::EUSERS => {
            "user namespaces are switched off here (kernel.unprivileged_userns_clone, \
             kernel.apparmor_restrict_unprivileged_userns, user.max_user_namespaces, or the seccomp profile of a \
             container): run as root, or use 'jailfs mount' and work in the mount"
        }
        nix::Error::EINVAL => "a process with several threads cannot enter a user namespace",
        _ => return Error::io(attempt, &io::Error::from(error)).kind(Kind::CannotMount),
    };
    Error::io(attempt, &io::Error::from(error)).kind(Kind::CannotMount).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let error = refused("unshare", nix::Error::EPERM);
        assert_eq!(error.kind, Kind::CannotMount);
        assert!(error.hint.unwrap().contains("jailfs mount"));
        assert!(refused("unshare", nix::Error::EIO).hint.is_none());
    }
}
