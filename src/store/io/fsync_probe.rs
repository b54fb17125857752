//! Tells whether a sync that failed for lack of space has lost anything.
//!
//! When the kernel cannot write pages, it drops them, reports the error once to each open file, and
//! the next sync succeeds. But a sync can also fail because the filesystem found no space for its
//! own metadata (btrfs under a quota). Then nothing is lost, and the sync can be tried again.
//!
//! A second open file of the same inode, the **probe**, tells the two apart: the kernel reports a
//! lost page to it separately, whatever it reported to others before (errseq_t,
//! Documentation/core-api/errseq.rst of Linux).
//!
//! Always true: a probe is opened before the first byte is written that it is asked about. If it
//! cannot be opened, or gives no answer, everything counts as lost.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

use crate::store::io::disk;
use crate::sys::file::sync_file_range_all;

/// Detects lost pages of a file.
#[derive(Debug)]
pub struct FsyncProbe(Option<File>);

/// Why a sync failed.
#[derive(Debug)]
pub enum Unsynced {
    /// The disk was full. Nothing is lost, and the sync can be tried again.
    Full(io::Error),
    /// Everything that was not synced before may be lost.
    Lost(io::Error),
}

impl FsyncProbe {
    /// A probe for pages of `file` that are written from now on.
    pub(in crate::store) fn of(file: &File) -> FsyncProbe {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened = openat(AT_FDCWD, path.as_str(), flags, Mode::empty());
        if let Err(errno) = &opened {
            log::debug!("a sync on a full disk will count as failed: {errno}");
        }
        FsyncProbe(opened.ok().map(File::from))
    }

    /// Syncs the file of the probe.
    ///
    /// # Errors
    /// As fdatasync(2), with what the error means.
    pub(in crate::store) fn sync(&self, file: &File) -> Result<(), Unsynced> {
        disk::sync(file).map_err(|error| self.judge(error))
    }

    /// Fails if the kernel could not write a page of the file since the last sync.
    ///
    /// # Errors
    /// As fdatasync(2): the page may be lost.
    pub(in crate::store) fn check(&self, file: &File) -> Result<(), Unsynced> {
        disk::check_written(file).map_err(Unsynced::Lost)
    }

    fn judge(&self, error: io::Error) -> Unsynced {
        let is_full = [Errno::ENOSPC, Errno::EDQUOT]
            .map(|errno| Some(errno as i32))
            .contains(&error.raw_os_error());
        let is_whole = || self.0.as_ref().is_some_and(|file| sync_file_range_all(file).is_ok());
        if is_full && is_whole() { Unsynced::Full(error) } else { Unsynced::Lost(error) }
    }
}

impl Unsynced {
    /// The error of the system call.
    pub fn into_error(self) -> io::Error {
        match self {
            Unsynced::Full(error) | Unsynced::Lost(error) => error,
        }
    }
}
