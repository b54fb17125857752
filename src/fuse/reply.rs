//! Replies: turns a result of `fs` into a reply, and an error into an errno and a log line.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use fuser::{
    Errno, Generation, INodeNo, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyXattr,
};

use crate::error::{FsError, FsResult};
use crate::fs::{Attr, Entry, Fs};
use crate::fuse::counters::Op;
use crate::fuse::errno::classify;
use crate::fuse::translate::{FOREVER, file_attr, file_type};
use crate::types::NodeId;

/// A request from the kernel, as log lines name it.
pub(super) struct Call<'a> {
    pub(super) op: Op,
    pub(super) node: u64,
    pub(super) pid: u32,
    pub(super) name: Option<&'a OsStr>,
}

impl Call<'_> {
    /// Logs an error of this request, and returns its errno.
    pub(super) fn refuse(&self, error: &FsError) -> Errno {
        let (errno, level) = classify(error);
        if log::log_enabled!(level) {
            let (op, node, pid) = (self.op.name(), self.node, self.pid);
            match self.name {
                Some(name) => {
                    let name = name.as_bytes().escape_ascii();
                    log::log!(level, "{op} '{name}' in node {node} for process {pid}: {error}");
                }
                None => log::log!(level, "{op} node {node} for process {pid}: {error}"),
            }
        }
        errno
    }

    pub(super) fn reply_empty(&self, result: FsResult<()>, reply: ReplyEmpty) {
        match result {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    /// Answers READDIR with the names after the cookie `behind`. Returns false if it failed before
    /// the first name.
    pub(super) fn reply_readdir(&self, fs: &Fs, behind: u64, mut reply: ReplyDirectory) -> bool {
        let mut taken = 0_usize;
        let result = fs.readdir(NodeId(self.node), behind, |entry| {
            let name = OsStr::from_bytes(&entry.name);
            let is_full =
                reply.add(INodeNo(entry.ino.0), entry.cookie, file_type(entry.kind), name);
            taken += usize::from(!is_full);
            !is_full
        });
        match result {
            Err(error) if taken == 0 => {
                reply.error(self.refuse(&error));
                false
            }
            // Send the names found so far. The error recurs when the kernel asks for the rest.
            Ok(()) | Err(_) => {
                reply.ok();
                true
            }
        }
    }

    pub(super) fn reply_entry(&self, result: FsResult<Entry>, reply: ReplyEntry) {
        match result {
            Ok(entry) => {
                let attr = file_attr(entry.id.0, &entry.attr);
                let renumbered = entry.id.0 != entry.attr.ino.0;
                let attr_ttl = if renumbered { Duration::ZERO } else { FOREVER };
                reply.entry_with_ttls(&attr_ttl, &FOREVER, &attr, Generation(0));
            }
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    pub(super) fn reply_attr(&self, result: FsResult<Attr>, reply: ReplyAttr) {
        match result {
            Ok(attr) => reply.attr(&FOREVER, &file_attr(attr.ino.0, &attr)),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    pub(super) fn reply_data(&self, result: FsResult<Vec<u8>>, reply: ReplyData) {
        match result {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(self.refuse(&error)),
        }
    }

    /// Answers GETXATTR and LISTXATTR; `room` 0 asks for the size only.
    pub(super) fn reply_xattr(&self, result: FsResult<Vec<u8>>, room: u32, reply: ReplyXattr) {
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
