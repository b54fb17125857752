//! Passes each request on, and answers those that need no filesystem.
//!
//! Nothing that a program could see is decided here, except for what only this protocol has:
//! * **No file is open.** OPEN, OPENDIR, CREATE and FLUSH fail with ENOSYS once, and the kernel
//!   never sends them again. So opening, closing and reading a cached file cost no message, and a
//!   restore has no handles to fix.
//! * **The kernel caches without a time limit.** Every change passes through the kernel, or the
//!   daemon invalidates what changed (`fuse/mount.rs`).
//! * `fuse/snapdir.rs` answers for nodes in the snapshot directory.

use nix::errno::Errno;
use nix::libc::{O_ACCMODE, O_RDONLY};

use crate::error::{FsError, FsResult};
use crate::fs::{Caller, RenameMode};
use crate::fuse::counters::Op;
use crate::fuse::gate::GATE_CLOSED;
use crate::fuse::server::{Server, name_of};
use crate::fuse::wire::{Lifetimes, Malformed, Operation, Reply, Request};
use crate::types::{FileKind, NodeId};

/// Flags of the replies to OPEN and OPENDIR (`FOPEN_*`).
const KEEP_CACHE: u32 = 1 << 1;
const CACHE_DIR: u32 = 1 << 3;

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid, gid: request.gid }
}

fn rename_mode(flags: u32) -> FsResult<RenameMode> {
    match flags {
        0 => Ok(RenameMode::Replace),
        1 => Ok(RenameMode::NoReplace),
        2 => Ok(RenameMode::Exchange),
        // RENAME_WHITEOUT is for layers below an overlayfs.
        _ => Err(FsError::Invalid),
    }
}

/// Decodes a device number as the kernel sends it (`new_encode_dev`: 12 bits of major, 20 of minor)
/// to `st_rdev`.
fn decode_device(device: u32) -> u64 {
    let major = (device & 0xfff00) >> 8;
    let minor = (device & 0xff) | ((device >> 12) & 0xfff00);
    nix::sys::stat::makedev(major.into(), minor.into())
}

impl Server {
    /// Serves a request. Returns whether it ends the session.
    pub(super) fn dispatch(&self, request: &Request, body: &[u8], reply: Reply) -> bool {
        let operation = match Operation::parse(request, body, self.layout) {
            Ok(operation) => operation,
            Err(Malformed) => {
                log::warn!("process {} sent a malformed request", request.pid);
                reply.error(Errno::EINVAL);
                return false;
            }
        };
        match operation {
            Operation::Forget { nlookup } => {
                self.forget(request.node, nlookup);
                reply.none();
            }
            Operation::BatchForget { nodes } => {
                nodes.into_iter().for_each(|(node, nlookup)| self.forget(node, nlookup));
                reply.none();
            }
            Operation::Destroy => {
                reply.ok();
                return true;
            }
            operation => self.serve_unless_known(request, operation, reply),
        }
        false
    }

    fn forget(&self, node: NodeId, nlookup: u64) {
        self.counters.count(Op::Forget);
        self.fs.forget(node, nlookup);
    }

    /// Answers the operations that are the same for every node, and serves the others.
    fn serve_unless_known(&self, request: &Request, operation: Operation<'_>, reply: Reply) {
        match operation {
            Operation::Open { flags } => self.serve_open(request.node, flags, reply),
            Operation::Opendir => self.serve_opendir(reply),
            Operation::Release => {
                self.counters.count(Op::Release);
                reply.ok();
            }
            Operation::Releasedir => {
                self.counters.count(Op::Releasedir);
                reply.ok();
            }
            Operation::Flush => self.refuse(Op::Flush, Errno::ENOSYS, reply),
            // The kernel checks permissions itself (`default_permissions`).
            Operation::Access => self.refuse(Op::Access, Errno::ENOSYS, reply),
            // On ENOSYS the kernel creates the node by MKNOD, which needs no handle.
            Operation::Create => self.refuse(Op::Create, Errno::ENOSYS, reply),
            // The kernel then implements file locks by itself.
            Operation::Locks => self.refuse(Op::Locks, Errno::ENOSYS, reply),
            Operation::Bmap => self.refuse(Op::Bmap, Errno::ENOSYS, reply),
            Operation::Ioctl => self.refuse(Op::Ioctl, Errno::ENOTTY, reply),
            Operation::Poll => self.refuse(Op::Poll, Errno::ENOSYS, reply),
            // The session has begun.
            Operation::Init => reply.error(Errno::EIO),
            // On ENOSYS the kernel never sends it again.
            Operation::Interrupt | Operation::Unknown => reply.error(Errno::ENOSYS),
            operation => match self.gate.enter() {
                Some(_admitted) => self.serve(request, operation, reply),
                None => reply.error(GATE_CLOSED),
            },
        }
    }

