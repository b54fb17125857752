//! Writes to the base. Only `apply` and its rollback use it.
//!
//! * A [`WriteDir`] is an open directory of the base, found beneath the root through no symlink.
//!   Each change is a call with this descriptor and one [`Name`], and follows no symlink either. If
//!   another process swaps a directory for a symlink, a call fails; it never writes elsewhere.
//! * Each change has a failpoint.
//! * This file does not decide what to write.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{Mode, SFlag, mkdirat, mknodat};
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};

use crate::error::{FsError, FsResult, if_exists};
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::file::{Rename, open_in, rename};
use crate::sys::flags;
use crate::sys::process::unlikely_number;
use crate::types::{FileKind, Name, PERM_BITS, TYPE_BITS, TreePath};

use super::attributes::{Attributes, change_mode, set_attributes};
use super::dir_lookup::stat_in;
use super::errno::{write_errno, write_error};
use super::resolve::{Resolver, Root};
use super::stat::{BaseStat, require_file};

/// The prefix of the names of staged nodes.
const STAGE: &str = ".jailfs-stage-";

/// Opens directories of the base for writing.
#[derive(Clone, Copy)]
pub struct BaseWriter<'a> {
    root: &'a Root,
    resolver: &'a Resolver,
    /// Whether the kernel can stat a file without asking a server.
    is_local: bool,
}

impl<'a> BaseWriter<'a> {
    pub(super) fn new(root: &'a Root, resolver: &'a Resolver, is_local: bool) -> BaseWriter<'a> {
        BaseWriter { root, resolver, is_local }
    }

    /// Opens the directory `path` of the base.
    ///
    /// # Errors
    /// `LeavesJail` if a symlink or a mount point is on the way or at the end; `NotFound`,
    /// `NotADirectory`, `AccessDenied`.
    pub fn dir(&self, path: &TreePath) -> FsResult<WriteDir<'a>> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let fd = match self.resolver.open(self.root, path.as_bytes(), flags) {
            Ok(fd) => fd,
            Err(errno) => return Err(self.why_no_dir(path, errno)),
        };
        Ok(WriteDir { root: Root::new(fd), resolver: self.resolver, is_local: self.is_local })
    }

    /// The error for a path that could not be opened as a directory. With O_DIRECTORY, the errors
    /// for a mount point and a symlink differ between kernels.
    fn why_no_dir(&self, path: &TreePath, errno: Errno) -> FsError {
        let stands = match self.resolver.open(self.root, path.as_bytes(), OFlag::O_PATH) {
            Ok(object) => BaseStat::of(&object).map(|stat| stat.kind),
            Err(errno) => Err(write_errno(errno)),
        };
        match stands {
            Ok(FileKind::Dir) => write_errno(errno),
            Ok(FileKind::Symlink) => FsError::LeavesJail,
            Ok(_) => FsError::NotADirectory,
            Err(error) => error,
        }
    }
}

/// A directory of the base that is open for changes of its names.
///
/// Each call can fail with `ReadOnly` on a read-only filesystem, and with `AccessDenied` or
/// `NotPermitted` if the host refuses. The methods name only other errors.
pub struct WriteDir<'a> {
    root: Root,
    resolver: &'a Resolver,
    is_local: bool,
}

