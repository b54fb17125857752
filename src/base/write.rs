//! The one door through which `apply` changes the base.
//!
//! A [`WriteDir`] is an open directory of the base, found beneath-only, through no link. What is done in it is done
//! with calls that take this descriptor and one [`Name`], and that follow no link either; so a base in which somebody
//! swaps directories for links gives an error, never a write elsewhere. Nothing here decides what to write.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{Mode, SFlag, mkdirat, mknodat};
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};

use crate::error::{FsError, FsResult};
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::file::{Rename, open_in, rename};
use crate::sys::flags;
use crate::sys::process::unlikely_number;
use crate::types::{FileKind, Name, PERM_BITS, TYPE_BITS, TreePath};

use super::attributes::{Attributes, change_mode, make_so};
use super::resolve::{Resolver, Root};
use super::stat::BaseStat;

/// What the names of staged content begin with.
const STAGE: &str = ".jailfs-stage-";

/// Opens directories of the base for writing.
#[derive(Clone, Copy)]
pub struct BaseWriter<'a> {
    root: &'a Root,
    resolver: &'a Resolver,
}

impl<'a> BaseWriter<'a> {
    pub(super) fn new(root: &'a Root, resolver: &'a Resolver) -> BaseWriter<'a> {
        BaseWriter { root, resolver }
    }

    /// Opens the directory `path` of the base to write in it.
    ///
    /// # Errors
    /// `LeavesJail` if a symlink or a mount point is on the way or at the end; `NotFound`, `NotADirectory`,
    /// `AccessDenied`.
    pub fn dir(&self, path: &TreePath) -> FsResult<WriteDir<'a>> {
        // Looked at first: opening a mount point, or with O_DIRECTORY a symlink, has other errors on other kernels.
        let looked =
            self.resolver.open(self.root, path.as_bytes(), OFlag::O_PATH).map_err(write_error)?;
        match BaseStat::of(&looked)?.kind {
            FileKind::Dir => {}
            FileKind::Symlink => return Err(FsError::LeavesJail),
            _ => return Err(FsError::NotADirectory),
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let fd = self.resolver.open(self.root, path.as_bytes(), flags).map_err(write_error)?;
        Ok(WriteDir { root: Root::new(fd), resolver: self.resolver })
    }
}

/// A directory of the base, open for changes of the names in it.
///
/// Every call fails with `ReadOnly` on a read-only filesystem, and with `AccessDenied` or `NotPermitted` where the
/// host says so; other errors are named where they have a meaning of their own.
pub struct WriteDir<'a> {
    root: Root,
    resolver: &'a Resolver,
}

