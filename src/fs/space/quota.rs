//! The component of [`crate::fs::Core`] that limits how much a sandbox stores.
//!
//! The limit counts what the store takes on the disk of the host: content and records of all its
//! states. So it protects the host, and removed files count until the store frees them (`gc`).
//!
//! Always true:
//! * New content, new nodes and larger attributes fail with ENOSPC at the limit.
//! * A rename, a change of attributes and a write in place take the bytes of a record. They are
//!   refused some way above the limit, so that an editor can finish.
//! * A removal and a truncation never fail: the number of names bounds them.
//!
//! To measure the store takes time. So written bytes are added up, and the store is measured again
//! when the sum reaches the limit. A measurement counts for a second, or until space is freed. It
//! looks at files of the store, so it is made without the core lock, and the operation that reached
//! the limit runs again after it. No change is made meanwhile, so that no byte counts twice.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{FsError, FsResult};
use crate::fs::{Core, Fs};
use crate::store::Store;
use crate::sys::lock::RankedGuard;

/// How long a measurement of the store counts.
const MEASURE_INTERVAL: Duration = Duration::from_secs(1);
/// The block size in bytes that statvfs(3) reports with a limit.
const BLOCK: u64 = 4096;

/// Records go beyond the limit by one in this many bytes of it,
const RECORDS_PART: u64 = 8;
/// and by this many bytes.
const RECORDS_BYTES: u64 = 1 << 20;

/// The files of a layer: what a checkpoint takes on the host without content.
const LAYER_FILES: u64 = 4;
/// The bytes of these files.
const LAYER_BYTES: u64 = 12 << 10;

/// How much a sandbox may store; none for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes on the disk of the host.
    pub bytes: Option<u64>,
    /// Files, directories and links that were created or changed. For a checkpoint, the files that
    /// checkpoints have taken on the host since the limit was set count as well.
    pub files: Option<u64>,
}

/// A function that is called after each `every` bytes.
struct Notice {
    every: u64,
    since: u64,
    call: Box<dyn Fn() + Send + Sync>,
}

/// How many bytes were written since the head was opened, and how many times space was freed.
#[derive(Clone, Copy, Default)]
struct SoFar {
    bytes: u64,
    frees: u64,
}

/// When the store was measured, and how often it had freed space by then.
struct Measurement {
    at: Instant,
    store_frees: u64,
}

/// The limits, and how much is stored.
#[derive(Default)]
pub(in crate::fs) struct Quota {
    limits: Limits,
    /// Bytes that the store took when it was measured, and those written since.
    used: u64,
    so_far: SoFar,
    /// The number of layers when the limits were set.
    layers_before: u64,
    measured: Option<Measurement>,
    notice: Option<Notice>,
}

impl Quota {
    /// The head has freed space: the next operation that needs some measures the store.
    pub(in crate::fs) fn measure_soon(&mut self) {
        self.measured = None;
        self.so_far.frees += 1;
    }

    /// Adds bytes that were written.
    pub(in crate::fs) fn add(&mut self, bytes: u64) {
        self.used = self.used.saturating_add(bytes);
        self.so_far.bytes = self.so_far.bytes.wrapping_add(bytes);
        if let Some(notice) = &mut self.notice {
            notice.since = notice.since.saturating_add(bytes);
            if notice.since >= notice.every {
                notice.since = 0;
                (notice.call)();
            }
        }
    }

    /// Whether there is a limit on bytes, and the last measurement is older than
    /// [`MEASURE_INTERVAL`].
    fn is_old(&self) -> bool {
        let is_recent = |last: &Measurement| last.at.elapsed() < MEASURE_INTERVAL;
        self.limits.bytes.is_some() && !self.measured.as_ref().is_some_and(is_recent)
    }

    /// Whether there is a limit on bytes, and the last measurement is old, or from before the store
    /// has freed space. `store_frees` says how often it has.
    fn is_outdated(&self, store_frees: u64) -> bool {
        let is_from_before = |last: &Measurement| last.store_frees != store_frees;
        self.is_old()
            || self.limits.bytes.is_some() && self.measured.as_ref().is_some_and(is_from_before)
    }

    /// Takes a measurement that began when `before` was the sum so far, and the store had freed
    /// space `store_frees` times. The bytes of a checkpoint that was begun since count in full. If
    /// space was freed since, the next operation that needs more than is left measures the store
    /// again.
    fn set_measured(&mut self, usage: u64, before: SoFar, store_frees: u64) {
        self.used = usage.saturating_add(self.so_far.bytes.wrapping_sub(before.bytes));
        let measured = Measurement { at: Instant::now(), store_frees };
        self.measured = (self.so_far.frees == before.frees).then_some(measured);
    }

    fn check_bytes(&self, bytes: u64) -> FsResult<()> {
        let Some(limit) = self.limits.bytes else { return Ok(()) };
        // Of a write in place, only the record takes space.
        let limit = if bytes == 0 { with_records(limit) } else { limit };
        if self.used.saturating_add(bytes) <= limit { Ok(()) } else { Err(FsError::NoSpace) }
    }

    fn check_record(&self) -> FsResult<()> {
        let Some(limit) = self.limits.bytes else { return Ok(()) };
        if self.used > with_records(limit) { Err(FsError::LimitReached) } else { Ok(()) }
    }
}

