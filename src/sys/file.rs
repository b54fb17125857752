//! Reads, writes and changes open files.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate, openat};
use nix::sys::stat::{Mode, makedev};
use nix::unistd::{Whence, lseek};

use crate::types::{ByteRange, Name, Timestamp};

/// Opens `name` in the directory `dir` (openat(2)). Follows no symlink; the descriptor closes on
/// exec.
///
/// # Errors
/// Those of openat(2): ELOOP for a symlink.
pub fn open_in<Fd: AsFd>(dir: Fd, name: &Name, flags: OFlag, mode: Mode) -> io::Result<OwnedFd> {
    Ok(openat(dir, name.as_os_str(), flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, mode)?)
}

/// Reads at `offset` without waiting for the disk (preadv2(2) with RWF_NOWAIT). `None` if nothing
/// is in memory, or if the filesystem does not support it; `Some(0)` at the end of the file. A
/// short read does not mean the end.
///
/// # Errors
/// Those of preadv2(2) except EAGAIN and EOPNOTSUPP.
pub fn pread_nowait<Fd: AsFd>(fd: Fd, buffer: &mut [u8], offset: u64) -> io::Result<Option<usize>> {
    let offset = to_offset(offset)?;
    let part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: preadv2(2) writes at most `iov_len` bytes to the one buffer, which is that long and
    // borrowed mutably.
    let result = unsafe {
        libc::preadv2(fd.as_fd().as_raw_fd(), &raw const part, 1, offset, libc::RWF_NOWAIT)
    };
    match Errno::result(result) {
        Ok(read) => Ok(Some(usize::try_from(read).unwrap_or(0))),
        Err(Errno::EAGAIN | Errno::EOPNOTSUPP | Errno::EINTR | Errno::ENOSYS) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Fills `buffer` from `offset`. Returns fewer bytes only at the end of the file.
///
/// # Errors
/// Those of pread(2) except EINTR.
pub fn pread_full(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes the dirty pages of the whole file to its filesystem and waits for them
/// (sync_file_range(2) with all flags).
///
/// # Errors
/// Those of sync_file_range(2): EBADF for an `O_PATH` descriptor, ESPIPE for a special file.
pub fn sync_file_range_all<Fd: AsFd>(fd: Fd) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: sync_file_range(2) takes numbers only; the descriptor is borrowed for the call.
    Errno::result(unsafe { libc::sync_file_range(fd.as_fd().as_raw_fd(), 0, 0, flags) })?;
    Ok(())
}

/// Fails with the error of a page that the kernel could not write since this descriptor last
/// reported one (sync_file_range(2) with SYNC_FILE_RANGE_WAIT_BEFORE, which reports the errors of
/// the whole file). Waits only if the first page is being written.
///
/// # Errors
/// Those of sync_file_range(2).
pub fn writeback_error<Fd: AsFd>(fd: Fd) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE;
    // SAFETY: sync_file_range(2) takes numbers only; the descriptor is borrowed for the call.
    Errno::result(unsafe { libc::sync_file_range(fd.as_fd().as_raw_fd(), 0, 1, flags) })?;
    Ok(())
}

/// Allocates blocks for `range`; a file that ends before it grows (fallocate(2) without flags).
///
/// # Errors
/// Those of fallocate(2): ENOSPC, after which a part may be allocated; EOPNOTSUPP if the filesystem
/// does not support it.
pub fn allocate<Fd: AsFd>(fd: Fd, range: ByteRange) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let flags = FallocateFlags::empty();
    fallocate(fd, flags, to_offset(range.start)?, to_offset(range.len())?)?;
    Ok(())
}

/// Frees the blocks of `range`. They then read as zeros, and the size stays (fallocate(2) with
/// FALLOC_FL_PUNCH_HOLE).
///
/// # Errors
/// Those of fallocate(2): EOPNOTSUPP if the filesystem does not support it.
pub fn punch_hole<Fd: AsFd>(fd: Fd, range: ByteRange) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(fd, flags, to_offset(range.start)?, to_offset(range.len())?)?;
    Ok(())
}

/// The first offset at or after `offset` that holds data; `None` if there is none (lseek(2) with
/// SEEK_DATA).
///
/// # Errors
/// Those of lseek(2) except ENXIO.
pub fn seek_data<Fd: AsFd>(fd: Fd, offset: u64) -> io::Result<Option<u64>> {
    seek(fd.as_fd(), offset, Whence::SeekData)
}

