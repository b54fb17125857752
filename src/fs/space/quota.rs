//! How much a sandbox may store.
//!
//! What counts is what the store takes on the disk of the host: content and records, of all its states. So a limit protects the
//! host, and what a sandbox removes comes back when the store gives it back (`gc`), not before. Between two looks at the
//! store what is written is added up; a look is taken when the sum reaches the limit, and not more often than once in a
//! while.
//!
//! What needs room is refused (ENOSPC) at the limit: new content, new nodes, larger attributes. Renaming and setting attributes
//! take the bytes of a record each. They go on a little further, so that an editor can finish, and are refused then. Removing
//! and truncating always go on: there are only so many names to remove.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::error::{FsError, FsResult};
use crate::fs::{Core, Fs};
use crate::store::Store;
use crate::store::content::pool::PoolWriter;

/// How long a look at the store is believed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The unit of space that is told.
const BLOCK: u64 = 4096;

/// How far records go beyond the limit: this part of it, and these bytes.
const RECORDS_PART: u64 = 8;
const RECORDS_BYTES: u64 = 1 << 20;

/// What a checkpoint takes of the disk of the host besides content: the files of its layer, and their bytes.
const LAYER_FILES: u64 = 4;
const LAYER_BYTES: u64 = 12 << 10;

/// What a sandbox may store; none for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes on the disk of the host.
    pub bytes: Option<u64>,
    /// Files, directories and links that were made or changed; to a checkpoint, those on the host, too, that it and others
    /// since the limit was set take there.
    pub files: Option<u64>,
}

/// Who is told that so many bytes were stored.
struct Notice {
    every: u64,
    since: u64,
    tell: Box<dyn Fn() + Send + Sync>,
}

/// The limits, and what is stored.
#[derive(Default)]
pub(crate) struct Quota {
    limits: Limits,
    used: u64,
    /// Layers that there were when the limits were set.
    layers_before: u64,
    looked: Option<Instant>,
    notice: Option<Notice>,
}

/// Space and nodes of a filesystem, as statvfs(3) tells them; space in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes of a block.
    pub block_size: u32,
    /// All blocks.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
    /// Free blocks for ordinary users.
    pub available: u64,
    /// All nodes.
    pub files: u64,
    /// Nodes that can still be made.
    pub files_free: u64,
}

impl Fs {
    /// Says how much may be stored from now on.
    pub fn set_limits(&self, limits: Limits) {
        let layers = self.store.catalog().len() as u64;
        let mut core = self.core();
        core.quota.limits = limits;
        core.quota.layers_before = layers;
        core.look_at_store(&self.store);
    }

    /// Takes room for a checkpoint.
    ///
    /// # Errors
    /// ENOSPC.
    pub fn need_checkpoint(&self) -> FsResult<()> {
        let layers = self.store.catalog().len() as u64;
        let mut core = self.core();
        if let Some(limit) = core.quota.limits.files {
            let since = layers.saturating_sub(core.quota.layers_before).saturating_add(1);
            if core.stored_nodes().saturating_add(since.saturating_mul(LAYER_FILES)) > limit {
                return Err(FsError::LimitReached);
            }
        }
        core.need_bytes(&self.store, LAYER_BYTES)?;
        core.took(LAYER_BYTES);
        Ok(())
    }

    /// Says who is told whenever so many bytes more were stored. Called with the lock of the head: it only takes notice.
    pub fn set_growth_notice(&self, every: u64, tell: Option<Box<dyn Fn() + Send + Sync>>) {
        self.core().quota.notice = tell.map(|tell| Notice { every, since: 0, tell });
    }

    /// Counts anew what the store takes.
    pub(in crate::fs) fn look_at_store(&self) {
        self.core().look_at_store(&self.store);
    }

