//! What is known of a node of the base.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use nix::sys::stat::{FileStat, fstat, makedev};

use crate::error::{FsError, FsResult};
use crate::types::{FileKind, Fingerprint, Timestamp};

/// The metadata of a node of the base, as lstat(2) gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseStat {
    /// The device of its filesystem: `st_dev` of the base's root, or a number that stands for another one and stays.
    pub dev: u64,
    /// Its number there.
    pub ino: u64,
    /// What it is; the same as the type bits of `mode`.
    pub kind: FileKind,
    /// Type and permission bits.
    pub mode: u32,
    /// How many names it has.
    pub nlink: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// The device that it stands for, as a raw `dev_t`; 0 if it is none.
    pub rdev: u64,
    /// Bytes of content; of a symlink, of its text.
    pub size: u64,
    /// Allocated blocks of 512 bytes.
    pub blocks: u64,
    /// Last read.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of content or metadata.
    pub ctime: Timestamp,
    /// Whether it is a mount point: shown without content. The other fields describe what lies under the mount, as far
    /// as that can be told; without a private view owner, times and permissions are made up from its parent.
    pub foreign: bool,
}

impl BaseStat {
    /// Of the object that `fd` refers to.
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

    /// Of what statx(2) said.
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

    /// The same, as a mount point is shown: without content.
    pub(super) fn into_foreign(self) -> BaseStat {
        let nlink = if self.kind == FileKind::Dir { 2 } else { 1 };
        BaseStat { nlink, size: 0, blocks: 0, foreign: true, ..self }
    }

    /// What must be the same for the content to be the same.
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

impl Fingerprint {
    /// Of an open file.
    ///
    /// # Errors
    /// Those of fstat(2).
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
