//! Mounts and unmounts FUSE filesystems, and clones a directory as a private read-only mount.
//!
//! A process that may mount does so itself: then it owns the session's descriptor from the start,
//! and no helper runs. Another process runs `fusermount3`, which is setuid root and sends the
//! descriptor.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path};
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::stat::Mode;

use crate::sys::socket::receive;

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
const SUBTYPE: &str = "jailfs";

/// How to mount a FUSE filesystem. It always has `default_permissions`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FuseMountOptions {
    /// The source that mountinfo shows.
    pub source: Vec<u8>,
    /// Whether users other than the mounting one may enter.
    pub allow_other: bool,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// Whether setuid and setgid programs and file capabilities take effect; only for root.
    pub suid: bool,
    /// Whether device nodes work; only for root.
    pub dev: bool,
    /// Whether programs cannot be executed from it.
    pub noexec: bool,
    /// Other flags of mount(2), by their names in [`VFS_OPTIONS`].
    pub vfs: Vec<String>,
    /// The largest READ that the kernel sends, in bytes; `None` means the kernel's own limit.
    pub max_read: Option<u32>,
}

/// Options that mount(8) passes to every filesystem, with their flags (mount(2)).
pub const VFS_OPTIONS: &[(&str, MsFlags)] = &[
    ("noatime", MsFlags::MS_NOATIME),
    ("nodiratime", MsFlags::MS_NODIRATIME),
    ("relatime", MsFlags::MS_RELATIME),
    ("strictatime", MsFlags::MS_STRICTATIME),
    ("lazytime", MsFlags::MS_LAZYTIME),
    ("sync", MsFlags::MS_SYNCHRONOUS),
    ("dirsync", MsFlags::MS_DIRSYNC),
];
/// Options that revert one of these options.
pub const OPPOSITES: &[(&str, &str)] = &[
    ("atime", "noatime"),
    ("diratime", "nodiratime"),
    ("norelatime", "relatime"),
    ("nostrictatime", "strictatime"),
    ("nolazytime", "lazytime"),
    ("async", "sync"),
];
/// Further options with their opposites and flags.
const OTHERS: &[(&str, &str, MsFlags)] = &[
    ("ro", "rw", MsFlags::MS_RDONLY),
    ("nosuid", "suid", MsFlags::MS_NOSUID),
    ("nodev", "dev", MsFlags::MS_NODEV),
    ("noexec", "exec", MsFlags::MS_NOEXEC),
];

/// Flags of a mount (mount(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountFlags(MsFlags);

impl Default for MountFlags {
    fn default() -> MountFlags {
        MountFlags(MsFlags::empty())
    }
}

impl MountFlags {
    /// Parses an option of mount(8). Returns whether it is one of a flag.
    pub fn take(&mut self, option: &[u8]) -> bool {
        let is = |word: &str| word.as_bytes() == option;
        let back = OPPOSITES.iter().find(|(word, _)| is(word)).map(|(_, name)| *name);
        let vfs = VFS_OPTIONS.iter().find(|(name, _)| is(name) || back == Some(*name));
        let other = OTHERS.iter().find(|(set, clear, _)| is(set) || is(clear));
        match (vfs, other) {
            (Some((_, flag)), _) => self.0.set(*flag, back.is_none()),
            (None, Some((set, _, flag))) => self.0.set(*flag, is(set)),
            (None, None) => return false,
        }
        true
    }

    /// Whether changes of names and attributes must be durable before the reply.
    pub fn syncs(&self) -> bool {
        self.0.intersects(MsFlags::MS_SYNCHRONOUS | MsFlags::MS_DIRSYNC)
    }
}

/// Changes the flags of a mount (mount(2), MS_REMOUNT).
///
/// # Errors
/// Those of mount(2).
pub fn remount(point: &Path, flags: &MountFlags) -> io::Result<()> {
    let flags = flags.0 | MsFlags::MS_REMOUNT;
    mount(None::<&str>, point, None::<&str>, flags, None::<&str>).map_err(io::Error::from)
}

