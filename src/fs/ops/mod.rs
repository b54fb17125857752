//! The operations, one file per family, as the VFS divides them.

pub(in crate::fs) mod acl;
pub(in crate::fs) mod attrs;
pub(in crate::fs) mod data;
pub(in crate::fs) mod namespace;
pub(in crate::fs) mod readdir;
pub(in crate::fs) mod symlink;
