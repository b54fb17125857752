//! Closes the descriptors that a daemon or a guard inherits.

use crate::error::{Attempt, Result};

/// Closes all descriptors but the standard three. An inherited one could hold open a pipe that
/// another process reads to its end, or the lock of a script. Call it before this process opens any
/// file.
pub(super) fn close() -> Result<()> {
    let listed = std::fs::read_dir("/proc/self/fd").attempt(|| "list the open files")?;
    // Collected first: the directory that is read has a descriptor too, which its owner closes.
    let numbers: Vec<i32> = listed
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2)
        .collect();
    for number in numbers {
        match nix::unistd::close(number) {
            Ok(()) | Err(nix::Error::EBADF) => {}
            Err(error) => log::debug!("close the inherited descriptor {number}: {error}"),
        }
    }
    Ok(())
}
