//! Replies: turns a result of `fs` into a reply, and an error into an errno and a log line.

use nix::errno::Errno;

use crate::error::{FsError, FsResult};
use crate::fs::{Attr, Entry, Fs};
use crate::fuse::counters::Op;
use crate::fuse::errno::classify;
use crate::fuse::wire::{FOREVER, Lifetimes, Names, Reply};
use crate::types::NodeId;

/// A request from the kernel, as log lines name it.
pub(super) struct Call<'a> {
    pub(super) op: Op,
    pub(super) node: NodeId,
    pub(super) pid: u32,
    pub(super) name: Option<&'a [u8]>,
}

impl Call<'_> {
    /// Logs an error of this request, and returns its errno.
    pub(super) fn refuse(&self, error: &FsError) -> Errno {
        let (errno, level) = classify(error);
        if log::log_enabled!(level) {
            let (op, node, pid) = (self.op.name(), self.node.0, self.pid);
            match self.name {
                Some(name) => {
                    let name = name.escape_ascii();
                    log::log!(level, "{op} '{name}' in node {node} for process {pid}: {error}");
                }
                None => log::log!(level, "{op} node {node} for process {pid}: {error}"),
            }
        }
        errno
    }

    pub(super) fn reply_empty(&self, result: FsResult<()>, reply: Reply) {
        match result {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    /// Answers READDIR with the names after the cookie `behind`, in at most `room` bytes. Returns
    /// false if it failed before the first name.
    pub(super) fn reply_readdir(&self, fs: &Fs, behind: u64, room: u32, reply: Reply) -> bool {
        let mut names = Names::new(room, false);
        let result = fs.readdir(self.node, behind, |entry| {
            let fits = names.has_room(&entry.name);
            if fits {
                names.add(entry.ino, entry.cookie, entry.kind, &entry.name);
            }
            fits
        });
        match result {
            Err(error) if names.is_empty() => {
                reply.error(self.refuse(&error));
                return false;
            }
            // Send the names found so far. The error recurs when the kernel asks for the rest.
            Ok(()) | Err(_) => {}
        }
        reply.names(&names);
        true
    }

    pub(super) fn reply_entry(&self, result: FsResult<Entry>, reply: Reply) {
        match result {
            Ok(entry) => reply.entry(&entry, Lifetimes::FOREVER),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    pub(super) fn reply_attr(&self, result: FsResult<Attr>, reply: Reply) {
        match result {
            Ok(attr) => reply.attr(&attr, FOREVER),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    pub(super) fn reply_data(&self, result: FsResult<Vec<u8>>, reply: Reply) {
        match result {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    /// Answers COPY_FILE_RANGE.
    pub(super) fn reply_copied(&self, result: FsResult<u64>, reply: Reply) {
        match result {
            Ok(copied) => reply.written(u32::try_from(copied).unwrap_or(u32::MAX)),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    /// Answers GETXATTR and LISTXATTR; `room` 0 asks for the size only.
    pub(super) fn reply_xattr(&self, result: FsResult<Vec<u8>>, room: u32, reply: Reply) {
        let answer = result.and_then(|bytes| match u32::try_from(bytes.len()) {
            Ok(len) if room == 0 => Ok((len, None)),
            Ok(len) if len <= room => Ok((len, Some(bytes))),
            Ok(_) | Err(_) => Err(FsError::Range),
        });
        match answer {
            Ok((len, None)) => reply.size(len),
            Ok((_, Some(bytes))) => reply.data(&bytes),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }
}
