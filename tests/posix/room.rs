//! Space, holes and copies: fallocate(2), lseek(2), copy_file_range(2).

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use jailfs::internals::fs::Limits;
use jailfs::internals::fuse::MountOptions;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::both::{Side, same, same_also_with_writeback};
use crate::common::Bench;
use crate::harness::Live;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// copy_file_range(2); nix does not offer it alone.
fn copy_file_range(
    from: &File,
    at: Option<&mut i64>,
    to: &File,
    into: Option<&mut i64>,
    len: usize,
) -> nix::Result<usize> {
    let pointer =
        |offset: Option<&mut i64>| offset.map_or(std::ptr::null_mut(), |offset| &raw mut *offset);
    // SAFETY: copy_file_range(2) of two open files reads and writes the two offsets, which are
    // borrowed mutably.
    let copied = unsafe {
        libc::copy_file_range(from.as_raw_fd(), pointer(at), to.as_raw_fd(), pointer(into), len, 0)
    };
    Errno::result(copied).map(|copied| copied as usize)
}

/// A checksum of the bytes, and the ranges of zeros.
fn summary(file: &File) -> (u64, u64, Vec<(u64, u64)>) {
    let size = file.metadata().unwrap().len();
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let mut zeros: Vec<(u64, u64)> = Vec::new();
    for (at, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte == 0) {
        let at = at as u64;
        match zeros.last_mut() {
            Some(run) if run.1 == at => run.1 = at + 1,
            _ => zeros.push((at, at + 1)),
        }
    }
    (size, bytes.iter().map(|byte| u64::from(*byte)).sum(), zeros)
}

/// overlayfs copies the whole file up first.
#[test]
fn every_mode_of_fallocate_works_as_on_the_host_or_is_not_supported() {
    const KEEP: i32 = 1;
    const PUNCH: i32 = 2;
    const COLLAPSE: i32 = 8;
    const ZERO: i32 = 16;
    const INSERT: i32 = 32;
    same_also_with_writeback(
        |dir| fs::write(dir.join("base"), [7; 20_000]).unwrap(),
        |side| {
            fs::write(side.at("new"), [8; 20_000]).unwrap();
            for name in ["base", "new", "empty"] {
                let file = open(&side.at(name));
                for (mode, offset, len) in [
                    (KEEP, 0, 100_000),
                    (PUNCH | KEEP, 5000, 5000),
                    (PUNCH | KEEP, 19_000, 50_000),
                    (PUNCH | KEEP, 50_000, 5000),
                    (ZERO | KEEP, 100, 10),
                    (ZERO | KEEP, 19_990, 1000),
                    (ZERO, 19_995, 1000),
                    (0, 20_000, 10_000),
                    (0, 0, 10),
                    (PUNCH, 0, 4096),
                    (0, 0, 0),
                    (KEEP, 10, 0),
                    (PUNCH | ZERO | KEEP, 0, 4096),
                ] {
                    let done =
                        fallocate(&file, FallocateFlags::from_bits_retain(mode), offset, len);
                    side.tried(&format!("{name}: {mode} {offset} {len}"), done);
                    side.note("then", summary(&file));
                }
                side.tried("cut", file.set_len(100));
                side.note("then", summary(&file));
                side.tried("grown", file.set_len(5000));
                side.note("then", summary(&file));
            }
            let read_only = File::open(side.at("base")).unwrap();
            side.tried(
                "not open for writing",
                fallocate(&read_only, FallocateFlags::empty(), 0, 10),
            );
            side.tried(
                "a negative offset",
                fallocate(open(&side.at("base")), FallocateFlags::empty(), -1, 10),
            );
        },
    );
    // ext4 moves blocks in these modes; the mount makes programs copy instead.
    let bench = Bench::over(|base| fs::write(base.join("base"), [7; 20_000]).unwrap());
    let file = open(&bench.at("base"));
    for mode in [COLLAPSE, INSERT] {
        let done = fallocate(&file, FallocateFlags::from_bits_retain(mode), 4096, 4096);
        assert_eq!(done, Err(Errno::EOPNOTSUPP), "{mode}");
    }
    assert_eq!(summary(&file), (20_000, 140_000, vec![]));
}

