//! Recognises a base and its nodes again: after a reboot, at another path, or on a device that got
//! another number.
//!
//! * Device numbers are assigned anew at each boot, and by some filesystems at each mount. So none
//!   is ever stored. The device of the base's root is recorded as "that of the root".
//! * Another device inside the same mount exists only where a filesystem has several. The
//!   subvolumes of btrfs have lasting ids. The layers of an overlay have none, so what is recorded
//!   of their nodes is valid for this mount only. After a reboot inode numbers in the sandbox then
//!   change, but no node is mistaken for another.

use std::os::fd::AsFd;

use crate::sys;
use crate::types::BaseMark;

/// Set in the stand-in for a device other than that of the root. Device numbers of the kernel are
/// smaller.
const OTHER: u64 = 1 << 63;

/// Filesystems whose inode numbers stay the same across mounts, as `f_type` of statfs(2).
const STABLE_INODES: [u64; 8] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // xfs
    BTRFS,
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

/// The type of the filesystem of a node: `f_type` of statfs(2).
fn filesystem<Fd: AsFd>(fd: Fd) -> Option<u64> {
    let statfs = nix::sys::statfs::fstatfs(fd).ok()?;
    // The C type of the field differs between targets; the numbers have 32 bits.
    Some(statfs.filesystem_type().0 as u64 & 0xffff_ffff)
}

/// Whether inode numbers stay the same when the filesystem is mounted again.
pub(super) fn has_stable_inodes<Fd: AsFd>(fd: Fd) -> bool {
    filesystem(fd).is_some_and(|kind| STABLE_INODES.contains(&kind))
}

/// Whether the kernel can stat a file without asking a server. An overlay counts: it forbids
/// changes of its layers behind its back.
pub(super) fn is_local<Fd: AsFd>(fd: Fd) -> bool {
    let is_local = |kind| kind == OVERLAYFS || (kind != NFS && STABLE_INODES.contains(&kind));
    filesystem(fd).is_some_and(is_local)
}

/// Whether the blocks of a removed file can be reused at once. A copy-on-write filesystem frees
/// them later, or never, if a snapshot has them.
pub(super) fn frees_at_once<Fd: AsFd>(fd: Fd) -> bool {
    filesystem(fd).is_some_and(|kind| ![BTRFS, ZFS, BCACHEFS].contains(&kind))
}

/// The mark of a base directory with the inode number `host`. `None` where inode numbers are not
/// stable.
pub(super) fn of_root<Fd: AsFd>(fd: Fd, host: u64) -> Option<BaseMark> {
    has_stable_inodes(&fd).then(|| BaseMark { host, born: sys::file::birth(&fd) })
}

/// A lasting stand-in for the device `dev` of a node that is not on the device of the base's root.
pub(super) fn other_device<Fd: AsFd>(fd: Fd, dev: u64) -> u64 {
    if filesystem(&fd) == Some(BTRFS)
        && let Ok(statvfs) = nix::sys::statvfs::fstatvfs(&fd)
    {
        // It is made of the ids of the filesystem and the subvolume (btrfs_statfs in the kernel).
        return OTHER | statvfs.filesystem_id();
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