    /// The space that there is: of the filesystem that holds the store, or less where there is a limit.
    ///
    /// # Errors
    /// As fstatvfs(3).
    pub fn statfs(&self) -> FsResult<Space> {
        let host =
            nix::sys::statvfs::fstatvfs(self.store.dir()).map_err(|e| FsError::Host(e as i32))?;
        let mut space = Space {
            block_size: u32::try_from(host.fragment_size()).unwrap_or(4096),
            blocks: host.blocks(),
            free: host.blocks_free(),
            available: host.blocks_available(),
            files: host.files(),
            files_free: host.files_free(),
        };
        let mut core = self.core();
        core.look_again(&self.store);
        let Limits { bytes, files } = core.quota.limits;
        if let Some(bytes) = bytes {
            space = space.in_small_blocks();
            let left = bytes.saturating_sub(core.quota.used) / BLOCK;
            space.blocks = bytes / BLOCK;
            space.free = space.free.min(left);
            space.available = space.available.min(left);
        }
        if let Some(files) = files {
            space.files = files;
            space.files_free = space.files_free.min(files.saturating_sub(core.stored_nodes()));
        }
        Ok(space)
    }
}

impl Quota {
    /// Says that there is room again: whoever needs some looks.
    pub(in crate::fs) fn look_soon(&mut self) {
        self.looked = None;
    }
}

impl Space {
    fn in_small_blocks(self) -> Space {
        let in_blocks = |blocks: u64| blocks.saturating_mul(u64::from(self.block_size)) / BLOCK;
        Space {
            block_size: 4096,
            blocks: in_blocks(self.blocks),
            free: in_blocks(self.free),
            available: in_blocks(self.available),
            ..self
        }
    }
}

impl Core {
    /// Asks for room for so many bytes.
    ///
    /// # Errors
    /// ENOSPC.
    pub(in crate::fs) fn need_bytes(&mut self, store: &Store, bytes: u64) -> FsResult<()> {
        let Some(limit) = self.quota.limits.bytes else { return Ok(()) };
        if self.quota.used.saturating_add(bytes) <= limit {
            return Ok(());
        }
        self.look_again(store);
        if self.quota.used.saturating_add(bytes) <= limit { Ok(()) } else { Err(FsError::NoSpace) }
    }

    /// Asks for room for one more record of something that is there.
    ///
    /// # Errors
    /// ENOSPC.
    pub(in crate::fs) fn need_record(&mut self, store: &Store) -> FsResult<()> {
        let Some(limit) = self.quota.limits.bytes else { return Ok(()) };
        let most = limit.saturating_add(limit / RECORDS_PART).saturating_add(RECORDS_BYTES);
        if self.quota.used > most {
            self.look_again(store);
        }
        if self.quota.used > most { Err(FsError::LimitReached) } else { Ok(()) }
    }

    /// Asks for room for one more node.
    ///
    /// # Errors
    /// ENOSPC.
    pub(in crate::fs) fn need_node(&mut self, store: &Store) -> FsResult<()> {
        match self.quota.limits.files {
            Some(limit) if self.stored_nodes() >= limit => Err(FsError::LimitReached),
            // Its record, and the block in which it may begin.
            _ => self.need_bytes(store, BLOCK),
        }
    }

    /// Notes that so many bytes were stored.
    pub(in crate::fs) fn took(&mut self, bytes: u64) {
        self.quota.used = self.quota.used.saturating_add(bytes);
        if let Some(notice) = &mut self.quota.notice {
            notice.since = notice.since.saturating_add(bytes);
            if notice.since >= notice.every {
                notice.since = 0;
                (notice.tell)();
            }
        }
    }

    fn stored_nodes(&self) -> u64 {
        (self.tree.len() + self.orphans.len()) as u64
    }

    /// Looks at the store, unless that was done just now.
    fn look_again(&mut self, store: &Store) {
        if self.quota.looked.is_none_or(|looked| looked.elapsed() >= LOOK_AGAIN) {
            self.look_at_store(store);
        }
    }

    fn look_at_store(&mut self, store: &Store) {
        if self.quota.limits == Limits::default() {
            return;
        }
        let scratch = self.scratch.as_ref().map(PoolWriter::file);
        let scratch =
            scratch.and_then(|file| file.metadata().ok()).map_or(0, |about| about.blocks() * 512);
        self.quota.used = store.disk_usage().saturating_add(scratch);
        self.quota.looked = Some(Instant::now());
    }
}
