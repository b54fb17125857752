//! The filesystem that the benchmark runs on: a journaled ext4 in a file, mounted through a loop
//! device.
//!
//! Ratios depend on the filesystem below. On an ext4 without a journal the bare disk itself takes
//! many times as long to create files after a large delete, and every overlay then looks fast. So
//! the benchmark makes the same filesystem everywhere. `--disk here` measures the one of `--dir`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Res;
use crate::args::Size;
use crate::programs;

/// The disk that the systems work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    /// An ext4 of its own.
    Loop,
    /// The filesystem that has the directory.
    Here,
}

impl Disk {
    pub fn parse(name: &str) -> Option<Disk> {
        match name {
            "loop" => Some(Disk::Loop),
            "here" => Some(Disk::Here),
            _ => None,
        }
    }

    /// Makes the disk in `dir` and returns the directory to work in. The mount ends with the mount
    /// namespace of the benchmark, and the loop device with the mount.
    pub fn make(self, dir: &Path, size: Size) -> Res<PathBuf> {
        match self {
            Disk::Here => Ok(dir.to_owned()),
            Disk::Loop => make_loop(dir, size),
        }
    }
}

fn make_loop(dir: &Path, size: Size) -> Res<PathBuf> {
    let (image, point) = (dir.join("disk.ext4"), dir.join("disk"));
    // Sparse: blocks are allocated when they are written.
    File::create_new(&image)?.set_len(size.disk)?;
    std::fs::create_dir(&point)?;
    // All of the metadata is written now, not by a kernel thread during the measurements.
    let settings =
        ["-q", "-F", "-O", "has_journal", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
    run(Command::new("mkfs.ext4").args(settings).arg(&image))?;
    // With direct I/O the host does not keep a second copy of each page.
    let mut attach = Command::new("losetup");
    attach.args(["--find", "--show", "--direct-io=on"]).arg(&image);
    let output = attach.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("losetup ended with {}", output.status).into());
    }
    let device = String::from_utf8(output.stdout)?.trim().to_owned();
    let mounted =
        run(Command::new("mount").args(["-t", "ext4", "-o", "noatime", &device]).arg(&point));
    // The kernel detaches the device when nothing uses it any more.
    run(Command::new("losetup").args(["--detach", &device]))?;
    mounted?;
    Ok(point)
}

fn run(command: &mut Command) -> Res<()> {
    programs::run(command.stdin(Stdio::null()).stdout(Stdio::null())).map(drop)
}
