//! Extended attributes of the object of any descriptor, including `O_PATH` ones and symlinks.
//!
//! fgetxattr(2) and its relatives fail with EBADF for `O_PATH` descriptors. `/proc/self/fd/N` leads
//! to exactly the object of the descriptor, even if that is a symlink, and no path is walked. So
//! that is the second attempt.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use nix::errno::Errno;

/// How often to ask again for a value that grows between asking for its size and reading it.
const TRIES: usize = 64;

/// The names of all attributes that the caller may see; empty if the filesystem has none.
///
/// # Errors
/// Those of listxattr(2) except ENOTSUP.
pub fn list<Fd: AsFd>(fd: Fd) -> io::Result<Vec<Vec<u8>>> {
    let object = Object::of(&fd)?;
    let listed = read_growing(|buffer| object.list(buffer));
    let bytes = match listed {
        Err(Errno::EOPNOTSUPP) => return Ok(Vec::new()),
        other => other?,
    };
    Ok(bytes.split(|&byte| byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect())
}

/// The value of the attribute `name`.
///
/// # Errors
/// Those of getxattr(2): ENODATA if the attribute does not exist.
pub fn get<Fd: AsFd>(fd: Fd, name: &[u8]) -> io::Result<Vec<u8>> {
    let object = Object::of(&fd)?;
    let name = CString::new(name)?;
    Ok(read_growing(|buffer| object.get(&name, buffer))?)
}

/// Creates or replaces the attribute `name`.
///
/// # Errors
/// Those of setxattr(2).
pub fn set<Fd: AsFd>(fd: Fd, name: &[u8], value: &[u8]) -> io::Result<()> {
    let object = Object::of(&fd)?;
    let name = CString::new(name)?;
    Ok(object.set(&name, value)?)
}

/// Removes the attribute `name`.
///
/// # Errors
/// Those of removexattr(2): ENODATA if the attribute does not exist.
pub fn remove<Fd: AsFd>(fd: Fd, name: &[u8]) -> io::Result<()> {
    let object = Object::of(&fd)?;
    let name = CString::new(name)?;
    Ok(object.remove(&name)?)
}

/// Asks for the size, then for the bytes, and again if they have grown in between.
fn read_growing(call: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    for _ in 0..TRIES {
        let size = call(&mut [])?;
        if size == 0 {
            return Ok(Vec::new());
        }
        let mut buffer = vec![0; size];
        match call(&mut buffer) {
            Ok(filled) => {
                buffer.truncate(filled);
                return Ok(buffer);
            }
            Err(Errno::ERANGE) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(Errno::ERANGE)
}

/// How to name the object in a call: by its descriptor or by its magic link.
enum Object {
    Open(RawFd),
    Path(CString),
}

impl Object {
    /// Borrows nothing, so every caller must keep the descriptor open until its call has returned.
    fn of<Fd: AsFd>(fd: &Fd) -> io::Result<Object> {
        let fd = fd.as_fd();
        let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFL)?;
        if flags & libc::O_PATH == 0 {
            return Ok(Object::Open(fd.as_raw_fd()));
        }
        Ok(Object::Path(CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd()))?))
    }

    fn list(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        let (start, len) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: listxattr(2) writes at most `size` bytes to the buffer, nothing if that is 0; the
        // path ends with NUL.
        let result = unsafe {
            match self {
                Object::Open(fd) => libc::flistxattr(*fd, start, len),
                Object::Path(path) => libc::listxattr(path.as_ptr(), start, len),
            }
        };
        Errno::result(result).map(|len| usize::try_from(len).unwrap_or(0))
    }

    fn get(&self, name: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
        let (start, len) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: getxattr(2) writes at most `size` bytes to the buffer, nothing if that is 0; name
        // and path end with NUL.
        let result = unsafe {
            match self {
                Object::Open(fd) => libc::fgetxattr(*fd, name.as_ptr(), start, len),
                Object::Path(path) => libc::getxattr(path.as_ptr(), name.as_ptr(), start, len),
            }
        };
        Errno::result(result).map(|len| usize::try_from(len).unwrap_or(0))
    }

    fn set(&self, name: &CStr, value: &[u8]) -> Result<(), Errno> {
        let (start, len) = (value.as_ptr().cast(), value.len());
        // SAFETY: setxattr(2) reads `size` bytes of the value, which is that long; name and path
        // end with NUL.
        let result = unsafe {
            match self {
                Object::Open(fd) => libc::fsetxattr(*fd, name.as_ptr(), start, len, 0),
                Object::Path(path) => libc::setxattr(path.as_ptr(), name.as_ptr(), start, len, 0),
            }
        };
        Errno::result(result).map(drop)
    }

    fn remove(&self, name: &CStr) -> Result<(), Errno> {
        // SAFETY: removexattr(2) only reads name and path, which end with NUL.
        let result = unsafe {
            match self {
                Object::Open(fd) => libc::fremovexattr(*fd, name.as_ptr()),
                Object::Path(path) => libc::removexattr(path.as_ptr(), name.as_ptr()),
            }
        };
        Errno::result(result).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::fcntl::{OFlag, open};
    use nix::sys::stat::Mode;
    use std::os::fd::OwnedFd;
    use std::path::Path;

    fn o_path(path: &Path) -> OwnedFd {
        open(path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty()).unwrap()
    }

    #[test]
    fn attributes_go_through_real_and_path_descriptors_alike() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"").unwrap();
        let real = open(&path, OFlag::O_RDWR, Mode::empty()).unwrap();
        let by_path = o_path(&path);
        set(&real, b"user.one", b"1").unwrap();
        set(&by_path, b"user.\xff", b"\0\xff").unwrap();
        for fd in [&real, &by_path] {
            let mut names = list(fd).unwrap();
            names.sort();
            assert_eq!(names, [b"user.one".to_vec(), b"user.\xff".to_vec()]);
            assert_eq!(get(fd, b"user.\xff").unwrap(), b"\0\xff");
            assert_eq!(get(fd, b"user.none").unwrap_err().raw_os_error(), Some(libc::ENODATA));
        }
        remove(&by_path, b"user.one").unwrap();
        set(&real, b"user.empty", b"").unwrap();
        assert_eq!(get(&by_path, b"user.empty").unwrap(), b"");
        remove(&real, b"user.\xff").unwrap();
        assert_eq!(list(&real).unwrap(), [b"user.empty".to_vec()]);
    }

    #[test]
    fn a_symlink_has_attributes_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), b"").unwrap();
        std::os::unix::fs::symlink("f", dir.path().join("l")).unwrap();
        let link = o_path(&dir.path().join("l"));
        set(&link, b"trusted.mark", b"link").unwrap();
        assert_eq!(list(&link).unwrap(), [b"trusted.mark".to_vec()]);
        assert_eq!(get(&link, b"trusted.mark").unwrap(), b"link");
        assert!(list(o_path(&dir.path().join("f"))).unwrap().is_empty());
        assert_eq!(set(&link, b"user.mark", b"").unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_filesystem_without_attributes_lists_none() {
        assert!(list(o_path(Path::new("/proc/self"))).unwrap().is_empty());
        assert!(list(o_path(Path::new("/proc/version"))).unwrap().is_empty());
    }

    #[test]
    fn a_growing_value_is_read_again() {
        let calls = std::cell::Cell::new(0);
        let value = read_growing(|buffer| {
            calls.set(calls.get() + 1);
            let now = if calls.get() < 2 { 3 } else { 5 };
            match buffer.len() {
                0 => Ok(now),
                len if len < now => Err(Errno::ERANGE),
                _ => {
                    buffer[..now].fill(b'v');
                    Ok(now)
                }
            }
        });
        assert_eq!(value.unwrap(), b"vvvvv");
        let always =
            read_growing(|buffer| if buffer.is_empty() { Ok(1) } else { Err(Errno::ERANGE) });
        assert_eq!(always.unwrap_err(), Errno::ERANGE);
    }
}
