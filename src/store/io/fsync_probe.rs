//! Whether a sync that failed for want of room has lost anything.
//!
//! A host that cannot write pages forgets them, says so once to each open file, and answers to the next sync that all is well. But a sync
//! also fails where only the host's own records found no room (btrfs under a quota), and then nothing is lost and it can be tried again.
//! What tells the two apart is a second open file of what is synced, the **witness**: it is told of every lost page for itself, whoever
//! else was told before (errseq_t, Documentation/core-api/errseq.rst of Linux).
//!
//! Always true: a witness is opened before the first byte is written of which it is asked. If it cannot be, or does not answer, everything
//! counts as lost.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

use crate::sys::file::sync_file_range_all;

/// What is told of the lost pages of a file.
#[derive(Debug)]
pub struct FsyncProbe(Option<File>);

/// Why something was not synced.
#[derive(Debug)]
pub enum Unsynced {
    /// There was no room for it. Nothing is lost, and it can be tried again.
    Full(io::Error),
    /// What was to be synced may be lost.
    Lost(io::Error),
}

impl FsyncProbe {
    /// A witness of a file from now on.
    pub(in crate::store) fn of(file: &File) -> FsyncProbe {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened = openat(AT_FDCWD, path.as_str(), flags, Mode::empty());
        if let Err(errno) = &opened {
            log::debug!("a sync that finds no room will count as failed: {errno}");
        }
        FsyncProbe(opened.ok().map(File::from))
    }

    /// What a failed sync of the file means.
    pub(in crate::store) fn judge(&self, error: io::Error) -> Unsynced {
        let is_full = [Errno::ENOSPC, Errno::EDQUOT]
            .map(|errno| Some(errno as i32))
            .contains(&error.raw_os_error());
        let is_whole = || self.0.as_ref().is_some_and(|file| sync_file_range_all(file).is_ok());
        if is_full && is_whole() { Unsynced::Full(error) } else { Unsynced::Lost(error) }
    }
}

impl Unsynced {
    /// The error of the host.
    pub fn into_error(self) -> io::Error {
        match self {
            Unsynced::Full(error) | Unsynced::Lost(error) => error,
        }
    }
}