impl WriteDir<'_> {
    /// What is at `name`, of a symlink the link itself; `None` if nothing is.
    ///
    /// # Errors
    /// `LeavesJail` for a mount point.
    pub fn stat(&self, name: &Name) -> FsResult<Option<BaseStat>> {
        match self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH) {
            Ok(object) => BaseStat::of(&object).map(Some),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(write_error(errno)),
        }
    }

    /// What this directory is now.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn own_stat(&self) -> FsResult<BaseStat> {
        BaseStat::of(&self.root.fd)
    }

    /// Opens the regular file `name` for reading: what is here now, to keep it as a pre-image.
    ///
    /// # Errors
    /// `NotFound`, `IsADirectory`; `Invalid` for what is neither file nor directory; `LeavesJail` for a mount point.
    pub fn open_file(&self, name: &Name) -> FsResult<File> {
        let looked =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_error)?;
        super::must_be_file(BaseStat::of(&looked)?.kind)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = self.resolver.open(&self.root, name.as_bytes(), flags).map_err(write_error)?;
        super::must_be_file(BaseStat::of(&file)?.kind)?;
        Ok(File::from(file))
    }

    /// The inode flags of the regular file `name` ([`crate::sys::flags`]); none of a file that may not
    /// be read.
    ///
    /// # Errors
    /// As [`WriteDir::open_file`], and those of ioctl(2).
    pub fn flags(&self, name: &Name) -> FsResult<u32> {
        match self.open_file(name) {
            Ok(file) => flags::get(&file).map_err(write_failure),
            Err(FsError::AccessDenied | FsError::NotPermitted) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// The inode flags of this directory.
    ///
    /// # Errors
    /// Those of ioctl(2).
    pub fn own_flags(&self) -> FsResult<u32> {
        flags::get(&self.root.fd).map_err(write_failure)
    }

    /// Creates an empty file, for reading and writing, mode 0600.
    ///
    /// # Errors
    /// `Exists`.
    pub fn create_file(&self, name: &Name) -> FsResult<File> {
        failpoint::hit(Failpoint::BaseStage)?;
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
        let file = open_in(&self.root.fd, name, flags, Mode::S_IRUSR | Mode::S_IWUSR);
        file.map(File::from).map_err(write_failure)
    }

    /// A name for what is staged, which nothing is likely to have.
    ///
    /// # Errors
    /// None that can be met.
    pub fn stage_name() -> FsResult<Name> {
        Ok(Name::new(format!("{STAGE}{:016x}", unlikely_number()).as_bytes())?)
    }

    /// Whether `name` is one as [`WriteDir::stage_name`] gives.
    pub fn is_stage_name(name: &Name) -> bool {
        let number = name.as_bytes().strip_prefix(STAGE.as_bytes());
        number.is_some_and(|number| number.len() == 16 && number.iter().all(u8::is_ascii_hexdigit))
    }

    /// Makes a directory. Its mode is `mode` less the umask, until [`WriteDir::set_owner_mode_times_xattrs`].
    ///
    /// # Errors
    /// `Exists`.
    pub fn mkdir(&self, name: &Name, mode: u32) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseMkdir)?;
        mkdirat(&self.root.fd, name.as_os_str(), Mode::from_bits_truncate(mode & PERM_BITS))
            .map_err(write_error)
    }

    /// Makes a symlink with the text `target`.
    ///
    /// # Errors
    /// `Exists`.
    pub fn symlink(&self, name: &Name, target: &[u8]) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseLink)?;
        symlinkat(std::ffi::OsStr::from_bytes(target), &self.root.fd, name.as_os_str())
            .map_err(write_error)
    }

    /// Makes a fifo, socket, device or empty file: `mode` has the type bits, `rdev` is a raw `dev_t`.
    ///
    /// # Errors
    /// `Exists`; `NotPermitted` for devices without privilege; `Invalid` for a directory or symlink.
    pub fn mknod(&self, name: &Name, mode: u32, rdev: u64) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseLink)?;
        match FileKind::from_mode(mode) {
            None | Some(FileKind::Dir | FileKind::Symlink) => return Err(FsError::Invalid),
            Some(_) => {}
        }
        let kind = SFlag::from_bits_truncate(mode & TYPE_BITS);
        let permissions = Mode::from_bits_truncate(mode & PERM_BITS);
        mknodat(&self.root.fd, name.as_os_str(), kind, permissions, rdev).map_err(write_error)
    }

    /// Gives `from` in `from_dir` a further name here; of a symlink, to the link itself.
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
        linkat(&from_dir.root.fd, from, &self.root.fd, name, AtFlags::empty()).map_err(write_error)
    }

    /// Renames `from` to `to` in `to_dir`.
    ///
    /// # Errors
    /// `NotFound`; `Exists` with [`Rename::NoReplace`]; `NotEmpty`, `IsADirectory`, `NotADirectory` as rename(2).
    pub fn rename(
        &self,
        from: &Name,
        to_dir: &WriteDir<'_>,
        to: &Name,
        how: Rename,
    ) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseRename)?;
        rename(&self.root.fd, from, &to_dir.root.fd, to, how).map_err(write_failure)
    }

    /// Removes a name that is no directory.
    ///
    /// # Errors
    /// `NotFound`, `IsADirectory`.
    pub fn unlink(&self, name: &Name) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseRemove)?;
        unlinkat(&self.root.fd, name.as_os_str(), UnlinkatFlags::NoRemoveDir).map_err(write_error)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `NotFound`, `NotADirectory`, `NotEmpty`.
    pub fn rmdir(&self, name: &Name) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseRemove)?;
        unlinkat(&self.root.fd, name.as_os_str(), UnlinkatFlags::RemoveDir).map_err(write_error)
    }

    /// Opens the regular file `name` to write it anew in place: it has links elsewhere that must stay links. Says what it is.
    ///
    /// # Errors
    /// EINVAL for what is not a regular file, else what the host answers.
    pub fn open_to_rewrite(&self, name: &Name) -> FsResult<(File, BaseStat)> {
        failpoint::hit(Failpoint::BaseStage)?;
        let looked =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_error)?;
        let stat = BaseStat::of(&looked)?;
        super::must_be_file(stat.kind)?;
        let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let open = || self.resolver.open(&self.root, name.as_bytes(), flags);
        let file = match open() {
            // Its owner may not write it, but may change that. It is given its mode when it was written.
            Err(Errno::EACCES) => {
                change_mode(&looked, stat.mode & PERM_BITS | 0o600)
                    .map_err(|_| FsError::AccessDenied)?;
                open()
            }
            opened => opened,
        };
        let file = file.map_err(write_error)?;
        let opened = BaseStat::of(&file)?;
        super::must_be_file(opened.kind)?;
        Ok((File::from(file), opened))
    }

    /// Gives `name`, whatever it is, its owner, mode, extended attributes and, last, its times; and says what it is then. Made again after a
    /// failure it ends the same.
    ///
    /// # Errors
    /// `NotFound`; `LeavesJail` for a mount point; `Unsupported` for attributes that the filesystem does not have.
    pub fn set_owner_mode_times_xattrs(
        &self,
        name: &Name,
        wanted: &Attributes<'_>,
    ) -> FsResult<BaseStat> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        let object =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_error)?;
        make_so(&object, wanted)?;
        BaseStat::of(&object)
    }

    /// The same for a file that was opened here, whatever its name is by now.
    ///
    /// # Errors
    /// `Unsupported` for attributes that the filesystem does not have.
    pub fn set_attributes_of(&self, file: File, wanted: &Attributes<'_>) -> FsResult<BaseStat> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        let object = file.into();
        make_so(&object, wanted)?;
        BaseStat::of(&object)
    }

    /// Gives `name`, which is no symlink, these permission bits.
    ///
    /// # Errors
    /// `NotFound`; `LeavesJail` for a mount point; `NotPermitted` if it is somebody else's.
    pub fn set_mode(&self, name: &Name, mode: u32) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        let object =
            self.resolver.open(&self.root, name.as_bytes(), OFlag::O_PATH).map_err(write_error)?;
        change_mode(&object, mode & PERM_BITS)
    }

    /// Gives this directory itself its owner, mode, extended attributes and, last, its times.
    ///
    /// # Errors
    /// As [`WriteDir::set_owner_mode_times_xattrs`].
    pub fn set_own_attributes(&self, wanted: &Attributes<'_>) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseAttributes)?;
        make_so(&self.root.fd, wanted)
    }

    /// Makes everything written to the filesystem of the base survive the machine (syncfs(2)).
    ///
    /// # Errors
    /// What the host answers.
    pub fn sync_filesystem(&self) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseSync)?;
        nix::unistd::syncfs(&self.root.fd).map_err(write_error)
    }

    /// Makes the names of this directory survive the machine (fsync(2)).
    ///
    /// # Errors
    /// Those of the host, EIO above all.
    pub fn fsync(&self) -> FsResult<()> {
        failpoint::hit(Failpoint::BaseSync)?;
        nix::unistd::fsync(&self.root.fd).map_err(write_error)
    }
}

