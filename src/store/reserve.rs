//! Space that is kept for the moment when the disk is full: the file `reserve`.
//!
//! The file takes blocks and holds nothing. It is released when something must be recorded that
//! frees space, or that completes an operation (a delete, a sync, a seal). Right after, the store
//! takes back as much of it as there is space for.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::io::disk;
use crate::types::ByteRange;

const RESERVE: &str = "reserve";
/// The largest reserve, in bytes.
const MOST: u64 = 4 << 20;
/// The smallest reserve, in bytes; less would not help.
const LEAST: u64 = 64 << 10;
/// The reserve is at most this part of the free space.
const PART: u64 = 16;

/// The reserve of a store.
#[derive(Default)]
pub(super) struct Reserve {
    /// Bytes to keep.
    wanted: u64,
    /// Bytes that are kept now.
    kept: u64,
}

impl Store {
    /// Takes over the reserve on disk, or creates one.
    pub(super) fn begin_reserve(&self) {
        let free = self.free_bytes();
        let found = self
            .dir
            .file(RESERVE, true)
            .and_then(|file| file.metadata().attempt(|| "stat the reserve"));
        let kept = found
            .map_or(0, |about| if about.blocks() * 512 >= about.len() { about.len() } else { 0 });
        *self.reserve.lock() = Reserve { wanted: (free / PART).clamp(LEAST, MOST).max(kept), kept };
        self.keep_reserve();
    }

    /// Free bytes on the filesystem of the store; 0 if they are not known.
    pub fn free_bytes(&self) -> u64 {
        let space = nix::sys::statvfs::fstatvfs(&self.dir);
        space.map_or(0, |space| space.blocks_available().saturating_mul(space.fragment_size()))
    }

    /// Releases the reserve. Returns whether that freed anything.
    pub fn release_reserve(&self) -> bool {
        self.release_reserve_above(0)
    }

    /// As [`Store::release_reserve`], but only while the reserve is clearly more than half of what
    /// the store wants to keep.
    pub fn release_large_reserve(&self) -> bool {
        let half = self.reserve.lock().wanted / 2;
        self.release_reserve_above(half.saturating_add(LEAST))
    }

    fn release_reserve_above(&self, bytes: u64) -> bool {
        let mut reserve = self.reserve.lock();
        let had = reserve.kept > bytes;
        if had && self.set_reserve(0).is_ok() {
            reserve.kept = 0;
        }
        had && reserve.kept == 0
    }

    /// Runs a step, and once more without the reserve if the disk is full.
    ///
    /// # Errors
    /// Those of the step.
    pub fn with_reserve<T>(&self, mut step: impl FnMut() -> Result<T>) -> Result<T> {
        match step() {
            Err(error) if error.is_full() && self.release_reserve() => {
                let again = step();
                self.keep_reserve();
                again
            }
            done => done,
        }
    }

    /// Takes the reserve back, or as much of it as there is space for.
    pub fn keep_reserve(&self) {
        let mut reserve = self.reserve.lock();
        let mut bytes = reserve.wanted.min(self.free_bytes()).max(LEAST);
        while reserve.kept == 0 && bytes >= LEAST {
            match self.set_reserve(bytes) {
                Ok(()) => reserve.kept = bytes,
                Err(error) => log::debug!("{error}"),
            }
            bytes /= 2;
        }
    }

    fn set_reserve(&self, bytes: u64) -> Result<()> {
        let attempt = || format!("reserve {bytes} bytes in {}", self.dir.path().display());
        let file = self.dir.file(RESERVE, true)?;
        if bytes > 0
            && let Err(error) = disk::allocate(&file, ByteRange::at(0, bytes))
        {
            // The filesystem may have allocated a part.
            disk::cut(&file, 0).attempt(attempt)?;
            return Err(error).attempt(attempt);
        }
        if bytes == 0 { self.truncate_reserve(file).attempt(attempt) } else { Ok(()) }
    }

    fn truncate_reserve(&self, file: File) -> io::Result<()> {
        match disk::cut(&file, 0) {
            Err(error) if error.raw_os_error() == Some(Errno::EDQUOT as i32) => {
                // With a full quota, btrfs refuses to truncate but removes the file. The space is
                // free only after a commit.
                drop(file);
                disk::remove(&self.dir, RESERVE)?;
                disk::commit(&self.dir)
            }
            cut => cut,
        }
    }
}