/// The first offset at or after `offset` in a hole; the end of the file counts as one. `None` if
/// `offset` is beyond it (lseek(2) with SEEK_HOLE).
///
/// # Errors
/// Those of lseek(2) except ENXIO.
pub fn seek_hole<Fd: AsFd>(fd: Fd, offset: u64) -> io::Result<Option<u64>> {
    seek(fd.as_fd(), offset, Whence::SeekHole)
}

/// The first run of data in a range of a file; `None` if the range is a hole.
///
/// # Errors
/// Those of lseek(2).
pub fn next_data<Fd: AsFd>(fd: Fd, range: ByteRange) -> io::Result<Option<ByteRange>> {
    if range.is_empty() {
        return Ok(None);
    }
    let Some(start) = seek_data(&fd, range.start)?.filter(|start| *start < range.end) else {
        return Ok(None);
    };
    let end = seek_hole(&fd, start)?.unwrap_or(start).min(range.end);
    Ok((start < end).then_some(ByteRange { start, end }))
}

/// The parts of a range that are not in a hole, in order.
///
/// # Errors
/// Those of lseek(2).
pub fn data_in<Fd: AsFd>(fd: Fd, range: ByteRange) -> io::Result<Vec<ByteRange>> {
    let (mut found, mut rest) = (Vec::new(), range);
    while let Some(data) = next_data(&fd, rest)? {
        found.push(data);
        rest.start = data.end;
    }
    Ok(found)
}

fn seek(fd: BorrowedFd<'_>, offset: u64, whence: Whence) -> io::Result<Option<u64>> {
    match lseek(fd, to_offset(offset)?, whence) {
        Ok(found) => Ok(u64::try_from(found).ok()),
        Err(Errno::ENXIO) => Ok(None),
        // A filesystem that cannot tell holes has one run of data, as with the kernel's own
        // fallback.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP | Errno::ENOSYS) => {
            let size = u64::try_from(nix::sys::stat::fstat(fd)?.st_size).unwrap_or(0);
            let found = if matches!(whence, Whence::SeekData) { offset } else { size };
            Ok((offset < size).then_some(found))
        }
        Err(errno) => Err(errno.into()),
    }
}

/// How [`rename`] treats an existing target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rename {
    /// Replace it.
    Replace,
    /// Fail with EEXIST (RENAME_NOREPLACE).
    NoReplace,
    /// Exchange the two (RENAME_EXCHANGE).
    Exchange,
}

/// Renames `from` in `from_dir` to `to` in `to_dir` (renameat2(2)). Follows no symlink.
///
/// # Errors
/// Those of renameat2(2).
pub fn rename<From: AsFd, To: AsFd>(
    from_dir: From,
    from: &Name,
    to_dir: To,
    to: &Name,
    how: Rename,
) -> io::Result<()> {
    let flags = match how {
        Rename::Replace => 0,
        Rename::NoReplace => libc::RENAME_NOREPLACE,
        Rename::Exchange => libc::RENAME_EXCHANGE,
    };
    let from = CString::new(from.as_bytes())?;
    let to = CString::new(to.as_bytes())?;
    // SAFETY: renameat2(2) only reads the two names, which end with NUL; the descriptors are
    // borrowed for the call. Called by number because nix and older libcs have it for glibc only.
    let result = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            from_dir.as_fd().as_raw_fd(),
            from.as_ptr(),
            to_dir.as_fd().as_raw_fd(),
            to.as_ptr(),
            flags,
        )
    };
    Errno::result(result)?;
    Ok(())
}

/// The id of the mount through which `fd` was opened (statx(2) STATX_MNT_ID, Linux 5.8); `None` if
/// the kernel does not report it. Sends no request to the server of a network filesystem.
pub fn mount_id<Fd: AsFd>(fd: Fd) -> Option<u64> {
    statx(fd, libc::STATX_MNT_ID).map(|attributes| attributes.stx_mnt_id)
}

/// As [`mount_id`], but unique until the next boot (STATX_MNT_ID_UNIQUE, Linux 6.8).
pub fn unique_mount_id<Fd: AsFd>(fd: Fd) -> Option<u64> {
    /// From linux/stat.h; the crate libc does not have it for all targets.
    const STATX_MNT_ID_UNIQUE: u32 = 0x4000;
    statx(fd, STATX_MNT_ID_UNIQUE).map(|attributes| attributes.stx_mnt_id)
}

