//! By what a base and its nodes are known again: after a reboot, in another place, on a device that is called otherwise.
//!
//! The number of a device is given out anew at each boot, and by some filesystems at each mount, so nothing that is kept may
//! speak of it. The device of the base's root is recorded as "that of the root". Other devices can only be in the same
//! mount where a filesystem has several of its own: the subvolumes of btrfs have an id that stays. The layers of an overlay have none:
//! what is known of them holds for this mount only. Then numbers in the mount change at a reboot, but no node is taken for another.

use std::os::fd::AsFd;

use crate::sys;
use crate::types::BaseMark;

/// Marks a device that is not that of the root; device numbers of the kernel are smaller.
const OTHER: u64 = 1 << 63;

/// The filesystems that keep the number of every node as long as it exists, also when they are mounted anew (statfs(2)).
const KEEP_NUMBERS: [u64; 8] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
    0xf2f5_2010, // f2fs
    ZFS,
    BCACHEFS,
    NFS,
];
const BTRFS: u64 = 0x9123_683e;
const ZFS: u64 = 0x2fc1_2fc1;
const BCACHEFS: u64 = 0xca45_1a4e;
const NFS: u64 = 0x6969;
const OVERLAYFS: u64 = 0x794c_7630;

/// The kind of filesystem that a node is on: `f_type` of statfs(2).
fn filesystem<Fd: AsFd>(fd: Fd) -> Option<u64> {
    let about = nix::sys::statfs::fstatfs(fd).ok()?;
    // The type of the field differs between targets, and the numbers have 32 bits.
    Some(about.filesystem_type().0 as u64 & 0xffff_ffff)
}

/// Whether the numbers of nodes mean the same after the filesystem was mounted anew.
pub(super) fn keeps_numbers<Fd: AsFd>(fd: Fd) -> bool {
    filesystem(fd).is_some_and(|kind| KEEP_NUMBERS.contains(&kind))
}

/// Whether the kernel knows what there is to know of a file without asking a server for it. What it was told of an
/// overlay is that its layers do not change.
pub(super) fn answers_at_once<Fd: AsFd>(fd: Fd) -> bool {
    let is_local = |kind| kind == OVERLAYFS || (kind != NFS && KEEP_NUMBERS.contains(&kind));
    filesystem(fd).is_some_and(is_local)
}

/// Whether the blocks of a file that is removed can be used for the next one at once. A filesystem
/// that copies on write frees them later, or never, if a snapshot of it has them.
pub(super) fn frees_at_once<Fd: AsFd>(fd: Fd) -> bool {
    filesystem(fd).is_some_and(|kind| ![BTRFS, ZFS, BCACHEFS].contains(&kind))
}

/// What a base directory is known by.
pub(super) fn of_root<Fd: AsFd>(fd: Fd, host: u64) -> Option<BaseMark> {
    keeps_numbers(&fd).then(|| BaseMark { host, born: sys::file::birth(&fd) })
}

/// What stands for the device `dev` of a node that is not on the device of the base's root.
pub(super) fn other_device<Fd: AsFd>(fd: Fd, dev: u64) -> u64 {
    if filesystem(&fd) == Some(BTRFS)
        && let Ok(about) = nix::sys::statvfs::fstatvfs(&fd)
    {
        // Made of the id of the filesystem and that of the subvolume (btrfs_statfs).
        return OTHER | about.filesystem_id();
    }
    let boot = sys::proc::boot_id().unwrap_or_default();
    let mount =
        sys::file::unique_mount_id(&fd).or_else(|| sys::file::mount_id(&fd)).unwrap_or_default();
    let bytes = boot.iter().copied().chain(mount.to_le_bytes()).chain(dev.to_le_bytes());
    // FNV-1a.
    OTHER
        | bytes.fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
}
