//! Receives each request from fuser, passes it on and answers it.
//!
//! Nothing that a program could see is decided here, except for what only this protocol has:
//! * **No file is open.** OPEN, OPENDIR, CREATE and FLUSH fail with ENOSYS once, and the kernel
//!   never sends them again. So opening, closing and reading a cached file cost no message, and a
//!   restore has no handles to fix.
//! * **The kernel caches without a time limit.** Every change passes through the kernel, or the
//!   daemon invalidates what changed (`fuse/mount.rs`).
//! * **A renumbered node**, which a restore gave a new id, has an id that differs from its inode
//!   number. fuser sends one number as both in LOOKUP, so the reply's attributes expire at once and
//!   the kernel asks for them by GETATTR.
//! * `fuse/snapdir.rs` answers for nodes in the snapshot directory.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags,
    Generation, INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents,
    PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek,
    ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use crate::error::{FsError, FsResult};
use crate::fs::{Caller, RenameMode, SetAttr};
use crate::fuse::counters::Op;
use crate::fuse::gate::GATE_CLOSED;
use crate::fuse::init;
use crate::fuse::readdirplus::Readdirplus;
use crate::fuse::reply::Call;
use crate::fuse::server::{Server, name_of};
use crate::fuse::translate::{FOREVER, decode_device, no_entry, node, set_time};
use crate::types::{FileKind, NodeId};

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

