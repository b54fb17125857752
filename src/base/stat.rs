//! The metadata of nodes in the base.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use nix::sys::stat::{FileStat, fstat, makedev};

use crate::error::{FsError, FsResult};
use crate::types::{FileKind, Fingerprint, Timestamp};

/// The metadata of a node in the base, as lstat(2) gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseStat {
    /// The device: `st_dev` of the base's root, or a lasting stand-in for another device.
    pub dev: u64,
    /// The inode number.
    pub ino: u64,
    /// The kind of node; the same as the type bits of `mode`.
    pub kind: FileKind,
    /// Type and permission bits.
    pub mode: u32,
    /// The number of hard links.
    pub nlink: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The device that the node represents, as a raw `dev_t`; 0 for other kinds.
    pub rdev: u64,
    /// Length of the content, or of the target of a symlink, in bytes.
    pub size: u64,
    /// Allocated blocks of 512 bytes.
    pub blocks: u64,
    /// Time of the last access.
    pub atime: Timestamp,
    /// Time of the last change of content.
    pub mtime: Timestamp,
    /// Time of the last change of content or metadata.
    pub ctime: Timestamp,
    /// Whether the node is a mount point, which is shown without content. The other fields describe
    /// the node under the mount as far as possible. Without a private view, owner, times and
    /// permissions are those of its parent or defaults.
    pub foreign: bool,
}

impl BaseStat {
    /// The metadata of the object of a descriptor.
    pub(super) fn of<Fd: AsFd>(fd: Fd) -> FsResult<BaseStat> {
        BaseStat::from_host(&fstat(fd).map_err(io::Error::from)?)
    }

    fn from_host(stat: &FileStat) -> FsResult<BaseStat> {
        Ok(BaseStat {
            dev: stat.st_dev,
            ino: stat.st_ino,
            kind: FileKind::from_mode(stat.st_mode).ok_or(FsError::Unsupported)?,
            mode: stat.st_mode,
            nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
            uid: stat.st_uid,
            gid: stat.st_gid,
            rdev: stat.st_rdev,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            blocks: u64::try_from(stat.st_blocks).unwrap_or(0),
            atime: timestamp(stat.st_atime, stat.st_atime_nsec),
            mtime: timestamp(stat.st_mtime, stat.st_mtime_nsec),
            ctime: timestamp(stat.st_ctime, stat.st_ctime_nsec),
            foreign: false,
        })
    }

    pub(super) fn from_statx(stat: &libc::statx) -> FsResult<BaseStat> {
        let mode = u32::from(stat.stx_mode);
        let time =
            |time: libc::statx_timestamp| Timestamp { secs: time.tv_sec, nanos: time.tv_nsec };
        Ok(BaseStat {
            dev: makedev(stat.stx_dev_major.into(), stat.stx_dev_minor.into()),
            ino: stat.stx_ino,
            kind: FileKind::from_mode(mode).ok_or(FsError::Unsupported)?,
            mode,
            nlink: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            rdev: makedev(stat.stx_rdev_major.into(), stat.stx_rdev_minor.into()),
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            atime: time(stat.stx_atime),
            mtime: time(stat.stx_mtime),
            ctime: time(stat.stx_ctime),
            foreign: false,
        })
    }

    /// The metadata that is shown for a mount point.
    pub(super) fn into_foreign(self) -> BaseStat {
        let nlink = if self.kind == FileKind::Dir { 2 } else { 1 };
        BaseStat { nlink, size: 0, blocks: 0, foreign: true, ..self }
    }

    /// The part of the metadata that changes with every change of the content.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint {
            dev: self.dev,
            ino: self.ino,
            size: self.size,
            mtime: self.mtime,
            ctime: self.ctime,
        }
    }
}

/// Refuses every kind but a regular file.
///
/// # Errors
/// EISDIR for a directory, EINVAL for the others.
pub fn require_file(kind: FileKind) -> FsResult<()> {
    match kind {
        FileKind::File => Ok(()),
        FileKind::Dir => Err(FsError::IsADirectory),
        FileKind::Symlink
        | FileKind::Fifo
        | FileKind::Socket
        | FileKind::Char
        | FileKind::Block => Err(FsError::Invalid),
    }
}

impl Fingerprint {
    /// The fingerprint of an open file.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn of(file: &File) -> io::Result<Fingerprint> {
        let stat = fstat(file)?;
        Ok(Fingerprint {
            dev: stat.st_dev,
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: timestamp(stat.st_mtime, stat.st_mtime_nsec),
            ctime: timestamp(stat.st_ctime, stat.st_ctime_nsec),
        })
    }
}

fn timestamp(secs: i64, nanos: i64) -> Timestamp {
    Timestamp { secs, nanos: u32::try_from(nanos).unwrap_or(0) }
}