/// How much may be stored if only a record is added.
fn with_records(limit: u64) -> u64 {
    limit.saturating_add(limit / RECORDS_PART).saturating_add(RECORDS_BYTES)
}

/// Space and nodes of a filesystem, as statvfs(3) reports them; space in blocks.
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
    /// Nodes that can still be created.
    pub files_free: u64,
}

impl Space {
    /// The same space in blocks of [`BLOCK`] bytes.
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

impl Fs {
    /// Sets how much may be stored from now on.
    pub fn set_limits(&self, limits: Limits) {
        let layers = self.store.layer_count();
        {
            let mut core = self.core();
            core.quota.limits = limits;
            core.quota.layers_before = layers;
        }
        self.measure_under(&self.changes.lock());
    }

    /// Checks that a checkpoint fits, and counts it.
    ///
    /// # Errors
    /// ENOSPC.
    pub fn need_checkpoint(&self) -> FsResult<()> {
        let layers = self.store.layer_count();
        self.retry_measured(|| self.try_need_checkpoint(layers))
    }

    fn try_need_checkpoint(&self, layers: u64) -> FsResult<()> {
        let mut core = self.core();
        if let Some(limit) = core.quota.limits.files {
            let since = layers.saturating_sub(core.quota.layers_before).saturating_add(1);
            if core.stored_nodes().saturating_add(since.saturating_mul(LAYER_FILES)) > limit {
                return Err(FsError::LimitReached);
            }
        }
        core.need_bytes(LAYER_BYTES)?;
        core.quota.add(LAYER_BYTES);
        Ok(())
    }

    /// Sets a function that is called whenever `every` more bytes were written. The caller holds
    /// the core lock, so it only wakes a thread.
    pub fn set_growth_notice(&self, every: u64, call: Option<Box<dyn Fn() + Send + Sync>>) {
        self.core().quota.notice = call.map(|call| Notice { every, since: 0, call });
    }

    /// Measures how much the store takes, if there is a limit. The caller holds the lock of
    /// changes.
    fn measure_under(&self, _changes: &RankedGuard<'_, ()>) {
        let store_frees = self.store.frees();
        let (scratch, before) = {
            let core = self.core();
            if core.quota.limits.bytes.is_none() {
                return;
            }
            (core.held.orphans().scratch_file().cloned(), core.quota.so_far)
        };
        let usage = usage(&self.store, scratch.as_deref());
        self.core().quota.set_measured(usage, before, store_frees);
        self.measurements.fetch_add(1, Ordering::Relaxed);
    }

    fn is_measurement_outdated(&self) -> bool {
        let store_frees = self.store.frees();
        self.core().quota.is_outdated(store_frees)
    }

    /// Runs an operation. If it fails at a limit by an old measurement, measures the store, unless
    /// another thread has done so meanwhile, and runs the operation again. A failed operation must
    /// have changed nothing. The caller holds neither the lock of changes nor the core lock.
    pub(in crate::fs) fn retry_measured<T>(
        &self,
        operation: impl Fn() -> FsResult<T>,
    ) -> FsResult<T> {
        let before = self.measurements.load(Ordering::Relaxed);
        let result = operation();
        let is_at_limit = matches!(result, Err(FsError::NoSpace | FsError::LimitReached))
            && self.core().quota.limits.bytes.is_some();
        if !is_at_limit {
            return result;
        }
        let changes = self.changes.lock();
        if self.is_measurement_outdated() {
            self.measure_under(&changes);
        } else if self.measurements.load(Ordering::Relaxed) == before {
            return result;
        }
        drop(changes);
        operation()
    }

    /// The space of the filesystem that holds the store, or less where there is a limit.
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
        // statfs must not wait for a change, so it may use an old measurement.
        if self.core().quota.is_old()
            && let Some(changes) = self.changes.try_lock()
        {
            self.measure_under(&changes);
        }
        let core = self.core();
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

/// Bytes on the disk of the host that count.
fn usage(store: &Store, scratch: Option<&File>) -> u64 {
    let scratch = scratch.and_then(|file| file.metadata().ok());
    store.disk_usage().saturating_add(scratch.map_or(0, |about| about.blocks() * 512))
}

impl Core {
    /// Checks that `bytes` more fit.
    ///
    /// # Errors
    /// ENOSPC.
    pub(in crate::fs) fn need_bytes(&self, bytes: u64) -> FsResult<()> {
        self.quota.check_bytes(bytes)
    }

    /// Checks that one more record about an existing node fits.
    ///
    /// # Errors
    /// ENOSPC.
    pub(in crate::fs) fn need_record(&self) -> FsResult<()> {
        self.quota.check_record()
    }

    /// Checks that one more node fits.
    ///
    /// # Errors
    /// ENOSPC.
    pub(in crate::fs) fn need_node(&self) -> FsResult<()> {
        match self.quota.limits.files {
            Some(limit) if self.stored_nodes() >= limit => Err(FsError::LimitReached),
            // Its record, and the block in which that may begin.
            _ => self.need_bytes(BLOCK),
        }
    }

    fn stored_nodes(&self) -> u64 {
        (self.tree.len() + self.held.orphans().tree().len()) as u64
    }
}
