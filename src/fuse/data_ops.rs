//! Serves requests for the content of files.

use std::sync::Arc;

use nix::errno::Errno;

use crate::error::{FsError, FsResult};
use crate::fs::{Fs, PrivilegeBits, SeekTo};
use crate::fuse::counters::Op;
use crate::fuse::gate::GATE_CLOSED;
use crate::fuse::init;
use crate::fuse::privileges::Requester;
use crate::fuse::reply::Call;
use crate::fuse::server::Server;
use crate::fuse::wire::{Reply, Request};
use crate::types::NodeId;

/// Flags of WRITE (`FUSE_WRITE_*`): the page cache writes back; setuid and setgid are to go.
const WRITE_CACHE: u32 = 1 << 0;
const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// The most that one COPY_FILE_RANGE copies: its reply has 32 bits. The program asks for the rest.
const MAX_COPY: u64 = 1 << 30;
/// The longest copy, in bytes, that the serving thread does itself: as long as a READ of the
/// kernel's read-ahead.
const SMALL_COPY: u64 = 128 << 10;

/// Parses the arguments of LSEEK. The kernel handles SEEK_SET, SEEK_CUR and SEEK_END by itself.
fn seek_target(offset: i64, whence: u32) -> FsResult<(u64, SeekTo)> {
    const SEEK_DATA: u32 = 3;
    const SEEK_HOLE: u32 = 4;
    let to = match whence {
        SEEK_DATA => SeekTo::Data,
        SEEK_HOLE => SeekTo::Hole,
        _ => return Err(FsError::Invalid),
    };
    Ok((u64::try_from(offset).map_err(|_| FsError::NoSuchOffset)?, to))
}

impl Server {
    /// READ: answered here if the bytes are in memory, else in a worker.
    pub(super) fn serve_read(&self, request: &Request, offset: u64, size: u32, reply: Reply) {
        let call: Call<'static> = self.call(Op::Read, request, None);
        if request.node.is_in_snapdir() {
            return self.snapdir_read(call, offset, size, reply);
        }
        // Limited to what INIT negotiated, because the reply is assembled in memory.
        let (node, size) = (request.node, size.min(init::MAX_REQUEST).into());
        let plan = match self.fs.read(node, offset, size) {
            Ok(plan) => plan,
            Err(error) => {
                reply.error(call.refuse(&error));
                return self.invalidate_drifted();
            }
        };
        if let Ok(Some(bytes)) = plan.read(true) {
            return reply.data(&bytes);
        }
        let fs = Arc::clone(&self.fs);
        self.workers.run(move || call.reply_data(fs.read_by(plan, node, offset, size), reply));
    }

    /// WRITE, from write(2) or from the page cache.
    pub(super) fn serve_write(
        &self,
        request: &Request,
        (offset, data): (u64, &[u8]),
        (write_flags, flags): (u32, u32),
        reply: Reply,
    ) {
        let call = self.call(Op::Write, request, None);
        if request.node.is_in_snapdir() {
            let from_cache = write_flags & WRITE_CACHE != 0;
            return self.snapdir_write(&call, data.len(), from_cache, reply);
        }
        let kill = write_flags & WRITE_KILL_SUIDGID != 0;
        let from_cache = write_flags & WRITE_CACHE != 0;
        let appends = flags & nix::libc::O_APPEND.cast_unsigned() != 0;
        let requester = Requester::of(request).without_fsetid();
        let privileges =
            if kill { PrivilegeBits::AsCaller(&requester) } else { PrivilegeBits::Keep };
        let result = if from_cache {
            self.fs.write_back(request.node, offset, data, privileges)
        } else if appends {
            self.fs.append(request.node, offset, data, privileges)
        } else {
            self.fs.write(request.node, offset, data, privileges)
        };
        if from_cache {
            self.recent_writeback.note(request.node);
        }
        match result {
            Ok(()) => {
                let written = u32::try_from(data.len()).unwrap_or(u32::MAX);
                self.reply_after_change(request.node, &requester, move || reply.written(written));
            }
            Err(error) => {
                reply.error(call.refuse(&error));
                self.invalidate_drifted();
            }
        }
    }

