//! Which errno a program gets, and how loudly the refusal is logged. Decided here and nowhere else.

use log::Level;
use nix::errno::Errno;

use crate::error::FsError;

/// The errno for a refused operation, and the level at which it is logged: ordinary refusals are the daily life of every
/// filesystem, the others are for a person to look at.
pub(super) fn verdict(error: &FsError) -> (fuser::Errno, Level) {
    let (errno, level) = match error {
        FsError::NotFound => (Errno::ENOENT, Level::Debug),
        FsError::Exists => (Errno::EEXIST, Level::Debug),
        FsError::NotADirectory => (Errno::ENOTDIR, Level::Debug),
        FsError::IsADirectory => (Errno::EISDIR, Level::Debug),
        FsError::NotEmpty => (Errno::ENOTEMPTY, Level::Debug),
        FsError::NotPermitted => (Errno::EPERM, Level::Debug),
        FsError::AccessDenied => (Errno::EACCES, Level::Debug),
        FsError::Invalid => (Errno::EINVAL, Level::Debug),
        FsError::NameTooLong => (Errno::ENAMETOOLONG, Level::Debug),
        FsError::FileTooBig => (Errno::EFBIG, Level::Debug),
        FsError::NoSuchOffset => (Errno::ENXIO, Level::Debug),
        FsError::NoAttribute => (Errno::ENODATA, Level::Debug),
        FsError::Range => (Errno::ERANGE, Level::Debug),
        FsError::TooLarge => (Errno::E2BIG, Level::Debug),
        FsError::NoSpace | FsError::LimitReached => (Errno::ENOSPC, Level::Debug),
        FsError::TooManyLinks => (Errno::EMLINK, Level::Debug),
        FsError::Unsupported => (Errno::EOPNOTSUPP, Level::Debug),
        // As RESOLVE_BENEATH of openat2(2) answers; `fs` has logged the link itself.
        FsError::LeavesJail => (Errno::EXDEV, Level::Debug),
        // The kernel then walks the path again, and asks for each name anew.
        FsError::Stale => (Errno::ESTALE, Level::Debug),
        FsError::ReadOnly => (Errno::EROFS, Level::Debug),
        FsError::Drift(_) | FsError::Damage(_) => (Errno::EIO, Level::Warn),
        FsError::Host(code) => (from_host(*code), Level::Warn),
        FsError::Store(error) => (from_store(error.errno), Level::Warn),
    };
    (fuser::Errno::from_i32(errno as i32), level)
}

/// An errno of the host, as a program in the mount may see it.
fn from_host(code: i32) -> Errno {
    match Errno::from_raw(code) {
        // The kernel would take it for "this operation does not exist" and never ask again.
        Errno::ENOSYS => Errno::EOPNOTSUPP,
        // About our descriptors and calls, not the program's.
        Errno::UnknownErrno | Errno::EINTR | Errno::EAGAIN | Errno::EBADF | Errno::EFAULT => Errno::EIO,
        errno => errno,
    }
}

/// An errno of the store: whatever it is, to the program it is a full or a broken disk.
fn from_store(code: Option<i32>) -> Errno {
    match code.map(Errno::from_raw) {
        Some(told @ (Errno::ENOSPC | Errno::EDQUOT | Errno::EROFS | Errno::ENOMEM | Errno::EINVAL)) => told,
        Some(_) | None => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn code(error: &FsError) -> Errno {
        Errno::from_raw(verdict(error).0.code())
    }

    #[test]
    fn a_full_store_is_a_full_disk_and_a_broken_store_a_broken_one() {
        let full = Error::io("write", &std::io::Error::from(Errno::ENOSPC));
        assert_eq!(code(&full.into()), Errno::ENOSPC);
        assert_eq!(code(&Error::io("write", &std::io::Error::from(Errno::EBADF)).into()), Errno::EIO);
        assert_eq!(code(&Error::damage("read", "torn").into()), Errno::EIO);
    }

    #[test]
    fn no_errno_of_the_host_switches_an_operation_off_or_is_refused_by_the_kernel() {
        for odd in [0, -1, 4, 512, 524, i32::MAX, i32::MIN] {
            assert_eq!(code(&FsError::Host(odd)), Errno::EIO, "{odd}");
        }
        assert_eq!(code(&FsError::Host(Errno::ENOSYS as i32)), Errno::EOPNOTSUPP);
        assert_eq!(code(&FsError::Host(Errno::ENOSPC as i32)), Errno::ENOSPC);
    }

    #[test]
    fn only_what_a_person_should_see_is_a_warning() {
        assert_eq!(verdict(&FsError::NotFound).1, Level::Debug);
        assert_eq!(verdict(&FsError::Damage("x")).1, Level::Warn);
    }
}
