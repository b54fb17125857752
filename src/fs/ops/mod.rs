//! The operations, one file per family, as the VFS divides them.
//!
//! An operation resolves its node and takes its locks once: the core lock, and before it the lock
//! of changes if it changes something (`fs/writing.rs`). If it must wait for the base, or for a
//! write to fresh addresses, it runs again after each wait, which is without a lock
//! (`fs/asked.rs`).

pub(in crate::fs) mod acl;
pub(in crate::fs) mod attrs;
mod change;
pub(in crate::fs) mod data;
mod fallocate;
pub(in crate::fs) mod namespace;
pub(in crate::fs) mod privileges;
pub(in crate::fs) mod readdir;
pub(in crate::fs) mod rename;
pub(in crate::fs) mod slot;
mod stage;
pub(in crate::fs) mod symlink;
#[cfg(test)]
mod tests;
mod tmpfile;
mod writable;
mod write;