    fn refuse(&self, op: Op, errno: Errno, reply: Reply) {
        self.counters.count(op);
        reply.error(errno);
    }

    /// Serves an operation of an admitted request.
    fn serve(&self, request: &Request, operation: Operation<'_>, reply: Reply) {
        match operation {
            Operation::Lookup { name } => self.serve_lookup(request, name, reply),
            Operation::Symlink { name, target } => {
                self.serve_symlink(request, name, target, reply);
            }
            Operation::Mknod { name, mode, rdev, umask } => {
                self.serve_mknod(request, name, (mode, rdev, umask), reply);
            }
            Operation::Mkdir { name, mode, umask } => {
                self.serve_mkdir(request, name, (mode, umask), reply);
            }
            Operation::Unlink { name } => self.serve_unlink(request, name, reply),
            Operation::Rmdir { name } => self.serve_rmdir(request, name, reply),
            Operation::Rename { name, to, new_name, flags } => {
                self.serve_rename(request, name, (to, new_name), flags, reply);
            }
            Operation::Link { node, name } => self.serve_link(request, node, name, reply),
            Operation::Tmpfile { mode, umask } => {
                self.serve_tmpfile(request, (mode, umask), reply);
            }
            Operation::Readdir { offset, size } => {
                self.serve_readdir(request, offset, size, reply);
            }
            Operation::Readdirplus { offset, size } => {
                self.serve_readdirplus(request, offset, size, reply);
            }
            operation => self.serve_node(request, operation, reply),
        }
    }

    /// Serves an operation on one node.
    fn serve_node(&self, request: &Request, operation: Operation<'_>, reply: Reply) {
        match operation {
            Operation::Getattr => self.serve_getattr(request, reply),
            Operation::Setattr { set } => self.serve_setattr(request, set, reply),
            Operation::Readlink => self.serve_readlink(request, reply),
            Operation::Read { offset, size } => self.serve_read(request, offset, size, reply),
            Operation::Write { offset, data, write_flags, flags } => {
                self.serve_write(request, (offset, data), (write_flags, flags), reply);
            }
            Operation::Statfs => self.serve_statfs(request, reply),
            Operation::Fsync => self.serve_sync(self.call(Op::Fsync, request, None), reply),
            Operation::Fsyncdir => self.serve_sync(self.call(Op::Fsyncdir, request, None), reply),
            Operation::Setxattr { name, value, flags, takes_setgid } => {
                self.serve_setxattr(request, name, value, (flags, takes_setgid), reply);
            }
            Operation::Getxattr { name, size } => {
                self.serve_getxattr(request, name, size, reply);
            }
            Operation::Listxattr { size } => self.serve_listxattr(request, size, reply),
            Operation::Removexattr { name } => self.serve_removexattr(request, name, reply),
            Operation::Fallocate { offset, len, mode } => {
                self.serve_fallocate(request, (offset, len), mode, reply);
            }
            Operation::Lseek { offset, whence } => {
                self.serve_lseek(request, offset, whence, reply);
            }
            Operation::CopyFileRange { offset, to, to_offset, len, flags } => {
                self.serve_copy_file_range(request, offset, (to, to_offset), (len, flags), reply);
            }
            // The callers of this method serve the others.
            _ => reply.error(Errno::ENOSYS),
        }
    }

    fn serve_open(&self, node: NodeId, flags: u32, reply: Reply) {
        self.counters.count(Op::Open);
        let is_read_only = flags & O_ACCMODE.cast_unsigned() == O_RDONLY.cast_unsigned();
        if self.no_open {
            reply.error(Errno::ENOSYS);
        } else if node.is_in_snapdir() && !is_read_only {
            reply.error(Errno::EROFS);
        } else {
            reply.opened(KEEP_CACHE);
        }
    }

    fn serve_opendir(&self, reply: Reply) {
        self.counters.count(Op::Opendir);
        if self.no_opendir {
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(KEEP_CACHE | CACHE_DIR);
        }
    }
}

/// Operations on names.
impl Server {
    fn serve_lookup(&self, request: &Request, name: &[u8], reply: Reply) {
        if request.node.is_in_snapdir() {
            return self.snapdir_lookup(self.call(Op::Lookup, request, None), name, reply);
        }
        let call = self.call(Op::Lookup, request, Some(name));
        match name_of(name).and_then(|name| self.fs.lookup(request.node, &name)) {
            Err(FsError::NotFound) => reply.no_entry(),
            result => {
                if result.as_ref().is_ok_and(|entry| entry.attr.kind != FileKind::Dir) {
                    self.readdirplus_policy.lock().on_lookup(call.pid);
                }
                self.reply_entry(call, result, reply);
            }
        }
    }

