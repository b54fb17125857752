//! The state of one mount's server, and what its request handlers share.
//!
//! The serving thread answers at once, except for work that waits for a disk: a sync, a copy, a
//! read of bytes that are not in memory. Such work goes to a worker.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use parking_lot::Mutex;

use crate::error::FsResult;
use crate::fs::{Attr, Entry, Fs};
use crate::fuse::counters::{Counters, Op};
use crate::fuse::discarded_writes::DiscardedWrites;
use crate::fuse::flush_waiters::FlushWaiters;
use crate::fuse::gate::Gate;
use crate::fuse::init::Negotiated;
use crate::fuse::notify::Channel;
use crate::fuse::readdirplus_policy::ReaddirplusPolicy;
use crate::fuse::recent_writeback::RecentWriteback;
use crate::fuse::reply::Call;
use crate::fuse::selinux::SelinuxLabels;
use crate::fuse::wire::{Layout, Reply, Request};
use crate::fuse::workers::Workers;
use crate::types::{Name, NodeId};

/// Serves the requests of one mount.
pub(super) struct Server {
    pub(super) fs: Arc<Fs>,
    /// The value of `user.jailfs.store`.
    pub(super) store_path: Vec<u8>,
    /// The value of `user.jailfs.head`.
    pub(super) head: Vec<u8>,
    pub(super) writeback: bool,
    /// Whether a change of names or attributes must be durable before the reply.
    syncs: bool,
    /// Whether ENOSYS to OPEN makes the kernel never send it again; likewise OPENDIR.
    pub(super) no_open: bool,
    pub(super) no_opendir: bool,
    /// Which fields SETXATTR has.
    pub(super) layout: Layout,
    pub(super) workers: Workers,
    /// Links that wait for a rename to complete, and dentries to invalidate. Kept apart: their wait
    /// may depend on a request that one of `workers` serves.
    pub(super) barrier_workers: Workers,
    /// Pages to invalidate, and replies that wait for it. Kept apart from the barrier: that may
    /// wait for a directory lock whose holder waits for such a reply. Kept apart from reads: the
    /// kernel waits for pages that are being read.
    pub(super) invalidation_workers: Workers,
    /// Requests in the snapshot directory that must wait. Kept apart: garbage collection makes all
    /// of these wait, while it itself waits for readers among `workers`.
    pub(super) snapdir_workers: Workers,
    pub(super) discarded_writes: DiscardedWrites,
    pub(super) readdirplus_policy: Mutex<ReaddirplusPolicy>,
    pub(super) selinux: SelinuxLabels,
    pub(super) channel: Arc<Channel>,
    pub(super) recent_writeback: Arc<RecentWriteback>,
    pub(super) flush_waiters: Arc<FlushWaiters>,
    pub(super) counters: Arc<Counters>,
    pub(super) gate: Arc<Gate>,
}

impl Server {
    /// A server of `fs`, which is a head of a store.
    pub(super) fn new(
        fs: Arc<Fs>,
        (store_path, head): (&Path, &str),
        writeback: bool,
        syncs: bool,
    ) -> Server {
        fs.attach_kernel(writeback);
        Server {
            fs,
            store_path: store_path.as_os_str().as_bytes().to_vec(),
            head: head.as_bytes().to_vec(),
            writeback,
            syncs,
            no_open: true,
            no_opendir: true,
            layout: Layout::default(),
            workers: Workers::default(),
            barrier_workers: Workers::default(),
            invalidation_workers: Workers::default(),
            snapdir_workers: Workers::default(),
            discarded_writes: DiscardedWrites::default(),
            readdirplus_policy: Mutex::default(),
            selinux: SelinuxLabels::new(),
            channel: Arc::default(),
            recent_writeback: Arc::default(),
            flush_waiters: Arc::default(),
            counters: Arc::default(),
            gate: Arc::default(),
        }
    }

    /// Takes over what INIT negotiated.
    pub(super) fn agree(&mut self, agreed: &Negotiated) {
        // With a writeback cache the kernel completes write(2) by itself. The snapshot directory
        // can then refuse a writer only at OPEN.
        self.no_open = agreed.no_open && !(self.writeback && self.fs.shows_snapdir());
        self.no_opendir = agreed.no_opendir;
        self.layout = agreed.layout;
        self.channel.set_negotiated(agreed.can_expire_dentries);
    }

