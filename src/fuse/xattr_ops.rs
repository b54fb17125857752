//! Serves requests for extended attributes.
//!
//! Three attributes are computed: `user.jailfs.store` and `user.jailfs.head` name the store and the
//! head of a mount, and `user.jailfs.origin` tells which layer last changed a file. They are not
//! listed and cannot be set.

use crate::error::{FsError, FsResult};
use crate::fs::SetXattr;
use crate::fuse::counters::Op;
use crate::fuse::server::Server;
use crate::fuse::wire::{Reply, Request};
use crate::types::NodeId;

/// Names the store of a mount.
pub(super) const STORE_ATTRIBUTE: &[u8] = b"user.jailfs.store";
/// Names the head of a mount.
pub(super) const HEAD_ATTRIBUTE: &[u8] = b"user.jailfs.head";
/// Tells which program last changed a file.
pub(super) const ORIGIN_ATTRIBUTE: &[u8] = b"user.jailfs.origin";
/// The prefix of our own attributes.
pub(super) const OWN_PREFIX: &[u8] = b"user.jailfs.";

impl Server {
    /// SETXATTR.
    pub(super) fn serve_setxattr(
        &self,
        request: &Request,
        name: &[u8],
        value: &[u8],
        (flags, takes_setgid): (u32, bool),
        reply: Reply,
    ) {
        const XATTR_CREATE: u32 = 1;
        const XATTR_REPLACE: u32 = 2;
        let call = self.call(Op::Setxattr, request, Some(name));
        let result = check_writable(request.node, name).and_then(|()| {
            let how = SetXattr {
                create: flags & XATTR_CREATE != 0,
                replace: flags & XATTR_REPLACE != 0,
                takes_setgid,
            };
            self.fs.setxattr(request.node, name, value, how)
        });
        self.selinux.note(name, result.is_ok());
        call.reply_empty(self.sync_if_required(result), reply);
        self.invalidate_drifted();
    }

    /// GETXATTR.
    pub(super) fn serve_getxattr(&self, request: &Request, name: &[u8], size: u32, reply: Reply) {
        if request.node.is_in_snapdir() || name == ORIGIN_ATTRIBUTE {
            return self.snapdir_getxattr(
                self.call(Op::Getxattr, request, None),
                name,
                size,
                reply,
            );
        }
        let call = self.call(Op::Getxattr, request, Some(name));
        let result = if name == STORE_ATTRIBUTE {
            Ok(self.store_path.clone())
        } else if name == HEAD_ATTRIBUTE {
            Ok(self.head.clone())
        } else if name.starts_with(OWN_PREFIX) {
            Err(FsError::NoAttribute)
        } else {
            self.selinux.filter(name, self.fs.getxattr(request.node, name))
        };
        call.reply_xattr(result, size, reply);
    }

    /// LISTXATTR. Our own attributes are not listed.
    pub(super) fn serve_listxattr(&self, request: &Request, size: u32, reply: Reply) {
        if request.node.is_in_snapdir() {
            return self.snapdir_listxattr(self.call(Op::Listxattr, request, None), size, reply);
        }
        let call = self.call(Op::Listxattr, request, None);
        call.reply_xattr(self.fs.listxattr(request.node), size, reply);
    }

    /// REMOVEXATTR.
    pub(super) fn serve_removexattr(&self, request: &Request, name: &[u8], reply: Reply) {
        let call = self.call(Op::Removexattr, request, Some(name));
        let result = check_writable(request.node, name)
            .and_then(|()| self.fs.removexattr(request.node, name));
        call.reply_empty(self.sync_if_required(result), reply);
        self.invalidate_drifted();
    }
}

/// Refuses to change attributes of the snapshot directory, and those that jailfs serves itself.
fn check_writable(node: NodeId, name: &[u8]) -> FsResult<()> {
    if node.is_in_snapdir() {
        return Err(FsError::ReadOnly);
    }
    if name.starts_with(OWN_PREFIX) { Err(FsError::NotPermitted) } else { Ok(()) }
}
