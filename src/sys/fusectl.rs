//! The FUSE control filesystem: reports on a connection and aborts it (the kernel's documentation
//! of FUSE, "Control filesystem"). If it is not mounted, root mounts it at no path, invisible to
//! other processes.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, minor};

const MOUNTED_AT: &str = "/sys/fs/fuse/connections";
/// From linux/mount.h.
const FSOPEN_CLOEXEC: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
const FSMOUNT_CLOEXEC: u32 = 1;

/// One connection in the control filesystem.
pub struct Connection(OwnedFd);

impl Connection {
    /// Opens the connection of the filesystem with device number `dev`.
    ///
    /// # Errors
    /// EPERM if the control filesystem is not mounted and this process may not mount it; ENOENT if
    /// the connection has ended.
    pub fn open(dev: u64) -> io::Result<Connection> {
        let number = minor(dev).to_string();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        if let Ok(dir) = open(&PathBuf::from(MOUNTED_AT).join(&number), flags, Mode::empty()) {
            return Ok(Connection(dir));
        }
        Ok(Connection(openat(view()?, Path::new(&number), flags, Mode::empty())?))
    }

    /// The number of requests that are not answered yet, including those that no server has read.
    ///
    /// # Errors
    /// EACCES if another user made the mount; ENOENT if the connection has ended.
    pub fn waiting(&self) -> io::Result<u64> {
        let mut text = String::new();
        self.file("waiting", OFlag::O_RDONLY)?.read_to_string(&mut text)?;
        text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Aborts the connection at once: all its requests fail with ENOTCONN.
    ///
    /// # Errors
    /// As [`Connection::waiting`].
    pub fn abort(&self) -> io::Result<()> {
        self.abort_file()?.write_all(b"1")
    }

    /// The file that aborts the connection when anything is written to it. It never aborts another
    /// connection, even if it is used much later.
    ///
    /// # Errors
    /// As [`Connection::waiting`].
    pub fn abort_file(&self) -> io::Result<std::fs::File> {
        self.file("abort", OFlag::O_WRONLY)
    }

    fn file(&self, name: &str, access: OFlag) -> io::Result<std::fs::File> {
        Ok(openat(&self.0, name, access | OFlag::O_CLOEXEC, Mode::empty())?.into())
    }
}

/// Mounts the control filesystem at no path.
fn view() -> io::Result<OwnedFd> {
    // SAFETY: fsopen(2) reads the name, which ends with NUL.
    let context =
        owned(unsafe { libc::syscall(libc::SYS_fsopen, c"fusectl".as_ptr(), FSOPEN_CLOEXEC) })?;
    let nothing = std::ptr::null::<libc::c_char>();
    let fd = context.as_fd().as_raw_fd();
    // SAFETY: fsconfig(2) takes neither key nor value for this command; the descriptor is borrowed
    // for the call.
    let created =
        unsafe { libc::syscall(libc::SYS_fsconfig, fd, FSCONFIG_CMD_CREATE, nothing, nothing, 0) };
    Errno::result(created)?;
    let attributes = libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;
    // SAFETY: fsmount(2) takes numbers only; the descriptor is borrowed for the call.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, fd, FSMOUNT_CLOEXEC, attributes) })
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let descriptor = i32::try_from(Errno::result(result)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: fsopen(2) and fsmount(2) return a new descriptor that no other code owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
