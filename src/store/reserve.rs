//! Room that is kept for the moment in which the disk is full.
//!
//! The file `reserve` takes space and holds nothing. It is let go when something must be recorded that gives space back, or that
//! ends an operation well (a delete, a sync, a seal), and what that left of it is taken again right after.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::io::disk;

const RESERVE: &str = "reserve";
/// Bytes that are kept, at most.
const MOST: u64 = 4 << 20;
/// Bytes that are kept, at least; less is no help.
const LEAST: u64 = 64 << 10;
/// No more is kept than this part of what is free.
const PART: u64 = 16;

/// The reserve of a store.
#[derive(Default)]
pub(super) struct Reserve {
    /// Bytes that are to be kept.
    wanted: u64,
    /// Bytes that are kept.
    kept: u64,
}

impl Store {
    /// Finds the reserve that is there, or begins one.
    pub(super) fn begin_reserve(&self) {
        let free = self.free_bytes();
        let found = self
            .dir
            .file(RESERVE, true)
            .and_then(|file| file.metadata().attempt(|| "look at the reserve"));
        let kept = found
            .map_or(0, |about| if about.blocks() * 512 >= about.len() { about.len() } else { 0 });
        *self.reserve.lock() = Reserve { wanted: (free / PART).clamp(LEAST, MOST).max(kept), kept };
        self.keep_reserve();
    }

    /// Bytes that are free on the filesystem of the store; none if it does not say.
    pub fn free_bytes(&self) -> u64 {
        let space = nix::sys::statvfs::fstatvfs(&self.dir);
        space.map_or(0, |space| space.blocks_available().saturating_mul(space.fragment_size()))
    }

    /// Lets the reserve go. Whether there was any.
    pub fn release_reserve(&self) -> bool {
        let mut reserve = self.reserve.lock();
        let had = reserve.kept > 0;
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

    /// Takes the reserve again, or as much of it as there is room for.
    pub fn keep_reserve(&self) {
        let mut reserve = self.reserve.lock();
        let mut bytes = reserve.wanted;
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
            && let Err(error) = disk::allocate(&file, bytes)
        {
            // Part of it may have been taken.
            disk::cut(&file, 0).attempt(attempt)?;
            return Err(error).attempt(attempt);
        }
        if bytes == 0 { self.let_go(file).attempt(attempt) } else { Ok(()) }
    }

    fn let_go(&self, file: File) -> io::Result<()> {
        match disk::cut(&file, 0) {
            Err(error) if error.raw_os_error() == Some(Errno::EDQUOT as i32) => {
                // btrfs cuts nothing under a full quota, but it removes; and what was removed counts until that is committed.
                drop(file);
                disk::remove(&self.dir, RESERVE)?;
                disk::commit(&self.dir)
            }
            cut => cut,
        }
    }
}