/// `st_dev` of a node, without asking the server of its filesystem (statx(2), AT_STATX_DONT_SYNC).
/// `None` if the kernel does not say.
pub fn device_of<Fd: AsFd>(fd: Fd) -> Option<u64> {
    let found = statx(fd, 0)?;
    Some(makedev(found.stx_dev_major.into(), found.stx_dev_minor.into()))
}

/// `st_ino` of a node as the kernel knows it, without asking the server of its filesystem
/// (statx(2), AT_STATX_DONT_SYNC). `None` if the kernel does not say.
pub fn known_inode_number<Fd: AsFd>(fd: Fd) -> Option<u64> {
    statx(fd, libc::STATX_INO).map(|found| found.stx_ino)
}

/// The creation time of a node (statx(2) STATX_BTIME), if the filesystem has it.
pub fn birth<Fd: AsFd>(fd: Fd) -> Option<Timestamp> {
    let born = statx(fd, libc::STATX_BTIME)?.stx_btime;
    Some(Timestamp { secs: born.tv_sec, nanos: born.tv_nsec })
}

/// Whether a node is immutable, and whether it is append-only: `chattr +i` and `+a` (statx(2)
/// `stx_attributes`). Both are false where the filesystem does not say.
pub fn is_immutable_or_append_only<Fd: AsFd>(fd: Fd) -> (bool, bool) {
    let known = statx(fd, 0).map_or(0, |answer| answer.stx_attributes & answer.stx_attributes_mask);
    let has = |bit: i32| known & u64::from(bit.unsigned_abs()) != 0;
    (has(libc::STATX_ATTR_IMMUTABLE), has(libc::STATX_ATTR_APPEND))
}

/// The attributes of a file; `None` unless the kernel reports all that `mask` asks for.
fn statx<Fd: AsFd>(fd: Fd, mask: u32) -> Option<libc::statx> {
    statx_at(fd.as_fd(), c"", libc::AT_EMPTY_PATH, mask).ok().flatten()
}

/// The attributes and mount id of `name` in the directory `dir`, of a symlink itself (statx(2),
/// Linux 5.8). At a mount point, those of the mounted root, without asking its server (9p and NFS
/// servers are asked whether the root still exists). `None` unless the kernel reports all of them.
///
/// # Errors
/// Those of statx(2): ENOENT, and ENOSYS or EPERM where it is not available.
pub fn statx_in<Fd: AsFd>(dir: Fd, name: &Name) -> io::Result<Option<libc::statx>> {
    let name = CString::new(name.as_bytes())?;
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT;
    statx_at(dir.as_fd(), &name, flags, libc::STATX_BASIC_STATS | libc::STATX_MNT_ID)
}

fn statx_at(
    fd: BorrowedFd<'_>,
    name: &CStr,
    flags: i32,
    mask: u32,
) -> io::Result<Option<libc::statx>> {
    let mut attributes = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: statx(2) fills the structure, for which all zeros are a valid value, and only reads
    // the name, which ends with NUL.
    let attributes = unsafe {
        let flags = flags | libc::AT_STATX_DONT_SYNC;
        let result =
            libc::statx(fd.as_raw_fd(), name.as_ptr(), flags, mask, attributes.as_mut_ptr());
        Errno::result(result)?;
        attributes.assume_init()
    };
    Ok((attributes.stx_mask & mask == mask).then_some(attributes))
}

fn to_offset(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| Errno::EOVERFLOW.into())
}

