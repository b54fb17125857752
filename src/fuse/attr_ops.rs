//! Serves requests for attributes, symlink texts and the space of the filesystem.

use std::sync::Arc;

use crate::error::FsError;
use crate::fs::{LinkReply, PrivilegeBits, SetAttr};
use crate::fuse::counters::Op;
use crate::fuse::privileges::Requester;
use crate::fuse::rename_barrier;
use crate::fuse::reply::Call;
use crate::fuse::server::Server;
use crate::fuse::wire::{Reply, Request, Statfs};
use crate::sys;

impl Server {
    /// GETATTR.
    pub(super) fn serve_getattr(&self, request: &Request, reply: Reply) {
        let call: Call<'static> = self.call(Op::Getattr, request, None);
        if request.node.is_in_snapdir() {
            return self.snapdir_getattr(call, reply);
        }
        let found = self.fs.getattr(request.node);
        if found.is_err() || !self.fs.needs_invalidation(request.node) {
            call.reply_attr(found, reply);
            return self.invalidate_drifted();
        }
        self.reply_after_invalidation(request.node, move |attr| call.reply_attr(attr, reply));
    }

    /// SETATTR.
    pub(super) fn serve_setattr(&self, request: &Request, set: SetAttr, reply: Reply) {
        let call: Call<'static> = self.call(Op::Setattr, request, None);
        if request.node.is_in_snapdir() {
            return reply.error(call.refuse(&FsError::ReadOnly));
        }
        let requester = Requester::of(request);
        let privileges = PrivilegeBits::AsCaller(&requester);
        let result = self.sync_if_required(self.fs.setattr(request.node, set, privileges));
        if set.size.is_some() {
            self.recent_writeback.note(request.node);
        }
        // Not after a truncation: until the reply, the kernel keeps dirty pages back that it must
        // write before it can invalidate.
        if result.is_ok() && set.size.is_none() && self.fs.needs_invalidation(request.node) {
            self.reply_after_invalidation(request.node, move |attr| call.reply_attr(attr, reply));
        } else {
            call.reply_attr(result, reply);
        }
        self.invalidate_drifted();
    }

    /// READLINK: answered by a worker if it must wait for a rename to complete in the kernel.
    pub(super) fn serve_readlink(&self, request: &Request, reply: Reply) {
        let call: Call<'static> = self.call(Op::Readlink, request, None);
        if request.node.is_in_snapdir() {
            return self.snapdir_readlink(call, reply);
        }
        // A process that called readlink(2) may see the stored text. It is blocked in that call
        // now, so the check cannot be outdated.
        if self.fs.tells_stored_text_of(request.node)
            && sys::proc::is_in_readlink(request.pid) == Some(true)
        {
            return call.reply_data(self.fs.link_text(request.node), reply);
        }
        match self.fs.readlink(request.node, request.pid) {
            Ok(LinkReply::Text(text)) => reply.data(&text),
            Err(error) => reply.error(call.refuse(&error)),
            Ok(LinkReply::Wait(first)) => {
                let (fs, channel) = (Arc::clone(&self.fs), Arc::clone(&self.channel));
                self.barrier_workers.run(move || {
                    call.reply_data(
                        rename_barrier::readlink(&fs, &channel, call.node, call.pid, first),
                        reply,
                    );
                });
            }
        }
    }

    /// STATFS.
    pub(super) fn serve_statfs(&self, request: &Request, reply: Reply) {
        let call = self.call(Op::Statfs, request, None);
        match self.fs.statfs() {
            Ok(space) => reply.statfs(Statfs {
                blocks: space.blocks,
                free: space.free,
                available: space.available,
                files: space.files,
                files_free: space.files_free,
                block_size: space.block_size,
                name_max: 255,
            }),
            Err(error) => reply.error(call.refuse(&error)),
        }
    }
}
