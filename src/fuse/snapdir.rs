//! Answers requests in the snapshot directory (`.jailfs`).
//!
//! Two things differ from other requests:
//! * Work that may wait (for a checkpoint to be loaded or made, or for gc) runs in a worker.
//! * The contents of a checkpoint may be cached for ever. The list of checkpoints, the other heads,
//!   the edit history of files and generated texts may not.
//!
//! The kernel caches a listing for as long as the directory's mtime stays the same. Attributes of
//! directories in the history are never cached, so each open of such a directory shows its present
//! contents.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::{Caller, Entry, Fs, LinkReply, SeekTo};
use crate::fuse::flush_waiters::FlushWaiters;
use crate::fuse::gate::GATE_CLOSED;
use crate::fuse::init;
use crate::fuse::reply::Call;
use crate::fuse::server::{Server, name_of};
use crate::fuse::wire::{FOREVER, Lifetimes, Reply};
use crate::fuse::xattr_ops::{HEAD_ATTRIBUTE, ORIGIN_ATTRIBUTE, OWN_PREFIX, STORE_ATTRIBUTE};
use crate::sys;
use crate::types::{FileKind, Name, NodeId};

/// How long the kernel may cache a name in a directory of the snapshot directory, in seconds.
fn name_lifetime(parent: NodeId, child: NodeId) -> u64 {
    match parent {
        NodeId::CHECKPOINTS => 0,
        NodeId::SNAPDIR
            if ![NodeId::CHECKPOINTS, NodeId::HISTORY, NodeId::FORKS].contains(&child) =>
        {
            0
        }
        parent if parent.is_in_history() || parent.is_in_forks() => 0,
        _ => FOREVER,
    }
}

/// Whether the kernel may cache that a name does not exist.
fn may_cache_absence(parent: NodeId) -> bool {
    let changes = parent.is_in_history() || parent.is_in_forks();
    parent != NodeId::SNAPDIR && parent != NodeId::CHECKPOINTS && !changes
}

/// How long the kernel may cache a node's attributes, in seconds.
fn attr_lifetime(id: NodeId, kind: FileKind) -> u64 {
    let changes = id == NodeId::CHECKPOINTS
        || id.is_in_forks()
        || (id.is_in_history() && kind == FileKind::Dir);
    if changes { 0 } else { FOREVER }
}

fn reply_entry(call: &Call<'_>, result: FsResult<Entry>, reply: Reply) {
    match result {
        Ok(entry) => {
            let name = name_lifetime(call.node, entry.id);
            let attributes = attr_lifetime(entry.id, entry.attr.kind);
            reply.entry(&entry, Lifetimes { name, attributes });
        }
        Err(FsError::NotFound) if may_cache_absence(call.node) => reply.no_entry(),
        Err(error) => reply.error(call.refuse(&error)),
    }
}

impl Server {
    /// Runs a job in this thread if it need not wait, else in a worker.
    fn run_on_snapdir(
        &self,
        id: NodeId,
        name: Option<&Name>,
        job: impl FnOnce(&Fs) + Send + 'static,
    ) {
        if let Some(_at_hand) = self.fs.snapdir_is_ready(id, name) {
            return job(&self.fs);
        }
        let fs = Arc::clone(&self.fs);
        self.snapdir_workers.run(move || job(&fs));
    }

    pub(super) fn snapdir_lookup(&self, call: Call<'static>, name: &[u8], reply: Reply) {
        match name_of(name) {
            Ok(name) => self.run_on_snapdir(call.node, Some(&name.clone()), move |fs| {
                reply_entry(&call, fs.lookup(call.node, &name), reply);
            }),
            Err(error) => reply.error(call.refuse(&error)),
        }
    }

    pub(super) fn snapdir_getattr(&self, call: Call<'static>, reply: Reply) {
        self.run_on_snapdir(call.node, None, move |fs| match fs.getattr(call.node) {
            Ok(attr) => reply.attr(&attr, attr_lifetime(call.node, attr.kind)),
            Err(error) => reply.error(call.refuse(&error)),
        });
    }

    pub(super) fn snapdir_readlink(&self, call: Call<'static>, reply: Reply) {
        self.run_on_snapdir(call.node, None, move |fs| {
            let id = call.node;
            if fs.tells_stored_text_of(id) && sys::proc::is_in_readlink(call.pid) == Some(true) {
                return call.reply_data(fs.link_text(id), reply);
            }
            match fs.readlink(id, call.pid) {
                Ok(LinkReply::Text(text)) => reply.data(&text),
                // No link of the snapshot directory waits for a rename.
                Ok(LinkReply::Wait(_)) => reply.error(call.refuse(&FsError::Stale)),
                Err(error) => reply.error(call.refuse(&error)),
            }
        });
    }