#[test]
fn more_than_is_free_cannot_be_allocated() {
    const LIMIT: u64 = 64 << 20;
    let bench = Bench::over(|base| fs::write(base.join("base"), [7; 20_000]).unwrap());
    bench.fs.set_limits(Limits { bytes: Some(LIMIT), files: None });
    fs::write(bench.at("new"), [8; 20_000]).unwrap();
    let too_much = i64::try_from(LIMIT).unwrap() + 10_000;
    for name in ["base", "new"] {
        let file = open(&bench.at(name));
        for mode in [FallocateFlags::empty(), FallocateFlags::FALLOC_FL_KEEP_SIZE] {
            assert_eq!(fallocate(&file, mode, 0, too_much), Err(Errno::ENOSPC), "{name}");
            assert_eq!(fallocate(&file, mode, too_much, 10_000), Ok(()), "{name}, far behind");
            file.set_len(20_000).unwrap();
        }
        // Holes count, and data does not.
        file.set_len(too_much.cast_unsigned()).unwrap();
        let mode = FallocateFlags::empty();
        assert_eq!(fallocate(&file, mode, 0, too_much), Err(Errno::ENOSPC), "{name}, a hole");
        assert_eq!(fallocate(&file, mode, 0, 20_000), Ok(()), "{name}, data");
        file.set_len(20_000).unwrap();
    }
    // Space that can be freed counts as free.
    fs::write(bench.at("large"), vec![7; LIMIT as usize / 2]).unwrap();
    fs::remove_file(bench.at("large")).unwrap();
    let most = i64::try_from(LIMIT / 4 * 3).unwrap();
    let file = open(&bench.at("new"));
    assert_eq!(fallocate(&file, FallocateFlags::empty(), 0, most), Ok(()));
}

/// The starts of data and holes, in blocks of 4 KiB, as lseek(2) reports them.
fn data_and_holes(file: &File) -> Vec<(u64, u64)> {
    let size = file.metadata().unwrap().len();
    let (mut at, mut found) = (0, Vec::new());
    while at < size {
        let Some(data) = jailfs::internals::sys::file::seek_data(file, at).unwrap() else { break };
        let hole = jailfs::internals::sys::file::seek_hole(file, data).unwrap().unwrap();
        found.push((data / 4096, hole.div_ceil(4096)));
        at = hole;
    }
    found
}

fn sparse(path: &Path) {
    let file = open(path);
    file.set_len(100 * 4096).unwrap();
    for block in [2, 3, 10, 50, 99] {
        file.write_all_at(&[block as u8; 4096], block * 4096).unwrap();
    }
}

fn mix(side: &mut Side) {
    let file = open(&side.at("file"));
    side.note("the base's holes", data_and_holes(&file));
    file.write_all_at(&[1; 10], 20 * 4096 + 5).unwrap();
    side.note("data in a hole", data_and_holes(&file));
    file.write_all_at(&[2; 4096], 3 * 4096).unwrap();
    file.write_all_at(&[3; 8192], 50 * 4096).unwrap();
    side.note("data over data", data_and_holes(&file));
    fallocate(&file, FallocateFlags::from_bits_retain(3), 2 * 4096, 4096).unwrap();
    side.note("a hole in data of the base", data_and_holes(&file));
    file.set_len(120 * 4096).unwrap();
    file.write_all_at(b"end", 119 * 4096).unwrap();
    side.note("grown", data_and_holes(&file));
    side.note("bytes", summary(&file));
    for (offset, data) in
        [(0, true), (4096 * 21, true), (4096 * 120, true), (4096 * 120 - 1, false)]
    {
        let found = match data {
            true => jailfs::internals::sys::file::seek_data(&file, offset),
            false => jailfs::internals::sys::file::seek_hole(&file, offset),
        };
        side.tried("seek", found);
    }
}

#[test]
fn lseek_reports_the_holes_of_base_and_mount_as_one() {
    same(|dir| sparse(&dir.join("file")), mix);
}

/// The kernel asks for data ranges without flushing its cached writes first. With a writeback cache
/// fresh data would look like a hole, and `cp` skips holes. So the whole file is reported as data.
#[test]
fn with_a_writeback_cache_no_data_is_reported_as_a_hole() {
    let options = MountOptions { writeback: true, ..MountOptions::default() };
    let bench = Bench::with(&options, |base| sparse(&base.join("file")));
    let file = open(&bench.at("file"));
    for block in [20, 60] {
        file.write_all_at(b"data", block * 4096).unwrap();
        assert_eq!(data_and_holes(&file), [(0, 100)]);
    }
    let copied = Command::new("cp")
        .args(["--sparse=auto", "file", "copy"])
        .current_dir(bench.at(""))
        .status();
    assert!(copied.unwrap().success());
    assert_eq!(summary(&file), summary(&open(&bench.at("copy"))));
}

