//! Maps each refusal to an errno and a log level. No other file decides either.

use log::Level;
use nix::errno::Errno;

use crate::error::FsError;

/// The errno of a refused operation and its log level. Ordinary refusals are logged for debugging
/// only; a warning needs a person's attention.
pub(super) fn classify(error: &FsError) -> (Errno, Level) {
    match error {
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
        // As openat2(2) with RESOLVE_BENEATH. `fs` has logged the link itself.
        FsError::LeavesJail => (Errno::EXDEV, Level::Debug),
        // On ESTALE the kernel walks the path again and looks each name up anew.
        FsError::Stale => (Errno::ESTALE, Level::Debug),
        FsError::ReadOnly => (Errno::EROFS, Level::Debug),
        FsError::Drift(_) | FsError::Damage(_) | FsError::MustWait => (Errno::EIO, Level::Warn),
        FsError::Host(code) => (from_host(*code), Level::Warn),
        FsError::Store(error) => (from_store(error.errno), Level::Warn),
    }
}

/// Maps an errno of the host to what a program in the mount may see.
fn from_host(code: i32) -> Errno {
    match Errno::from_raw(code) {
        // On ENOSYS the kernel would never send this operation again.
        Errno::ENOSYS => Errno::EOPNOTSUPP,
        // These are about the daemon's descriptors and calls, not the program's.
        Errno::UnknownErrno | Errno::EINTR | Errno::EAGAIN | Errno::EBADF | Errno::EFAULT => {
            Errno::EIO
        }
        errno => errno,
    }
}

/// Maps an errno of the store. To a program, the store is a full or a broken disk.
fn from_store(code: Option<i32>) -> Errno {
    match code.map(Errno::from_raw) {
        Some(
            errno @ (Errno::ENOSPC | Errno::EDQUOT | Errno::EROFS | Errno::ENOMEM | Errno::EINVAL),
        ) => errno,
        Some(_) | None => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn code(error: &FsError) -> Errno {
        classify(error).0
    }

    #[test]
    fn a_full_store_gives_enospc_and_a_broken_store_eio() {
        let full = Error::io("write", &std::io::Error::from(Errno::ENOSPC));
        assert_eq!(code(&full.into()), Errno::ENOSPC);
        assert_eq!(
            code(&Error::io("write", &std::io::Error::from(Errno::EBADF)).into()),
            Errno::EIO
        );
        assert_eq!(code(&Error::damage("read", "torn").into()), Errno::EIO);
    }

    #[test]
    fn no_host_errno_disables_an_operation_or_is_invalid_to_the_kernel() {
        for odd in [0, -1, 4, 512, 524, i32::MAX, i32::MIN] {
            assert_eq!(code(&FsError::Host(odd)), Errno::EIO, "{odd}");
        }
        assert_eq!(code(&FsError::Host(Errno::ENOSYS as i32)), Errno::EOPNOTSUPP);
        assert_eq!(code(&FsError::Host(Errno::ENOSPC as i32)), Errno::ENOSPC);
    }

    #[test]
    fn ordinary_refusals_are_not_warnings() {
        assert_eq!(classify(&FsError::NotFound).1, Level::Debug);
        assert_eq!(classify(&FsError::Damage("x")).1, Level::Warn);
    }
}