/// The options of [`VFS_OPTIONS`] that `fusermount3` supports.
const OF_HELPER: &[&str] = &["noatime", "sync", "dirsync"];

/// Why a FUSE filesystem cannot be mounted.
#[derive(Debug)]
pub enum MountError {
    /// `/dev/fuse` does not exist: the module is not loaded, or the container lacks the device.
    NoDevice(io::Error),
    /// No permission to open `/dev/fuse`.
    DeviceDenied(io::Error),
    /// mount(2) failed, and not for lack of privilege.
    Mount(io::Error),
    /// This process may not mount, and `fusermount3` is not installed.
    NoHelper,
    /// `fusermount3` refused; this is its message.
    Helper(String),
    /// Communication with `fusermount3` failed.
    HelperTalk(io::Error),
}

impl MountError {
    const DEVICE_HINT: Option<&'static str> = Some("allow this user to read and write /dev/fuse");

    /// Advice for the user, if there is any.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            MountError::NoDevice(_) => Some(
                "load the kernel module with 'modprobe fuse'; a container needs '--device \
                 /dev/fuse'",
            ),
            MountError::DeviceDenied(_) => MountError::DEVICE_HINT,
            MountError::NoHelper => Some("install the package 'fuse3', or run as root"),
            MountError::Helper(text) if text.contains("user_allow_other") => {
                Some("add the line 'user_allow_other' to /etc/fuse.conf")
            }
            MountError::Helper(text) if text.contains(DEVICE) => MountError::DEVICE_HINT,
            MountError::Mount(_) | MountError::Helper(_) | MountError::HelperTalk(_) => None,
        }
    }

    /// The errno of the host, if one was the reason.
    pub fn errno(&self) -> Option<i32> {
        match self {
            MountError::NoDevice(error)
            | MountError::DeviceDenied(error)
            | MountError::Mount(error)
            | MountError::HelperTalk(error) => error.raw_os_error(),
            MountError::NoHelper | MountError::Helper(_) => None,
        }
    }
}

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MountError::NoDevice(error) => write!(f, "there is no {DEVICE}: {error}"),
            MountError::DeviceDenied(error) => write!(f, "open {DEVICE}: {error}"),
            MountError::Mount(error) => write!(f, "{error}"),
            MountError::NoHelper => {
                write!(f, "mounting needs root or {HELPER}, and there is no {HELPER}")
            }
            MountError::Helper(text) => f.write_str(text),
            MountError::HelperTalk(error) => write!(f, "run {HELPER}: {error}"),
        }
    }
}

impl std::error::Error for MountError {}

/// Mounts a FUSE filesystem of type `fuse.jailfs` at `mountpoint` and returns its session's
/// descriptor. Uses mount(2), or `fusermount3` if that fails with EPERM. `mountpoint` is a path
/// that a user typed, resolved.
///
/// # Errors
/// [`MountError`] tells which step failed.
pub fn mount_fuse(mountpoint: &Path, options: &FuseMountOptions) -> Result<OwnedFd, MountError> {
    match mount_direct(mountpoint, options) {
        Err(MountError::DeviceDenied(_)) => mount_by_helper(mountpoint, options),
        Err(MountError::Mount(error)) if error.raw_os_error() == Some(libc::EPERM) => {
            mount_by_helper(mountpoint, options)
        }
        other => other,
    }
}

fn mount_direct(mountpoint: &Path, options: &FuseMountOptions) -> Result<OwnedFd, MountError> {
    let device = open_device()?;
    let point = open_without_links(mountpoint).map_err(|errno| MountError::Mount(errno.into()))?;
    let by_descriptor = format!("/proc/self/fd/{}", point.as_raw_fd());
    mount_device(device, Path::new(&by_descriptor), options)
}

