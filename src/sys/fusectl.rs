//! The control filesystem of FUSE: what the kernel tells of a connection, and how it is ended (the kernel's documentation of
//! FUSE, "Control filesystem"). Where it is not mounted, root gets a view of its own that nobody else sees.

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

/// One connection, as the control filesystem shows it.
pub struct Connection(OwnedFd);

impl Connection {
    /// The connection of the filesystem `dev`.
    ///
    /// # Errors
    /// EPERM where the control filesystem is not mounted and we may not mount it; ENOENT if the connection is gone.
    pub fn open(dev: u64) -> io::Result<Connection> {
        let number = minor(dev).to_string();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        if let Ok(dir) = open(&PathBuf::from(MOUNTED_AT).join(&number), flags, Mode::empty()) {
            return Ok(Connection(dir));
        }
        Ok(Connection(openat(view()?, Path::new(&number), flags, Mode::empty())?))
    }

    /// How many requests the kernel has made that are not answered yet, those that nobody has read included.
    ///
    /// # Errors
    /// EACCES for another user than the one who mounted it; ENOENT if the connection is gone.
    pub fn waiting(&self) -> io::Result<u64> {
        let mut text = String::new();
        self.file("waiting", OFlag::O_RDONLY)?.read_to_string(&mut text)?;
        text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Ends it at once, whoever uses it: all its requests answer ENOTCONN.
    ///
    /// # Errors
    /// As [`Connection::waiting`].
    pub fn abort(&self) -> io::Result<()> {
        self.abort_file()?.write_all(b"1")
    }

    /// The file that ends it as soon as anything is written to it, however late that is: never another connection.
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

/// A mount of the control filesystem at no path.
fn view() -> io::Result<OwnedFd> {
    // SAFETY: fsopen(2) reads the name, which ends with NUL.
    let context = owned(unsafe { libc::syscall(libc::SYS_fsopen, c"fusectl".as_ptr(), FSOPEN_CLOEXEC) })?;
    let nothing = std::ptr::null::<libc::c_char>();
    let fd = context.as_fd().as_raw_fd();
    // SAFETY: fsconfig(2) takes neither key nor value for this command; the descriptor is borrowed for the call.
    let created = unsafe { libc::syscall(libc::SYS_fsconfig, fd, FSCONFIG_CMD_CREATE, nothing, nothing, 0) };
    Errno::result(created)?;
    let attributes = libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;
    // SAFETY: fsmount(2) takes numbers only; the descriptor is borrowed for the call.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, fd, FSMOUNT_CLOEXEC, attributes) })
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let descriptor = i32::try_from(Errno::result(result)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: fsopen(2) and fsmount(2) return a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
