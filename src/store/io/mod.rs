//! How records and bytes reach the disk: directories, framed logs, system calls, and failed syncs.

pub mod codec;
pub mod dir;
pub(in crate::store) mod disk;
pub(in crate::store) mod frames;
pub mod fsync_probe;
pub mod log;
pub mod lru_cache;
pub(in crate::store) mod record_file;
pub mod writer;