/// Opens a directory without following a symlink on the way. Since the path was resolved, another
/// process may have replaced a directory by a symlink. A symlink fails with ENOTDIR (open(2),
/// O_NOFOLLOW with O_DIRECTORY).
fn open_without_links(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut names = path.components().filter(|part| *part != Component::CurDir);
    let first = names.next().map_or(Path::new("."), |part| Path::new(part.as_os_str()));
    let mut dir = open(first, flags, Mode::empty())?;
    for name in names {
        dir = openat(&dir, name.as_os_str(), flags, Mode::empty())?;
    }
    Ok(dir)
}

/// Opens the device, for [`mount_device`] in the same user namespace.
///
/// # Errors
/// [`MountError`] tells why it cannot be opened.
pub fn open_device() -> Result<OwnedFd, MountError> {
    open(DEVICE, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).map_err(|errno| match errno {
        Errno::EACCES | Errno::EPERM => MountError::DeviceDenied(errno.into()),
        _ => MountError::NoDevice(errno.into()),
    })
}

/// As [`mount_fuse`], by mount(2) only. For a process in its own namespaces, where a helper cannot
/// see the mount point and perhaps not the device.
///
/// # Errors
/// [`MountError`] tells which step failed.
pub fn mount_device(
    device: OwnedFd,
    mountpoint: &Path,
    options: &FuseMountOptions,
) -> Result<OwnedFd, MountError> {
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        nix::unistd::getuid(),
        nix::unistd::getgid()
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    if let Some(bytes) = options.max_read {
        data.push_str(&format!(",max_read={bytes}"));
    }
    let mut flags = MsFlags::empty();
    flags.set(MsFlags::MS_NOSUID, !options.suid);
    flags.set(MsFlags::MS_NODEV, !options.dev);
    flags.set(MsFlags::MS_NOEXEC, options.noexec);
    flags.set(MsFlags::MS_RDONLY, options.read_only);
    for (name, flag) in VFS_OPTIONS {
        flags.set(*flag, options.vfs.iter().any(|option| option == name));
    }
    let kind = format!("fuse.{SUBTYPE}");
    let source = OsStr::from_bytes(&options.source);
    mount(Some(source), mountpoint, Some(kind.as_str()), flags, Some(data.as_str()))
        .map_err(|errno| MountError::Mount(errno.into()))?;
    Ok(device)
}

/// Mounts by `fusermount3`, which sends the descriptor over the socket that `_FUSE_COMMFD` names.
/// The socket is the helper's standard input: so no other child of this process inherits it.
fn mount_by_helper(mountpoint: &Path, options: &FuseMountOptions) -> Result<OwnedFd, MountError> {
    let talk = |errno: Errno| MountError::HelperTalk(errno.into());
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)
            .map_err(talk)?;
    let mut command = Command::new(HELPER);
    command
        .arg("-o")
        .arg(helper_options(options))
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => MountError::NoHelper,
        _ => MountError::HelperTalk(error),
    })?;
    // The command holds the helper's end of the socket, which delays the end of file until it is
    // gone.
    drop(command);
    let received = receive_descriptor(&ours);
    let output = child.wait_with_output().map_err(MountError::HelperTalk)?;
    match received {
        Ok(Some(device)) if output.status.success() => Ok(device),
        Err(errno) => Err(talk(errno)),
        Ok(_) => Err(MountError::Helper(helper_words(&output))),
    }
}

fn helper_words(output: &std::process::Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    match text.trim() {
        "" => format!("{HELPER} failed ({})", output.status),
        words => words.replace('\n', "; "),
    }
}