    /// Replies that a file has changed. If the change cleared bits of its mode, a worker first
    /// invalidates the mode that the kernel caches.
    fn reply_after_change(
        &self,
        node: NodeId,
        requester: &Requester,
        reply: impl FnOnce() + Send + 'static,
    ) {
        if !requester.was_denied() {
            return reply();
        }
        let channel = Arc::clone(&self.channel);
        self.workers.run(move || {
            channel.invalidate_attributes(node);
            reply();
        });
    }

    /// FALLOCATE.
    pub(super) fn serve_fallocate(
        &self,
        request: &Request,
        (offset, length): (u64, u64),
        mode: u32,
        reply: Reply,
    ) {
        let call: Call<'static> = self.call(Op::Fallocate, request, None);
        if request.node.is_in_snapdir() {
            return reply.error(call.refuse(&FsError::ReadOnly));
        }
        let requester = Requester::of(request);
        let privileges = PrivilegeBits::AsCaller(&requester);
        let result =
            self.fs.fallocate(request.node, mode.cast_signed(), offset, length, privileges);
        self.reply_after_change(request.node, &requester, move || call.reply_empty(result, reply));
        self.invalidate_drifted();
    }

    /// LSEEK: finds data or a hole.
    pub(super) fn serve_lseek(&self, request: &Request, offset: i64, whence: u32, reply: Reply) {
        let call = self.call(Op::Lseek, request, None);
        if self.writeback {
            // Dirty pages that the kernel has not sent yet would look like a hole, and a copying
            // program would skip them. On ENOSYS the kernel never asks again, and takes the whole
            // file for data.
            return reply.error(Errno::ENOSYS);
        }
        if request.node.is_in_snapdir() {
            return self.snapdir_lseek(call, seek_target(offset, whence), reply);
        }
        let found = seek_target(offset, whence)
            .and_then(|(offset, to)| self.fs.seek(request.node, offset, to));
        match found.map(i64::try_from) {
            Ok(Ok(found)) => reply.offset(found),
            Ok(Err(_)) => reply.error(call.refuse(&FsError::FileTooBig)),
            Err(error) => reply.error(call.refuse(&error)),
        }
    }

    /// COPY_FILE_RANGE. This thread makes a small copy itself, as it serves a WRITE, because a
    /// worker must first be woken up. A worker makes a large one.
    pub(super) fn serve_copy_file_range(
        &self,
        request: &Request,
        offset: u64,
        (to, to_offset): (NodeId, u64),
        (len, flags): (u64, u64),
        reply: Reply,
    ) {
        let call: Call<'static> = self.call(Op::CopyFileRange, request, None);
        if flags != 0 {
            return reply.error(call.refuse(&FsError::Invalid));
        }
        if to.is_in_snapdir() {
            return reply.error(call.refuse(&FsError::ReadOnly));
        }
        // Invalidates what the previous copy found changed. A worker must not do it: it would wait
        // for pages that the kernel is reading.
        self.invalidate_drifted();
        let (requester, from, len) = (Requester::of(request), call.node, len.min(MAX_COPY));
        let copy = move |fs: &Fs, requester: &Requester| {
            let privileges = PrivilegeBits::AsCaller(requester);
            fs.copy_range(from, offset, to, to_offset, len, privileges)
        };
        if len <= SMALL_COPY && !from.is_in_snapdir() {
            let copied = copy(&self.fs, &requester);
            return self
                .reply_after_change(to, &requester, move || call.reply_copied(copied, reply));
        }
        let (fs, gate, channel) =
            (Arc::clone(&self.fs), Arc::clone(&self.gate), Arc::clone(&self.channel));
        let workers = if from.is_in_snapdir() { &self.snapdir_workers } else { &self.workers };
        workers.run(move || {
            // The serving thread's admission ends with this function.
            let Some(_admitted) = gate.reenter() else { return reply.error(GATE_CLOSED) };
            let copied = copy(&fs, &requester);
            if requester.was_denied() {
                channel.invalidate_attributes(to);
            }
            call.reply_copied(copied, reply);
        });
    }
}