    pub(super) fn snapdir_read(&self, call: Call<'static>, offset: u64, size: u32, reply: Reply) {
        let (id, len) = (call.node, size.min(init::MAX_REQUEST).into());
        if let Some(_at_hand) = self.fs.snapdir_is_ready(id, None) {
            match self.fs.snapdir_read(id, offset, len, true) {
                Ok(Some(bytes)) => return reply.data(&bytes),
                Ok(None) => {}
                Err(error) => return reply.error(call.refuse(&error)),
            }
        }
        let fs = Arc::clone(&self.fs);
        self.snapdir_workers.run(move || {
            call.reply_data(
                fs.snapdir_read(id, offset, len, false).map(Option::unwrap_or_default),
                reply,
            );
        });
    }

    pub(super) fn snapdir_readdir(
        &self,
        call: Call<'static>,
        offset: u64,
        room: u32,
        reply: Reply,
    ) {
        self.run_on_snapdir(call.node, None, move |fs| {
            call.reply_readdir(fs, offset, room, reply);
        });
    }

    pub(super) fn snapdir_readdirplus(
        &self,
        call: Call<'static>,
        offset: u64,
        room: u32,
        reply: Reply,
    ) {
        self.run_on_snapdir(call.node, None, move |fs| {
            call.reply_readdirplus(fs, (offset, false), room, reply);
        });
    }

    /// GETXATTR in the snapshot directory, or of the origin of any node.
    pub(super) fn snapdir_getxattr(
        &self,
        call: Call<'static>,
        name: &[u8],
        room: u32,
        reply: Reply,
    ) {
        let name = name.to_vec();
        let (store, head) = (self.store_path.clone(), self.head.clone());
        let answer = move |fs: &Fs| {
            let id = call.node;
            let value = match &name[..] {
                STORE_ATTRIBUTE => Ok(store),
                HEAD_ATTRIBUTE => Ok(head),
                ORIGIN_ATTRIBUTE => fs.origin(id).map(|origin| origin.to_string().into_bytes()),
                other if other.starts_with(OWN_PREFIX) => Err(FsError::NoAttribute),
                other => fs.getxattr(id, other),
            };
            call.reply_xattr(value, room, reply);
        };
        // The origin of a file is read from the records of many layers, so always use a worker.
        let fs = Arc::clone(&self.fs);
        self.snapdir_workers.run(move || answer(&fs));
    }

    pub(super) fn snapdir_listxattr(&self, call: Call<'static>, room: u32, reply: Reply) {
        self.run_on_snapdir(call.node, None, move |fs| {
            call.reply_xattr(fs.listxattr(call.node), room, reply);
        });
    }

    pub(super) fn snapdir_lseek(
        &self,
        call: Call<'static>,
        target: FsResult<(u64, SeekTo)>,
        reply: Reply,
    ) {
        self.run_on_snapdir(call.node, None, move |fs| {
            let found = target.and_then(|(offset, to)| fs.seek(call.node, offset, to));
            match found.map(i64::try_from) {
                Ok(Ok(found)) => reply.offset(found),
                Ok(Err(_)) => reply.error(call.refuse(&FsError::FileTooBig)),
                Err(error) => reply.error(call.refuse(&error)),
            }
        });
    }

    /// MKDIR among the checkpoints takes a checkpoint, and among the heads it makes a fork. Never
    /// in this thread: both flush dirty pages through this very mount.
    pub(super) fn make_in_snapdir(&self, call: Call<'static>, name: &[u8], reply: Reply) {
        let name = match name_of(name) {
            Ok(name) => name,
            Err(error) => return reply.error(call.refuse(&error)),
        };
        let (fs, gate) = (Arc::clone(&self.fs), Arc::clone(&self.gate));
        let waiter = FlushWaiters::begin(&self.flush_waiters);
        self.snapdir_workers.run(move || {
            let Some(_admitted) = gate.reenter() else {
                drop(waiter);
                return reply.error(GATE_CLOSED);
            };
            let root = Caller { uid: 0, gid: 0 };
            let made = fs.mkdir(call.node, &name, 0, 0, root);
            drop(waiter);
            reply_entry(&call, made, reply);
        });
    }

    /// WRITE to a file in the snapshot directory. OPEN is never sent, so a program can open such a
    /// file for writing. write(2) fails. A write through a mapping is discarded, and its pages are
    /// invalidated so that no other process reads them. An error reply instead would reach every
    /// program that syncs the mount, and every checkpoint.
    pub(super) fn snapdir_write(
        &self,
        call: &Call<'_>,
        len: usize,
        from_cache: bool,
        reply: Reply,
    ) {
        let id = call.node;
        if from_cache {
            if self.discarded_writes.is_first(id) {
                log::warn!(
                    "discarding writes of process {} to a mapping in the snapshot directory",
                    call.pid
                );
            }
            reply.written(u32::try_from(len).unwrap_or(u32::MAX));
        } else {
            reply.error(call.refuse(&FsError::ReadOnly));
        }
        self.discarded_writes.invalidate(id, &self.channel);
    }
}
