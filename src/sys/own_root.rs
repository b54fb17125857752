//! Gives a process its own mount tree as its root.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns};
use nix::unistd::{fchdir, pivot_root};

/// A detached copy of all mounts at and below the root directory of this process (open_tree(2)).
///
/// # Errors
/// ENOSYS before Linux 5.2; EPERM without CAP_SYS_ADMIN over the mount namespace, or by the profile
/// of a container.
pub fn copy_of_root() -> io::Result<OwnedFd> {
    let flags =
        libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_RECURSIVE.cast_unsigned();
    // SAFETY: open_tree(2) reads the path, which ends with NUL.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, c"/".as_ptr(), flags) };
    let fd = i32::try_from(Errno::result(fd)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: open_tree(2) returns a new descriptor that no other code owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Leaves a chroot(2): the root of the thread's mount namespace becomes its root and current
/// directory (setns(2) with the thread's own namespace).
///
/// # Errors
/// ENOSYS before Linux 5.3, EINVAL before 5.8; EPERM without CAP_SYS_CHROOT and CAP_SYS_ADMIN.
pub fn leave_chroot() -> io::Result<()> {
    // SAFETY: pidfd_open(2) takes numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
    let fd = i32::try_from(Errno::result(fd)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: pidfd_open(2) returns a new descriptor that no other code owns.
    let own = unsafe { OwnedFd::from_raw_fd(fd) };
    setns(&own, CloneFlags::CLONE_NEWNS)?;
    Ok(())
}

/// Makes a detached mount tree the root of this thread's mount namespace, and detaches all other
/// mounts (move_mount(2), pivot_root(2)). The current directory is then the new root.
///
/// # Errors
/// Those of move_mount(2), pivot_root(2) and umount2(2).
pub fn enter(tree: impl AsFd) -> io::Result<()> {
    let fd = tree.as_fd().as_raw_fd();
    // SAFETY: move_mount(2) reads the two paths, which end with NUL.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            fd,
            c"".as_ptr(),
            libc::AT_FDCWD,
            c"/".as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    Errno::result(moved)?;
    fchdir(&tree)?;
    // The old root is stacked on the new one and then detached (pivot_root(2), NOTES).
    pivot_root(".", ".")?;
    umount2(Path::new("."), MntFlags::MNT_DETACH)?;
    std::env::set_current_dir("/")
}