fn rename_mode(flags: RenameFlags) -> FsResult<RenameMode> {
    if flags.is_empty() {
        Ok(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Ok(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Ok(RenameMode::Exchange)
    } else {
        // RENAME_WHITEOUT is for layers below an overlayfs.
        Err(FsError::Invalid)
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let agreed = init::negotiate(config, self.writeback);
        // With a writeback cache the kernel completes write(2) by itself. The snapshot directory
        // can then refuse a writer only at OPEN.
        self.no_open = agreed.no_open && !(self.writeback && self.fs.shows_snapdir());
        self.no_opendir = agreed.no_opendir;
        self.channel.set_negotiated(agreed.can_expire_dentries);
        Ok(())
    }

    fn destroy(&mut self) {
        self.workers.finish();
        self.barrier_workers.finish();
        self.invalidation_workers.finish();
        self.snapdir_workers.finish();
        self.discarded_writes.finish();
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        if node(parent).is_in_snapdir() {
            return self.snapdir_lookup(self.call(Op::Lookup, request, parent, None), name, reply);
        }
        let call = self.call(Op::Lookup, request, parent, Some(name));
        match name_of(name).and_then(|name| self.fs.lookup(node(parent), &name)) {
            Err(FsError::NotFound) => reply.entry(&FOREVER, &no_entry(), Generation(0)),
            result => {
                if result.as_ref().is_ok_and(|entry| entry.attr.kind != FileKind::Dir) {
                    self.readdirplus_policy.lock().on_lookup(call.pid);
                }
                self.reply_entry(call, result, reply);
            }
        }
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        self.counters.count(Op::Forget);
        self.fs.forget(node(ino), nlookup);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_getattr(request, ino, reply);
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let (atime, mtime) = (atime.map(set_time), mtime.map(set_time));
        let set = SetAttr { mode, uid, gid, size, atime, mtime };
        self.serve_setattr(request, ino, set, reply);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_readlink(request, ino, reply);
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let call = self.call(Op::Mknod, request, parent, Some(name));
        let result = name_of(name).and_then(|name| {
            self.fs.mknod(node(parent), &name, mode, decode_device(rdev), umask, caller(request))
        });
        call.reply_entry(self.sync_if_required(result), reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        if node(parent) == NodeId::CHECKPOINTS || node(parent) == NodeId::FORKS {
            return self.make_in_snapdir(self.call(Op::Mkdir, request, parent, None), name, reply);
        }
        let call = self.call(Op::Mkdir, request, parent, Some(name));
        let result = name_of(name)
            .and_then(|name| self.fs.mkdir(node(parent), &name, mode, umask, caller(request)));
        call.reply_entry(self.sync_if_required(result), reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let call = self.call(Op::Unlink, request, parent, Some(name));
        let result = name_of(name).and_then(|name| self.fs.unlink(node(parent), &name));
        call.reply_empty(self.sync_if_required(result), reply);
        self.invalidate_drifted();
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let call = self.call(Op::Rmdir, request, parent, Some(name));
        let result = name_of(name).and_then(|name| self.fs.rmdir(node(parent), &name));
        call.reply_empty(self.sync_if_required(result), reply);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let call = self.call(Op::Symlink, request, parent, Some(link_name));
        let text = target.as_os_str().as_bytes();
        let result = name_of(link_name)
            .and_then(|name| self.fs.symlink(node(parent), &name, text, caller(request)));
        call.reply_entry(self.sync_if_required(result), reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let call = self.call(Op::Rename, request, parent, Some(name));
        let result = || {
            let (from, to, mode) = (name_of(name)?, name_of(newname)?, rename_mode(flags)?);
            self.fs.rename(node(parent), &from, node(newparent), &to, mode, request.pid())
        };
        call.reply_empty(self.sync_if_required(result()), reply);
        self.invalidate_drifted();
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let call = self.call(Op::Link, request, newparent, Some(newname));
        let result =
            name_of(newname).and_then(|name| self.fs.link(node(ino), node(newparent), &name));
        self.reply_entry(call, self.sync_if_required(result), reply);
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.counters.count(Op::Open);
        if self.no_open {
            reply.error(Errno::ENOSYS);
        } else if node(ino).is_in_snapdir() && flags.acc_mode() != OpenAccMode::O_RDONLY {
            reply.error(Errno::EROFS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
        }
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_read(request, ino, offset, size, reply);
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_write(request, ino, (offset, data), (write_flags, flags), reply);
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Flush);
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Release);
        reply.ok();
    }

    fn fsync(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_sync(self.call(Op::Fsync, request, ino, None), reply);
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.counters.count(Op::Opendir);
        if self.no_opendir {
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR);
        }
    }

    fn readdir(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        if node(ino).is_in_snapdir() {
            return self.snapdir_readdir(self.call(Op::Readdir, request, ino, None), offset, reply);
        }
        let call = self.call(Op::Readdir, request, ino, None);
        if !call.reply_readdir(&self.fs, offset, reply) {
            self.invalidate_drifted();
        }
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        let call: Call<'static> = self.call(Op::Readdirplus, request, ino, None);
        let mut listing = Readdirplus { unique: request.unique().0, reply, with_files: false };
        if node(ino).is_in_snapdir() {
            return self.snapdir_readdirplus(call, offset, listing);
        }
        listing.with_files = self.readdirplus_policy.lock().on_readdir(call.pid, offset == 0);
        if !listing.answer(&call, &self.fs, &self.channel, offset) {
            self.invalidate_drifted();
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Releasedir);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_sync(self.call(Op::Fsyncdir, request, ino, None), reply);
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_statfs(request, ino, reply);
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_setxattr(request, ino, name, value, flags, reply);
    }

    fn getxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_getxattr(request, ino, name, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_listxattr(request, ino, size, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_removexattr(request, ino, name, reply);
    }

    // The kernel checks permissions itself (`default_permissions`).
    fn access(&self, _request: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        self.counters.count(Op::Access);
        reply.error(Errno::ENOSYS);
    }

    // On ENOSYS the kernel creates the node by MKNOD, which needs no handle.
    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        self.counters.count(Op::Create);
        reply.error(Errno::ENOSYS);
    }

    // The kernel then implements file locks by itself.
    fn getlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        _start: u64,
        _end: u64,
        _typ: i32,
        _pid: u32,
        reply: ReplyLock,
    ) {
        self.counters.count(Op::Locks);
        reply.error(Errno::ENOSYS);
    }

    fn setlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        _start: u64,
        _end: u64,
        _typ: i32,
        _pid: u32,
        _sleep: bool,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Locks);
        reply.error(Errno::ENOSYS);
    }

    fn bmap(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _blocksize: u32,
        _idx: u64,
        reply: ReplyBmap,
    ) {
        self.counters.count(Op::Bmap);
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        self.counters.count(Op::Ioctl);
        reply.error(Errno::ENOTTY);
    }

    fn poll(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _ph: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        self.counters.count(Op::Poll);
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_fallocate(request, ino, (offset, length), mode, reply);
    }

    fn lseek(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_lseek(request, ino, offset, whence, reply);
    }

    fn copy_file_range(
        &self,
        request: &Request,
        ino_in: INodeNo,
        _fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let Some(_admitted) = self.gate.enter() else { return reply.error(GATE_CLOSED) };
        self.serve_copy_file_range(
            request,
            (ino_in, offset_in),
            (ino_out, offset_out),
            len,
            flags,
            reply,
        );
    }
}
