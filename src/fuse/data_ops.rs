//! Serves requests for the content of files.

use std::sync::Arc;

use fuser::{
    CopyFileRangeFlags, Errno, INodeNo, OpenFlags, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite,
    Request, WriteFlags,
};

use crate::error::{FsError, FsResult};
use crate::fs::{PrivilegeBits, SeekTo};
use crate::fuse::counters::Op;
use crate::fuse::gate::GATE_CLOSED;
use crate::fuse::init;
use crate::fuse::privileges::Requester;
use crate::fuse::reply::Call;
use crate::fuse::server::Server;
use crate::fuse::translate::node;

/// The most that one COPY_FILE_RANGE copies: its reply has 32 bits. The program asks for the rest.
const MAX_COPY: u64 = 1 << 30;

/// Parses the arguments of LSEEK. The kernel handles SEEK_SET, SEEK_CUR and SEEK_END by itself.
fn seek_target(offset: i64, whence: i32) -> FsResult<(u64, SeekTo)> {
    const SEEK_DATA: i32 = 3;
    const SEEK_HOLE: i32 = 4;
    let to = match whence {
        SEEK_DATA => SeekTo::Data,
        SEEK_HOLE => SeekTo::Hole,
        _ => return Err(FsError::Invalid),
    };
    Ok((u64::try_from(offset).map_err(|_| FsError::NoSuchOffset)?, to))
}

impl Server {
    /// READ: answered here if the bytes are in memory, else in a worker.
    pub(super) fn serve_read(
        &self,
        request: &Request,
        ino: INodeNo,
        offset: u64,
        size: u32,
        reply: ReplyData,
    ) {
        let call: Call<'static> = self.call(Op::Read, request, ino, None);
        if node(ino).is_in_snapdir() {
            return self.snapdir_read(call, offset, size, reply);
        }
        // Limited to what INIT negotiated, because the reply is assembled in memory.
        let plan = match self.fs.read(node(ino), offset, size.min(init::MAX_REQUEST).into()) {
            Ok(plan) => plan,
            Err(error) => {
                reply.error(call.refuse(&error));
                return self.invalidate_drifted();
            }
        };
        match plan.read(true) {
            Ok(Some(bytes)) => reply.data(&bytes),
            Err(error) => reply.error(call.refuse(&error)),
            Ok(None) => self.workers.run(move || {
                call.reply_data(plan.read(false).map(Option::unwrap_or_default), reply);
            }),
        }
    }

    /// WRITE, from write(2) or from the page cache.
    pub(super) fn serve_write(
        &self,
        request: &Request,
        ino: INodeNo,
        (offset, data): (u64, &[u8]),
        (write_flags, flags): (WriteFlags, OpenFlags),
        reply: ReplyWrite,
    ) {
        let call = self.call(Op::Write, request, ino, None);
        if node(ino).is_in_snapdir() {
            let from_cache = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
            return self.snapdir_write(&call, data.len(), from_cache, reply);
        }
        let kill = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let from_cache = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let appends = flags.0 & nix::libc::O_APPEND != 0 && !from_cache;
        let requester = Requester::of(request).without_fsetid();
        let privileges =
            if kill { PrivilegeBits::AsCaller(&requester) } else { PrivilegeBits::Keep };
        let result = match appends {
            true => self.fs.append(node(ino), offset, data, privileges),
            false => self.fs.write(node(ino), offset, data, privileges),
        };
        if from_cache {
            self.recent_writeback.note(node(ino));
        }
        match result {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            Err(error) => {
                reply.error(call.refuse(&error));
                self.invalidate_drifted();
            }
        }
    }

    /// FALLOCATE.
    pub(super) fn serve_fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        (offset, length): (u64, u64),
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let call = self.call(Op::Fallocate, request, ino, None);
        if node(ino).is_in_snapdir() {
            return reply.error(call.refuse(&FsError::ReadOnly));
        }
        let requester = Requester::of(request);
        let privileges = PrivilegeBits::AsCaller(&requester);
        let result = self.fs.fallocate(node(ino), mode, offset, length, privileges);
        call.reply_empty(result, reply);
        self.invalidate_drifted();
    }

    /// LSEEK: finds data or a hole.
    pub(super) fn serve_lseek(
        &self,
        request: &Request,
        ino: INodeNo,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let call = self.call(Op::Lseek, request, ino, None);
        if self.writeback {
            // Dirty pages that the kernel has not sent yet would look like a hole, and a copying
            // program would skip them. On ENOSYS the kernel never asks again, and takes the whole
            // file for data.
            return reply.error(Errno::ENOSYS);
        }
        if node(ino).is_in_snapdir() {
            return self.snapdir_lseek(call, seek_target(offset, whence), reply);
        }
        let found = seek_target(offset, whence)
            .and_then(|(offset, to)| self.fs.seek(node(ino), offset, to));
        match found.map(i64::try_from) {
            Ok(Ok(found)) => reply.offset(found),
            Ok(Err(_)) => reply.error(call.refuse(&FsError::FileTooBig)),
            Err(error) => reply.error(call.refuse(&error)),
        }
    }

    /// COPY_FILE_RANGE, in a worker.
    pub(super) fn serve_copy_file_range(
        &self,
        request: &Request,
        (ino_in, offset_in): (INodeNo, u64),
        (ino_out, offset_out): (INodeNo, u64),
        len: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let call: Call<'static> = self.call(Op::CopyFileRange, request, ino_out, None);
        if !flags.is_empty() {
            return reply.error(call.refuse(&FsError::Invalid));
        }
        if node(ino_out).is_in_snapdir() {
            return reply.error(call.refuse(&FsError::ReadOnly));
        }
        // Invalidates what the previous copy found changed. A worker must not do it: it would wait
        // for pages that the kernel is reading.
        self.invalidate_drifted();
        let requester = Requester::of(request);
        let (fs, gate) = (Arc::clone(&self.fs), Arc::clone(&self.gate));
        let workers =
            if node(ino_in).is_in_snapdir() { &self.snapdir_workers } else { &self.workers };
        workers.run(move || {
            // The serving thread's admission ends with this function.
            let Some(_admitted) = gate.reenter() else { return reply.error(GATE_CLOSED) };
            match fs.copy_range(
                node(ino_in),
                offset_in,
                node(ino_out),
                offset_out,
                len.min(MAX_COPY),
                PrivilegeBits::AsCaller(&requester),
            ) {
                Ok(copied) => reply.written(u32::try_from(copied).unwrap_or(u32::MAX)),
                Err(error) => reply.error(call.refuse(&error)),
            }
        });
    }
}
