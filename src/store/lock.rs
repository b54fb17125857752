//! Keeps other processes and other users out of a store.

use std::fs::File;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::io::dir::StoreDir;
use crate::sys::proc::flock_holder;

/// The file that the owner of an open store holds locked.
pub(super) const LOCK: &str = "lock";

/// Takes the lock of a store, until the result is dropped.
///
/// # Errors
/// `InUse` if another process has it, with its pid if that is known.
pub(super) fn take_lock(dir: &StoreDir) -> Result<Flock<File>> {
    let file = dir.file(LOCK, true)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((file, Errno::EWOULDBLOCK)) => {
            let holder = flock_holder(&file).ok().flatten();
            let pid = holder.map(|pid| format!(" (process {pid})")).unwrap_or_default();
            Err(Error::new(
                Kind::InUse,
                format!("lock store '{}'", dir.path().display()),
                format!("another jailfs has it open{pid}"),
            )
            .hint(
                "wait for it to end; if it serves a mount, 'jailfs status' there says more, \
                 and 'jailfs umount MNT' ends it",
            ))
        }
        Err((_, errno)) => {
            Err(std::io::Error::from(errno)).attempt(|| format!("lock {}", dir.show(LOCK)))
        }
    }
}

/// Refuses a directory that other users could have written, as ssh does for its keys: it must
/// belong to us or to root, and have no write permission for others.
///
/// Otherwise another user could plant files that `apply` writes into the base.
///
/// # Errors
/// The reason, and how to change it.
pub(super) fn check_private(dir: &StoreDir) -> Result<()> {
    let attempt = || format!("open store '{}'", dir.path().display());
    let stat = nix::sys::stat::fstat(dir).map_err(std::io::Error::from).attempt(attempt)?;
    let us = nix::unistd::geteuid().as_raw();
    if stat.st_uid != us && stat.st_uid != 0 {
        let why = format!("it belongs to user {}, and we are user {us}", stat.st_uid);
        return Err(Error::new(Kind::Failed, attempt(), why).hint(
            "run the command as that user; if you trust the content of the store, \
             'chown -R' gives it to this one",
        ));
    }
    if stat.st_mode & 0o022 != 0 {
        let path = dir.path().display();
        return Err(Error::new(Kind::Failed, attempt(), "others can write to it")
            .hint(format!("if you trust the content of the store: chmod 700 '{path}'")));
    }
    Ok(())
}

/// Removes all permissions of others from a directory, if it belongs to us.
///
/// # Errors
/// As fstat(2) and fchmod(2).
pub(super) fn make_private(dir: &StoreDir) -> std::io::Result<()> {
    let is_ours = nix::sys::stat::fstat(dir)?.st_uid == nix::unistd::geteuid().as_raw();
    if is_ours {
        nix::sys::stat::fchmod(dir, nix::sys::stat::Mode::S_IRWXU)?;
    }
    Ok(())
}