impl WriteDir<'_> {
    /// The metadata of the node at `name`, which may be a symlink. `None` if there is none.
    ///
    /// # Errors
    /// `LeavesJail` for a mount point.
    pub fn stat(&self, name: &Name) -> FsResult<Option<BaseStat>> {
        if self.is_local
            && let Some(found) = stat_in(&self.root, name)
        {
            return if_exists(found);
        }
        match self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH) {
            Ok(object) => BaseStat::of(&object).map(Some),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(write_errno(errno)),
        }
    }

    /// The metadata of this directory.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn own_stat(&self) -> FsResult<BaseStat> {
        BaseStat::of(&self.root.fd)
    }

    /// Opens the regular file `name` for reading, to store it as a pre-image.
    ///
    /// # Errors
    /// `NotFound`, `IsADirectory`; `Invalid` for other kinds of nodes; `LeavesJail` for a mount
    /// point.
    pub fn open_file(&self, name: &Name) -> FsResult<File> {
        let checked =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_errno)?;
        require_file(BaseStat::of(&checked)?.kind)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = self.resolver.open(&self.root, name.as_bytes(), flags).map_err(write_errno)?;
        require_file(BaseStat::of(&file)?.kind)?;
        Ok(File::from(file))
    }

    /// The inode flags of the regular file `name` ([`crate::sys::flags`]); 0 if it is not readable.
    ///
    /// # Errors
    /// As [`WriteDir::open_file`] and ioctl(2).
    pub fn flags(&self, name: &Name) -> FsResult<u32> {
        match self.open_file(name) {
            Ok(file) => flags::get(&file).map_err(write_error),
            Err(FsError::AccessDenied | FsError::NotPermitted) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// The inode flags of this directory.
    ///
    /// # Errors
    /// As ioctl(2).
    pub fn own_flags(&self) -> FsResult<u32> {
        flags::get(&self.root.fd).map_err(write_error)
    }

    /// Creates an empty file with mode 0600, and opens it for reading and writing.
    ///
    /// # Errors
    /// `Exists`.
    pub fn create_file(&self, name: &Name) -> FsResult<File> {
        failpoint::hit(Failpoint::BaseStage)?;
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
        let file = open_in(&self.root.fd, name, flags, Mode::S_IRUSR | Mode::S_IWUSR);
        file.map(File::from).map_err(write_error)
    }

    /// A new random name for a staged node.
    ///
    /// # Errors
    /// None in practice: the name is always valid.
    pub fn stage_name() -> FsResult<Name> {
        Ok(Name::new(format!("{STAGE}{:016x}", unlikely_number()).as_bytes())?)
    }

    /// Creates a directory. Its mode is `mode` minus the umask until
    /// [`WriteDir::set_attributes`] is called.
    ///
    /// # Errors
    /// `Exists`.
    pub fn mkdir(&self, name: &Name, mode: u32) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseMkdir)?;
        mkdirat(&self.root.fd, name.as_os_str(), Mode::from_bits_truncate(mode & PERM_BITS))
            .map_err(write_errno)
    }

    /// Creates a symlink to `target`.
    ///
    /// # Errors
    /// `Exists`.
    pub fn symlink(&self, name: &Name, target: &[u8]) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseLink)?;
        symlinkat(std::ffi::OsStr::from_bytes(target), &self.root.fd, name.as_os_str())
            .map_err(write_errno)
    }

    /// Creates a fifo, socket, device or empty file. `mode` includes the type bits, and `rdev` is a
    /// raw `dev_t`.
    ///
    /// # Errors
    /// `Exists`; `NotPermitted` for a device without privilege; `Invalid` for a directory or
    /// symlink.
    pub fn mknod(&self, name: &Name, mode: u32, rdev: u64) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseLink)?;
        match FileKind::from_mode(mode) {
            None | Some(FileKind::Dir | FileKind::Symlink) => return Err(FsError::Invalid),
            Some(_) => {}
        }
        let kind = SFlag::from_bits_truncate(mode & TYPE_BITS);
        let permissions = Mode::from_bits_truncate(mode & PERM_BITS);
        mknodat(&self.root.fd, name.as_os_str(), kind, permissions, rdev).map_err(write_errno)
    }

    /// Creates the hard link `name` to `from` in `from_dir`, which may be a symlink.
    ///
    /// # Errors
    /// `Exists`, `NotFound`, `TooManyLinks`; `NotPermitted` for a directory.
    pub fn hard_link_from(
        &self,
        from_dir: &WriteDir<'_>,
        from: &Name,
        name: &Name,
    ) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseLink)?;
        let (from, name) = (from.as_os_str(), name.as_os_str());
        linkat(&from_dir.root.fd, from, &self.root.fd, name, AtFlags::empty()).map_err(write_errno)
    }

    /// Renames `from` to `to` in `to_dir`.
    ///
    /// # Errors
    /// `NotFound`; `Exists` with [`Rename::NoReplace`]; `NotEmpty`, `IsADirectory` and
    /// `NotADirectory` as rename(2).
    pub fn rename(
        &self,
        from: &Name,
        to_dir: &WriteDir<'_>,
        to: &Name,
        how: Rename,
    ) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseRename)?;
        rename(&self.root.fd, from, &to_dir.root.fd, to, how).map_err(write_error)
    }

    /// Removes a name that is not a directory.
    ///
    /// # Errors
    /// `NotFound`, `IsADirectory`.
    pub fn unlink(&self, name: &Name) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseRemove)?;
        unlinkat(&self.root.fd, name.as_os_str(), UnlinkatFlags::NoRemoveDir).map_err(write_errno)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `NotFound`, `NotADirectory`, `NotEmpty`.
    pub fn rmdir(&self, name: &Name) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseRemove)?;
        unlinkat(&self.root.fd, name.as_os_str(), UnlinkatFlags::RemoveDir).map_err(write_errno)
    }

    /// Opens the regular file `name` to replace its content in place, because it has other hard
    /// links that must keep sharing its inode. Returns its metadata, too.
    ///
    /// # Errors
    /// `IsADirectory`, or `Invalid` for other kinds of nodes; else the error of the host.
    pub fn open_to_rewrite(&self, name: &Name) -> FsResult<(File, BaseStat)> {
        failpoint::hit(Failpoint::BaseStage)?;
        let checked =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_errno)?;
        let stat = BaseStat::of(&checked)?;
        require_file(stat.kind)?;
        let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let open = || self.resolver.open(&self.root, name.as_bytes(), flags);
        let file = match open() {
            // The owner may not write to it, but may change the mode. The caller sets the final
            // mode after writing.
            Err(Errno::EACCES) => {
                change_mode(&checked, stat.mode & PERM_BITS | 0o600)
                    .map_err(|_| FsError::AccessDenied)?;
                open()
            }
            opened => opened,
        };
        let file = file.map_err(write_errno)?;
        let opened = BaseStat::of(&file)?;
        require_file(opened.kind)?;
        Ok((File::from(file), opened))
    }

    /// Sets owner, mode, extended attributes and times of the node at `name`, and returns its
    /// metadata after that. A call that failed halfway can be repeated.
    ///
    /// # Errors
    /// `NotFound`; `LeavesJail` for a mount point; `Unsupported` for attributes that the filesystem
    /// does not have.
    pub fn set_attributes(&self, name: &Name, wanted: &Attributes<'_>) -> FsResult<BaseStat> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        let object =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_errno)?;
        set_attributes(&object, wanted)?;
        BaseStat::of(&object)
    }

    /// As [`WriteDir::set_attributes`], for an open file.
    ///
    /// # Errors
    /// `Unsupported` for attributes that the filesystem does not have.
    pub fn set_file_attributes(&self, file: File, wanted: &Attributes<'_>) -> FsResult<BaseStat> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        let object = file.into();
        set_attributes(&object, wanted)?;
        BaseStat::of(&object)
    }

    /// Sets the permission bits of the node at `name`, which is not a symlink.
    ///
    /// # Errors
    /// `NotFound`; `LeavesJail` for a mount point; `NotPermitted` if it belongs to another user.
    pub fn set_mode(&self, name: &Name, mode: u32) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        let object =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_errno)?;
        change_mode(&object, mode & PERM_BITS)
    }

    /// Sets owner, mode, extended attributes and times of this directory.
    ///
    /// # Errors
    /// As [`WriteDir::set_attributes`].
    pub fn set_own_attributes(&self, wanted: &Attributes<'_>) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        set_attributes(&self.root.fd, wanted)
    }

    /// Makes everything that was written to the filesystem of the base survive a power cut.
    ///
    /// # Errors
    /// As syncfs(2).
    pub fn sync_filesystem(&self) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseSync)?;
        nix::unistd::syncfs(&self.root.fd).map_err(write_errno)
    }

    /// Makes the names in this directory survive a power cut.
    ///
    /// # Errors
    /// As fsync(2).
    pub fn fsync(&self) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseSync)?;
        nix::unistd::fsync(&self.root.fd).map_err(write_errno)
    }
}
