//! Changes the flags of mounts, and brings up the loopback of a network namespace.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::mountinfo::Entry;

/// Flags of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// No write is permitted.
    pub read_only: bool,
    /// setuid and setgid programs and file capabilities have no effect.
    pub nosuid: bool,
    /// Device nodes do not work.
    pub nodev: bool,
}

impl Flags {
    /// All of them.
    pub const ALL: Flags = Flags { read_only: true, nosuid: true, nodev: true };
    /// None of them.
    pub const NONE: Flags = Flags { read_only: false, nosuid: false, nodev: false };

    fn attributes(self) -> u64 {
        let mut bits = 0;
        if self.read_only {
            bits |= libc::MOUNT_ATTR_RDONLY;
        }
        if self.nosuid {
            bits |= libc::MOUNT_ATTR_NOSUID;
        }
        if self.nodev {
            bits |= libc::MOUNT_ATTR_NODEV;
        }
        bits
    }
}

/// Sets and clears flags of the mount at `path`, and with `recursive` of all mounts below it.
/// Changes either all of them or none (mount_setattr(2)).
///
/// # Errors
/// ENOSYS before Linux 5.12, or EPERM if a container forbids the call; EPERM also for a locked
/// flag; EINVAL if `path` is not the root of a mount.
pub fn set_flags(path: &Path, set: Flags, clear: Flags, recursive: bool) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    let attributes = libc::mount_attr {
        attr_set: set.attributes(),
        attr_clr: clear.attributes(),
        propagation: 0,
        userns_fd: 0,
    };
    let flags = if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: mount_setattr(2) reads `size` bytes of the structure, which is that long, and the
    // path, which ends with NUL.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    Errno::result(result)?;
    Ok(())
}

/// As [`set_flags`] for one mount, by mount(2) with MS_REMOUNT, which every kernel supports.
///
/// # Errors
/// EPERM for a locked flag, EINVAL if `path` is not the root of a mount.
pub fn remount(path: &Path, set: Flags, clear: Flags) -> io::Result<()> {
    let now = statvfs(path)?.flags();
    let flags = Flags {
        read_only: now.contains(FsFlags::ST_RDONLY),
        nosuid: now.contains(FsFlags::ST_NOSUID),
        nodev: now.contains(FsFlags::ST_NODEV),
    };
    remount_from(path, flags, now.contains(FsFlags::ST_NOEXEC), set, clear)
}

/// As [`remount`], for a mount from mountinfo. Sends no request to its filesystem, whose server may
/// not answer.
///
/// # Errors
/// As [`remount`].
pub fn remount_listed(entry: &Entry, set: Flags, clear: Flags) -> io::Result<()> {
    let path = Path::new(OsStr::from_bytes(&entry.mount_point));
    let flags = Flags {
        read_only: entry.has_option("ro"),
        nosuid: entry.has_option("nosuid"),
        nodev: entry.has_option("nodev"),
    };
    remount_from(path, flags, entry.has_option("noexec"), set, clear)
}

fn remount_from(path: &Path, now: Flags, noexec: bool, set: Flags, clear: Flags) -> io::Result<()> {
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    flags.set(MsFlags::MS_RDONLY, (now.read_only || set.read_only) && !clear.read_only);
    flags.set(MsFlags::MS_NOSUID, (now.nosuid || set.nosuid) && !clear.nosuid);
    flags.set(MsFlags::MS_NODEV, (now.nodev || set.nodev) && !clear.nodev);
    flags.set(MsFlags::MS_NOEXEC, noexec);
    // Without a flag for access times, the kernel keeps the present mode.
    mount(None::<&str>, path, None::<&str>, flags, None::<&str>)?;
    Ok(())
}

/// Brings up the loopback of this thread's network namespace (netdevice(7)).
///
/// # Errors
/// EPERM without CAP_NET_ADMIN.
pub fn bring_loopback_up() -> io::Result<()> {
    // SAFETY: socket(2) takes numbers.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    let socket = Errno::result(socket)?;
    // SAFETY: socket(2) returns a new descriptor that no other code owns.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: this structure consists of numbers and bytes, for which zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(c"lo".to_bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        i16::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or_default();
    // SAFETY: SIOCSIFFLAGS reads a structure of this type, whose name ends with NUL (netdevice(7)).
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    Errno::result(result)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::{CloneFlags, unshare};

    fn in_namespaces(test: impl FnOnce() + Send + 'static) {
        std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
            mount(
                None::<&str>,
                "/",
                None::<&str>,
                MsFlags::MS_REC | MsFlags::MS_PRIVATE,
                None::<&str>,
            )
            .unwrap();
            test();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn both_ways_make_a_mount_read_only_and_back() {
        in_namespaces(|| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path();
            mount(Some("t"), path, Some("tmpfs"), MsFlags::MS_NOEXEC, None::<&str>).unwrap();
            let inner = path.join("inner");
            std::fs::create_dir(&inner).unwrap();
            mount(Some("t"), &inner, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            let writable = |path: &Path| std::fs::write(path.join("f"), "x").is_ok();
            set_flags(path, Flags::ALL, Flags::NONE, true).unwrap();
            assert!(!writable(path) && !writable(&inner));
            let only = Flags { read_only: true, ..Flags::NONE };
            set_flags(path, Flags::NONE, only, false).unwrap();
            assert!(writable(path) && !writable(&inner));
            remount(path, only, Flags::NONE).unwrap();
            assert!(!writable(path));
            remount(&inner, Flags::NONE, only).unwrap();
            assert!(writable(&inner));
            let flags = statvfs(path).unwrap().flags();
            assert!(flags.contains(FsFlags::ST_NOEXEC | FsFlags::ST_NOSUID | FsFlags::ST_NODEV));
            for umount in [&inner, path] {
                nix::mount::umount(umount).unwrap();
            }
        });
    }

    #[test]
    fn the_loopback_of_a_new_network_namespace_can_be_brought_up() {
        in_namespaces(|| {
            let reach =
                || std::net::UdpSocket::bind("127.0.0.1:0").and_then(|s| s.connect("127.0.0.1:9"));
            assert!(reach().is_err());
            bring_loopback_up().unwrap();
            reach().unwrap();
        });
    }
}