#[test]
fn holes_stay_holes_through_checkpoints_restores_and_remounts() {
    let mut live = Live::new(
        "truncate -s 400K file; printf x | dd of=file bs=4096 seek=10 conv=notrunc status=none",
    );
    let ranges = |live: &Live| data_and_holes(&File::open(live.mnt.join("file")).unwrap());
    assert_eq!(ranges(&live), [(10, 11)]);
    live.checkpoint("one");
    live.sh("printf y | dd of=file bs=4096 seek=20 conv=notrunc status=none");
    assert_eq!(ranges(&live), [(10, 11), (20, 21)]);
    live.checkpoint("two");
    live.sh(
        "fallocate -p -o 40960 -l 4096 file; printf z | dd of=file bs=4096 seek=21 conv=notrunc \
         status=none",
    );
    assert_eq!(ranges(&live), [(20, 22)]);
    live.remount();
    assert_eq!(ranges(&live), [(20, 22)]);
    live.restore("two");
    assert_eq!(ranges(&live), [(10, 11), (20, 21)]);
    live.restore("one");
    assert_eq!(ranges(&live), [(10, 11)]);
}

#[test]
fn ranges_are_copied_as_the_host_copies_them() {
    same_also_with_writeback(
        |dir| {
            let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n % 251 + 1) as u8).collect();
            fs::write(dir.join("from"), bytes).unwrap();
            sparse(&dir.join("sparse"));
        },
        |side| {
            let from = File::open(side.at("from")).unwrap();
            let to = open(&side.at("to"));
            for (mut offset, mut into, len) in [
                (0, 0, 100),
                (99_990, 100, 100),
                (100_000, 0, 10),
                (5, 200_000, 50_000),
                (0, 0, 1 << 40),
            ] {
                let copied = copy_file_range(&from, Some(&mut offset), &to, Some(&mut into), len);
                side.tried("copied", copied);
                side.note("then", (offset, into, summary(&to)));
            }
            let holes = File::open(side.at("sparse")).unwrap();
            side.tried("holes", copy_file_range(&holes, Some(&mut 0), &to, Some(&mut 0), 200_000));
            side.note("then", summary(&to).1);
            // Within one file: apart, and overlapping.
            side.tried("apart", copy_file_range(&to, Some(&mut 0), &to, Some(&mut 300_000), 1000));
            side.tried(
                "over itself",
                copy_file_range(&to, Some(&mut 0), &to, Some(&mut 500), 1000),
            );
            side.note("then", summary(&to).1);
            let append = OpenOptions::new().append(true).open(side.at("to")).unwrap();
            side.tried(
                "to its end",
                copy_file_range(&from, Some(&mut 0), &append, Some(&mut 0), 10),
            );
            let read_only = File::open(side.at("to")).unwrap();
            side.tried(
                "not for writing",
                copy_file_range(&from, Some(&mut 0), &read_only, Some(&mut 0), 10),
            );
            let dir = File::open(side.at("")).unwrap();
            side.tried("a directory", copy_file_range(&dir, Some(&mut 0), &to, Some(&mut 0), 10));
            let outside = tempfile::tempfile().unwrap();
            outside.write_all_at(b"from elsewhere", 0).unwrap();
            let copied = copy_file_range(&outside, Some(&mut 0), &to, Some(&mut 0), 100);
            // To another filesystem: the kernel copies by itself, or refuses.
            if let Err(error) = copied {
                assert_eq!(error, Errno::EXDEV);
            }
        },
    );
}

/// `st_blocks` in units of 4 KiB.
fn blocks(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() / 8
}

#[test]
fn st_blocks_counts_data_and_not_holes() {
    same(
        |dir| {
            // So few extents that ext4 needs no extra block for them.
            let file = open(&dir.join("file"));
            file.set_len(100 * 4096).unwrap();
            [2, 3, 50]
                .iter()
                .for_each(|block| file.write_all_at(&[5; 4096], block * 4096).unwrap());
            fs::write(dir.join("small"), "x").unwrap();
            fs::write(dir.join("empty"), "").unwrap();
        },
        |side| {
            let note_blocks = |side: &mut Side, what: &str, name: &str| {
                let path = side.at(name);
                side.note(what, blocks(&path));
            };
            note_blocks(side, "of the base, with holes", "file");
            note_blocks(side, "one byte", "small");
            note_blocks(side, "nothing", "empty");
            let file = open(&side.at("file"));
            file.write_all_at(&[1; 4096], 30 * 4096).unwrap();
            file.sync_all().unwrap();
            note_blocks(side, "a block more", "file");
            fallocate(&file, FallocateFlags::from_bits_retain(3), 2 * 4096, 8192).unwrap();
            note_blocks(side, "two less", "file");
            let new = open(&side.at("new"));
            new.set_len(1 << 30).unwrap();
            note_blocks(side, "a hole", "new");
            new.write_all_at(b"x", 1 << 29).unwrap();
            new.sync_all().unwrap();
            note_blocks(side, "a byte in a hole", "new");
            new.set_len(10).unwrap();
            note_blocks(side, "cut", "new");
        },
    );
}
