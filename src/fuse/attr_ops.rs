//! Serves requests for attributes, symlink texts and the space of the filesystem.

use std::sync::Arc;

use fuser::{INodeNo, ReplyAttr, ReplyData, ReplyStatfs, Request};

use crate::error::FsError;
use crate::fs::{LinkReply, PrivilegeBits, SetAttr};
use crate::fuse::counters::Op;
use crate::fuse::privileges::Requester;
use crate::fuse::rename_barrier;
use crate::fuse::reply::Call;
use crate::fuse::server::Server;
use crate::fuse::translate::node;
use crate::sys;

impl Server {
    /// GETATTR.
    pub(super) fn serve_getattr(&self, request: &Request, ino: INodeNo, reply: ReplyAttr) {
        let call: Call<'static> = self.call(Op::Getattr, request, ino, None);
        if node(ino).is_in_snapdir() {
            return self.snapdir_getattr(call, reply);
        }
        let found = self.fs.getattr(node(ino));
        if found.is_err() || !self.fs.needs_invalidation(node(ino)) {
            call.reply_attr(found, reply);
            return self.invalidate_drifted();
        }
        self.reply_after_invalidation(node(ino), move |attr| call.reply_attr(attr, reply));
    }

    /// SETATTR.
    pub(super) fn serve_setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        set: SetAttr,
        reply: ReplyAttr,
    ) {
        let call: Call<'static> = self.call(Op::Setattr, request, ino, None);
        if node(ino).is_in_snapdir() {
            return reply.error(call.refuse(&FsError::ReadOnly));
        }
        let requester = Requester::of(request);
        let privileges = PrivilegeBits::AsCaller(&requester);
        let result = self.sync_if_required(self.fs.setattr(node(ino), set, privileges));
        if set.size.is_some() {
            self.recent_writeback.note(node(ino));
        }
        // Not after a truncation: until the reply, the kernel keeps dirty pages back that it must
        // write before it can invalidate.
        if result.is_ok() && set.size.is_none() && self.fs.needs_invalidation(node(ino)) {
            self.reply_after_invalidation(node(ino), move |attr| call.reply_attr(attr, reply));
        } else {
            call.reply_attr(result, reply);
        }
        self.invalidate_drifted();
    }

    /// READLINK: answered by a worker if it must wait for a rename to complete in the kernel.
    pub(super) fn serve_readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let call: Call<'static> = self.call(Op::Readlink, request, ino, None);
        if node(ino).is_in_snapdir() {
            return self.snapdir_readlink(call, reply);
        }
        // A process that called readlink(2) may see the stored text. It is blocked in that call
        // now, so the check cannot be outdated.
        if self.fs.tells_stored_text_of(node(ino))
            && sys::proc::is_in_readlink(request.pid()) == Some(true)
        {
            return call.reply_data(self.fs.link_text(node(ino)), reply);
        }
        match self.fs.readlink(node(ino), request.pid()) {
            Ok(LinkReply::Text(text)) => reply.data(&text),
            Err(error) => reply.error(call.refuse(&error)),
            Ok(LinkReply::Wait(first)) => {
                let (fs, channel) = (Arc::clone(&self.fs), Arc::clone(&self.channel));
                self.barrier_workers.run(move || {
                    call.reply_data(
                        rename_barrier::readlink(&fs, &channel, node(ino), call.pid, first),
                        reply,
                    );
                });
            }
        }
    }

    /// STATFS.
    pub(super) fn serve_statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let call = self.call(Op::Statfs, request, ino, None);
        match self.fs.statfs() {
            Ok(space) => reply.statfs(
                space.blocks,
                space.free,
                space.available,
                space.files,
                space.files_free,
                space.block_size,
                255,
                space.block_size,
            ),
            Err(error) => reply.error(call.refuse(&error)),
        }
    }
}