/// How many bytes of a pipe are unread (FIONREAD, pipe(7)).
///
/// # Errors
/// Those of ioctl(2).
pub fn unread(pipe: impl AsFd) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes an int (ioctl_tty(2)).
    let result = unsafe { libc::ioctl(pipe.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut count) };
    Errno::result(result)?;
    Ok(usize::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_nowait_read_agrees_with_a_plain_read() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello").unwrap();
        let mut buffer = [0; 8];
        if let Some(read) = pread_nowait(&file, &mut buffer, 1).unwrap() {
            assert_eq!(&buffer[..read], b"ello");
            assert_eq!(pread_nowait(&file, &mut buffer, 100).unwrap(), Some(0));
        }
        assert!(pread_nowait(&file, &mut buffer, u64::MAX).is_err());
    }

    #[test]
    fn a_full_read_ends_only_at_the_end() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 10_000], 5).unwrap();
        let mut buffer = vec![1; 20_000];
        assert_eq!(pread_full(&file, &mut buffer, 0).unwrap(), 10_005);
        assert!(
            buffer[..5] == [0; 5]
                && buffer[5..10_005].iter().all(|&b| b == 7)
                && buffer[10_005] == 1
        );
        assert_eq!(pread_full(&file, &mut buffer, 10_005).unwrap(), 0);
        sync_file_range_all(&file).unwrap();
    }

    #[test]
    fn a_punched_range_reads_as_zeros_and_is_a_hole() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 3 << 16], 0).unwrap();
        punch_hole(&file, ByteRange::at(1 << 16, 1 << 16)).unwrap();
        punch_hole(&file, ByteRange::at(0, 0)).unwrap();
        let mut buffer = vec![9; 3 << 16];
        assert_eq!(pread_full(&file, &mut buffer, 0).unwrap(), 3 << 16);
        assert!(buffer[1 << 16..2 << 16].iter().all(|&b| b == 0));
        assert_eq!(seek_hole(&file, 0).unwrap(), Some(1 << 16));
        assert_eq!(seek_data(&file, 1 << 16).unwrap(), Some(2 << 16));
        assert_eq!(seek_data(&file, 4 << 16).unwrap(), None);
        let (before, behind) = (ByteRange::at(0, 1 << 16), ByteRange::at(2 << 16, 1 << 16));
        assert_eq!(
            data_in(&file, ByteRange { start: 0, end: u64::MAX }).unwrap(),
            [before, behind]
        );
        assert_eq!(data_in(&file, ByteRange::at(5, 7)).unwrap(), [ByteRange::at(5, 7)]);
        assert_eq!(data_in(&file, ByteRange::at(1 << 16, 1 << 16)).unwrap(), []);
        assert_eq!(next_data(&file, ByteRange::at(1 << 16, 2 << 16)).unwrap(), Some(behind));
        assert_eq!(next_data(&file, ByteRange::at(1 << 16, 1 << 16)).unwrap(), None);
        assert_eq!(next_data(&file, ByteRange::at(3 << 16, 1)).unwrap(), None);
    }

    #[test]
    fn a_filesystem_that_cannot_tell_holes_has_none() {
        // Most files in /proc refuse SEEK_DATA with EINVAL.
        let file = std::fs::OpenOptions::new().read(true).open("/proc/self/status").unwrap();
        assert_eq!(lseek(&file, 0, Whence::SeekData), Err(Errno::EINVAL), "this kernel can tell");
        assert_eq!(seek_data(&file, 0).unwrap(), None, "it is empty by its size");
        assert_eq!(data_in(&file, ByteRange::at(0, 10)).unwrap(), []);
    }

    #[test]
    fn rename_replaces_refuses_and_exchanges() {
        let dir = tempfile::tempdir().unwrap();
        let fd = nix::fcntl::open(dir.path(), OFlag::O_PATH, Mode::empty()).unwrap();
        let (a, b) = (Name::new(b"a").unwrap(), Name::new(b"b").unwrap());
        let write = |name: &Name| {
            std::fs::write(dir.path().join(name.as_os_str()), name.as_bytes()).unwrap()
        };
        let read = |name: &Name| std::fs::read(dir.path().join(name.as_os_str())).unwrap();
        write(&a);
        write(&b);
        let error = rename(&fd, &a, &fd, &b, Rename::NoReplace).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
        rename(&fd, &a, &fd, &b, Rename::Exchange).unwrap();
        assert_eq!((read(&a), read(&b)), (b"b".to_vec(), b"a".to_vec()));
        rename(&fd, &a, &fd, &b, Rename::Replace).unwrap();
        assert_eq!(read(&b), b"b");
        assert!(!dir.path().join("a").exists());
    }

    #[test]
    fn mounts_have_ids() {
        let open = |path: &str| nix::fcntl::open(path, OFlag::O_PATH, Mode::empty()).unwrap();
        let root = mount_id(open("/"));
        assert!(root.is_some() && root == mount_id(open("/")));
        assert_ne!(root, mount_id(open("/proc")));
    }
}