    /// Completes what the workers do, and ends them.
    pub(super) fn finish(&self) {
        self.workers.finish();
        self.barrier_workers.finish();
        self.invalidation_workers.finish();
        self.snapdir_workers.finish();
        self.discarded_writes.finish();
    }

    /// The gate that ends the service.
    pub(super) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// The session's channel. It is connected once the session exists.
    pub(super) fn channel(&self) -> Arc<Channel> {
        Arc::clone(&self.channel)
    }

    /// The files that the kernel has just written back.
    pub(super) fn recent_writeback(&self) -> Arc<RecentWriteback> {
        Arc::clone(&self.recent_writeback)
    }

    /// The requests that wait for a flush.
    pub(super) fn flush_waiters(&self) -> Arc<FlushWaiters> {
        Arc::clone(&self.flush_waiters)
    }

    /// Counts the requests so far.
    pub(super) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Counts a request and gives it the context for its log lines.
    pub(super) fn call<'a>(&self, op: Op, request: &Request, name: Option<&'a [u8]>) -> Call<'a> {
        self.counters.count(op);
        log::trace!("{} node {} for process {}", op.name(), request.node.0, request.pid);
        Call { op, node: request.node, pid: request.pid, name }
    }

    /// Invalidates files of the base that changed behind the sandbox. To be called after every
    /// operation that reads attributes of base files or copies files up.
    pub(super) fn invalidate_drifted(&self) {
        let (nodes, names) = self.fs.take_invalidations();
        for id in nodes {
            let (fs, channel) = (Arc::clone(&self.fs), Arc::clone(&self.channel));
            self.invalidation_workers.run(move || {
                channel.invalidate_pages(id);
                fs.node_was_invalidated(id);
            });
        }
        for (dir, name) in names {
            let channel = Arc::clone(&self.channel);
            self.barrier_workers.run(move || channel.invalidate_dentry(dir, &name));
        }
    }

    /// Invalidates a node's pages, then replies with its attributes. In the other order the kernel
    /// would take old bytes for part of a file of the new size.
    pub(super) fn reply_after_invalidation(
        &self,
        id: NodeId,
        reply: impl FnOnce(FsResult<Attr>) + Send + 'static,
    ) {
        let (fs, channel) = (Arc::clone(&self.fs), Arc::clone(&self.channel));
        self.invalidation_workers.run(move || {
            channel.invalidate_pages(id);
            fs.node_was_invalidated(id);
            reply(fs.getattr(id));
        });
    }

    /// Replies with an entry, after invalidating the node's pages if its file changed in the base.
    pub(super) fn reply_entry(&self, call: Call<'_>, result: FsResult<Entry>, reply: Reply) {
        match result {
            Ok(entry) if self.fs.needs_invalidation(entry.id) => {
                let call: Call<'static> = Call { name: None, ..call };
                self.reply_after_invalidation(entry.id, move |attr| {
                    // The node was handed out, so the reply must carry it in any case.
                    let attr = attr.unwrap_or(entry.attr);
                    call.reply_entry(Ok(Entry { attr, ..entry }), reply);
                });
            }
            result => call.reply_entry(result, reply),
        }
        self.invalidate_drifted();
    }

    /// With `sync` or `dirsync`, makes a completed change durable.
    pub(super) fn sync_if_required<T>(&self, result: FsResult<T>) -> FsResult<T> {
        if self.syncs && result.is_ok() {
            self.fs.sync()?;
        }
        result
    }

    /// FSYNC and FSYNCDIR.
    pub(super) fn serve_sync(&self, call: Call<'static>, reply: Reply) {
        if !self.fs.store().durable() {
            // On ENOSYS the kernel never sends it again.
            return reply.error(Errno::ENOSYS);
        }
        let fs = Arc::clone(&self.fs);
        self.workers.run(move || call.reply_empty(fs.sync(), reply));
    }
}

/// Parses a name from a request.
pub(super) fn name_of(name: &[u8]) -> FsResult<Name> {
    Ok(Name::new(name)?)
}