/// What an errno of a change means.
pub(super) fn write_error(errno: Errno) -> FsError {
    match errno {
        Errno::ENOENT => FsError::NotFound,
        Errno::EEXIST => FsError::Exists,
        Errno::ENOTDIR => FsError::NotADirectory,
        Errno::EISDIR => FsError::IsADirectory,
        Errno::ENOTEMPTY => FsError::NotEmpty,
        Errno::EPERM => FsError::NotPermitted,
        Errno::EACCES => FsError::AccessDenied,
        Errno::EINVAL => FsError::Invalid,
        Errno::ENAMETOOLONG => FsError::NameTooLong,
        Errno::EFBIG => FsError::FileTooBig,
        Errno::E2BIG => FsError::TooLarge,
        Errno::EMLINK => FsError::TooManyLinks,
        Errno::EOPNOTSUPP => FsError::Unsupported,
        Errno::EROFS => FsError::ReadOnly,
        // A link or a mount point where a directory was: going on would lead out of the base.
        Errno::ELOOP | Errno::EXDEV => FsError::LeavesJail,
        // ENOSPC too, so that the message says what is full.
        other => FsError::Host(other as i32),
    }
}

pub(super) fn write_failure(error: io::Error) -> FsError {
    error
        .raw_os_error()
        .map_or(FsError::Host(libc::EIO), |errno| write_error(Errno::from_raw(errno)))
}
