//! The command line of the benchmark.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::Res;
use crate::disk::Disk;
use crate::systems::System;

const USAGE: &str = "usage: bench [OPTIONS]
  --against NAME,...   peers: native, overlayfs, fuse-overlayfs, fuse-overlayfs=PROGRAM,
                       jailfs-wake=off, jailfs-wake=latency, jailfs-wake=spin,
                       jailfs-writeback, jailfs-no-allow: no link may lead to /usr
                       (native, overlayfs, fuse-overlayfs, jailfs-wake=off; jailfs always runs)
  --only WORD,...      only groups and workloads whose name begins so: 'meta', 'data/sqlite'
  --rounds N           how often each is measured (3)
  --size small|full    how much of everything (full)
  --dir DIR            where to work (/var/tmp); a directory of its own is made there and removed
  --disk loop|here     measure on a journaled ext4 in a file below DIR, or on DIR itself (loop)
  --json               one object per line
  --list               only names the workloads";

/// The sizes of all workloads.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub name: &'static str,
    /// Files of the source tree, and their bytes.
    pub files: u64,
    pub text_bytes: u64,
    /// Files of the archive.
    pub archive_files: u64,
    /// Bytes of the large file.
    pub big: u64,
    /// Single reads or writes of 4 KiB.
    pub random: u64,
    /// Appends of 100 bytes.
    pub appends: u64,
    /// Rows of the database, transactions of the one with a log, and those that are synced.
    pub rows: u64,
    pub transactions: u64,
    pub synced: u64,
    /// Files of the base that is mounted and not changed.
    pub many: u64,
    /// Changed files, for the cost of checkpoint and restore.
    pub changed: [u64; 3],
    /// Changed files in a store that is mounted.
    pub stored: u64,
    /// Checkpoints in a row.
    pub checkpoints: u64,
    /// Checkpoints of the workload in which another program writes.
    pub checkpoints_under_load: u64,
    /// Packages that npm installs, and modules that cargo compiles.
    pub packages: u64,
    pub modules: u64,
    /// Bytes of the disk that the benchmark makes, at most.
    pub disk: u64,
}

pub const FULL: Size = Size {
    name: "full",
    files: 30_000,
    text_bytes: 200 << 20,
    archive_files: 20_000,
    big: 1 << 30,
    random: 50_000,
    appends: 50_000,
    rows: 500_000,
    transactions: 5_000,
    synced: 400,
    many: 1_000_000,
    changed: [10, 10_000, 100_000],
    stored: 200_000,
    checkpoints: 1_000,
    checkpoints_under_load: 10_000,
    packages: 150,
    modules: 60,
    disk: 48 << 30,
};

pub const SMALL: Size = Size {
    name: "small",
    files: 3_000,
    text_bytes: 20 << 20,
    archive_files: 2_000,
    big: 128 << 20,
    random: 10_000,
    appends: 5_000,
    rows: 50_000,
    transactions: 500,
    synced: 100,
    many: 50_000,
    changed: [10, 1_000, 10_000],
    stored: 20_000,
    checkpoints: 100,
    checkpoints_under_load: 1_000,
    packages: 20,
    modules: 10,
    disk: 12 << 30,
};

/// The command line.
pub struct Args {
    pub systems: Vec<System>,
    pub only: Vec<String>,
    pub rounds: usize,
    pub size: Size,
    pub dir: PathBuf,
    pub disk: Disk,
    pub json: bool,
    pub list: bool,
}

impl Args {
    pub fn parse(words: &[OsString]) -> Res<Args> {
        let mut args = Args {
            systems: ["native", "overlayfs", "fuse-overlayfs", "jailfs", "jailfs-wake=off"]
                .iter()
                .filter_map(|name| System::parse(name))
                .collect(),
            only: Vec::new(),
            rounds: 3,
            size: FULL,
            dir: PathBuf::from("/var/tmp"),
            disk: Disk::Loop,
            json: false,
            list: false,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let option = word.to_str().ok_or("an option that is not text")?;
            let mut value = || {
                words
                    .next()
                    .and_then(|value| value.to_str())
                    .ok_or(format!("{option} needs a value\n{USAGE}"))
            };
            match option {
                "--against" => args.systems = against(value()?)?,
                "--only" => args.only = value()?.split(',').map(str::to_owned).collect(),
                "--rounds" => {
                    args.rounds = value()?
                        .parse()
                        .ok()
                        .filter(|n| *n > 0)
                        .ok_or("--rounds is a number from 1 on")?
                }
                "--size" => {
                    args.size = match value()? {
                        "small" => SMALL,
                        "full" => FULL,
                        _ => return Err("--size is small or full".into()),
                    }
                }
                "--dir" => args.dir = value()?.into(),
                "--disk" => {
                    args.disk = Disk::parse(value()?).ok_or("--disk is loop or here")?;
                }
                "--json" => args.json = true,
                "--list" => args.list = true,
                "--help" | "-h" => return Err(USAGE.into()),
                // `cargo bench` adds this option.
                "--bench" => {}
                _ => return Err(format!("unknown option '{option}'\n{USAGE}").into()),
            }
        }
        Ok(args)
    }

    /// Whether the command line selects a workload.
    pub fn wants(&self, group: &str, name: &str) -> bool {
        let full = format!("{group}/{name}");
        self.only.is_empty()
            || self.only.iter().any(|word| full.starts_with(word.as_str()) || name == word)
    }
}

/// The selected systems, in the order in which they take turns. jailfs is always one of them.
fn against(names: &str) -> Res<Vec<System>> {
    let mut systems = Vec::new();
    for name in names.split(',').filter(|name| !name.is_empty()) {
        systems.push(
            System::parse(name).ok_or_else(|| format!("no system is called '{name}'\n{USAGE}"))?,
        );
    }
    if !systems.contains(&System::Jailfs(None)) {
        systems.push(System::Jailfs(None));
    }
    systems.sort();
    systems.dedup();
    Ok(systems)
}
