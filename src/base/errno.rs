//! Translates errno values of the host into [`FsError`].

use std::io;

use nix::errno::Errno;

use crate::error::FsError;

/// The error of a read of the base. A path that can only be reached through a symlink or into a
/// mount is not in the base, and a name that is too long for the host cannot be there.
pub(super) fn read_errno(errno: Errno) -> FsError {
    match errno {
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV | Errno::ENAMETOOLONG => {
            FsError::NotFound
        }
        Errno::EACCES | Errno::EPERM => FsError::AccessDenied,
        other => FsError::Host(other as i32),
    }
}

/// As [`read_errno`].
pub(super) fn read_error(error: io::Error) -> FsError {
    error
        .raw_os_error()
        .map_or(FsError::Host(libc::EIO), |errno| read_errno(Errno::from_raw(errno)))
}

/// The error of a change of the base.
pub(super) fn write_errno(errno: Errno) -> FsError {
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
        // A symlink or a mount point stands where a directory was: going on would leave the base.
        Errno::ELOOP | Errno::EXDEV => FsError::LeavesJail,
        // ENOSPC is among them: the message then says that the disk of the host is full.
        other => FsError::Host(other as i32),
    }
}

/// As [`write_errno`].
pub(super) fn write_error(error: io::Error) -> FsError {
    error
        .raw_os_error()
        .map_or(FsError::Host(libc::EIO), |errno| write_errno(Errno::from_raw(errno)))
}