    fn serve_mknod(
        &self,
        request: &Request,
        name: &[u8],
        (mode, rdev, umask): (u32, u32, u32),
        reply: Reply,
    ) {
        let call = self.call(Op::Mknod, request, Some(name));
        let device = decode_device(rdev);
        let result = name_of(name).and_then(|name| {
            self.fs.mknod(request.node, &name, mode, device, umask, caller(request))
        });
        call.reply_entry(self.sync_if_required(result), reply);
    }

    fn serve_mkdir(&self, request: &Request, name: &[u8], (mode, umask): (u32, u32), reply: Reply) {
        if request.node == NodeId::CHECKPOINTS || request.node == NodeId::FORKS {
            return self.make_in_snapdir(self.call(Op::Mkdir, request, None), name, reply);
        }
        let call = self.call(Op::Mkdir, request, Some(name));
        let result = name_of(name)
            .and_then(|name| self.fs.mkdir(request.node, &name, mode, umask, caller(request)));
        call.reply_entry(self.sync_if_required(result), reply);
    }

    fn serve_tmpfile(&self, request: &Request, (mode, umask): (u32, u32), reply: Reply) {
        let call = self.call(Op::Tmpfile, request, None);
        match self.fs.tmpfile(request.node, mode, umask, caller(request)) {
            Ok(entry) => reply.created(&entry, Lifetimes::FOREVER, KEEP_CACHE),
            Err(error) => reply.error(call.refuse(&error)),
        }
    }

    fn serve_symlink(&self, request: &Request, name: &[u8], target: &[u8], reply: Reply) {
        let call = self.call(Op::Symlink, request, Some(name));
        let result = name_of(name)
            .and_then(|name| self.fs.symlink(request.node, &name, target, caller(request)));
        call.reply_entry(self.sync_if_required(result), reply);
    }

    fn serve_link(&self, request: &Request, node: NodeId, name: &[u8], reply: Reply) {
        let call = self.call(Op::Link, request, Some(name));
        let result = name_of(name).and_then(|name| self.fs.link(node, request.node, &name));
        self.reply_entry(call, self.sync_if_required(result), reply);
    }

    fn serve_unlink(&self, request: &Request, name: &[u8], reply: Reply) {
        let call = self.call(Op::Unlink, request, Some(name));
        let result = name_of(name).and_then(|name| self.fs.unlink(request.node, &name));
        call.reply_empty(self.sync_if_required(result), reply);
        self.invalidate_drifted();
    }

    fn serve_rmdir(&self, request: &Request, name: &[u8], reply: Reply) {
        let call = self.call(Op::Rmdir, request, Some(name));
        let result = name_of(name).and_then(|name| self.fs.rmdir(request.node, &name));
        call.reply_empty(self.sync_if_required(result), reply);
    }

    fn serve_rename(
        &self,
        request: &Request,
        name: &[u8],
        (to, new_name): (NodeId, &[u8]),
        flags: u32,
        reply: Reply,
    ) {
        let call = self.call(Op::Rename, request, Some(name));
        let result = || {
            let (from, new_name) = (name_of(name)?, name_of(new_name)?);
            self.fs.rename(request.node, &from, to, &new_name, rename_mode(flags)?, request.pid)
        };
        call.reply_empty(self.sync_if_required(result()), reply);
        self.invalidate_drifted();
    }
}

/// Listings.
impl Server {
    fn serve_readdir(&self, request: &Request, offset: u64, size: u32, reply: Reply) {
        let call = self.call(Op::Readdir, request, None);
        if request.node.is_in_snapdir() {
            return self.snapdir_readdir(call, offset, size, reply);
        }
        if !call.reply_readdir(&self.fs, offset, size, reply) {
            self.invalidate_drifted();
        }
    }

    fn serve_readdirplus(&self, request: &Request, offset: u64, size: u32, reply: Reply) {
        let call = self.call(Op::Readdirplus, request, None);
        if request.node.is_in_snapdir() {
            return self.snapdir_readdirplus(call, offset, size, reply);
        }
        let with_files = self.readdirplus_policy.lock().on_readdir(call.pid, offset == 0);
        if !call.reply_readdirplus(&self.fs, (offset, with_files), size, reply) {
            self.invalidate_drifted();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_are_decoded_as_the_kernel_encodes_them() {
        assert_eq!(decode_device(0x103), nix::sys::stat::makedev(1, 3));
        assert_eq!(decode_device(0x0010_0800), nix::sys::stat::makedev(8, 256));
        assert_eq!(decode_device(0xffff_ffff), nix::sys::stat::makedev(4095, 1_048_575));
    }
}
