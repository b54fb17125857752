//! How bytes reach the disk: directories, framed logs, syncs, and which of them are believed.

pub mod codec;
pub mod dir;
pub(in crate::store) mod disk;
pub(in crate::store) mod frames;
pub mod fsync_probe;
pub mod log;
pub mod lru_cache;
pub mod writer;
