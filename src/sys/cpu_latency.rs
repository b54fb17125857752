//! Limits the wake-up latency of all CPUs (`/dev/cpu_dma_latency`, PM QoS interface of the kernel).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};

/// The kernel's device.
pub const DEVICE: &str = "/dev/cpu_dma_latency";

/// Opens the device for writing. Alone that limits nothing.
///
/// # Errors
/// EACCES for users other than root, ENOENT where the kernel has no such device.
pub fn open() -> io::Result<File> {
    OpenOptions::new().write(true).open(DEVICE)
}

/// Sets the limit, in microseconds. It holds until the file is closed.
///
/// # Errors
/// Those of write(2).
pub fn set(file: &mut File, microseconds: i32) -> io::Result<()> {
    file.write_all(&microseconds.to_ne_bytes())
}
