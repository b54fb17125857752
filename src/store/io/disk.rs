//! The system calls that change a store's files. The store changes them in no other way.
//!
//! Each call names its failpoint. So a test can end the process before each call, make each fail,
//! and record all of them to see what a power cut could leave (`sys::failpoint`). Nothing is
//! decided here.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::lock::{Rank, check_not_held};
use crate::types::ByteRange;

/// Records a change for a test.
macro_rules! note {
    ($change:ident { $($field:ident: $value:expr),* }) => {
        #[cfg(feature = "crash-points")]
        failpoint::record(|| Ok(failpoint::Change::$change { $($field: $value),* }))?;
    };
}

#[cfg(feature = "crash-points")]
fn ino(fd: impl AsFd) -> io::Result<u64> {
    Ok(nix::sys::stat::fstat(fd)?.st_ino)
}

/// Opens a file in a directory (openat(2)). If the call creates it, only its owner may read it.
pub(in crate::store) fn open(dir: impl AsFd, name: &str, flags: OFlag) -> io::Result<File> {
    if flags.contains(OFlag::O_CREAT) {
        check_not_held(Rank::Core);
    }
    failpoint::hit(Failpoint::StoreOpen)?;
    let file = File::from(openat(&dir, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
    if flags.contains(OFlag::O_CREAT) {
        note!(Open { dir: ino(&dir)?, name: name.to_owned(), ino: ino(&file)? });
    }
    if flags.contains(OFlag::O_TRUNC) {
        note!(Cut { ino: ino(&file)?, len: 0 });
    }
    Ok(file)
}

/// Opens a file or directory in a directory for reading (openat(2)).
pub(in crate::store) fn open_to_read(
    dir: impl AsFd,
    name: &str,
    flags: OFlag,
) -> nix::Result<OwnedFd> {
    look()?;
    openat(dir, name, flags | OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW, Mode::empty())
}

/// Fills `bytes` from `offset` (pread(2)). Returns fewer bytes only at the end of the file.
pub(in crate::store) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    look()?;
    crate::sys::file::pread_full(file, bytes, offset)
}

/// The failpoint of everything that reads.
pub(in crate::store) fn look() -> nix::Result<()> {
    failpoint::hit(Failpoint::StoreRead)
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}

/// Writes all of `bytes` (pwrite(2)).
pub(in crate::store) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreWrite)?;
    file.write_all_at(bytes, offset)?;
    note!(Write { ino: ino(file)?, offset: offset, bytes: bytes.to_vec() });
    Ok(())
}

/// Sets the length of a file (ftruncate(2)).
pub(in crate::store) fn cut(file: &File, len: u64) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreCut)?;
    file.set_len(len)?;
    note!(Cut { ino: ino(file)?, len: len });
    Ok(())
}

/// Allocates blocks for a range of a file (fallocate(2)). Bytes that were never written read as
/// zeros. A file that ends before the range grows.
pub(in crate::store) fn allocate(file: &File, range: ByteRange) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreAllocate)?;
    crate::sys::file::allocate(file, range)?;
    note!(Cut { ino: ino(file)?, len: file.metadata()?.len() });
    Ok(())
}

/// Frees the blocks of a range (fallocate(2)).
pub(in crate::store) fn punch(file: &File, range: ByteRange) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StorePunch)?;
    crate::sys::file::punch_hole(file, range)?;
    // The length of the file does not change.
    note!(Punch {
        ino: ino(file)?,
        range: ByteRange { end: range.end.min(file.metadata()?.len()), ..range }
    });
    Ok(())
}

/// Syncs the bytes of a file (fdatasync(2)).
pub(in crate::store) fn sync(file: &File) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreSync)?;
    file.sync_data()?;
    note!(Sync { ino: ino(file)? });
    Ok(())
}

/// Fails if the kernel could not write bytes of a file. Does not wait for the disk, but for a page
/// at the beginning (sync_file_range(2)).
pub(in crate::store) fn check_written(file: &File) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreCheck)?;
    crate::sys::file::writeback_error(file)
}

/// Renames within a directory, over the new name if it exists (renameat(2)).
pub(in crate::store) fn rename(dir: impl AsFd, from: &str, to: &str) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreRename)?;
    renameat(&dir, from, &dir, to)?;
    note!(Rename { dir: ino(&dir)?, from: from.to_owned(), to: to.to_owned() });
    Ok(())
}

/// Removes a file (unlinkat(2)). A missing file is no error.
pub(in crate::store) fn remove(dir: impl AsFd, name: &str) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreRemove)?;
    gone(unlinkat(&dir, name, UnlinkatFlags::NoRemoveDir))?;
    note!(Remove { dir: ino(&dir)?, name: name.to_owned() });
    Ok(())
}

/// Removes an empty directory (unlinkat(2)). A missing directory is no error.
pub(in crate::store) fn remove_dir(dir: impl AsFd, name: &str) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreRemove)?;
    gone(unlinkat(&dir, name, UnlinkatFlags::RemoveDir))?;
    note!(Remove { dir: ino(&dir)?, name: name.to_owned() });
    Ok(())
}

fn gone(result: nix::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Creates a directory (mkdirat(2)). An existing directory is no error.
pub(in crate::store) fn mkdir(dir: impl AsFd, name: &str) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreMkdir)?;
    match mkdirat(&dir, name, Mode::S_IRWXU) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    #[cfg(feature = "crash-points")]
    failpoint::record(|| {
        let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let made = openat(&dir, name, flags, Mode::empty())?;
        Ok(failpoint::Change::Mkdir { dir: ino(&dir)?, name: name.to_owned(), ino: ino(made)? })
    })?;
    Ok(())
}

/// Syncs the names in a directory (fsync(2)).
pub(in crate::store) fn sync_dir(dir: impl AsFd) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreSyncDir)?;
    nix::unistd::fsync(&dir)?;
    note!(SyncDir { ino: ino(&dir)? });
    Ok(())
}

/// Syncs and commits the whole filesystem of a directory (syncfs(2)).
pub(in crate::store) fn commit(dir: impl AsFd) -> io::Result<()> {
    check_not_held(Rank::Core);
    failpoint::hit(Failpoint::StoreSyncDir)?;
    nix::unistd::syncfs(&dir)?;
    note!(SyncAll {});
    Ok(())
}