/// The value of `-o`. In the source, `\` and `,` are escaped for fusermount3.
fn helper_options(options: &FuseMountOptions) -> OsString {
    let mut value = b"default_permissions,subtype=".to_vec();
    value.extend_from_slice(SUBTYPE.as_bytes());
    value.extend_from_slice(if options.suid { b",suid" } else { b",nosuid" });
    value.extend_from_slice(if options.dev { b",dev" } else { b",nodev" });
    if options.noexec {
        value.extend_from_slice(b",noexec");
    }
    if options.allow_other {
        value.extend_from_slice(b",allow_other");
    }
    if options.read_only {
        value.extend_from_slice(b",ro");
    }
    for option in options.vfs.iter().filter(|option| OF_HELPER.contains(&option.as_str())) {
        value.push(b',');
        value.extend_from_slice(option.as_bytes());
    }
    if let Some(bytes) = options.max_read {
        value.extend_from_slice(format!(",max_read={bytes}").as_bytes());
    }
    value.extend_from_slice(b",fsname=");
    for &byte in &options.source {
        if byte == b',' || byte == b'\\' {
            value.push(b'\\');
        }
        value.push(byte);
    }
    OsString::from_vec(value)
}

/// Receives one descriptor over a socket; `None` if the peer closed it without sending one.
fn receive_descriptor(socket: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    let (_, descriptors) = receive(socket, &mut [0])?;
    Ok(descriptors.into_iter().next())
}

/// Unmounts the mount at `mountpoint`, without following a symlink there. `lazy` detaches it even
/// while it is in use. Uses `fusermount3 -u` if umount2(2) fails with EPERM.
///
/// # Errors
/// EBUSY while it is in use, EINVAL if nothing is mounted there, or the message of `fusermount3`.
pub fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let mut flags = MntFlags::UMOUNT_NOFOLLOW;
    if lazy {
        flags |= MntFlags::MNT_DETACH;
    }
    match umount2(mountpoint, flags) {
        Err(Errno::EPERM) => unmount_by_helper(mountpoint, lazy),
        other => Ok(other?),
    }
}

fn unmount_by_helper(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let mut command = Command::new(HELPER);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    command.arg("--").arg(mountpoint).stdin(Stdio::null());
    let output = match command.output() {
        // Without a helper, the reason is the missing privilege.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Errno::EPERM.into()),
        other => other?,
    };
    if output.status.success() {
        return Ok(());
    }
    let words = helper_words(&output);
    let kind =
        if words.contains("busy") { io::ErrorKind::ResourceBusy } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, words))
}

/// A private view of the directory `dir` that permits no write and updates no access time: a
/// detached, read-only, `noatime`, `nodev`, `nosuid`, `noexec` clone of its mount with `dir` as its
/// root (open_tree(2), mount_setattr(2)). Mounts below `dir` are not part of it.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN, ENOSYS before Linux 5.12, EINVAL if the mount cannot be cloned.
pub fn clone_private_readonly<Fd: AsFd>(dir: Fd) -> io::Result<OwnedFd> {
    let view = open_tree(&dir)?;
    set_private_readonly(&view)?;
    Ok(view)
}

fn open_tree<Fd: AsFd>(dir: &Fd) -> io::Result<OwnedFd> {
    let flags =
        libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH.cast_unsigned();
    // SAFETY: open_tree(2) reads the path, which is empty and ends with NUL, and takes a descriptor
    // that is borrowed for the call.
    let result =
        unsafe { libc::syscall(libc::SYS_open_tree, dir.as_fd().as_raw_fd(), c"".as_ptr(), flags) };
    let descriptor = Errno::result(result)?;
    let descriptor = i32::try_from(descriptor).map_err(|_| Errno::EBADF)?;
    // SAFETY: open_tree(2) returns a new descriptor that no other code owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn set_private_readonly(view: &OwnedFd) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY
            | libc::MOUNT_ATTR_NOATIME
            | libc::MOUNT_ATTR_NODEV
            | libc::MOUNT_ATTR_NOSUID
            | libc::MOUNT_ATTR_NOEXEC,
        // mount_setattr(2): setting an access time mode requires clearing all of them.
        attr_clr: libc::MOUNT_ATTR__ATIME,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    // SAFETY: mount_setattr(2) reads `size` bytes of the structure, which is that long, and the
    // empty path, which ends with NUL.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            view.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    Errno::result(result)?;
    Ok(())
}

#[cfg(test)]
mod tests;
